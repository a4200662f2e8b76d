"""Rows encoded with error feedback: the reference's bytes, improved where that lowers the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.groups import GroupTile
from quantkit.kernels.cpu.feedback.metric import Metric
from quantkit.kernels.cpu.feedback.options import Rounding
from quantkit.kernels.cpu.feedback.refine import FIXED, HALF, INTEGER, Scales, refine
from quantkit.kernels.cpu.feedback.sweeps import codebook, feed, residuals, weighted_squares
from quantkit.kernels.cpu.feedback.tiles import ROWS, codes_of_levels, to_lanes
from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows
from quantkit.kernels.levels import (
    Integers,
    Levels,
    levels_of,
    read_integers,
    write_integers,
)
from quantkit.types import TensorType

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Rounded:
    """Encoded rows, uint8 [rows, row bytes]; losses by row of the reference's bytes and of these, float64 [rows]."""

    rows: U8
    before: F64
    after: F64


def round_rows(
    t: TensorType, x: F32, encode: Callable[[F32, U8], None], by: Metric, how: Rounding, target: F32 | None = None
) -> Rounded:
    """Encode rows.

    Args:
        t: the type.
        x: the rows, float32 [rows, n], which the reference's encoder is given.
        encode: fills the rows of the second argument with the reference's bytes of the first.
        by: the metric.
        how: what is done.
        target: what the values shall come near to, if that is not x. Losses are those from it, also that of the
            reference's bytes of x.
    """
    made = np.zeros((len(x), t.row_bytes(x.shape[1])), np.uint8)
    encode(x, made)
    start = made
    if target is None:
        target = x
    else:  # scales that fit it are a better beginning
        start = np.zeros_like(made)
        encode(target, start)
    before, after = np.empty(len(x)), np.empty(len(x))
    of = levels_of(t)
    kind = _Tile if of.grid is None else GroupTile
    for first in range(0, len(x), ROWS):
        rows = slice(first, min(first + ROWS, len(x)))
        tile = kind(of, target[rows], made[rows], start[rows], by)
        before[rows], after[rows] = tile.improve(how)
        made[rows] = tile.best
    return Rounded(made, before, after)


#: A row is kept where its loss is less by this share: more than what rounding to float32 makes of it.
MARGIN = 1e-4


class _Tile:
    """Up to ``ROWS`` rows x, with the reference's bytes, and bytes to ``start`` from; missing ones repeat the last."""

    def __init__(self, of: Levels, x: F32, rows: U8, start: U8, by: Metric) -> None:
        self.of, self.by, self.count, n = of, by, len(x), by.n
        fill = np.minimum(np.arange(ROWS), len(x) - 1)
        self.best = rows.copy()
        self.rows = rows[fill]
        self.sub = np.arange(n, dtype=np.int32) // np.int32(of.span)
        self.x, self.levels, self.v, self.e, self.c = (np.empty((n, ROWS), np.float32) for _ in range(5))
        to_lanes(x[fill], self.x)
        self.book = codebook(of.codebook)
        self.scales = scales_of(of, n // of.span, read_integers(of.type, start[fill], with_levels=False))

    def improve(self, how: Rounding) -> tuple[F64, F64]:
        """Return the losses of the reference's bytes, and of the best."""
        before = self._loss_of_reference()
        best = before.copy()
        for _ in range(how.rounds_of(self.by.n)):
            loss = self._feed()
            for _ in range(how.sweeps_of(self.by.n)):
                loss -= self._refine(how)
            self._keep(loss, best)
        return before[: self.count], best[: self.count]

    def _loss_of_reference(self) -> F64:
        values = np.empty((ROWS, self.by.n), np.float32)
        dequantize_rows(self.of.type, self.rows, values)
        to_lanes(values, self.v)
        residuals(self.by.columns, self.x, self.v, self.by.u, self.e, self.c)
        return weighted_squares(self.c, self.by.pivots)

    def _feed(self) -> F64:
        """Choose all levels with error feedback; return the loss."""
        s = self.scales
        feed(
            self.by.columns, self.x, self.by.u, self.sub, s.scale, s.low, s.inverse, self.book, self.levels, self.v,
            self.e, self.c,
        )  # fmt: skip
        return weighted_squares(self.c, self.by.pivots)

    def _refine(self, how: Rounding) -> F64:
        """Choose levels and scales again; return by how much the loss falls."""
        width = max(how.width, self.of.span)
        return refine(
            self.x, self.by.h, self.by.per_diagonal, self.book, self.scales, self.levels, self.v, self.e, width,
            how.passes, how.repeats, how.fits, how.looks_beside(self.by.n),
        )  # fmt: skip

    def _keep(self, loss: F64, best: F64) -> None:
        """Take over rows whose loss is the lowest so far."""
        better = loss < best * (1 - MARGIN)
        best[better] = loss[better]
        rows = np.flatnonzero(better[: self.count])
        if not len(rows):
            return
        made = self.best[rows]
        write_integers(self.of.type, integers_of(self.of, self.scales, self.levels, rows), made)
        self.best[rows] = made


def scales_of(of: Levels, subs: int, i: Integers) -> Scales:
    """Return the scales of a tile of so many sub-blocks a row as what refines them takes them."""

    def lanes(a: F32 | U8 | None) -> F32:
        return np.zeros((0, ROWS), np.float32) if a is None else np.ascontiguousarray(a.T, np.float32)

    d = np.ones((1, ROWS), np.float32) if i.d is None else lanes(i.d)
    dmin = -lanes(i.dmin) if of.added else lanes(i.dmin)
    per_d = subs // len(d)
    factors, place = np.zeros(0, np.float32), np.zeros((0, ROWS), np.int32)
    scale = np.repeat(d, per_d, axis=0)
    if i.s is not None and of.factors is not None:
        factors = np.unique(of.factors)
        place = np.searchsorted(factors, of.factors).astype(np.int32)[np.ascontiguousarray(i.s.T)]
        scale *= factors[place]
    m = lanes(i.m) if i.m is not None else np.ones((subs if len(dmin) else 0, ROWS), np.float32)
    raised = np.zeros((subs, ROWS), np.float32) if i.shift is None else lanes(i.shift) * np.float32(of.by)
    low = (np.repeat(dmin, per_d, axis=0) * m if len(dmin) else np.float32(0)) - scale * raised
    usable = np.abs(scale) > np.finfo(np.float32).tiny
    inverse = np.where(usable, 1 / np.where(usable, scale, np.float32(1)), np.float32(0))
    own = per_d == 1 and of.has_half_scales
    return Scales(
        of.span, scale, low, inverse, INTEGER if len(place) else HALF if own and i.d is not None else FIXED, place,
        factors, d, per_d, INTEGER if i.m is not None else HALF if own and len(dmin) else FIXED, m,
        0.0 if of.minimum is None else 2.0 ** of.minimum.shape[1] - 1, dmin, raised,
    )  # fmt: skip


def integers_of(of: Levels, s: Scales, levels: F32, rows: npt.NDArray[np.int64]) -> Integers:
    """Return the integers of some rows of a tile."""
    known, codes = np.unique(of.codebook, return_index=True)  # whole numbers, -128 to 127
    code = np.zeros(256, np.uint8)
    code[known.astype(np.int8).view(np.uint8)] = codes
    q = np.empty((ROWS, len(levels)), np.uint8)
    codes_of_levels(levels, code, q)
    d = None if not of.d else s.d[:, rows].T
    dmin = None if not of.dmin else -s.dmin[:, rows].T if of.added else s.dmin[:, rows].T
    m = None if of.minimum is None else s.m[:, rows].T.astype(np.uint8)
    factors = None
    if of.factors is not None:
        factors = np.unique(of.factors, return_index=True)[1].astype(np.uint8)[s.place[:, rows].T]
    shift = None if of.shift is None else (s.raised[:, rows].T != 0).astype(np.uint8)
    return Integers(q[rows], factors, m, shift, d, dmin)

"""Rows encoded with error feedback: the reference's bytes, improved where that lowers the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback import Rounding
from quantkit.kernels.cpu.feedback.groups import GroupTile
from quantkit.kernels.cpu.feedback.metric import Metric
from quantkit.kernels.cpu.feedback.refine import FIXED, HALF, INTEGER, Scales, Tile, Visits, refine
from quantkit.kernels.cpu.feedback.sweeps import Scaling, codebook, error_feedback, residuals, weighted_squares
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
    t: TensorType,
    x: F32,
    encode: Callable[[F32, U8], None],
    metric: Metric,
    rounding: Rounding,
    target: F32 | None = None,
) -> Rounded:
    """Encode rows.

    Args:
        t: the type.
        x: the rows, float32 [rows, n], which the reference's encoder is given.
        encode: fills the rows of the second argument with the reference's bytes of the first.
        metric: the metric.
        rounding: the rounding options.
        target: the target of the values, if not x. All losses are relative to it, also that of the reference's bytes of
            x.
    """
    blocks = np.zeros((len(x), t.row_bytes(x.shape[1])), np.uint8)
    encode(x, blocks)
    start = blocks
    if target is None:
        target = x
    else:  # scales fitted to it are a better start
        start = np.zeros_like(blocks)
        encode(target, start)
    before, after = np.empty(len(x)), np.empty(len(x))
    layout = levels_of(t)
    kind = _RowTile if layout.grid is None else GroupTile
    for first in range(0, len(x), ROWS):
        rows = slice(first, min(first + ROWS, len(x)))
        tile = kind(layout, target[rows], blocks[rows], start[rows], metric)
        before[rows], after[rows] = tile.improve(rounding)
        blocks[rows] = tile.best
    return Rounded(blocks, before, after)


#: A row is kept if its loss is less by this share, which exceeds the rounding error of float32.
MARGIN = 1e-4


class _RowTile:
    """Up to ``ROWS`` rows x, with the reference's bytes, and bytes to ``start`` from; missing ones repeat the last."""

    def __init__(self, layout: Levels, x: F32, rows: U8, start: U8, metric: Metric) -> None:
        self.layout = layout
        self.metric = metric
        self.count = len(x)
        n = metric.n
        fill = np.minimum(np.arange(ROWS), len(x) - 1)
        self.best = rows.copy()
        self.rows = rows[fill]
        self.sub = np.arange(n, dtype=np.int32) // np.int32(layout.span)
        self.x, self.levels, self.v, self.e, self.c = (np.empty((n, ROWS), np.float32) for _ in range(5))
        to_lanes(x[fill], self.x)
        self.codebook = codebook(layout.codebook)
        self.scales = scales_of(layout, n // layout.span, read_integers(layout.type, start[fill], with_levels=False))

    def improve(self, rounding: Rounding) -> tuple[F64, F64]:
        """Return the losses of the reference's bytes, and of the best."""
        before = self._loss_of_reference()
        best = before.copy()
        for _ in range(rounding.rounds_of(self.metric.n)):
            loss = self._error_feedback()
            for _ in range(rounding.sweeps_of(self.metric.n)):
                loss -= self._refine(rounding)
            self._keep(loss, best)
        return before[: self.count], best[: self.count]

    def _loss_of_reference(self) -> F64:
        values = np.empty((ROWS, self.metric.n), np.float32)
        dequantize_rows(self.layout.type, self.rows, values)
        to_lanes(values, self.v)
        residuals(self.metric.columns, self.x, self.v, self.metric.u, self.e, self.c)
        return weighted_squares(self.c, self.metric.pivots)

    def _error_feedback(self) -> F64:
        """Choose all levels with error feedback; return the loss."""
        s = self.scales
        scaling = Scaling(self.sub, s.scale, s.minimum, s.inverse, self.codebook)
        error_feedback(self.metric.columns, self.x, self.metric.u, scaling, self.levels, self.v, self.e, self.c)
        return weighted_squares(self.c, self.metric.pivots)

    def _refine(self, rounding: Rounding) -> F64:
        """Choose levels and scales again; return the decrease of the loss."""
        visits = Visits(
            max(rounding.width, self.layout.span),
            rounding.passes,
            rounding.repeats,
            rounding.fits,
            rounding.tries_neighbour_scales(self.metric.n),
        )
        tile = Tile(self.metric.h, self.metric.per_diagonal, self.codebook, self.levels, self.v)
        return refine(self.x, tile, self.scales, self.e, visits)

    def _keep(self, loss: F64, best: F64) -> None:
        """Store the bytes of rows whose loss is the lowest so far."""
        better = loss < best * (1 - MARGIN)
        best[better] = loss[better]
        rows = np.flatnonzero(better[: self.count])
        if not len(rows):
            return
        blocks = self.best[rows]
        write_integers(self.layout.type, integers_of(self.layout, self.scales, self.levels, rows), blocks)
        self.best[rows] = blocks


def scales_of(layout: Levels, subs: int, i: Integers) -> Scales:
    """Return the scales of a tile, ``subs`` sub-blocks a row, for ``refine``."""

    def lanes(a: F32 | U8 | None) -> F32:
        return np.zeros((0, ROWS), np.float32) if a is None else np.ascontiguousarray(a.T, np.float32)

    d = np.ones((1, ROWS), np.float32) if i.d is None else lanes(i.d)
    dmin = -lanes(i.dmin) if layout.added else lanes(i.dmin)
    per_d = subs // len(d)
    factors, factor_index = np.zeros(0, np.float32), np.zeros((0, ROWS), np.int32)
    scale = np.repeat(d, per_d, axis=0)
    if i.s is not None and layout.factors is not None:
        factors = np.unique(layout.factors)
        factor_index = np.searchsorted(factors, layout.factors).astype(np.int32)[np.ascontiguousarray(i.s.T)]
        scale *= factors[factor_index]
    m = lanes(i.m) if i.m is not None else np.ones((subs if len(dmin) else 0, ROWS), np.float32)
    shift = np.zeros((subs, ROWS), np.float32) if i.shift is None else lanes(i.shift) * np.float32(layout.shift_step)
    usable = np.abs(scale) > np.finfo(np.float32).tiny
    block_has_scale = per_d == 1 and layout.has_half_scales
    return Scales(
        span=layout.span,
        scale=scale,
        minimum=(np.repeat(dmin, per_d, axis=0) * m if len(dmin) else np.float32(0)) - scale * shift,
        inverse=np.where(usable, 1 / np.where(usable, scale, np.float32(1)), np.float32(0)),
        scale_kind=_kind(len(factor_index) > 0, block_has_scale and i.d is not None),
        factor_index=factor_index,
        factors=factors,
        d=d,
        per_d=per_d,
        min_kind=_kind(i.m is not None, block_has_scale and len(dmin) > 0),
        m=m,
        max_m=0.0 if layout.minimum is None else 2.0 ** layout.minimum.shape[1] - 1,
        dmin=dmin,
        shift=shift,
    )


def _kind(is_integer: bool, is_half: bool) -> int:
    if is_integer:
        return INTEGER
    return HALF if is_half else FIXED


def integers_of(layout: Levels, s: Scales, levels: F32, rows: npt.NDArray[np.int64]) -> Integers:
    """Return the integers of some rows of a tile."""
    distinct, codes = np.unique(layout.codebook, return_index=True)  # integers, -128 to 127
    code = np.zeros(256, np.uint8)
    code[distinct.astype(np.int8).view(np.uint8)] = codes
    q = np.empty((ROWS, len(levels)), np.uint8)
    codes_of_levels(levels, code, q)
    d = None if not layout.d else s.d[:, rows].T
    dmin = None
    if layout.dmin:
        dmin = -s.dmin[:, rows].T if layout.added else s.dmin[:, rows].T
    m = None if layout.minimum is None else s.m[:, rows].T.astype(np.uint8)
    factors = None
    if layout.factors is not None:
        factors = np.unique(layout.factors, return_index=True)[1].astype(np.uint8)[s.factor_index[:, rows].T]
    shift = None if layout.shift is None else (s.shift[:, rows].T != 0).astype(np.uint8)
    return Integers(q[rows], factors, m, shift, d, dmin)

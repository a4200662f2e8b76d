"""Rows encoded with error feedback: the reference's bytes, improved where that lowers the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.factor import cholesky
from quantkit.kernels.cpu.feedback.frames import Frames, frames_of, visited
from quantkit.kernels.cpu.feedback.groups import GroupTile
from quantkit.kernels.cpu.feedback.scales import fit_factors, fit_super_scales
from quantkit.kernels.cpu.feedback.sweeps import codebook, descend, dot_columns, feed, gradient
from quantkit.kernels.cpu.feedback.tiles import ROWS, pack_columns
from quantkit.kernels.levels import (
    Grouping,
    Integers,
    Levels,
    decoded,
    levels_of,
    read_integers,
    scales_and_minimums,
    write_integers,
)
from quantkit.types import TensorType

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Metric:
    """A covariance, ready for sweeps.

    columns: in descending order of their variance, or of their groups', int32 [n]; u: the factor of the covariance in
    that order, packed. h: the covariance, packed, columns in their own order; per_diagonal: 1 / H_kk. frames: those of
    groups of columns, if they are rounded together.
    """

    columns: Ints
    u: F32
    h: F32
    per_diagonal: F32
    frames: Frames | None = None

    @property
    def n(self) -> int:
        """Columns."""
        return len(self.columns)


def metric(covariance: F64, damping: float, threads: int = 1, grouping: Grouping | None = None) -> Metric:
    """Return the metric of a covariance [n, n] whose diagonal is raised by ``damping`` times its mean.

    It is for types that group columns so. Raises numpy.linalg.LinAlgError if it is not positive definite even so.
    """
    h = covariance + damping * np.diagonal(covariance).mean() * np.eye(len(covariance))
    columns = visited(np.diagonal(h), grouping)
    last_first = columns[::-1]
    upper = np.triu(cholesky(h[np.ix_(last_first, last_first)], threads))[::-1, ::-1].T  # H = upper upper^T
    u = pack_columns(upper / np.diagonal(upper))
    frames = None if grouping is None else frames_of(h, upper, grouping)
    return Metric(columns.astype(np.int32), u, pack_columns(h), (1 / np.diagonal(h)).astype(np.float32), frames)


@dataclass(frozen=True)
class Rounding:
    """How levels are chosen: how often feedback, sweeps and the fit of scales are repeated; sweeps of each round."""

    rounds: int = 2
    sweeps: int = 1
    fits: int = 1


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
        target: what the values shall come near to, if that is not x.
    """
    target = x if target is None else target
    made = np.zeros((len(x), t.row_bytes(x.shape[1])), np.uint8)
    encode(x, made)
    before, after = np.empty(len(x)), np.empty(len(x))
    of = levels_of(t)
    kind = _Tile if of.grid is None else GroupTile
    for first in range(0, len(x), ROWS):
        rows = slice(first, min(first + ROWS, len(x)))
        tile = kind(of, target[rows], made[rows], by)
        before[rows], after[rows] = tile.improve(how)
        made[rows] = tile.best
    return Rounded(made, before, after)


class _Tile:
    """Up to ``ROWS`` rows; the lanes of missing ones repeat the last."""

    def __init__(self, of: Levels, x: F32, rows: U8, by: Metric) -> None:
        self.of, self.by, self.count, n = of, by, len(x), by.n
        fill = np.minimum(np.arange(ROWS), len(x) - 1)
        self.best = rows.copy()
        self.integers = read_integers(of.type, rows[fill])
        self.sub = np.arange(n, dtype=np.int32) // np.int32(of.span)
        self.x = np.ascontiguousarray(x[fill].T)
        self.levels, self.v, self.g, self.scratch, self.c = (np.empty((n, ROWS), np.float32) for _ in range(5))
        self.book = codebook(of.codebook)

    def improve(self, how: Rounding) -> tuple[F64, F64]:
        """Return the losses of the reference's bytes, and of the best."""
        before = self._loss(self.best)
        best = before.copy()
        for _ in range(how.rounds):
            self._feed()
            self._descend(how.sweeps)
            if how.fits:
                self._fit(how.fits)
                self._descend(how.sweeps)
            self._keep(best)
        return before[: self.count], best[: self.count]

    def _loss(self, rows: U8) -> F64:
        fill = np.minimum(np.arange(ROWS), self.count - 1)
        v = np.ascontiguousarray(decoded(self.of.type, read_integers(self.of.type, rows[fill])).T)
        gradient(self.x, v, self.by.h, self.c, self.scratch)
        return dot_columns(self.c, self.scratch)

    def _scales(self) -> tuple[F32, F32, F32]:
        scale, low = scales_and_minimums(self.of.type, self.integers)
        low = np.zeros_like(scale) if low is None else low
        usable = np.abs(scale) > np.finfo(np.float32).tiny
        inverse = np.where(usable, 1 / np.where(usable, scale, np.float32(1)), np.float32(0))
        return tuple(np.ascontiguousarray(a.T, np.float32) for a in (scale, low, inverse))  # type: ignore[return-value]

    def _feed(self) -> None:
        columns = self.by.columns
        levels, v = np.empty_like(self.v), np.empty_like(self.v)
        feed(
            self.x[columns], self.by.u, self.sub[columns], *self._scales(), self.book, levels, v,
            self.scratch, self.c,
        )  # fmt: skip
        self.levels[columns], self.v[columns] = levels, v
        gradient(self.x, self.v, self.by.h, self.g, self.scratch)

    def _descend(self, sweeps: int) -> None:
        scales = self._scales()
        for _ in range(sweeps):
            descend(
                self.by.h, self.sub, self.by.per_diagonal, *scales, self.book, self.levels, self.v, self.g,
                self.scratch,
            )  # fmt: skip

    def _fit(self, times: int) -> None:
        i, of = self.integers, self.of
        up = self.levels if i.shift is None else self.levels + np.float32(of.by) * i.shift.T[self.sub]
        one = np.full_like(up, -1 if not of.added else 1)
        for _ in range(times):
            if i.s is not None and of.factors is not None:
                self._fit_codes(i.s, of.factors, up, i.d)
            if i.m is not None and i.dmin is not None:
                self._fit_codes(i.m, np.arange(256, dtype=np.float32)[: 1 << of.minimum.shape[1]], one, i.dmin)  # type: ignore[union-attr]
            if i.d is not None:
                self._fit_supers(up, one)

    def _fit_codes(self, codes: U8, factors: F32, t: F32, d: F32 | None) -> None:
        code_of = np.unique(factors, return_index=True)[1]
        ascending = factors[code_of]
        places = np.ascontiguousarray(np.searchsorted(ascending, factors[codes]).T.astype(np.int32))
        supers = np.ones((1, ROWS), np.float32) if d is None else np.ascontiguousarray(d.T)
        per = self.by.n // self.of.span // len(supers)
        which = (self.by.h, self.of.span)
        fit_factors(*which, t, supers, per, places, ascending, self.v, self.g, self.scratch)
        codes[:] = code_of[places].T

    def _fit_supers(self, up: F32, one: F32) -> None:
        i, of = self.integers, self.of
        assert i.d is not None
        factor = np.ones((ROWS, self.by.n // of.span), np.float32) if i.s is None else of.factors[i.s]  # type: ignore[index]
        t = factor.T[self.sub] * up
        d = np.ascontiguousarray(i.d.T)
        s, dmin = np.zeros((0, ROWS), np.float32), np.zeros((0, ROWS), np.float32)
        if i.dmin is not None:
            m = np.ones_like(factor) if i.m is None else i.m.astype(np.float32)
            s, dmin = m.T[self.sub] * one, np.ascontiguousarray(i.dmin.T)
        which, kinds = (self.by.h, self.by.n // i.d.shape[1]), (of.added, of.has_half_scales)
        fit_super_scales(*which, t, s, d, dmin, *kinds, self.v, self.g, self.scratch, self.c)
        i.d[:] = d.T
        if i.dmin is not None:
            i.dmin[:] = dmin.T

    def _keep(self, best: F64) -> None:
        """Take over rows whose loss, of their very bytes, is the lowest so far."""
        of, i = self.of, self.integers
        ranks = np.unique(of.codebook, return_index=True)
        q = ranks[1][np.searchsorted(ranks[0], self.levels.T)].astype(np.uint8)
        made = self.best.copy()
        n = self.count
        cut = Integers(*(None if a is None else a[:n] for a in (q, i.s, i.m, i.shift, i.d, i.dmin)))  # type: ignore[arg-type]
        write_integers(of.type, cut, made)
        loss = self._loss(made)
        better = loss < best
        best[better] = loss[better]
        self.best[better[:n]] = made[better[:n]]

"""Tiles of types whose groups of columns have their levels from a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.books import book_of
from quantkit.kernels.cpu.feedback.group_sweeps import sweeps_of
from quantkit.kernels.cpu.feedback.scales import fit_factors, fit_super_scales
from quantkit.kernels.cpu.feedback.search import SCRATCH
from quantkit.kernels.cpu.feedback.sweeps import dot_columns, gradient
from quantkit.kernels.cpu.feedback.tiles import ROWS
from quantkit.kernels.levels import (
    Integers,
    Levels,
    decoded,
    read_integers,
    scales_and_minimums,
    write_integers,
)

if TYPE_CHECKING:
    from quantkit.kernels.cpu.feedback.metric import Metric
    from quantkit.kernels.cpu.feedback.options import Rounding

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class GroupTile:
    """Up to ``ROWS`` rows, as rounding.py's; the lanes of missing ones repeat the last.

    codes: what groups have chosen (books.py).
    """

    def __init__(self, of: Levels, x: F32, rows: U8, start: U8, by: Metric) -> None:
        if by.frames is None or by.frames.grouping != of.grouping:
            raise ValueError(f"the metric is not for groups of columns as {of.type} has them")
        self.of, self.by, self.frames, self.count, n = of, by, by.frames, len(x), by.n
        self._fill = np.minimum(np.arange(ROWS), len(x) - 1)
        self.best = rows.copy()
        self.integers = read_integers(of.type, start[self._fill])
        self.x = np.ascontiguousarray(x[self._fill].T)
        self.levels, self.v, self.g, self.scratch, self.c = (np.empty((n, ROWS), np.float32) for _ in range(5))
        self.sub = np.arange(n, dtype=np.int32) // np.int32(of.span)
        self.book = book_of(of.type.name)
        self.codes, self.classes = self._codes_and_classes()
        self._set_up_groups()

    def _codes_and_classes(self) -> tuple[I32, I32]:
        """Return the codes of groups, int32 [groups, parts, ROWS], and the classes of sub-blocks."""
        i, grid, subs = self.integers, self.book.grid, self.by.n // self.of.span
        if grid.books == 1 or i.shift is None:
            per, classes = None, np.zeros((subs, ROWS), np.int32)
        else:
            per, classes = np.repeat(i.shift, i.q.shape[1] // subs, axis=1), np.ascontiguousarray(i.shift.T, np.int32)
        codes = self.book.codes_of(i.q.astype(np.uint32), per)
        return np.ascontiguousarray(codes.transpose(1, 2, 0)), classes

    def _set_up_groups(self) -> None:
        grid, tree, grouping = self.book.grid, self.book.tree, self.frames.grouping
        self.order = grouping.order(self.by.n)
        self.sub_of_group = self.sub[self.order[:: grouping.size]]
        place = np.empty(self.by.n, np.int64)
        place[self.order] = np.arange(self.by.n)
        self.fed = place[self.by.columns[:: grouping.size]] // grouping.size
        self.feed_groups, self.descend_groups = sweeps_of(grid.size, grid.parts)
        self.tables: tuple[Any, ...] = (
            np.empty((grid.parts, tree.root_lines, grid.size, 16), np.float32),
            np.empty(grid.parts * tree.patterns * grid.size**2 + 16, np.float32),
            np.empty((grouping.size, ROWS), np.float32),
            np.empty(SCRATCH, np.uint8),
        )

    def improve(self, how: Rounding) -> tuple[F64, F64]:
        """Return the losses of the reference's bytes, and of the best."""
        before = self._loss(self.best)
        best = before.copy()
        for _ in range(how.rounds):
            self._feed()
            self._descend(how.sweeps)
            if how.fits:
                self._fit()
                self._descend(how.sweeps)
            self._keep(best)
        return before[: self.count], best[: self.count]

    def _loss(self, rows: U8) -> F64:
        v = np.ascontiguousarray(decoded(self.of.type, read_integers(self.of.type, rows[self._fill])).T)
        gradient(self.x, v, self.by.h, self.c, self.scratch)
        return dot_columns(self.c, self.scratch)

    def _scales(self) -> tuple[F32, F32, F32]:
        """Return scales, what is subtracted, and 1 / scale, or 0 for 0, float32 [sub-blocks, ROWS]."""
        scale, low = scales_and_minimums(self.of.type, self.integers)
        low = np.zeros_like(scale) if low is None else low
        usable = np.abs(scale) > np.finfo(np.float32).tiny
        inverse = np.where(usable, 1 / np.where(usable, scale, np.float32(1)), np.float32(0))
        return tuple(np.ascontiguousarray(a.T, np.float32) for a in (scale, low, inverse))  # type: ignore[return-value]

    def _feed(self) -> None:
        columns, codes = self.by.columns, self.codes[self.fed]
        levels, v = np.empty_like(self.v), np.empty_like(self.v)
        self.feed_groups(
            self.x[columns], self.by.u, self.sub_of_group[self.fed], np.arange(self.by.n), self.frames.fed,
            self.book.tree, *self._scales(), self.classes, codes, levels, v, self.scratch, self.c, *self.tables,
        )  # fmt: skip
        self.codes[self.fed], self.levels[columns], self.v[columns] = codes, levels, v
        gradient(self.x, self.v, self.by.h, self.g, self.scratch)

    def _descend(self, sweeps: int) -> None:
        scales = self._scales()
        for _ in range(sweeps):
            self.descend_groups(
                self.by.h, self.sub_of_group, self.order, self.frames.descended, self.book.tree, *scales, self.classes,
                self.codes, self.levels, self.v, self.g, self.scratch, *self.tables,
            )  # fmt: skip

    def _fit(self) -> None:
        """Fit the factors of sub-blocks, then d; no grid has minimums."""
        i, of = self.integers, self.of
        assert i.d is not None
        assert i.s is not None
        assert of.factors is not None
        up = self.levels if i.shift is None else self.levels + np.float32(of.by) * i.shift.T[self.sub]
        d, code_of = np.ascontiguousarray(i.d.T), np.unique(of.factors, return_index=True)[1]
        ascending = of.factors[code_of]
        places = np.ascontiguousarray(np.searchsorted(ascending, of.factors[i.s]).T.astype(np.int32))
        per = self.by.n // of.span // len(d)
        fit_factors(self.by.h, of.span, up, d, per, places, ascending, self.v, self.g, self.scratch)
        i.s[:] = code_of[places].T
        none = np.zeros((0, ROWS), np.float32)
        fit_super_scales(
            self.by.h, self.by.n // len(d), of.factors[i.s].T[self.sub] * up, none, d, none, False,
            of.has_half_scales, self.v, self.g, self.scratch, self.c,
        )  # fmt: skip
        i.d[:] = d.T

    def _keep(self, best: F64) -> None:
        """Take over rows whose loss, of their very bytes, is the lowest so far."""
        i, n, made = self.integers, self.count, self.best.copy()
        q = self.book.q_of(self.codes.transpose(2, 0, 1))
        cut = Integers(*(None if a is None else a[:n] for a in (q, i.s, i.m, i.shift, i.d, i.dmin)))  # type: ignore[arg-type]
        write_integers(self.of.type, cut, made)
        loss = self._loss(made)
        better = loss < best
        best[better] = loss[better]
        self.best[better[:n]] = made[better[:n]]

"""Tiles of types whose groups of columns have their levels from a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.codebook_tree import tree_of
from quantkit.kernels.cpu.feedback.group_sweeps import Choice, Groups, SubBlocks, Work, sweeps_of
from quantkit.kernels.cpu.feedback.scales import Values, fit_factors, fit_super_scales
from quantkit.kernels.cpu.feedback.search import SCRATCH
from quantkit.kernels.cpu.feedback.sweeps import dot_columns, gradient
from quantkit.kernels.cpu.feedback.tiles import ROWS
from quantkit.kernels.levels import (
    Integers,
    Levels,
    decode,
    read_integers,
    scales_and_minimums,
    write_integers,
)

if TYPE_CHECKING:
    from quantkit.kernels.cpu.feedback import Rounding
    from quantkit.kernels.cpu.feedback.metric import Metric

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class GroupTile:
    """Up to ``ROWS`` rows, as rounding.py's; the lanes of missing ones repeat the last.

    codes: what groups have chosen (codebook_tree.py).
    """

    def __init__(self, layout: Levels, x: F32, rows: U8, start: U8, metric: Metric) -> None:
        if metric.groups is None or metric.groups.grouping != layout.grouping:
            raise ValueError(f"the metric does not match the groups of columns of {layout.type}")
        self.layout = layout
        self.metric = metric
        self.groups = metric.groups
        self.count = len(x)
        n = metric.n
        self._fill = np.minimum(np.arange(ROWS), len(x) - 1)
        self.best = rows.copy()
        self.integers = read_integers(layout.type, start[self._fill])
        self.x = np.ascontiguousarray(x[self._fill].T)
        self.levels, self.v, self.g, self.scratch, self.c = (np.empty((n, ROWS), np.float32) for _ in range(5))
        self.sub = np.arange(n, dtype=np.int32) // np.int32(layout.span)
        self.codebook_tree = tree_of(layout.type.name)
        self.codes, self.classes = self._codes_and_classes()
        self._set_up_groups()

    def _codes_and_classes(self) -> tuple[I32, I32]:
        """Return the codes of groups, int32 [groups, parts, ROWS], and the classes of sub-blocks."""
        i = self.integers
        grid = self.codebook_tree.grid
        subs = self.metric.n // self.layout.span
        if grid.codebooks == 1 or i.shift is None:
            per, classes = None, np.zeros((subs, ROWS), np.int32)
        else:
            per, classes = np.repeat(i.shift, i.q.shape[1] // subs, axis=1), np.ascontiguousarray(i.shift.T, np.int32)
        codes = self.codebook_tree.codes_of(i.q.astype(np.uint32), per)
        return np.ascontiguousarray(codes.transpose(1, 2, 0)), classes

    def _set_up_groups(self) -> None:
        grid = self.codebook_tree.grid
        tree = self.codebook_tree.tree
        grouping = self.groups.grouping
        self.order = grouping.order(self.metric.n)
        self.sub_of_group = self.sub[self.order[:: grouping.size]]
        place = np.empty(self.metric.n, np.int64)
        place[self.order] = np.arange(self.metric.n)
        self.feedback_order = place[self.metric.columns[:: grouping.size]] // grouping.size
        self.error_feedback_groups, self.descend_groups = sweeps_of(grid.size, grid.points_per_group)
        self.work = Work(
            np.empty((grid.points_per_group, tree.root_lines, grid.size, 16), np.float32),
            np.empty(grid.points_per_group * tree.patterns * grid.size**2 + 16, np.float32),
            np.empty((grouping.size, ROWS), np.float32),
            np.empty(SCRATCH, np.uint8),
        )

    def improve(self, rounding: Rounding) -> tuple[F64, F64]:
        """Return the losses of the reference's bytes, and of the best."""
        before = self._loss(self.best)
        best = before.copy()
        for _ in range(rounding.rounds):
            self._error_feedback()
            self._descend(rounding.sweeps)
            if rounding.fits:
                self._fit()
                self._descend(rounding.sweeps)
            self._keep(best)
        return before[: self.count], best[: self.count]

    def _loss(self, rows: U8) -> F64:
        v = np.ascontiguousarray(decode(self.layout.type, read_integers(self.layout.type, rows[self._fill])).T)
        gradient(self.x, v, self.metric.h, self.c, self.scratch)
        return dot_columns(self.c, self.scratch)

    def _sub_blocks(self) -> SubBlocks:
        """Return the scales of sub-blocks, as sweeps take them."""
        scale, minimum = scales_and_minimums(self.layout.type, self.integers)
        minimum = np.zeros_like(scale) if minimum is None else minimum
        usable = np.abs(scale) > np.finfo(np.float32).tiny
        inverse = np.where(usable, 1 / np.where(usable, scale, np.float32(1)), np.float32(0))
        lanes = [np.ascontiguousarray(a.T, np.float32) for a in (scale, minimum, inverse)]
        return SubBlocks(lanes[0], lanes[1], lanes[2], self.classes)

    def _error_feedback(self) -> None:
        columns, order = self.metric.columns, self.feedback_order
        groups = Groups(
            self.codebook_tree.tree, self.groups.feedback, np.arange(self.metric.n), self.sub_of_group[order]
        )
        choice = Choice(self.codes[order], np.empty_like(self.v), np.empty_like(self.v))
        self.error_feedback_groups(
            self.x[columns], self.metric.u, groups, self._sub_blocks(), choice, self.scratch, self.c, self.work
        )
        self.codes[order], self.levels[columns], self.v[columns] = choice
        gradient(self.x, self.v, self.metric.h, self.g, self.scratch)

    def _descend(self, sweeps: int) -> None:
        groups = Groups(self.codebook_tree.tree, self.groups.descent, self.order, self.sub_of_group)
        choice, sub_blocks = Choice(self.codes, self.levels, self.v), self._sub_blocks()
        for _ in range(sweeps):
            self.descend_groups(self.metric.h, groups, sub_blocks, choice, self.g, self.scratch, self.work)

    def _fit(self) -> None:
        """Fit the factors of sub-blocks, then d; no grid has minimums."""
        i, layout = self.integers, self.layout
        assert i.d is not None
        assert i.s is not None
        assert layout.factors is not None
        up = self.levels if i.shift is None else self.levels + np.float32(layout.shift_step) * i.shift.T[self.sub]
        d, code_of = np.ascontiguousarray(i.d.T), np.unique(layout.factors, return_index=True)[1]
        ascending = layout.factors[code_of]
        places = np.ascontiguousarray(np.searchsorted(ascending, layout.factors[i.s]).T.astype(np.int32))
        per = self.metric.n // layout.span // len(d)
        values = Values(self.v, self.g, self.scratch)
        fit_factors(self.metric.h, layout.span, up, d, per, places, ascending, values)
        i.s[:] = code_of[places].T
        t = layout.factors[i.s].T[self.sub] * up
        fit_super_scales(self.metric.h, self.metric.n // len(d), t, d, layout.has_half_scales, values)
        i.d[:] = d.T

    def _keep(self, best: F64) -> None:
        """Store the bytes of rows whose loss, computed from these bytes, is the lowest so far."""
        i = self.integers
        n = self.count
        rows = self.best.copy()
        q = self.codebook_tree.q_of(self.codes.transpose(2, 0, 1))
        unpadded = Integers(*(None if a is None else a[:n] for a in (q, i.s, i.m, i.shift, i.d, i.dmin)))  # type: ignore[arg-type]
        write_integers(self.layout.type, unpadded, rows)
        loss = self._loss(rows)
        better = loss < best
        best[better] = loss[better]
        self.best[better[:n]] = rows[better[:n]]

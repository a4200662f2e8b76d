"""Points of a grid in a tree, as searches read it (search.py).

Points are split in halves along the dimension in which they vary most, until 16 are left: a *cell*. 16 neighbouring
cells make a node, 16 nodes the next, and so on: a node's number, times 16, is that of its first child, and a point's
number is its place. The *roots* are the nodes of the greatest height with enough nodes for a first ranking. Where
points are magnitudes, there is such a tree for each pattern of signs, of which only the roots are stored; with several
codebooks, one for each.

A search keeps the best lanes, so neighbours should not be in the same lane: patterns, roots and the
children of each node are shuffled.

A *class* is a part of the roots of which one search is free to choose: the codebook that a sub-block names, or the
patterns with an even, or odd, number of signs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.grids import Grid
from quantkit.kernels.levels import levels_of
from quantkit.types import BY_NAME

F32 = npt.NDArray[np.float32]
I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]

#: Points of a cell, and children of a node; the minimum number of roots, if there are as many points; the number of
#: points up to which, without signs, each is a root.
LANES = 16
ROOTS = 128
ALL = 4096
#: Number of lanes whose best nodes are expanded: with one level below the roots, and with more.
FLAT, HIGH = 8, 4


class Tree(NamedTuple):
    """The tree as kernels take it: addresses and numbers, which avoids reference counting of arrays.

    roots: their centers, float32 [root_lines, size, 16]. lines: the centers of 16 nodes, or 16 points, of each height
    below the roots, highest first, int8 [lines, size, 16]; points: where the lines of points begin. heights: their
    number; places: for each the first line, the lines less one, and the bits of their number, int64 [heights, 3].
    signs: the factor of each element of T, of each pattern, float32 [patterns, size, size], and 16 more. bits: log2 of
    the number of points. unit: the unit of centers and points. classes: their number. kept: the least number of lanes
    in which the search continues from the best nodes of a height.
    """

    roots: int
    root_lines: int
    lines: int
    points: int
    heights: int
    heights_at: int
    signs: int
    patterns: int
    bits: int
    unit: float
    classes: int
    beam: int


@dataclass(frozen=True, eq=False)
class CodebookTree:
    """The tree of a grid. order: the index of each point; patterns: which levels are negative, a bit each; int64.

    arrays: the arrays whose addresses ``tree`` holds, so that they stay alive.
    """

    grid: Grid
    tree: Tree
    order: I64
    patterns: I64
    arrays: tuple[npt.NDArray[Any], ...]

    def codes_of(self, q: U32, codebook: U8 | None) -> I32:
        """Return the codes of groups' points, int32 [..., parts]: pattern * points + point."""
        grid = self.grid
        indices = grid.indices(q).astype(np.int64)
        if codebook is not None and grid.codebooks > 1:
            indices += codebook.astype(np.int64)[..., None] << grid.index_bits
        patterns = np.zeros_like(indices)
        if grid.signs:
            masks = grid.negative(q).astype(np.int64)[..., None] >> self._shifts & ((1 << grid.size) - 1)
            by_mask = np.argsort(self.patterns)
            patterns = by_mask[np.searchsorted(self.patterns[by_mask], masks)]
        return (patterns * len(self.order) + self._point_of_index[indices]).astype(np.int32)

    def q_of(self, codes: I32) -> U32:
        """Return the q of groups of codes [..., parts]."""
        pattern, point = np.divmod(codes, len(self.order))
        indices = self.order[point] & ((1 << self.grid.index_bits) - 1)
        negative = (self.patterns[pattern] << self._shifts).sum(-1)
        return self.grid.q_of(indices.astype(np.uint32), negative.astype(np.uint32))

    @cached_property
    def _point_of_index(self) -> I64:
        return np.argsort(self.order)

    @property
    def _shifts(self) -> I64:
        return np.arange(self.grid.points_per_group) * self.grid.size


@cache
def tree_of(name: str) -> CodebookTree:
    """Return the tree of the grid of the type of that name."""
    grid = levels_of(BY_NAME[name]).grid
    assert grid is not None
    unit = 1.0 if (grid.points == np.rint(grid.points)).all() else 0.125
    points = np.rint(grid.points / unit).astype(np.int64)
    patterns, classes = _patterns(grid)
    signs = 1 - 2 * (patterns[:, None] >> np.arange(grid.size) & 1).astype(np.float32)
    count = len(points)
    while len(points) * len(patterns) > (0 if grid.signs else ALL) and count * len(patterns) // LANES >= ROOTS:
        count //= LANES
    parts = [
        _order(part, count // grid.codebooks) + i * len(part) for i, part in enumerate(np.split(points, grid.codebooks))
    ]
    order = np.concatenate(parts)
    heights = [points[order]]
    while len(heights[0]) > count:
        heights.insert(0, _centers(heights[0]))
    roots = _lines(heights[0] * signs[:, None, :], np.float32)
    lines = [_lines(points_of_height, np.int8) for points_of_height in heights[1:] or heights]
    sizes = [len(points_of_height) for points_of_height in lines][: len(heights) - 1]
    where = [(sum(sizes[:i]), size - 1, size.bit_length() - 1) for i, size in enumerate(sizes)]
    of_elements = np.append(signs.repeat(grid.size), np.zeros(LANES, np.float32))
    arrays = roots, np.concatenate(lines), np.array(where, np.int64), of_elements
    at_roots, at_lines, at_places, at_signs = (points_of_height.ctypes.data for points_of_height in arrays)
    at_points = at_lines + arrays[1].nbytes - lines[-1].nbytes
    tree = Tree(
        at_roots, len(roots), at_lines, at_points, len(where), at_places, at_signs, len(patterns),
        len(order).bit_length() - 1, unit, classes, FLAT if len(where) == 1 else HIGH,
    )  # fmt: skip
    return CodebookTree(grid, tree, order, patterns, arrays)


def _lines(points: npt.NDArray[Any], dtype: type[Any]) -> npt.NDArray[Any]:
    """Return points [..., size] as lines of 16."""
    return np.ascontiguousarray(points.reshape(-1, LANES, points.shape[-1]).swapaxes(1, 2), dtype)


def _patterns(grid: Grid) -> tuple[I64, int]:
    """Return the patterns of signs of a point, class by class, and the number of classes."""
    if not grid.signs:
        return np.zeros(1, np.int64), grid.codebooks
    masks = _shuffle(1 << grid.size)
    odd = np.bitwise_count(masks) & 1
    if not grid.is_even:
        return masks, 1
    if grid.points_per_group == 1:
        return masks[odd == 0], 1
    return masks[np.argsort(odd, kind="stable")], 2


def _hash(count: int) -> I64:
    """Return a number of 16 bits for each below ``count``, without pattern."""
    mixed = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1)
    return (mixed ^ mixed >> np.uint32(15)).astype(np.int64) * 40503 >> 8 & 0xFFFF


def _shuffle(count: int) -> I64:
    """Return the numbers below ``count`` in an order without pattern."""
    return _hash(count).argsort(kind="stable")


def _order(points: I64, roots: int) -> I64:
    """Return the numbers of points, ordered by cell, under this number of roots."""
    order = np.arange(len(points))[None]
    while order.shape[1] > LANES:
        cell_points = points[order]
        spread = order.shape[1] * (cell_points**2).sum(1) - cell_points.sum(1) ** 2
        axis_values = np.take_along_axis(cell_points, spread.argmax(1)[:, None, None], 2)[:, :, 0]
        order = np.take_along_axis(order, axis_values.argsort(1, kind="stable"), 1).reshape(2 * len(order), -1)
    order = order.reshape(roots, -1)[_shuffle(roots)]
    width = order.shape[1] // LANES
    while width:
        nodes = order.reshape(-1, LANES, width)
        lanes = np.arange(LANES) ^ _hash(len(nodes))[:, None] & LANES - 1
        order = np.take_along_axis(nodes, lanes[:, :, None], 1)
        width //= LANES
    return order.ravel()


def _centers(points: I64) -> I64:
    """Return the centers of 16 each, rounded."""
    centers: I64 = np.rint(points.reshape(-1, LANES, points.shape[1]).mean(1)).astype(np.int64)
    return centers

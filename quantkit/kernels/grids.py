"""Grids: the vectors of levels of types whose groups of columns have one index.

A *grid* lists points, 2 to 8 levels each. A group of columns takes its levels from a point, or from two, one after
another; where points are magnitudes, signs belong to the group, too. The q of a group holds everything that it may
choose: the indices of its points, lowest bits first, then its signs. reference.py is the specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from quantkit.kernels.tables import table

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Grid:
    """The levels of groups of columns.

    points: levels of each index, or magnitudes if there are signs, float32 [indices, columns]. parts: points of a
    group. signs: bits of a group's signs: none, one for each column, or one less, if an even number is negative.
    codebooks: a bit of the sub-block selects the half of the points for its groups' indices.
    """

    points: F32
    points_per_group: int = 1
    signs: int = 0
    codebooks: int = 1

    @property
    def size(self) -> int:
        """Columns of a point."""
        return int(self.points.shape[1])

    @property
    def columns(self) -> int:
        """Columns of a group."""
        return self.points_per_group * self.size

    @property
    def is_even(self) -> bool:
        """Whether an even number of a group's levels is negative."""
        return 0 < self.signs < self.columns

    @cached_property
    def index_bits(self) -> int:
        """Bits of an index."""
        return (len(self.points) // self.codebooks).bit_length() - 1

    def indices(self, q: U32) -> U32:
        """Return the indices of groups' points, uint32 [..., parts]."""
        shifts = np.arange(self.points_per_group, dtype=np.uint32) * np.uint32(self.index_bits)
        return (q[..., None] >> shifts) & np.uint32((1 << self.index_bits) - 1)

    def negative(self, q: U32) -> U32:
        """Return which levels of groups are negative, a bit each."""
        signs = q >> np.uint32(self.points_per_group * self.index_bits)
        if self.is_even:
            signs = signs | (np.bitwise_count(signs).astype(np.uint32) & np.uint32(1)) << np.uint32(self.signs)
        return signs

    def q_of(self, indices: U32, negative: U32) -> U32:
        """Return the q of groups from indices [..., parts] and the bits of negative levels."""
        q = (negative & np.uint32((1 << self.signs) - 1)) << np.uint32(self.points_per_group * self.index_bits)
        for part in range(self.points_per_group):
            q = q | indices[..., part] << np.uint32(part * self.index_bits)
        return q.astype(np.uint32)

    def levels(self, q: U32, codebook: npt.NDArray[np.uint8] | None = None) -> F32:
        """Return the levels of groups, float32 [..., columns]; ``codebook`` is that of each group."""
        indices = self.indices(q)
        if self.codebooks > 1 and codebook is not None:
            indices = indices + (codebook.astype(np.uint32) << np.uint32(self.index_bits))[..., None]
        levels = self.points[indices].reshape(*q.shape, -1)
        if not self.signs:
            return levels
        bits = self.negative(q)[..., None] >> np.arange(self.columns, dtype=np.uint32) & np.uint32(1)
        return np.where(bits, -levels, levels)


def ternary(shifts: bool) -> Grid:
    """Return the grid of IQ1_S, levels shifted by 1/8, or of IQ1_M, whose q has a bit for the sign of the shift."""
    points = table("iq1s_grid").astype(np.float32)
    up = points + np.float32(0.125)
    return Grid(np.concatenate([up, points - np.float32(0.125)]) if shifts else up)


def magnitudes(name: str, signs: int, parts: int = 1) -> Grid:
    """Return a grid of magnitudes from the table of that name."""
    return Grid(table(name).astype(np.float32), parts, signs)


def even_levels() -> Grid:
    """Return the grid of IQ4_KSS: four levels, the bits of whose indices are even in number; 2 q is x, 4 each x ^ x/2.

    They are those of values 2 k, 2 k + 16, 2 k + 1, 2 k + 17 of 32.
    """
    x = 2 * np.arange(1 << 15)
    nibbles = (x ^ x >> 1)[:, None] >> np.array([0, 4, 8, 12]) & 15
    return Grid(table("kvalues_iq4nl").astype(np.float32)[nibbles])


def trellis_levels(first: int, count: int, size: int) -> npt.NDArray[np.int64]:
    """Return the levels of a trellis type, int64 [count, size], of indices from ``first`` on."""
    x, levels = np.arange(first, first + count, dtype=np.uint32) + np.uint32(4096), []
    for _ in range(size):
        x = x * np.uint32(0xCBAC1FED)
        levels.append((x & np.uint32(0x3F3F3F3F))[:, None].view(np.uint8).sum(1, np.int64) - 126)
    return np.stack(levels, 1)


def trellis(size: int, bits: int = 16, signs: int = 0, codebooks: int = 1) -> Grid:
    """Return the grid of a trellis type with these bits for index and codebook: of magnitudes if it has signs."""
    points = trellis_levels(0, 1 << bits, size).astype(np.float32)
    return Grid(np.abs(points) if signs else points, 1, signs, codebooks)

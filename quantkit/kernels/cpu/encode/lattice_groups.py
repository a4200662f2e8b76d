"""Groups of levels as points of a grid: the indices and signs of blocks whose single levels a search knows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.kernels.grids import Grid
from quantkit.kernels.lattices import Lattice
from quantkit.kernels.levels import Integers, write_integers

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def _keys(magnitudes: F32, steps: F32) -> I64:
    """Return a number for each point, the last axis, of magnitudes that are among the ascending ``steps``."""
    powers = len(steps) ** np.arange(magnitudes.shape[-1], dtype=np.int64)
    keys: I64 = (np.searchsorted(steps, magnitudes) * powers).sum(axis=-1)
    return keys


def find_points(grid: Grid, levels: F32) -> tuple[U32, Flags]:
    """Return the q of groups of levels, float32 [groups, columns], and which of them the grid has."""
    steps = np.unique(grid.points)
    keys = _keys(grid.points, steps)
    order = np.argsort(keys)
    searched = _keys(np.abs(levels).reshape(len(levels), grid.points_per_group, grid.size), steps)
    places = np.searchsorted(keys[order], searched).clip(max=len(keys) - 1)
    indices = order[places]
    negative = ((levels < 0) * (1 << np.arange(grid.columns, dtype=np.uint32))).sum(axis=1).astype(np.uint32)
    exists = (keys[indices] == searched).all(axis=1)
    if grid.is_even:
        exists &= np.bitwise_count(negative) % 2 == 0
    return grid.q_of(indices.astype(np.uint32), negative), exists


def pack_groups(lattice: Lattice, q: U8, s: U8, d: F64) -> tuple[U8, Flags]:
    """Return blocks of a type with a grid, uint8 [blocks, block bytes], and which of them it has.

    q: codes of levels, uint8 [blocks * block]. s: uint8 [blocks * subs]. d: float64 [blocks], for values times
    ``lattice.unit``; encoders do not make it negative.
    """
    grid, blocks = lattice.grid, len(d)
    assert grid is not None
    signs = np.where(d < 0, -1, 1).astype(np.float32)
    levels = lattice.codebook[q].reshape(blocks, lattice.type.block) * signs[:, None]
    points, exists = find_points(grid, levels.reshape(-1, grid.columns))
    with np.errstate(over="ignore"):
        halves = np.abs(d).astype(np.float16).astype(np.float32)
    out = np.zeros((blocks, lattice.type.block_bytes), np.uint8)
    if blocks:
        integers = Integers(points.reshape(blocks, -1), s.reshape(blocks, -1), None, None, halves[:, None], None)
        write_integers(lattice.type, integers, out)
    complete = np.all(exists.reshape(blocks, lattice.type.block // grid.columns), axis=1)
    return out, np.asarray(complete, np.bool_)

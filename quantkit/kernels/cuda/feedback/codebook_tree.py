"""Grids as searches on a device read them (search.cuh): the CPU's codebook trees, in another layout.

A lane of sixteen has a root, or a child: so the values of one lie together. Signs are bits, not factors.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from quantkit.kernels.cpu.feedback.codebook_tree import LANES, tree_of
from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.cuda.core.lookups import upload_once
from quantkit.types import TensorType


class TreeTables(NamedTuple):
    """Arrays or, on a device, their addresses.

    roots: float32 [roots, size]. lines: of all heights below, highest first, uint8 [lines, 16, size], 128 more than
    what they are. signs: which levels are negative in each pattern, a bit each, uint8. order: the index of each point,
    int32; point_of_index: the point of each index, int32. pattern_of: the pattern of each combination of signs, uint8.
    """

    roots: Any
    lines: Any
    signs: Any
    order: Any
    point_of_index: Any
    pattern_of: Any


@cache
def tree_arrays(name: str) -> TreeTables:
    """Return the arrays of the type of that name."""
    tree = tree_of(name)
    size = tree.grid.size
    roots, lines, _, _ = tree.arrays
    pattern_of = np.zeros(1 << size, np.uint8)
    pattern_of[tree.patterns] = np.arange(len(tree.patterns))
    return TreeTables(
        np.ascontiguousarray(roots.swapaxes(1, 2).reshape(-1, size)),
        np.ascontiguousarray((lines.swapaxes(1, 2).astype(np.int16) + 128).astype(np.uint8)),
        tree.patterns.astype(np.uint8),
        tree.order.astype(np.int32),
        np.argsort(tree.order).astype(np.int32),
        pattern_of,
    )


def tree_macros(t: TensorType) -> dict[str, str | int]:
    """Return the macros of search.cuh for a type's grid: how large its tree is, as ``Tree`` counts it."""
    entry = tree_of(t.name)
    grid, tree = entry.grid, entry.tree
    bits = [int(count) for count in entry.arrays[2][:, 2]] if tree.heights else []
    return {
        "SIZE": grid.size, "PARTS": grid.points_per_group, "ROOT_LINES": tree.root_lines, "CLASSES": tree.classes,
        "PATTERNS": tree.patterns, "POINT_BITS": tree.bits, "HEIGHTS": tree.heights, "KEPT": tree.beam,
        "HEIGHT_BITS": f"0x{sum(height_bits << 4 * i for i, height_bits in enumerate(bits)):x}",
        "FIRST_OF_POINTS": points_offset(t) // (LANES * grid.size),
        "UNIT": f"{tree.unit}f",
    }  # fmt: skip


def points_offset(t: TensorType) -> int:
    """Return the offset of the points in ``lines``."""
    tree = tree_of(t.name).tree
    return tree.points - tree.lines


def tree_on(device: Device, t: TensorType) -> TreeTables:
    """Return the addresses of a type's tables on a device, where they stay."""
    return TreeTables(*upload_once(device, tree_arrays, t.name))

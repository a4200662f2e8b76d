"""Grids as searches on a device read them (search.cuh): the trees of the CPU's books, in another layout.

A lane of sixteen has a root, or a child: so the values of one lie together. Signs are bits, not factors.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from quantkit.kernels.cpu.feedback.books import LANES, book_of
from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.cuda.core.lookups import put_once
from quantkit.types import TensorType


class BookTables(NamedTuple):
    """Arrays or, on a device, their addresses.

    roots: float32 [roots, size]. lines: of all heights below, highest first, uint8 [lines, 16, size], 128 more than
    what they are. signs: which levels are negative in each pattern, a bit each, uint8. order: the index of each point,
    int32; place: the point of each index, int32. pattern_of: the pattern of each combination of signs, uint8.
    """

    roots: Any
    lines: Any
    signs: Any
    order: Any
    place: Any
    pattern_of: Any


@cache
def book_arrays(name: str) -> BookTables:
    """Return the arrays of the type of that name."""
    book = book_of(name)
    size = book.grid.size
    roots, lines, _, _ = book.kept
    pattern_of = np.zeros(1 << size, np.uint8)
    pattern_of[book.patterns] = np.arange(len(book.patterns))
    return BookTables(
        np.ascontiguousarray(roots.swapaxes(1, 2).reshape(-1, size)),
        np.ascontiguousarray((lines.swapaxes(1, 2).astype(np.int16) + 128).astype(np.uint8)),
        book.patterns.astype(np.uint8),
        book.order.astype(np.int32),
        np.argsort(book.order).astype(np.int32),
        pattern_of,
    )


def book_macros(t: TensorType) -> dict[str, str | int]:
    """Return the macros of search.cuh for a type's grid: how large its tree is, as ``Tree`` counts it."""
    book = book_of(t.name)
    grid, tree = book.grid, book.tree
    bits = [int(each) for each in book.kept[2][:, 2]] if tree.heights else []
    return {
        "SIZE": grid.size, "PARTS": grid.parts, "ROOT_LINES": tree.root_lines, "CLASSES": tree.classes,
        "PATTERNS": tree.patterns, "POINT_BITS": tree.bits, "HEIGHTS": tree.heights, "KEPT": tree.kept,
        "HEIGHT_BITS": f"0x{sum(each << 4 * i for i, each in enumerate(bits)):x}",
        "FIRST_OF_POINTS": first_byte_of_points(t) // (LANES * grid.size),
        "UNIT": f"{tree.unit}f",
    }  # fmt: skip


def first_byte_of_points(t: TensorType) -> int:
    """Return where the points begin in ``lines``."""
    tree = book_of(t.name).tree
    return tree.points - tree.lines


def book_on(device: Device, t: TensorType) -> BookTables:
    """Return the addresses of a type's tables on a device, where they stay."""
    return BookTables(*put_once(device, book_arrays, t.name))

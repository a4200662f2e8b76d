"""Tables of a type on a device: where the bits of its integers lie, as fields.cuh and rows.cu read it, and its grid.

A grid is as searches read it (search.cuh): the CPU's codebook tree, in another layout. A lane of sixteen has a root, or
a child: so the values of one lie together. Signs are bits, not factors.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.codebook_tree import LANES, tree_of
from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.cuda.core.lookups import upload_once
from quantkit.kernels.cuda.feedback.sweeps import codebook
from quantkit.kernels.levels import Bits, Levels, float_bits, levels_of
from quantkit.types import TensorType

Ints = npt.NDArray[np.int32]
#: The field of a bit (fields.cuh).
_LEVEL, _FACTOR, _MINIMUM, _SHIFT, _D, _DMIN = range(1, 7)


class Tables(NamedTuple):
    """Arrays or, on a device, their addresses; an empty array, or 0, where a type has none.

    Fields are int32 [fields, bits]; factor_indices: of the factor of each s in ``factors``, ascending; sources, codes:
    as write_args of rows.cu says. codebook: of its levels (sweeps.cuh); empty where levels come from a grid.
    """

    factor_fields: Any
    minimum_fields: Any
    shift_fields: Any
    d_field: Any
    dmin_field: Any
    factor_indices: Any
    factors: Any
    sources: Any
    level_codes: Any
    factor_codes: Any
    codebook: Any
    level_fields: Any


def _field(kind: str) -> Ints:
    return float_bits(kind).ravel().astype(np.int32) if kind else np.zeros(0, np.int32)


def _enter(sources: npt.NDArray[np.uint32], kind: int, fields: Bits | None) -> None:
    """Record the item and bit of each field bit."""
    if fields is None:
        return
    items, bits = np.indices(fields.shape)
    sources[fields] = kind << 24 | items << 8 | bits


def _sources(layout: Levels) -> npt.NDArray[np.uint32]:
    """Return the field of each bit of a row's header, then of a block's."""
    header, block = (np.zeros(8 * size, np.uint32) for size in (layout.type.row_header, layout.type.block_bytes))
    for kind, fields in (
        (_LEVEL, layout.levels),
        (_FACTOR, layout.scale),
        (_MINIMUM, layout.minimum),
        (_SHIFT, layout.shift),
    ):
        _enter(block, kind, fields)
    for kind, where in ((_D, layout.d), (_DMIN, layout.dmin)):
        if where:
            _enter(header if where.startswith("row:") else block, kind, float_bits(where))
    return np.concatenate([header, block])


def _flat(fields: Bits | None) -> Ints:
    return np.zeros(0, np.int32) if fields is None else fields.astype(np.int32).ravel()


@cache
def tables(t: TensorType) -> Tables:
    """Return the arrays of a type."""
    layout = levels_of(t)
    factors = np.zeros(0, np.float32)
    factor_indices = np.zeros(0, np.int64)
    codes = np.zeros(0, np.int64)
    if layout.factors is not None:
        factors, codes, factor_indices = np.unique(layout.factors, return_index=True, return_inverse=True)
    level_codes, levels = np.zeros(0, np.int32), np.zeros(0, np.float32)
    if layout.grid is None:
        distinct, first = np.unique(layout.codebook, return_index=True)  # integers, -128 to 127
        level_codes, levels = np.zeros(256, np.int32), codebook(layout.codebook)
        level_codes[distinct.astype(np.int8).view(np.uint8)] = first
    return Tables(
        _flat(layout.scale), _flat(layout.minimum), _flat(layout.shift), _field(layout.d), _field(layout.dmin),
        factor_indices.astype(np.int32), factors.astype(np.float32), _sources(layout).view(np.int32), level_codes,
        codes.astype(np.int32), levels, _flat(layout.levels),
    )  # fmt: skip


def tables_on(device: Device, t: TensorType) -> Tables:
    """Return the addresses of a type's tables on a device, where they stay."""
    return Tables(*upload_once(device, tables, t))


class TreeTables(NamedTuple):
    """Arrays or, on a device, their addresses.

    roots: float32 [roots, size]. lines: of all heights below, highest first, uint8 [lines, 16, size], offset by 128.
    signs: which levels are negative in each pattern, a bit each, uint8. order: the index of each point, int32;
    point_of_index: the point of each index, int32. pattern_of: the pattern of each combination of signs, uint8.
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

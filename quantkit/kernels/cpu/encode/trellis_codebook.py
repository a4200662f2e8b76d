"""The points that trellis types encode to, in a tree of cells, as the search of trellis_search.py reads them.

A point is the 8 (IQ4_KT: 4) levels of an index. 16 points near each other are a cell; 16 consecutive cells, a family.
Cells of points of 8 are clusters (scripts/make_trellis_cells.py); other points are split in halves along the dimension
in which they vary most, until cells are left. Groups of 16 points, of 16 cells' centers and of 16 families'
centers are stored as lines of 64 bytes, a word per point: four levels plus 126 (IQ3_KT: magnitudes), then four squares
/ 64 rounded, as bytes; IQ4_KT's points, two levels of 16 bits.

Everything is read from files or computed exactly, so cells are the same everywhere. How far cells reach is for scans,
which skip some.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.grids import trellis_levels


class Codebook(NamedTuple):
    """Lines of points, of cells' centers and of families' centers, u8; and the index of each point, i32 [points].

    And how far the cells reach with any of SCALES, f32 [cells / 16, values, 2, 16]: for each value the least and the
    largest level of 16 cells, times a scale.

    Of points of 4 values also the lines near queries of a bucket, u16 [codebooks, buckets, lines] (trellis_lists.py).
    """

    points: npt.NDArray[np.uint8]
    cells: npt.NDArray[np.uint8]
    families: npt.NDArray[np.uint8]
    extents: npt.NDArray[np.float32]
    indices: npt.NDArray[np.int32]
    lists: npt.NDArray[np.uint16]


#: The minimum and maximum scale for which all points are ranked, relative to the guess.
SCALES = 0.62, 1.6

#: The numbers of points, ordered by cell, u16 [points], by ``cells_key``.
CELLS = Path(__file__).parent.parent.parent / "trellis_cells.npz"

#: A parity check of distance 4: families that differ in fewer than 4 of the first splits have different syndromes.
_CHECK = [16, 17, 18, 20, 24, 23, 27, 29]


def _sorted_by_cell(points: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers of points, cell by cell: neighbours of a family, and of a cell, are in different lanes."""
    order = np.arange(len(points))[None]
    size = points.shape[1]
    splits = 0
    while order.shape[1] > 16:
        cell_points = points[order]
        if order.shape[1] > 256:
            axis_values = cell_points[:, :, splits % size]
        else:
            spread = order.shape[1] * (cell_points**2).sum(1) - cell_points.sum(1) ** 2
            axis_values = np.take_along_axis(cell_points, spread.argmax(1)[:, None, None], 2)[:, :, 0]
        order = np.take_along_axis(order, axis_values.argsort(1, kind="stable"), 1).reshape(2 * len(order), -1)
        splits += 1
    families = order.reshape(-1, 16, 16)
    bits = np.arange(len(families))[:, None] >> np.arange(len(families).bit_length() - 1) & 1
    syndromes = np.bitwise_xor.reduce(bits * np.array(_CHECK[: bits.shape[1]]), axis=1)
    lanes = np.arange(16) ^ (syndromes[:, None] & 15)
    families = np.take_along_axis(families, lanes[:, :, None], 1)
    by_slot = syndromes.argsort(kind="stable").reshape(min(32, len(families)), -1).T
    sorted_points: npt.NDArray[np.int64] = families[by_slot.ravel()].ravel()
    return sorted_points


def _lines(values: npt.NDArray[np.int64], bias: int, wide: bool) -> npt.NDArray[np.uint8]:
    """Return the lines of groups of 16 points [16 n, size]; wide: levels of 16 bits."""
    kind: np.dtype[Any]
    if wide:
        words, kind = values, np.dtype(np.int16)
    else:
        words, kind = np.concatenate([values + bias, (values**2 + 32) // 64], 1), np.dtype(np.uint8)
    lines = words.reshape(len(words) // 16, 16, -1, 4 // kind.itemsize).swapaxes(1, 2).astype(kind)
    return np.ascontiguousarray(lines).view(np.uint8).ravel()


def _centers(points: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return the centers of ``count`` points each, rounded."""
    centers: npt.NDArray[np.int64] = (2 * points.reshape(-1, count, points.shape[1]).sum(1) + count) // (2 * count)
    return centers


def _extents(points: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return the extent of cells of 16 points, times SCALES as f32: exact, then rounded outwards."""
    cells = points.reshape(len(points) // 256, 16, 16, -1)
    scaled = np.multiply.outer(np.array(SCALES, np.float32).astype(np.float64), cells)
    low = np.nextafter(scaled.min((0, 3)).astype(np.float32), np.float32(-np.inf))
    high = np.nextafter(scaled.max((0, 3)).astype(np.float32), np.float32(np.inf))
    return np.ascontiguousarray(np.stack([low, high]).transpose(1, 3, 0, 2))


def _lists(points: npt.NDArray[np.int64], first: int) -> npt.NDArray[np.uint16]:
    from quantkit.kernels.cpu.encode.trellis_lists import lines_near  # needs numba, which a machine with a GPU may lack

    return lines_near(points, first)


def cells_key(count: int, size: int, magnitudes: bool) -> str:
    """Return the key of a codebook's cells."""
    return f"{count}x{size}{'-magnitudes' if magnitudes else ''}"


def _cluster(count: int, size: int, magnitudes: bool) -> npt.NDArray[np.int64]:
    """Return the numbers of points, cell by cell."""
    with np.load(CELLS) as npz:
        order: npt.NDArray[np.int64] = npz[cells_key(count, size, magnitudes)].astype(np.int64)
    return order


def _align(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy that begins with a cache line, as lines of points should."""
    buffer = np.empty(array.nbytes + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    copy: npt.NDArray[Any] = buffer[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@cache
def codebook(count: int, size: int, magnitudes: bool = False, codebooks: int = 1) -> Codebook:
    """Return ``codebooks`` codebooks of ``count`` consecutive indices each, one after the other."""
    parts: list[Any] = []
    for index in range(codebooks):
        levels = trellis_levels(index * count, count, size)
        levels, bias = (abs(levels), 0) if magnitudes else (levels, 126)
        order = _sorted_by_cell(levels) if size == 4 else _cluster(count, size, magnitudes)
        by_cell = levels[order]
        centers = (_lines(_centers(by_cell, points), bias, False) for points in (16, 256))
        lists = _lists(by_cell, index * count // 16) if size == 4 else np.empty(0, np.uint16)
        parts.append((_lines(by_cell, bias, size == 4), *centers, _extents(by_cell), order.astype(np.int32), lists))
    return Codebook(*(_align(np.concatenate(arrays)) for arrays in zip(*parts, strict=True)))

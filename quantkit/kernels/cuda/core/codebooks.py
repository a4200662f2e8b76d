"""What encoders of trellis types look up on a device: trellis_search.cuh's Codebook.

Points and centers are the CPU's (quantkit.kernels.cpu.encode.trellis_codebook), in the same order, but each lies by
itself: its levels, signed, then their squares / 64, rounded, less 128. Points that are never ranked in 8 bits have
magnitudes instead of squares, or nothing where levels are magnitudes: what a search reads of them comes from afar.
Behind centers of magnitudes are their squares. Lists of lines near queries are the CPU's.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.encode import trellis_codebook
from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.cuda.core.lookups import put_once
from quantkit.types import TensorType


class Points(NamedTuple):
    """What points a type has: so many of so many values, magnitudes or not, in each of its codebooks."""

    number: int
    size: int
    magnitudes: bool = False
    books: int = 1


CODEBOOKS = {
    "IQ1_KT": Points(8192, 8),
    "IQ2_KT": Points(65536, 8),
    "IQ3_KT": Points(65536, 8, magnitudes=True),
    "IQ4_KT": Points(32768, 4, books=2),
}
#: Scales at which errors are known, over a guess: each over the one before.
_STEP = 1.065


class Codebook(NamedTuple):
    """Arrays or, on a device, their addresses."""

    points: Any
    cells: Any
    families: Any
    indices: Any
    grid: Any
    lists: Any


def _levels(lines: npt.NDArray[np.uint8], size: int, bias: int, wide: bool) -> npt.NDArray[np.int64]:
    """Return the levels of each point of the CPU's lines of 16, int64 [points, size]."""
    kind: Any = np.int16 if wide else np.uint8
    each = 4 // kind().itemsize
    words = size // each if wide else 2 * size // each
    values = lines.view(kind).reshape(-1, words, 16, each).swapaxes(1, 2).reshape(-1, words * each).astype(np.int64)
    levels: npt.NDArray[np.int64] = values if wide else values[:, :size] - bias
    return levels


def _with_squares(levels: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    return np.concatenate([levels, (levels**2 + 32) // 64 - 128], 1).astype(np.int8)


def _centers(levels: npt.NDArray[np.int64], magnitudes: bool) -> npt.NDArray[np.int8]:
    """Return centers as points are, for magnitudes with all squares, of 16 bits, behind all of them."""
    short = _with_squares(levels)
    return np.concatenate([short, (levels**2).astype(np.int16).view(np.int8)]) if magnitudes else short


@cache
def codebook_arrays(name: str) -> Codebook:
    """Return the arrays of a type."""
    count, size, magnitudes, books = CODEBOOKS[name]
    of, bias = trellis_codebook.codebook(count, size, magnitudes, books), 0 if magnitudes else 126
    grid = np.array([_STEP ** (k - 7.5) for k in range(16)], np.float32)
    cells, families = (_centers(_levels(lines, size, bias, False), magnitudes) for lines in (of.cells, of.families))
    levels = _levels(of.points, size, bias, size == 4)
    if magnitudes:
        points = levels.astype(np.int8)
    elif size == 4:
        points = np.concatenate([levels, abs(levels)], 1).astype(np.int8)
    else:
        points = _with_squares(levels)
    return Codebook(points, cells, families, of.indices, grid, of.lists)


def codebook_on(device: Device, t: TensorType) -> Codebook:
    """Return the addresses of a trellis type's codebook on a device, where it stays."""
    return Codebook(*put_once(device, codebook_arrays, t.name))

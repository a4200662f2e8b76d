"""Tables of the encoders of trellis types on a device: trellis_search.cuh's Codebook.

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
from quantkit.kernels.cuda.core.lookups import upload_once
from quantkit.kernels.trellis_settings import TRELLIS_SETTINGS
from quantkit.types import TensorType

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
    per_word = 4 // kind().itemsize
    words = size // per_word if wide else 2 * size // per_word
    values = (
        lines.view(kind).reshape(-1, words, 16, per_word).swapaxes(1, 2).reshape(-1, words * per_word).astype(np.int64)
    )
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
    settings = TRELLIS_SETTINGS[name]
    size = settings.size
    magnitudes = settings.magnitudes
    bias = 0 if settings.magnitudes else 126
    codebook = trellis_codebook.codebook(settings.points, size, magnitudes, settings.codebooks)
    grid = np.array([_STEP ** (k - 7.5) for k in range(16)], np.float32)
    cells, families = (
        _centers(_levels(lines, size, bias, False), magnitudes) for lines in (codebook.cells, codebook.families)
    )
    levels = _levels(codebook.points, size, bias, size == 4)
    if magnitudes:
        points = levels.astype(np.int8)
    elif size == 4:
        points = np.concatenate([levels, abs(levels)], 1).astype(np.int8)
    else:
        points = _with_squares(levels)
    return Codebook(points, cells, families, codebook.indices, grid, codebook.lists)


def codebook_on(device: Device, t: TensorType) -> Codebook:
    """Return the addresses of a trellis type's codebook on a device, where it stays."""
    return Codebook(*upload_once(device, codebook_arrays, t.name))

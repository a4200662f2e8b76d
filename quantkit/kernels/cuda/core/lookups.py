"""Arrays that kernels look up, uploaded to a device on first use and kept there.

Codebooks of trellis types (trellis_search.cuh): points and centers are the CPU's (cpu/encode/trellis_codebook.py), in
the same order, stored separately: its levels, signed, then their squares / 64, rounded, less 128. Points that are
never ranked in 8 bits have magnitudes instead of squares, or nothing where levels are magnitudes, to save global
memory traffic. Behind centers of magnitudes are their squares. Lists of lines near queries are the CPU's.

Tables of types with a grid (lane.cuh): the CPU's lists (cpu/encode/neighbours.py describes slots), padded to a
multiple of four with copies of the first neighbour: a copy is never nearer than the original.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.encode import trellis_codebook
from quantkit.kernels.cpu.encode.neighbours import FILL, WORDS, levels, neighbour_lists
from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.trellis_settings import TRELLIS_SETTINGS
from quantkit.types import TensorType

_on_device: WeakKeyDictionary[Device, dict[Hashable, tuple[int, ...]]] = WeakKeyDictionary()
_lock = Lock()


def upload_once(
    device: Device, arrays: Callable[..., Sequence[npt.NDArray[Any]]], *arguments: Hashable
) -> tuple[int, ...]:
    """Return the addresses on a device of the arrays that ``arrays(*arguments)`` returns, 0 of an empty one."""
    owner: Device = getattr(device, "owner", device)  # all lanes of a device read the same
    with _lock:
        uploaded = _on_device.setdefault(owner, {})
        if (arrays, arguments) not in uploaded:
            uploaded[arrays, arguments] = tuple(_upload(owner, array) for array in arrays(*arguments))
            owner.synchronize()  # no lane's stream waits for this one
        return uploaded[arrays, arguments]


def _upload(device: Device, array: npt.NDArray[Any]) -> int:
    if not array.size:
        return 0
    address = device.allocate(array.nbytes)
    device.upload(address, array)
    return address


#: Ratio of adjacent scales, relative to a guess, at which errors are computed.
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


#: Words that a kernel reads at once.
_FOUR = 4
#: Maximum distance of neighbours, by type; the grid is the type's own, except for IQ1 types.
_DISTANCES = {
    "IQ1_S": 3,
    "IQ1_M": 3,
    "IQ1_S_ROW": 3,
    "IQ1_M_ROW": 3,
    "IQ2_XXS": 2,
    "IQ2_XS": 2,
    "IQ2_S": 1,
    "IQ3_XXS": 2,
    "IQ3_S": 3,
}


class GridTables(NamedTuple):
    """Arrays or, on a device, their addresses; 0 for a type without a grid."""

    #: int32 [slots]: ~index of a point of the grid; otherwise offset << 8 | length of its list, both in units of four.
    entries: Any = 0
    #: uint16 [...]: lists of indices; and of words, if a group has 8 values.
    lists: Any = 0
    words: Any = 0
    #: float32 [points, values]: the values of each point.
    points: Any = 0


@cache
def _grid_tables(grid: str, distances: int) -> GridTables:
    """Return the arrays for a grid of kernels/tables.py."""
    entries, words, indices = neighbour_lists(grid, distances)
    first_of_entry = np.where(entries < 0, ~indices[np.where(entries < 0, ~entries, 0)].astype(np.int32), 0)
    off = np.flatnonzero(entries >= 0)
    places, lengths = entries[off] >> 5, entries[off] & 31
    is_word = words != FILL
    ends = np.concatenate([[0], np.cumsum(is_word)])
    counts = ends[(places + lengths) * WORDS] - ends[places * WORDS]
    fours = -(-counts // _FOUR)
    starts = np.cumsum(fours) - fours
    first_of_entry[off] = starts << 8 | fours
    firsts = words[places * WORDS]
    points = firsts.repeat(_FOUR * fours)
    row = np.arange(len(off)).repeat(counts)
    points[_FOUR * starts[row] + np.arange(len(row)) - (np.cumsum(counts) - counts)[row]] = words[is_word]
    on = levels(grid)
    values = on - 1 if grid == "iq1s_grid" else 2 * on + 1
    no_words = np.empty(0, np.uint16)
    rows = points if on.shape[1] == 8 else no_words
    return GridTables(first_of_entry, indices[points], rows, values.astype(np.float32))


def grid_tables(t: TensorType) -> GridTables:
    """Return the arrays of a type with a grid."""
    name = "iq1s" if t.name.startswith("IQ1") else t.name.lower().replace("_", "")
    return _grid_tables(f"{name}_grid", _DISTANCES[t.name])


def grid_on(device: Device, t: TensorType) -> GridTables:
    """Return the addresses of a type's tables on a device, where they stay; zeros for a type without a grid."""
    if t.name not in _DISTANCES:
        return GridTables()
    return GridTables(*upload_once(device, grid_tables, t))

"""Tables of the encoders of types with a grid on a device: lane.cuh's GridTables.

The lists are the CPU's (quantkit.kernels.cpu.encode.neighbours, which says what a slot is), filled up to a multiple of
four with copies of the first neighbour: a copy is never nearer than it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from quantkit.kernels.cpu.encode.neighbours import FILL, WORDS, levels, neighbour_lists
from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.cuda.core.lookups import upload_once
from quantkit.types import TensorType

#: Words that a kernel reads at once.
_FOUR = 4
#: The distances up to which points are neighbours, by type; the grid is the type's own, but for IQ1's.
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

    #: int32 [slots]: ~index of a point of the grid; else place << 8 | length of its list, both in fours.
    entries: Any = 0
    #: uint16 [...]: lists of indices; and of words, where a group has 8 values.
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

"""Where to look for the grid point nearest to rounded values: the lists of neighbours of IQ1, IQ2 and IQ3.

Values of a group (8 of IQ1 and IQ2, 4 of IQ3), rounded to levels 0 .. base - 1, are a *point*; the levels of a grid are
some of all points. A point off the grid has a list of neighbours on it: those at the smallest distance, at the
second smallest and so on, up to the number of distances of its type, nearest first, then by their index in the grid.

A *word* is a point as kernels handle it, 16 bits: level i in bits ``bits * i``, 2 of 8 values or 4 of 4. A *slot* is
the number of a point: level i times base^i.

Source: llama.cpp b11434 ggml-quants.c iq2xs_init_impl and iq3xs_init_impl.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.tables import table

#: Words read at once; every list is padded to a multiple of it with FILL, whose levels no point has.
WORDS, FILL = 16, 0xFFFF


class Lists(NamedTuple):
    """The lists of a grid."""

    #: int32 [slots]: ~word of a point of the grid; otherwise 32 * offset of its list + length of its list, both in
    #: WORDS.
    entries: npt.NDArray[np.int32]
    #: uint16 [...]: the lists of words.
    words: npt.NDArray[np.uint16]
    #: uint16 [largest word + 1]: the index of a word in the grid, 0 for all others.
    indices: npt.NDArray[np.uint16]


def points(base: int, size: int) -> npt.NDArray[np.int64]:
    """Return the levels of all points by slot, [base^size, size]."""
    return np.arange(base**size)[:, None] // base ** np.arange(size) % base


def levels(grid: str) -> npt.NDArray[Any]:
    """Return a grid's levels: its values are as many, in the same order."""
    values = table(grid)
    return np.searchsorted(np.unique(values), values)


@cache
def neighbour_lists(grid: str, distances: int) -> Lists:
    """Return the lists for the grid of that name in kernels/tables.py and a number of distances."""
    on = levels(grid)
    base, size = int(on.max()) + 1, on.shape[1]
    words = (on << (16 // size) * np.arange(size)).sum(1)
    slots = (on * base ** np.arange(size)).sum(1)
    indices = np.zeros(words.max() + 1, np.uint16)
    indices[words] = np.arange(len(on))
    off = np.setdiff1d(np.arange(base**size), slots)
    row, column = _nearest(points(base, size)[off], on, distances)
    counts = np.bincount(row, minlength=len(off))
    lengths = -(-counts // WORDS)
    places = np.cumsum(lengths) - lengths
    entries = np.empty(base**size, np.int32)
    entries[slots], entries[off] = ~words, 32 * places + lengths
    padded = np.full(WORDS * lengths.sum(), FILL, np.uint16)
    padded[(places * WORDS - np.cumsum(counts) + counts)[row] + np.arange(len(row))] = words[column]
    return Lists(entries, padded, indices)


def _nearest(points: npt.NDArray[Any], grid: npt.NDArray[Any], distances: int) -> tuple[Any, Any]:
    """Return pairs (point, index in the grid) up to this number of distances, by point, distance and index."""
    square = np.float32((points**2).sum(1)[:, None] + (grid**2).sum(1))
    squares = (square - 2 * points.astype(np.float32) @ grid.T.astype(np.float32)).astype(np.int16)
    limit = np.zeros((len(points), 1), np.int16)
    for _ in range(distances):
        limit = np.where(squares > limit, squares, np.int16(999)).min(1, keepdims=True)
    row, column = np.nonzero(squares <= limit)
    order = np.argsort(row * 1000 + squares[row, column], kind="stable")
    return row[order], column[order]

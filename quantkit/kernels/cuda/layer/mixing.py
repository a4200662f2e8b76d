"""Rows by their own statistics, and groups of columns mixed (Gemma 3n, DeepSeek 4): mixing.cu.

    exceed       x out width rows factor         max(x - mean - factor * deviation, 0) of each row
    to_length    x like out width rows group     every group of columns made as long as like's row
    mix          x weights base out width group n offset rows
                 out group j = base group j + sum over i of (weights[j n + i] + offset) * x group i

    stream_weights  before after across x scale base rows rounds eps
                 how four streams count (ops.StreamWeights): before and after [4], across [16] of x [24] a row

Values begin at multiples of 16 bytes; out of exceed and to_length may be x.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.layer.elementwise import over_rows

FILE = "layer/mixing.cu"


def exceed(rows: int) -> Shape:
    """Return how to launch ``exceed``: a block per row."""
    return Shape(Kernel(FILE, "exceed"), (max(1, rows), 1, 1))


def to_length(groups: int, rows: int) -> Shape:
    """Return how to launch ``to_length`` for ``groups`` of columns a row: a block per group."""
    return Shape(Kernel(FILE, "to_length"), (max(1, rows), groups, 1))


def mix(width: int, rows: int) -> Shape:
    """Return how to launch ``mix``; width: columns of out."""
    return over_rows(Kernel(FILE, "mix"), width, rows)


def stream_weights(rows: int) -> Shape:
    """Return how to launch ``stream_weights``: sixteen threads a row."""
    return Shape(Kernel(FILE, "stream_weights"), (max(1, -(-rows // 8)), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield exceed(1).kernel
    yield to_length(1, 1).kernel
    yield mix(1, 1).kernel
    yield stream_weights(1).kernel

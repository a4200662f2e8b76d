"""Rows by their own statistics, and groups of columns, streams and blocks of rows mixed.

mixing.cu, of Gemma 3n and RWKV:

    exceed       x out width rows factor         max(x - mean - factor * deviation, 0) of each row
    to_length    x like out width rows group     every group of columns made as long as like's row
    mix          x weights base out width group n offset rows
                 out group j = base group j + sum over i of (weights[j n + i] + offset) * x group i
    lerp         x to by weights out width n rows
                 out group j = x + (to - x) * (by group j + weights group j); n: columns of a group; by, weights: or 0
    bonus        x r k v vector out width head rows
                 out = x + v times the sum over each head's columns of r k vector

Values begin at multiples of 16 bytes; out of exceed, to_length and bonus may be x.

streams.cu, the weights of the four residual streams in a layer's input and output, and compress.cu, one row for every
block of positions:

    stream_weights  before after across x scale base rows rounds eps
                    ops.StreamWeights: before and after [4], across [16] of x [24] a row; scale: [3], base: [24]
    compress        ops.Compress
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.layer.elementwise import over_rows

FILE = "layer/mixing.cu"


def exceed(rows: int) -> Shape:
    """Return the kernel and grid of ``exceed``: a block per row."""
    return Shape(Kernel(FILE, "exceed"), (max(1, rows), 1, 1))


def to_length(groups: int, rows: int) -> Shape:
    """Return the kernel and grid of ``to_length`` for ``groups`` of columns a row: a block per group."""
    return Shape(Kernel(FILE, "to_length"), (max(1, rows), groups, 1))


def mix(width: int, rows: int) -> Shape:
    """Return the kernel and grid of ``mix``; width: columns of out."""
    return over_rows(Kernel(FILE, "mix"), width, rows)


def lerp(width: int, rows: int) -> Shape:
    """Return the kernel and grid of ``lerp``; width: columns of out."""
    return over_rows(Kernel(FILE, "lerp"), width, rows)


def bonus(heads: int) -> Shape:
    """Return the kernel and grid of ``bonus`` for ``heads`` of all rows: a warp each."""
    return Shape(Kernel(FILE, "bonus"), (max(1, -(-heads // 8)), 1, 1))


def stream_weights(rows: int) -> Shape:
    """Return the kernel and grid that compute the weights of streams: sixteen threads a row."""
    return Shape(Kernel("layer/streams.cu", "stream_weights"), (max(1, -(-rows // 8)), 1, 1))


def compress(width: int) -> Shape:
    """Return the kernel and grid that make rows of ``width`` columns, for any number of tokens."""
    return Shape(Kernel("layer/compress.cu", "compress"), (-(-width // 64), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of these files."""
    for shape in (exceed(1), to_length(1, 1), mix(1, 1), lerp(1, 1), bonus(1), stream_weights(1), compress(1)):
        yield shape.kernel

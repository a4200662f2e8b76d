"""Rows by their own statistics, and groups of columns mixed (Gemma 3n, RWKV): mixing.cu.

    exceed       x out width rows factor         max(x - mean - factor * deviation, 0) of each row
    to_length    x like out width rows group     every group of columns made as long as like's row
    mix          x weights base out width group n offset rows
                 out group j = base group j + sum over i of (weights[j n + i] + offset) * x group i
    lerp         x to by weights out width n rows
                 out group j = x + (to - x) * (by group j + weights group j); n: columns of a group; by, weights: or 0
    bonus        x r k v vector out width head rows
                 out = x + v times the sum over each head's columns of r k vector

Values begin at multiples of 16 bytes; out of exceed, to_length and bonus may be x.
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


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield exceed(1).kernel
    yield to_length(1, 1).kernel
    yield mix(1, 1).kernel
    yield lerp(1, 1).kernel
    yield bonus(1).kernel

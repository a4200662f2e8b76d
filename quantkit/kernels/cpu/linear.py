"""Products of rows with a matrix in float32, in the order of sums of oneMKL's sgemm."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import kernel
from quantkit.kernels.cpu.core.simd import f32x16, load, muladd, splat, store
from quantkit.kernels.cpu.low_rank import LANES, block_size

F32 = npt.NDArray[np.float32]

#: Number of rows computed at once, which share the loads of the matrix.
ROWS = 4


def blocks(size: int) -> list[range]:
    """Return the parts of a sum of ``size`` terms that oneMKL's sgemm computes one after another."""
    step = block_size(size)
    return [range(first, min(first + step, size)) for first in range(0, size, step)]


def multiply(x: F32, matrix: F32, columns: int) -> F32:
    """Return x @ A.

    Each value is computed separately, so results do not depend on the rows of a call: a chain of fused multiply-adds
    for each of ``blocks``, then their sum.

    Args:
        x: [rows, terms]
        matrix: A, [terms, columns], as ``strips`` returns it.
        columns: those of A.
    """
    padded = np.zeros((-(-len(x) // ROWS) * ROWS, x.shape[1]), np.float32)
    padded[: len(x)] = x
    result = np.zeros((len(padded), matrix.shape[0] * LANES), np.float32)
    for block in blocks(x.shape[1]):
        add_products(result, matrix, padded, block.start, block.stop)
    return result[: len(x), :columns]


@kernel
def add_products(out: F32, a: F32, x: F32, begin: int, end: int) -> None:
    """Add the terms from ``begin`` to ``end`` of x @ A to ``out``.

    Args:
        out: [rows, strips * 16], a multiple of 4 rows
        a: A as ``strips`` returns it, [strips, terms, 16].
        x: [rows, terms]
        begin: the first term.
        end: the one after the last.
    """
    n, width = out.shape
    terms = x.shape[1]
    for strip in range(width // LANES):
        line_at = 4 * strip * terms * LANES
        for first in range(0, n, ROWS):
            offset = 4 * first * terms
            s0 = splat(f32x16, np.float32(0))
            s1 = splat(f32x16, np.float32(0))
            s2 = splat(f32x16, np.float32(0))
            s3 = splat(f32x16, np.float32(0))
            for k in range(begin, end):
                line = load(f32x16, a, line_at + 4 * k * LANES)
                s0 = muladd(line, load(types.float32, x, offset + 4 * k), s0)
                s1 = muladd(line, load(types.float32, x, offset + 4 * (terms + k)), s1)
                s2 = muladd(line, load(types.float32, x, offset + 4 * (2 * terms + k)), s2)
                s3 = muladd(line, load(types.float32, x, offset + 4 * (3 * terms + k)), s3)
            place = 4 * (first * width + strip * LANES)
            store(out, place, load(f32x16, out, place) + s0)
            place += 4 * width
            store(out, place, load(f32x16, out, place) + s1)
            place += 4 * width
            store(out, place, load(f32x16, out, place) + s2)
            place += 4 * width
            store(out, place, load(f32x16, out, place) + s3)

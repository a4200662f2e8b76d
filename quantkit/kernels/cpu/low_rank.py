"""Products of two factors, B @ A, added to rows of float32: a LoRA adapter merged into a weight."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import kernel
from quantkit.kernels.cpu.core.simd import f32x16, load, splat, store

F32 = npt.NDArray[np.float32]

LANES = 16
#: Number of rows computed at once, which share the loads of A.
ROWS = 4


def strips(a: F32) -> F32:
    """Return A, [rank, columns], as ``add_low_rank`` reads it: [strips of 16 columns, rank, 16], filled up with 0."""
    rank, columns = a.shape
    n = -(-columns // LANES)
    padded = np.zeros((rank, n * LANES), np.float32)
    padded[:, :columns] = a
    return np.ascontiguousarray(padded.reshape(rank, n, LANES).transpose(1, 0, 2))


@kernel
def add_low_rank(x: F32, a: F32, b: F32, scale: np.float32) -> None:
    """Add B @ A * scale to x.

    Each value is computed separately: the sum over the rank in order, each term rounded, then times the scale, then
    added. So results depend neither on the rows of a call nor on the CPU.

    Args:
        x: [rows, columns]
        a: A as ``strips`` returns it.
        b: [rows, rank]
        scale: float32
    """
    n, columns = x.shape
    rank = b.shape[1]
    factor = splat(f32x16, scale)
    for first in range(0, n - ROWS + 1, ROWS):
        offset = 4 * first * rank
        for strip in range(columns // LANES):
            begin = 4 * strip * rank * LANES
            line = load(f32x16, a, begin)
            s0 = splat(f32x16, load(types.float32, b, offset)) * line
            s1 = splat(f32x16, load(types.float32, b, offset + 4 * rank)) * line
            s2 = splat(f32x16, load(types.float32, b, offset + 8 * rank)) * line
            s3 = splat(f32x16, load(types.float32, b, offset + 12 * rank)) * line
            for k in range(1, rank):
                line = load(f32x16, a, begin + 4 * k * LANES)
                s0 = s0 + splat(f32x16, load(types.float32, b, offset + 4 * k)) * line
                s1 = s1 + splat(f32x16, load(types.float32, b, offset + 4 * (rank + k))) * line
                s2 = s2 + splat(f32x16, load(types.float32, b, offset + 4 * (2 * rank + k))) * line
                s3 = s3 + splat(f32x16, load(types.float32, b, offset + 4 * (3 * rank + k))) * line
            place = 4 * (first * columns + strip * LANES)
            store(x, place, load(f32x16, x, place) + s0 * factor)
            place += 4 * columns
            store(x, place, load(f32x16, x, place) + s1 * factor)
            place += 4 * columns
            store(x, place, load(f32x16, x, place) + s2 * factor)
            place += 4 * columns
            store(x, place, load(f32x16, x, place) + s3 * factor)
    for row in range(n - n % ROWS, n):
        for strip in range(columns // LANES):
            begin = 4 * strip * rank * LANES
            s0 = splat(f32x16, load(types.float32, b, 4 * row * rank)) * load(f32x16, a, begin)
            for k in range(1, rank):
                s0 = s0 + splat(f32x16, load(types.float32, b, 4 * (row * rank + k))) * load(
                    f32x16, a, begin + 4 * k * LANES
                )
            place = 4 * (row * columns + strip * LANES)
            store(x, place, load(f32x16, x, place) + s0 * factor)
    last = columns // LANES
    for row in range(n):
        for column in range(last * LANES, columns):
            total = b[row, 0] * a[last, 0, column - last * LANES]
            for k in range(1, rank):
                total += b[row, k] * a[last, k, column - last * LANES]
            x[row, column] += total * scale

"""Products of two factors, B @ A, added to rows of float32: a LoRA adapter merged into a weight."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import kernel
from quantkit.kernels.cpu.core.simd import f32x16, load, muladd, splat, store

F32 = npt.NDArray[np.float32]

LANES = 16
#: Number of rows computed at once, which share the loads of A.
ROWS = 4
#: The longest sum that sgemm computes at once.
_BLOCK = 192


def strips(a: F32) -> F32:
    """Return A, [rank, columns], as ``add_low_rank`` reads it: [strips of 16 columns, rank, 16], filled up with 0."""
    rank, columns = a.shape
    n = -(-columns // LANES)
    padded = np.zeros((rank, n * LANES), np.float32)
    padded[:, :columns] = a
    return np.ascontiguousarray(padded.reshape(rank, n, LANES).transpose(1, 0, 2))


def block_size(terms: int) -> int:
    """Return the number of terms that sgemm of oneMKL 2024 sums at once, in a product with sums of ``terms``.

    Source: torch 2.13 on an AMD EPYC: such parts reproduce its products of 1 to 2048 terms.
    """
    return -(-terms // 2) if _BLOCK < terms <= 2 * _BLOCK else _BLOCK


def add_low_rank(x: F32, a: F32, b: F32, scale: np.float32) -> None:
    """Add B @ A * scale to x, in the order of sums of oneMKL's sgemm, and so of torch and PEFT.

    Each value is computed separately: a chain of fused multiply-adds over the rank (over each block of it, if it is
    longer than 192), then times the scale, then added. So results depend neither on the rows of a call nor on the CPU,
    if it has FMA.

    Args:
        x: [rows, columns]
        a: A as ``strips`` returns it.
        b: [rows, rank]
        scale: float32
    """
    _add_low_rank(x, a, b, scale, block_size(b.shape[1]))


@kernel
def _add_low_rank(x: F32, a: F32, b: F32, scale: np.float32, step: int) -> None:
    n, columns = x.shape
    rank = b.shape[1]
    factor = splat(f32x16, scale)
    last = columns // LANES
    line = np.empty(LANES, np.float32)
    for first in range(0, n - ROWS + 1, ROWS):
        offset = 4 * first * rank
        for strip in range(last):
            begin = 4 * strip * rank * LANES
            t0 = splat(f32x16, np.float32(0))
            t1 = splat(f32x16, np.float32(0))
            t2 = splat(f32x16, np.float32(0))
            t3 = splat(f32x16, np.float32(0))
            for block in range(0, rank, step):
                s0 = splat(f32x16, np.float32(0))
                s1 = splat(f32x16, np.float32(0))
                s2 = splat(f32x16, np.float32(0))
                s3 = splat(f32x16, np.float32(0))
                for k in range(block, min(block + step, rank)):
                    v = load(f32x16, a, begin + 4 * k * LANES)
                    s0 = muladd(v, load(types.float32, b, offset + 4 * k), s0)
                    s1 = muladd(v, load(types.float32, b, offset + 4 * (rank + k)), s1)
                    s2 = muladd(v, load(types.float32, b, offset + 4 * (2 * rank + k)), s2)
                    s3 = muladd(v, load(types.float32, b, offset + 4 * (3 * rank + k)), s3)
                t0 = t0 + s0
                t1 = t1 + s1
                t2 = t2 + s2
                t3 = t3 + s3
            place = 4 * (first * columns + strip * LANES)
            store(x, place, load(f32x16, x, place) + t0 * factor)
            place += 4 * columns
            store(x, place, load(f32x16, x, place) + t1 * factor)
            place += 4 * columns
            store(x, place, load(f32x16, x, place) + t2 * factor)
            place += 4 * columns
            store(x, place, load(f32x16, x, place) + t3 * factor)
    # Rows after the last four, and of all rows the columns after the last strip.
    for row in range(n):
        for strip in range(last if row < n - n % ROWS else 0, -(-columns // LANES)):
            begin = 4 * strip * rank * LANES
            t0 = splat(f32x16, np.float32(0))
            for block in range(0, rank, step):
                s0 = splat(f32x16, np.float32(0))
                for k in range(block, min(block + step, rank)):
                    v = load(f32x16, a, begin + 4 * k * LANES)
                    s0 = muladd(v, load(types.float32, b, 4 * (row * rank + k)), s0)
                t0 = t0 + s0
            store(line, 0, t0 * factor)
            for i in range(min(LANES, columns - strip * LANES)):
                x[row, strip * LANES + i] += line[i]

"""F32, F16 and BF16: plain floats, one value per block.

F16 is IEEE half precision (1 sign, 5 exponent, 10 mantissa bits), BF16 the upper 16 bits of an f32 (1, 8, 7).
Both round to nearest, ties to even, and keep denormals; F16 overflows to infinity from 65520 on. A NaN becomes ggml's:
0x7E00 with the sign in F16, the quieted upper half in BF16. The importance matrix is ignored.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import kernel
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    f32_to_f16,
    f32x16,
    load,
    prefetch_l2,
    select,
    store,
    store_f16,
    transpose16_apart,
    u16x16,
    u32x16,
)
from quantkit.kernels.cpu.encode.batch import aligned_scratch

U = np.uint32
Rows = npt.NDArray[np.float32]


@kernel
def encode_f32(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Copy rows row0..row1 of x."""
    start, count = row0 * x.shape[1], (row1 - row0) * x.shape[1]
    for i in range(0, count - 15, 16):
        store(out, 4 * (start + i), load(u32x16, x, 4 * (start + i)))
    for i in range(count & ~15, count):
        store(out, 4 * (start + i), load(types.uint32, x, 4 * (start + i)))


@kernel
def encode_f16(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Round rows row0..row1 of x to half floats (llama.cpp b11434 ggml_fp32_to_fp16_row)."""
    start, count = row0 * x.shape[1], (row1 - row0) * x.shape[1]
    for i in range(0, count - 15, 16):
        v = load(f32x16, x, 4 * (start + i))
        quiet = cast(f32x16, (cast(u32x16, v) & U(0x80000000)) | U(0x7FC00000))
        store_f16(out, 2 * (start + i), select(v == v, v, quiet))
    for i in range(count & ~15, count):
        bits = load(types.uint32, x, 4 * (start + i))
        half = f32_to_f16(load(types.float32, x, 4 * (start + i)))
        if (bits & U(0x7FFFFFFF)) > U(0x7F800000):
            half = np.uint16((bits >> U(16)) & U(0x8000) | U(0x7E00))
        store(out, 2 * (start + i), half)


@kernel
def encode_bf16(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Round rows row0..row1 of x to bfloat16 (llama.cpp b11434 ggml_compute_fp32_to_bf16)."""
    start, count = row0 * x.shape[1], (row1 - row0) * x.shape[1]
    for i in range(0, count - 15, 16):
        v = load(u32x16, x, 4 * (start + i))
        rounded = (v + ((v >> U(16)) & U(1)) + U(0x7FFF)) >> U(16)
        nan = (v & U(0x7FFFFFFF)) > U(0x7F800000)
        store(out, 2 * (start + i), convert(u16x16, select(nan, (v >> U(16)) | U(64), rounded)))
    for i in range(count & ~15, count):
        bits = load(types.uint32, x, 4 * (start + i))
        rounded = (bits + ((bits >> U(16)) & U(1)) + U(0x7FFF)) >> U(16)
        if (bits & U(0x7FFFFFFF)) > U(0x7F800000):
            rounded = (bits >> U(16)) | U(64)
        store(out, 2 * (start + i), np.uint16(rounded))


@kernel
def cut_bf16_r16(x: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Write the upper halves of rows row0..row1 of x, whole groups of 16 of n values, a multiple of 32, as BF16_R16.

    A group has for each two columns those of every row, one after the other (ik_llama.cpp 8337e4cd3
    repack_f32_bf16_r16).
    """
    n = x.shape[1]
    tile = aligned_scratch(16 * 64)
    for group in range(row0, row1, 16):
        for column in range(0, n, 32):
            for row in range(16):
                offset = 4 * (n * (group + row) + column)
                prefetch_l2(x, offset + 1024)  # 16 rows are more streams than the hardware prefetches
                prefetch_l2(x, offset + 1088)
                store(tile, 64 * row, convert(u16x16, load(u32x16, x, offset) >> U(16)))
                store(tile, 64 * row + 32, convert(u16x16, load(u32x16, x, offset + 64) >> U(16)))
            transpose16_apart(tile, 0, 64, out, 2 * n * group + 32 * column, 64)

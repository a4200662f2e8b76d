"""Q1_0: one bit a weight, its sign, times one scale per block.

Bytes of a block of 128 values: f16 d = mean of |x|, u8 qs[16]; bit j % 8 of byte j / 8 is set where x[j] >= 0
(both zeros count as positive). x = d or -d.

The mean is a sum in order, so one lane holds one block and 16 are summed at once.

Source: llama.cpp b11434 ggml-quants.c, quantize_row_q1_0_ref.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.encode.groups import address, copy
from quantkit.kernels.cpu.jit import inline, kernel
from quantkit.kernels.cpu.simd import (
    f32_to_f16,
    f32x16,
    load,
    mask_bits,
    splat,
    store,
    transpose16,
    vabs,
)

F = np.float32


@inline
def _mean_magnitudes(x, xt, target):
    """Write the mean |x| of 16 blocks at address x, each summed in order."""
    total = splat(f32x16, F(0))
    for part in range(8):
        transpose16(x, 64 * part, 512, xt, 0)
        for j in range(16):
            total = total + vabs(load(f32x16, xt, 64 * j))
    store(target, 0, total / F(128))


@kernel
def encode_q1_0(
    x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int
) -> None:
    """Encode rows row0..row1 of x [rows, n], n a multiple of 128, as Q1_0; weights are ignored.

    Source: llama.cpp b11434 ggml-quants.c quantize_row_q1_0_ref.
    """
    per_row = x.shape[1] // 128
    xt, d, group = np.empty(256, np.float32), np.empty(16, np.float32), np.zeros(2048, np.float32)
    last = row1 * per_row
    for first in range(row0 * per_row, last, 16):
        count = min(16, last - first)
        # Streamed into L1 first: the strided reads below hide the stream from the prefetcher.
        source = address(group)  # taken here: numba frees an array after its last use
        copy(address(x) + 512 * first, source, 512 * count)
        _mean_magnitudes(source, xt, d)
        for b in range(count):
            o = 18 * (first + b)
            store(out, o, f32_to_f16(d[b]))
            for part in range(8):
                signs = mask_bits(load(f32x16, source, 512 * b + 64 * part) >= F(0))
                store(out, o + 2 + 2 * part, np.uint16(signs))

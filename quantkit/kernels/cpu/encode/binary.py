"""Q1_0: one bit per weight, its sign, times one scale per block.

Bytes of a block of 128 values: f16 d = mean of |x|, u8 qs[16]; bit j % 8 of byte j / 8 is set where x[j] >= 0
(both zeros count as positive). x = d or -d.

The mean is summed in order, so each lane holds a block and 16 are summed at once.

Source: llama.cpp b11434 ggml-quants.c, quantize_row_q1_0_ref.
"""

from __future__ import annotations

import numpy as np

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32_to_f16, f32x16, load, mask_bits, splat, store, transpose16, vabs
from quantkit.kernels.cpu.encode.batch import blocks_encoder

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


@inline
def _encode_16(s, x, weights, out, count):
    """Encode 16 blocks at address x; store ``count``. Source: llama.cpp b11434 ggml-quants.c quantize_row_q1_0_ref."""
    d = s[256:]
    _mean_magnitudes(x, s, d)
    for b in range(count):
        store(out, 18 * b, f32_to_f16(d[b]))
        for part in range(8):
            signs = mask_bits(load(f32x16, x, 512 * b + 64 * part) >= F(0))
            store(out, 18 * b + 2 + 2 * part, np.uint16(signs))


encode_q1_0 = blocks_encoder("Q1_0", _encode_16, 16, 4 * 272, gathered=True)

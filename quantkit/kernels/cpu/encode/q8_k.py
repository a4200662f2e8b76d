"""Q8_K_R8 and Q8_K_R16: rows encoded as activations are, Q8_K, and woven together; no file holds single rows of it.

A group of 8 or 16 rows has, for each 256 values, an f16 d of each row, then 64 times a dword (4 levels, i8) of each
row; x = d * q. Q8_K_R16 stores levels with an offset of 128.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, iqk_quantize_row_q8_K and repack_q8_k.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import kernel
from quantkit.kernels.cpu.core.simd import (
    convert,
    f32x16,
    hmax,
    i8x16,
    load,
    prefetch_l2,
    splat,
    store,
    store_f16,
    transpose16_apart,
    u32x16,
    vabs,
    vmax,
    vmin,
)
from quantkit.kernels.cpu.encode.search import round_as_cvtps2dq

F, I32 = np.float32, np.int32


@kernel
def encode_woven_q8_k(
    x: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int, rows: int, flipped: np.uint32
) -> None:
    """Encode rows row0..row1 of x, whole groups of 8 or 16 ``rows``, without importance; ``flipped``: XORed to levels.

    The largest magnitude becomes 127; where 127 divided by it overflows, levels are -128, and the scale is 0.
    """
    n, width = x.shape[1], 4 * rows
    # Of 8 rows each dword's line has 8 more, which the next line, or nothing, takes the place of.
    levels, lines = np.zeros(16 * 256, np.uint8), np.empty(64 * 64 + 64, np.uint8)
    tops, halves = np.zeros(16, np.float32), np.empty(32, np.uint8)
    mask = splat(u32x16, flipped)
    for group in range(row0, row1, rows):
        for block in range(n // 256):
            to = out.shape[1] * group + 258 * rows * block
            for row in range(rows):
                source = 4 * (n * (group + row) + 256 * block)
                ahead = source + 1024 if block + 1 < n // 256 else source + 4 * n * rows - 4 * 256 * block
                most = vabs(load(f32x16, x, source))
                for i in range(1, 16):
                    most = vmax(most, vabs(load(f32x16, x, source + 64 * i)))
                top = hmax(most)
                tops[row] = top
                inverse = F(127) / top if top > F(0) else F(0)
                for i in range(16):
                    prefetch_l2(x, ahead + 64 * i)  # 8 or 16 rows are more streams than the hardware prefetches
                    q = round_as_cvtps2dq(load(f32x16, x, source + 64 * i) * inverse)
                    store(levels, 256 * row + 16 * i, convert(i8x16, vmax(vmin(q, I32(127)), I32(-128))))
            store_f16(halves, 0, load(f32x16, tops, 0) / F(127))
            for i in range(2 * rows):
                store(out, to + i, halves[i])
            for i in range(4):
                transpose16_apart(levels, 64 * i, 256, lines, 16 * i * width, width)
            for i in range(width):
                store(out, to + 2 * rows + 64 * i, load(u32x16, lines, 64 * i) ^ mask)

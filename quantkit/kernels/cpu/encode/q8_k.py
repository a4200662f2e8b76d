"""Q8_K_R8, Q8_K_R16 and Q8_KV_R8: rows encoded as activations are, Q8_K or Q8_KV, and interleaved at once.

No file holds single rows of Q8_K. A group of 8 or 16 rows has, for each 256 values, an f16 d of each row, then 64 times
a dword (4 levels, i8) of each row; x = d * q. Q8_K_R16 stores levels with an offset of 128. A group of Q8_KV_R8 begins
with the f32 d of its 8 rows, and all dwords follow.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, iqk_quantize_row_q8_K, iqk_quantize_row_q8_KV and repack_q8_k,
repack_q8_KV.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import inline, kernel
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

#: Bytes of 256 values of 16 rows. With 8 rows, each line of dwords writes 8 more, which the next line or the padding at
#: the end absorbs.
LINES = 64 * 64 + 64


@inline
def _over(x: Any, y: Any, top: Any) -> Any:
    """Return x / y, 0 for values of 0; where it is infinite, levels become -128."""
    return x / y if top > F(0) else F(0)


@inline
def _encode(x: Any, source: Any, count: Any, inverse: Any, levels: Any, levels_at: Any, prefetch_at: Any) -> None:
    """Write the levels of ``count`` values, and fetch as many of ``prefetch_at``.

    Hardware prefetches fewer streams than 8 or 16 rows are.
    """
    for i in range(0, count, 16):
        prefetch_l2(x, prefetch_at + 4 * i)
        q = round_as_cvtps2dq(load(f32x16, x, source + 4 * i) * inverse)
        store(levels, levels_at + i, convert(i8x16, vmax(vmin(q, I32(127)), I32(-128))))


@inline
def _interleave(levels: Any, count: Any, rows: Any, lines: Any, out: Any, out_at: Any, mask: Any) -> None:
    """Write the levels of ``count`` values of each of 8 or 16 rows, 256 bytes apart, dword by dword."""
    width = 4 * rows
    for i in range((count + 63) // 64):
        transpose16_apart(levels, 64 * i, 256, lines, 16 * i * width, width)
    for i in range(count * rows // 64):
        store(out, out_at + 64 * i, load(u32x16, lines, 64 * i) ^ mask)


@inline
def _magnitude(x: Any, source: Any, count: Any) -> Any:
    most = vabs(load(f32x16, x, source))
    for i in range(16, count, 16):
        most = vmax(most, vabs(load(f32x16, x, source + 4 * i)))
    return hmax(most)


@kernel
def encode_interleaved_q8_k(
    x: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int, rows: int, flipped: np.uint32
) -> None:
    """Encode rows row0..row1 of x, whole groups of 8 or 16 ``rows``, without importance; ``flipped``: XORed to levels.

    The largest magnitude becomes 127; where 127 divided by it overflows, levels are -128, and the scale is 0.
    """
    n = x.shape[1]
    levels, lines = np.zeros(16 * 256, np.uint8), np.empty(LINES, np.uint8)
    tops, halves = np.zeros(16, np.float32), np.empty(32, np.uint8)
    for group in range(row0, row1, rows):
        for block in range(n // 256):
            out_at = out.shape[1] * group + 258 * rows * block
            for row in range(rows):
                source = 4 * (n * (group + row) + 256 * block)
                prefetch_at = source + 1024 if block + 1 < n // 256 else source + 4 * n * rows - 4 * 256 * block
                tops[row] = _magnitude(x, source, 256)
                _encode(x, source, 256, _over(F(127), tops[row], tops[row]), levels, 256 * row, prefetch_at)
            store_f16(halves, 0, load(f32x16, tops, 0) / F(127))
            for i in range(2 * rows):
                store(out, out_at + i, halves[i])
            _interleave(levels, 256, rows, lines, out, out_at + 2 * rows, splat(u32x16, flipped))


@kernel
def encode_interleaved_q8_kv(x: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x, whole groups of 8 of n values, a multiple of 32, as Q8_KV_R8; see encode_q8_kv."""
    n = x.shape[1]
    levels, lines = np.zeros(16 * 256, np.uint8), np.empty(LINES, np.uint8)
    inverses = np.empty(8, np.float32)
    for group in range(row0, row1, 8):
        source, out_at = 4 * n * group, out.shape[1] * group
        for row in range(8):
            top = _magnitude(x, source + 4 * n * row, n)
            store(out, out_at + 4 * row, top / F(127))
            inverses[row] = _over(F(1), top / F(127), top)
        for column in range(0, n, 256):
            count = min(256, n - column)
            for row in range(8):
                source_at = source + 4 * (n * row + column)
                _encode(x, source_at, count, inverses[row], levels, 256 * row, source_at + 4 * n * 8)
            _interleave(levels, count, 8, lines, out, out_at + 32 + 8 * column, splat(u32x16, np.uint32(0)))

"""Rows of IQ1_S_R4 and IQ1_M_R4: the grid and searches of IQ1_S and IQ1_M, with scales that are multiples of the row's.

Bytes of a block of 32 values: quantkit/kernels/cpu/unpack/i_quants.py. Sub-blocks are 32 values, in IQ1_M_R4 16.
Weights are importance * sqrt(a + x^2), where a is 1.5 times the mean square of 32 values; where an importance leaves
zero weight, there is none. d follows from the largest scale of the row; the others become multiples of it.

Sub-blocks of zeros become the point of zeros and shift up; ik's shifts of halves of a block are in interleaved.py.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp quantize_iq1_s_r4, quantize_iq1_m_r4; ggml-quants.c iq1s_process_1block,
iq1m_process_1block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import inline, kernel, specialize
from quantkit.kernels.cpu.core.simd import f32_to_f16, load, nearest_int, splat, store, vabs, vsqrt
from quantkit.kernels.cpu.core.simd import select as choose
from quantkit.kernels.cpu.encode import Encoder
from quantkit.kernels.cpu.encode.batch import address, aligned_scratch, copy, load_group
from quantkit.kernels.cpu.encode.grid_quants import BEST_SIGNS, BEST_WORDS, SCALES, index_of
from quantkit.kernels.cpu.encode.grid_refined import fit_half_loaded
from quantkit.kernels.cpu.encode.grid_search import W, X
from quantkit.kernels.cpu.encode.grid_ternary import SCRATCH, fit_loaded
from quantkit.kernels.cpu.encode.search import LANES, STEP, WIDE, WIDE_INT, F
from quantkit.types import BY_NAME

#: Sums of squares, and of w |x|, below this count as 0.
NOTHING = F(1e-14)
#: The word of the point whose values are 0.
ZEROS = 0x5555

# Scratch after that of the search: values and importances of a batch at the end of a row; the limit of each lane from
# which a sum counts; sums of squares of 32 values.
VALUES, IMPORTANCES = SCRATCH, SCRATCH + 128 * LANES
LIMITS, SQUARES = IMPORTANCES + 128 * LANES, IMPORTANCES + 128 * LANES + STEP
END = SQUARES + STEP

# ---------------------------------------------------------------- a batch of sub-blocks


@inline
def _sum_of_squares(s: Any, n: Any) -> Any:
    total = splat(WIDE, F(0))
    for offset in range(0, n * STEP, STEP):
        v = load(WIDE, s, X + offset)
        total = total + v * v
    return total


@inline
def _store_weights(s: Any, w: Any, n: Any, squares: Any, limit: Any) -> None:
    """Store the weights of LANES sub-blocks; without importance where sum(w |x|) is below ``limit``."""
    sigma = F(1.5) * squares / F(32)
    if w:
        load_group(w, 0, n, s, W)
    total = splat(WIDE, F(0))
    for offset in range(0, n * STEP, STEP):
        x = load(WIDE, s, X + offset)
        weight = vsqrt(sigma + x * x)
        if w:
            weight = load(WIDE, s, W + offset) * weight
            total = total + weight * vabs(x)
        store(s, W + offset, weight)
    if w:
        nothing = total < limit
        for offset in range(0, n * STEP, STEP):
            x = load(WIDE, s, X + offset)
            store(s, W + offset, choose(nothing, vsqrt(sigma + x * x), load(WIDE, s, W + offset)))


@inline
def _zero(s: Any, dead: Any, groups: Any) -> None:
    """Make lanes the point of zeros, with scale 0 and shifted up."""
    store(s, SCALES, choose(dead, F(0), load(WIDE, s, SCALES)))
    store(s, BEST_SIGNS, choose(dead, 0, load(WIDE_INT, s, BEST_SIGNS)))
    for k in range(0, groups * 16 * STEP, 16 * STEP):
        store(s, BEST_WORDS + k, choose(dead, ZEROS, load(WIDE_INT, s, BEST_WORDS + k)))


@inline
def fit_blocks(s: Any, x: Any, w: Any, lists: Any) -> None:
    """Search LANES sub-blocks of 32."""
    load_group(x, 0, 32, s, X)
    squares = _sum_of_squares(s, 32)
    _store_weights(s, w, 32, squares, NOTHING)
    fit_loaded(s, lists, 0, 32)
    _zero(s, squares < NOTHING, 4)


@inline
def fit_halves(s: Any, x: Any, w: Any, lists: Any) -> None:
    """Search LANES sub-blocks of 16, of which two are 32 values."""
    load_group(x, 0, 16, s, X)
    of_half = _sum_of_squares(s, 16)
    store(s, SQUARES, of_half)
    for offset in range(0, STEP, 8):
        both = load(types.float32, s, SQUARES + offset) + load(types.float32, s, SQUARES + offset + 4)
        store(s, SQUARES + offset, both)
        store(s, SQUARES + offset + 4, both)
        # ik compares the second sum with a double, which is a bit larger.
        store(s, LIMITS + offset, NOTHING)
        store(s, LIMITS + offset + 4, np.nextafter(NOTHING, F(1)))
    squares = load(WIDE, s, SQUARES)
    _store_weights(s, w, 16, squares, load(WIDE, s, LIMITS))
    fit_half_loaded(s, lists, 0, F(0))
    alive = choose(squares < NOTHING, F(0), of_half) > NOTHING
    _zero(s, choose(alive, 0, splat(WIDE_INT, 1)) != 0, 2)


# ---------------------------------------------------------------- bytes


@inline
def store_block(s: Any, lists: Any, b: Any, out: Any) -> None:
    """Store block b of IQ1_S_ROW without its scale."""
    high = 0
    for k in range(4):
        index = index_of(s, lists, 4 * b, k)
        store(out, k, np.uint8(index))
        high |= index >> 8 << 3 * k
    down = load(types.uint32, s, BEST_SIGNS + 4 * b) != 0
    store(out, 4, np.uint16(high | (0x8000 if down else 0)))


@inline
def store_halves(s: Any, lists: Any, b: Any, out: Any) -> None:
    """Store block b of IQ1_M_ROW without its scales."""
    for half in range(2):
        offset = 4 * (2 * b + half)
        i0, i1 = index_of(s, lists, offset, 0), index_of(s, lists, offset, 1)
        shifts = np.int64(load(types.int32, s, BEST_SIGNS + offset))
        store(out, 2 * half, np.uint16((i0 & 255) | (i1 & 255) << 8))
        store(out, 4 + half, np.uint8(i0 >> 8 | i1 >> 8 << 4 | (shifts & 2) << 2 | (shifts & 1) << 7))


@inline
def store_scale(scales: Any, b: Any, inverse: Any, out: Any) -> None:
    """Add the scale, an odd multiple of d, to block b of IQ1_S_ROW."""
    code = nearest_int(F(0.5) * (load(types.float32, scales, 4 * b) * inverse - F(1)))
    high = np.int64(load(types.uint16, out, 4))
    store(out, 4, np.uint16(high | np.int64(max(0, min(7, code))) << 12))


@inline
def store_scales(scales: Any, b: Any, inverse: Any, out: Any) -> None:
    """Store the scales, multiples of d, of block b of IQ1_M_ROW."""
    low = nearest_int(load(types.float32, scales, 8 * b) * inverse)
    high = nearest_int(load(types.float32, scales, 8 * b + 4) * inverse)
    store(out, 6, np.uint8(max(0, min(15, low)) | max(0, min(15, high)) << 4))


# ---------------------------------------------------------------- rows

#: Bindings: see ``grid_rows_encoder``.
fit: Any = None
store_found: Any = None
store_codes: Any = None
halves = block_bytes = 0


@inline
def _pad(row: Any, first: Any, count: Any, buffer: Any) -> Any:
    """Return the address of a batch: at a row's end, of a copy in ``buffer``, where LANES sub-blocks may be read."""
    if count * halves == LANES:
        return row + 128 * first
    copy(row + 128 * first, buffer, 128 * count)
    return buffer


def _encode_row(s: Any, x: Any, w: Any, n: Any, out: Any, scales: Any, lists: Any) -> None:
    """Encode n values at address ``x``; w: the address of importances, or 0; scales: scratch for those of a row."""
    blocks = n // 32
    top = F(0)
    for first in range(0, blocks, LANES // halves):
        count = min(LANES // halves, blocks - first)
        weights = _pad(w, first, count, s + IMPORTANCES) if w else 0
        fit(s, _pad(x, first, count, s + VALUES), weights, lists)
        for b in range(count):
            store_found(s, lists, b, out + 2 + block_bytes * (first + b))
        for i in range(0, 4 * halves * count, 4):
            scale = load(types.float32, s, SCALES + i)
            store(scales, 4 * halves * first + i, scale)
            top = max(top, scale)
    store(out, 0, f32_to_f16(F(1.0625) * top / F(15)))
    inverse = F(15) / top if top > F(0) else F(0)
    for b in range(blocks):
        store_codes(scales, b, inverse, out + 2 + block_bytes * b)


encode_row: Any = None


def _encode_rows(x: Any, weights: Any, out: Any, row0: int, row1: int, *lists: Any) -> None:
    """Encode rows row0..row1 of x [rows, n], n a multiple of 32; weights [n] or empty."""
    n = x.shape[1]
    scratch, scales = aligned_scratch(END), np.empty(n // 16, np.float32)
    scratch[:] = F(0)
    for row in range(row0, row1):
        # Addresses are taken here: numba frees an array after its last use.
        w = address(weights) if weights.size else 0
        source, target = address(x) + 4 * n * row, address(out) + out.shape[1] * row
        encode_row(address(scratch), source, w, n, target, address(scales), lists)


def grid_rows_encoder(name: str, fit: Any, store_found: Any, store_codes: Any, tables: Callable[[], Any]) -> Encoder:
    """Return the encoder of a type.

    fit(s, x, w, lists): the search of LANES sub-blocks. store_found(s, lists, b, out): the bytes of a block of them but
    for scales; store_codes(scales, b, inverse, out): these. tables: returns lists of neighbours.
    """
    key, halves = name.lower(), 2 if fit is fit_halves else 1
    bound = {"fit": fit, "store_found": store_found, "store_codes": store_codes, "halves": halves}
    row = specialize(_encode_row, key, **bound, block_bytes=BY_NAME[name].block_bytes)
    compiled = specialize(_encode_rows, key, kernel, encode_row=row)

    def encode(x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
        compiled(x, weights, out, row0, row1, *tables())

    return encode

"""Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, Q8_0: 32 values a block, one scale, perhaps one minimum; Q1_0; Q8_KV: a scale per row.

Bytes of a block (f16 d, f16 m, u32 qh: bit 4 of value j in bit j, u8 qs: value j in a low, j + 16 in a high nibble)::

    Q4_0  d       qs[16]   x = d * (q - 8)          Q8_0  d  i8 q[32]   x = d * q
    Q4_1  d m     qs[16]   x = d * q + m
    Q5_0  d    qh qs[16]   x = d * (q - 16)
    Q5_1  d m  qh qs[16]   x = d * q + m
    Q6_0  d    qh qs[16]   x = d * (q - 32); u8 qh[8]: two bits each of values j, j + 16, j + 8, j + 24

Q1_0 has 128 values a block: f16 d = mean of |x|, u8 qs[16]; bit j % 8 of byte j / 8 is set where x[j] >= 0 (both zeros
count as positive). x = d or -d. The mean is summed in order, so each lane holds a block and 16 are summed at once.

Without an importance matrix a block is scaled by its extreme values: _0 by the value of largest magnitude (the first
of equals, its sign decides which way the odd level lies), _1 by minimum and maximum. With one, weights
importance * sqrt(mean x^2 of the row + x^2) steer a search over scales (search.py): make_qx_quants for _0,
make_qkx3_quants for _1, many blocks side by side, one per lane.

Source: llama.cpp b11434 ggml-quants.c, quantize_row_q*_ref and quantize_row_q*_impl.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline, kernel, specialize
from quantkit.kernels.cpu.core.simd import (
    VecType,
    any_lane,
    cast,
    convert,
    extract,
    f32_to_f16,
    f32x16,
    hmax,
    hsum,
    i8x16,
    i32x16,
    load,
    mask_bits,
    nearest_int,
    prefetch_l2,
    round_away,
    row_extremes,
    select,
    splat,
    store,
    store_f16,
    transpose16,
    transpose16_apart,
    u8x16,
    vabs,
    vmax,
    vmin,
    vsqrt,
)
from quantkit.kernels.cpu.encode.batch import blocks_encoder
from quantkit.kernels.cpu.encode.search import LANES, STEP, fit_signed, fit_with_min, round_as_cvtps2dq, search_levels
from quantkit.kernels.cpu.encode.search_refined import fit_signed_refined, fit_with_min_refined

F = np.float32
I32 = np.int32
U64 = np.uint64
_u64x2 = VecType(types.uint64, 2)
Rows = npt.NDArray[np.float32]

# Byte offsets into the scratch of one call. The search: [32][LANES] f32 each, element i of all blocks side by side,
# and [LANES][32] f32, the weights of each block before they are transposed.
X = 0
W = 32 * STEP
LEVELS = 64 * STEP
ROWS = 96 * STEP
# [LANES] f32 each: the results for each block.
SCALE = 128 * STEP
LOW = 129 * STEP
INVERSE = 130 * STEP
BASE = 131 * STEP
SCRATCH = 132 * STEP


@inline
def _store_levels(out: Any, o: Any, q0: Any, q1: Any, high_bits: Any) -> Any:
    """Store the bits of 32 levels above the fourth, where a type has them, then their nibbles."""
    if high_bits == 2:  # 4 bits for levels j and j + 16; byte j has them, and 4 bits for j + 8
        high = cast(_u64x2, convert(u8x16, (q0 >> I32(4)) | ((q1 >> I32(4)) << I32(2))))
        store(out, o, extract(high, 0) | (extract(high, 1) << U64(4)))
        o += 8
        q0, q1 = q0 & I32(15), q1 & I32(15)
    if high_bits == 1:
        store(out, o, np.uint32(mask_bits(q0 > I32(15)) | (mask_bits(q1 > I32(15)) << U64(16))))
        o += 4
        q0, q1 = q0 & I32(15), q1 & I32(15)
    store(out, o, convert(u8x16, q0 | (q1 << I32(4))))


@inline
def _copy_f16(s: Any, offset: Any, out: Any, o: Any) -> Any:
    store(out, o, load(types.uint16, s, offset))


# ---------------------------------------------------------------- without an importance matrix: 16 blocks at a time


@inline
def _extremes(x: Any, s: Any, first: Any, end: Any) -> Any:
    """Return minima and maxima of blocks first .. first + 15, one per lane; of blocks past ``end``, 0."""
    source = x.ctypes.data + 128 * first
    if end - first < 16:
        for i in range(0, 2048, 64):
            in_range = i < 128 * (end - first)
            store(s, X + i, load(f32x16, source, i) if in_range else splat(f32x16, F(0)))
        source = s.ctypes.data + X
    return row_extremes(source, 0, 128)


@inline
def _bits(x: Any, block: Any) -> Any:
    """Return the sign bits of the 32 values of a block (set for -0), and the block's two vectors."""
    x0, x1 = load(f32x16, x, 128 * block), load(f32x16, x, 128 * block + 64)
    low, high = mask_bits(cast(i32x16, x0) < I32(0)), mask_bits(cast(i32x16, x1) < I32(0))
    return low | (high << U64(16)), x0, x1


@inline
def _first(x0: Any, x1: Any, value: Any) -> Any:
    """Return the bit of the first of 32 values whose magnitude is ``value``."""
    hits = mask_bits(vabs(x0) == value) | (mask_bits(vabs(x1) == value) << U64(16))
    return hits & (~hits + U64(1))


@inline
def _invert(s: Any, d: Any, middle: Any) -> Any:
    """Store 1 / d, 0 for d = 0, and the offset of a value before it is cut to an integer.

    A d too small to invert: in C every value becomes infinity or NaN, whose conversion to an integer is 0. Both
    numbers are 0 then.
    """
    inverse = F(1) / d
    store(s, INVERSE, select(vabs(inverse) < F(np.inf), inverse, F(0)))
    store(s, BASE, select((d == F(0)) | (vabs(inverse) < F(np.inf)), splat(f32x16, middle), F(0)))


@inline
def _symmetric_scales(x: Any, s: Any, first: Any, end: Any, half: Any) -> Any:
    """Scale 16 blocks by their values of largest magnitude: d in SCALE as f16, then INVERSE and BASE."""
    low, high = _extremes(x, s, first, end)
    # + 0: a block of zeros has d = 0 / -half, regardless of their signs
    largest = select(high > -low, high, low) + F(0)
    tie = (high == -low) & (high > F(0))
    if any_lane(tie):
        store(s, BASE, largest)
        for lane in range(min(16, end - first)):
            if (mask_bits(tie) >> U64(lane)) & U64(1):
                value = abs(load(types.float32, s, BASE + 4 * lane))
                negative, x0, x1 = _bits(x, first + lane)
                store(s, BASE + 4 * lane, -value if negative & _first(x0, x1, value) else value)
        largest = load(f32x16, s, BASE)
    d = largest / F(-half)
    store_f16(s, SCALE, d)
    _invert(s, d, F(half) + F(0.5))


@inline
def _even_scales(x: Any, s: Any, first: Any, end: Any) -> Any:
    """Scale 16 blocks so that the largest magnitude is 7 or -7: d in SCALE as f16, then INVERSE and BASE."""
    low, high = _extremes(x, s, first, end)
    d = vmax(vabs(low), vabs(high)) / F(7)
    store_f16(s, SCALE, d)
    _invert(s, d, F(8.5))


@inline
def _affine_scales(x: Any, s: Any, first: Any, end: Any, top: Any) -> Any:
    """Scale 16 blocks from minimum to maximum: d and m in SCALE and LEVELS as f16, then LOW, INVERSE and BASE."""
    low, high = _extremes(x, s, first, end)
    zero = low == F(0)
    if any_lane(zero):  # the sign of the first zero is m's
        store(s, LOW, low)
        for lane in range(min(16, end - first)):
            if (mask_bits(zero) >> U64(lane)) & U64(1):
                negative, x0, x1 = _bits(x, first + lane)
                store(s, LOW + 4 * lane, F(-0.0) if negative & _first(x0, x1, F(0)) else F(0))
        low = load(f32x16, s, LOW)
    d = vabs(high - low) / F(top)  # never -0
    store_f16(s, SCALE, d)
    store_f16(s, LEVELS, low)
    _invert(s, d, F(0.5))
    # If the range overflows, 1 / d is 0, and infinity times 0 is NaN: level 0.
    store(s, LOW, select(d < F(np.inf), low, F(0)))


@inline
def _plain_symmetric(x: Any, out: Any, row0: Any, row1: Any, half: Any, even: Any = False) -> Any:
    """Encode rows as levels 0..2 * half - 1 around half (quantize_row_q4_0_ref, quantize_row_q5_0_ref).

    even: as many levels on both sides, so that the lowest is never used.
    """
    s = np.empty(SCRATCH, np.uint8)
    end, size = row1 * (x.shape[1] // 32), 18 if half == 8 else 22
    for first in range(row0 * (x.shape[1] // 32), end, 16):
        if even:
            _even_scales(x, s, first, end)
        else:
            _symmetric_scales(x, s, first, end, half)
        for lane in range(min(16, end - first)):
            offset, o = 128 * (first + lane), size * (first + lane)
            inverse = load(types.float32, s, INVERSE + 4 * lane)
            middle = load(types.float32, s, BASE + 4 * lane)
            q0 = vmin(convert(i32x16, load(f32x16, x, offset) * inverse + middle), 2 * half - 1)
            q1 = vmin(convert(i32x16, load(f32x16, x, offset + 64) * inverse + middle), 2 * half - 1)
            _copy_f16(s, SCALE + 2 * lane, out, o)
            _store_levels(out, o + 2, q0, q1, half // 16)


@inline
def _plain_affine(x: Any, out: Any, row0: Any, row1: Any, top: Any) -> Any:
    """Encode rows as levels 0..top from a minimum up (quantize_row_q4_1_ref, quantize_row_q5_1_ref)."""
    s = np.empty(SCRATCH, np.uint8)
    end, size = row1 * (x.shape[1] // 32), 20 if top == 15 else 24
    for first in range(row0 * (x.shape[1] // 32), end, 16):
        _affine_scales(x, s, first, end, top)
        for lane in range(min(16, end - first)):
            offset, o = 128 * (first + lane), size * (first + lane)
            low = load(types.float32, s, LOW + 4 * lane)
            inverse = load(types.float32, s, INVERSE + 4 * lane)
            half = load(types.float32, s, BASE + 4 * lane)
            q0 = vmin(convert(i32x16, (load(f32x16, x, offset) - low) * inverse + half), top)
            q1 = vmin(convert(i32x16, (load(f32x16, x, offset + 64) - low) * inverse + half), top)
            _copy_f16(s, SCALE + 2 * lane, out, o)
            _copy_f16(s, LEVELS + 2 * lane, out, o + 2)
            _store_levels(out, o + 4, q0, q1, top // 31)


# ---------------------------------------------------------------- with an importance matrix: one block per lane


@helper
def mean_squares(x: Any, row0: Any, row1: Any, out: Any, scratch: Any) -> Any:
    """Set out[r - row0] to the mean square of row r, summed from left to right; 16 rows side by side."""
    n = x.shape[1]
    row = row0
    while row1 - row >= 16:
        total = splat(f32x16, F(0))
        for i in range(0, n, 16):
            transpose16(x, 4 * (row * n + i), 4 * n, scratch, 0)
            for k in range(16):
                v = load(f32x16, scratch, 64 * k)
                total = total + v * v
        store(out, 4 * (row - row0), total / F(n))
        row += 16
    for r in range(row, row1):
        sum_x2 = F(0)
        for i in range(n):
            sum_x2 += x[r, i] * x[r, i]
        out[r - row0] = sum_x2 / F(n)


@inline
def _fill_lanes(x: Any, weights: Any, sigma2: Any, s: Any, first: Any, last: Any, row0: Any) -> Any:
    """Load blocks first .. first + LANES - 1 and their weights into X and W; past the end block ``last`` repeatedly.

    Without importances, weights are x^2 (Q6_0 alone).
    """
    per_row = x.shape[1] // 32
    for lane in range(LANES):
        block = min(first + lane, last)
        row = block // per_row
        spread = splat(f32x16, sigma2[row - row0])
        for half in range(0, 128, 64):
            v = load(f32x16, x, 128 * block + half)
            store(s, LEVELS + 128 * lane + half, v)
            if weights.size:
                w = load(f32x16, weights, 128 * (block - row * per_row) + half)
                store(s, ROWS + 128 * lane + half, w * vsqrt(spread + v * v))
            else:
                store(s, ROWS + 128 * lane + half, v * v)
    for lane in range(0, LANES, 16):
        for half in range(2):
            offset, target = 128 * lane + 64 * half, 16 * half * STEP + 4 * lane
            transpose16_apart(s, LEVELS + offset, 128, s, X + target, STEP)
            transpose16_apart(s, ROWS + offset, 128, s, W + target, STEP)


@inline
def _fit_symmetric(s: Any, half: Any) -> None:
    """Find the scales of LANES blocks."""
    scale, inverse = fit_signed(s, X, W, 32, half, True)
    store(s, SCALE, scale)
    store(s, INVERSE, inverse)


@inline
def _symmetric_levels(s: Any, x: Any, offset: Any, lane: Any, half: Any) -> Any:
    """Return the 32 levels of a block."""
    inverse = load(types.float32, s, INVERSE + 4 * lane)
    # Blocks that count as zero have an inverse of 0, and level 0 rather than the middle one.
    middle = I32(half) if inverse != F(0) else I32(0)
    q0 = vmin(vmax(nearest_int(load(f32x16, x, offset) * inverse), -half), half - 1) + middle
    q1 = vmin(vmax(nearest_int(load(f32x16, x, offset + 64) * inverse), -half), half - 1) + middle
    return q0, q1


@inline
def _fit_affine(s: Any, top: Any) -> None:
    """Find the scales and minima of LANES blocks."""
    scale, low, _, inverse, base = fit_with_min(s, X, W, LEVELS, 32, top, F(-0.9), F(0.05), 36, False, True)
    store(s, SCALE, scale)
    store(s, LOW, -low)
    store(s, INVERSE, inverse)
    store(s, BASE, base)


@inline
def _affine_levels(s: Any, x: Any, offset: Any, lane: Any, top: Any) -> Any:
    """Return the 32 levels of a block."""
    inverse = load(types.float32, s, INVERSE + 4 * lane)
    base = load(types.float32, s, BASE + 4 * lane)
    q0 = search_levels(load(f32x16, x, offset), inverse, base, top, True)
    q1 = search_levels(load(f32x16, x, offset + 64), inverse, base, top, True)
    return q0, q1


@inline
def _weighted_symmetric(x: Any, weights: Any, out: Any, row0: Any, row1: Any, half: Any) -> Any:
    """Encode rows as levels 0..2 * half - 1 around half (quantize_row_q4_0_impl, quantize_row_q5_0_impl)."""
    s, sigma2 = np.empty(SCRATCH, np.uint8), np.empty(row1 - row0, np.float32)
    mean_squares(x, row0, row1, sigma2, s)
    end, size = row1 * (x.shape[1] // 32), 18 if half == 8 else 22 if half == 16 else 26
    for first in range(row0 * (x.shape[1] // 32), end, LANES):
        _fill_lanes(x, weights, sigma2, s, first, end - 1, row0)
        _fit_symmetric(s, half)
        for lane in range(min(LANES, end - first)):
            offset, o = 128 * (first + lane), size * (first + lane)
            store(out, o, f32_to_f16(load(types.float32, s, SCALE + 4 * lane)))
            q0, q1 = _symmetric_levels(s, x, offset, lane, half)
            _store_levels(out, o + 2, q0, q1, half // 16)


@inline
def _weighted_affine(x: Any, weights: Any, out: Any, row0: Any, row1: Any, top: Any) -> Any:
    """Encode rows as levels 0..top from a minimum up (quantize_row_q4_1_impl, quantize_row_q5_1_impl)."""
    s, sigma2 = np.empty(SCRATCH, np.uint8), np.empty(row1 - row0, np.float32)
    mean_squares(x, row0, row1, sigma2, s)
    end, size = row1 * (x.shape[1] // 32), 20 if top == 15 else 24
    for first in range(row0 * (x.shape[1] // 32), end, LANES):
        _fill_lanes(x, weights, sigma2, s, first, end - 1, row0)
        _fit_affine(s, top)
        for lane in range(min(LANES, end - first)):
            offset, o = 128 * (first + lane), size * (first + lane)
            store(out, o, f32_to_f16(load(types.float32, s, SCALE + 4 * lane)))
            store(out, o + 2, f32_to_f16(load(types.float32, s, LOW + 4 * lane)))
            q0, q1 = _affine_levels(s, x, offset, lane, top)
            _store_levels(out, o + 4, q0, q1, top // 31)


# ---------------------------------------------------------------- the same in ik_llama.cpp


@inline
def _turn_levels(s: Any) -> None:
    """Rearrange the levels that a search left in LEVELS as [block][32] in ROWS."""
    for lane in range(0, LANES, 16):
        for half in range(2):
            transpose16_apart(s, LEVELS + 16 * half * STEP + 4 * lane, STEP, s, ROWS + 128 * lane + 64 * half, 128)


@inline
def _refine_symmetric(s: Any, half: Any) -> None:
    """_fit_symmetric with more candidates; the levels are in ROWS."""
    scale, _ = fit_signed_refined(s, X, W, LEVELS, 32, half)
    store(s, SCALE, scale)
    _turn_levels(s)


@inline
def _refine_affine(s: Any, top: Any) -> None:
    """_fit_affine with levels that move; they are in ROWS."""
    scale, low = fit_with_min_refined(s, X, W, LEVELS, 32, top)
    store(s, SCALE, scale)
    store(s, LOW, -low)
    _turn_levels(s)


@inline
def _levels_above(s: Any, lane: Any, middle: Any) -> Any:
    """Return the 32 levels of a block in ROWS, plus ``middle``."""
    q0, q1 = load(f32x16, s, ROWS + 128 * lane), load(f32x16, s, ROWS + 128 * lane + 64)
    return convert(i32x16, q0) + middle, convert(i32x16, q1) + middle


@inline
def _refined_symmetric(s: Any, x: Any, offset: Any, lane: Any, half: Any) -> Any:
    return _levels_above(s, lane, I32(half))


@inline
def _refined_affine(s: Any, x: Any, offset: Any, lane: Any, top: Any) -> Any:
    return _levels_above(s, lane, I32(0))


#: Bindings that differ in the kernels of ik_llama.cpp's encoders.
_SYMMETRIC = {
    "_weighted_symmetric": specialize(
        _weighted_symmetric, "ik", _fit_symmetric=_refine_symmetric, _symmetric_levels=_refined_symmetric
    )
}
_AFFINE = {
    "_weighted_affine": specialize(_weighted_affine, "ik", _fit_affine=_refine_affine, _affine_levels=_refined_affine)
}

_refined_q6_0 = _SYMMETRIC["_weighted_symmetric"]

# ---------------------------------------------------------------- the encoders


@kernel
def encode_q4_0(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x (quantize_row_q4_0_ref, quantize_row_q4_0_impl)."""
    if weights.size:
        _weighted_symmetric(x, weights, out, row0, row1, 8)
    else:
        _plain_symmetric(x, out, row0, row1, 8)


@kernel
def encode_q4_0_symmetric(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x; the importance matrix is ignored (ik_llama.cpp quantize_row_q4_0_symmetric)."""
    _plain_symmetric(x, out, row0, row1, 8, True)


@kernel
def encode_q4_1(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x (quantize_row_q4_1_ref, quantize_row_q4_1_impl)."""
    if weights.size:
        _weighted_affine(x, weights, out, row0, row1, 15)
    else:
        _plain_affine(x, out, row0, row1, 15)


@kernel
def encode_q5_0(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x (quantize_row_q5_0_ref, quantize_row_q5_0_impl)."""
    if weights.size:
        _weighted_symmetric(x, weights, out, row0, row1, 16)
    else:
        _plain_symmetric(x, out, row0, row1, 16)


@kernel
def encode_q5_1(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x (quantize_row_q5_1_ref, quantize_row_q5_1_impl)."""
    if weights.size:
        _weighted_affine(x, weights, out, row0, row1, 31)
    else:
        _plain_affine(x, out, row0, row1, 31)


@kernel
def encode_q8_0(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x; the importance matrix is ignored (quantize_row_q8_0_ref)."""
    s = np.empty(SCRATCH, np.uint8)
    end = row1 * (x.shape[1] // 32)
    for first in range(row0 * (x.shape[1] // 32), end, 16):
        low, high = _extremes(x, s, first, end)
        d = vabs(vmax(high, -low)) / F(127)
        store_f16(s, SCALE, d)
        _invert(s, d, F(0))
        for lane in range(min(16, end - first)):
            offset, o = 128 * (first + lane), 34 * (first + lane)
            inverse = load(types.float32, s, INVERSE + 4 * lane)
            _copy_f16(s, SCALE + 2 * lane, out, o)
            store(out, o + 2, convert(i8x16, round_away(load(f32x16, x, offset) * inverse)))
            store(out, o + 18, convert(i8x16, round_away(load(f32x16, x, offset + 64) * inverse)))


@kernel
def encode_q8_kv(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x; the importance matrix is ignored.

    A row is f32 d, i32 the sum of the levels, then i8 levels. Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp,
    iqk_quantize_row_q8_KV.
    """
    for row in range(row0, row1):
        source, target = 4 * x.shape[1] * row, out.shape[1] * row
        next_row = source + 4 * x.shape[1]
        most, total = splat(f32x16, F(0)), splat(i32x16, I32(0))
        for i in range(0, x.shape[1], 16):
            most = vmax(most, vabs(load(f32x16, x, source + 4 * i)))
        d = hmax(most) / F(127)
        # A row of zeros has levels of 0; where 1 / d is infinite, levels are -128.
        inverse = F(1) / d if hmax(most) > F(0) else F(0)
        for i in range(0, x.shape[1], 16):
            prefetch_l2(x, next_row + 4 * i)  # memory is idle while levels are computed from the cache
            q = round_as_cvtps2dq(load(f32x16, x, source + 4 * i) * inverse)
            total = total + q
            store(out, target + 8 + i, convert(i8x16, vmax(vmin(q, I32(127)), I32(-128))))
        store(out, target, d)
        store(out, target + 4, hsum(total))


#: ik_llama.cpp's differ with an importance matrix. Source: ik_llama.cpp 8337e4cd3, quantize_row_q4_0_impl and similar
#: functions.
encode_q4_0_ik = specialize(encode_q4_0, "ik", kernel, **_SYMMETRIC)
encode_q5_0_ik = specialize(encode_q5_0, "ik", kernel, **_SYMMETRIC)
encode_q4_1_ik = specialize(encode_q4_1, "ik", kernel, **_AFFINE)
encode_q5_1_ik = specialize(encode_q5_1, "ik", kernel, **_AFFINE)


@kernel
def encode_q6_0(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x (ik_llama.cpp 8337e4cd3 quantize_row_q6_0_impl)."""
    _refined_q6_0(x, weights, out, row0, row1, 32)


# ---------------------------------------------------------------- Q1_0


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
def _encode_signs(s, x, weights, out, count):
    """Encode 16 blocks at address x; store ``count``. Source: llama.cpp b11434 ggml-quants.c quantize_row_q1_0_ref."""
    d = s[256:]
    _mean_magnitudes(x, s, d)
    for b in range(count):
        store(out, 18 * b, f32_to_f16(d[b]))
        for part in range(8):
            signs = mask_bits(load(f32x16, x, 512 * b + 64 * part) >= F(0))
            store(out, 18 * b + 2 + 2 * part, np.uint16(signs))


encode_q1_0 = blocks_encoder("Q1_0", _encode_signs, 16, 4 * 272, gathered=True)

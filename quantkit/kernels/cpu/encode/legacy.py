"""Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: 32 values a block, one scale, perhaps one minimum.

Bytes of a block (f16 d, f16 m, u32 qh: bit 4 of value j in bit j, u8 qs: value j in a low, j + 16 in a high nibble)::

    Q4_0  d       qs[16]   x = d * (q - 8)          Q8_0  d  i8 q[32]   x = d * q
    Q4_1  d m     qs[16]   x = d * q + m
    Q5_0  d    qh qs[16]   x = d * (q - 16)
    Q5_1  d m  qh qs[16]   x = d * q + m

Without an importance matrix a block is scaled by its extreme values: _0 by the value of largest magnitude (the first
of equals, its sign decides which way the odd level lies), _1 by minimum and maximum. With one, weights
importance * sqrt(mean x^2 of the row + x^2) steer a search over scales (search.py): make_qx_quants for _0,
make_qkx3_quants for _1, many blocks side by side, one per lane.

Source: llama.cpp b11434 ggml-quants.c, quantize_row_q*_ref and quantize_row_q*_impl.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.encode.search import LANES, STEP, fit_signed, fit_with_min, search_levels
from quantkit.kernels.cpu.jit import helper, inline, kernel
from quantkit.kernels.cpu.simd import (
    cast,
    convert,
    f32_to_f16,
    f32x16,
    hmax,
    hmin,
    i8x16,
    i32x16,
    load,
    load_scalar,
    mask_bits,
    nearest_int,
    round_away,
    splat,
    store,
    store_scalar,
    transpose16,
    transpose16_apart,
    types,
    u8x16,
    vmax,
    vmin,
    vsqrt,
)

F, I, U = np.float32, np.int32, np.uint64

# ---------------------------------------------------------------- without an importance matrix


@inline
def _inverse(d):  # type: ignore[no-untyped-def]
    """Return 1 / d and whether it is a number: 0 for d = 0, and (0, False) where d is too small to invert.

    In C the infinite inverse turns every value into infinity or NaN, whose conversion to an integer is 0.
    """
    inverse = F(1) / d if d != F(0) else F(0)
    finite = abs(inverse) < F(np.inf)
    return inverse if finite else F(0), finite


@inline
def _largest(x0, x1):  # type: ignore[no-untyped-def]
    """Return the value of largest magnitude among 32, the first of equals; +0 if all are zero."""
    a0, a1 = cast(i32x16, x0) & I(0x7FFFFFFF), cast(i32x16, x1) & I(0x7FFFFFFF)
    top = hmax(vmax(a0, a1))
    hits = mask_bits(a0 == top) | (mask_bits(a1 == top) << U(16))
    negative = mask_bits(cast(i32x16, x0) < I(0)) | (mask_bits(cast(i32x16, x1) < I(0)) << U(16))
    first = hits & (~hits + U(1))
    value = I(top).view(F)
    return F(0) - value if first & negative else value


@inline
def _extremes(x0, x1):  # type: ignore[no-untyped-def]
    """Return minimum and maximum of 32 values; of zeros of both signs the first counts."""
    low, high = hmin(vmin(x0, x1)), hmax(vmax(x0, x1))
    if low == F(0):
        zeros = mask_bits(x0 == F(0)) | (mask_bits(x1 == F(0)) << U(16))
        negative = mask_bits(cast(i32x16, x0) < I(0)) | (mask_bits(cast(i32x16, x1) < I(0)) << U(16))
        low = F(-0.0) if zeros & (~zeros + U(1)) & negative else F(0)
    return low, high


@inline
def _store_levels(out, o, q0, q1, has_high):  # type: ignore[no-untyped-def]
    """Store bit 4 of 32 levels as u32, where a type has it, then their nibbles."""
    if has_high:
        store_scalar(out, o, np.uint32(mask_bits(q0 > I(15)) | (mask_bits(q1 > I(15)) << U(16))))
        o += 4
        q0, q1 = q0 & I(15), q1 & I(15)
    store(out, o, convert(u8x16, q0 | (q1 << I(4))))


@inline
def _symmetric(x, at, out, o, half):  # type: ignore[no-untyped-def]
    """Scale one block by its largest magnitude: store d, return levels 0..2 * half - 1 around half."""
    x0, x1 = load(f32x16, x, at), load(f32x16, x, at + 64)
    d = _largest(x0, x1) / F(-half)
    inverse, finite = _inverse(d)
    middle = F(half) + F(0.5) if finite else F(0)
    store_scalar(out, o, f32_to_f16(d))
    top = I(2 * half - 1)
    q0 = vmin(convert(i32x16, x0 * inverse + middle), top)
    q1 = vmin(convert(i32x16, x1 * inverse + middle), top)
    return q0, q1


@inline
def _affine(x, at, out, o, top):  # type: ignore[no-untyped-def]
    """Scale one block from its minimum to its maximum: store d and m, return levels 0..top."""
    x0, x1 = load(f32x16, x, at), load(f32x16, x, at + 64)
    low, high = _extremes(x0, x1)
    d = abs(high - low) / F(top)
    inverse, finite = _inverse(d)
    store_scalar(out, o, f32_to_f16(d))
    store_scalar(out, o + 2, f32_to_f16(low))
    if not (finite and d < F(np.inf)):
        low, inverse = F(0), F(0)
    q0 = vmin(convert(i32x16, (x0 - low) * inverse + F(0.5)), I(top))
    q1 = vmin(convert(i32x16, (x1 - low) * inverse + F(0.5)), I(top))
    return q0, q1


# ---------------------------------------------------------------- with an importance matrix: one block per lane

# Byte offsets into the scratch of one call: [32][LANES] f32 each, element i of all blocks side by side.
X, W, LEVELS = 0, 32 * STEP, 64 * STEP
# [LANES][32] f32: the weights of each block before they are transposed.
ROWS = 96 * STEP
# [LANES] f32 each: what a search found for each block.
SCALE, LOW, INVERSE, BASE, SCRATCH = 128 * STEP, 129 * STEP, 130 * STEP, 131 * STEP, 132 * STEP


@helper
def mean_squares(x, row0, row1, out, scratch):  # type: ignore[no-untyped-def]
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
def _fill_lanes(x, weights, sigma2, s, first, last, row0):  # type: ignore[no-untyped-def]
    """Put blocks first .. first + LANES - 1 and their weights into X and W; past the end block ``last`` again."""
    per_row = x.shape[1] // 32
    for lane in range(LANES):
        block = min(first + lane, last)
        row = block // per_row
        spread = splat(f32x16, sigma2[row - row0])
        for half in range(0, 128, 64):
            v = load(f32x16, x, 128 * block + half)
            w = load(f32x16, weights, 128 * (block - row * per_row) + half)
            store(s, LEVELS + 128 * lane + half, v)
            store(s, ROWS + 128 * lane + half, w * vsqrt(spread + v * v))
    for lane in range(0, LANES, 16):
        for half in range(2):
            at, to = 128 * lane + 64 * half, 16 * half * STEP + 4 * lane
            transpose16_apart(s, LEVELS + at, 128, s, X + to, STEP)
            transpose16_apart(s, ROWS + at, 128, s, W + to, STEP)


@inline
def _rows_symmetric(x, weights, out, row0, row1, half):  # type: ignore[no-untyped-def]
    """Encode rows as levels 0..2 * half - 1 around half (quantize_row_q4_0_impl, quantize_row_q5_0_impl)."""
    s, sigma2 = np.empty(SCRATCH, np.uint8), np.empty(row1 - row0, np.float32)
    mean_squares(x, row0, row1, sigma2, s)
    end, size = row1 * (x.shape[1] // 32), 18 if half == 8 else 22
    for first in range(row0 * (x.shape[1] // 32), end, LANES):
        _fill_lanes(x, weights, sigma2, s, first, end - 1, row0)
        scale, inverse = fit_signed(s, X, W, 32, half, True)
        store(s, SCALE, scale)
        store(s, INVERSE, inverse)
        for lane in range(min(LANES, end - first)):
            at, o = 128 * (first + lane), size * (first + lane)
            store_scalar(out, o, f32_to_f16(load_scalar(types.float32, s, SCALE + 4 * lane)))
            inverse = load_scalar(types.float32, s, INVERSE + 4 * lane)
            # Blocks that count as zero have an inverse of 0, and level 0 rather than the middle one.
            middle = I(half) if inverse != F(0) else I(0)
            q0 = vmin(vmax(nearest_int(load(f32x16, x, at) * inverse), -half), half - 1) + middle
            q1 = vmin(vmax(nearest_int(load(f32x16, x, at + 64) * inverse), -half), half - 1) + middle
            _store_levels(out, o + 2, q0, q1, half == 16)


@inline
def _rows_affine(x, weights, out, row0, row1, top):  # type: ignore[no-untyped-def]
    """Encode rows as levels 0..top from a minimum up (quantize_row_q4_1_impl, quantize_row_q5_1_impl)."""
    s, sigma2 = np.empty(SCRATCH, np.uint8), np.empty(row1 - row0, np.float32)
    mean_squares(x, row0, row1, sigma2, s)
    end, size = row1 * (x.shape[1] // 32), 20 if top == 15 else 24
    for first in range(row0 * (x.shape[1] // 32), end, LANES):
        _fill_lanes(x, weights, sigma2, s, first, end - 1, row0)
        scale, low, _, inverse, base = fit_with_min(
            s, X, W, LEVELS, 32, top, F(-0.9), F(0.05), 36, False, True
        )
        store(s, SCALE, scale)
        store(s, LOW, -low)
        store(s, INVERSE, inverse)
        store(s, BASE, base)
        for lane in range(min(LANES, end - first)):
            at, o = 128 * (first + lane), size * (first + lane)
            store_scalar(out, o, f32_to_f16(load_scalar(types.float32, s, SCALE + 4 * lane)))
            store_scalar(out, o + 2, f32_to_f16(load_scalar(types.float32, s, LOW + 4 * lane)))
            inverse = load_scalar(types.float32, s, INVERSE + 4 * lane)
            base = load_scalar(types.float32, s, BASE + 4 * lane)
            q0 = search_levels(load(f32x16, x, at), inverse, base, top, True)
            q1 = search_levels(load(f32x16, x, at + 64), inverse, base, top, True)
            _store_levels(out, o + 4, q0, q1, top == 31)


# ---------------------------------------------------------------- the encoders


@kernel
def encode_q4_0(x: npt.NDArray, weights: npt.NDArray, out: npt.NDArray, row0: int, row1: int) -> None:  # type: ignore[type-arg]
    """Encode rows row0..row1 of x (quantize_row_q4_0_ref, quantize_row_q4_0_impl)."""
    if weights.size:
        _rows_symmetric(x, weights, out, row0, row1, 8)
    else:
        for block in range(row0 * (x.shape[1] // 32), row1 * (x.shape[1] // 32)):
            q0, q1 = _symmetric(x, 128 * block, out, 18 * block, 8)
            _store_levels(out, 18 * block + 2, q0, q1, False)


@kernel
def encode_q4_1(x: npt.NDArray, weights: npt.NDArray, out: npt.NDArray, row0: int, row1: int) -> None:  # type: ignore[type-arg]
    """Encode rows row0..row1 of x (quantize_row_q4_1_ref, quantize_row_q4_1_impl)."""
    if weights.size:
        _rows_affine(x, weights, out, row0, row1, 15)
    else:
        for block in range(row0 * (x.shape[1] // 32), row1 * (x.shape[1] // 32)):
            q0, q1 = _affine(x, 128 * block, out, 20 * block, 15)
            _store_levels(out, 20 * block + 4, q0, q1, False)


@kernel
def encode_q5_0(x: npt.NDArray, weights: npt.NDArray, out: npt.NDArray, row0: int, row1: int) -> None:  # type: ignore[type-arg]
    """Encode rows row0..row1 of x (quantize_row_q5_0_ref, quantize_row_q5_0_impl)."""
    if weights.size:
        _rows_symmetric(x, weights, out, row0, row1, 16)
    else:
        for block in range(row0 * (x.shape[1] // 32), row1 * (x.shape[1] // 32)):
            q0, q1 = _symmetric(x, 128 * block, out, 22 * block, 16)
            _store_levels(out, 22 * block + 2, q0, q1, True)


@kernel
def encode_q5_1(x: npt.NDArray, weights: npt.NDArray, out: npt.NDArray, row0: int, row1: int) -> None:  # type: ignore[type-arg]
    """Encode rows row0..row1 of x (quantize_row_q5_1_ref, quantize_row_q5_1_impl)."""
    if weights.size:
        _rows_affine(x, weights, out, row0, row1, 31)
    else:
        for block in range(row0 * (x.shape[1] // 32), row1 * (x.shape[1] // 32)):
            q0, q1 = _affine(x, 128 * block, out, 24 * block, 31)
            _store_levels(out, 24 * block + 4, q0, q1, True)


@kernel
def encode_q8_0(x: npt.NDArray, weights: npt.NDArray, out: npt.NDArray, row0: int, row1: int) -> None:  # type: ignore[type-arg]
    """Encode rows row0..row1 of x; the importance matrix is ignored (quantize_row_q8_0_ref)."""
    for block in range(row0 * (x.shape[1] // 32), row1 * (x.shape[1] // 32)):
        x0, x1 = load(f32x16, x, 128 * block), load(f32x16, x, 128 * block + 64)
        top = hmax(vmax(cast(i32x16, x0) & I(0x7FFFFFFF), cast(i32x16, x1) & I(0x7FFFFFFF)))
        d = I(top).view(F) / F(127)
        inverse, _ = _inverse(d)
        store_scalar(out, 34 * block, f32_to_f16(d))
        store(out, 34 * block + 2, convert(i8x16, round_away(x0 * inverse)))
        store(out, 34 * block + 18, convert(i8x16, round_away(x1 * inverse)))

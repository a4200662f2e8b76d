"""Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: 32 values a block, one scale, perhaps one minimum.

Bytes of a block (f16 d, f16 m, u32 qh: bit 4 of value j in bit j, u8 qs: value j in a low, j + 16 in a high nibble)::

    Q4_0  d       qs[16]   x = d * (q - 8)          Q8_0  d  i8 q[32]   x = d * q
    Q4_1  d m     qs[16]   x = d * q + m
    Q5_0  d    qh qs[16]   x = d * (q - 16)
    Q5_1  d m  qh qs[16]   x = d * q + m

Without an importance matrix a block is scaled by its extreme values: _0 by the value of largest magnitude (the first
of equals, its sign decides which way the odd level lies), _1 by minimum and maximum. With one, weights
importance * sqrt(mean x^2 of the row + x^2) steer a search over scales: make_qx_quants for _0, make_qkx3_quants
for _1. The search runs 16 blocks side by side, one per lane, so that each lane adds in the reference's order.

Source: llama.cpp b11434 ggml-quants.c, quantize_row_q*_ref and quantize_row_q*_impl.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
    nearest,
    round_away,
    select,
    splat,
    store,
    store_f16,
    store_scalar,
    transpose16,
    types,
    u8x16,
    vabs,
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
    """Return the value of largest magnitude among 32, the first of equals."""
    a0, a1 = cast(i32x16, x0) & I(0x7FFFFFFF), cast(i32x16, x1) & I(0x7FFFFFFF)
    top = hmax(vmax(a0, a1))
    hits = mask_bits(a0 == top) | (mask_bits(a1 == top) << U(16))
    negative = mask_bits(cast(i32x16, x0) < I(0)) | (mask_bits(cast(i32x16, x1) < I(0)) << U(16))
    first = hits & (~hits + U(1))
    value = I(top).view(F)
    return -value if first & negative else value


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
def _store_nibbles(out, o, q0, q1):  # type: ignore[no-untyped-def]
    store(out, o, convert(u8x16, q0 | (q1 << I(4))))


@inline
def _store_bits(out, o, q0, q1):  # type: ignore[no-untyped-def]
    """Store bit 4 of 32 levels as u32, then their nibbles."""
    high = mask_bits(q0 > I(15)) | (mask_bits(q1 > I(15)) << U(16))
    store_scalar(out, o, np.uint32(high))
    _store_nibbles(out, o + 4, q0 & I(15), q1 & I(15))


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


@inline
def _rows_q4_0(x, out, row0, row1):  # type: ignore[no-untyped-def]
    for block in range(row0 * (x.shape[1] // 32), row1 * (x.shape[1] // 32)):
        q0, q1 = _symmetric(x, 128 * block, out, 18 * block, 8)
        _store_nibbles(out, 18 * block + 2, q0, q1)


@inline
def _rows_q4_1(x, out, row0, row1):  # type: ignore[no-untyped-def]
    for block in range(row0 * (x.shape[1] // 32), row1 * (x.shape[1] // 32)):
        q0, q1 = _affine(x, 128 * block, out, 20 * block, 15)
        _store_nibbles(out, 20 * block + 4, q0, q1)


@inline
def _rows_q5_0(x, out, row0, row1):  # type: ignore[no-untyped-def]
    for block in range(row0 * (x.shape[1] // 32), row1 * (x.shape[1] // 32)):
        q0, q1 = _symmetric(x, 128 * block, out, 22 * block, 16)
        _store_bits(out, 22 * block + 2, q0, q1)


@inline
def _rows_q5_1(x, out, row0, row1):  # type: ignore[no-untyped-def]
    for block in range(row0 * (x.shape[1] // 32), row1 * (x.shape[1] // 32)):
        q0, q1 = _affine(x, 128 * block, out, 24 * block, 31)
        _store_bits(out, 24 * block + 4, q0, q1)


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


# ---------------------------------------------------------------- with an importance matrix: 16 blocks, one per lane

# Byte offsets into the scratch of one call: [32][16] f32 each, lane = block.
X, W, LEVELS, ROWS = 0, 2048, 4096, 6144
D, M, HIGH, SCRATCH = 10240, 10272, 10304, 10368


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
def _fill_lanes(x, weights, sigma2, buf, first, total, row0):  # type: ignore[no-untyped-def]
    """Put 16 blocks and their weights into X and W, one per lane; past the end the last block again."""
    per_row = x.shape[1] // 32
    for lane in range(16):
        block = min(first + lane, total - 1)
        row = block // per_row
        at, w_at, to = 128 * (row0 * per_row + block), 128 * (block - row * per_row), ROWS + 128 * lane
        spread = splat(f32x16, sigma2[row])
        for half in range(0, 128, 64):
            v = load(f32x16, x, at + half)
            store(buf, to + half, v)
            store(buf, to + 2048 + half, load(f32x16, weights, w_at + half) * vsqrt(spread + v * v))
    for half in range(2):
        transpose16(buf, ROWS + 64 * half, 128, buf, X + 1024 * half)
        transpose16(buf, ROWS + 2048 + 64 * half, 128, buf, W + 1024 * half)


@helper
def make_qx_quants(buf, nmax):  # type: ignore[no-untyped-def]
    """Find d for x = d * (level - nmax) in each lane; levels 0..2 * nmax - 1 go to LEVELS, d is returned.

    The scale of the largest magnitude, the first of equals, and 18 more around it are tried; the one whose least
    squares fit explains most wins, ties to the earlier one. ROWS is overwritten.
    """
    zero = splat(f32x16, F(0))
    high, low = splat(f32x16, F(nmax - 1)), splat(f32x16, F(-nmax))
    amax, extreme = zero, zero
    for i in range(32):
        v = load(f32x16, buf, X + 64 * i)
        above = vabs(v) > amax
        amax, extreme = select(above, vabs(v), amax), select(above, v, extreme)
        store(buf, ROWS + 64 * i, load(f32x16, buf, W + 64 * i) * v)
    scale, best, best_inverse = zero, zero, zero
    for k in range(19):
        # The reference tries step 0 first, then -9..9 without it.
        step = 0 if k == 0 else k - 10 if k < 10 else k - 9
        inverse = splat(f32x16, -(F(nmax) + F(0.1) * F(step))) / extreme
        sum_lx, sum_l2 = zero, zero
        for i in range(32):
            level = vmin(vmax(nearest(inverse * load(f32x16, buf, X + 64 * i)), low), high)
            sum_lx = sum_lx + load(f32x16, buf, ROWS + 64 * i) * level
            sum_l2 = sum_l2 + load(f32x16, buf, W + 64 * i) * level * level
        if k == 0:
            scale = select(sum_l2 != F(0), sum_lx / sum_l2, zero)
            best, best_inverse = scale * sum_lx, inverse
        else:
            better = (sum_l2 > F(0)) & (sum_lx * sum_lx > best * sum_l2)
            scale = select(better, sum_lx / sum_l2, scale)
            best, best_inverse = select(better, scale * sum_lx, best), select(better, inverse, best_inverse)
    alive = amax >= F(1e-15)
    scale, best_inverse = select(alive, scale, zero), select(alive, best_inverse, zero)
    middle = select(alive, splat(f32x16, F(nmax)), zero)
    for i in range(32):
        level = nearest(best_inverse * load(f32x16, buf, X + 64 * i))
        store(buf, LEVELS + 64 * i, vmin(vmax(level, low), high) + middle)
    return scale


@inline
def _levels(x, inverse, low, nmax):  # type: ignore[no-untyped-def]
    """nearest_int(min(v, nmax)) where v > 0, else (NaN too) 0."""
    return nearest(vmin(vmax(inverse * (x - low), F(0)), nmax))


@helper
def make_qkx3_quants(buf, top, rmin, rdelta, nstep):  # type: ignore[no-untyped-def]
    """Find d and m for x = d * level + m in each lane; levels 0..top go to LEVELS, (d, m) is returned.

    Scales (rmin + rdelta * k + top) / (max - m), k = 0..nstep, are tried, m being the best found so far; each is
    refined by a weighted least squares fit of d and m <= 0, and the smallest weighted squared error wins.
    """
    zero, nmax = splat(f32x16, F(0)), splat(f32x16, F(top))
    low = load(f32x16, buf, X)
    high, sum_w = low, load(f32x16, buf, W)
    sum_x = sum_w * low
    for i in range(1, 32):
        v, w = load(f32x16, buf, X + 64 * i), load(f32x16, buf, W + 64 * i)
        low, high = vmin(v, low), vmax(v, high)
        sum_w, sum_x = sum_w + w, sum_x + w * v
    low = select(low > F(0), zero, low)
    dead, floor = high <= low, low
    inverse = nmax / (high - low)
    scale, error = F(1) / inverse, zero
    # A range too small to invert: C's nearest_int makes level 0 of infinity and NaN.
    best_inverse, best_low = select(vabs(inverse) < F(np.inf), inverse, zero), low
    for i in range(32):
        v = load(f32x16, buf, X + 64 * i)
        diff = scale * _levels(v, best_inverse, low, nmax) + low - v
        error = error + load(f32x16, buf, W + 64 * i) * (diff * diff)
    for k in range(nstep + 1):
        inverse = splat(f32x16, F(rmin) + F(rdelta) * F(k) + F(top)) / (high - low)
        sum_l, sum_l2, sum_xl = zero, zero, zero
        for i in range(32):
            v = load(f32x16, buf, X + 64 * i)
            level = _levels(v, inverse, low, nmax)
            store(buf, LEVELS + 64 * i, level)
            wl = load(f32x16, buf, W + 64 * i) * level
            sum_l, sum_l2, sum_xl = sum_l + wl, sum_l2 + wl * level, sum_xl + wl * v
        det = sum_w * sum_l2 - sum_l * sum_l
        fit, base = (sum_w * sum_xl - sum_x * sum_l) / det, (sum_l2 * sum_x - sum_l * sum_xl) / det
        fit, base = select(base > F(0), sum_xl / sum_l2, fit), select(base > F(0), zero, base)
        mad = zero
        for i in range(32):
            diff = fit * load(f32x16, buf, LEVELS + 64 * i) + base - load(f32x16, buf, X + 64 * i)
            mad = mad + load(f32x16, buf, W + 64 * i) * (diff * diff)
        better = (det > F(0)) & (mad < error)
        error, scale = select(better, mad, error), select(better, fit, scale)
        best_inverse, best_low = select(better, inverse, best_inverse), select(better, low, best_low)
        low = select(better, base, low)
    scale, best_inverse = select(dead, zero, scale), select(dead, zero, best_inverse)
    for i in range(32):
        store(buf, LEVELS + 64 * i, _levels(load(f32x16, buf, X + 64 * i), best_inverse, best_low, nmax))
    return scale, select(dead, floor, low)


@helper
def _store_lanes(buf, out, first, total, row0_block, has_min, has_high):  # type: ignore[no-untyped-def]
    """Write the blocks of 16 lanes from D, M and LEVELS."""
    zero = splat(i32x16, I(0))
    high = zero
    for j in range(16):
        q0 = convert(i32x16, load(f32x16, buf, LEVELS + 64 * j))
        q1 = convert(i32x16, load(f32x16, buf, LEVELS + 64 * (j + 16)))
        store(buf, ROWS + 64 * j, (q0 & I(15)) | ((q1 & I(15)) << I(4)))
        high = high | ((q0 >> I(4)) << I(j)) | ((q1 >> I(4)) << I(j + 16))
    store(buf, HIGH, high)
    transpose16(buf, ROWS, 64, buf, ROWS + 1024)
    size = 18 + 2 * has_min + 4 * has_high
    for lane in range(min(16, total - first)):
        o = size * (row0_block + first + lane)
        store_scalar(out, o, load_scalar(types.uint16, buf, D + 2 * lane))
        o += 2
        if has_min:
            store_scalar(out, o, load_scalar(types.uint16, buf, M + 2 * lane))
            o += 2
        if has_high:
            store_scalar(out, o, load_scalar(types.uint32, buf, HIGH + 4 * lane))
            o += 4
        store(out, o, convert(u8x16, load(i32x16, buf, ROWS + 1024 + 64 * lane)))


@inline
def _rows_weighted(x, weights, out, row0, row1, bits, has_min):  # type: ignore[no-untyped-def]
    """Encode rows of a type of 4 or 5 bits, with or without a minimum, by the weighted searches."""
    buf, sigma2 = np.empty(SCRATCH, np.uint8), np.empty(row1 - row0, np.float32)
    mean_squares(x, row0, row1, sigma2, buf)
    per_row = x.shape[1] // 32
    total = (row1 - row0) * per_row
    for first in range(0, total, 16):
        _fill_lanes(x, weights, sigma2, buf, first, total, row0)
        if has_min:
            scale, low = make_qkx3_quants(buf, (1 << bits) - 1, F(-0.9), F(0.05), 36)
            store_f16(buf, D, scale)
            store_f16(buf, M, low)
        else:
            store_f16(buf, D, make_qx_quants(buf, 1 << (bits - 1)))
        _store_lanes(buf, out, first, total, row0 * per_row, has_min, bits == 5)


@kernel
def encode_q4_0(x: npt.NDArray, weights: npt.NDArray, out: npt.NDArray, row0: int, row1: int) -> None:  # type: ignore[type-arg]
    """Encode rows row0..row1 of x (quantize_row_q4_0_ref, quantize_row_q4_0_impl)."""
    if weights.size:
        _rows_weighted(x, weights, out, row0, row1, 4, False)
    else:
        _rows_q4_0(x, out, row0, row1)


@kernel
def encode_q4_1(x: npt.NDArray, weights: npt.NDArray, out: npt.NDArray, row0: int, row1: int) -> None:  # type: ignore[type-arg]
    """Encode rows row0..row1 of x (quantize_row_q4_1_ref, quantize_row_q4_1_impl)."""
    if weights.size:
        _rows_weighted(x, weights, out, row0, row1, 4, True)
    else:
        _rows_q4_1(x, out, row0, row1)


@kernel
def encode_q5_0(x: npt.NDArray, weights: npt.NDArray, out: npt.NDArray, row0: int, row1: int) -> None:  # type: ignore[type-arg]
    """Encode rows row0..row1 of x (quantize_row_q5_0_ref, quantize_row_q5_0_impl)."""
    if weights.size:
        _rows_weighted(x, weights, out, row0, row1, 5, False)
    else:
        _rows_q5_0(x, out, row0, row1)


@kernel
def encode_q5_1(x: npt.NDArray, weights: npt.NDArray, out: npt.NDArray, row0: int, row1: int) -> None:  # type: ignore[type-arg]
    """Encode rows row0..row1 of x (quantize_row_q5_1_ref, quantize_row_q5_1_impl)."""
    if weights.size:
        _rows_weighted(x, weights, out, row0, row1, 5, True)
    else:
        _rows_q5_1(x, out, row0, row1)

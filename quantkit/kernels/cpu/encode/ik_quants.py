"""IQ4_KS of ik_llama.cpp: IQ4_XS' levels, or all of them plus 4, with a scale per 32 values and one per row.

A row is f32 d, then per 256 values u8 s[8], u8 qs[8][16]; x = d * ((s & 254) - 127) * (VALUES[q] + 4 * (s & 1)).

The scale of 32 values: 31 candidates for 1 / d map the value of largest magnitude to or near an end of the levels; each
is tried with both signs and, except the first, with both sets of levels, and rated as in IQ4_XS. The largest scale of a
row becomes 127 d; scales are rounded to odd multiples of d, the levels rounded again, and d fitted to them.

Weights are as in IQ4_XS; where the importances of 32 values, or the values, are almost 0, the importances become 1e-9.

Each lane holds a sub-block, and 16 are searched at once: a batch is 512 values of one row, because d is the row's.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_iq4_ks, quantize_row_iq4_k_impl_bs128, best_index_iq4nl.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline, kernel
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    f32x16,
    i32x16,
    load,
    lookup16_f32,
    lookup32_f32,
    make_constant,
    nearest_int,
    select,
    splat,
    store,
    transpose16,
    u8x16,
    vabs,
    vmax,
    vmin,
)
from quantkit.kernels.cpu.encode import i_quants as iq4
from quantkit.kernels.cpu.encode.codebook import MAGIC
from quantkit.kernels.cpu.encode.groups import address, copy

F, I32 = np.float32, np.int32
TENTH, TINY = F(0.1), F(1e-9)

#: For the raised levels. A boundary is where x - below < above - x becomes false in f32: a few ulp before -0.5.
_boundary = [b + 4 if b != -4.5 else -0.5 - 2.0**-22 for b in iq4.BOUNDARY]
_raised_boundary0 = make_constant(f32x16, _boundary[:16], "iq4_ks_boundary0")
_raised_boundary1 = make_constant(f32x16, _boundary[16:], "iq4_ks_boundary1")
_values = make_constant(f32x16, iq4.VALUES, "iq4_ks_values")


@inline
def _nearest_value(v, tenth, raised):
    """Return the value of either set nearest to v, |v| <= 150; tenth is v / 10 to within a few ulp."""
    if not raised:
        return iq4.nearest_value(v, tenth)
    bucket = cast(i32x16, tenth - F(0.4) + MAGIC)
    low, high = iq4.values_of(bucket)
    return select(v >= lookup32_f32(_raised_boundary0(), _raised_boundary1(), bucket), high, low) + F(4)


@inline
def _nearest_level(v, raised):
    """Return the level nearest to any v; ``raised``: lanes of 0 or 4. Beyond int, C gives INT_MIN: level 0."""
    v = vmax(vmin(select(v < F(2.0**31), v, F(-130)), F(130)), F(-130))
    bucket = cast(i32x16, (v - raised) * TENTH + MAGIC)
    boundary = lookup32_f32(_raised_boundary0(), _raised_boundary1(), bucket)
    boundary = select(raised > F(0), boundary, iq4.boundary_of(bucket))
    return iq4.level_of(bucket) + convert(i32x16, v >= boundary)


# ---------------------------------------------------------------- the search for 16 scales


@inline
def _rate(xt, wt, inverse, raised):
    """Return sum(w q x) and sum(w q q) for the values q nearest to x * inverse, and the same for -inverse."""
    tenth, zero = inverse * TENTH, splat(f32x16, F(0))
    qx, q2, minus_qx, minus_q2 = zero, zero, zero, zero
    for j in range(32):
        x, w = load(f32x16, xt, 64 * j), load(f32x16, wt, 64 * j)
        v, t = inverse * x, tenth * x
        q = _nearest_value(v, t, raised)
        wq = w * q
        qx, q2 = qx + wq * x, q2 + wq * q
        q = _nearest_value(-v, -t, raised)
        wq = w * q
        minus_qx, minus_q2 = minus_qx + wq * x, minus_q2 + wq * q
    return qx, q2, minus_qx, minus_q2


@inline
def _keep_better(best, d, raised, qx, q2, by):
    better = (q2 > F(0)) & (qx * qx > best * q2)
    ratio = qx / q2
    return select(better, ratio * qx, best), select(better, ratio, d), select(better, F(by), raised)


@helper
def _search(xt, wt, scales, raised_by):
    """Write the scales of 16 sub-blocks, 0 where all |x| < 1e-16, and whether levels are raised: by 0 or 4."""
    amax, top = iq4.largest(xt)
    qx, q2, minus_qx, minus_q2 = _rate(xt, wt, F(1) / (top / F(127)), False)
    d, raised = qx / q2, splat(f32x16, F(0))
    best, d, raised = _keep_better(d * qx, d, raised, minus_qx, minus_q2, 0)
    for itry in range(-7, 8):
        qx, q2, minus_qx, minus_q2 = _rate(xt, wt, F(itry - 127) / top, False)
        best, d, raised = _keep_better(best, d, raised, qx, q2, 0)
        best, d, raised = _keep_better(best, d, raised, minus_qx, minus_q2, 0)
        qx, q2, minus_qx, minus_q2 = _rate(xt, wt, F(itry - 123) / top, True)
        best, d, raised = _keep_better(best, d, raised, qx, q2, 4)
        best, d, raised = _keep_better(best, d, raised, minus_qx, minus_q2, 4)
    dead = amax < F(1e-16)
    store(scales, 0, select(dead, F(0), d))
    store(raised_by, 0, select(dead, F(0), raised))


@inline
def _lift_weights(xt, wt):
    """Set all importances of a sub-block to 1e-9 where they, its values or their products are almost 0."""
    w2 = x2 = wx = splat(f32x16, F(0))
    for j in range(32):
        x, w = load(f32x16, xt, 64 * j), load(f32x16, wt, 64 * j)
        w2, x2, wx = w2 + w * w, x2 + x * x, wx + w * vabs(x)
    least = F(32) * (TINY * TINY)
    fine = (w2 > least) & (x2 > least) & (wx > least)
    for j in range(32):
        store(wt, 64 * j, select(fine, load(f32x16, wt, 64 * j), TINY))


# ---------------------------------------------------------------- a batch of a row

# Offsets into the scratch of a call: values and weights, f32 [32][16]; three of [16][16]; copies of a row's end.
X, W, BYTES, TERMS, TERMS2, TAIL, WEIGHTS_TAIL, SCRATCH = 0, 2048, 4096, 5120, 6144, 7168, 9216, 11264


@inline
def _mean_squares(row, n, sigma2):
    """Set sigma2 to twice the mean square of each super-block of a row, each summed in order."""
    for block in range(n // 256):
        squares = F(0)
        for i in range(1024 * block, 1024 * block + 1024, 4):
            v = load(types.float32, row, i)
            squares += v * v
        sigma2[block] = squares * F(2 / 256)


@inline
def _batch(row, n, first, tail):
    """Return the address of sub-blocks first .. first + 15 of a row: at its end a zero-padded copy at ``tail``."""
    rest = n // 32 - first
    if rest >= 16:
        return row + 128 * first
    copy(row + 128 * first, tail, 128 * rest)
    return tail


@inline
def _load(s, row, weights, n, first, sigma2):
    """Transpose 16 sub-blocks of a row, and their weights, to [32][16]; weights: an address, or 0."""
    iq4.load_transposed(_batch(row, n, first, s + TAIL), 0, s + X)
    if weights:
        iq4.load_transposed(_batch(weights, n, first, s + WEIGHTS_TAIL), 0, s + W)
        _lift_weights(s + X, s + W)
        half = iq4.first_half() != I32(0)
        of_block = select(half, splat(f32x16, sigma2[first // 8]), splat(f32x16, sigma2[first // 8 + 1]))
        iq4.importance_weights(s + X, s + W, of_block)
    else:
        iq4.square_weights(s + X, s + W)


@inline
def _store_levels(s, multiple, d, raised):
    """Round 16 sub-blocks to levels: return their bytes, and their terms of the two sums that fit d."""
    inverse = iq4.inverse_or_zero(d * multiple)
    for j in range(0, 1024, 64):
        x0, x1 = load(f32x16, s, X + j), load(f32x16, s, X + 1024 + j)
        level0, level1 = _nearest_level(inverse * x0, raised), _nearest_level(inverse * x1, raised)
        q0 = (lookup16_f32(_values(), level0) + raised) * multiple
        q1 = (lookup16_f32(_values(), level1) + raised) * multiple
        wq0, wq1 = load(f32x16, s, W + j) * q0, load(f32x16, s, W + 1024 + j) * q1
        store(s, BYTES + j, level0 | (level1 << I32(4)))
        store(s, TERMS + j, wq0 * x0 + wq1 * x1)
        store(s, TERMS2 + j, wq0 * q0 + wq1 * q1)
    transpose16(s, BYTES, 64, s, BYTES)
    transpose16(s, TERMS, 64, s, TERMS)
    transpose16(s, TERMS2, 64, s, TERMS2)


@inline
def _search_row(s, row, weights, n, sigma2, scales, raised):
    """Find the scales of a row and whether levels are raised; return the largest magnitude of a scale."""
    largest = F(0)
    for first in range(0, n // 32, 16):
        _load(s, row, weights, n, first, sigma2)
        _search(s + X, s + W, address(scales) + 4 * first, address(raised) + 4 * first)
        for i in range(first, min(first + 16, n // 32)):
            largest = max(largest, abs(scales[i]))
    return largest


@inline
def _store_row(s, row, weights, n, sigma2, scales, raised, d, out):
    """Write the blocks of a row to address ``out``; return the scale that best fits their levels, else d."""
    sumqx = sumq2 = F(0)
    for first in range(0, n // 32, 16):
        _load(s, row, weights, n, first, sigma2)
        by = load(f32x16, raised, 4 * first)
        code = nearest_int(F(0.5) * (load(f32x16, scales, 4 * first) * (F(1) / d) + F(127)))
        code = vmax(vmin(code, I32(127)), I32(0)) << I32(1)
        _store_levels(s, convert(f32x16, code - I32(127)), d, by)
        store(s, X, code | (convert(i32x16, by) >> I32(2)))
        for i in range(min(16, n // 32 - first)):
            block, sub = out + 136 * ((first + i) // 8), i % 8
            store(block, sub, load(types.uint8, s, X + 4 * i))
            store(block, 8 + 16 * sub, convert(u8x16, load(i32x16, s, BYTES + 64 * i)))
            for at in range(64 * i, 64 * i + 64, 4):
                sumqx += load(types.float32, s, TERMS + at)
                sumq2 += load(types.float32, s, TERMS2 + at)
    return sumqx / sumq2 if sumq2 > F(0) else d


@kernel
def encode_iq4_ks(
    x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int
) -> None:
    """Encode rows row0..row1 of x [rows, n], n a multiple of 256, as IQ4_KS; weights [n] or empty."""
    n = x.shape[1]
    scratch, sigma2 = np.zeros(SCRATCH, np.uint8), np.zeros(n // 256 + 16, np.float32)
    scales, raised = np.zeros(n // 32 + 16, np.float32), np.zeros(n // 32 + 16, np.float32)
    for row in range(row0, row1):
        # Addresses are taken here: numba frees an array after its last use.
        s, w = address(scratch), address(weights) if weights.size else 0
        source, target = address(x) + 4 * n * row, address(out) + out.shape[1] * row
        if w:
            _mean_squares(source, n, sigma2)
        d = _search_row(s, source, w, n, sigma2, scales, raised) / F(127)
        if d == F(0):
            out[row, :] = 0
            for i in range(n // 32):
                out[row, 4 + 136 * (i // 8) + i % 8] = raised[i] > F(0)
        else:
            d = _store_row(s, source, w, n, sigma2, scales, raised, d, target + 4)
        store(target, 0, d)

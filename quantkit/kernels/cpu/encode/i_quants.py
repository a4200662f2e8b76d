"""IQ4_NL and IQ4_XS: 4-bit levels that are not evenly spaced.

A level 0..15 stands for one of 16 values, denser around zero, as weights are::

    VALUES   -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
    IQ4_NL   f16 d, u8 qs[16]                                           32 values    x = d * VALUES[q]
    IQ4_XS   f16 d, u16 scales_h, u8 scales_l[4], u8 qs[8][16]          256 values   x = d * (scale - 32) * VALUES[q]

Value j of 32 lies in the low nibbles of qs, value j + 16 in the high ones; a 6-bit scale has its low 4 bits in
scales_l, two a byte, its high 2 in scales_h.

The scale of 32 values: 16 candidates for 1 / d lay the value of largest magnitude on or near -127 (the first one on
+127); each rounds all values to levels and rates them by sum(w q x)^2 / sum(w q q), whose best d is
sum(w q x) / sum(w q q). Weights are x^2, or importance * sqrt(2 mean x^2 + x^2). Then levels are chosen once more.

One lane holds one sub-block of 32, so that each keeps the reference's order of additions; 16 are searched at once.
Rounding to a level is a table lookup (codebook.py).

Source: llama.cpp b11434 ggml-quants.c, quantize_row_iq4_nl_impl and best_index_int8 with ntry = 7.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.encode.codebook import MAGIC, bucket_tables
from quantkit.kernels.cpu.encode.groups import address, copy
from quantkit.kernels.cpu.jit import helper, inline, kernel
from quantkit.kernels.cpu.simd import (
    cast,
    convert,
    f32_to_f16,
    f32x16,
    i32x16,
    load,
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
    vsqrt,
)

F, I32 = np.float32, np.int32

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: A bucket of the lookup is 10 wide. best_index_int8 takes the upper level at a tie: a boundary belongs to it.
_boundary, _below, _above = bucket_tables([(a + b) / 2 for a, b in zip(VALUES, VALUES[1:], strict=False)], 10)
_TENTH = F(0.1)
_boundary0 = make_constant(f32x16, _boundary[:16], "iq4_boundary0")
_boundary1 = make_constant(f32x16, _boundary[16:], "iq4_boundary1")
_below0 = make_constant(f32x16, [VALUES[i] for i in _below[:16]], "iq4_below0")
_below1 = make_constant(f32x16, [VALUES[i] for i in _below[16:]], "iq4_below1")
_above0 = make_constant(f32x16, [VALUES[i] for i in _above[:16]], "iq4_above0")
_above1 = make_constant(f32x16, [VALUES[i] for i in _above[16:]], "iq4_above1")
_level0 = make_constant(i32x16, _below[:16], "iq4_level0")
_level1 = make_constant(i32x16, _below[16:], "iq4_level1")
_first_half = make_constant(i32x16, [1] * 8 + [0] * 8, "iq4_first_half")

# ---------------------------------------------------------------- rounding to a level


@inline
def _nearest_value(v, tenth):
    """Return the value nearest to v, |v| <= 150; tenth is v / 10, give or take a few ulp."""
    bucket = cast(i32x16, tenth + MAGIC)
    low = lookup32_f32(_below0(), _below1(), bucket)
    high = lookup32_f32(_above0(), _above1(), bucket)
    return select(v >= lookup32_f32(_boundary0(), _boundary1(), bucket), high, low)


@inline
def _nearest_level(v):
    """Return the level nearest to any v, as i32; NaN gives 15, as in the reference."""
    v = vmax(vmin(v, F(130)), F(-130))
    bucket = cast(i32x16, v * _TENTH + MAGIC)
    level = lookup32_f32(_level0(), _level1(), bucket)
    return level + convert(i32x16, v >= lookup32_f32(_boundary0(), _boundary1(), bucket))


@inline
def _store_levels(x, at, inverse, out, o):
    """Round the 32 values at byte ``at`` by 1 / d; store 16 bytes of nibbles."""
    d = splat(f32x16, inverse)
    low, high = _nearest_level(d * load(f32x16, x, at)), _nearest_level(d * load(f32x16, x, at + 64))
    store(out, o, convert(u8x16, low | (high << I32(4))))


# ---------------------------------------------------------------- the search for 16 scales


@inline
def _rate(xt, wt, inverse):
    """Return sum(w q x) and sum(w q q) of every lane for q = the values nearest to x * inverse."""
    tenth = inverse * _TENTH
    sumqx, sumq2 = splat(f32x16, F(0)), splat(f32x16, F(0))
    for j in range(32):
        x = load(f32x16, xt, 64 * j)
        q = _nearest_value(inverse * x, tenth * x)
        wq = load(f32x16, wt, 64 * j) * q
        sumqx = sumqx + wq * x
        sumq2 = sumq2 + wq * q
    return sumqx, sumq2


@helper
def _search(xt, wt, scales):
    """Write the scales of 16 sub-blocks, transposed to [32][16] with their weights; 0 where all |x| < 1e-15.

    |x| * candidate is at most 134, but in lanes of such small x it may be anything: what they compute is thrown away.
    """
    zero = splat(f32x16, F(0))
    amax, top = zero, zero
    for j in range(32):
        x = load(f32x16, xt, 64 * j)
        larger = vabs(x) > amax
        amax, top = select(larger, vabs(x), amax), select(larger, x, top)
    sumqx, sumq2 = _rate(xt, wt, F(1) / (top / F(127)))
    d = select(sumq2 > zero, sumqx / sumq2, zero)
    best = d * sumqx
    for itry in range(-7, 8):
        sumqx, sumq2 = _rate(xt, wt, F(itry - 127) / top)
        better = (sumq2 > zero) & (sumqx * sumqx > best * sumq2)
        d = select(better, sumqx / sumq2, d)
        best = select(better, d * sumqx, best)
    store(scales, 0, select(amax < F(1e-15), zero, d))


@inline
def _load_transposed(source, at, target):
    """Transpose 16 sub-blocks of 32 to [32][16]."""
    transpose16(source, at, 128, target, 0)
    transpose16(source, at + 64, 128, target, 1024)


@inline
def _square_weights(xt, wt):
    for j in range(32):
        x = load(f32x16, xt, 64 * j)
        store(wt, 64 * j, x * x)


@inline
def _importance_weights(xt, wt, sigma2):
    """Turn importances into weights, in place; sigma2 is twice the mean square of each lane's (super-)block."""
    for j in range(32):
        x = load(f32x16, xt, 64 * j)
        store(wt, 64 * j, load(f32x16, wt, 64 * j) * vsqrt(sigma2 + x * x))


@inline
def _inverse_or_zero(d):
    return select(d != F(0), F(1) / d, F(0))


@inline
def _repeated(weights, n):
    """Return the importances, repeated so that any 16 sub-blocks in a row lie side by side; empty if there are none."""
    repeated = np.empty(n + 480 if weights.size else 0, np.float32)
    for i in range(weights.size):
        repeated[i] = weights[i]
    for i in range(weights.size, repeated.size):
        repeated[i] = repeated[i - n]
    return repeated


# ---------------------------------------------------------------- IQ4_NL


@inline
def _encode_16_nl(x, weights, out, xt, wt, scales, count):
    """Encode 16 blocks at address x with the importances at address weights (0: none); store ``count`` of them."""
    _load_transposed(x, 0, xt)
    if weights:
        _load_transposed(weights, 0, wt)
        squares = splat(f32x16, F(0))
        for j in range(32):
            v = load(f32x16, xt, 64 * j)
            squares = squares + v * v
        _importance_weights(xt, wt, squares * F(2 / 32))
    else:
        _square_weights(xt, wt)
    _search(xt, wt, scales)
    store(scales, 64, _inverse_or_zero(load(f32x16, scales, 0)))
    for b in range(count):
        store(out, 18 * b, f32_to_f16(scales[b]))
        _store_levels(x, 128 * b, scales[16 + b], out, 18 * b + 2)


@kernel
def encode_iq4_nl(
    x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int
) -> None:
    """Encode rows row0..row1 of x [rows, n], n a multiple of 32, as IQ4_NL; weights [n] or empty.

    Source: llama.cpp b11434 ggml-quants.c quantize_iq4_nl.
    """
    per_row = x.shape[1] // 32
    repeated = _repeated(weights, x.shape[1])
    xt, wt, scales = np.empty(512, np.float32), np.empty(512, np.float32), np.empty(32, np.float32)
    tail = np.zeros(512, np.float32)
    last = row1 * per_row
    for block in range(row0 * per_row, last, 16):
        count = min(16, last - block)
        source = address(x) + 128 * block
        if count < 16:
            copy(source, address(tail), 128 * count)
            source = address(tail)
        w = address(repeated) + 128 * (block % per_row) if repeated.size else 0
        _encode_16_nl(source, w, address(out) + 18 * block, xt, wt, scales, count)


# ---------------------------------------------------------------- IQ4_XS


@inline
def _mean_squares(x, xt, target):
    """Write twice the mean square of 16 super-blocks, each summed in order: one lane per super-block."""
    squares = splat(f32x16, F(0))
    for part in range(16):
        transpose16(x, 64 * part, 1024, xt, 0)
        for j in range(16):
            v = load(f32x16, xt, 64 * j)
            squares = squares + v * v
    store(target, 0, squares * F(2 / 256))


@inline
def _super_scale(scales, h):
    """Return d of super-block h: the sub-block scale of largest magnitude, the first of equals, becomes -32."""
    largest, top = F(0), F(0)
    for ib in range(8 * h, 8 * h + 8):
        magnitude = abs(scales[ib])
        if magnitude > largest:
            largest, top = magnitude, scales[ib]
    return -top / F(32)


@inline
def _round_scales(scales, codes):
    """Return d of two super-blocks; write the 6-bit codes of 16 scales, and 1 / (d * scale) after ``scales``."""
    d0, d1 = _super_scale(scales, 0), _super_scale(scales, 1)
    d = select(_first_half() != I32(0), splat(f32x16, d0), splat(f32x16, d1))
    level = nearest_int(load(f32x16, scales, 0) * _inverse_or_zero(d))
    level = vmax(vmin(level, I32(31)), I32(-32))
    store(scales, 64, _inverse_or_zero(d * convert(f32x16, level)))
    store(codes, 0, level + I32(32))
    return d0, d1


@inline
def _store_scales(d, codes, h, out):
    """Store d and the 8 codes of super-block h: f16 d, u16 scales_h, u8 scales_l[4]."""
    low, high = I32(0), I32(0)
    for ib in range(8):
        code = codes[8 * h + ib]
        low |= (code & I32(15)) << I32(4 * ib)
        high |= code >> I32(4) << I32(2 * ib)
    store(out, 0, f32_to_f16(d))
    store(out, 2, np.uint16(high))
    store(out, 4, np.uint32(low))


@inline
def _encode_2_xs(x, weights, sigma2, out, xt, wt, scales, codes, count):
    """Encode two super-blocks at address x; store ``count`` of them. sigma2 is used with weights only."""
    _load_transposed(x, 0, xt)
    if weights:
        _load_transposed(weights, 0, wt)
        _importance_weights(xt, wt, sigma2)
    else:
        _square_weights(xt, wt)
    _search(xt, wt, scales)
    d0, d1 = _round_scales(scales, codes)
    _store_scales(d0, codes, 0, out)
    if count == 2:
        _store_scales(d1, codes, 1, out + 136)
    for ib in range(8 * count):
        _store_levels(x, 128 * ib, scales[16 + ib], out, 16 * ib + 8 * (ib // 8 + 1))


@kernel
def encode_iq4_xs(
    x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int
) -> None:
    """Encode rows row0..row1 of x [rows, n], n a multiple of 256, as IQ4_XS; weights [n] or empty.

    Source: llama.cpp b11434 ggml-quants.c quantize_iq4_xs.
    """
    per_row = x.shape[1] // 256
    repeated = _repeated(weights, x.shape[1])
    xt, wt, scales = np.empty(512, np.float32), np.empty(512, np.float32), np.zeros(32, np.float32)
    codes, sigma2 = np.empty(16, np.int32), np.zeros(32, np.float32)
    tail = np.zeros(4096, np.float32)
    last = row1 * per_row
    for batch in range(row0 * per_row, last, 16):
        blocks = min(16, last - batch)
        source = address(x) + 1024 * batch
        if blocks < 16:
            copy(source, address(tail), 1024 * blocks)
            source = address(tail)
        if repeated.size:
            _mean_squares(source, xt, sigma2)
        for pair in range(0, blocks, 2):
            w = address(repeated) + 1024 * ((batch + pair) % per_row) if repeated.size else 0
            for lane in range(8):
                sigma2[16 + lane], sigma2[24 + lane] = sigma2[pair], sigma2[pair + 1]
            to = address(out) + 136 * (batch + pair)
            count = min(2, blocks - pair)
            _encode_2_xs(source + 1024 * pair, w, load(f32x16, sigma2, 64), to, xt, wt, scales, codes, count)

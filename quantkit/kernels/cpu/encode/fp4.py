"""MXFP4 and NVFP4: 4-bit floats (E2M1) with a scale that is a small float.

A level is a sign (bit 3) and one of eight magnitudes; ggml keeps them doubled, and the scale halved::

    MAGNITUDES   0 1 2 3 4 6 8 12
    MXFP4  u8 e, u8 qs[16]       32 values, d = 2^(e - 128)          value j low, j + 16 high nibble of byte j
    NVFP4  u8 d[4], u8 qs[4][8]  4 x 16 values, d = ue4m3 / 2 each   value j low, j + 8 high nibble of byte j

MXFP4's e is floor(log2(largest magnitude)) - 2, biased by 127. log2f rounds: just below 2^k it returns k for the floats
within half an ulp of k (none for small |k|, 44 and 88 for the largest); their number is added to the bits before the
exponent is read. Below 2^-125 the reference's e is negative and wraps around to 232..255.

NVFP4's scale is largest magnitude / 6 as an unsigned float of 4 exponent and 3 mantissa bits, bias 7, at most 448.

The level is the nearest, the lower magnitude (and 0, not -0) at a tie: |x| is compared with the midpoints between
magnitudes times d. They are exact, and so are the differences that the reference compares. Three exceptions: 8 d, if it
overflows, is never the nearest; d = 0 gives level 0; an NVFP4 value so far beyond 448 * 6 that its differences round to
equal numbers takes the first, by comparing one by one.

One lane per (sub-)block, 16 at a time.

With a scale of the whole tensor, by which rows are divided first, NVFP4's scales are searched: ``encode_nvfp4_scaled``.
Of the codes from 2 below to 6 above that of the largest magnitude / 6, the one with the least weighted square error is
kept. The upper ones put the largest magnitude at level 4 instead of 6, between which E2M1 is coarse (the idea of "Four
over six", arXiv 2512.02010). On Gaussian weights this lowers the relative error from .095 to .081.

Source: llama.cpp b11434 ggml-quants.c quantize_row_mxfp4_ref, quantize_row_nvfp4_ref, best_index_mxfp4;
ggml-impl.h ggml_e8m0_to_fp32_half, ggml_fp32_to_ue4m3, ggml_ue4m3_to_fp32.
"""

from __future__ import annotations

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import (
    any_lane,
    cast,
    convert,
    f32x16,
    i32x16,
    load,
    make_shuffle2,
    select,
    splat,
    store,
    transpose16,
    u8x16,
    u8x32,
    vabs,
    vmax,
    vmin,
)
from quantkit.kernels.cpu.encode.batch import blocks_encoder

F, I32 = np.float32, np.int32

MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
_zip_low = make_shuffle2([i // 2 + 16 * (i % 2) for i in range(16)], "fp4_zip_low")
_zip_high = make_shuffle2([8 + i // 2 + 16 * (i % 2) for i in range(16)], "fp4_zip_high")
_zip2_low = make_shuffle2([i // 4 * 2 + i % 2 + 16 * (i // 2 % 2) for i in range(16)], "fp4_zip2_low")
_zip2_high = make_shuffle2([8 + i // 4 * 2 + i % 2 + 16 * (i // 2 % 2) for i in range(16)], "fp4_zip2_high")

# ---------------------------------------------------------------- levels


@inline
def _middles(d):
    """Return the seven midpoints between magnitudes times d; infinite where the larger magnitude overflows."""
    m8, m12 = d * F(8) * F(0.5), d * F(12) * F(0.5)
    return d * F(0.5), d * F(1.5), d * F(2.5), d * F(3.5), d * F(5), d * F(3) + m8, m8 + m12


@inline
def _level(x, middles):
    """Return the level nearest to x, as i32: bits 2, 1, 0 by bisection, bit 3 the sign of all but level 0."""
    m0, m1, m2, m3, m4, m5, m6 = middles
    a, zero = vabs(x), splat(i32x16, I32(0))
    bit2 = a > m3
    bit1 = a > select(bit2, m5, m1)
    bit0 = a > select(bit1, select(bit2, m6, m2), select(bit2, m4, m0))
    level = select(bit2, I32(4), zero) | select(bit1, I32(2), zero) | select(bit0, I32(1), zero)
    return level | select(x < -m0, I32(8), zero)


@inline
def _nibbles(xt, j, half, middles):
    """Return four bytes of levels per lane: rows j .. j + 3 of [row][16], rows from j + half in the high nibbles."""
    word = splat(i32x16, I32(0))
    for i in range(4):
        low = _level(load(f32x16, xt, 64 * (j + i)), middles)
        high = _level(load(f32x16, xt, 64 * (j + i + half)), middles)
        word = word | (low | high << I32(4)) << I32(8 * i)
    return word


@inline
def _largest_magnitudes(xt, rows):
    """Return the largest |x| of each lane."""
    amax = splat(f32x16, F(0))
    for j in range(rows):
        amax = vmax(amax, vabs(load(f32x16, xt, 64 * j)))
    return amax


# ---------------------------------------------------------------- MXFP4


@inline
def _floats_that_round_up(k):
    """Return the number of floats below 2^k whose log2f equals k: floor(ln 2 * 2^p), 2^p the power of two in |k|.

    The j-th float below 2^k is 2^k (1 - j 2^-24), its logarithm k - j 2^-24 / ln 2; ulp(k) / 2 is 2^(p - 24).
    For k > 0 the spacing of floats below k counts, hence k - 1.
    """
    m = select(k > I32(0), k - I32(1), -k)
    zero = splat(i32x16, I32(0))
    count = select(m >= I32(2), I32(1), zero) + select(m >= I32(4), I32(1), zero) + select(m >= I32(8), I32(3), zero)
    count = count + select(m >= I32(16), I32(6), zero) + select(m >= I32(32), I32(11), zero)
    return count + select(m >= I32(64), I32(22), zero) + select(m >= I32(128), I32(44), zero)


@inline
def _e8m0(amax):
    """Return the exponent bytes of 16 blocks, as i32 in 0..255."""
    denormal = amax < F(2.0**-126)
    bits = cast(i32x16, select(denormal, amax * F(2.0**24), amax))
    shift = select(denormal, I32(-24), splat(i32x16, I32(0)))
    above = (bits >> I32(23)) + shift - I32(126)
    e = ((bits + _floats_that_round_up(above)) >> I32(23)) + shift - I32(2)
    return select(amax > F(0), e & I32(255), I32(0))


@inline
def _e8m0_half(e):
    """Return 2^(e - 128): a denormal for e = 0 and 1."""
    small = select(e == I32(0), splat(i32x16, I32(0x00200000)), I32(0x00400000))
    return cast(f32x16, select(e < I32(2), small, (e - I32(1)) << I32(23)))


@inline
def _encode_16_mx(s, x, weights, out, count):
    """Encode 16 blocks at address x; store ``count`` of them. Source: quantize_row_mxfp4_ref."""
    xt, words = s[:512], s[512:].view(np.uint32)
    transpose16(x, 0, 128, xt, 0)
    transpose16(x, 64, 128, xt, 1024)
    e = _e8m0(_largest_magnitudes(xt, 32))
    middles = _middles(_e8m0_half(e))
    for j in range(4):
        store(words, 64 * j, _nibbles(xt, 4 * j, 16, middles))
    a = load(i32x16, words, 0)
    b = load(i32x16, words, 64)
    c = load(i32x16, words, 128)
    d = load(i32x16, words, 192)
    ab, cd = _zip_low(a, b), _zip_low(c, d)
    store(words, 0, _zip2_low(ab, cd))
    store(words, 64, _zip2_high(ab, cd))
    ab, cd = _zip_high(a, b), _zip_high(c, d)
    store(words, 128, _zip2_low(ab, cd))
    store(words, 192, _zip2_high(ab, cd))
    store(words, 256, convert(u8x16, e))
    for block in range(count):
        store(out, 17 * block, load(types.uint8, words, 256 + block))
        store(out, 17 * block + 1, load(u8x16, words, 16 * block))


encode_mxfp4 = blocks_encoder("MXFP4", _encode_16_mx, 16, 4 * 580, gathered=True)


# ---------------------------------------------------------------- NVFP4


@inline
def _nearest_ue4m3(v):
    """Return 16 floats >= 0 as bytes of 4 exponent and 3 mantissa bits, in i32: ties round up, at most 448."""
    bits = cast(i32x16, vmin(v, F(448)))
    exponent = (bits >> I32(23)) - I32(120)
    normal = (exponent << I32(3) | (bits >> I32(20)) & I32(7)) + ((bits >> I32(19)) & I32(1))
    small = vmin(convert(i32x16, vmin(v, F(1)) * F(512) + F(0.5)), I32(7))
    return select(exponent <= I32(0), small, normal)


@inline
def _ue4m3(v):
    """Return the bytes of 16 floats >= 0 as in the reference: from 248 on 448."""
    u = _nearest_ue4m3(v)
    return select(u >= I32(0x78), I32(0x7E), u)


@inline
def _ue4m3_half(u):
    """Return half the value of unsigned E4M3 bytes."""
    normal = cast(f32x16, (u << I32(20)) + I32(119 << 23))
    return select(u < I32(8), convert(f32x16, u) * F(2.0**-10), normal)


@helper
def _search_one_by_one(xt, d, words):
    """Encode 16 sub-blocks like the reference, for values whose differences to several magnitudes are equal."""
    for lane in range(16):
        for j in range(16):
            x, best = xt[16 * j + lane], 0
            error = abs(x)
            for level in range(1, 16):
                value = F(MAGNITUDES[level & 7]) * d[lane]
                e = abs((value if level < 8 else -value) - x)
                if e < error:
                    best, error = level, e
            index = 8 * lane + (j & 7)
            words[index] = best if j < 8 else words[index] | best << 4


@inline
def _write_levels(x, words, middles):
    """Write the levels of 16 sub-blocks of NVFP4 to the first 128 bytes, those of 4 blocks one after another."""
    for j in range(2):
        store(words, 64 * j, _nibbles(x, 4 * j, 8, middles))
    a, b = load(i32x16, words, 0), load(i32x16, words, 64)
    store(words, 0, _zip_low(a, b))
    store(words, 64, _zip_high(a, b))


@inline
def _store_nv_blocks(words, out, count):
    """Store blocks of NVFP4: their levels are at [0, 128), their scales at [128, 144)."""
    for block in range(count):
        store(out, 36 * block, load(types.uint32, words, 128 + 4 * block))
        store(out, 36 * block + 4, load(u8x32, words, 32 * block))


@inline
def _encode_4_nv(s, x, weights, out, count):
    """Encode 4 blocks, 16 sub-blocks, at address x; store ``count`` of them. Source: quantize_row_nvfp4_ref."""
    xt = s[:256]
    d = s[256:272]
    words = s[272:].view(np.uint8)
    transpose16(x, 0, 64, xt, 0)
    amax = _largest_magnitudes(xt, 16)
    scale = _ue4m3(amax / F(6))
    half = _ue4m3_half(scale)
    store(words, 128, convert(u8x16, scale))
    if any_lane(amax >= F(2.0**24)):
        store(d, 0, half)
        _search_one_by_one(xt, d, words)
    else:
        # values with a scale of 0 are < 0.006: level 0
        _write_levels(xt, words, _middles(select(scale == I32(0), F(1), half)))
    _store_nv_blocks(words, out, count)


encode_nvfp4 = blocks_encoder("NVFP4", _encode_4_nv, 4, 4 * 308)

# ---------------------------------------------------------------- NVFP4 with a scale of the tensor

#: Codes of a scale that are tried, relative to that of the largest magnitude / 6.
_FIRST_CODE, _LAST_CODE = -2, 6
_LARGEST_CODE = 126


@inline
def _magnitude(level):
    """Return the doubled magnitude of a level, as f32; the sign is ignored."""
    m = level & I32(7)
    large = select(m < I32(6), m + m - I32(4), (m << I32(2)) - I32(16))
    return convert(f32x16, select(m < I32(4), m, large))


@inline
def _square_error(s, half, weighted):
    """Return the weighted square error of 16 sub-blocks at [0, 256) with weights at [256, 512)."""
    middles = _middles(half)
    total = splat(f32x16, F(0))
    for j in range(16):
        x = load(f32x16, s, 64 * j)
        difference = vabs(x) - _magnitude(_level(x, middles)) * half
        square = difference * difference
        if weighted:
            square = load(f32x16, s, 1024 + 64 * j) * square
        total = total + square
    return total


@inline
def _search_scale(s, weighted):
    """Return the scale codes of 16 sub-blocks with the least square error; at a tie the first."""
    base = _nearest_ue4m3(_largest_magnitudes(s, 16) / F(6))
    best, least = base, splat(f32x16, F(np.inf))
    for offset in range(_FIRST_CODE, _LAST_CODE + 1):
        code = base + I32(offset)
        code = select(code < I32(0), I32(0), select(code > I32(_LARGEST_CODE), I32(_LARGEST_CODE), code))
        error = _square_error(s, _ue4m3_half(code), weighted)
        is_less = error < least
        best, least = select(is_less, code, best), select(is_less, error, least)
    return best


@inline
def _encode_4_scaled(s, x, weights, out, count):
    """Encode 4 blocks, 16 sub-blocks, whose values the scale of the tensor divides, at address x; store ``count``."""
    words = s[512:].view(np.uint8)
    transpose16(x, 0, 64, s, 0)
    if weights != 0:
        transpose16(weights, 0, 64, s, 1024)
        scale = _search_scale(s, True)
    else:
        scale = _search_scale(s, False)
    store(words, 128, convert(u8x16, scale))
    _write_levels(s, words, _middles(_ue4m3_half(scale)))
    _store_nv_blocks(words, out, count)


encode_nvfp4_scaled = blocks_encoder("NVFP4", _encode_4_scaled, 4, 4 * 548)

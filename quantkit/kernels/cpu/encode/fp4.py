"""MXFP4 and NVFP4: 4-bit floats (E2M1) under a scale that is itself a small float.

A level is a sign (bit 3) and one of eight magnitudes; ggml keeps them doubled, and the scale halved::

    MAGNITUDES   0 1 2 3 4 6 8 12
    MXFP4  u8 e, u8 qs[16]       32 values, d = 2^(e - 128)          value j low, j + 16 high nibble of byte j
    NVFP4  u8 d[4], u8 qs[4][8]  4 x 16 values, d = ue4m3 / 2 each   value j low, j + 8 high nibble of byte j

MXFP4's e is floor(log2(largest magnitude)) - 2, biased by 127. log2f rounds: just below 2^k it gives k itself, for
as many floats as lie within half an ulp of k (none for small |k|, 44 and 88 for the largest); their number is
added to the bits before the exponent is read. Below 2^-125 the reference's e is negative and wraps around to 232..255.

NVFP4's scale is largest magnitude / 6 as unsigned float of 4 exponent and 3 mantissa bits, bias 7, at most 448.

The level is the nearest, the lower magnitude (and 0, not -0) at a tie: middles between magnitudes, times d, are exact,
and so are the reference's two differences when it compares them. MXFP4 divides by d, exactly, and looks the level up
(codebook.py); where 8 d overflows, no level above 6 d is ever the nearest. NVFP4 compares with the middles times d;
d = 0 gives level 0, and a value so far beyond 448 * 6 that its differences round to equals takes the first of them,
and is compared one by one.

One lane holds one (sub-)block, 16 at a time.

Source: llama.cpp b11434 ggml-quants.c quantize_row_mxfp4_ref, quantize_row_nvfp4_ref, best_index_mxfp4;
ggml-impl.h ggml_e8m0_to_fp32_half, ggml_fp32_to_ue4m3, ggml_ue4m3_to_fp32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.encode.codebook import MAGIC, bucket_tables
from quantkit.kernels.cpu.encode.groups import address, copy
from quantkit.kernels.cpu.jit import helper, inline, kernel
from quantkit.kernels.cpu.simd import (
    any_lane,
    cast,
    convert,
    f32x16,
    i32x16,
    load,
    load_scalar,
    lookup32_f32,
    make_constant,
    make_shuffle2,
    select,
    splat,
    store,
    store_scalar,
    transpose16,
    types,
    u8x16,
    u8x32,
    vabs,
    vmax,
    vmin,
)

F, I32 = np.float32, np.int32

MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
_MIDDLES = (0.5, 1.5, 2.5, 3.5, 5, 7, 10)
#: The levels from the most negative on, and where each begins: at a tie the one nearer to zero wins.
_ORDER = (15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7)
_STARTS = [-m for m in reversed(_MIDDLES)] + [float(np.nextafter(F(m), F(np.inf))) for m in _MIDDLES]
_boundary, _below, _above = bucket_tables(_STARTS, 1.05, 0.5)
_boundary0 = make_constant(f32x16, _boundary[:16], "mxfp4_boundary0")
_boundary1 = make_constant(f32x16, _boundary[16:], "mxfp4_boundary1")
_below0 = make_constant(i32x16, [_ORDER[i] for i in _below[:16]], "mxfp4_below0")
_below1 = make_constant(i32x16, [_ORDER[i] for i in _below[16:]], "mxfp4_below1")
_above0 = make_constant(i32x16, [_ORDER[i] for i in _above[:16]], "mxfp4_above0")
_above1 = make_constant(i32x16, [_ORDER[i] for i in _above[16:]], "mxfp4_above1")

_zip_low = make_shuffle2([i // 2 + 16 * (i % 2) for i in range(16)], "fp4_zip_low")
_zip_high = make_shuffle2([8 + i // 2 + 16 * (i % 2) for i in range(16)], "fp4_zip_high")
_zip2_low = make_shuffle2([i // 4 * 2 + i % 2 + 16 * (i // 2 % 2) for i in range(16)], "fp4_zip2_low")
_zip2_high = make_shuffle2([8 + i // 4 * 2 + i % 2 + 16 * (i // 2 % 2) for i in range(16)], "fp4_zip2_high")


@inline
def _largest_magnitudes(xt, rows):
    """Return the largest |x| of every lane."""
    amax = splat(f32x16, F(0))
    for j in range(rows):
        amax = vmax(amax, vabs(load(f32x16, xt, 64 * j)))
    return amax


# ---------------------------------------------------------------- MXFP4


@inline
def _floats_that_round_up(k):
    """Return how many floats just below 2^k have log2f equal to k: floor(ln 2 * 2^p), 2^p the power of two in |k|.

    ulp(k) / 2 is 2^(p - 24), and log2(2^k - j ulp) lies j * 2^-24 / ln 2 below k. For k > 0 the spacing of floats
    below k counts, hence k - 1.
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
def _power(exponent):
    return cast(f32x16, (exponent + I32(127)) << I32(23))


@inline
def _level_mx(x, root0, root1):
    """Return the level nearest to x * root0 * root1, |x| < 16 after scaling, as i32."""
    v = x * root0 * root1
    bucket = cast(i32x16, (v * F(1 / 1.05) - F(0.5)) + MAGIC)
    low, high = lookup32_f32(_below0(), _below1(), bucket), lookup32_f32(_above0(), _above1(), bucket)
    return select(v >= lookup32_f32(_boundary0(), _boundary1(), bucket), high, low)


@inline
def _nibbles_mx(xt, j, root0, root1):
    """Return four bytes of levels per lane: rows j .. j + 3 of [row][16], rows j + 16 .. in the high nibbles."""
    word = splat(i32x16, I32(0))
    for i in range(4):
        low = _level_mx(load(f32x16, xt, 64 * (j + i)), root0, root1)
        high = _level_mx(load(f32x16, xt, 64 * (j + i + 16)), root0, root1)
        word = word | (low | high << I32(4)) << I32(8 * i)
    return word


@helper
def _clip(xt, lanes, limit):
    """Limit |x| of the lanes that are marked."""
    for j in range(32):
        x = load(f32x16, xt, 64 * j)
        store(xt, 64 * j, select(lanes, vmax(vmin(x, limit), -limit), x))


@inline
def _encode_16_mx(x, out, xt, words, count):
    """Encode 16 blocks at address x; store ``count`` of them."""
    transpose16(x, 0, 128, xt, 0)
    transpose16(x, 64, 128, xt, 1024)
    e = _e8m0(_largest_magnitudes(xt, 32))
    if any_lane(e == I32(253)):
        _clip(xt, e == I32(253), F(6 * 2.0**125))
    # 1 / d in two factors, for 2^128 is no f32.
    root0 = _power((I32(128) - e) >> I32(1))
    root1 = _power((I32(129) - e) >> I32(1))
    a, b = _nibbles_mx(xt, 0, root0, root1), _nibbles_mx(xt, 4, root0, root1)
    c, d = _nibbles_mx(xt, 8, root0, root1), _nibbles_mx(xt, 12, root0, root1)
    ab, cd = _zip_low(a, b), _zip_low(c, d)
    store(words, 0, _zip2_low(ab, cd))
    store(words, 64, _zip2_high(ab, cd))
    ab, cd = _zip_high(a, b), _zip_high(c, d)
    store(words, 128, _zip2_low(ab, cd))
    store(words, 192, _zip2_high(ab, cd))
    store(words, 256, convert(u8x16, e))
    for block in range(count):
        store_scalar(out, 17 * block, load_scalar(types.uint8, words, 256 + block))
        store(out, 17 * block + 1, load(u8x16, words, 16 * block))


@kernel
def encode_mxfp4(
    x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int
) -> None:
    """Encode rows row0..row1 of x [rows, n], n a multiple of 32, as MXFP4; weights are ignored.

    Source: llama.cpp b11434 ggml-quants.c quantize_row_mxfp4_ref.
    """
    per_row = x.shape[1] // 32
    xt, words, tail = np.empty(512, np.float32), np.empty(68, np.uint32), np.zeros(512, np.float32)
    last = row1 * per_row
    for first in range(row0 * per_row, last, 16):
        count = min(16, last - first)
        source = address(x) + 128 * first
        if count < 16:
            copy(source, address(tail), 128 * count)
            source = address(tail)
        _encode_16_mx(source, address(out) + 17 * first, xt, words, count)


# ---------------------------------------------------------------- NVFP4


@inline
def _ue4m3(v):
    """Return 16 floats >= 0 as bytes of 4 exponent and 3 mantissa bits, in i32: halves round up, from 248 on to 448."""
    bits = cast(i32x16, vmin(v, F(448)))
    exponent = (bits >> I32(23)) - I32(120)
    normal = (exponent << I32(3) | (bits >> I32(20)) & I32(7)) + ((bits >> I32(19)) & I32(1))
    small = vmin(convert(i32x16, vmin(v, F(1)) * F(512) + F(0.5)), I32(7))
    return select(exponent <= I32(0), small, select(normal >= I32(0x78), I32(0x7E), normal))


@inline
def _ue4m3_half(u):
    """Return half the value of such bytes."""
    normal = cast(f32x16, (u << I32(20)) + I32(119 << 23))
    return select(u < I32(8), convert(f32x16, u) * F(2.0**-10), normal)


@inline
def _middles(d):
    """Return the seven middles between magnitudes times d."""
    return d * F(0.5), d * F(1.5), d * F(2.5), d * F(3.5), d * F(5), d * F(7), d * F(10)


@inline
def _level(x, middles):
    """Return the level nearest to x, as i32: bits 2, 1, 0 by halving, bit 3 the sign of all but level 0."""
    m0, m1, m2, m3, m4, m5, m6 = middles
    a, zero = vabs(x), splat(i32x16, I32(0))
    bit2 = a > m3
    bit1 = a > select(bit2, m5, m1)
    bit0 = a > select(bit1, select(bit2, m6, m2), select(bit2, m4, m0))
    level = select(bit2, I32(4), zero) | select(bit1, I32(2), zero) | select(bit0, I32(1), zero)
    return level | select(x < -m0, I32(8), zero)


@inline
def _nibbles_nv(xt, j, middles):
    """Return four bytes of levels per lane: rows j .. j + 3 of [row][16], rows j + 8 .. in the high nibbles."""
    word = splat(i32x16, I32(0))
    for i in range(4):
        low = _level(load(f32x16, xt, 64 * (j + i)), middles)
        high = _level(load(f32x16, xt, 64 * (j + i + 8)), middles)
        word = word | (low | high << I32(4)) << I32(8 * i)
    return word


@helper
def _search_one_by_one(xt, d, words, lanes):
    """Encode 16 sub-blocks as the reference does, for values whose differences to several magnitudes are equal."""
    for lane in range(lanes):
        for j in range(16):
            x, best = xt[16 * j + lane], 0
            error = abs(x)
            for level in range(1, 16):
                value = F(MAGNITUDES[level & 7]) * d[lane]
                e = abs((value if level < 8 else -value) - x)
                if e < error:
                    best, error = level, e
            at = 8 * lane + (j & 7)
            words[at] = best if j < 8 else words[at] | best << 4


@inline
def _encode_16_nv(x, out, xt, d, words, count):
    """Encode 16 sub-blocks (4 blocks) at address x; store ``count`` blocks."""
    transpose16(x, 0, 64, xt, 0)
    amax = _largest_magnitudes(xt, 16)
    scale = _ue4m3(amax / F(6))
    half = _ue4m3_half(scale)
    store(words, 128, convert(u8x16, scale))
    if any_lane(amax >= F(2.0**24)):
        store(d, 0, half)
        _search_one_by_one(xt, d, words, 16)
    else:
        middles = _middles(select(scale == I32(0), F(1), half))  # values under a scale of 0 are < 0.006: level 0
        a, b = _nibbles_nv(xt, 0, middles), _nibbles_nv(xt, 4, middles)
        store(words, 0, _zip_low(a, b))
        store(words, 64, _zip_high(a, b))
    for block in range(count):
        store_scalar(out, 36 * block, load_scalar(types.uint32, words, 128 + 4 * block))
        store(out, 36 * block + 4, load(u8x32, words, 32 * block))


@kernel
def encode_nvfp4(
    x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int
) -> None:
    """Encode rows row0..row1 of x [rows, n], n a multiple of 64, as NVFP4; weights are ignored.

    Source: llama.cpp b11434 ggml-quants.c quantize_row_nvfp4_ref.
    """
    per_row = x.shape[1] // 64
    xt, d, tail = np.empty(256, np.float32), np.empty(16, np.float32), np.zeros(256, np.float32)
    words = np.empty(144, np.uint8)
    last = row1 * per_row
    for first in range(row0 * per_row, last, 4):
        count = min(4, last - first)
        source = address(x) + 256 * first
        if count < 4:
            copy(source, address(tail), 256 * count)
            source = address(tail)
        _encode_16_nv(source, address(out) + 36 * first, xt, d, words, count)

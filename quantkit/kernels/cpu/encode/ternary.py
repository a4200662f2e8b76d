"""TQ1_0, TQ2_0 and Q2_0: weights of -1, 0 and 1 (BitNet, TriLM), times one scale per block.

Bytes of a block (f16 d = largest magnitude; q = round(x / d) + 1, a "trit")::

    TQ2_0  u8 qs[64], f16 d             256 values   byte m of half h: values 128 h + m + 32 n, 2 bits each, n = 0..3
    TQ1_0  u8 qs[48], u8 qh[4], f16 d   256 values   5 trits a byte: m + 32 n (m < 32), 160 + m + 16 n (m < 16);
                                                     4 trits a byte in qh: 240 + m + 4 n
    Q2_0   f16 d, u8 qs[16]              64 values   byte j: values 4 j .. 4 j + 3, 2 bits each

Five trits are the digits of a number below 243, first digit highest, stored as ceil(number * 256 / 243), so that a
decoder gets the digits one after another as the high byte of a multiplication by 3. Rounding is roundf's, halves
away from zero. In all three the largest magnitude maps to 1: level 3 of TQ2_0 and Q2_0 is never written.

Where d is so small that 1 / d is infinite, C converts infinity or NaN to an integer: TQ* then store 1 for every
value (lroundf gives 0 in its low 32 bits), Q2_0 stores 0 (a conversion to int gives INT_MIN).

Source: llama.cpp b11434 ggml-quants.c, quantize_row_tq1_0_ref, quantize_row_tq2_0_ref, quantize_row_q2_0_ref.
"""

from __future__ import annotations

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    VecType,
    cast,
    convert,
    f32_to_f16,
    f32x16,
    hmax,
    load,
    make_shuffle,
    make_shuffle2,
    splat,
    store,
    u8x16,
    u8x64,
    u32x16,
    vabs,
    vmax,
)
from quantkit.kernels.cpu.encode.batch import blocks_encoder

F = np.float32
U8 = np.uint8
U32 = np.uint32

_u8x4, _u32x4 = VecType(types.uint8, 4), VecType(types.uint32, 4)
_join16 = make_shuffle2(range(32), "ternary_join16")
_join32 = make_shuffle2(range(64), "ternary_join32")
_half0 = make_shuffle(range(32), "ternary_half0")
_half1 = make_shuffle(range(32, 64), "ternary_half1")
quarter0 = make_shuffle(range(16), "ternaryquarter0")
quarter1 = make_shuffle(range(16, 32), "ternaryquarter1")
quarter2 = make_shuffle(range(32, 48), "ternaryquarter2")
quarter3 = make_shuffle(range(48, 64), "ternaryquarter3")
_four0 = make_shuffle(range(4), "ternary_four0")
_four1 = make_shuffle(range(4, 8), "ternary_four1")
_four2 = make_shuffle(range(8, 12), "ternary_four2")
_four3 = make_shuffle(range(12, 16), "ternary_four3")


@inline
def largest_magnitude(x, offset, n):
    """Return the largest |x| of n values at byte ``offset``, n a multiple of 64."""
    m0, m1 = splat(f32x16, F(0)), splat(f32x16, F(0))
    for i in range(0, 4 * n, 128):
        m0 = vmax(m0, vabs(load(f32x16, x, offset + i)))
        m1 = vmax(m1, vabs(load(f32x16, x, offset + i + 64)))
    return hmax(vmax(m0, m1))


@inline
def _inverse(d):
    """Return 1 / d, or 0 if that is not finite: every value then rounds to 0."""
    inverse = F(1) / d
    return inverse if inverse < F(np.inf) else F(0)


@inline
def trits(x, offset, factor, low, high):
    """Return 64 values times ``factor`` as bytes: 0 up to ``low``, 2 from ``high`` up, 1 between."""
    v0, v1 = load(f32x16, x, offset) * factor, load(f32x16, x, offset + 64) * factor
    v2, v3 = load(f32x16, x, offset + 128) * factor, load(f32x16, x, offset + 192) * factor
    up = _join32(_join16(v0 >= high, v1 >= high), _join16(v2 >= high, v3 >= high))
    down = _join32(_join16(v0 <= low, v1 <= low), _join16(v2 <= low, v3 <= low))
    return convert(u8x64, up) - convert(u8x64, down) + U8(1)


@inline
def _trits(x, offset, inverse):
    """Return 64 values, rounded to -1, 0, 1, plus 1, as bytes."""
    return trits(x, offset, inverse, F(-0.5), F(0.5))


# ---------------------------------------------------------------- TQ2_0


@inline
def _encode_tq2_0(s, x, weights, out, count):
    """Encode a block at address x. Source: llama.cpp b11434 ggml-quants.c quantize_row_tq2_0_ref."""
    d = largest_magnitude(x, 0, 256)
    inverse = _inverse(d)
    for h in range(2):
        low, high = _trits(x, 512 * h, inverse), _trits(x, 512 * h + 256, inverse)
        pairs = low | (high << U8(4))
        store(out, 32 * h, _half0(pairs) | (_half1(pairs) << U8(2)))
    store(out, 64, f32_to_f16(d))


encode_tq2_0 = blocks_encoder("TQ2_0", _encode_tq2_0, 1, 0)


# ---------------------------------------------------------------- TQ1_0


@inline
def number_of_digits(a, b, c, d, e):
    """Return 81 a + 27 b + 9 c + 3 d + e, at most 242."""
    q = a + a + a + b
    q = q + q + q + c
    q = q + q + q + d
    return q + q + q + e


@inline
def fraction(q):
    """Return ceil(q * 256 / 243) for q in 0..242, in 32-bit lanes: 69041 / 65536 is near enough to 256 / 243."""
    return (q * U32(69041) + U32(65535)) >> U32(16)


@inline
def _encode_tq1_0(s, x, weights, out, count):
    """Encode a block at address x. Source: llama.cpp b11434 ggml-quants.c quantize_row_tq1_0_ref."""
    d = largest_magnitude(x, 0, 256)
    inverse = _inverse(d)
    t0, t1 = _trits(x, 0, inverse), _trits(x, 256, inverse)
    t2, t3 = _trits(x, 512, inverse), _trits(x, 768, inverse)
    q = number_of_digits(_half0(t0), _half1(t0), _half0(t1), _half1(t1), _half0(t2))
    store(out, 0, convert(u8x16, fraction(convert(u32x16, quarter0(q)))))
    store(out, 16, convert(u8x16, fraction(convert(u32x16, quarter1(q)))))
    q = number_of_digits(quarter2(t2), quarter3(t2), quarter0(t3), quarter1(t3), quarter2(t3))
    store(out, 32, convert(u8x16, fraction(convert(u32x16, q))))
    t = quarter3(t3)
    q = number_of_digits(_four0(t), _four1(t), _four2(t), _four3(t), splat(_u8x4, U8(0)))
    store(out, 48, convert(_u8x4, fraction(convert(_u32x4, q))))
    store(out, 52, f32_to_f16(d))


encode_tq1_0 = blocks_encoder("TQ1_0", _encode_tq1_0, 1, 0)


# ---------------------------------------------------------------- Q2_0


@inline
def _encode_q2_0(s, x, weights, out, count):
    """Encode a block at address x. Source: llama.cpp b11434 ggml-quants.c quantize_row_q2_0_ref."""
    d = largest_magnitude(x, 0, 64)
    inverse = _inverse(d)
    four = cast(u32x16, _trits(x, 0, inverse))
    if d > F(0) and inverse == F(0):
        four = splat(u32x16, U32(0))
    byte = four | four >> U32(6) | four >> U32(12) | four >> U32(18)
    store(out, 0, f32_to_f16(d))
    store(out, 2, convert(u8x16, byte))


encode_q2_0 = blocks_encoder("Q2_0", _encode_q2_0, 1, 0)

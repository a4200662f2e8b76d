"""Unpackers of Q2_K, Q3_K, Q4_K, Q5_K, Q6_K: super-blocks of 256 values with quantized scales.

Bytes of a super-block (llama.cpp b11434 ggml-common.h)::

    Q2_K  scales 16 | qs 64 | d f16 | dmin f16              d * (s & 15) * q - dmin * (s >> 4), one s per 16 values
    Q3_K  hmask 32 | qs 64 | scales 12 | d f16              d * (s - 32) * (q - 4), 6-bit s per 16 values
    Q4_K  d f16 | dmin f16 | scales 12 | qs 128             d * s * q - dmin * m, 6-bit s and m per 32 values
    Q5_K  d f16 | dmin f16 | scales 12 | qh 32 | qs 128     the same, q of 5 bits
    Q6_K  ql 128 | qh 64 | scales 16 int8 | d f16           d * s * (q - 32), s per 16 values

2-bit fields: byte b of 32 holds values b, b + 32, b + 64, b + 96 of 128, from the low bits up. 4-bit fields: byte b
of 32 (Q6_K: of 64) holds values b and b + 32 (b + 64). One-bit masks: bit k of byte b belongs to value b + 32 * k.
"""

from __future__ import annotations

from typing import Any

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    f32x16,
    i8x16,
    i8x64,
    load,
    make_constant,
    make_shuffle,
    make_shuffle2,
    select,
    splat,
    u8x16,
    u8x32,
    u8x64,
    u32x4,
)
from quantkit.kernels.cpu.unpack.lanes import below, crumbs, half_at, high_halves, low_halves, twice32

#: Masks of bits 0 and 1, 2 and 3, 4 and 5, 6 and 7 of a byte, 32 lanes each.
bits01 = make_constant(u8x64, [1] * 32 + [2] * 32, "k_quants.bits01")
bits23 = make_constant(u8x64, [4] * 32 + [8] * 32, "k_quants.bits23")
bits45 = make_constant(u8x64, [16] * 32 + [32] * 32, "k_quants.bits45")
bits67 = make_constant(u8x64, [64] * 32 + [128] * 32, "k_quants.bits67")

#: Q3_K: the 16 low nibbles from bytes 2..9 of x and of x >> 4, and bytes 10..13 four times, shifted 0, 2, 4, 6.
q3_low = make_shuffle2([*range(2, 10), *range(18, 26)], "k_quants.q3_low")
q3_high = make_shuffle([10, 11, 12, 13] * 4, "k_quants.q3_high")
q3_shifts = make_constant(u32x4, [0, 2, 4, 6], "k_quants.q3_shifts")

#: Q4_K, Q5_K: bytes 4..7 hold 6 bits of scales 0..3 and the top bits of scales 4..7; 8..11 the same for minimums;
#: 12..15 the low nibbles of scales 4..7, and shifted by 4 those of minimums 4..7. Every lane twice.
sub_scale_low = make_shuffle([4, 4, 5, 5, 6, 6, 7, 7, 12, 12, 13, 13, 14, 14, 15, 15], "k_quants.scale_low")
sub_scale_top = make_shuffle([4, 4, 5, 5, 6, 6, 7, 7] * 2, "k_quants.scale_top")
sub_min_low = make_shuffle2([8, 8, 9, 9, 10, 10, 11, 11, *(16 + i // 2 for i in range(24, 32))], "k_quants.min_low")
sub_min_top = make_shuffle([8, 8, 9, 9, 10, 10, 11, 11] * 2, "k_quants.min_top")
sub_mask_low = make_constant(u8x16, [63] * 8 + [15] * 8, "k_quants.mask_low")
sub_mask_top = make_constant(u8x16, [0] * 8 + [48] * 8, "k_quants.mask_top")


@inline
def nibbles32(data: int, offset: int) -> Any:
    """Return four vectors of 4-bit values from 128 bytes, in value order, unsigned."""
    a, b = load(u8x64, data, offset), load(u8x64, data, offset + 64)
    al = a & 15
    ah = a >> 4
    bl = b & 15
    bh = b >> 4
    return low_halves(al, ah), high_halves(al, ah), low_halves(bl, bh), high_halves(bl, bh)


@inline
def mask_bits32(data: int, offset: int, value: int) -> Any:
    """Return four vectors of ``value`` where a value's bit in a mask of 32 bytes is set, else 0."""
    h, weight = twice32(load(u8x32, data, offset)), splat(u8x64, value)
    return (
        select((h & bits01()) != 0, weight, 0),
        select((h & bits23()) != 0, weight, 0),
        select((h & bits45()) != 0, weight, 0),
        select((h & bits67()) != 0, weight, 0),
    )


@inline
def sub_scales(data: int, offset: int) -> Any:
    """Return scales d * s and minimums dmin * m of Q4_K and Q5_K, whose first 16 bytes have one layout."""
    head = load(u8x16, data, offset)
    top = (head >> 2) & 48
    s = (sub_scale_low(head) & sub_mask_low()) | (sub_scale_top(top) & sub_mask_top())
    m = (sub_min_low(head, head >> 4) & sub_mask_low()) | (sub_min_top(top) & sub_mask_top())
    return convert(f32x16, s) * half_at(data, offset), convert(f32x16, m) * half_at(data, offset + 2)


@inline
def unpack_q2_k(data: int, offset: int) -> Any:
    """84 bytes."""
    l0, l1, l2, l3 = crumbs(data, offset + 16)
    s = load(u8x16, data, offset)
    scales = convert(f32x16, s & 15) * half_at(data, offset + 80)
    mins = convert(f32x16, s >> 4) * half_at(data, offset + 82)
    return cast(i8x64, l0), cast(i8x64, l1), cast(i8x64, l2), cast(i8x64, l3), scales, mins


@inline
def unpack_q3_k(data: int, offset: int) -> Any:
    """110 bytes; a bit of hmask adds 4."""
    l0, l1, l2, l3 = crumbs(data, offset + 32)
    h0, h1, h2, h3 = mask_bits32(data, offset, 4)
    l0 = below(l0 | h0, 4)
    l1 = below(l1 | h1, 4)
    l2 = below(l2 | h2, 4)
    l3 = below(l3 | h3, 4)
    # The last 16 bytes: two of qs, 12 of scales, d.
    tail = load(u8x16, data, offset + 94)
    high = cast(u8x16, cast(u32x4, q3_high(tail)) >> q3_shifts()) & 3
    s = (q3_low(tail, tail >> 4) & 15) | (high << 4)
    scales = convert(f32x16, cast(i8x16, s - 32)) * half_at(data, offset + 108)
    return l0, l1, l2, l3, scales, None


@inline
def unpack_q4_k(data: int, offset: int) -> Any:
    """144 bytes."""
    l0, l1, l2, l3 = nibbles32(data, offset + 16)
    scales, mins = sub_scales(data, offset)
    return cast(i8x64, l0), cast(i8x64, l1), cast(i8x64, l2), cast(i8x64, l3), scales, mins


@inline
def unpack_q5_k(data: int, offset: int) -> Any:
    """176 bytes; a bit of qh adds 16."""
    l0, l1, l2, l3 = nibbles32(data, offset + 48)
    h0, h1, h2, h3 = mask_bits32(data, offset + 16, 16)
    scales, mins = sub_scales(data, offset)
    return cast(i8x64, l0 | h0), cast(i8x64, l1 | h1), cast(i8x64, l2 | h2), cast(i8x64, l3 | h3), scales, mins


@inline
def unpack_q6_k(data: int, offset: int) -> Any:
    """210 bytes."""
    a = load(u8x64, data, offset)
    b = load(u8x64, data, offset + 64)
    h = load(u8x64, data, offset + 128)
    h0 = (h << 4) & 48
    h1 = (h << 2) & 48
    h2 = h & 48
    h3 = (h >> 2) & 48
    l0, l1 = (a & 15) | low_halves(h0, h1), (a >> 4) | low_halves(h2, h3)
    l2, l3 = (b & 15) | high_halves(h0, h1), (b >> 4) | high_halves(h2, h3)
    scales = convert(f32x16, load(i8x16, data, offset + 192)) * half_at(data, offset + 208)
    return below(l0, 32), below(l1, 32), below(l2, 32), below(l3, 32), scales, None

"""Unpackers of ik_llama.cpp's own types: super-blocks of non-linear levels, IQ2_K to IQ6_K and those of a row's scale.

Bytes of a row header (KS, KSS, KL) and of a block of 256 values (ik_llama.cpp 8337e4cd3, ggml-common.h)::

    IQ2_K    d f16 | extra u16 | scales 8 | qs 64                 d * (s - 8) * (codebook[q] + 5 * shift)
    IQ3_K    d f16 | extra u16 | signs u16 | scales 8 | qs 64 | qh 32    +-d * (2 s + 1) * (codebook[q] + 4 * shift)
    IQ4_K    d f16 | extra u16 | scales 12 | qs 128               d * (s - 32) * (codebook[q] + 4 * shift)
    IQ5_K    d f16 | extra u16 | scales 12 | qs 128 | qh 32       d * (s - 32) * (codebook[q] + 2 * shift)
    IQ6_K    d f16 | extra u16 | scales 16 int8 | qs 128 | qh 64  d * s * (codebook[q] + shift)
    IQ2_KS   d f16 | extra u16 | scales 4 | qs 64                 d * (s - 16) * (codebook[q] + 5 * shift)
    IQ3_KS   d f16 | extra u16 | scales 4 | qs 64 | qh 32         d * (s - 16) * (codebook[q] + 4 * shift)
    IQ4_KS   d f32 | scales 8 | qs 128                            d * ((s & 254) - 127) * (codebook[q] + 4 * (s & 1))
    IQ5_KS   d f32 | scales 8 | qs 128 | qh 32                    d * ((s & 254) - 127) * (codebook[q] + 2 * (s & 1))
    IQ4_KSS  d f32 | 64 u16                                       as IQ4_KS
    IQ2_KL   d f16 | scales_h u16 | scales_l 4 | qs 64 | qh 16    d * (s - 32) * grid[q], two values for a q

K: a scale and a shift for each 16 values, the others: for 32. A bit of ``extra`` is a shift; in IQ2_KS and IQ3_KS the
other 8 bits are the fifth bits of the scales. Fields of 2 bits and qh of 32 bytes lie as in Q2_K and Q3_K, fields of 4
bits as in IQ4_XS if there is no qh, else as in Q5_K; qh of IQ6_K as in Q6_K. Codebooks: quantkit/kernels/tables.py.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    VecType,
    cast,
    convert,
    f32x16,
    i8x16,
    i8x32,
    i8x64,
    load,
    lookup64,
    make_constant,
    make_shuffle,
    make_shuffle2,
    mask_bits,
    select,
    splat,
    u8x8,
    u8x16,
    u8x64,
    u16x32,
    u32x16,
)
from quantkit.kernels.cpu.unpack import i_quants, k_quants
from quantkit.kernels.cpu.unpack.lanes import (
    crumbs,
    each_twice,
    half_at,
    high_quarters,
    in_turn8,
    lookup_all,
    lookup_all_64,
    low_quarters,
    mask_of_bits,
    nibbles16,
    nibbles16_of,
    u8x4,
)
from quantkit.kernels.tables import table

u64x2 = VecType(types.uint64, 2)

codebook_2 = make_constant(i8x16, table("kvalues_iq2nl").tolist() * 4, "ik_quants.codebook_2")
codebook_3 = make_constant(i8x16, table("kvalues_iq3nl").tolist() * 2, "ik_quants.codebook_3")
codebook_5 = make_constant(i8x32, table("kvalues_iq5nl").tolist(), "ik_quants.codebook_5")
codebook_6 = make_constant(i8x64, table("kvalues_iq6nl").tolist(), "ik_quants.codebook_6")
#: IQ2_KL: the first, and the second, values of pairs.
firsts = make_constant(i8x32, table("iq2kl_grid")[:, 0].tolist(), "ik_quants.firsts")
seconds = make_constant(i8x32, table("iq2kl_grid")[:, 1].tolist(), "ik_quants.seconds")
first_pairs = make_shuffle2([64 * (i % 2) + i // 2 for i in range(64)], "ik_quants.first_pairs")
last_pairs = make_shuffle2([64 * (i % 2) + 32 + i // 2 for i in range(64)], "ik_quants.last_pairs")
#: 16 bytes four times; masks of a bit for each 16.
four_times = make_shuffle([*range(16)] * 4, "ik_quants.four_times")
bits0123 = make_constant(u8x64, [1 << i // 16 for i in range(64)], "ik_quants.bits0123")
bits4567 = make_constant(u8x64, [16 << i // 16 for i in range(64)], "ik_quants.bits4567")

fields_16 = make_constant(u32x16, range(0, 32, 2), "ik_quants.fields_16")
upper8 = make_shuffle(range(8, 16), "ik_quants.upper8")
#: Nibbles of 4 bytes, all low before all high, each twice.
nibbles_twice = make_shuffle2([i // 2 for i in range(16)], "ik_quants.nibbles_twice")
#: A shift for 16 values.
shift16_0 = make_shuffle([i // 16 for i in range(64)], "ik_quants.shift16_0")
shift16_1 = make_shuffle([4 + i // 16 for i in range(64)], "ik_quants.shift16_1")
shift16_2 = make_shuffle([8 + i // 16 for i in range(64)], "ik_quants.shift16_2")
shift16_3 = make_shuffle([12 + i // 16 for i in range(64)], "ik_quants.shift16_3")

# ---------------------------------------------------------------- shared by several types


@inline
def raised16(levels: Any, shifts: Any) -> Any:
    """Raise each group of 16 of 256 levels by one of 16 bytes."""
    l0, l1, l2, l3 = levels
    return (
        l0 + cast(i8x64, shift16_0(shifts)),
        l1 + cast(i8x64, shift16_1(shifts)),
        l2 + cast(i8x64, shift16_2(shifts)),
        l3 + cast(i8x64, shift16_3(shifts)),
    )


@inline
def raised32(levels: Any, shifts: Any) -> Any:
    """Raise each group of 32 of 256 levels by one of the first 8 bytes of ``shifts``."""
    l0, l1, l2, l3 = levels
    return (
        l0 + cast(i8x64, i_quants.shift32_0(shifts)),
        l1 + cast(i8x64, i_quants.shift32_1(shifts)),
        l2 + cast(i8x64, i_quants.shift32_2(shifts)),
        l3 + cast(i8x64, i_quants.shift32_3(shifts)),
    )


@inline
def bits16(data: int, offset: int) -> Any:
    """Return the bits of a u16 as 16 bytes of 0 or 1."""
    return select(mask_of_bits(load(types.uint16, data, offset)), splat(u8x16, 1), 0)


@inline
def levels2(data: int, offset: int) -> Any:
    """Return 256 levels of 2-bit indices: 64 bytes."""
    q0, q1, q2, q3 = crumbs(data, offset)
    return lookup_all(codebook_2(), q0, q1, q2, q3)


@inline
def levels3(data: int, offset: int) -> Any:
    """Return 256 levels of 3-bit indices: 64 bytes, and 32 of third bits."""
    q0, q1, q2, q3 = crumbs(data, offset)
    h0, h1, h2, h3 = k_quants.mask_bits32(data, offset + 64, 4)
    return lookup_all(codebook_3(), q0 | h0, q1 | h1, q2 | h2, q3 | h3)


@inline
def levels4(data: int, offset: int) -> Any:
    """Return 256 levels of 4-bit indices: 128 bytes."""
    q0, q1, q2, q3 = nibbles16(data, offset, 16)
    return lookup_all(i_quants.codebook(), q0, q1, q2, q3)


@inline
def levels5(data: int, offset: int) -> Any:
    """Return 256 levels of 5-bit indices: 128 bytes, and 32 of fifth bits."""
    q0, q1, q2, q3 = k_quants.nibbles32(data, offset)
    h0, h1, h2, h3 = k_quants.mask_bits32(data, offset + 128, 16)
    return lookup_all_64(codebook_5(), q0 | h0, q1 | h1, q2 | h2, q3 | h3)


# ---------------------------------------------------------------- a scale for 16 values


@inline
def scales4(data: int, offset: int) -> Any:
    """Return 16 scales of 4 bits, from 8 bytes."""
    s = load(u8x8, data, offset)
    return in_turn8(s & 15, s >> 4)


@inline
def scales6(data: int, offset: int) -> Any:
    """Return s - 32 for IQ4_K and IQ5_K, whose first 16 bytes have one layout: 2 bits of each s, then 4 bits."""
    high = (splat(u32x16, load(types.uint32, data, offset + 4)) >> fields_16()) & 3
    return cast(i8x16, (scales4(data, offset + 8) | (convert(u8x16, high) << 4)) - 32)


@inline
def iq2_k_scales(data: int, offset: int) -> Any:
    """Return s - 8."""
    return cast(i8x16, scales4(data, offset + 4) - 8)


@inline
def iq3_k_scales(data: int, offset: int) -> Any:
    """Return +-(2 s + 1)."""
    s = cast(i8x16, (scales4(data, offset + 6) << 1) | 1)
    return select(mask_of_bits(load(types.uint16, data, offset + 4)), -s, s)


@inline
def unpack_iq2_k(data: int, offset: int) -> Any:
    """76 bytes."""
    l0, l1, l2, l3 = raised16(levels2(data, offset + 12), bits16(data, offset + 2) * 5)
    scales = convert(f32x16, iq2_k_scales(data, offset)) * half_at(data, offset)
    return l0, l1, l2, l3, scales, None


@inline
def unpack_iq3_k(data: int, offset: int) -> Any:
    """110 bytes."""
    l0, l1, l2, l3 = raised16(levels3(data, offset + 14), bits16(data, offset + 2) << 2)
    scales = convert(f32x16, iq3_k_scales(data, offset)) * half_at(data, offset)
    return l0, l1, l2, l3, scales, None


@inline
def unpack_iq4_k(data: int, offset: int) -> Any:
    """144 bytes."""
    l0, l1, l2, l3 = raised16(levels4(data, offset + 16), bits16(data, offset + 2) << 2)
    return l0, l1, l2, l3, convert(f32x16, scales6(data, offset)) * half_at(data, offset), None


@inline
def unpack_iq5_k(data: int, offset: int) -> Any:
    """176 bytes."""
    l0, l1, l2, l3 = raised16(levels5(data, offset + 16), bits16(data, offset + 2) << 1)
    return l0, l1, l2, l3, convert(f32x16, scales6(data, offset)) * half_at(data, offset), None


@inline
def unpack_iq6_k(data: int, offset: int) -> Any:
    """212 bytes."""
    q0, q1, q2, q3 = k_quants.nibbles32(data, offset + 20)
    h0, h1, h2, h3 = crumbs(data, offset + 148)
    levels = lookup_all_64(codebook_6(), q0 | (h0 << 4), q1 | (h1 << 4), q2 | (h2 << 4), q3 | (h3 << 4))
    l0, l1, l2, l3 = raised16(levels, bits16(data, offset + 2))
    scales = convert(f32x16, load(i8x16, data, offset + 4)) * half_at(data, offset)
    return l0, l1, l2, l3, scales, None


# ---------------------------------------------------------------- a scale for 32 values, and one for the row


@inline
def iq2_ks_scales(data: int, offset: int, extra: Any) -> Any:
    """Return s - 16, each twice: nibbles in turn, their fifth bits after the shifts."""
    low = load(u8x4, data, offset + 2)
    s = i_quants.halves_twice(low & 15, low >> 4) | (each_twice(upper8(extra)) << 4)
    return cast(i8x16, s - 16)


@inline
def unpack_iq2_ks(data: int, offset: int) -> Any:
    """70 bytes."""
    extra = bits16(data, offset)
    l0, l1, l2, l3 = raised32(levels2(data, offset + 6), extra * 5)
    return l0, l1, l2, l3, convert(f32x16, iq2_ks_scales(data, offset, extra)), None


@inline
def iq3_ks_scales(data: int, offset: int, extra: Any) -> Any:
    """Return s - 16, each twice: all low nibbles, then all high ones, their fifth bits before the shifts."""
    low = load(u8x4, data, offset + 2)
    return cast(i8x16, (nibbles_twice(low & 15, low >> 4) | (each_twice(extra) << 4)) - 16)


@inline
def unpack_iq3_ks(data: int, offset: int) -> Any:
    """102 bytes."""
    extra = bits16(data, offset)
    l0, l1, l2, l3 = raised32(levels3(data, offset + 6), upper8(extra) << 2)
    return l0, l1, l2, l3, convert(f32x16, iq3_ks_scales(data, offset, extra)), None


@inline
def iq4_ks_scales(s: Any) -> Any:
    """Return (s & 254) - 127 for the first 8 bytes, each twice."""
    return convert(f32x16, cast(i8x16, each_twice(s & 254) - 127))


@inline
def unpack_iq4_ks(data: int, offset: int) -> Any:
    """136 bytes."""
    s = load(u8x8, data, offset)
    l0, l1, l2, l3 = raised32(levels4(data, offset + 8), (s & 1) << 2)
    return l0, l1, l2, l3, iq4_ks_scales(s), None


@inline
def unpack_iq5_ks(data: int, offset: int) -> Any:
    """168 bytes."""
    s = load(u8x8, data, offset)
    l0, l1, l2, l3 = raised32(levels5(data, offset + 8), (s & 1) << 1)
    return l0, l1, l2, l3, iq4_ks_scales(s), None


@inline
def without_last_bits(words: Any) -> Any:
    """Return the bytes of 32 u16, decoded: x ^ x >> 1 of the upper 15 bits."""
    x = words & 0xFFFE
    return cast(u8x64, x ^ (x >> 1))


@inline
def iq4_kss_fields(data: int, offset: int) -> Any:
    """Return 64 bytes of indices, 64 more, and s: the lowest bits of 8 u16."""
    a, b = load(u16x32, data, offset), load(u16x32, data, offset + 64)
    s = mask_bits((a & 1) != 0) | (mask_bits((b & 1) != 0) << types.uint64(32))
    return without_last_bits(a), without_last_bits(b), cast(u8x16, splat(u64x2, s))


@inline
def unpack_iq4_kss(data: int, offset: int) -> Any:
    """128 bytes."""
    a, b, s = iq4_kss_fields(data, offset)
    q0, q1, q2, q3 = nibbles16_of(a, b)
    l0, l1, l2, l3 = raised32(lookup_all(i_quants.codebook(), q0, q1, q2, q3), (s & 1) << 2)
    return l0, l1, l2, l3, iq4_ks_scales(s), None


@inline
def iq2_kl_scales(data: int, offset: int) -> Any:
    """Return s - 32, each twice."""
    low = load(u8x4, data, offset + 2)
    high = (splat(u32x16, load(types.uint16, data, offset)) >> i_quants.shifts_xs()) & 3
    return cast(i8x16, (nibbles_twice(low & 15, low >> 4) | (convert(u8x16, high) << 4)) - 32)


@inline
def unpack_iq2_kl(data: int, offset: int) -> Any:
    """86 bytes; 4-bit fields as in IQ4_XS, each with a fifth bit, stand for two values."""
    q, h = load(u8x64, data, offset + 6), four_times(load(u8x16, data, offset + 70))
    a = low_quarters(q & 15, q >> 4) | select((h & bits0123()) != 0, splat(u8x64, 16), 0)
    b = high_quarters(q & 15, q >> 4) | select((h & bits4567()) != 0, splat(u8x64, 16), 0)
    a0 = lookup64(firsts(), a)
    a1 = lookup64(seconds(), a)
    b0 = lookup64(firsts(), b)
    b1 = lookup64(seconds(), b)
    scales = convert(f32x16, iq2_kl_scales(data, offset))
    return first_pairs(a0, a1), last_pairs(a0, a1), first_pairs(b0, b1), last_pairs(b0, b1), scales, None

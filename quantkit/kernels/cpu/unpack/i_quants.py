"""Unpackers of the i-quants: levels looked up in a codebook (IQ4) or 4 or 8 at a time in a grid (IQ1, IQ2, IQ3).

Bytes of a block (llama.cpp b11434 ggml-common.h); grids and codebooks: quantkit/kernels/tables.py::

    IQ4_NL   32:  d f16 | qs 16                                     d * codebook[q], halves of bytes as in Q4_0
    IQ4_XS   256: d f16 | scales_h u16 | scales_l 4 | qs 128        d * (s - 32) * codebook[q], 6-bit s per 32 values
    IQ3_XXS  256: d f16 | qs 64 | 8 u32: 4 x 7 signs, 4-bit s       d * (0.5 + s) * 0.5 * grid[q]
    IQ3_S    256: d f16 | qs 64 | qh 8 | signs 32 | scales 4        d * (1 + 2 s) * grid[q], s per 32 values
    IQ2_XXS  256: d f16 | 8 x (4 qs, u32: 4 x 7 signs, 4-bit s)     d * (0.5 + s) * 0.25 * grid[q]
    IQ2_XS   256: d f16 | 32 u16: 9-bit q, 7 signs | scales 8       the same, s per 16 values
    IQ2_S    256: d f16 | qs 32 | signs 32 | qh 8 | scales 8        the same
    IQ1_S    256: d f16 | qs 32 | 8 u16: 4 x 3 bits of q, s, sign   d * (2 s + 1) * (grid[q] +- 1/8), s, sign per 32
    IQ1_M    256: qs 32 | qh 16 | 4 u16: 4 x 3-bit s, 4 bits of d   the same, s per 16, sign per 8 values

and of single rows of IQ1_S_R4 and IQ1_M_R4 (ik_llama.cpp 8337e4cd3), which begin with d f16::

    IQ1_S_ROW 32: qs 4 | u16: 4 x 3 bits of q, s, sign              as IQ1_S
    IQ1_M_ROW 32: qs 4 | qh 2 | s 1: two nibbles                    d * s * (grid[q] +- 1/8), s per 16, sign per 8

Seven signs encode eight: the eighth makes the number of negative values even. IQ1's eighths become integers: levels
are 8 * grid +- 1, the scale an eighth (exact: d is an f16, so nothing underflows).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    extract,
    f16_to_f32,
    f32x16,
    i8x8,
    i8x16,
    i8x32,
    load,
    make_constant,
    make_shuffle,
    make_shuffle2,
    popcount,
    select,
    splat,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
    u16x8,
    u16x32,
    u32x8,
    u32x16,
)
from quantkit.kernels.cpu.unpack.lanes import (
    block_scales,
    each_4_times,
    each_twice,
    fields_of_7,
    half_at,
    in_turn8,
    in_turn16,
    load_pieces,
    lookup_all,
    make_grid,
    mask_of_bits,
    nibbles16,
    u8x4,
    u16x4,
    u16x64,
    u64x4,
)
from quantkit.kernels.tables import table

codebook = make_constant(i8x16, table("kvalues_iq4nl").tolist(), "i_quants.codebook")

iq3xxs = make_grid(table("iq3xxs_grid"), "iq3xxs_grid")
iq3s = make_grid(table("iq3s_grid"), "iq3s_grid")
iq2xxs = make_grid(table("iq2xxs_grid"), "iq2xxs_grid")
iq2xs = make_grid(table("iq2xs_grid"), "iq2xs_grid")
iq2s = make_grid(table("iq2s_grid"), "iq2s_grid")
iq1s_8 = make_grid(table("iq1s_grid") * np.int8(8), "iq1s_grid_8")

#: IQ2_XXS: even words are indices, odd words hold signs and scale.
even_words = make_shuffle(range(0, 16, 2), "i_quants.even_words")
odd_words = make_shuffle(range(1, 16, 2), "i_quants.odd_words")
#: Each of 8 lanes 4 times.
eight_4_times = make_shuffle([i // 4 for i in range(32)], "i_quants.eight_4_times")
#: Nibbles of 4 bytes, low before high, each twice: a scale of 32 values as two of 16.
halves_twice = make_shuffle2([4 * (i // 2 % 2) + i // 4 for i in range(16)], "i_quants.halves_twice")

shifts3 = make_constant(u32x16, [0, 3, 6, 9] * 4, "i_quants.shifts3")
shifts3_16 = make_constant(u16x32, [0, 3, 6, 9] * 8, "i_quants.shifts3_16")
shifts2_16 = make_constant(u16x32, [0, 2, 4, 6] * 8, "i_quants.shifts2_16")
shifts_xs = make_constant(u32x16, [i // 2 * 2 for i in range(16)], "i_quants.shifts_xs")

#: IQ1_S: one shift for 32 values; IQ1_M: one for 8.
shift32_0 = make_shuffle([i // 32 for i in range(64)], "i_quants.shift32_0")
shift32_1 = make_shuffle([2 + i // 32 for i in range(64)], "i_quants.shift32_1")
shift32_2 = make_shuffle([4 + i // 32 for i in range(64)], "i_quants.shift32_2")
shift32_3 = make_shuffle([6 + i // 32 for i in range(64)], "i_quants.shift32_3")
shift8_0 = make_shuffle([i // 8 for i in range(64)], "i_quants.shift8_0")
shift8_1 = make_shuffle([8 + i // 8 for i in range(64)], "i_quants.shift8_1")
shift8_2 = make_shuffle([16 + i // 8 for i in range(64)], "i_quants.shift8_2")
shift8_3 = make_shuffle([24 + i // 8 for i in range(64)], "i_quants.shift8_3")


# ---------------------------------------------------------------- IQ4


@inline
def unpack_iq4_nl(data: int, offset: int) -> Any:
    """8 blocks of 18 bytes."""
    q0, q1, q2, q3 = nibbles16(data, offset + 2, 18)
    l0, l1, l2, l3 = lookup_all(codebook(), q0, q1, q2, q3)
    return l0, l1, l2, l3, block_scales(data, offset, 18), None


@inline
def iq4_xs_scales(data: int, offset: int) -> Any:
    """Return d * (s - 32), two lanes for 32 values."""
    low = load(u8x4, data, offset + 4)
    high = (splat(u32x16, load(types.uint16, data, offset + 2)) >> shifts_xs()) & 3
    s = halves_twice(low & 15, low >> 4) | (convert(u8x16, high) << 4)
    return convert(f32x16, cast(i8x16, s - 32)) * half_at(data, offset)


@inline
def unpack_iq4_xs(data: int, offset: int) -> Any:
    """136 bytes."""
    q0, q1, q2, q3 = nibbles16(data, offset + 8, 16)
    l0, l1, l2, l3 = lookup_all(codebook(), q0, q1, q2, q3)
    return l0, l1, l2, l3, iq4_xs_scales(data, offset), None


# ---------------------------------------------------------------- signs and scales of IQ2 and IQ3


@inline
def all_signs(seven: Any) -> Any:
    """Complete each 7 sign bits to 8: bit 7 is the parity of the others."""
    return seven | (popcount(seven) << 7)


@inline
def word_signs(words: Any) -> Any:
    """Return 32 bytes of signs from 8 words of 4 x 7 bits."""
    return all_signs(fields_of_7(words) & 127)


@inline
def minus_bits(signs: Any) -> Any:
    """Return 32 bytes of sign bits as four masks of 64 lanes."""
    bits = cast(u64x4, signs)
    return (
        mask_of_bits(extract(bits, 0)),
        mask_of_bits(extract(bits, 1)),
        mask_of_bits(extract(bits, 2)),
        mask_of_bits(extract(bits, 3)),
    )


@inline
def signed_unit(fields: Any) -> Any:
    """Return levels and scales of (magnitudes, signs, s, d): values are +-d * (2 s + 1) * magnitude."""
    (g0, g1, g2, g3), signs, s, d = fields
    m0, m1, m2, m3 = minus_bits(signs)
    l0 = select(m0, -g0, g0)
    l1 = select(m1, -g1, g1)
    l2 = select(m2, -g2, g2)
    l3 = select(m3, -g3, g3)
    return l0, l1, l2, l3, convert(f32x16, (s << 1) | 1) * d, None


# ---------------------------------------------------------------- IQ3: d * (0.5 + s) * 0.5 is d / 4 * (2 s + 1)


@inline
def fields_iq3_xxs(data: int, offset: int) -> Any:
    """98 bytes."""
    g, words = iq3xxs(load(u8x64, data, offset + 2)), load(u32x8, data, offset + 66)
    return g, word_signs(words), each_twice(words >> 28), half_at(data, offset) * np.float32(0.25)


@inline
def unpack_iq3_xxs(data: int, offset: int) -> Any:
    """98 bytes."""
    return signed_unit(fields_iq3_xxs(data, offset))


@inline
def fields_iq3_s(data: int, offset: int) -> Any:
    """110 bytes; bit i of qh is the ninth bit of index i."""
    high = select(mask_of_bits(load(types.uint64, data, offset + 66)), splat(u16x64, 256), 0)
    g, s = iq3s(convert(u16x64, load(u8x64, data, offset + 2)) | high), load(u8x4, data, offset + 106)
    return g, load(u8x32, data, offset + 74), halves_twice(s & 15, s >> 4), half_at(data, offset)


@inline
def unpack_iq3_s(data: int, offset: int) -> Any:
    """110 bytes."""
    return signed_unit(fields_iq3_s(data, offset))


# ---------------------------------------------------------------- IQ2: d * (0.5 + s) * 0.25 is d / 8 * (2 s + 1)


@inline
def fields_iq2_xxs(data: int, offset: int) -> Any:
    """66 bytes."""
    both = load(u32x16, data, offset + 2)
    g, words = iq2xxs(cast(u8x32, even_words(both))), odd_words(both)
    return g, word_signs(words), each_twice(words >> 28), half_at(data, offset) * np.float32(0.125)


@inline
def unpack_iq2_xxs(data: int, offset: int) -> Any:
    """66 bytes."""
    return signed_unit(fields_iq2_xxs(data, offset))


@inline
def fields_iq2_xs(data: int, offset: int) -> Any:
    """74 bytes."""
    both, s = load(u16x32, data, offset + 2), load(u8x8, data, offset + 66)
    signs = all_signs(convert(u8x32, both >> 9))
    return iq2xs(both & 511), signs, in_turn8(s & 15, s >> 4), half_at(data, offset) * np.float32(0.125)


@inline
def unpack_iq2_xs(data: int, offset: int) -> Any:
    """74 bytes."""
    return signed_unit(fields_iq2_xs(data, offset))


@inline
def fields_iq2_s(data: int, offset: int) -> Any:
    """82 bytes; each index has two bits of qh."""
    high = (eight_4_times(convert(u16x8, load(u8x8, data, offset + 66))) >> shifts2_16()) & 3
    g, s = iq2s(convert(u16x32, load(u8x32, data, offset + 2)) | (high << 8)), load(u8x8, data, offset + 74)
    return g, load(u8x32, data, offset + 34), in_turn8(s & 15, s >> 4), half_at(data, offset) * np.float32(0.125)


@inline
def unpack_iq2_s(data: int, offset: int) -> Any:
    """82 bytes."""
    return signed_unit(fields_iq2_s(data, offset))


# ---------------------------------------------------------------- IQ1


@inline
def shifted_by_32(low: Any, h: Any) -> Any:
    """Return levels from 32 low bytes of indices and 8 words of high bits, scales and signs; and the scales."""
    high = (eight_4_times(h) >> shifts3_16()) & 7
    q = convert(u16x32, low) | (high << 8)
    shift = convert(i8x8, 1 - ((h >> 15) << 1))
    g0, g1, g2, g3 = iq1s_8(q)
    l0 = g0 + shift32_0(shift)
    l1 = g1 + shift32_1(shift)
    l2 = g2 + shift32_2(shift)
    l3 = g3 + shift32_3(shift)
    return l0, l1, l2, l3, convert(f32x16, each_twice((((h >> 12) & 7) << 1) | 1))


@inline
def unpack_iq1_s(data: int, offset: int) -> Any:
    """50 bytes."""
    l0, l1, l2, l3, s = shifted_by_32(load(u8x32, data, offset + 2), load(u16x8, data, offset + 34))
    return l0, l1, l2, l3, s * half_at(data, offset) * np.float32(0.125), None


@inline
def unpack_iq1_s_row(data: int, offset: int) -> Any:
    """8 blocks of 6 bytes."""
    low, h = load_pieces(u8x32, u8x4, data, offset, 6), load_pieces(u16x8, types.uint16, data, offset + 4, 6)
    l0, l1, l2, l3, s = shifted_by_32(low, h)
    return l0, l1, l2, l3, s * np.float32(0.125), None


@inline
def scattered_f16(words: Any) -> Any:
    """Return IQ1_M's d, whose four hex digits are the top digits of the four scale words, as f32."""
    w = types.uint64(words)
    low = ((w >> types.uint64(12)) & types.uint64(0xF)) | ((w >> types.uint64(24)) & types.uint64(0xF0))
    high = ((w >> types.uint64(36)) & types.uint64(0xF00)) | ((w >> types.uint64(48)) & types.uint64(0xF000))
    return f16_to_f32(types.uint16(low | high))


@inline
def shifted_by_8(low: Any, h: Any) -> Any:
    """Return levels from 32 low bytes of indices, each with a nibble of h: 3 bits, and the sign of the shift."""
    digits = in_turn16(h & 15, h >> 4)
    q = convert(u16x32, low) | (convert(u16x32, digits & 7) << 8)
    shift = cast(i8x32, 1 - ((digits >> 3) << 1))
    g0, g1, g2, g3 = iq1s_8(q)
    l0 = g0 + shift8_0(shift)
    l1 = g1 + shift8_1(shift)
    l2 = g2 + shift8_2(shift)
    l3 = g3 + shift8_3(shift)
    return l0, l1, l2, l3


@inline
def unpack_iq1_m(data: int, offset: int) -> Any:
    """56 bytes."""
    l0, l1, l2, l3 = shifted_by_8(load(u8x32, data, offset), load(u8x16, data, offset + 32))
    s = (convert(u32x16, each_4_times(load(u16x4, data, offset + 48))) >> shifts3()) & 7
    d = scattered_f16(load(types.uint64, data, offset + 48))
    return l0, l1, l2, l3, convert(f32x16, (s << 1) | 1) * d * np.float32(0.125), None


@inline
def unpack_iq1_m_row(data: int, offset: int) -> Any:
    """8 blocks of 7 bytes."""
    high = cast(u8x16, load_pieces(u16x8, types.uint16, data, offset + 4, 7))
    l0, l1, l2, l3 = shifted_by_8(load_pieces(u8x32, u8x4, data, offset, 7), high)
    s = load_pieces(u8x8, types.uint8, data, offset + 6, 7)
    return l0, l1, l2, l3, convert(f32x16, in_turn8(s & 15, s >> 4)) * np.float32(0.125), None

"""Unpackers of ik_llama.cpp's own types: IQ4_KS, IQ2_KS. A row is its scale d, then super-blocks.

Bytes of a row header and of a block of 256 values (ik_llama.cpp 8337e4cd3, ggml-common.h)::

    IQ4_KS  d f32 | scales 8 | qs 128             d * ((s & 254) - 127) * (codebook[q] + 4 * (s & 1)), s per 32 values
    IQ2_KS  d f16 | extra u16 | scales 4 | qs 64  d * (s - 16) * (codebook[q] + 5 * shift), s of 5 bits per 32 values

IQ4_KS: nibbles and codebook as in IQ4_XS. IQ2_KS: 2-bit fields as in Q2_K; the low byte of ``extra`` holds the shifts,
the high byte the fifth bits of the scales, whose other four bits are the nibbles of ``scales``.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    f32x16,
    i8x16,
    i8x64,
    load,
    lookup16,
    make_constant,
    make_shuffle,
    splat,
    u8x8,
    u8x16,
    u32x16,
)
from quantkit.kernels.cpu.unpack import i_quants
from quantkit.kernels.cpu.unpack.lanes import crumbs, each_twice, nibbles16, u8x4
from quantkit.kernels.tables import table

codebook_2 = make_constant(i8x16, table("kvalues_iq2nl").tolist() * 4, "ik_quants.codebook_2")
bits_16 = make_constant(u32x16, range(16), "ik_quants.bits_16")
upper_twice = make_shuffle([8 + i // 2 for i in range(16)], "ik_quants.upper_twice")


@inline
def raised_levels(codebook: Any, q: Any, by: Any) -> Any:
    """Look up 256 levels; raise each group of 32 by one of the first 8 bytes of ``by``."""
    q0, q1, q2, q3 = q
    return (
        lookup16(codebook, q0) + cast(i8x64, i_quants.shift32_0(by)),
        lookup16(codebook, q1) + cast(i8x64, i_quants.shift32_1(by)),
        lookup16(codebook, q2) + cast(i8x64, i_quants.shift32_2(by)),
        lookup16(codebook, q3) + cast(i8x64, i_quants.shift32_3(by)),
    )


@inline
def iq4_ks_scales(s: Any) -> Any:
    """Return (s & 254) - 127 for 8 bytes, each twice."""
    return convert(f32x16, cast(i8x16, each_twice(s & 254) - 127))


@inline
def unpack_iq4_ks(data: int, offset: int) -> Any:
    """136 bytes."""
    s = load(u8x8, data, offset)
    l0, l1, l2, l3 = raised_levels(i_quants.codebook(), nibbles16(data, offset + 8, 16), (s & 1) << 2)
    return l0, l1, l2, l3, iq4_ks_scales(s), None


@inline
def unpack_iq2_ks(data: int, offset: int) -> Any:
    """70 bytes."""
    extra = convert(u8x16, (splat(u32x16, load(types.uint16, data, offset)) >> bits_16()) & 1)
    l0, l1, l2, l3 = raised_levels(codebook_2(), crumbs(data, offset + 6), extra * 5)
    low = load(u8x4, data, offset + 2)
    s = i_quants.halves_twice(low & 15, low >> 4) | (upper_twice(extra) << 4)
    return l0, l1, l2, l3, convert(f32x16, cast(i8x16, s - 16)), None

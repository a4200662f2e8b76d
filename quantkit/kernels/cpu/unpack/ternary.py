"""Unpackers of TQ1_0, TQ2_0, Q2_0: levels -1, 0, 1 (Q2_0 also 2) and one f16 scale per block.

Bytes of a block (llama.cpp b11434 ggml-common.h)::

    TQ1_0  256: qs 48 | qh 4 | d f16     five base-3 digits per byte, a fraction of 256: first digit = byte * 3 >> 8
    TQ2_0  256: qs 64 | d f16            2 bits per value, as in Q2_K; value = d * (q - 1)
    Q2_0    64: d f16 | qs 16            2 bits per value, values 4 i ... 4 i + 3 in byte i; value = d * (q - 1)

TQ1_0: digit n of byte b is value 32 n + b in the first 32 bytes, value 160 + 16 n + b in the next 16; qh holds four
digits per byte, values 240 + 4 n + b. Multiplying a byte by 3 modulo 256 brings its next digit to the front.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    f32x16,
    i8x64,
    load,
    make_constant,
    select,
    splat,
    u8x16,
    u8x32,
    u8x64,
    u16x16,
    u32x4,
    u32x16,
)
from quantkit.kernels.cpu.unpack.lanes import (
    below,
    crumbs,
    each_4_times,
    half_at,
    join16,
    join32,
    load_pieces,
    u16x4,
    widen_f16,
)

powers = make_constant(u16x16, [1] * 4 + [3] * 4 + [9] * 4 + [27] * 4, "ternary.powers")


@inline
def first_digits(x: Any) -> Any:
    """Return the first base-3 digit of 64 bytes minus one: byte * 3 >> 8 is 1 from 86 and 2 from 171 on."""
    one, two = select(x >= 86, splat(i8x64, 1), 0), select(x >= 171, splat(i8x64, 1), 0)
    return one + two - 1


@inline
def unpack_tq1_0(data: int, offset: int) -> Any:
    """54 bytes."""
    a0, b0 = load(u8x32, data, offset), load(u8x16, data, offset + 32)
    a1, b1 = a0 * 3, b0 * 3
    a2, b2 = a1 * 3, b1 * 3
    a3, b3 = a2 * 3, b2 * 3
    a4, b4 = a3 * 3, b3 * 3
    qh = cast(u8x16, splat(u32x4, load(types.uint32, data, offset + 48)))
    c = convert(u8x16, convert(u16x16, qh) * powers())
    l0, l1 = first_digits(join32(a0, a1)), first_digits(join32(a2, a3))
    l2 = first_digits(join32(a4, join16(b0, b1)))
    l3 = first_digits(join32(join16(b2, b3), join16(b4, c)))
    return l0, l1, l2, l3, splat(f32x16, half_at(data, offset + 52)), None


@inline
def unpack_tq2_0(data: int, offset: int) -> Any:
    """66 bytes."""
    l0, l1, l2, l3 = crumbs(data, offset)
    return below(l0, 1), below(l1, 1), below(l2, 1), below(l3, 1), splat(f32x16, half_at(data, offset + 64)), None


@inline
def spread_crumbs(data: int, offset: int) -> Any:
    """Return 64 2-bit values from 16 bytes, four consecutive ones from each."""
    x = convert(u32x16, load(u8x16, data, offset))
    x = x | (x << 12)
    x = x | (x << 6)
    return cast(u8x64, x) & 3


@inline
def unpack_q2_0(data: int, offset: int) -> Any:
    """4 blocks of 18 bytes."""
    l0, l1 = below(spread_crumbs(data, offset + 2), 1), below(spread_crumbs(data, offset + 20), 1)
    l2, l3 = below(spread_crumbs(data, offset + 38), 1), below(spread_crumbs(data, offset + 56), 1)
    return l0, l1, l2, l3, each_4_times(widen_f16(load_pieces(u16x4, types.uint16, data, offset, 18))), None

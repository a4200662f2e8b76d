"""Levels in the order in which blocks store them, and activations loaded to match: shared by dot products of types.

A byte holds values of 2 or 4 blocks of 32, so a vector of fields of 2 or 4 bits holds two such blocks that are not
neighbours. It is cheaper to load the halves of the activations in that order than to rearrange the levels.
"""

from __future__ import annotations

from typing import Any

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    cast,
    dot2,
    i8x32,
    i32x16,
    load,
    maddubs,
    make_constant,
    make_shuffle,
    splat,
    u8x32,
    u8x64,
    u16x32,
)
from quantkit.kernels.cpu.unpack.lanes import join32, twice32

#: Groups of 16 values: 0 to 3, 4 to 7, ...; and of blocks 0 and 4, 1 and 5, 2 and 6, 3 and 7 of 32.
scales_0123 = make_shuffle([i // 8 for i in range(32)], "stored.scales_0123")
scales_4567 = make_shuffle([4 + i // 8 for i in range(32)], "stored.scales_4567")
scales_89ab = make_shuffle([8 + i // 8 for i in range(32)], "stored.scales_89ab")
scales_cdef = make_shuffle([12 + i // 8 for i in range(32)], "stored.scales_cdef")
scales_0189 = make_shuffle([8 * (i // 16) + i // 8 % 2 for i in range(32)], "stored.scales_0189")
scales_23ab = make_shuffle([8 * (i // 16) + 2 + i // 8 % 2 for i in range(32)], "stored.scales_23ab")
scales_45cd = make_shuffle([8 * (i // 16) + 4 + i // 8 % 2 for i in range(32)], "stored.scales_45cd")
scales_67ef = make_shuffle([8 * (i // 16) + 6 + i // 8 % 2 for i in range(32)], "stored.scales_67ef")

left_4_2 = make_constant(u16x32, [4] * 16 + [2] * 16, "stored.left_4_2")
left_3_1 = make_constant(u16x32, [3] * 16 + [1] * 16, "stored.left_3_1")
right_0_2 = make_constant(u16x32, [0] * 16 + [2] * 16, "stored.right_0_2")
right_0_4 = make_constant(u16x32, [0] * 16 + [4] * 16, "stored.right_0_4")
right_1_3 = make_constant(u16x32, [1] * 16 + [3] * 16, "stored.right_1_3")
#: Shifts of the bits of a mask of 32 bytes, for blocks 0 and 4, 1 and 5, 2 and 6, 3 and 7, to bit 2.
hmask_02 = make_constant(u16x32, [2] * 16 + [0] * 16, "stored.hmask_left_2_0")
hmask_right = make_constant(u16x32, [0] * 16 + [2] * 16, "stored.hmask_right_0_2")


@inline
def halves(act: int, first: int, second: int) -> Any:
    """Return the levels of two blocks of 32 activations."""
    return join32(load(i8x32, act, 32 * first), load(i8x32, act, 32 * second))


@inline
def low_bits(x: Any, n: Any) -> Any:
    """Shift bytes left, each half of the vector by its own count; bits of neighbours shift in."""
    return cast(u8x64, cast(u16x32, x) << n)


@inline
def high_bits(x: Any, n: Any) -> Any:
    """Shift bytes right in the same way."""
    return cast(u8x64, cast(u16x32, x) >> n)


@inline
def three_bits(q: Any, h: Any) -> Any:
    """Return four vectors of fields of 3 bits: two of q, from the low ones up, and one of h, a mask of 32 bytes twice.

    Lanes 0..31 need bits 0, 1, 2, 3 of h, lanes 32..63 bits 4, 5, 6, 7.
    """
    h = high_bits(low_bits(h, hmask_02()), hmask_right())  # to bits 2, 3, 4, 5
    u0, u1 = (q & 3) | (h & 4), ((q >> 2) & 3) | ((h >> 1) & 4)
    return u0, u1, ((q >> 4) & 3) | ((h >> 2) & 4), (q >> 6) | ((h >> 3) & 4)


@inline
def nibbles_and_bits(low: int, high: int) -> Any:
    """Return four vectors of fields of 5 bits: nibbles of two times 64 bytes, and bits of a mask of 32 bytes.

    Bit k of byte b of the mask belongs to value b + 32 k.
    """
    a, b, h = load(u8x64, low, 0), load(u8x64, low, 64), twice32(load(u8x32, high, 0))
    a0, a1 = (a & 15) | (low_bits(h, left_4_2()) & 16), (a >> 4) | (low_bits(h, left_3_1()) & 16)
    b0, b1 = (b & 15) | (high_bits(h, right_0_2()) & 16), (b >> 4) | (high_bits(h, right_1_3()) & 16)
    return a0, a1, b0, b1


@inline
def crumbs_of_two(h: Any) -> Any:
    """Return 32 bytes of four 2-bit fields, twice, so that fields 0 and 1 are those of blocks 0 and 2, 1 and 3."""
    return high_bits(twice32(h), right_0_4())


@inline
def crumb_products(act: int, u0: Any, u1: Any, u2: Any, u3: Any, s: Any) -> Any:
    """Return scaled sums of levels in stored order (2 bits per value, from the low ones up), as i32x16."""
    x = dot2(splat(i32x16, 0), maddubs(u0, halves(act, 0, 4)), scales_0189(s))
    y = dot2(splat(i32x16, 0), maddubs(u1, halves(act, 1, 5)), scales_23ab(s))
    x = dot2(x, maddubs(u2, halves(act, 2, 6)), scales_45cd(s))
    return x + dot2(y, maddubs(u3, halves(act, 3, 7)), scales_67ef(s))

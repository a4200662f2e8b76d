"""Levels in the order in which blocks store them, and activations loaded to match: shared by dot products of types.

A byte holds values of 2 or 4 blocks of 32, so a vector of fields of 2 or 4 bits holds two such blocks that are not
neighbours. Activations have their levels in that order, too (APART_2, APART_4), so nothing is rearranged.
"""

from __future__ import annotations

from typing import Any

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    dot2,
    f32x16,
    i8x64,
    i32x16,
    load,
    maddubs,
    make_constant,
    make_shuffle,
    muladd,
    splat,
    u8x32,
    u8x64,
    u16x32,
)
from quantkit.kernels.cpu.matmul.activations import APART_4, SCALES, SUMS
from quantkit.kernels.cpu.unpack.lanes import twice32

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
#: 16 lanes twice.
twice16 = make_shuffle([*range(16)] * 2, "stored.twice16")
#: Shifts of the bits of a mask of 32 bytes, for blocks 0 and 4, 1 and 5, 2 and 6, 3 and 7, to bit 2.
hmask_02 = make_constant(u16x32, [2] * 16 + [0] * 16, "stored.hmask_left_2_0")
hmask_right = make_constant(u16x32, [0] * 16 + [2] * 16, "stored.hmask_right_0_2")


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
    a = load(u8x64, low, 0)
    b = load(u8x64, low, 64)
    h = twice32(load(u8x32, high, 0))
    a0, a1 = (a & 15) | (low_bits(h, left_4_2()) & 16), (a >> 4) | (low_bits(h, left_3_1()) & 16)
    b0, b1 = (b & 15) | (high_bits(h, right_0_2()) & 16), (b >> 4) | (high_bits(h, right_1_3()) & 16)
    return a0, a1, b0, b1


@inline
def crumbs_of_two(h: Any) -> Any:
    """Return 32 bytes of four 2-bit fields, twice, so that fields 0 and 1 are those of blocks 0 and 2, 1 and 3."""
    return high_bits(twice32(h), right_0_4())


@inline
def scaled_products(y: int, u0: Any, u1: Any, u2: Any, u3: Any, s0: Any, s1: Any, s2: Any, s3: Any) -> Any:
    """Return 16 sums of unsigned levels times the activations at ``y``, 64 in turn, in pairs, times scales in i16."""
    a = dot2(splat(i32x16, 0), maddubs(u0, load(i8x64, y, 0)), s0)
    b = dot2(splat(i32x16, 0), maddubs(u1, load(i8x64, y, 64)), s1)
    a = dot2(a, maddubs(u2, load(i8x64, y, 128)), s2)
    return a + dot2(b, maddubs(u3, load(i8x64, y, 192)), s3)


@inline
def crumb_products(act: int, u0: Any, u1: Any, u2: Any, u3: Any, s: Any) -> Any:
    """Return scaled sums of levels in stored order (2 bits per value, from the low ones up), as i32x16."""
    s0 = scales_0189(s)
    s1 = scales_23ab(s)
    s2 = scales_45cd(s)
    s3 = scales_67ef(s)
    return scaled_products(act + APART_4, u0, u1, u2, u3, s0, s1, s2, s3)


# ---------------------------------------------------------------- four lanes for a block of 32

#: Scales of 16 groups to those of blocks 0 to 3, and 4 to 7, four lanes each.
scales_low = make_shuffle([i // 4 * 2 for i in range(16)], "stored.scales_low")
scales_high = make_shuffle([8 + i // 4 * 2 for i in range(16)], "stored.scales_high")


@inline
def add_block_sums(act: int, acc: Any, x: Any, y: Any, scales: Any, mins: Any) -> Any:
    """Add the sums of blocks 0 to 3, and of 4 to 7, four lanes each, times scales, minus mins * sums."""
    d = scales * load(f32x16, act, SCALES)
    acc = muladd(-mins, load(f32x16, act, SUMS), acc)
    acc = muladd(convert(f32x16, x), scales_low(d), acc)
    return muladd(convert(f32x16, y), scales_high(d), acc)

"""Specialized dot products for one token, of ik_llama.cpp's types with codebooks; entered in type_dots.py.

Levels are looked up in stored order from codebooks raised above zero; the offset of a group of 16 from its values, the
constant less the group's shift, is subtracted through the sums of the activations. Levels of 2 and 3 bits are small
enough to be added in pairs to i16 and multiplied by integer scales, as those of Q2_K and Q3_K; larger ones are added by
fours to i32, and their scales are f32.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    convert,
    dot2,
    dot4,
    f32x8,
    f32x16,
    i8x16,
    i8x64,
    i16x16,
    i32x8,
    i32x16,
    load,
    lookup16,
    lookup64,
    make_constant,
    make_shuffle,
    muladd,
    opaque,
    splat,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
)
from quantkit.kernels.cpu.matmul.activations import APART_2, BY_PIECES, SCALES, SUMS, TOTALS, sum_fours
from quantkit.kernels.cpu.matmul.stored_order import (
    crumb_products,
    crumbs_of_two,
    nibbles_and_bits,
    three_bits,
)
from quantkit.kernels.cpu.unpack import ik_quants
from quantkit.kernels.cpu.unpack.lanes import each_twice, half_at, twice32
from quantkit.kernels.tables import table

# ---------------------------------------------------------------- 2 and 3 bits: integer scales

codes_2 = make_constant(u8x16, (table("kvalues_iq2nl").astype(int) + 32).tolist() * 4, "ik_dots.codes_2")
codes_3 = make_constant(u8x16, (table("kvalues_iq3nl").astype(int) + 64).tolist() * 2, "ik_dots.codes_3")


@inline
def add_pair_products(act: int, acc: Any, codes: Any, indices: Any, s: Any, raised: Any, d: Any) -> Any:
    """Add the products of a super-block with scales s, i8x16; ``raised``: i8x16, the offset of each group."""
    q0, q1, q2, q3 = indices
    s = opaque(convert(i16x16, s))
    u0 = lookup16(codes, q0)
    u1 = lookup16(codes, q1)
    u2 = lookup16(codes, q2)
    u3 = lookup16(codes, q3)
    x = crumb_products(act, u0, u1, u2, u3, s)
    offset = dot2(splat(i32x8, 0), s * convert(i16x16, raised), load(i16x16, act, TOTALS))
    d *= load(types.float32, act, SCALES)
    products, offsets = acc
    products = muladd(convert(f32x16, x), splat(f32x16, d), products)
    return products, muladd(convert(f32x8, offset), splat(f32x8, d), offsets)


@inline
def two_bits(q: Any) -> Any:
    """Return four vectors of fields of 2 bits, from the low ones up."""
    return q & 3, (q >> 2) & 3, (q >> 4) & 3, q >> 6


@inline
def dot_iq2_k(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ2_K."""
    q, raised = two_bits(load(u8x64, block, 12)), 32 - ik_quants.bits16(block, 2) * 5
    return add_pair_products(act, acc, codes_2(), q, ik_quants.iq2_k_scales(block, 0), raised, half_at(block, 0))


@inline
def dot_iq2_ks(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ2_KS; the row's scale is applied last (dots.py)."""
    q, extra = two_bits(load(u8x64, block, 6)), ik_quants.bits16(block, 0)
    raised = 32 - each_twice(extra) * 5
    return add_pair_products(act, acc, codes_2(), q, ik_quants.iq2_ks_scales(block, 0, extra), raised, types.float32(1))


@inline
def dot_iq3_k(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ3_K."""
    q, raised = (
        three_bits(load(u8x64, block, 14), twice32(load(u8x32, block, 78))),
        64 - (ik_quants.bits16(block, 2) << 2),
    )
    return add_pair_products(act, acc, codes_3(), q, ik_quants.iq3_k_scales(block, 0), raised, half_at(block, 0))


@inline
def dot_iq3_ks(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ3_KS."""
    q, extra = three_bits(load(u8x64, block, 6), twice32(load(u8x32, block, 70))), ik_quants.bits16(block, 0)
    raised = 64 - (each_twice(ik_quants.upper8(extra)) << 2)
    return add_pair_products(act, acc, codes_3(), q, ik_quants.iq3_ks_scales(block, 0, extra), raised, types.float32(1))


# ---------------------------------------------------------------- 4, 5 and 6 bits: scales in f32

codes_4 = make_constant(u8x16, (table("kvalues_iq4nl").astype(int) + 128).tolist(), "ik_dots.codes_4")
codes_5 = make_constant(u8x32, (table("kvalues_iq5nl").astype(int) + 128).tolist(), "ik_dots.codes_5")
codes_6 = make_constant(u8x64, (table("kvalues_iq6nl").astype(int) + 128).tolist(), "ik_dots.codes_6")
#: From the order of groups of 16 to that of sum_fours, of blocks stored by 16 bytes, and by 32.
order_16 = make_shuffle([g + 2 * i for i in range(0, 4) for g in (0, 1, 8, 9)], "ik_dots.order_16")
order_32 = make_shuffle([g + i for i in (0, 1, 4, 5) for g in (0, 2, 8, 10)], "ik_dots.order_32")


@inline
def add_ordered(act: int, acc: Any, sums: Any, ordered: Any, raised: Any, scales: Any) -> Any:
    """Add 16 sums of levels raised above zero; ``ordered``: the products of the scales, in the order of the sums."""
    acc = muladd(-(scales * raised), load(f32x16, act, SUMS), acc)
    return muladd(convert(f32x16, sums), ordered, acc)


@inline
def products(u: Any, y: Any) -> Any:
    """Return sums of four products each."""
    return dot4(splat(i32x16, 0), u, y)


@inline
def dot_iq4_k(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ4_K."""
    a = load(u8x64, block, 16)
    b = load(u8x64, block, 80)
    codes = codes_4()
    sums = sum_fours(
        products(lookup16(codes, a & 15), load(i8x64, act, BY_PIECES)),
        products(lookup16(codes, a >> 4), load(i8x64, act, BY_PIECES + 64)),
        products(lookup16(codes, b & 15), load(i8x64, act, BY_PIECES + 128)),
        products(lookup16(codes, b >> 4), load(i8x64, act, BY_PIECES + 192)),
    )
    scales = convert(f32x16, ik_quants.scales6(block, 0)) * half_at(block, 0)
    raised = convert(f32x16, 128 - (ik_quants.bits16(block, 2) << 2))
    return add_ordered(act, acc, sums, order_16(scales * load(f32x16, act, SCALES)), raised, scales)


@inline
def add_by_32(act: int, acc: Any, codes: Any, q: Any, raised: Any, scales: Any) -> Any:
    """Add the products of indices of blocks 0 and 2, 1 and 3, 4 and 6, 5 and 7."""
    q0, q1, q2, q3 = q
    sums = sum_fours(
        products(lookup64(codes, q0), load(i8x64, act, APART_2)),
        products(lookup64(codes, q1), load(i8x64, act, APART_2 + 64)),
        products(lookup64(codes, q2), load(i8x64, act, APART_2 + 128)),
        products(lookup64(codes, q3), load(i8x64, act, APART_2 + 192)),
    )
    return add_ordered(act, acc, sums, order_32(scales * load(f32x16, act, SCALES)), raised, scales)


@inline
def dot_iq5_k(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ5_K."""
    scales = convert(f32x16, ik_quants.scales6(block, 0)) * half_at(block, 0)
    raised = convert(f32x16, 128 - (ik_quants.bits16(block, 2) << 1))
    return add_by_32(act, acc, codes_5(), nibbles_and_bits(block + 16, block + 144), raised, scales)


@inline
def dot_iq5_ks(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ5_KS."""
    s = load(u8x8, block, 0)
    raised = convert(f32x16, 128 - each_twice((s & 1) << 1))
    return add_by_32(act, acc, codes_5(), nibbles_and_bits(block + 8, block + 136), raised, ik_quants.iq4_ks_scales(s))


@inline
def dot_iq6_k(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ6_K."""
    a, b = load(u8x64, block, 20), load(u8x64, block, 84)
    g, h = crumbs_of_two(load(u8x32, block, 148)), crumbs_of_two(load(u8x32, block, 180))
    q = ((a & 15) | ((g << 4) & 48), (a >> 4) | ((g << 2) & 48), (b & 15) | ((h << 4) & 48), (b >> 4) | ((h << 2) & 48))
    scales = convert(f32x16, load(i8x16, block, 4)) * half_at(block, 0)
    return add_by_32(act, acc, codes_6(), q, convert(f32x16, 128 - ik_quants.bits16(block, 2)), scales)


#: Types with two sums (type_dots.py); types with one, whose levels need dot4 of any bytes.
IK_PAIRS = {"iq2_k": dot_iq2_k, "iq2_ks": dot_iq2_ks, "iq3_k": dot_iq3_k, "iq3_ks": dot_iq3_ks}
IK_GROUPS = {"iq4_k": dot_iq4_k, "iq5_k": dot_iq5_k, "iq5_ks": dot_iq5_ks, "iq6_k": dot_iq6_k}

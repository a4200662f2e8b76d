"""Specialized dot products for one token, for types faster without the common form; used by dots.py.

K-quants have integer scales: products of bytes, added to i16, are multiplied by them as i16 and summed over a
super-block before conversion to f32; levels stay in stored order, and the activations are loaded to match. Blocks of 32
whose bytes hold values i and i + 16 are multiplied in stored order by the activations "by pieces" (activations.py):
four lanes then hold one block, low and high nibbles added, and there is half as much to convert and scale.

Offsets of levels (q - 8, q - 32, codebooks below zero) are applied through the sums of the activations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types

from quantkit.kernels.cpu.core.jit import inline, specialize
from quantkit.kernels.cpu.core.simd import (
    HAS_DOT4,
    cast,
    convert,
    dot2,
    dot4,
    f32x4,
    f32x8,
    f32x16,
    hsum,
    i8x16,
    i8x64,
    i16x8,
    i16x16,
    i16x32,
    i32x4,
    i32x8,
    i32x16,
    load,
    load_f16,
    lookup16,
    make_constant,
    make_shuffle,
    muladd,
    opaque,
    prefetch,
    select,
    splat,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
    u32x4,
)
from quantkit.kernels.cpu.matmul.activations import (
    APART_2,
    APART_4,
    BY_PIECES,
    BY_QUARTERS,
    SCALES,
    SUMS,
    TOTALS,
    TOTALS32,
    UNIT_BYTES,
    by_fours,
)
from quantkit.kernels.cpu.matmul.grid_dots import GRIDS
from quantkit.kernels.cpu.matmul.ik_dots import IK_GROUPS, IK_PAIRS
from quantkit.kernels.cpu.matmul.kt_dots import TRELLIS
from quantkit.kernels.cpu.matmul.stored_order import (
    add_block_sums,
    crumb_products,
    high_bits,
    left_4_2,
    low_bits,
    nibbles_and_bits,
    right_0_2,
    scaled_products,
    scales_0123,
    scales_89ab,
    scales_4567,
    scales_cdef,
    three_bits,
    twice16,
)
from quantkit.kernels.cpu.unpack import fp4, i_quants, ik_quants, k_quants, ternary
from quantkit.kernels.cpu.unpack.lanes import (
    block_scales,
    each_twice,
    half_at,
    high_eighths,
    join16,
    join32,
    load_pieces,
    low_eighths,
    twice32,
)
from quantkit.kernels.formats import format_of
from quantkit.kernels.tables import table
from quantkit.types import TensorType

# ---------------------------------------------------------------- row sums


@inline
def two_sums() -> Any:
    """Return zeros: 16 sums of products, and 8 of minimums."""
    return splat(f32x16, 0), splat(f32x8, 0)


@inline
def minus_second(acc: Any) -> Any:
    """Return the products minus the minimums."""
    return hsum(acc[0]) - hsum(acc[1])


@inline
def one_sum() -> Any:
    """Return 16 sums of zero."""
    return splat(f32x16, 0)


@inline
def total(acc: Any) -> Any:
    """Return the sum of all 16."""
    return hsum(acc)


# ---------------------------------------------------------------- K-quants: integer scales

#: For levels of blocks 0 and 2, 1 and 3, 4 and 6, 5 and 7 of 32 values: i16 lanes of 8 scales.
scales_02 = make_shuffle([0] * 16 + [2] * 16, "direct.scales_02")
scales_13 = make_shuffle([1] * 16 + [3] * 16, "direct.scales_13")
scales_46 = make_shuffle([4] * 16 + [6] * 16, "direct.scales_46")
scales_57 = make_shuffle([5] * 16 + [7] * 16, "direct.scales_57")
upper_8 = make_shuffle(range(8, 16), "direct.upper_8")
lane_0, lane_1 = make_shuffle([0] * 16, "direct.lane_0"), make_shuffle([1] * 4, "direct.lane_1")
_ACBC = [4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15]
bytes_acbc = make_shuffle([16 * k + i for k in range(4) for i in _ACBC], "direct.bytes_acbc")
_AABB = [4, 5, 6, 7] * 2 + [8, 9, 10, 11] * 2
bytes_aabb = make_shuffle([16 * k + i for k in range(4) for i in _AABB], "direct.bytes_aabb")
first_16 = make_shuffle(range(16), "direct.first_16")
second_16 = make_shuffle(range(16, 32), "direct.second_16")
third_16 = make_shuffle(range(32, 48), "direct.third_16")
fourth_16 = make_shuffle(range(48, 64), "direct.fourth_16")
last_quarters = make_constant(u8x64, ([0] * 12 + [255] * 4) * 4, "direct.last_quarters")
low_bits_of_scales = make_constant(u8x64, ([63] * 4 + [15] * 4) * 8, "direct.low_bits_of_scales")
top_bits_of_scales = make_constant(u8x64, ([0] * 4 + [48] * 4) * 8, "direct.top_bits_of_scales")


@inline
def nibble_scales(heads: Any) -> Any:
    """Return the 8 integer scales and 8 minimums of each of four 16-byte heads of Q4_K or Q5_K, as bytes.

    From bytes a (4..7), b (8..11) and c (12..15): a & 63, c & 15 with the top of a, b & 63, c >> 4 with the top of b.
    """
    bits = bytes_acbc(heads)
    low = select(last_quarters() != 0, bits >> 4, bits) & low_bits_of_scales()
    return low | ((bytes_aabb(heads) >> 2) & top_bits_of_scales())


@inline
def levels_q4_k(block: int) -> Any:
    """Return levels 0..15 in stored order: low and high nibbles of 64 bytes, twice."""
    a, b = load(u8x64, block, 16), load(u8x64, block, 80)
    return a & 15, a >> 4, b & 15, b >> 4


@inline
def levels_q5_k(block: int) -> Any:
    """Return levels 0..31 in the same order."""
    return nibbles_and_bits(block + 48, block + 16)


#: Pairs of scales of blocks 0 and 1 for eight lanes, then of 2 and 3; and of 4 and 5, 6 and 7.
scale_pairs_0123 = make_shuffle([0] * 8 + [1] * 8, "direct.scale_pairs_0123")
scale_pairs_4567 = make_shuffle([2] * 8 + [3] * 8, "direct.scale_pairs_4567")
low_16_bits = make_constant(i32x16, [0xFFFF] * 16, "direct.low_16_bits")


@inline
def sums_in_pairs(act: int, u: Any, v: Any, offset: int) -> Any:
    """Return i16 sums of four products of u, and of v, side by side; each is at most 4 * 31 * 127."""
    a = dot4(splat(i32x16, 0), u, load(i8x64, act, APART_2 + offset))
    b = dot4(splat(i32x16, 0), v, load(i8x64, act, APART_2 + offset + 64))
    return cast(i16x32, (a & low_16_bits()) | (b << 16))


@inline
def products_by_fours(act: int, a0: Any, a1: Any, b0: Any, b1: Any, s: Any) -> Any:
    """Return 16 sums of scale * level * q over a super-block: four products at a time, two scales at a time."""
    pairs = cast(i32x8, s)
    x = dot2(splat(i32x16, 0), sums_in_pairs(act, a0, a1, 0), cast(i16x32, scale_pairs_0123(pairs)))
    return dot2(x, sums_in_pairs(act, b0, b1, 128), cast(i16x32, scale_pairs_4567(pairs)))


@inline
def products_by_twos(act: int, a0: Any, a1: Any, b0: Any, b1: Any, s: Any) -> Any:
    """The same with half as many products of bytes added at a time; a pair of them is at most 2 * 31 * 127."""
    return scaled_products(act + APART_2, a0, a1, b0, b1, scales_02(s), scales_13(s), scales_46(s), scales_57(s))


nibble_products: Any = products_by_fours if HAS_DOT4 else products_by_twos

#: Rebound for Q4_K and Q5_K.
nibble_levels: Any = None
add_super_block: Any = None
unit_bytes = 0


def add_nibble_products(block: int, act: int, acc: Any, scales: Any) -> Any:
    """Add the products of a super-block; scales: its 16 bytes."""
    a0, a1, b0, b1 = nibble_levels(block)
    s = opaque(convert(i16x16, scales))
    x = nibble_products(act, a0, a1, b0, b1, s)
    mins = dot2(splat(i32x4, 0), upper_8(s), load(i16x8, act, TOTALS32))
    # d and dmin at once; the other two lanes are unused.
    d = load_f16(f32x4, block, 0) * load(types.float32, act, SCALES)
    products, minimums = acc
    products = muladd(convert(f32x16, x), lane_0(d), products)
    return products, muladd(convert(f32x4, mins), lane_1(d), minimums)


def dot_nibble_row(w: int, act: int, n: int, distance: int) -> Any:
    """dots.dot_row for Q4_K and Q5_K: unpacks the scales of four super-blocks at once."""
    acc = splat(f32x16, 0), splat(f32x4, 0)
    units = n // 256
    for _ in range(units // 4):
        for line in range(unit_bytes // 16):
            prefetch(w, distance + 64 * line)
        scales = nibble_scales(load_pieces(u8x64, u8x16, w, 0, unit_bytes))
        acc = add_super_block(w, act, acc, first_16(scales))
        acc = add_super_block(w + unit_bytes, act + UNIT_BYTES, acc, second_16(scales))
        acc = add_super_block(w + 2 * unit_bytes, act + 2 * UNIT_BYTES, acc, third_16(scales))
        acc = add_super_block(w + 3 * unit_bytes, act + 3 * UNIT_BYTES, acc, fourth_16(scales))
        w += 4 * unit_bytes
        act += 4 * UNIT_BYTES
    n_tail = units % 4
    if n_tail > 0:
        for line in range(3 * n_tail):
            prefetch(w, distance + 64 * line)
        second, third = w + min(n_tail - 1, 1) * unit_bytes, w + min(n_tail - 1, 2) * unit_bytes
        heads = join16(load(u8x16, w, 0), load(u8x16, second, 0))
        scales = nibble_scales(join32(heads, twice16(load(u8x16, third, 0))))
        acc = add_super_block(w, act, acc, first_16(scales))
        if n_tail > 1:
            acc = add_super_block(second, act + UNIT_BYTES, acc, second_16(scales))
        if n_tail > 2:
            acc = add_super_block(third, act + 2 * UNIT_BYTES, acc, third_16(scales))
    return hsum(acc[0]) - hsum(acc[1])


@inline
def dot_q6_k(block: int, act: int, acc: Any) -> Any:
    """A super-block of Q6_K: levels 0..63, minus 32 times the sums; a pair of products is at most 2 * 63 * 127."""
    a, b = load(u8x64, block, 0), load(u8x64, block, 64)
    g, h = twice32(load(u8x32, block, 128)), twice32(load(u8x32, block, 160))
    s = opaque(convert(i16x16, load(i8x16, block, 192)))
    a0, a1 = (a & 15) | (low_bits(g, left_4_2()) & 48), (a >> 4) | (high_bits(g, right_0_2()) & 48)
    b0, b1 = (b & 15) | (low_bits(h, left_4_2()) & 48), (b >> 4) | (high_bits(h, right_0_2()) & 48)
    x = scaled_products(act, a0, a1, b0, b1, scales_0123(s), scales_4567(s), scales_89ab(s), scales_cdef(s))
    d = half_at(block, 208) * load(types.float32, act, SCALES)
    offset = dot2(splat(i32x8, 0), s, load(i16x16, act, TOTALS)) << 5
    products, offsets = acc
    products = muladd(convert(f32x16, x), splat(f32x16, d), products)
    return products, muladd(convert(f32x8, offset), splat(f32x8, d), offsets)


@inline
def dot_q2_k(block: int, act: int, acc: Any) -> Any:
    """A super-block of Q2_K."""
    q, s = load(u8x64, block, 16), load(u8x16, block, 0)
    x = crumb_products(act, q & 3, (q >> 2) & 3, (q >> 4) & 3, q >> 6, opaque(convert(i16x16, s & 15)))
    mins = dot2(splat(i32x8, 0), convert(i16x16, s >> 4), load(i16x16, act, TOTALS))
    d = load(types.float32, act, SCALES)
    products, minimums = acc
    products = muladd(convert(f32x16, x), splat(f32x16, half_at(block, 80) * d), products)
    return products, muladd(convert(f32x8, mins), splat(f32x8, half_at(block, 82) * d), minimums)


@inline
def dot_q3_k(block: int, act: int, acc: Any) -> Any:
    """A super-block of Q3_K: levels 0..7, minus 4 times the sums."""
    q, h = load(u8x64, block, 32), twice32(load(u8x32, block, 0))
    u0, u1, u2, u3 = three_bits(q, h)
    tail = load(u8x16, block, 94)
    high = cast(u8x16, cast(u32x4, k_quants.q3_high(tail)) >> k_quants.q3_shifts()) & 3
    s = opaque(convert(i16x16, cast(i8x16, ((k_quants.q3_low(tail, tail >> 4) & 15) | (high << 4)) - 32)))
    x = crumb_products(act, u0, u1, u2, u3, s)
    d = half_at(block, 108) * load(types.float32, act, SCALES)
    offset = dot2(splat(i32x8, 0), s, load(i16x16, act, TOTALS)) << 2
    products, offsets = acc
    products = muladd(convert(f32x16, x), splat(f32x16, d), products)
    return products, muladd(convert(f32x8, offset), splat(f32x8, d), offsets)


# ---------------------------------------------------------------- blocks of 32 in pieces of 16 bytes


@inline
def add_piece_products(act: int, acc: Any, a0: Any, a1: Any, b0: Any, b1: Any, scales: Any, mins: Any) -> Any:
    """Add the products of 256 levels, low and high nibbles of 4 blocks each, twice, minus mins * sums."""
    x = dot4(splat(i32x16, 0), a0, load(i8x64, act, BY_PIECES))
    y = dot4(splat(i32x16, 0), b0, load(i8x64, act, BY_PIECES + 128))
    x = dot4(x, a1, load(i8x64, act, BY_PIECES + 64))
    y = dot4(y, b1, load(i8x64, act, BY_PIECES + 192))
    return add_block_sums(act, acc, x, y, scales, mins)


@inline
def pieces(block: int, stride: int) -> Any:
    """Return 16 bytes of each of blocks 0..3, and of 4..7."""
    return load_pieces(u8x64, u8x16, block, 0, stride), load_pieces(u8x64, u8x16, block + 4 * stride, 0, stride)


@inline
def dot_q4_0(block: int, act: int, acc: Any) -> Any:
    """8 blocks of Q4_0: levels minus 8."""
    a, b = pieces(block + 2, 18)
    scales = block_scales(block, 0, 18)
    return add_piece_products(act, acc, a & 15, a >> 4, b & 15, b >> 4, scales, scales * np.float32(8))


@inline
def dot_q4_1(block: int, act: int, acc: Any) -> Any:
    """8 blocks of Q4_1; minimums are stored negated."""
    a, b = pieces(block + 4, 20)
    scales, mins = block_scales(block, 0, 20), -block_scales(block, 2, 20)
    return add_piece_products(act, acc, a & 15, a >> 4, b & 15, b >> 4, scales, mins)


@inline
def dot_q6_0(block: int, act: int, acc: Any) -> Any:
    """8 blocks of Q6_0: levels minus 32."""
    a, b = pieces(block + 10, 26)
    h = load_pieces(u8x64, u8x8, block, 2, 26)
    g, h = low_eighths(h, h >> 4), high_eighths(h, h >> 4)
    a0, a1 = (a & 15) | ((g << 4) & 48), (a >> 4) | ((g << 2) & 48)
    b0, b1 = (b & 15) | ((h << 4) & 48), (b >> 4) | ((h << 2) & 48)
    scales = block_scales(block, 0, 26)
    return add_piece_products(act, acc, a0, a1, b0, b1, scales, scales * np.float32(32))


raised_codebook = make_constant(u8x16, (table("kvalues_iq4nl").astype(int) + 128).tolist(), "direct.iq4nl_128")
raised_fp4 = make_constant(u8x16, (table("kvalues_fp4").astype(int) + 16).tolist(), "direct.fp4_16")


@inline
def add_codebook_products(act: int, acc: Any, codes: Any, raised: Any, a: Any, b: Any, scales: Any) -> Any:
    """Add products of codebook levels raised above zero, all by the same amount or each 16 by their own."""
    a0 = lookup16(codes, a & 15)
    a1 = lookup16(codes, a >> 4)
    b0 = lookup16(codes, b & 15)
    b1 = lookup16(codes, b >> 4)
    return add_piece_products(act, acc, a0, a1, b0, b1, scales, scales * raised)


@inline
def dot_iq4_nl(block: int, act: int, acc: Any) -> Any:
    """8 blocks of IQ4_NL."""
    a, b = pieces(block + 2, 18)
    return add_codebook_products(act, acc, raised_codebook(), np.float32(128), a, b, block_scales(block, 0, 18))


@inline
def dot_mxfp4(block: int, act: int, acc: Any) -> Any:
    """8 blocks of MXFP4."""
    a, b = pieces(block + 1, 17)
    return add_codebook_products(act, acc, raised_fp4(), np.float32(16), a, b, fp4.mxfp4_scales(block, 0))


@inline
def dot_iq4_xs(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ4_XS."""
    a, b = load(u8x64, block, 8), load(u8x64, block, 72)
    return add_codebook_products(act, acc, raised_codebook(), np.float32(128), a, b, i_quants.iq4_xs_scales(block, 0))


@inline
def add_shifted_products(act: int, acc: Any, a: Any, b: Any, s: Any) -> Any:
    """Add products of IQ4_KS and IQ4_KSS, s: scales and shifts; the row's scale is applied last (dots.py)."""
    raised = np.float32(128) - convert(f32x16, each_twice((s & 1) << 2))
    return add_codebook_products(act, acc, raised_codebook(), raised, a, b, ik_quants.iq4_ks_scales(s))


@inline
def dot_iq4_ks(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ4_KS."""
    return add_shifted_products(act, acc, load(u8x64, block, 8), load(u8x64, block, 72), load(u8x8, block, 0))


@inline
def dot_iq4_kss(block: int, act: int, acc: Any) -> Any:
    """A super-block of IQ4_KSS."""
    a, b, s = ik_quants.iq4_kss_fields(block, 0)
    return add_shifted_products(act, acc, a, b, s)


# ---------------------------------------------------------------- ternary


@inline
def add_ternary_products(act: int, acc: Any, x: Any, y: Any, d: Any) -> Any:
    """Add sums of levels 0..2 minus the sums of the activations, times d."""
    less_one = x + y - convert(i32x16, load(i16x16, act, TOTALS))
    return muladd(convert(f32x16, less_one), splat(f32x16, d * load(types.float32, act, SCALES)), acc)


@inline
def dot_tq2_0(block: int, act: int, acc: Any) -> Any:
    """256 values of TQ2_0."""
    q = load(u8x64, block, 0)
    x = dot4(splat(i32x16, 0), q & 3, load(i8x64, act, APART_4))
    y = dot4(splat(i32x16, 0), (q >> 2) & 3, load(i8x64, act, APART_4 + 64))
    x = dot4(x, (q >> 4) & 3, load(i8x64, act, APART_4 + 128))
    y = dot4(y, q >> 6, load(i8x64, act, APART_4 + 192))
    return add_ternary_products(act, acc, x, y, half_at(block, 64))


@inline
def dot_tq1_0(block: int, act: int, acc: Any) -> Any:
    """256 values of TQ1_0."""
    l0, l1, l2, l3, _, _ = ternary.unpack_tq1_0(block, 0)
    x = dot4(splat(i32x16, 0), cast(u8x64, l0 + 1), load(i8x64, act, 0))
    y = dot4(splat(i32x16, 0), cast(u8x64, l1 + 1), load(i8x64, act, 64))
    x = dot4(x, cast(u8x64, l2 + 1), load(i8x64, act, 128))
    y = dot4(y, cast(u8x64, l3 + 1), load(i8x64, act, 192))
    return add_ternary_products(act, acc, x, y, half_at(block, 52))


@inline
def dot_iq2_bn(block: int, act: int, acc: Any) -> Any:
    """4 blocks of IQ2_BN; the row's scale is applied last (dots.py)."""
    q = load(u8x64, block, 0)
    x = dot4(splat(i32x16, 0), q & 3, load(i8x64, act, BY_QUARTERS))
    y = dot4(splat(i32x16, 0), (q >> 2) & 3, load(i8x64, act, BY_QUARTERS + 64))
    x = dot4(x, (q >> 4) & 3, load(i8x64, act, BY_QUARTERS + 128))
    y = dot4(y, q >> 6, load(i8x64, act, BY_QUARTERS + 192))
    # Each word of 16 bytes has its own scale; levels are 1 too high.
    return muladd(convert(f32x16, x + y), by_fours(load(f32x16, act, SCALES)), acc - load(f32x16, act, SUMS))


_TWO_SUMS = {"q2_k": dot_q2_k, "q3_k": dot_q3_k, "q6_k": dot_q6_k, **IK_PAIRS}
_NIBBLES = {"q4_k": levels_q4_k, "q5_k": levels_q5_k}
_ONE_SUM = {
    "q4_0": dot_q4_0,
    "q4_1": dot_q4_1,
    "mxfp4": dot_mxfp4,
    "tq1_0": dot_tq1_0,
    "tq2_0": dot_tq2_0,
    "q6_0": dot_q6_0,
    "iq2_bn": dot_iq2_bn,
    **GRIDS,
    **TRELLIS,
}
if HAS_DOT4:  # elsewhere unsigned operands may not exceed 127
    _ONE_SUM |= {"iq4_nl": dot_iq4_nl, "iq4_xs": dot_iq4_xs, "iq4_ks": dot_iq4_ks, "iq4_kss": dot_iq4_kss, **IK_GROUPS}


def direct_dot(t: TensorType) -> dict[str, Any] | None:
    """Return the bindings of ``dots.dot_row`` for a type with its own dot product, else None."""
    name = t.name.lower()
    if name in _TWO_SUMS:
        return {"dot_unit": _TWO_SUMS[name], "start": two_sums, "finish": minus_second}
    if name in _ONE_SUM:
        return {"dot_unit": _ONE_SUM[name], "start": one_sum, "finish": total}
    return None


def direct_row(t: TensorType) -> Any:
    """Return the type's own ``dot_row``, else None."""
    name = t.name.lower()
    if name not in _NIBBLES:
        return None
    return specialize(
        dot_nibble_row,
        name,
        add_super_block=specialize(add_nibble_products, name, nibble_levels=_NIBBLES[name]),
        unit_bytes=format_of(t).unit_bytes,
    )

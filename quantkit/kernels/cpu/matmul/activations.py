"""Activations for matrix products: llama.cpp's integers and scales in the layout of quantkit's kernels.

A quantized weight is multiplied by int8 activations, in the format llama.cpp pairs with its type (b11434,
ggml-cpu.c type_traits_cpu), ik_llama.cpp with those that only it has (8337e4cd3, ggml.c type_traits)::

    q8_0   per 32 values: d = f16(amax / 127), q = round(x * 127 / amax)                 Q4_0 Q5_0 Q8_0 IQ4_NL MXFP4 ...
    q8_1   the same, with s = f16(amax / 127 * sum of q)                                 Q4_1 Q5_1
    q8_2   per 32 values: d = bf16(amax / 127), q = round(x / d)                         Q6_0, trellis types
    q8_k   per 256 values: d = 1 / iscale, q = round(iscale * x), iscale = -127 / max    K-quants, i-quants, TQ, IQ*_K*
    q8_kv  per row: d = amax / 127, q = round(x / d)                                     Q8_KV
    q8_k64 the same, four a row: for places i of which i % 16 / 4 is 0, 1, 2, 3          those of BitNet (bitnet.py)
    f16    rounded to half precision, kept as f32                                        F16
    bf16   rounded to bfloat16, kept as f32                                              BF16
    f32    as they are: products read the value itself                                   F32

(max: the first value of the largest magnitude, with its sign; rounding is to nearest even.) The int8 formats share
a layout: *units* of 256 values, 1344 bytes each, zero-padded at the end of a row::

    byte   0  int8  levels[256]
         256  f32   d[16]           per 16 values; repeated where more share one
         320  f32   sums[16]        the factor of a minimum: q8_k d * sum of q; q8_1 s in even lanes, 0 in odd
         384  i32   offsets[16]     -128 * sum of q of each 16 values, group g at place 4 * (g % 4) + g // 4
         448  i32   offsets32[8]    -128 * sum of q of each 32 values
         480  f32   sums32[8]       sums of adjacent pairs
         512  i16   totals[16]      sum of q of each 16 values
         544  i16   totals32[8]     sum of q of each 32 values; then 16 bytes to fill a cache line
         576  int8  by_pieces[256]  the levels again: the first 16 of each of 4 blocks of 32, then their second 16
         832  int8  apart_2[256]    the levels again: blocks 0 2, 1 3, 4 6, 5 7 of 32; q8_k only
         832  int8  by_eights[256]  the levels again: of each 128, every 8th, from 0, 1 ... 7 on; q8_2 only
        1088  int8  apart_4[256]    the levels again: blocks 0 4, 1 5, 2 6, 3 7 of 32; q8_k only
         832  int8  in_order[256]   the levels again, in order; q8_k64 only
        1088  int8  by_quarters[256]  the levels again: the first 16 of each 64, the second 16 ...; q8_k64 only

q8_k64 has the levels *by words*: the 64 of a unit that the first scale is of, then those of the second, third and
fourth, each in the order of ``by_words``; so, as elsewhere, groups of 16 and 32 share a scale. Panels bring weights
to that order, too (panel.py); other products take the levels in order, and sum words (dots.py).

The offsets compensate for adding 128 to signed levels: vpdpbusd takes one unsigned operand. A row is its units and 64
more bytes, so that rows of power-of-two length do not all map to the same cache sets.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba.core import types

from quantkit.kernels.cpu.core.functions import load_part
from quantkit.kernels.cpu.core.jit import inline, specialize
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    dot4,
    extract,
    f16_to_f32,
    f32_to_f16,
    f32x16,
    hmax,
    hmin,
    i8x16,
    i8x64,
    i16x8,
    i16x16,
    i32x16,
    load,
    load_f16,
    make_shuffle,
    make_shuffle2,
    nearest_int,
    round_even,
    select,
    splat,
    stack_bytes,
    store,
    store_f16,
    u8x64,
    u32x16,
    vabs,
    vmax,
    vmin,
)
from quantkit.kernels.cpu.core.tape import N_OUTPUTS, N_TOKENS, TapeOp, arg, batch_word, first_of, operation
from quantkit.kernels.cpu.unpack.lanes import by_words, high_halves, load_pieces, low_halves

#: Bytes of a unit of 256 values, and the offsets of its parts.
UNIT_BYTES = 1344
SCALES = 256
SUMS = 320
OFFSETS = 384
OFFSETS32 = 448
SUMS32 = 480
TOTALS = 512
TOTALS32 = 544
BY_PIECES = 576
APART_2 = 832
APART_4 = 1088
BY_EIGHTS = 832
IN_ORDER = 832
BY_QUARTERS = 1088
#: Bytes after the units of a row.
ROW_GAP = 64


def row_bytes(kind: str, n: int) -> int:
    """Return the bytes of a row of ``n`` activations in a format; an f32 row is the value's own."""
    if kind in ("f32", "f16", "bf16"):
        return 4 * n
    return -(-n // 256) * UNIT_BYTES + ROW_GAP


# ---------------------------------------------------------------- sums of groups of 16

#: Within each 128 bits, dwords (quadwords) of two vectors, interleaved: the lower, and the upper, half of them.
low_words = make_shuffle2([16 * (i % 2) + i // 4 * 4 + i % 4 // 2 for i in range(16)], "activations.low_words")
high_words = make_shuffle2([16 * (i % 2) + i // 4 * 4 + 2 + i % 4 // 2 for i in range(16)], "activations.high_words")
low_pairs = make_shuffle2([16 * (i % 4 // 2) + i // 4 * 4 + i % 2 for i in range(16)], "activations.low_pairs")
high_pairs = make_shuffle2([16 * (i % 4 // 2) + i // 4 * 4 + 2 + i % 2 for i in range(16)], "activations.high_pairs")
#: From the order of the values to that of ``sum_fours`` and back: a 4 x 4 transpose is its own inverse.
by_fours = make_shuffle([i % 4 * 4 + i // 4 for i in range(16)], "activations.by_fours")


@inline
def sum_fours(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Add groups of four lanes: the sum of lanes 4 g .. 4 g + 3 of a to lane 4 g, of b to 4 g + 1, and so on."""
    x = low_words(a, b) + high_words(a, b)
    y = low_words(c, d) + high_words(c, d)
    return low_pairs(x, y) + high_pairs(x, y)


@inline
def max_fours(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return the maximums of each four lanes, in the order of ``sum_fours``."""
    x = vmax(low_words(a, b), high_words(a, b))
    y = vmax(low_words(c, d), high_words(c, d))
    return vmax(low_pairs(x, y), high_pairs(x, y))


@inline
def byte_sums(x: Any) -> Any:
    """Return the sums of each 4 consecutive int8 of 64, as 16 int32."""
    return dot4(splat(i32x16, 0), splat(u8x64, 1), x)


# ---------------------------------------------------------------- a unit

#: The lower halves, and the upper halves, of two vectors; quarters 0, 0, 2, 2 swapped with 1, 1, 3, 3.
low_halves16 = make_shuffle2([*range(8), *range(16, 24)], "activations.low_halves16")
high_halves16 = make_shuffle2([*range(8, 16), *range(24, 32)], "activations.high_halves16")
swap_quarters = make_shuffle([*range(4, 8), *range(4), *range(12, 16), *range(8, 12)], "activations.swap_quarters")
#: Eight numbers at lanes 0..3 and 8..11, each twice.
eight_twice = make_shuffle([8 * (i // 8) + i % 8 // 2 for i in range(16)], "activations.eight_twice")
#: The first, and the second, 16 of each 32 bytes.
first_pieces = make_shuffle2([32 * (i // 16) + i % 16 for i in range(64)], "activations.first_pieces")
second_pieces = make_shuffle2([32 * (i // 16) + 16 + i % 16 for i in range(64)], "activations.second_pieces")
eighths_0123 = make_shuffle2([8 * (i % 16) + i // 16 for i in range(64)], "activations.eighths_0123")
eighths_4567 = make_shuffle2([8 * (i % 16) + i // 16 + 4 for i in range(64)], "activations.eighths_4567")
even_lanes = make_shuffle(range(0, 16, 2), "activations.even_lanes")
odd_lanes = make_shuffle(range(1, 16, 2), "activations.odd_lanes")
swap_neighbours = make_shuffle([i ^ 1 for i in range(16)], "activations.swap_neighbours")
swap_pairs = make_shuffle([i ^ 2 for i in range(16)], "activations.swap_pairs")
on_even_lanes = make_shuffle2([i if i % 2 == 0 else 16 for i in range(16)], "activations.on_even_lanes")


@inline
def block_maxima(x: int) -> Any:
    """Return the largest magnitude of each 32 of 256 values, each twice."""
    m0 = vmax(vabs(load(f32x16, x, 0)), vabs(load(f32x16, x, 64)))
    m1 = vmax(vabs(load(f32x16, x, 128)), vabs(load(f32x16, x, 192)))
    m2 = vmax(vabs(load(f32x16, x, 256)), vabs(load(f32x16, x, 320)))
    m3 = vmax(vabs(load(f32x16, x, 384)), vabs(load(f32x16, x, 448)))
    m4 = vmax(vabs(load(f32x16, x, 512)), vabs(load(f32x16, x, 576)))
    m5 = vmax(vabs(load(f32x16, x, 640)), vabs(load(f32x16, x, 704)))
    m6 = vmax(vabs(load(f32x16, x, 768)), vabs(load(f32x16, x, 832)))
    m7 = vmax(vabs(load(f32x16, x, 896)), vabs(load(f32x16, x, 960)))
    low, high = max_fours(m0, m1, m2, m3), max_fours(m4, m5, m6, m7)
    half = vmax(low_halves16(low, high), high_halves16(low, high))
    return eight_twice(vmax(half, swap_quarters(half)))


@inline
def store_offsets(out: int) -> Any:
    """Write the offsets of a unit, whose levels are written; return the sums of each 16 levels."""
    a = load(i8x64, out, 0)
    b = load(i8x64, out, 64)
    c = load(i8x64, out, 128)
    d = load(i8x64, out, 192)
    store(out, BY_PIECES, first_pieces(a, b))
    store(out, BY_PIECES + 64, second_pieces(a, b))
    store(out, BY_PIECES + 128, first_pieces(c, d))
    store(out, BY_PIECES + 192, second_pieces(c, d))
    sums = sum_fours(byte_sums(a), byte_sums(b), byte_sums(c), byte_sums(d))
    store(out, OFFSETS, sums * -128)
    sums = by_fours(sums)
    store(out, TOTALS, convert(i16x16, sums))
    of_32 = even_lanes(sums) + odd_lanes(sums)
    store(out, OFFSETS32, of_32 * -128)
    store(out, TOTALS32, convert(i16x8, of_32))
    return sums


@inline
def store_halves(out: int, offset: int, a: Any, b: Any) -> None:
    """Write the lower halves of two vectors, then the upper ones."""
    store(out, offset, low_halves(a, b))
    store(out, offset + 64, high_halves(a, b))


@inline
def store_apart(out: int) -> None:
    """Write the levels of a unit again, blocks that are not neighbours side by side."""
    a = load(i8x64, out, 0)
    b = load(i8x64, out, 64)
    c = load(i8x64, out, 128)
    d = load(i8x64, out, 192)
    store_halves(out, APART_2, a, b)
    store_halves(out, APART_2 + 128, c, d)
    store_halves(out, APART_4, a, c)
    store_halves(out, APART_4 + 128, b, d)


@inline
def store_by_eights(out: int) -> None:
    """Write the levels of a unit again, as rows of 16 that are 8 apart."""
    for half in range(2):
        a, b = load(i8x64, out, 128 * half), load(i8x64, out, 128 * half + 64)
        store(out, BY_EIGHTS + 128 * half, eighths_0123(a, b))
        store(out, BY_EIGHTS + 128 * half + 64, eighths_4567(a, b))


@inline
def store_by_words(out: int) -> None:
    """Write the levels of a unit, which are in order behind it, by words, and as quarters of each 64."""
    levels = out + IN_ORDER
    for quarter in range(4):
        store(out, BY_QUARTERS + 64 * quarter, load_pieces(i8x64, i8x16, levels, 16 * quarter, 64))
    l0, l1, l2, l3 = by_words(
        load(i8x64, levels, 0), load(i8x64, levels, 64), load(i8x64, levels, 128), load(i8x64, levels, 192)
    )
    store(out, 0, l0)
    store(out, 64, l1)
    store(out, 128, l2)
    store(out, 192, l3)


@inline
def rounded_levels(x: int, offset: int, factor: Any) -> Any:
    """Return the 16 values at byte ``offset`` times ``factor``, rounded to int8."""
    return convert(i8x16, convert(i32x16, round_even(load(f32x16, x, offset) * factor)))


@inline
def store_levels_by_32(x: int, out: int, factors: Any) -> Any:
    """Write the levels and offsets of a unit, for each block's factor, twice; return the sums of each 16 levels."""
    for block in range(8):
        factor = splat(f32x16, extract(factors, 2 * block))
        store(out, 32 * block, rounded_levels(x, 128 * block, factor))
        store(out, 32 * block + 16, rounded_levels(x, 128 * block + 64, factor))
    return store_offsets(out)


@inline
def quantize_unit_by_32(x: int, out: int, with_sums: bool) -> None:
    """256 values to q8_0, or q8_1 if with_sums (llama.cpp arch/x86/quants.c quantize_row_q8_0, quantize_row_q8_1)."""
    amax = block_maxima(x)
    d = amax / np.float32(127)
    # Below, d is 0 in half precision and 127 / amax may overflow: ggml's levels are -128 then, which d = 0 cancels.
    factors = select(amax > np.float32(2.0**-120), np.float32(127) / amax, 0)
    sums = store_levels_by_32(x, out, factors)
    store_f16(out, SUMS, d)
    store(out, SCALES, load_f16(f32x16, out, SUMS))
    if with_sums:
        # One s per 32 values, in the even lanes of the sums of 16.
        s = convert(f32x16, sums + swap_neighbours(sums)) * d
        store_f16(out, SUMS, s)
        s = load_f16(f32x16, out, SUMS)
        store(out, SUMS, on_even_lanes(s, splat(f32x16, 0)))
        store(out, SUMS32, even_lanes(s))
    else:
        store_scaled_sums(out, sums)


@inline
def store_scaled_sums(out: int, sums: Any) -> None:
    """Write d * sum of levels for each 16 and each 32 values."""
    d = load(f32x16, out, SCALES)
    store(out, SUMS, convert(f32x16, sums) * d)
    store(out, SUMS32, even_lanes(convert(f32x16, sums + swap_neighbours(sums)) * d))


@inline
def first_largest(x: int) -> Any:
    """Return the first value of the largest magnitude among 256."""
    high = low = load(f32x16, x, 0)
    for i in range(1, 16):
        v = load(f32x16, x, 64 * i)
        high, low = vmax(high, v), vmin(low, v)
    largest, smallest = hmax(high), hmin(low)
    if largest == -smallest:
        for i in range(256):
            v = load(types.float32, x, 4 * i)
            if abs(v) == largest:
                return v
    return largest if largest > -smallest else smallest


@inline
def quantize_unit_q8_k(x: int, out: int, of_row: Any) -> None:
    """256 values to q8_k (llama.cpp ggml-quants.c quantize_row_q8_K_ref)."""
    largest = first_largest(x)
    iscale = np.float32(0)
    d = np.float32(0)
    if largest != 0:
        iscale = np.float32(-127) / largest
        d = np.float32(1) / iscale
    factor = splat(f32x16, iscale)
    for i in range(16):
        q = nearest_int(load(f32x16, x, 64 * i) * factor)
        store(out, 16 * i, convert(i8x16, vmin(q, splat(i32x16, 127))))
    store(out, SCALES, splat(f32x16, d))
    store_scaled_sums(out, store_offsets(out))
    store_apart(out)


@inline
def quantize_unit_q8_0(x: int, out: int, of_row: Any) -> None:
    """256 values to q8_0."""
    quantize_unit_by_32(x, out, False)


@inline
def quantize_unit_q8_1(x: int, out: int, of_row: Any) -> None:
    """256 values to q8_1."""
    quantize_unit_by_32(x, out, True)


@inline
def quantize_unit_q8_2(x: int, out: int, of_row: Any) -> None:
    """256 values to q8_2 (ik_llama.cpp iqk_quantize.cpp quantize_row_q8_2_x4)."""
    amax = block_maxima(x)
    d = cast(f32x16, round_bf16(cast(u32x16, amax / np.float32(127))))
    # Below, d is denormal: it may be so much smaller than amax / 127 that levels overflow.
    sums = store_levels_by_32(x, out, select(amax > np.float32(2.0**-118), np.float32(1) / d, 0))
    store(out, SCALES, d)
    store_scaled_sums(out, sums)
    store_by_eights(out)


# ---------------------------------------------------------------- formats with scales of a row


@inline
def no_scales(x: int, n: int) -> Any:
    """The scales of a unit follow from its values alone."""
    return None


@inline
def row_maxima(x: int, n: int) -> Any:
    """Return the largest magnitudes of a row at places i of each i % 16."""
    most = splat(f32x16, 0)
    for i in range(0, n - 15, 16):
        most = vmax(most, vabs(load(f32x16, x, 4 * i)))
    return vmax(most, vabs(load_part(f32x16, x, n // 16 * 64, n % 16)))


@inline
def scales_of_row(amax: Any) -> Any:
    """Return d, and the factor of the values, of largest magnitudes."""
    d = amax / np.float32(127)
    return d, select(amax > np.float32(2.0**-118), np.float32(1) / d, 0)  # as in q8_2


@inline
def scales_q8_kv(x: int, n: int) -> Any:
    """One for all values."""
    return scales_of_row(splat(f32x16, hmax(row_maxima(x, n))))


@inline
def scales_q8_k64(x: int, n: int) -> Any:
    """One for all first words of 16 bytes of levels, for all second, third and fourth ones."""
    amax = row_maxima(x, n)
    amax = vmax(amax, swap_neighbours(amax))
    return scales_of_row(vmax(amax, swap_pairs(amax)))


@inline
def store_row_levels(x: int, out: int, factors: Any) -> None:
    """Write the levels of 256 values in order; factors: of each 16 values."""
    for i in range(16):
        store(out, 16 * i, rounded_levels(x, 64 * i, factors))


@inline
def quantize_unit_q8_kv(x: int, out: int, of_row: Any) -> None:
    """256 values to q8_kv (ik_llama.cpp iqk_quantize.cpp iqk_quantize_row_q8_KV)."""
    d, factors = of_row
    store_row_levels(x, out, factors)
    store(out, SCALES, d)
    store_scaled_sums(out, store_offsets(out))


@inline
def quantize_unit_q8_k64(x: int, out: int, of_row: Any) -> None:
    """256 values to q8_k64 (ik_llama.cpp iqk_quantize.cpp quantize_row_q8_K64_ref)."""
    d, factors = of_row
    store_row_levels(x, out + IN_ORDER, factors)
    store_by_words(out)
    store(out, SCALES, d)
    store_scaled_sums(out, store_offsets(out))


# ---------------------------------------------------------------- rows

#: The scales of a row and the unit quantizer, rebound for each format.
find_scales: Any = None
quantize_unit: Any = None


def quantize_row(x: int, out: int, n: int, first: int, last: int) -> None:
    """Quantize units first..last of a row of ``n`` values, zero-padded; threads that share it all find its scales."""
    of_row = find_scales(x, n)
    for unit in range(first, last):
        source = x + 1024 * unit
        if 256 * unit + 256 > n:
            padded = stack_bytes(1024)
            for i in range(256):
                in_range = 256 * unit + i < n
                store(padded, 4 * i, load(types.float32, source, 4 * i) if in_range else types.float32(0))
            source = padded
        quantize_unit(source, out + UNIT_BYTES * unit, of_row)


@inline
def round_row_f16(x: int, out: int, n: int) -> None:
    """Round n values to half precision, kept as f32."""
    for i in range(0, n - 15, 16):
        store_f16(out, 4 * i, load(f32x16, x, 4 * i))
        store(out, 4 * i, load_f16(f32x16, out, 4 * i))
    for i in range(n // 16 * 16, n):
        store(out, 4 * i, f16_to_f32(f32_to_f16(load(types.float32, x, 4 * i))))


@inline
def round_bf16(bits: Any) -> Any:
    """Round the bits of f32 to bfloat16, nearest even, NaNs quieted (ggml_compute_fp32_to_bf16)."""
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000
    quiet = (bits | 0x400000) & 0xFFFF0000
    return select((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded)


@inline
def round_row_bf16(x: int, out: int, n: int) -> None:
    """Round n values to bfloat16, kept as f32."""
    for i in range(0, n - 15, 16):
        store(out, 4 * i, round_bf16(load(u32x16, x, 4 * i)))
    for i in range(n // 16 * 16, n):
        store(out, 4 * i, extract(round_bf16(splat(u32x16, load(types.uint32, x, 4 * i))), 0))


ROUNDERS = {"f16": round_row_f16, "bf16": round_row_bf16}
QUANTIZERS = {
    "q8_0": quantize_unit_q8_0,
    "q8_1": quantize_unit_q8_1,
    "q8_2": quantize_unit_q8_2,
    "q8_k": quantize_unit_q8_k,
    "q8_kv": quantize_unit_q8_kv,
    "q8_k64": quantize_unit_q8_k64,
}
#: Formats whose scales follow from all values of a row.
ROW_SCALES = {"q8_kv": scales_q8_kv, "q8_k64": scales_q8_k64}


# ---------------------------------------------------------------- operations

_X, _OUT, _N, _ROWS_OF, _PER = range(1, 6)

#: ``quantize_row`` of a format.
quantize_units: Any = None
round_row: Any = None


@operation("batch x out n rows_of per")
def quantize_rows(args: int, tid: int, nth: int) -> None:
    """Quantize rows of x, f32 [rows, n], to rows of ``row_bytes(format, n)``; threads share the units."""
    rows, n = batch_word(args, rows_word(arg(args, _ROWS_OF))) * arg(args, _PER), arg(args, _N)
    x, out = arg(args, _X), arg(args, _OUT)
    units = (n + 255) // 256
    stride = units * UNIT_BYTES + ROW_GAP
    first, last = first_of(rows * units, tid, nth), first_of(rows * units, tid + 1, nth)
    while first < last:
        row, unit = first // units, first % units
        end = min(units, unit + last - first)
        quantize_units(x + 4 * n * row, out + stride * row, n, unit, end)
        first += end - unit


@operation("batch x out n rows_of per")
def round_rows(args: int, tid: int, nth: int) -> None:
    """Round rows of x, f32 [rows, n], to half precision or bfloat16, kept as f32; threads share runs of 64 values."""
    rows, n = batch_word(args, rows_word(arg(args, _ROWS_OF))) * arg(args, _PER), arg(args, _N)
    x, out = arg(args, _X), arg(args, _OUT)
    runs = (rows * n + 63) // 64
    first, last = 64 * first_of(runs, tid, nth), min(rows * n, 64 * first_of(runs, tid + 1, nth))
    if first < last:
        round_row(x + 4 * first, out + 4 * first, last - first)


@inline
def rows_word(rows_of: int) -> int:
    """Return the word of the batch block with the number of rows: tokens (0) or outputs (1)."""
    return N_OUTPUTS if rows_of == 1 else N_TOKENS


@cache
def quantize(kind: str) -> TapeOp:
    """Return the operation that converts x to a format: slots batch, x, out, n, rows_of, per. f32 needs none.

    x is f32 [rows * per, n]; out has as many rows of ``row_bytes(kind, n)``. Raises ValueError for other formats.
    """
    if kind in QUANTIZERS:
        bound = {"quantize_unit": QUANTIZERS[kind], "find_scales": ROW_SCALES.get(kind, no_scales)}
        return quantize_rows.bind(kind, quantize_units=specialize(quantize_row, kind, **bound))
    if kind in ROUNDERS:
        return round_rows.bind(kind, round_row=ROUNDERS[kind])
    raise ValueError(f"activations are quantized to {', '.join([*QUANTIZERS, *ROUNDERS])}; not to {kind}")

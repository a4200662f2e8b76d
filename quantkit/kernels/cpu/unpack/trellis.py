"""Unpackers of ik_llama.cpp's trellis types: levels are pseudo-random numbers, seeded by indices.

Bytes of a row header and of a block of 256 values (ik_llama.cpp 8337e4cd3, ggml-common.h and iqk_quantize.cpp)::

    IQ1_KT  d f32 | sh 8 | ql 32 | qh 16          d * codebook[sh & 15] * levels of 8 from 13-bit q, sh per 32 values
    IQ2_KT  d f32 | scales 4 | qs 32 u16          d * codebook[s] * levels of 8 from 16-bit q, 4-bit s per 32 values
    IQ3_KT  d f32 | scales 4 | qs 32 u16 | qh 32  d * s * magnitudes of 8 from 16-bit q, signs in qh, 4-bit s per 32
    IQ4_KT  d f32 | 8 u32 w | ql 64 | qh 32       d * ((w >> 1 & 127) - 64) * levels of 4 from 16-bit q, w per 32 values

The levels of q: x = q + 4096, and for each level x = 0xCBAC1FED * x mod 2^32; the four bytes of x & 0x3F3F3F3F are
summed, and 126 subtracted: -126 .. 126, distributed nearly normally with a deviation of 37. Nothing is looked up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    dot4,
    f32x16,
    i8x64,
    i32x16,
    load,
    lookup16,
    make_constant,
    make_shuffle,
    make_shuffle2,
    select,
    splat,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
    u16x16,
    u32x8,
    u32x16,
    vmax,
    vmin,
)
from quantkit.kernels.cpu.unpack import i_quants
from quantkit.kernels.cpu.unpack.lanes import each_twice, twice32, u8x4

#: The factor of the generator, the relevant bits of a number, and the offset of an index.
FACTOR = 0xCBAC1FED
MASK = 0x3F3F3F3F
FIRST = 4096

low_in_turn = make_shuffle2([16 * (i % 2) + i // 2 for i in range(16)], "trellis.low_in_turn")
high_in_turn = make_shuffle2([16 * (i % 2) + i // 2 + 8 for i in range(16)], "trellis.high_in_turn")
#: Two vectors of 4, concatenated, each lane twice.
joined_twice = make_shuffle2([i // 2 for i in range(16)], "trellis.joined_twice")
#: Lanes 2 k and 2 k + 1 of 8, each 8 times; lanes 0 to 3, and 4 to 7, each 4 times.
words_0 = make_shuffle([i // 8 for i in range(16)], "trellis.words_0")
words_1 = make_shuffle([2 + i // 8 for i in range(16)], "trellis.words_1")
words_2 = make_shuffle([4 + i // 8 for i in range(16)], "trellis.words_2")
words_3 = make_shuffle([6 + i // 8 for i in range(16)], "trellis.words_3")
first_4_times = make_shuffle([i // 4 for i in range(16)], "trellis.first_4_times")
last_4_times = make_shuffle([4 + i // 4 for i in range(16)], "trellis.last_4_times")
fifth_bits = make_constant(u32x16, [4, 5, 6, 7] * 4, "trellis.fifth_bits")
threes = make_constant(u32x16, list(range(8, 32, 3)) * 2, "trellis.threes")
two_bits = make_constant(u8x64, [1] * 32 + [2] * 32, "trellis.two_bits")


@inline
def _sums(x: Any) -> Any:
    """Return the sums of the kept bits of four bytes: 0 .. 252."""
    return cast(u32x16, dot4(splat(i32x16, 0), cast(u8x64, x & MASK), splat(i8x64, 1)))


@inline
def next_four(x: Any) -> Any:
    """Return the next four sums of 16 generators as bytes, in order, and the generators' states."""
    a = x * FACTOR
    b = a * FACTOR
    c = b * FACTOR
    d = c * FACTOR
    return _sums(a) | (_sums(b) << 8) | (_sums(c) << 16) | (_sums(d) << 24), d


@inline
def _levels(sums: Any) -> Any:
    return cast(i8x64, cast(u8x64, sums) - 126)


@inline
def eights(q: Any) -> Any:
    """Return 128 levels, in two vectors, for 16 indices of u32."""
    low, x = next_four(q + FIRST)
    high, _ = next_four(x)
    return _levels(low_in_turn(low, high)), _levels(high_in_turn(low, high))


@inline
def fours(q: Any) -> Any:
    """Return 64 levels for 16 indices of u32."""
    low, _ = next_four(q + FIRST)
    return _levels(low)


@inline
def _of_words(data: int, offset: int) -> Any:
    """Return 256 levels for 32 indices of 16 bits."""
    l0, l1 = eights(convert(u32x16, load(u16x16, data, offset)))
    l2, l3 = eights(convert(u32x16, load(u16x16, data, offset + 32)))
    return l0, l1, l2, l3


@inline
def _nibbles_twice(data: int, offset: int) -> Any:
    """Return the low nibbles of 4 bytes, then the high ones, each twice."""
    s = load(u8x4, data, offset)
    return joined_twice(s & 15, s >> 4)


@inline
def codebook_scales(nibbles: Any) -> Any:
    """Return codebook[s] for 16 nibbles."""
    return convert(f32x16, lookup16(i_quants.codebook(), nibbles))


@inline
def iq1_kt_indices(data: int, offset: int) -> Any:
    """Return the indices of 128 values, and of the others."""
    sh, qh = load(u8x8, data, offset), load(u8x16, data, offset + 40)
    words = convert(u32x8, sh)
    top0 = ((first_4_times(words) >> fifth_bits()) & 1) << 12
    top1 = ((last_4_times(words) >> fifth_bits()) & 1) << 12
    q0 = convert(u32x16, load(u8x16, data, offset + 8)) | (convert(u32x16, qh & 15) << 8)
    q1 = convert(u32x16, load(u8x16, data, offset + 24)) | (convert(u32x16, qh >> 4) << 8)
    return q0 | top0, q1 | top1


@inline
def iq1_kt_scales(data: int, offset: int) -> Any:
    """Return codebook[sh & 15], each twice."""
    return codebook_scales(each_twice(load(u8x8, data, offset) & 15))


@inline
def unpack_iq1_kt(data: int, offset: int) -> Any:
    """56 bytes."""
    q0, q1 = iq1_kt_indices(data, offset)
    l0, l1 = eights(q0)
    l2, l3 = eights(q1)
    return l0, l1, l2, l3, iq1_kt_scales(data, offset), None


@inline
def iq2_kt_scales(data: int, offset: int) -> Any:
    """Return codebook[s], each twice."""
    return codebook_scales(_nibbles_twice(data, offset))


@inline
def unpack_iq2_kt(data: int, offset: int) -> Any:
    """68 bytes."""
    l0, l1, l2, l3 = _of_words(data, offset + 4)
    return l0, l1, l2, l3, iq2_kt_scales(data, offset), None


@inline
def _signed(levels: Any, signs: Any) -> Any:
    """Return levels' magnitudes, negative where ``signs`` has a bit."""
    minus = -levels
    return select(signs != 0, vmin(levels, minus), vmax(levels, minus))


@inline
def unpack_iq3_kt(data: int, offset: int) -> Any:
    """100 bytes."""
    l0, l1, l2, l3 = _of_words(data, offset + 4)
    signs = twice32(load(u8x32, data, offset + 68))
    l0, l1 = _signed(l0, signs & two_bits()), _signed(l1, signs & (two_bits() << 2))
    l2, l3 = _signed(l2, signs & (two_bits() << 4)), _signed(l3, signs & (two_bits() << 6))
    return l0, l1, l2, l3, convert(f32x16, _nibbles_twice(data, offset)), None


@inline
def _of_words_and_bytes(data: int, offset: int, words: Any, nibbles: Any) -> Any:
    """Return 64 levels of IQ4_KT: words of 32 values each 8 times, 16 bytes at ``offset``, 16 nibbles."""
    q = convert(u32x16, load(u8x16, data, offset)) | (convert(u32x16, nibbles) << 8)
    return fours(q | (((words >> threes()) & 7) << 12) | ((words & 1) << 15))


@inline
def unpack_iq4_kt(data: int, offset: int) -> Any:
    """128 bytes."""
    words = load(u32x8, data, offset)
    a, b = load(u8x16, data, offset + 96), load(u8x16, data, offset + 112)
    l0 = _of_words_and_bytes(data, offset + 32, words_0(words), a & 15)
    l1 = _of_words_and_bytes(data, offset + 48, words_1(words), b & 15)
    l2 = _of_words_and_bytes(data, offset + 64, words_2(words), a >> 4)
    l3 = _of_words_and_bytes(data, offset + 80, words_3(words), b >> 4)
    scales = convert(f32x16, each_twice((words >> 1) & 127))
    return l0, l1, l2, l3, scales - np.float32(64), None

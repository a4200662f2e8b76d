"""Unpackers of Q1_0, Q4_0 to Q8_0 and Q6_0, blocks with an f16 scale (and an f16 minimum), and of Q8_KV.

Bytes of a block (llama.cpp b11434 ggml-common.h; Q6_0, Q8_KV: ik_llama.cpp 8337e4cd3); 256 values are 8 blocks::

    Q1_0  d f16 | qs 16      value = d or -d             blocks of 128; bit i set: value i is d (ik: q1_0_g128)
    Q4_0  d f16 | qs 16      value = d * (q - 8)         q: value i in the low, i + 16 in the high half of byte i
    Q4_1  d f16 | m f16 | qs 16           d * q + m
    Q5_0  d f16 | qh 4 | qs 16            d * (q - 16)   bit i of qh is the fifth bit of value i
    Q5_1  d f16 | m f16 | qh 4 | qs 16    d * q + m
    Q8_0  d f16 | qs 32                   d * q          q: int8
    Q6_0  d f16 | qh 8 | qs 16            d * (q - 32)   byte b of qh: 2 high bits of values b, b + 16, b + 8, b + 24
    Q8_KV qs 32                           d * q          d f32 begins the row; the sum of all q, an i32, follows it
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import cast, f32x16, i8x32, i8x64, load, select, splat, u8x8, u8x64
from quantkit.kernels.cpu.unpack.lanes import (
    below,
    block_scales,
    each_8_times,
    high_eighths,
    high_quarters,
    load_pieces,
    low_eighths,
    low_quarters,
    mask_of_bits,
    nibbles16,
    u16x2,
    widen_f16,
)


@inline
def fifth_bits(data: int, offset: int, stride: int) -> Any:
    """Return 16 where a value's bit is set in the 4-byte masks of two blocks, else 0."""
    low = types.uint64(load(types.uint32, data, offset))
    high = types.uint64(load(types.uint32, data, offset + stride))
    return select(mask_of_bits(low | (high << types.uint64(32))), splat(u8x64, 16), 0)


@inline
def signs64(data: int, offset: int) -> Any:
    """Expand the bits of 8 bytes: 1 where set, else -1."""
    return select(mask_of_bits(load(types.uint64, data, offset)), splat(i8x64, 1), -1)


@inline
def unpack_q1_0(data: int, offset: int) -> Any:
    """2 blocks of 18 bytes."""
    l0, l1 = signs64(data, offset + 2), signs64(data, offset + 10)
    l2, l3 = signs64(data, offset + 20), signs64(data, offset + 28)
    return l0, l1, l2, l3, each_8_times(widen_f16(load_pieces(u16x2, types.uint16, data, offset, 18))), None


@inline
def unpack_q4_0(data: int, offset: int) -> Any:
    """8 blocks of 18 bytes."""
    l0, l1, l2, l3 = nibbles16(data, offset + 2, 18)
    return below(l0, 8), below(l1, 8), below(l2, 8), below(l3, 8), block_scales(data, offset, 18), None


@inline
def unpack_q4_1(data: int, offset: int) -> Any:
    """8 blocks of 20 bytes; the minimum is stored negated."""
    l0, l1, l2, l3 = nibbles16(data, offset + 4, 20)
    scales, mins = block_scales(data, offset, 20), -block_scales(data, offset + 2, 20)
    return cast(i8x64, l0), cast(i8x64, l1), cast(i8x64, l2), cast(i8x64, l3), scales, mins


@inline
def unpack_q5_0(data: int, offset: int) -> Any:
    """8 blocks of 22 bytes."""
    l0, l1, l2, l3 = nibbles16(data, offset + 6, 22)
    l0 = below(l0 | fifth_bits(data, offset + 2, 22), 16)
    l1 = below(l1 | fifth_bits(data, offset + 46, 22), 16)
    l2 = below(l2 | fifth_bits(data, offset + 90, 22), 16)
    l3 = below(l3 | fifth_bits(data, offset + 134, 22), 16)
    return l0, l1, l2, l3, block_scales(data, offset, 22), None


@inline
def unpack_q5_1(data: int, offset: int) -> Any:
    """8 blocks of 24 bytes; the minimum is stored negated."""
    l0, l1, l2, l3 = nibbles16(data, offset + 8, 24)
    l0 = cast(i8x64, l0 | fifth_bits(data, offset + 4, 24))
    l1 = cast(i8x64, l1 | fifth_bits(data, offset + 52, 24))
    l2 = cast(i8x64, l2 | fifth_bits(data, offset + 100, 24))
    l3 = cast(i8x64, l3 | fifth_bits(data, offset + 148, 24))
    return l0, l1, l2, l3, block_scales(data, offset, 24), -block_scales(data, offset + 2, 24)


@inline
def unpack_q8_0(data: int, offset: int) -> Any:
    """8 blocks of 34 bytes."""
    l0 = load_pieces(i8x64, i8x32, data, offset + 2, 34)
    l1 = load_pieces(i8x64, i8x32, data, offset + 70, 34)
    l2 = load_pieces(i8x64, i8x32, data, offset + 138, 34)
    l3 = load_pieces(i8x64, i8x32, data, offset + 206, 34)
    return l0, l1, l2, l3, block_scales(data, offset, 34), None


@inline
def unpack_q6_0(data: int, offset: int) -> Any:
    """8 blocks of 26 bytes."""
    l0, l1, l2, l3 = nibbles16(data, offset + 10, 26)
    h = load_pieces(u8x64, u8x8, data, offset + 2, 26)
    h0 = (h << 4) & 48
    h16 = (h << 2) & 48
    h8 = h & 48
    h24 = (h >> 2) & 48
    a, b = low_eighths(h0, h8), low_eighths(h16, h24)
    c, d = high_eighths(h0, h8), high_eighths(h16, h24)
    l0, l1 = below(l0 | low_quarters(a, b), 32), below(l1 | high_quarters(a, b), 32)
    l2, l3 = below(l2 | low_quarters(c, d), 32), below(l3 | high_quarters(c, d), 32)
    return l0, l1, l2, l3, block_scales(data, offset, 26), None


@inline
def unpack_q8_kv(data: int, offset: int) -> Any:
    """8 blocks of 32 bytes."""
    l0, l1 = load(i8x64, data, offset), load(i8x64, data, offset + 64)
    l2, l3 = load(i8x64, data, offset + 128), load(i8x64, data, offset + 192)
    return l0, l1, l2, l3, splat(f32x16, types.float32(1)), None

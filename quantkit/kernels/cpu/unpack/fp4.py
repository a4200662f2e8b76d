"""Unpackers of MXFP4 and NVFP4: 4-bit floats (E2M1) scaled by a power of two, or by an 8-bit float.

Bytes of a block (llama.cpp b11434 ggml-common.h)::

    MXFP4  32: e u8 | qs 16             E2M1[q] * 2^(e - 127); value i in the low, i + 16 in the high half of byte i
    NVFP4  64: 4 scales u8 | qs 32      E2M1[q] * scale; 16 values per scale, value i and i + 8 in one of 8 bytes

E2M1 is 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign; levels are twice that, scales half (ggml_e8m0_to_fp32_half,
ggml_ue4m3_to_fp32). NVFP4's scale is an unsigned E4M3 whose top bit is ignored; 0x7F, its NaN, counts as 0.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    f32x8,
    f32x16,
    i8x16,
    lookup16,
    make_constant,
    select,
    splat,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
    u32x4,
    u32x8,
    u32x16,
)
from quantkit.kernels.cpu.unpack.lanes import (
    each_twice,
    high_eighths,
    load_pieces,
    lookup_all,
    low_eighths,
    nibbles16,
)
from quantkit.kernels.tables import table

codebook = make_constant(i8x16, table("kvalues_fp4").tolist(), "fp4.codebook")


@inline
def half_e8m0(e: Any) -> Any:
    """Return 2^(e - 128) of 8 bytes, denormal below 2; 255, NaN in the standard, is 2^127 as in ggml."""
    x = convert(u32x8, e)
    small = splat(u32x8, 0x00200000) << (x & 1)
    return cast(f32x8, select(x < 2, small, (x - 1) << 23))


@inline
def mxfp4_scales(data: int, offset: int) -> Any:
    """Return the scales of 8 blocks, each twice."""
    return each_twice(half_e8m0(load_pieces(u8x8, types.uint8, data, offset, 17)))


@inline
def unpack_mxfp4(data: int, offset: int) -> Any:
    """8 blocks of 17 bytes."""
    q0, q1, q2, q3 = nibbles16(data, offset + 1, 17)
    l0, l1, l2, l3 = lookup_all(codebook(), q0, q1, q2, q3)
    return l0, l1, l2, l3, mxfp4_scales(data, offset), None


@inline
def half_ue4m3(code: Any) -> Any:
    """Return half the value of 16 unsigned E4M3 bytes, 0 for 0x7F."""
    x = convert(u32x16, code) & 127
    normal = cast(f32x16, (x << 20) + (119 << 23))
    value = select(x < 8, convert(f32x16, x) * types.float32(2.0**-10), normal)
    return select(convert(u32x16, code) == 127, splat(f32x16, 0), value)


@inline
def unpack_nvfp4(data: int, offset: int) -> Any:
    """4 blocks of 36 bytes."""
    a = load_pieces(u8x64, u8x32, data, offset + 4, 36)
    b = load_pieces(u8x64, u8x32, data, offset + 76, 36)
    al = a & 15
    ah = a >> 4
    bl = b & 15
    bh = b >> 4
    l0, l1 = lookup16(codebook(), low_eighths(al, ah)), lookup16(codebook(), high_eighths(al, ah))
    l2, l3 = lookup16(codebook(), low_eighths(bl, bh)), lookup16(codebook(), high_eighths(bl, bh))
    return l0, l1, l2, l3, half_ue4m3(cast(u8x16, load_pieces(u32x4, types.uint32, data, offset, 36))), None

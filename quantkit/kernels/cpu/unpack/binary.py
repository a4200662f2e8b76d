"""Unpacker of Q1_0: one bit per value, d or -d.

Bytes of a block of 128 values (llama.cpp b11434 ggml-common.h): d f16 | qs 16, bit i set: value i is d. ik_llama.cpp
calls the same layout q1_0_g128.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import i8x64, load, select, splat
from quantkit.kernels.cpu.unpack.lanes import each_8_times, load_pieces, mask_of_bits, u16x2, widen_f16


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

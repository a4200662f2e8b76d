"""Shared by unpackers: gathering pieces of blocks into vectors, and rearranging lanes.

Most formats store values i and i + 16 (or i + 32) of a block in one byte, so unpacking shifts and masks 64 bytes at
once, then arranges halves, quarters or eighths of the results in the order of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    _LL,
    VecType,
    _address,
    _from_half,
    _shuffle,
    cast,
    emits,
    f16_to_f32,
    i8x64,
    load,
    lookup16,
    lookup64,
    make_shuffle,
    make_shuffle2,
    mask64,
    u8x16,
    u8x64,
    u16x8,
)

u8x4, u64x4 = VecType(types.uint8, 4), VecType(types.uint64, 4)
u16x2, u16x4 = VecType(types.uint16, 2), VecType(types.uint16, 4)

# ---------------------------------------------------------------- memory


def _join(b: ir.IRBuilder, parts: Sequence[ir.Value]) -> ir.Value:
    while len(parts) > 1:
        lanes = 2 * parts[0].type.count
        parts = [_shuffle(b, x, y, range(lanes)) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _of_pieces(vt: Any, piece: Any, buffer: Any, offset: Any, stride: Any) -> Any:
    return vt.instance_type(vt, piece, buffer, types.intp, types.intp)


@emits(_of_pieces)
def load_pieces(b, sig, vt, piece, buffer, offset, stride):
    """load_pieces(u8x64, u8x16, buffer, byte, stride): a vector of pieces ``stride`` bytes apart.

    A piece is a vector type or a scalar type (types.uint16).
    """
    rt, pt = sig.return_type, sig.args[1].instance_type
    start = _address(b, buffer, offset)
    ll = pt.ll if isinstance(pt, VecType) else _LL[pt]
    count = rt.lanes // (pt.lanes if isinstance(pt, VecType) else 1)
    at = [b.gep(start, [b.mul(stride, ir.IntType(64)(k))]) for k in range(count)]
    parts = [b.load(b.bitcast(p, ll.as_pointer()), align=1) for p in at]
    if isinstance(pt, VecType):
        return _join(b, parts)
    out = ir.Constant(rt.ll, ir.Undefined)
    for k, part in enumerate(parts):
        out = b.insert_element(out, part, ir.IntType(32)(k))
    return out


def make_grid(entries: npt.NDArray[Any], name: str) -> Any:
    """Return an intrinsic ``pick(index)`` that concatenates entries of a grid as i8x64.

    ``entries`` are bytes [n, 8] or [n, 4]; ``index`` has 8 or 16 integer lanes, all below n. The grid is a constant
    in the kernel. One scalar load per entry: gather instructions take 18 to 28 % longer (EPYC, AVX-512).
    """
    raw, width = np.ascontiguousarray(entries).tobytes(), entries.shape[1]

    @emits(lambda index: i8x64(index), name)
    def pick(b, sig, index):
        i32, i64, word = ir.IntType(32), ir.IntType(64), ir.IntType(8 * width)
        constant = ir.Constant(ir.ArrayType(ir.IntType(8), len(raw)), bytearray(raw))
        table = cgutils.global_constant(b.module, f"quantkit.{name}", constant)
        table.align = 64
        start, lanes = b.bitcast(table, ir.IntType(8).as_pointer()), 64 // width
        out = ir.Constant(ir.VectorType(word, lanes), ir.Undefined)
        bits = index.type.element.width
        words = b.bitcast(index, ir.VectorType(i64, lanes * bits // 64))
        for k in range(lanes):
            # Indices come from shifts of whole words: the scalar units are idle, the vector units are not.
            word64 = b.extract_element(words, i32(k * bits // 64))
            entry_at = b.and_(b.lshr(word64, i64(k * bits % 64)), i64(2**bits - 1))
            at = b.mul(entry_at, i64(width))
            entry = b.load(b.bitcast(b.gep(start, [at]), word.as_pointer()), align=width)
            out = b.insert_element(out, entry, i32(k))
        return b.bitcast(out, i8x64.ll)

    return pick


# ---------------------------------------------------------------- bits and halves


@emits(lambda bits: mask64(types.uint64))
def mask_of_bits(b, sig, bits):
    """Return the mask of 64 lanes whose lane i is bit i of an integer (the inverse of mask_bits)."""
    return b.bitcast(bits, mask64.ll)


@emits(lambda bits: VecType(types.float32, bits.lanes)(bits))
def widen_f16(b, sig, bits):
    """Return the f32 lanes of half floats given as u16 lanes."""
    return _from_half(b, bits)


# ---------------------------------------------------------------- arranging lanes


def _runs(*starts: int, length: int) -> list[int]:
    return [s + i for s in starts for i in range(length)]


#: Two vectors of equal length, concatenated.
join16 = make_shuffle2(range(32), "unpack.join16")
join32 = make_shuffle2(range(64), "unpack.join32")
#: The lower, and the upper, halves of two vectors of 64, concatenated.
low_halves = make_shuffle2(_runs(0, 64, length=32), "unpack.low_halves")
high_halves = make_shuffle2(_runs(32, 96, length=32), "unpack.high_halves")
#: Quarters of two vectors of 64, interleaved: x0 y0 x1 y1, and x2 y2 x3 y3.
low_quarters = make_shuffle2(_runs(0, 64, 16, 80, length=16), "unpack.low_quarters")
high_quarters = make_shuffle2(_runs(32, 96, 48, 112, length=16), "unpack.high_quarters")
#: Eighths of two vectors of 64, interleaved.
low_eighths = make_shuffle2(_runs(0, 64, 8, 72, 16, 80, 24, 88, length=8), "unpack.low_eighths")
high_eighths = make_shuffle2(_runs(32, 96, 40, 104, 48, 112, 56, 120, length=8), "unpack.high_eighths")
#: A vector of 32 twice.
twice32 = make_shuffle([*range(32), *range(32)], "unpack.twice32")
#: 16 lanes: each of 8 lanes twice, each of 4 lanes 4 times, each of 2 lanes 8 times.
each_twice = make_shuffle([i // 2 for i in range(16)], "unpack.each_twice")
each_4_times = make_shuffle([i // 4 for i in range(16)], "unpack.each_4_times")
each_8_times = make_shuffle([i // 8 for i in range(16)], "unpack.each_8_times")
#: Lanes of two vectors, interleaved: x0 y0 x1 y1 ...
in_turn8 = make_shuffle2([8 * (i % 2) + i // 2 for i in range(16)], "unpack.in_turn8")
in_turn16 = make_shuffle2([16 * (i % 2) + i // 2 for i in range(32)], "unpack.in_turn16")


@inline
def half_at(data: int, offset: int) -> Any:
    """Return the f16 at ``offset`` as f32."""
    return f16_to_f32(load(types.uint16, data, offset))


@inline
def nibbles16(data: int, offset: int, stride: int) -> Any:
    """Return four vectors of unsigned 4-bit values from 16 bytes each of 8 blocks, in value order."""
    a = load_pieces(u8x64, u8x16, data, offset, stride)
    return nibbles16_of(a, load_pieces(u8x64, u8x16, data, offset + 4 * stride, stride))


@inline
def nibbles16_of(a: Any, b: Any) -> Any:
    """Return four vectors of unsigned 4-bit values from 8 blocks of 16 bytes in two vectors, in value order."""
    al, ah, bl, bh = a & 15, a >> 4, b & 15, b >> 4
    return low_quarters(al, ah), high_quarters(al, ah), low_quarters(bl, bh), high_quarters(bl, bh)


@inline
def crumbs(data: int, offset: int) -> Any:
    """Return four vectors of 2-bit values from 64 bytes, in value order, unsigned."""
    q = load(u8x64, data, offset)
    q0, q1, q2, q3 = q & 3, (q >> 2) & 3, (q >> 4) & 3, q >> 6
    return low_halves(q0, q1), low_halves(q2, q3), high_halves(q0, q1), high_halves(q2, q3)


@inline
def lookup_all(codebook: Any, q0: Any, q1: Any, q2: Any, q3: Any) -> Any:
    """Look up 256 indices in a codebook of 16."""
    return lookup16(codebook, q0), lookup16(codebook, q1), lookup16(codebook, q2), lookup16(codebook, q3)


@inline
def lookup_all_64(codebook: Any, q0: Any, q1: Any, q2: Any, q3: Any) -> Any:
    """Look up 256 indices in a codebook of 32 or 64."""
    return lookup64(codebook, q0), lookup64(codebook, q1), lookup64(codebook, q2), lookup64(codebook, q3)


@inline
def block_scales(data: int, offset: int, stride: int) -> Any:
    """Return the f16 scales of 8 blocks of 32 values, two lanes per block: one per 16 values."""
    return each_twice(widen_f16(load_pieces(u16x8, types.uint16, data, offset, stride)))


@inline
def below(levels: Any, offset: int) -> Any:
    """Return unsigned bytes minus ``offset`` as signed levels."""
    return cast(i8x64, levels - offset)

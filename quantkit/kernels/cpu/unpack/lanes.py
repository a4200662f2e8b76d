"""Shared by unpackers: gathering pieces of blocks into vectors, and rearranging lanes.

Most formats store values i and i + 16 (or i + 32) of a block in one byte, so unpacking shifts and masks 64 bytes at
once, then arranges halves, quarters or eighths of the results in the order of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.types.containers import UniTuple

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    _LL,
    FEATURES,
    VecType,
    _address,
    _call,
    _const,
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
    u8x16,
    u8x64,
    u16x8,
)

u8x4, u64x4 = VecType(types.uint8, 4), VecType(types.uint64, 4)
u16x2 = VecType(types.uint16, 2)
u16x4 = VecType(types.uint16, 4)
u16x64 = VecType(types.uint16, 64)

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
    pointers = [b.gep(start, [b.mul(stride, ir.IntType(64)(k))]) for k in range(count)]
    parts = [b.load(b.bitcast(p, ll.as_pointer()), align=1) for p in pointers]
    if isinstance(pt, VecType):
        return _join(b, parts)
    out = ir.Constant(rt.ll, ir.Undefined)
    for k, part in enumerate(parts):
        out = b.insert_element(out, part, ir.IntType(32)(k))
    return out


def make_grid(entries: npt.NDArray[Any], name: str) -> Any:
    """Return an intrinsic ``pick(index)`` that concatenates 256 bytes of entries of a grid, as four i8x64.

    ``entries`` are bytes [n, 8] or [n, 4]; ``index`` has 32 or 64 integer lanes, all below n. The grid is a constant
    in the kernel: with AVX-512 VBMI as codes of 16 bits, looked up in registers, unless they are too many.
    """
    fits = len(entries) * entries.shape[1] <= _MOST_BYTES
    emit = _look_codes_up if fits and "avx512vbmi" in FEATURES else _look_entries_up
    result = UniTuple(i8x64, 4)
    return emits(lambda index: result(index), name)(lambda b, sig, index: emit(b, entries, name, index))


#: Codes of larger grids take longer than a load per entry.
_MOST_BYTES = 2048


def _table(b: ir.IRBuilder, values: npt.NDArray[Any], name: str) -> ir.Value:
    """Return the address of constant bytes."""
    raw = np.ascontiguousarray(values).tobytes()
    constant = ir.Constant(ir.ArrayType(ir.IntType(8), len(raw)), bytearray(raw))
    table = cgutils.global_constant(b.module, f"quantkit.{name}", constant)
    table.align = 64
    return b.bitcast(table, ir.IntType(8).as_pointer())


def _look_entries_up(b: ir.IRBuilder, entries: npt.NDArray[Any], name: str, index: ir.Value) -> list[ir.Value]:
    """One scalar load per entry: gather instructions take 18 to 28 % longer (EPYC, AVX-512)."""
    width, start = entries.shape[1], _table(b, entries, name)
    word = ir.DoubleType() if width == 8 else ir.FloatType()  # loads that insert are those of floats
    per_piece = 16 // width
    count = index.type.count
    bits = index.type.element.width
    i64 = ir.IntType(64)
    words = b.bitcast(index, ir.VectorType(i64, count * bits // 64))
    pieces = []
    for first in range(0, count, per_piece):
        piece = ir.Constant(ir.VectorType(word, per_piece), ir.Undefined)
        for k in range(per_piece):
            # Indices come from shifts of whole words: the scalar units are idle, the vector units are not.
            bit = (first + k) * bits
            n = b.and_(b.lshr(b.extract_element(words, ir.IntType(32)(bit // 64)), i64(bit % 64)), i64(2**bits - 1))
            byte = b.mul(n, i64(width))
            entry = b.load(b.bitcast(b.gep(start, [byte]), word.as_pointer()), align=width)
            piece = b.insert_element(piece, entry, ir.IntType(32)(k))
        pieces.append(piece)
    quarter = len(pieces) // 4
    return [b.bitcast(_join(b, pieces[k : k + quarter]), i8x64.ll) for k in range(0, 4 * quarter, quarter)]


def _look_codes_up(b: ir.IRBuilder, entries: npt.NDArray[Any], name: str, index: ir.Value) -> list[ir.Value]:
    """Look up codes (vpermi2w), spread the fields of each to bytes (vpmultishiftqb), and look up levels (vpermb).

    A code has a field of 2 or 4 bits for each byte of the entry: which of its levels. The codes of 8 bytes are brought
    to the low end of a quadword.
    """
    levels, fields = np.unique(entries, return_inverse=True)
    width = entries.shape[1]
    field, per_qword = 16 // width, 8 // width
    codes = (fields.reshape(-1, width) << field * np.arange(width)).sum(1).astype(np.uint16)
    word = ir.VectorType(ir.IntType(16), 32)
    start = b.bitcast(_table(b, codes, f"{name}.codes"), word.as_pointer())
    tables = [b.load(b.gep(start, [ir.IntType(64)(k)]), align=64) for k in range(len(codes) // 32)]
    indices = b.zext(index, ir.VectorType(ir.IntType(16), index.type.count))
    indices = [_shuffle(b, indices, None, range(k, k + 32)) for k in range(0, index.type.count, 32)]
    results = [_look_words_up(b, tables, codes) for codes in indices]
    # The bits above a field in its byte choose among copies of the levels.
    levels_by_code = ir.Constant(i8x64.ll, [int(levels[i % 2**field % len(levels)]) for i in range(64)])
    control = ir.Constant(i8x64.ll, [field * j for j in range(8)] * 8)
    out = []
    for vector in range(4):
        first = vector * 8 * per_qword
        lanes = [first % 32 + w // 4 * per_qword + w % per_qword for w in range(32)]
        words = b.bitcast(_shuffle(b, results[first // 32], None, lanes), i8x64.ll)
        spread = _call(b, "llvm.x86.avx512.pmultishift.qb.512", i8x64.ll, [control, words])
        out.append(_call(b, "llvm.x86.avx512.permvar.qi.512", i8x64.ll, [levels_by_code, spread]))
    return out


def _look_words_up(b: ir.IRBuilder, tables: list[ir.Value], index: ir.Value) -> ir.Value:
    """Look up words in a table of 64, 128 ... words, 32 in each vector."""
    pairs = zip(tables[::2], tables[1::2], strict=True)
    entries = [_call(b, "llvm.x86.avx512.vpermi2var.hi.512", index.type, [x, index, y]) for x, y in pairs]
    bit = 64
    while len(entries) > 1:
        high = b.icmp_unsigned("!=", b.and_(index, _const(index.type, bit)), _const(index.type, 0))
        entries = [b.select(high, y, x) for x, y in zip(entries[::2], entries[1::2], strict=True)]
        bit *= 2
    return entries[0]


# ---------------------------------------------------------------- bits and halves


@emits(lambda bits: VecType(types.boolean, bits.bitwidth)(bits))
def mask_of_bits(b, sig, bits):
    """Return the mask whose lane i is bit i of an integer (the inverse of mask_bits)."""
    return b.bitcast(bits, sig.return_type.ll)


@emits(lambda bits: VecType(types.float32, bits.lanes)(bits))
def widen_f16(b, sig, bits):
    """Return the f32 lanes of half floats given as u16 lanes."""
    return _from_half(b, bits)


@emits(lambda words: VecType(types.uint8, 4 * words.lanes)(words))
def fields_of_7(b, sig, words):
    """Return the bytes that begin at bits 0, 7, 14 and 21 of each of 8 words."""
    t = sig.return_type.ll
    if {"avx512vbmi", "avx512vl"} <= FEATURES:
        control = ir.Constant(t, [32 * k + 7 * i for k in range(2) for i in range(4)] * (t.count // 8))
        return _call(b, "llvm.x86.avx512.pmultishift.qb.256", t, [control, b.bitcast(words, t)])
    # Each field moves up by as many bits as there are fields below it.
    moved = [b.and_(b.shl(words, _const(words.type, i)), _const(words.type, 255 << 8 * i)) for i in range(4)]
    return b.bitcast(reduce(b.or_, moved), t)


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
#: Within each 16 bytes, words of two vectors of 64 bytes, interleaved: x0 y0 x1 y1, and x2 y2 x3 y3; and their pairs of
#: words: x01 y01, and x23 y23.
_AT_16 = range(0, 64, 16)
low_words = make_shuffle2(_runs(*(i + k for i in _AT_16 for k in (0, 64, 4, 68)), length=4), "unpack.low_words")
high_words = make_shuffle2(_runs(*(i + k for i in _AT_16 for k in (8, 72, 12, 76)), length=4), "unpack.high_words")
low_pairs = make_shuffle2(_runs(*(i + k for i in _AT_16 for k in (0, 64)), length=8), "unpack.low_pairs")
high_pairs = make_shuffle2(_runs(*(i + k for i in _AT_16 for k in (8, 72)), length=8), "unpack.high_pairs")
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
    al = a & 15
    ah = a >> 4
    bl = b & 15
    bh = b >> 4
    return low_quarters(al, ah), high_quarters(al, ah), low_quarters(bl, bh), high_quarters(bl, bh)


@inline
def crumbs(data: int, offset: int) -> Any:
    """Return four vectors of 2-bit values from 64 bytes, in value order, unsigned."""
    q = load(u8x64, data, offset)
    q0 = q & 3
    q1 = (q >> 2) & 3
    q2 = (q >> 4) & 3
    q3 = q >> 6
    return low_halves(q0, q1), low_halves(q2, q3), high_halves(q0, q1), high_halves(q2, q3)


@inline
def by_words(l0: Any, l1: Any, l2: Any, l3: Any) -> Any:
    """Return the first words of all 16 bytes of four vectors, then the second, the third and the fourth.

    Word g of bytes 16 i ... of vector v is word 4 i + v of vector g.
    """
    a, b = low_words(l0, l1), low_words(l2, l3)
    c, d = high_words(l0, l1), high_words(l2, l3)
    return low_pairs(a, b), high_pairs(a, b), low_pairs(c, d), high_pairs(c, d)


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

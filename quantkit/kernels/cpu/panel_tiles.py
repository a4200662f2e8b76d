"""What register tiles of mat-muls are made of: intrinsics over tuples of vectors, one for 16 rows of each token.

A tile of n tokens is a tuple of 2 n vectors: rows 0..15 of every token, then rows 16..31. An intrinsic unrolls over all
of them in a Python loop while it makes code, so the tile stays in registers and the loops around it in numba. Tokens
are a tuple of addresses; offsets count bytes from each of them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from quantkit.kernels.cpu.simd import (
    HAS_DOT4,
    VecType,
    _dot4,
    _muladd,
    _shuffle,
    _splat,
    _transpose_step,
    f32x16,
    i8x64,
    i32x16,
)

_VECTORS = 2
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

# ---------------------------------------------------------------- turning rows into columns


@intrinsic
def turn(tyctx: Any, source: Any, stride: Any, target: Any, apart: Any, count: Any) -> Any:
    """turn(source, row_stride, target, apart, 16): 16 rows of 16 dwords to the first ``count`` columns, ``apart``."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    n = count.literal_value

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        start, out = (b.inttoptr(args[i], ir.IntType(8).as_pointer()) for i in (0, 2))
        pointer = f32x16.ll.as_pointer()
        at = [b.gep(start, [b.mul(args[1], _I64(r))]) for r in range(16)]
        rows = [b.load(b.bitcast(p, pointer), align=1) for p in at]
        for step in (8, 4, 2, 1):
            rows = _transpose_step(b, rows, step)
        for r in range(n):
            b.store(rows[r], b.bitcast(b.gep(out, [b.mul(args[3], _I64(r))]), pointer), align=1)
        return cgctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, count), cg


@intrinsic
def store_scales(tyctx: Any, out: Any, scales: Any, mins: Any, span: Any) -> Any:
    """Write a row's scales (and mins): 8 each in a line if 32 values share one, else two lines of 16."""
    if not isinstance(span, types.IntegerLiteral):
        return None

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        start = b.inttoptr(args[0], ir.IntType(8).as_pointer())
        pointer = f32x16.ll.as_pointer()
        has_mins = isinstance(sig.args[2], VecType)
        mins_at = args[2] if has_mins else None
        if span.literal_value == 32:
            both = _shuffle(b, args[1], mins_at, [*range(0, 16, 2), *(range(16, 32, 2) if has_mins else [0] * 8)])
            b.store(both, b.bitcast(start, pointer), align=1)
        else:
            b.store(args[1], b.bitcast(start, pointer), align=1)
            if has_mins:
                b.store(args[2], b.bitcast(b.gep(start, [_I64(64)]), pointer), align=1)
        return cgctx.get_dummy_value()

    return types.void(types.int64, scales, mins, span), cg


# ---------------------------------------------------------------- the tile


def _sums_of(tokens: Any) -> Any:
    return UniTuple(f32x16, _VECTORS * tokens.count)


def _dots_of(tokens: Any) -> Any:
    return UniTuple(i32x16, _VECTORS * tokens.count)


def broadcast(b: ir.IRBuilder, base: ir.Value, offset: ir.Value, element: ir.Type) -> ir.Value:
    at = b.gep(b.inttoptr(base, ir.IntType(8).as_pointer()), [offset])
    return _splat(b, b.load(b.bitcast(at, element.as_pointer()), align=4), 16)


def vector_at(b: ir.IRBuilder, base: ir.Value, offset: int, t: ir.Type) -> ir.Value:
    at = b.gep(b.inttoptr(base, ir.IntType(8).as_pointer()), [_I64(offset)])
    return b.load(b.bitcast(at, t.as_pointer()), align=64)


def items(b: ir.IRBuilder, value: ir.Value) -> list[ir.Value]:
    return [b.extract_value(value, i) for i in range(value.type.count)]


def packed(cgctx: Any, b: ir.IRBuilder, t: Any, parts: list[ir.Value]) -> ir.Value:
    out = ir.Constant(cgctx.get_value_type(t), ir.Undefined)
    for i, item in enumerate(parts):
        out = b.insert_value(out, item, i)
    return out


@intrinsic
def no_sums(tyctx: Any, tokens: Any) -> Any:
    """A tile of zeros."""
    t = _sums_of(tokens)
    return t(tokens), lambda cgctx, b, sig, args: ir.Constant(cgctx.get_value_type(t), None)


@intrinsic
def no_dots(tyctx: Any, tokens: Any, offset: Any) -> Any:
    """A tile of integer zeros."""
    t = _dots_of(tokens)
    return t(tokens, types.int64), lambda cgctx, b, sig, args: ir.Constant(cgctx.get_value_type(t), None)


@intrinsic
def offset_dots(tyctx: Any, tokens: Any, offset: Any) -> Any:
    """A tile of each token's integer at ``offset``."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        starts = [broadcast(b, y, args[1], _I32) for y in items(b, args[0])]
        return packed(cgctx, b, sig.return_type, starts * _VECTORS)

    return _dots_of(tokens)(tokens, types.int64), cg


@intrinsic
def dot_steps(tyctx: Any, dots: Any, panel: Any, tokens: Any, offset: Any, steps: Any) -> Any:
    """Add ``steps`` times 4 products, of levels at ``panel`` with bytes of the tokens from ``offset`` on."""
    if not isinstance(steps, types.IntegerLiteral):
        return None

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, ys = items(b, args[0]), items(b, args[2])
        n, signed = len(ys), not HAS_DOT4
        for step in range(steps.literal_value):
            w = [vector_at(b, args[1], 64 * (_VECTORS * step + r), i8x64.ll) for r in range(_VECTORS)]
            for c, y in enumerate(ys):
                x = b.bitcast(broadcast(b, y, b.add(args[3], _I64(4 * step)), _I32), i8x64.ll)
                for r in range(_VECTORS):
                    acc[r * n + c] = _dot4(b, acc[r * n + c], w[r], x, signed)
        return packed(cgctx, b, sig.return_type, acc)

    return dots(dots, types.int64, tokens, types.int64, steps), cg


@intrinsic
def add_scaled(tyctx: Any, sums: Any, dots: Any, scales: Any) -> Any:
    """sums + dots * the rows' scales."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, dots = items(b, args[0]), items(b, args[1])
        for r in range(_VECTORS):
            s = vector_at(b, args[2], 64 * r, f32x16.ll)
            for i in range(r * len(acc) // _VECTORS, (r + 1) * len(acc) // _VECTORS):
                acc[i] = _muladd(b, b.sitofp(dots[i], f32x16.ll), s, acc[i])
        return packed(cgctx, b, sig.return_type, acc)

    return sums(sums, dots, types.int64), cg


@intrinsic
def add_scaled_twice(tyctx: Any, sums: Any, dots: Any, scales: Any, tokens: Any, offset: Any) -> Any:
    """sums + dots * the rows' scales * each token's scale at ``offset``."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, dots = items(b, args[0]), items(b, args[1])
        rows = [vector_at(b, args[2], 64 * r, f32x16.ll) for r in range(_VECTORS)]
        for c, y in enumerate(items(b, args[3])):
            d = broadcast(b, y, args[4], _F32)
            for r in range(_VECTORS):
                i = r * len(acc) // _VECTORS + c
                acc[i] = _muladd(b, b.sitofp(dots[i], f32x16.ll), b.fmul(rows[r], d), acc[i])
        return packed(cgctx, b, sig.return_type, acc)

    return sums(sums, dots, types.int64, tokens, types.int64), cg


@intrinsic
def add_products(tyctx: Any, sums: Any, parts: Any, tokens: Any, offset: Any) -> Any:
    """sums + parts * each token's number at ``offset``."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, parts = items(b, args[0]), items(b, args[1])
        for c, y in enumerate(items(b, args[2])):
            d = broadcast(b, y, args[3], _F32)
            for r in range(_VECTORS):
                i = r * len(acc) // _VECTORS + c
                acc[i] = _muladd(b, parts[i], d, acc[i])
        return packed(cgctx, b, sig.return_type, acc)

    return sums(sums, parts, tokens, types.int64), cg


@intrinsic
def minus_mins(tyctx: Any, sums: Any, mins: Any, tokens: Any, offset: Any) -> Any:
    """sums - the rows' minimums * each token's number at ``offset``."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc = items(b, args[0])
        rows = [b.fneg(vector_at(b, args[1], 64 * r, f32x16.ll)) for r in range(_VECTORS)]
        for c, y in enumerate(items(b, args[2])):
            s = broadcast(b, y, args[3], _F32)
            for r in range(_VECTORS):
                i = r * len(acc) // _VECTORS + c
                acc[i] = _muladd(b, rows[r], s, acc[i])
        return packed(cgctx, b, sig.return_type, acc)

    return sums(sums, types.int64, tokens, types.int64), cg


@intrinsic
def store_tile(tyctx: Any, sums: Any, out: Any) -> Any:
    """Write a tile as f32 [tokens, 32]."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        parts, start = items(b, args[0]), b.inttoptr(args[1], ir.IntType(8).as_pointer())
        n = len(parts) // _VECTORS
        for i, item in enumerate(parts):
            at = b.gep(start, [_I64(64 * (_VECTORS * (i % n) + i // n))])
            b.store(item, b.bitcast(at, f32x16.ll.as_pointer()), align=64)
        return cgctx.get_dummy_value()

    return types.void(sums, types.int64), cg

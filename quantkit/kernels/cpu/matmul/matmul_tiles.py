"""Register tiles of matrix products: intrinsics over tuples of vectors, one per token and 16 rows.

A tile of n tokens is a tuple of 2 n vectors: rows 0..15 of every token, then rows 16..31. An intrinsic unrolls over
them while it generates code, so the tile stays in registers and the loops around it in numba. Tokens are a tuple of
addresses; offsets are in bytes from each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.types.containers import UniTuple

from quantkit.kernels.cpu.core.simd import (
    HAS_DOT4,
    VecType,
    _dot4,
    _muladd,
    _shuffle,
    _splat,
    _transpose_step,
    emits,
    f32x16,
    i8x64,
    i32x16,
)

_VECTORS = 2
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()

# ---------------------------------------------------------------- transposing rows


def _literal(last: Any, signature: Any) -> Any:
    return signature if isinstance(last, types.IntegerLiteral) else None


@emits(lambda *args: _literal(args[-1], types.void(*[types.int64] * 4, args[-1])))
def turn(b, sig, source, stride, target, target_stride, count):
    """turn(source, row_stride, target, target_stride, 16): transpose ``count`` columns of 16 rows of dwords."""
    start, out = (b.inttoptr(p, ir.IntType(8).as_pointer()) for p in (source, target))
    pointer = f32x16.ll.as_pointer()
    pointers = [b.gep(start, [b.mul(stride, _I64(r))]) for r in range(16)]
    rows = [b.load(b.bitcast(p, pointer), align=1) for p in pointers]
    for step in (8, 4, 2, 1):
        rows = _transpose_step(b, rows, step)
    for r in range(sig.args[4].literal_value):
        b.store(rows[r], b.bitcast(b.gep(out, [b.mul(target_stride, _I64(r))]), pointer), align=1)


@emits(lambda out, scales, mins, span: _literal(span, types.void(types.int64, scales, mins, span)))
def store_scales(b, sig, out, scales, mins, span):
    """Write a row's scales (and mins): 8 each in one line if 32 values share one, else two lines of 16."""
    start = b.inttoptr(out, ir.IntType(8).as_pointer())
    pointer = f32x16.ll.as_pointer()
    has_mins = isinstance(sig.args[2], VecType)
    if sig.args[3].literal_value == 32:
        lanes = [*range(0, 16, 2), *(range(16, 32, 2) if has_mins else [0] * 8)]
        b.store(_shuffle(b, scales, mins if has_mins else None, lanes), b.bitcast(start, pointer), align=1)
    else:
        b.store(scales, b.bitcast(start, pointer), align=1)
        if has_mins:
            b.store(mins, b.bitcast(b.gep(start, [_I64(64)]), pointer), align=1)


# ---------------------------------------------------------------- the tile


def _tile(element: Any, tokens: Any) -> Any:
    return UniTuple(element, _VECTORS * tokens.count)


def broadcast(b: ir.IRBuilder, base: ir.Value, offset: ir.Value, element: ir.Type) -> ir.Value:
    element_pointer = b.gep(b.inttoptr(base, ir.IntType(8).as_pointer()), [offset])
    return _splat(b, b.load(b.bitcast(element_pointer, element.as_pointer()), align=4), 16)


def vector_at(b: ir.IRBuilder, base: ir.Value, offset: int, t: ir.Type) -> ir.Value:
    vector_pointer = b.gep(b.inttoptr(base, ir.IntType(8).as_pointer()), [_I64(offset)])
    return b.load(b.bitcast(vector_pointer, t.as_pointer()), align=64)


def _zeros(sig: Any) -> list[ir.Value]:
    return [ir.Constant(sig.return_type.dtype.ll, None)] * sig.return_type.count


@emits(lambda tokens: _tile(f32x16, tokens)(tokens))
def no_sums(b, sig, tokens):
    """Return a tile of zeros."""
    return _zeros(sig)


@emits(lambda tokens, offset: _tile(i32x16, tokens)(tokens, types.int64))
def no_dots(b, sig, tokens, offset):
    """Return a tile of integer zeros."""
    return _zeros(sig)


@emits(lambda tokens, offset: _tile(i32x16, tokens)(tokens, types.int64))
def offset_dots(b, sig, tokens, offset):
    """Return a tile of each token's integer at ``offset``."""
    return [broadcast(b, y, offset, _I32) for y in tokens] * _VECTORS


@emits(lambda dots, panel, ys, offset, steps: _literal(steps, dots(dots, types.int64, ys, types.int64, steps)))
def dot_steps(b, sig, dots, panel, tokens, offset, steps):
    """Add ``steps`` times 4 products of levels at ``panel`` and the tokens' bytes from ``offset`` on."""
    n, signed = len(tokens), not HAS_DOT4
    for step in range(sig.args[4].literal_value):
        w = [vector_at(b, panel, 64 * (_VECTORS * step + r), i8x64.ll) for r in range(_VECTORS)]
        for c, y in enumerate(tokens):
            x = b.bitcast(broadcast(b, y, b.add(offset, _I64(4 * step)), _I32), i8x64.ll)
            for r in range(_VECTORS):
                dots[r * n + c] = _dot4(b, dots[r * n + c], w[r], x, signed)
    return dots


@emits(lambda sums, dots, scales: sums(sums, dots, types.int64))
def add_scaled(b, sig, sums, dots, scales):
    """sums + dots * the rows' scales."""
    rows = [vector_at(b, scales, 64 * r, f32x16.ll) for r in range(_VECTORS)]
    n = len(sums) // _VECTORS
    return [_muladd(b, b.sitofp(dot, f32x16.ll), rows[i // n], sums[i]) for i, dot in enumerate(dots)]


def _by_token(b: Any, sums: Any, tokens: Any, offset: Any, term: Callable[[int, int, Any], Any]) -> Any:
    """Add term(i, r, x), two factors, to each vector i, of rows r; x is its token's number at ``offset``."""
    for c, y in enumerate(tokens):
        x = broadcast(b, y, offset, _F32)
        for r in range(_VECTORS):
            i = r * len(sums) // _VECTORS + c
            left, right = term(i, r, x)
            sums[i] = _muladd(b, left, right, sums[i])
    return sums


@emits(lambda sums, dots, scales, tokens, offset: sums(sums, dots, types.int64, tokens, types.int64))
def add_scaled_twice(b, sig, sums, dots, scales, tokens, offset):
    """sums + dots * the rows' scales * each token's scale at ``offset``."""
    rows = [vector_at(b, scales, 64 * r, f32x16.ll) for r in range(_VECTORS)]
    return _by_token(b, sums, tokens, offset, lambda i, r, d: (b.sitofp(dots[i], f32x16.ll), b.fmul(rows[r], d)))


@emits(lambda sums, parts, tokens, offset: sums(sums, parts, tokens, types.int64))
def add_products(b, sig, sums, parts, tokens, offset):
    """sums + parts * each token's number at ``offset``."""
    return _by_token(b, sums, tokens, offset, lambda i, r, d: (parts[i], d))


@emits(lambda sums, mins, tokens, offset: sums(sums, types.int64, tokens, types.int64))
def minus_mins(b, sig, sums, mins, tokens, offset):
    """sums - the rows' minimums * each token's number at ``offset``."""
    rows = [b.fneg(vector_at(b, mins, 64 * r, f32x16.ll)) for r in range(_VECTORS)]
    return _by_token(b, sums, tokens, offset, lambda i, r, s: (rows[r], s))


@emits(lambda sums, out: types.void(sums, types.int64))
def store_tile(b, sig, sums, out):
    """Write a tile as f32 [tokens, 32]."""
    start, n = b.inttoptr(out, ir.IntType(8).as_pointer()), len(sums) // _VECTORS
    for i, item in enumerate(sums):
        vector_pointer = b.gep(start, [_I64(64 * (_VECTORS * (i % n) + i // n))])
        b.store(item, b.bitcast(vector_pointer, f32x16.ll.as_pointer()), align=64)

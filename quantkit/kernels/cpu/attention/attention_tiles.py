"""Products of small float32 matrices in registers, for attention.

A tile is a tuple of f32x16, ROWS rows by some columns of vectors, row by row; it stays in registers while a loop
accumulates into it, in one of two ways by the layout of the second factor:

    outer    tile[r][c] += b[r] * a[c]           a: vectors over keys (or over the columns of values), b: one number
    inner    tile[r][c] += q[r] . k[c]           both vectors along a head; ``store_sums`` then adds up their lanes

``outer`` needs no sums across lanes but transposed keys, which pays when many rows of q share them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.types.containers import UniTuple

from quantkit.kernels.cpu.core.simd import FEATURES, _from_half, _muladd, _shuffle, _splat, emits, f32x16

#: Rows and columns (of 16) of a tile, by the number of vector registers (32 with AVX-512 and on AArch64).
ROWS = 4
COLUMNS = 4 if "avx512f" in FEATURES else 1
#: Keys multiplied by ROWS rows of q at a time.
KEYS = 4

_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VECTOR = f32x16.ll


def _element_pointer(b: ir.IRBuilder, address: ir.Value, stride: ir.Value, i: int, t: ir.Type) -> ir.Value:
    return b.inttoptr(b.add(address, b.mul(stride, _I64(i))), t.as_pointer())


def _load(b: ir.IRBuilder, address: ir.Value, stride: ir.Value, i: int, t: ir.Type = _VECTOR) -> ir.Value:
    return b.load(_element_pointer(b, address, stride, i, t), align=1)


def _read(b: ir.IRBuilder, address: ir.Value, half: bool) -> ir.Value:
    if not half:
        return _load(b, address, _I64(0), 0)
    return _from_half(b, _load(b, address, _I64(0), 0, ir.VectorType(ir.IntType(16), 16)))


def _rows_at(b: ir.IRBuilder, address: ir.Value, stride: ir.Value) -> list[ir.Value]:
    return [b.add(address, b.mul(stride, _I64(r))) for r in range(ROWS)]


def _make_zero_tile(columns: int, name: str) -> Any:
    """Return an intrinsic ``tile()``: ROWS x columns vectors of zeros."""
    t = UniTuple(f32x16, ROWS * columns)
    return emits(lambda: t(), name)(lambda b, sig: [ir.Constant(_VECTOR, [0.0] * 16)] * t.count)


zero_tile, zero_strip, zero_products = (
    _make_zero_tile(n, name) for n, name in ((COLUMNS, "zero_tile"), (1, "zero_strip"), (KEYS, "zero_products"))
)


def _updates(tile: Any, *arguments: Any) -> Any:
    return tile(tile, *[types.int64] * len(arguments))


def _writes(tile: Any, *arguments: Any) -> Any:
    return types.void(tile, *[types.int64] * len(arguments))


def _make_outer(name: str, half: bool) -> Any:
    @emits(_updates, name)
    def outer(b, sig, tile, a, a_stride, x, x_stride):
        """outer(tile, a, a_stride, x, x_stride): tile[r][c] += x[r] * a[c]; vectors at a, scalars at x."""
        columns = len(tile) // ROWS
        vectors = [_read(b, b.add(a, b.mul(a_stride, _I64(c))), half) for c in range(columns)]
        parts = []
        for r in range(ROWS):
            factor = _splat(b, _load(b, x, x_stride, r, _F32), 16)
            parts += [_muladd(b, factor, v, tile[r * columns + c]) for c, v in enumerate(vectors)]
        return parts

    return outer


def _make_inner(name: str, half: bool) -> Any:
    @emits(_updates, name)
    def inner(b, sig, tile, k0, k1, k2, k3, q, q_stride):
        """inner(tile, k0, k1, k2, k3, q, q_stride): tile[r][c] += q[r] * k[c], vector by vector."""
        keys = [_read(b, address, half) for address in (k0, k1, k2, k3)]
        parts = []
        for r in range(ROWS):
            row = _load(b, q, q_stride, r)
            parts += [_muladd(b, row, key, tile[r * KEYS + c]) for c, key in enumerate(keys)]
        return parts

    return inner


#: For f32 and f16 at a and k.
outer, outer_half = _make_outer("outer", False), _make_outer("outer_half", True)
inner, inner_half = _make_inner("inner", False), _make_inner("inner_half", True)


@emits(_updates)
def load_tile(b, sig, tile, out, stride, factors):
    """load_tile(like, out, stride, factors): tile[r][c] = factors[r] * vector c of row r; factors are float32."""
    parts = []
    for r, row in enumerate(_rows_at(b, out, stride)):
        factor = _splat(b, _load(b, factors, _I64(4), r, _F32), 16)
        parts += [b.fmul(factor, _load(b, row, _I64(64), c)) for c in range(len(tile) // ROWS)]
    return parts


@emits(_updates)
def add_tile(b, sig, tile, out, stride):
    """add_tile(tile, out, stride): tile plus the one ``store_tile`` wrote."""
    columns, rows = len(tile) // ROWS, _rows_at(b, out, stride)
    return [b.fadd(_load(b, rows[i // columns], _I64(64), i % columns), x) for i, x in enumerate(tile)]


@emits(_writes)
def store_tile(b, sig, tile, out, stride):
    """store_tile(tile, out, stride): write each row's vectors contiguously, rows ``stride`` bytes apart."""
    columns, rows = len(tile) // ROWS, _rows_at(b, out, stride)
    for i, x in enumerate(tile):
        b.store(x, _element_pointer(b, rows[i // columns], _I64(64), i % columns, _VECTOR), align=1)


@emits(_writes)
def store_sums(b, sig, tile, out, stride):
    """store_sums(products, out, stride): write the sum of the lanes of tile[r][c] as element c of row r."""
    rows = tile
    for step in (8, 4, 2, 1):  # a transposition that adds the two halves at each step
        low = [c if not c & step else 16 + c - step for c in range(16)]
        high = [c + step if not c & step else 16 + c for c in range(16)]
        rows = [
            b.fadd(_shuffle(b, rows[r], rows[r + step], low), _shuffle(b, rows[r], rows[r + step], high))
            for r in range(step)
        ]
    for r in range(ROWS):
        part = _shuffle(b, rows[0], None, range(KEYS * r, KEYS * r + KEYS))
        b.store(part, _element_pointer(b, out, stride, r, part.type), align=4)

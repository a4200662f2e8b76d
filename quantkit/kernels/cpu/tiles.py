"""Products of small float32 matrices in registers: what attention is made of.

A tile is a tuple of vectors of 16, ROWS rows by some columns of vectors, row by row; it stays in registers while a loop
feeds it. Two ways to feed it, by how the second factor lies in memory:

    outer    tile[r][c] += b[r] * a[c]           a: vectors over keys (or over the columns of values), b: one number
    inner    tile[r][c] += q[r] . k[c]           both vectors along a head; ``sums`` then adds up the lanes of each

``outer`` needs no sums across lanes, but the keys transposed, which pays when many rows of q share them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from quantkit.kernels.cpu.simd import FEATURES, _call, _from_half, _shuffle, _splat, _suffix, f32x16

#: Rows and columns (of 16) of a tile, chosen by the number of vector registers (32 with AVX-512 and on AArch64).
ROWS = 4
COLUMNS = 4 if "avx512f" in FEATURES else 1
#: Keys whose products with ROWS rows of q are summed up together.
KEYS = 4

_I64, _F32, _VECTOR = ir.IntType(64), ir.FloatType(), f32x16.ll


def _at(b: ir.IRBuilder, address: ir.Value, stride: ir.Value, i: int, t: ir.Type) -> ir.Value:
    return b.inttoptr(b.add(address, b.mul(stride, _I64(i))), t.as_pointer())


def _load(b: ir.IRBuilder, address: ir.Value, stride: ir.Value, i: int, t: ir.Type = _VECTOR) -> ir.Value:
    return b.load(_at(b, address, stride, i, t), align=1)


def _read(b: ir.IRBuilder, address: ir.Value, half: bool) -> ir.Value:
    if not half:
        return _load(b, address, _I64(0), 0)
    return _from_half(b, _load(b, address, _I64(0), 0, ir.VectorType(ir.IntType(16), 16)))


def _muladd(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    if "fma" in FEATURES or "avx512f" in FEATURES:
        return _call(b, f"llvm.fma.{_suffix(x.type)}", x.type, [x, y, z])
    return b.fadd(b.fmul(x, y), z)


def _pack(cgctx: Any, b: ir.IRBuilder, t: UniTuple, parts: list[ir.Value]) -> ir.Value:
    out = ir.Constant(cgctx.get_value_type(t), ir.Undefined)
    for i, part in enumerate(parts):
        out = b.insert_value(out, part, i)
    return out


def _named(function: Any, name: str) -> Any:
    """Give an intrinsic made by a factory a stable identity, or numba's cache never hits."""
    function.__name__ = name
    function._set_uuid(f"quantkit.tiles.{name}")
    return function


def _make_zero_tile(columns: int, name: str) -> Any:
    """Return an intrinsic ``tile()``: ROWS x columns vectors of zeros."""
    t = UniTuple(f32x16, ROWS * columns)

    @intrinsic
    def zero_tile(tyctx: Any) -> Any:
        zero = ir.Constant(_VECTOR, [0.0] * 16)
        return t(), lambda cgctx, b, sig, args: _pack(cgctx, b, t, [zero] * t.count)

    return _named(zero_tile, name)


zero_tile, zero_strip, zero_products = (
    _make_zero_tile(n, name) for n, name in ((COLUMNS, "zero_tile"), (1, "zero_strip"), (KEYS, "zero_products"))
)


def _make_outer(half: bool) -> Any:
    @intrinsic
    def outer(tyctx: Any, tile: Any, a: Any, a_stride: Any, x: Any, x_stride: Any) -> Any:
        """outer(tile, a, a_stride, x, x_stride): tile[r][c] += x[r] * a[c]; vectors at a, numbers at x."""

        def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
            acc, a, a_stride, x, x_stride = args
            columns = tile.count // ROWS
            vectors = [_read(b, b.add(a, b.mul(a_stride, _I64(c))), half) for c in range(columns)]
            parts = []
            for r in range(ROWS):
                factor = _splat(b, _load(b, x, x_stride, r, _F32), 16)
                parts += [_muladd(b, factor, v, b.extract_value(acc, r * columns + c)) for c, v in enumerate(vectors)]
            return _pack(cgctx, b, tile, parts)

        return tile(tile, *[types.int64] * 4), cg

    return _named(outer, "outer_half" if half else "outer")


def _make_inner(half: bool) -> Any:
    @intrinsic
    def inner(tyctx: Any, tile: Any, k0: Any, k1: Any, k2: Any, k3: Any, q: Any, q_stride: Any) -> Any:
        """inner(tile, k0, k1, k2, k3, q, q_stride): tile[r][c] += q[r] * k[c], vector by vector."""

        def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
            acc, *addresses, q, q_stride = args
            keys = [_read(b, address, half) for address in addresses]
            parts = []
            for r in range(ROWS):
                row = _load(b, q, q_stride, r)
                parts += [_muladd(b, row, key, b.extract_value(acc, r * KEYS + c)) for c, key in enumerate(keys)]
            return _pack(cgctx, b, tile, parts)

        return tile(tile, *[types.int64] * 6), cg

    return _named(inner, "inner_half" if half else "inner")


#: For float32 and half floats at a and k.
outer, outer_half = _make_outer(False), _make_outer(True)
inner, inner_half = _make_inner(False), _make_inner(True)


@intrinsic
def fetch(tyctx: Any, address: Any, offset: Any) -> Any:
    """Ask for a cache line, into the second level only: many more of these can be under way at once."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        p, i32 = b.inttoptr(b.add(args[0], args[1]), ir.IntType(8).as_pointer()), ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [p.type, i32, i32, i32])
        b.call(cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0"), [p, i32(0), i32(2), i32(1)])
        return cgctx.get_dummy_value()

    return types.void(types.int64, types.int64), cg


@intrinsic
def load_tile(tyctx: Any, tile: Any, out: Any, stride: Any, factors: Any) -> Any:
    """load_tile(like, out, stride, factors): tile[r][c] = factors[r] * vector c of row r; factors are float32."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        _, out, stride, factors = args
        columns = tile.count // ROWS
        parts = []
        for r in range(ROWS):
            factor = _splat(b, _load(b, factors, _I64(4), r, _F32), 16)
            row = b.add(out, b.mul(stride, _I64(r)))
            parts += [b.fmul(factor, _load(b, row, _I64(64), c)) for c in range(columns)]
        return _pack(cgctx, b, tile, parts)

    return tile(tile, *[types.int64] * 3), cg


@intrinsic
def add_tile(tyctx: Any, tile: Any, out: Any, stride: Any) -> Any:
    """add_tile(tile, out, stride): tile plus what ``store_tile`` wrote."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, out, stride = args
        columns = tile.count // ROWS
        parts = []
        for r in range(ROWS):
            row = b.add(out, b.mul(stride, _I64(r)))
            for c in range(columns):
                parts.append(b.fadd(_load(b, row, _I64(64), c), b.extract_value(acc, r * columns + c)))
        return _pack(cgctx, b, tile, parts)

    return tile(tile, types.int64, types.int64), cg


@intrinsic
def store_tile(tyctx: Any, tile: Any, out: Any, stride: Any) -> Any:
    """store_tile(tile, out, stride): rows of vectors, side by side."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, out, stride = args
        columns = tile.count // ROWS
        for r in range(ROWS):
            row = b.add(out, b.mul(stride, _I64(r)))
            for c in range(columns):
                b.store(b.extract_value(acc, r * columns + c), _at(b, row, _I64(64), c, _VECTOR), align=1)
        return cgctx.get_dummy_value()

    return types.void(tile, types.int64, types.int64), cg


@intrinsic
def store_sums(tyctx: Any, tile: Any, out: Any, stride: Any) -> Any:
    """store_sums(products, out, stride): the sum of the lanes of tile[r][c] as number c of row r."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, out, stride = args
        rows = [b.extract_value(acc, i) for i in range(16)]
        for step in (8, 4, 2, 1):  # a transposition that adds the two halves at every step
            low = [c if not c & step else 16 + c - step for c in range(16)]
            high = [c + step if not c & step else 16 + c for c in range(16)]
            rows = [
                b.fadd(_shuffle(b, rows[r], rows[r + step], low), _shuffle(b, rows[r], rows[r + step], high))
                for r in range(step)
            ]
        for r in range(ROWS):
            part = _shuffle(b, rows[0], None, range(KEYS * r, KEYS * r + KEYS))
            b.store(part, _at(b, out, stride, r, part.type), align=4)
        return cgctx.get_dummy_value()

    return types.void(tile, types.int64, types.int64), cg

"""Panels and register tiles: how many rows of activations are multiplied with rows of weights unpacked once.

A *panel* is 32 rows of weights, unpacked into scratch that stays in the L2 cache, turned so that a vector holds the
same four values of 16 rows. Per unit of 256 values of each row (G = 8 groups of 32, or 16 of 16 values)::

    levels  u8  [64 steps of 4 values][2][16 rows][4]     8192 bytes; raised by 128 if signed (i8 without dot4)
    scales  f32 [G][2][16 rows]
    mins    f32 [G][2][16 rows]                           types with minimums only

A *tile* is the 32 rows times TOKENS rows of activations, kept in registers over a whole row: a step broadcasts four
bytes of each token and adds 2 x TOKENS vectors of four products each, in integers. After each group of values the
integers, started from the offsets, are scaled into f32 sums of the unit; q8_k's d is the same for a unit and comes in
at its end. Tokens are given by their addresses, so a tile may gather any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from quantkit.kernels.cpu.activations import OFFSETS, OFFSETS32, SCALES, SUMS, SUMS32, UNIT_BYTES, activation_format
from quantkit.kernels.cpu.dots import copy_tail, operand_functions
from quantkit.kernels.cpu.jit import helper, inline, specialize
from quantkit.kernels.cpu.simd import (
    HAS_DOT4,
    VecType,
    _call,
    _dot4,
    _shuffle,
    _splat,
    _transpose_step,
    f32x16,
    i8x64,
    i32x16,
    load,
    stack_bytes,
    store,
    u8x64,
)
from quantkit.kernels.cpu.unpack import unpacker
from quantkit.types import TensorType

#: Rows of a panel, and rows of activations of a tile.
ROWS = 32
TOKENS, FEW = 6, 2
_VECTORS = 2
LEVEL_BYTES = 8192

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

# ---------------------------------------------------------------- unpacking


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


#: Bound anew for each type.
unpack: Any = None
operand: Any = None
copy_row_tail: Any = None
turn_scales: Any = None
span = 32
unit_bytes = 0
panel_unit_bytes = 0


def turn_scales_32(rows: int, panel: int) -> None:
    """8 scales a row."""
    turn(rows, 128, panel, 128, 8)


def turn_scales_32_mins(rows: int, panel: int) -> None:
    """8 scales and 8 minimums a row, in one line."""
    turn(rows, 128, panel, 128, 16)


def turn_scales_16(rows: int, panel: int) -> None:
    """16 scales a row."""
    turn(rows, 128, panel, 128, 16)


def turn_scales_16_mins(rows: int, panel: int) -> None:
    """16 scales and 16 minimums a row."""
    turn(rows, 128, panel, 128, 16)
    turn(rows + 64, 128, panel + 2048, 128, 16)


def unpack_panel(w: int, row_bytes: int, rows: int, n: int, panel: int) -> None:
    """Unpack ``rows`` (1 to 32) rows of ``n`` values at ``w``; where there are fewer than 32 the last one repeats."""
    levels, scales, padded = stack_bytes(4096), stack_bytes(2048), stack_bytes(320)
    for unit in range((n + 255) // 256):
        partial = 256 * unit + 256 > n
        for half in range(2):
            for r in range(16):
                at = w + min(16 * half + r, rows - 1) * row_bytes + unit * unit_bytes
                if partial:
                    copy_row_tail(at, n % 256, padded)
                    at = padded
                l0, l1, l2, l3, s, m = unpack(at, 0)
                store(levels, 256 * r, operand(l0))
                store(levels, 256 * r + 64, operand(l1))
                store(levels, 256 * r + 128, operand(l2))
                store(levels, 256 * r + 192, operand(l3))
                store_scales(scales + 128 * r, s, m, span)
            to = panel + unit * panel_unit_bytes + 64 * half
            for k in range(4):
                turn(levels + 64 * k, 256, to + 2048 * k, 128, 16)
            turn_scales(scales, to + LEVEL_BYTES)


# ---------------------------------------------------------------- the tile



def _sums_of(tokens: Any) -> Any:
    return UniTuple(f32x16, _VECTORS * tokens.count)


def _dots_of(tokens: Any) -> Any:
    return UniTuple(i32x16, _VECTORS * tokens.count)


def _broadcast(b: ir.IRBuilder, base: ir.Value, offset: ir.Value, element: ir.Type) -> ir.Value:
    at = b.gep(b.inttoptr(base, ir.IntType(8).as_pointer()), [offset])
    return _splat(b, b.load(b.bitcast(at, element.as_pointer()), align=4), 16)


def _vector(b: ir.IRBuilder, base: ir.Value, offset: ir.Value, t: ir.Type) -> ir.Value:
    at = b.gep(b.inttoptr(base, ir.IntType(8).as_pointer()), [offset])
    return b.load(b.bitcast(at, t.as_pointer()), align=64)


def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return _call(b, "llvm.fma.v16f32", f32x16.ll, [x, y, z])


def _items(b: ir.IRBuilder, value: ir.Value) -> list[ir.Value]:
    return [b.extract_value(value, i) for i in range(value.type.count)]


def _packed(cgctx: Any, b: ir.IRBuilder, t: Any, items: list[ir.Value]) -> ir.Value:
    out = ir.Constant(cgctx.get_value_type(t), ir.Undefined)
    for i, item in enumerate(items):
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
        starts = [_broadcast(b, y, args[1], _I32) for y in _items(b, args[0])]
        return _packed(cgctx, b, sig.return_type, starts * _VECTORS)

    return _dots_of(tokens)(tokens, types.int64), cg


@intrinsic
def dot_steps(tyctx: Any, dots: Any, panel: Any, tokens: Any, offset: Any, steps: Any) -> Any:
    """Add ``steps`` times 4 products, of levels at ``panel`` with bytes of the tokens from ``offset`` on."""
    if not isinstance(steps, types.IntegerLiteral):
        return None

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, ys = _items(b, args[0]), _items(b, args[2])
        n, signed = len(ys), not HAS_DOT4
        for step in range(steps.literal_value):
            w = [_vector(b, args[1], _I64(64 * (_VECTORS * step + r)), i8x64.ll) for r in range(_VECTORS)]
            for c, y in enumerate(ys):
                x = b.bitcast(_broadcast(b, y, b.add(args[3], _I64(4 * step)), _I32), i8x64.ll)
                for r in range(_VECTORS):
                    acc[r * n + c] = _dot4(b, acc[r * n + c], w[r], x, signed)
        return _packed(cgctx, b, sig.return_type, acc)

    return dots(dots, types.int64, tokens, types.int64, steps), cg


@intrinsic
def add_scaled(tyctx: Any, sums: Any, dots: Any, scales: Any) -> Any:
    """sums + dots * the rows' scales."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, dots = _items(b, args[0]), _items(b, args[1])
        for r in range(_VECTORS):
            s = _vector(b, args[2], _I64(64 * r), f32x16.ll)
            for i in range(r * len(acc) // _VECTORS, (r + 1) * len(acc) // _VECTORS):
                acc[i] = _fma(b, b.sitofp(dots[i], f32x16.ll), s, acc[i])
        return _packed(cgctx, b, sig.return_type, acc)

    return sums(sums, dots, types.int64), cg


@intrinsic
def add_scaled_twice(tyctx: Any, sums: Any, dots: Any, scales: Any, tokens: Any, offset: Any) -> Any:
    """sums + dots * the rows' scales * each token's scale at ``offset``."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, dots = _items(b, args[0]), _items(b, args[1])
        rows = [_vector(b, args[2], _I64(64 * r), f32x16.ll) for r in range(_VECTORS)]
        for c, y in enumerate(_items(b, args[3])):
            d = _broadcast(b, y, args[4], _F32)
            for r in range(_VECTORS):
                i = r * len(acc) // _VECTORS + c
                acc[i] = _fma(b, b.sitofp(dots[i], f32x16.ll), b.fmul(rows[r], d), acc[i])
        return _packed(cgctx, b, sig.return_type, acc)

    return sums(sums, dots, types.int64, tokens, types.int64), cg


@intrinsic
def add_products(tyctx: Any, sums: Any, parts: Any, tokens: Any, offset: Any) -> Any:
    """sums + parts * each token's number at ``offset``."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, parts = _items(b, args[0]), _items(b, args[1])
        for c, y in enumerate(_items(b, args[2])):
            d = _broadcast(b, y, args[3], _F32)
            for r in range(_VECTORS):
                i = r * len(acc) // _VECTORS + c
                acc[i] = _fma(b, parts[i], d, acc[i])
        return _packed(cgctx, b, sig.return_type, acc)

    return sums(sums, parts, tokens, types.int64), cg


@intrinsic
def minus_mins(tyctx: Any, sums: Any, mins: Any, tokens: Any, offset: Any) -> Any:
    """sums - the rows' minimums * each token's number at ``offset``."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        acc = _items(b, args[0])
        rows = [b.fneg(_vector(b, args[1], _I64(64 * r), f32x16.ll)) for r in range(_VECTORS)]
        for c, y in enumerate(_items(b, args[2])):
            s = _broadcast(b, y, args[3], _F32)
            for r in range(_VECTORS):
                i = r * len(acc) // _VECTORS + c
                acc[i] = _fma(b, rows[r], s, acc[i])
        return _packed(cgctx, b, sig.return_type, acc)

    return sums(sums, types.int64, tokens, types.int64), cg


@intrinsic
def store_tile(tyctx: Any, sums: Any, out: Any) -> Any:
    """Write a tile as f32 [tokens, 32]."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        items, start = _items(b, args[0]), b.inttoptr(args[1], ir.IntType(8).as_pointer())
        n = len(items) // _VECTORS
        for i, item in enumerate(items):
            at = b.gep(start, [_I64(64 * (_VECTORS * (i % n) + i // n))])
            b.store(item, b.bitcast(at, f32x16.ll.as_pointer()), align=64)
        return cgctx.get_dummy_value()

    return types.void(sums, types.int64), cg


#: Bound anew for each type.
first_dots: Any = None
subtract_mins: Any = None


def subtract_nothing(sums: Any, panel: int, tokens: Any, at: int) -> Any:
    """Types without minimums."""
    return sums


def subtract_mins_32(sums: Any, panel: int, tokens: Any, at: int) -> Any:
    """One minimum per 32 values."""
    for g in range(8):
        sums = minus_mins(sums, panel + LEVEL_BYTES + 1024 + 128 * g, tokens, at + SUMS32 + 4 * g)
    return sums


def subtract_mins_16(sums: Any, panel: int, tokens: Any, at: int) -> Any:
    """One minimum per 16 values."""
    for g in range(16):
        sums = minus_mins(sums, panel + LEVEL_BYTES + 2048 + 128 * g, tokens, at + SUMS + 4 * g)
    return sums


def tile_q8_k_32(panel: int, units: int, tokens: Any, out: int) -> None:
    """Activations with one scale per 256, weights with one per 32 values."""
    sums = no_sums(tokens)
    for unit in range(units):
        at = unit * UNIT_BYTES
        part = no_sums(tokens)
        for g in range(8):
            dots = dot_steps(first_dots(tokens, at + OFFSETS32 + 4 * g), panel + 1024 * g, tokens, at + 32 * g, 8)
            part = add_scaled(part, dots, panel + LEVEL_BYTES + 128 * g)
        sums = add_products(sums, part, tokens, at + SCALES)
        sums = subtract_mins(sums, panel, tokens, at)
        panel += panel_unit_bytes
    store_tile(sums, out)


def tile_q8_k_16(panel: int, units: int, tokens: Any, out: int) -> None:
    """Activations with one scale per 256, weights with one per 16 values."""
    sums = no_sums(tokens)
    for unit in range(units):
        at = unit * UNIT_BYTES
        part = no_sums(tokens)
        for g in range(16):
            # The offsets lie as a 4 x 4 matrix turned over.
            offset = at + OFFSETS + 16 * (g % 4) + 4 * (g // 4)
            dots = dot_steps(first_dots(tokens, offset), panel + 512 * g, tokens, at + 16 * g, 4)
            part = add_scaled(part, dots, panel + LEVEL_BYTES + 128 * g)
        sums = add_products(sums, part, tokens, at + SCALES)
        sums = subtract_mins(sums, panel, tokens, at)
        panel += panel_unit_bytes
    store_tile(sums, out)


def tile_q8_0_32(panel: int, units: int, tokens: Any, out: int) -> None:
    """Activations and weights with one scale per 32 values."""
    sums = no_sums(tokens)
    for unit in range(units):
        at = unit * UNIT_BYTES
        for g in range(8):
            dots = dot_steps(first_dots(tokens, at + OFFSETS32 + 4 * g), panel + 1024 * g, tokens, at + 32 * g, 8)
            sums = add_scaled_twice(sums, dots, panel + LEVEL_BYTES + 128 * g, tokens, at + SCALES + 8 * g)
        sums = subtract_mins(sums, panel, tokens, at)
        panel += panel_unit_bytes
    store_tile(sums, out)


def tile_q8_0_16(panel: int, units: int, tokens: Any, out: int) -> None:
    """Activations with one scale per 32, weights with one per 16 values."""
    sums = no_sums(tokens)
    for unit in range(units):
        at = unit * UNIT_BYTES
        for g in range(16):
            offset = at + OFFSETS + 16 * (g % 4) + 4 * (g // 4)
            dots = dot_steps(first_dots(tokens, offset), panel + 512 * g, tokens, at + 16 * g, 4)
            sums = add_scaled_twice(sums, dots, panel + LEVEL_BYTES + 128 * g, tokens, at + SCALES + 4 * g)
        sums = subtract_mins(sums, panel, tokens, at)
        panel += panel_unit_bytes
    store_tile(sums, out)


_TILES = {
    ("q8_k", 32): tile_q8_k_32,
    ("q8_k", 16): tile_q8_k_16,
    ("q8_0", 32): tile_q8_0_32,
    ("q8_0", 16): tile_q8_0_16,
}


# ---------------------------------------------------------------- many tokens


@inline
def row_address(x: int, stride: int, rows: int, i: int, count: int) -> int:
    """Return the address of the i-th of ``count`` rows (the last one from there on), the rows[i]-th if rows is given."""
    i = min(i, count - 1)
    if rows != 0:
        i = types.int64(load(types.int32, rows, 4 * i))
    return x + i * stride


#: Bound anew for each type.
tile: Any = None


def multiply_tiles(panel: int, units: int, x: int, stride: int, rows: int, i: int, count: int, out: int) -> int:
    """Multiply a panel with the next few of ``count`` rows of x, from the i-th on; return how many.

    rows: address of int32 numbers of rows of x, or 0: the i-th is row i. The products go to out, f32 [TOKENS, 32].
    """
    if count - i >= 5:
        tokens = (
            row_address(x, stride, rows, i, count),
            row_address(x, stride, rows, i + 1, count),
            row_address(x, stride, rows, i + 2, count),
            row_address(x, stride, rows, i + 3, count),
            row_address(x, stride, rows, i + 4, count),
            row_address(x, stride, rows, i + 5, count),
        )
        tile(panel, units, tokens, out)
        return min(count - i, 6)
    tile(panel, units, (row_address(x, stride, rows, i, count), row_address(x, stride, rows, i + 1, count)), out)
    return min(count - i, 2)


@inline
def write_rows(products: int, n: int, out: int, stride: int, rows: int, i: int, width: int, scale: int, bias: int) -> None:
    """Write n rows of ``width`` (1 to 32) products, f32 [n, 32], times scale, plus bias, to rows i ... of out.

    rows: address of int32 numbers of rows of out, or 0; scale: address of one f32, or 0; bias: of 32 f32, or 0.
    """
    factor = load(types.float32, scale, 0) if scale != 0 else types.float32(1)
    for c in range(n):
        source, to = products + 128 * c, row_address(out, stride, rows, i + c, i + n)
        if width == 32:
            low, high = load(f32x16, source, 0) * factor, load(f32x16, source, 64) * factor
            if bias != 0:
                low, high = low + load(f32x16, bias, 0), high + load(f32x16, bias, 64)
            store(to, 0, low)
            store(to, 64, high)
        else:
            for o in range(width):
                add = load(types.float32, bias, 4 * o) if bias != 0 else types.float32(0)
                store(to, 4 * o, load(types.float32, source, 4 * o) * factor + add)


@dataclass(frozen=True)
class Panels:
    """What a type brings to products with many rows of activations: functions for operations, and a panel's size.

    unpack(w, row_bytes, rows, n, panel): fill a panel with up to 32 rows of n values.
    multiply(panel, units, x, stride, rows, i, count, out) -> n: products with the next few rows of x: multiply_tiles.
    """

    unpack: Any
    multiply: Any
    unit_bytes: int

    def bytes(self, n: int) -> int:
        """Return the bytes of a panel of rows of ``n`` values."""
        return -(-n // 256) * self.unit_bytes


@cache
def panels(t: TensorType) -> Panels:
    """Return how weights of type ``t`` are unpacked into panels and multiplied in tiles."""
    made, name = unpacker(t), t.name.lower()
    kind = "q8_k" if activation_format(t) == "q8_k" else "q8_0"
    size = LEVEL_BYTES + 128 * (256 // made.span) * (2 if made.has_mins else 1)
    operands = operand_functions(made.non_negative)
    raised = HAS_DOT4 and not made.non_negative
    scales = globals()[f"turn_scales_{made.span}" + ("_mins" if made.has_mins else "")]
    subtract = globals()[f"subtract_mins_{made.span}"] if made.has_mins else subtract_nothing
    one_tile = specialize(
        _TILES[kind, made.span],
        name,
        helper,
        first_dots=offset_dots if raised else no_dots,
        subtract_mins=inline(subtract),
        panel_unit_bytes=size,
    )
    unpack_rows = specialize(
        unpack_panel,
        name,
        helper,
        unpack=made.function,
        operand=operands["operand"],
        copy_row_tail=specialize(copy_tail, name, unit_bytes=made.unit_bytes),
        turn_scales=inline(scales),
        span=made.span,
        unit_bytes=made.unit_bytes,
        panel_unit_bytes=size,
    )
    return Panels(unpack_rows, specialize(multiply_tiles, name, helper, tile=one_tile), size)

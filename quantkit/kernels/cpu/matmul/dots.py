"""Dot products of a row of weights with quantized activations: the mat-vec skeleton, generic over unpackers.

``dot_row`` streams through one row: for every 256 values it unpacks the levels, multiplies bytes by bytes, adds four
at a time in integers (exact) down to one sum per 16 values, and only then multiplies by the scales, in f32::

    result = sum over groups of 16:  scale * d * (sum of level * q)  -  min * sums

One row at a time and strictly in order, with a prefetch ``distance`` bytes further on, which at the end of the rows is
in those that come next: the hardware prefetcher handles several streams worse. Where bytes are multiplied as u8 x s8
(simd.HAS_DOT4), signed levels are raised by 128, and the offsets of activations.py compensate. ``dot_row_by_4`` unpacks
a row once for the activations of four tokens.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline, specialize
from quantkit.kernels.cpu.core.simd import (
    HAS_DOT4,
    VecType,
    _muladd,
    cast,
    convert,
    dot4,
    emits,
    f32x16,
    hsum,
    i8x64,
    i32x16,
    load,
    muladd,
    prefetch,
    splat,
    stack_bytes,
    store,
    u8x64,
)
from quantkit.kernels.cpu.matmul import float_dots
from quantkit.kernels.cpu.matmul.activations import IN_ORDER, OFFSETS, SCALES, SUMS, UNIT_BYTES, by_fours, sum_fours
from quantkit.kernels.cpu.matmul.type_dots import direct_dot, direct_row
from quantkit.kernels.cpu.unpack import unpacker
from quantkit.kernels.formats import Format
from quantkit.types import TensorType

# ---------------------------------------------------------------- levels as operands of dot4


@inline
def unsigned_operand(levels: Any) -> Any:
    """Unsigned levels, unchanged."""
    return cast(u8x64, levels)


@inline
def raised_operand(levels: Any) -> Any:
    """Signed levels plus 128."""
    return cast(u8x64, levels) ^ 128


@inline
def signed_operand(levels: Any) -> Any:
    """Signed levels, for targets that multiply signed bytes."""
    return levels


@inline
def lower_levels(sums: Any, act: int) -> Any:
    """Undo the raising of the levels."""
    return sums + load(i32x16, act, OFFSETS)


@inline
def keep_levels(sums: Any, act: int) -> Any:
    """The levels were not raised."""
    return sums


def operand_functions(spec: Format) -> dict[str, Any]:
    """Return the conversion of a type's levels to operands of dot4, and the correction of the sums."""
    if not spec.signed:
        return {"operand": unsigned_operand, "correct": keep_levels}
    return (
        {"operand": raised_operand, "correct": lower_levels}
        if HAS_DOT4
        else {"operand": signed_operand, "correct": keep_levels}
    )


@emits(lambda acc, mins, sums: acc(acc, mins, sums))
def minus_product(b, sig, acc, mins, sums):
    """acc - mins * sums with one rounding; acc itself if mins is None."""
    return _muladd(b, b.fneg(mins), sums, acc) if isinstance(sig.args[1], VecType) else acc


# ---------------------------------------------------------------- a unit; rebound for each type

#: Prefetch distance in bytes.
PREFETCH = 4096

unpack: Any = None
operand: Any = None
correct: Any = None
dot_unit: Any = None
row_scale: Any = None
scaled: Any = None
unit_bytes = unit_lines = header_bytes = 0


def group_sums(u0: Any, u1: Any, u2: Any, u3: Any, act: int) -> Any:
    """Return sums of level * q over each 16 of 256 values, in the order of sum_fours."""
    zero = splat(i32x16, 0)
    a, b = dot4(zero, u0, load(i8x64, act, 0)), dot4(zero, u1, load(i8x64, act, 64))
    c, d = dot4(zero, u2, load(i8x64, act, 128)), dot4(zero, u3, load(i8x64, act, 192))
    return correct(sum_fours(a, b, c, d), act)


def word_sums(u0: Any, u1: Any, u2: Any, u3: Any, act: int) -> Any:
    """The same for activations in q8_k64: each sum in the place of its scale in the order of sum_fours."""
    zero = splat(i32x16, 0)
    a, b = dot4(zero, u0, load(i8x64, act, IN_ORDER)), dot4(zero, u1, load(i8x64, act, IN_ORDER + 64))
    a, b = dot4(a, u2, load(i8x64, act, IN_ORDER + 128)), dot4(b, u3, load(i8x64, act, IN_ORDER + 192))
    return correct(a + b, act)


def dot_unit_unpacked(block: int, act: int, acc: Any) -> Any:
    """Add the products of 256 values to 16 sums."""
    l0, l1, l2, l3, scales, mins = unpack(block, 0)
    sums = group_sums(operand(l0), operand(l1), operand(l2), operand(l3), act)
    acc = muladd(convert(f32x16, sums), by_fours(scales * load(f32x16, act, SCALES)), acc)
    return minus_product(acc, mins, load(f32x16, act, SUMS))


def dot_unit_by_4(block: int, y0: int, y1: int, y2: int, y3: int, accs: Any) -> Any:
    """Add the products of 256 values with the activations of four tokens."""
    l0, l1, l2, l3, scales, mins = unpack(block, 0)
    u0 = operand(l0)
    u1 = operand(l1)
    u2 = operand(l2)
    u3 = operand(l3)
    a0, a1, a2, a3 = accs
    turned = by_fours(scales)
    a0 = muladd(convert(f32x16, group_sums(u0, u1, u2, u3, y0)), turned * by_fours(load(f32x16, y0, SCALES)), a0)
    a1 = muladd(convert(f32x16, group_sums(u0, u1, u2, u3, y1)), turned * by_fours(load(f32x16, y1, SCALES)), a1)
    a2 = muladd(convert(f32x16, group_sums(u0, u1, u2, u3, y2)), turned * by_fours(load(f32x16, y2, SCALES)), a2)
    a3 = muladd(convert(f32x16, group_sums(u0, u1, u2, u3, y3)), turned * by_fours(load(f32x16, y3, SCALES)), a3)
    return (
        minus_product(a0, mins, load(f32x16, y0, SUMS)),
        minus_product(a1, mins, load(f32x16, y1, SUMS)),
        minus_product(a2, mins, load(f32x16, y2, SUMS)),
        minus_product(a3, mins, load(f32x16, y3, SUMS)),
    )


# ---------------------------------------------------------------- a row


def copy_tail(source: int, count: int, padded: int) -> None:
    """Copy the bytes of a row's last ``count`` values, less than a unit, and zero-pad them."""
    n = count * unit_bytes // 256
    for i in range(n):
        store(padded, i, load(types.uint8, source, i))
    for i in range(n, unit_bytes):
        store(padded, i, types.uint8(0))


@inline
def zero_sums() -> Any:
    """Return 16 sums of zero."""
    return splat(f32x16, 0)


copy_row_tail: Any = None
start: Any = zero_sums
finish: Any = hsum


def dot_row(w: int, act: int, n: int, distance: int) -> Any:
    """Return the dot product, float32, of the row of ``n`` weights at ``w`` and the activations at ``act``."""
    acc, of_row = start(), row_scale(w)
    w += header_bytes
    for _ in range(n // 256):
        for line in range(unit_lines):
            prefetch(w, distance + 64 * line)
        acc = dot_unit(w, act, acc)
        w += unit_bytes
        act += UNIT_BYTES
    if n % 256:
        padded = stack_bytes(320)
        copy_row_tail(w, n % 256, padded)
        acc = dot_unit(padded, act, acc)
    return scaled(finish(acc), of_row)


def dot_row_by_4(w: int, y0: int, y1: int, y2: int, y3: int, n: int) -> Any:
    """Return four dot products, float32, of the row at ``w`` and the activations at y0 ... y3."""
    zero = splat(f32x16, 0)
    accs = (zero, zero, zero, zero)
    padded = stack_bytes(320)
    of_row = row_scale(w)
    for unit in range((n + 255) // 256):
        block, offset = w + header_bytes + unit * unit_bytes, unit * UNIT_BYTES
        for line in range(unit_lines):
            prefetch(block, PREFETCH + 64 * line)
        if 256 * unit + 256 > n:
            copy_row_tail(block, n % 256, padded)
            block = padded
        accs = dot_unit(block, y0 + offset, y1 + offset, y2 + offset, y3 + offset, accs)
    a = hsum(accs[0])
    b = hsum(accs[1])
    c = hsum(accs[2])
    d = hsum(accs[3])
    return scaled(a, of_row), scaled(b, of_row), scaled(c, of_row), scaled(d, of_row)


def row_dots(t: TensorType) -> tuple[Any, Any]:
    """Return ``dot_row`` and ``dot_row_by_4`` of a type, for inlining into operations."""
    name = t.name.lower()
    if t.name in float_dots.LOADS:
        bound = float_dots.LOADS[t.name]
        return specialize(float_dots.dot_float_row, name, **bound), specialize(
            float_dots.dot_float_row_by_4, name, **bound
        )
    unpack = unpacker(t)
    operands = operand_functions(unpack.format)
    sums = specialize(word_sums if unpack.format.activations == "q8_k64" else group_sums, name, **operands)
    unit = {"unpack": unpack.function, "group_sums": sums, **operands}
    size = unpack.format.unit_bytes
    tail = specialize(copy_tail, name, unit_bytes=size)
    row = {**unpack.product_row, "unit_lines": -(-size // 64), "copy_row_tail": tail}
    direct = direct_dot(t) or {"dot_unit": specialize(dot_unit_unpacked, name, **unit)}
    one = direct_row(t) or specialize(dot_row, name, **direct, **row)
    four = specialize(dot_row_by_4, name, dot_unit=specialize(dot_unit_by_4, name, **unit), **row)
    return one, four

"""Panels and register tiles: rows of weights, unpacked once, times many rows of activations.

A *panel* is 32 rows of weights, unpacked into scratch that stays in the L2 cache, transposed so that a vector holds
the same four values of 16 rows. Per unit of 256 values of each row (G = 8 groups of 32, or 16 of 16 values)::

    levels  u8  [64 steps of 4 values][2][16 rows][4]     8192 bytes; raised by 128 if signed (i8 without dot4)
    scales  f32 [G][2][16 rows]
    mins    f32 [G][2][16 rows]                           only for types with minimums

A *tile* is the 32 rows times TOKENS rows of activations, in registers for a whole row: a step broadcasts four bytes of
each token and adds 2 x TOKENS vectors of four products each, in integers. After each group of values the integers,
which start from the offsets, are scaled into f32 sums of the unit; q8_k's d, one per unit, is applied at its end.
Tokens are given by address, so a tile may gather any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import helper, inline, specialize
from quantkit.kernels.cpu.core.simd import HAS_DOT4, load, prefetch_l2, stack_bytes, store
from quantkit.kernels.cpu.matmul import float_dots
from quantkit.kernels.cpu.matmul.activations import OFFSETS, OFFSETS32, SCALES, SUMS, SUMS32, UNIT_BYTES
from quantkit.kernels.cpu.matmul.dots import copy_tail, operand_functions
from quantkit.kernels.cpu.matmul.matmul_tiles import (
    add_products,
    add_scaled,
    add_scaled_twice,
    dot_steps,
    minus_mins,
    no_dots,
    no_sums,
    offset_dots,
    store_scales,
    store_tile,
    turn,
)
from quantkit.kernels.cpu.unpack import Unpacker, unpacker
from quantkit.kernels.cpu.unpack.lanes import by_words
from quantkit.kernels.formats import format_of
from quantkit.types import TensorType

#: Rows of a panel, and rows of activations of a tile.
ROWS = 32
TOKENS = 6
LEVEL_BYTES = 8192

# ---------------------------------------------------------------- unpacking

#: Rebound for each type.
unpack: Any = None
operand: Any = None
copy_row_tail: Any = None
turn_scales: Any = None
row_scale: Any = None
scaled: Any = None
span = 32
unit_bytes = header_bytes = panel_unit_bytes = 0


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


#: Rebound for each type.
unpack_in_order: Any = None


def unpack_by_words(data: int, offset: int) -> Any:
    """Unpack levels to the order of activations in q8_k64; all values have one scale."""
    l0, l1, l2, l3, scales, mins = unpack_in_order(data, offset)
    g0, g1, g2, g3 = by_words(l0, l1, l2, l3)
    return g0, g1, g2, g3, scales, mins


def panel_unpacker(unpack: Unpacker) -> Any:
    """Return the function that unpacks levels to the order of the activations."""
    if unpack.format.activations != "q8_k64":
        return unpack.function
    return specialize(unpack_by_words, unpack.format.type.name.lower(), unpack_in_order=unpack.function)


def unpack_panel(w: int, row_bytes: int, rows: int, n: int, panel: int) -> None:
    """Unpack ``rows`` (1 to 32) rows of ``n`` values at ``w``; the last one is repeated up to 32."""
    levels = stack_bytes(4096)
    scales = stack_bytes(2048)
    padded = stack_bytes(320)
    for unit in range((n + 255) // 256):
        partial = 256 * unit + 256 > n
        for half in range(2):
            for r in range(16):
                row = w + min(16 * half + r, rows - 1) * row_bytes
                block = row + header_bytes + unit * unit_bytes
                if partial:
                    copy_row_tail(block, n % 256, padded)
                    block = padded
                for byte in range(0, unit_bytes, 64):  # 32 rows are more streams than the hardware prefetches
                    prefetch_l2(block, unit_bytes + byte)
                l0, l1, l2, l3, s, m = unpack(block, 0)
                store(levels, 256 * r, operand(l0))
                store(levels, 256 * r + 64, operand(l1))
                store(levels, 256 * r + 128, operand(l2))
                store(levels, 256 * r + 192, operand(l3))
                store_scales(scales + 128 * r, scaled(s, row_scale(row)), m, span)
            target = panel + unit * panel_unit_bytes + 64 * half
            for k in range(4):
                turn(levels + 64 * k, 256, target + 2048 * k, 128, 16)
            turn_scales(scales, target + LEVEL_BYTES)


# ---------------------------------------------------------------- the tile


@inline
def fetch(address: int, n: int) -> None:
    """Prefetch n bytes into the L2 cache; a few lines at a time, spread over the work, never stall it."""
    for byte in range(0, n, 64):
        prefetch_l2(address, byte)


#: Rebound for each type.
first_dots: Any = None
subtract_mins: Any = None


def subtract_nothing(sums: Any, panel: int, tokens: Any, unit_at: int) -> Any:
    """For types without minimums."""
    return sums


def subtract_mins_32(sums: Any, panel: int, tokens: Any, unit_at: int) -> Any:
    """One minimum per 32 values."""
    for g in range(8):
        sums = minus_mins(sums, panel + LEVEL_BYTES + 1024 + 128 * g, tokens, unit_at + SUMS32 + 4 * g)
    return sums


def subtract_mins_16(sums: Any, panel: int, tokens: Any, unit_at: int) -> Any:
    """One minimum per 16 values."""
    for g in range(16):
        sums = minus_mins(sums, panel + LEVEL_BYTES + 2048 + 128 * g, tokens, unit_at + SUMS + 4 * g)
    return sums


def tile_q8_k_32(panel: int, n: int, tokens: Any, out: int, next_rows: int, step: int) -> None:
    """Activations with one scale per 256, weights with one per 32 values."""
    sums = no_sums(tokens)
    for unit in range((n + 255) // 256):
        unit_at = unit * UNIT_BYTES
        fetch(next_rows + unit * step, step)
        part = no_sums(tokens)
        for g in range(8):
            dots = dot_steps(
                first_dots(tokens, unit_at + OFFSETS32 + 4 * g), panel + 1024 * g, tokens, unit_at + 32 * g, 8
            )
            part = add_scaled(part, dots, panel + LEVEL_BYTES + 128 * g)
        sums = add_products(sums, part, tokens, unit_at + SCALES)
        sums = subtract_mins(sums, panel, tokens, unit_at)
        panel += panel_unit_bytes
    store_tile(sums, out)


def tile_q8_k_16(panel: int, n: int, tokens: Any, out: int, next_rows: int, step: int) -> None:
    """Activations with one scale per 256, weights with one per 16 values."""
    sums = no_sums(tokens)
    for unit in range((n + 255) // 256):
        unit_at = unit * UNIT_BYTES
        fetch(next_rows + unit * step, step)
        part = no_sums(tokens)
        for g in range(16):
            # The offsets are stored as a transposed 4 x 4 matrix.
            offset = unit_at + OFFSETS + 16 * (g % 4) + 4 * (g // 4)
            dots = dot_steps(first_dots(tokens, offset), panel + 512 * g, tokens, unit_at + 16 * g, 4)
            part = add_scaled(part, dots, panel + LEVEL_BYTES + 128 * g)
        sums = add_products(sums, part, tokens, unit_at + SCALES)
        sums = subtract_mins(sums, panel, tokens, unit_at)
        panel += panel_unit_bytes
    store_tile(sums, out)


def tile_q8_0_32(panel: int, n: int, tokens: Any, out: int, next_rows: int, step: int) -> None:
    """Activations and weights with one scale per 32 values."""
    sums = no_sums(tokens)
    for unit in range((n + 255) // 256):
        unit_at = unit * UNIT_BYTES
        fetch(next_rows + unit * step, step)
        for g in range(8):
            dots = dot_steps(
                first_dots(tokens, unit_at + OFFSETS32 + 4 * g), panel + 1024 * g, tokens, unit_at + 32 * g, 8
            )
            sums = add_scaled_twice(sums, dots, panel + LEVEL_BYTES + 128 * g, tokens, unit_at + SCALES + 8 * g)
        sums = subtract_mins(sums, panel, tokens, unit_at)
        panel += panel_unit_bytes
    store_tile(sums, out)


def tile_q8_0_16(panel: int, n: int, tokens: Any, out: int, next_rows: int, step: int) -> None:
    """Activations with one scale per 32, weights with one per 16 values."""
    sums = no_sums(tokens)
    for unit in range((n + 255) // 256):
        unit_at = unit * UNIT_BYTES
        fetch(next_rows + unit * step, step)
        for g in range(16):
            offset = unit_at + OFFSETS + 16 * (g % 4) + 4 * (g // 4)
            dots = dot_steps(first_dots(tokens, offset), panel + 512 * g, tokens, unit_at + 16 * g, 4)
            sums = add_scaled_twice(sums, dots, panel + LEVEL_BYTES + 128 * g, tokens, unit_at + SCALES + 4 * g)
        sums = subtract_mins(sums, panel, tokens, unit_at)
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
    """Return the address of the i-th of ``count`` rows (at most the last): row i, or row rows[i] if given."""
    i = min(i, count - 1)
    if rows != 0:
        i = types.int64(load(types.int32, rows, 4 * i))
    return x + i * stride


#: Rebound for each type.
tile: Any = None


def multiply_tiles(
    panel: int, n: int, x: int, stride: int, rows: int, i: int, count: int, out: int, next_rows: int, step: int
) -> int:
    """Multiply a panel by the next few of ``count`` rows of x, from the i-th on; return their number.

    rows: address of int32 numbers of rows of x, or 0: the i-th is row i. The products go to out, f32 [TOKENS, 32].
    Every 256 values, prefetch the next ``step`` bytes from ``next_rows`` on.
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
        tile(panel, n, tokens, out, next_rows, step)
        return min(count - i, 6)
    two = (row_address(x, stride, rows, i, count), row_address(x, stride, rows, i + 1, count))
    tile(panel, n, two, out, next_rows, step)
    return min(count - i, 2)


@dataclass(frozen=True)
class Panels:
    """A type's functions for products with many rows of activations, and a panel's bytes by n.

    unpack(w, row_bytes, rows, n, panel): fill a panel with up to 32 rows of n values.
    multiply: multiply a panel by the next few rows of x, see multiply_tiles.
    """

    unpack: Any
    multiply: Any
    bytes: Callable[[int], int]


@cache
def panels(t: TensorType) -> Panels:
    """Return the functions that unpack weights of type ``t`` into panels and multiply them in tiles."""
    name = t.name.lower()
    if t.name in float_dots.LOADS:
        unpack_floats = specialize(float_dots.unpack_float_panel, name, helper, **float_dots.LOADS[t.name])
        return Panels(
            unpack_floats,
            specialize(multiply_tiles, "floats", helper, tile=helper(float_dots.tile_float)),
            lambda n: 4 * ROWS * (-(-n // 16) * 16),
        )
    unpacked_by, spec = unpacker(t), format_of(t)
    kind = "q8_k" if spec.activations == "q8_k" else "q8_0"
    size = LEVEL_BYTES + 128 * (256 // spec.span) * (2 if spec.mins else 1)
    raised = HAS_DOT4 and spec.signed
    scales = globals()[f"turn_scales_{spec.span}" + ("_mins" if spec.mins else "")]
    subtract = globals()[f"subtract_mins_{spec.span}"] if spec.mins else subtract_nothing
    one_tile = specialize(
        _TILES[kind, spec.span],
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
        unpack=panel_unpacker(unpacked_by),
        operand=operand_functions(spec)["operand"],
        copy_row_tail=specialize(copy_tail, name, unit_bytes=spec.unit_bytes),
        turn_scales=inline(scales),
        span=spec.span,
        panel_unit_bytes=size,
        **unpacked_by.product_row,
    )
    return Panels(unpack_rows, specialize(multiply_tiles, name, helper, tile=one_tile), lambda n: -(-n // 256) * size)

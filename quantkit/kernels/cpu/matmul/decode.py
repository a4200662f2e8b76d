"""Weights decoded to f32 in scratch, to multiply f32 activations by the functions of F32 weights (float_dots.py).

A row, or a panel of 32 transposed rows, f32 [n][2][16 rows], is decoded once for all rows of activations. A product is
that of the same values stored as F32, bit by bit.
"""

from __future__ import annotations

from typing import Any

from quantkit.kernels.cpu.core.jit import helper, inline, specialize
from quantkit.kernels.cpu.core.simd import prefetch_l2, stack_bytes
from quantkit.kernels.cpu.matmul.dots import copy_tail
from quantkit.kernels.cpu.matmul.matmul_tiles import turn
from quantkit.kernels.cpu.unpack import unpacker
from quantkit.kernels.cpu.unpack.dequantize import write_values
from quantkit.types import TensorType

#: Rebound for each type.
unpack: Any = None
copy_row_tail: Any = None
row_scale: Any = None
scaled: Any = None
unit_bytes = header_bytes = 0


def decode_unit(row: int, unit: int, n: int, padded: int, out: int) -> None:
    """Decode 256 values of a row of ``n``, zero-padded; padded: 320 bytes."""
    block = row + header_bytes + unit * unit_bytes
    if 256 * unit + 256 > n:
        copy_row_tail(block, n % 256, padded)
        block = padded
    l0, l1, l2, l3, scales, mins = unpack(block, 0)
    write_values(out, 0, l0, l1, l2, l3, scaled(scales, row_scale(row)), mins)


decode: Any = None


def decode_row(row: int, n: int, scratch: int) -> int:
    """Decode ``n`` values to scratch, in whole units of 256; return its address."""
    padded = stack_bytes(320)
    for unit in range((n + 255) // 256):
        decode(row, unit, n, padded, scratch + 1024 * unit)
    return scratch


def decode_panel(w: int, row_bytes: int, rows: int, n: int, panel: int) -> None:
    """Decode and transpose ``rows`` (1 to 32) rows of ``n`` values at ``w``; the last one is repeated up to 32."""
    values, padded = stack_bytes(16384), stack_bytes(320)
    for unit in range((n + 255) // 256):
        groups = min(16, (n - 256 * unit + 15) // 16)
        for half in range(2):
            for r in range(16):
                row = w + min(16 * half + r, rows - 1) * row_bytes
                for byte in range(0, unit_bytes, 64):  # 32 rows are more streams than the hardware prefetches
                    prefetch_l2(row, header_bytes + (unit + 1) * unit_bytes + byte)
                decode(row, unit, n, padded, values + 1024 * r)
            target = panel + 32768 * unit + 64 * half
            for group in range(groups):
                turn(values + 64 * group, 1024, target + 2048 * group, 128, 16)


@inline
def stored_row(row: int, n: int, scratch: int) -> int:
    """Return the address of a row that needs no decoding."""
    return row


def row_and_panel(t: TensorType) -> tuple[Any, Any]:
    """Return ``decode_row`` and ``decode_panel`` of a type of blocks; row scales include the gain of products."""
    name, spec = t.name.lower(), unpacker(t)
    tail = specialize(copy_tail, name, unit_bytes=spec.format.unit_bytes)
    unit = specialize(decode_unit, name, unpack=spec.function, copy_row_tail=tail, **spec.product_row)
    sizes = {name: spec.product_row[name] for name in ("unit_bytes", "header_bytes")}
    return specialize(decode_row, name, helper, decode=unit), specialize(
        decode_panel, name, helper, decode=unit, **sizes
    )

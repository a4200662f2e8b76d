"""Products of up to 32 rows of weights with rows of activations: one compiled function per type, called by address.

Only this part of an operation (matmul.py, moe.py) depends on the type of the weights, so operations are not compiled
for every type: their slot ``products`` holds ``products_of(t)``. Few rows of activations are multiplied one row of
weights at a time (dots.py), many with a panel (panel.py), which stays in scratch between calls.

``exact_products_of(t)`` multiplies decoded weights by activations that are not rounded (decode.py): in its place, x
and scratch are those of ``DECODED_TYPE``, whatever the type of the weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline, specialize
from quantkit.kernels.cpu.core.simd import store
from quantkit.kernels.cpu.core.tape import arg, operation
from quantkit.kernels.cpu.core.team import call_operation
from quantkit.kernels.cpu.matmul.decode import row_and_panel, stored_row
from quantkit.kernels.cpu.matmul.dots import PREFETCH, row_dots
from quantkit.kernels.cpu.matmul.panel import ROWS, panels, row_address
from quantkit.kernels.formats import format_of
from quantkit.types import BY_NAME, TensorType

#: The type of decoded weights.
DECODED_TYPE = BY_NAME["F32"]
#: Minimum rows of activations for a panel, and maximum rows of one call (TOKENS divides it).
MIN_PANEL = 5
BLOCK = 60
#: Bytes of the products of a call, f32 [BLOCK, ROWS], and of the argument block of ``unit_products``.
PRODUCTS_BYTES, UNIT_BLOCK_BYTES = 4 * ROWS * BLOCK, 128

#: Rebound for each type.
dot_row: Any = None
dot_row_by_4: Any = None
operand_row: Any = stored_row
unpack_panel: Any = None
multiply_tiles: Any = None
by_rows: Any = None
by_panel: Any = None


def multiply_rows(
    w: int,
    row_bytes: int,
    n_in: int,
    rows: int,
    x: int,
    x_stride: int,
    numbers: int,
    count: int,
    products: int,
    next_rows: int,
    scratch: int,
) -> None:
    """products[i, r] = row r of w times the i-th row of x; each row of w is unpacked once for four of x."""
    end = w + rows * row_bytes
    for r in range(rows):
        row, target = w + r * row_bytes, products + 4 * r
        # The last rows prefetch the beginning of the data that is read next.
        further = PREFETCH if end - row > PREFETCH + row_bytes // 2 else PREFETCH + next_rows - end
        row = operand_row(row, n_in, scratch)
        i = 0
        while count - i >= 3:
            # Three rows are faster as four rows, one of them twice, than one by one.
            x0, x1 = row_address(x, x_stride, numbers, i, count), row_address(x, x_stride, numbers, i + 1, count)
            x2, x3 = row_address(x, x_stride, numbers, i + 2, count), row_address(x, x_stride, numbers, i + 3, count)
            a, b, c, d = dot_row_by_4(row, x0, x1, x2, x3, n_in)
            offset = 4 * ROWS * i
            store(target, offset, a)
            store(target, offset + 4 * ROWS, b)
            store(target, offset + 8 * ROWS, c)
            if count - i > 3:
                store(target, offset + 12 * ROWS, d)
            i += 4
        while i < count:
            store(target, 4 * ROWS * i, dot_row(row, row_address(x, x_stride, numbers, i, count), n_in, further))
            i += 1


def multiply_panel(
    panel: int,
    n_in: int,
    x: int,
    x_stride: int,
    numbers: int,
    count: int,
    products: int,
    next_rows: int,
    next_bytes: int,
) -> None:
    """products[i, r] = row r of the panel times the i-th row of x; prefetches the next rows."""
    i, units = 0, (n_in + 255) // 256
    # Every unit of every tile prefetches its share, in whole cache lines.
    step = (next_bytes // (units * max(1, (count + 3) // 6)) + 63) // 64 * 64
    while i < count:
        target = products + 4 * ROWS * i
        i += multiply_tiles(
            panel, n_in, x, x_stride, numbers, i, count, target, next_rows, min(step, next_bytes // units)
        )
        next_rows += step * units
        next_bytes = max(0, next_bytes - step * units)


_W, _ROW_BYTES, _N_IN, _ROWS, _X, _X_STRIDE, _NUMBERS, _COUNT, _TOTAL, _BEGIN, _PRODUCTS, _PANEL = range(1, 13)
_NEXT_ROWS, _NEXT_BYTES = 13, 14


@operation("batch w row_bytes n_in rows x x_stride numbers count total begin products panel next_rows next_bytes")
def unit_products(args: int, tid: int, nth: int) -> None:
    """products[i, r], f32 [count, ROWS], = row r of w times the i-th of ``count`` rows of x.

    numbers: address of the rows' numbers, int32, or 0: 0, 1, 2 ... Not an entry of a tape: operations call it for each
    block of rows; total: rows of all blocks; begin: those before this one. The first block unpacks the panel, and
    prefetches ``next_bytes`` bytes of the next rows.
    """
    w = arg(args, _W)
    row_bytes = arg(args, _ROW_BYTES)
    n_in = arg(args, _N_IN)
    rows = arg(args, _ROWS)
    x = arg(args, _X)
    x_stride = arg(args, _X_STRIDE)
    numbers = arg(args, _NUMBERS)
    count = arg(args, _COUNT)
    products = arg(args, _PRODUCTS)
    panel = arg(args, _PANEL)
    if arg(args, _TOTAL) < MIN_PANEL:
        by_rows(w, row_bytes, n_in, rows, x, x_stride, numbers, count, products, arg(args, _NEXT_ROWS), panel)
        return
    if arg(args, _BEGIN) == 0:
        unpack_panel(w, row_bytes, rows, n_in, panel)
    next_rows, next_bytes = arg(args, _NEXT_ROWS), arg(args, _NEXT_BYTES)
    by_panel(panel, n_in, x, x_stride, numbers, count, products, next_rows, next_bytes)


@inline
def fill_unit(block: int, row_bytes: int, n_in: int, x_stride: int, numbers: int, products: int, panel: int) -> None:
    """Write the arguments common to all units of an operation into the argument block of unit_products."""
    store(block, 8 * _ROW_BYTES, types.int64(row_bytes))
    store(block, 8 * _N_IN, types.int64(n_in))
    store(block, 8 * _X_STRIDE, types.int64(x_stride))
    store(block, 8 * _NUMBERS, types.int64(numbers))
    store(block, 8 * _PRODUCTS, types.int64(products))
    store(block, 8 * _PANEL, types.int64(panel))


@inline
def call_unit(
    function: int,
    block: int,
    w: int,
    rows: int,
    x: int,
    count: int,
    total: int,
    begin: int,
    next_rows: int,
    next_bytes: int,
) -> None:
    """Call unit_products of a type by its address."""
    store(block, 8 * _W, types.int64(w))
    store(block, 8 * _ROWS, types.int64(rows))
    store(block, 8 * _X, types.int64(x))
    store(block, 8 * _COUNT, types.int64(count))
    store(block, 8 * _TOTAL, types.int64(total))
    store(block, 8 * _BEGIN, types.int64(begin))
    store(block, 8 * _NEXT_ROWS, types.int64(next_rows))
    store(block, 8 * _NEXT_BYTES, types.int64(next_bytes if begin == 0 else 0))
    call_operation(function, block, 0, 1)


@cache
def products_of(t: TensorType) -> Any:
    """Return the value of slot ``products`` for weights of type ``t``: the address of their unit_products."""
    one, four = row_dots(t)
    name, functions = t.name.lower(), panels(t)
    return unit_products.bind(
        name,
        by_rows=specialize(multiply_rows, name, dot_row=one, dot_row_by_4=four),
        by_panel=specialize(multiply_panel, name, multiply_tiles=functions.multiply),
        unpack_panel=functions.unpack,
    )


@cache
def exact_products_of(t: TensorType) -> Any:
    """Return the same for activations that are not rounded, f32 for every type: products of decoded weights."""
    if format_of(t).is_float:
        return products_of(t)  # only the activations that they are called with differ
    (one, four), floats = row_dots(DECODED_TYPE), panels(DECODED_TYPE)
    row, panel = row_and_panel(t)
    name = f"{t.name.lower()}_decoded"
    return unit_products.bind(
        name,
        by_rows=specialize(multiply_rows, name, dot_row=one, dot_row_by_4=four, operand_row=row),
        by_panel=specialize(multiply_panel, "f32", multiply_tiles=floats.multiply),
        unpack_panel=panel,
    )

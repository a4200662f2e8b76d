"""Matrix products of weights as they lie on disk: the operations, for every type of weight.

    op = mul_mat(t)                                 out[row, o] = scale * sum over i of w[o, i] * x[row, i] + bias[o]
    kind = activation_format(t)                     what x must be brought to first, by quantize(kind); "f32": nothing
    block = op.block(batch=..., x=address of the activations, x_stride=row_bytes(kind, n_in), w=address, row_bytes=...,
                     n_in=..., n_out=..., out=address, out_stride=4 * width, rows_of=0, per=1, bias=0, scale=0,
                     scratch=address, scratch_bytes=scratch_bytes(t, n_in))

All strides are bytes. bias: address of f32 [n_out], or 0; scale: address of one f32, or 0. scratch: threads *
scratch_bytes, 64-aligned, shared by all operations of a tape. Several matrices of one x are several entries of a tape
that need not wait for each other (the third word of an entry).

Few rows of x go row of weights by row of weights (dots.py), each thread a range of them; from MIN_TILE rows on,
panels of 32 rows of weights are unpacked once and multiplied in register tiles (panel.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba.core import types

from quantkit.kernels.cpu.activations import activation_format, quantize, row_bytes, rows_word
from quantkit.kernels.cpu.dots import row_dots
from quantkit.kernels.cpu.jit import specialize
from quantkit.kernels.cpu.panel import panels, write_rows
from quantkit.kernels.cpu.simd import load, stack_bytes, store
from quantkit.kernels.cpu.tape import Operation, arg, batch_word, first_of, operation
from quantkit.types import TensorType

__all__ = ["activation_format", "mul_mat", "quantize", "row_bytes", "scratch_bytes"]

_X, _X_STRIDE, _W, _ROW_BYTES, _N_IN, _N_OUT, _OUT, _OUT_STRIDE, _ROWS_OF, _PER, _BIAS, _SCALE, _SCRATCH = range(1, 14)
_SCRATCH_BYTES = 14

#: Bound anew for each type.
dot_row: Any = None
dot_row_by_4: Any = None
unpack_panel: Any = None
multiply_tiles: Any = None
multiply_rows: Any = None
multiply_panels: Any = None

#: Rows of activations from which on panels are unpacked.
MIN_TILE = 8


def multiply_by_row(
    w: int, row_bytes: int, n_in: int, first: int, last: int, x: int, x_stride: int, rows: int, out: int, out_stride: int,
    bias: int, scale: int,
) -> None:  # fmt: skip
    """Multiply rows first..last of the weights with every row of x, unpacking each for four rows of x at a time."""
    factor = load(types.float32, scale, 0) if scale != 0 else types.float32(1)
    for o in range(first, last):
        row, to = w + o * row_bytes, out + 4 * o
        add = load(types.float32, bias, 4 * o) if bias != 0 else types.float32(0)
        done = 0
        while rows - done >= 3:
            y = x + done * x_stride
            # Three rows cost less as four, one of them twice, than one by one.
            y3 = y + 3 * x_stride if rows - done > 3 else y
            a, b, c, d = dot_row_by_4(row, y, y + x_stride, y + 2 * x_stride, y3, n_in)
            store(to, done * out_stride, a * factor + add)
            store(to, (done + 1) * out_stride, b * factor + add)
            store(to, (done + 2) * out_stride, c * factor + add)
            if rows - done > 3:
                store(to, (done + 3) * out_stride, d * factor + add)
            done += 4
        while done < rows:
            store(to, done * out_stride, dot_row(row, x + done * x_stride, n_in) * factor + add)
            done += 1


def multiply_by_panel(
    w: int, row_bytes: int, n_in: int, n_out: int, first: int, last: int, x: int, x_stride: int, rows: int, out: int,
    out_stride: int, bias: int, scale: int, panel: int,
) -> None:  # fmt: skip
    """Multiply panels first..last of the weights with all rows of x."""
    products = stack_bytes(1024)
    for p in range(first, last):
        o = 32 * p
        width = min(32, n_out - o)
        unpack_panel(w + o * row_bytes, row_bytes, width, n_in, panel)
        at = bias + 4 * o if bias != 0 else 0
        i = 0
        while i < rows:
            n = multiply_tiles(panel, (n_in + 255) // 256, x, x_stride, 0, i, rows, products)
            write_rows(products, n, out + 4 * o, out_stride, 0, i, width, scale, at)
            i += n


@operation("batch x x_stride w row_bytes n_in n_out out out_stride rows_of per bias scale scratch scratch_bytes")
def multiply(args: int, tid: int, nth: int) -> None:
    """out = scale * (w x) + bias."""
    rows = batch_word(args, rows_word(arg(args, _ROWS_OF))) * arg(args, _PER)
    n_in, n_out, scratch = arg(args, _N_IN), arg(args, _N_OUT), arg(args, _SCRATCH) + tid * arg(args, _SCRATCH_BYTES)
    w, row_bytes, x, x_stride = arg(args, _W), arg(args, _ROW_BYTES), arg(args, _X), arg(args, _X_STRIDE)
    out, out_stride, bias, scale = arg(args, _OUT), arg(args, _OUT_STRIDE), arg(args, _BIAS), arg(args, _SCALE)
    if rows < MIN_TILE:
        first, last = first_of(n_out, tid, nth), first_of(n_out, tid + 1, nth)
        multiply_rows(w, row_bytes, n_in, first, last, x, x_stride, rows, out, out_stride, bias, scale)
    else:
        n = (n_out + 31) // 32
        first, last = first_of(n, tid, nth), first_of(n, tid + 1, nth)
        multiply_panels(
            w, row_bytes, n_in, n_out, first, last, x, x_stride, rows, out, out_stride, bias, scale, scratch
        )  # fmt: skip


@cache
def mul_mat(t: TensorType) -> Operation:
    """Return the operation out = scale * (w x) + bias for weights of type ``t``; see the top of this file."""
    one, four = row_dots(t)
    name, many = t.name.lower(), panels(t)
    return multiply.bind(
        name,
        multiply_rows=specialize(multiply_by_row, name, dot_row=one, dot_row_by_4=four),
        multiply_panels=specialize(
            multiply_by_panel, name, unpack_panel=many.unpack, multiply_tiles=many.multiply
        ),
    )


def scratch_bytes(t: TensorType, n_in: int) -> int:
    """Return the bytes of scratch each thread needs for weights of type ``t``."""
    return panels(t).bytes(n_in)

"""Matrix products: weights in their file format times activations in the format of their type.

    mul_mat       batch x x_stride w row_bytes products n_in n_out out out_stride rows_of per bias scale
                  scratch scratch_bytes at_once
                      out[row, o] = scale * sum over i of w[o, i] * x[row, i] + bias[o]
    up_gate(a)    batch up up_row_bytes up_products up_x up_x_stride up_bias up_scale, the same with gate,
                  n_in n_out out out_stride rows_of per scratch scratch_bytes at_once, and ``**limits(a)`` (glu.py)
                      out[row, o] = activation(gate x)[row, o] * (up x)[row, o], both with their scale and bias

x: rows converted to ``activation_format(t)`` by ``quantize(format)``, at least ``row_bytes(format, n_in)`` apart,
64-aligned (format f32: the value itself). products: products_of(t), or exact_products_of(t), with x and scratch as for
weights of type DECODED_TYPE. All strides are in bytes. bias: address of f32 [n_out], or 0; scale: of one f32, or 0.
scratch: threads * scratch_bytes, 64-aligned, shared by all operations of a tape; scratch_bytes(t, n_in), or
up_gate_scratch_bytes(up, gate, n_in). at_once: cached_rows(bytes of a row of x). Several matrices with the same x are
independent entries of a tape; so are the matrices of heads, with x and out starting within a row.

Threads share the rows of weights: whole rows for few rows of x, panels of 32 for many. The products of a panel with up
to 60 rows of x are computed in L1 and written scaled, biased and gated. All panels are multiplied by as many rows of x
as the L2 cache holds, then unpacked again for the next: unpacking takes less time than rows from further away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba.core import types

from quantkit.cpus import l2_bytes
from quantkit.kernels.cpu.core.functions import load_part, store_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32x16, load, stack_bytes
from quantkit.kernels.cpu.core.tape import TapeOp, arg, batch_word, farg, first_of, operation
from quantkit.kernels.cpu.layer.glu import gated_activation
from quantkit.kernels.cpu.matmul.activations import quantize, row_bytes, rows_word
from quantkit.kernels.cpu.matmul.panel import ROWS, panels
from quantkit.kernels.cpu.matmul.products import (
    BLOCK,
    DECODED_TYPE,
    MIN_PANEL,
    PRODUCTS_BYTES,
    UNIT_BLOCK_BYTES,
    call_unit,
    exact_products_of,
    fill_unit,
    products_of,
)
from quantkit.kernels.formats import activation_format
from quantkit.types import TensorType

if TYPE_CHECKING:
    from quantkit.kernels.parameters import Activation

__all__ = [
    "DECODED_TYPE",
    "activation_format",
    "cached_rows",
    "exact_products_of",
    "mul_mat",
    "products_of",
    "quantize",
    "row_bytes",
    "scratch_bytes",
    "up_gate",
]

#: More rows than any matrix has.
ANY_NUMBER = 1 << 40
#: Padding between two panels, which must not map to the same cache sets.
_PANEL_GAP = 128


def scratch_bytes(t: TensorType, n_in: int) -> int:
    """Return the bytes of scratch each thread needs for weights of type ``t`` with rows of ``n_in``."""
    return panels(t).bytes(n_in) + _PANEL_GAP


def cached_rows(row_bytes: int) -> int:
    """Return the number of rows of x, of a given size, that fit into the L2 cache, in whole blocks.

    If not even half a block fits, panels are unpacked once for all rows.
    """
    block = BLOCK * row_bytes
    return BLOCK * max(1, round(l2_bytes() / block)) if block <= 2 * l2_bytes() else ANY_NUMBER


@inline
def share_rows(n_out: int, rows: int, tid: int, nth: int) -> Any:
    """Return a thread's first row of weights and one past its last; whole panels for many rows of x."""
    if rows < MIN_PANEL:
        return first_of(n_out, tid, nth), first_of(n_out, tid + 1, nth)
    n = (n_out + ROWS - 1) // ROWS
    return ROWS * first_of(n, tid, nth), min(n_out, ROWS * first_of(n, tid + 1, nth))


@inline
def rows_at_once(count: int) -> Any:
    """Return the number of weight rows per call: a panel, or as many as leave space for one row of x."""
    return ROWS * BLOCK if count == 1 else ROWS


@inline
def factor(scale: int) -> Any:
    """Return the f32 at an address, 1 for address 0."""
    return load(types.float32, scale, 0) if scale != 0 else types.float32(1)


@inline
def epilogue(products: int, scale: Any, bias: int, o: int, n: int) -> Any:
    """Return up to 16 products times the scale, plus the bias of outputs o and following."""
    v = load(f32x16, products, 0) * scale
    return v + load_part(f32x16, bias, 4 * o, n) if bias != 0 else v


_X, _X_STRIDE, _W, _ROW_BYTES, _PRODUCTS, _N_IN, _N_OUT, _OUT, _OUT_STRIDE, _ROWS_OF, _PER, _BIAS = range(1, 13)
_SCALE, _SCRATCH, _SCRATCH_BYTES, _AT_ONCE = range(13, 17)


@operation(
    "batch x x_stride w row_bytes products n_in n_out out out_stride rows_of per bias scale scratch scratch_bytes "
    "at_once"
)
def mul_mat(args: int, tid: int, nth: int) -> None:
    """out = scale * (w x) + bias"""
    count = batch_word(args, rows_word(arg(args, _ROWS_OF))) * arg(args, _PER)
    x = arg(args, _X)
    x_stride = arg(args, _X_STRIDE)
    function = arg(args, _PRODUCTS)
    bias = arg(args, _BIAS)
    scale = factor(arg(args, _SCALE))
    row_bytes = arg(args, _ROW_BYTES)
    products, block = stack_bytes(PRODUCTS_BYTES), stack_bytes(UNIT_BLOCK_BYTES)
    panel = arg(args, _SCRATCH) + tid * arg(args, _SCRATCH_BYTES)
    fill_unit(block, row_bytes, arg(args, _N_IN), x_stride, 0, products, panel)
    first, last = share_rows(arg(args, _N_OUT), count, tid, nth)
    step = rows_at_once(count)
    for start in range(0, count, arg(args, _AT_ONCE)):
        stop = min(count, start + arg(args, _AT_ONCE))
        for o in range(first, last, step):
            rows, w = min(step, last - o), arg(args, _W) + o * row_bytes
            next_rows, next_bytes = w + rows * row_bytes, rows * row_bytes
            for begin in range(start, stop, BLOCK):
                n, xs = min(BLOCK, stop - begin), x + begin * x_stride
                call_unit(function, block, w, rows, xs, n, count, begin - start, next_rows, next_bytes)
                for i in range(n):
                    out = arg(args, _OUT) + (begin + i) * arg(args, _OUT_STRIDE) + 4 * o
                    for r in range(0, rows, 16):
                        m = min(16, rows - r)
                        store_part(out, 4 * r, epilogue(products + 4 * (ROWS * i + r), scale, bias, o + r, m), m)


#: Rebound for each kind of activation.
gate_up: Any = None

_UP = 1
_GATE = 8
_W_AT, _BYTES_AT, _PRODUCTS_AT, _X_AT, _STRIDE_AT, _BIAS_AT, _SCALE_AT = range(7)
_G_IN, _G_OUT, _G_TO, _G_TO_STRIDE, _G_ROWS_OF, _G_PER, _G_SCRATCH, _G_SCRATCH_BYTES, _G_AT_ONCE = range(15, 24)
_ALPHA, _GATE_LIMIT, _ACT_LIMIT, _UP_LIMIT = range(24, 28)


@inline
def multiply_one_of_two(
    args: int, side: int, block: int, o: int, rows: int, start: int, begin: int, n: int, count: int
) -> None:
    """Compute the products of up, or gate, with a block of rows of x; ``start``: the first that are in the cache."""
    row_bytes = arg(args, side + _BYTES_AT)
    w = arg(args, side + _W_AT) + o * row_bytes
    x = arg(args, side + _X_AT) + begin * arg(args, side + _STRIDE_AT)
    # The product with gate prefetches the same rows of up; that with up, gate's next rows.
    second = _UP + _GATE - side
    next_o = o + rows if side == _UP else o
    next_rows = arg(args, second + _W_AT) + next_o * arg(args, second + _BYTES_AT)
    next_bytes = rows * arg(args, second + _BYTES_AT)
    call_unit(arg(args, side + _PRODUCTS_AT), block, w, rows, x, n, count, begin - start, next_rows, next_bytes)


@operation(
    "batch up up_row_bytes up_products up_x up_x_stride up_bias up_scale gate gate_row_bytes gate_products gate_x "
    "gate_x_stride gate_bias gate_scale n_in n_out out out_stride rows_of per scratch scratch_bytes at_once "
    "alpha:f gate_limit:f act_limit:f up_limit:f"
)
def gate_dense(args: int, tid: int, nth: int) -> None:
    """out = activation(gate x) * (up x)"""
    count, n_in = batch_word(args, rows_word(arg(args, _G_ROWS_OF))) * arg(args, _G_PER), arg(args, _G_IN)
    alpha, gate_limit = farg(args, _ALPHA), farg(args, _GATE_LIMIT)
    act_limit, up_limit = farg(args, _ACT_LIMIT), farg(args, _UP_LIMIT)
    up_bias, up_scale = arg(args, _UP + _BIAS_AT), factor(arg(args, _UP + _SCALE_AT))
    gate_bias, gate_scale = arg(args, _GATE + _BIAS_AT), factor(arg(args, _GATE + _SCALE_AT))
    ups, gates = stack_bytes(PRODUCTS_BYTES), stack_bytes(PRODUCTS_BYTES)
    up_block, gate_block = stack_bytes(UNIT_BLOCK_BYTES), stack_bytes(UNIT_BLOCK_BYTES)
    panel = arg(args, _G_SCRATCH) + tid * arg(args, _G_SCRATCH_BYTES)
    second = panel + arg(args, _G_SCRATCH_BYTES) // 128 * 64
    fill_unit(up_block, arg(args, _UP + _BYTES_AT), n_in, arg(args, _UP + _STRIDE_AT), 0, ups, panel)
    fill_unit(gate_block, arg(args, _GATE + _BYTES_AT), n_in, arg(args, _GATE + _STRIDE_AT), 0, gates, second)
    first, last = share_rows(arg(args, _G_OUT), count, tid, nth)
    step = rows_at_once(count)
    for start in range(0, count, arg(args, _G_AT_ONCE)):
        stop = min(count, start + arg(args, _G_AT_ONCE))
        for o in range(first, last, step):
            rows = min(step, last - o)
            for begin in range(start, stop, BLOCK):
                n = min(BLOCK, stop - begin)
                multiply_one_of_two(args, _GATE, gate_block, o, rows, start, begin, n, count)
                multiply_one_of_two(args, _UP, up_block, o, rows, start, begin, n, count)
                for i in range(n):
                    out = arg(args, _G_TO) + (begin + i) * arg(args, _G_TO_STRIDE) + 4 * o
                    for r in range(0, rows, 16):
                        m, k = min(16, rows - r), 4 * (ROWS * i + r)
                        g = epilogue(gates + k, gate_scale, gate_bias, o + r, m)
                        u = epilogue(ups + k, up_scale, up_bias, o + r, m)
                        store_part(out, 4 * r, gate_up(g, u, alpha, gate_limit, act_limit, up_limit), m)


def up_gate(activation: Activation) -> TapeOp:
    """Return the operation of ops.UpGate for a kind of activation; its limits are slots (glu.limits)."""
    return gate_dense.bind(activation.kind, gate_up=gated_activation(activation.kind))


def up_gate_scratch_bytes(up: TensorType, gate: TensorType, n_in: int) -> int:
    """Return the bytes of scratch each thread needs for ``up_gate``."""
    return 2 * max(scratch_bytes(up, n_in), scratch_bytes(gate, n_in))

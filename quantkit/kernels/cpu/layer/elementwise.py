"""Elementwise and row-wise operations, and copies of columns and rows.

    embed          batch out weight row_bytes width scale:f scratch scratch_bytes rows_by     decoded rows
    select_outputs batch out x width                                                  width: all columns of a token
    add            batch out a b width rows_of per
    scale shift clamp softcap    batch out x width rows_of per by:f
    softplus       batch out x width rows_of per by:f                                 ops.Activate's; by is unused
    xielu          batch out x width rows_of per alpha_n:f alpha_p:f beta:f eps:f
    scale_by_position      batch out x width rows_of per floor_scale:f alpha:f offset:f
    multiply_by plus_vector    batch out x vector n width rows_of per                 vector repeats along a row
    take           batch out x width x_width start period rows_of per
    join           batch out a b a_width b_width period_a period_b rows_of per

Except in copies (select_outputs, take, join), out may alias x or a. No byte beyond the end of a value is
touched. Thread 0 alone processes small values: moving cache lines between cores costs more than the work.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core import functions
from quantkit.kernels.cpu.core.functions import load_part, store_part, tanh
from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import f32x16, load, select, store, vmax, vmin
from quantkit.kernels.cpu.core.tape import (
    N_OUTPUTS,
    N_TOKENS,
    OUTPUT_ROWS,
    POSITIONS,
    TOKENS,
    TapeOp,
    arg,
    batch_word,
    farg,
    first_of,
    operation,
)
from quantkit.kernels.cpu.unpack import dequantize
from quantkit.kernels.formats import UNIT
from quantkit.types import TensorType

#: Number of elements below which thread 0 does all the work.
SMALL = 8192


@inline
def share(n, size, tid, nth):
    """Return this thread's (first, end) of n units of ``size`` elements; thread 0 takes all of a few."""
    if n * size < SMALL:
        return 0, (n if tid == 0 else 0)
    return first_of(n, tid, nth), first_of(n, tid + 1, nth)


@inline
def copy(out, x, n):
    """Copy n floats."""
    for i in range(0, n - 15, 16):
        store(out, 4 * i, load(f32x16, x, 4 * i))
    n_tail = n % 16
    if n_tail:
        store_part(out, 4 * (n - n_tail), load_part(f32x16, x, 4 * (n - n_tail), n_tail), n_tail)


# ---------------------------------------------------------------- elements

#: Bound for each operation.
function: Any = None

_OUT, _X, _WIDTH, _ROWS_OF, _PER, _BY = range(1, 7)


@operation("batch out x width rows_of per by:f")
def _map(args, tid, nth):
    """out = function(x, operand)"""
    total = batch_word(args, arg(args, _ROWS_OF)) * arg(args, _PER) * arg(args, _WIDTH)
    out = arg(args, _OUT)
    x = arg(args, _X)
    operand = farg(args, _BY)
    first, end = share((total + 15) // 16, 16, tid, nth)
    vector_end = min(16 * end, total - 15)
    for i in range(16 * first, vector_end, 16):
        store(out, 4 * i, function(load(f32x16, x, 4 * i), operand))
    n_tail = total % 16
    if n_tail and 16 * end > total:
        offset = 4 * (total - n_tail)
        store_part(out, offset, function(load_part(f32x16, x, offset, n_tail), operand), n_tail)


@inline
def _times(x, operand):
    return x * operand


@inline
def _sum(x, operand):
    return x + operand


@inline
def _clamp(x, operand):
    return vmax(-operand, vmin(operand, x))


@inline
def _cap(x, operand):
    return tanh(x / operand) * operand


@inline
def _softplus(x, operand):
    return functions.softplus(x)


scale = _map.bind("scale", function=_times)
shift = _map.bind("shift", function=_sum)
clamp = _map.bind("clamp", function=_clamp)
softcap = _map.bind("softcap", function=_cap)
softplus = _map.bind("softplus", function=_softplus)


@inline
def _below(x, eps):
    """e^min(x, eps) - 1 - x; a polynomial near zero, where that cancels."""
    m = vmin(eps, x)
    polynomial = m * m * (((((m * (1 / 5040) + 1 / 720) * m + 1 / 120) * m + 1 / 24) * m + 1 / 6) * m + 0.5)
    return select(m > -0.3, polynomial, functions.exp(m) - 1.0 - m) + (m - x)


@inline
def _xielu(x, alpha_n, alpha_p, beta, eps):
    return select(x > 0.0, x * x * alpha_p, _below(x, eps) * alpha_n) + x * beta


_ALPHA_N, _ALPHA_P, _BETA, _EPS = range(6, 10)


@operation("batch out x width rows_of per alpha_n:f alpha_p:f beta:f eps:f")
def xielu(args, tid, nth):
    """out = alpha_p x^2 + beta x above 0, else alpha_n (e^min(x, eps) - 1 - x) + beta x"""
    alpha_n = farg(args, _ALPHA_N)
    alpha_p = farg(args, _ALPHA_P)
    beta = farg(args, _BETA)
    eps = farg(args, _EPS)
    total = batch_word(args, arg(args, _ROWS_OF)) * arg(args, _PER) * arg(args, _WIDTH)
    out, x = arg(args, _OUT), arg(args, _X)
    first, end = share((total + 15) // 16, 16, tid, nth)
    for i in range(16 * first, min(16 * end, total - 15), 16):
        store(out, 4 * i, _xielu(load(f32x16, x, 4 * i), alpha_n, alpha_p, beta, eps))
    n_tail = total % 16
    if n_tail and 16 * end > total:
        offset = 4 * (total - n_tail)
        store_part(out, offset, _xielu(load_part(f32x16, x, offset, n_tail), alpha_n, alpha_p, beta, eps), n_tail)


_A, _B, _ADD_WIDTH, _ADD_ROWS_OF, _ADD_PER = range(2, 7)


@operation("batch out a b width rows_of per")
def add(args, tid, nth):
    """out = a + b"""
    total = batch_word(args, arg(args, _ADD_ROWS_OF)) * arg(args, _ADD_PER) * arg(args, _ADD_WIDTH)
    out = arg(args, _OUT)
    a = arg(args, _A)
    b = arg(args, _B)
    first, end = share((total + 15) // 16, 16, tid, nth)
    for i in range(16 * first, min(16 * end, total - 15), 16):
        store(out, 4 * i, load(f32x16, a, 4 * i) + load(f32x16, b, 4 * i))
    n_tail = total % 16
    if n_tail and 16 * end > total:
        offset = 4 * (total - n_tail)
        store_part(out, offset, load_part(f32x16, a, offset, n_tail) + load_part(f32x16, b, offset, n_tail), n_tail)


# ---------------------------------------------------------------- rows


@inline
def scale_row(out, x, n, factor):
    """Multiply n floats."""
    for i in range(0, n - 15, 16):
        store(out, 4 * i, load(f32x16, x, 4 * i) * factor)
    n_tail = n % 16
    if n_tail:
        offset = 4 * (n - n_tail)
        store_part(out, offset, load_part(f32x16, x, offset, n_tail) * factor, n_tail)


_FLOOR_SCALE = 6
_ALPHA = 7
_OFFSET = 8


@operation("batch out x width rows_of per floor_scale:f alpha:f offset:f")
def scale_by_position(args, tid, nth):
    """out = x * (1 + alpha * log(1 + floor((position + offset) / floor_scale))), on all rows of a token."""
    width = arg(args, _WIDTH) * arg(args, _PER)
    first, end = share(batch_word(args, arg(args, _ROWS_OF)), width, tid, nth)
    for row in range(first, end):
        token = load(types.int32, batch_word(args, OUTPUT_ROWS), 4 * row) if arg(args, _ROWS_OF) == N_OUTPUTS else row
        position = types.float32(load(types.int32, batch_word(args, POSITIONS), 4 * token))
        steps = math.floor((position + farg(args, _OFFSET)) / farg(args, _FLOOR_SCALE))
        factor = math.log(types.float64(steps) + 1.0) * types.float64(farg(args, _ALPHA)) + 1.0
        offset = 4 * row * width
        scale_row(arg(args, _OUT) + offset, arg(args, _X) + offset, width, types.float32(factor))


_VECTOR, _N, _V_WIDTH, _V_ROWS_OF, _V_PER = range(3, 8)


@operation("batch out x vector n width rows_of per")
def _with_vector(args, tid, nth):
    """out = function(x, vector); the vector repeats along the row."""
    n, vector = arg(args, _N), arg(args, _VECTOR)
    repeats = arg(args, _V_WIDTH) // n
    units = batch_word(args, arg(args, _V_ROWS_OF)) * arg(args, _V_PER) * repeats
    first, end = share(units, n, tid, nth)
    for unit in range(first, end):
        out, x = arg(args, _OUT) + 4 * n * unit, arg(args, _X) + 4 * n * unit
        for i in range(0, n - 15, 16):
            store(out, 4 * i, function(load(f32x16, x, 4 * i), load(f32x16, vector, 4 * i)))
        n_tail = n % 16
        if n_tail:
            offset = 4 * (n - n_tail)
            store_part(
                out,
                offset,
                function(load_part(f32x16, x, offset, n_tail), load_part(f32x16, vector, offset, n_tail)),
                n_tail,
            )


multiply_by = _with_vector.bind("times", function=_times)
plus_vector = _with_vector.bind("plus", function=_sum)

# ---------------------------------------------------------------- copies of columns and rows


_TAKE_X_WIDTH, _START, _PERIOD, _TAKE_ROWS_OF, _TAKE_PER = range(4, 9)


@operation("batch out x width x_width start period rows_of per")
def take(args, tid, nth):
    """Copy ``width`` columns: those from ``start`` on of every ``period`` columns."""
    width = arg(args, _WIDTH)
    x_width = arg(args, _TAKE_X_WIDTH)
    period = arg(args, _PERIOD)
    groups = x_width // period
    n = width // groups
    units = batch_word(args, arg(args, _TAKE_ROWS_OF)) * arg(args, _TAKE_PER) * groups
    first, end = share(units, n, tid, nth)
    for unit in range(first, end):
        copy(arg(args, _OUT) + 4 * n * unit, arg(args, _X) + 4 * (unit * period + arg(args, _START)), n)


_A_WIDTH, _B_WIDTH, _PERIOD_A, _PERIOD_B, _JOIN_ROWS_OF, _JOIN_PER = range(4, 10)


@operation("batch out a b a_width b_width period_a period_b rows_of per")
def join(args, tid, nth):
    """Interleave period_a columns of a with period_b of b; b wraps around."""
    period_a, period_b = arg(args, _PERIOD_A), arg(args, _PERIOD_B)
    a_groups, b_groups = arg(args, _A_WIDTH) // period_a, arg(args, _B_WIDTH) // period_b
    units = batch_word(args, arg(args, _JOIN_ROWS_OF)) * arg(args, _JOIN_PER) * a_groups
    first, end = share(units, period_a + period_b, tid, nth)
    for unit in range(first, end):
        row, group = unit // a_groups, unit % a_groups
        out = arg(args, _OUT) + 4 * unit * (period_a + period_b)
        copy(out, arg(args, _A) + 4 * unit * period_a, period_a)
        b = arg(args, _B) + 4 * (row * b_groups + group % b_groups) * period_b
        copy(out + 4 * period_a, b, period_b)


@operation("batch out x width")
def select_outputs(args, tid, nth):
    """Copy the rows of the tokens that need logits."""
    width, rows = arg(args, _WIDTH), batch_word(args, OUTPUT_ROWS)
    first, end = share(batch_word(args, N_OUTPUTS), width, tid, nth)
    for row in range(first, end):
        source = types.int64(load(types.int32, rows, 4 * row))
        copy(arg(args, _OUT) + 4 * row * width, arg(args, _X) + 4 * source * width, width)


# ---------------------------------------------------------------- embeddings

_TABLE, _TABLE_WIDTH = 2, 3


@operation("batch out table width")
def lookup(args, tid, nth):
    """Copy rows of an integer table, selected by tokens; table: int32 [n_vocab, width]."""
    width, tokens = arg(args, _TABLE_WIDTH), batch_word(args, TOKENS)
    first, end = share(batch_word(args, N_TOKENS), width, tid, nth)
    for row in range(first, end):
        source = arg(args, _TABLE) + 4 * width * types.int64(load(types.int32, tokens, 4 * row))
        copy(arg(args, _OUT) + 4 * row * width, source, width)


#: dequantize.decode_rows of the weight's type; bound for each type.
decode: Any = None

_WEIGHT, _ROW_BYTES, _EMBED_WIDTH, _EMBED_SCALE, _SCRATCH, _SCRATCH_BYTES, _ROWS_BY = range(2, 9)

#: The source of row numbers: words of the batch block.
ROWS_BY = {"token": TOKENS, "position": POSITIONS}


@operation("batch out weight row_bytes width scale:f scratch scratch_bytes rows_by")
def _embed(args, tid, nth):
    """Decode the rows that tokens (or positions) name, times scale; scratch: scratch_bytes zeroed bytes per thread."""
    width = arg(args, _EMBED_WIDTH)
    row_bytes = arg(args, _ROW_BYTES)
    factor = farg(args, _EMBED_SCALE)
    scratch, names = arg(args, _SCRATCH) + tid * arg(args, _SCRATCH_BYTES), batch_word(args, arg(args, _ROWS_BY))
    first, end = share(batch_word(args, N_TOKENS), width, tid, nth)
    for row in range(first, end):
        out = arg(args, _OUT) + 4 * row * width
        source = arg(args, _WEIGHT) + row_bytes * types.int64(load(types.int32, names, 4 * row))
        decode(source, row_bytes, out, 4 * width, 1, width, scratch)
        if factor != 1.0:
            scale_row(out, out, width, factor)


@helper
def _decode_f32(data, stride, out, out_stride, rows, n, scratch):
    for row in range(rows):
        copy(out + row * out_stride, data + row * stride, n)


@cache
def embed(t: TensorType) -> TapeOp:
    """Return the operation that looks up rows of type ``t``; TypeNotSupported if it has no decoder."""
    name = f"embed_{t.name.lower()}"
    if t.name == "F32":
        return _embed.bind(name, decode=_decode_f32)
    return _embed.bind(name, decode=dequantize.rows_decoder(t, helper))


def embed_scratch_bytes(t: TensorType, width: int) -> int:
    """Return the scratch bytes of ``embed`` per thread: one unit, unless rows are whole units."""
    return t.row_bytes(UNIT) + 4 * UNIT if width % UNIT and t.block > 1 else 0

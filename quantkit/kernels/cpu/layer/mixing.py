"""Rows by their own statistics, and groups of columns mixed: what Gemma 3n and DeepSeek 4 have around their layers.

    exceed       batch out x width rows_of per factor:f          max(x - mean - factor * deviation, 0) of each row
    to_length    batch out x like width rows_of per group        every group of columns made as long as like's row
    mix          batch out x weights base width group n offset:f rows_of per
                 out group j = base group j + sum over i of (weights[j n + i] + offset) * x group i

    stream_weights  batch before after across x scale base rounds eps:f rows_of per
                 how four streams count (ops.StreamWeights): before and after [4], across [16] of x [24] a row

Sums of squares are those of norms.py. Values have one row a token (per 1); out of exceed and to_length may be x.
"""

from __future__ import annotations

import math

from numba.core import types

from quantkit.kernels.cpu.core.functions import exp, load_part, sigmoid, store_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32x16, load, make_shuffle, splat, store, vmax
from quantkit.kernels.cpu.core.tape import arg, batch_word, farg, operation
from quantkit.kernels.cpu.layer.elementwise import share
from quantkit.kernels.cpu.layer.norms import sum_of, sum_of_squares

_OUT, _X = 1, 2
_WIDTH, _ROWS_OF, _PER, _FACTOR = range(3, 7)


@operation("batch out x width rows_of per factor:f")
def exceed(args, tid, nth):
    """out = max(x - mean - factor * deviation, 0); a unit of work is a row."""
    n = arg(args, _WIDTH)
    first, end = share(batch_word(args, arg(args, _ROWS_OF)), n, tid, nth)
    for row in range(first, end):
        x, out = arg(args, _X) + 4 * n * row, arg(args, _OUT) + 4 * n * row
        mean = types.float32(sum_of(x, n) / n)
        deviation = math.sqrt(types.float32(sum_of_squares(x, n, mean) / (n - 1)))
        cut = mean + deviation * farg(args, _FACTOR)
        for i in range(0, n - 15, 16):
            store(out, 4 * i, vmax(0.0, load(f32x16, x, 4 * i) - cut))
        rest = n % 16
        if rest:
            at = 4 * (n - rest)
            store_part(out, at, vmax(0.0, load_part(f32x16, x, at, rest) - cut), rest)


@inline
def _length(x, n):
    return math.sqrt(types.float32(sum_of_squares(x, n, types.float32(0.0))))


_LIKE, _L_WIDTH, _L_ROWS_OF, _L_PER, _L_GROUP = range(3, 8)


@operation("batch out x like width rows_of per group")
def to_length(args, tid, nth):
    """out = x * length of like / length of x; a unit of work is a group of columns."""
    n = arg(args, _L_GROUP)
    groups = arg(args, _L_WIDTH) // n
    first, end = share(batch_word(args, arg(args, _L_ROWS_OF)) * groups, n, tid, nth)
    for unit in range(first, end):
        x, out = arg(args, _X) + 4 * n * unit, arg(args, _OUT) + 4 * n * unit
        wanted, own = _length(arg(args, _LIKE) + 4 * n * (unit // groups), n), _length(x, n)
        for i in range(0, n - 15, 16):
            store(out, 4 * i, load(f32x16, x, 4 * i) * wanted / own)
        rest = n % 16
        if rest:
            at = 4 * (n - rest)
            store_part(out, at, load_part(f32x16, x, at, rest) * wanted / own, rest)


_WEIGHTS, _BASE, _M_WIDTH, _GROUP, _N, _OFFSET, _M_ROWS_OF = range(3, 10)


@inline
def _mixed(x, weights, n, stride, offset, at, count):
    """Return the sum of 16 columns of n groups; count: how many of them there are."""
    total = splat(f32x16, 0.0)
    for i in range(n):
        weight = load(types.float32, weights, 4 * i) + offset
        total += load_part(f32x16, x, i * stride + at, count) * weight
    return total


@operation("batch out x weights base width group n offset:f rows_of per")
def mix(args, tid, nth):
    """out group j = base group j + the weighted sum of x's; a unit of work is a group of columns of out."""
    group, n, offset = arg(args, _GROUP), arg(args, _N), farg(args, _OFFSET)
    groups = arg(args, _M_WIDTH) // group
    first, end = share(batch_word(args, arg(args, _M_ROWS_OF)) * groups, group, tid, nth)
    for unit in range(first, end):
        x, weights = arg(args, _X) + 4 * group * n * (unit // groups), arg(args, _WEIGHTS) + 4 * n * unit
        base, out = arg(args, _BASE) + 4 * group * unit, arg(args, _OUT) + 4 * group * unit
        for i in range(0, group, 16):
            count = min(16, group - i)
            total = _mixed(x, weights, n, 4 * group, offset, 4 * i, count)
            store_part(out, 4 * i, load_part(f32x16, base, 4 * i, count) + total, count)


# ---------------------------------------------------------------- how streams count

_BEFORE, _AFTER, _ACROSS, _S_X, _SCALE, _S_BASE, _ROUNDS, _EPS, _S_ROWS_OF = range(1, 10)

#: Of a matrix of 4 by 4: neighbours in a row, pairs of them; rows below each other, pairs of them; the transposed one.
_beside = make_shuffle([i ^ 1 for i in range(16)], "streams_beside")
_across = make_shuffle([i ^ 2 for i in range(16)], "streams_across")
_below = make_shuffle([i ^ 4 for i in range(16)], "streams_below")
_far_below = make_shuffle([i ^ 8 for i in range(16)], "streams_far_below")
_transposed = make_shuffle([i % 4 * 4 + i // 4 for i in range(16)], "streams_transposed")


@inline
def _sum_of_rows(c):
    pairs = c + _beside(c)
    return pairs + _across(pairs)


@inline
def _sum_of_columns(c):
    pairs = c + _below(c)
    return pairs + _far_below(pairs)


@operation("batch before after across x scale base rounds eps:f rows_of per")
def stream_weights(args, tid, nth):
    """Say how four streams count; a unit of work is a row, its matrix one vector."""
    scale, base, eps = arg(args, _SCALE), arg(args, _S_BASE), farg(args, _EPS)
    by_before, by_after = load(types.float32, scale, 0), load(types.float32, scale, 4)
    first, end = share(batch_word(args, arg(args, _S_ROWS_OF)), 1024, tid, nth)
    for row in range(first, end):
        x = arg(args, _S_X) + 96 * row
        before = load_part(f32x16, x, 0, 4) * by_before + load_part(f32x16, base, 0, 4)
        store_part(arg(args, _BEFORE), 16 * row, sigmoid(before) + eps, 4)
        after = load_part(f32x16, x, 16, 4) * by_after + load_part(f32x16, base, 16, 4)
        store_part(arg(args, _AFTER), 16 * row, sigmoid(after) * 2.0, 4)
        c = load(f32x16, x, 32) * load(types.float32, scale, 8) + load(f32x16, base, 32)
        largest = vmax(c, _beside(c))
        c = exp(c - vmax(largest, _across(largest)))
        c = c / _sum_of_rows(c) + eps
        c = c / (_sum_of_columns(c) + eps)
        for _ in range(arg(args, _ROUNDS) - 1):
            c = c / (_sum_of_rows(c) + eps)
            c = c / (_sum_of_columns(c) + eps)
        store(arg(args, _ACROSS), 64 * row, _transposed(c))

"""Rows by their own statistics, and groups of columns mixed, as around the layers of Gemma 3n and RWKV.

    exceed       batch out x width rows_of per factor:f          max(x - mean - factor * deviation, 0) of each row
    to_length    batch out x like width rows_of per group        every group of columns made as long as like's row
    mix          batch out x weights base width group n offset:f rows_of per
                 out group j = base group j + sum over i of (weights[j n + i] + offset) * x group i
    lerp         batch out x to by weights width n rows_of per
                 out group j = x + (to - x) * (by group j + weights group j); n: columns of a group; by, weights: or 0
    bonus        batch out x r k v vector width head rows_of per
                 out = x + v times the sum over each head's columns of r k vector

Sums of squares are those of norms.py. Values have one row a token (per 1); out of exceed, to_length and bonus may be x.
"""

from __future__ import annotations

import math

from numba.core import types

from quantkit.kernels.cpu.core.functions import load_part, store_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32x16, hsum, load, muladd, splat, store, vmax
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
        threshold = mean + deviation * farg(args, _FACTOR)
        for i in range(0, n - 15, 16):
            store(out, 4 * i, vmax(0.0, load(f32x16, x, 4 * i) - threshold))
        n_tail = n % 16
        if n_tail:
            offset = 4 * (n - n_tail)
            store_part(out, offset, vmax(0.0, load_part(f32x16, x, offset, n_tail) - threshold), n_tail)


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
        target_length, length = _length(arg(args, _LIKE) + 4 * n * (unit // groups), n), _length(x, n)
        for i in range(0, n - 15, 16):
            store(out, 4 * i, load(f32x16, x, 4 * i) * target_length / length)
        n_tail = n % 16
        if n_tail:
            offset = 4 * (n - n_tail)
            store_part(out, offset, load_part(f32x16, x, offset, n_tail) * target_length / length, n_tail)


_WEIGHTS, _BASE, _M_WIDTH, _GROUP, _N, _OFFSET, _M_ROWS_OF = range(3, 10)


@inline
def _mix(x, weights, n, stride, offset, byte, count):
    """Return the sum of 16 columns of n groups; count: the number of columns that exist."""
    total = splat(f32x16, 0.0)
    for i in range(n):
        weight = load(types.float32, weights, 4 * i) + offset
        total += load_part(f32x16, x, i * stride + byte, count) * weight
    return total


@operation("batch out x weights base width group n offset:f rows_of per")
def mix(args, tid, nth):
    """out group j = base group j + the weighted sum of x's; a unit of work is a group of columns of out."""
    group = arg(args, _GROUP)
    n = arg(args, _N)
    offset = farg(args, _OFFSET)
    groups = arg(args, _M_WIDTH) // group
    first, end = share(batch_word(args, arg(args, _M_ROWS_OF)) * groups, group, tid, nth)
    for unit in range(first, end):
        x, weights = arg(args, _X) + 4 * group * n * (unit // groups), arg(args, _WEIGHTS) + 4 * n * unit
        base, out = arg(args, _BASE) + 4 * group * unit, arg(args, _OUT) + 4 * group * unit
        for i in range(0, group, 16):
            count = min(16, group - i)
            total = _mix(x, weights, n, 4 * group, offset, 4 * i, count)
            store_part(out, 4 * i, load_part(f32x16, base, 4 * i, count) + total, count)


_TO, _BY, _R_WEIGHTS, _R_WIDTH, _R_N, _R_ROWS_OF = range(3, 9)


@operation("batch out x to by weights width n rows_of per")
def lerp(args, tid, nth):
    """out group j = x + (to - x) * (by group j + weights group j); a unit of work is a group."""
    n, width = arg(args, _R_N), arg(args, _R_WIDTH)
    groups = width // n
    first, end = share(batch_word(args, arg(args, _R_ROWS_OF)) * groups, n, tid, nth)
    for unit in range(first, end):
        row = 4 * n * (unit // groups)
        x = arg(args, _X) + row
        target = arg(args, _TO) + row
        out = arg(args, _OUT) + 4 * n * unit
        factors, weights = arg(args, _BY), arg(args, _R_WEIGHTS)
        factors = factors + 4 * n * (unit % groups) if factors else factors
        weights = weights + 4 * n * unit if weights else weights
        for i in range(0, n, 16):
            count = min(16, n - i)
            factor = splat(f32x16, 0.0)
            if factors:
                factor = load_part(f32x16, factors, 4 * i, count)
            if weights:
                factor = factor + load_part(f32x16, weights, 4 * i, count)
            a = load_part(f32x16, x, 4 * i, count)
            store_part(out, 4 * i, a + (load_part(f32x16, target, 4 * i, count) - a) * factor, count)


_R, _K, _V, _VECTOR, _B_WIDTH, _B_HEAD, _B_ROWS_OF = range(3, 10)


@operation("batch out x r k v vector width head rows_of per")
def bonus(args, tid, nth):
    """out = x + v times the sum of r k vector; a unit of work is a head."""
    n = arg(args, _B_HEAD)
    heads = arg(args, _B_WIDTH) // n
    first, end = share(batch_word(args, arg(args, _B_ROWS_OF)) * heads, n, tid, nth)
    for unit in range(first, end):
        offset = 4 * n * unit
        r = arg(args, _R) + offset
        k = arg(args, _K) + offset
        v = arg(args, _V) + offset
        vector = arg(args, _VECTOR)
        vector = vector + 4 * n * (unit % heads)
        total = splat(f32x16, 0.0)
        for i in range(0, n, 16):
            count = min(16, n - i)
            product = load_part(f32x16, k, 4 * i, count) * load_part(f32x16, r, 4 * i, count)
            total = muladd(product, load_part(f32x16, vector, 4 * i, count), total)
        factor = hsum(total)
        x = arg(args, _X) + offset
        out = arg(args, _OUT) + offset
        for i in range(0, n, 16):
            count = min(16, n - i)
            y = load_part(f32x16, x, 4 * i, count)
            store_part(out, 4 * i, y + load_part(f32x16, v, 4 * i, count) * factor, count)

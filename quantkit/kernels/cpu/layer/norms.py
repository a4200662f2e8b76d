"""Normalization of each group of columns (a head, or the whole row).

    rms    y = x / sqrt(mean(x^2) + eps)
    layer  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)
    l2     y = x / sqrt(sum(x^2) + eps)

then y * weight + bias, where given. As in llama.cpp (b11434 ggml-cpu/ops.cpp), squares are f32 and their sum is
double. TapeOp norm(kind): batch out x width rows_of per group weight bias n_weight eps:f; weight and bias are
addresses of n_weight f32 (0: none), a multiple of group that divides width; they repeat along the row. out may be x.
"""

from __future__ import annotations

import math
from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.functions import load_part, store_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import convert, f32x8, f32x16, f64x8, hsum, load, splat, store
from quantkit.kernels.cpu.core.tape import TapeOp, arg, batch_word, farg, operation
from quantkit.kernels.cpu.layer.elementwise import share


@inline
def sum_of(x, n):
    """Return the sum of n floats, in double."""
    low, high = splat(f64x8, 0.0), splat(f64x8, 0.0)
    for i in range(0, n - 15, 16):
        low += convert(f64x8, load(f32x8, x, 4 * i))
        high += convert(f64x8, load(f32x8, x, 4 * i + 32))
    total = hsum(low + high)
    for i in range(n // 16 * 16, n):
        total += types.float64(load(types.float32, x, 4 * i))
    return total


@inline
def sum_of_squares(x, n, mean):
    """Return the sum of (x - mean)^2: differences and squares in f32, the sum in double."""
    low, high = splat(f64x8, 0.0), splat(f64x8, 0.0)
    for i in range(0, n - 15, 16):
        a, b = load(f32x8, x, 4 * i) - mean, load(f32x8, x, 4 * i + 32) - mean
        low += convert(f64x8, a * a)
        high += convert(f64x8, b * b)
    total = hsum(low + high)
    for i in range(n // 16 * 16, n):
        c = load(types.float32, x, 4 * i) - mean
        total += types.float64(c * c)
    return total


@inline
def _finish(out, x, n, mean, factor, weight, bias):
    """out = (x - mean) * factor * weight + bias"""
    for i in range(0, n - 15, 16):
        y = (load(f32x16, x, 4 * i) - mean) * factor
        if weight:
            y = y * load(f32x16, weight, 4 * i)
        if bias:
            y = y + load(f32x16, bias, 4 * i)
        store(out, 4 * i, y)
    n_tail = n % 16
    if n_tail:
        offset = 4 * (n - n_tail)
        y = (load_part(f32x16, x, offset, n_tail) - mean) * factor
        if weight:
            y = y * load_part(f32x16, weight, offset, n_tail)
        if bias:
            y = y + load_part(f32x16, bias, offset, n_tail)
        store_part(out, offset, y, n_tail)


@inline
def _rms(x, n, eps):
    mean_square = types.float32(sum_of_squares(x, n, types.float32(0.0)) / n)
    return types.float32(0.0), types.float32(1.0) / math.sqrt(mean_square + eps)


@inline
def _layer(x, n, eps):
    mean = types.float32(sum_of(x, n) / n)
    variance = types.float32(sum_of_squares(x, n, mean) / n)
    return mean, types.float32(1.0) / math.sqrt(variance + eps)


@inline
def _l2(x, n, eps):
    square = types.float32(sum_of_squares(x, n, types.float32(0.0)))
    return types.float32(0.0), types.float32(1.0) / math.sqrt(square + eps)


#: (x, n, eps) -> mean, factor; bound for each kind.
moments: Any = None

_OUT, _X, _WIDTH, _ROWS_OF, _PER, _GROUP, _WEIGHT, _BIAS, _N_WEIGHT, _EPS = range(1, 11)


@operation("batch out x width rows_of per group weight bias n_weight eps:f")
def _norm(args, tid, nth):
    """Normalize groups; a unit of work is a group."""
    group = arg(args, _GROUP)
    n_weight = arg(args, _N_WEIGHT)
    width = arg(args, _WIDTH)
    weight = arg(args, _WEIGHT)
    bias = arg(args, _BIAS)
    eps = farg(args, _EPS)
    units = batch_word(args, arg(args, _ROWS_OF)) * arg(args, _PER) * (width // group)
    first, end = share(units, group, tid, nth)
    for unit in range(first, end):
        x, out = arg(args, _X) + 4 * group * unit, arg(args, _OUT) + 4 * group * unit
        mean, factor = moments(x, group, eps)
        offset = 4 * (group * unit % n_weight) if n_weight else 0
        _finish(out, x, group, mean, factor, weight + offset if weight else 0, bias + offset if bias else 0)


KINDS = {"rms": _rms, "layer": _layer, "l2": _l2}


def norm(kind: str) -> TapeOp:
    """Return the operation of ops.Norm for ``rms``, ``layer`` or ``l2``."""
    return _norm.bind(kind, moments=KINDS[kind])

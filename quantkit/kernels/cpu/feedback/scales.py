"""Scales fitted to levels of a grid that are chosen, in the metric of the covariance.

A value is v = d * factor * level: a sub-block's factor, one of a codebook, moves its columns by d * level, a
super-block's d by factor * level. Along such a direction t the loss changes by -2 x t.g + x^2 t.H.t, g = H (w - v):
each is set, in turn, to where that is least, and g is kept up to date. Layouts and arguments are those of sweeps.py,
but all columns are in their own order, in which those of a sub-block are neighbours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import f16_to_f32, f32_to_f16, f32x16, load, muladd, splat, store
from quantkit.kernels.cpu.feedback.tiles import LINE, ROWS, multiply

F32 = npt.NDArray[np.float32]
F = np.float32


@inline
def _look(t: Any, h: Any, g: Any, begin: Any, end: Any, c: Any, slope: Any, curvature: Any) -> Any:
    """Set c = H t for a direction t of some columns, and its slope t.g and curvature t.c, float32 [ROWS]."""
    n = len(t)
    zero = splat(f32x16, F(0))
    for offset in range(0, LINE * n, 64):
        store(c, offset, zero)
    multiply(c, h, t, n, begin, end, 0, n)
    _dot(t, g, begin, end, slope)
    _dot(t, c, begin, end, curvature)


@inline
def _dot(t: Any, g: Any, begin: Any, end: Any, out: Any) -> Any:
    for half in range(0, LINE, 64):
        total = splat(f32x16, F(0))
        for offset in range(LINE * begin + half, LINE * end, LINE):
            total = muladd(load(f32x16, t, offset), load(f32x16, g, offset), total)
        store(out, half, total)


@inline
def _move(t: Any, c: Any, factors: Any, begin: Any, end: Any, v: Any, g: Any, n: Any) -> Any:
    """v += factors * t; g = H (w - v) -= factors * c."""
    for half in range(0, LINE, 64):
        step = load(f32x16, factors, half)
        minus_step = splat(f32x16, F(0)) - step
        for offset in range(LINE * begin + half, LINE * end, LINE):
            store(v, offset, muladd(load(f32x16, t, offset), step, load(f32x16, v, offset)))
        for offset in range(half, LINE * n, LINE):
            store(g, offset, muladd(load(f32x16, c, offset), minus_step, load(f32x16, g, offset)))


@inline
def _best_code(codes: Any, ascending: Any, code: Any, d: Any, slope: Any, curvature: Any) -> Any:
    """Return the place in ``ascending`` of the factor of least loss, from that of ``code`` on."""
    now = ascending[code]
    target = now + slope / (curvature * d)
    best = np.searchsorted(ascending, target)
    if best > 0 and (best == len(ascending) or target - ascending[best - 1] < ascending[best] - target):
        best -= 1
    return best


class Values(NamedTuple):
    """Values v of a tile, their gradient g = H (w - v), and scratch, float32 [n, ROWS]."""

    v: F32
    g: F32
    scratch: F32


@kernel
def fit_factors(h: F32, span: int, t: F32, d: F32, per_d: int, codes: Any, ascending: F32, values: Values) -> None:
    """Set the factor of every sub-block in turn.

    Args:
        span: columns of a sub-block.
        t: the value of each column for a factor of 1 and d = 1, the level; float32 [n, ROWS].
        d: of super-blocks, float32 [super-blocks, ROWS]; per_d: the sub-blocks of one.
        codes: the places of factors in ``ascending``, int32 [sub-blocks, ROWS]; set.
    """
    v, g, c = values
    slope = np.empty(ROWS, F)
    curvature = np.empty(ROWS, F)
    change = np.empty(ROWS, F)
    for a in range(len(t) // span):
        begin, end = a * span, a * span + span
        _look(t, h, g, begin, end, c, slope, curvature)
        for row in range(ROWS):
            change[row] = F(0)
            d_of_row = d[a // per_d, row]
            if d_of_row != F(0) and curvature[row] > F(0):
                code = codes[a, row]
                best = _best_code(codes, ascending, code, d_of_row, slope[row], curvature[row])
                change[row] = d_of_row * (ascending[best] - ascending[code])
                codes[a, row] = best
        _move(t, c, change, begin, end, v, g, len(t))


@kernel
def fit_super_scales(h: F32, span: int, t: F32, d: F32, half: bool, values: Values) -> None:
    """Set d of every super-block to the best value.

    Args:
        span: columns of a super-block.
        t: what d of 1 adds to each column: factor * level, float32 [n, ROWS].
        d: of super-blocks, float32 [super-blocks, ROWS]; set.
        half: d is a half float.
    """
    v, g, c = values
    slope = np.empty(ROWS, F)
    curvature = np.empty(ROWS, F)
    change = np.empty(ROWS, F)
    for a in range(len(t) // span):
        begin, end = a * span, a * span + span
        _look(t, h, g, begin, end, c, slope, curvature)
        for row in range(ROWS):
            x = slope[row] / curvature[row] if curvature[row] > F(0) else F(0)
            if half:
                x = f16_to_f32(f32_to_f16(d[a, row] + x)) - d[a, row]
            loss = x * x * curvature[row] - F(2) * (x * slope[row])
            change[row] = x if loss < F(0) else F(0)
            d[a, row] += change[row]
        _move(t, c, change, begin, end, v, g, len(t))

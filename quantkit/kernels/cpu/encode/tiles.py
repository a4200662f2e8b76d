"""Tiles: sixteen sub-blocks of 16 or 32 values, transposed to [values][16], a lane each.

So every lane adds in the reference's order. ``span`` is the number of values; xt and wt are tiles of values and of
weights.
"""

from __future__ import annotations

import numpy as np

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    f32x16,
    i32x16,
    load,
    make_constant,
    select,
    splat,
    store,
    transpose16,
    vabs,
    vsqrt,
)

F = np.float32

#: Bytes of 16 values of each sub-block.
TILE = 1024

#: 1 in the lanes of the first 8 sub-blocks.
first_half = make_constant(i32x16, [1] * 8 + [0] * 8, "tiles_first_half")


@inline
def load_tile(source, offset, span, target):
    """Transpose 16 sub-blocks, contiguous from byte ``offset``."""
    for part in range(span // 16):
        transpose16(source, offset + 64 * part, 4 * span, target, TILE * part)


@inline
def largest(xt, span):
    """Return the largest magnitude of each lane, and the first value with it."""
    amax = top = splat(f32x16, F(0))
    for j in range(span):
        x = load(f32x16, xt, 64 * j)
        larger = vabs(x) > amax
        amax, top = select(larger, vabs(x), amax), select(larger, x, top)
    return amax, top


@inline
def square_weights(xt, wt, span, bias):
    """Set the weights to ``bias`` and the squares of the values."""
    for j in range(span):
        x = load(f32x16, xt, 64 * j)
        store(wt, 64 * j, bias + x * x)


@inline
def magnitude_weights(xt, wt, span):
    """Set the weights to the magnitudes of the values."""
    for j in range(span):
        store(wt, 64 * j, vabs(load(f32x16, xt, 64 * j)))


@inline
def importance_weights(xt, wt, span, sigma2):
    """Turn importances into weights, in place; sigma2 is a multiple of the mean square of each lane's super-block."""
    for j in range(span):
        x = load(f32x16, xt, 64 * j)
        store(wt, 64 * j, load(f32x16, wt, 64 * j) * vsqrt(sigma2 + x * x))


@inline
def sum_weights(wt, span):
    """Return the sum of the weights of each lane."""
    total = splat(f32x16, F(0))
    for j in range(span):
        total = total + load(f32x16, wt, 64 * j)
    return total


@inline
def sums_of_squares(x, scratch, target):
    """Write the sum of squares of 16 super-blocks, each summed in order: one lane per super-block."""
    squares = splat(f32x16, F(0))
    for part in range(16):
        transpose16(x, 64 * part, 1024, scratch, 0)
        for j in range(16):
            v = load(f32x16, scratch, 64 * j)
            squares = squares + v * v
    store(target, 0, squares)


@inline
def inverse_or_zero(d):
    """Return 1 / d, 0 for 0."""
    return select(d != F(0), F(1) / d, F(0))

"""Sweeps over the columns of rows that choose levels: with error feedback, and by coordinate descent.

For a row w, its values v and the covariance H of its inputs, the loss is (w - v)^T H (w - v). With H = U D U^T, U unit
upper triangular, the loss is the sum over columns k of D_k (e_k + sum_{j<k} U_jk e_j)^2, e = w - v: so a column is
rounded to w_k + sum_{j<k} U_jk e_j (LDLQ: Chee et al. 2023, arXiv:2307.13304; the same as GPTQ: Frantar et al. 2022,
arXiv:2210.17323). ``error_feedback``, the inner loop of GPTQ, does that. ``descend`` then visits each column again and
rounds it so that the loss is minimal with all others fixed; it keeps the ``gradient`` H e up to date.

Columns are in the order in which they are visited. Common arguments: x, the targets, levels and v, the choice and its
values, float32 [n, ROWS]; u and h, packed (tiles.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import f32x16, load, muladd, round_even, select, splat, store, vmax, vmin
from quantkit.kernels.cpu.feedback.tiles import LINE, element, multiply

F32 = npt.NDArray[np.float32]
F = np.float32

#: Columns after which all later columns are updated.
BLOCK = 64


def codebook(levels: F32) -> F32:
    """Return levels as sweeps read them: the first, their distance, or 0 if distances differ, and their number.

    If distances differ, then for each level but the first: where it begins, half way from the one before, and its
    distance from that.
    """
    ascending = np.unique(levels)
    steps = np.diff(ascending)
    if len(set(steps)) == 1:
        return np.array([ascending[0], steps[0], len(ascending)], np.float32)
    ends = np.stack([(ascending[1:] + ascending[:-1]) / 2, steps], axis=1)
    return np.concatenate([[ascending[0], 0, len(ascending)], ends.ravel()]).astype(np.float32)


@inline
def _nearest(y: Any, codebook: Any) -> Any:
    """Return the level next to y."""
    first = splat(f32x16, codebook[0])
    step = codebook[1]
    count = int(codebook[2])
    if step > F(0):
        rank = round_even((y - first) * splat(f32x16, F(1) / step))
        rank = vmin(vmax(rank, splat(f32x16, F(0))), splat(f32x16, F(count - 1)))
        return muladd(rank, splat(f32x16, step), first)
    level = first
    for i in range(count - 1):
        above = y > splat(f32x16, codebook[3 + 2 * i])
        level = level + select(above, splat(f32x16, codebook[4 + 2 * i]), splat(f32x16, F(0)))
    return level


class Scaling(NamedTuple):
    """The levels that columns may have: v = scale * level - minimum.

    sub: the sub-block of each column, int32 [n]. scale, minimum, inverse: of sub-blocks, float32 [sub-blocks, ROWS];
    inverse is 1 / scale, or 0 for 0. codebook: the levels (``codebook``).
    """

    sub: Any
    scale: F32
    minimum: F32
    inverse: F32
    codebook: F32


@inline
def store_nearest(x: Any, offset: Any, levels: Any, v: Any, place: Any, scaling: Any, codebook: Any) -> Any:
    """Store the level next to x, and its value, and return that; scaling has scale, minimum and inverse."""
    subtrahend = load(f32x16, scaling.minimum, place)
    level = _nearest((x + subtrahend) * load(f32x16, scaling.inverse, place), codebook)
    store(levels, offset, level)
    value = load(f32x16, scaling.scale, place) * level - subtrahend
    store(v, offset, value)
    return value


@kernel
def error_feedback(columns: Any, x: F32, u: F32, scaling: Scaling, levels: F32, v: F32, e: F32, c: F32) -> None:
    """Choose the levels of a tile, column after column, in the order of ``columns``, int32 [n].

    Only e, which becomes x - v, and c, which becomes U^T e, are in that order: the loss is the sum of D_k c_k^2.
    """
    n, sub = len(columns), scaling.sub
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for k in range(begin, end):
            for half in range(0, LINE, 64):
                store(c, LINE * k + half, load(f32x16, x, LINE * columns[k] + half))
        multiply(c, u, e, n, 0, begin, begin, end)
        for k in range(begin, end):
            for half in range(0, LINE, 64):
                offset = LINE * k + half
                column_at = LINE * columns[k] + half
                place = LINE * sub[columns[k]] + half
                target = load(f32x16, c, offset)
                value = store_nearest(target, column_at, levels, v, place, scaling, scaling.codebook)
                store(c, offset, target - value)
                store(e, offset, load(f32x16, x, column_at) - value)
            for j in range(k + 1, end):
                factor = element(u, n, k, j)
                for half in range(0, LINE, 64):
                    column_at = LINE * j + half
                    store(c, column_at, muladd(load(f32x16, e, LINE * k + half), factor, load(f32x16, c, column_at)))


@kernel
def residuals(columns: Any, x: F32, v: F32, u: F32, e: F32, c: F32) -> None:
    """Set e = x - v and c = U^T e, both in the order of ``columns``, as ``error_feedback`` does."""
    n = len(columns)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for k in range(begin, end):
            for half in range(0, LINE, 64):
                offset, column_at = LINE * k + half, LINE * columns[k] + half
                store(e, offset, load(f32x16, x, column_at) - load(f32x16, v, column_at))
                store(c, offset, splat(f32x16, F(0)))
        multiply(c, u, e, n, 0, end, begin, end)


@kernel
def gradient(x: F32, v: F32, h: F32, g: F32, e: F32) -> None:
    """Set e = x - v and g = H e."""
    n = len(x)
    zero = splat(f32x16, F(0))
    for offset in range(0, LINE * n, 64):
        store(e, offset, load(f32x16, x, offset) - load(f32x16, v, offset))
        store(g, offset, zero)
    multiply(g, h, e, n, 0, n, 0, n)


@kernel
def descend(h: F32, per_diagonal: F32, scaling: Scaling, levels: F32, v: F32, g: F32, d: F32) -> None:
    """Choose every level again, to minimize the loss while the others stay, and keep g = H (x - v).

    per_diagonal: 1 / H_kk, float32 [n]. d: scratch, float32 [n, ROWS].
    """
    n, sub = len(v), scaling.sub
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for k in range(begin, end):
            for half in range(0, LINE, 64):
                offset, place = LINE * k + half, LINE * sub[k] + half
                old = load(f32x16, v, offset)
                best = muladd(load(f32x16, g, offset), splat(f32x16, per_diagonal[k]), old)
                change = old - store_nearest(best, offset, levels, v, place, scaling, scaling.codebook)
                store(d, offset, change)
                for j in range(begin, end):
                    target = LINE * j + half
                    store(g, target, muladd(change, element(h, n, k, j), load(f32x16, g, target)))
        multiply(g, h, d, n, begin, end, 0, begin)
        multiply(g, h, d, n, begin, end, end, n)


@kernel
def weighted_squares(c: F32, weights: F32) -> npt.NDArray[np.float64]:
    """Return the sum of weights c^2 over the columns, float64 [ROWS]."""
    total = np.zeros(c.shape[1], np.float64)
    for k in range(len(c)):
        weight = np.float64(weights[k])
        for row in range(c.shape[1]):
            total[row] += weight * (np.float64(c[k, row]) * np.float64(c[k, row]))
    return total


@kernel
def dot_columns(a: F32, b: F32) -> npt.NDArray[np.float64]:
    """Return the sum of a b over the columns, float64 [ROWS]."""
    total = np.zeros(a.shape[1], np.float64)
    for k in range(len(a)):
        for row in range(a.shape[1]):
            total[row] += np.float64(a[k, row]) * np.float64(b[k, row])
    return total

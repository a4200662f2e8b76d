"""Sweeps over the columns of rows that choose levels: with error feedback, and by coordinate descent.

For a row w, its values v and the covariance H of its inputs, the loss is (w - v)^T H (w - v). With H = U D U^T, U unit
upper triangular, the loss is the sum over columns k of D_k (e_k + sum_{j<k} U_jk e_j)^2, e = w - v: so a column is
rounded to w_k + sum_{j<k} U_jk e_j (LDLQ: Chee et al. 2023, arXiv:2307.13304; the same as GPTQ: Frantar et al. 2022,
arXiv:2210.17323). ``feed`` does that. ``descend`` then visits each column again, rounding it to what minimizes the loss
while all others stay; the ``gradient`` H e is kept up to date meanwhile.

Columns are in the order in which they are visited. Arguments that all have: x, the targets, levels and v, what was
chosen and its values, float32 [n, ROWS]; sub, the sub-block of each column, int32 [n]; scale, low, inverse, of
sub-blocks, float32 [sub-blocks, ROWS]: v = scale * level - low, inverse is 1 / scale, or 0 for 0; book, the levels
(``codebook``); u and h, packed (tiles.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import f32x16, load, muladd, round_even, select, splat, store, vmax, vmin
from quantkit.kernels.cpu.feedback.tiles import LINE, element, multiply

F32 = npt.NDArray[np.float32]
F = np.float32

#: Columns after which those behind them are brought up to date.
BLOCK = 64


def codebook(levels: F32) -> F32:
    """Return levels as sweeps read them: the first, their distance, or 0 if distances differ, and their number.

    If distances differ, then for each level but the first: where it begins, half way from the one before, and its
    distance from that.
    """
    ascending = np.unique(levels)
    apart = np.diff(ascending)
    if len(set(apart)) == 1:
        return np.array([ascending[0], apart[0], len(ascending)], np.float32)
    ends = np.stack([(ascending[1:] + ascending[:-1]) / 2, apart], axis=1)
    return np.concatenate([[ascending[0], 0, len(ascending)], ends.ravel()]).astype(np.float32)


@inline
def _nearest(y: Any, book: Any) -> Any:
    """Return the level next to y."""
    first, apart, count = splat(f32x16, book[0]), book[1], int(book[2])
    if apart > F(0):
        rank = round_even((y - first) * splat(f32x16, F(1) / apart))
        rank = vmin(vmax(rank, splat(f32x16, F(0))), splat(f32x16, F(count - 1)))
        return muladd(rank, splat(f32x16, apart), first)
    level = first
    for i in range(count - 1):
        above = y > splat(f32x16, book[3 + 2 * i])
        level = level + select(above, splat(f32x16, book[4 + 2 * i]), splat(f32x16, F(0)))
    return level


@inline
def choose(x: Any, at: Any, levels: Any, v: Any, place: Any, scale: Any, low: Any, inverse: Any, book: Any) -> Any:
    """Store the level next to x, and its value, and return that."""
    subtrahend = load(f32x16, low, place)
    level = _nearest((x + subtrahend) * load(f32x16, inverse, place), book)
    store(levels, at, level)
    value = load(f32x16, scale, place) * level - subtrahend
    store(v, at, value)
    return value


@kernel
def feed(columns: Any, x: F32, u: F32, sub: Any, scale: F32, low: F32, inverse: F32, book: F32, levels: F32, v: F32,
         e: F32, c: F32) -> None:  # fmt: skip
    """Choose the levels of a tile, column after column, in the order of ``columns``, int32 [n].

    Only e, which becomes x - v, and c, which becomes U^T e, are in that order: the loss is the sum of D_k c_k^2.
    """
    n = len(columns)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for k in range(begin, end):
            for half in range(0, LINE, 64):
                store(c, LINE * k + half, load(f32x16, x, LINE * columns[k] + half))
        multiply(c, u, e, n, 0, begin, begin, end)
        for k in range(begin, end):
            for half in range(0, LINE, 64):
                at, to, place = LINE * k + half, LINE * columns[k] + half, LINE * sub[columns[k]] + half
                wanted = load(f32x16, c, at)
                value = choose(wanted, to, levels, v, place, scale, low, inverse, book)
                store(c, at, wanted - value)
                store(e, at, load(f32x16, x, to) - value)
            for j in range(k + 1, end):
                factor = element(u, n, k, j)
                for half in range(0, LINE, 64):
                    to = LINE * j + half
                    store(c, to, muladd(load(f32x16, e, LINE * k + half), factor, load(f32x16, c, to)))


@kernel
def residuals(columns: Any, x: F32, v: F32, u: F32, e: F32, c: F32) -> None:
    """Set e = x - v and c = U^T e, both in the order of ``columns``, as ``feed`` does."""
    n = len(columns)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for k in range(begin, end):
            for half in range(0, LINE, 64):
                at, of = LINE * k + half, LINE * columns[k] + half
                store(e, at, load(f32x16, x, of) - load(f32x16, v, of))
                store(c, at, splat(f32x16, F(0)))
        multiply(c, u, e, n, 0, end, begin, end)


@kernel
def gradient(x: F32, v: F32, h: F32, g: F32, e: F32) -> None:
    """Set e = x - v and g = H e."""
    n = len(x)
    zero = splat(f32x16, F(0))
    for at in range(0, LINE * n, 64):
        store(e, at, load(f32x16, x, at) - load(f32x16, v, at))
        store(g, at, zero)
    multiply(g, h, e, n, 0, n, 0, n)


@kernel
def descend(h: F32, sub: Any, per_diagonal: F32, scale: F32, low: F32, inverse: F32, book: F32,
            levels: F32, v: F32, g: F32, d: F32) -> None:  # fmt: skip
    """Choose every level again, to minimize the loss while the others stay, and keep g = H (x - v).

    per_diagonal: 1 / H_kk, float32 [n]. d: scratch, float32 [n, ROWS].
    """
    n = len(sub)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for k in range(begin, end):
            for half in range(0, LINE, 64):
                at, place = LINE * k + half, LINE * sub[k] + half
                old = load(f32x16, v, at)
                best = muladd(load(f32x16, g, at), splat(f32x16, per_diagonal[k]), old)
                change = old - choose(best, at, levels, v, place, scale, low, inverse, book)
                store(d, at, change)
                for j in range(begin, end):
                    to = LINE * j + half
                    store(g, to, muladd(change, element(h, n, k, j), load(f32x16, g, to)))
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

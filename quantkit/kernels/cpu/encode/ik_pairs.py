"""Pairs of values from 32 of the 64 pairs of 3-bit levels.

Two neighbours are rounded to the nearest plain values. If that pair is not among the 32, the best of the 8 pairs next
to it is taken, by w (q - v)^2 of both. Of those 8 few can win in the cell of a pair: one is left out if another, before
it, is at least as near in both values everywhere in the cell. At most four are left.

The scale of 32 values: 12 candidates for 1 / d, tried as in ik_search.py. When it is a multiple of the row's, the ones
next to that are tried, too. Weights without importances are magnitudes.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq2_kl_impl.
"""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import (
    convert,
    f32x16,
    i32x16,
    load,
    make_table,
    select,
    splat,
    store,
    transpose16,
    u8x16,
)
from quantkit.kernels.cpu.encode.ik_levels import IQ3, find_bucket, limit
from quantkit.kernels.cpu.encode.ik_rows import CODES, LEVELS, SUMQ2, SUMQX, TERMS, TERMS2, W, X
from quantkit.kernels.cpu.encode.ik_scales import largest_scale, nearest_multiple
from quantkit.kernels.cpu.encode.ik_search import add_in_order, keep_better
from quantkit.kernels.cpu.encode.tiles import inverse_or_zero, largest
from quantkit.kernels.tables import table

F, I32 = np.float32, np.int32
LOWEST = F(IQ3.lowest)
PER_UNIT = IQ3.per_unit
REACH = F(80)
_level = IQ3.level[0]

# ---------------------------------------------------------------- which pairs may be nearest

_VALUES = table("kvalues_iq3nl").tolist()
_PAIRS = [tuple(pair) for pair in table("iq2kl_grid").tolist()]
_EDGES = [-1e9, *((a + b) / 2 for a, b in pairwise(_VALUES)), 1e9]


def _is_as_near(m: int, n: int, cell: tuple[int, ...]) -> bool:
    """Return whether pair m is at least as near as pair n in both values, everywhere in the cell of two levels."""
    corners = [(a, _EDGES[level + end]) for a, level in enumerate(cell) for end in (0, 1)]
    return all(abs(_PAIRS[m][a] - edge) <= abs(_PAIRS[n][a] - edge) for a, edge in corners)


def _candidates(cell: tuple[int, ...]) -> list[int]:
    """Return the pairs that may be nearest in a cell, in the reference's order; four, the last one repeated."""
    center = tuple(_VALUES[level] for level in cell)
    distance = [sum((a - b) ** 2 for a, b in zip(center, pair, strict=True)) for pair in _PAIRS]
    nearest = sorted(range(32), key=lambda n: (distance[n], n))[: 1 if 0 in distance else 8]
    candidates: list[int] = []
    for n in nearest:
        if not any(_is_as_near(m, n, cell) for m in candidates):
            candidates.append(n)
    return candidates + [candidates[-1]] * (4 - len(candidates))


_cell_candidates = [_candidates(cell) for cell in product(range(8), range(8))]
_index0, _index1, _index2, _index3 = (
    make_table([f[i] for f in _cell_candidates], f"ik_pairs_index{i}") for i in range(4)
)
_first0, _first1, _first2, _first3 = (
    make_table([_PAIRS[f[i]][0] for f in _cell_candidates], f"ik_pairs_first{i}") for i in range(4)
)
_second0, _second1, _second2, _second3 = (
    make_table([_PAIRS[f[i]][1] for f in _cell_candidates], f"ik_pairs_second{i}") for i in range(4)
)

# ---------------------------------------------------------------- rounding


@inline
def _distance(v, w, first, second):
    a, b = first - v[0], second - v[1]
    return w[0] * a * a + w[1] * b * b


@inline
def _cell(v, anywhere):
    """Return 8 * level of v[0] + level of v[1]."""
    a, b = (limit(v[0], REACH), limit(v[1], REACH)) if anywhere else v
    level0, level1 = _level(a, find_bucket(a, PER_UNIT))[0], _level(b, find_bucket(b, PER_UNIT))[0]
    return convert(i32x16, F(8) * level0 + level1)


@inline
def _nearest_pair(v, w, anywhere):
    """Return the index of the best pair for v with weights w, and its values, as f32; anywhere: any v will do."""
    cell = _cell(v, anywhere)
    index = _index0(cell)
    q0 = _first0(cell)
    q1 = _second0(cell)
    least = _distance(v, w, q0, q1)
    other0, other1 = _first1(cell), _second1(cell)
    distance = _distance(v, w, other0, other1)
    less = distance < least
    least, index = select(less, distance, least), select(less, _index1(cell), index)
    q0, q1 = select(less, other0, q0), select(less, other1, q1)
    other0, other1 = _first2(cell), _second2(cell)
    distance = _distance(v, w, other0, other1)
    less = distance < least
    least, index = select(less, distance, least), select(less, _index2(cell), index)
    q0, q1 = select(less, other0, q0), select(less, other1, q1)
    other0, other1 = _first3(cell), _second3(cell)
    less = _distance(v, w, other0, other1) < least
    return select(less, _index3(cell), index), select(less, other0, q0), select(less, other1, q1)


@inline
def _load_pair(tile, j):
    return load(f32x16, tile, 128 * j), load(f32x16, tile, 128 * j + 64)


# ---------------------------------------------------------------- the search for 16 scales


@helper
def _rate(xt, wt, inverse):
    """Return sum(w q x) and sum(w q q) for the pairs of values that x * inverse becomes."""
    qx = q2 = splat(f32x16, F(0))
    for j in range(16):
        x, w = _load_pair(xt, j), _load_pair(wt, j)
        _, q, p = _nearest_pair((inverse * x[0], inverse * x[1]), w, False)
        wq, wp = w[0] * q, w[1] * p
        qx, q2 = qx + (wq * x[0] + wp * x[1]), q2 + (wq * q + wp * p)
    return qx, q2


@helper
def search_pairs(xt, wt, scales, shifts):
    """Write the scales of 16 sub-blocks, 0 where all |x| < 1e-16."""
    amax, top = largest(xt, 32)
    inverse, none = F(1) / (top / -LOWEST), splat(f32x16, F(0))
    qx, q2 = _rate(xt, wt, inverse)
    d = qx / q2
    minus_qx, minus_q2 = _rate(xt, wt, -inverse)
    best, d, none = keep_better(d * qx, d, none, minus_qx, minus_q2, 0)
    for itry in range(-5, 6):
        inverse = F(itry + LOWEST) / top
        qx, q2 = _rate(xt, wt, inverse)
        minus_qx, minus_q2 = _rate(xt, wt, -inverse)
        best, d, none = keep_better(best, d, none, qx, q2, 0)
        best, d, none = keep_better(best, d, none, minus_qx, minus_q2, 0)
    store(scales, 0, select(amax < F(1e-16), F(0), d))
    store(shifts, 0, none)


# ---------------------------------------------------------------- a batch of a row


@inline
def scale_6_bit(scales, sums, count):
    """Return d and its inverse: the largest scale becomes -32."""
    d = F(0) - largest_scale(scales, count) / F(32)
    return d, F(1) / d


@helper
def _error(s, d):
    """Return the sum of w (d q - x)^2 for the pairs of values that x / d becomes."""
    inverse, total = inverse_or_zero(d), splat(f32x16, F(0))
    for j in range(16):
        x, w = _load_pair(s + X, j), _load_pair(s + W, j)
        _, q, p = _nearest_pair((inverse * x[0], inverse * x[1]), w, True)
        a, b = d * q - x[0], d * p - x[1]
        total = total + (w[0] * a * a + w[1] * b * b)
    return total


@inline
def _best_multiple(s, d, guess):
    """Return the multiple of d with the least error: ``guess``, or one less or more; of equals the lowest."""
    best, least = guess, splat(f32x16, F(3.4028234663852886e38))
    for step in range(-1, 2):
        multiple = guess + I32(step)
        error = _error(s, d * convert(f32x16, multiple))
        less = (error < least) & (multiple >= I32(-32)) & (multiple <= I32(31))
        best, least = select(less, multiple, best), select(less, error, least)
    return best


@inline
def _store_levels(s, d, multiple):
    """Round X to pairs, write their indices to LEVELS, 16 of a sub-block, and terms of the sums that fit d."""
    factor = convert(f32x16, multiple)
    inverse = inverse_or_zero(d * factor)
    for j in range(16):
        x, w = _load_pair(s + X, j), _load_pair(s + W, j)
        index, q, p = _nearest_pair((inverse * x[0], inverse * x[1]), w, True)
        q, p = q * factor, p * factor
        wq, wp = w[0] * q, w[1] * p
        store(s, TERMS + 64 * j, wq * x[0] + wp * x[1])
        store(s, TERMS2 + 64 * j, wq * q + wp * p)
        store(s, X + 64 * j, select(multiple == I32(0), I32(0), convert(i32x16, index)))
    transpose16(s, X, 64, s, X)
    for i in range(16):
        store(s, LEVELS + 16 * i, convert(u8x16, load(i32x16, s, X + 64 * i)))


@inline
def _pack(s, h, out):
    """Store the indices of super-block h: u8 qs[64], of low nibbles, and u8 qh[16], of high bits."""
    high = splat(u8x16, np.uint8(0))
    for ib in range(8):
        high = high | (load(u8x16, s, LEVELS + 128 * h + 16 * ib) >> np.uint8(4)) << np.uint8(ib)
    for k in range(4):
        offset = LEVELS + 128 * h + 32 * k
        low, upper = load(u8x16, s, offset) & np.uint8(15), load(u8x16, s, offset + 16) << np.uint8(4)
        store(out, 16 * k, low | upper)
    store(out, 64, high)


@inline
def _store_multiples(s, multiple, h, out):
    """Store 8 scales: u16 of 2 high bits each, u8 of the nibbles of scales ib and ib + 4."""
    store(s, CODES, multiple + I32(32))
    high, low = 0, 0
    for ib in range(8):
        code = load(types.int32, s, CODES + 32 * h + 4 * ib)
        high |= (code >> 4) << (2 * ib)
        low |= (code & 15) << (8 * (ib & 3) + (ib & 4))
    store(out, 0, np.uint16(high))
    store(out, 2, np.uint32(low))


@helper
def store_pairs(s, scale, shifted, d, inverse, count, out):
    """Encode ``count`` sub-blocks, 8 or 16, of X with their weights W, scales and row scale d to blocks at ``out``."""
    multiple = _best_multiple(s, d, nearest_multiple(inverse * scale, -32, 31))
    _store_levels(s, d, multiple)
    store(s, SUMQX, add_in_order(load(types.float32, s, SUMQX), s + TERMS, 16, count))
    store(s, SUMQ2, add_in_order(load(types.float32, s, SUMQ2), s + TERMS2, 16, count))
    for h in range(count // 8):
        _store_multiples(s, multiple, h, out + 86 * h)
        _pack(s, h, out + 86 * h + 6)

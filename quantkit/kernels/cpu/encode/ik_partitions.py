"""A search for scales by partitions: every way to give four values to 16 or 32 sorted ones.

Sorted, the values of a sub-block fall into four runs, one for each of the four levels, upwards or (d < 0) downwards.
All partitions are tried with plain and shifted values: 816 of 16 values; of 32 values, where the first run has at most
23 and the last one at most 24, 5744. Sums over runs are differences of sums from the start. A partition is rated by
sum(w q x)^2 / sum(w q q); the best has the scale sum(w q x) / sum(w q q). A lane is a sub-block.

Most need not be tried. With one scale for the first two runs and another for the last two, both only get
better: a partition is rated at most as high as its halves together (Cauchy and Schwarz). Two first runs are passed
over if they and the best two last ones that can follow are below what is reached already, in all lanes. The result is
that of trying all.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq2_k_impl, quantize_row_iq2_ks_impl.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import helper, inline, specialize
from quantkit.kernels.cpu.core.simd import any_lane, f32x16, load, select, splat, stack_bytes, store, vabs, vmax
from quantkit.kernels.cpu.encode.ik_levels import IQ2
from quantkit.kernels.cpu.encode.ik_search import keep_better
from quantkit.kernels.tables import table

F, I32 = np.float32, np.int32
_PLAIN = tuple(float(v) for v in table("kvalues_iq2nl"))
_SHIFTED = tuple(v + 5 for v in _PLAIN)
#: The values of runs, and whether they are shifted, in the reference's order.
_RUNS = (_PLAIN, _SHIFTED, _PLAIN[::-1], _SHIFTED[::-1])

# Offsets: sorted values and their weights; sums of w x and of w before each; then per value four vectors, upper bounds
# of what the last two runs add to a rating if the first of them begins there, and eight vectors, the terms of the last
# run.
_X = 0
_W = 2048
_SUMX = 4096
_SUMW = 4096 + 33 * 64
_BOUNDS, _LAST = 4096 + 66 * 64, 4096 + 66 * 64 + 32 * 256
_BYTES = _LAST + 32 * 512

#: Tolerance of bounds against rounding, as a share of sum(w x x). Limits below and above which squares of sums may lose
#: bits or overflow. Limit of the largest |x| over sum(w x x) above which products with small weights may do so.
_SLACK = F(1e-5)
_LEAST = F(1e-25)
_MOST = F(1e33)
_FURTHEST = F(1e14)

#: Values of a sub-block, the end of first runs, the minimum start of last runs.
span = end_first = start_last = 0


def _sort(s):
    """Sort each lane by value, the weights along: adjacent pairs are swapped if out of order, so it is stable."""
    for turn in range(span):
        for i in range(turn % 2, span - 1, 2):
            offset = 64 * i
            x0, x1 = load(f32x16, s, _X + offset), load(f32x16, s, _X + offset + 64)
            w0, w1 = load(f32x16, s, _W + offset), load(f32x16, s, _W + offset + 64)
            swap = x0 > x1
            store(s, _X + offset, select(swap, x1, x0))
            store(s, _X + offset + 64, select(swap, x0, x1))
            store(s, _W + offset, select(swap, w1, w0))
            store(s, _W + offset + 64, select(swap, w0, w1))


def _sum_up(s):
    """Write the sums of w x and w before each value, and after the last; return sum(w x x) and the largest |x|."""
    sumx = sumw = sumx2 = amax = splat(f32x16, F(0))
    for i in range(span):
        store(s, _SUMX + 64 * i, sumx)
        store(s, _SUMW + 64 * i, sumw)
        x, w = load(f32x16, s, _X + 64 * i), load(f32x16, s, _W + 64 * i)
        sumx = sumx + w * x
        sumw = sumw + w
        sumx2 = sumx2 + w * x * x
        amax = vmax(amax, vabs(x))
    store(s, _SUMX + 64 * span, sumx)
    store(s, _SUMW + 64 * span, sumw)
    return sumx2, amax


@inline
def _run(s, i, j):
    """Return the sums of w x and w over values i .. j - 1."""
    wx = load(f32x16, s, _SUMX + 64 * j) - load(f32x16, s, _SUMX + 64 * i)
    return wx, load(f32x16, s, _SUMW + 64 * j) - load(f32x16, s, _SUMW + 64 * i)


@inline
def _terms(s, i, j, level, down):
    """Return the terms of values i .. j - 1 in sum(w q x), twice, and in sum(w q q), for plain and shifted values."""
    wx, w = _run(s, i, j)
    a, b = F(_RUNS[2 * down][level]), F(_RUNS[2 * down + 1][level])
    return wx * a, wx * b, w * a * a, w * b * b


@inline
def _add_terms(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@inline
def _load4(s, offset):
    return (
        load(f32x16, s, offset),
        load(f32x16, s, offset + 64),
        load(f32x16, s, offset + 128),
        load(f32x16, s, offset + 192),
    )


@inline
def _rating(qx, q2):
    return select(q2 > F(0), (qx / q2) * qx, select(qx != F(0), splat(f32x16, F(np.inf)), F(0)))


def _store_last(s):
    """Write the terms of each run that ends with the last value."""
    for i in range(span):
        for down in range(2):
            terms, offset = _terms(s, i, span, 3, down), _LAST + 512 * i + 256 * down
            store(s, offset, terms[0])
            store(s, offset + 64, terms[1])
            store(s, offset + 128, terms[2])
            store(s, offset + 192, terms[3])


def _store_bounds(s):
    """Write the most that the last two runs, from each value on, add to a rating."""
    for i in range(span):
        for down in range(2):
            plain = shifted = splat(f32x16, F(0))
            for j in range(max(i, start_last), span):
                terms = _add_terms(_terms(s, i, j, 2, down), _load4(s, _LAST + 512 * j + 256 * down))
                plain, shifted = vmax(plain, _rating(terms[0], terms[2])), vmax(shifted, _rating(terms[1], terms[3]))
            store(s, _BOUNDS + 256 * i + 128 * down, plain)
            store(s, _BOUNDS + 256 * i + 128 * down + 64, shifted)


@inline
def _keep(s, two, i2, i3, down, best, d, shifted):
    """Keep the scale of a partition with the terms ``two`` of its first two runs in lanes where it is rated better."""
    terms = _add_terms(_add_terms(two, _terms(s, i2, i3, 2, down)), _load4(s, _LAST + 512 * i3 + 256 * down))
    if any_lane((terms[0] * terms[0] > best * terms[2]) | (terms[1] * terms[1] > best * terms[3])):
        best, d, shifted = keep_better(best, d, shifted, terms[0], terms[2], 0)
        best, d, shifted = keep_better(best, d, shifted, terms[1], terms[3], 1)
    return best, d, shifted


round_any: Any = None


def _fit(s, d, shifted, best):
    """Return the scale fitted to the levels nearest to x / d, and the better of its rating and ``best``.

    Levels that no partition gives, since runs have bounds, are not rated.
    """
    zero = splat(f32x16, F(0))
    inverse = F(1) / d
    is_shifted = shifted > F(0)
    qx = zero
    q2 = zero
    lowest = zero
    highest = zero
    for i in range(span):
        x, w = load(f32x16, s, _X + 64 * i), load(f32x16, s, _W + 64 * i)
        level, q = round_any(inverse * x, is_shifted)
        qx, q2 = qx + w * q * x, q2 + w * q * q
        lowest = lowest + select(level == I32(0), splat(f32x16, F(1)), F(0))
        highest = highest + select(level == I32(3), splat(f32x16, F(1)), F(0))
    up = d > F(0)
    first, last = select(up, lowest, highest), select(up, highest, lowest)
    allowed = (first < F(end_first)) & (last > F(0)) & (last <= F(span - start_last))
    ratio = qx / q2
    better = allowed & (q2 > F(0)) & (ratio * qx > best)
    return select(q2 > F(0), ratio, d), select(better, ratio * qx, best)


fit: Any = None


def _rate_likely(s):
    """Return the rating of a likely partition: the best of a few, fitted alternately to levels and scale."""
    best = d = shifted = splat(f32x16, F(0))
    n = span // 16
    for i1 in range(n, 5 * n, 2 * n):
        for i2 in range(4 * n, 9 * n, 2 * n):
            for down in range(2):
                two = _add_terms(_terms(s, 0, i1, 0, down), _terms(s, i1, i2, 1, down))
                for i3 in range(10 * n, 15 * n, 2 * n):
                    best, d, shifted = _keep(s, two, i2, i3, down, best, d, shifted)
    for kind in range(2):
        scale = d
        for _ in range(2):
            scale, best = fit(s, scale, splat(f32x16, F(kind)), best)
    return best


@inline
def _may_exceed(s, two, i2, down, threshold):
    """Return whether two first runs, with any two last ones, can exceed the bound in some lane; NaN can.

    No quotient is taken: qx * qx <= left * q2. Where these lose bits below what floats hold, q2 is so small that its
    runs' whole rating, at most some 1e4 q2 amax^2, is less than the slack (``_threshold``).
    """
    offset = _BOUNDS + 256 * i2 + 128 * down
    left, left_shifted = threshold - load(f32x16, s, offset), threshold - load(f32x16, s, offset + 64)
    plain = (two[0] * two[0] <= left * two[2]) & (left >= F(0))
    return any_lane(~(plain & (two[1] * two[1] <= left_shifted * two[3]) & (left_shifted >= F(0))))


sort: Any = None
sum_up: Any = None
store_last: Any = None
store_bounds: Any = None
reached: Any = None
needed_by: Any = None


def _threshold(s, sumx2, amax):
    """Return the number that a bound must exceed: +inf where x is almost 0, -1 where sums are too small or large."""
    rating, sumw = reached(s), load(f32x16, s, _SUMW + 64 * span)
    is_exact = (rating * sumw > _LEAST) & (sumx2 * sumw < _MOST) & (amax < _FURTHEST * sumx2)
    return select(amax < F(1e-16), splat(f32x16, F(np.inf)), select(is_exact, rating - _SLACK * sumx2, F(-1)))


def _search(xt, wt, scales, shifts):
    """Write the scales of 16 sub-blocks, 0 where all |x| < 1e-16, and 1 where values are shifted, else 0, as f32."""
    s = stack_bytes(_BYTES)
    for offset in range(0, 64 * span, 64):
        store(s, _X + offset, load(f32x16, xt, offset))
        store(s, _W + offset, load(f32x16, wt, offset))
    sort(s)
    sumx2, amax = sum_up(s)
    store_last(s)
    store_bounds(s)
    dead = amax < F(1e-16)
    threshold = needed_by(s, sumx2, amax)
    best = d = shifted = splat(f32x16, F(0))
    for i1 in range(end_first):
        first_up, first_down = _terms(s, 0, i1, 0, 0), _terms(s, 0, i1, 0, 1)
        for i2 in range(i1, span):
            two_up = _add_terms(first_up, _terms(s, i1, i2, 1, 0))
            two_down = _add_terms(first_down, _terms(s, i1, i2, 1, 1))
            up, down = _may_exceed(s, two_up, i2, 0, threshold), _may_exceed(s, two_down, i2, 1, threshold)
            if not (up | down):
                continue
            for i3 in range(max(i2, start_last), span):
                if up:
                    best, d, shifted = _keep(s, two_up, i2, i3, 0, best, d, shifted)
                if down:
                    best, d, shifted = _keep(s, two_down, i2, i3, 1, best, d, shifted)
    store(scales, 0, select(dead, F(0), d))
    store(shifts, 0, select(dead, F(0), shifted))


def _make(values: int, end_first: int, start_last: int) -> Any:
    runs = {"span": values, "end_first": end_first, "start_last": start_last}
    functions = {name: specialize(f, str(values), **runs) for name, f in _FUNCTIONS.items()}
    fit = specialize(_fit, str(values), **runs, round_any=IQ2.round_any)
    reached = specialize(_rate_likely, str(values), span=values, fit=fit)
    threshold = specialize(_threshold, str(values), span=values, reached=reached)
    return specialize(_search, str(values), helper, **runs, **functions, needed_by=threshold)


_FUNCTIONS = {
    "sort": _sort,
    "sum_up": _sum_up,
    "store_last": _store_last,
    "store_bounds": _store_bounds,
}

#: search(xt, wt, scales, shifted) of sub-blocks of 16 and of 32 values: see ``_search``.
search_16, search_32 = _make(16, 16, 0), _make(32, 24, 8)

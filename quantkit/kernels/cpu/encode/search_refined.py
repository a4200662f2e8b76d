"""ik_llama.cpp's scale searches for types that both trees have: more candidates, then one level after the other moves.

As in search.py, every lane is a sub-block. What the searches end with is no rounding of x any more, so they leave the
levels behind.

| search              | fits                | used for                         |
|---------------------|---------------------|----------------------------------|
| fit_signed_refined  | x ~ scale * l       | Q6_K, Q3_K, Q4_0, Q5_0           |

Source: ik_llama.cpp 8337e4cd3 ggml-quants.c, make_qx_quants.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import any_lane, load, splat, store
from quantkit.kernels.cpu.core.simd import select as choose
from quantkit.kernels.cpu.encode.search import (
    EPSILON,
    STEP,
    WIDE,
    WIDE_INT,
    F,
    largest_value,
    signed_level,
    signed_sums,
    signed_sums3,
)

# ---------------------------------------------------------------- x ~ scale * l


@inline
def _candidate(k: Any, nmax: Any, largest: Any) -> Any:
    """Return the k-th of 38 values of iscale: 19 times one that maps the largest value near -nmax, one near nmax - 1."""
    near = F(0.1) * F(k // 2 - 9)
    return splat(WIDE, -(F(nmax) + near) if k % 2 == 0 else F(nmax - 1) + near) / largest


@inline
def _keep_better(kept: Any, iscale: Any, sum_lx: Any, sum_l2: Any) -> Any:
    """Return (best, its iscale, its two sums) after a candidate."""
    best, best_iscale, best_lx, best_l2 = kept
    better = sum_lx * sum_lx > choose(sum_l2 > F(0), best * sum_l2, F(np.inf))
    best = choose(better, sum_lx / sum_l2 * sum_lx, best)
    best_iscale = choose(better, iscale, best_iscale)
    return best, best_iscale, choose(better, sum_lx, best_lx), choose(better, sum_l2, best_l2)


@inline
def _steepest(s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, nmax: Any, scale: Any) -> Any:
    """Return which level's move by one lowers the error fastest, the first of several: (place or -1, +-1, w x, w, l)."""
    steepest = up = best_wx = best_w = best_level = splat(WIDE, F(0))
    place = splat(WIDE_INT, -1)
    for i in range(n):
        at = i * STEP
        x, w, level = load(WIDE, s, x_at + at), load(WIDE, s, w_at + at), load(WIDE, s, l_at + at)
        slope = scale * w * (x - scale * level)
        rises = slope > F(0)
        size = choose(rises, slope, -slope)
        size = choose(level != choose(rises, F(nmax - 1), splat(WIDE, F(-nmax))), size, F(0))
        larger = size > steepest
        steepest, place = choose(larger, size, steepest), choose(larger, i, place)
        up = choose(larger, slope, up)
        best_wx, best_w = choose(larger, w * x, best_wx), choose(larger, w, best_w)
        best_level = choose(larger, level, best_level)
    return place, choose(up > F(0), F(1), splat(WIDE, F(-1))), best_wx, best_w, best_level


@inline
def _move_levels(s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, nmax: Any, dead: Any, kept: Any) -> Any:
    """Move levels by one, the steepest first, for as long as that raises sum_lx^2 / sum_l2; return the scale."""
    best, _, sum_lx, sum_l2 = kept
    scale = choose(sum_l2 != F(0), sum_lx / sum_l2, F(0))
    moving = choose(dead, F(0), splat(WIDE, F(1)))
    for _ in range(n * (2 * nmax - 1)):
        place, step, wx, w, level = _steepest(s, x_at, w_at, l_at, n, nmax, scale)
        new_lx = sum_lx + step * wx
        new_l2 = sum_l2 + w * (step * (level + level) + F(1))
        gain = choose(place >= 0, new_lx * new_lx, F(-np.inf))
        gain = choose(moving > F(0), gain, F(-np.inf))
        moves = gain > choose(new_l2 > F(0), best * new_l2, F(np.inf))
        moving = choose(moves, moving, F(0))
        if not any_lane(moves):
            break
        sum_lx, sum_l2 = choose(moves, new_lx, sum_lx), choose(moves, new_l2, sum_l2)
        ratio = new_lx / new_l2
        scale, best = choose(moves, ratio, scale), choose(moves, ratio * new_lx, best)
        place, level = choose(moves, place, -1), level + step
        for i in range(n):
            store(s, l_at + i * STEP, choose(place == i, level, load(WIDE, s, l_at + i * STEP)))
    return scale


@inline
def fit_signed_refined(s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, nmax: Any) -> Any:
    """Fit x ~ scale * l with l in -nmax..nmax-1 and given weights, maximizing (sum w*x*l)^2 / sum w*l*l.

    The levels are left at l_at, -nmax in sub-blocks of zeros. Source: make_qx_quants with rmse_type 1.

    Returns (scale, 1, or 0 for a sub-block of zeros).
    """
    largest, size = largest_value(s, x_at, n)
    dead = size < EPSILON
    largest = choose(dead, F(1), largest)
    iscale = splat(WIDE, F(-nmax)) / largest
    first_lx, first_l2 = signed_sums(s, x_at, w_at, n, nmax, True, iscale)
    best = choose(first_l2 != F(0), first_lx / first_l2, F(0)) * first_lx
    kept = best, iscale, first_lx, first_l2
    for k in range(0, 39 if any_lane(~dead) else 0, 3):
        a, b = _candidate(k, nmax, largest), _candidate(k + 1, nmax, largest)
        c = _candidate(min(k + 2, 37), nmax, largest)  # the last one twice: it is not better than itself
        ax, a2, bx, b2, cx, c2 = signed_sums3(s, x_at, w_at, n, nmax, True, a, b, c)
        kept = _keep_better(kept, a, ax, a2)
        kept = _keep_better(kept, b, bx, b2)
        kept = _keep_better(kept, c, cx, c2)
    for i in range(n):
        level = signed_level(kept[1] * load(WIDE, s, x_at + i * STEP), nmax)
        store(s, l_at + i * STEP, choose(dead, F(-nmax), level))
    scale = _move_levels(s, x_at, w_at, l_at, n, nmax, dead, kept)
    return choose(dead, F(0), scale), choose(dead, F(0), splat(WIDE, F(1)))

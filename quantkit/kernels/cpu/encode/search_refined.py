"""ik_llama.cpp's scale searches for the common types: more candidates, then single levels move.

As in search.py, every lane is a sub-block. The final levels are no longer roundings of x, so the searches store them.

| search               | fits                | used for                         |
|----------------------|---------------------|----------------------------------|
| fit_signed_refined   | x ~ scale * l       | Q6_K, Q3_K, Q4_0, Q5_0           |
| fit_with_min_refined | x ~ scale * l + min | Q2_K, Q4_K, Q5_K, Q4_1, Q5_1     |

Source: ik_llama.cpp 8337e4cd3 ggml-quants.c, make_qx_quants, make_qkx3_quants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import VecType, any_lane, convert, load, muladd, splat, store, vabs, vmax, vmin
from quantkit.kernels.cpu.core.simd import select as choose
from quantkit.kernels.cpu.encode.search import (
    EPSILON,
    LANES,
    SAFE,
    STEP,
    WIDE,
    WIDE_INT,
    F,
    largest_value,
    level_anywhere,
    level_of,
    signed_level,
    signed_sums,
    signed_sums3,
)

# ---------------------------------------------------------------- x ~ scale * l


@inline
def _candidate(k: Any, nmax: Any, largest: Any) -> Any:
    """Return the k-th of 38 values of iscale: of each two, one maps the largest value near -nmax, one near nmax - 1."""
    delta = F(0.1) * F(k // 2 - 9)
    return splat(WIDE, -(F(nmax) + delta) if k % 2 == 0 else F(nmax - 1) + delta) / largest


@inline
def _keep_better(fit: Any, iscale: Any, sum_lx: Any, sum_l2: Any) -> Any:
    """Return (best, its iscale, its two sums) after a candidate."""
    best, best_iscale, best_lx, best_l2 = fit
    better = sum_lx * sum_lx > choose(sum_l2 > F(0), best * sum_l2, F(np.inf))
    best = choose(better, sum_lx / sum_l2 * sum_lx, best)
    best_iscale = choose(better, iscale, best_iscale)
    return best, best_iscale, choose(better, sum_lx, best_lx), choose(better, sum_l2, best_l2)


@inline
def _steepest(s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, nmax: Any, scale: Any) -> Any:
    """Return which level's move by one lowers the error fastest, or place -1: (place, +-1, w x, w, l)."""
    steepest = up = best_wx = best_w = best_level = splat(WIDE, F(0))
    place = splat(WIDE_INT, -1)
    for i in range(n):
        offset = i * STEP
        x = load(WIDE, s, x_at + offset)
        w = load(WIDE, s, w_at + offset)
        level = load(WIDE, s, l_at + offset)
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
def _move_levels(s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, nmax: Any, dead: Any, fit: Any) -> Any:
    """Move levels by one, the steepest first, for as long as that raises sum_lx^2 / sum_l2; return the scale."""
    best, _, sum_lx, sum_l2 = fit
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
    fit = best, iscale, first_lx, first_l2
    for k in range(0, 39 if any_lane(~dead) else 0, 3):
        a, b = _candidate(k, nmax, largest), _candidate(k + 1, nmax, largest)
        c = _candidate(min(k + 2, 37), nmax, largest)  # the last one twice, which has no effect
        ax, a2, bx, b2, cx, c2 = signed_sums3(s, x_at, w_at, n, nmax, True, a, b, c)
        fit = _keep_better(fit, a, ax, a2)
        fit = _keep_better(fit, b, bx, b2)
        fit = _keep_better(fit, c, cx, c2)
    for i in range(n):
        level = signed_level(fit[1] * load(WIDE, s, x_at + i * STEP), nmax)
        store(s, l_at + i * STEP, choose(dead, F(-nmax), level))
    scale = _move_levels(s, x_at, w_at, l_at, n, nmax, dead, fit)
    return choose(dead, F(0), scale), choose(dead, F(0), splat(WIDE, F(1)))


# ---------------------------------------------------------------- x ~ scale * l + min

#: Sums are f64 here. Products of a weight, a value and a level are exact, so a fused sum is the same.
_DOUBLE = VecType(types.float64, LANES)
D = np.float64


@inline
def _sums_of_values(s: Any, x_at: Any, w_at: Any, n: Any) -> Any:
    """Return the sums over w, w*x and w*x*x."""
    sum_w = sum_x = sum_x2 = splat(_DOUBLE, D(0))
    for i in range(n):
        x, w = convert(_DOUBLE, load(WIDE, s, x_at + i * STEP)), convert(_DOUBLE, load(WIDE, s, w_at + i * STEP))
        wx = w * x
        sum_w = sum_w + w
        sum_x = sum_x + wx
        sum_x2 = sum_x2 + wx * x
    return sum_w, sum_x, sum_x2


@inline
def _sums_of_levels(s: Any, x_at: Any, w_at: Any, n: Any, top: Any, iscale: Any, low: Any, safe: Any) -> Any:
    """Return the sums over w*l, w*l*l and w*l*x of the levels of (iscale, low)."""
    sum_l = sum_l2 = sum_xl = splat(_DOUBLE, D(0))
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        v = iscale * (x - low)
        level = convert(_DOUBLE, level_of(v, top) if safe else level_anywhere(v, top, False))
        wl = convert(_DOUBLE, load(WIDE, s, w_at + i * STEP)) * level
        sum_l = sum_l + wl
        sum_l2 = muladd(wl, level, sum_l2)
        sum_xl = muladd(wl, convert(_DOUBLE, x), sum_xl)
    return sum_l, sum_l2, sum_xl


@inline
def _first_error(s: Any, x_at: Any, w_at: Any, n: Any, top: Any, iscale: Any, low: Any) -> Any:
    """Return the weighted error of the levels that spread from the least value to the largest."""
    scale, offset = convert(_DOUBLE, splat(WIDE, F(1)) / iscale), convert(_DOUBLE, low)
    total = splat(_DOUBLE, D(0))
    for i in range(n):
        x, w = load(WIDE, s, x_at + i * STEP), convert(_DOUBLE, load(WIDE, s, w_at + i * STEP))
        diff = scale * convert(_DOUBLE, level_anywhere(iscale * (x - low), top, False)) + offset - convert(_DOUBLE, x)
        total = total + w * (diff * diff)
    return total


@inline
def _least_squares(sums: Any, sum_l: Any, sum_l2: Any, sum_xl: Any) -> Any:
    """Return the best (scale, low <= 0) for the sums of levels, and their determinant, which must be positive."""
    sum_w, sum_x, _ = sums
    det = sum_w * sum_l2 - sum_l * sum_l
    scale = (sum_w * sum_xl - sum_x * sum_l) / det
    low = (sum_l2 * sum_x - sum_l * sum_xl) / det
    above = low > D(0)
    if any_lane(above):
        scale, low = choose(above, sum_xl / sum_l2, scale), choose(above, D(0), low)
    return scale, low, det


@inline
def _furthest(s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, top: Any, scale: Any, low: Any) -> Any:
    """Return the value furthest from its level that may move towards it: (place or -1, +-1, w, x, l)."""
    furthest = up = best_x = best_w = best_level = splat(WIDE, F(0))
    place = splat(WIDE_INT, -1)
    for i in range(n):
        offset = i * STEP
        x = load(WIDE, s, x_at + offset)
        w = load(WIDE, s, w_at + offset)
        level = load(WIDE, s, l_at + offset)
        off = x - scale * level - low
        rises = off > F(0)
        size = choose(rises, off, -off)
        size = choose(level != choose(rises, F(top), splat(WIDE, F(0))), size, F(0))
        larger = size > furthest
        furthest = choose(larger, size, furthest)
        place = choose(larger, i, place)
        up = choose(larger, off, up)
        best_x, best_w = choose(larger, x, best_x), choose(larger, w, best_w)
        best_level = choose(larger, level, best_level)
    return place, choose(up > F(0), F(1), splat(WIDE, F(-1))), best_w, best_x, best_level


@inline
def _gain(sums: Any, scale: Any, low: Any, sum_l: Any, sum_l2: Any, sum_xl: Any) -> Any:
    """Return the reduction of sum(w*x*x) by a fit."""
    sum_w, sum_x, _ = sums
    gain = D(2) * scale * sum_xl + D(2) * low * sum_x - D(2) * scale * low * sum_l
    return gain - scale * scale * sum_l2 - low * low * sum_w


@inline
def _move_levels_with_min(
    s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, top: Any, sums: Any, scale: Any, low: Any, flat: Any
) -> Any:
    """Move levels by one, of the value furthest off first, as long as the fit improves; return scale and low."""
    sum_l = sum_l2 = sum_xl = splat(_DOUBLE, D(0))
    for i in range(n):
        x, level = convert(_DOUBLE, load(WIDE, s, x_at + i * STEP)), convert(_DOUBLE, load(WIDE, s, l_at + i * STEP))
        wl = convert(_DOUBLE, load(WIDE, s, w_at + i * STEP)) * level
        sum_l = sum_l + wl
        sum_l2 = muladd(wl, level, sum_l2)
        sum_xl = muladd(wl, x, sum_xl)
    best = _gain(sums, convert(_DOUBLE, scale), convert(_DOUBLE, low), sum_l, sum_l2, sum_xl)
    moving, last = choose(flat, F(0), splat(WIDE, F(1))), splat(WIDE_INT, -1)
    last_step = splat(WIDE, F(0))
    for _ in range(n * top):
        place, step, w, x, level = _furthest(s, x_at, w_at, l_at, n, top, scale, low)
        reverses = choose(place == last, last_step * step, F(0)) < F(0)
        moving = choose(reverses, F(0), choose(place >= 0, moving, F(0)))
        if not any_lane(moving > F(0)):
            break
        weight, delta = convert(_DOUBLE, w), convert(_DOUBLE, step)
        sum_l, sum_xl = sum_l + weight * delta, sum_xl + weight * convert(_DOUBLE, x) * delta
        sum_l2 = sum_l2 + weight * convert(_DOUBLE, (level + level) * step + F(1))
        new_scale, new_low, det = _least_squares(sums, sum_l, sum_l2, sum_xl)
        gain = _gain(sums, new_scale, new_low, sum_l, sum_l2, sum_xl)
        gain = choose(det > D(0), gain, D(-np.inf))
        gain = choose(new_scale < D(0), D(-np.inf), gain)
        gain = choose(moving > F(0), gain, D(-np.inf))
        moves = gain > best
        moving, best = choose(moves, moving, F(0)), choose(moves, gain, best)
        scale, low = choose(moves, convert(WIDE, new_scale), scale), choose(moves, convert(WIDE, new_low), low)
        last, last_step = choose(moves, place, last), choose(moves, step, last_step)
        place, level = choose(moves, place, -1), level + step
        for i in range(n):
            store(s, l_at + i * STEP, choose(place == i, level, load(WIDE, s, l_at + i * STEP)))
    return scale, low


@inline
def fit_with_min_refined(s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, top: Any) -> Any:
    """Fit x ~ scale * l + low with l in 0..top and low <= 0, minimizing the weighted error.

    The candidates are those of ``fit_with_min`` with weights; their errors follow from sums. The levels are left at
    l_at. Source: make_qkx3_quants.

    Returns (scale, -low).
    """
    low = high = load(WIDE, s, x_at)
    for i in range(1, n):
        x = load(WIDE, s, x_at + i * STEP)
        low, high = vmin(x, low), vmax(x, high)
    smallest, low = low, choose(low > F(0), F(0), low)
    flat = high - low < F(1e-10)
    width = choose(flat, F(1), high - low)
    sums = _sums_of_values(s, x_at, w_at, n)
    sum_w, sum_x, sum_x2 = sums
    iscale = splat(WIDE, F(top)) / width
    scale = splat(WIDE, F(1)) / iscale
    best = _first_error(s, x_at, w_at, n, top, iscale, low)
    best_iscale, best_low = iscale, low
    for k in range(37 if any_lane(~flat) else 0):
        iscale = splat(WIDE, F(-0.9) + F(0.05) * F(k) + F(top)) / width
        reach = choose(vabs(iscale * (high - low)) < SAFE, vabs(iscale * (smallest - low)), SAFE)
        if any_lane(~(reach < SAFE)):
            sum_l, sum_l2, sum_xl = _sums_of_levels(s, x_at, w_at, n, top, iscale, low, False)
        else:
            sum_l, sum_l2, sum_xl = _sums_of_levels(s, x_at, w_at, n, top, iscale, low, True)
        new_scale, new_low, det = _least_squares(sums, sum_l, sum_l2, sum_xl)
        error = sum_x2 - D(2) * new_scale * sum_xl - D(2) * new_low * sum_x + D(2) * new_scale * new_low * sum_l
        error = error + new_scale * new_scale * sum_l2 + new_low * new_low * sum_w
        better = choose(det > D(0), error, D(np.inf)) < best
        best = choose(better, error, best)
        scale = choose(better, convert(WIDE, new_scale), scale)
        best_iscale, best_low = choose(better, iscale, best_iscale), choose(better, low, best_low)
        low = choose(better, convert(WIDE, new_low), low)
        width = choose(flat, F(1), high - low)
    for i in range(n):
        level = level_anywhere(best_iscale * (load(WIDE, s, x_at + i * STEP) - best_low), top, False)
        store(s, l_at + i * STEP, choose(flat, F(0), level))
    scale, low = _move_levels_with_min(s, x_at, w_at, l_at, n, top, sums, scale, low, flat)
    return choose(flat, F(0), scale), -low

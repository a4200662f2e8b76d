"""The scale searches of the K-quants, one sub-block (or super-block) per lane.

ggml fits a scale (and a minimum) to a few values by trying a grid of scales and keeping the best. Each search is one
chain of dependent f32 sums, which a CPU cannot speed up without changing their order and so the bytes. Here every lane
of a vector runs its own search: element i of all sub-blocks is one vector, branches become masks, and each lane adds
in ggml's order. A value that only some lanes need is computed in all of them and dropped by ``select``.

| search            | fits                    | used for                                           |
|-------------------|-------------------------|----------------------------------------------------|
| fit_with_min      | x ~ scale * l + min     | Q2_K, Q4_K, Q5_K: make_qkx2_quants, make_qkx3_quants |
| fit_signed        | x ~ scale * l           | Q3_K with weights, Q6_K: make_qx_quants            |
| fit_by_largest, fit_by_descent | x ~ scale * l | Q3_K without weights: make_q3_quants |
| fit_positive      | x ~ scale * l, l >= 0   | scales and minima of a super-block: make_qp_quants |

Source: llama.cpp b11434, ggml/src/ggml-quants.c. Vectors lie in a scratch array, element i at ``at + i * step`` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    FEATURES,
    VecType,
    any_lane,
    cast,
    convert,
    f32x16,
    i32x16,
    load,
    lookup16_f32,
    make_constant,
    nearest_int,
    round_even,
    splat,
    store,
    vabs,
    vmax,
    vmin,
)
from quantkit.kernels.cpu.core.simd import select as choose

F = np.float32

#: Sub-blocks searched together. Two vectors at a time hide the latency of each other's sums.
LANES = 32 if "avx512f" in FEATURES else 16
WIDE, WIDE_INT = VecType(types.float32, LANES), VecType(types.int32, LANES)
STEP = 4 * LANES

#: Adding 1.5 * 2^23 rounds an f32 to an integer, nearest even, if its size is below 2^22.
MAGIC = F(12582912.0)
#: Levels of a search stay exact under MAGIC below this; beyond it nearest_int wraps around.
SAFE = F(2.0**21)
#: A sub-block without a larger value counts as zero (GROUP_MAX_EPS).
EPSILON = F(1e-15)

#: Entry k holds k as a 4-bit signed number, clamped to -4..3.
_signed_3_bits = make_constant(
    f32x16, [float(min(k if k < 8 else k - 16, 3) if k < 8 else max(k - 16, -4)) for k in range(16)], "signed_3_bits"
)


# ---------------------------------------------------------------- uneven levels


def bucket_tables(
    boundaries: Sequence[float], width: float, count: int = 32
) -> tuple[list[float], list[int], list[int]]:
    """Return, at n mod ``count`` for each bucket n, its boundary and the levels below and above it.

    Rounding to unevenly spaced levels is a look-up: boundaries between them divide the line, and buckets of equal width
    each hold at most one. So the bucket of v, v / width rounded, gives a boundary and the levels on either side, and
    one comparison with v decides. The bucket may be off by one near its edges if no boundary is near, so v / width need
    not be exact. 32 buckets, numbered -16..15, are two vectors: the low 5 bits of ``v / width + MAGIC`` are the index.

    A level is the number of boundaries <= v. Empty buckets have an infinite boundary. Raises ValueError if a bucket
    holds two boundaries, or if one is within 1 % of a bucket's edge or beyond the buckets.
    """
    boundary = [float("inf")] * count
    below = [0] * count
    above = [0] * count
    for n in range(-count // 2, count // 2):
        low, high = (n - 0.5) * width, (n + 0.5) * width
        members = [m for m in boundaries if low <= m < high]
        if len(members) > 1 or any(min(m - low, high - m) < 0.01 * width for m in members):
            raise ValueError(f"buckets of {width} do not separate the boundaries {members}")
        level = sum(m < low for m in boundaries)
        boundary[n % count] = members[0] if members else float("inf")
        below[n % count], above[n % count] = level, level + len(members)
    if max(abs(m) for m in boundaries) > (count / 2 - 1) * width:
        raise ValueError(f"{count} buckets of {width} do not reach the boundaries")
    return boundary, below, above


# ---------------------------------------------------------------- x ~ scale * l + min


@inline
def round_as_cvtps2dq(v):
    """Round to nearest even as cvtps2dq does: INT_MIN beyond int32."""
    return choose(vabs(v) < F(2.0**31), convert(i32x16, round_even(v)), np.int32(-(2**31)))


@inline
def level_of(v: Any, top: Any) -> Any:
    """Round v to a level in 0..top, as f32; |v| < 2^22."""
    return round_even(vmin(vmax(v, F(0)), F(top)))


@inline
def level_anywhere(v: Any, top: Any, guarded: Any) -> Any:
    """level_of of any v at all, as ggml's two searches do it.

    make_qkx2_quants clamps nearest_int, which wraps around beyond 2^22; make_qkx3_quants (guarded) clamps v first.
    """
    if guarded:
        low = nearest_int(choose(v < F(top), v, F(top)))
        return convert(WIDE, choose(v > F(0), low, 0))
    return convert(WIDE, vmin(vmax(nearest_int(v), 0), top))


@inline
def _add_level(s: Any, sums: Any, x: Any, level: Any, w_at: Any, l_at: Any) -> Any:
    """Store a level; return the sums over w*l, w*l*l and w*l*x with it."""
    sum_l, sum_l2, sum_xl = sums
    store(s, l_at, level)
    wl = load(WIDE, s, w_at) * level
    return sum_l + wl, sum_l2 + wl * level, sum_xl + wl * x


@inline
def _weighted_sums(s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, top: Any, iscale: Any, low: Any) -> Any:
    """Quantize by (iscale, low); return the sums over w*l, w*l*l and w*l*x, and store the levels."""
    sums = splat(WIDE, F(0)), splat(WIDE, F(0)), splat(WIDE, F(0))
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        sums = _add_level(s, sums, x, level_of(iscale * (x - low), top), w_at + i * STEP, l_at + i * STEP)
    return sums


@inline
def _weighted_sums_anywhere(
    s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, top: Any, iscale: Any, low: Any, guarded: Any
) -> Any:
    """Return ``_weighted_sums`` of lanes whose minimum is so near their maximum that levels leave the safe range."""
    sums = splat(WIDE, F(0)), splat(WIDE, F(0)), splat(WIDE, F(0))
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        level = level_anywhere(iscale * (x - low), top, guarded)
        sums = _add_level(s, sums, x, level, w_at + i * STEP, l_at + i * STEP)
    return sums


@inline
def _error(s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, scale: Any, low: Any, absolute: Any) -> Any:
    """Return the sum over w * (scale * l + low - x)^2, or over w * |...|."""
    total = splat(WIDE, F(0))
    for i in range(n):
        diff = scale * load(WIDE, s, l_at + i * STEP) + low - load(WIDE, s, x_at + i * STEP)
        diff = vabs(diff) if absolute else diff * diff
        total = total + load(WIDE, s, w_at + i * STEP) * diff
    return total


@inline
def fit_with_min(
    s: Any,
    x_at: Any,
    w_at: Any,
    l_at: Any,
    n: Any,
    top: Any,
    start: Any,
    delta: Any,
    steps: Any,
    absolute: Any,
    guarded: Any,
) -> Any:
    """Fit x ~ scale * l + low with l in 0..top and low <= 0, minimizing the weighted error.

    Tries iscale = (start + delta * k + top) / (max - low) for k in 0..steps; low is the best one so far, so the
    trials depend on each other. Source: make_qkx2_quants, and make_qkx3_quants (guarded).

    Returns (scale, -low, sum of weights, and the iscale and low that gave the best levels, see ``search_levels``).
    """
    low = high = load(WIDE, s, x_at)
    sum_w = load(WIDE, s, w_at)
    sum_x = sum_w * low
    for i in range(1, n):
        x, w = load(WIDE, s, x_at + i * STEP), load(WIDE, s, w_at + i * STEP)
        low, high = vmin(x, low), vmax(x, high)
        sum_w = sum_w + w
        sum_x = sum_x + w * x
    smallest = low
    low = choose(low > F(0), F(0), low)
    flat = high <= low  # nothing to fit: all levels 0. A width of 1 keeps these lanes quiet.
    width = choose(flat, F(1), high - low)
    iscale = splat(WIDE, F(top)) / width
    scale = splat(WIDE, F(1)) / iscale
    for i in range(n):
        store(s, l_at + i * STEP, level_anywhere(iscale * (load(WIDE, s, x_at + i * STEP) - low), top, False))
    best = _error(s, x_at, w_at, l_at, n, scale, low, absolute)
    # An infinite iscale turns every value into inf or NaN, hence level 0; an iscale of 0 gives level 0 under both
    # rules.
    best_iscale, best_low = choose(vabs(iscale) < F(np.inf), iscale, F(0)), low
    trials = steps + 1 if any_lane(~flat) else 0  # whole groups of zeros are common enough
    for k in range(trials):
        iscale = splat(WIDE, F(start) + F(delta) * F(k) + F(top)) / width
        reach = choose(vabs(iscale * (high - low)) < SAFE, vabs(iscale * (smallest - low)), SAFE)
        if any_lane(~(reach < SAFE)):
            sum_l, sum_l2, sum_xl = _weighted_sums_anywhere(s, x_at, w_at, l_at, n, top, iscale, low, guarded)
        else:
            sum_l, sum_l2, sum_xl = _weighted_sums(s, x_at, w_at, l_at, n, top, iscale, low)
        det = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / det
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / det
        above = new_low > F(0)
        if any_lane(above):
            new_scale = choose(above, sum_xl / sum_l2, new_scale)
            new_low = choose(above, F(0), new_low)
        error = _error(s, x_at, w_at, l_at, n, new_scale, new_low, absolute)
        error = choose(det > F(0), error, F(np.inf))
        better = error < best
        best = choose(better, error, best)
        scale = choose(better, new_scale, scale)
        best_iscale, best_low = choose(better, iscale, best_iscale), choose(better, low, best_low)
        low = choose(better, new_low, low)
        width = choose(flat, F(1), high - low)
    zero = splat(WIDE, F(0))
    return choose(flat, zero, scale), -low, sum_w, choose(flat, zero, best_iscale), choose(flat, zero, best_low)


@inline
def search_levels(x: Any, iscale: Any, low: Any, top: Any, guarded: Any) -> Any:
    """Return the levels that fit_with_min ended with for 16 values of one sub-block, as int32."""
    v = iscale * (x - low)
    if guarded:
        return choose(v > F(0), nearest_int(choose(v < F(top), v, F(top))), 0)
    return vmin(vmax(nearest_int(v), 0), top)


# ---------------------------------------------------------------- x ~ scale * l


@inline
def signed_level(v: Any, nmax: Any) -> Any:
    """Round v, of magnitude below nmax + 1, to a level in -nmax..nmax-1, as f32."""
    if nmax == 4:
        return lookup16_f32(_signed_3_bits(), cast(WIDE_INT, v + MAGIC))
    return round_even(vmin(vmax(v, F(-nmax)), F(nmax - 1)))


@inline
def signed_sums(s: Any, x_at: Any, w_at: Any, n: Any, nmax: Any, weighted: Any, iscale: Any) -> Any:
    """Return the sums over w*x*l and w*l*l for the levels of one iscale."""
    sum_lx = sum_l2 = splat(WIDE, F(0))
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        w = load(WIDE, s, w_at + i * STEP) if weighted else x * x
        level = signed_level(iscale * x, nmax)
        sum_lx = sum_lx + w * x * level
        sum_l2 = sum_l2 + w * level * level
    return sum_lx, sum_l2


@inline
def signed_sums3(s: Any, x_at: Any, w_at: Any, n: Any, nmax: Any, weighted: Any, a: Any, b: Any, c: Any) -> Any:
    """signed_sums of three values of iscale, which share the loads."""
    ax = bx = cx = a2 = b2 = c2 = splat(WIDE, F(0))
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        w = load(WIDE, s, w_at + i * STEP) if weighted else x * x
        wx = w * x
        la = signed_level(a * x, nmax)
        lb = signed_level(b * x, nmax)
        lc = signed_level(c * x, nmax)
        ax = ax + wx * la
        bx = bx + wx * lb
        cx = cx + wx * lc
        a2 = a2 + w * la * la
        b2 = b2 + w * lb * lb
        c2 = c2 + w * lc * lc
    return ax, a2, bx, b2, cx, c2


@inline
def _keep_better(best: Any, scale: Any, best_iscale: Any, iscale: Any, sum_lx: Any, sum_l2: Any) -> Any:
    better = sum_lx * sum_lx > choose(sum_l2 > F(0), best * sum_l2, F(np.inf))
    ratio = sum_lx / sum_l2
    best = choose(better, ratio * sum_lx, best)
    return best, choose(better, ratio, scale), choose(better, iscale, best_iscale)


@inline
def largest_value(s: Any, x_at: Any, n: Any) -> Any:
    """Return the first value of the largest size, and its size."""
    value = size = splat(WIDE, F(0))
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        larger = vabs(x) > size
        size, value = choose(larger, vabs(x), size), choose(larger, x, value)
    return value, size


@inline
def _grid(k: Any, nmax: Any, largest: Any) -> Any:
    """Return the k-th of the 18 values of iscale that make_qx_quants tries."""
    step = k - 9 if k < 9 else k - 8
    return splat(WIDE, -(F(nmax) + F(0.1) * F(step))) / largest


@inline
def fit_signed(s: Any, x_at: Any, w_at: Any, n: Any, nmax: Any, weighted: Any) -> Any:
    """Fit x ~ scale * l with l in -nmax..nmax-1, maximizing (sum w*x*l)^2 / sum w*l*l; weights x*x unless given.

    The trials are independent, so three share every load. Source: make_qx_quants with rmse_type 1.

    Returns (scale, iscale of the best levels); both are 0 for a sub-block of zeros, whose codes are all 0.
    """
    largest, size = largest_value(s, x_at, n)
    dead = size < EPSILON
    largest = choose(dead, F(1), largest)
    best_iscale = splat(WIDE, F(-nmax)) / largest
    sum_lx, sum_l2 = signed_sums(s, x_at, w_at, n, nmax, weighted, best_iscale)
    scale = choose(sum_l2 != F(0), sum_lx / sum_l2, F(0))
    best = scale * sum_lx
    for k in range(0, 18 if any_lane(~dead) else 0, 3):
        a = _grid(k, nmax, largest)
        b = _grid(k + 1, nmax, largest)
        c = _grid(k + 2, nmax, largest)
        ax, a2, bx, b2, cx, c2 = signed_sums3(s, x_at, w_at, n, nmax, weighted, a, b, c)
        best, scale, best_iscale = _keep_better(best, scale, best_iscale, a, ax, a2)
        best, scale, best_iscale = _keep_better(best, scale, best_iscale, b, bx, b2)
        best, scale, best_iscale = _keep_better(best, scale, best_iscale, c, cx, c2)
    return choose(dead, F(0), scale), choose(dead, F(0), best_iscale)


# ---------------------------------------------------------------- x ~ scale * l, refined one level at a time


@inline
def _descend(
    s: Any, x_at: Any, w_at: Any, l_at: Any, i: Any, low: Any, top: Any, sum_lx: Any, sum_l2: Any, moved: Any
) -> Any:
    """Move level i of every lane to its optimum for the others, where that raises sum_lx^2 / sum_l2.

    Signed levels (low < 0) weigh by x*x; levels from 0 have weights at w_at and are stored in a byte, as ggml does.
    Returns both sums and ``moved``, 1 in every lane that moved.
    """
    x, level = load(WIDE, s, x_at + i * STEP), load(WIDE, s, l_at + i * STEP)
    w = x * x if low < 0 else load(WIDE, s, w_at + i * STEP)
    wx = w * x
    rest_lx = sum_lx - wx * level
    rest_l2 = sum_l2 - w * level * level
    code = vmin(nearest_int(x * rest_l2 / rest_lx), top)
    if low < 0:
        code = vmax(code, low)
    new = convert(WIDE, code)
    new_lx = rest_lx + wx * new
    new_l2 = rest_l2 + w * new * new
    # Conditions are folded into the last comparison: masks of more than one register are slow to combine.
    gain = choose(rest_lx > F(0), new_lx * new_lx * sum_l2, F(-np.inf))
    gain = choose(new != level, gain, F(-np.inf))
    need = choose((new_l2 if low < 0 else rest_l2) > F(0), sum_lx * sum_lx * new_l2, F(np.inf))
    moves = gain > need
    stored = new if low < 0 else convert(WIDE, code & 255)
    store(s, l_at + i * STEP, choose(moves, stored, level))
    return choose(moves, new_lx, sum_lx), choose(moves, new_l2, sum_l2), choose(moves, F(1), moved)


@inline
def fit_by_largest(s: Any, x_at: Any, n: Any, nmax: Any) -> Any:
    """Fit x ~ scale * l as make_q3_quants begins: levels by the largest value, then the scale by least squares.

    Returns (scale, iscale or 0 for a sub-block of zeros, mask of the lanes whose levels may move in fit_by_descent).
    The others are done: a level moves only if x * sum_l2 / sum_lx, of the other values, lies half a step away.
    """
    largest, size = largest_value(s, x_at, n)
    dead = size < EPSILON
    iscale = splat(WIDE, F(-nmax)) / choose(dead, F(1), largest)
    sum_lx = sum_l2 = splat(WIDE, F(0))
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        level = signed_level(iscale * x, nmax)
        sum_lx = sum_lx + x * x * x * level
        sum_l2 = sum_l2 + x * x * level * level
    moving = splat(WIDE, F(0))
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        level = signed_level(iscale * x, nmax)
        rest_lx = sum_lx - x * x * x * level
        off = x * (sum_l2 - x * x * level * level) - level * rest_lx
        # At the top the clamp stops a further increase, unless nearest_int wraps around.
        size = choose(level > F(nmax - 1.5), vmax(-off, F(0.001) * off), vabs(off))
        size = choose(rest_lx > F(0), size, F(-np.inf))
        moving = choose(size < F(0.499) * rest_lx, moving, F(1))  # 0.001 is far more than the rounding error
    scale = choose(sum_l2 > F(0), sum_lx / sum_l2, F(0))
    zero = splat(WIDE, F(0))
    return choose(dead, zero, scale), choose(dead, zero, iscale), choose(dead, zero, moving) > F(0)


@inline
def _begin_descent(s: Any, x_at: Any, l_at: Any, n: Any, nmax: Any) -> Any:
    """Store the levels by the largest value; return the sums over x^3*l and x^2*l*l."""
    iscale = splat(WIDE, F(-nmax)) / largest_value(s, x_at, n)[0]
    sum_lx = sum_l2 = splat(WIDE, F(0))
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        level = signed_level(iscale * x, nmax)
        store(s, l_at + i * STEP, level)
        sum_lx = sum_lx + x * x * x * level
        sum_l2 = sum_l2 + x * x * level * level
    return sum_lx, sum_l2


@inline
def fit_by_descent(s: Any, x_at: Any, l_at: Any, n: Any, nmax: Any) -> Any:
    """Fit x ~ scale * l with l in -nmax..nmax-1 and weights x*x, for twice LANES sub-blocks.

    Each step waits for a division; two independent chains wait together. The second LANES sub-blocks lie behind the
    first, n * STEP bytes on. The levels are left at l_at. Sub-blocks of zeros must not come here.

    Source: make_q3_quants. Returns the scales of both.
    """
    x_of_b, l_of_b = x_at + n * STEP, l_at + n * STEP
    a_lx, a_l2 = _begin_descent(s, x_at, l_at, n, nmax)
    b_lx, b_l2 = _begin_descent(s, x_of_b, l_of_b, n, nmax)
    for _ in range(5):
        moved = splat(WIDE, F(0))
        for i in range(n):
            a_lx, a_l2, moved = _descend(s, x_at, x_at, l_at, i, -nmax, nmax - 1, a_lx, a_l2, moved)
            b_lx, b_l2, moved = _descend(s, x_of_b, x_of_b, l_of_b, i, -nmax, nmax - 1, b_lx, b_l2, moved)
        if not any_lane(moved > F(0)):  # a lane that has stopped stays stopped
            break
    return choose(a_l2 > F(0), a_lx / a_l2, F(0)), choose(b_l2 > F(0), b_lx / b_l2, F(0))


# ---------------------------------------------------------------- the scales of a super-block


@inline
def _positive_error(s: Any, x_at: Any, w_at: Any, n: Any, top: Any, iscale: Any, first: Any) -> Any:
    """Return the sum over w * (x - l / iscale)^2; the first trial keeps l in a byte, later ones clamp it to top."""
    scale, total = splat(WIDE, F(1)) / iscale, splat(WIDE, F(0))
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        code = nearest_int(iscale * x)
        code = code & 255 if first else vmin(code, top)
        diff = x - scale * convert(WIDE, code)
        total = total + load(WIDE, s, w_at + i * STEP) * diff * diff
    return total


@inline
def fit_positive(s: Any, x_at: Any, w_at: Any, l_at: Any, n: Any, top: Any) -> Any:
    """Fit x ~ scale * l with l in 0..top, for the scales or minima of a super-block; the levels are left at l_at.

    Source: make_qp_quants. Returns the scale.
    """
    largest = splat(WIDE, F(0))
    for i in range(n):
        largest = vmax(largest, load(WIDE, s, x_at + i * STEP))
    dead = largest < EPSILON
    largest = choose(dead, F(1), largest)
    best_iscale = splat(WIDE, F(top)) / largest
    best = _positive_error(s, x_at, w_at, n, top, best_iscale, True)
    for k in range(-4, 5):
        if k != 0:
            iscale = splat(WIDE, F(0.1) * F(k) + F(top)) / largest
            error = _positive_error(s, x_at, w_at, n, top, iscale, False)
            better = error < best
            best, best_iscale = choose(better, error, best), choose(better, iscale, best_iscale)
    sum_lx = sum_l2 = splat(WIDE, F(0))
    for i in range(n):
        x, w = load(WIDE, s, x_at + i * STEP), load(WIDE, s, w_at + i * STEP)
        code = vmin(nearest_int(best_iscale * x), top)
        level = convert(WIDE, code)
        store(s, l_at + i * STEP, convert(WIDE, choose(dead, 0, code & 255)))
        sum_lx = sum_lx + w * x * level
        sum_l2 = sum_l2 + w * level * level
    sum_lx = choose(dead, F(0), sum_lx)  # without a sum no level changes
    for _ in range(5):
        moved = splat(WIDE, F(0))
        for i in range(n):
            sum_lx, sum_l2, moved = _descend(s, x_at, w_at, l_at, i, 0, top, sum_lx, sum_l2, moved)
        if not any_lane(moved > F(0)):
            break
    return choose(dead | ~(sum_l2 > F(0)), F(0), sum_lx / sum_l2)

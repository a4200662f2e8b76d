"""IQ1_S and IQ1_M: points of a grid of -1, 0, 1, all shifted by an eighth up or down.

Bytes of a block of 256 values: quantkit/kernels/cpu/unpack/i_quants.py. Sub-blocks are 32 values (IQ1_S) with a shift,
or 16 (IQ1_M) with a shift per 8. The search is exhaustive: of sorted values the lowest become -1, the highest 1; every
pair of boundaries is tried with every shift, and rated by sum(w q x)^2 / sum(w q q) from sums over the values below
each boundary. Groups of 8 off the grid then become the nearest of their neighbours.

A lane is a sub-block: LANES are sorted at once by a network, then tried at every pair of boundaries.

Source: llama.cpp b11434 ggml-quants.c quantize_row_iq1_s_impl, quantize_row_iq1_m_impl, iq1_find_best_neighbour2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    any_lane,
    f32_to_f16,
    load,
    lookup16_f32,
    nearest_int,
    splat,
    store,
    vabs,
    vmax,
)
from quantkit.kernels.cpu.core.simd import select as choose
from quantkit.kernels.cpu.encode import grid_search as grid
from quantkit.kernels.cpu.encode.batch import store_sigma
from quantkit.kernels.cpu.encode.grid_quants import (
    BEST_SIGNS,
    BEST_WORDS,
    SCALES,
    SIGMA,
    begin_block,
    index_of,
    largest_scale,
    load_sub_blocks,
)
from quantkit.kernels.cpu.encode.grid_search import OFF, ROOT, SHIFT, SLOT, W, X, ternary
from quantkit.kernels.cpu.encode.search import LANES, STEP, WIDE, WIDE_INT, F

#: Levels are -1, 0, 1 plus or minus this (IQ1S_DELTA, IQ1M_DELTA).
EIGHTH = F(0.125)
#: The final factor of IQ1_M's scales.
D_GAIN = F(1.1125)

# Scratch beside the search's, [value or boundary][lane]: sorted values, their weights and indices; the sums of w * x
# and of w over the values below a boundary, for both halves of IQ1_M; the terms that a boundary adds to a candidate's
# sums.
SORTED = BEST_WORDS + 8 * 16 * STEP
SORTED_W, PLACE = SORTED + 32 * STEP, SORTED + 64 * STEP
SUM_X, SUM_W = SORTED + 96 * STEP, SORTED + 132 * STEP
TERMS = SORTED + 168 * STEP
SCRATCH = TERMS + 4 * 36 * STEP
#: IQ1_M: twice the code of each scale plus 1; the sums of super-blocks.
FACTORS = TERMS
FITTED_X = TERMS + 16 * STEP
FITTED_2 = TERMS + 17 * STEP

# ---------------------------------------------------------------- sorting


@inline
def _exchange(s: Any, a: Any, b: Any) -> None:
    """Sort the values at places a < b, equal ones by their origin."""
    a, b = a * STEP, b * STEP
    x, y = load(WIDE, s, SORTED + a), load(WIDE, s, SORTED + b)
    i, j = load(WIDE_INT, s, PLACE + a), load(WIDE_INT, s, PLACE + b)
    v, w = load(WIDE, s, SORTED_W + a), load(WIDE, s, SORTED_W + b)
    first = choose(x == y, i, splat(WIDE_INT, 0)) > choose(x == y, j, choose(x > y, -1, splat(WIDE_INT, 0)))
    store(s, SORTED + a, choose(first, y, x))
    store(s, SORTED + b, choose(first, x, y))
    store(s, PLACE + a, choose(first, j, i))
    store(s, PLACE + b, choose(first, i, j))
    store(s, SORTED_W + a, choose(first, w, v))
    store(s, SORTED_W + b, choose(first, v, w))


@inline
def sort_values(s: Any, n: Any) -> None:
    """Sort n values of each lane, stably, with their weights: Batcher's odd-even merges."""
    for i in range(n):
        store(s, SORTED + i * STEP, load(WIDE, s, X + i * STEP))
        store(s, SORTED_W + i * STEP, load(WIDE, s, W + i * STEP))
        store(s, PLACE + i * STEP, splat(WIDE_INT, i))
    p = 1
    while p < n:
        k = p
        while k > 0:
            for j in range(k % p, n - k, 2 * k):
                for i in range(j, min(j + k, n - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        _exchange(s, i, i + k)
            k //= 2
        p *= 2


@inline
def _rank(s: Any, n: Any, boundary: Any) -> Any:
    """Return the value, and where it comes from, that a boundary comes before; infinity behind the last."""
    x, place = splat(WIDE, F(np.inf)), splat(WIDE_INT, 0)
    for j in range(n):
        is_boundary = boundary == j
        x, place = (
            choose(is_boundary, load(WIDE, s, SORTED + j * STEP), x),
            choose(is_boundary, load(WIDE_INT, s, PLACE + j * STEP), place),
        )
    return x, place


@inline
def store_slots(s: Any, n: Any, low: Any, high: Any, mirrored: Any) -> None:
    """Store the slot of each group: levels 0 below boundary ``low``, 2 from ``high`` on, 1 between; or 2 - level."""
    low_x, low_place = _rank(s, n, low)
    high_x, high_place = _rank(s, n, high)
    one = splat(WIDE_INT, 1)
    for k in range(n // 8):
        slot = splat(WIDE_INT, 0)
        for i in range(8 * k + 7, 8 * k - 1, -1):
            x = load(WIDE, s, X + i * STEP)
            level = choose(x > low_x, one, choose(x == low_x, choose(low_place <= i, one, 0), 0))
            level = level + choose(x > high_x, one, choose(x == high_x, choose(high_place <= i, one, 0), 0))
            slot = slot * 3 + choose(mirrored, 2 - level, level)
        store(s, SLOT + k * STEP, slot)


# ---------------------------------------------------------------- the search


@inline
def sum_below(s: Any, n: Any, half: Any) -> None:
    """Store the sums of w * x and w over the values below each boundary; of a half of the sub-block, or all (-1)."""
    x_at, w_at = SUM_X, SUM_W
    if half == 1:
        x_at, w_at = SUM_X + 18 * STEP, SUM_W + 18 * STEP
    sum_x = sum_w = splat(WIDE, F(0))
    store(s, x_at, sum_x)
    store(s, w_at, sum_w)
    for j in range(n):
        w = load(WIDE, s, SORTED_W + j * STEP)
        more_x, more_w = sum_x + w * load(WIDE, s, SORTED + j * STEP), sum_w + w
        if half >= 0:
            in_half = load(WIDE_INT, s, PLACE + j * STEP) >> 3 == half
            more_x, more_w = choose(in_half, more_x, sum_x), choose(in_half, more_w, sum_w)
        sum_x, sum_w = more_x, more_w
        store(s, x_at + (j + 1) * STEP, sum_x)
        store(s, w_at + (j + 1) * STEP, sum_w)


@inline
def is_better(best: Any, qx: Any, q2: Any) -> Any:
    return choose(q2 > F(0), qx * qx, F(-np.inf)) > best * q2


@inline
def keep_better(fit: Any, qx: Any, q2: Any, low: Any, high: Any, shift: Any) -> Any:
    """Return ``fit``, (rating, scale, boundaries, shift), with this candidate in the lanes where it is better."""
    best, scale, old_low, old_high, old_shift = fit
    better = is_better(best, qx, q2)
    if any_lane(better):
        ratio = qx / q2
        scale, best = choose(better, ratio, scale), choose(better, ratio * qx, best)
        old_low, old_high = choose(better, low, old_low), choose(better, high, old_high)
        old_shift = choose(better, shift, old_shift)
    return best, scale, old_low, old_high, old_shift


@inline
def _search_s(s: Any, scale: Any) -> Any:
    """Return the best scale of each lane, its boundaries and its shift: 1, -1, or 0 where nothing has a rating."""
    sum_below(s, 32, -1)
    all_x, all_w = load(WIDE, s, SUM_X + 32 * STEP), load(WIDE, s, SUM_W + 32 * STEP)
    for i in range(33):
        x, w = all_x - load(WIDE, s, SUM_X + i * STEP), all_w - load(WIDE, s, SUM_W + i * STEP)
        store(s, TERMS + i * STEP, x * F(1.125))
        store(s, TERMS + (36 + i) * STEP, x * F(0.875))
        store(s, TERMS + (72 + i) * STEP, w * F(1.125) * F(1.125))
        store(s, TERMS + (108 + i) * STEP, w * F(0.875) * F(0.875))
    zero = splat(WIDE_INT, 0)
    fit = splat(WIDE, F(-np.finfo(np.float32).max)), scale, zero, zero, zero
    for i in range(33):
        x, w = load(WIDE, s, SUM_X + i * STEP), load(WIDE, s, SUM_W + i * STEP)
        x_up, x_down = x * F(-0.875), x * F(-1.125)
        w_up, w_down = w * F(-0.875) * F(-0.875), w * F(-1.125) * F(-1.125)
        for j in range(i, 33):
            middle = (load(WIDE, s, SUM_X + j * STEP) - x) * EIGHTH
            middle2 = (load(WIDE, s, SUM_W + j * STEP) - w) * EIGHTH * EIGHTH
            qx = x_up + middle + load(WIDE, s, TERMS + j * STEP)
            q2 = w_up + middle2 + load(WIDE, s, TERMS + (72 + j) * STEP)
            fit = keep_better(fit, qx, q2, i, j, 1)
            qx = x_down - middle + load(WIDE, s, TERMS + (36 + j) * STEP)
            q2 = w_down + middle2 + load(WIDE, s, TERMS + (108 + j) * STEP)
            fit = keep_better(fit, qx, q2, i, j, -1)
    return fit[1:]


@inline
def _half_sums(s: Any, i: Any, j: Any, half: Any) -> Any:
    """Return sum(w q x) and sum(w q q) of a half of 16 values for boundaries i, j: shifted up, and down."""
    offset = half * 18 * STEP
    below = load(WIDE, s, SUM_X + offset + i * STEP) + load(WIDE, s, SUM_X + offset + j * STEP)
    all_x, all_w = load(WIDE, s, SUM_X + offset + 16 * STEP), load(WIDE, s, SUM_W + offset + 16 * STEP)
    w, v = load(WIDE, s, SUM_W + offset + i * STEP), load(WIDE, s, SUM_W + offset + j * STEP)
    up = all_w * F(1.125) * F(1.125) + w * F(0.75) + v * F(-1.25)
    down = all_w * F(0.875) * F(0.875) + w * F(1.25) + v * F(-0.75)
    return all_x * F(1.125) - below, up, all_x * F(0.875) - below, down


@inline
def _search_m(s: Any, scale: Any) -> Any:
    """Return the best scale of each lane, its boundaries, which halves shift down: 0 .. 3, bit 1 the first; or -1."""
    sum_below(s, 16, 0)
    sum_below(s, 16, 1)
    zero = splat(WIDE_INT, 0)
    fit = splat(WIDE, F(-np.finfo(np.float32).max)), scale, zero, zero, splat(WIDE_INT, -1)
    for i in range(17):
        for j in range(i, 17):
            x0_up, w0_up, x0_down, w0_down = _half_sums(s, i, j, 0)
            x1_up, w1_up, x1_down, w1_down = _half_sums(s, i, j, 1)
            for k in range(4):
                qx = (x0_up if k < 2 else x0_down) + (x1_up if k % 2 == 0 else x1_down)
                q2 = (w0_up if k < 2 else w0_down) + (w1_up if k % 2 == 0 else w1_down)
                fit = keep_better(fit, qx, q2, i, j, k)
    return fit[1:]


# ---------------------------------------------------------------- sub-blocks


@inline
def largest_magnitude(s: Any, n: Any) -> Any:
    largest = splat(WIDE, F(0))
    for offset in range(0, n * STEP, STEP):
        largest = vmax(largest, vabs(load(WIDE, s, X + offset)))
    return largest


@inline
def rate_terms(s: Any, n: Any, factor: Any) -> Any:
    """Return the terms of sum(w q x) and sum(w q q), added up in order, for the words in SLOT and the shifts in SHIFT.

    q is factor times the values; the terms are stored at SORTED and SORTED_W.
    """
    sum_qx = sum_q2 = splat(WIDE, F(0))
    for k in range(n // 8):
        word, shift = load(WIDE_INT, s, SLOT + k * STEP), load(WIDE, s, SHIFT + k * STEP)
        for i in range(8):
            q = (lookup16_f32(ternary(), word) + shift) * factor
            word = word >> 2
            offset = (8 * k + i) * STEP
            wq = load(WIDE, s, W + offset) * q
            qx, q2 = wq * load(WIDE, s, X + offset), wq * q
            store(s, SORTED + offset, qx)
            store(s, SORTED_W + offset, q2)
            sum_qx, sum_q2 = sum_qx + qx, sum_q2 + q2
    return sum_qx, sum_q2


@inline
def fit_loaded(s: Any, lists: Any, group: Any, n: Any) -> None:
    """Search LANES sub-blocks of n values with their weights; store the result as that of ``group``."""
    for offset in range(0, n * STEP, STEP):
        store(s, ROOT + offset, load(WIDE, s, W + offset))
    largest = largest_magnitude(s, n)
    sort_values(s, n)
    if n == 32:
        scale, low, high, direction = _search_s(s, largest)
        shifts = choose(direction < 0, 3, splat(WIDE_INT, 0))
        dead = choose(largest < F(1e-12), 0, direction) == 0
    else:
        scale, low, high, shifts = _search_m(s, largest)
        dead = choose(largest < F(1e-7), -1, shifts) < 0
    negative = scale < F(0)
    shifts = choose(dead, 0, choose(negative, 3 - shifts, shifts))
    scale = choose(negative, -scale, scale)
    for k in range(n // 8):
        down = (shifts & (1 if k else 2)) != 0
        store(s, SHIFT + k * STEP, choose(down, -EIGHTH, splat(WIDE, EIGHTH)))
    store_slots(s, n, low, high, negative)
    grid.slots_to_words(s, scale, lists, n, 8, True)
    off = splat(WIDE_INT, 0)
    for k in range(n // 8):
        off = off | load(WIDE_INT, s, SLOT + k * STEP)
    sum_qx, sum_q2 = rate_terms(s, n, F(1))
    fits = choose(sum_qx > F(0), choose(sum_q2 > F(0), off & OFF, 0), 0) != 0
    offset = group * STEP
    store(s, SCALES + offset, choose(dead, F(0), choose(fits, sum_qx / sum_q2, scale)))
    store(s, BEST_SIGNS + offset, shifts)
    for k in range(n // 8):
        word = load(WIDE_INT, s, SLOT + k * STEP) & (OFF - 1)
        store(s, BEST_WORDS + k * 16 * STEP + offset, choose(dead, 0, word))


@inline
def _fit_sub_blocks(s: Any, x: Any, w: Any, lists: Any, count: Any, n: Any) -> None:
    """Search the sub-blocks of ``count`` super-blocks. BEST_SIGNS gets the halves that shift down, bit 1 the first."""
    store_sigma(s, x, 256 // n, 2, X, grid.SCALE, SIGMA)
    for group in range((count * (256 // n) + LANES - 1) // LANES):
        load_sub_blocks(s, x, w, group, n, False)
        fit_loaded(s, lists, group, n)


@inline
def _scale_code(s: Any, offset: Any, inverse: Any) -> Any:
    """Return the 3-bit code of the scale of a sub-block."""
    return max(0, min(7, nearest_int(F(0.5) * (inverse * load(types.float32, s, SCALES + offset) - F(1)))))


# ---------------------------------------------------------------- IQ1_S


@inline
def iq1_s_batch(s: Any, x: Any, w: Any, out: Any, count: Any, *lists: Any) -> None:
    """Encode super-blocks as IQ1_S. Source: quantize_row_iq1_s_impl."""
    _fit_sub_blocks(s, x, w, lists, count, 32)
    for b in range(count):
        o, first, alive, inverse = begin_block(s, b, 8, F(15), F(1.125), out, 50)
        for ib in range(8):
            offset, high = first + 4 * ib, 0
            for k in range(4):
                index = index_of(s, lists, offset, k)
                store(o, 2 + 4 * ib + k, np.uint8(index))
                high |= index >> 8 << 3 * k
            if alive:
                down = load(types.uint32, s, BEST_SIGNS + offset) != 0
                high |= (_scale_code(s, offset, inverse) | (8 if down else 0)) << 12
            store(o, 34 + 2 * ib, np.uint16(high))


# ---------------------------------------------------------------- IQ1_M


@inline
def sum_terms(s: Any, group: Any) -> None:
    """Store the sums of super-blocks over the terms of LANES sub-blocks of 16, in order."""
    for b in range(LANES // 16):
        sum_qx = sum_q2 = F(0)
        for lane in range(16 * b, 16 * b + 16):
            for i in range(4 * lane, 4 * lane + 16 * STEP, STEP):
                sum_qx += load(types.float32, s, SORTED + i)
                sum_q2 += load(types.float32, s, SORTED_W + i)
        of_block = 4 * (group * (LANES // 16) + b)
        store(s, FITTED_X + of_block, sum_qx)
        store(s, FITTED_2 + of_block, sum_q2)


@inline
def _refit(s: Any, x: Any, w: Any, count: Any) -> None:
    """Store sum(w q x) and sum(w q q) of super-blocks for the codes of scales, both in order, behind SIGNS."""
    for group in range((count * 16 + LANES - 1) // LANES):
        load_sub_blocks(s, x, w, group, 16, False)
        offset = group * STEP
        shifts = load(WIDE_INT, s, BEST_SIGNS + offset)
        for k in range(2):
            down = (shifts & (1 if k else 2)) != 0
            store(s, SHIFT + k * STEP, choose(down, -EIGHTH, splat(WIDE, EIGHTH)))
            store(s, SLOT + k * STEP, load(WIDE_INT, s, BEST_WORDS + k * 16 * STEP + offset))
        rate_terms(s, 16, load(WIDE, s, FACTORS + offset))
        sum_terms(s, group)


@inline
def _fit_halves(s: Any, x: Any, w: Any, lists: Any, count: Any) -> None:
    _fit_sub_blocks(s, x, w, lists, count, 16)


@inline
def iq1_m_batch(s: Any, x: Any, w: Any, out: Any, count: Any, *lists: Any) -> None:
    """Encode super-blocks as IQ1_M. Source: quantize_row_iq1_m_impl."""
    _fit_halves(s, x, w, lists, count)
    for b in range(count):
        inverse = F(1) / (largest_scale(s, 64 * b, 16) / F(15))
        for offset in range(64 * b, 64 * b + 64, 4):
            store(s, FACTORS + offset, F(2 * _scale_code(s, offset, inverse) + 1))
    _refit(s, x, w, count)
    for b in range(count):
        o, first = out + 56 * b, 64 * b
        top = largest_scale(s, first, 16)
        d, alive = top / F(15), top > F(0)
        scales = np.int64(0)
        for ib in range(16):
            offset = first + 4 * ib
            i0, i1 = index_of(s, lists, offset, 0), index_of(s, lists, offset, 1)
            high = i0 >> 8 | i1 >> 8 << 4
            store(o, 2 * ib, np.uint16((i0 & 255) | (i1 & 255) << 8))
            if alive:
                shifts = np.int64(load(types.int32, s, BEST_SIGNS + offset))
                high |= (shifts & 2) << 2 | (shifts & 1) << 7
                code = np.int64(load(types.float32, s, FACTORS + offset)) >> 1
                scales |= code << (16 * (ib // 4) + 3 * (ib % 4))
            store(o, 32 + ib, np.uint8(high))
        if alive:
            sum_q2 = load(types.float32, s, FITTED_2 + 4 * b)
            d = load(types.float32, s, FITTED_X + 4 * b) / sum_q2 if sum_q2 > F(0) else d
            half = np.int64(f32_to_f16(d * D_GAIN))
            scales |= (half & 15) << 12 | (half & 0xF0) << 24 | (half & 0xF00) << 36 | (half & 0xF000) << 48
        store(o, 48, scales)

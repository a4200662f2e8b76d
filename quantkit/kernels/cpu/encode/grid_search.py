"""The search for the scale of a sub-block whose values are points of a grid: IQ2 and IQ3.

A candidate for 1 / scale rounds values to levels q = 1, 3, 5, ... A group (4 values of IQ3, 8 of IQ2) whose point is
beside the grid becomes the one of its neighbours (neighbours.py) with the smallest sum(sqrt(w) * (scale * q - x)^2).
The candidate is rated by sum(w q x)^2 / sum(w q q), with the best scale sum(w q x) / sum(w q q). At the end groups are
rounded again by the scale that won.

A lane is a sub-block in all of this but the search among neighbours, where a lane is a neighbour: what a level costs is
computed once for every value of the group, in tables of a vector, and costs are added in the reference's order.

Source: llama.cpp b11434 ggml-quants.c quantize_row_iq{2_xxs,2_xs,2_s,3_xxs,3_s}_impl, iq{2,3}_find_best_neighbour.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    any_lane,
    convert,
    extract,
    f32x16,
    first_lane,
    hmin,
    i32x16,
    load,
    lookup16_f32,
    make_constant,
    mask_bits,
    nearest_int,
    splat,
    store,
    u16x16,
    vmax,
    vmin,
    vsqrt,
)
from quantkit.kernels.cpu.core.simd import select as choose
from quantkit.kernels.cpu.encode.neighbours import WORDS
from quantkit.kernels.cpu.encode.search import STEP, WIDE, WIDE_INT, F

#: Set in a word that is not its group's own point.
OFF = 1 << 24

# Scratch, [value][lane]: magnitudes, weights, weights * x, roots of weights; [group][lane]: slots, then words, and the
# best words; a queue of groups beside the grid; [lane]: scales of a candidate, signs;
# [group][lane]: IQ1's shifts.
X, W, WX, ROOT = (k * 32 * STEP for k in range(4))
SLOT, BEST, QUEUE = 128 * STEP, 136 * STEP, 144 * STEP
SCALE, SIGNS, SHIFT, END = 152 * STEP, 153 * STEP, 154 * STEP, 158 * STEP

ternary = make_constant(f32x16, [-1, 0, 1, 0] * 4, "grid_ternary")
odd3 = make_constant(f32x16, [1, 3, 5, 7] * 4, "grid_odd3")
odd8 = make_constant(f32x16, [1, 3, 5, 7, 9, 11, 13, 15] * 2, "grid_odd8")
lane_numbers = make_constant(i32x16, list(range(16)), "grid_lane_numbers")


@inline
def bits_of(size: Any) -> Any:
    """Return the bits of a level in a word."""
    return 3 if size == 4 else 2


@inline
def values_of_levels(size: Any) -> Any:
    """Return the values of levels 0, 1, ..., repeated: a lookup needs no mask if more bits follow."""
    return odd8() if size == 4 else odd3()


# ---------------------------------------------------------------- the nearest neighbour of a point


@inline
def _cost(s: Any, at: Any, q: Any) -> Any:
    """Return what each level costs of the value at byte ``at``; q: scale times the values of levels."""
    diff = q - load(types.float32, s, X + at)
    return load(types.float32, s, ROOT + at) * diff * diff


@inline
def _costs(s: Any, at: Any, q: Any, size: Any) -> Any:
    """Return the costs of levels of each value of a group."""
    c0, c1 = _cost(s, at, q), _cost(s, at + STEP, q)
    c2, c3 = _cost(s, at + 2 * STEP, q), _cost(s, at + 3 * STEP, q)
    if size == 4:
        return c0, c1, c2, c3, c0, c0, c0, c0
    c4, c5 = _cost(s, at + 4 * STEP, q), _cost(s, at + 5 * STEP, q)
    return c0, c1, c2, c3, c4, c5, _cost(s, at + 6 * STEP, q), _cost(s, at + 7 * STEP, q)


@inline
def _distances(words: Any, costs: Any, size: Any) -> Any:
    """Return the weighted distances of 16 neighbours, added in order."""
    c0, c1, c2, c3, c4, c5, c6, c7 = costs
    b = bits_of(size)
    d = lookup16_f32(c0, words) + lookup16_f32(c1, words >> b)
    d = d + lookup16_f32(c2, words >> 2 * b) + lookup16_f32(c3, words >> 3 * b)
    if size == 4:
        return d
    d = d + lookup16_f32(c4, words >> 4 * b) + lookup16_f32(c5, words >> 5 * b)
    return d + lookup16_f32(c6, words >> 6 * b) + lookup16_f32(c7, words >> 7 * b)


@inline
def _nearest(s: Any, at: Any, q: Any, entry: Any, words: Any, size: Any) -> Any:
    """Return the word of the nearest neighbour, the first of several, of the group whose x begins at byte ``at``.

    q: scale times the values of levels.
    """
    costs = _costs(s, at, q, size)
    first = (entry >> 5) * (2 * WORDS)
    best = _distances(convert(i32x16, load(u16x16, words, first)), costs, size)
    place = lane_numbers()
    for k in range(1, entry & 31):
        d = _distances(convert(i32x16, load(u16x16, words, first + 2 * WORDS * k)), costs, size)
        closer = d < best
        best, place = choose(closer, d, best), choose(closer, lane_numbers() + WORDS * k, place)
    least = best == hmin(best)
    bits = mask_bits(least)
    if bits & (bits - np.uint64(1)):
        found = hmin(choose(least, place, 32 * WORDS))
    else:
        found = extract(place, first_lane(least) & 15)
    return load(types.uint16, words, first + 2 * found)


# ---------------------------------------------------------------- a candidate


@inline
def _round_to_slots(s: Any, iscale: Any, n: Any, size: Any, top: Any) -> None:
    """Round x * iscale to levels 0 .. top: store the slot of each group's point."""
    for k in range(n // size):
        slot = splat(WIDE_INT, 0)
        for i in range(size - 1, -1, -1):
            x = load(WIDE, s, X + (k * size + i) * STEP)
            level = nearest_int(F(0.5) * (iscale * x - F(1)))
            slot = slot * (top + 1) + vmax(vmin(level, top), 0)
        store(s, SLOT + k * STEP, slot)


@inline
def slots_to_words(s: Any, scale: Any, lists: Any, n: Any, size: Any, shifted: Any) -> None:
    """Replace slots by words: of the point itself or, with OFF, of its nearest neighbour.

    shifted: the values of levels are not 1, 3, 5, ... but -1, 0, 1 plus the SHIFT of the group.
    """
    entries, words = lists[0], lists[1]
    store(s, SCALE, scale)
    count = 0
    for at in range(0, n // size * STEP, 4):
        entry = load(types.int32, entries, 4 * load(types.int32, s, SLOT + at))
        store(s, SLOT + at, np.int32(~entry))
        store(s, QUEUE + 4 * count, np.int32(at))
        count += entry >= 0
    for j in range(count):
        at = np.int64(load(types.int32, s, QUEUE + 4 * j))
        entry = ~np.int64(load(types.int32, s, SLOT + at))
        lane = at & (STEP - 1)
        values = values_of_levels(size)
        if shifted:
            values = ternary() + load(types.float32, s, SHIFT + at)
        q = load(types.float32, s, SCALE + lane) * values
        word = _nearest(s, at + (size - 1) * (at - lane), q, entry, words, size)
        store(s, SLOT + at, np.int32(np.int64(word) | OFF))


@inline
def _rate(s: Any, n: Any, size: Any) -> Any:
    """Return sum(w q x) and sum(w q q) for the words."""
    sum_qx = sum_q2 = splat(WIDE, F(0))
    for k in range(n // size):
        word = load(WIDE_INT, s, SLOT + k * STEP)
        for i in range(size):
            q = lookup16_f32(values_of_levels(size), word)
            word = word >> bits_of(size)
            at = (k * size + i) * STEP
            sum_qx = sum_qx + load(WIDE, s, WX + at) * q
            sum_q2 = sum_q2 + load(WIDE, s, W + at) * q * q
    return sum_qx, sum_q2


@inline
def search_scale(
    s: Any, lists: Any, n: Any, size: Any, top: Any, largest: Any, scale: Any, steps: Any, step: Any, off: Any
) -> Any:
    """Try (2 * top + 1 + k * step) / largest for k = -steps .. steps; return the best scale, its words in BEST.

    Where none is better than 0, these are ``scale`` and point 0, which counts as off the grid if ``off``.
    """
    best = splat(WIDE, F(0))
    for k in range(n // size):
        store(s, BEST + k * STEP, splat(WIDE_INT, OFF if off else 0))
    for trial in range(-steps, steps + 1):
        iscale = splat(WIDE, F(2 * top + 1) + F(trial) * F(step)) / largest
        _round_to_slots(s, iscale, n, size, top)
        slots_to_words(s, F(1) / iscale, lists, n, size, False)
        sum_qx, sum_q2 = _rate(s, n, size)
        better = choose(sum_q2 > F(0), sum_qx * sum_qx, F(-np.inf)) > best * sum_q2
        if any_lane(better):
            ratio = sum_qx / sum_q2
            scale, best = choose(better, ratio, scale), choose(better, ratio * sum_qx, best)
            for k in range(0, n // size * STEP, STEP):
                store(s, BEST + k, choose(better, load(WIDE_INT, s, SLOT + k), load(WIDE_INT, s, BEST + k)))
    return scale


#: Which groups of a sub-block are rounded again.
OFF_GRID, ALL_IF_ONE_IS_OFF, ALL = 0, 1, 2


@inline
def round_again(s: Any, lists: Any, n: Any, size: Any, top: Any, scale: Any, which: Any) -> Any:
    """Round groups by the best scale, if it is positive; return the scale that fits the words in BEST then."""
    off = splat(WIDE_INT, OFF if which == ALL else 0)
    for k in range(n // size):
        off = off | load(WIDE_INT, s, BEST + k * STEP)
    again = choose(scale > F(0), off & OFF, 0)
    if not any_lane(again != 0):
        return scale
    _round_to_slots(s, F(1) / scale, n, size, top)
    slots_to_words(s, scale, lists, n, size, False)
    for k in range(0, n // size * STEP, STEP):
        best = load(WIDE_INT, s, BEST + k)
        mine = again & best if which == OFF_GRID else again
        word = choose((mine & OFF) != 0, load(WIDE_INT, s, SLOT + k), best)
        store(s, SLOT + k, word)
        store(s, BEST + k, word)
    sum_qx, sum_q2 = _rate(s, n, size)
    ratio = choose(sum_q2 > F(0), sum_qx / sum_q2, scale)
    return choose(again != 0, ratio, scale)


# ---------------------------------------------------------------- signs and weights


@inline
def _least(s: Any, k: Any) -> Any:
    """Return which of 8 values has the least w * x * x, the first of several."""
    x = load(WIDE, s, X + k * STEP)
    least, at = load(WIDE, s, W + k * STEP) * x * x, splat(WIDE_INT, 0)
    for i in range(1, 8):
        x = load(WIDE, s, X + (k + i) * STEP)
        size = load(WIDE, s, W + (k + i) * STEP) * x * x
        less = size < least
        least, at = choose(less, size, least), choose(less, i, at)
    return at


@inline
def take_signs(s: Any, n: Any, even: Any) -> None:
    """Replace values by magnitudes; store their signs: 8 bits for 8 values, lowest first.

    even: 7 bits; if an odd number is negative, the value that matters least changes its sign first, and its magnitude
    becomes negative.
    """
    signs = splat(WIDE_INT, 0)
    for k in range(0, n, 8):
        bits = splat(WIDE_INT, 0)
        for i in range(8):
            bits = bits | choose(load(WIDE, s, X + (k + i) * STEP) < F(0), 1 << i, splat(WIDE_INT, 0))
        flip = splat(WIDE_INT, -1)
        if even:
            odd = bits ^ (bits >> 4)
            odd = odd ^ (odd >> 2)
            odd = odd ^ (odd >> 1)
            flip = choose((odd & 1) != 0, _least(s, k), flip)
        for i in range(8):
            at = X + (k + i) * STEP
            x = load(WIDE, s, at)
            x = choose(x < F(0), -x, x)
            if even:
                flips = flip == i
                x, bits = choose(flips, -x, x), choose(flips, bits ^ (1 << i), bits)
            store(s, at, x)
        signs = signs | ((bits & 127) << (k // 8 * 7) if even else bits << k)
    store(s, SIGNS, signs)


@inline
def derive_weights(s: Any, n: Any) -> None:
    """Store w * x and sqrt(w)."""
    for at in range(0, n * STEP, STEP):
        w = load(WIDE, s, W + at)
        store(s, WX + at, w * load(WIDE, s, X + at))
        store(s, ROOT + at, vsqrt(w))


@inline
def largest_value(s: Any, n: Any) -> Any:
    """Return the largest x of each lane."""
    largest = load(WIDE, s, X)
    for at in range(STEP, n * STEP, STEP):
        largest = vmax(largest, load(WIDE, s, X + at))
    return largest

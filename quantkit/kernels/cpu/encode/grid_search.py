"""The search for the scale of a sub-block whose values are points of a grid: IQ2 and IQ3.

A candidate for 1 / scale rounds values to levels q = 1, 3, 5, ... A group (4 values of IQ3, 8 of IQ2) whose point is
off the grid becomes the one of its neighbours (neighbours.py) with the smallest sum(sqrt(w) * (scale * q - x)^2).
The candidate is rated by sum(w q x)^2 / sum(w q q), with the best scale sum(w q x) / sum(w q q). At the end groups are
rounded again by the scale that won.

A lane is a sub-block in all of this but the search among neighbours, where a lane is a neighbour: the cost of each
level is computed once for every value of the group, in tables of a vector, and costs are added in the reference's
order.

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
    hmin,
    i32x16,
    load,
    lookup16_f32,
    make_constant,
    mask_bits,
    nearest_int,
    splat,
    store,
    trailing_zeros,
    transpose16_apart,
    u16x16,
    vmax,
    vmin,
    vsqrt,
)
from quantkit.kernels.cpu.core.simd import select as choose
from quantkit.kernels.cpu.encode.neighbours import WORDS
from quantkit.kernels.cpu.encode.search import LANES, STEP, WIDE, WIDE_INT, F

#: Relative tolerance of distances, far above the rounding error of their sums of 8 terms.
TOLERANCE = F(2.0**-12)
#: A level that no point has: farther away than any neighbour, or as far as all.
UNREACHABLE = 1e18
#: Flags of a word: it is not the point of its own group; it is the nearest by more than TOLERANCE.
OFF, SURE = 1 << 24, 1 << 25

# Scratch. [value][lane]: magnitudes, weights, weights * x, roots of weights.
X, W, WX, ROOT = (k * 32 * STEP for k in range(4))
# [group][lane]: slots, then words; the best words; IQ1's shifts; the margin between distances that makes a word SURE. A
# queue of groups. [lane]: scales, signs.
SLOT, BEST, QUEUE, SHIFT, BOUND = ((128 + 8 * k) * STEP for k in range(5))
SCALE, SIGNS = 168 * STEP, 169 * STEP
# [trial][lane]: 1 / scale, scales, slots of a group. [lane][trial]: slots, words. [group][trial][lane]: words. Queues
# of indices into [lane][trial], and of pairs of them.
TRIALS = 32
ISCALES, SCALES, SLOTS, RUNS, RUN_WORDS, WORDS_OF = ((170 + k * TRIALS) * STEP for k in range(6))
TASKS = WORDS_OF + 8 * TRIALS * STEP
SPANS, END = TASKS + TRIALS * STEP, TASKS + 3 * TRIALS * STEP

ternary = make_constant(f32x16, [-1, 0, 1, UNREACHABLE] * 4, "grid_ternary")
odd3 = make_constant(f32x16, [1, 3, 5, UNREACHABLE] * 4, "grid_odd3")
odd8 = make_constant(f32x16, [1, 3, 5, 7, 9, 11, 13, 15] + [UNREACHABLE] * 8, "grid_odd8")
lane_numbers = make_constant(i32x16, list(range(16)), "grid_lane_numbers")


@inline
def bits_of(size: Any) -> Any:
    """Return the bits of a level in a word."""
    return 16 // size


@inline
def values_of_levels(size: Any) -> Any:
    """Return the values of levels 0, 1, ..., those of 2 bits repeated: a lookup needs no mask if more bits follow."""
    return odd8() if size == 4 else odd3()


# ---------------------------------------------------------------- the nearest neighbour of a point


@inline
def _cost(s: Any, offset: Any, q: Any) -> Any:
    """Return the error of the value at byte ``offset`` with each level; q: scale times the values of levels."""
    diff = q - load(types.float32, s, X + offset)
    return load(types.float32, s, ROOT + offset) * diff * diff


@inline
def _costs(s: Any, offset: Any, q: Any, size: Any) -> Any:
    """Return the costs of levels of each value of a group."""
    c0, c1 = _cost(s, offset, q), _cost(s, offset + STEP, q)
    c2, c3 = _cost(s, offset + 2 * STEP, q), _cost(s, offset + 3 * STEP, q)
    if size == 4:
        return c0, c1, c2, c3, c0, c0, c0, c0
    c4, c5 = _cost(s, offset + 4 * STEP, q), _cost(s, offset + 5 * STEP, q)
    return c0, c1, c2, c3, c4, c5, _cost(s, offset + 6 * STEP, q), _cost(s, offset + 7 * STEP, q)


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
def _nearest(s: Any, offset: Any, q: Any, entry: Any, words: Any, size: Any) -> Any:
    """Find the nearest neighbour, the first of several, of the group whose x begins at byte ``offset``.

    q: scale times the values of levels. Returns its word, its distance and that of the second nearest.
    """
    costs = _costs(s, offset, q, size)
    first = (entry >> 5) * (2 * WORDS)
    best = _distances(convert(i32x16, load(u16x16, words, first)), costs, size)
    place, second = lane_numbers(), splat(f32x16, F(np.inf))
    for k in range(1, entry & 31):
        d = _distances(convert(i32x16, load(u16x16, words, first + 2 * WORDS * k)), costs, size)
        closer = d < best
        second = vmin(choose(closer, best, d), second)
        best, place = choose(closer, d, best), choose(closer, lane_numbers() + WORDS * k, place)
    distance = hmin(best)
    least = best == distance
    bits = mask_bits(least)
    nearest, runner_up = np.int64(extract(place, trailing_zeros(bits) & 15)), hmin(choose(least, second, best))
    if bits & (bits - np.uint64(1)):
        nearest, runner_up = np.int64(hmin(choose(least, place, 32 * WORDS))), distance
    return np.int64(load(types.uint16, words, first + 2 * nearest)), distance, runner_up


# ---------------------------------------------------------------- a candidate


@inline
def slot_of(s: Any, iscale: Any, k: Any, size: Any, top: Any) -> Any:
    """Return the slot of the point of group k: x * iscale rounded to levels 0 .. top."""
    slot = splat(WIDE_INT, 0)
    for i in range(size - 1, -1, -1):
        x = load(WIDE, s, X + (k * size + i) * STEP)
        level = nearest_int(F(0.5) * (iscale * x - F(1)))
        slot = slot * (top + 1) + vmax(vmin(level, top), 0)
    return slot


@inline
def slots_to_words(s: Any, scale: Any, lists: Any, n: Any, size: Any, shifted: Any) -> None:
    """Replace slots by words: of the point itself or, with OFF, of its nearest neighbour.

    shifted: the values of levels are not 1, 3, 5, ... but -1, 0, 1 plus the SHIFT of the group.
    """
    entries, words = lists[0], lists[1]
    store(s, SCALE, scale)
    count = 0
    for offset in range(0, n // size * STEP, 4):
        entry = load(types.int32, entries, 4 * load(types.int32, s, SLOT + offset))
        store(s, SLOT + offset, np.int32(~entry))
        store(s, QUEUE + 4 * count, np.int32(offset))
        count += entry >= 0
    for j in range(count):
        place = np.int64(load(types.int32, s, QUEUE + 4 * j))
        entry = ~np.int64(load(types.int32, s, SLOT + place))
        lane = place & (STEP - 1)
        values = values_of_levels(size)
        if shifted:
            values = ternary() + load(types.float32, s, SHIFT + place)
        q = load(types.float32, s, SCALE + lane) * values
        word, _, _ = _nearest(s, place + (size - 1) * (place - lane), q, entry, words, size)
        store(s, SLOT + place, np.int32(word | OFF))


@inline
def rate_words(s: Any, words: Any, stride: Any, n: Any, size: Any) -> Any:
    """Return sum(w q x) and sum(w q q) for words ``stride`` bytes apart."""
    sum_qx = sum_q2 = splat(WIDE, F(0))
    for k in range(n // size):
        word = load(WIDE_INT, s, words + k * stride)
        for i in range(size):
            q = lookup16_f32(values_of_levels(size), word)
            word = word >> bits_of(size)
            offset = (k * size + i) * STEP
            sum_qx = sum_qx + load(WIDE, s, WX + offset) * q
            sum_q2 = sum_q2 + load(WIDE, s, W + offset) * q * q
    return sum_qx, sum_q2


# ---------------------------------------------------------------- all candidates


@inline
def _store_bounds(s: Any, n: Any, size: Any) -> None:
    """Store TOLERANCE * sum(sqrt(w) x^2) of each group; infinity where it is so small that products may underflow."""
    for k in range(n // size):
        total = splat(WIDE, F(0))
        for offset in range(k * size * STEP, (k + 1) * size * STEP, STEP):
            x = load(WIDE, s, X + offset)
            total = total + load(WIDE, s, ROOT + offset) * x * x
        store(s, BOUND + k * STEP, choose(total > F(1e-30), TOLERANCE * total, F(np.inf)))


@inline
def _fill(s: Any, words: Any, after: Any, word: Any, trials: Any) -> None:
    """Set the words of the trials behind ``after``, of the 16 or 32 at byte ``words``."""
    store(s, words, choose(lane_numbers() > after, word, load(i32x16, s, words)))
    if trials > 16:
        store(s, words + 64, choose(lane_numbers() > after - 16, word, load(i32x16, s, words + 64)))


@inline
def _list_runs(s: Any, lane: Any, entries: Any, trials: Any, tasks: Any, spans: Any) -> Any:
    """Split a group's slots, one for each trial, into runs of the same point; return the ends of TASKS and SPANS.

    Words of points on the grid are written; for others the run's ends become tasks, what lies between them a span.
    """
    slots, words = RUNS + 32 * lane, RUN_WORDS + 32 * lane
    changes = mask_bits(load(i32x16, s, slots) != load(i32x16, s, slots - 4)) | np.uint64(1)
    if trials > 16:
        changes |= mask_bits(load(i32x16, s, slots + 64) != load(i32x16, s, slots + 60)) << np.uint64(16)
    changes &= np.uint64((1 << trials) - 1)
    while changes:
        first = trailing_zeros(changes)
        changes &= changes - np.uint64(1)
        last = min(trailing_zeros(changes), trials) - 1
        entry = load(types.int32, entries, 4 * np.int64(load(types.int32, s, slots + 4 * first)))
        if entry < 0:
            _fill(s, words, first - 1, ~entry, trials)
            continue
        store(s, tasks, np.int32(32 * lane + 4 * first))
        store(s, tasks + 4, np.int32(32 * lane + 4 * last))
        tasks += 8 if last > first else 4
        store(s, spans, np.int32(32 * lane + 4 * first))
        store(s, spans + 4, np.int32(32 * lane + 4 * last))
        spans += 8 if last > first + 1 else 0
    return tasks, spans


@inline
def _do_task(s: Any, place: Any, k: Any, lists: Any, size: Any) -> None:
    """Find the nearest neighbour of group k for the lane and trial at byte ``place`` of RUNS."""
    lane, trial = place >> 5 & -4, place & 124
    q = load(types.float32, s, SCALES + trial * (STEP // 4) + lane) * values_of_levels(size)
    entry = np.int64(load(types.int32, lists[0], 4 * np.int64(load(types.int32, s, RUNS + place))))
    word, best, second = _nearest(s, size * k * STEP + lane, q, entry, lists[1], size)
    sure = second - best > TOLERANCE * best + load(types.float32, s, BOUND + k * STEP + lane)
    store(s, RUN_WORDS + place, np.int32(word | OFF | (SURE if sure else 0)))


@inline
def _do_span(s: Any, span: Any, trials: Any, tasks: Any, spans: Any) -> Any:
    """Fill a span whose ends have the same word for sure, else halve it; return the ends of TASKS and SPANS."""
    first, last = np.int64(load(types.int32, s, span)), np.int64(load(types.int32, s, span + 4))
    a, b = load(types.int32, s, RUN_WORDS + first), load(types.int32, s, RUN_WORDS + last)
    if a == b and a & SURE:
        words, end = RUN_WORDS + (first & -128), (last & 127) >> 2
        in_span = (lane_numbers() > (first & 127) >> 2) & (lane_numbers() < end)
        store(s, words, choose(in_span, a, load(i32x16, s, words)))
        if trials > 16:
            in_span = (lane_numbers() > ((first & 127) >> 2) - 16) & (lane_numbers() < end - 16)
            store(s, words + 64, choose(in_span, a, load(i32x16, s, words + 64)))
        return tasks, spans
    middle = (first + last) >> 3 << 2
    store(s, tasks, np.int32(middle))
    store(s, spans, np.int32(first))
    store(s, spans + 4, np.int32(middle))
    spans += 8 if middle > first + 4 else 0
    store(s, spans, np.int32(middle))
    store(s, spans + 4, np.int32(last))
    return tasks + 4, spans + (8 if last > middle + 4 else 0)


@inline
def _words_of_runs(s: Any, k: Any, lists: Any, trials: Any, size: Any) -> None:
    """Write the words of group k of all lanes, [lane][trial] at RUN_WORDS, for the slots at RUNS.

    Trials in a row that have the same point share its list of neighbours. Distances are sum(sqrt(w) x^2) plus scale *
    (a * scale - b), with a and b of each neighbour: between two scales with the same nearest neighbour it is the
    nearest, too, because the difference to another is scale times a linear function. Tasks and spans wait in queues, as
    one task after the other would wait for the result of the last.
    """
    tasks, spans = TASKS, SPANS
    for lane in range(0, STEP, 4):
        tasks, spans = _list_runs(s, lane, lists[0], trials, tasks, spans)
    task, span = TASKS, SPANS
    while task < tasks:
        for entry in range(task, tasks, 4):
            _do_task(s, np.int64(load(types.int32, s, entry)), k, lists, size)
        task, end = tasks, spans
        for entry in range(span, end, 8):
            tasks, spans = _do_span(s, entry, trials, tasks, spans)
        span = end


@inline
def _words_of_trials(s: Any, lists: Any, n: Any, size: Any, top: Any, trials: Any) -> None:
    """Find the words of all groups for all trials."""
    for k in range(n // size):
        for trial in range(0, trials * STEP, STEP):
            store(s, SLOTS + trial, slot_of(s, load(WIDE, s, ISCALES + trial), k, size, top))
        words = WORDS_OF + k * TRIALS * STEP
        for half in range(0, LANES // 16 * 64, 64):
            for part in range(2 if trials > 16 else 1):
                run = RUNS + 32 * half + 64 * part
                transpose16_apart(s, SLOTS + part * 16 * STEP + half, STEP, s, run, 128)
        _words_of_runs(s, k, lists, trials, size)
        for half in range(0, LANES // 16 * 64, 64):
            for part in range(2 if trials > 16 else 1):
                run = RUN_WORDS + 32 * half + 64 * part
                transpose16_apart(s, run, 128, s, words + part * 16 * STEP + half, STEP)


@inline
def search_scale(
    s: Any, lists: Any, n: Any, size: Any, top: Any, largest: Any, scale: Any, steps: Any, step: Any, off: Any
) -> Any:
    """Try (2 * top + 1 + k * step) / largest for k = -steps .. steps; return the best scale and its rating.

    Its words are in BEST. Where none is better than 0, these are ``scale`` and point 0, which counts as off the grid if
    ``off``.
    """
    trials = 2 * steps + 1
    for trial in range(trials):
        iscale = splat(WIDE, F(2 * top + 1) + F(trial - steps) * F(step)) / largest
        store(s, ISCALES + trial * STEP, iscale)
        store(s, SCALES + trial * STEP, F(1) / iscale)
    _store_bounds(s, n, size)
    _words_of_trials(s, lists, n, size, top, trials)
    best = splat(WIDE, F(0))
    for k in range(n // size):
        store(s, BEST + k * STEP, splat(WIDE_INT, OFF if off else 0))
    for words in range(WORDS_OF, WORDS_OF + trials * STEP, STEP):
        sum_qx, sum_q2 = rate_words(s, words, TRIALS * STEP, n, size)
        better = choose(sum_q2 > F(0), sum_qx * sum_qx, F(-np.inf)) > best * sum_q2
        if any_lane(better):
            ratio = sum_qx / sum_q2
            scale, best = choose(better, ratio, scale), choose(better, ratio * sum_qx, best)
            for k in range(n // size):
                word = load(WIDE_INT, s, words + k * TRIALS * STEP)
                store(s, BEST + k * STEP, choose(better, word, load(WIDE_INT, s, BEST + k * STEP)))
    return scale, best


#: Which groups of a sub-block are rounded again.
OFF_GRID = 0
ALL_IF_ONE_IS_OFF = 1
ALL = 2


@inline
def round_again(s: Any, lists: Any, n: Any, size: Any, top: Any, scale: Any, selection: Any) -> Any:
    """Round groups by the best scale, if it is positive; return the scale that fits the words in BEST then."""
    off = splat(WIDE_INT, OFF if selection == ALL else 0)
    for k in range(n // size):
        off = off | load(WIDE_INT, s, BEST + k * STEP)
    pending = choose(scale > F(0), off & OFF, 0)
    if not any_lane(pending != 0):
        return scale
    for k in range(n // size):
        store(s, SLOT + k * STEP, slot_of(s, F(1) / scale, k, size, top))
    slots_to_words(s, scale, lists, n, size, False)
    for k in range(0, n // size * STEP, STEP):
        best = load(WIDE_INT, s, BEST + k)
        selected = pending & best if selection == OFF_GRID else pending
        word = choose((selected & OFF) != 0, load(WIDE_INT, s, SLOT + k), best)
        store(s, BEST + k, word)
    sum_qx, sum_q2 = rate_words(s, BEST, STEP, n, size)
    ratio = choose(sum_q2 > F(0), sum_qx / sum_q2, scale)
    return choose(pending != 0, ratio, scale)


# ---------------------------------------------------------------- signs and weights


@inline
def _least(s: Any, k: Any) -> Any:
    """Return which of 8 values has the least w * x * x, the first of several."""
    x = load(WIDE, s, X + k * STEP)
    least, index = load(WIDE, s, W + k * STEP) * x * x, splat(WIDE_INT, 0)
    for i in range(1, 8):
        x = load(WIDE, s, X + (k + i) * STEP)
        size = load(WIDE, s, W + (k + i) * STEP) * x * x
        less = size < least
        least, index = choose(less, size, least), choose(less, i, index)
    return index


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
            offset = X + (k + i) * STEP
            x = load(WIDE, s, offset)
            x = choose(x < F(0), -x, x)
            if even:
                flips = flip == i
                x, bits = choose(flips, -x, x), choose(flips, bits ^ (1 << i), bits)
            store(s, offset, x)
        signs = signs | ((bits & 127) << (k // 8 * 7) if even else bits << k)
    store(s, SIGNS, signs)


@inline
def derive_weights(s: Any, n: Any) -> None:
    """Store w * x and sqrt(w)."""
    for offset in range(0, n * STEP, STEP):
        w = load(WIDE, s, W + offset)
        store(s, WX + offset, w * load(WIDE, s, X + offset))
        store(s, ROOT + offset, vsqrt(w))


@inline
def largest_value(s: Any, n: Any) -> Any:
    """Return the largest x of each lane."""
    largest = load(WIDE, s, X)
    for offset in range(STEP, n * STEP, STEP):
        largest = vmax(largest, load(WIDE, s, X + offset))
    return largest

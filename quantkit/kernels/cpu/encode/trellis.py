"""IQ1_KT, IQ2_KT, IQ3_KT, IQ4_KT of ik_llama.cpp: the nearest of many pseudo-random points to 8 or 4 values.

Layouts and the generator of points are in cpu/unpack/trellis.py. The error weighs values as ik_llama.cpp does: by
importance * sqrt(2 m + x^2), without importances by m / 2 + x^2, m the mean square of 256 values; 1e-4 where values or
weights are almost 0. Its bytes depend on its CPU's vectors, and its search leaves errors that are up to twice the least
possible, so it is not repeated here. This one:

1. guesses the scale of 32 values from their fourth powers;
2. finds the points near them for scales around the guess, either sign, either codebook: the more searches, and the
   deeper, the larger sum(w x x) is, and where few weights are most of their sum; and from the points the error of 32
   values as a curve over the scale, in long rows for some of them; IQ4_KT searches the better codebook of a sign once
   more, where the curve is lowest;
3. in uneven rows, where few values make the error, searches more deeply for those, by these curves, and ranks all
   points for groups of them that do: where one value or one weight exceeds all others, a tree misses the best;
4. chooses the scale d of the row for which the levels of scales cost the least on all curves; where few values make
   the error and curves say little, tries several that cost the least with the points that were found;
5. chooses levels and points among those found, fits d to them, and again while the error falls; IQ3_KT and IQ4_KT
   search once more for the scales chosen.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, QuantizerIQKT::set_weights and quantize_row_iq*_kt_impl.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import frexp
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline, kernel, specialize
from quantkit.kernels.cpu.core.simd import (
    cast,
    convert,
    extract,
    f32x4,
    f32x8,
    f32x16,
    hmax,
    hmin,
    hsum,
    i8x8,
    i16x8,
    i32x16,
    load,
    lookup16_f32,
    make_constant,
    round_even,
    select,
    splat,
    store,
    vabs,
    vmax,
    vmin,
    vsqrt,
)
from quantkit.kernels.cpu.encode import Encoder
from quantkit.kernels.cpu.encode import trellis_search as points
from quantkit.kernels.cpu.encode.batch import aligned_scratch
from quantkit.kernels.cpu.encode.groups import address
from quantkit.kernels.cpu.encode.i_quants import VALUES
from quantkit.kernels.cpu.encode.trellis_codebook import SCALES, codebook
from quantkit.kernels.cpu.encode.trellis_lists import BUCKETS, LISTED
from quantkit.kernels.cpu.encode.trellis_search import best_lane
from quantkit.types import BY_NAME

F, I32 = np.float32, np.int32

codebook_values = make_constant(f32x16, VALUES, "trellis_scales")
up_to_15 = make_constant(f32x16, range(16), "trellis_up_to_15")

# ---------------------------------------------------------------- weights

#: Below these, values or weights are almost 0; and what weights become.
ALMOST_0, LEAST = 1e-14, 1e-4


@inline
def _fill(w, at, count, value):
    for i in range(at, at + 4 * count, 64):
        store(w, i, splat(f32x16, F(min(value, 1e30))))


@inline
def _weigh_by_importance(x, w, importance, sigma2, unit, top):
    """Write the weights of 32 values; x is in units of ``unit``, weights are in units of ``top``."""
    wx = w2 = x2 = splat(f32x16, F(0))
    for i in range(0, 128, 64):
        v = load(f32x16, x, i)
        weight = (load(f32x16, importance, i) * F(1 / top)) * vsqrt(sigma2 + v * v)
        store(w, i, weight)
        wx, w2, x2 = wx + weight * vabs(v), w2 + weight * weight, x2 + v * v
    both = top * unit
    dead = np.float64(hsum(x2)) * unit * unit < ALMOST_0 or np.float64(hsum(w2)) * both * both < ALMOST_0
    if dead or np.float64(hsum(wx)) * both * unit < ALMOST_0:
        _fill(w, 0, 32, LEAST / both)


@inline
def _weigh(x, w, importance, n, unit, top):
    """Write the weights of a row; ``importance``: an address, or 0."""
    for at in range(0, 4 * n, 1024):
        squares = splat(f32x16, F(0))
        for i in range(at, at + 1024, 64):
            squares = squares + load(f32x16, x, i) * load(f32x16, x, i)
        square = hsum(squares)
        if np.float64(square) * unit * unit < 256 * ALMOST_0:
            _fill(w, at, 256, LEAST / (unit * (top if importance else unit)))
        elif importance:
            for i in range(at, at + 1024, 128):
                _weigh_by_importance(x + i, w + i, importance + i, square * F(2 / 256), unit, top)
        else:
            for i in range(at, at + 1024, 64):
                v = load(f32x16, x, i)
                store(w, i, square * F(0.5 / 256) + v * v)


# ---------------------------------------------------------------- levels of a scale


@inline
def codebook_levels(v):
    """Return the levels that a scale of v times the row's may have."""
    return codebook_values()


@inline
def small_levels(v):
    """Return the levels that a scale of v times the row's may have."""
    return up_to_15()


@inline
def wide_levels(v):
    """Return the levels that a scale of v times the row's may have: the nearest 16."""
    return up_to_15() + (min(max(np.rint(v), F(-56)), F(55)) - F(8))


# ---------------------------------------------------------------- errors over the scale of a block

#: An error curve: at 16 scales, each STEP times the one before, around the guess of a block's scale.
STEP, LOG2_STEP = 1.065, 0.0908534
grid = make_constant(f32x16, [STEP ** (k - 7.5) for k in range(16)], "trellis_grid")

#: Bytes of the curves of 32 values: for positive and for negative scales; each 16 errors, room, at LEAST_OF the least
#: with each codebook, at SCALE_OF its scale.
CURVES, LEAST_OF, SCALE_OF = 256, 96, 104

#: By how much of the least error the error of another sign and codebook may exceed it, to be looked at again: of most
#: rows, and of those for which there is more patience.
PATIENCE, MORE_PATIENCE = 0.25, 1e30


@inline
def guess_scale(x):
    """Return about the scale that fits 32 values best, by the fourth root of their mean fourth power; 0 for zeros."""
    a, b = load(f32x16, x, 0), load(f32x16, x, 64)
    top = hmax(vmax(vabs(a), vabs(b)))
    if top == F(0):
        return F(0)
    a, b = a * (F(1) / top), b * (F(1) / top)
    a, b = a * a, b * b
    return top * (np.sqrt(np.sqrt(hsum(a * a + b * b) * F(1 / 32))) * F(0.0232))


@inline
def _energy(x, w):
    """Return sum(w x x) of 32 values."""
    a, b = load(f32x16, x, 0), load(f32x16, x, 64)
    return hsum(a * a * load(f32x16, w, 0) + b * b * load(f32x16, w, 64))


@inline
def _place(ratio):
    """Return where on a curve 16 scales are, given over the guess: log2 by its exponent and a parabola."""
    bits = cast(i32x16, ratio)
    m = cast(f32x16, (bits & I32(0x7FFFFF)) | I32(0x3F800000))
    log2 = convert(f32x16, (bits >> 23) - I32(127)) + ((F(2) - m * F(1 / 3)) * m - F(5 / 3))
    return log2 * F(1 / LOG2_STEP) + F(7.5)


@inline
def _gain(curve, ratio):
    """Return the errors at 16 scales, given over the guess, of the curve at an address: no gain far beyond its ends."""
    t = _place(ratio)
    at = vmax(vmin(t, F(14.99)), F(0))
    k = convert(i32x16, at)
    values = load(f32x16, curve, 0)
    slopes = load(f32x16, curve, 4) - values
    inside = lookup16_f32(values, k) + (at - convert(f32x16, k)) * lookup16_f32(slopes, k)
    beyond = vmin(t, F(0)) * F(0.05) - vmax(t - F(15), F(0)) * F(0.2)
    return vmin(inside, F(0)) * vmax(beyond + F(1), F(0))


#: Bindings: the levels; how many signs scales have, and codebooks there are; groups of 32 values.
levels_near: Any = None
signs = books = groups = 1


def least_of_levels(d, sign, side, guess, curve):
    """Return the least errors of 32 values, by the curve of a side, for a row's scales sign * d, and their own scales.

    d: in 16 lanes; scales are one of 16 levels times that.
    """
    least, scales, inverse = splat(f32x16, F(0)), splat(f32x16, F(0)), F(1) / guess
    least_d, most_d = hmin(d), hmax(d)
    for i in range(16):
        level = extract(levels_near(F(0)), i)
        ratio = abs(level) * inverse
        mine = ((level < F(0)) == (sign > F(0))) == (side == 1)
        if mine and ratio * least_d < F(1.65) and ratio * most_d > F(0.3):
            gain = _gain(curve, d * ratio)
            scales = select(gain < least, d * abs(level), scales)
            least = vmin(gain, least)
    return least, scales


def least_of_wide(d, sign, side, guess, curve):
    """Return what ``least_of_levels`` does, where scales are -64 .. 63 times that of the row."""
    least, scales, inverse = splat(f32x16, F(0)), splat(f32x16, F(0)), F(1) / guess
    most = F(63) if (side == 0) == (sign > F(0)) else F(64)
    for i in range(16):
        scale = vmin(round_even(splat(f32x16, guess * extract(grid(), i)) / d), most) * d
        gain = _gain(curve, scale * inverse)
        scales = select(gain < least, scale, scales)
        least = vmin(gain, least)
    return least, scales


#: Bindings: ``least_of_levels`` or ``least_of_wide``; ``_hopeful``; the bytes of survivors of 32 values for one sign
#: and codebook; slots of survivors.
least_of: Any = None
hopeful: Any = None
part, slots = 0, 1


@inline
def _least_found(side, scales, limit, curves, at, filled):
    """Return the errors of 32 values for 16 scales of a sign, with the points found at ``at``."""
    least = splat(f32x16, F(0))
    for book in range(books):
        if load(types.float32, curves, CURVES // 2 * side + LEAST_OF + 4 * book) <= limit:
            of, count = at + part * (side * books + book), filled[side * books + book]
            least = vmin(points.errors(of, groups, points.SURVIVORS * slots, count, scales), least)
    return least


#: Binding: ``_least_found``.
least_found: Any = None


def cost_of(d, sign, guesses, energies, curves, counted, exact, kept, filled):
    """Return the errors of a row for its scales sign * d, d in 16 lanes; exact: with the points that were found."""
    total, combinations = splat(f32x16, F(0)), signs * books
    for b in range(guesses.size):
        if not (guesses[b] > F(0) and counted[b] > F(0)):
            continue
        least, of = splat(f32x16, F(0)), curves + CURVES * b
        limit = hopeful(energies[b], of, F(PATIENCE)) if exact else F(0)
        for side in range(signs):
            found, scales = least_of(d, sign, side, guesses[b], of + CURVES // 2 * side)
            if exact:
                at = kept + part * combinations * b
                found = least_found(side, scales, limit, of, at, filled[combinations * b :])
            least = vmin(found, least)
        total = total + least * counted[b]
    return total


#: Bindings: ``cost_of``; the largest level.
cost_of_row: Any = None
largest = F(0)


def rate_row_scales(guesses, energies, curves, counted, exact, kept, filled, scales, costs):
    """Write 64 scales that the row may have, and what they cost."""
    top = F(0)
    for b in range(guesses.size):
        top = max(top, guesses[b])
    d = (up_to_15() * F(0.028) + F(1)) * (top * F(0.8) / largest)
    for i in range(0, 64, 16):
        sign = F(-1) if i < 32 else F(1)
        wider = d * F(1.448) if i % 32 else d
        cost = splat(f32x16, F(0))
        if signs == 2 or sign > F(0):
            cost = cost_of_row(wider, sign, guesses, energies, curves, counted, exact, kept, filled)
        store(scales, 4 * i, wider * sign)
        store(costs, 4 * i, cost)


# ---------------------------------------------------------------- bytes


@inline
def _or(block, byte, bits):
    store(block, byte, types.uint8(load(types.uint8, block, byte) | types.uint8(bits)))


@inline
def _code(level):
    return best_lane((codebook_values() - level) * (codebook_values() - level))


@inline
def put_iq1_kt(block, b, level, book, x, q):
    """Write 32 values, the b-th of a block of zeros: the level of their scale, their indices."""
    code = _code(level)
    for j in range(4):
        store(block, 8 + 4 * b + j, types.uint8(q[j] & 255))
        _or(block, 40 + 4 * (b % 4) + j, ((q[j] >> 8) & 15) << (4 * (b // 4)))
        code |= (q[j] >> 12) << (4 + j)
    store(block, b, types.uint8(code))


@inline
def put_iq2_kt(block, b, level, book, x, q):
    """Write 32 values."""
    _or(block, b % 4, _code(level) << (4 * (b // 4)))
    for j in range(4):
        store(block, 4 + 8 * b + 2 * j, types.uint16(q[j]))


@inline
def put_iq3_kt(block, b, level, book, x, q):
    """Write 32 values; their signs are those of x."""
    _or(block, b % 4, np.int64(level) << (4 * (b // 4)))
    for j in range(4):
        store(block, 4 + 8 * b + 2 * j, types.uint16(q[j]))
    for j in range(32):
        if load(types.float32, x, 4 * j) < F(0):
            _or(block, 68 + j, 1 << b)


@inline
def put_iq4_kt(block, b, level, book, x, q):
    """Write 32 values."""
    word = ((np.int64(level) + 64) << 1) | book
    for j in range(8):
        word |= (q[j] >> 12) << (8 + 3 * j)
        store(block, 32 + 8 * b + j, types.uint8(q[j] & 255))
        _or(block, 96 + 8 * (b % 4) + j, ((q[j] >> 8) & 15) << (4 * (b // 4)))
    store(block, 4 * b, types.uint32(word))


# ---------------------------------------------------------------- rows

#: Ranges of scales, over the guess, for which all points are ranked, as many as are kept apart: where they end.
ENDS = {3: (SCALES[0], 0.85, 1.17, SCALES[1]), 4: (SCALES[0], 0.79, 1.0, 1.27, SCALES[1])}
#: The share of an uneven row's sum(w x x) from which 32 values are searched for more deeply.
DEEP = 1 / 16

#: Bindings: points.search; how many slots of survivors one search fills; the codebooks that it looks through.
search: Any = None
spread = at_once = 1


@inline
def search_around(x, w, center, searches, lines, s, kept):
    """Keep the points near 32 values for scales around ``center``, either sign, either codebook."""
    ratio = F(1)
    for _ in range(searches - 1):
        ratio *= F(0.8944272)
    for side in range(signs):
        for book in range(0, books, at_once):
            to, at = kept + part * (side * books + book), center * ratio
            sign = F(1) if side == 0 else F(-1)
            for k in range(searches):
                to_slot = to + 4 * points.SURVIVORS * spread * k
                search(book, sign, sign / at, x, w, lines, s, to_slot, points.SURVIVORS * slots)
                at *= F(1.25)


#: Bindings: what fetches lists of lines for the values that are searched for next; ``search_around``, and deeper.
#: Searches of 32 values that weigh little, and that weigh ``much`` times the mean; from ``very_much`` times it on, with
#: patience from ``much_enough`` times, they are searched for more deeply; ``fine``: as often, those of unequal weights.
lists_fetched: Any = None
searched_around: Any = None
deeply_searched: Any = None
few = some = fine = 1
much, very_much, much_enough = 2.0, 4.0, 4.0
#: Bindings: whether, with patience, all values are searched for as those that weigh much; whether, without, it matters
#: that weights are unequal.
eager = careful = False
#: Bindings: whether levels depend on the curve; whether the better codebook of either sign, where values were searched
#: for once, is searched again, around the scale at which its error is least.
every_curve = again = False


@inline
def _curve_of(side, center, at, filled, first, curve):
    """Return the errors of 32 values for 16 scales, the codebook and scale with the least; write each one's."""
    least, lowest, better, scale = splat(f32x16, F(0)), F(3e38), 0, center
    for book in range(books):
        of = at + part * (side * books + book)
        count = filled[first + side * books + book]
        found = points.errors(of, groups, points.SURVIVORS * slots, count, grid() * center)
        least = found if book == 0 else vmin(found, least)
        store(curve, LEAST_OF + 4 * book, hmin(found))
        if hmin(found) < lowest:
            lowest, better, scale = hmin(found), book, center * extract(grid(), best_lane(found))
    return least, better, scale


@inline
def _hopeful(energy, curves, patience):
    """Return up to which error, less the energy, a sign and codebook of 32 values is looked at again."""
    least = F(3e38)
    for c in range(signs * books):
        least = min(least, load(types.float32, curves, CURVES // 2 * (c // books) + LEAST_OF + 4 * (c % books)))
    return least + max(energy + least, F(0)) * patience


#: How many times the least that it may be the sum of squares of unequal weights is.
UNEQUAL = 4.0


@inline
def _unequal(w):
    """Return whether few of 32 weights are most of their sum."""
    a, b = load(f32x16, w, 0), load(f32x16, w, 64)
    total = np.float64(hsum(a + b))
    return np.float64(hsum(a * a + b * b)) * 32 > UNEQUAL * (total * total)


#: Binding: ``_curve_of``.
curve_of: Any = None


def survey(x, w, n, guesses, energies, total, weighed, uneven, patience, lines, s, kept, curves, filled, step, counted):
    """Search for all values of a row; write how many slots are filled, and curves of errors.

    ``weighed``: whether there are importances; ``uneven``: whether few values make most of the row's sum(w x x);
    ``counted``: how many times one counts where the row's scale is chosen: one in ``step`` if it weighs little.
    """
    mean, patient = total * 32 / n, patience > F(1)
    least_deep = (much_enough if patient else very_much) * mean
    if uneven:
        least_deep = min(DEEP * total, least_deep)
    for b in range(n // 32):
        at, xb, wb, center = kept + part * signs * books * b, x + 128 * b, w + 128 * b, guesses[b]
        energy = np.float64(energies[b]) if center > F(0) else 0.0
        around, first = center if center > F(0) else F(1), signs * books * b
        following = min(b + 1, n // 32 - 1)
        if guesses[following] > F(0):
            lists_fetched(x + 128 * following, F(1) / guesses[following], lines[3], s)
        if energy > least_deep or (weighed and (careful or patient) and _unequal(wb)):
            count = slots - 1 if energy > least_deep else fine
            deeply_searched(xb, wb, around, count, lines, s, at)
        else:
            searches = some if energy > much * mean or (eager and patient) else few
            count = searches * spread
            searched_around(xb, wb, around, searches, lines, s, at)
        for c in range(signs * books):
            filled[first + c] = count
        # Few values that weigh much can make the error of a long row: all of them count.
        counted[b] = F(1) if energy > much * mean else F(step) if b % step == 0 else F(0)
        if counted[b] == F(0) and not every_curve:
            continue
        of_block = curves + CURVES * b
        for side in range(signs):
            least, _, scale = curve_of(side, center, at, filled, first, of_block + CURVES // 2 * side)
            store(of_block, CURVES // 2 * side, least)
            store(of_block, CURVES // 2 * side + SCALE_OF, scale)
        if again and count < slots - 1 and center > F(0):
            limit = hopeful(energies[b], of_block, patience)
            for side in range(signs):
                curve = of_block + CURVES // 2 * side
                better = 1 if load(types.float32, curve, LEAST_OF + 4) < load(types.float32, curve, LEAST_OF) else 0
                if load(types.float32, curve, LEAST_OF + 4 * better) > limit:
                    continue
                of, sign = at + part * (side * books + better), F(1) if side == 0 else F(-1)
                search(
                    better, sign, sign / load(types.float32, curve, SCALE_OF), xb, wb, lines, s,
                    of + 4 * points.SURVIVORS * count, points.SURVIVORS * slots,
                )  # fmt: skip
                filled[first + side * books + better] = count + spread
                found = points.errors(of, groups, points.SURVIVORS * slots, count + spread, grid() * center)
                store(curve, 0, vmin(found, load(f32x16, curve, 0)))
                store(curve, LEAST_OF + 4 * better, hmin(found))


#: Bindings: points.scan; values of a group.
scan: Any = None
size = 0
floats: Any = f32x8


@inline
def _error_left(b, energies, curves):
    """Return about the error of 32 values with the scale that suits them."""
    gain = hmin(load(f32x16, curves, CURVES * b))
    if signs == 2:
        gain = min(gain, hmin(load(f32x16, curves, CURVES * b + CURVES // 2)))
    return np.float64(max(energies[b] + gain, F(0)))


@inline
def _errors_of_groups(x, w, side, book, scale, at, filled, errors):
    """Write the errors of the groups of 32 values for a scale."""
    of = at + part * (side * books + book)
    for group in range(groups):
        v = load(floats, x, 4 * size * group)
        p, q, _ = points.pick(
            of + 12 * points.SURVIVORS * slots * group, points.SURVIVORS * slots, filled[side * books + book], scale
        )
        errors[group] = hsum(v * v * load(floats, w, 4 * size * group)) + (scale * q - p) * scale


#: Bindings: the functions above.
error_left: Any = None
errors_of_groups: Any = None
#: Bindings: the shares of a row's error from which 32 values are searched for more deeply, and from which all points
#: are ranked for a group of them; in rows of 256 values a ``short_part`` of both; by how much of the least error that
#: of a sign and codebook may exceed it, for all points to be ranked for it.
much_error = heavy = 0.05
short_part = scanned = 1.0


def reinforce(x, w, n, guesses, energies, lines, s, kept, curves, filled, counted, errors):
    """Search more deeply for values that make much of a row's error, and rank all points for groups of them."""
    total, width = 0.0, points.SURVIVORS * slots
    for b in range(n // 32):
        if counted[b] > F(0) and guesses[b] > F(0):
            total += np.float64(counted[b]) * error_left(b, energies, curves)
    part_of = short_part * total if n == 256 else total
    least_error, least_heavy = much_error * part_of, heavy * part_of
    for b in range(n // 32):
        if not (counted[b] > F(0) and guesses[b] > F(0) and error_left(b, energies, curves) > least_error):
            continue
        at, xb, wb, center = kept + part * signs * books * b, x + 128 * b, w + 128 * b, guesses[b]
        first, lowest = signs * books * b, F(3e38)
        for side in range(signs):
            curve = curves + CURVES * b + CURVES // 2 * side
            least, better, scale = curve_of(side, center, at, filled, first, curve)
            if hmin(least) < lowest:
                lowest = hmin(least)
                errors_of_groups(xb, wb, side, better, scale, at, filled[first:], errors)
        limit = hopeful(energies[b], curves + CURVES * b, F(scanned))
        if filled[first : first + signs * books].min() < slots - 1:
            deeply_searched(xb, wb, center, slots - 1, lines, s, at)
        for c in range(signs * books):
            filled[first + c] = slots - 1
            inverse = (F(-1) if c >= books else F(1)) / center
            if (
                load(types.float32, curves, CURVES * b + CURVES // 2 * (c // books) + LEAST_OF + 4 * (c % books))
                > limit
            ):
                continue
            for group in range(groups):
                if np.float64(errors[group]) > least_heavy:
                    to, of = at + part * c + 12 * width * group, 4 * size * group
                    scan(c % books, inverse, xb + of, wb + of, errors[group], lines, s, to, width, slots - 1)
        for side in range(signs):
            curve = curves + CURVES * b + CURVES // 2 * side
            least, _, _ = curve_of(side, center, at, filled, first, curve)
            store(curve, 0, least)


#: Bindings: whether more levels than the nearest ones are tried of values that were searched for deeply; of 16 levels,
#: whether only 8 are tried, around the guess.
widely = by_guess = False


@inline
def _far_from(guess, d, levels):
    """Return which of the levels 0 .. 15 are not among the 8 around a guess, for a row's scale."""
    first = np.rint(guess / d - F(2.5))
    first = first if first > F(0) else F(0)
    first = first if first < F(8) else F(8)
    return vabs(levels - (first + F(3.5))) > F(4)


@inline
def _best_level(guess, energy, patience, d, filled, first, kept, curves):
    """Return the level of the scale of 32 values with the least error, and its sign and codebook as an index."""
    lowest, level, combination = F(3e38), F(0), 0
    limit = hopeful(energy, curves, patience) if every_curve else F(0)
    around = 1 if widely and filled[first : first + signs * books].min() == slots - 1 else 0
    for side in range(signs):
        sign = F(1) if side == 0 else F(-1)
        near = guess * extract(grid(), best_lane(load(f32x16, curves, CURVES // 2 * side)))
        for book in range(books):
            if every_curve and load(types.float32, curves, CURVES // 2 * side + LEAST_OF + 4 * book) > limit:
                continue
            of = kept + part * (side * books + book)
            count = filled[first + side * books + book]
            for k in range(-around, around + 1):
                levels = levels_near(sign * near / d + F(16 * k))
                scales = levels * (d * sign)
                found = points.errors(of, groups, points.SURVIVORS * slots, count, vmax(scales, F(0)))
                found = select(scales < F(0), F(3e38), found)
                if by_guess:
                    found = select(_far_from(guess, d, levels), F(3e38), found)
                if hmin(found) < lowest:
                    lowest, level, combination = hmin(found), extract(levels, best_lane(found)), side * books + book
    return level, combination


#: Bindings: ``_best_level``; whether a last search is for the scale that was chosen, and the slots that it fills.
best_level: Any = None
polished = False


def choose(
    x, w, n, d, first, last, guesses, energies, patience, curves, lines, s, kept, filled, levels, combinations, places
):
    """Choose levels and points for a row's scale d; return sum(w q x) and sum(w q q), q in units of d.

    ``first``: of the row: search again where the scale is far from the guess; ``last``: search for the scale chosen.
    """
    sumqx = sumq2 = 0.0
    width = points.SURVIVORS * slots
    for b in range(n // 32):
        at, xb, wb = kept + part * signs * books * b, x + 128 * b, w + 128 * b
        begin = signs * books * b
        level, combination = best_level(guesses[b], energies[b], patience, d, filled, begin, at, curves + CURVES * b)
        scale = abs(level * d)
        if first and (scale > F(1.65) * guesses[b] or scale < F(0.6) * guesses[b]) and scale > F(0):
            for c in range(signs * books):
                filled[begin + c] = 1
                store(curves, CURVES * b + CURVES // 2 * (c // books) + LEAST_OF + 4 * (c % books), F(0))
            deeply_searched(xb, wb, scale, 1, lines, s, at)
            level, combination = best_level(
                guesses[b], energies[b], patience, d, filled, begin, at, curves + CURVES * b
            )
            scale = abs(level * d)
        levels[b], combinations[b] = level, combination
        of, count = at + part * combination, filled[begin + combination]
        if polished and last and scale > F(0) and count < slots:
            sign = F(-1) if combination >= books else F(1)
            search(combination % books, sign, sign / scale, xb, wb, lines, s, of + 4 * points.SURVIVORS * count, width)
            count += 1
        for group in range(groups):
            p, q, place = points.pick(of + 12 * width * group, width, count, scale)
            sumqx += np.float64(abs(level)) * np.float64(p)
            sumq2 += np.float64(level) * np.float64(level) * np.float64(q)
            places[b, group] = place
    return (0.5 if d > F(0) else -0.5) * sumqx, sumq2


@inline
def write(x, n, levels, combinations, places, indices, out):
    """Write the blocks of a row, all zeros before."""
    for b in range(n // 32):
        for group in range(groups):
            places[b, group] = load(types.int32, indices, 4 * places[b, group]) if levels[b] != F(0) else 0
        book = combinations[b] % books
        put(out + block_bytes * (b // 8), b % 8, levels[b], book, x + 128 * b, places[b])


#: Bindings of ``encode``: the functions above; bytes of a block; lines of families, or of cells, to rank.
row_surveyed: Any = None
row_reinforced: Any = None
row_scales: Any = None
levels_chosen: Any = None
put: Any = None
block_bytes = lines_ranked = 0
magnitudes = False
least_fits = 1
#: By how much a row's scale exceeds that of least squares, with which values come out too small on average.
stretch = 1.0


@inline
def _top(values):
    top = F(0)
    for i in range(values.size):
        top = max(top, abs(values[i]))
    return top


@inline
def _prepare(x, row, xs, guesses, unit, magnitudes):
    """Write a row, or its magnitudes, in units of ``unit``, and guesses of scales: 0 where all |x| < 1e-16."""
    inverse = F(1 / unit)
    for i in range(xs.size):
        v = x[row, i] * inverse
        xs[i] = abs(v) if magnitudes else v
    for b in range(guesses.size):
        guesses[b] = guess_scale(address(xs) + 128 * b) if _top(x[row, 32 * b : 32 * b + 32]) >= F(1e-16) else F(0)


#: Bindings: how many scales are tried for uneven rows; the share that makes a row uneven.
attempts, even = 1, 0.1
#: Of a row's share: how many times that of equal parts makes it uneven; from where on several scales are tried for
#: uneven rows, and from where on there is more patience with all.
UNEVEN, FEW_MATTER, PATIENT = 1.5, 0.035, 0.04


@inline
def _share(energies):
    """Return a row's sum(w x x), and the share of it that 32 values have, on average over that sum."""
    total = squares = 0.0
    for b in range(energies.size):
        total += np.float64(energies[b])
        squares += np.float64(energies[b]) * np.float64(energies[b])
    return total, squares / (total * total) if total > 0 else 0.0


def encode(x, weights, out, row0, row1, lines_of_points, lines_of_cells, lines_of_families, extents, indices, lists):
    """Encode rows row0..row1 of x [rows, n], n a multiple of 256; weights [n] or empty."""
    n = x.shape[1]
    count = n // 32
    xs, ws = aligned_scratch(4 * n)[:n], aligned_scratch(4 * n)[:n]
    guesses, energies = np.empty(count, np.float32), np.empty(count, np.float32)
    counted = np.empty(count, np.float32)
    curves, filled = aligned_scratch(count * CURVES + 64), np.empty(count * signs * books, np.int64)
    kept, scratch = aligned_scratch(count * part * signs * books), aligned_scratch(points.SCRATCH + 64)
    curves[:] = 0
    scratch[:] = 0
    levels, combinations = np.empty((2, count), np.float32), np.empty((2, count), np.int64)
    scales, costs, errors = np.empty(64, np.float32), np.empty(64, np.float32), np.empty(8, np.float32)
    places = np.empty((2, count, 8), np.int32)
    for i in range(books * lines_ranked):
        store(address(scratch), points.LINES + 4 * i, I32(i))
    store(address(scratch), points.ONE, 1)
    largest_weight = np.float64(_top(weights))
    top = largest_weight if largest_weight > 0 else 1.0
    for row in range(row0, row1):
        out[row, :] = 0
        _, exponent = frexp(np.float64(_top(x[row])))
        unit = 2.0 ** min(max(exponent, -126), 126)
        _prepare(x, row, xs, guesses, unit, magnitudes)
        if _top(guesses) == F(0):
            continue
        # Addresses are taken here: numba frees an array after its last use.
        lines = (
            address(lines_of_points), address(lines_of_cells), address(lines_of_families), address(lists),
            address(extents),
        )  # fmt: skip
        s, px, pw, found = address(scratch), address(xs), address(ws), address(kept)
        _weigh(px, pw, address(weights) if weights.size else 0, n, unit, top)
        for b in range(count):
            energies[b] = _energy(px + 128 * b, pw + 128 * b)
        total, share = _share(energies)
        uneven = share > even or share * count > UNEVEN
        tries = attempts if uneven and share > FEW_MATTER else 1
        step = 1 if tries > 1 else max(count // 16, 1)
        patience = F(MORE_PATIENCE if tries > 1 or share > PATIENT else PATIENCE)
        row_surveyed(
            px, pw, n, guesses, energies, total, weights.size > 0, uneven, patience, lines, s, found, address(curves),
            filled, step, counted,
        )  # fmt: skip
        if uneven:
            row_reinforced(px, pw, n, guesses, energies, lines, s, found, address(curves), filled, counted, errors)
        row_scales(
            guesses, energies, address(curves), counted, tries > 1, found, filled, address(scales), address(costs)
        )
        best, scale, at = -1.0, 0.0, 0
        for attempt in range(tries):
            cheapest = costs.size - 1 - costs[::-1].argmin()
            if costs[cheapest] >= F(0) and attempt > 0:
                break
            d, before, costs[cheapest] = scales[cheapest], -1.0, F(0)
            for k in range(2 if tries > 1 else least_fits):
                qx, q2 = levels_chosen(
                    px, pw, n, d, attempt + k == 0, False, guesses, energies, patience, address(curves), lines,
                    s, found, filled, levels[at], combinations[at], places[at],
                )  # fmt: skip
                gain = qx * qx / q2 if q2 > 0 else 0.0
                if gain > best:
                    best, scale, at = gain, qx / q2 if q2 > 0 else 0.0, 1 - at
                if gain <= before or q2 <= 0:
                    break
                d, before = F(qx / q2), gain
        if best >= 0.0:
            qx, q2 = levels_chosen(
                px, pw, n, F(scale), False, True, guesses, energies, patience, address(curves), lines,
                s, found, filled, levels[at], combinations[at], places[at],
            )  # fmt: skip
            if q2 > 0 and qx * qx / q2 > best:
                scale, at = qx / q2, 1 - at
            store(address(out) + out.shape[1] * row, 0, F(scale * stretch * unit))
            if scale != 0.0:
                target = address(out) + out.shape[1] * row + 4
                write(
                    address(x) + 4 * n * row, n, levels[1 - at], combinations[1 - at], places[1 - at],
                    address(indices), target,
                )  # fmt: skip


# ---------------------------------------------------------------- the encoders


@cache
def _ranks(name: str, size: int, bias: int, coarse: bool, short: bool = False) -> dict[str, Any]:
    """Return the bindings of points.rank and points.search that depend on how a query is stored.

    ``coarse``: in 8 bits; ``short``: weights in 8 bits, all else in 16.
    """
    floats, largest = f32x8 if size == 8 else f32x4, F(64 if bias else 126)
    if coarse:
        prepared = specialize(points.prepare_coarse, name, largest=largest)
        return {"query_of": points.coarse_query, "score": points.coarse_score, "query_prepared": prepared}
    sums = specialize(points.fine_sums8 if size == 8 else points.fine_sums4, name, bias=bias)
    units = points.SHORT if short else {}
    of_p = {"fine_unit": units.get("fine_unit", 7)}
    prepared = specialize(
        points.prepare_fine, name, size=size, floats=floats, shorts_of=i16x8 if size == 8 else points.i16x4,
        paired=points.even_odd if size == 8 else points.in_order,
        weights_factor=specialize(points.fine_factor, name, **units), **units,
    )  # fmt: skip
    prepared = specialize(
        points.prepare_both, name, fine_prepared=prepared, largest=largest, size=size, floats=floats,
        bytes_of=i8x8 if size == 8 else points.i8x4,
    )  # fmt: skip
    return {
        "query_of": points.fine_query8 if size == 8 else points.fine_query4, "query_prepared": prepared,
        "score": specialize(points.fine_score, name, fine_sums=sums, **of_p), "fine_sums": sums, **of_p,
    }  # fmt: skip


def _bound(bindings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: bindings[name] for name in names}


def _rated(name: str, size: int, bias: int, spread: int) -> dict[str, Any]:
    """Return the bindings that ``points.search`` and ``points.scan`` share."""
    levels = specialize(points.levels8, name, bias=bias) if size == 8 else points.levels4
    rated = specialize(
        points.rate_points, f"{name}_{spread}", helper,
        size=size, levels=levels, spread=spread,
    )  # fmt: skip
    gathered = specialize(
        points.gather_points, f"{name}_{spread}", helper, line_bytes=256 if size == 8 else 128, spread=spread
    )
    floats = f32x8 if size == 8 else f32x4
    return {"size": size, "floats": floats, "points_gathered": gathered, "points_rated": rated}


#: Of how many lanes the best family, or cell, stays, the second best, and so on; () if all cells are ranked.
Shape = tuple[int, ...]
#: Shapes of families and of cells; or how many lines are ranked, of those listed.
Depth = tuple[Shape, Shape] | int


def _search(
    name: str, count: int, size: int, bias: int, shapes: tuple[Shape, Shape], spread: int = 1, *,
    coarse: bool = False, coarse_tree: bool = True, short: bool = False,
) -> Any:  # fmt: skip
    """Return ``points.search`` for codebooks of ``count`` points; ``shapes``: of families, of cells that stay.

    ``coarse``: points are ranked in 8 bits; ``coarse_tree``: centers are; ``short``: points, by weights of 8 bits.
    """
    ranks, (of_families, of_cells) = _ranks(name, size, bias, coarse, short), shapes
    kinds = _bound(ranks, "query_of", "score")
    tree = kinds if size == 8 else {"query_of": points.coarse_query4, "score": points.coarse_score4}
    if size == 8 and coarse_tree and not coarse:
        query = specialize(points.coarse_query, name, query_at=points.COARSE)
        tree = {"query_of": query, "score": points.coarse_score}
    steps = {
        f"rank_{step}": specialize(points.rank, f"{name}_{step}", helper, shape=(*shape, 0, 0, 0, 0)[:4], **of)
        for step, shape, of in (("families", of_families, tree), ("cells", of_cells, tree), ("points", (16,), kinds))
    }
    if spread == 2:
        kinds = _bound(ranks, "query_of", "fine_sums", "fine_unit")
        steps["rank_points"] = specialize(points.rank_around, name, helper, **kinds)
    return specialize(
        points.search, name, helper, lines_of_families=count // 4096 if of_families else 0,
        lines_of_cells=count // 256, families_kept=sum(of_families), cells_kept=sum(of_cells),
        query_prepared=ranks["query_prepared"], **steps, **_rated(name, size, bias, spread),
    )  # fmt: skip


def _search_listed(
    name: str, count: int, lines: int, spread: int, *, around: bool, books_at_once: int = 1, apart: int = 0
) -> Any:
    """Return ``points.search_listed`` for codebooks of ``count`` points; around: for two scales."""
    sums = specialize(points.fine_sums4, name)
    prepared = specialize(
        points.prepare_fine, name, size=4, floats=f32x4, shorts_of=points.i16x4, paired=points.in_order
    )
    kinds = {"query_of": points.fine_query4, "numbers": types.uint16, "number_bytes": 2}
    if around:
        ranked = specialize(points.rank_around, name, helper, fine_sums=sums, lanes_kept=8 * spread, **kinds)
    else:
        ranked = specialize(
            points.rank, name, helper, score=specialize(points.fine_score, name, fine_sums=sums), **kinds
        )
    rated = _rated(name, 4, 0, spread)
    return specialize(
        points.search_listed, f"{name}_{lines}_{books_at_once}", helper, lines_listed=lines,
        lists_bytes=2 * LISTED * BUCKETS, books_at_once=books_at_once, apart=apart, query_prepared=prepared,
        rank_points=ranked, **_bound(rated, "floats", "points_gathered", "points_rated"),
    )  # fmt: skip


def _scan(name: str, count: int, size: int, bias: int, ends: tuple[float, ...]) -> Any:
    """Return ``points.scan`` for codebooks of ``count`` points."""
    ranks = _ranks(name, size, bias, False)
    kinds = _bound(ranks, "query_of", "fine_sums")
    of_size = {"size": size, "floats": f32x8 if size == 8 else f32x4}
    of_size |= {"shorts_of": i16x8 if size == 8 else points.i16x4}
    of_size |= {"paired": points.even_odd if size == 8 else points.in_order}
    ranked = specialize(
        points.rank_all, name, helper, all_lines=count // 16, ends=ends, **kinds,
        line_ranked=specialize(points.rank_line, name, helper, ends=ends, **kinds),
        bounds_prepared=specialize(points.prepare_bounds, name, **of_size),
        bounds_of=specialize(points.bounds_of_cells, name, size=size),
    )  # fmt: skip
    return specialize(
        points.scan, name, helper, all_lines=count // 16, all_ranked=ranked, query_prepared=ranks["query_prepared"],
        **_rated(name, size, bias, 1),
    )  # fmt: skip


def _encoder(
    name: str, count: int, size: int, put: Any, levels: Any, *,
    largest: int, around: Depth, deep: tuple[Shape, Shape], searches: tuple[int, int, int],
    fine: int, careful: bool = True,
    coarse: bool = False, again: int = 0, much: float = 2.0, very_much: float = 4.0, much_enough: float | None = None,
    spread: int = 1, eager: bool = False,
    last: Depth | None = None, signs: int = 2, books: int = 1, stretch: float = 1.0,
    attempts: int = 4, even: float = 0.1, more_deeply: dict[str, float],
) -> Encoder:  # fmt: skip
    """Return the encoder of a type: codebooks of ``count`` points; the functions and numbers that differ.

    ``searches``: of 32 values that weigh little, that weigh much, and deeper ones; ``fine``: deeper ones for unequal
    weights.
    """
    suffix, bias, slots = name.lower(), 126 if signs == 2 else 0, searches[2] + 1
    shared = {"signs": signs, "books": books, "groups": 32 // size, "slots": slots}
    shared["part"] = 12 * points.SURVIVORS * slots * (32 // size)
    sides = _bound(shared, "signs", "books", "slots", "part")
    deep_search = _search(suffix, count, size, bias, deep, coarse_tree=False)
    lists_fetched = points.fetch_nothing
    if isinstance(around, int):
        both = {"books_at_once": books, "apart": shared["part"]}
        first_search = _search_listed(suffix, count, around, spread, around=True, **both)
        lists_fetched = specialize(points.fetch_lists, suffix, lists_bytes=2 * LISTED * BUCKETS, books_at_once=books)
    else:
        first_search = _search(suffix, count, size, bias, around, spread, coarse=coarse, short=signs == 1)
    last_search = deep_search
    if isinstance(last, int):
        last_search = _search_listed(suffix, count, last, 1, around=False)
    elif last:
        last_search = _search(suffix, count, size, bias, last, short=signs == 1)
    deeply_searched = specialize(search_around, f"{suffix}_deeply", search=deep_search, **sides)
    curves, every_curve = specialize(_curve_of, suffix, **shared), levels is wide_levels
    likely = specialize(_hopeful, suffix, signs=signs, books=books)
    surveyed = specialize(
        survey, suffix, helper, deeply_searched=deeply_searched, curve_of=curves, **shared,
        few=searches[0], some=searches[1], eager=eager, careful=careful, spread=spread, lists_fetched=lists_fetched,
        fine=fine, much_enough=very_much if much_enough is None else much_enough,
        searched_around=specialize(
            search_around, suffix, search=first_search, at_once=books if isinstance(around, int) else 1,
            spread=spread, **sides,
        ),
        much=much, very_much=very_much, every_curve=every_curve, hopeful=likely, again=again > 0,
        search=_search_listed(suffix, count, again, spread, around=True) if again else first_search,
    )  # fmt: skip
    reinforced = specialize(
        reinforce, suffix, helper, scan=_scan(suffix, count, size, bias, ENDS[slots - 1]), size=size,
        error_left=specialize(_error_left, suffix, signs=signs), deeply_searched=deeply_searched, curve_of=curves,
        **more_deeply, hopeful=likely, errors_of_groups=specialize(
            _errors_of_groups, suffix, size=size, floats=f32x8 if size == 8 else f32x4, **shared
        ), **shared,
    )  # fmt: skip
    cost = specialize(
        cost_of, suffix, helper, hopeful=likely, least_found=specialize(_least_found, suffix, **shared),
        least_of=specialize(least_of_wide if levels is wide_levels else least_of_levels, suffix, levels_near=levels),
        **_bound(shared, "signs", "books", "part"),
    )  # fmt: skip
    chosen = specialize(
        choose, suffix, helper, deeply_searched=deeply_searched, polished=last is not None,
        search=last_search, **shared,
        best_level=specialize(
            _best_level, suffix, levels_near=levels, every_curve=every_curve, hopeful=likely,
            widely=levels is wide_levels, by_guess=levels is small_levels, **shared,
        ),
    )  # fmt: skip
    encode_rows: Callable[..., None] = specialize(
        encode, suffix, kernel, **sides, magnitudes=signs == 1, stretch=stretch,
        least_fits=1 if coarse or again else 2, row_surveyed=surveyed,
        row_reinforced=reinforced, levels_chosen=chosen,
        row_scales=specialize(rate_row_scales, suffix, helper, cost_of_row=cost, largest=F(largest), signs=signs),
        write=specialize(write, suffix, put=put, block_bytes=BY_NAME[name].block_bytes, books=books, groups=32 // size),
        lines_ranked=count // 4096 if deep[0] else count // 256, attempts=attempts, even=even,
    )  # fmt: skip

    def encode_type(
        x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int
    ) -> None:
        """Encode rows row0..row1 of x [rows, n], n a multiple of 256; weights [n] or empty."""
        book = codebook(count, size, signs == 1, books)
        tree = book.points, book.cells, book.families, book.extents
        encode_rows(x, weights, out, row0, row1, *tree, book.indices, book.lists)

    return encode_type


#: What ``reinforce`` is bound to: the fewer bits, the less one value can make the error of a row.
LARGE_ERRORS = {"much_error": 0.05, "heavy": 0.05, "short_part": 1.0, "scanned": 0.3}
SMALL_ERRORS = {"much_error": 0.03, "heavy": 0.02, "short_part": 1 / 3, "scanned": 1.0}

encode_iq1_kt = _encoder(
    "IQ1_KT", 8192, 8, put_iq1_kt, codebook_levels, largest=127, around=((16, 4), (16, 8)), deep=((), (16, 16, 16)),
    searches=(1, 2, 3), fine=2, eager=True, coarse=True, very_much=8.0, stretch=1.07, more_deeply=LARGE_ERRORS,
)  # fmt: skip
encode_iq2_kt = _encoder(
    "IQ2_KT", 65536, 8, put_iq2_kt, codebook_levels, largest=127, around=((16, 4), (16, 4)),
    deep=((16, 16), (16, 16, 16)), searches=(1, 2, 3), fine=2, eager=True, coarse=True, much=1.6, very_much=6.0,
    more_deeply=LARGE_ERRORS | {"heavy": 0.1},
)  # fmt: skip
encode_iq3_kt = _encoder(
    "IQ3_KT", 65536, 8, put_iq3_kt, small_levels, largest=15, around=((16, 8), (16, 16, 8)),
    deep=((16, 16), (16, 16, 16)), last=((16, 16), (16, 16)), searches=(2, 2, 4), fine=4, spread=2, signs=1,
    very_much=1.6, much_enough=1.0, attempts=8, even=0.075, more_deeply=SMALL_ERRORS,
)  # fmt: skip
encode_iq4_kt = _encoder(
    "IQ4_KT", 32768, 4, put_iq4_kt, wide_levels, largest=64, around=12, again=12,
    deep=((16, 16), (16, 16, 16)), last=24, searches=(1, 2, 4), fine=4, eager=True, books=2, much=1.4, very_much=9.0,
    careful=False, attempts=8, more_deeply=SMALL_ERRORS,
)  # fmt: skip

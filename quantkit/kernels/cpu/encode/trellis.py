"""IQ1_KT, IQ2_KT, IQ3_KT, IQ4_KT of ik_llama.cpp: the nearest of many pseudo-random points to 8 or 4 values.

Layouts and the generator of points are in cpu/unpack/trellis.py. The error weighs values as ik_llama.cpp does: by
importance * sqrt(2 m + x^2), without importances by m / 2 + x^2, m the mean square of 256 values; 1e-4 where values or
weights are almost 0. Its bytes depend on its CPU's vectors, and its search leaves errors that are up to twice the least
possible, so quantkit has its own search, which

1. guesses the scale of 32 values from their fourth powers;
2. finds the points near them for scales around the guess, either sign, either codebook: in more searches where
   sum(w x x) is large, deeper where few weights are most of their sum; and from the points the error of 32 values as a
   curve over the scale, in long rows for some of them; IQ4_KT searches the better codebook of a sign once more, where
   the curve is lowest;
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
from dataclasses import dataclass
from functools import cache
from math import frexp
from typing import Any, NamedTuple

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
from quantkit.kernels.cpu.core.specialize import constants
from quantkit.kernels.cpu.encode import Encoder, trellis_codebook
from quantkit.kernels.cpu.encode import trellis_search as points
from quantkit.kernels.cpu.encode.batch import address, aligned_scratch
from quantkit.kernels.cpu.encode.i_quants import VALUES
from quantkit.kernels.cpu.encode.trellis_lists import BUCKETS, LIST_LENGTH
from quantkit.kernels.cpu.encode.trellis_search import best_lane
from quantkit.kernels.trellis_settings import TRELLIS_SETTINGS, ListSearch, TreeSearch, TrellisSettings
from quantkit.types import BY_NAME

F, I32 = np.float32, np.int32

codebook_values = make_constant(f32x16, VALUES, "trellis_scales")
up_to_15 = make_constant(f32x16, range(16), "trellis_up_to_15")


constants(TrellisSettings)


@constants
@dataclass(frozen=True)
class Search:
    """A search for points (trellis_search.py) that fills a slot of survivors of each of ``codebooks``."""

    search: Any
    steps: Any
    codebooks: int = 1


@constants
@dataclass(frozen=True)
class TrellisType:
    """A type: its settings, and the functions that differ between types.

    width: points that are kept of a group of values; survivors: bytes of those of 32 values, both for one sign and
    codebook. levels_near, least_of_levels: of its levels; write_values: writes 32 values. lines_ranked: of families, or
    of cells, of a codebook, that are ranked first.
    """

    settings: TrellisSettings
    signs: int
    codebooks: int
    groups: int
    slots: int
    width: int
    heavy_searches: int
    survivors: int
    block_bytes: int
    has_wide_levels: bool
    has_unsigned_levels: bool
    retries: bool
    finishes: bool
    floats: Any
    levels_near: Any
    least_of_levels: Any
    write_values: Any
    first: Search
    deep: Search
    retry: Search
    final: Search
    fetch_lists: Any
    scan: Any
    lines_ranked: int


class Row(NamedTuple):
    """A row during its search; x, w, curves, survivors, scratch and those of ``lines`` are addresses.

    Of each 32 values: the scale guessed; the energy sum(w x x); how many times it counts where the row's scale is
    chosen; two curves of errors; survivors, and of each sign and codebook how many slots of these are filled, int64.
    lines: of points, of cells, of families, lists, and how far cells reach.
    """

    x: int
    w: int
    n: int
    guesses: Any
    energies: Any
    multiplicities: Any
    curves: int
    survivors: int
    slot_counts: Any
    lines: Any
    scratch: int


class Choice(NamedTuple):
    """Of each 32 values the level of the scale, sign and codebook as an index, and the places of points."""

    levels: Any
    combinations: Any
    places: Any


# ---------------------------------------------------------------- weights

#: Limit below which values or weights count as 0, and the minimum weight that replaces them.
ALMOST_0, LEAST = 1e-14, 1e-4


@inline
def _fill(w, offset, count, value):
    for i in range(offset, offset + 4 * count, 64):
        store(w, i, splat(f32x16, F(min(value, 1e30))))


@inline
def _weigh_by_importance(x, w, importance, sigma2, unit, top):
    """Write the weights of 32 values; x is in units of ``unit``, weights are in units of ``top``."""
    wx = w2 = x2 = splat(f32x16, F(0))
    for i in range(0, 128, 64):
        v = load(f32x16, x, i)
        weight = (load(f32x16, importance, i) * F(1 / top)) * vsqrt(sigma2 + v * v)
        store(w, i, weight)
        wx = wx + weight * vabs(v)
        w2 = w2 + weight * weight
        x2 = x2 + v * v
    both = top * unit
    dead = np.float64(hsum(x2)) * unit * unit < ALMOST_0 or np.float64(hsum(w2)) * both * both < ALMOST_0
    if dead or np.float64(hsum(wx)) * both * unit < ALMOST_0:
        _fill(w, 0, 32, LEAST / both)


@inline
def _weigh(x, w, importance, n, unit, top):
    """Write the weights of a row; ``importance``: an address, or 0."""
    for offset in range(0, 4 * n, 1024):
        squares = splat(f32x16, F(0))
        for i in range(offset, offset + 1024, 64):
            squares = squares + load(f32x16, x, i) * load(f32x16, x, i)
        square = hsum(squares)
        if np.float64(square) * unit * unit < 256 * ALMOST_0:
            _fill(w, offset, 256, LEAST / (unit * (top if importance else unit)))
        elif importance:
            for i in range(offset, offset + 1024, 128):
                _weigh_by_importance(x + i, w + i, importance + i, square * F(2 / 256), unit, top)
        else:
            for i in range(offset, offset + 1024, 64):
                v = load(f32x16, x, i)
                store(w, i, square * F(0.5 / 256) + v * v)


# ---------------------------------------------------------------- levels of a scale


@inline
def codebook_levels(v):
    """Return the 16 levels that a scale may have."""
    return codebook_values()


@inline
def unsigned_levels(v):
    """Return the 16 levels that a scale may have."""
    return up_to_15()


@inline
def wide_levels(v):
    """Return the 16 levels that are nearest to v."""
    return up_to_15() + (min(max(np.rint(v), F(-56)), F(55)) - F(8))


# ---------------------------------------------------------------- errors over the scale of a block

#: An error curve: at 16 scales, each STEP times the one before, around the guess of a block's scale.
STEP, LOG2_STEP = 1.065, 0.0908534
grid = make_constant(f32x16, [STEP ** (k - 7.5) for k in range(16)], "trellis_grid")

#: Bytes of the curves of 32 values, for positive and for negative scales: each has 16 errors, padding, at LEAST_OF the
#: minimum with each codebook, at SCALE_OF its scale.
CURVES = 256
LEAST_OF = 96
SCALE_OF = 104

#: Share of the minimum error by which another sign and codebook may exceed it and still be tried: in most rows, and in
#: rows that are searched longer.
PATIENCE, MORE_PATIENCE = 0.25, 1e30


@inline
def guess_scale(x):
    """Estimate the scale that fits 32 values best by the fourth root of their mean fourth power; 0 for zeros."""
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
    """Return the positions on a curve of 16 scales, given over the guess: log2 by its exponent and a parabola."""
    bits = cast(i32x16, ratio)
    m = cast(f32x16, (bits & I32(0x7FFFFF)) | I32(0x3F800000))
    log2 = convert(f32x16, (bits >> 23) - I32(127)) + ((F(2) - m * F(1 / 3)) * m - F(5 / 3))
    return log2 * F(1 / LOG2_STEP) + F(7.5)


@inline
def _gain(curve, ratio):
    """Return the errors at 16 scales, given over the guess, of the curve at an address: no gain far beyond its ends."""
    t = _place(ratio)
    clamped = vmax(vmin(t, F(14.99)), F(0))
    k = convert(i32x16, clamped)
    values = load(f32x16, curve, 0)
    slopes = load(f32x16, curve, 4) - values
    interpolated = lookup16_f32(values, k) + (clamped - convert(f32x16, k)) * lookup16_f32(slopes, k)
    beyond = vmin(t, F(0)) * F(0.05) - vmax(t - F(15), F(0)) * F(0.2)
    return vmin(interpolated, F(0)) * vmax(beyond + F(1), F(0))


@inline
def least_of_16(t, d, sign, side, guess, curve):
    """Return the least errors of 32 values, by the curve of a side, for a row's scales sign * d, and their own scales.

    d: in 16 lanes; scales are one of 16 levels times that.
    """
    least = splat(f32x16, F(0))
    scales = splat(f32x16, F(0))
    inverse = F(1) / guess
    least_d, most_d = hmin(d), hmax(d)
    for i in range(16):
        level = extract(t.levels_near(F(0)), i)
        ratio = abs(level) * inverse
        is_of_side = ((level < F(0)) == (sign > F(0))) == (side == 1)
        if is_of_side and ratio * least_d < F(1.65) and ratio * most_d > F(0.3):
            gain = _gain(curve, d * ratio)
            scales = select(gain < least, d * abs(level), scales)
            least = vmin(gain, least)
    return least, scales


@inline
def least_of_wide(t, d, sign, side, guess, curve):
    """Do ``least_of_16`` for scales that are -64 .. 63 times that of the row."""
    least = splat(f32x16, F(0))
    scales = splat(f32x16, F(0))
    inverse = F(1) / guess
    most = F(63) if (side == 0) == (sign > F(0)) else F(64)
    for i in range(16):
        scale = vmin(round_even(splat(f32x16, guess * extract(grid(), i)) / d), most) * d
        gain = _gain(curve, scale * inverse)
        scales = select(gain < least, scale, scales)
        least = vmin(gain, least)
    return least, scales


@inline
def _curves_of(row, b, side):
    """Return the address of the curve of 32 values for a sign."""
    return row.curves + CURVES * b + CURVES // 2 * side


@inline
def _survivors_of(t, row, b, combination):
    """Return the address of the survivors of 32 values for a sign and a codebook."""
    return row.survivors + t.survivors * (t.signs * t.codebooks * b + combination)


@inline
def _least_error(t, row, b, combination):
    """Return the least error of 32 values with a sign and a codebook, less their energy."""
    curve = _curves_of(row, b, combination // t.codebooks)
    return load(types.float32, curve, LEAST_OF + 4 * (combination % t.codebooks))


@inline
def _prune_limit(t, row, b, slack):
    """Return the least error up to which a sign and codebook of 32 values is reconsidered: ``slack`` of the error."""
    least = F(3e38)
    for c in range(t.signs * t.codebooks):
        least = min(least, _least_error(t, row, b, c))
    return least + max(row.energies[b] + least, F(0)) * slack


@inline
def _least_of_survivors(t, row, b, side, scales, limit):
    """Return the errors of 32 values for 16 scales of a sign, with their survivors."""
    least = splat(f32x16, F(0))
    for codebook in range(t.codebooks):
        c = side * t.codebooks + codebook
        if _least_error(t, row, b, c) <= limit:
            count = row.slot_counts[t.signs * t.codebooks * b + c]
            survivors = _survivors_of(t, row, b, c)
            least = vmin(points.errors(survivors, t.groups, t.width, count, scales), least)
    return least


@helper
def cost_of(t, row, d, sign, exact):
    """Return the errors of a row for its scales sign * d, d in 16 lanes; exact: with survivors, not by curves."""
    total = splat(f32x16, F(0))
    guesses = row.guesses
    multiplicities = row.multiplicities
    for b in range(guesses.size):
        if not (guesses[b] > F(0) and multiplicities[b] > F(0)):
            continue
        least = splat(f32x16, F(0))
        limit = _prune_limit(t, row, b, F(PATIENCE)) if exact else F(0)
        for side in range(t.signs):
            error, scales = t.least_of_levels(t, d, sign, side, guesses[b], _curves_of(row, b, side))
            if exact:
                error = _least_of_survivors(t, row, b, side, scales, limit)
            least = vmin(error, least)
        total = total + least * multiplicities[b]
    return total


@helper
def rate_row_scales(t, row, exact, scales, costs):
    """Write 64 scales that the row may have, and the row's errors with them."""
    top = F(0)
    for b in range(row.guesses.size):
        top = max(top, row.guesses[b])
    d = (up_to_15() * F(0.028) + F(1)) * (top * F(0.8) / F(t.settings.largest_level))
    for i in range(0, 64, 16):
        sign = F(-1) if i < 32 else F(1)
        wider = d * F(1.448) if i % 32 else d
        cost = splat(f32x16, F(0))
        if t.signs == 2 or sign > F(0):
            cost = cost_of(t, row, wider, sign, exact)
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
def put_iq1_kt(block, b, level, codebook, x, q):
    """Write 32 values, the b-th of a block of zeros: the level of their scale, their indices."""
    code = _code(level)
    for j in range(4):
        store(block, 8 + 4 * b + j, types.uint8(q[j] & 255))
        _or(block, 40 + 4 * (b % 4) + j, ((q[j] >> 8) & 15) << (4 * (b // 4)))
        code |= (q[j] >> 12) << (4 + j)
    store(block, b, types.uint8(code))


@inline
def put_iq2_kt(block, b, level, codebook, x, q):
    """Write 32 values."""
    _or(block, b % 4, _code(level) << (4 * (b // 4)))
    for j in range(4):
        store(block, 4 + 8 * b + 2 * j, types.uint16(q[j]))


@inline
def put_iq3_kt(block, b, level, codebook, x, q):
    """Write 32 values; their signs are those of x."""
    _or(block, b % 4, np.int64(level) << (4 * (b // 4)))
    for j in range(4):
        store(block, 4 + 8 * b + 2 * j, types.uint16(q[j]))
    for j in range(32):
        if load(types.float32, x, 4 * j) < F(0):
            _or(block, 68 + j, 1 << b)


@inline
def put_iq4_kt(block, b, level, codebook, x, q):
    """Write 32 values."""
    word = ((np.int64(level) + 64) << 1) | codebook
    for j in range(8):
        word |= (q[j] >> 12) << (8 + 3 * j)
        store(block, 32 + 8 * b + j, types.uint8(q[j] & 255))
        _or(block, 96 + 8 * (b % 4) + j, ((q[j] >> 8) & 15) << (4 * (b // 4)))
    store(block, 4 * b, types.uint32(word))


# ---------------------------------------------------------------- rows

#: Ends of the ranges of scales, relative to the guess, for which all points are ranked; one range per deep search.
ENDS = {
    3: (trellis_codebook.SCALES[0], 0.85, 1.17, trellis_codebook.SCALES[1]),
    4: (trellis_codebook.SCALES[0], 0.79, 1.0, 1.27, trellis_codebook.SCALES[1]),
}
#: The share of an uneven row's sum(w x x) from which 32 values get a deep search.
DEEP = 1 / 16
#: Larger than any energy sum(w x x).
INFINITE = 1e300
#: Groups with an energy sum(w x x) of at least this multiple of the mean are searched longer.
HEAVY = 2.0
#: All points are ranked for signs and codebooks whose error exceeds the minimum by at most this share.
SCAN_SLACK = 1.0
#: Weights are unequal if their sum of squares is at least this multiple of its minimum.
UNEQUAL = 4.0


@inline
def search_around(t, search, row, b, center, searches):
    """Keep the points near 32 values for scales around ``center``, either sign, either codebook."""
    ratio = F(1)
    x = row.x + 128 * b
    w = row.w + 128 * b
    for _ in range(searches - 1):
        ratio *= F(0.8944272)
    for side in range(t.signs):
        for codebook in range(0, t.codebooks, search.codebooks):
            survivors, scale = _survivors_of(t, row, b, side * t.codebooks + codebook), center * ratio
            sign = F(1) if side == 0 else F(-1)
            for k in range(searches):
                slot = survivors + 4 * points.SURVIVORS * k
                query = points.Query(codebook, sign, sign / scale, x, w)
                search.search(search.steps, query, row.lines, row.scratch, slot, t.width)
                scale *= F(1.25)


@inline
def _find_curve(t, row, b, side, center):
    """Return the errors of 32 values for 16 scales, the codebook and scale of the least; write the least of each."""
    least = splat(f32x16, F(0))
    lowest = F(3e38)
    best = 0
    scale = center
    for codebook in range(t.codebooks):
        c = side * t.codebooks + codebook
        count, survivors = row.slot_counts[t.signs * t.codebooks * b + c], _survivors_of(t, row, b, c)
        errors = points.errors(survivors, t.groups, t.width, count, grid() * center)
        least = errors if codebook == 0 else vmin(errors, least)
        store(_curves_of(row, b, side), LEAST_OF + 4 * codebook, hmin(errors))
        if hmin(errors) < lowest:
            lowest = hmin(errors)
            best = codebook
            scale = center * extract(grid(), best_lane(errors))
    return least, best, scale


@inline
def _is_unequal(w):
    """Return whether few of 32 weights are most of their sum."""
    a, b = load(f32x16, w, 0), load(f32x16, w, 64)
    total = np.float64(hsum(a + b))
    return np.float64(hsum(a * a + b * b)) * 32 > UNEQUAL * (total * total)


@inline
def _retry(t, row, b, patience, count):
    """Search the better codebook of either sign again, around the scale at which its error is least."""
    limit, first = _prune_limit(t, row, b, patience), t.signs * t.codebooks * b
    for side in range(t.signs):
        curve = _curves_of(row, b, side)
        best = 1 if load(types.float32, curve, LEAST_OF + 4) < load(types.float32, curve, LEAST_OF) else 0
        if load(types.float32, curve, LEAST_OF + 4 * best) > limit:
            continue
        c = side * t.codebooks + best
        sign = F(1) if side == 0 else F(-1)
        survivors = _survivors_of(t, row, b, c)
        inverse = sign / load(types.float32, curve, SCALE_OF)
        query = points.Query(best, sign, inverse, row.x + 128 * b, row.w + 128 * b)
        slot = survivors + 4 * points.SURVIVORS * count
        t.retry.search(t.retry.steps, query, row.lines, row.scratch, slot, t.width)
        row.slot_counts[first + c] = count + 1
        errors = points.errors(survivors, t.groups, t.width, count + 1, grid() * row.guesses[b])
        store(curve, 0, vmin(errors, load(f32x16, curve, 0)))
        store(curve, LEAST_OF + 4 * best, hmin(errors))


@helper
def search_blocks(t, row, total, weighed, uneven, patience, step):
    """Search for all values of a row; write the number of filled slots, and curves of errors.

    total: the row's sum(w x x). weighed: whether there are importances; uneven: whether few values make most of
    ``total``. Values that weigh little count ``step`` times, one in ``step``.
    """
    n = row.n
    guesses = row.guesses
    slot_counts = row.slot_counts
    settings = t.settings
    mean, patient = total * 32 / n, patience > F(1)
    least_deep = settings.patient_deep_energy * mean if patient else INFINITE
    if uneven:
        least_deep = min(DEEP * total, least_deep)
    for b in range(n // 32):
        center, first = guesses[b], t.signs * t.codebooks * b
        energy = np.float64(row.energies[b]) if center > F(0) else 0.0
        guess = center if center > F(0) else F(1)
        following = min(b + 1, n // 32 - 1)
        if guesses[following] > F(0):
            t.fetch_lists(t.first.steps, row.x + 128 * following, F(1) / guesses[following], row.lines[3], row.scratch)
        is_heavy = energy > HEAVY * mean
        count = t.heavy_searches if is_heavy or patient else settings.light_searches
        if energy > least_deep:
            count = settings.deep_searches
            search_around(t, t.deep, row, b, guess, count)
        elif weighed and (settings.deep_if_unequal or patient) and _is_unequal(row.w + 128 * b):
            count = t.heavy_searches
            search_around(t, t.deep, row, b, guess, count)
        else:
            search_around(t, t.first, row, b, guess, count)
        for c in range(t.signs * t.codebooks):
            slot_counts[first + c] = count
        # A few values of large weight can dominate the error of a long row, so all are counted.
        if is_heavy:
            row.multiplicities[b] = F(1)
        else:
            row.multiplicities[b] = F(step) if b % step == 0 else F(0)
        if row.multiplicities[b] == F(0) and not t.has_wide_levels:
            continue
        for side in range(t.signs):
            least, _, scale = _find_curve(t, row, b, side, center)
            store(_curves_of(row, b, side), 0, least)
            store(_curves_of(row, b, side), SCALE_OF, scale)
        if t.retries and count < settings.deep_searches and center > F(0):
            _retry(t, row, b, patience, count)


@inline
def _error_left(t, row, b):
    """Estimate the error of 32 values with the scale that suits them."""
    gain = hmin(load(f32x16, _curves_of(row, b, 0), 0))
    if t.signs == 2:
        gain = min(gain, hmin(load(f32x16, _curves_of(row, b, 1), 0)))
    return np.float64(max(row.energies[b] + gain, F(0)))


@inline
def _write_errors_of_groups(t, row, b, combination, scale, errors):
    """Write the errors of the groups of 32 values for a scale."""
    survivors = _survivors_of(t, row, b, combination)
    size = t.settings.size
    count = row.slot_counts[t.signs * t.codebooks * b + combination]
    for group in range(t.groups):
        first = 128 * b + 4 * size * group
        v = load(t.floats, row.x, first)
        p, q, _ = points.pick(survivors + 12 * t.width * group, t.width, count, scale)
        errors[group] = hsum(v * v * load(t.floats, row.w, first)) + (scale * q - p) * scale


@helper
def refine_outliers(t, row, errors):
    """Search more deeply for values that make much of a row's error, and rank all points for groups of them.

    errors: scratch, float32 [8].
    """
    total = 0.0
    combinations = t.signs * t.codebooks
    guesses = row.guesses
    multiplicities = row.multiplicities
    slot_counts = row.slot_counts
    for b in range(row.n // 32):
        if multiplicities[b] > F(0) and guesses[b] > F(0):
            total += np.float64(multiplicities[b]) * _error_left(t, row, b)
    part = t.settings.short_row_factor * total if row.n == 256 else total
    least_deep, least_scanned = t.settings.deep_error * part, t.settings.scan_error * part
    for b in range(row.n // 32):
        if not (multiplicities[b] > F(0) and guesses[b] > F(0) and _error_left(t, row, b) > least_deep):
            continue
        center = guesses[b]
        first = combinations * b
        lowest = F(3e38)
        for side in range(t.signs):
            least, codebook, scale = _find_curve(t, row, b, side, center)
            if hmin(least) < lowest:
                lowest = hmin(least)
                _write_errors_of_groups(t, row, b, side * t.codebooks + codebook, scale, errors)
        limit = _prune_limit(t, row, b, F(SCAN_SLACK))
        if slot_counts[first : first + combinations].min() < t.settings.deep_searches:
            search_around(t, t.deep, row, b, center, t.settings.deep_searches)
        for c in range(combinations):
            slot_counts[first + c] = t.settings.deep_searches
            if _least_error(t, row, b, c) > limit:
                continue
            sign = F(-1) if c >= t.codebooks else F(1)
            for group in range(t.groups):
                if np.float64(errors[group]) > least_scanned:
                    survivors = _survivors_of(t, row, b, c) + 12 * t.width * group
                    offset = 128 * b + 4 * t.settings.size * group
                    query = points.Query(c % t.codebooks, sign, sign / center, row.x + offset, row.w + offset)
                    points.scan(t.scan, query, errors[group], row.lines, row.scratch, survivors, t.width)
        for side in range(t.signs):
            least, _, _ = _find_curve(t, row, b, side, center)
            store(_curves_of(row, b, side), 0, least)


@inline
def _is_far_from(guess, d, levels):
    """Return which of the levels 0 .. 15 are not among the 8 around a guess, for a row's scale."""
    first = np.rint(guess / d - F(2.5))
    first = first if first > F(0) else F(0)
    first = first if first < F(8) else F(8)
    return vabs(levels - (first + F(3.5))) > F(4)


@inline
def _best_level(t, row, b, d, patience):
    """Return the level of the scale of 32 values with the least error, and its sign and codebook as an index."""
    lowest = F(3e38)
    level = F(0)
    combination = 0
    guess = row.guesses[b]
    slot_counts = row.slot_counts
    first = t.signs * t.codebooks * b
    combinations = t.signs * t.codebooks
    limit = _prune_limit(t, row, b, patience) if t.has_wide_levels else F(0)
    reach = (
        1 if t.has_wide_levels and slot_counts[first : first + combinations].min() == t.settings.deep_searches else 0
    )
    for side in range(t.signs):
        sign = F(1) if side == 0 else F(-1)
        estimate = guess * extract(grid(), best_lane(load(f32x16, _curves_of(row, b, side), 0)))
        for codebook in range(t.codebooks):
            c = side * t.codebooks + codebook
            if t.has_wide_levels and _least_error(t, row, b, c) > limit:
                continue
            for k in range(-reach, reach + 1):
                levels = t.levels_near(sign * estimate / d + F(16 * k))
                scales = levels * (d * sign)
                errors = points.errors(
                    _survivors_of(t, row, b, c), t.groups, t.width, slot_counts[first + c],
                    vmax(scales, F(0)),
                )  # fmt: skip
                errors = select(scales < F(0), F(3e38), errors)
                if t.has_unsigned_levels:
                    errors = select(_is_far_from(guess, d, levels), F(3e38), errors)
                if hmin(errors) < lowest:
                    lowest = hmin(errors)
                    level = extract(levels, best_lane(errors))
                    combination = c
    return level, combination


@inline
def _search_anew(t, row, b, scale):
    """Search for 32 values around one scale only, and discard earlier results."""
    for c in range(t.signs * t.codebooks):
        row.slot_counts[t.signs * t.codebooks * b + c] = 1
        store(_curves_of(row, b, c // t.codebooks), LEAST_OF + 4 * (c % t.codebooks), F(0))
    search_around(t, t.deep, row, b, scale, 1)


@helper
def pick_levels(t, row, d, patience, first, last, choice):
    """Choose levels and points for a row's scale d; return sum(w q x) and sum(w q q), q in units of d.

    ``first``: of the row: search again where the scale is far from the guess; ``last``: search for the scale chosen.
    """
    sumqx = sumq2 = 0.0
    guesses = row.guesses
    slot_counts = row.slot_counts
    for b in range(row.n // 32):
        begin = t.signs * t.codebooks * b
        level, combination = _best_level(t, row, b, d, patience)
        scale = abs(level * d)
        if first and (scale > F(1.65) * guesses[b] or scale < F(0.6) * guesses[b]) and scale > F(0):
            _search_anew(t, row, b, scale)
            level, combination = _best_level(t, row, b, d, patience)
            scale = abs(level * d)
        choice.levels[b], choice.combinations[b] = level, combination
        survivors, count = _survivors_of(t, row, b, combination), slot_counts[begin + combination]
        if t.finishes and last and scale > F(0) and count < t.slots:
            sign = F(-1) if combination >= t.codebooks else F(1)
            codebook, slot = combination % t.codebooks, survivors + 4 * points.SURVIVORS * count
            query = points.Query(codebook, sign, sign / scale, row.x + 128 * b, row.w + 128 * b)
            t.final.search(t.final.steps, query, row.lines, row.scratch, slot, t.width)
            count += 1
        for group in range(t.groups):
            p, q, place = points.pick(survivors + 12 * t.width * group, t.width, count, scale)
            sumqx += np.float64(abs(level)) * np.float64(p)
            sumq2 += np.float64(level) * np.float64(level) * np.float64(q)
            choice.places[b, group] = place
    return (0.5 if d > F(0) else -0.5) * sumqx, sumq2


@inline
def write(t, x, n, choice, indices, out):
    """Write the blocks of a row, all zeros before."""
    levels, places = choice.levels, choice.places
    for b in range(n // 32):
        for group in range(t.groups):
            places[b, group] = load(types.int32, indices, 4 * places[b, group]) if levels[b] != F(0) else 0
        codebook = choice.combinations[b] % t.codebooks
        t.write_values(out + t.block_bytes * (b // 8), b % 8, levels[b], codebook, x + 128 * b, places[b])


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


#: Thresholds of the largest share of a row: the share, and its multiple of the mean share, from which a row is uneven;
#: the share from which several scales are tried for uneven rows; the share from which all rows are searched longer.
UNEVEN_SHARE, UNEVEN = 0.1, 1.5
FEW_MATTER = 0.035
PATIENT = 0.04


@inline
def _share(energies):
    """Return a row's sum(w x x), and the share of it that 32 values have, on average over that sum."""
    total = squares = 0.0
    for b in range(energies.size):
        total += np.float64(energies[b])
        squares += np.float64(energies[b]) * np.float64(energies[b])
    return total, squares / (total * total) if total > 0 else 0.0


#: The type that ``encode`` encodes, bound by its entry point.
this_type: Any = None


def encode(x, weights, out, row0, row1, tables):
    """Encode rows row0..row1 of x [rows, n], n a multiple of 256; weights [n] or empty; tables: a ``Codebook``'s."""
    t, settings = this_type, this_type.settings
    n = x.shape[1]
    count, combinations = n // 32, t.signs * t.codebooks
    xs, ws = aligned_scratch(4 * n)[:n], aligned_scratch(4 * n)[:n]
    guesses, energies = np.empty(count, np.float32), np.empty(count, np.float32)
    multiplicities = np.empty(count, np.float32)
    curves, slot_counts = aligned_scratch(count * CURVES + 64), np.empty(count * combinations, np.int64)
    survivors, scratch = aligned_scratch(count * t.survivors * combinations), aligned_scratch(points.SCRATCH + 64)
    curves[:] = 0
    scratch[:] = 0
    levels, indices_of = np.empty((2, count), np.float32), np.empty((2, count), np.int64)
    scales = np.empty(64, np.float32)
    costs = np.empty(64, np.float32)
    errors = np.empty(8, np.float32)
    places = np.empty((2, count, 8), np.int32)
    for i in range(t.codebooks * t.lines_ranked):
        store(address(scratch), points.LINES + 4 * i, I32(i))
    store(address(scratch), points.ONE, 1)
    largest_weight = np.float64(_top(weights))
    top = largest_weight if largest_weight > 0 else 1.0
    for row in range(row0, row1):
        out[row, :] = 0
        _, exponent = frexp(np.float64(_top(x[row])))
        unit = 2.0 ** min(max(exponent, -126), 126)
        _prepare(x, row, xs, guesses, unit, settings.magnitudes)
        if _top(guesses) == F(0):
            continue
        # Addresses are taken here: numba frees an array after its last use.
        lines = (
            address(tables.points), address(tables.cells), address(tables.families), address(tables.lists),
            address(tables.extents),
        )  # fmt: skip
        r = Row(
            address(xs),
            address(ws),
            n,
            guesses,
            energies,
            multiplicities,
            address(curves),
            address(survivors),
            slot_counts,
            lines,
            address(scratch),
        )
        _weigh(r.x, r.w, address(weights) if weights.size else 0, n, unit, top)
        for b in range(count):
            energies[b] = _energy(r.x + 128 * b, r.w + 128 * b)
        total, share = _share(energies)
        uneven = share > UNEVEN_SHARE or share * count > UNEVEN
        tries = settings.row_scales if uneven and share > FEW_MATTER else 1
        step = 1 if tries > 1 else max(count // 16, 1)
        patience = F(MORE_PATIENCE if tries > 1 or share > PATIENT else PATIENCE)
        search_blocks(t, r, total, weights.size > 0, uneven, patience, step)
        if uneven:
            refine_outliers(t, r, errors)
        rate_row_scales(t, r, tries > 1, address(scales), address(costs))
        best = -1.0
        scale = 0.0
        spare = 0
        for attempt in range(tries):
            cheapest = costs.size - 1 - costs[::-1].argmin()
            if costs[cheapest] >= F(0) and attempt > 0:
                break
            d, before, costs[cheapest] = scales[cheapest], -1.0, F(0)
            for k in range(2 if tries > 1 else 1):
                choice = Choice(levels[spare], indices_of[spare], places[spare])
                qx, q2 = pick_levels(t, r, d, patience, attempt + k == 0, False, choice)
                gain = qx * qx / q2 if q2 > 0 else 0.0
                if gain > best:
                    best = gain
                    scale = qx / q2 if q2 > 0 else 0.0
                    spare = 1 - spare
                if gain <= before or q2 <= 0:
                    break
                d, before = F(qx / q2), gain
        if best >= 0.0:
            choice = Choice(levels[spare], indices_of[spare], places[spare])
            qx, q2 = pick_levels(t, r, F(scale), patience, False, True, choice)
            if q2 > 0 and qx * qx / q2 > best:
                scale, spare = qx / q2, 1 - spare
            store(address(out) + out.shape[1] * row, 0, F(scale * settings.row_scale_gain * unit))
            if scale != 0.0:
                target = address(out) + out.shape[1] * row + 4
                choice = Choice(levels[1 - spare], indices_of[1 - spare], places[1 - spare])
                write(t, address(x) + 4 * n * row, n, choice, address(tables.indices), target)


# ---------------------------------------------------------------- the encoders


@cache
def point_format(size: int, bias: int, short: bool = False) -> points.PointFormat:
    """Return the storage of points of ``size`` values; ``short``: weights of queries have 8 bits, everything else "
    "16."""
    units = points.SHORT if short else {}
    largest = F(64 if bias else 126)
    if size == 8:
        return points.PointFormat(
            size=8,
            bias=bias,
            line_bytes=256,
            largest=largest,
            floats=f32x8,
            shorts=i16x8,
            bytes=i8x8,
            order=points.even_odd,
            query=points.fine_query8,
            sums=points.fine_sums8,
            levels=points.levels8,
            **units,
        )
    return points.PointFormat(
        size=4,
        bias=bias,
        line_bytes=128,
        largest=largest,
        floats=f32x4,
        shorts=points.i16x4,
        bytes=points.i8x4,
        order=points.in_order,
        query=points.fine_query4,
        sums=points.fine_sums4,
        levels=points.levels4,
        **units,
    )


def _tree_steps(settings: TrellisSettings, search: TreeSearch) -> points.TreeSteps:
    """Return the steps of ``points.search`` in a type's codebooks."""
    form = point_format(settings.size, _bias(settings), settings.magnitudes and search.coarse_centers)
    query, score, prepare = form.query, points.fine_score, points.prepare_both
    if search.coarse_points:
        query, score, prepare = points.coarse_query, points.coarse_score, points.prepare_coarse
    center_query, center_score = query, score
    if settings.size == 4:
        center_query, center_score = points.coarse_query4, points.coarse_score4
    elif search.coarse_centers and not search.coarse_points:
        center_query, center_score = points.coarse_query_of_both, points.coarse_score
    families, cells = (
        points.Ranking(center_query, center_score, (*shape, 0, 0, 0, 0)[:4])
        for shape in (search.families, search.cells)
    )
    return points.TreeSteps(
        points=form,
        prepare=prepare,
        of_families=families,
        of_cells=cells,
        of_points=points.Ranking(query, score),
        families=settings.points // 4096 if search.families else 0,
        cells=settings.points // 256,
        families_kept=sum(search.families),
        cells_kept=sum(search.cells),
    )


def _list_steps(settings: TrellisSettings, search: ListSearch) -> points.ListSteps:
    """Return the steps of ``points.search_listed`` in a type's codebooks."""
    return points.ListSteps(
        points=point_format(4, _bias(settings)),
        rank_points=points.rank_around if search.two_scales else points.rank,
        of_points=points.Ranking(points.fine_query4, points.fine_score, numbers=types.uint16, number_bytes=2),
        lines=search.lines,
        list_bytes=2 * LIST_LENGTH * BUCKETS,
        codebooks=search.codebooks,
        codebook_stride=_survivors(settings) if search.codebooks > 1 else 0,
    )


def scan_steps(count: int, form: points.PointFormat, ranges: int) -> points.ScanSteps:
    """Return the steps of ``points.scan`` in codebooks of ``count`` points, for this number of ranges of scales."""
    return points.ScanSteps(points=form, rank_all=points.rank_all, lines=count // 16, ends=ENDS[ranges])


def _bias(settings: TrellisSettings) -> int:
    """Return the offset of stored levels."""
    return 0 if settings.magnitudes else 126


def _survivors(settings: TrellisSettings) -> int:
    """Return the bytes of survivors of 32 values, for one sign and codebook."""
    return 12 * points.SURVIVORS * settings.slots * settings.groups


def _search(settings: TrellisSettings, search: TreeSearch | ListSearch) -> Search:
    if isinstance(search, ListSearch):
        return Search(points.search_listed, _list_steps(settings, search), search.codebooks)
    return Search(points.search, _tree_steps(settings, search))


_WRITERS = {"IQ1_KT": put_iq1_kt, "IQ2_KT": put_iq2_kt, "IQ3_KT": put_iq3_kt, "IQ4_KT": put_iq4_kt}
_LEVELS = {"codebook": codebook_levels, "unsigned": unsigned_levels, "wide": wide_levels}


def _trellis_type(name: str, settings: TrellisSettings) -> TrellisType:
    is_wide = settings.levels == "wide"
    form = point_format(settings.size, _bias(settings))
    deep = _search(settings, settings.deep)
    return TrellisType(
        settings=settings,
        signs=settings.signs,
        codebooks=settings.codebooks,
        groups=settings.groups,
        slots=settings.slots,
        width=points.SURVIVORS * settings.slots,
        heavy_searches=settings.heavy_searches,
        survivors=_survivors(settings),
        block_bytes=BY_NAME[name].block_bytes,
        has_wide_levels=is_wide,
        has_unsigned_levels=settings.levels == "unsigned",
        retries=settings.retry is not None,
        finishes=settings.final is not None,
        floats=f32x8 if settings.size == 8 else f32x4,
        levels_near=_LEVELS[settings.levels],
        least_of_levels=least_of_wide if is_wide else least_of_16,
        write_values=_WRITERS[name],
        first=_search(settings, settings.first),
        deep=deep,
        retry=deep if settings.retry is None else _search(settings, settings.retry),
        final=deep if settings.final is None else _search(settings, settings.final),
        fetch_lists=points.fetch_lists if isinstance(settings.first, ListSearch) else points.fetch_nothing,
        scan=scan_steps(settings.points, form, settings.deep_searches),
        lines_ranked=settings.points // 4096 if settings.deep.families else settings.points // 256,
    )


def encoder_with(name: str, settings: TrellisSettings) -> Encoder:
    """Return an encoder of a type that searches with these settings."""
    encode_rows: Callable[..., None] = specialize(encode, name.lower(), kernel, this_type=_trellis_type(name, settings))

    def encode_type(
        x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int
    ) -> None:
        """Encode rows row0..row1 of x [rows, n], n a multiple of 256; weights [n] or empty."""
        codebook = trellis_codebook.codebook(settings.points, settings.size, settings.magnitudes, settings.codebooks)
        encode_rows(x, weights, out, row0, row1, codebook)

    return encode_type


encode_iq1_kt = encoder_with("IQ1_KT", TRELLIS_SETTINGS["IQ1_KT"])
encode_iq2_kt = encoder_with("IQ2_KT", TRELLIS_SETTINGS["IQ2_KT"])
encode_iq3_kt = encoder_with("IQ3_KT", TRELLIS_SETTINGS["IQ3_KT"])
encode_iq4_kt = encoder_with("IQ4_KT", TRELLIS_SETTINGS["IQ4_KT"])

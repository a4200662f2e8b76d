"""IQ1_KT, IQ2_KT, IQ3_KT, IQ4_KT of ik_llama.cpp: the nearest of many pseudo-random points to 8 or 4 values.

Layouts and the generator of points are in cpu/unpack/trellis.py. The error weighs values as ik_llama.cpp does: by
importance * sqrt(2 m + x^2), without importances by m / 2 + x^2, m the mean square of 256 values; 1e-4 where values or
weights are almost 0. Its bytes depend on its CPU's vectors, and its search leaves errors that are up to twice the least
possible, so it is not repeated here. This one:

1. guesses the scale of 32 values from their fourth powers;
2. finds the points near them for scales around the guess, either sign, either codebook, and more of them for values
   that weigh much; and from these the error of each 32 values as a curve over the scale;
3. chooses the scale d of the row for which the levels of scales cost the least on all curves;
4. chooses levels and points among those found, fits d to them, and again while the error falls.

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
from quantkit.kernels.cpu.encode.groups import address
from quantkit.kernels.cpu.encode.i_quants import VALUES
from quantkit.kernels.cpu.encode.trellis_codebook import codebook
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

#: Bytes of the curves of 32 values: for positive and for negative scales; each 16 errors, and room.
CURVES = 256


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


def cost_of_levels(d, sign, guesses, curves, count):
    """Return the errors of a row for its scales sign * d, d in 16 lanes: scales are one of 16 levels times that."""
    total = splat(f32x16, F(0))
    least_d, most_d = hmin(d), hmax(d)
    for b in range(count):
        if guesses[b] > F(0):
            least, inverse = splat(f32x16, F(0)), F(1) / guesses[b]
            for i in range(16):
                level = extract(levels_near(F(0)), i) * inverse
                curve = curves + CURVES * b + (CURVES // 2 if (level < F(0)) == (sign > F(0)) else 0)
                if abs(level) * least_d < F(1.65) and abs(level) * most_d > F(0.3):
                    least = vmin(_gain(curve, d * abs(level)), least)
            total = total + least
    return total


def cost_of_wide(d, sign, guesses, curves, count):
    """Return the errors of a row for its scales sign * d, d in 16 lanes: scales are -64 .. 63 times that."""
    total = splat(f32x16, F(0))
    for b in range(count):
        if guesses[b] > F(0):
            least, inverse = splat(f32x16, F(0)), F(1) / guesses[b]
            for side in range(2):
                most = F(63) if (side == 0) == (sign > F(0)) else F(64)
                for i in range(16):
                    level = vmin(round_even(splat(f32x16, guesses[b] * extract(grid(), i)) / d), most)
                    least = vmin(_gain(curves + CURVES * b + 128 * side, level * d * inverse), least)
            total = total + least
    return total


#: Binding: ``cost_of_levels`` or ``cost_of_wide``; the largest level.
cost_of: Any = None
largest = F(0)


def rate_row_scales(guesses, curves, count, scales, costs):
    """Write 64 scales that the row may have, and what they cost."""
    top = F(0)
    for b in range(count):
        top = max(top, guesses[b])
    d = (up_to_15() * F(0.028) + F(1)) * (top * F(0.8) / largest)
    for i in range(0, 64, 16):
        sign = F(-1) if i < 32 else F(1)
        wider = d * F(1.448) if i % 32 else d
        cost = splat(f32x16, F(0))
        if signs == 2 or sign > F(0):
            cost = cost_of(wider, sign, guesses, curves, count)
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

#: Bindings: points.search; searches of 32 values that weigh little, and much; a kept group of a search, in floats.
search: Any = None
few = many = 1


@inline
def _searches(x, w, center, searches, lines, s, kept):
    """Keep the points near 32 values for scales around ``center``, either sign, either codebook."""
    ratio = F(1)
    for _ in range(searches - 1):
        ratio *= F(0.8944272)
    for side in range(signs):
        for book in range(books):
            to = kept + (side * books + book) * (12 * points.SURVIVORS * many * groups)
            at = center * ratio
            for k in range(searches):
                sign = F(1) if side == 0 else F(-1)
                search(book, sign, sign / at, x, w, lines, s, to + 4 * points.SURVIVORS * k, points.SURVIVORS * many)
                at *= F(1.25)


def survey(x, w, n, guesses, energies, lines, s, kept, curves, searched):
    """Search for all values of a row; write the curves of errors."""
    total = 0.0
    for b in range(n // 32):
        total += np.float64(energies[b])
    mean = F(total * 32 / n)
    for b in range(n // 32):
        at = kept + b * (12 * points.SURVIVORS * many * groups * signs * books)
        count = many if energies[b] > F(1.5) * mean else few
        searched[b] = count if guesses[b] > F(0) else 1
        _searches(x + 128 * b, w + 128 * b, guesses[b] if guesses[b] > F(0) else F(1), searched[b], lines, s, at)
        for side in range(signs):
            least = splat(f32x16, F(0))
            for book in range(books):
                of = at + (side * books + book) * (12 * points.SURVIVORS * many * groups)
                found = points.errors(of, groups, points.SURVIVORS * many, searched[b], grid() * guesses[b])
                least = found if book == 0 else vmin(found, least)
            store(curves, CURVES * b + CURVES // 2 * side, least)


@inline
def _best_level(guess, d, searches, kept, curves):
    """Return the least error of 32 values, the level of their scale, the codebook, and the index of both."""
    lowest, level, combination = F(3e38), F(0), 0
    for side in range(signs):
        sign = F(1) if side == 0 else F(-1)
        near = guess * extract(grid(), best_lane(load(f32x16, curves, CURVES // 2 * side)))
        levels = levels_near(sign * near / d)
        scales = levels * (d * sign)
        for book in range(books):
            of = kept + (side * books + book) * (12 * points.SURVIVORS * many * groups)
            found = points.errors(of, groups, points.SURVIVORS * many, searches, vmax(scales, F(0)))
            found = select(scales < F(0), F(3e38), found)
            if hmin(found) < lowest:
                lowest, level, combination = hmin(found), extract(levels, best_lane(found)), side * books + book
    return level, combination


def choose(x, w, n, d, first, guesses, curves, lines, s, kept, searched, levels, combinations, places):
    """Choose levels and points for a row's scale d; return sum(w q x) and sum(w q q), q in units of d."""
    sumqx = sumq2 = 0.0
    for b in range(n // 32):
        at = kept + b * (12 * points.SURVIVORS * many * groups * signs * books)
        level, combination = _best_level(guesses[b], d, searched[b], at, curves + CURVES * b)
        scale = abs(level * d)
        if first and (scale > F(1.65) * guesses[b] or scale < F(0.6) * guesses[b]) and scale > F(0):
            searched[b] = 1
            _searches(x + 128 * b, w + 128 * b, scale, 1, lines, s, at)
            level, combination = _best_level(guesses[b], d, 1, at, curves + CURVES * b)
        levels[b], combinations[b] = level, combination
        of = at + combination * (12 * points.SURVIVORS * many * groups)
        for group in range(groups):
            width = points.SURVIVORS * many
            p, q, place = points.pick(of + 12 * width * group, width, searched[b], abs(level * d))
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
row_scales: Any = None
levels_chosen: Any = None
put: Any = None
block_bytes = lines_ranked = 0
magnitudes = False
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


@inline
def _attempts(energies):
    """Return how many scales of a row are tried: more than one where few values make most of the error."""
    top = total = F(0)
    for b in range(energies.size):
        top, total = max(top, energies[b]), total + energies[b]
    return 8 if top * F(16) > total else 1


def encode(x, weights, out, row0, row1, lines_of_points, lines_of_cells, lines_of_families, indices):
    """Encode rows row0..row1 of x [rows, n], n a multiple of 256; weights [n] or empty."""
    n = x.shape[1]
    count = n // 32
    xs, ws = np.empty(n, np.float32), np.empty(n, np.float32)
    guesses, energies = np.empty(count, np.float32), np.empty(count, np.float32)
    curves, searched = np.zeros(count * (CURVES // 4) + 16, np.float32), np.empty(count, np.int64)
    kept = np.empty(count * 12 * points.SURVIVORS * many * groups * signs * books + 64, np.uint8)
    levels, combinations = np.empty((2, count), np.float32), np.empty((2, count), np.int64)
    scales, costs = np.empty(64, np.float32), np.empty(64, np.float32)
    places, scratch = np.empty((2, count, 8), np.int32), np.zeros(points.SCRATCH + 128, np.uint8)
    for i in range(books * lines_ranked):
        store(address(scratch), points.LINES + 4 * i, I32(i))
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
        lines = address(lines_of_points), address(lines_of_cells), address(lines_of_families)
        s, px, pw, found = address(scratch), address(xs), address(ws), address(kept)
        _weigh(px, pw, address(weights) if weights.size else 0, n, unit, top)
        for b in range(count):
            energies[b] = _energy(px + 128 * b, pw + 128 * b)
        row_surveyed(px, pw, n, guesses, energies, lines, s, found, address(curves), searched)
        row_scales(guesses, address(curves), count, address(scales), address(costs))
        best, scale, at = -1.0, 0.0, 0
        for attempt in range(_attempts(energies)):
            cheapest = costs.size - 1 - costs[::-1].argmin()
            if costs[cheapest] >= F(0) and attempt > 0:
                break
            d, before, costs[cheapest] = scales[cheapest], -1.0, F(0)
            for k in range(3):
                qx, q2 = levels_chosen(
                    px, pw, n, d, attempt + k == 0, guesses, address(curves), lines, s, found, searched,
                    levels[at], combinations[at], places[at],
                )  # fmt: skip
                gain = qx * qx / q2 if q2 > 0 else 0.0
                if gain > best:
                    best, scale, at = gain, qx / q2 if q2 > 0 else 0.0, 1 - at
                if gain <= before or q2 <= 0:
                    break
                d, before = F(qx / q2), gain
        if best >= 0.0:
            store(address(out) + out.shape[1] * row, 0, F(scale * stretch * unit))
            if scale != 0.0:
                target = address(out) + out.shape[1] * row + 4
                write(
                    address(x) + 4 * n * row, n, levels[1 - at], combinations[1 - at], places[1 - at],
                    address(indices), target,
                )  # fmt: skip


# ---------------------------------------------------------------- the encoders


@cache
def _search(name: str, count: int, size: int, bias: int, depths: tuple[int, int], coarse_from: int) -> Any:
    """Return ``points.search`` for codebooks of ``count`` points; ``depths``: families, cells of a lane that stay."""
    kinds: dict[str, Any] = {"floats": f32x8 if size == 8 else f32x4}
    fine_score = specialize(points.fine_score8 if size == 8 else points.fine_score4, name, bias=bias)

    def rank(depth: int, score: Any) -> Any:
        return specialize(points.rank, f"{name}_{depth}", score=score, depth=depth)

    depth_of = max(depths[0], 1), depths[1], 2
    bound: dict[str, Any] = {}
    for step, depth in zip(("families", "cells", "points"), depth_of, strict=True):
        bound[f"rank_{step}"] = rank(depth, fine_score)
        bound[f"coarsely_rank_{step}"] = rank(depth, points.coarse_score if size == 8 else fine_score)
    prepared = specialize(
        points._prepare, name, **kinds, coarse_from=coarse_from,
        coarse_prepared=specialize(points.prepare_coarse, name, largest=F(64 if bias else 126))
        if size == 8 else points.prepare_no_coarse,
        fine_prepared=specialize(
            points.prepare_fine, name, size=size, **kinds, shorts_of=i16x8 if size == 8 else points.i16x4,
            paired=points.even_odd if size == 8 else points.in_order,
        ),
    )  # fmt: skip
    return specialize(
        points.search, name, helper, size=size, coarse_from=coarse_from, **bound, prepared=prepared,
        fine_query=points.fine_query8 if size == 8 else points.fine_query4,
        coarse_query=points.coarse_query if size == 8 else points.fine_query4,
        lines_of_families=count // 4096 if depths[0] else 0, lines_of_cells=count // 256,
        family_depth=depths[0], cell_depth=depths[1],
        points_rated=specialize(
            points.rate_points, name, size=size, line_bytes=256 if size == 8 else 128,
            levels=specialize(points.levels8, name, bias=bias) if size == 8 else points.levels4,
        ),
    )  # fmt: skip


def _encoder(
    name: str, count: int, size: int, put: Any, levels: Any, *,
    largest: int, depths: tuple[int, int], coarse_from: int, searches: tuple[int, int], signs: int = 2, books: int = 1,
    stretch: float = 1.0,
) -> Encoder:  # fmt: skip
    """Return the encoder of a type: codebooks of ``count`` points; the functions and numbers that differ."""
    suffix = name.lower()
    shared = {"signs": signs, "books": books, "groups": 32 // size, "many": max(searches)}
    search = _search(suffix, count, size, 126 if signs == 2 else 0, depths, coarse_from)
    searches_of = specialize(_searches, suffix, search=search, **shared)
    cost = specialize(
        cost_of_wide if levels is wide_levels else cost_of_levels, suffix, helper, levels_near=levels, signs=signs
    )
    best = specialize(_best_level, suffix, levels_near=levels, **shared)
    encode_rows: Callable[..., None] = specialize(
        encode, suffix, kernel, **shared, magnitudes=signs == 1, stretch=stretch,
        row_surveyed=specialize(survey, suffix, helper, _searches=searches_of, few=searches[0], **shared),
        row_scales=specialize(rate_row_scales, suffix, helper, cost_of=cost, largest=F(largest), signs=signs),
        levels_chosen=specialize(choose, suffix, helper, _searches=searches_of, _best_level=best, **shared),
        write=specialize(write, suffix, put=put, block_bytes=BY_NAME[name].block_bytes, books=books, groups=32 // size),
        lines_ranked=count // 4096 if depths[0] else count // 256,
    )  # fmt: skip

    def encode_type(
        x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int
    ) -> None:
        """Encode rows row0..row1 of x [rows, n], n a multiple of 256; weights [n] or empty."""
        book = codebook(count, size, signs == 1, books)
        encode_rows(x, weights, out, row0, row1, book.points, book.cells, book.families, book.indices)

    return encode_type


encode_iq1_kt = _encoder(
    "IQ1_KT", 8192, 8, put_iq1_kt, codebook_levels, largest=127, depths=(0, 2), coarse_from=6, searches=(1, 3),
    stretch=1.07,
)  # fmt: skip
encode_iq2_kt = _encoder(
    "IQ2_KT", 65536, 8, put_iq2_kt, codebook_levels, largest=127, depths=(2, 3), coarse_from=6, searches=(1, 3)
)
encode_iq3_kt = _encoder(
    "IQ3_KT", 65536, 8, put_iq3_kt, small_levels, largest=15, depths=(2, 3), coarse_from=65, searches=(3, 3), signs=1
)
encode_iq4_kt = _encoder(
    "IQ4_KT", 32768, 4, put_iq4_kt, wide_levels, largest=64, depths=(2, 2), coarse_from=65, searches=(2, 4), books=2
)

"""The points of a trellis codebook nearest to 8 (or 4) values: a few that are good for all scales near one.

The error of point v for values x, weights w and a scale d is, less a constant, d^2 Q - 2 d P, where P = sum(w x v) and
Q = sum(w v v). A search for one d (*center*):

1. ranks the centers of all families by that error in integers, of 8 bits (weights of 7) or 16: the best of each of 16
   lanes stays, and of the second best, the third ... of lanes the better one of two, or the best of four: about those
   that are best of all, for a few operations;
2. ranks the centers of the cells of these families likewise, and the points of these cells (IQ3_KT, IQ4_KT: in 16
   bits, centers in 8; IQ3_KT: weights in 8): the best of each lane remains, or the best for two scales around d;
3. computes P and Q of these in f32. Any scale, the best of them for it: three operations a point.

Where a point has 4 values, lines of points are listed for every bucket of queries (trellis_lists.py): most searches
look the list up instead of 1 and 2, and rank its first lines.

A scan ranks all points, each by its error with the scale of a range that suits it best, for three or four ranges: where
the weights of 8 values differ a lot, as beside outliers, a tree loses the best point. It skips points that cannot be
the best of their lanes: by how far their cells reach, 16 cells at once, then by the error with the scale that suits
them best of all. The bounds allow for all rounding: what a scan finds is the same as if it skipped none.

Rounding disturbs the order of points by some percent of the error; few points are that near to the best one, and the
best one is among those that remain. Integers and the fixed order of f32 operations give the same points on every CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    VecType,
    any_lane,
    cast,
    convert,
    dot2,
    dot4,
    f32x8,
    f32x16,
    hmax,
    hmin,
    hsum,
    i8x8,
    i8x64,
    i16x8,
    i16x32,
    i32x16,
    load,
    lookup16_f32,
    make_constant,
    make_shuffle,
    mask_bits,
    nearest_int,
    prefetch,
    round_even,
    select,
    splat,
    store,
    trailing_zeros,
    u8x64,
    u16x32,
    u32x16,
    vabs,
    vmax,
    vmin,
)
from quantkit.kernels.cpu.encode.trellis_lists import LEVELS, LISTED, RANGE_OF

F, I32 = np.float32, np.int32

#: Survivors of a search; a score that none has; the bits of a ranked score that number a line; the largest query.
SURVIVORS, MOST, NUMBER, FARTHEST = 16, 0x7FFFFFFF, 12, F(140)

#: Offsets into a group's part of the scratch: a query; lists of families, of cells; survivors; their levels.
#: After the parts of 8 groups: the list of lines that are ranked first; a 1 of 64 bits. Numbers of turns are times it,
#: read from memory, so that LLVM keeps loops, which it would unroll to several times the cache of instructions.
QUERY, FAMILIES, CELLS, POINTS, WORDS, PART = 0, 64, 320, 576, 704, 960
COARSE, LINES, ONE, LISTS, SCRATCH = 32, 8 * PART, 8 * PART + 256, 8 * PART + 320, 8 * PART + 448

lanes16 = make_constant(i32x16, range(16), "trellis_lanes")
swap_8 = make_shuffle([*range(8, 16), *range(8)], "trellis_swap_8")
swap_4 = make_shuffle([4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11], "trellis_swap_4")
i8x4, i16x4 = VecType(types.int8, 4), VecType(types.int16, 4)
even_odd = make_shuffle([0, 2, 1, 3, 4, 6, 5, 7], "trellis_even_odd")
in_order = make_shuffle([0, 1, 2, 3], "trellis_in_order")

#: Bindings: values of a point; what levels are stored plus; bytes of a line; the largest coarse query.
size = bias = line_bytes = 0
largest = F(0)
#: Bindings of ``prepare_fine``.
floats: Any = f32x8
shorts_of: Any = i16x8
paired: Any = None


@inline
def _word(s, at):
    return splat(u32x16, load(types.uint32, s, at))


@inline
def prepare_coarse(y, weights, s):
    """Store the query of 8 values y with weights: rounded weights u, and -2 u y in units of 64."""
    top = max(hmax(weights) * F(1 / 64), hmax(weights * vabs(y)) * (F(1 / 32) / largest))
    factor = F(1) / top if top > F(1e-33) else F(0)
    u = nearest_int(weights * factor)
    a = vmax(vmin(convert(f32x8, u) * y * F(-1 / 32), largest), -largest)
    store(s, QUERY, convert(i8x8, nearest_int(a)))
    store(s, QUERY + 8, convert(i8x8, u))


#: Bindings of fine queries: what weights u are multiples of, and at most; the unit of -2 u y, as a power of two. With
#: SHORT ones, products of magnitudes and u / 64 have 16 bits: of no use here, but on a card.
weight_step, most_weight, fine_unit = 1, 32000, 7
SHORT = {"weight_step": 64, "most_weight": 16000, "fine_unit": 6}


@inline
def fine_factor(y, weights):
    """Return what the weights of a fine query are over weights."""
    ay = weights * vabs(y)
    top = max(hsum(weights * F(15876) + ay * F(320)) * F(1 / 2.0e9), hmax(weights) * F(1 / most_weight))
    top = max(top, hmax(ay) * F(2 / (1 << fine_unit) / 32000))
    return F(1) / top if top > F(1e-33) else F(0)


#: Binding of ``prepare_fine``.
weights_factor: Any = fine_factor

#: Bindings of ``prepare_both``: what stores the fine query; bytes of integers.
fine_prepared: Any = None
bytes_of: Any = i8x8


@inline
def prepare_both(y, weights, s):
    """Store the coarse query of 8 or 4 values, and the fine one."""
    fine_prepared(y, weights, s)
    top = max(hmax(weights) * F(1 / 64), hmax(weights * vabs(y)) * (F(1 / 32) / largest))
    factor = F(1) / top if top > F(1e-33) else F(0)
    u = nearest_int(weights * factor)
    a = vmax(vmin(convert(floats, u) * y * F(-1 / 32), largest), -largest)
    store(s, COARSE, convert(bytes_of, nearest_int(a)))
    store(s, COARSE + size, convert(bytes_of, u))


@inline
def coarse_query4(s):
    """Return the words of a coarse query of 4 values."""
    a, b = _word(s, COARSE), _word(s, COARSE + 4)
    return cast(i8x64, a), cast(i8x64, b)


@inline
def coarse_score4(lines, number, query):
    """Return the errors of a line of 16 points of 4 values."""
    at, (a, b) = 128 * number, query
    return dot4(dot4(splat(i32x16, 0), load(u8x64, lines, at), a), load(u8x64, lines, at + 64), b)


#: Binding of ``coarse_query``: where it lies.
query_at = QUERY


@inline
def coarse_query(s):
    """Return the words of a coarse query."""
    at = s + query_at
    a, b, c, d = _word(at, 0), _word(at, 4), _word(at, 8), _word(at, 12)
    return cast(i8x64, a), cast(i8x64, b), cast(i8x64, c), cast(i8x64, d)


@inline
def coarse_score(lines, number, query):
    """Return the errors of a line of 16 points of 8 values."""
    at, (a, b, c, d) = 256 * number, query
    first = dot4(dot4(splat(i32x16, 0), load(u8x64, lines, at), a), load(u8x64, lines, at + 64), b)
    return dot4(dot4(first, load(u8x64, lines, at + 128), c), load(u8x64, lines, at + 192), d)


@inline
def prepare_fine(y, weights, s):
    """Store the query of 8 or 4 values y with weights: weights u of up to 15 bits, -2 u y in its unit."""
    u = round_even(weights * (weights_factor(y, weights) * F(1 / weight_step))) * F(weight_step)
    store(s, QUERY, convert(shorts_of, nearest_int(paired(u * y * F(-2 / (1 << fine_unit))))))
    store(s, QUERY + 2 * size, convert(shorts_of, nearest_int(paired(u))))


@inline
def fine_query8(s):
    """Return the words of a fine query of 8 values."""
    a, b, c, d = _word(s, QUERY), _word(s, QUERY + 4), _word(s, QUERY + 8), _word(s, QUERY + 12)
    e, f, g, h = _word(s, QUERY + 16), _word(s, QUERY + 20), _word(s, QUERY + 24), _word(s, QUERY + 28)
    p = cast(i16x32, a), cast(i16x32, b), cast(i16x32, c), cast(i16x32, d)
    return p, (cast(i16x32, e), cast(i16x32, f), cast(i16x32, g), cast(i16x32, h))


@inline
def fine_query4(s):
    """Return the words of a fine query of 4 values."""
    a, b, c, d = _word(s, QUERY), _word(s, QUERY + 4), _word(s, QUERY + 8), _word(s, QUERY + 12)
    return (cast(i16x32, a), cast(i16x32, b)), (cast(i16x32, c), cast(i16x32, d))


@inline
def fine_sums8(lines, number, query):
    """Return -2 u y v / 128 and u v v, summed, of a line of 16 points v of 8 values."""
    p = q = splat(i32x16, 0)
    (a, b, c, d), (e, f, g, h) = query
    x = load(u16x32, lines, 256 * number)
    u, v = cast(i16x32, x & np.uint16(255)) - np.int16(bias), cast(i16x32, x >> np.uint16(8)) - np.int16(bias)
    p, q = dot2(dot2(p, u, a), v, b), dot2(dot2(q, u * u, e), v * v, f)
    x = load(u16x32, lines, 256 * number + 64)
    u, v = cast(i16x32, x & np.uint16(255)) - np.int16(bias), cast(i16x32, x >> np.uint16(8)) - np.int16(bias)
    p, q = dot2(dot2(p, u, c), v, d), dot2(dot2(q, u * u, g), v * v, h)
    return p, q


@inline
def fine_sums4(lines, number, query):
    """Return -2 u y v / 128 and u v v, summed, of a line of 16 points v of 4 values."""
    p = q = splat(i32x16, 0)
    (a, b), (c, d) = query
    u, v = load(i16x32, lines, 128 * number), load(i16x32, lines, 128 * number + 64)
    p, q = dot2(dot2(p, u, a), v, b), dot2(dot2(q, u * u, c), v * v, d)
    return p, q


#: Binding of ``fine_score``.
fine_sums: Any = None


@inline
def fine_score(lines, number, query):
    """Return the errors of a line of 16 points, in fewer bits."""
    p, q = fine_sums(lines, number, query)
    return ((p << fine_unit) + q) >> NUMBER


#: Bindings of ``rank``.
query_of: Any = None
score: Any = None

#: Binding of ``rank``: of how many lanes the best point remains, the second best, and so on: 16, 8, 4 or 0.
shape = (16, 0, 0, 0)
#: Bindings of ``rank`` and ``rank_around``: how numbers of lines are stored, and their bytes.
numbers: Any = types.int32
number_bytes = 4


def rank(lines, source, count, s, to):
    """Rank the points of the lines listed at ``source``; list those that remain at ``to``."""
    query = query_of(s)
    a = b = c = d = splat(i32x16, MOST)
    for i in range(source, source + number_bytes * count, number_bytes):
        number = types.int32(load(numbers, i, 0))
        found = (score(lines, number, query) << NUMBER) | number
        a, found = vmin(a, found), vmax(a, found)
        if shape[1] > 0:
            b, found = vmin(b, found), vmax(b, found)
        if shape[2] > 0:
            c, found = vmin(c, found), vmax(c, found)
        if shape[3] > 0:
            d = vmin(d, found)
    _list(a, s, to)
    if shape[1] > 0:
        _list_best(b, shape[1], s, to + 64)
    if shape[2] > 0:
        _list_best(c, shape[2], s, to + 64 + 4 * shape[1])
    if shape[3] > 0:
        _list_best(d, shape[3], s, to + 64 + 4 * (shape[1] + shape[2]))


#: Binding: of how many lanes the best points remain: 16; 8, of each two the better one.
lanes_kept = 16


def rank_around(lines, source, count, s, to):
    """Rank points as ``rank`` does, for two scales 1/8 above and below: list the best of lanes, for either."""
    query = query_of(s)
    a = b = splat(i32x16, MOST)
    for i in range(source, source + number_bytes * count, number_bytes):
        number = types.int32(load(numbers, i, 0))
        p, q = fine_sums(lines, number, query)
        found, more = (p << fine_unit) + q, p << (fine_unit - 3)
        a = vmin(a, (((found + more) >> NUMBER) << NUMBER) | number)
        b = vmin(b, (((found - more) >> NUMBER) << NUMBER) | number)
    _list_best(a, lanes_kept, s, to)
    _list_best(b, lanes_kept, s, to + 4 * lanes_kept)


@inline
def _list(found, s, to):
    store(s, to, ((found & I32((1 << NUMBER) - 1)) << 4) | lanes16())


@inline
def _list_best(found, count, s, to):
    """List the points found: of 16, or the better of lanes l and l + 8, or of these the better of l and l + 4."""
    places = ((found & I32((1 << NUMBER) - 1)) << 4) | lanes16()
    if count < 16:
        there = swap_8(found)
        places = select(there < found, swap_8(places), places)
        found = vmin(there, found)
    if count < 8:
        places = select(swap_4(found) < found, swap_4(places), places)
    store(s, to, places)


@inline
def levels8(words, j):
    """Return level j of points stored as bytes."""
    return cast(i32x16, (words >> (8 * (j % 4))) & 255) - I32(bias)


@inline
def levels4(words, j):
    """Return level j of points stored as 16 bits."""
    return cast(i32x16, words << (16 - 16 * (j % 2))) >> 16


#: Bindings: levels of points; for how many scales points are ranked.
levels: Any = None
spread = 1


def gather_points(lines, s):
    """Copy the levels of the points listed: long before they are read as vectors, which waits for such small stores."""
    for i in range(0, 4 * SURVIVORS * spread, 4):
        place = load(types.int32, s, POINTS + i)
        at, to = (place >> 4) * line_bytes + 4 * (place & 15), WORDS + i + (i // 64) * 64
        store(s, to, load(types.uint32, lines, at))
        store(s, to + 64, load(types.uint32, lines, at + 64))


def rate_points(x, w, s, sign, kept, width):
    """Compute 2 P, of x or -x, and Q of the points gathered, and keep them and where the points are."""
    for half in range(0, 4 * SURVIVORS * spread, 64):
        p = q = splat(f32x16, F(0))
        for j in range(size):
            words = load(u32x16, s, WORDS + 2 * half + 64 * (j // (size // 2)))
            v = convert(f32x16, levels(words, j))
            wv = v * load(types.float32, w, 4 * j)
            p, q = p + wv * load(types.float32, x, 4 * j), q + wv * v
        store(kept, half, p * (sign + sign))
        store(kept, 4 * width + half, q)
        store(kept, 8 * width + half, load(i32x16, s, POINTS + half))


#: Bindings of ``search``: lines of families of a codebook, none if all cells are ranked; how many of these stay.
lines_of_families = lines_of_cells = families_kept = cells_kept = 0
query_prepared: Any = None
rank_families: Any = None
rank_cells: Any = None
rank_points: Any = None
points_gathered: Any = None
points_rated: Any = None


def search(book, sign, inverse, x, w, lines, s, kept, width):
    """Keep the survivors of each group of 32 values at x, with weights at w, for scales around 1 / |inverse|.

    ``sign``: of the scales; ``lines``: addresses of lines of points, of cells, of families. For each group at ``kept``:
    2 P, Q and the places of ``width`` points, of which these are SURVIVORS; P is that of sign * x. Each step is done
    for all groups, so that none waits for its own result.
    """
    one = load(types.int64, s, ONE)
    end = s + PART * (32 // size) * one
    for group in range(32 // size):
        at = 4 * size * group
        y = vmax(vmin(load(floats, x, at) * inverse, FARTHEST), -FARTHEST)
        query_prepared(y, load(floats, w, at), s + PART * group)
    first = s + LINES + 4 * book * (lines_of_families if lines_of_families > 0 else lines_of_cells)
    if lines_of_families > 0:
        for t in range(s, end, PART):
            rank_families(lines[2], first, lines_of_families, t, FAMILIES)
        for t in range(s, end, PART):
            rank_cells(lines[1], t + FAMILIES, families_kept * one, t, CELLS)
    else:
        for t in range(s, end, PART):
            rank_cells(lines[1], first, lines_of_cells * one, t, CELLS)
    for t in range(s, end, PART):
        rank_points(lines[0], t + CELLS, cells_kept * one, t, POINTS)
    for t in range(s, end, PART):
        points_gathered(lines[0], t)
    for group in range(32 // size * one):
        at = 4 * size * group
        points_rated(x + at, w + at, s + PART * group, sign, kept + 12 * width * group, width)


ranges16 = make_constant(f32x16, RANGE_OF, "trellis_ranges")
list_places = make_constant(i32x16, [2 * LISTED * (2 * LEVELS) ** (3 - i % 4) for i in range(16)], "trellis_places")
next_lane = make_shuffle([i ^ 1 for i in range(16)], "trellis_next_lane")
next_but_one = make_shuffle([i ^ 2 for i in range(16)], "trellis_next_but_one")

#: Bindings of ``search_listed`` and ``fetch_lists``: how many lines are ranked of those listed; bytes of the lists of a
#: codebook; how many codebooks are searched, and how far apart their survivors are kept.
lines_listed = lists_bytes = books_at_once = apart = 0


@inline
def find_lists(x, inverse, s):
    """Write where the lists of the buckets of 32 values lie, for each 4."""
    for i in range(0, 128, 64):
        y = load(f32x16, x, i) * inverse
        of = convert(i32x16, lookup16_f32(ranges16(), convert(i32x16, vmin(vabs(y) * F(1 / 8), F(15)))))
        at = select(y < F(0), I32(LEVELS - 1) - of, of + I32(LEVELS)) * list_places()
        at = at + next_lane(at)
        store(s, LISTS + i, at + next_but_one(at))


@inline
def fetch_lists(x, inverse, lists, s):
    """Prefetch the lists of 32 values, which are far from the caches, for a scale of either sign."""
    find_lists(x, inverse, s)
    for group in range(8):
        place = load(types.int32, s, LISTS + 16 * group)
        for first in range(0, books_at_once * lists_bytes, lists_bytes):
            prefetch(lists, first + place)
            prefetch(lists, first + lists_bytes - 2 * LISTED - place)


@inline
def fetch_nothing(x, inverse, lists, s):
    """Stand for ``fetch_lists`` where points have none."""


def search_listed(book, sign, inverse, x, w, lines, s, kept, width):
    """Keep the survivors of each group of 4 of 32 values, as ``search`` does, of the lines listed for its bucket.

    Of ``books_at_once`` codebooks from ``book`` on.
    """
    one = load(types.int64, s, ONE)
    end = s + PART * 8 * one
    first = lines[3] + lists_bytes * book
    find_lists(x, inverse, s)
    for group in range(8):
        y = vmax(vmin(load(floats, x, 16 * group) * inverse, FARTHEST), -FARTHEST)
        query_prepared(y, load(floats, w, 16 * group), s + PART * group)
    for k in range(books_at_once * one):
        for group in range(8 * one):
            at = first + lists_bytes * k + load(types.int32, s, LISTS + 16 * group)
            rank_points(lines[0], at, lines_listed * one, s + PART * group, POINTS)
        for t in range(s, end, PART):
            points_gathered(lines[0], t)
        for group in range(8 * one):
            to = kept + apart * k + 12 * width * group
            points_rated(x + 16 * group, w + 16 * group, s + PART * group, sign, to, width)


#: Bindings of ``rank_all``: all lines of a codebook; where ranges of scales end, over the scale given: three or four,
#: together from least to most of trellis_codebook.SCALES.
all_lines = 0
ends: tuple[float, ...] = (0.62, 0.79, 1.0, 1.27, 1.6)

#: What the error that is known counts as, and the largest.
KNOWN, WORST = 1 << 15, (1 << 31 - NUMBER) - 1

#: The share of each term that bounds of errors allow for: f32 loses up to 2^-24 in each of less than 32 operations.
ROUNDED = 2.0**-18
#: Offsets into a group's part of the scratch, in a scan: the best points for up to four ranges, and the worst score of
#: these, of each lane; at which level times scale each value adds least to the error, and its u.
BEST, WORST_OF, NEAREST, WEIGHTS = FAMILIES, CELLS, WORDS, WORDS + 32


@inline
def _within(p, q, suits, least, most, energy, factor, number):
    """Return the errors of a line of 16 points with the scale of a range that suits each best, ranked."""
    ratio = vmax(vmin(suits, F(most)), F(least))
    error = (energy + (p + q * ratio) * ratio) * factor
    return (nearest_int(vmin(vmax(error, F(0)), F(WORST))) << NUMBER) | number


def rank_line(lines, number, energy, factor, s):
    """Rank the points of a line for each range of scales, with those that are the best of their lanes."""
    p, q = fine_sums(lines, number, query_of(s))
    pf, qf = convert(f32x16, p) * F(128), convert(f32x16, q)
    suits, worst = pf * F(-0.5) / (qf + F(1)), splat(i32x16, 0)
    for i in range(len(ends) - 1):
        found = _within(pf, qf, suits, ends[i], ends[i + 1], energy, factor, number)
        best = vmin(found, load(i32x16, s, BEST + 64 * i))
        store(s, BEST + 64 * i, best)
        worst = vmax(best, worst)
    store(s, WORST_OF, worst)


@inline
def prepare_bounds(s):
    """Write at which level times scale each value adds least to the error, and its u; return how much is then saved.

    Of the integers of the fine query, as the error of a point is. Nothing is bounded where an importance is negative.
    """
    a = convert(floats, paired(load(shorts_of, s, QUERY)))
    u = convert(floats, paired(load(shorts_of, s, QUERY + 2 * size)))
    nearest = a * F(-64) / vmax(u, F(1))
    store(s, NEAREST, nearest)
    store(s, WEIGHTS, u)
    return hsum(u * nearest * nearest) if hmin(u) >= F(0) else F(3e38)


@inline
def bounds_of_cells(extents, cells, s):
    """Return how much the points of each of 16 cells add to the error, above the least, at any scale: at least."""
    total = splat(f32x16, F(0))
    for j in range(size):
        at, nearest = 128 * (size * cells + j), load(types.float32, s, NEAREST + 4 * j)
        low, high = load(f32x16, extents, at), load(f32x16, extents, at + 64)
        away = vmax(vmax(low - nearest, nearest - high), F(0))
        total = total + away * away * load(types.float32, s, WEIGHTS + 4 * j)
    return total


@inline
def _limits(energy, saved, unit, sane, s):
    """Return p p / q of points of each lane, p < 0, and the bound of a cell up to which a point may yet be the best.

    With P = 128 p and Q = q the error of a point is at least energy - P P / (4 Q), energy if P >= 0; and at least
    energy - ``saved`` + the bound of its cell. One that rounds to more than the worst score of its lane is of no use,
    nor is WORST, as the first line is ranked before all others: of equal scores the lower line stays.
    """
    worst = vmin(convert(f32x16, load(i32x16, s, WORST_OF) >> NUMBER) + F(1), F(WORST)) * unit
    limit = vmax(energy * F(1 - ROUNDED) - worst, F(0)) * F((4 - 4 * ROUNDED) / (128 * 128))
    reach = max(hmax(worst) - energy * F(1 - ROUNDED) + saved * F(1 + ROUNDED), F(0)) * F(1 + 2 * ROUNDED)
    return (limit, reach) if sane else (splat(f32x16, F(0)), F(3e38))


#: Bindings of ``rank_all``: the functions above; of every how manyth of the survivors at hand the line goes first.
line_ranked: Any = None
bounds_prepared: Any = None
bounds_of: Any = None
every = 4


def rank_all(lines, first, energy, known, s, near):
    """List, for each range of scales, the best of all points of each lane, by their error with the best of these.

    The lines of survivors listed at ``near`` go first; then points that cannot be better are skipped, cells at once.
    """
    for i in range(0, 64 * len(ends) - 64, 64):
        store(s, BEST + i, splat(i32x16, MOST))
    factor, unit = F(KNOWN) / known, known * F(1 / KNOWN)
    sane = F(1e-10) < known < F(1e12) and F(0) <= energy < F(1e12)
    line_ranked(lines[0], first, energy, factor, s)
    for i in range(0, 64 * len(ends) - 64, 4 * every):
        number = min(max(load(types.int32, near, i) >> 4, first), first + all_lines - 1)
        line_ranked(lines[0], number, energy, factor, s)
    saved, query = bounds_prepared(s), query_of(s)
    limit, reach = _limits(energy, saved, unit, sane, s)
    for cells in range(first // 16, (first + all_lines) // 16):
        left = mask_bits(bounds_of(lines[4], cells, s) <= reach)
        while left != 0:
            number = 16 * cells + trailing_zeros(left)
            left &= left - np.uint64(1)
            p, q = fine_sums(lines[0], number, query)
            pf = convert(f32x16, p)
            if any_lane(pf * vmin(pf, F(0)) >= convert(f32x16, q) * limit):
                line_ranked(lines[0], number, energy, factor, s)
                limit, reach = _limits(energy, saved, unit, sane, s)
    for i in range(0, 64 * len(ends) - 64, 64):
        _list(load(i32x16, s, BEST + i), s, BEST + i)


#: Bindings of ``scan``.
all_ranked: Any = None


def scan(book, inverse, x, w, error, lines, s, kept, width, count):
    """Keep, as ``search`` does for one group, the best of all points, of each lane, for ``count`` ranges of scales.

    ``error``: about that of the group. So many slots are filled: the nearer their points, the less is left to rank.
    """
    y, weights, sign = load(floats, x, 0) * inverse, load(floats, w, 0), F(-1) if inverse < F(0) else F(1)
    query_prepared(y, weights, s)
    factor = fine_factor(y, weights)
    known = F(error) * inverse * inverse * factor
    all_ranked(lines, book * all_lines, hsum(y * y * weights) * factor, known, s, kept + 8 * width)
    for k in range(count):
        store(s, POINTS, load(i32x16, s, BEST + 64 * k))
        points_gathered(lines[0], s)
        points_rated(x, w, s, sign, kept + 4 * SURVIVORS * k, width)


@inline
def errors(kept, groups, width, slots, d):
    """Return the errors of a block for 16 scales >= 0, each with the best survivors of ``slots`` searches for it."""
    total = splat(f32x16, F(0))
    for group in range(groups):
        at = kept + 12 * width * group
        one = two = splat(f32x16, F(3e38))
        for i in range(at, at + 4 * SURVIVORS * slots, 8):
            q, p = load(types.float32, i, 4 * width), load(types.float32, i, 0)
            r, o = load(types.float32, i, 4 * width + 4), load(types.float32, i, 4)
            one, two = vmin(d * q - p, one), vmin(d * r - o, two)
        total = total + vmin(one, two)
    return total * d


@inline
def best_lane(values):
    """Return the first lane with the least value."""
    return min(hmin(select(values == hmin(values), lanes16(), I32(99))), I32(15))


@inline
def pick(kept, width, slots, d):
    """Return 2 P, Q and the place of a group's best survivor for a scale d >= 0."""
    best, at = splat(f32x16, F(3e38)), splat(i32x16, 0)
    for i in range(0, 4 * SURVIVORS * slots, 64):
        found = load(f32x16, kept, 4 * width + i) * d - load(f32x16, kept, i)
        at = select(found < best, lanes16() + I32(i // 4), at)
        best = vmin(found, best)
    i = 4 * hmin(select(best == hmin(best), at, I32(4 * width)))
    i = kept + min(i, 4 * (width - 1))
    return load(types.float32, i, 0), load(types.float32, i, 4 * width), load(types.int32, i, 8 * width)

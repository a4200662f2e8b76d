"""The points of a trellis codebook nearest to 8 (or 4) values: a few that are good for all scales near one.

The error of point v for values x, weights w and a scale d is, less a constant, d^2 Q - 2 d P, where P = sum(w x v) and
Q = sum(w v v). A search for one d (*center*):

1. ranks the centers of all families by that error in integers, of 8 bits (weights of 7) or 16: the best of each of 16
   lanes stays, and of the second best, the third ... of lanes the better one of two, or the best of four: about those
   that are best of all, for a few operations;
2. ranks the centers of the cells of these families likewise, and the points of these cells (often in 16
   bits, centers in 8; IQ3_KT: weights in 8): the best of each lane remains;
3. computes P and Q of these in f32. Any scale, the best of them for it: three operations a point.

Where a point has 4 values, lines of points are listed for every bucket of queries (trellis_lists.py): most searches
look the list up instead of 1 and 2, and rank its first lines.

A scan ranks all points, each by its error with the scale of a range that suits it best, for three ranges: where
the weights of 8 values differ a lot, as beside outliers, a tree loses the best point. It skips points that cannot be
the best of their lanes: by the extent of their cells, 16 cells at once, then by the error with their best scale. The
bounds allow for all rounding: the result is that of a scan that skips no line.

Rounding disturbs the order of points by some percent of the error; few points are that near to the best one, and the
best one is among those that remain. Integers and the fixed order of f32 operations give the same points on every CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline
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
from quantkit.kernels.cpu.core.specialize import constants
from quantkit.kernels.cpu.encode.trellis_lists import LEVELS, LIST_LENGTH, RANGE_OF

F, I32 = np.float32, np.int32

#: Survivors of a search; a score above all others; the bits of a ranked score for the number of a line; the maximum of
#: a query.
SURVIVORS = 16
MOST = 0x7FFFFFFF
NUMBER = 12
FARTHEST = F(140)

#: Offsets into a group's part of the scratch: a query; lists of families, of cells; survivors; their levels.
#: After the parts of 8 groups: the list of lines that are ranked first; a 64-bit 1. Loop counts are multiplied by it,
#: read from memory, so that LLVM does not unroll the loops to several times the instruction cache.
QUERY = 0
FAMILIES = 64
CELLS = 320
POINTS = 576
WORDS = 640
PART = 768
COARSE = 32
LINES = 8 * PART
ONE = 8 * PART + 256
LISTS = 8 * PART + 320
SCRATCH = 8 * PART + 448

lanes16 = make_constant(i32x16, range(16), "trellis_lanes")
swap_8 = make_shuffle([*range(8, 16), *range(8)], "trellis_swap_8")
swap_4 = make_shuffle([4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11], "trellis_swap_4")
i8x4, i16x4 = VecType(types.int8, 4), VecType(types.int16, 4)
even_odd = make_shuffle([0, 2, 1, 3, 4, 6, 5, 7], "trellis_even_odd")
in_order = make_shuffle([0, 1, 2, 3], "trellis_in_order")


@constants
@dataclass(frozen=True)
class PointFormat:
    """Storage format of the points of a codebook, and of queries for them.

    size: values of a point. bias: added to levels as they are stored. line_bytes: of 16 points. largest: the largest
    coarse query. floats, shorts, bytes: vectors of a point's values; order: in which shorts are stored. query: returns
    the words of a fine query; sums: -2 u y v and u v v of a line; levels: of points. Weights u of a fine query are
    multiples of weight_step, at most most_weight; -2 u y is in units of 2^fine_unit.
    """

    size: int
    bias: int
    line_bytes: int
    largest: Any
    floats: Any
    shorts: Any
    bytes: Any
    order: Any
    query: Any
    sums: Any
    levels: Any
    weight_step: int = 1
    most_weight: int = 32000
    fine_unit: int = 7


@constants
@dataclass(frozen=True)
class Ranking:
    """A ranking of points, or of centers.

    query: returns the words of a query; score: the errors of a line, None for ``rank_around``. shape: of how many lanes
    the best point remains, the second best, and so on: 16, 8, 4 or 0. numbers: how numbers of lines are stored;
    number_bytes: their bytes.
    """

    query: Any
    score: Any = None
    shape: tuple[int, ...] = (16, 0, 0, 0)
    numbers: Any = types.int32
    number_bytes: int = 4


@constants
@dataclass(frozen=True)
class TreeSteps:
    """The steps of ``search``.

    prepare: stores a query. families, cells: lines of them in a codebook, no families if all cells are ranked;
    families_kept, cells_kept: numbers that remain.
    """

    points: PointFormat
    prepare: Any
    of_families: Ranking
    of_cells: Ranking
    of_points: Ranking
    families: int
    cells: int
    families_kept: int
    cells_kept: int


@constants
@dataclass(frozen=True)
class ListSteps:
    """The steps of ``search_listed`` and ``fetch_lists``.

    lines: ranked of those listed, by ``rank_points``. list_bytes: of the lists of a codebook. codebooks: searched at
    once; codebook_stride: bytes from the survivors of one to those of the next.
    """

    points: PointFormat
    rank_points: Any
    of_points: Ranking
    lines: int
    list_bytes: int
    codebooks: int
    codebook_stride: int


class Query(NamedTuple):
    """Values at address x, with weights at w, and which codebook is searched for them.

    sign: of the scales, which are around 1 / |inverse|.
    """

    codebook: Any
    sign: Any
    inverse: Any
    x: Any
    w: Any


@constants
@dataclass(frozen=True)
class ScanSteps:
    """The steps of ``scan``.

    lines: of a codebook. ends: where ranges of scales end, over the scale given, together from least to most of
    trellis_codebook.SCALES.
    """

    points: PointFormat
    rank_all: Any
    lines: int
    ends: tuple[float, ...]


@inline
def _word(s, offset):
    return splat(u32x16, load(types.uint32, s, offset))


@inline
def prepare_coarse(c, y, weights, s):
    """Store the query of 8 values y with weights: rounded weights u, and -2 u y in units of 64."""
    top = max(hmax(weights) * F(1 / 64), hmax(weights * vabs(y)) * (F(1 / 32) / c.largest))
    factor = F(1) / top if top > F(1e-33) else F(0)
    u = nearest_int(weights * factor)
    a = vmax(vmin(convert(f32x8, u) * y * F(-1 / 32), c.largest), -c.largest)
    store(s, QUERY, convert(i8x8, nearest_int(a)))
    store(s, QUERY + 8, convert(i8x8, u))


#: For formats with short weights: products of magnitudes and u / 64 fit 16 bits, which only GPUs use.
SHORT = {"weight_step": 64, "most_weight": 16000, "fine_unit": 6}


@inline
def fine_factor(c, y, weights):
    """Return the factor from weights to those of a fine query."""
    ay = weights * vabs(y)
    top = max(hsum(weights * F(15876) + ay * F(320)) * F(1 / 2.0e9), hmax(weights) * F(1 / c.most_weight))
    top = max(top, hmax(ay) * F(2 / (1 << c.fine_unit) / 32000))
    return F(1) / top if top > F(1e-33) else F(0)


@inline
def prepare_fine(c, y, weights, s):
    """Store the query of 8 or 4 values y with weights: weights u of up to 15 bits, -2 u y in its unit."""
    u = round_even(weights * (fine_factor(c, y, weights) * F(1 / c.weight_step))) * F(c.weight_step)
    store(s, QUERY, convert(c.shorts, nearest_int(c.order(u * y * F(-2 / (1 << c.fine_unit))))))
    store(s, QUERY + 2 * c.size, convert(c.shorts, nearest_int(c.order(u))))


@inline
def prepare_both(c, y, weights, s):
    """Store the coarse query of 8 or 4 values, and the fine one."""
    prepare_fine(c, y, weights, s)
    top = max(hmax(weights) * F(1 / 64), hmax(weights * vabs(y)) * (F(1 / 32) / c.largest))
    factor = F(1) / top if top > F(1e-33) else F(0)
    u = nearest_int(weights * factor)
    a = vmax(vmin(convert(c.floats, u) * y * F(-1 / 32), c.largest), -c.largest)
    store(s, COARSE, convert(c.bytes, nearest_int(a)))
    store(s, COARSE + c.size, convert(c.bytes, u))


@inline
def coarse_query4(c, s):
    """Return the words of a coarse query of 4 values."""
    a, b = _word(s, COARSE), _word(s, COARSE + 4)
    return cast(i8x64, a), cast(i8x64, b)


@inline
def coarse_score4(c, lines, number, query):
    """Return the errors of a line of 16 points of 4 values."""
    offset, (a, b) = 128 * number, query
    return dot4(dot4(splat(i32x16, 0), load(u8x64, lines, offset), a), load(u8x64, lines, offset + 64), b)


@inline
def _coarse_words(s):
    a, b, c, d = _word(s, 0), _word(s, 4), _word(s, 8), _word(s, 12)
    return cast(i8x64, a), cast(i8x64, b), cast(i8x64, c), cast(i8x64, d)


@inline
def coarse_query(c, s):
    """Return the words of a coarse query of 8 values."""
    return _coarse_words(s + QUERY)


@inline
def coarse_query_of_both(c, s):
    """Return the words of the coarse query of 8 values that ``prepare_both`` stores."""
    return _coarse_words(s + COARSE)


@inline
def coarse_score(c, lines, number, query):
    """Return the errors of a line of 16 points of 8 values."""
    offset, (q0, q1, q2, q3) = 256 * number, query
    first = dot4(dot4(splat(i32x16, 0), load(u8x64, lines, offset), q0), load(u8x64, lines, offset + 64), q1)
    return dot4(dot4(first, load(u8x64, lines, offset + 128), q2), load(u8x64, lines, offset + 192), q3)


@inline
def fine_query8(c, s):
    """Return the words of a fine query of 8 values: -2 u y, u."""
    return _fine_words(s + QUERY), _fine_words(s + QUERY + 16)


@inline
def _fine_words(s):
    a, b, c, d = _word(s, 0), _word(s, 4), _word(s, 8), _word(s, 12)
    return cast(i16x32, a), cast(i16x32, b), cast(i16x32, c), cast(i16x32, d)


@inline
def fine_query4(c, s):
    """Return the words of a fine query of 4 values: -2 u y, u."""
    a0, a1, u0, u1 = _fine_words(s + QUERY)
    return (a0, a1), (u0, u1)


@inline
def fine_sums8(c, lines, number, query):
    """Return -2 u y v / 128 and u v v, summed, of a line of 16 points v of 8 values."""
    p = q = splat(i32x16, 0)
    (a0, a1, a2, a3), (u0, u1, u2, u3) = query
    x = load(u16x32, lines, 256 * number)
    v, w = cast(i16x32, x & np.uint16(255)) - np.int16(c.bias), cast(i16x32, x >> np.uint16(8)) - np.int16(c.bias)
    p, q = dot2(dot2(p, v, a0), w, a1), dot2(dot2(q, v * v, u0), w * w, u1)
    x = load(u16x32, lines, 256 * number + 64)
    v, w = cast(i16x32, x & np.uint16(255)) - np.int16(c.bias), cast(i16x32, x >> np.uint16(8)) - np.int16(c.bias)
    p, q = dot2(dot2(p, v, a2), w, a3), dot2(dot2(q, v * v, u2), w * w, u3)
    return p, q


@inline
def fine_sums4(c, lines, number, query):
    """Return -2 u y v / 128 and u v v, summed, of a line of 16 points v of 4 values."""
    p = q = splat(i32x16, 0)
    (a0, a1), (u0, u1) = query
    v, w = load(i16x32, lines, 128 * number), load(i16x32, lines, 128 * number + 64)
    p, q = dot2(dot2(p, v, a0), w, a1), dot2(dot2(q, v * v, u0), w * w, u1)
    return p, q


@inline
def fine_score(c, lines, number, query):
    """Return the errors of a line of 16 points, in fewer bits."""
    p, q = c.sums(c, lines, number, query)
    return ((p << c.fine_unit) + q) >> NUMBER


@helper
def rank(points, ranking, lines, source, count, s, target):
    """Rank the points of the lines listed at ``source``; list those that remain at ``target``."""
    query = ranking.query(points, s)
    a = b = c = d = splat(i32x16, MOST)
    for i in range(source, source + ranking.number_bytes * count, ranking.number_bytes):
        number = types.int32(load(ranking.numbers, i, 0))
        ranked = (ranking.score(points, lines, number, query) << NUMBER) | number
        a, ranked = vmin(a, ranked), vmax(a, ranked)
        if ranking.shape[1] > 0:
            b, ranked = vmin(b, ranked), vmax(b, ranked)
        if ranking.shape[2] > 0:
            c, ranked = vmin(c, ranked), vmax(c, ranked)
        if ranking.shape[3] > 0:
            d = vmin(d, ranked)
    _list(a, s, target)
    if ranking.shape[1] > 0:
        _list_best(b, ranking.shape[1], s, target + 64)
    if ranking.shape[2] > 0:
        _list_best(c, ranking.shape[2], s, target + 64 + 4 * ranking.shape[1])
    if ranking.shape[3] > 0:
        _list_best(d, ranking.shape[3], s, target + 64 + 4 * (ranking.shape[1] + ranking.shape[2]))


@helper
def rank_around(points, ranking, lines, source, count, s, target):
    """Rank points as ``rank`` does, for two scales 1/8 above and below: list the better of two lanes, for either."""
    query = ranking.query(points, s)
    a = b = splat(i32x16, MOST)
    for i in range(source, source + ranking.number_bytes * count, ranking.number_bytes):
        number = types.int32(load(ranking.numbers, i, 0))
        p, q = points.sums(points, lines, number, query)
        error, difference = (p << points.fine_unit) + q, p << (points.fine_unit - 3)
        a = vmin(a, (((error + difference) >> NUMBER) << NUMBER) | number)
        b = vmin(b, (((error - difference) >> NUMBER) << NUMBER) | number)
    _list_best(a, 8, s, target)
    _list_best(b, 8, s, target + 32)


@inline
def _list(ranked, s, target):
    store(s, target, ((ranked & I32((1 << NUMBER) - 1)) << 4) | lanes16())


@inline
def _list_best(ranked, count, s, target):
    """List the points found: of 16, or the better of lanes l and l + 8, or of these the better of l and l + 4."""
    places = ((ranked & I32((1 << NUMBER) - 1)) << 4) | lanes16()
    if count < 16:
        partner = swap_8(ranked)
        places = select(partner < ranked, swap_8(places), places)
        ranked = vmin(partner, ranked)
    if count < 8:
        places = select(swap_4(ranked) < ranked, swap_4(places), places)
    store(s, target, places)


@inline
def levels8(c, words, j):
    """Return level j of points stored as bytes."""
    return cast(i32x16, (words >> (8 * (j % 4))) & 255) - I32(c.bias)


@inline
def levels4(c, words, j):
    """Return level j of points stored as 16 bits."""
    return cast(i32x16, words << (16 - 16 * (j % 2))) >> 16


@helper
def gather_points(steps, lines, s):
    """Copy the levels of the points listed: long before they are read as vectors, which waits for such small stores."""
    for i in range(0, 4 * SURVIVORS, 4):
        place = load(types.int32, s, POINTS + i)
        offset, target = (place >> 4) * steps.points.line_bytes + 4 * (place & 15), WORDS + i
        store(s, target, load(types.uint32, lines, offset))
        store(s, target + 64, load(types.uint32, lines, offset + 64))


@helper
def rate_points(steps, x, w, s, sign, survivors, width):
    """Compute 2 P, of x or -x, and Q of the points gathered, and keep them and where the points are."""
    points = steps.points
    p = q = splat(f32x16, F(0))
    for j in range(points.size):
        words = load(u32x16, s, WORDS + 64 * (j // (points.size // 2)))
        v = convert(f32x16, points.levels(points, words, j))
        wv = v * load(types.float32, w, 4 * j)
        p, q = p + wv * load(types.float32, x, 4 * j), q + wv * v
    store(survivors, 0, p * (sign + sign))
    store(survivors, 4 * width, q)
    store(survivors, 8 * width, load(i32x16, s, POINTS))


@helper
def search(steps, query, lines, s, survivors, width):
    """Keep the survivors of each group of 32 values, for scales around the query's.

    ``lines``: addresses of lines of points, of cells, of families. At ``survivors``, for each group: 2 P, Q and the
    places of ``width`` points, of which these are SURVIVORS; P is that of sign * x. Each step is done for all groups,
    so that none waits for its own result.
    """
    points = steps.points
    codebook, sign, inverse, x, w = query
    one = load(types.int64, s, ONE)
    end = s + PART * (32 // points.size) * one
    for group in range(32 // points.size):
        offset = 4 * points.size * group
        y = vmax(vmin(load(points.floats, x, offset) * inverse, FARTHEST), -FARTHEST)
        steps.prepare(points, y, load(points.floats, w, offset), s + PART * group)
    first = s + LINES + 4 * codebook * (steps.families if steps.families > 0 else steps.cells)
    if steps.families > 0:
        for t in range(s, end, PART):
            rank(points, steps.of_families, lines[2], first, steps.families, t, FAMILIES)
        for t in range(s, end, PART):
            rank(points, steps.of_cells, lines[1], t + FAMILIES, steps.families_kept * one, t, CELLS)
    else:
        for t in range(s, end, PART):
            rank(points, steps.of_cells, lines[1], first, steps.cells * one, t, CELLS)
    for t in range(s, end, PART):
        rank(points, steps.of_points, lines[0], t + CELLS, steps.cells_kept * one, t, POINTS)
    for t in range(s, end, PART):
        gather_points(steps, lines[0], t)
    for group in range(32 // points.size * one):
        offset = 4 * points.size * group
        rate_points(steps, x + offset, w + offset, s + PART * group, sign, survivors + 12 * width * group, width)


ranges16 = make_constant(f32x16, RANGE_OF, "trellis_ranges")
list_places = make_constant(
    i32x16, [2 * LIST_LENGTH * (2 * LEVELS) ** (3 - i % 4) for i in range(16)], "trellis_places"
)
next_lane = make_shuffle([i ^ 1 for i in range(16)], "trellis_next_lane")
next_but_one = make_shuffle([i ^ 2 for i in range(16)], "trellis_next_but_one")


@inline
def find_lists(x, inverse, s):
    """Write the positions of the lists of the buckets of 32 values, for each 4."""
    for i in range(0, 128, 64):
        y = load(f32x16, x, i) * inverse
        magnitude = convert(i32x16, lookup16_f32(ranges16(), convert(i32x16, vmin(vabs(y) * F(1 / 8), F(15)))))
        place = select(y < F(0), I32(LEVELS - 1) - magnitude, magnitude + I32(LEVELS)) * list_places()
        place = place + next_lane(place)
        store(s, LISTS + i, place + next_but_one(place))


@inline
def fetch_lists(steps, x, inverse, lists, s):
    """Prefetch the lists of 32 values, which are far from the caches, for a scale of either sign."""
    find_lists(x, inverse, s)
    for group in range(8):
        place = load(types.int32, s, LISTS + 16 * group)
        for first in range(0, steps.codebooks * steps.list_bytes, steps.list_bytes):
            prefetch(lists, first + place)
            prefetch(lists, first + steps.list_bytes - 2 * LIST_LENGTH - place)


@inline
def fetch_nothing(steps, x, inverse, lists, s):
    """Replace ``fetch_lists`` for points without lists."""


@helper
def search_listed(steps, query, lines, s, survivors, width):
    """Keep the survivors of each group of 4 of 32 values, as ``search`` does, of the lines listed for its bucket.

    Of ``steps.codebooks`` codebooks from the query's on.
    """
    points = steps.points
    codebook, sign, inverse, x, w = query
    one = load(types.int64, s, ONE)
    end = s + PART * 8 * one
    first = lines[3] + steps.list_bytes * codebook
    find_lists(x, inverse, s)
    for group in range(8):
        y = vmax(vmin(load(points.floats, x, 16 * group) * inverse, FARTHEST), -FARTHEST)
        prepare_fine(points, y, load(points.floats, w, 16 * group), s + PART * group)
    for k in range(steps.codebooks * one):
        for group in range(8 * one):
            offset = first + steps.list_bytes * k + load(types.int32, s, LISTS + 16 * group)
            steps.rank_points(points, steps.of_points, lines[0], offset, steps.lines * one, s + PART * group, POINTS)
        for t in range(s, end, PART):
            gather_points(steps, lines[0], t)
        for group in range(8 * one):
            target = survivors + steps.codebook_stride * k + 12 * width * group
            rate_points(steps, x + 16 * group, w + 16 * group, s + PART * group, sign, target, width)


#: The value that a known error is scaled to, and the maximum.
KNOWN_ERROR, WORST = 1 << 15, (1 << 31 - NUMBER) - 1

#: Relative rounding error that error bounds allow for: f32 loses up to 2^-24 in each of less than 32 operations.
ROUNDED = 2.0**-18
#: Offsets into a group's part of the scratch, in a scan: the best points for each range, and the worst score of
#: these, of each lane; the level times scale at which each value adds least to the error, and its u.
BEST = FAMILIES
WORST_OF = CELLS
NEAREST = WORDS
WEIGHTS = WORDS + 32


@inline
def _within(p, q, suits, least, most, energy, factor, number):
    """Return the errors of a line of 16 points with the scale of a range that suits each best, ranked."""
    ratio = vmax(vmin(suits, F(most)), F(least))
    error = (energy + (p + q * ratio) * ratio) * factor
    return (nearest_int(vmin(vmax(error, F(0)), F(WORST))) << NUMBER) | number


@helper
def rank_line(steps, lines, number, energy, factor, s):
    """Rank the points of a line for each range of scales, with those that are the best of their lanes."""
    points, ends = steps.points, steps.ends
    p, q = points.sums(points, lines, number, points.query(points, s))
    pf, qf = convert(f32x16, p) * F(128), convert(f32x16, q)
    suits, worst = pf * F(-0.5) / (qf + F(1)), splat(i32x16, 0)
    for i in range(len(ends) - 1):
        ranked = _within(pf, qf, suits, ends[i], ends[i + 1], energy, factor, number)
        best = vmin(ranked, load(i32x16, s, BEST + 64 * i))
        store(s, BEST + 64 * i, best)
        worst = vmax(best, worst)
    store(s, WORST_OF, worst)


@inline
def prepare_bounds(c, s):
    """Write the level times scale at which each value adds least to the error, and its u; return the saving.

    Of the integers of the fine query, as the error of a point is. Nothing is bounded where an importance is negative.
    """
    a = convert(c.floats, c.order(load(c.shorts, s, QUERY)))
    u = convert(c.floats, c.order(load(c.shorts, s, QUERY + 2 * c.size)))
    nearest = a * F(-64) / vmax(u, F(1))
    store(s, NEAREST, nearest)
    store(s, WEIGHTS, u)
    return hsum(u * nearest * nearest) if hmin(u) >= F(0) else F(3e38)


@inline
def bounds_of_cells(c, extents, cells, s):
    """Return a lower bound of the error that the points of each of 16 cells add to the least one, at any scale."""
    total = splat(f32x16, F(0))
    for j in range(c.size):
        offset, nearest = 128 * (c.size * cells + j), load(types.float32, s, NEAREST + 4 * j)
        low, high = load(f32x16, extents, offset), load(f32x16, extents, offset + 64)
        distance = vmax(vmax(low - nearest, nearest - high), F(0))
        total = total + distance * distance * load(types.float32, s, WEIGHTS + 4 * j)
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


#: In a scan, the lines of every n-th survivor are ranked first.
SURVIVOR_STEP = 4


@helper
def rank_all(steps, lines, first, energy, known_error, s, first_survivors):
    """List, for each range of scales, the best of all points of each lane, by their error with the best of these.

    The lines of survivors listed at ``first_survivors`` go first; then points that cannot be better are skipped, cells
    at once.
    """
    points, ends = steps.points, steps.ends
    for i in range(0, 64 * len(ends) - 64, 64):
        store(s, BEST + i, splat(i32x16, MOST))
    factor, unit = F(KNOWN_ERROR) / known_error, known_error * F(1 / KNOWN_ERROR)
    sane = F(1e-10) < known_error < F(1e12) and F(0) <= energy < F(1e12)
    rank_line(steps, lines[0], first, energy, factor, s)
    for i in range(0, 64 * len(ends) - 64, 4 * SURVIVOR_STEP):
        number = min(max(load(types.int32, first_survivors, i) >> 4, first), first + steps.lines - 1)
        rank_line(steps, lines[0], number, energy, factor, s)
    saved, query = prepare_bounds(points, s), points.query(points, s)
    limit, reach = _limits(energy, saved, unit, sane, s)
    for cells in range(first // 16, (first + steps.lines) // 16):
        left = mask_bits(bounds_of_cells(points, lines[4], cells, s) <= reach)
        while left != 0:
            number = 16 * cells + trailing_zeros(left)
            left &= left - np.uint64(1)
            p, q = points.sums(points, lines[0], number, query)
            pf = convert(f32x16, p)
            if any_lane(pf * vmin(pf, F(0)) >= convert(f32x16, q) * limit):
                rank_line(steps, lines[0], number, energy, factor, s)
                limit, reach = _limits(energy, saved, unit, sane, s)
    for i in range(0, 64 * len(ends) - 64, 64):
        _list(load(i32x16, s, BEST + i), s, BEST + i)


@helper
def scan(steps, query, error, lines, s, survivors, width):
    """Keep, as ``search`` does for one group, the best of all points, of each lane, for each range of scales.

    ``error``: about that of the group. More filled slots with nearer points leave fewer points to rank.
    """
    points = steps.points
    codebook, sign, inverse, x, w = query
    y, weights = load(points.floats, x, 0) * inverse, load(points.floats, w, 0)
    prepare_both(points, y, weights, s)
    factor = fine_factor(points, y, weights)
    known_error = F(error) * inverse * inverse * factor
    energy = hsum(y * y * weights) * factor
    steps.rank_all(steps, lines, codebook * steps.lines, energy, known_error, s, survivors + 8 * width)
    for k in range(len(steps.ends) - 1):
        store(s, POINTS, load(i32x16, s, BEST + 64 * k))
        gather_points(steps, lines[0], s)
        rate_points(steps, x, w, s, sign, survivors + 4 * SURVIVORS * k, width)


@inline
def errors(survivors, groups, width, slots, d):
    """Return the errors of a block for 16 scales >= 0, each with the best survivors of ``slots`` searches for it."""
    total = splat(f32x16, F(0))
    for group in range(groups):
        offset = survivors + 12 * width * group
        one = two = splat(f32x16, F(3e38))
        for i in range(offset, offset + 4 * SURVIVORS * slots, 8):
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
def pick(survivors, width, slots, d):
    """Return 2 P, Q and the place of a group's best survivor for a scale d >= 0."""
    best, index = splat(f32x16, F(3e38)), splat(i32x16, 0)
    for i in range(0, 4 * SURVIVORS * slots, 64):
        error = load(f32x16, survivors, 4 * width + i) * d - load(f32x16, survivors, i)
        index = select(error < best, lanes16() + I32(i // 4), index)
        best = vmin(error, best)
    i = 4 * hmin(select(best == hmin(best), index, I32(4 * width)))
    i = survivors + min(i, 4 * (width - 1))
    return load(types.float32, i, 0), load(types.float32, i, 4 * width), load(types.int32, i, 8 * width)

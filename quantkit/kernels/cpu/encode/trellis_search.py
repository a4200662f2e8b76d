"""The points of a trellis codebook nearest to 8 (or 4) values: a few that are good for all scales near one.

The error of point v for values x, weights w and a scale d is, less a constant, d^2 Q - 2 d P, where P = sum(w x v) and
Q = sum(w v v). A search for one d (*center*):

1. ranks the centers of all families by that error in integers, with weights of 7 bits; the best few of each lane stay;
2. ranks the centers of the cells of these families likewise, and the points of these cells: the best 32 remain;
3. computes P and Q of these in f32. Any scale, the best of them for it: three operations a point.

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
    make_constant,
    make_shuffle,
    nearest_int,
    round_even,
    select,
    splat,
    store,
    u8x64,
    u16x32,
    u32x16,
    vabs,
    vmax,
    vmin,
)

F, I32 = np.float32, np.int32

#: Survivors of a search; a score that none has; the bits of a ranked score that number a line; the largest query.
SURVIVORS, MOST, NUMBER, FARTHEST = 32, 0x7FFFFFFF, 12, F(140)

#: Offsets into a group's part of the scratch: a query; lists of families, of cells; survivors; their levels; whether
#: the query is fine. After the parts of 8 groups: the list of lines that are ranked first.
QUERY, FAMILIES, CELLS, POINTS, WORDS, FINE, PART = 0, 64, 320, 576, 704, 832, 896
LINES, SCRATCH = 8 * PART, 8 * PART + 256

lanes16 = make_constant(i32x16, range(16), "trellis_lanes")
i16x4 = VecType(types.int16, 4)
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
    """Store the query of 8 values y with weights: rounded weights u, and -2 u y in units of 64; return the least u."""
    top = max(hmax(weights) * F(1 / 64), hmax(weights * vabs(y)) * (F(1 / 32) / largest))
    factor = F(1) / top if top > F(1e-33) else F(0)
    u = nearest_int(weights * factor)
    a = vmax(vmin(convert(f32x8, u) * y * F(-1 / 32), largest), -largest)
    store(s, QUERY, convert(i8x8, nearest_int(a)))
    store(s, QUERY + 8, convert(i8x8, u))
    return hmin(u)


@inline
def prepare_no_coarse(y, weights, s):
    """Stand for ``prepare_coarse`` where all queries are fine."""
    return I32(0)


@inline
def coarse_query(s):
    """Return the words of a coarse query."""
    a, b, c, d = _word(s, QUERY), _word(s, QUERY + 4), _word(s, QUERY + 8), _word(s, QUERY + 12)
    return cast(i8x64, a), cast(i8x64, b), cast(i8x64, c), cast(i8x64, d)


@inline
def coarse_score(lines, number, query):
    """Return the errors of a line of 16 points of 8 values."""
    at, (a, b, c, d) = 256 * number, query
    first = dot4(dot4(splat(i32x16, 0), load(u8x64, lines, at), a), load(u8x64, lines, at + 64), b)
    return dot4(dot4(first, load(u8x64, lines, at + 128), c), load(u8x64, lines, at + 192), d)


@inline
def prepare_fine(y, weights, s):
    """Store the query of 8 or 4 values y with weights: weights u of up to 15 bits, -2 u y in units of 128."""
    ay = weights * vabs(y)
    top = max(hsum(weights * F(15876) + ay * F(280)) * F(1 / 2.0e9), hmax(weights) * F(1 / 32000))
    top = max(top, hmax(ay) * F(1 / 64 / 32000))
    factor = F(1) / top if top > F(1e-33) else F(0)
    u = round_even(weights * factor)
    store(s, QUERY, convert(shorts_of, nearest_int(paired(u * y * F(-1 / 64)))))
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
def fine_score8(lines, number, query):
    """Return the errors of a line of 16 points of 8 values, in fewer bits."""
    p = q = splat(i32x16, 0)
    (a, b, c, d), (e, f, g, h) = query
    x = load(u16x32, lines, 256 * number)
    u, v = cast(i16x32, x & np.uint16(255)) - np.int16(bias), cast(i16x32, x >> np.uint16(8)) - np.int16(bias)
    p, q = dot2(dot2(p, u, a), v, b), dot2(dot2(q, u * u, e), v * v, f)
    x = load(u16x32, lines, 256 * number + 64)
    u, v = cast(i16x32, x & np.uint16(255)) - np.int16(bias), cast(i16x32, x >> np.uint16(8)) - np.int16(bias)
    p, q = dot2(dot2(p, u, c), v, d), dot2(dot2(q, u * u, g), v * v, h)
    return ((p << 7) + q) >> NUMBER


@inline
def fine_score4(lines, number, query):
    """Return the errors of a line of 16 points of 4 values, in fewer bits."""
    p = q = splat(i32x16, 0)
    (a, b), (c, d) = query
    u, v = load(i16x32, lines, 128 * number), load(i16x32, lines, 128 * number + 64)
    p, q = dot2(dot2(p, u, a), v, b), dot2(dot2(q, u * u, c), v * v, d)
    return ((p << 7) + q) >> NUMBER


#: Binding of ``rank``.
score: Any = None

#: Bindings of ``rank``: how many of each lane remain.
depth = 0


def rank(lines, source, count, query, s, to):
    """Rank the points of the lines listed at ``source``; list the best few of each lane at ``to``."""
    a = b = c = d = splat(i32x16, MOST)
    for i in range(source, source + 4 * count, 4):
        number = load(types.int32, s, i)
        found = (score(lines, number, query) << NUMBER) | number
        a, found = vmin(a, found), vmax(a, found)
        if depth > 1:
            b, found = vmin(b, found), vmax(b, found)
        if depth > 2:
            c, found = vmin(c, found), vmax(c, found)
        if depth > 3:
            d = vmin(d, found)
    _list(a, s, to)
    if depth > 1:
        _list(b, s, to + 64)
    if depth > 2:
        _list(c, s, to + 128)
    if depth > 3:
        _list(d, s, to + 192)


@inline
def _list(found, s, to):
    store(s, to, ((found & I32((1 << NUMBER) - 1)) << 4) | lanes16())


@inline
def levels8(words, j):
    """Return level j of points stored as bytes."""
    return cast(i32x16, (words >> (8 * (j % 4))) & 255) - I32(bias)


@inline
def levels4(words, j):
    """Return level j of points stored as 16 bits."""
    return cast(i32x16, words << (16 - 16 * (j % 2))) >> 16


levels: Any = None


def rate_points(lines, x, w, s, sign, kept, width):
    """Compute 2 P, of x or -x, and Q of the 32 points listed, and keep them and where the points are."""
    for half in range(0, 128, 64):
        for i in range(0, 64, 4):
            place = load(types.int32, s, POINTS + half + i)
            at = (place >> 4) * line_bytes + 4 * (place & 15)
            store(s, WORDS + i, load(types.uint32, lines, at))
            store(s, WORDS + 64 + i, load(types.uint32, lines, at + 64))
        p = q = splat(f32x16, F(0))
        for j in range(size):
            v = convert(f32x16, levels(load(u32x16, s, WORDS + 64 * (j // (size // 2))), j))
            wv = v * load(types.float32, w, 4 * j)
            p, q = p + wv * load(types.float32, x, 4 * j), q + wv * v
        store(kept, half, p * (sign + sign))
        store(kept, 4 * width + half, q)
        store(kept, 8 * width + half, load(i32x16, s, POINTS + half))


#: Bindings of ``search``: lines of families of a codebook, none if all cells are ranked; how many of each lane stay;
#: the least weight, of 64, with which a query may be coarse, 65 if none may.
lines_of_families = lines_of_cells = family_depth = cell_depth = 0
coarse_from = 65
fine_prepared: Any = None
coarse_prepared: Any = None
fine_query: Any = None
rank_families: Any = None
rank_cells: Any = None
rank_points: Any = None
coarsely_rank_families: Any = None
coarsely_rank_cells: Any = None
coarsely_rank_points: Any = None
points_rated: Any = None


@inline
def _prepare(x, w, inverse, s):
    y, weights = vmax(vmin(load(floats, x, 0) * inverse, FARTHEST), -FARTHEST), load(floats, w, 0)
    coarse = 0
    if coarse_from <= 64:
        coarse = 1 if coarse_prepared(y, weights, s) >= I32(coarse_from) else 0
    if coarse == 0:
        fine_prepared(y, weights, s)
    store(s, FINE, I32(coarse))


def search(book, sign, inverse, x, w, lines, s, kept, width):
    """Keep the survivors of each group of 32 values at x, with weights at w, for scales around 1 / |inverse|.

    ``sign``: of the scales; ``lines``: addresses of lines of points, of cells, of families. For each group at ``kept``:
    2 P, Q and the places of ``width`` points, of which these are 32; P is that of sign * x. Each step is done for all
    groups, so that none waits for its own result.
    """
    for group in range(32 // size):
        at = 4 * size * group
        prepared(x + at, w + at, inverse, s + PART * group)
    first = s + LINES + 4 * book * (lines_of_families if lines_of_families > 0 else lines_of_cells)
    if lines_of_families > 0:
        for t in range(s, s + PART * (32 // size), PART):
            if coarse_from <= 64 and load(types.int32, t, FINE) != I32(0):
                coarsely_rank_families(lines[2], first - t, lines_of_families, coarse_query(t), t, FAMILIES)
            else:
                rank_families(lines[2], first - t, lines_of_families, fine_query(t), t, FAMILIES)
    for t in range(s, s + PART * (32 // size), PART):
        source = FAMILIES if lines_of_families > 0 else first - t
        count = 16 * family_depth if lines_of_families > 0 else lines_of_cells
        if coarse_from <= 64 and load(types.int32, t, FINE) != I32(0):
            coarsely_rank_cells(lines[1], source, count, coarse_query(t), t, CELLS)
        else:
            rank_cells(lines[1], source, count, fine_query(t), t, CELLS)
    for t in range(s, s + PART * (32 // size), PART):
        if coarse_from <= 64 and load(types.int32, t, FINE) != I32(0):
            coarsely_rank_points(lines[0], CELLS, 16 * cell_depth, coarse_query(t), t, POINTS)
        else:
            rank_points(lines[0], CELLS, 16 * cell_depth, fine_query(t), t, POINTS)
    for group in range(32 // size):
        at = 4 * size * group
        points_rated(lines[0], x + at, w + at, s + PART * group, sign, kept + 12 * width * group, width)


prepared: Any = None


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

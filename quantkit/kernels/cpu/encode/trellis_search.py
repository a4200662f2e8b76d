"""The nearest point of a trellis codebook to 8 (or 4) values, for several scales at once.

The error of point v for values x, weights w and a scale d is, less a constant, d^2 Q - 2 d P, where P = sum(w x v) and
Q = sum(w v v). A search for one d (*center*) finds points that are good for all scales near it:

1. The centers of all cells are ranked by that error in integers: w and w x / d as 7 bits. Of the cells whose number has
   the same rest by 16, the best one is kept (a lane each), in every half: 32 cells.
2. All points of these cells are ranked likewise; the best of each lane, and of every second group, remain: 32 points.
3. P and Q of these are computed in f32. Any scale, the best of 32 points for it: a few operations.

Rounding disturbs the order of points by some percent of the error, and few points are that near to the best one.
Integers and the fixed order of f32 operations give the same points on every CPU.
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
    dot4,
    f32x8,
    f32x16,
    hmax,
    hmin,
    hsum,
    i8x8,
    i8x64,
    i32x16,
    load,
    make_constant,
    nearest_int,
    select,
    splat,
    store,
    u8x64,
    u32x16,
    vabs,
    vmax,
    vmin,
)

F, I32 = np.float32, np.int32

#: Survivors of a search; and the low bits of a ranked score, which number groups of 16.
SURVIVORS, MOST, FARTHEST = 32, 0x7FFFFFFF, 140

#: Offsets into a scratch: a query's bytes; cells; groups of survivors; their values; P, Q and positions [8][32].
QUERY, FAMILIES, CELLS, GROUPS, WORDS = 0, 64, 1088, 2112, 2240
P, Q, AT, SCRATCH = 2368, 3392, 4416, 5440

lanes16 = make_constant(i32x16, range(16), "trellis_lanes")
i8x4 = VecType(types.int8, 4)

#: Bindings: bytes of the lines of 16 points; vectors of cells of a codebook; what levels are stored plus.
line_bytes = family_groups = bias = size = square = 0
floats: Any = f32x8
bytes_of: Any = i8x8


@inline
def _word(s, at):
    return cast(i8x64, splat(u32x16, load(types.uint32, s, at)))


def prepare(x, w, inverse, s):
    """Store the query for values at x with weights at w and a scale's inverse: w and -2 w x / d, in 13 bits."""
    y, weights = vmax(vmin(load(floats, x, 0) * inverse, F(FARTHEST)), F(-FARTHEST)), load(floats, w, 0)
    wy = weights * y
    a, b = wy + wy, weights * F(square)
    top = max(hmax(vabs(a)), hmax(b))
    factor = F(4096) / top if top > F(1e-33) else F(0)
    a, b = nearest_int(-(a * factor)), nearest_int(b * factor)
    c, d = (a + 32) >> 6, (b + 32) >> 6
    store(s, QUERY, convert(bytes_of, c))
    store(s, QUERY + size, convert(bytes_of, d))
    store(s, QUERY + 2 * size, convert(bytes_of, a - (c << 6)))
    store(s, QUERY + 3 * size, convert(bytes_of, b - (d << 6)))
    offset = hsum(a) * I32(bias)
    return F(1) / factor if factor > F(0) else F(0), offset


@inline
def query8(s):
    """Return the words of a query for 8 values."""
    high = _word(s, QUERY), _word(s, QUERY + 4), _word(s, QUERY + 8), _word(s, QUERY + 12)
    return high, (_word(s, QUERY + 16), _word(s, QUERY + 20), _word(s, QUERY + 24), _word(s, QUERY + 28))


@inline
def query4(s):
    """Return the words of a query for 4 values."""
    return (_word(s, QUERY), _word(s, QUERY + 4)), (_word(s, QUERY + 8), _word(s, QUERY + 12))


@inline
def _sums2(u, v, a, b, c, d):
    """Return the sums of products of two lines of 16 points with high and low halves of a query."""
    zero = splat(i32x16, 0)
    return (dot4(dot4(zero, u, a), v, b) << 6) + dot4(dot4(zero, u, c), v, d)


@inline
def score8(lines, number, query):
    """Return the two parts of the errors of a group of 16 points."""
    at, (a, b, c, d), (e, f, g, h) = 256 * number, query[0], query[1]
    p = _sums2(load(u8x64, lines, at), load(u8x64, lines, at + 64), a, b, e, f)
    return p, _sums2(load(u8x64, lines, at + 128), load(u8x64, lines, at + 192), c, d, g, h)


@inline
def score8_fine(lines, number, query):
    """Return the two parts of the errors of a group of 16 points."""
    at, (a, b, c, d), (e, f, g, h) = 384 * number, query[0], query[1]
    p = _sums2(load(u8x64, lines, at), load(u8x64, lines, at + 64), a, b, e, f)
    q = _sums2(load(u8x64, lines, at + 128), load(u8x64, lines, at + 192), c, d, g, h)
    rests = dot4(dot4(splat(i32x16, 0), load(u8x64, lines, at + 256), c), load(u8x64, lines, at + 320), d)
    return p, q + (rests >> 1)


@inline
def score4_fine(lines, number, query):
    """Return the two parts of the errors of a group of 16 points."""
    at, (a, b), (c, d), zero = 192 * number, query[0], query[1], splat(i32x16, 0)
    u, v = load(u8x64, lines, at), load(u8x64, lines, at + 64)
    rests = dot4(zero, load(u8x64, lines, at + 128), b)
    return (dot4(zero, u, a) << 6) + dot4(zero, u, c), (dot4(zero, v, b) << 6) + dot4(zero, v, d) + (rests >> 1)


#: Bindings for 8 or 4 values.
query_of: Any = None
score: Any = None


@inline
def _better(best, number, found, i):
    """Keep the least of found errors, and where it was."""
    return vmin(found, best), select(found < best, I32(i), number)


@inline
def _store_two(s, at, a, b):
    store(s, at, (a << 4) | lanes16())
    store(s, at + 64, (b << 4) | lanes16())


def error_of(lines, i, query):
    p, q = score(lines, i, query)
    return p + q


def rank_families(families, book, count, query, s):
    """Store the numbers of 32 * count families whose centers are near."""
    if family_groups <= 2 * count:
        for i in range(family_groups):
            store(s, FAMILIES + 64 * i, lanes16() + I32(16 * (book * family_groups + i)))
        return
    most = splat(i32x16, MOST)
    for part in range(count):
        a, b, na, nb = most, most, splat(i32x16, 0), splat(i32x16, 0)
        step = 2 * count
        for i in range(book * family_groups + 2 * part, (book + 1) * family_groups, step):
            a, na = _better(a, na, error(families, i, query), i)
            b, nb = _better(b, nb, error(families, i + 1, query), i + 1)
        _store_two(s, FAMILIES + 128 * part, na, nb)


error: Any = None


def rank_cells(cells, count, groups, query, s):
    """Store the numbers of 32 * count cells whose centers are near, of families."""
    most = splat(i32x16, MOST)
    for part in range(count):
        a, b, na, nb = most, most, splat(i32x16, 0), splat(i32x16, 0)
        for k in range(2 * part, groups, 2 * count):
            i = load(types.int32, s, FAMILIES + 4 * k)
            a, na = _better(a, na, error(cells, i, query), i)
            i = load(types.int32, s, FAMILIES + 4 * k + 4)
            b, nb = _better(b, nb, error(cells, i, query), i)
        _store_two(s, CELLS + 128 * part, na, nb)


@inline
def best_lane(values):
    """Return the first lane with the least value."""
    return min(hmin(select(values == hmin(values), lanes16(), I32(99))), I32(15))


def rank_cells_of_two(cells, count, groups, query, s):
    """Store the numbers of 32 * count cells whose centers are near, half for a smaller, half for a larger scale."""
    most = splat(i32x16, MOST)
    for part in range(count):
        a, b, na, nb = most, most, splat(i32x16, 0), splat(i32x16, 0)
        for k in range(part, groups, count):
            i = load(types.int32, s, FAMILIES + 4 * k)
            p, q = score(cells, i, query)
            both, step = p + q, q >> shift
            a, na = _better(a, na, both - step, i)
            b, nb = _better(b, nb, both + step, i)
        _store_two(s, CELLS + 128 * part, na, nb)


shift = 0


def least_of_4(points, groups, query, s, ratios):
    """Store the least errors, over the scale, for each of 4 scales."""
    most = splat(f32x16, F(3e38))
    a, b, c, d = most, most, most, most
    r0, r1 = splat(f32x16, load(types.float32, ratios, 0)), splat(f32x16, load(types.float32, ratios, 4))
    r2, r3 = splat(f32x16, load(types.float32, ratios, 8)), splat(f32x16, load(types.float32, ratios, 12))
    for k in range(groups):
        p, q = score(points, load(types.int32, s, CELLS + 4 * k), query)
        u, v = convert(f32x16, p), convert(f32x16, q)
        a, b, c, d = vmin(v * r0 + u, a), vmin(v * r1 + u, b), vmin(v * r2 + u, c), vmin(v * r3 + u, d)
    store(s, WORDS, hmin(a))
    store(s, WORDS + 4, hmin(b))
    store(s, WORDS + 8, hmin(c))
    store(s, WORDS + 12, hmin(d))


def least_of_8(points, groups, query, s, ratios):
    """Store the least errors, over the scale, for each of 8 scales."""
    most = splat(f32x16, F(3e38))
    a, b, c, d, e, f, g, h = most, most, most, most, most, most, most, most
    r0, r1 = splat(f32x16, load(types.float32, ratios, 0)), splat(f32x16, load(types.float32, ratios, 4))
    r2, r3 = splat(f32x16, load(types.float32, ratios, 8)), splat(f32x16, load(types.float32, ratios, 12))
    r4, r5 = splat(f32x16, load(types.float32, ratios, 16)), splat(f32x16, load(types.float32, ratios, 20))
    r6, r7 = splat(f32x16, load(types.float32, ratios, 24)), splat(f32x16, load(types.float32, ratios, 28))
    for k in range(groups):
        p, q = score(points, load(types.int32, s, CELLS + 4 * k), query)
        u, v = convert(f32x16, p), convert(f32x16, q)
        a, b, c, d = vmin(v * r0 + u, a), vmin(v * r1 + u, b), vmin(v * r2 + u, c), vmin(v * r3 + u, d)
        e, f, g, h = vmin(v * r4 + u, e), vmin(v * r5 + u, f), vmin(v * r6 + u, g), vmin(v * r7 + u, h)
    store(s, WORDS, hmin(a))
    store(s, WORDS + 4, hmin(b))
    store(s, WORDS + 8, hmin(c))
    store(s, WORDS + 12, hmin(d))
    store(s, WORDS + 16, hmin(e))
    store(s, WORDS + 20, hmin(f))
    store(s, WORDS + 24, hmin(g))
    store(s, WORDS + 28, hmin(h))


def rank_points(points, groups, query, s):
    """Store the numbers of the best 32 points of cells."""
    a, b = splat(i32x16, MOST), splat(i32x16, MOST)
    na, nb = splat(i32x16, 0), splat(i32x16, 0)
    for k in range(0, groups, 2):
        i = load(types.int32, s, CELLS + 4 * k)
        a, na = _better(a, na, error(points, i, query), i)
        i = load(types.int32, s, CELLS + 4 * k + 4)
        b, nb = _better(b, nb, error(points, i, query), i)
    store(s, GROUPS, na)
    store(s, GROUPS + 64, nb)


def rate_points(points, x, w, s, group):
    """Compute P and Q of 32 points, for values at x with weights at w."""
    for half in range(2):
        for lane in range(16):
            number = load(types.int32, s, GROUPS + 64 * half + 4 * lane)
            for k in range(size // 4):
                at = number * line_bytes + 64 * k + 4 * lane
                store(s, WORDS + 64 * k + 4 * lane, load(types.uint32, points, at))
        p = q = splat(f32x16, F(0))
        for j in range(size):
            word = load(u32x16, s, WORDS + 64 * (j // 4))
            v = convert(f32x16, cast(i32x16, (word >> (8 * (j % 4))) & 255) - I32(bias))
            wv = v * load(types.float32, w, 4 * j)
            p, q = p + wv * load(types.float32, x, 4 * j), q + wv * v
        at = 128 * group + 64 * half
        store(s, P + at, p)
        store(s, Q + at, q)
        store(s, AT + at, (load(i32x16, s, GROUPS + 64 * half) << 4) | lanes16())


#: Bindings of ``search``.
prepare_query: Any = None
families_ranked: Any = None
cells_ranked: Any = None
points_ranked: Any = None
points_rated: Any = None


def search(book, families, cells, x, w, center, s, lines):
    """Find the survivors of each group of 32 values at x, with weights at w, for scales around ``center``.

    ``families``, ``cells``: how many are searched, in units of 32. ``lines``: addresses.
    """
    inverse = F(1) / center
    for group in range(32 // size):
        at = 4 * size * group
        prepare_query(x + at, w + at, inverse, s)
        query = query_of(s)
        families_ranked(lines[2], book, families, query, s)
        cells_ranked(lines[1], cells, 32 * families, query, s)
        points_ranked(lines[0], 32 * cells, query, s)
        points_rated(lines[0], x + at, w + at, s, group)


@inline
def errors(s, groups, d):
    """Return the errors of a block for 16 scales, each with the best survivors for it."""
    square, twice, total = d * d, d + d, splat(f32x16, F(0))
    for group in range(groups):
        least = splat(f32x16, F(np.inf))
        for i in range(128 * group, 128 * group + 4 * SURVIVORS, 4):
            q, p = load(types.float32, s, Q + i), load(types.float32, s, P + i)
            least = vmin(square * q - twice * p, least)
        total = total + least
    return total


@inline
def pick(s, group, d):
    """Return P, Q and the position of the best survivor for scale d."""
    at = 128 * group
    square, twice = d * d, d + d
    one = load(f32x16, s, Q + at) * square - load(f32x16, s, P + at) * twice
    two = load(f32x16, s, Q + at + 64) * square - load(f32x16, s, P + at + 64) * twice
    both = vmin(two, one)
    at += 4 * best_lane(both)
    if not load(types.float32, s, Q + at) * square - load(types.float32, s, P + at) * twice <= hmin(both):
        at += 64
    return load(types.float32, s, P + at), load(types.float32, s, Q + at), load(types.int32, s, AT + at)


curve_points: Any = None
cells_of_two: Any = None


def curve(book, families, cells, x, w, center, s, lines, ratios):
    """Return the errors of 32 values for 4 or 8 scales around center"""
    inverse = F(1) / center
    total = splat(f32x8, F(0))
    r = load(f32x8, ratios, 0)
    for group in range(32 // size):
        at = 4 * size * group
        unit, offset = prepare_query(x + at, w + at, inverse, s)
        query = query_of(s)
        families_ranked(lines[2], book, families, query, s)
        cells_of_two(lines[1], cells, 32 * families, query, s)
        curve_points(lines[0], 32 * cells, query, s, ratios)
        total = total + (load(f32x8, s, WORDS) - F(offset)) * unit
    return total * (center * center) * r

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
    f32x4,
    f32x8,
    f32x16,
    hmax,
    hmin,
    i8x8,
    i8x64,
    i16x32,
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

#: Survivors of a search; a score that none has; the bits of a ranked score that number a line; the largest query.
SURVIVORS, MOST, NUMBER, FARTHEST = 32, 0x7FFFFFFF, 12, F(140)

#: Offsets into a scratch: a query; lists of lines to rank, of families, of cells; survivors; their levels.
QUERY, LINES, FAMILIES, CELLS, POINTS, WORDS, SCRATCH = 0, 64, 320, 576, 832, 960, 1216

lanes16 = make_constant(i32x16, range(16), "trellis_lanes")
i16x4 = VecType(types.int16, 4)

#: Bindings: values of a point; what levels are stored plus; bytes of a line; the largest query in units of 32 levels.
size = bias = line_bytes = 0
largest = F(0)


@inline
def _word(s, at):
    return splat(u32x16, load(types.uint32, s, at))


def prepare8(x, w, inverse, s):
    """Store the query of 8 values x / d with weights w: rounded weights u, and -2 u x / d in units of 64 levels."""
    y, weights = vmax(vmin(load(f32x8, x, 0) * inverse, FARTHEST), -FARTHEST), load(f32x8, w, 0)
    top = max(hmax(weights) * F(1 / 64), hmax(weights * vabs(y)) * (F(1 / 32) / largest))
    factor = F(1) / top if top > F(1e-33) else F(0)
    u = nearest_int(weights * factor)
    a = vmax(vmin(convert(f32x8, u) * y * F(-1 / 32), largest), -largest)
    store(s, QUERY, convert(i8x8, nearest_int(a)))
    store(s, QUERY + 8, convert(i8x8, u))


@inline
def query8(s):
    """Return the words of a query of 8 values."""
    a, b, c, d = _word(s, QUERY), _word(s, QUERY + 4), _word(s, QUERY + 8), _word(s, QUERY + 12)
    return cast(i8x64, a), cast(i8x64, b), cast(i8x64, c), cast(i8x64, d)


@inline
def score8(lines, number, query):
    """Return the errors of a line of 16 points of 8 values."""
    at, (a, b, c, d) = 256 * number, query
    first = dot4(dot4(splat(i32x16, 0), load(u8x64, lines, at), a), load(u8x64, lines, at + 64), b)
    return dot4(dot4(first, load(u8x64, lines, at + 128), c), load(u8x64, lines, at + 192), d)


def prepare4(x, w, inverse, s):
    """Store the query of 4 values x / d with weights w: rounded weights u, and 2 u x / d; v u - 2 u x / d fits i16."""
    y, weights = vmax(vmin(load(f32x4, x, 0) * inverse, FARTHEST), -FARTHEST), load(f32x4, w, 0)
    top = hmax(weights * (vabs(y) + F(63)))
    factor = F(16000) / top if top > F(1e-33) else F(0)
    u = nearest_int(weights * factor)
    store(s, QUERY, convert(i16x4, nearest_int(convert(f32x4, u) * (y + y))))
    store(s, QUERY + 8, convert(i16x4, u))


@inline
def query4(s):
    """Return the words of a query of 4 values."""
    a, b, c, d = _word(s, QUERY), _word(s, QUERY + 4), _word(s, QUERY + 8), _word(s, QUERY + 12)
    return cast(i16x32, a), cast(i16x32, b), cast(i16x32, c), cast(i16x32, d)


@inline
def score4(lines, number, query):
    """Return the errors of a line of 16 points of 4 values."""
    at, (a, b, c, d) = 128 * number, query
    u, v = load(i16x32, lines, at), load(i16x32, lines, at + 64)
    return dot2(dot2(splat(i32x16, 0), u, u * c - a), v, v * d - b) >> 5


#: Bindings for 8 or 4 values.
prepare: Any = None
query_of: Any = None
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
    for half in range(2):
        for lane in range(16):
            place = load(types.int32, s, POINTS + 64 * half + 4 * lane)
            at = (place >> 4) * line_bytes + 4 * (place & 15)
            store(s, WORDS + 4 * lane, load(types.uint32, lines, at))
            store(s, WORDS + 64 + 4 * lane, load(types.uint32, lines, at + 64))
        p = q = splat(f32x16, F(0))
        for j in range(size):
            v = convert(f32x16, levels(load(u32x16, s, WORDS + 64 * (j // (size // 2))), j))
            wv = v * load(types.float32, w, 4 * j)
            p, q = p + wv * load(types.float32, x, 4 * j), q + wv * v
        store(kept, 64 * half, p * (sign + sign))
        store(kept, 4 * width + 64 * half, q)
        store(kept, 8 * width + 64 * half, load(i32x16, s, POINTS + 64 * half))


#: Bindings of ``search``: lines of families of a codebook, none if all cells are ranked; how many of each lane stay.
lines_of_families = lines_of_cells = family_depth = cell_depth = 0
families_ranked: Any = None
cells_ranked: Any = None
points_ranked: Any = None
points_rated: Any = None


def search(book, sign, inverse, x, w, lines, s, kept, width):
    """Keep the survivors of each group of 32 values at x, with weights at w, for scales around 1 / |inverse|.

    ``sign``: of the scales; ``lines``: addresses of lines of points, of cells, of families. For each group at ``kept``:
    2 P, Q and the places of ``width`` points, of which these are 32; P is that of sign * x.
    """
    for group in range(32 // size):
        at, to = 4 * size * group, kept + 12 * width * group
        prepare(x + at, w + at, inverse, s)
        query = query_of(s)
        if lines_of_families:
            families_ranked(lines[2], LINES + 4 * book * lines_of_families, lines_of_families, query, s, FAMILIES)
            cells_ranked(lines[1], FAMILIES, 16 * family_depth, query, s, CELLS)
        else:
            cells_ranked(lines[1], LINES + 4 * book * lines_of_cells, lines_of_cells, query, s, CELLS)
        points_ranked(lines[0], CELLS, 16 * cell_depth, query, s, POINTS)
        points_rated(lines[0], x + at, w + at, s, sign, to, width)


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
    i = min(i, 4 * (width - 1))
    return load(types.float32, kept, i), load(types.float32, kept, 4 * width + i), load(types.int32, kept, 8 * width + i)

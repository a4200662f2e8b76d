"""For every bucket of queries of 4 values, the lines of a trellis codebook that hold the points nearest to them.

A query is 4 values over a scale, of a standard deviation near 37. Each value's magnitude has LEVELS ranges, finer where
values are frequent: a bucket is a range and a sign for each. Trials find the lines of 16 points that suit its queries:
of CANDIDATES, those that reach nearest to the bucket's middle, all points are rated for SAMPLES queries spread over the
bucket, with weights as values have them; the lines whose best points are the nearest are listed, best first.

Samples are the same for every codebook and machine, and so are strict f32 operations in a fixed order: the same lists
everywhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import f32x16, hsum, i32x16, load, make_constant, select, splat, store, vmax, vmin
from quantkit.kernels.cpu.encode.batch import address

F, I32 = np.float32, np.int32

lanes16 = make_constant(i32x16, range(16), "trellis_lists_lanes")

#: The range of a magnitude, by magnitude // 8, at most 15; number of ranges; buckets of 4 values; lines per list.
RANGE_OF = (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6)
LEVELS = 7
BUCKETS, LIST_LENGTH = (2 * LEVELS) ** 4, 32
#: Lines that are tried; queries for which they are tried; the maximum magnitude of a query.
CANDIDATES = 64
SAMPLES = 64
FARTHEST = 136.0
#: Half the mean square of values divided by their scale, a term of every weight.
HALF_SQUARE = 684.0


#: Assumed position of a line's point: this share of the way from the nearest position within its extent to its center.
TO_CENTER = 0.25
#: Scale of errors above that of the best point, in mean weights.
SLACK = 10.0
#: How fast the score of a line falls with that excess error.
SHARPNESS = 5.0


def _samples() -> npt.NDArray[np.float32]:
    """Return weights w, -2 w y and w y y of queries y, f32 [2 LEVELS, 4, 3, SAMPLES], by the range of each value."""
    starts = [8.0 * RANGE_OF.index(k) for k in range(LEVELS)]
    ranges = np.stack([starts, [*starts[1:], FARTHEST]], 1)
    first, last = np.concatenate([-ranges[::-1, ::-1], ranges])[:, :, None, None].swapaxes(0, 1)
    k = np.arange(SAMPLES)
    y = first + (last - first) * (np.array([[1], [19], [27], [45]]) * k % SAMPLES + 0.5) / SAMPLES
    importance = np.array([6, 10, 16, 26, 42])[(k + np.array([[0], [1], [3], [2]]) * (k // 5)) % 5]
    w, y = (HALF_SQUARE + y * y) * importance, y * np.array([8 / 9, 1, 8 / 7, 1])[k % 4]
    return np.stack([w, -2 * w * y, w * y * y], 2).astype(F)


@inline
def _rank_lines(extents, count, totals, tried):
    """Write the numbers of CANDIDATES lines: the best four of each lane, by the error for all queries of a place in it.

    It is between the center of its points and what is nearest to the middle of the queries within their extent.
    """
    worst, none = splat(f32x16, F(3e38)), splat(i32x16, 0)
    a = worst
    b = worst
    c = worst
    d = worst
    ai = none
    bi = none
    ci = none
    di = none
    for line in range(0, count, 16):
        error, number = splat(f32x16, F(0)), lanes16() + I32(line)
        for j in range(4):
            extent = extents + 12 * count * j + 4 * line
            w, wy = load(types.float32, totals, 8 * j), load(types.float32, totals, 8 * j + 4)
            v = vmin(vmax(load(f32x16, extent, 0), wy / w * F(-0.5)), load(f32x16, extent, 4 * count))
            v = v + (load(f32x16, extent, 8 * count) - v) * F(TO_CENTER)
            error = error + (v * w + wy) * v
        less = error < a
        a, error, ai, number = (
            select(less, error, a),
            select(less, a, error),
            select(less, number, ai),
            select(less, ai, number),
        )
        less = error < b
        b, error, bi, number = (
            select(less, error, b),
            select(less, b, error),
            select(less, number, bi),
            select(less, bi, number),
        )
        less = error < c
        c, error, ci, number = (
            select(less, error, c),
            select(less, c, error),
            select(less, number, ci),
            select(less, ci, number),
        )
        less = error < d
        d, di = select(less, error, d), select(less, number, di)
    store(tried, 0, ai)
    store(tried, 64, bi)
    store(tried, 128, ci)
    store(tried, 192, di)


@inline
def _least_errors(points, line, sample, ranges):
    """Return the least error of the points of a line for each of 16 queries, whose values are in four ranges."""
    least = splat(f32x16, F(3e38))
    for i in range(256 * line, 256 * (line + 1), 16):
        error = splat(f32x16, F(0))
        for j in range(4):
            terms, v = sample + 12 * SAMPLES * (4 * ranges[j] + j), load(types.float32, points, i + 4 * j)
            error = error + ((load(f32x16, terms, 0) * v + load(f32x16, terms, 4 * SAMPLES)) * v)
        least = vmin(error, least)
    for j in range(4):
        least = least + load(f32x16, sample, 12 * SAMPLES * (4 * ranges[j] + j) + 8 * SAMPLES)
    return least


@inline
def _suit(points, samples, ranges, tried, errors, suits):
    """Add how well each candidate suits each query: 1 that with the nearest point, others less."""
    for sample in range(samples, samples + 4 * SAMPLES, 64):
        best, weight = splat(f32x16, F(3e38)), splat(f32x16, F(0))
        for j in range(4):
            weight = weight + load(f32x16, sample, 12 * SAMPLES * (4 * ranges[j] + j))
        for k in range(CANDIDATES):
            error = _least_errors(points, load(types.int32, tried, 4 * k), sample, ranges)
            store(errors, 64 * k, error)
            best = vmin(error, best)
        slack = vmax(best, F(0)) + weight * F(SLACK / 4)
        for k in range(CANDIDATES):
            suit = slack / (slack + (load(f32x16, errors, 64 * k) - best) * F(SHARPNESS / 4))
            suit = suit * suit
            store(suits, 64 * k, load(f32x16, suits, 64 * k) + suit * suit)


@kernel
def list_lines(points, extents, samples, first, lists):
    """Write lists u16 [BUCKETS, LIST_LENGTH], of lines that are numbered from ``first`` on.

    points: f32 [lines, 16, 4]; extents: f32 [4, 3, lines], the least, the largest and the mean value of each of 4;
    samples: of ``_samples``.
    """
    totals, tried = np.empty((4, 2), np.float32), np.empty(CANDIDATES, np.int32)
    errors, suits = np.empty((CANDIDATES, 16), np.float32), np.empty((CANDIDATES, 16), np.float32)
    for bucket in range(BUCKETS):
        side = 2 * LEVELS
        ranges = bucket // side**3, bucket // side**2 % side, bucket // side % side, bucket % side
        for j in range(4):
            for k in range(2):
                totals[j, k] = 0
                for i in range(SAMPLES):
                    totals[j, k] += samples[ranges[j], j, k, i]
        _rank_lines(address(extents), extents.shape[2], address(totals), address(tried))
        suits[:] = 0
        _suit(address(points), address(samples), ranges, address(tried), address(errors), address(suits))
        for k in range(CANDIDATES):
            suits[k, 0] = hsum(load(f32x16, address(suits), 64 * k))
        for i in range(LIST_LENGTH):
            best = 0
            for k in range(1, CANDIDATES):
                best = k if suits[k, 0] > suits[best, 0] else best
            lists[bucket, i] = first + tried[best]
            suits[best, 0] = -1


def lines_near(points: npt.NDArray[np.int64], first: int) -> npt.NDArray[np.uint16]:
    """Return the lists of all buckets, u16 [BUCKETS, LIST_LENGTH], of lines of 16 of the points [16 lines, 4].

    ``first``: the number of the first line.
    """
    lines = points.astype(F).reshape(-1, 16, 4)
    extents = np.ascontiguousarray(np.stack([lines.min(1), lines.max(1), lines.sum(1) / F(16)]).transpose(2, 0, 1))
    lists = np.empty((BUCKETS, LIST_LENGTH), np.uint16)
    list_lines(lines, extents, _samples(), first, lists)
    return lists

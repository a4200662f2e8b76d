"""One block of keys and one tile of rows: scores, the running softmax, weighted values.

``many``: rows of q and the keys are transposed, 16 at a time, and multiplied by ``outer`` tiles; values are copied into
columns as wide as a tile, so that each stays in the L1 cache. ``few``: nothing is copied; keys and values are read in
place, and the next ones prefetched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from quantkit.kernels.cpu.attention.attention_tiles import (
    COLUMNS,
    KEYS,
    ROWS,
    add_tile,
    inner,
    inner_half,
    load_tile,
    outer,
    outer_half,
    store_sums,
    store_tile,
    zero_products,
    zero_strip,
    zero_tile,
)
from quantkit.kernels.cpu.attention.cache import BLOCK, F16, read_rows
from quantkit.kernels.cpu.core.functions import exp, load_part, store_part, tanh
from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import (
    convert,
    f32x16,
    hmax,
    hsum,
    i32x16,
    load,
    make_constant,
    prefetch_l2,
    select,
    splat,
    store,
    transpose16,
    vmax,
)

#: Rows of q of a tile.
TILE = 64
#: Products of a score that are summed in one accumulator.
SUMMED = 128

NONE = np.float32(-3.0e38)  # the maximum score without keys: finite, so that differences are never NaN

lanes = make_constant(i32x16, list(range(16)), "attention_lanes")


class Scoring(NamedTuple):
    """Transformation of a block's scores; start: its first key; is_adjusted: whether a softcap or a bias applies."""

    start: Any
    scale: Any
    softcap: Any
    is_adjusted: Any


class Source(NamedTuple):
    """Keys or values of a block that are read in place, ``stride`` bytes apart; kind: their type.

    following: the rows of the next block, n_bytes of each of which are prefetched.
    """

    address: Any
    stride: Any
    kind: Any
    following: Any
    n_bytes: Any


class Columns(NamedTuple):
    """Some columns of values: rows ``stride`` bytes apart, of vectors ``vector`` apart; half: in f16.

    following: the rows of the next block, n_bytes of each of which are prefetched.
    """

    address: Any
    stride: Any
    vector: Any
    half: Any
    following: Any
    n_bytes: Any


# ---------------------------------------------------------------- scratch
# Scratch of each thread, in order; k and v are the vectors of a head's key and value:
#     rows of the tile      [TILE] of 64 bytes each, see below
#     factors               [TILE] float32, the factor of o in a block
#     scores                [TILE][BLOCK]
#     sixteen               [16][k] vectors: 16 rows to transpose
#     q                     [TILE][k] vectors
#     keys                  [BLOCK][k] vectors
#     values                [BLOCK][v] vectors
#     o                     [TILE][v] vectors
# After all threads: parts [SPLIT_ROWS][SPLITS] of v + 1 vectors, o and then m and l.

FACTORS = 64 * TILE
SCORES = FACTORS + 4 * TILE
SIXTEEN = SCORES + 4 * TILE * BLOCK
#: Fields of a row: first and last visible position, head, token; m, l, slope of the bias, sum of the weights in the
#: last block; the address of the bias of key 0, or 0.
FIRST, LAST, HEAD, TOKEN, M, L, SLOPE, SUM, BIAS = range(0, 36, 4)


@inline
def q_at(k):
    return SIXTEEN + 1024 * k


@inline
def keys_at(k):
    return SIXTEEN + 1024 * k + 64 * TILE * k


@inline
def values_at(k):
    return SIXTEEN + 1024 * k + 64 * (TILE + BLOCK) * k


@inline
def o_at(k, v):
    return values_at(k) + 64 * BLOCK * v


@inline
def thread_bytes(k, v):
    return o_at(k, v) + 64 * TILE * v


@inline
def field(row, offset):
    """Return an integer field of a row."""
    return types.int64(load(types.int32, row, offset))


# ---------------------------------------------------------------- scores


@helper
def transpose_keys(source, row_bytes, kind, keys, n, scratch, panels):
    """Read ``keys`` keys and transpose them, 16 at a time: [keys / 16][n][16]."""
    k = (n + 15) // 16
    for first in range(0, keys, 16):
        read_rows(source + first * row_bytes, row_bytes, kind, min(16, keys - first), n, k, scratch)
        for j in range(k):
            transpose16(scratch, 64 * j, 64 * k, panels, 64 * (first * k + 16 * j))


@inline
def _score(tile, keys, key_stride, q, begin, end, scores):
    """Multiply columns begin..end of q and the keys of a tile; add the stored products of the columns before."""
    for i in range(begin, end):
        tile = outer(tile, keys + 64 * i, key_stride, q + 64 * i, 4)
    if begin > 0:
        tile = add_tile(tile, scores, 4 * BLOCK)
    store_tile(tile, scores, 4 * BLOCK)


@inline
def outer_scores(q, keys, k, n, first, last, scores):
    """Score ROWS rows (of a transposed panel of q) against the keys of vectors first..last.

    Sums cover SUMMED columns and are then added, or rounding errors grow with the square of the head's length.
    """
    v = first
    while v < last:
        wide = v + COLUMNS <= BLOCK // 16 and last - v > COLUMNS // 2
        for begin in range(0, n, SUMMED):
            end = min(n, begin + SUMMED)
            if wide:
                _score(zero_tile(), keys + 1024 * k * v, 1024 * k, q, begin, end, scores + 64 * v)
            else:
                _score(zero_strip(), keys + 1024 * k * v, 1024 * k, q, begin, end, scores + 64 * v)
        v += COLUMNS if wide else 1


@inline
def prefetch_row(address, n):
    for i in range(0, n, 64):
        prefetch_l2(address, i)


@inline
def _inner_scores(q, keys, k, first, last, scores, n_bytes):
    """Score ROWS rows (not transposed) against keys first..last, a ``Source``; prefetch n_bytes of the following."""
    stride = keys.stride
    for key in range(first, last, KEYS):
        k0 = keys.address + stride * key
        k1 = keys.address + stride * min(key + 1, last - 1)
        k2, k3 = keys.address + stride * min(key + 2, last - 1), keys.address + stride * min(key + 3, last - 1)
        tile = zero_products()
        if n_bytes > 0:
            for c in range(KEYS):
                prefetch_row(keys.following + n_bytes * (key + c), n_bytes)
        if keys.kind == F16:
            for j in range(k):
                tile = inner_half(tile, k0 + 32 * j, k1 + 32 * j, k2 + 32 * j, k3 + 32 * j, q + 64 * j, 64 * k)
        else:
            for j in range(k):
                tile = inner(tile, k0 + 64 * j, k1 + 64 * j, k2 + 64 * j, k3 + 64 * j, q + 64 * j, 64 * k)
        store_sums(tile, scores + 4 * key, 4 * BLOCK)


@inline
def _mask(s, key, first, end):
    """Set the scores of keys ``key``, ``key`` + 1, ... outside first..end to minus infinity."""
    columns = lanes() + types.int32(key)
    return select((columns >= types.int32(first)) & (columns < types.int32(end)), s, types.float32(-np.inf))


@helper
def _adjust(s, n0, n1, row, start, softcap):
    """Cap scores and add the bias by distance."""
    slope, last, biases = load(types.float32, row, SLOPE), field(row, LAST), load(types.int64, row, BIAS)
    for v in range(n0, n1):
        x = load(f32x16, s, 64 * v)
        if softcap > 0:
            x = tanh(x / softcap) * softcap
        distance = convert(f32x16, lanes() + types.int32(start + 16 * v - last))
        x = x + distance * slope
        if biases != 0:
            x = x + load(f32x16, biases, 4 * (start + 16 * v))
        store(s, 64 * v, x)


@helper
def _softmax(rows_at, factors, scores, n0, n1, scoring):
    """Turn the scores of ROWS rows for key vectors n0..n1 of a block into weights; update m, l and the factors."""
    start = scoring.start
    for r in range(ROWS):
        row, s = rows_at + 64 * r, scores + 4 * BLOCK * r
        first, end = field(row, FIRST) - start, field(row, LAST) - start + 1
        if scoring.is_adjusted:
            for v in range(n0, n1):
                store(s, 64 * v, load(f32x16, s, 64 * v) * scoring.scale)
            _adjust(s, n0, n1, row, start, scoring.softcap)
        factor = types.float32(1) if scoring.is_adjusted else scoring.scale
        largest = splat(f32x16, load(types.float32, row, M))
        for v in range(n0, n1):
            x = load(f32x16, s, 64 * v) * factor
            if first > 16 * v or end < 16 * v + 16:
                x = _mask(x, 16 * v, first, end)
            store(s, 64 * v, x)
            largest = vmax(x, largest)
        m = hmax(largest)
        store(factors, 4 * r, types.float32(load(types.float32, row, M) - m))
        store(row, M, m)
        total = splat(f32x16, 0.0)
        for v in range(n0, n1):
            p = exp(load(f32x16, s, 64 * v) - m)
            total = total + p
            store(s, 64 * v, p)
        store(row, SUM, hsum(total))
    f = exp(load_part(f32x16, factors, 0, ROWS))
    store_part(factors, 0, f, ROWS)
    for r in range(ROWS):
        row = rows_at + 64 * r
        before = load(types.float32, row, L) * load(types.float32, factors, 4 * r)
        store(row, L, types.float32(before + load(types.float32, row, SUM)))


@helper
def _key_range(rows_at, start):
    """Return the first and last + 1 key of a block visible to any of ROWS rows."""
    first, end = types.int64(BLOCK), types.int64(0)
    for r in range(ROWS):
        last = field(rows_at + 64 * r, LAST) - start + 1
        if last > 0:
            first = min(first, field(rows_at + 64 * r, FIRST) - start)
            end = max(end, last)
    return max(first, 0), min(end, BLOCK)


@helper
def many_scores(me, rows, k, n, scoring):
    """Compute the weights of all rows of a tile for a block of transposed keys."""
    for r in range(0, rows, ROWS):
        first, end = _key_range(me + 64 * r, scoring.start)
        if first >= end:
            continue
        scores, q = me + SCORES + 4 * BLOCK * r, me + q_at(k) + 1024 * k * (r // 16) + 4 * (r % 16)
        n0, n1 = first // 16, (end + 15) // 16
        outer_scores(q, me + keys_at(k), k, n, n0, n1, scores)
        _softmax(me + 64 * r, me + FACTORS + 4 * r, scores, n0, n1, scoring)


@helper
def few_scores(me, begin, rows, k, keys, scoring):
    """Compute the weights of rows begin..begin + rows for a block of keys, a ``Source``."""
    for r in range(begin, begin + rows, ROWS):
        first, end = _key_range(me + 64 * r, scoring.start)
        if first >= end:
            continue
        scores, q = me + SCORES + 4 * BLOCK * r, me + q_at(k) + 64 * k * r
        n0, n1 = first // 16, (end + 15) // 16
        _inner_scores(q, keys, k, 16 * n0, end, scores, keys.n_bytes if r == begin else 0)
        _softmax(me + 64 * r, me + FACTORS + 4 * r, scores, n0, n1, scoring)


@inline
def _weigh(tile, target, o_stride, weights, first, end, values):
    """Write a tile: factor * o + weights * values first..end, values a ``Columns``; prefetch what follows.

    target: address of o, of the factors.
    """
    o, factors = target
    tile = load_tile(tile, o, o_stride, factors)
    for i in range(first, end):
        prefetch_row(values.following + values.n_bytes * i, values.n_bytes)
        if values.half:
            tile = outer_half(tile, values.address + values.stride * i, values.vector, weights + 4 * i, 4 * BLOCK)
        else:
            tile = outer(tile, values.address + values.stride * i, values.vector, weights + 4 * i, 4 * BLOCK)
    store_tile(tile, o, o_stride)


@helper
def few_values(me, begin, rows, k, v, values, start):
    """o = factor * o + weights * values, for rows begin..begin + rows; values: a ``Source``."""
    half = values.kind == F16
    size, stride = 32 if half else 64, values.stride
    for j in range(0, v, COLUMNS):
        following = values.following + size * BLOCK * j
        for r in range(begin, begin + rows, ROWS):
            first, end = _key_range(me + 64 * r, start)
            if first >= end:
                continue
            first = first // 16 * 16
            weights, factors, o = me + SCORES + 4 * BLOCK * r, me + FACTORS + 4 * r, me + o_at(k, v) + 64 * v * r
            n_bytes = size * COLUMNS if r == begin and values.n_bytes > 0 else 0
            x, target = values.address + size * j, o + 64 * j
            if j + COLUMNS > v:
                for c in range(v - j):
                    columns = Columns(x + size * c, stride, size, half, 0, 0)
                    _weigh(zero_strip(), (target + 64 * c, factors), 64 * v, weights, first, end, columns)
            elif half:
                columns = Columns(x, stride, size, True, following, n_bytes)
                _weigh(zero_tile(), (target, factors), 64 * v, weights, first, end, columns)
            else:
                columns = Columns(x, stride, size, False, following, n_bytes)
                _weigh(zero_tile(), (target, factors), 64 * v, weights, first, end, columns)


@helper
def many_values(me, rows, k, v, start):
    """o = factor * o + weights * values, for all rows of a tile; values in columns of COLUMNS vectors."""
    j = 0
    while j < v:
        wide = j + COLUMNS <= v
        values, o = me + values_at(k) + 64 * BLOCK * j, me + o_at(k, v) + 64 * j
        for r in range(0, rows, ROWS):
            first, end = _key_range(me + 64 * r, start)
            if first >= end:
                continue
            first = first // 16 * 16
            weights = me + SCORES + 4 * BLOCK * r
            factors = me + FACTORS + 4 * r
            target = o + 64 * v * r
            if wide:
                columns = Columns(values, 64 * COLUMNS, 64, False, 0, 0)
                _weigh(zero_tile(), (target, factors), 64 * v, weights, first, end, columns)
            else:
                columns = Columns(values, 64, 64, False, 0, 0)
                _weigh(zero_strip(), (target, factors), 64 * v, weights, first, end, columns)
        j += COLUMNS if wide else 1

"""Sums over the rows of a value, accumulated over runs: the data of importance matrices.

    sum_columns     batch x width rows_of per sums count bad
    sum_columns_id  batch x width x_per plan n_expert sums counts bad
    count_up        batch out first n_used rows_of

Each column has the sum of x^2 and that of x; each expert, the sums over the rows routed to it. sums: float64
[n_mat, 4, columns], columns a multiple of COLUMNS: high and low part of the sum of squares, then of the sum. The square
of a float32 is exact in float64, and TwoSum keeps in the low part the rounding error of each addition, so the relative
error is about 2^-66 after a million rows (Ogita, Rump, Oishi 2005, Sum2), and the sum rounded to float32 does not
depend on the order of rows, on threads or on batches. count: int64 number of rows; counts: int64 [n_expert].

bad: int64 [threads], 1 + the first non-finite row that a thread found, or 0. A thread searches for it only once its
sums are no longer finite, so finite rows cost nothing; the sums are then invalid.

Threads share the columns. Rows come in tiles of TILE: sums are loaded and stored once a tile, and rows are still in
L1 for the next columns. x_per: n_used if x has one row per token, 1 if one per pair (moe.py defines the plan).
"""

from __future__ import annotations

from numba.core import types

from quantkit.kernels.cpu.core.functions import load_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import any_lane, convert, f32x8, f64x8, load, store
from quantkit.kernels.cpu.core.tape import arg, batch_word, first_of, operation
from quantkit.kernels.cpu.matmul.moe import _STARTS, _USED, int_at

#: Columns of a step and rows of a tile.
COLUMNS, TILE = 8, 32


@inline
def _rounded_off(a, b, s):
    """Return the rounding error of s = a + b (Knuth's TwoSum), for any magnitudes."""
    b_virtual = s - a
    return (a - (s - b_virtual)) + (b - b_virtual)


@inline
def _columns(x, n):
    """Return the first n of 8 columns, as float64."""
    if n >= COLUMNS:
        return convert(f64x8, load(f32x8, x, 0))
    return convert(f64x8, load_part(f32x8, x, 0, n))


@inline
def _row_of(rows, row, x_per):
    """Return the row of x: ``row`` itself, or that of a pair of the plan."""
    return int_at(rows, row) // x_per if rows != 0 else row


@inline
def _sum_block(x, stride, rows, first, end, x_per, n, sums, plane):
    """Add rows first..end of n columns to their sums; return whether the sums are finite."""
    high, low = load(f64x8, sums, 0), load(f64x8, sums, plane)
    high1, low1 = load(f64x8, sums, 2 * plane), load(f64x8, sums, 3 * plane)
    for row in range(first, end):
        v = _columns(x + stride * _row_of(rows, row, x_per), n)
        square = v * v
        s = high + square
        low += _rounded_off(high, square, s)
        high = s
        s1 = high1 + v
        low1 += _rounded_off(high1, v, s1)
        high1 = s1
    store(sums, 0, high)
    store(sums, plane, low)
    store(sums, 2 * plane, high1)
    store(sums, 3 * plane, low1)
    zero = high - high  # NaN if it is not finite
    return not any_lane(zero != zero)


@inline
def _first_bad(x, stride, rows, first, end, x_per, n):
    """Return the first row with a non-finite value among n columns, or -1."""
    for row in range(first, end):
        row_at = x + stride * _row_of(rows, row, x_per)
        for i in range(n):
            v = load(types.float32, row_at, 4 * i)
            if v - v != 0.0:
                return row
    return -1


@inline
def _sum_rows(x, width, rows, first, end, x_per, sums, bad, tid, nth):
    """Add rows first..end to this thread's columns of the sums of one matrix."""
    blocks = (width + COLUMNS - 1) // COLUMNS
    begin, stop = first_of(blocks, tid, nth), first_of(blocks, tid + 1, nth)
    plane = 8 * COLUMNS * blocks
    for tile in range(first, end, TILE):
        tile_end = min(tile + TILE, end)
        for block in range(begin, stop):
            source, n = x + 4 * COLUMNS * block, min(COLUMNS, width - COLUMNS * block)
            fine = _sum_block(source, 4 * width, rows, tile, tile_end, x_per, n, sums + 8 * COLUMNS * block, plane)
            if not fine and load(types.int64, bad, 8 * tid) == 0:
                row = _first_bad(source, 4 * width, rows, tile, tile_end, x_per, n)
                if row >= 0:
                    store(bad, 8 * tid, types.int64(1 + (int_at(rows, row) if rows != 0 else row)))


_X, _WIDTH, _ROWS_OF, _PER, _SUMS, _COUNT, _BAD = range(1, 8)


@operation("batch x width rows_of per sums count bad")
def sum_columns(args, tid, nth):
    """Add all rows of x; bad holds a row of x."""
    n = batch_word(args, arg(args, _ROWS_OF)) * arg(args, _PER)
    _sum_rows(arg(args, _X), arg(args, _WIDTH), 0, 0, n, 1, arg(args, _SUMS), arg(args, _BAD), tid, nth)
    if tid == 0:
        count = arg(args, _COUNT)
        store(count, 0, types.int64(load(types.int64, count, 0) + n))


_X_PER, _PLAN, _N_EXPERT, _ID_SUMS, _COUNTS, _ID_BAD = range(3, 9)


@operation("batch x width x_per plan n_expert sums counts bad")
def sum_columns_id(args, tid, nth):
    """Add the row of x of every pair to the sums of its expert; bad holds a pair."""
    plan = arg(args, _PLAN)
    n_expert = arg(args, _N_EXPERT)
    width = arg(args, _WIDTH)
    used = plan + 4 * (_STARTS + n_expert + 2)
    pairs, counts = used + 4 * n_expert, arg(args, _COUNTS)
    sums_bytes = 32 * COLUMNS * ((width + COLUMNS - 1) // COLUMNS)
    for i in range(int_at(plan, _USED)):
        e = int_at(used, i)
        first, end = int_at(plan, _STARTS + e), int_at(plan, _STARTS + e + 1)
        sums, bad = arg(args, _ID_SUMS) + sums_bytes * e, arg(args, _ID_BAD)
        _sum_rows(arg(args, _X), width, pairs, first, end, arg(args, _X_PER), sums, bad, tid, nth)
        if tid == 0:
            store(counts, 8 * e, types.int64(load(types.int64, counts, 8 * e) + end - first))


_IDS, _FIRST_EXPERT, _N_USED, _IDS_ROWS_OF = range(1, 5)


@operation("batch out first n_used rows_of")
def count_up(args, tid, nth):
    """Set every row of out, int32 [rows, n_used], to first, first + 1, ...: routes each token to these experts."""
    if tid == 0:
        n_used = arg(args, _N_USED)
        for row in range(batch_word(args, arg(args, _IDS_ROWS_OF))):
            for j in range(n_used):
                offset = 4 * (row * n_used + j)
                store(arg(args, _IDS), offset, types.int32(arg(args, _FIRST_EXPERT) + j))

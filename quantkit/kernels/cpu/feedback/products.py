"""Products of matrices, the same bits on every CPU and GPU: covariances of two streams, and corrections.

Those of a BLAS depend on its number of threads. Here a sum is taken in the order of its terms, of up to
``ROWS_AT_ONCE`` rows in float32, of these sums in float64; threads share columns of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline, kernel
from quantkit.kernels.cpu.core.simd import convert, f32x16, f64x8, f64x16, load, muladd, splat, store
from quantkit.kernels.cpu.feedback.factor import cholesky
from quantkit.kernels.cpu.feedback.tiles import ROWS, multiply

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
F = np.float32

#: Rows whose products are added in float32; columns of a strip, of the first factor and of the second.
ROWS_AT_ONCE = 256
FIRST = 4
SECOND = 32
#: Columns per thread at a time; rows of a triangle that are solved before the remaining rows are updated.
SHARE, BLOCK = 64, 64


# ---------------------------------------------------------------- sums of products


class Products:
    """The sums of x^T x, ``square``, and of z^T x, ``cross``, float64 [n, n] and [m, n], over rows that come in order.

    n is a multiple of 32, m of 4. ``square`` holds only the upper triangle until ``finish``.
    """

    def __init__(self, n: int, m: int, threads: int) -> None:
        self.n, self._threads = n, threads
        self.square, self.cross = np.zeros((n, n)), np.zeros((m, n))

    def add(self, x: F32, z: F32) -> None:
        """Add rows x and z, float32 [rows, n] and [rows, m]."""
        right = _pack_rows(x, SECOND)
        left = _pack_rows(x, FIRST)
        cross = _pack_rows(z, FIRST)

        def part(begin: int, end: int) -> None:
            _add_products(self.square, left, right, begin // SECOND, end // SECOND, True)
            _add_products(self.cross, cross, right, begin // SECOND, end // SECOND, False)

        _share(part, self.n, self._threads)

    def finish(self) -> None:
        """Copy the upper triangle to the lower."""
        self.square = np.triu(self.square) + np.triu(self.square, 1).T


def _pack_rows(rows: F32, width: int) -> F32:
    """Return rows as strips of columns, by runs of ``ROWS_AT_ONCE``, float32 [runs, strips, rows, width]."""
    runs = -(-len(rows) // ROWS_AT_ONCE)
    panels = np.zeros((runs, rows.shape[1] // width, ROWS_AT_ONCE, width), np.float32)
    _pack(np.ascontiguousarray(rows), panels)
    return panels


@kernel
def _pack(rows: F32, panels: F32) -> None:
    strips, width = panels.shape[1], panels.shape[3]
    for k in range(len(rows)):
        run, row = k // ROWS_AT_ONCE, k % ROWS_AT_ONCE
        for strip in range(strips):
            for i in range(width):
                panels[run, strip, row, i] = rows[k, width * strip + i]


@kernel
def _add_products(c: F64, left: F32, right: F32, begin: int, end: int, upper: bool) -> None:
    """Add left^T right to the columns of strips ``begin`` to ``end`` of c; ``upper``: only above the diagonal."""
    n = c.shape[1]
    for run in range(len(right)):
        for strip in range(begin, end):
            last = min((strip + 1) * SECOND, n) if upper else len(c)
            right_at = 4 * SECOND * ROWS_AT_ONCE * (run * right.shape[1] + strip)
            for j in range(0, last, FIRST):
                left_at = 4 * FIRST * ROWS_AT_ONCE * (run * left.shape[1] + j // FIRST)
                _add_tile(c, 8 * (n * j + SECOND * strip), left, left_at, right, right_at)


@inline
def _add_tile(c: Any, c_at: Any, left: Any, left_at: Any, right: Any, right_at: Any) -> Any:
    """Add the products of a run of rows to four rows of c, of a strip's columns."""
    n = c.shape[1]
    zero = splat(f32x16, F(0))
    a0 = zero
    a1 = zero
    b0 = zero
    b1 = zero
    c0 = zero
    c1 = zero
    d0 = zero
    d1 = zero
    for k in range(ROWS_AT_ONCE):
        x0, x1 = load(f32x16, right, right_at + 4 * SECOND * k), load(f32x16, right, right_at + 4 * SECOND * k + 64)
        w = splat(f32x16, load(types.float32, left, left_at + 16 * k))
        a0, a1 = muladd(x0, w, a0), muladd(x1, w, a1)
        w = splat(f32x16, load(types.float32, left, left_at + 16 * k + 4))
        b0, b1 = muladd(x0, w, b0), muladd(x1, w, b1)
        w = splat(f32x16, load(types.float32, left, left_at + 16 * k + 8))
        c0, c1 = muladd(x0, w, c0), muladd(x1, w, c1)
        w = splat(f32x16, load(types.float32, left, left_at + 16 * k + 12))
        d0, d1 = muladd(x0, w, d0), muladd(x1, w, d1)
    for row, (low, high) in enumerate(((a0, a1), (b0, b1), (c0, c1), (d0, d1))):
        row_at = c_at + 8 * n * row
        store(c, row_at, load(f64x16, c, row_at) + convert(f64x16, low))
        store(c, row_at + 128, load(f64x16, c, row_at + 128) + convert(f64x16, high))


# ---------------------------------------------------------------- solving


def times_inverse(cross: F64, covariance: F64, damping: float, threads: int = 1) -> F64:
    """Return ``cross`` (covariance + damping * its mean diagonal)^-1, float64 [m, n].

    Raises numpy.linalg.LinAlgError if that is not positive definite.
    """
    n = len(covariance)
    r = np.triu(cholesky(covariance + damping * np.diagonal(covariance).mean() * np.eye(n), threads))
    lower, solution = np.ascontiguousarray(r.T), np.array(cross.T, order="C")
    _share(lambda first, last: _solve(r, lower, solution, first, last), solution.shape[1], threads)
    return solution.T


def _share(work: Callable[[int, int], None], n: int, threads: int) -> None:
    """Do some columns at a time of n."""
    if threads == 1:
        for first in range(0, n, SHARE):
            work(first, min(first + SHARE, n))
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda first: work(first, min(first + SHARE, n)), range(0, n, SHARE)))


@kernel
def _solve(r: F64, lower: F64, x: F64, first: int, last: int) -> None:
    """Solve R^T R X = B for columns ``first`` to ``last``, multiples of 16, of X, which holds B before."""
    n = len(r)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for k in range(begin, end):
            _scale_row(x, k, 1.0 / r[k, k], first, last)
            for j in range(k + 1, end):
                _subtract_row(x, j, k, r[k, j], first, last)
        _subtract(x, r, begin, end, end, n, first, last)
    for block in range((n - 1) // BLOCK, -1, -1):
        begin, end = BLOCK * block, min(BLOCK * (block + 1), n)
        for k in range(end - 1, begin - 1, -1):
            _scale_row(x, k, 1.0 / r[k, k], first, last)
            for j in range(begin, k):
                _subtract_row(x, j, k, lower[k, j], first, last)
        _subtract(x, lower, begin, end, 0, begin, first, last)


@helper
def _scale_row(x: F64, k: int, factor: float, first: int, last: int) -> None:
    for i in range(first, last):
        x[k, i] *= factor


@helper
def _subtract_row(x: F64, j: int, k: int, times: float, first: int, last: int) -> None:
    factor, n = splat(f64x8, -times), x.shape[1]
    for i in range(first, last, 8):
        target = 8 * (n * j + i)
        store(x, target, muladd(load(f64x8, x, 8 * (n * k + i)), factor, load(f64x8, x, target)))


@helper
def _subtract(x: F64, a: F64, begin: int, end: int, row: int, stop: int, first: int, last: int) -> None:
    """x[row:stop] -= a[begin:end, row:stop]^T x[begin:end], four rows at a time."""
    n = x.shape[1]
    for i in range(first, last, 16):
        for j in range(row, stop, 4):
            offset = 8 * (n * j + i)
            line = 8 * n
            a0, a1 = load(f64x8, x, offset), load(f64x8, x, offset + 64)
            b0, b1 = load(f64x8, x, offset + line), load(f64x8, x, offset + line + 64)
            c0, c1 = load(f64x8, x, offset + 2 * line), load(f64x8, x, offset + 2 * line + 64)
            d0, d1 = load(f64x8, x, offset + 3 * line), load(f64x8, x, offset + 3 * line + 64)
            for k in range(begin, end):
                x0, x1 = load(f64x8, x, 8 * (n * k + i)), load(f64x8, x, 8 * (n * k + i) + 64)
                w = splat(f64x8, -a[k, j])
                a0, a1 = muladd(x0, w, a0), muladd(x1, w, a1)
                w = splat(f64x8, -a[k, j + 1])
                b0, b1 = muladd(x0, w, b0), muladd(x1, w, b1)
                w = splat(f64x8, -a[k, j + 2])
                c0, c1 = muladd(x0, w, c0), muladd(x1, w, c1)
                w = splat(f64x8, -a[k, j + 3])
                d0, d1 = muladd(x0, w, d0), muladd(x1, w, d1)
            store(x, offset, a0)
            store(x, offset + 64, a1)
            store(x, offset + line, b0)
            store(x, offset + line + 64, b1)
            store(x, offset + 2 * line, c0)
            store(x, offset + 2 * line + 64, c1)
            store(x, offset + 3 * line, d0)
            store(x, offset + 3 * line + 64, d1)


# ---------------------------------------------------------------- targets


def correct(x: F32, correction: F32) -> F32:
    """Return rows x + x M, float32 [rows, n]; M is packed (tiles.py)."""
    out = np.empty_like(x)
    for first in range(0, len(x), ROWS):
        rows = x[first : first + ROWS]
        tile = np.zeros((x.shape[1], ROWS), np.float32)
        tile[:, : len(rows)] = rows.T
        targets = tile.copy()
        _correct(targets, correction, tile)
        out[first : first + ROWS] = targets[:, : len(rows)].T
    return out


@kernel
def _correct(targets: F32, correction: F32, tile: F32) -> None:
    n = len(tile)
    multiply(targets, correction, tile, n, 0, n, 0, n)

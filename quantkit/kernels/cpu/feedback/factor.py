"""Cholesky decomposition of a covariance, the same bits on every CPU and GPU.

LAPACK's depends on its number of threads. Here every sum is taken in the order of its terms, blocks of ``BLOCK`` rows
at a time, with float64 throughout. A block is factored ``INNER`` rows at a time; then it is packed, and the rows below
are updated with ``TALL`` rows by ``WIDE`` columns in registers.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import FEATURES, f64x8, load, muladd, splat, store
from quantkit.kernels.cpu.feedback.tiles import make_registers

F64 = npt.NDArray[np.float64]

BLOCK = 64
INNER = 16
LANES = 8
TALL, WIDE = 8, 2 * LANES
_STEP = 8 * LANES
#: Vectors and rows of a tile: as many as registers allow.
_VECTORS, _ROWS = (2, 8) if "avx512f" in FEATURES else (1, 4)
_load_tile, _store_tile, _add_products = make_registers(f64x8, _VECTORS, _ROWS, "f64")


@inline
def _factor_inner(r: Any, begin: Any, end: Any) -> Any:
    """Factor rows ``begin`` to ``end`` of R, which are up to date; return the row that is not positive, or -1."""
    n = r.shape[1]
    for k in range(begin, end):
        pivot = r[k, k]
        if not pivot > 0.0:
            return k
        inverse = 1.0 / math.sqrt(pivot)
        for i in range(k, n):
            r[k, i] *= inverse
        for j in range(k + 1, end):
            factor = splat(f64x8, -r[k, j])
            for offset in range(8 * (j // LANES * LANES), 8 * n, _STEP):
                target = 8 * n * j + offset
                store(r, target, muladd(load(f64x8, r, 8 * n * k + offset), factor, load(f64x8, r, target)))
    return -1


@inline
def _update_two(r: Any, n: Any, begin: Any, end: Any, j: Any) -> Any:
    """Update rows j and j + 1, from the columns of j on."""
    for offset in range(16 * LANES * (j // (2 * LANES)), 8 * n, 2 * _STEP):
        a, b = 8 * n * j + offset, 8 * n * (j + 1) + offset
        a0 = load(f64x8, r, a)
        a1 = load(f64x8, r, a + _STEP)
        b0 = load(f64x8, r, b)
        b1 = load(f64x8, r, b + _STEP)
        for k in range(begin, end):
            row = 8 * n * k
            x0, x1 = load(f64x8, r, row + offset), load(f64x8, r, row + offset + _STEP)
            first = splat(f64x8, -load(types.float64, r, row + 8 * j))
            second = splat(f64x8, -load(types.float64, r, row + 8 * j + 8))
            a0, a1 = muladd(x0, first, a0), muladd(x1, first, a1)
            b0, b1 = muladd(x0, second, b0), muladd(x1, second, b1)
        store(r, a, a0)
        store(r, a + _STEP, a1)
        store(r, b, b0)
        store(r, b + _STEP, b1)


@kernel
def _factor_rows(r: F64, begin: int, end: int) -> int:
    """Factor rows ``begin`` to ``end`` of R, which are up to date; return the row that is not positive, or -1."""
    n = r.shape[1]
    for first in range(begin, end, INNER):
        last = min(first + INNER, end)
        bad: int = _factor_inner(r, first, last)
        if bad >= 0:
            return bad
        for j in range(last, end, 2):
            _update_two(r, n, first, last, j)
    return -1


@kernel
def _pack(r: F64, begin: int, end: int, tall: F64, wide: F64) -> None:
    """Pack the columns behind ``end`` of rows ``begin`` to ``end``: negative in ``tall``, and in ``wide``."""
    for i in range(end // WIDE, r.shape[1] // WIDE):
        for k in range(begin, end):
            for c in range(WIDE):
                x = r[k, WIDE * i + c]
                wide[i, k - begin, c] = x
                tall[2 * i + c // TALL, k - begin, c % TALL] = -x


@kernel
def _update(r: F64, count: int, tall: F64, wide: F64, first: int, last: int) -> None:
    """Subtract the products of ``count`` packed rows from rows ``first`` to ``last`` of R, multiples of ``TALL``."""
    n = r.shape[1]
    for i in range(first // WIDE, n // WIDE):
        for j in range(first, min(last, WIDE * i + WIDE), _ROWS):
            for part in range(0, 8 * WIDE, _STEP * _VECTORS):
                target = 8 * (n * j + WIDE * i) + part
                tile = _load_tile(r, target, 8 * n)
                wide_at, place = 8 * WIDE * BLOCK * i + part, 8 * (TALL * BLOCK * (j // TALL) + j % TALL)
                for k in range(count):
                    tile = _add_products(tile, wide, wide_at + 8 * WIDE * k, tall, place + 8 * TALL * k)
                _store_tile(r, target, 8 * n, tile)


def cholesky(r: F64, threads: int = 1) -> F64:
    """Make a matrix [n, n], n a multiple of 16, the upper triangular R with R^T R = the matrix, in place; return it.

    What is below the diagonal is undefined. Raises numpy.linalg.LinAlgError if it is not positive definite.
    """
    n = len(r)
    tall, wide = np.empty((n // TALL, BLOCK, TALL)), np.empty((n // WIDE, BLOCK, WIDE))
    with ThreadPoolExecutor(threads) as pool:
        for begin in range(0, n, BLOCK):
            end = min(begin + BLOCK, n)
            bad = _factor_rows(r, begin, end)
            if bad >= 0:
                raise np.linalg.LinAlgError(f"not positive definite: column {bad} of {n}")
            _pack(r, begin, end, tall, wide)
            shares = _shares(end, n, threads)
            list(pool.map(lambda part, count=end - begin: _update(r, count, tall, wide, *part), shares))
    return r


def _shares(first: int, n: int, threads: int) -> list[tuple[int, int]]:
    """Cut rows ``first`` to ``n`` of a triangle into parts of equal area."""
    left = n - first
    edges = [first + round(left * (1 - math.sqrt(1 - i / threads)) / TALL) * TALL for i in range(threads)] + [n]
    return [(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True) if a < b]

"""Tiles of rows, and products of them with matrices that all rows share.

Rows are lanes: of a tile of ``ROWS`` rows, each array is float32 [columns, ROWS]. A shared matrix is packed in strips
of four columns. Every sum is taken in the order of its terms, so a row's result depends on nothing but the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32x16, load, muladd, splat, store

F32 = npt.NDArray[np.float32]

LANES = 16
#: Rows of a tile, and their bytes; two vectors are multiplied together.
ROWS = 64
LINE, PAIR = 4 * ROWS, 8 * LANES
#: Columns of a strip of a packed matrix.
STRIP = 4


def pack_columns(matrix: npt.NDArray[np.floating[Any]]) -> F32:
    """Return a matrix [n, n] as strips of four columns, float32 [n / 4, n, 4]; n is a multiple of 4."""
    n = len(matrix)
    return np.ascontiguousarray(matrix.reshape(n, n // STRIP, STRIP).transpose(1, 0, 2), np.float32)


@inline
def multiply(c: Any, a: Any, e: Any, n: Any, k0: Any, k1: Any, j0: Any, j1: Any) -> Any:
    """c[j] += sum of a[k, j] e[k], for columns j0 to j1, over the columns k from k0 to k1."""
    for strip in range(j0 // STRIP, j1 // STRIP):
        base = 16 * strip * n
        for half in range(0, LINE, PAIR):
            at0 = LINE * STRIP * strip + half
            at1, at2, at3 = at0 + LINE, at0 + 2 * LINE, at0 + 3 * LINE
            c00, c01 = load(f32x16, c, at0), load(f32x16, c, at0 + 64)
            c10, c11 = load(f32x16, c, at1), load(f32x16, c, at1 + 64)
            c20, c21 = load(f32x16, c, at2), load(f32x16, c, at2 + 64)
            c30, c31 = load(f32x16, c, at3), load(f32x16, c, at3 + 64)
            for k in range(k0, k1):
                place, line = base + 16 * k, LINE * k + half
                e0, e1 = load(f32x16, e, line), load(f32x16, e, line + 64)
                w = splat(f32x16, load(types.float32, a, place))
                c00, c01 = muladd(e0, w, c00), muladd(e1, w, c01)
                w = splat(f32x16, load(types.float32, a, place + 4))
                c10, c11 = muladd(e0, w, c10), muladd(e1, w, c11)
                w = splat(f32x16, load(types.float32, a, place + 8))
                c20, c21 = muladd(e0, w, c20), muladd(e1, w, c21)
                w = splat(f32x16, load(types.float32, a, place + 12))
                c30, c31 = muladd(e0, w, c30), muladd(e1, w, c31)
            store(c, at0, c00)
            store(c, at0 + 64, c01)
            store(c, at1, c10)
            store(c, at1 + 64, c11)
            store(c, at2, c20)
            store(c, at2 + 64, c21)
            store(c, at3, c30)
            store(c, at3 + 64, c31)


@inline
def element(a: Any, n: Any, k: Any, j: Any) -> Any:
    """Return a[k, j] of a packed matrix, in all lanes."""
    return splat(f32x16, load(types.float32, a, 16 * (j // STRIP) * n + 16 * k + 4 * (j % STRIP)))

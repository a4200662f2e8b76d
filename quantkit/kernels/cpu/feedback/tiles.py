"""Tiles of rows, and products of them with matrices that all rows share.

Rows are lanes: of a tile of ``ROWS`` rows, each array is float32 [columns, ROWS]. A shared matrix is packed in strips
of four columns. Every sum is taken in the order of its terms, so a row's result depends only on the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.core.types.containers import UniTuple

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import (
    FEATURES,
    VecType,
    _muladd,
    _pointer,
    _splat,
    emits,
    f32x16,
    load,
    splat,
    transpose16_apart,
)

F32 = npt.NDArray[np.float32]

LANES = 16
#: Rows of a tile, and their bytes.
ROWS = 64
LINE = 4 * ROWS
#: Columns of a strip of a packed matrix, and rows of it that are multiplied before the next strip: their part of a tile
#: stays in the L1 cache.
STRIP, CHUNK = 4, 64
#: Vectors of a column that are multiplied together: with 32 registers, all.
VECTORS = ROWS // LANES if "avx512f" in FEATURES else 1


def make_registers(vt: VecType, vectors: int, columns: int, name: str) -> tuple[Any, Any, Any]:
    """Return intrinsics over ``vectors`` vectors of each of some columns, which stay in registers.

    ``load_tile(c, byte, stride)`` and ``store_tile(c, byte, stride, tile)``: columns are ``stride`` bytes apart.
    ``add_products(tile, e, byte, a, place)`` adds the vectors at ``byte`` of e times the scalar of each column,
    neighbours at ``place`` of a.
    """
    tile = UniTuple(vt, vectors * columns)
    nbytes = 64
    element = vt.elem.bitwidth // 8

    def places(b: Any, buffer: Any, offset: Any, stride: Any) -> list[Any]:
        starts = [b.add(offset, b.mul(stride, stride.type(j))) for j in range(columns)]
        return [_pointer(b, buffer, b.add(x, x.type(nbytes * i)), vt.ll) for x in starts for i in range(vectors)]

    @emits(lambda c, offset, stride: tile(c, types.intp, types.intp), f"get_{name}")
    def load_tile(b, sig, c, offset, stride):
        return [b.load(p, align=1) for p in places(b, c, offset, stride)]

    @emits(lambda c, offset, stride, values: types.void(c, types.intp, types.intp, tile), f"put_{name}")
    def store_tile(b, sig, c, offset, stride, values):
        for p, value in zip(places(b, c, offset, stride), values, strict=True):
            b.store(value, p, align=1)

    @emits(lambda values, e, offset, a, place: tile(tile, e, types.intp, a, types.intp), f"add_{name}")
    def add_products(b, sig, values, e, offset, a, place):
        x = [b.load(_pointer(b, e, b.add(offset, offset.type(nbytes * i)), vt.ll), align=1) for i in range(vectors)]
        out = []
        for j in range(columns):
            scalar = b.load(_pointer(b, a, b.add(place, place.type(element * j)), vt.ll.element), align=1)
            factor = _splat(b, scalar, vt.lanes)
            out += [_muladd(b, x[i], factor, values[vectors * j + i]) for i in range(vectors)]
        return out

    return load_tile, store_tile, add_products


get_tile, put_tile, add_products = make_registers(f32x16, VECTORS, STRIP, "f32")


def pack_columns(matrix: npt.NDArray[np.floating[Any]]) -> F32:
    """Return a matrix [n, n] as strips of four columns, float32 [n / 4, n, 4]; n is a multiple of 4."""
    n = len(matrix)
    return np.ascontiguousarray(matrix.reshape(n, n // STRIP, STRIP).transpose(1, 0, 2), np.float32)


def pack_upper(upper: npt.NDArray[np.float64]) -> F32:
    """Return the upper triangle as ``pack_columns`` does, each column over its diagonal element."""
    n, step = len(upper), 64 * STRIP
    out = np.zeros((n // STRIP, n, STRIP), np.float32)
    for begin in range(0, n, step):
        end = min(begin + step, n)
        part = upper[:end, begin:end].copy()
        part /= np.diagonal(upper)[begin:end]
        part[begin:] = np.triu(part[begin:])
        out[begin // STRIP : end // STRIP, :end] = part.reshape(end, -1, STRIP).transpose(1, 0, 2)
    return out


@kernel
def to_lanes(rows: F32, out: F32) -> None:
    """Set ``out`` [n, ROWS] to ``rows`` [ROWS, n] transposed; n is a multiple of 16."""
    n = rows.shape[1]
    for k in range(0, n, LANES):
        for row in range(0, ROWS, LANES):
            transpose16_apart(rows, 4 * (n * row + k), 4 * n, out, LINE * k + 4 * row, LINE)


@kernel
def codes_of_levels(levels: F32, code: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    """Set ``out`` [ROWS, n] to the codes of levels [n, ROWS]: integers, -128 to 127. code: by level & 255."""
    n = len(levels)
    for begin in range(0, n, 64):
        for row in range(ROWS):
            for k in range(begin, min(begin + 64, n)):
                out[row, k] = code[np.int64(levels[k, row]) & 255]


@inline
def multiply_part(c: Any, c0: Any, a: Any, e: Any, e0: Any, n: Any, k0: Any, k1: Any, j0: Any, j1: Any) -> Any:
    """Do ``multiply`` with c and e that begin with columns c0 and e0."""
    for first in range(k0, k1, CHUNK):
        last = min(first + CHUNK, k1)
        for strip in range(j0 // STRIP, j1 // STRIP):
            for part in range(0, LINE, 64 * VECTORS):
                target = LINE * (STRIP * strip - c0) + part
                tile = get_tile(c, target, LINE)
                for k in range(first, last):
                    tile = add_products(tile, e, LINE * (k - e0) + part, a, 16 * (n * strip + k))
                put_tile(c, target, LINE, tile)


@inline
def multiply(c: Any, a: Any, e: Any, n: Any, k0: Any, k1: Any, j0: Any, j1: Any) -> Any:
    """c[j] += sum of a[k, j] e[k], for columns j0 to j1, over the columns k from k0 to k1."""
    multiply_part(c, 0, a, e, 0, n, k0, k1, j0, j1)


@inline
def element(a: Any, n: Any, k: Any, j: Any) -> Any:
    """Return a[k, j] of a packed matrix, in all lanes."""
    return splat(f32x16, load(types.float32, a, 16 * (j // STRIP) * n + 16 * k + 4 * (j % STRIP)))

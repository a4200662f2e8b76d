"""IQ1_KT, IQ2_KT, IQ3_KT, IQ4_KT of ik_llama.cpp: the nearest of many pseudo-random points to 8 or 4 values.

Layouts and the generator of points are in cpu/unpack/trellis.py. The error weighs values as ik_llama.cpp does: by
importance * sqrt(2 m + x^2), without importances by m / 2 + x^2, m the mean square of 256 values; 1e-4 where values or
weights are almost 0. Its bytes depend on its CPU's vectors, and its search leaves errors that are up to twice the least
possible, so it is not repeated here. This one:

1. guesses the scale of 32 values from their fourth powers, and from all guesses and a typical error for too small and
   too large scales the scale d of the row (for rows with outliers: three);
2. finds for each 32 values the errors of several levels of the scale around the guess, either sign, either codebook;
3. searches the points for the best of these levels more widely; other levels may use the same points better;
4. fits d to the points and keeps the best d of a row.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, QuantizerIQKT::set_weights and quantize_row_iq*_kt_impl.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import frexp
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline, kernel, specialize
from quantkit.kernels.cpu.core.simd import (
    extract,
    f32x4,
    f32x8,
    f32x16,
    hmax,
    hmin,
    hsum,
    i8x8,
    load,
    make_constant,
    select,
    splat,
    store,
    vabs,
    vmax,
    vsqrt,
)
from quantkit.kernels.cpu.encode import Encoder
from quantkit.kernels.cpu.encode import trellis_search as points
from quantkit.kernels.cpu.encode.groups import address
from quantkit.kernels.cpu.encode.i_quants import VALUES
from quantkit.kernels.cpu.encode.trellis_codebook import codebook
from quantkit.kernels.cpu.encode.trellis_search import best_lane
from quantkit.types import BY_NAME

F, I32 = np.float32, np.int32

codebook_values = make_constant(f32x16, VALUES, "trellis_scales")
up_to_15 = make_constant(f32x16, range(16), "trellis_up_to_15")

# ---------------------------------------------------------------- weights

#: Below these, values or weights are almost 0; and what weights become.
ALMOST_0, LEAST = 1e-14, 1e-4


@inline
def _fill(w, at, count, value):
    for i in range(at, at + 4 * count, 64):
        store(w, i, splat(f32x16, F(min(value, 1e30))))


@inline
def _weigh_by_importance(x, w, importance, sigma2, unit, top):
    """Write the weights of 32 values; x is in units of ``unit``, weights are in units of ``top``."""
    wx = w2 = x2 = splat(f32x16, F(0))
    for i in range(0, 128, 64):
        v = load(f32x16, x, i)
        weight = (load(f32x16, importance, i) * F(1 / top)) * vsqrt(sigma2 + v * v)
        store(w, i, weight)
        wx, w2, x2 = wx + weight * vabs(v), w2 + weight * weight, x2 + v * v
    both = top * unit
    dead = np.float64(hsum(x2)) * unit * unit < ALMOST_0 or np.float64(hsum(w2)) * both * both < ALMOST_0
    if dead or np.float64(hsum(wx)) * both * unit < ALMOST_0:
        _fill(w, 0, 32, LEAST / both)


@inline
def _weigh(x, w, importance, n, unit, top):
    """Write the weights of a row; ``importance``: an address, or 0."""
    for at in range(0, 4 * n, 1024):
        squares = splat(f32x16, F(0))
        for i in range(at, at + 1024, 64):
            squares = squares + load(f32x16, x, i) * load(f32x16, x, i)
        square = hsum(squares)
        if np.float64(square) * unit * unit < 256 * ALMOST_0:
            _fill(w, at, 256, LEAST / (unit * (top if importance else unit)))
        elif importance:
            for i in range(at, at + 1024, 128):
                _weigh_by_importance(x + i, w + i, importance + i, square * F(2 / 256), unit, top)
        else:
            for i in range(at, at + 1024, 64):
                v = load(f32x16, x, i)
                store(w, i, square * F(0.5 / 256) + v * v)


# ---------------------------------------------------------------- levels of a scale


@inline
def codebook_levels(v):
    """Return the levels that a scale of v times the row's may have."""
    return codebook_values()


@inline
def small_levels(v):
    """Return the levels that a scale of v times the row's may have."""
    return up_to_15()


@inline
def wide_levels(v):
    """Return the levels that a scale of v times the row's may have: the nearest 16."""
    return up_to_15() + (min(max(np.rint(v), F(-56)), F(55)) - F(8))


@inline
def codebook_window(v, to):
    """Store four levels around v, of its sign."""
    levels = codebook_values()
    nearest = best_lane((levels - v) * (levels - v))
    first = min(max(nearest - I32(1), I32(8)), I32(12)) if v > F(0) else min(max(nearest - I32(2), I32(0)), I32(4))
    for k in range(4):
        store(to, 4 * k, extract(levels, first + k))


@inline
def small_window(v, to):
    """Store eight levels around v."""
    first = min(max(np.rint(v) - F(3), F(1)), F(8))
    for k in range(8):
        store(to, 4 * k, first + F(k))


@inline
def wide_window(v, to):
    """Store eight levels around v: every second one where they are close."""
    stride = F(2) if abs(v) > F(24) else F(1)
    first = min(max(np.rint(v) - F(4) * stride, F(-64)), F(63) - F(7) * stride)
    for k in range(8):
        store(to, 4 * k, first + F(k) * stride)


# ---------------------------------------------------------------- scales


@inline
def guess_scale(x):
    """Return about the scale that fits 32 values best, by the fourth root of their mean fourth power; 0 for zeros."""
    a, b = load(f32x16, x, 0), load(f32x16, x, 64)
    top = hmax(vmax(vabs(a), vabs(b)))
    if top == F(0):
        return F(0)
    a, b = a * (F(1) / top), b * (F(1) / top)
    a, b = a * a, b * b
    return top * (np.sqrt(np.sqrt(hsum(a * a + b * b) * F(1 / 32))) * F(0.0232))


@inline
def _energy(x, w):
    """Return sum(w x x) of 32 values."""
    a, b = load(f32x16, x, 0), load(f32x16, x, 64)
    return hsum(a * a * load(f32x16, w, 0) + b * b * load(f32x16, w, 64))


#: Bindings: levels of scales; by how much too small a scale hurts; how many values' scales it divides; tries.
levels_near: Any = None
steep = largest = F(0)
signs = books = 1


def guess_row_scale(guesses, energies, count):
    """Return the row's scale for which the levels nearest to guesses cost the least; 0 if all guesses are 0."""
    top = F(0)
    for i in range(count):
        top = max(top, guesses[i])
    best, d, at = np.inf, F(0), top * F(0.4) / abs(largest)
    for _ in range(20):
        cost, inverse = 0.0, F(1) / at
        for i in range(count):
            if guesses[i] > F(0):
                v = guesses[i] * inverse
                ratio = vmax(vabs(levels_near(v)) * (F(1) / v), F(0.05))
                more, less = ratio - F(1), F(1) / ratio - F(1)
                each = select(more > F(0), (F(0.5) * more + F(0.35)) * more, less * less * steep)
                cost += np.float64(hmin(each)) * np.float64(energies[i])
        if cost < best:
            best, d = cost, at
        at = at * F(1.056)
    return -d if largest < F(0) else d


#: Bindings of ``choose_level``: cells to search, in units of 32; levels of ``window``; points.curve.
cells = levels_of_window = 0
window: Any = None
curve: Any = None


def choose_level(x, w, guess, d, s, lines):
    """Return the level of the scale of 32 values, and the codebook, that the coarse search likes best; 0 if none."""
    lowest, level, book = F(0), F(0), 0
    levels, ratios = s + points.SCRATCH, s + points.SCRATCH + 32
    for sign in range(signs):
        v = guess / d if sign == 0 else -guess / d
        window(v, levels)
        v = min(max(v, load(types.float32, levels, 0)), load(types.float32, levels, 4 * levels_of_window - 4))
        for k in range(levels_of_window):
            store(ratios, 4 * k, load(types.float32, levels, 4 * k) / v)
        for b in range(books):
            errors = curve(b, 1, cells, x, w, d * v, s, lines, ratios)
            for k in range(levels_of_window):
                if extract(errors, k) < lowest:
                    lowest, level, book = extract(errors, k), load(types.float32, levels, 4 * k), b
    return level, book


# ---------------------------------------------------------------- bytes


@inline
def _or(block, byte, bits):
    store(block, byte, types.uint8(load(types.uint8, block, byte) | types.uint8(bits)))


@inline
def _code(level):
    return best_lane((codebook_values() - level) * (codebook_values() - level))


@inline
def put_iq1_kt(block, b, level, book, x, q):
    """Write 32 values, the b-th of a block of zeros: the level of their scale, their indices."""
    code = _code(level)
    for j in range(4):
        store(block, 8 + 4 * b + j, types.uint8(q[j] & 255))
        _or(block, 40 + 4 * (b % 4) + j, ((q[j] >> 8) & 15) << (4 * (b // 4)))
        code |= (q[j] >> 12) << (4 + j)
    store(block, b, types.uint8(code))


@inline
def put_iq2_kt(block, b, level, book, x, q):
    """Write 32 values."""
    _or(block, b % 4, _code(level) << (4 * (b // 4)))
    for j in range(4):
        store(block, 4 + 8 * b + 2 * j, types.uint16(q[j]))


@inline
def put_iq3_kt(block, b, level, book, x, q):
    """Write 32 values; their signs are those of x."""
    _or(block, b % 4, np.int64(level) << (4 * (b // 4)))
    for j in range(4):
        store(block, 4 + 8 * b + 2 * j, types.uint16(q[j]))
    for j in range(32):
        if load(types.float32, x, 4 * j) < F(0):
            _or(block, 68 + j, 1 << b)


@inline
def put_iq4_kt(block, b, level, book, x, q):
    """Write 32 values."""
    word = ((np.int64(level) + 64) << 1) | book
    for j in range(8):
        word |= (q[j] >> 12) << (8 + 3 * j)
        store(block, 32 + 8 * b + j, types.uint8(q[j] & 255))
        _or(block, 96 + 8 * (b % 4) + j, ((q[j] >> 8) & 15) << (4 * (b // 4)))
    store(block, 4 * b, types.uint32(word))


# ---------------------------------------------------------------- rows

#: Bindings of ``encode_row``: the functions above; cells of the last search, groups of 32 values, bytes of a block.
level_chosen: Any = None
search: Any = None
put: Any = None
last_cells = groups = block_bytes = 0


def encode_row(x, w, source, n, d, guesses, indices, lines, s, chosen, out):
    """Write the blocks of a row, all zeros before, to ``out``; return sum(w q x) and sum(w q q), q in units of d."""
    sumqx = sumq2 = 0.0
    for b in range(n // 32):
        at, target = 128 * b, out + block_bytes * (b // 8)
        levels, book = levels_near(F(0)), 0
        level = extract(levels, best_lane(levels * levels))
        if guesses[b] > F(0):
            level, book = level_chosen(x + at, w + at, guesses[b], d, s, lines)
        if level == F(0):
            for group in range(groups):
                chosen[group] = 0
        else:
            levels = levels_near(level)
            search(book, 1, last_cells, x + at, w + at, d * level, s, lines)
            level = extract(levels, best_lane(points.errors(s, groups, levels * d)))
            for group in range(groups):
                p, q, position = points.pick(s, group, d * level)
                sumqx += np.float64(level) * np.float64(p)
                sumq2 += np.float64(level) * np.float64(level) * np.float64(q)
                chosen[group] = load(types.int32, indices, 4 * position)
        put(target, b % 8, level, book, source + at, chosen)
    return sumqx, sumq2


#: Bindings of ``encode``.
row_encoded: Any = None
row_scale: Any = None
magnitudes = False


@inline
def _top(values):
    top = F(0)
    for i in range(values.size):
        top = max(top, abs(values[i]))
    return top


@inline
def _prepare(x, row, xs, guesses, unit, magnitudes):
    """Write a row, or its magnitudes, in units of ``unit``, and guesses of scales: 0 where all |x| < 1e-16."""
    inverse = F(1 / unit)
    for i in range(xs.size):
        v = x[row, i] * inverse
        xs[i] = abs(v) if magnitudes else v
    for b in range(guesses.size):
        guesses[b] = guess_scale(address(xs) + 128 * b) if _top(x[row, 32 * b : 32 * b + 32]) >= F(1e-16) else F(0)


@inline
def _tries(guesses):
    """Return how many scales of a row are tried: three if one guess is larger than 2.5 times the mean."""
    top = total = F(0)
    for b in range(guesses.size):
        top, total = max(top, guesses[b]), total + guesses[b]
    return 3 if top * F(guesses.size) > F(2.5) * total else 1


def encode(x, weights, out, row0, row1, lines_of_points, lines_of_cells, lines_of_families, indices):
    """Encode rows row0..row1 of x [rows, n], n a multiple of 256; weights [n] or empty."""
    n = x.shape[1]
    xs, ws = np.empty(n, np.float32), np.empty(n, np.float32)
    guesses, energies = np.empty(n // 32, np.float32), np.empty(n // 32, np.float32)
    scratch, chosen = np.zeros(points.SCRATCH + 128, np.uint8), np.zeros(8, np.int32)
    blocks = np.zeros(out.shape[1] + 64, np.uint8)
    largest_weight = np.float64(_top(weights))
    top = largest_weight if largest_weight > 0 else 1.0
    for row in range(row0, row1):
        out[row, :] = 0
        _, exponent = frexp(np.float64(_top(x[row])))
        unit = 2.0 ** min(max(exponent, -126), 126)
        _prepare(x, row, xs, guesses, unit, magnitudes)
        # Addresses are taken here: numba frees an array after its last use.
        lines = address(lines_of_points), address(lines_of_cells), address(lines_of_families)
        s, px, pw, source = address(scratch), address(xs), address(ws), address(x) + 4 * n * row
        _weigh(px, pw, address(weights) if weights.size else 0, n, unit, top)
        for b in range(n // 32):
            energies[b] = _energy(px + 128 * b, pw + 128 * b)
        first = row_scale(guesses, energies, n // 32)
        best = -1.0
        for k in range(_tries(guesses) if first != F(0) else 0):
            d = first * (F(1) if k == 0 else F(1.3) if k == 1 else F(0.77))
            blocks[:] = 0
            qx, q2 = row_encoded(px, pw, source, n, d, guesses, address(indices), lines, s, chosen, address(blocks))
            gain = qx * qx / q2 if q2 > 0 else 0.0
            if gain > best:
                best = gain
                out[row, 4:] = blocks[: out.shape[1] - 4]
                store(address(out) + out.shape[1] * row, 0, F((qx / q2 if q2 > 0 else np.float64(d)) * unit))


# ---------------------------------------------------------------- the encoders


@cache
def _functions_of_points(name: str, count: int, size: int, bias: int, fine: bool, window: int) -> tuple[Any, Any]:
    """Return ``curve`` and ``search`` for a codebook."""
    by_size = {"query_of": points.query8 if size == 8 else points.query4, "size": size}
    score = (points.score8_fine if fine else points.score8) if size == 8 else points.score4_fine
    vectors: dict[str, Any] = {"floats": f32x8 if size == 8 else f32x4, "bytes_of": i8x8 if size == 8 else points.i8x4}
    square, line_bytes = (128, 48 * size) if fine else (64, 32 * size)
    error = specialize(points.error_of, name, score=score)
    shared = {
        "prepare_query": specialize(points.prepare, name, size=size, bias=bias, square=square, **vectors),
        "families_ranked": specialize(points.rank_families, name, error=error, family_groups=count // 4096),
        **by_size,
    }
    least = points.least_of_4 if window == 4 else points.least_of_8
    curve = specialize(
        points.curve, name, helper, **shared,
        cells_of_two=specialize(points.rank_cells_of_two, name, score=score, shift=4 if fine else 3),
        curve_points=specialize(least, name, score=score),
    )  # fmt: skip
    search = specialize(
        points.search, name, helper, **shared,
        cells_ranked=specialize(points.rank_cells, name, error=error),
        points_ranked=specialize(points.rank_points, name, error=error),
        points_rated=specialize(points.rate_points, name, size=size, bias=bias, line_bytes=line_bytes),
    )  # fmt: skip
    return curve, search


def _encoder(
    name: str, count: int, size: int, put: Any, levels: Any, window: Any, *,
    largest: int, steep: int, cells: int, last_cells: int, signs: int = 2, books: int = 1, fine: bool = False,
) -> Encoder:  # fmt: skip
    """Return the encoder of a type: codebooks of ``count`` points; the functions and numbers that differ."""
    suffix, in_window = name.lower(), 4 if window is codebook_window else 8
    curve, search = _functions_of_points(suffix, count, size, 126 if signs == 2 else 0, fine, in_window)
    chosen = specialize(
        choose_level, suffix, helper,
        curve=curve, window=window, levels_of_window=in_window, cells=cells, signs=signs, books=books,
    )  # fmt: skip
    row = specialize(
        encode_row, suffix, helper,
        level_chosen=chosen, search=search, put=put, levels_near=levels, last_cells=last_cells, groups=32 // size,
        block_bytes=BY_NAME[name].block_bytes,
    )  # fmt: skip
    scale = specialize(guess_row_scale, suffix, helper, levels_near=levels, largest=F(largest), steep=F(steep))
    encode_rows: Callable[..., None] = specialize(
        encode, suffix, kernel, row_encoded=row, row_scale=scale, magnitudes=signs == 1
    )

    def encode_type(
        x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], row0: int, row1: int
    ) -> None:
        """Encode rows row0..row1 of x [rows, n], n a multiple of 256; weights [n] or empty."""
        book = codebook(count, size, signs == 1, books, fine)
        encode_rows(x, weights, out, row0, row1, book.points, book.cells, book.families, book.indices)

    return encode_type


CELLS: dict[str, tuple[int, int]] = {"IQ1_KT": (2, 4), "IQ2_KT": (2, 4), "IQ3_KT": (4, 4), "IQ4_KT": (2, 4)}


def _cells(name: str) -> dict[str, Any]:
    return dict(zip(("cells", "last_cells"), CELLS[name], strict=True))


encode_iq1_kt = _encoder(
    "IQ1_KT", 8192, 8, put_iq1_kt, codebook_levels, codebook_window, largest=-127, steep=5, **_cells("IQ1_KT")
)
encode_iq2_kt = _encoder(
    "IQ2_KT", 65536, 8, put_iq2_kt, codebook_levels, codebook_window, largest=-127, steep=5, **_cells("IQ2_KT")
)
encode_iq3_kt = _encoder(
    "IQ3_KT", 65536, 8, put_iq3_kt, small_levels, small_window,
    largest=15, steep=20, signs=1, fine=True, **_cells("IQ3_KT"),
)  # fmt: skip
encode_iq4_kt = _encoder(
    "IQ4_KT", 32768, 4, put_iq4_kt, wide_levels, wide_window,
    largest=-64, steep=60, books=2, fine=True, **_cells("IQ4_KT"),
)  # fmt: skip

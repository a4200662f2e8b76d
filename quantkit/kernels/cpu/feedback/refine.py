"""A sweep that optimizes levels, factors and minimums of each sub-block jointly, in the metric of the covariance.

The covariance is passed over once: for ``width`` columns at a time, the gradient g = H e, e = w - v, is summed up over
all columns; then their sub-blocks are visited, and only their effect on each other's g is computed. In a sub-block, a
change of the scale by x and of the subtrahend by y moves v by x t - y, t the levels, and the loss by x^2 t.H.t - 2 x y
1.H.t + y^2 1.H.1 - 2 (x t.g - y 1.g), all over the columns of the sub-block only. Both are set to the minimum, as
nearly as integers allow; then each level is set to minimize the loss with everything else fixed. Layouts and arguments
are those of sweeps.py; columns are in their own order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import f16_to_f32, f32_to_f16, f32x16, load, muladd, splat, store
from quantkit.kernels.cpu.feedback.sweeps import store_nearest
from quantkit.kernels.cpu.feedback.tiles import LINE, ROWS, element, multiply_part

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
F = np.float32

#: Fitted values: nothing, an integer, or a half float.
FIXED = 0
INTEGER = 1
HALF = 2


class Scales(NamedTuple):
    """Scales of a tile, float32 [sub-blocks, ROWS] unless noted; set by fits.

    v = scale * level - minimum, scale = d * factor, minimum = dmin * m - scale * shift, inverse = 1 / scale, or 0 for
    0. scale_kind: the fitted part of the scale, the factor (INTEGER) or d (HALF); factor_index: of the factor in
    ``factors``, ascending, int32. min_kind: the fitted part of the minimum, m (INTEGER), from 0 to max_m, or dmin
    (HALF). d, dmin: float32 [super-blocks, ROWS]; per_d: sub-blocks of one.
    """

    span: int
    scale: F32
    minimum: F32
    inverse: F32
    scale_kind: int
    factor_index: npt.NDArray[np.int32]
    factors: F32
    d: F32
    per_d: int
    min_kind: int
    m: F32
    max_m: float
    dmin: F32
    shift: F32


class Tile(NamedTuple):
    """A tile's metric, h and per_diagonal as ``Metric`` has them; its codebook; levels and values, set."""

    h: F32
    per_diagonal: F32
    codebook: F32
    levels: F32
    v: F32


class Visits(NamedTuple):
    """Parameters of the visits of sub-blocks.

    width: columns that are visited together, a multiple of the span; passes: the number of passes. repeats: the number
    of times that scales and levels of a sub-block are chosen in turn in each pass; fits: whether scales are fitted;
    neighbour_scales: whether the neighbours of scales are tried.
    """

    width: int
    passes: int
    repeats: int
    fits: bool
    neighbour_scales: bool


class Candidate(NamedTuple):
    """The choice for a sub-block that reduces each row's loss most: float32 [ROWS]; levels, v: [span, ROWS]."""

    reduction: F32
    scale: F32
    m: F32
    dmin: F32
    factor_index: F32
    levels: F32
    v: F32


class Work(NamedTuple):
    """Scratch of a sub-block: gradient, its part of H e; old, its values when it was visited; t, levels with shifts;
    c = H t; sums; ``best``, and data to compare neighbours of the ``first`` scale."""

    gradient: F32
    old: F32
    t: F32
    c: F32
    sums: F32
    best: Candidate
    reduction: F32
    first_scale: F32
    first_factor_index: F32


@inline
def _new_work(span: Any) -> Any:
    row = np.zeros((7, ROWS), F)
    columns = np.empty((6, span, ROWS), F)
    best = Candidate(np.zeros(ROWS, F), row[0], row[1], row[2], row[3], columns[4], columns[5])
    sums = np.zeros((7, max(ROWS, span)), F)
    return Work(columns[0], columns[1], columns[2], columns[3], sums, best, row[4], row[5], row[6])


@inline
def _dot(a: Any, b: Any, count: Any, out: Any) -> Any:
    for part in range(0, LINE, 64):
        total = splat(f32x16, F(0))
        for offset in range(part, LINE * count, LINE):
            total = muladd(load(f32x16, a, offset), load(f32x16, b, offset), total)
        store(out, part, total)


@inline
def _sum(a: Any, count: Any, out: Any) -> Any:
    for part in range(0, LINE, 64):
        total = splat(f32x16, F(0))
        for offset in range(part, LINE * count, LINE):
            total = total + load(f32x16, a, offset)
        store(out, part, total)


@inline
def least(gt: Any, gs: Any, tt: Any, ts: Any, ss: Any) -> Any:
    """Return where -2 (x gt + y gs) + x^2 tt + 2 x y ts + y^2 ss is least; y is 0 if ss is."""
    if not tt > F(0):
        return F(0), (gs / ss if ss > F(0) else F(0))
    determinant = tt * ss - ts * ts
    if not determinant > F(1e-6) * tt * ss:
        return gt / tt, F(0)
    return (gt * ss - gs * ts) / determinant, (gs * tt - gt * ts) / determinant


@inline
def _as_half(x: Any) -> Any:
    return f16_to_f32(f32_to_f16(x))


@inline
def _nearest_factor(factors: Any, target: Any) -> Any:
    index = np.searchsorted(factors, target)
    if index > 0 and (index == len(factors) or target - factors[index - 1] < factors[index] - target):
        index -= 1
    return index


@inline
def _move(s: Any, a: Any, row: Any, gt: Any, gs: Any, tt: Any, ts: Any, ss: Any) -> Any:
    """Set scale and minimum of a row's sub-block to the best values; return the changes of scale and minimum.

    minimum gains y; ``shift`` is left to the caller. gs and ts are of the direction -1.
    """
    up = a // s.per_d
    now = s.scale[a, row]
    d, dmin = s.d[up, row], s.dmin[up, row] if s.min_kind != FIXED else F(0)
    if s.min_kind == FIXED or (s.min_kind == INTEGER and dmin == F(0)):
        gs = F(0)
        ts = F(0)
        ss = F(0)
    x, y = least(gt, gs, tt, ts, ss)
    factor_index, half = 0, F(0)
    if s.scale_kind == INTEGER and d != F(0):
        factor_index = _nearest_factor(s.factors, (now + x) / d)
        x = d * s.factors[factor_index] - now
    elif s.scale_kind == HALF:
        half = _as_half(now + x)
        x = half - now
    else:
        x = F(0)
    m = F(0)
    if ss > F(0):
        y = (gs - x * ts) / ss
        if s.min_kind == INTEGER:
            m = min(max(np.rint(s.m[a, row] + y / dmin), F(0)), F(s.max_m))
            y = dmin * (m - s.m[a, row])
        else:
            m = _as_half(dmin + y)
            y = m - dmin
    else:
        y = F(0)
    if not x * (x * tt + F(2) * (y * ts - gt)) + y * (y * ss - F(2) * gs) < F(0):
        return F(0), F(0)
    if s.scale_kind == INTEGER and d != F(0):
        s.factor_index[a, row] = factor_index
        s.scale[a, row] = d * s.factors[factor_index]
    elif s.scale_kind == HALF:
        s.d[up, row] = half
        s.scale[a, row] = half
    if ss > F(0):
        if s.min_kind == INTEGER:
            s.m[a, row] = m
        else:
            s.dmin[up, row] = m
    return x, y


@inline
def _fit(tile: Any, s: Any, a: Any, g: Any, work: Any) -> Any:
    """Fit scale and minimum of sub-block a; g is of its columns."""
    begin = a * s.span
    end = a * s.span + s.span
    n = len(tile.levels)
    h = tile.h
    levels = tile.levels
    v = tile.v
    t = work.t
    c = work.c
    sums = work.sums
    zero = splat(f32x16, F(0))
    for part in range(0, LINE, 64):
        shift = load(f32x16, s.shift, LINE * a + part)
        for k in range(s.span):
            store(t, LINE * k + part, load(f32x16, levels, LINE * (begin + k) + part) + shift)
            store(c, LINE * k + part, zero)
    multiply_part(c, begin, h, t, begin, n, begin, end, begin, end)
    gt = sums[0]
    gs = sums[1]
    tt = sums[2]
    ts = sums[3]
    step = sums[4]
    step_minimum = sums[5]
    _dot(t, g, s.span, gt)
    _dot(t, c, s.span, tt)
    total = F(0)
    if s.min_kind != FIXED:
        _sum(g, s.span, gs)
        _sum(c, s.span, ts)
        for j in range(s.span):
            one = F(0)
            for k in range(begin, end):
                one += h[(begin + j) // 4, k, j % 4]
            sums[6, j] = one
            total += one
    for row in range(ROWS):
        x, y = _move(s, a, row, gt[row], -gs[row], tt[row], -ts[row], total)
        step[row], step_minimum[row] = -x, y
        _set_minimum_and_inverse(s, a, row)
    for part in range(0, LINE, 64):
        scale, minimum = load(f32x16, s.scale, LINE * a + part), load(f32x16, s.minimum, LINE * a + part)
        x, y = load(f32x16, step, part), load(f32x16, step_minimum, part)
        for k in range(s.span):
            offset = LINE * k + part
            target = LINE * (begin + k) + part
            store(v, target, scale * load(f32x16, levels, target) - minimum)
            now = muladd(load(f32x16, c, offset), x, load(f32x16, g, offset))
            if s.min_kind != FIXED:
                now = muladd(y, splat(f32x16, sums[6, k]), now)
            store(g, offset, now)


@inline
def _set_minimum_and_inverse(s: Any, a: Any, row: Any) -> Any:
    """Set minimum and inverse of a row's sub-block to those of its scale, d and m."""
    scale = s.scale[a, row]
    minimum = s.dmin[a // s.per_d, row] * s.m[a, row] if len(s.dmin) else F(0)
    s.minimum[a, row] = minimum - scale * s.shift[a, row]
    s.inverse[a, row] = F(1) / scale if abs(scale) > F(1.1754944e-38) else F(0)


@inline
def _descend(tile: Any, s: Any, a: Any, g: Any) -> Any:
    """Choose the levels of sub-block a, one after the other; g is of its columns."""
    begin = a * s.span
    end = a * s.span + s.span
    n = len(tile.levels)
    h = tile.h
    per_diagonal = tile.per_diagonal
    levels = tile.levels
    v = tile.v
    for k in range(begin, end):
        inverse = splat(f32x16, per_diagonal[k])
        for part in range(0, LINE, 64):
            offset = LINE * k + part
            old = load(f32x16, v, offset)
            best = muladd(load(f32x16, g, LINE * (k - begin) + part), inverse, old)
            change = old - store_nearest(best, offset, levels, v, LINE * a + part, s, tile.codebook)
            for j in range(begin, end):
                target = LINE * (j - begin) + part
                store(g, target, muladd(change, element(h, n, k, j), load(f32x16, g, target)))


@inline
def _write_loss_reduction(
    v: Any, gradient: Any, g: Any, begin: Any, column: Any, span: Any, work: Any, out: Any
) -> Any:
    """Set out to the decrease of the loss since a sub-block's values were ``work.old`` and H e was g, from column
    ``column`` on; gradient is the present H e."""
    for part in range(0, LINE, 64):
        total = splat(f32x16, F(0))
        for k in range(span):
            offset = LINE * k + part
            slope = load(f32x16, gradient, offset) + load(f32x16, g, LINE * column + offset)
            total = muladd(load(f32x16, v, LINE * begin + offset) - load(f32x16, work.old, offset), slope, total)
        store(out, part, total)


@inline
def _save(tile: Any, s: Any, a: Any, row: Any, candidate: Any) -> Any:
    """Copy scale, minimum, levels and values of a row's sub-block to a ``Candidate``."""
    up, begin = a // s.per_d, a * s.span
    candidate.scale[row] = s.scale[a, row]
    if s.min_kind != FIXED:
        candidate.m[row], candidate.dmin[row] = s.m[a, row], s.dmin[up, row]
    if s.scale_kind == INTEGER:
        candidate.factor_index[row] = F(s.factor_index[a, row])
    for k in range(s.span):
        candidate.levels[k, row], candidate.v[k, row] = tile.levels[begin + k, row], tile.v[begin + k, row]


@inline
def _set_scale(s: Any, a: Any, row: Any, scale: Any, factor_index: Any, best: Any, step: Any) -> Any:
    """Set the minimum of a row's sub-block to that of ``best``, its scale to one ``step`` steps from that given.

    A step is the next factor, or 1/32 of a scale that has none.
    """
    up = a // s.per_d
    if s.min_kind == INTEGER:
        s.m[a, row] = best.m[row]
    elif s.min_kind == HALF:
        s.dmin[up, row] = best.dmin[row]
    if s.scale_kind == INTEGER:
        index = int(factor_index)
        if step != 0:
            index = min(max(index + step, 0), len(s.factors) - 1)
            scale = s.d[up, row] * s.factors[index]
        s.factor_index[a, row] = index
    else:
        scale = _as_half(scale * (F(1) + F(step) / F(32)))
        s.d[up, row] = scale
    s.scale[a, row] = scale
    _set_minimum_and_inverse(s, a, row)


@inline
def _try_neighbour_scales(tile: Any, s: Any, a: Any, g: Any, column: Any, work: Any) -> Any:
    """Choose sub-block a again from either neighbour of its scale; keep, by row, the largest reduction of the loss.

    g, from column ``column`` on: H e before the sub-block was visited.
    """
    span = s.span
    begin = a * s.span
    best = work.best
    _write_loss_reduction(tile.v, work.gradient, g, begin, column, span, work, best.reduction)
    for row in range(ROWS):
        _save(tile, s, a, row, best)
        work.first_scale[row], work.first_factor_index[row] = best.scale[row], best.factor_index[row]
    for step in (-1, 1):
        for row in range(ROWS):
            _set_scale(s, a, row, work.first_scale[row], work.first_factor_index[row], best, step)
        for k in range(0, LINE * span, 64):
            store(tile.v, LINE * begin + k, load(f32x16, work.old, k))
            store(work.gradient, k, load(f32x16, g, LINE * column + k))
        _descend(tile, s, a, work.gradient)
        _fit(tile, s, a, work.gradient, work)
        _descend(tile, s, a, work.gradient)
        _write_loss_reduction(tile.v, work.gradient, g, begin, column, span, work, work.reduction)
        for row in range(ROWS):
            if work.reduction[row] > best.reduction[row]:
                best.reduction[row] = work.reduction[row]
                _save(tile, s, a, row, best)
    for row in range(ROWS):
        _set_scale(s, a, row, best.scale[row], best.factor_index[row], best, 0)
        for k in range(span):
            tile.levels[begin + k, row], tile.v[begin + k, row] = best.levels[k, row], best.v[k, row]


@inline
def _settle(x: Any, v: Any, e: Any, first: Any, last: Any, before: Any, g: Any, gain: Any) -> Any:
    """Set e = x - v of columns, and add the reduction of the loss to ``gain``; g was ``before``."""
    for k in range(first, last):
        for row in range(ROWS):
            now = x[k, row] - v[k, row]
            slope = np.float64(before[k - first, row]) + np.float64(g[k - first, row])
            gain[row] += np.float64(e[k, row] - now) * slope
            e[k, row] = now


@kernel
def refine(x: F32, tile: Tile, s: Scales, e: F32, visits: Visits) -> F64:
    """Visit all columns once; return the reduction of each row's loss, float64 [ROWS].

    e: x - v, in the order of the columns; set.
    """
    h = tile.h
    v = tile.v
    width = visits.width
    n, span = len(x), s.span
    gain = np.zeros(ROWS, np.float64)
    g, before = np.empty((width, ROWS), F), np.empty((width, ROWS), F)
    work = _new_work(span)
    gradient, old = work.gradient, work.old
    for offset in range(0, LINE * n, 64):
        store(e, offset, load(f32x16, x, offset) - load(f32x16, v, offset))
    for first in range(0, n, width):
        last = min(first + width, n)
        g[:] = F(0)
        multiply_part(g, first, h, e, 0, n, 0, n, first, last)
        before[:] = g
        for _ in range(visits.passes):
            for a in range(first // span, last // span):
                begin, end = a * span, a * span + span
                for offset in range(0, LINE * span, 64):
                    store(old, offset, load(f32x16, v, LINE * begin + offset))
                    store(gradient, offset, load(f32x16, g, LINE * (begin - first) + offset))
                for _ in range(visits.repeats):
                    if visits.fits:
                        _fit(tile, s, a, gradient, work)
                    _descend(tile, s, a, gradient)
                if visits.neighbour_scales and s.scale_kind != FIXED:
                    _try_neighbour_scales(tile, s, a, g, begin - first, work)
                for offset in range(0, LINE * span, 64):
                    store(old, offset, load(f32x16, old, offset) - load(f32x16, v, LINE * begin + offset))
                multiply_part(g, first, h, old, begin, n, begin, end, first, last)
        _settle(x, v, e, first, last, before, g, gain)
    return gain

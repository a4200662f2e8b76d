"""A sweep that chooses levels, factors and minimums of each sub-block together, in the metric of the covariance.

The covariance is passed over once: for ``width`` columns at a time, the gradient g = H e, e = w - v, is summed up over
all columns; then their sub-blocks are visited, and only what those change of each other's g is computed. In a
sub-block, a change of scale by x and of what is subtracted by y moves v by x t - y, t the levels, and the loss by
x^2 t.H.t - 2 x y 1.H.t + y^2 1.H.1 - 2 (x t.g - y 1.g), all over the columns of the sub-block only. Both are set to
where that is least, as nearly as integers allow; then each level is set to where the loss is least while all else
stays. Layouts and arguments are those of sweeps.py; columns are in their own order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import f16_to_f32, f32_to_f16, f32x16, load, muladd, splat, store
from quantkit.kernels.cpu.feedback.sweeps import choose
from quantkit.kernels.cpu.feedback.tiles import LINE, ROWS, element, multiply_part

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
F = np.float32

#: What may be fitted: nothing, an integer, or a half float.
FIXED, INTEGER, HALF = 0, 1, 2


class Scales(NamedTuple):
    """Scales of a tile, float32 [sub-blocks, ROWS] if nothing else is said: set by what fits them.

    v = scale * level - low. scale = d * factor: kind says what of these is fitted, d if that is HALF. place: of the
    factor in ``factors``, ascending, int32. low = dmin * m - scale * raised; minimum says what of dmin, HALF, or m is
    fitted, which is from 0 to ``most``. inverse is 1 / scale, or 0 for 0. d, dmin: float32 [super-blocks, ROWS];
    per_d: sub-blocks of one.
    """

    span: int
    scale: F32
    low: F32
    inverse: F32
    kind: int
    place: npt.NDArray[np.int32]
    factors: F32
    d: F32
    per_d: int
    minimum: int
    m: F32
    most: float
    dmin: F32
    raised: F32


@inline
def _dot(a: Any, b: Any, count: Any, out: Any) -> Any:
    for part in range(0, LINE, 64):
        total = splat(f32x16, F(0))
        for at in range(part, LINE * count, LINE):
            total = muladd(load(f32x16, a, at), load(f32x16, b, at), total)
        store(out, part, total)


@inline
def _sum(a: Any, count: Any, out: Any) -> Any:
    for part in range(0, LINE, 64):
        total = splat(f32x16, F(0))
        for at in range(part, LINE * count, LINE):
            total = total + load(f32x16, a, at)
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
def _nearest_factor(factors: Any, wanted: Any) -> Any:
    place = np.searchsorted(factors, wanted)
    if place > 0 and (place == len(factors) or wanted - factors[place - 1] < factors[place] - wanted):
        place -= 1
    return place


@inline
def _moved(s: Any, a: Any, row: Any, gt: Any, gs: Any, tt: Any, ts: Any, ss: Any) -> Any:
    """Set scale and minimum of a row's sub-block to the best values; return by how much scale and low change.

    low gains y; ``raised`` is left to the caller. gs and ts are of the direction -1.
    """
    up = a // s.per_d
    now = s.scale[a, row]
    d, dmin = s.d[up, row], s.dmin[up, row] if s.minimum != FIXED else F(0)
    if s.minimum == FIXED or (s.minimum == INTEGER and dmin == F(0)):
        gs, ts, ss = F(0), F(0), F(0)
    x, y = least(gt, gs, tt, ts, ss)
    place, half = 0, F(0)
    if s.kind == INTEGER and d != F(0):
        place = _nearest_factor(s.factors, (now + x) / d)
        x = d * s.factors[place] - now
    elif s.kind == HALF:
        half = _as_half(now + x)
        x = half - now
    else:
        x = F(0)
    m = F(0)
    if ss > F(0):
        y = (gs - x * ts) / ss
        if s.minimum == INTEGER:
            m = min(max(np.rint(s.m[a, row] + y / dmin), F(0)), F(s.most))
            y = dmin * (m - s.m[a, row])
        else:
            m = _as_half(dmin + y)
            y = m - dmin
    else:
        y = F(0)
    if not x * (x * tt + F(2) * (y * ts - gt)) + y * (y * ss - F(2) * gs) < F(0):
        return F(0), F(0)
    if s.kind == INTEGER and d != F(0):
        s.place[a, row] = place
        s.scale[a, row] = d * s.factors[place]
    elif s.kind == HALF:
        s.d[up, row] = half
        s.scale[a, row] = half
    if ss > F(0):
        if s.minimum == INTEGER:
            s.m[a, row] = m
        else:
            s.dmin[up, row] = m
    return x, y


@inline
def _fit(h: Any, n: Any, s: Any, a: Any, levels: Any, v: Any, g: Any, t: Any, c: Any, sums: Any) -> Any:
    """Fit scale and minimum of sub-block a; g, t and c are of its columns."""
    begin, end = a * s.span, a * s.span + s.span
    zero = splat(f32x16, F(0))
    for part in range(0, LINE, 64):
        raised = load(f32x16, s.raised, LINE * a + part)
        for k in range(s.span):
            store(t, LINE * k + part, load(f32x16, levels, LINE * (begin + k) + part) + raised)
            store(c, LINE * k + part, zero)
    multiply_part(c, begin, h, t, begin, n, begin, end, begin, end)
    gt, gs, tt, ts, by, by_low = sums[0], sums[1], sums[2], sums[3], sums[4], sums[5]
    _dot(t, g, s.span, gt)
    _dot(t, c, s.span, tt)
    total = F(0)
    if s.minimum != FIXED:
        _sum(g, s.span, gs)
        _sum(c, s.span, ts)
        for j in range(s.span):
            one = F(0)
            for k in range(begin, end):
                one += h[(begin + j) // 4, k, j % 4]
            sums[6, j] = one
            total += one
    for row in range(ROWS):
        x, y = _moved(s, a, row, gt[row], -gs[row], tt[row], -ts[row], total)
        by[row], by_low[row] = -x, y
        scale, up = s.scale[a, row], a // s.per_d
        low = s.dmin[up, row] * s.m[a, row] if len(s.dmin) else F(0)
        s.low[a, row] = low - scale * s.raised[a, row]
        s.inverse[a, row] = F(1) / scale if abs(scale) > F(1.1754944e-38) else F(0)
    for part in range(0, LINE, 64):
        scale, low = load(f32x16, s.scale, LINE * a + part), load(f32x16, s.low, LINE * a + part)
        x, y = load(f32x16, by, part), load(f32x16, by_low, part)
        for k in range(s.span):
            at = LINE * k + part
            to = LINE * (begin + k) + part
            store(v, to, scale * load(f32x16, levels, to) - low)
            now = muladd(load(f32x16, c, at), x, load(f32x16, g, at))
            if s.minimum != FIXED:
                now = muladd(y, splat(f32x16, sums[6, k]), now)
            store(g, at, now)


@inline
def _descend(h: Any, n: Any, per_diagonal: Any, s: Any, a: Any, book: Any, levels: Any, v: Any, g: Any) -> Any:
    """Choose the levels of sub-block a, one after the other; g is of its columns."""
    begin, end = a * s.span, a * s.span + s.span
    for k in range(begin, end):
        inverse = splat(f32x16, per_diagonal[k])
        for part in range(0, LINE, 64):
            at = LINE * k + part
            old = load(f32x16, v, at)
            best = muladd(load(f32x16, g, LINE * (k - begin) + part), inverse, old)
            change = old - choose(best, at, levels, v, LINE * a + part, s.scale, s.low, s.inverse, book)
            for j in range(begin, end):
                to = LINE * (j - begin) + part
                store(g, to, muladd(change, element(h, n, k, j), load(f32x16, g, to)))


@inline
def _gained(v: Any, old: Any, own: Any, g: Any, begin: Any, at: Any, span: Any, out: Any) -> Any:
    """Set out to how much the loss has fallen since a sub-block's values were ``old`` and H e was g, from column ``at``
    on; own is H e now."""
    for part in range(0, LINE, 64):
        total = splat(f32x16, F(0))
        for k in range(span):
            to = LINE * k + part
            slope = load(f32x16, own, to) + load(f32x16, g, LINE * at + to)
            total = muladd(load(f32x16, v, LINE * begin + to) - load(f32x16, old, to), slope, total)
        store(out, part, total)


@inline
def _remember(s: Any, a: Any, row: Any, kept: Any) -> Any:
    """Keep the scale and the minimum of a row's sub-block."""
    up = a // s.per_d
    kept[0, row] = s.scale[a, row]
    if s.minimum != FIXED:
        kept[1, row], kept[2, row] = s.m[a, row], s.dmin[up, row]
    if s.kind == INTEGER:
        kept[3, row] = F(s.place[a, row])


@inline
def _recall(s: Any, a: Any, row: Any, kept: Any, step: Any) -> Any:
    """Set them again, with the factor ``step`` places away."""
    up = a // s.per_d
    scale = kept[0, row]
    if s.minimum == INTEGER:
        s.m[a, row] = kept[1, row]
    elif s.minimum == HALF:
        s.dmin[up, row] = kept[2, row]
    if s.kind == INTEGER:
        place = int(kept[3, row])
        if step != 0:
            place = min(max(place + step, 0), len(s.factors) - 1)
            scale = s.d[up, row] * s.factors[place]
        s.place[a, row] = place
    else:
        scale = _as_half(scale * (F(1) + F(step) / F(32)))
        s.d[up, row] = scale
    low = s.dmin[up, row] * s.m[a, row] if len(s.dmin) else F(0)
    s.scale[a, row] = scale
    s.low[a, row] = low - scale * s.raised[a, row]
    s.inverse[a, row] = F(1) / scale if abs(scale) > F(1.1754944e-38) else F(0)


@inline
def _take(levels: Any, v: Any, begin: Any, row: Any, span: Any, best: Any, back: Any) -> Any:
    """Keep the levels and values of a row's sub-block in ``best``, or set those that are there again."""
    for k in range(span):
        if back:
            levels[begin + k, row], v[begin + k, row] = best[0, k, row], best[1, k, row]
        else:
            best[0, k, row], best[1, k, row] = levels[begin + k, row], v[begin + k, row]


@inline
def _look_beside(h: Any, n: Any, per_diagonal: Any, s: Any, a: Any, book: Any, levels: Any, v: Any, own: Any, old: Any,
                 g: Any, at: Any, t: Any, c: Any, sums: Any, kept: Any, best: Any) -> Any:  # fmt: skip
    """Begin sub-block a anew with both neighbours of the factor that was found, and take what loses most.

    old, g from column ``at`` on: the values before it was visited, and H e then. kept, best: scratch.
    """
    span, begin = s.span, a * s.span
    _gained(v, old, own, g, begin, at, span, kept[4])
    for row in range(ROWS):
        _remember(s, a, row, kept)
        _take(levels, v, begin, row, span, best, False)
        kept[5, row], kept[6, row] = kept[0, row], kept[3, row]
    for step in (-1, 1):
        for row in range(ROWS):
            kept[7, row], kept[8, row] = kept[0, row], kept[3, row]
            kept[0, row], kept[3, row] = kept[5, row], kept[6, row]
            _recall(s, a, row, kept, step)
            kept[0, row], kept[3, row] = kept[7, row], kept[8, row]
        for k in range(0, LINE * span, 64):
            store(v, LINE * begin + k, load(f32x16, old, k))
            store(own, k, load(f32x16, g, LINE * at + k))
        _descend(h, n, per_diagonal, s, a, book, levels, v, own)
        _fit(h, n, s, a, levels, v, own, t, c, sums)
        _descend(h, n, per_diagonal, s, a, book, levels, v, own)
        _gained(v, old, own, g, begin, at, span, kept[9])
        for row in range(ROWS):
            if kept[9, row] > kept[4, row]:
                kept[4, row] = kept[9, row]
                _remember(s, a, row, kept)
                _take(levels, v, begin, row, span, best, False)
    for row in range(ROWS):
        _recall(s, a, row, kept, 0)
        _take(levels, v, begin, row, span, best, True)


@inline
def _settle(x: Any, v: Any, e: Any, first: Any, last: Any, before: Any, g: Any, gain: Any) -> Any:
    """Set e = x - v of columns; gain is what the loss loses by their change, g having been ``before``."""
    for k in range(first, last):
        for row in range(ROWS):
            now = x[k, row] - v[k, row]
            slope = np.float64(before[k - first, row]) + np.float64(g[k - first, row])
            gain[row] += np.float64(e[k, row] - now) * slope
            e[k, row] = now


@kernel
def refine(x: F32, h: F32, per_diagonal: F32, book: F32, s: Scales, levels: F32, v: F32, e: F32, width: int,
           passes: int, repeats: int, fits: bool, beside: bool) -> F64:  # fmt: skip
    """Go over all columns once; return by how much the loss of each row falls, float64 [ROWS].

    Args:
        e: x - v, in the order of the columns; set.
        width: columns that are visited together, a multiple of the span; passes: how often.
        repeats: how often scales and levels of a sub-block are chosen in turn, each time.
        fits: whether scales are fitted; beside: whether their neighbours are tried, too.
    """
    n, span = len(x), s.span
    gain = np.zeros(ROWS, np.float64)
    g, before = np.empty((width, ROWS), F), np.empty((width, ROWS), F)
    own, t, c, old = (np.empty((span, ROWS), F), np.empty((span, ROWS), F), np.empty((span, ROWS), F),
                      np.empty((span, ROWS), F))  # fmt: skip
    sums = np.zeros((7, max(ROWS, span)), F)
    kept, best = np.zeros((10, ROWS), F), np.empty((2, span, ROWS), F)
    for at in range(0, LINE * n, 64):
        store(e, at, load(f32x16, x, at) - load(f32x16, v, at))
    for first in range(0, n, width):
        last = min(first + width, n)
        g[:] = F(0)
        multiply_part(g, first, h, e, 0, n, 0, n, first, last)
        before[:] = g
        for _ in range(passes):
            for a in range(first // span, last // span):
                begin, end = a * span, a * span + span
                for at in range(0, LINE * span, 64):
                    store(old, at, load(f32x16, v, LINE * begin + at))
                    store(own, at, load(f32x16, g, LINE * (begin - first) + at))
                for _ in range(repeats):
                    if fits:
                        _fit(h, n, s, a, levels, v, own, t, c, sums)
                    _descend(h, n, per_diagonal, s, a, book, levels, v, own)
                if beside and s.kind != FIXED:
                    _look_beside(h, n, per_diagonal, s, a, book, levels, v, own, old, g, begin - first, t, c, sums,
                                 kept, best)  # fmt: skip
                for at in range(0, LINE * span, 64):
                    store(old, at, load(f32x16, old, at) - load(f32x16, v, LINE * begin + at))
                multiply_part(g, first, h, old, begin, n, begin, end, first, last)
        _settle(x, v, e, first, last, before, g, gain)
    return gain

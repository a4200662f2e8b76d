"""A search for scales by partitions: every way to give four values to 16 or 32 sorted ones.

Sorted, the values of a sub-block fall into four runs, one for each of the four levels, upwards or (d < 0) downwards.
All partitions are tried with plain and raised values: 816 of 16 values; of 32 values, where the first run has at most
23 and the last one at most 24, 5744. Sums over runs are differences of sums from the start. A partition is rated by
sum(w q x)^2 / sum(w q q); the best has the scale sum(w q x) / sum(w q q). A lane is a sub-block.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq2_k_impl, quantize_row_iq2_ks_impl.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import helper, inline, specialize
from quantkit.kernels.cpu.core.simd import any_lane, f32x16, load, select, splat, stack_bytes, store, vabs, vmax
from quantkit.kernels.cpu.encode.ik_search import keep_better
from quantkit.kernels.tables import table

F = np.float32
_PLAIN = tuple(float(v) for v in table("kvalues_iq2nl"))
_RAISED = tuple(v + 5 for v in _PLAIN)
#: The values of runs, and whether they are raised, in the reference's order.
_RUNS = (_PLAIN, _RAISED, _PLAIN[::-1], _RAISED[::-1])

# Offsets: sorted values and their weights; sums of w x and of w before each; terms of the last run.
_X, _W, _SUMX, _SUMW, _LAST = 0, 2048, 4096, 4096 + 33 * 64, 4096 + 66 * 64
_BYTES = _LAST + 32 * 512

#: Values of a sub-block, the end of first runs, the least start of last ones.
span = end_first = start_last = 0


def _sort(s):
    """Sort each lane by value, the weights along: adjacent pairs are swapped if out of order, so it is stable."""
    for turn in range(span):
        for i in range(turn % 2, span - 1, 2):
            at = 64 * i
            x0, x1 = load(f32x16, s, _X + at), load(f32x16, s, _X + at + 64)
            w0, w1 = load(f32x16, s, _W + at), load(f32x16, s, _W + at + 64)
            swap = x0 > x1
            store(s, _X + at, select(swap, x1, x0))
            store(s, _X + at + 64, select(swap, x0, x1))
            store(s, _W + at, select(swap, w1, w0))
            store(s, _W + at + 64, select(swap, w0, w1))


def _sum_up(s):
    """Write the sums of w x and w before each value, and after the last; return the largest magnitude."""
    sumx = sumw = amax = splat(f32x16, F(0))
    for i in range(span):
        store(s, _SUMX + 64 * i, sumx)
        store(s, _SUMW + 64 * i, sumw)
        x, w = load(f32x16, s, _X + 64 * i), load(f32x16, s, _W + 64 * i)
        sumx, sumw, amax = sumx + w * x, sumw + w, vmax(amax, vabs(x))
    store(s, _SUMX + 64 * span, sumx)
    store(s, _SUMW + 64 * span, sumw)
    return amax


@inline
def _run(s, i, j):
    """Return the sums of w x and w over values i .. j - 1."""
    wx = load(f32x16, s, _SUMX + 64 * j) - load(f32x16, s, _SUMX + 64 * i)
    return wx, load(f32x16, s, _SUMW + 64 * j) - load(f32x16, s, _SUMW + 64 * i)


@inline
def _terms(sums, level):
    """Return the terms of a run in sum(w q x), and in sum(w q q), for each of the four values of its level."""
    wx, w = sums
    a, b, c, d = F(_RUNS[0][level]), F(_RUNS[1][level]), F(_RUNS[2][level]), F(_RUNS[3][level])
    return (wx * a, wx * b, wx * c, wx * d), (w * a * a, w * b * b, w * c * c, w * d * d)


@inline
def _plus(a, b):
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])


def _store_last(s):
    """Write the terms of each run that ends with the last value."""
    for i in range(span):
        qx, q2 = _terms(_run(s, i, span), 3)
        at = _LAST + 512 * i
        store(s, at, qx[0])
        store(s, at + 64, qx[1])
        store(s, at + 128, qx[2])
        store(s, at + 192, qx[3])
        store(s, at + 256, q2[0])
        store(s, at + 320, q2[1])
        store(s, at + 384, q2[2])
        store(s, at + 448, q2[3])


@inline
def _four(s, at):
    return (load(f32x16, s, at), load(f32x16, s, at + 64), load(f32x16, s, at + 128), load(f32x16, s, at + 192))


sort: Any = None
sum_up: Any = None
store_last: Any = None


def _search(xt, wt, scales, raised_by):
    """Write the scales of 16 sub-blocks, 0 where all |x| < 1e-16, and 1 where values are raised, else 0, as f32."""
    s = stack_bytes(_BYTES)
    for at in range(0, 64 * span, 64):
        store(s, _X + at, load(f32x16, xt, at))
        store(s, _W + at, load(f32x16, wt, at))
    sort(s)
    amax = sum_up(s)
    store_last(s)
    best = d = raised = splat(f32x16, F(0))
    for i1 in range(end_first):
        first_qx, first_q2 = _terms(_run(s, 0, i1), 0)
        for i2 in range(i1, span):
            second_qx, second_q2 = _terms(_run(s, i1, i2), 1)
            two_qx, two_q2 = _plus(first_qx, second_qx), _plus(first_q2, second_q2)
            for i3 in range(max(i2, start_last), span):
                third_qx, third_q2 = _terms(_run(s, i2, i3), 2)
                at = _LAST + 512 * i3
                qx = _plus(_plus(two_qx, third_qx), _four(s, at))
                q2 = _plus(_plus(two_q2, third_q2), _four(s, at + 256))
                some = (qx[0] * qx[0] > best * q2[0]) | (qx[1] * qx[1] > best * q2[1])
                if any_lane(some | (qx[2] * qx[2] > best * q2[2]) | (qx[3] * qx[3] > best * q2[3])):
                    best, d, raised = keep_better(best, d, raised, qx[0], q2[0], 0)
                    best, d, raised = keep_better(best, d, raised, qx[1], q2[1], 1)
                    best, d, raised = keep_better(best, d, raised, qx[2], q2[2], 0)
                    best, d, raised = keep_better(best, d, raised, qx[3], q2[3], 1)
    dead = amax < F(1e-16)
    store(scales, 0, select(dead, F(0), d))
    store(raised_by, 0, select(dead, F(0), raised))


def _make(values: int, end_first: int, start_last: int) -> Any:
    functions = {name: specialize(f, str(values), span=values) for name, f in _FUNCTIONS.items()}
    runs = {"span": values, "end_first": end_first, "start_last": start_last}
    return specialize(_search, str(values), helper, **runs, **functions)


_FUNCTIONS = {"sort": _sort, "sum_up": _sum_up, "store_last": _store_last}

#: search(xt, wt, scales, raised) of sub-blocks of 16 and of 32 values: see ``_search``.
search_16, search_32 = _make(16, 16, 0), _make(32, 24, 8)

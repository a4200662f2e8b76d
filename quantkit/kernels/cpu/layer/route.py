"""Routing: the experts of a token and their weights; and the steps on rows before and after the experts.

From the router's logits of a token, as in llama.cpp (b11434 src/llama-graph.cpp build_moe_ffn)::

    probs      softmax(logits), sigmoid(logits), sqrt(softplus(logits)), or the logits themselves (softmax_weight)
    choice     probs + bias; with groups, minus infinity outside the n_group_used groups with the largest top-2 sums
    ids        the n_used largest of choice, descending; ties by lower number (ggml's sort leaves them open); / share
               or those given as chosen
    weights    probs[ids]; softmax of them (softmax_weight); / max(sum, sum_floor) (norm); * scale (unless 0 or 1)

Comparisons use integers that sort as the floats do, so that NaN sorts last and no expert comes twice.

Operations:

    route        batch ids weights logits bias chosen n_expert n_used n_group n_group_used gating norm rows_of
                 scale:f sum_floor:f share; Routing.slots() gives those from n_expert on; bias: f32 [n_expert] or 0;
                 chosen: int32 as ids, or 0
    repeat       batch out x weights width n_used rows_of
    combine      batch out x weights width n_used rows_of; weights 0: the plain sum
"""

from __future__ import annotations

import numpy as np
from numba.core import types

from quantkit.kernels.cpu.core.functions import exp, load_part, sigmoid, softplus, store_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    cast,
    f32x16,
    hmax,
    hmin,
    hsum,
    i32x16,
    load,
    make_constant,
    select,
    splat,
    stack_bytes,
    store,
    vmax,
    vsqrt,
)
from quantkit.kernels.cpu.core.tape import arg, batch_word, farg, first_of, operation
from quantkit.kernels.cpu.layer.elementwise import scale_row

lane_numbers = make_constant(i32x16, range(16), "route.lane_numbers")

_LOWEST = -0x80000000


@inline
def softmax(x, out, n):
    """out[i] = e^(x[i] - max) / sum, f32, n > 0; x and out may be the same."""
    low = splat(f32x16, -np.inf)
    for i in range(0, n - 15, 16):
        low = vmax(load(f32x16, x, 4 * i), low)
    offset, n_tail = 4 * (n - n % 16), n % 16
    tail = lane_numbers() < types.int32(n_tail)
    largest = hmax(vmax(select(tail, load_part(f32x16, x, offset, n_tail), -np.inf), low))
    total = splat(f32x16, 0)
    for i in range(0, n - 15, 16):
        e = exp(load(f32x16, x, 4 * i) - largest)
        total += e
        store(out, 4 * i, e)
    e = select(tail, exp(load_part(f32x16, x, offset, n_tail) - largest), 0.0)
    store_part(out, offset, e, n_tail)
    factor = types.float32(1) / hsum(total + e)
    for i in range(0, n - 15, 16):
        store(out, 4 * i, load(f32x16, out, 4 * i) * factor)
    store_part(out, offset, e * factor, n_tail)


@inline
def _score_groups(choice, scores, n_group, size):
    """scores[g] = sum of the two largest of the ``size`` values of group g."""
    for g in range(n_group):
        best = second = types.float32(-np.inf)
        for i in range(g * size, (g + 1) * size):
            v = load(types.float32, choice, 4 * i)
            if v > best:
                best, second = v, best
            elif v > second:
                second = v
        store(scores, 4 * g, best + second if size > 1 else best)


@inline
def _sort_keys(x, n):
    """Turn n floats in place into integers of the same order; NaN and the padding become the smallest."""
    for i in range(0, n, 16):
        v = load_part(f32x16, x, 4 * i, min(16, n - i)) + 0.0  # -0 becomes 0
        bits = cast(i32x16, v)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        keys = select(v == v, keys, _LOWEST + 1)
        store(x, 4 * i, select(lane_numbers() < types.int32(n - i), keys, _LOWEST))


@inline
def _take_largest(keys, n):
    """Return the index of the largest of n keys, the first of ties, and remove it."""
    best, where = splat(i32x16, _LOWEST), splat(i32x16, 0)
    for i in range(0, n, 16):
        k = load(i32x16, keys, 4 * i)
        better = k > best
        best, where = select(better, k, best), select(better, lane_numbers() + types.int32(i), where)
    top = hmax(best)
    index = types.int64(hmin(select(best == top, where, 0x7FFFFFFF)))
    store(keys, 4 * index, types.int32(_LOWEST))
    return index


@inline
def _keep_groups(choice, n_expert, n_group, n_used):
    """Set the choice outside the n_used best groups to minus infinity."""
    scores, is_kept = stack_bytes(4 * 4096), stack_bytes(4096)
    size = n_expert // n_group
    _score_groups(choice, scores, n_group, size)
    _sort_keys(scores, n_group)
    for g in range(n_group):
        store(is_kept, g, types.uint8(0))
    for _ in range(n_used):
        store(is_kept, _take_largest(scores, n_group), types.uint8(1))
    for i in range(n_expert):
        if load(types.uint8, is_kept, i // size) == 0:
            store(choice, 4 * i, types.float32(-np.inf))


@inline
def _probabilities(logits, probs, n, gating):
    if gating == 0:
        softmax(logits, probs, n)
        return
    for i in range(0, n, 16):
        x = load_part(f32x16, logits, 4 * i, min(16, n - i))
        if gating == 1:
            x = sigmoid(x)
        elif gating == 3:
            x = vsqrt(softplus(x))
        store(probs, 4 * i, x)


@inline
def _normalize(weights, n, gating, norm, scale, floor):
    if gating == 2:
        softmax(weights, weights, n)
    factor = types.float32(1)
    if norm:
        total = types.float64(0)
        for j in range(n):
            total += load(types.float32, weights, 4 * j)
        factor = max(types.float32(total), floor)
    for j in range(n):
        w = load(types.float32, weights, 4 * j) / factor
        store(weights, 4 * j, w * scale if scale != 0 else w)


_IDS, _WEIGHTS, _LOGITS, _BIAS, _CHOSEN, _N_EXPERT, _N_USED, _N_GROUP, _N_GROUP_USED = range(1, 10)
_GATING, _NORM, _ROWS_OF, _SCALE, _SUM_FLOOR, _SHARE = range(10, 16)


@operation(
    "batch ids weights logits bias chosen n_expert n_used n_group n_group_used gating norm rows_of scale:f sum_floor:f"
    " share"
)
def route(args, tid, nth):
    """Choose experts, token by token."""
    n = arg(args, _N_EXPERT)
    n_used = arg(args, _N_USED)
    gating = arg(args, _GATING)
    n_group, bias = arg(args, _N_GROUP), arg(args, _BIAS)
    rows = batch_word(args, arg(args, _ROWS_OF))
    probs, choice = stack_bytes(4 * 4096), stack_bytes(4 * 4096)
    for row in range(first_of(rows, tid, nth), first_of(rows, tid + 1, nth)):
        ids, weights = arg(args, _IDS) + 4 * row * n_used, arg(args, _WEIGHTS) + 4 * row * n_used
        _probabilities(arg(args, _LOGITS) + 4 * row * n, probs, n, gating)
        for i in range(0, n, 16):
            v = load(f32x16, probs, 4 * i)
            store(choice, 4 * i, v + load_part(f32x16, bias, 4 * i, min(16, n - i)) if bias else v)
        if n_group > 1:
            _keep_groups(choice, n, n_group, arg(args, _N_GROUP_USED))
        _sort_keys(choice, n)
        for j in range(n_used):
            if arg(args, _CHOSEN) != 0:
                e = types.int64(load(types.int32, arg(args, _CHOSEN), 4 * (row * n_used + j)))
            else:
                e = _take_largest(choice, n) // arg(args, _SHARE)
            store(ids, 4 * j, types.int32(e))
            store(weights, 4 * j, load(types.float32, probs, 4 * e))
        _normalize(weights, n_used, gating, arg(args, _NORM), farg(args, _SCALE), farg(args, _SUM_FLOOR))


# ---------------------------------------------------------------- rows before and after the experts

_OUT, _X, _W, _WIDTH, _USED, _ROWS = range(1, 7)
#: Columns of a unit of work.
PART = 512


@operation("batch out x weights width n_used rows_of")
def repeat(args, tid, nth):
    """out row (t, j) = x row t * weights[t, j]"""
    width, n_used = arg(args, _WIDTH), arg(args, _USED)
    rows = batch_word(args, arg(args, _ROWS)) * n_used
    for row in range(first_of(rows, tid, nth), first_of(rows, tid + 1, nth)):
        x, out = arg(args, _X) + 4 * width * (row // n_used), arg(args, _OUT) + 4 * width * row
        w = load(types.float32, arg(args, _W), 4 * row)
        scale_row(out, x, width, w)


@operation("batch out x weights width n_used rows_of")
def combine(args, tid, nth):
    """out row t = sum over j, in order, of weights[t, j] * x row (t, j); each product and sum is rounded."""
    width = arg(args, _WIDTH)
    n_used = arg(args, _USED)
    weights = arg(args, _W)
    parts = (width + PART - 1) // PART
    units = batch_word(args, arg(args, _ROWS)) * parts
    for unit in range(first_of(units, tid, nth), first_of(units, tid + 1, nth)):
        row, first = unit // parts, unit % parts * PART
        x, out = arg(args, _X) + 4 * width * n_used * row, arg(args, _OUT) + 4 * width * row
        last = min(first + PART, width)
        for i in range(first, last - 15, 16):
            total = load(f32x16, x, 4 * i)
            if weights:
                total = total * load(types.float32, weights, 4 * row * n_used)
            for j in range(1, n_used):
                v = load(f32x16, x, 4 * (j * width + i))
                if weights:
                    v = v * load(types.float32, weights, 4 * (row * n_used + j))
                total += v
            store(out, 4 * i, total)
        offset, n = 4 * (last - last % 16), last % 16
        if n:
            total = splat(f32x16, 0)
            for j in range(n_used):
                v = load_part(f32x16, x, 4 * j * width + offset, n)
                if weights:
                    v = v * load(types.float32, weights, 4 * (row * n_used + j))
                total = v if j == 0 else total + v
            store_part(out, offset, total, n)

"""Weights of the four residual streams in a layer's input and output (DeepSeek 4).

    stream_weights  batch before after across x scale base rounds eps:f rows_of per
                    ops.StreamWeights: before and after [4], across [16] of x [24] a row; scale: [3], base: [24]

The matrix of a row is one vector, whose rows and columns are added up by shuffles. Values have one row a token (per 1).
"""

from __future__ import annotations

from numba.core import types

from quantkit.kernels.cpu.core.functions import exp, load_part, sigmoid, store_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32x16, load, make_shuffle, store, vmax
from quantkit.kernels.cpu.core.tape import arg, batch_word, farg, operation
from quantkit.kernels.cpu.layer.elementwise import share

_BEFORE, _AFTER, _ACROSS, _X, _SCALE, _BASE, _ROUNDS, _EPS, _ROWS_OF = range(1, 10)

#: Shuffles of a 4 x 4 matrix: swap neighbours in a row, or pairs of them; swap neighbouring rows, or pairs of them;
#: transpose.
_swap_lanes = make_shuffle([i ^ 1 for i in range(16)], "streams_beside")
_swap_pairs = make_shuffle([i ^ 2 for i in range(16)], "streams_across")
_below = make_shuffle([i ^ 4 for i in range(16)], "streams_below")
_far_below = make_shuffle([i ^ 8 for i in range(16)], "streams_far_below")
_transposed = make_shuffle([i % 4 * 4 + i // 4 for i in range(16)], "streams_transposed")


@inline
def _sum_of_rows(c):
    pairs = c + _swap_lanes(c)
    return pairs + _swap_pairs(pairs)


@inline
def _sum_of_columns(c):
    pairs = c + _below(c)
    return pairs + _far_below(pairs)


@operation("batch before after across x scale base rounds eps:f rows_of per")
def stream_weights(args, tid, nth):
    """Compute the weights of four streams; a unit of work is a row, its matrix one vector."""
    scale = arg(args, _SCALE)
    base = arg(args, _BASE)
    eps = farg(args, _EPS)
    by_before, by_after = load(types.float32, scale, 0), load(types.float32, scale, 4)
    first, end = share(batch_word(args, arg(args, _ROWS_OF)), 1024, tid, nth)
    for row in range(first, end):
        x = arg(args, _X) + 96 * row
        before = load_part(f32x16, x, 0, 4) * by_before + load_part(f32x16, base, 0, 4)
        store_part(arg(args, _BEFORE), 16 * row, sigmoid(before) + eps, 4)
        after = load_part(f32x16, x, 16, 4) * by_after + load_part(f32x16, base, 16, 4)
        store_part(arg(args, _AFTER), 16 * row, sigmoid(after) * 2.0, 4)
        c = load(f32x16, x, 32) * load(types.float32, scale, 8) + load(f32x16, base, 32)
        largest = vmax(c, _swap_lanes(c))
        c = exp(c - vmax(largest, _swap_pairs(largest)))
        c = c / _sum_of_rows(c) + eps
        c = c / (_sum_of_columns(c) + eps)
        for _ in range(arg(args, _ROUNDS) - 1):
            c = c / (_sum_of_rows(c) + eps)
            c = c / (_sum_of_columns(c) + eps)
        store(arg(args, _ACROSS), 64 * row, _transposed(c))

"""One row for every block of positions, a mixture of its tokens' rows, column by column (DeepSeek 4).

    compress  batch out kv score ape state width ratio overlap
              out, kv, score: float32 [n_tokens, width], with overlap kv and score twice as wide; ape: [ratio, as wide]
              state: float32 [sequences, 3, width], with overlap [sequences, 9, width]

With w_i the softmax of score_i + ape_i over the tokens of a block, its last token's out is the sum of w_i kv_i; that of
others is 0. It is gathered token by token: largest score m, sum of weights s, sum of values a, and for a new token

    m' = max(m, score)    f = e^(m - m')    g = e^(score - m')    s = f s + g    a = f a + g kv

With overlap a block is made of the second halves of its tokens, and of the first halves of those of the block before.
The state holds m, s and a of the second halves, of the first ones, and of the first ones of the block before. So
results do not depend on how tokens are divided into batches. Tokens are processed in batch order; a unit of work is 16
columns.
"""

from __future__ import annotations

from numba import types

from quantkit.kernels.cpu.core.functions import exp, load_part, store_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32x16, splat, vmax
from quantkit.kernels.cpu.core.simd import load as load_number
from quantkit.kernels.cpu.core.tape import N_TOKENS, POSITIONS, SEQUENCES, arg, batch_word, first_of, operation

_OUT, _KV, _SCORE, _APE, _STATE, _WIDTH, _RATIO, _OVERLAP = range(1, 9)


@inline
def _load_sums(state, stride, n):
    """Return m, s and a of 16 columns."""
    m, s = load_part(f32x16, state, 0, n), load_part(f32x16, state, stride, n)
    return m, s, load_part(f32x16, state, 2 * stride, n)


@inline
def _store_sums(state, stride, n, m, s, a):
    store_part(state, 0, m, n)
    store_part(state, stride, s, n)
    store_part(state, 2 * stride, a, n)


@inline
def _add_token(state, stride, n, starts, score, kv):
    """Add a token to the sums of 16 columns, or begin with it."""
    if starts:
        _store_sums(state, stride, n, score, splat(f32x16, 1.0), kv)
    else:
        m, s, a = _load_sums(state, stride, n)
        largest = vmax(m, score)
        f, g = exp(m - largest), exp(score - largest)
        _store_sums(state, stride, n, largest, s * f + g, a * f + kv * g)


@inline
def _mixture(state, stride, n, with_before):
    """Return the row of a block; with_before: the block before counts, too."""
    m, s, a = _load_sums(state, stride, n)
    if with_before:
        m1, s1, a1 = _load_sums(state + 6 * stride, stride, n)
        largest = vmax(m, m1)
        f, g = exp(m1 - largest), exp(m - largest)
        s, a = s1 * f + s * g, a1 * f + a * g
    return a / s


@operation("batch out kv score ape state width ratio overlap")
def compress(args, tid, nth):
    """Make the rows of blocks; slots: see the top of this file."""
    width = arg(args, _WIDTH)
    ratio = arg(args, _RATIO)
    overlap = arg(args, _OVERLAP)
    wide = width * (1 + overlap)
    stride = 4 * width
    parts = (width + 15) // 16
    for part in range(first_of(parts, tid, nth), first_of(parts, tid + 1, nth)):
        n, column = min(16, width - 16 * part), 64 * part
        for t in range(batch_word(args, N_TOKENS)):
            sequence = types.int64(load_number(types.int32, batch_word(args, SEQUENCES), 4 * t))
            position = types.int64(load_number(types.int32, batch_word(args, POSITIONS), 4 * t))
            i = position % ratio
            state = arg(args, _STATE) + stride * (9 if overlap else 3) * sequence + column
            for half in range(1 + overlap):  # the second one first
                offset = column + stride * (overlap - half)
                score = load_part(f32x16, arg(args, _SCORE), 4 * wide * t + offset, n)
                score = score + load_part(f32x16, arg(args, _APE), 4 * wide * i + offset, n)
                kv = load_part(f32x16, arg(args, _KV), 4 * wide * t + offset, n)
                _add_token(state + 3 * half * stride, stride, n, i == 0, score, kv)
            out = splat(f32x16, 0.0)
            if i == ratio - 1:
                out = _mixture(state, stride, n, overlap != 0 and position >= ratio)
                if overlap:
                    m, s, a = _load_sums(state + 3 * stride, stride, n)
                    _store_sums(state + 6 * stride, stride, n, m, s, a)
            store_part(arg(args, _OUT), stride * t + column, out, n)

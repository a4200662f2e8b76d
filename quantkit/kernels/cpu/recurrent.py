"""Layers that remember a sequence in a state of fixed size: causal convolution and the gated delta rule.

A state is float32 [sequences, width]; a token at position 0 finds zeros, whatever was there before. The tokens of a
batch are taken in its order; sequences may be mixed. Columns do not depend on each other, so threads share columns,
and no result depends on their number.

    convolve     out[t] = sum over i of w[i] x[t - n + 1 + i], each column by itself; state: rows t - n + 1 ... t - 1
                 weight: float32 [width, n] (a column's n taps side by side, as in the GGUF tensor)
    delta_net    of every value head, with S [head_k, head_v]:
                 S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  out = scale S^T q

The delta rule (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks") is computed token by token in two passes over
S: S^T k first (the decay is applied to its result), then decay, update and S^T q at once. A unit of work is a head's
64 columns, [head_k, 64], small enough for the first-level cache, where it stays while all tokens pass.
"""

from __future__ import annotations

from numba import types

from quantkit.kernels.cpu.functions import exp, load_part, muladd, store_part
from quantkit.kernels.cpu.jit import helper, inline
from quantkit.kernels.cpu.simd import extract, f32x16, load, splat, stack_bytes, store
from quantkit.kernels.cpu.tape import (
    N_TOKENS,
    POSITIONS,
    SEQUENCES,
    arg,
    batch_word,
    farg,
    first_of,
    operation,
)

_CONVOLVE_X, _CONVOLVE_OUT, _WEIGHT, _CONVOLVE_STATE, _TAPS, _WIDTH = range(1, 7)
_Q, _K, _V, _G, _BETA, _OUT, _STATE, _N_K_HEAD, _N_V_HEAD, _HEAD_K, _HEAD_V, _SCALE, _TILED = range(1, 14)

#: Columns of a unit of work.
PART = 64
#: The most taps of a convolution (models have 4).
TAPS = 16


@inline
def _get(address, byte, n):
    """16 columns, or as many as are left."""
    if n >= 16:
        return load(f32x16, address, byte)
    return load_part(f32x16, address, byte, n)


@inline
def _put(address, byte, x, n):
    if n >= 16:
        store(address, byte, x)
    else:
        store_part(address, byte, x, n)


# ---------------------------------------------------------------- convolution


@helper
def _convolve_columns(args, first, n, weights):
    """Take n <= PART columns of all tokens; weights: room for them, tap by tap."""
    width, taps = arg(args, _WIDTH), arg(args, _TAPS)
    positions, sequences = batch_word(args, POSITIONS), batch_word(args, SEQUENCES)
    for c in range(n):
        for i in range(taps):
            store(weights, 4 * (PART * i + c), load(types.float32, arg(args, _WEIGHT), 4 * ((first + c) * taps + i)))
    for t in range(batch_word(args, N_TOKENS)):
        sequence = types.int64(load(types.int32, sequences, 4 * t))
        row = 4 * (t * width + first)
        x, out = arg(args, _CONVOLVE_X) + row, arg(args, _CONVOLVE_OUT) + row
        state = arg(args, _CONVOLVE_STATE) + 4 * (sequence * (taps - 1) * width + first)
        begins = load(types.int32, positions, 4 * t) == 0
        for c in range(0, n, 16):
            left = n - c
            total = splat(f32x16, 0.0)
            for i in range(taps - 1):
                before = splat(f32x16, 0.0) if begins else _get(state, 4 * (i * width + c), left)
                total = muladd(before, load(f32x16, weights, 4 * (PART * i + c)), total)
                if i > 0:
                    _put(state, 4 * ((i - 1) * width + c), before, left)
            now = _get(x, 4 * c, left)
            if taps > 1:
                _put(state, 4 * ((taps - 2) * width + c), now, left)
            _put(out, 4 * c, muladd(now, load(f32x16, weights, 4 * (PART * (taps - 1) + c)), total), left)


@operation("batch x out weight state taps width")
def convolve(args, tid, nth):
    """Causal convolution of every column with 1 <= taps <= TAPS; state: [sequences][taps - 1][width]."""
    weights = stack_bytes(4 * 64 * 16)
    width = arg(args, _WIDTH)
    parts = (width + PART - 1) // PART
    for part in range(first_of(parts, tid, nth), first_of(parts, tid + 1, nth)):
        _convolve_columns(args, part * PART, min(PART, width - part * PART), weights)


# ---------------------------------------------------------------- the gated delta rule


@inline
def _number(args, slot, i):
    return load(types.float32, arg(args, slot), 4 * i)


@helper
def _step(s, stride, k, q, v, out, rows, decay, beta, scale):
    """One token, 64 columns of one head: S is ``rows`` rows, ``stride`` bytes apart."""
    a0 = a1 = a2 = a3 = splat(f32x16, 0.0)
    for i in range(rows):
        at, x = s + stride * i, splat(f32x16, load(types.float32, k, 4 * i))
        a0, a1 = muladd(load(f32x16, at, 0), x, a0), muladd(load(f32x16, at, 64), x, a1)
        a2, a3 = muladd(load(f32x16, at, 128), x, a2), muladd(load(f32x16, at, 192), x, a3)
    d0, d1 = (load(f32x16, v, 0) - a0 * decay) * beta, (load(f32x16, v, 64) - a1 * decay) * beta
    d2, d3 = (load(f32x16, v, 128) - a2 * decay) * beta, (load(f32x16, v, 192) - a3 * decay) * beta
    o0 = o1 = o2 = o3 = splat(f32x16, 0.0)
    for i in range(rows):
        at = s + stride * i
        x, y = splat(f32x16, load(types.float32, k, 4 * i)), splat(f32x16, load(types.float32, q, 4 * i))
        s0 = muladd(d0, x, load(f32x16, at, 0) * decay)
        s1 = muladd(d1, x, load(f32x16, at, 64) * decay)
        s2 = muladd(d2, x, load(f32x16, at, 128) * decay)
        s3 = muladd(d3, x, load(f32x16, at, 192) * decay)
        store(at, 0, s0)
        store(at, 64, s1)
        store(at, 128, s2)
        store(at, 192, s3)
        o0, o1, o2, o3 = muladd(s0, y, o0), muladd(s1, y, o1), muladd(s2, y, o2), muladd(s3, y, o3)
    store(out, 0, o0 * scale)
    store(out, 64, o1 * scale)
    store(out, 128, o2 * scale)
    store(out, 192, o3 * scale)


@helper
def _step_part(s, stride, k, q, v, out, rows, decay, beta, scale, n):
    """As _step, for n <= 16 columns."""
    a = splat(f32x16, 0.0)
    for i in range(rows):
        a = muladd(_get(s, stride * i, n), splat(f32x16, load(types.float32, k, 4 * i)), a)
    d = (_get(v, 0, n) - a * decay) * beta
    o = splat(f32x16, 0.0)
    for i in range(rows):
        x = muladd(d, splat(f32x16, load(types.float32, k, 4 * i)), _get(s, stride * i, n) * decay)
        _put(s, stride * i, x, n)
        o = muladd(x, splat(f32x16, load(types.float32, q, 4 * i)), o)
    _put(out, 0, o * scale, n)


@helper
def _zero(s, stride, rows, n):
    for i in range(rows):
        for c in range(n):
            store(s, stride * i + 4 * c, types.float32(0))


@operation("batch q k v g beta out state n_k_head n_v_head head_k head_v scale:f tiled")
def delta_net(args, tid, nth):
    """The gated delta rule over all tokens of the batch; state: [sequences][n_v_head][head_k][head_v]."""
    n_k_head, n_v_head = arg(args, _N_K_HEAD), arg(args, _N_V_HEAD)
    head_k, head_v, scale = arg(args, _HEAD_K), arg(args, _HEAD_V), farg(args, _SCALE)
    positions, sequences = batch_word(args, POSITIONS), batch_word(args, SEQUENCES)
    parts = (head_v + PART - 1) // PART
    units = n_v_head * parts
    for unit in range(first_of(units, tid, nth), first_of(units, tid + 1, nth)):
        head, first = unit // parts, unit % parts * PART
        from_head = head % n_k_head if arg(args, _TILED) else head // (n_v_head // n_k_head)
        n = min(PART, head_v - first)
        for t in range(batch_word(args, N_TOKENS)):
            sequence = types.int64(load(types.int32, sequences, 4 * t))
            s = arg(args, _STATE) + 4 * ((sequence * n_v_head + head) * head_k * head_v + first)
            if load(types.int32, positions, 4 * t) == 0:
                _zero(s, 4 * head_v, head_k, n)
            k = arg(args, _K) + 4 * (t * n_k_head + from_head) * head_k
            q = arg(args, _Q) + 4 * (t * n_k_head + from_head) * head_k
            column = 4 * ((t * n_v_head + head) * head_v + first)
            v, out = arg(args, _V) + column, arg(args, _OUT) + column
            decay = extract(exp(splat(f32x16, _number(args, _G, t * n_v_head + head))), 0)
            beta = _number(args, _BETA, t * n_v_head + head)
            if n == PART:
                _step(s, 4 * head_v, k, q, v, out, head_k, decay, beta, scale)
            else:
                for c in range(0, n, 16):
                    at = 4 * c
                    _step_part(s + at, 4 * head_v, k, q, v + at, out + at, head_k, decay, beta, scale, min(16, n - c))

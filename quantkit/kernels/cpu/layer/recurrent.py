"""Recurrent layers with a state of fixed size per sequence: convolution, gated delta rule, selective scan, RWKV.

A state is float32 [sequences, width]; a token at position 0 starts from zeros, regardless of the state. Tokens are
processed in batch order; sequences may be mixed. Columns are independent, so threads share columns and no result
depends on the number of threads.

    convolve     out[t] = bias + sum over i of w[i] x[t - n + 1 + i] for each column; state: rows t - n + 1 ... t - 1
                 weight: float32 [width, n] (the n taps of a column contiguous, as in the GGUF tensor); bias: or 0
    delta_net    for each value head, with S [head_k, head_v]:
                 S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  out = scale S^T q
                 delta_net_by_row: g has a number for every row of S, not one for all
    ssm_scan     for each head, with S [d_state, head] and dt = softplus(dt + dt_bias):
                 S = exp(a dt) S + b (dt x)^T;  out = (S^T c + d x) silu(z)
                 dt, d, z: or 0, for steps of 1, nothing more, and no gate
    column_scan  for each column, with S [d_state], a [d_state] and dt = softplus(dt):
                 S = exp(a dt) S + b dt x;  out = (S^T c + d x) silu(z)
    wkv          for each head, with S [head, head], w = exp(-exp(g)), or exp(-bound sigmoid(g)) with a bound:
                 S = diag(w) S + k v^T;  out = scale S^T r
                 removed, rate: or 0; S loses (rate * removed) (S^T removed)^T, too, where that is of the S before
                 earlier: out is of the S before; complement: k is k (1 - w)

The delta rule (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks") runs on ROWS = 4 tokens of a sequence at a time
where possible: S is read once for all four, and their effect on each other reduces to dot products. With e_i the
decays, D_i = e_1 ... e_i, P_ji = e_j+1 ... e_i and S before the four:

    d_i   = beta_i (v_i - D_i S^T k_i - sum over j < i of P_ji (k_j . k_i) d_j)
    out_i = scale (D_i S^T q_i + sum over j <= i of P_ji (k_j . q_i) d_j)
    S     = D_4 S + sum over j of P_j4 k_j d_j^T

Where each row of S has its own decay, D and P are diagonal matrices: D_i S^T k_i is S^T (D_i k_i), P_ji (k_j . k_i) is
k_j . P_ji k_i.

A single token takes two passes over S: S^T k; then decay, update and S^T q together. A unit of work is 64 columns of
a head.

The scan (Dao & Gu 2024, "Transformers are SSMs") takes one pass a token, over 64 columns that stay in the L1 cache from
token to token. Processing several tokens together would save only the decay, one of three operations on each value of
S; so results do not depend on how tokens are divided into batches.

So does the recurrence of RWKV (Peng et al. 2024, "Eagle and Finch"; 2025, "RWKV-7 Goose"): S of 64 columns stays in the
L1 cache, one pass a token, two where something of the S before is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types

from quantkit.kernels.cpu.attention.attention_tiles import (
    COLUMNS,
    ROWS,
    inner,
    load_tile,
    outer,
    store_sums,
    store_tile,
    zero_products,
    zero_tile,
)
from quantkit.kernels.cpu.core.functions import exp, load_up_to, sigmoid, softplus, store_up_to
from quantkit.kernels.cpu.core.jit import helper, inline, specialize
from quantkit.kernels.cpu.core.simd import extract, f32x16, load, muladd, splat, stack_bytes, store
from quantkit.kernels.cpu.core.tape import N_TOKENS, POSITIONS, SEQUENCES, arg, batch_word, farg, first_of, operation
from quantkit.kernels.parameters import MAX_DECAYS

_CONVOLVE_X, _CONVOLVE_OUT, _WEIGHT, _CONVOLVE_BIAS, _CONVOLVE_STATE, _TAPS, _WIDTH = range(1, 8)
_Q, _K, _V, _G, _BETA, _OUT, _STATE, _N_K_HEAD, _N_V_HEAD, _HEAD_K, _HEAD_V, _SCALE, _TILED = range(1, 14)
_X, _Z, _DT, _B, _C, _DT_BIAS, _A, _D_SKIP, _SCAN_OUT, _SCAN_STATE, _N_HEAD, _N_GROUP, _HEAD, _D_STATE = range(1, 15)
_RATES, _SKIP, _COLUMN_OUT, _COLUMN_STATE, _COLUMN_WIDTH, _COLUMN_D_STATE = range(6, 12)


class State(NamedTuple):
    """Columns of the state of a head: ``rows`` rows, ``stride`` bytes apart."""

    address: Any
    stride: Any
    rows: Any


class Tokens(NamedTuple):
    """Addresses of a token's keys, queries, values and results, and bytes from one token to the next."""

    k: Any
    q: Any
    v: Any
    out: Any
    k_stride: Any
    v_stride: Any


class Update(NamedTuple):
    """The update of a state by ROWS tokens: addresses of their keys and of the decay of its rows over all of them.

    Strides are bytes: from one token's keys to the next, from one row's decay to the next.
    """

    keys: Any
    key_stride: Any
    decay: Any
    decay_stride: Any


class ScanToken(NamedTuple):
    """Addresses of a token's inputs and result in a scan; z is 0 without a gate."""

    b: Any
    c: Any
    x: Any
    z: Any
    out: Any


class Run(NamedTuple):
    """Consecutive tokens of a sequence from ``begin``: columns of their rows and of the preceding state."""

    x: Any
    state: Any
    stride: Any
    begin: Any
    taps: Any
    starts: Any


#: Columns of a unit of work.
PART = 64
#: The same for a convolution, and its largest number of taps (models have 4).
CONVOLVE_PART, TAPS = 256, 16


# ---------------------------------------------------------------- convolution


@inline
def _run_end(positions, sequences, begin, n_tokens):
    """Return the end of the run of consecutive tokens of one sequence from ``begin``."""
    end = begin + 1
    while (
        end < n_tokens
        and load(types.int32, sequences, 4 * end) == load(types.int32, sequences, 4 * begin)
        and load(types.int32, positions, 4 * end) == load(types.int32, positions, 4 * end - 4) + 1
    ):
        end += 1
    return end


@inline
def _row_before(run, r, byte, n):
    """Return 16 columns of row r of a run; r may lie before its beginning."""
    if r >= run.begin:
        return load_up_to(run.x, run.stride * r + byte, n)
    if run.starts:
        return splat(f32x16, 0.0)
    return load_up_to(run.state, run.stride * (r - run.begin + run.taps - 1) + byte, n)


@helper
def _convolve_run(run, out, end, weights, n):
    """Convolve n columns of a run up to row ``end``, then update the state.

    weights: [taps][CONVOLVE_PART], and the biases as one row more.
    """
    x, state, stride, begin, taps, _ = run
    for t in range(begin, end):
        for c in range(0, n, 16):
            total = splat(f32x16, 0.0)
            if t - taps + 1 >= begin and n - c >= 16:
                for i in range(taps):
                    before = load(f32x16, x, stride * (t - taps + 1 + i) + 4 * c)
                    total = muladd(before, load(f32x16, weights, 4 * (CONVOLVE_PART * i + c)), total)
            else:
                for i in range(taps):
                    before = _row_before(run, t - taps + 1 + i, 4 * c, n - c)
                    total = muladd(before, load(f32x16, weights, 4 * (CONVOLVE_PART * i + c)), total)
            total = total + load(f32x16, weights, 4 * (CONVOLVE_PART * taps + c))
            store_up_to(out, stride * t + 4 * c, total, n - c)
    for i in range(taps - 1):
        for c in range(0, n, 16):
            row = _row_before(run, end - taps + 1 + i, 4 * c, n - c)
            store_up_to(state, stride * i + 4 * c, row, n - c)


@operation("batch x out weight bias state taps width")
def convolve(args, tid, nth):
    """Causal convolution of every column with 1 <= taps <= TAPS; state: [sequences][taps - 1][width]."""
    weights = stack_bytes(17408)  # [TAPS + 1][CONVOLVE_PART]
    width = arg(args, _WIDTH)
    taps = arg(args, _TAPS)
    n_tokens = batch_word(args, N_TOKENS)
    positions, sequences = batch_word(args, POSITIONS), batch_word(args, SEQUENCES)
    parts = (width + CONVOLVE_PART - 1) // CONVOLVE_PART
    for part in range(first_of(parts, tid, nth), first_of(parts, tid + 1, nth)):
        first = part * CONVOLVE_PART
        n = min(CONVOLVE_PART, width - first)
        for i in range(taps):
            for c in range(n):
                w = load(types.float32, arg(args, _WEIGHT), 4 * ((first + c) * taps + i))
                store(weights, 4 * (CONVOLVE_PART * i + c), w)
        for c in range(0, n, 16):
            bias = splat(f32x16, 0.0)
            if arg(args, _CONVOLVE_BIAS):
                bias = load_up_to(arg(args, _CONVOLVE_BIAS), 4 * (first + c), n - c)
            store(weights, 4 * (CONVOLVE_PART * taps + c), bias)
        begin = 0
        while begin < n_tokens:
            end = _run_end(positions, sequences, begin, n_tokens)
            sequence = types.int64(load(types.int32, sequences, 4 * begin))
            state = arg(args, _CONVOLVE_STATE) + 4 * (sequence * (taps - 1) * width + first)
            x, out = arg(args, _CONVOLVE_X) + 4 * first, arg(args, _CONVOLVE_OUT) + 4 * first
            starts = load(types.int32, positions, 4 * begin) == 0
            _convolve_run(Run(x, state, 4 * width, begin, taps, starts), out, end, weights, n)
            begin = end


# ---------------------------------------------------------------- the gated delta rule


@inline
def _one_decay(decay, i):
    return decay


@inline
def _decay_of_row(decay, i):
    return load(types.float32, decay, 4 * i)


@inline
def _no_decay(decay, i):
    return types.float32(1)


#: The decay of row i of S; S^T k is computed from rows times ``before``, and multiplied by ``after``. Bound to the
#: functions above.
row_decay: Any = None
before: Any = None
after: Any = None


def _step(state, token, decay, beta, scale):
    """Process one token on 64 columns of a head."""
    s, stride, rows = state
    k, q, v, out, _, _ = token
    a0 = a1 = a2 = a3 = splat(f32x16, 0.0)
    for i in range(rows):
        row, x = s + stride * i, splat(f32x16, types.float32(load(types.float32, k, 4 * i) * before(decay, i)))
        a0, a1 = muladd(load(f32x16, row, 0), x, a0), muladd(load(f32x16, row, 64), x, a1)
        a2, a3 = muladd(load(f32x16, row, 128), x, a2), muladd(load(f32x16, row, 192), x, a3)
    left = after(decay, 0)
    d0, d1 = (load(f32x16, v, 0) - a0 * left) * beta, (load(f32x16, v, 64) - a1 * left) * beta
    d2, d3 = (load(f32x16, v, 128) - a2 * left) * beta, (load(f32x16, v, 192) - a3 * left) * beta
    o0 = o1 = o2 = o3 = splat(f32x16, 0.0)
    for i in range(rows):
        row = s + stride * i
        x, y = splat(f32x16, load(types.float32, k, 4 * i)), splat(f32x16, load(types.float32, q, 4 * i))
        decayed = row_decay(decay, i)
        s0 = muladd(d0, x, load(f32x16, row, 0) * decayed)
        s1 = muladd(d1, x, load(f32x16, row, 64) * decayed)
        s2 = muladd(d2, x, load(f32x16, row, 128) * decayed)
        s3 = muladd(d3, x, load(f32x16, row, 192) * decayed)
        store(row, 0, s0)
        store(row, 64, s1)
        store(row, 128, s2)
        store(row, 192, s3)
        o0 = muladd(s0, y, o0)
        o1 = muladd(s1, y, o1)
        o2 = muladd(s2, y, o2)
        o3 = muladd(s3, y, o3)
    store(out, 0, o0 * scale)
    store(out, 64, o1 * scale)
    store(out, 128, o2 * scale)
    store(out, 192, o3 * scale)


def _step_part(state, token, decay, beta, scale, n):
    """Do ``_step`` for n <= 16 columns."""
    s, stride, rows = state
    k, q, v, out, _, _ = token
    a = splat(f32x16, 0.0)
    for i in range(rows):
        x = splat(f32x16, types.float32(load(types.float32, k, 4 * i) * before(decay, i)))
        a = muladd(load_up_to(s, stride * i, n), x, a)
    d = (load_up_to(v, 0, n) - a * after(decay, 0)) * beta
    o = splat(f32x16, 0.0)
    for i in range(rows):
        decayed = load_up_to(s, stride * i, n) * row_decay(decay, i)
        x = muladd(d, splat(f32x16, load(types.float32, k, 4 * i)), decayed)
        store_up_to(s, stride * i, x, n)
        o = muladd(x, splat(f32x16, load(types.float32, q, 4 * i)), o)
    store_up_to(out, 0, o * scale, n)


_ONE_DECAY: dict[str, Any] = {"row_decay": _one_decay, "before": _no_decay, "after": _one_decay}
_BY_ROW: dict[str, Any] = {"row_decay": _decay_of_row, "before": _decay_of_row, "after": _no_decay}
_step_one_decay, _step_part_one_decay = (
    specialize(step, "one_decay", helper, **_ONE_DECAY) for step in (_step, _step_part)
)
_step_by_row, _step_part_by_row = (specialize(step, "by_row", helper, **_BY_ROW) for step in (_step, _step_part))


@helper
def _zero(s, stride, rows, n):
    for i in range(rows):
        for c in range(n):
            store(s, stride * i + 4 * c, types.float32(0))


#: Byte offsets of what ROWS tokens share, ROWS numbers each: decays, their running products, the last product ROWS
#: times, the decay from each token to the last; then dot products [ROWS][ROWS]; then tiles [ROWS][COLUMNS] of vectors.
_DECAY, _PRODUCT, _LAST, _TO_LAST, _KK, _QK = (4 * ROWS * i for i in (0, 1, 2, 3, 4, 4 + ROWS))
_KS, _QS, _D = (1024 + 64 * ROWS * COLUMNS * i for i in range(3))
#: If rows have their own decays: [ROWS][MAX_DECAYS] of keys and queries times the decays up to them, of keys times the
#: decays after them; then the products of all decays (of one token: its decays).
_DECAYED_K, _DECAYED_Q, _K_TO_LAST, _LAST_OF_ROWS = (4096 + 4 * ROWS * MAX_DECAYS * i for i in range(4))
_SHARED = 4096 + 4 * (3 * ROWS + 1) * MAX_DECAYS


@helper
def _set_shared(k, q, stride, n, shared):
    """Fill the matrix of tokens k and q: dot products times the decay between the two."""
    kk, qk = zero_products(), zero_products()
    for j in range(0, 4 * n, 64):
        row = k + j
        k1 = row + stride
        k2 = row + 2 * stride
        k3 = row + 3 * stride
        kk = inner(kk, row, k1, k2, k3, row, stride)
        qk = inner(qk, row, k1, k2, k3, q + j, stride)
    store_sums(kk, shared + _KK, 4 * ROWS)
    store_sums(qk, shared + _QK, 4 * ROWS)
    product = types.float32(1)
    for i in range(ROWS):
        product *= load(types.float32, shared, _DECAY + 4 * i)
        store(shared, _PRODUCT + 4 * i, product)
        between = types.float32(1)
        for j in range(i, -1, -1):
            row = 4 * (ROWS * i + j)
            store(shared, _KK + row, types.float32(load(types.float32, shared, _KK + row) * between))
            store(shared, _QK + row, types.float32(load(types.float32, shared, _QK + row) * between))
            store(shared, _TO_LAST + 4 * j, between)  # the last iteration stores that of i = ROWS - 1
            between *= load(types.float32, shared, _DECAY + 4 * j)
    for i in range(ROWS):
        store(shared, _LAST + 4 * i, product)


@helper
def _set_shared_by_row(k, q, stride, g, g_stride, n, shared):
    """Do ``_set_shared`` with logarithms of decays at g; the decays that remain to be applied are 1."""
    kk10 = kk20 = kk21 = kk30 = kk31 = kk32 = zero = splat(f32x16, 0.0)
    qk00 = qk10 = qk11 = qk20 = qk21 = qk22 = qk30 = qk31 = qk32 = qk33 = zero
    for j in range(0, 4 * n, 64):
        k0, k1 = load(f32x16, k, j), load(f32x16, k, stride + j)
        k2, k3 = load(f32x16, k, 2 * stride + j), load(f32x16, k, 3 * stride + j)
        q0, q1 = load(f32x16, q, j), load(f32x16, q, stride + j)
        q2, q3 = load(f32x16, q, 2 * stride + j), load(f32x16, q, 3 * stride + j)
        e0, e1 = exp(load(f32x16, g, j)), exp(load(f32x16, g, g_stride + j))
        e2, e3 = exp(load(f32x16, g, 2 * g_stride + j)), exp(load(f32x16, g, 3 * g_stride + j))
        # Keys of token 1 times the decays between the tokens.
        k01 = k0 * e1
        k02 = k0 * (e1 * e2)
        k03 = k0 * (e1 * e2 * e3)
        k12 = k1 * e2
        k13 = k1 * (e2 * e3)
        k23 = k2 * e3
        kk10 = muladd(k01, k1, kk10)
        kk20 = muladd(k02, k2, kk20)
        kk21 = muladd(k12, k2, kk21)
        kk30 = muladd(k03, k3, kk30)
        kk31 = muladd(k13, k3, kk31)
        kk32 = muladd(k23, k3, kk32)
        qk00 = muladd(k0, q0, qk00)
        qk10 = muladd(k01, q1, qk10)
        qk11 = muladd(k1, q1, qk11)
        qk20 = muladd(k02, q2, qk20)
        qk21 = muladd(k12, q2, qk21)
        qk22 = muladd(k2, q2, qk22)
        qk30 = muladd(k03, q3, qk30)
        qk31 = muladd(k13, q3, qk31)
        qk32 = muladd(k23, q3, qk32)
        qk33 = muladd(k3, q3, qk33)
        e1 = e1 * e0
        e2 = e2 * e1
        e3 = e3 * e2
        _store_rows(shared + _DECAYED_K + j, k0 * e0, k1 * e1, k2 * e2, k3 * e3)
        _store_rows(shared + _DECAYED_Q + j, q0 * e0, q1 * e1, q2 * e2, q3 * e3)
        _store_rows(shared + _K_TO_LAST + j, k03, k13, k23, k3)
        store(shared, _LAST_OF_ROWS + j, e3)
    kk = (zero, zero, zero, zero, kk10, zero, zero, zero, kk20, kk21, zero, zero, kk30, kk31, kk32, zero)
    qk = (qk00, zero, zero, zero, qk10, qk11, zero, zero, qk20, qk21, qk22, zero, qk30, qk31, qk32, qk33)
    store_sums(kk, shared + _KK, 4 * ROWS)
    store_sums(qk, shared + _QK, 4 * ROWS)
    for i in range(ROWS):
        store(shared, _PRODUCT + 4 * i, types.float32(1))
        store(shared, _TO_LAST + 4 * i, types.float32(1))


@inline
def _store_rows(target, x0, x1, x2, x3):
    store(target, 0, x0)
    store(target, 4 * MAX_DECAYS, x1)
    store(target, 8 * MAX_DECAYS, x2)
    store(target, 12 * MAX_DECAYS, x3)


@inline
def _times(s, stride, x, x_stride, rows, out):
    """Compute S^T x for ROWS vectors x."""
    tile = zero_tile()
    for i in range(rows):
        tile = outer(tile, s + stride * i, 64, x + 4 * i, x_stride)
    store_tile(tile, out, 64 * COLUMNS)


@helper
def _steps(state, tokens, update, beta, beta_stride, scale, shared):
    """Process ROWS tokens on COLUMNS vectors of columns of a head."""
    s, stride, rows = state
    k, q, v, out, k_stride, v_stride = tokens
    _times(s, stride, k, k_stride, rows, shared + _KS)
    _times(s, stride, q, k_stride, rows, shared + _QS)
    for i in range(ROWS):
        product = load(types.float32, shared, _PRODUCT + 4 * i)
        for c in range(COLUMNS):
            offset = 64 * (COLUMNS * i + c)
            x = load(f32x16, shared, _KS + offset) * product
            y = load(f32x16, shared, _QS + offset) * product
            for j in range(i):
                d = load(f32x16, shared, _D + 64 * (COLUMNS * j + c))
                x = muladd(d, load(types.float32, shared, _KK + 4 * (ROWS * i + j)), x)
                y = muladd(d, load(types.float32, shared, _QK + 4 * (ROWS * i + j)), y)
            d = (load(f32x16, v, v_stride * i + 64 * c) - x) * load(types.float32, beta, beta_stride * i)
            store(shared, _D + offset, d)
            y = muladd(d, load(types.float32, shared, _QK + 4 * (ROWS * i + i)), y)
            store(out, v_stride * i + 64 * c, y * scale)
    for i in range(ROWS):
        for c in range(COLUMNS):
            offset = _D + 64 * (COLUMNS * i + c)
            store(shared, offset, load(f32x16, shared, offset) * load(types.float32, shared, _TO_LAST + 4 * i))
    for i in range(0, rows, ROWS):
        tile = load_tile(zero_tile(), s + stride * i, stride, update.decay + update.decay_stride * i)
        for j in range(ROWS):
            tile = outer(tile, shared + _D + 64 * COLUMNS * j, 64, update.keys + update.key_stride * j + 4 * i, 4)
        store_tile(tile, s + stride * i, stride)


@inline
def _same_sequence(positions, sequences, t, n_tokens):
    """Return whether tokens t ... t + ROWS - 1 are of one sequence that does not begin among them."""
    if t + ROWS > n_tokens:
        return False
    equal = True
    for i in range(t + 1, t + ROWS):
        of_sequence = load(types.int32, sequences, 4 * i) == load(types.int32, sequences, 4 * t)
        equal = equal and of_sequence and load(types.int32, positions, 4 * i) != 0
    return equal


@helper
def _decay(args, i):
    return extract(exp(splat(f32x16, load(types.float32, arg(args, _G), 4 * i))), 0)


@inline
def _places(args, t, head, from_head, first, n):
    """Return where S, k, q, v and out of token t are, from column ``first`` of a head; S is zero where a sequence
    begins."""
    n_v_head = arg(args, _N_V_HEAD)
    head_k = arg(args, _HEAD_K)
    head_v = arg(args, _HEAD_V)
    sequence = types.int64(load(types.int32, batch_word(args, SEQUENCES), 4 * t))
    s = arg(args, _STATE) + 4 * ((sequence * n_v_head + head) * head_k * head_v + first)
    if load(types.int32, batch_word(args, POSITIONS), 4 * t) == 0:
        _zero(s, 4 * head_v, head_k, n)
    offset = 4 * (arg(args, _N_K_HEAD) * t + from_head) * head_k
    of_head = 4 * ((t * n_v_head + head) * head_v + first)
    return s, arg(args, _K) + offset, arg(args, _Q) + offset, arg(args, _V) + of_head, arg(args, _OUT) + of_head


@helper
def _advance(args, t, in_block, head, from_head, first, n, shared):
    """Advance n columns of a head, from ``first``, by token t, or by ROWS tokens from t."""
    n_v_head = arg(args, _N_V_HEAD)
    head_k = arg(args, _HEAD_K)
    head_v = arg(args, _HEAD_V)
    s, k, q, v, out = _places(args, t, head, from_head, first, n)
    scale = farg(args, _SCALE)
    k_stride = 4 * arg(args, _N_K_HEAD) * head_k
    number = t * n_v_head + head
    if in_block:
        for i in range(ROWS):
            store(shared, _DECAY + 4 * i, _decay(args, number + n_v_head * i))
        _set_shared(k, q, k_stride, head_k, shared)
        beta = arg(args, _BETA) + 4 * number
        for c in range(0, 4 * n, 64 * COLUMNS):
            tokens = Tokens(k, q, v + c, out + c, k_stride, 4 * n_v_head * head_v)
            update = Update(k, k_stride, shared + _LAST, 0)
            _steps(State(s + c, 4 * head_v, head_k), tokens, update, beta, 4 * n_v_head, scale, shared)
        return
    beta, decay = load(types.float32, arg(args, _BETA), 4 * number), _decay(args, number)
    if n == PART:
        _step_one_decay(State(s, 4 * head_v, head_k), Tokens(k, q, v, out, 0, 0), decay, beta, scale)
        return
    for c in range(0, 4 * n, 64):
        state, token = State(s + c, 4 * head_v, head_k), Tokens(k, q, v + c, out + c, 0, 0)
        _step_part_one_decay(state, token, decay, beta, scale, min(16, n - c // 4))


@helper
def _advance_by_row(args, t, in_block, head, from_head, first, n, shared):
    """Do ``_advance`` where every row of S has its own decay; at most MAX_DECAYS rows."""
    n_v_head = arg(args, _N_V_HEAD)
    head_k = arg(args, _HEAD_K)
    head_v = arg(args, _HEAD_V)
    s, k, q, v, out = _places(args, t, head, from_head, first, n)
    scale = farg(args, _SCALE)
    k_stride = 4 * arg(args, _N_K_HEAD) * head_k
    number = t * n_v_head + head
    g = arg(args, _G) + 4 * number * head_k
    decays = shared + _LAST_OF_ROWS
    row = 4 * MAX_DECAYS
    if in_block:
        _set_shared_by_row(k, q, k_stride, g, 4 * n_v_head * head_k, head_k, shared)
        beta = arg(args, _BETA) + 4 * number
        for c in range(0, 4 * n, 64 * COLUMNS):
            tokens = Tokens(shared + _DECAYED_K, shared + _DECAYED_Q, v + c, out + c, row, 4 * n_v_head * head_v)
            update = Update(shared + _K_TO_LAST, row, decays, 4)
            _steps(State(s + c, 4 * head_v, head_k), tokens, update, beta, 4 * n_v_head, scale, shared)
        return
    for i in range(0, 4 * head_k, 64):
        store(decays, i, exp(load_up_to(g, i, head_k - i // 4)))
    beta = load(types.float32, arg(args, _BETA), 4 * number)
    if n == PART:
        _step_by_row(State(s, 4 * head_v, head_k), Tokens(k, q, v, out, 0, 0), decays, beta, scale)
        return
    for c in range(0, 4 * n, 64):
        state, token = State(s + c, 4 * head_v, head_k), Tokens(k, q, v + c, out + c, 0, 0)
        _step_part_by_row(state, token, decays, beta, scale, min(16, n - c // 4))


#: Bound to one of the two above.
advance: Any = None


@operation("batch q k v g beta out state n_k_head n_v_head head_k head_v scale:f tiled")
def _delta_net(args, tid, nth):
    """Apply the gated delta rule to all tokens of the batch; state: [sequences][n_v_head][head_k][head_v]."""
    n_k_head, n_v_head = arg(args, _N_K_HEAD), arg(args, _N_V_HEAD)
    head_v, n_tokens = arg(args, _HEAD_V), batch_word(args, N_TOKENS)
    positions, sequences = batch_word(args, POSITIONS), batch_word(args, SEQUENCES)
    shared = stack_bytes(_SHARED)
    parts = (head_v + PART - 1) // PART
    units = n_v_head * parts
    for unit in range(first_of(units, tid, nth), first_of(units, tid + 1, nth)):
        head, first = unit // parts, unit % parts * PART
        from_head = head % n_k_head if arg(args, _TILED) else head // (n_v_head // n_k_head)
        n = min(PART, head_v - first)
        t = 0
        while t < n_tokens:
            in_block = n == PART and arg(args, _HEAD_K) % 16 == 0 and _same_sequence(positions, sequences, t, n_tokens)
            advance(args, t, in_block, head, from_head, first, n, shared)
            t += ROWS if in_block else 1


delta_net, delta_net_by_row = (
    _delta_net.bind(name, advance=advance) for name, advance in (("alike", _advance), ("by_row", _advance_by_row))
)


# ---------------------------------------------------------------- the selective scan


@inline
def _silu(z):
    return z * sigmoid(z)


@helper
def _scan_step(state, token, decay, dt, skip):
    """Process one token on 64 columns of a head."""
    s, stride, rows = state
    b, c, x, z, out = token
    x0 = load(f32x16, x, 0)
    x1 = load(f32x16, x, 64)
    x2 = load(f32x16, x, 128)
    x3 = load(f32x16, x, 192)
    d0 = x0 * dt
    d1 = x1 * dt
    d2 = x2 * dt
    d3 = x3 * dt
    o0 = o1 = o2 = o3 = splat(f32x16, 0.0)
    for i in range(rows):
        row = s + stride * i
        y, w = splat(f32x16, load(types.float32, b, 4 * i)), splat(f32x16, load(types.float32, c, 4 * i))
        s0 = muladd(d0, y, load(f32x16, row, 0) * decay)
        s1 = muladd(d1, y, load(f32x16, row, 64) * decay)
        s2 = muladd(d2, y, load(f32x16, row, 128) * decay)
        s3 = muladd(d3, y, load(f32x16, row, 192) * decay)
        store(row, 0, s0)
        store(row, 64, s1)
        store(row, 128, s2)
        store(row, 192, s3)
        o0 = muladd(s0, w, o0)
        o1 = muladd(s1, w, o1)
        o2 = muladd(s2, w, o2)
        o3 = muladd(s3, w, o3)
    o0 = muladd(x0, skip, o0)
    o1 = muladd(x1, skip, o1)
    o2 = muladd(x2, skip, o2)
    o3 = muladd(x3, skip, o3)
    if z:
        o0, o1 = o0 * _silu(load(f32x16, z, 0)), o1 * _silu(load(f32x16, z, 64))
        o2, o3 = o2 * _silu(load(f32x16, z, 128)), o3 * _silu(load(f32x16, z, 192))
    store(out, 0, o0)
    store(out, 64, o1)
    store(out, 128, o2)
    store(out, 192, o3)


@helper
def _scan_step_part(state, token, decay, dt, skip, n):
    """Do ``_scan_step`` for n <= 16 columns."""
    s, stride, rows = state
    b, c, x, z, out = token
    x0 = load_up_to(x, 0, n)
    d, o = x0 * dt, splat(f32x16, 0.0)
    for i in range(rows):
        y = muladd(d, splat(f32x16, load(types.float32, b, 4 * i)), load_up_to(s, stride * i, n) * decay)
        store_up_to(s, stride * i, y, n)
        o = muladd(y, splat(f32x16, load(types.float32, c, 4 * i)), o)
    o = muladd(x0, skip, o)
    if z:
        o = o * _silu(load_up_to(z, 0, n))
    store_up_to(out, 0, o, n)


@helper
def _set_steps(args, head, t, n, steps):
    """Fill in dt and exp(a dt) of tokens t ... t + n, 16 of each."""
    dt = splat(f32x16, 1.0)
    if arg(args, _DT):
        n_head, bias = arg(args, _N_HEAD), load(types.float32, arg(args, _DT_BIAS), 4 * head)
        for i in range(16):
            x = load(types.float32, arg(args, _DT), 4 * ((t + i) * n_head + head)) if i < n else types.float32(0)
            store(steps, 4 * i, types.float32(x + bias))
        dt = softplus(load(f32x16, steps, 0))
    store(steps, 0, dt)
    store(steps, 64, exp(dt * load(types.float32, arg(args, _A), 4 * head)))


@helper
def _scan_token(args, t, head, first, n, dt, decay):
    """Advance n columns of a head, from ``first``, by token t."""
    n_head = arg(args, _N_HEAD)
    width = arg(args, _HEAD)
    rows = arg(args, _D_STATE)
    sequence = types.int64(load(types.int32, batch_word(args, SEQUENCES), 4 * t))
    s = arg(args, _SCAN_STATE) + 4 * ((sequence * n_head + head) * rows * width + first)
    if load(types.int32, batch_word(args, POSITIONS), 4 * t) == 0:
        _zero(s, 4 * width, rows, n)
    offset = 4 * (t * arg(args, _N_GROUP) + head // (n_head // arg(args, _N_GROUP))) * rows
    b, c = arg(args, _B) + offset, arg(args, _C) + offset
    offset = 4 * ((t * n_head + head) * width + first)
    x = arg(args, _X) + offset
    out = arg(args, _SCAN_OUT) + offset
    z = arg(args, _Z)
    z_step = 0
    if z:
        z, z_step = z + offset, 1
    skip = types.float32(0)
    if arg(args, _D_SKIP):
        skip = load(types.float32, arg(args, _D_SKIP), 4 * head)
    if n == PART:
        _scan_step(State(s, 4 * width, rows), ScanToken(b, c, x, z, out), decay, dt, skip)
        return
    for i in range(0, 4 * n, 64):
        state, token = State(s + i, 4 * width, rows), ScanToken(b, c, x + i, z + z_step * i, out + i)
        _scan_step_part(state, token, decay, dt, skip, min(16, n - i // 4))


@operation("batch x z dt b c dt_bias a d out state n_head n_group head d_state")
def ssm_scan(args, tid, nth):
    """Apply Mamba 2's selective scan to all tokens of the batch; state: [sequences][n_head][d_state][head]."""
    width = arg(args, _HEAD)
    n_tokens = batch_word(args, N_TOKENS)
    steps = stack_bytes(128)
    parts = (width + PART - 1) // PART
    units = arg(args, _N_HEAD) * parts
    for unit in range(first_of(units, tid, nth), first_of(units, tid + 1, nth)):
        head, first = unit // parts, unit % parts * PART
        for begin in range(0, n_tokens, 16):
            n = min(16, n_tokens - begin)
            _set_steps(args, head, begin, n, steps)
            for i in range(n):
                dt, decay = load(types.float32, steps, 4 * i), load(types.float32, steps, 64 + 4 * i)
                _scan_token(args, begin + i, head, first, min(PART, width - first), dt, decay)


# ---------------------------------------------------------------- the scan of columns


@helper
def _column_step(state, a, token, dt, skip, n):
    """Process one token on n <= 16 columns; the rates a are as far apart as the state's rows."""
    s, stride, rows = state
    b, c, x, z, out = token
    x0, steps = load_up_to(x, 0, n), softplus(load_up_to(dt, 0, n))
    d, o = x0 * steps, splat(f32x16, 0.0)
    for i in range(rows):
        decay = exp(load_up_to(a, stride * i, n) * steps)
        y = muladd(d, splat(f32x16, load(types.float32, b, 4 * i)), load_up_to(s, stride * i, n) * decay)
        store_up_to(s, stride * i, y, n)
        o = muladd(y, splat(f32x16, load(types.float32, c, 4 * i)), o)
    store_up_to(out, 0, muladd(x0, load_up_to(skip, 0, n), o) * _silu(load_up_to(z, 0, n)), n)


@operation("batch x z dt b c a d out state width d_state")
def column_scan(args, tid, nth):
    """Apply Mamba's selective scan to all tokens of the batch; a: [d_state][width]; state: [sequences][d_state][width].

    A unit of work is 64 columns, whose states stay in the L1 cache from token to token.
    """
    width = arg(args, _COLUMN_WIDTH)
    rows = arg(args, _COLUMN_D_STATE)
    n_tokens = batch_word(args, N_TOKENS)
    stride, parts = 4 * width, (width + PART - 1) // PART
    for part in range(first_of(parts, tid, nth), first_of(parts, tid + 1, nth)):
        first = part * PART
        n = min(PART, width - first)
        for t in range(n_tokens):
            sequence = types.int64(load(types.int32, batch_word(args, SEQUENCES), 4 * t))
            s = arg(args, _COLUMN_STATE) + 4 * (sequence * rows * width + first)
            if load(types.int32, batch_word(args, POSITIONS), 4 * t) == 0:
                _zero(s, stride, rows, n)
            b, c = arg(args, _B) + 4 * t * rows, arg(args, _C) + 4 * t * rows
            offset = stride * t + 4 * first
            for i in range(0, 4 * n, 64):
                place, column = offset + i, 4 * first + i
                token = ScanToken(b, c, arg(args, _X) + place, arg(args, _Z) + place, arg(args, _COLUMN_OUT) + place)
                _column_step(
                    State(s + i, stride, rows), arg(args, _RATES) + column, token, arg(args, _DT) + place,
                    arg(args, _SKIP) + column, min(16, n - i // 4),
                )  # fmt: skip


# ---------------------------------------------------------------- RWKV

_R, _W, _W_K, _W_V, _REMOVED, _RATE, _W_OUT, _W_STATE, _W_N_HEAD, _W_N_KV, _W_HEAD = range(1, 12)
_EARLIER, _COMPLEMENT, _W_SCALE, _BOUND = range(12, 16)

#: Numbers of each row of S: its decay, the factors of added and removed values, and that of the output.
_ROW_W, _ROW_K, _ROW_REMOVAL, _ROW_R = (4 * MAX_DECAYS * i for i in range(4))


@helper
def _set_rows(args, offset, of_kv, rows):
    """Fill a token's rows of S, for the head whose columns begin at byte ``offset``, keys at ``of_kv``."""
    n = arg(args, _W_HEAD)
    bound = farg(args, _BOUND)
    scale = farg(args, _W_SCALE)
    for i in range(0, n, 16):
        count = min(16, n - i)
        g = load_up_to(arg(args, _W) + offset, 4 * i, count)
        power = exp(g)
        if bound != 0:
            power = sigmoid(g) * bound
        w = exp(-power)
        k = load_up_to(arg(args, _W_K) + of_kv, 4 * i, count)
        if arg(args, _COMPLEMENT):
            k = k - k * w
        removal = splat(f32x16, 0.0)
        if arg(args, _REMOVED):
            removal = load_up_to(arg(args, _REMOVED) + offset, 4 * i, count) * load_up_to(
                arg(args, _RATE) + offset, 4 * i, count
            )
        store(rows, _ROW_W + 4 * i, w)
        store(rows, _ROW_K + 4 * i, k)
        store(rows, _ROW_REMOVAL + 4 * i, -removal)
        store(rows, _ROW_R + 4 * i, load_up_to(arg(args, _R) + offset, 4 * i, count) * scale)


@inline
def _splat_at(buffer, byte):
    return splat(f32x16, load(types.float32, buffer, byte))


@helper
def _wkv_step(state, before, v, out, earlier, rows):
    """Process one token on 64 columns of a head.

    before: the factor of S before its update, or 0; earlier: out reads S before its update.
    """
    s, stride, n = state
    a0 = a1 = a2 = a3 = splat(f32x16, 0.0)
    if before:
        for i in range(n):
            row, x = s + stride * i, _splat_at(before, 4 * i)
            a0, a1 = muladd(load(f32x16, row, 0), x, a0), muladd(load(f32x16, row, 64), x, a1)
            a2, a3 = muladd(load(f32x16, row, 128), x, a2), muladd(load(f32x16, row, 192), x, a3)
    v0 = load(f32x16, v, 0)
    v1 = load(f32x16, v, 64)
    v2 = load(f32x16, v, 128)
    v3 = load(f32x16, v, 192)
    o0 = o1 = o2 = o3 = splat(f32x16, 0.0)
    for i in range(n):
        row = s + stride * i
        w = _splat_at(rows, _ROW_W + 4 * i)
        k = _splat_at(rows, _ROW_K + 4 * i)
        removal, r = _splat_at(rows, _ROW_REMOVAL + 4 * i), _splat_at(rows, _ROW_R + 4 * i)
        s0 = muladd(a0, removal, muladd(v0, k, load(f32x16, row, 0) * w))
        s1 = muladd(a1, removal, muladd(v1, k, load(f32x16, row, 64) * w))
        s2 = muladd(a2, removal, muladd(v2, k, load(f32x16, row, 128) * w))
        s3 = muladd(a3, removal, muladd(v3, k, load(f32x16, row, 192) * w))
        store(row, 0, s0)
        store(row, 64, s1)
        store(row, 128, s2)
        store(row, 192, s3)
        o0 = muladd(s0, r, o0)
        o1 = muladd(s1, r, o1)
        o2 = muladd(s2, r, o2)
        o3 = muladd(s3, r, o3)
    if earlier:
        o0 = a0
        o1 = a1
        o2 = a2
        o3 = a3
    store(out, 0, o0)
    store(out, 64, o1)
    store(out, 128, o2)
    store(out, 192, o3)


@helper
def _wkv_step_part(state, before, v, out, earlier, rows, columns):
    """Do ``_wkv_step`` for at most 16 columns."""
    s, stride, n = state
    a = splat(f32x16, 0.0)
    o = splat(f32x16, 0.0)
    v0 = load_up_to(v, 0, columns)
    if before:
        for i in range(n):
            a = muladd(load_up_to(s, stride * i, columns), _splat_at(before, 4 * i), a)
    for i in range(n):
        decayed = load_up_to(s, stride * i, columns) * _splat_at(rows, _ROW_W + 4 * i)
        x = muladd(a, _splat_at(rows, _ROW_REMOVAL + 4 * i), muladd(v0, _splat_at(rows, _ROW_K + 4 * i), decayed))
        store_up_to(s, stride * i, x, columns)
        o = muladd(x, _splat_at(rows, _ROW_R + 4 * i), o)
    if earlier:
        o = a
    store_up_to(out, 0, o, columns)


@helper
def _wkv_token(args, t, head, first, columns, rows):
    """Advance columns of a head, from ``first``, by token t."""
    n_head = arg(args, _W_N_HEAD)
    n_kv = arg(args, _W_N_KV)
    n = arg(args, _W_HEAD)
    sequence = types.int64(load(types.int32, batch_word(args, SEQUENCES), 4 * t))
    s = arg(args, _W_STATE) + 4 * ((sequence * n_head + head) * n * n + first)
    if load(types.int32, batch_word(args, POSITIONS), 4 * t) == 0:
        _zero(s, 4 * n, n, columns)
    offset, of_kv = 4 * (t * n_head + head) * n, 4 * (t * n_kv + head // (n_head // n_kv)) * n
    _set_rows(args, offset, of_kv, rows)
    v, out = arg(args, _W_V) + of_kv + 4 * first, arg(args, _W_OUT) + offset + 4 * first
    earlier, before = arg(args, _EARLIER), arg(args, _REMOVED)
    if earlier:
        before = rows + _ROW_R
    elif before:
        before = before + offset
    if columns == PART:
        _wkv_step(State(s, 4 * n, n), before, v, out, earlier, rows)
        return
    for i in range(0, 4 * columns, 64):
        state = State(s + i, 4 * n, n)
        _wkv_step_part(state, before, v + i, out + i, earlier, rows, min(16, columns - i // 4))


@operation("batch r g k v removed rate out state n_head n_kv_head head earlier complement scale:f bound:f")
def wkv(args, tid, nth):
    """Apply RWKV's recurrence to all tokens of the batch, heads of at most MAX_DECAYS columns.

    state: [sequences][n_head][head][head]
    """
    n = arg(args, _W_HEAD)
    n_tokens = batch_word(args, N_TOKENS)
    rows = stack_bytes(4096)
    parts = (n + PART - 1) // PART
    units = arg(args, _W_N_HEAD) * parts
    for unit in range(first_of(units, tid, nth), first_of(units, tid + 1, nth)):
        head, first = unit // parts, unit % parts * PART
        for t in range(n_tokens):
            _wkv_token(args, t, head, first, min(PART, n - first), rows)

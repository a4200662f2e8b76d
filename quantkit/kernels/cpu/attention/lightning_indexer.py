"""The lightning indexer: scores of all keys before a token, and the positions of the largest.

    score[p] = sum over heads of scale * weight[h] * max(q[h] . k[p], 0)

Tokens are processed in rounds. First, threads score chunks of keys, one token at a time: a block of keys is transposed
and multiplied by four heads at once, as attention does with many rows. Then each thread selects for tokens: the n-th
largest score is found digit by digit (a radix selection over integers that sort as the floats do, NaN as the lowest),
and a last pass keeps the positions above it in order, and of those equal to it the lowest. Tokens that see at most
n_selected keys select all of them, without computation.

    slot        lightning_indexer
    out         int32 [n_tokens, n_selected]: positions, ascending, then -1
    q, weights  [n_tokens, n_head * head], [n_tokens, n_head]
    k_cache     rows of ``head`` values of k_type (cache.py)
    ratio       1; or positions per block, if keys are those of blocks, n_ctx // ratio a sequence, and numbers of blocks
    scratch     ``scratch_bytes(...)`` bytes, aligned to 64; any contents
"""

from __future__ import annotations

from numba import types

from quantkit.kernels.cpu.attention.attention_blocks import outer_scores, transpose_keys
from quantkit.kernels.cpu.attention.attention_tiles import ROWS
from quantkit.kernels.cpu.attention.cache import BLOCK, F32, bytes_of
from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import cast, f32x16, i32x16, load, select, splat, store, vmax
from quantkit.kernels.cpu.core.tape import (
    CONTROL,
    N_CTX,
    N_TOKENS,
    POSITIONS,
    SEQUENCES,
    arg,
    batch_word,
    farg,
    operation,
)
from quantkit.kernels.cpu.core.team import atomic_add, atomic_store, barrier

#: Tokens per round, for which scores are stored; blocks of keys per unit of work.
ROUND, CHUNK = 32, 8
#: Bits of a digit of the selection, from the highest down; a histogram has 1 << 11 counts.
BITS = (11, 11, 10)
#: Word of the batch block that counts the units assigned.
COUNTER = 8

_OUT, _Q, _WEIGHTS, _K_CACHE, _K_TYPE, _N_HEAD, _HEAD, _N_SELECTED, _RATIO, _SCALE, _SCRATCH = range(1, 12)

# ---------------------------------------------------------------- scratch
# Of each thread, k being the vectors of a head: scores of ROWS heads [ROWS][BLOCK], counts [1 << 11] int32, 16 rows to
# transpose, the keys of a block, q. After all threads: the scores of a round, [ROUND][n_ctx, rounded up to BLOCK].

_COUNTS = 4 * ROWS * BLOCK
_SIXTEEN = _COUNTS + (4 << 11)


@inline
def _keys_at(k):
    return _SIXTEEN + 1024 * k


@inline
def _q_at(k):
    return _SIXTEEN + 1024 * k + 64 * BLOCK * k


@inline
def _thread_bytes(n_head, k):
    return _q_at(k) + 1024 * k * ((n_head + 15) // 16)


@inline
def _row_bytes(n_ctx):
    return 4 * ((n_ctx + BLOCK - 1) // BLOCK * BLOCK)


def scratch_bytes(n_head: int, head: int, n_ctx: int, threads: int) -> int:
    """Return the scratch bytes of the indexer."""
    k = (head + 15) // 16
    thread = _SIXTEEN + 1024 * k + 64 * BLOCK * k + 1024 * k * ((n_head + 15) // 16)
    return thread * threads + ROUND * 4 * ((n_ctx + BLOCK - 1) // BLOCK * BLOCK)


@inline
def _integer(address, i):
    return types.int64(load(types.int32, address, 4 * i))


# ---------------------------------------------------------------- scores


@inline
def _n_keys(args, token):
    """Return the number of keys that a token can see."""
    return (_integer(batch_word(args, POSITIONS), token) + 1) // arg(args, _RATIO)


@helper
def _n_scored(args, token):
    """Return the number of scored keys of a token: 0 if it selects all."""
    n = _n_keys(args, token)
    return n if n > arg(args, _N_SELECTED) else 0


@helper
def _most_chunks(args, first, count):
    """Return the chunks of the token, of ``count`` from ``first``, that has most."""
    most = 0
    for token in range(first, first + count):
        most = max(most, (_n_scored(args, token) + CHUNK * BLOCK - 1) // (CHUNK * BLOCK))
    return most


@inline
def _score_block(args, me, k, token, vectors, out):
    """Score the transposed keys of a block, ``vectors`` of 16."""
    n = arg(args, _HEAD)
    n_head = arg(args, _N_HEAD)
    scale = farg(args, _SCALE)
    weights = arg(args, _WEIGHTS) + 4 * token * n_head
    for v in range(vectors):
        store(out, 64 * v, splat(f32x16, 0.0))
    for h in range(0, n_head, ROWS):
        outer_scores(me + _q_at(k) + 1024 * k * (h // 16) + 4 * (h % 16), me + _keys_at(k), k, n, 0, vectors, me)
        for v in range(vectors):
            total = load(f32x16, out, 64 * v)
            for r in range(min(ROWS, n_head - h)):
                w = load(types.float32, weights, 4 * (h + r)) * scale
                total = total + vmax(load(f32x16, me, 4 * BLOCK * r + 64 * v), splat(f32x16, 0.0)) * w
            store(out, 64 * v, total)


@helper
def _score(args, me, k, token, chunk, out):
    """Score a chunk of a token's keys; out: all its scores."""
    n = arg(args, _HEAD)
    kind = arg(args, _K_TYPE)
    end = _n_scored(args, token)
    first = chunk * CHUNK * BLOCK
    if first >= end:
        return
    q = arg(args, _Q) + 4 * n * arg(args, _N_HEAD) * token
    transpose_keys(q, 4 * n, F32, arg(args, _N_HEAD), n, me + _SIXTEEN, me + _q_at(k))
    row_bytes = bytes_of(kind, n)
    cells = _integer(batch_word(args, SEQUENCES), token) * (batch_word(args, N_CTX) // arg(args, _RATIO))
    for start in range(first, min(end, first + CHUNK * BLOCK), BLOCK):
        keys = min(BLOCK, end - start)
        source = arg(args, _K_CACHE) + (cells + start) * row_bytes
        transpose_keys(source, row_bytes, kind, keys, n, me + _SIXTEEN, me + _keys_at(k))
        _score_block(args, me, k, token, (keys + 15) // 16, out + 4 * start)


# ---------------------------------------------------------------- the largest


@inline
def _sort_keys(x, n):
    """Turn n floats in place into unsigned integers of the same order; NaN becomes 0."""
    for i in range(0, n, 16):
        v = load(f32x16, x, 4 * i) + 0.0  # -0 becomes 0
        bits = cast(i32x16, v)
        keys = bits ^ ((bits >> 31) | -0x80000000)
        store(x, 4 * i, select(v == v, keys, 0))


@inline
def _key(x, i):
    return types.int64(load(types.uint32, x, 4 * i))


@helper
def _threshold(keys, n, remaining, counts):
    """Return the k-th largest of n keys, k being ``wanted``, and how many of the k largest are equal to it."""
    prefix, shift = types.int64(0), 32
    for bits in BITS:
        before, shift = shift, shift - bits
        for i in range(1 << bits):
            store(counts, 4 * i, types.int32(0))
        for i in range(n):
            key = _key(keys, i)
            if key >> before == prefix:
                digit = (key >> shift) & ((1 << bits) - 1)
                store(counts, 4 * digit, types.int32(_integer(counts, digit) + 1))
        digit = (1 << bits) - 1
        while _integer(counts, digit) < remaining:
            remaining -= _integer(counts, digit)
            digit -= 1
        prefix = (prefix << bits) | digit
    return prefix, remaining


@helper
def _select(args, token, keys, counts):
    """Write the positions of a token; keys: its scores."""
    n_selected, n = arg(args, _N_SELECTED), _n_scored(args, token)
    out, count = arg(args, _OUT) + 4 * n_selected * token, 0
    if n == 0:
        end = _n_keys(args, token)
        for i in range(n_selected):
            store(out, 4 * i, types.int32(i if i < end else -1))
        return
    _sort_keys(keys, n)
    least, equal = _threshold(keys, n, n_selected, counts)
    for i in range(n):
        key = _key(keys, i)
        if key > least or (key == least and equal > 0):
            equal -= key == least
            store(out, 4 * count, types.int32(i))
            count += 1


# ---------------------------------------------------------------- the operation


@operation("batch out q weights k_cache k_type n_head head n_selected ratio scale:f scratch")
def lightning_indexer(args, tid, nth):
    """Select the keys of every token; slots: see the top of this file."""
    k, n_tokens = (arg(args, _HEAD) + 15) // 16, batch_word(args, N_TOKENS)
    thread = _thread_bytes(arg(args, _N_HEAD), k)
    me, scores = arg(args, _SCRATCH) + tid * thread, arg(args, _SCRATCH) + nth * thread
    row = _row_bytes(batch_word(args, N_CTX))
    for first in range(0, n_tokens, ROUND):
        count = min(ROUND, n_tokens - first)
        units = count * _most_chunks(args, first, count)
        unit = atomic_add(load(types.int64, args, 0), COUNTER, 1)
        while unit < units:  # consecutive units have the same keys
            _score(args, me, k, first + unit % count, unit // count, scores + row * (unit % count))
            unit = atomic_add(load(types.int64, args, 0), COUNTER, 1)
        barrier(batch_word(args, CONTROL), nth)
        if tid == 0:
            atomic_store(load(types.int64, args, 0), COUNTER, 0)
        for i in range(tid, count, nth):
            _select(args, first + i, scores + row * i, me + _COUNTS)
        barrier(batch_word(args, CONTROL), nth)

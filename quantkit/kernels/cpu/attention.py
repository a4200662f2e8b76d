"""Attention over a cache, in blocks of keys: softmax(scale * q K^T + bias) V without ever holding all of its rows.

The unit of work is a tile of rows of q that share a key-value head: some tokens of one sequence, times the heads of
the group. Block by block of 64 keys, with m the largest score so far, l the sum and o the weighted values:

    s = scale * q K^T       capped, biased, masked
    m' = max(m, max s)      p = exp(s - m')      f = exp(m - m')
    l = f l + sum p         o = f o + p V        at the end out = o / l

so memory does not grow with the context (Milakov & Gimelshein 2018; Dao et al. 2022, FlashAttention). Sinks are one
more score per head that has no value: they join l at the end. Blocks that no row of a tile may see are skipped.

Many rows (a prompt): the keys of a block are transposed once and multiplied by register tiles (``outer``). Few rows
(generation): products along the head (``inner``), one pass over the keys for all heads of the group. A few tokens at
great depth are also split along the keys, at places that depend on the depth alone, and the parts merged: threads
take units from a counter, and no result depends on which thread took it.

    slot        attention
    q, out      [n_tokens, n_head * head_k], [n_tokens, n_head * head_v]
    k_cache     rows of n_head_kv * head_k values of k_type (cache.py); v_cache the same with head_v and v_type
                v_cache = 0: values are the first head_v columns of the keys (MLA)
    sinks       float32 [n_head], or 0
    mask        CAUSAL, SLIDING, CHUNKED, with window
    softcap     0: none;  alibi: largest bias, 0: none
    scratch     ``scratch_bytes(...)`` bytes, aligned to 64; any contents

Everything is float32. Two tiles of one sequence in a batch are independent: keys were written by cache_write before.
"""

from __future__ import annotations

import numpy as np
from numba import types

from quantkit.kernels.cpu.cache import BLOCK, F16, F32, Q8_0, bytes_of, read_rows
from quantkit.kernels.cpu.functions import exp, load_part, store_part, tanh
from quantkit.kernels.cpu.jit import helper, inline
from quantkit.kernels.cpu.simd import (
    convert,
    extract,
    f32x16,
    hmax,
    hsum,
    i32x16,
    load,
    make_constant,
    prefetch,
    select,
    splat,
    store,
    transpose16,
    vmax,
)
from quantkit.kernels.cpu.tape import (
    CONTROL,
    N_CTX,
    N_TOKENS,
    POSITIONS,
    SEQUENCES,
    arg,
    batch_word,
    farg,
    first_of,
    operation,
)
from quantkit.kernels.cpu.team import atomic_add, atomic_store, barrier
from quantkit.kernels.cpu.tiles import (
    COLUMNS,
    KEYS,
    ROWS,
    inner,
    inner_half,
    load_tile,
    outer,
    outer_half,
    store_sums,
    store_tile,
    zero_products,
    zero_strip,
    zero_tile,
)

CAUSAL, SLIDING, CHUNKED = range(3)
MASKS = {"causal": CAUSAL, "sliding": SLIDING, "chunked": CHUNKED}

#: Rows of q of a tile, and up to how many of them products are taken along the head.
TILE = 64
FEW = 16
#: Batches of at most so many rows (tokens * heads) are split along the keys: blocks of a part, parts.
SPLIT_ROWS, SPLIT_BLOCKS, SPLITS = 512, 8, 16
#: The batch block's word that counts units taken.
COUNTER = 8

NONE = np.float32(-3.0e38)  # the largest score of no keys: finite, so that differences are numbers

lanes = make_constant(i32x16, list(range(16)), "attention_lanes")

_Q, _OUT, _K_CACHE, _V_CACHE, _K_TYPE, _V_TYPE, _N_HEAD, _N_HEAD_KV, _HEAD_K, _HEAD_V = range(1, 11)
_SCALE, _SOFTCAP, _SINKS, _MASK, _WINDOW, _ALIBI, _SCRATCH = range(11, 18)


# ---------------------------------------------------------------- scratch
# Of each thread, bytes from its beginning, with k and v the vectors of a head's key and value:
#     rows of the tile      [TILE] of 64 bytes each, see below
#     factors               [TILE] float32, what a block multiplies o by
#     scores                [TILE][BLOCK]
#     few                   [16][k] vectors: 16 rows to be transposed
#     q                     [TILE][k] vectors
#     keys                  [BLOCK][k] vectors
#     values                [BLOCK][v] vectors
#     o                     [TILE][v] vectors
# After those of all threads: parts [SPLIT_ROWS][SPLITS] of v + 1 vectors, o and then m and l.

_FACTORS = 64 * TILE
_SCORES = _FACTORS + 4 * TILE
_FEW = _SCORES + 4 * TILE * BLOCK
#: Of a row: first and last position it sees, head, token; then m, l, slope of its bias.
_FIRST, _LAST, _HEAD, _TOKEN, _M, _L, _SLOPE = range(0, 28, 4)


@inline
def _q_at(k):
    return _FEW + 1024 * k


@inline
def _keys_at(k):
    return _FEW + 1024 * k + 64 * TILE * k


@inline
def _values_at(k):
    return _FEW + 1024 * k + 64 * (TILE + BLOCK) * k


@inline
def _o_at(k, v):
    return _values_at(k) + 64 * BLOCK * v


@inline
def _thread_bytes(k, v):
    return _o_at(k, v) + 64 * TILE * v


def scratch_bytes(head_k: int, head_v: int, threads: int) -> int:
    """Return the bytes of scratch that attention needs; one scratch serves all of a tape, sized for the largest."""
    k, v = (head_k + 15) // 16, (head_v + 15) // 16
    thread = _FEW + 1024 * k + 64 * (TILE + BLOCK) * (k + v)
    return thread * threads + SPLIT_ROWS * SPLITS * 64 * (v + 1)


# ---------------------------------------------------------------- tiles and what their rows see


@inline
def _padded(rows):
    return (rows + ROWS - 1) // ROWS * ROWS


@inline
def _int(address, i):
    return types.int64(load(types.int32, address, 4 * i))


@inline
def _first_seen(position, mask, window):
    """The first position that a token at ``position`` sees."""
    if mask == SLIDING:
        return max(position - window + 1, 0)
    if mask == CHUNKED:
        return position // window * window
    return types.int64(0)


@inline
def _tile_begin(sequences, end, tokens):
    """Where the tile that ends before token ``end`` begins: tokens side by side of one sequence."""
    begin = end - 1
    while begin > 0 and end - begin < tokens and _int(sequences, begin - 1) == _int(sequences, begin):
        begin -= 1
    return begin


@inline
def _blocks(positions, begin, end, mask, window):
    """First and last + 1 block of keys that tokens begin..end of a tile see."""
    first, last = _first_seen(_int(positions, begin), mask, window), _int(positions, begin)
    for t in range(begin + 1, end):
        first = min(first, _first_seen(_int(positions, t), mask, window))
        last = max(last, _int(positions, t))
    return first // BLOCK, last // BLOCK + 1


@inline
def _part_blocks(n_blocks):
    """Blocks of a part, if that many blocks are split."""
    return max(SPLIT_BLOCKS, (n_blocks + SPLITS - 1) // SPLITS)


@helper
def _count_parts(args, tokens):
    """Parts of the keys for every tile of this batch."""
    n_tokens = batch_word(args, N_TOKENS)
    if n_tokens * arg(args, _N_HEAD) > SPLIT_ROWS:
        return 1
    positions, sequences = batch_word(args, POSITIONS), batch_word(args, SEQUENCES)
    parts, end = 1, n_tokens
    while end > 0:
        begin = _tile_begin(sequences, end, tokens)
        b0, b1 = _blocks(positions, begin, end, arg(args, _MASK), arg(args, _WINDOW))
        per = _part_blocks(b1 - b0)
        parts = max(parts, (b1 - b0 + per - 1) // per)
        end = begin
    return parts


@inline
def _slope(largest, head, n_head):
    """ALiBi's slope of a head (Press et al. 2022): powers of 2^-(largest / n), n a power of two."""
    if largest <= 0:
        return types.float32(0)
    n = 1
    while 2 * n <= n_head:
        n *= 2
    exponent = (head + 1) / n if head < n else (2 * (head - n) + 1) / (2 * n)
    return types.float32(2.0 ** (-largest * exponent))


@helper
def _set_rows(args, begin, end, head, heads, rows, me):
    """Fill the rows of a tile: token by token, head by head; the rest, up to ``rows``, sees nothing."""
    positions = batch_word(args, POSITIONS)
    mask, window, n_head = arg(args, _MASK), arg(args, _WINDOW), arg(args, _N_HEAD)
    for r in range(rows):
        at, token = me + 64 * r, begin + r // heads
        there = token < end
        position = _int(positions, token) if there else types.int64(-1)
        first = _first_seen(position, mask, window) if there else types.int64(0)
        store(at, _FIRST, types.int32(first))
        store(at, _LAST, types.int32(position))
        store(at, _HEAD, types.int32(head + r % heads))
        store(at, _TOKEN, types.int32(token))
        store(at, _M, NONE)
        store(at, _L, types.float32(0))
        store(at, _SLOPE, _slope(farg(args, _ALIBI), head + r % heads, n_head))


@helper
def _set_q(args, rows, few, me):
    """Copy rows of q, zeros behind: as they are, or 16 rows at a time transposed, [rows / 16][head_k][16]."""
    n, q = arg(args, _HEAD_K), arg(args, _Q)
    k = (n + 15) // 16
    for first in range(0, rows, 16):
        panel = me + _q_at(k) + 1024 * k * (first // 16)
        to = panel if few else me + _FEW
        for r in range(first, min(first + 16, rows) if few else first + 16):
            row = me + 64 * r
            source = q + 4 * n * (_int(row, _TOKEN // 4) * arg(args, _N_HEAD) + _int(row, _HEAD // 4))
            for j in range(k):
                x = splat(f32x16, 0.0)
                if r < rows and _int(row, _LAST // 4) >= 0:
                    x = load_part(f32x16, source, 64 * j, n - 16 * j) if 16 * j + 16 > n else load(f32x16, source, 64 * j)
                store(to, 64 * (k * (r - first) + j), x)
        if not few:
            for j in range(k):
                transpose16(to, 64 * j, 64 * k, panel, 1024 * j)


# ---------------------------------------------------------------- scores


@helper
def _transpose_keys(source, row_bytes, kind, keys, n, few, panels):
    """Read ``keys`` keys and transpose them, 16 at a time: [keys / 16][n][16]."""
    k = (n + 15) // 16
    for first in range(0, keys, 16):
        read_rows(source + first * row_bytes, row_bytes, kind, min(16, keys - first), n, k, few)
        for j in range(k):
            transpose16(few, 64 * j, 64 * k, panels, 64 * (first * k + 16 * j))


@inline
def _outer_scores(q, keys, k, n, first, last, scores):
    """Scores of ROWS rows (of a transposed panel of q) with keys of vectors first..last."""
    v = first
    while v < last:
        if v + COLUMNS <= BLOCK // 16 and last - v > COLUMNS // 2:
            tile = zero_tile()
            for i in range(n):
                tile = outer(tile, keys + 64 * (16 * k * v + i), 1024 * k, q + 64 * i, 4)
            store_tile(tile, scores + 64 * v, 4 * BLOCK)
            v += COLUMNS
        else:
            strip = zero_strip()
            for i in range(n):
                strip = outer(strip, keys + 64 * (16 * k * v + i), 1024 * k, q + 64 * i, 4)
            store_tile(strip, scores + 64 * v, 4 * BLOCK)
            v += 1


@inline
def _prefetch_row(address, n):
    for i in range(0, n, 64):
        prefetch(address, i)


@inline
def _inner_scores(q, keys, stride, kind, k, first, last, scores, after, n_bytes):
    """Scores of ROWS rows (as they are) with keys first..last; keys lie ``stride`` bytes apart.

    Fetches the same rows at ``after`` meanwhile, n_bytes of each.
    """
    for key in range(first, last, KEYS):
        k0 = keys + stride * key
        k1 = keys + stride * min(key + 1, last - 1)
        k2, k3 = keys + stride * min(key + 2, last - 1), keys + stride * min(key + 3, last - 1)
        tile = zero_products()
        if n_bytes > 0:
            for c in range(KEYS):
                _prefetch_row(after + stride * (key + c), n_bytes)
        if kind == F16:
            for j in range(k):
                tile = inner_half(tile, k0 + 32 * j, k1 + 32 * j, k2 + 32 * j, k3 + 32 * j, q + 64 * j, 64 * k)
        else:
            for j in range(k):
                tile = inner(tile, k0 + 64 * j, k1 + 64 * j, k2 + 64 * j, k3 + 64 * j, q + 64 * j, 64 * k)
        store_sums(tile, scores + 4 * key, 4 * BLOCK)


@inline
def _mask(s, at, first, end):
    """Scores of keys at, at + 1, ... that lie outside first..end become minus infinity."""
    here = lanes() + types.int32(at)
    return select((here >= types.int32(first)) & (here < types.int32(end)), s, types.float32(-np.inf))


@helper
def _bend(s, n0, n1, row, start, softcap):
    """Cap scores, and add the bias of the distance."""
    slope, last = load(types.float32, row, _SLOPE), _int(row, _LAST // 4)
    for v in range(n0, n1):
        x = load(f32x16, s, 64 * v)
        if softcap > 0:
            x = tanh(x / softcap) * softcap
        distance = convert(f32x16, lanes() + types.int32(start + 16 * v - last))
        store(s, 64 * v, x + distance * slope)


@inline
def _softmax(rows_at, factors, scores, start, n0, n1, scale, softcap, bent):
    """Turn the scores of ROWS rows with keys of vectors n0..n1 of a block into weights; m, l and factors follow."""
    for r in range(ROWS):
        row, s = rows_at + 64 * r, scores + 4 * BLOCK * r
        first, end = _int(row, _FIRST // 4) - start, _int(row, _LAST // 4) - start + 1
        if bent:
            for v in range(n0, n1):
                store(s, 64 * v, load(f32x16, s, 64 * v) * scale)
            _bend(s, n0, n1, row, start, softcap)
        by = types.float32(1) if bent else scale
        largest = splat(f32x16, load(types.float32, row, _M))
        for v in range(n0, n1):
            x = load(f32x16, s, 64 * v) * by
            if first > 16 * v or end < 16 * v + 16:
                x = _mask(x, 16 * v, first, end)
            store(s, 64 * v, x)
            largest = vmax(x, largest)
        m = hmax(largest)
        store(factors, 4 * r, types.float32(load(types.float32, row, _M) - m))
        store(row, _M, m)
        total = splat(f32x16, 0.0)
        for v in range(n0, n1):
            p = exp(load(f32x16, s, 64 * v) - m)
            total = total + p
            store(s, 64 * v, p)
        store(row, _L + 0, load(types.float32, row, _L))
        store(row, 48, hsum(total))
    f = exp(load_part(f32x16, factors, 0, ROWS))
    store_part(factors, 0, f, ROWS)
    for r in range(ROWS):
        row = rows_at + 64 * r
        l = load(types.float32, row, _L) * load(types.float32, factors, 4 * r) + load(types.float32, row, 48)
        store(row, _L, types.float32(l))


@inline
def _seen(rows_at, start):
    """First and last + 1 key of a block that any of ROWS rows sees."""
    first, end = types.int64(BLOCK), types.int64(0)
    for r in range(ROWS):
        last = _int(rows_at + 64 * r, _LAST // 4) - start + 1
        if last > 0:
            first = min(first, _int(rows_at + 64 * r, _FIRST // 4) - start)
            end = max(end, last)
    return max(first, 0), min(end, BLOCK)


@helper
def _many_scores(me, rows, k, n, start, scale, softcap, bent):
    """Weights of all rows of a tile for a block of keys, transposed."""
    for r in range(0, rows, ROWS):
        first, end = _seen(me + 64 * r, start)
        if first >= end:
            continue
        scores, q = me + _SCORES + 4 * BLOCK * r, me + _q_at(k) + 1024 * k * (r // 16) + 4 * (r % 16)
        n0, n1 = first // 16, (end + 15) // 16
        _outer_scores(q, me + _keys_at(k), k, n, n0, n1, scores)
        _softmax(me + 64 * r, me + _FACTORS + 4 * r, scores, start, n0, n1, scale, softcap, bent)


@helper
def _few_scores(me, begin, rows, k, keys, stride, kind, start, scale, softcap, bent, after, n_bytes):
    """Weights of rows begin..begin + rows for a block of keys as they lie in memory."""
    for r in range(begin, begin + rows, ROWS):
        first, end = _seen(me + 64 * r, start)
        if first >= end:
            continue
        scores, q = me + _SCORES + 4 * BLOCK * r, me + _q_at(k) + 64 * k * r
        n0, n1 = first // 16, (end + 15) // 16
        _inner_scores(q, keys, stride, kind, k, 16 * n0, end, scores, after, n_bytes if r == begin else 0)
        _softmax(me + 64 * r, me + _FACTORS + 4 * r, scores, start, n0, n1, scale, softcap, bent)


@helper
def _few_values(me, begin, rows, k, v, values, stride, kind, start, after, n_bytes):
    """o = factor * o + weights * values, for rows begin..begin + rows; values as they lie in memory."""
    size = 32 if kind == F16 else 64
    for j in range(0, v, COLUMNS):
        wide = j + COLUMNS <= v
        for r in range(begin, begin + rows, ROWS):
            first, end = _seen(me + 64 * r, start)
            if first >= end:
                continue
            first = first // 16 * 16
            weights, factors, o = me + _SCORES + 4 * BLOCK * r, me + _FACTORS + 4 * r, me + _o_at(k, v) + 64 * v * r
            at = min(n_bytes, size * COLUMNS) if r == begin else 0
            if wide and kind == F16:
                tile = load_tile(zero_tile(), o + 64 * j, 64 * v, factors)
                for i in range(first, end):
                    _prefetch_row(after + stride * i + size * j, at)
                    tile = outer_half(tile, values + stride * i + size * j, size, weights + 4 * i, 4 * BLOCK)
                store_tile(tile, o + 64 * j, 64 * v)
            elif wide:
                tile = load_tile(zero_tile(), o + 64 * j, 64 * v, factors)
                for i in range(first, end):
                    _prefetch_row(after + stride * i + size * j, at)
                    tile = outer(tile, values + stride * i + size * j, size, weights + 4 * i, 4 * BLOCK)
                store_tile(tile, o + 64 * j, 64 * v)
            else:
                for c in range(j, v):
                    strip = load_tile(zero_strip(), o + 64 * c, 64 * v, factors)
                    for i in range(first, end):
                        if kind == F16:
                            strip = outer_half(strip, values + stride * i + size * c, size, weights + 4 * i, 4 * BLOCK)
                        else:
                            strip = outer(strip, values + stride * i + size * c, size, weights + 4 * i, 4 * BLOCK)
                    store_tile(strip, o + 64 * c, 64 * v)


@helper
def _many_values(me, rows, k, v, start):
    """o = factor * o + weights * values, for all rows of a tile; values in columns of COLUMNS vectors."""
    j = 0
    while j < v:
        wide = j + COLUMNS <= v
        values, o = me + _values_at(k) + 64 * BLOCK * j, me + _o_at(k, v) + 64 * j
        for r in range(0, rows, ROWS):
            first, end = _seen(me + 64 * r, start)
            if first >= end:
                continue
            first = first // 16 * 16
            weights, factors, to = me + _SCORES + 4 * BLOCK * r, me + _FACTORS + 4 * r, o + 64 * v * r
            if wide:
                tile = load_tile(zero_tile(), to, 64 * v, factors)
                for i in range(first, end):
                    tile = outer(tile, values + 64 * COLUMNS * i, 64, weights + 4 * i, 4 * BLOCK)
                store_tile(tile, to, 64 * v)
            else:
                strip = load_tile(zero_strip(), to, 64 * v, factors)
                for i in range(first, end):
                    strip = outer(strip, values + 64 * i, 64, weights + 4 * i, 4 * BLOCK)
                store_tile(strip, to, 64 * v)
        j += COLUMNS if wide else 1


# ---------------------------------------------------------------- the end: one part, or parts merged


@inline
def _scalar_exp(x):
    return extract(exp(splat(f32x16, types.float32(x))), 0)


@inline
def _with_sink(sinks, head, m):
    """The largest of m and the head's sink, and what the sink adds to the sum."""
    if sinks == 0:
        return m, types.float32(0)
    sink = load(types.float32, sinks, 4 * head)
    largest = max(m, sink)
    return largest, _scalar_exp(sink - largest)


@inline
def _store_row(out, n, j, x):
    if 16 * j + 16 > n:
        store_part(out, 64 * j, x, n - 16 * j)
    else:
        store(out, 64 * j, x)


@helper
def _finish(args, me, rows, k, v):
    """out = o / l of the rows of a tile."""
    n = arg(args, _HEAD_V)
    for r in range(rows):
        if _int(me + 64 * r, _LAST // 4) < 0:
            continue
        row, o = me + 64 * r, me + _o_at(k, v) + 64 * v * r
        head, m = _int(row, _HEAD // 4), load(types.float32, row, _M)
        largest, more = _with_sink(arg(args, _SINKS), head, m)
        f = types.float32(1) if largest == m else _scalar_exp(m - largest)
        by = f / (load(types.float32, row, _L) * f + more)
        out = arg(args, _OUT) + 4 * n * (_int(row, _TOKEN // 4) * arg(args, _N_HEAD) + head)
        for j in range(v):
            _store_row(out, n, j, load(f32x16, o, 64 * j) * by)


@helper
def _keep_part(args, me, rows, k, v, part, n_parts, parts):
    """Keep o, m and l of a tile's rows for the merge."""
    for r in range(rows):
        if _int(me + 64 * r, _LAST // 4) < 0:
            continue
        row, o = me + 64 * r, me + _o_at(k, v) + 64 * v * r
        number = _int(row, _TOKEN // 4) * arg(args, _N_HEAD) + _int(row, _HEAD // 4)
        to = parts + 64 * (v + 1) * (number * n_parts + part)
        for j in range(v):
            store(to, 64 * j, load(f32x16, o, 64 * j))
        store(to, 64 * v, load(types.float32, row, _M))
        store(to, 64 * v + 4, load(types.float32, row, _L))


@helper
def _merge(args, v, n_parts, parts, tid, nth):
    """out of every row from its parts, in their order."""
    n, n_head = arg(args, _HEAD_V), arg(args, _N_HEAD)
    rows, size = batch_word(args, N_TOKENS) * n_head, 64 * (v + 1)
    for row in range(first_of(rows, tid, nth), first_of(rows, tid + 1, nth)):
        at = parts + size * n_parts * row
        m = NONE
        for p in range(n_parts):
            m = max(m, load(types.float32, at + size * p, 64 * v))
        m, total = _with_sink(arg(args, _SINKS), row % n_head, m)
        for p in range(n_parts):
            f = _scalar_exp(load(types.float32, at + size * p, 64 * v) - m)
            total += f * load(types.float32, at + size * p, 64 * v + 4)
            store(at + size * p, 64 * v, f)
        for j in range(v):
            x = splat(f32x16, 0.0)
            for p in range(n_parts):
                x = x + load(f32x16, at + size * p, 64 * j) * load(types.float32, at + size * p, 64 * v)
            _store_row(arg(args, _OUT) + 4 * n * row, n, j, x / total)


# ---------------------------------------------------------------- the operation


@inline
def _last_seen(me, rows):
    """The last position that any row of a tile sees."""
    last = _int(me, _LAST // 4)
    for r in range(rows):
        last = max(last, _int(me + 64 * r, _LAST // 4))
    return last


@inline
def _value_rows(args):
    """Address, type and bytes of a row of the values; without any they are in the keys."""
    if arg(args, _V_CACHE) == 0:
        kind = arg(args, _K_TYPE)
        return arg(args, _K_CACHE), kind, bytes_of(kind, arg(args, _HEAD_K) * arg(args, _N_HEAD_KV))
    kind = arg(args, _V_TYPE)
    return arg(args, _V_CACHE), kind, bytes_of(kind, arg(args, _HEAD_V) * arg(args, _N_HEAD_KV))


@helper
def _many(args, kv_head, b0, b1, rows, me):
    """Take the rows of a tile, of one key-value head, through blocks b0..b1 of keys."""
    n, nv = arg(args, _HEAD_K), arg(args, _HEAD_V)
    k, v = (n + 15) // 16, (nv + 15) // 16
    k_type = arg(args, _K_TYPE)
    k_bytes = bytes_of(k_type, n * arg(args, _N_HEAD_KV))
    v_cache, v_type, v_bytes = _value_rows(args)
    cells = _int(batch_word(args, SEQUENCES), _int(me, _TOKEN // 4)) * batch_word(args, N_CTX)
    scale, softcap = farg(args, _SCALE), farg(args, _SOFTCAP)
    bent, last = softcap > 0 or farg(args, _ALIBI) > 0, _last_seen(me, rows)
    k_source = arg(args, _K_CACHE) + kv_head * bytes_of(k_type, n)
    v_source = v_cache + kv_head * bytes_of(v_type, nv)
    for block in range(b0, b1):
        start = block * BLOCK
        keys = min(BLOCK, last + 1 - start)
        at = cells + start
        _transpose_keys(k_source + at * k_bytes, k_bytes, k_type, keys, n, me + _FEW, me + _keys_at(k))
        read_rows(v_source + at * v_bytes, v_bytes, v_type, keys, nv, COLUMNS, me + _values_at(k))
        _many_scores(me, rows, k, n, start, scale, softcap, bent)
        _many_values(me, rows, k, v, start)


@helper
def _few(args, kv_head, kv_heads, b0, b1, rows, me):
    """Take ``rows`` rows of each of some key-value heads through blocks b0..b1 of keys.

    A block of all heads lies together in memory; while one head's part is used, the next one's is fetched.
    """
    n, nv = arg(args, _HEAD_K), arg(args, _HEAD_V)
    k, v = (n + 15) // 16, (nv + 15) // 16
    k_type = arg(args, _K_TYPE)
    k_bytes = bytes_of(k_type, n * arg(args, _N_HEAD_KV))
    v_cache, v_type, v_bytes = _value_rows(args)
    k_head, v_head = bytes_of(k_type, n), bytes_of(v_type, nv)
    cells = _int(batch_word(args, SEQUENCES), _int(me, _TOKEN // 4)) * batch_word(args, N_CTX)
    scale, softcap = farg(args, _SCALE), farg(args, _SOFTCAP)
    bent, last = softcap > 0 or farg(args, _ALIBI) > 0, _last_seen(me, rows)
    k_direct, v_direct = k_type != Q8_0 and n % 16 == 0, v_type != Q8_0 and nv % 16 == 0
    for block in range(b0, b1):
        start = block * BLOCK
        keys = min(BLOCK, last + 1 - start)
        k_at = arg(args, _K_CACHE) + (cells + start) * k_bytes + kv_head * k_head
        v_at = v_cache + (cells + start) * v_bytes + kv_head * v_head
        for head in range(kv_heads):
            source, stride, kind = k_at + head * k_head, k_bytes, k_type
            after = source + (k_head if head + 1 < kv_heads else BLOCK * k_bytes - head * k_head)
            if not k_direct:
                read_rows(source, stride, kind, keys, n, k, me + _keys_at(k))
                source, stride, kind = me + _keys_at(k), 64 * k, F32
            fetch = k_head if k_direct else 0
            _few_scores(
                me, head * rows, rows, k, source, stride, kind, start, scale, softcap, bent, after, fetch
            )
            source, stride, kind = v_at + head * v_head, v_bytes, v_type
            after = source + (v_head if head + 1 < kv_heads else BLOCK * v_bytes - head * v_head)
            if not v_direct:
                read_rows(source, stride, kind, keys, nv, v, me + _values_at(k))
                source, stride, kind = me + _values_at(k), 64 * v, F32
            fetch = v_head if v_direct and arg(args, _V_CACHE) != 0 else 0
            _few_values(me, head * rows, rows, k, v, source, stride, kind, start, after, fetch)


@inline
def _heads_of_unit(args, rows, heads, work, nth):
    """How many key-value heads a unit takes: as many as fit, but enough units for all threads."""
    n_head_kv = arg(args, _N_HEAD_KV)
    if rows > FEW:
        return 1
    most = min(TILE // rows, n_head_kv)
    while most > 1 and (n_head_kv + most - 1) // most * work < 3 * nth:
        most = (most + 1) // 2
    return most


@operation(
    "batch q out k_cache v_cache k_type v_type n_head n_head_kv head_k head_v scale:f softcap:f sinks mask window"
    " alibi:f scratch"
)
def attention(args, tid, nth):
    """Causal attention of every token over the cells of its sequence; slots: see the top of this file."""
    n_head, n_head_kv = arg(args, _N_HEAD), arg(args, _N_HEAD_KV)
    k, v = (arg(args, _HEAD_K) + 15) // 16, (arg(args, _HEAD_V) + 15) // 16
    group, n_tokens = n_head // n_head_kv, batch_word(args, N_TOKENS)
    heads = min(group, TILE)
    head_tiles, tokens = (group + heads - 1) // heads, TILE // heads
    n_parts = _count_parts(args, tokens)
    me = arg(args, _SCRATCH) + tid * _thread_bytes(k, v)
    parts = arg(args, _SCRATCH) + nth * _thread_bytes(k, v)
    positions, sequences = batch_word(args, POSITIONS), batch_word(args, SEQUENCES)
    kv_heads = _heads_of_unit(args, _padded(min(n_tokens, tokens) * heads), heads, n_parts * head_tiles, nth)
    kv_units = (n_head_kv + kv_heads - 1) // kv_heads
    units = kv_units * head_tiles * n_parts
    tile, end = 0, n_tokens  # tiles are counted from the last, which sees most keys
    begin = _tile_begin(sequences, end, tokens)
    while True:
        unit = atomic_add(load(types.int64, args, 0), COUNTER, 1)
        while tile < unit // units and end > 0:
            tile, end = tile + 1, begin
            if end > 0:
                begin = _tile_begin(sequences, end, tokens)
        if end <= 0:
            break
        rest = unit % units
        part, kv_head, first = rest % n_parts, rest // n_parts // head_tiles * kv_heads, rest // n_parts % head_tiles * heads
        b0, b1 = _blocks(positions, begin, end, arg(args, _MASK), arg(args, _WINDOW))
        if n_parts > 1:
            per = _part_blocks(b1 - b0)
            b0, b1 = min(b1, b0 + part * per), min(b1, b0 + part * per + per)
        here = min(heads, group - first)
        n_kv, there = min(kv_heads, n_head_kv - kv_head), (end - begin) * here
        rows = _padded(there)
        few = rows <= FEW
        for i in range(n_kv):
            _set_rows(args, begin, end, (kv_head + i) * group + first, here, rows, me + 64 * rows * i)
        _set_q(args, rows * n_kv, few, me)
        for i in range(rows * n_kv * v):
            store(me + _o_at(k, v), 64 * i, splat(f32x16, 0.0))
        if few:
            _few(args, kv_head, n_kv, b0, b1, rows, me)
        else:
            _many(args, kv_head, b0, b1, rows, me)
        if n_parts > 1:
            _keep_part(args, me, rows * n_kv, k, v, part, n_parts, parts)
        else:
            _finish(args, me, rows * n_kv, k, v)
    barrier(batch_word(args, CONTROL), nth)
    if tid == 0:
        atomic_store(load(types.int64, args, 0), COUNTER, 0)
    if n_parts > 1:
        _merge(args, v, n_parts, parts, tid, nth)

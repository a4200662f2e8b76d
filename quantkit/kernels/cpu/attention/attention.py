"""Attention over a cache in blocks of keys: softmax(scale * q K^T + bias) V without storing the full score matrix.

The unit of work is a tile of rows of q that share a key-value head: tokens of one sequence, times the heads of the
group. For each block of 64 keys, with m the largest score so far, l the sum and o the weighted values:

    s = scale * q K^T       capped, biased, masked
    m' = max(m, max s)      p = exp(s - m')      f = exp(m - m')
    l = f l + sum p         o = f o + p V        at the end out = o / l

so memory does not grow with the context (Milakov & Gimelshein 2018; Dao et al. 2022, FlashAttention). A sink is an
extra score per head without a value: it joins l at the end. Blocks that are masked for all rows of a tile are skipped.

Many rows (a prompt): the keys of a block are transposed once and multiplied in register tiles (``outer``). Few rows
(generation): dot products along the head (``inner``), one pass over the keys for all heads of the group. A few tokens
at great depth are also split along the keys, at points that depend on the depth alone, and the parts merged: threads
take units from a counter, and no result depends on which thread takes which.

    slot        attention
    q, out      [n_tokens, n_head * head_k], [n_tokens, n_head * head_v]
    k_cache     rows of n_head_kv * head_k values of k_type (cache.py); v_cache the same with head_v and v_type
                v_cache = 0: values are the first head_v columns of the keys (MLA)
    sinks       float32 [n_head], or 0
    mask        CAUSAL; SLIDING, CHUNKED, with window; NON_CAUSAL: those after it in the batch, too; SYMMETRIC: those up
                to window / 2 positions before and after it
    softcap     0: none;  alibi: largest bias, 0: none
    biases      float32 [n_head, 2 * n_ctx + BLOCK], the bias of a key by its distance: column n_ctx - 1 is that of the
                token's position, later ones are those of the keys after it; or 0
    selected    int32 [n_tokens, n_selected]: the positions visible to a token (lightning_indexer.py), or 0. Up to
                position n_selected they are all before it, and read in place; later ones are copied, block by block,
                side by side. The keys of a tile, one token then, are counted as they come in this row.
    ratio       0; or the selected cells are those of a window and of blocks of this number of positions (cache.py)
    scratch     ``scratch_bytes(...)`` bytes, aligned to 64; any contents

Everything is float32. Tiles of one sequence in a batch are independent: cache_write has already stored all its keys.
"""

from __future__ import annotations

from numba import types

from quantkit.kernels.cpu.attention.attention_blocks import (
    BIAS,
    FIRST,
    HEAD,
    LAST,
    NONE,
    SIXTEEN,
    SLOPE,
    TILE,
    TOKEN,
    L,
    M,
    Scoring,
    Source,
    few_scores,
    few_values,
    field,
    keys_at,
    many_scores,
    many_values,
    o_at,
    prefetch_row,
    q_at,
    thread_bytes,
    transpose_keys,
    values_at,
)
from quantkit.kernels.cpu.attention.attention_tiles import COLUMNS, ROWS
from quantkit.kernels.cpu.attention.cache import BLOCK, F32, Q8_0, bytes_of, read_rows
from quantkit.kernels.cpu.core.functions import exp, load_up_to, store_up_to
from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import extract, f32x16, load, splat, store, transpose16
from quantkit.kernels.cpu.core.tape import (
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
from quantkit.kernels.cpu.core.team import atomic_add, atomic_store, barrier

#: Numbers of parameters.MASKS.
CAUSAL, SLIDING, CHUNKED, NON_CAUSAL, SYMMETRIC = range(5)

#: Maximum rows of q for which products run along the head.
FEW_ROWS = 16
#: Prefetch distance, in selected rows.
PREFETCH_DISTANCE = 8
#: Batches of at most SPLIT_ROWS rows (tokens * heads) are split along the keys: blocks per part, maximum number of
#: parts.
SPLIT_ROWS = 512
SPLIT_BLOCKS = 8
SPLITS = 16
#: Word of the batch block that counts the units assigned.
COUNTER = 8

_Q, _OUT, _K_CACHE, _V_CACHE, _K_TYPE, _V_TYPE, _N_HEAD, _N_HEAD_KV, _HEAD_K, _HEAD_V = range(1, 11)
_SCALE, _SOFTCAP, _SINKS, _MASK, _WINDOW, _ALIBI, _BIASES, _SELECTED, _N_SELECTED, _RATIO, _SCRATCH = range(11, 22)


# ---------------------------------------------------------------- tiles, and the keys visible to their rows


def scratch_bytes(head_k: int, head_v: int, threads: int, selected: bool = False) -> int:
    """Return the scratch bytes of attention; one scratch, sized for the largest, serves a whole tape."""
    k, v = (head_k + 15) // 16, (head_v + 15) // 16
    thread = SIXTEEN + 1024 * k + 64 * (TILE + BLOCK) * (k + v) + (64 * BLOCK * k if selected else 0)
    return thread * threads + SPLIT_ROWS * SPLITS * 64 * (v + 1)


@inline
def pad(rows):
    return (rows + ROWS - 1) // ROWS * ROWS


@inline
def integer(address, i):
    return types.int64(load(types.int32, address, 4 * i))


@inline
def _first_seen(position, mask, window):
    """Return the first position visible from ``position``."""
    if mask == SLIDING:
        return max(position - window + 1, 0)
    if mask == CHUNKED:
        return position // window * window
    if mask == SYMMETRIC:
        return max(position - window // 2, 0)
    return types.int64(0)


@helper
def _end_of(args, token):
    """Return the last position that a token could see: its own; with the mask NON_CAUSAL that of its sequence, with
    SYMMETRIC that within the window."""
    positions, sequences = batch_word(args, POSITIONS), batch_word(args, SEQUENCES)
    mask = arg(args, _MASK)
    position = integer(positions, token)
    if mask in (NON_CAUSAL, SYMMETRIC):
        for t in range(batch_word(args, N_TOKENS) - 1, token, -1):
            if integer(sequences, t) == integer(sequences, token):
                last = integer(positions, t)
                return min(last, position + arg(args, _WINDOW) // 2) if mask == SYMMETRIC else last
    return position


@helper
def _tile_begin(sequences, end, tokens):
    """Return where the tile that ends before token ``end`` begins: adjacent tokens of one sequence."""
    begin = end - 1
    while begin > 0 and end - begin < tokens and integer(sequences, begin - 1) == integer(sequences, begin):
        begin -= 1
    return begin


@inline
def _last_key(args, position):
    """Return the number of the last key visible to a token: its position, or the number of selected ones."""
    if arg(args, _SELECTED) == 0:
        return position
    ratio = arg(args, _RATIO)
    n = arg(args, _N_SELECTED)
    window = arg(args, _WINDOW)
    if ratio == 0:
        return min(position, n - 1)
    return min(position + 1, window) + min((position + 1) // ratio, n - window) - 1


@helper
def _blocks(args, begin, end):
    """Return the first and last + 1 block of keys visible to tokens begin..end of a tile."""
    positions = batch_word(args, POSITIONS)
    mask = arg(args, _MASK)
    window = arg(args, _WINDOW)
    first, last = _first_seen(integer(positions, begin), mask, window), _end_of(args, begin)
    for t in range(begin + 1, end):
        first = min(first, _first_seen(integer(positions, t), mask, window))
        last = max(last, _end_of(args, t))
    return first // BLOCK, _last_key(args, last) // BLOCK + 1


@inline
def _part_blocks(n_blocks):
    """Return the blocks of a part when n_blocks are split."""
    return max(SPLIT_BLOCKS, (n_blocks + SPLITS - 1) // SPLITS)


@helper
def _count_parts(args, tokens):
    """Return the number of parts into which the keys of this batch's tiles are split."""
    n_tokens = batch_word(args, N_TOKENS)
    if n_tokens * arg(args, _N_HEAD) > SPLIT_ROWS:
        return 1
    sequences = batch_word(args, SEQUENCES)
    parts, end = 1, n_tokens
    while end > 0:
        begin = _tile_begin(sequences, end, tokens)
        b0, b1 = _blocks(args, begin, end)
        per = _part_blocks(b1 - b0)
        parts = max(parts, (b1 - b0 + per - 1) // per)
        end = begin
    return parts


@helper
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
    """Fill the rows of a tile, token by token, head by head; no key is visible to the padding, up to ``rows``."""
    positions = batch_word(args, POSITIONS)
    mask = arg(args, _MASK)
    window = arg(args, _WINDOW)
    n_head = arg(args, _N_HEAD)
    biases, stride = arg(args, _BIASES), 2 * batch_word(args, N_CTX) + BLOCK
    center = batch_word(args, N_CTX) - 1
    for r in range(rows):
        row, token = me + 64 * r, begin + r // heads
        valid = token < end
        position = integer(positions, token) if valid else types.int64(-1)
        first = _first_seen(position, mask, window) if valid else types.int64(0)
        store(row, FIRST, types.int32(first))
        store(row, LAST, types.int32(_last_key(args, _end_of(args, token) if valid else position)))
        store(row, HEAD, types.int32(head + r % heads))
        store(row, TOKEN, types.int32(token))
        store(row, M, NONE)
        store(row, L, types.float32(0))
        store(row, SLOPE, _slope(farg(args, _ALIBI), head + r % heads, n_head))
        store(
            row, BIAS, types.int64(0) if biases == 0 else biases + 4 * (stride * (head + r % heads) + center - position)
        )


@helper
def _set_q(args, rows, few_rows, me):
    """Copy rows of q, zero-padded: as they are, or transposed 16 at a time, [rows / 16][head_k][16]."""
    n, q = arg(args, _HEAD_K), arg(args, _Q)
    k = (n + 15) // 16
    for first in range(0, rows, 16):
        panel = me + q_at(k) + 1024 * k * (first // 16)
        target = panel if few_rows else me + SIXTEEN
        for r in range(first, min(first + 16, rows) if few_rows else first + 16):
            row = me + 64 * r
            source = q + 4 * n * (field(row, TOKEN) * arg(args, _N_HEAD) + field(row, HEAD))
            for j in range(k):
                x = splat(f32x16, 0.0)
                if r < rows and field(row, LAST) >= 0:
                    x = load_up_to(source, 64 * j, n - 16 * j)
                store(target, 64 * (k * (r - first) + j), x)
        if not few_rows:
            for j in range(k):
                transpose16(target, 64 * j, 64 * k, panel, 1024 * j)


# ---------------------------------------------------------------- the end: one part, or parts merged


@helper
def scalar_exp(x):
    return extract(exp(splat(f32x16, types.float32(x))), 0)


@helper
def _with_sink(sinks, head, m):
    """Return the larger of m and the head's sink, and the sink's term of the sum."""
    if sinks == 0:
        return m, types.float32(0)
    sink = load(types.float32, sinks, 4 * head)
    largest = max(m, sink)
    return largest, scalar_exp(sink - largest)


@helper
def _finish(args, me, rows, k, v):
    """out = o / l, for the rows of a tile."""
    n = arg(args, _HEAD_V)
    for r in range(rows):
        if field(me + 64 * r, LAST) < 0:
            continue
        row, o = me + 64 * r, me + o_at(k, v) + 64 * v * r
        head, m = field(row, HEAD), load(types.float32, row, M)
        largest, sink_term = _with_sink(arg(args, _SINKS), head, m)
        f = types.float32(1) if largest == m else scalar_exp(m - largest)
        inverse = f / (load(types.float32, row, L) * f + sink_term)
        out = arg(args, _OUT) + 4 * n * (field(row, TOKEN) * arg(args, _N_HEAD) + head)
        for j in range(v):
            store_up_to(out, 64 * j, load(f32x16, o, 64 * j) * inverse, n - 16 * j)


@helper
def _keep_part(args, me, rows, k, v, part, n_parts, parts):
    """Store o, m and l of a tile's rows for the merge."""
    for r in range(rows):
        if field(me + 64 * r, LAST) < 0:
            continue
        row, o = me + 64 * r, me + o_at(k, v) + 64 * v * r
        number = field(row, TOKEN) * arg(args, _N_HEAD) + field(row, HEAD)
        target = parts + 64 * (v + 1) * (number * n_parts + part)
        for j in range(v):
            store(target, 64 * j, load(f32x16, o, 64 * j))
        store(target, 64 * v, load(types.float32, row, M))
        store(target, 64 * v + 4, load(types.float32, row, L))


@helper
def _merge(args, v, n_parts, parts, tid, nth):
    """Merge the parts of every row, in order, into out."""
    n, n_head = arg(args, _HEAD_V), arg(args, _N_HEAD)
    rows, size = batch_word(args, N_TOKENS) * n_head, 64 * (v + 1)
    for row in range(first_of(rows, tid, nth), first_of(rows, tid + 1, nth)):
        first_part = parts + size * n_parts * row
        m = NONE
        for p in range(n_parts):
            m = max(m, load(types.float32, first_part + size * p, 64 * v))
        m, total = _with_sink(arg(args, _SINKS), row % n_head, m)
        for p in range(n_parts):
            f = scalar_exp(load(types.float32, first_part + size * p, 64 * v) - m)
            total += f * load(types.float32, first_part + size * p, 64 * v + 4)
            store(first_part + size * p, 64 * v, f)
        for j in range(v):
            x = splat(f32x16, 0.0)
            for p in range(n_parts):
                x = x + load(f32x16, first_part + size * p, 64 * j) * load(types.float32, first_part + size * p, 64 * v)
            store_up_to(arg(args, _OUT) + 4 * n * row, 64 * j, x / total, n - 16 * j)


# ---------------------------------------------------------------- the operation


@helper
def _last_seen(me, rows):
    """Return the last position visible to any row of a tile."""
    last = field(me, LAST)
    for r in range(rows):
        last = max(last, field(me + 64 * r, LAST))
    return last


@inline
def _thread_bytes(args, k, v):
    """Return the bytes of a thread's scratch; at its end is room for the rows of a block of selected keys."""
    return thread_bytes(k, v) + (64 * BLOCK * k if arg(args, _SELECTED) != 0 else 0)


@inline
def _copy_row(source, target, n_bytes):
    for i in range(0, n_bytes - 63, 64):
        store(target, i, load(f32x16, source, i))
    for i in range(n_bytes - n_bytes % 64, n_bytes, 2):
        store(target, i, load(types.int16, source, i))


@helper
def _key_rows(args, me, start, keys, row_bytes, target):
    """Return where the rows of keys ``start``, ... of a tile lie: in the cache; if selected, copied side by side."""
    token, n = field(me, TOKEN), arg(args, _N_SELECTED)
    cells = arg(args, _K_CACHE) + integer(batch_word(args, SEQUENCES), token) * batch_word(args, N_CTX) * row_bytes
    in_place = arg(args, _RATIO) == 0 and integer(batch_word(args, POSITIONS), token) < n
    if arg(args, _SELECTED) == 0 or in_place:
        return cells + start * row_bytes
    ids = arg(args, _SELECTED) + 4 * (token * n + start)
    for i in range(keys):
        prefetch_row(cells + integer(ids, min(i + PREFETCH_DISTANCE, keys - 1)) * row_bytes, row_bytes)
        _copy_row(cells + integer(ids, i) * row_bytes, target + i * row_bytes, row_bytes)
    return target


@helper
def _value_rows(args, me, start, keys):
    """Return where the rows of values ``start``, ... lie, their type and bytes; without a v_cache: within the keys."""
    if arg(args, _V_CACHE) == 0:
        kind = arg(args, _K_TYPE)
        return keys, kind, bytes_of(kind, arg(args, _HEAD_K) * arg(args, _N_HEAD_KV))
    kind = arg(args, _V_TYPE)
    row_bytes = bytes_of(kind, arg(args, _HEAD_V) * arg(args, _N_HEAD_KV))
    cell = integer(batch_word(args, SEQUENCES), field(me, TOKEN)) * batch_word(args, N_CTX) + start
    return arg(args, _V_CACHE) + cell * row_bytes, kind, row_bytes


@helper
def _attend_tiles(args, kv_head, b0, b1, rows, me):
    """Process the rows of a tile of one key-value head over key blocks b0..b1."""
    n, nv = arg(args, _HEAD_K), arg(args, _HEAD_V)
    k, v = (n + 15) // 16, (nv + 15) // 16
    k_type = arg(args, _K_TYPE)
    k_bytes = bytes_of(k_type, n * arg(args, _N_HEAD_KV))
    scale, softcap = farg(args, _SCALE), farg(args, _SOFTCAP)
    is_adjusted, last = softcap > 0 or farg(args, _ALIBI) > 0 or arg(args, _BIASES) != 0, _last_seen(me, rows)
    for block in range(b0, b1):
        start = block * BLOCK
        keys = min(BLOCK, last + 1 - start)
        k_rows = _key_rows(args, me, start, keys, k_bytes, me + thread_bytes(k, v))
        v_rows, v_type, v_bytes = _value_rows(args, me, start, k_rows)
        k_source, v_source = k_rows + kv_head * bytes_of(k_type, n), v_rows + kv_head * bytes_of(v_type, nv)
        transpose_keys(k_source, k_bytes, k_type, keys, n, me + SIXTEEN, me + keys_at(k))
        read_rows(v_source, v_bytes, v_type, keys, nv, COLUMNS, me + values_at(k))
        many_scores(me, rows, k, n, Scoring(start, scale, softcap, is_adjusted))
        many_values(me, rows, k, v, start)


@helper
def _attend_few_rows(args, kv_head, kv_heads, b0, b1, rows, me):
    """Process ``rows`` rows of each of kv_heads key-value heads over key blocks b0..b1.

    A block of all heads is contiguous in memory; while one head's part is used, the next head's is prefetched.
    """
    n, nv = arg(args, _HEAD_K), arg(args, _HEAD_V)
    k, v = (n + 15) // 16, (nv + 15) // 16
    k_type = arg(args, _K_TYPE)
    k_bytes = bytes_of(k_type, n * arg(args, _N_HEAD_KV))
    scale, softcap = farg(args, _SCALE), farg(args, _SOFTCAP)
    is_adjusted, last = softcap > 0 or farg(args, _ALIBI) > 0 or arg(args, _BIASES) != 0, _last_seen(me, rows)
    k_head, k_direct = bytes_of(k_type, n), k_type != Q8_0 and n % 16 == 0
    for block in range(b0, b1):
        start = block * BLOCK
        keys = min(BLOCK, last + 1 - start)
        k_rows = _key_rows(args, me, start, keys, k_bytes, me + thread_bytes(k, v))
        v_rows, v_type, v_bytes = _value_rows(args, me, start, k_rows)
        v_head, v_direct = bytes_of(v_type, nv), v_type != Q8_0 and nv % 16 == 0
        k_at, v_at = k_rows + kv_head * k_head, v_rows + kv_head * v_head
        for head in range(kv_heads):
            source = k_at + head * k_head
            stride = k_bytes
            kind = k_type
            after = k_at + BLOCK * (k_bytes + head * k_head)
            if not k_direct:
                read_rows(source, stride, kind, keys, n, k, me + keys_at(k))
                source = me + keys_at(k)
                stride = 64 * k
                kind = F32
            fetch = k_head if k_direct else 0
            rows_of_keys = Source(source, stride, kind, after, fetch)
            few_scores(me, head * rows, rows, k, rows_of_keys, Scoring(start, scale, softcap, is_adjusted))
            source = v_at + head * v_head
            stride = v_bytes
            kind = v_type
            after = v_at + BLOCK * (v_bytes + head * v_head)
            if not v_direct:
                read_rows(source, stride, kind, keys, nv, v, me + values_at(k))
                source = me + values_at(k)
                stride = 64 * v
                kind = F32
            fetch = v_head if v_direct and arg(args, _V_CACHE) != 0 else 0
            few_values(me, head * rows, rows, k, v, Source(source, stride, kind, after, fetch), start)


@inline
def _heads_of_unit(args, rows, heads, work, nth):
    """Return the key-value heads a unit takes: as many as fit, but leaving enough units for all threads."""
    n_head_kv = arg(args, _N_HEAD_KV)
    if rows > FEW_ROWS:
        return 1
    most = min(TILE // rows, n_head_kv)
    while most > 1 and (n_head_kv + most - 1) // most * work < 3 * nth:
        most = (most + 1) // 2
    return most


@operation(
    "batch q out k_cache v_cache k_type v_type n_head n_head_kv head_k head_v scale:f softcap:f sinks mask window"
    " alibi:f biases selected n_selected ratio scratch"
)
def attention(args, tid, nth):
    """Causal attention of every token over the cells of its sequence; slots: see the top of this file."""
    n_head, n_head_kv = arg(args, _N_HEAD), arg(args, _N_HEAD_KV)
    k, v = (arg(args, _HEAD_K) + 15) // 16, (arg(args, _HEAD_V) + 15) // 16
    group, n_tokens = n_head // n_head_kv, batch_word(args, N_TOKENS)
    heads = min(group, TILE)
    head_tiles, tokens = (group + heads - 1) // heads, 1 if arg(args, _SELECTED) != 0 else TILE // heads
    n_parts = _count_parts(args, tokens)
    me = arg(args, _SCRATCH) + tid * _thread_bytes(args, k, v)
    parts = arg(args, _SCRATCH) + nth * _thread_bytes(args, k, v)
    sequences = batch_word(args, SEQUENCES)
    kv_heads = _heads_of_unit(args, pad(min(n_tokens, tokens) * heads), heads, n_parts * head_tiles, nth)
    kv_units = (n_head_kv + kv_heads - 1) // kv_heads
    units = kv_units * head_tiles * n_parts
    tile, end = 0, n_tokens  # tiles are numbered from the last, which has the most keys
    begin = _tile_begin(sequences, end, tokens)
    while True:
        unit = atomic_add(load(types.int64, args, 0), COUNTER, 1)
        while tile < unit // units and end > 0:
            tile, end = tile + 1, begin
            if end > 0:
                begin = _tile_begin(sequences, end, tokens)
        if end <= 0:
            break
        part, head_unit = unit % n_parts, unit % units // n_parts
        kv_head, first = head_unit // head_tiles * kv_heads, head_unit % head_tiles * heads
        b0, b1 = _blocks(args, begin, end)
        if n_parts > 1:
            per = _part_blocks(b1 - b0)
            b0, b1 = min(b1, b0 + part * per), min(b1, b0 + part * per + per)
        n_heads = min(heads, group - first)
        n_kv, n_rows = min(kv_heads, n_head_kv - kv_head), (end - begin) * n_heads
        rows = pad(n_rows)
        few_rows = rows <= FEW_ROWS
        for i in range(n_kv):
            _set_rows(args, begin, end, (kv_head + i) * group + first, n_heads, rows, me + 64 * rows * i)
        _set_q(args, rows * n_kv, few_rows, me)
        for i in range(rows * n_kv * v):
            store(me + o_at(k, v), 64 * i, splat(f32x16, 0.0))
        if few_rows:
            _attend_few_rows(args, kv_head, n_kv, b0, b1, rows, me)
        else:
            _attend_tiles(args, kv_head, b0, b1, rows, me)
        if n_parts > 1:
            _keep_part(args, me, rows * n_kv, k, v, part, n_parts, parts)
        else:
            _finish(args, me, rows * n_kv, k, v)
    barrier(batch_word(args, CONTROL), nth)
    if tid == 0:
        atomic_store(load(types.int64, args, 0), COUNTER, 0)
    if n_parts > 1:
        _merge(args, v, n_parts, parts, tid, nth)

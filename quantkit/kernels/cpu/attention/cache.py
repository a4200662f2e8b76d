"""The key-value cache: written row by row, read back in float32 blocks.

Each cell is one row of all key-value heads, in F32, F16 or Q8_0 (ggml's bytes: blocks of 32, f16 scale, int8 levels,
rounded as quantize_row_q8_0_ref does). The cell of a token is sequence * n_ctx + position. Types are ggml ids
(quantkit.types), dispatched at run time: reading a block is cheap next to using it.

Products are float32. llama.cpp also rounds q to the cache's type (f16 x f16, q8_0 x q8_0 products); results here
differ from its by that rounding and are closer to the model.

Rows that stand for blocks of positions, and the cells visible to a token if they follow a window:

    block_write        batch k k_cache k_type k_width ratio first      k [n_tokens, k_width], of the tokens that end a
                       block of ``ratio`` positions, to row first + sequence * (n_ctx // ratio) + block
    window_and_blocks  batch out blocks n_out window ratio first       out int32 [n_tokens, n_out]: cells from that of
                       the sequence's position 0 on: the last ``window`` positions, then blocks, then -1
                       blocks: int32 [n_tokens, n_out - window], numbers of blocks, then -1; or 0: all that have ended
"""

from __future__ import annotations

from numba import types

from quantkit.kernels.cpu.attention.cache_rounding import round_part
from quantkit.kernels.cpu.core.functions import load_part, store_part
from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import (
    convert,
    f16_to_f32,
    f32_to_f16,
    f32x16,
    hmax,
    i8x16,
    load,
    load_f16,
    prefetch_l2,
    round_away,
    splat,
    store,
    store_f16,
    vabs,
    vmax,
)
from quantkit.kernels.cpu.core.tape import N_CTX, N_TOKENS, POSITIONS, SEQUENCES, arg, batch_word, first_of, operation
from quantkit.types import BY_NAME

#: ggml ids of the types a cache may have: the values of slots k_type and v_type.
F32, F16, Q8_0 = (BY_NAME[name].id for name in ("F32", "F16", "Q8_0"))

#: Added to a type's id where cells are written: values are rounded to the type, and stored as F32.
ROUNDED = 1 << 16

#: Cells read at once; a block begins at a multiple of BLOCK.
BLOCK = 64


@inline
def bytes_of(kind, n):
    """Return the bytes of n values of a cache type."""
    if kind == F32 or kind >= ROUNDED:
        return 4 * n
    return 2 * n if kind == F16 else n // 32 * 34


# ---------------------------------------------------------------- write

_K, _V, _K_CACHE, _V_CACHE, _K_TYPE, _V_TYPE, _K_WIDTH, _V_WIDTH = range(1, 9)


@inline
def _write_q8_0(x, out):
    """Write one block as quantize_row_q8_0_ref does; a scale too small to invert gives levels of 0."""
    x0, x1 = load(f32x16, x, 0), load(f32x16, x, 64)
    d = hmax(vmax(vabs(x0), vabs(x1))) / types.float32(127)
    inverse = types.float32(1) / d
    if not inverse < types.float32(3.4028235e38):
        inverse = types.float32(0)
    store(out, 0, f32_to_f16(d))
    store(out, 2, convert(i8x16, round_away(x0 * inverse)))
    store(out, 18, convert(i8x16, round_away(x1 * inverse)))


@helper
def write_part(x, n, kind, out):
    """Write up to 32 values; exactly 32 for Q8_0."""
    if kind == Q8_0:
        _write_q8_0(x, out)
        return
    if kind >= ROUNDED:
        round_part(x, n, kind - ROUNDED, out)
        return
    for i in range(0, n, 16):
        if n - i >= 16:
            if kind == F16:
                store_f16(out, 2 * i, load(f32x16, x, 4 * i))
            else:
                store(out, 4 * i, load(f32x16, x, 4 * i))
        elif kind == F32:
            store_part(out, 4 * i, load_part(f32x16, x, 4 * i, n - i), n - i)
        else:
            for j in range(i, n):
                store(out, 2 * j, f32_to_f16(load(types.float32, x, 4 * j)))


@inline
def _write(args, x, cache, kind, width, tid, nth):
    """Write all rows of x; threads share blocks of 32 columns."""
    parts = (width + 31) // 32
    row_bytes = bytes_of(kind, width)
    positions, sequences = batch_word(args, POSITIONS), batch_word(args, SEQUENCES)
    items = batch_word(args, N_TOKENS) * parts
    for item in range(first_of(items, tid, nth), first_of(items, tid + 1, nth)):
        token, part = item // parts, item % parts
        cell = load(types.int32, sequences, 4 * token) * batch_word(args, N_CTX) + load(
            types.int32, positions, 4 * token
        )
        n = min(32, width - 32 * part)
        write_part(x + 4 * (token * width + 32 * part), n, kind, cache + cell * row_bytes + bytes_of(kind, 32 * part))


@operation("batch k v k_cache v_cache k_type v_type k_width v_width")
def cache_write(args, tid, nth):
    """Store k [n_tokens, k_width] and v [n_tokens, v_width] in the cells of the tokens; v_width 0: no v.

    Rows of a Q8_0 cache have a multiple of 32 values.
    """
    _write(args, arg(args, _K), arg(args, _K_CACHE), arg(args, _K_TYPE), arg(args, _K_WIDTH), tid, nth)
    if arg(args, _V_WIDTH) > 0:
        _write(args, arg(args, _V), arg(args, _V_CACHE), arg(args, _V_TYPE), arg(args, _V_WIDTH), tid, nth)


# ---------------------------------------------------------------- read


@inline
def _read16(source, kind, j):
    """Return values 16 j, ..., 16 j + 15 of a head's row."""
    if kind == F16:
        return load_f16(f32x16, source, 32 * j)
    if kind == F32:
        return load(f32x16, source, 64 * j)
    block = source + (j >> 1) * 34
    d = f16_to_f32(load(types.uint16, block, 0))
    return convert(f32x16, load(i8x16, block, 2 + 16 * (j & 1))) * d


@inline
def _read_end(source, kind, width, out):
    """Write the last values of a row whose length is not a multiple of 16, zero-padded."""
    store(out, 0, splat(f32x16, 0.0))
    for i in range(width // 16 * 16, width):
        if kind == F16:
            store(out, 4 * (i % 16), f16_to_f32(load(types.uint16, source, 2 * i)))
        else:
            store(out, 4 * (i % 16), load(types.float32, source, 4 * i))


@helper
def read_rows(source, row_bytes, kind, rows, width, group, out):
    """Read ``rows`` <= BLOCK rows of ``width`` values, as float32 in columns of ``group`` vectors of 16.

    Vector j of row r, in the group of g vectors that begins with vector j0, goes to byte
    64 * (BLOCK * j0 + g * r + j - j0); vectors beyond the last whole group form single groups (g = 1). A group
    of all vectors gives plain rows. The same rows of the next block are prefetched.
    """
    vectors, full = (width + 15) // 16, width // 16
    n_bytes = bytes_of(kind, width)
    for r in range(rows):
        row = source + r * row_bytes
        for i in range(0, n_bytes, 64):
            prefetch_l2(row, BLOCK * row_bytes + i)
        j = 0
        while j + group <= full:
            target = out + 64 * (BLOCK * j + group * r)
            if kind == F16:
                for c in range(group):
                    store(target, 64 * c, load_f16(f32x16, row, 32 * (j + c)))
            elif kind == F32:
                for c in range(group):
                    store(target, 64 * c, load(f32x16, row, 64 * (j + c)))
            elif group % 2 == 0:
                for c in range(0, group, 2):
                    block = row + (j + c) // 2 * 34
                    d = splat(f32x16, f16_to_f32(load(types.uint16, block, 0)))
                    store(target, 64 * c, convert(f32x16, load(i8x16, block, 2)) * d)
                    store(target, 64 * c + 64, convert(f32x16, load(i8x16, block, 18)) * d)
            else:
                for c in range(group):
                    store(target, 64 * c, _read16(row, Q8_0, j + c))
            j += group
        while j < vectors:
            if j + group <= vectors:
                target = out + 64 * (BLOCK * j + group * r)
                size = group
            else:
                target = out + 64 * (BLOCK * j + r)
                size = 1
            for c in range(size):
                if j + c < full:
                    store(target, 64 * c, _read16(row, kind, j + c))
                else:
                    _read_end(row, kind, width, target + 64 * c)
            j += size


# ---------------------------------------------------------------- blocks of positions

_ROW, _ROW_CACHE, _ROW_TYPE, _ROW_WIDTH, _RATIO, _FIRST = range(1, 7)
_OUT, _BLOCKS, _N_OUT, _WINDOW, _W_RATIO, _W_FIRST = range(1, 7)


@inline
def _position(args, token):
    return types.int64(load(types.int32, batch_word(args, POSITIONS), 4 * token))


@inline
def _sequence(args, token):
    return types.int64(load(types.int32, batch_word(args, SEQUENCES), 4 * token))


@operation("batch k k_cache k_type k_width ratio first")
def block_write(args, tid, nth):
    """Store the rows of blocks; threads share blocks of 32 columns."""
    kind = arg(args, _ROW_TYPE)
    width = arg(args, _ROW_WIDTH)
    ratio = arg(args, _RATIO)
    parts, row_bytes = (width + 31) // 32, bytes_of(kind, width)
    items = batch_word(args, N_TOKENS) * parts
    for item in range(first_of(items, tid, nth), first_of(items, tid + 1, nth)):
        token, part = item // parts, item % parts
        position = _position(args, token)
        if (position + 1) % ratio == 0:
            cell = arg(args, _FIRST) + _sequence(args, token) * (batch_word(args, N_CTX) // ratio) + position // ratio
            target = arg(args, _ROW_CACHE) + cell * row_bytes + bytes_of(kind, 32 * part)
            write_part(arg(args, _ROW) + 4 * (token * width + 32 * part), min(32, width - 32 * part), kind, target)


@operation("batch out blocks n_out window ratio first")
def window_and_blocks(args, tid, nth):
    """List the cells visible to each token."""
    n_out = arg(args, _N_OUT)
    window = arg(args, _WINDOW)
    ratio = arg(args, _W_RATIO)
    n_ctx, n_tokens = batch_word(args, N_CTX), batch_word(args, N_TOKENS)
    for token in range(first_of(n_tokens, tid, nth), first_of(n_tokens, tid + 1, nth)):
        out, blocks = arg(args, _OUT) + 4 * n_out * token, arg(args, _BLOCKS) + 4 * (n_out - window) * token
        end, sequence = _position(args, token) + 1, _sequence(args, token)
        n_recent = min(end, window)
        for i in range(n_recent):
            store(out, 4 * i, types.int32(end - n_recent + i))
        first = arg(args, _W_FIRST) + sequence * (n_ctx // ratio - n_ctx)
        n_blocks = min(end // ratio, n_out - window)
        for i in range(n_blocks):
            block = types.int64(load(types.int32, blocks, 4 * i)) if arg(args, _BLOCKS) != 0 else i
            store(out, 4 * (n_recent + i), types.int32(first + block))
        for i in range(n_recent + n_blocks, n_out):
            store(out, 4 * i, types.int32(-1))

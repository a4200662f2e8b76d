"""Rows of a cache that stand for blocks of positions, and the cells that a token sees if they follow a window.

block_write        batch k k_cache k_type k_width ratio first      k [n_tokens, k_width], of the tokens that end a
                   block of ``ratio`` positions, to row first + sequence * (n_ctx // ratio) + block
window_and_blocks  batch out blocks n_out window ratio first       out int32 [n_tokens, n_out]: cells from that of
                   the sequence's position 0 on: the last ``window`` positions, then blocks, then -1
                   blocks: int32 [n_tokens, n_out - window], numbers of blocks, then -1; or 0: all that have ended
"""

from __future__ import annotations

from numba import types

from quantkit.kernels.cpu.attention.cache import bytes_of, write_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import load, store
from quantkit.kernels.cpu.core.tape import N_CTX, N_TOKENS, POSITIONS, SEQUENCES, arg, batch_word, first_of, operation

_K, _K_CACHE, _K_TYPE, _K_WIDTH, _RATIO, _FIRST = range(1, 7)
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
    kind = arg(args, _K_TYPE)
    width = arg(args, _K_WIDTH)
    ratio = arg(args, _RATIO)
    parts, row_bytes = (width + 31) // 32, bytes_of(kind, width)
    items = batch_word(args, N_TOKENS) * parts
    for item in range(first_of(items, tid, nth), first_of(items, tid + 1, nth)):
        token, part = item // parts, item % parts
        position = _position(args, token)
        if (position + 1) % ratio == 0:
            cell = arg(args, _FIRST) + _sequence(args, token) * (batch_word(args, N_CTX) // ratio) + position // ratio
            target = arg(args, _K_CACHE) + cell * row_bytes + bytes_of(kind, 32 * part)
            write_part(arg(args, _K) + 4 * (token * width + 32 * part), min(32, width - 32 * part), kind, target)


@operation("batch out blocks n_out window ratio first")
def window_and_blocks(args, tid, nth):
    """List the cells that every token sees."""
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

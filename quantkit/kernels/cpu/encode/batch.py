"""Batches of blocks: the loop shared by encoders, and loading values into lanes.

Rows are contiguous, so the blocks of a range of rows form one sequence, and a batch is a slice of it that may span
rows. The importance row restarts with every row: it is repeated in advance, so that the weights of any batch are also
contiguous. The last batch is padded with arbitrary values, whose lanes are computed and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import inline, kernel, specialize
from quantkit.kernels.cpu.core.simd import f32x16, load, splat, store, transpose16_apart, u8x64, vsqrt
from quantkit.kernels.cpu.encode import Encoder
from quantkit.kernels.cpu.encode.search import LANES, STEP, WIDE
from quantkit.types import BY_NAME

#: Bytes of the 256 f32 of a super-block.
BLOCK_BYTES = 1024


@inline
def address(a):
    """Return an array's address as a signed integer: adding an index keeps it an integer."""
    return np.intp(a.ctypes.data)


@inline
def copy(source, target, nbytes):
    """Copy a multiple of 64 bytes between addresses."""
    for offset in range(0, nbytes, 64):
        store(target, offset, load(u8x64, source, offset))


@inline
def aligned_scratch(size: Any) -> Any:
    """Return ``size`` bytes of float32 aligned to a cache line."""
    buffer = np.empty(size // 4 + 16, np.float32)
    return buffer[(-address(buffer) & 63) // 4 :]


@inline
def periodic(weights: Any) -> Any:
    """Repeat the importance row so that LANES super-blocks follow any start of a batch; empty if it is empty."""
    n = weights.size
    out = np.empty(n + LANES * 256 if n else 0, np.float32)
    k = 0
    for i in range(out.size):
        out[i] = weights[k]
        k = k + 1 if k + 1 < n else 0
    return out


@inline
def load_group(x: Any, group: Any, n: Any, s: Any, target: Any) -> Any:
    """Transpose LANES sub-blocks of n values into [n][LANES]."""
    for half in range(LANES // 16):
        for part in range(n // 16):
            offset = ((group * LANES + half * 16) * n + part * 16) * 4
            transpose16_apart(x, offset, n * 4, s, target + part * 16 * STEP + half * 64, STEP)


@inline
def turn(s: Any, flat: Any, turned: Any, subs: Any) -> Any:
    """Transpose a number per sub-block from memory order to [sub-block][super-block]."""
    for half in range(LANES // 16):
        transpose16_apart(s, flat + half * 16 * subs * 4, subs * 4, s, turned + half * 64, STEP)


@inline
def store_sigma(s: Any, x: Any, subs: Any, factor: Any, columns_at: Any, turned: Any, out_at: Any) -> None:
    """Store factor * (sum of squares of the super-block) / 256 for every sub-block, in memory order.

    ``columns_at`` and ``turned`` have room for 16 rows and 1 row of LANES.
    """
    total = splat(WIDE, np.float32(0))
    for part in range(16):
        for half in range(LANES // 16):
            transpose16_apart(x, half * 16 * BLOCK_BYTES + part * 64, BLOCK_BYTES, s, columns_at + half * 64, STEP)
        for i in range(16):
            v = load(WIDE, s, columns_at + i * STEP)
            total = total + v * v
    store(s, turned, np.float32(factor) * total / np.float32(256))
    for b in range(LANES):
        sigma = load(types.float32, s, turned + 4 * b)
        store(s, out_at + b * subs * 4, splat(f32x16, sigma))


@inline
def weigh_by_importance(s: Any, w: Any, group: Any, n: Any, x_at: Any, w_at: Any, sigma_at: Any) -> None:
    """weight = importance * sqrt(sigma2 + x^2)"""
    load_group(w, group, n, s, w_at)
    sigma = load(WIDE, s, sigma_at + group * STEP)
    for i in range(n):
        x = load(WIDE, s, x_at + i * STEP)
        store(s, w_at + i * STEP, load(WIDE, s, w_at + i * STEP) * vsqrt(sigma + x * x))


# ---------------------------------------------------------------- the loop

#: Bindings of ``encode_blocks``: encode_batch(s, x, weights, out, count), s: float32 scratch, x, weights and out:
#: addresses for the first block, weights 0 without an importance matrix; and further functions for the values and bytes
#: of a block. Tables are further arguments.
encode_batch: Any = None
block = block_bytes = batch = scratch_bytes = 0
gathered = False


def encode_blocks(x: Any, weights: Any, out: Any, row0: int, row1: int, *tables: Any) -> None:
    """Encode rows row0..row1 of x, float32 [rows, n], to uint8 [rows, row_bytes]; weights: float32 [n], or empty."""
    per_row = x.shape[1] // block
    scratch = aligned_scratch(scratch_bytes)
    group = np.zeros(block * batch, np.float32)
    repeated = periodic(weights)
    end = row1 * per_row
    for first in range(row0 * per_row, end, batch):
        count = min(batch, end - first)
        source = address(x) + 4 * block * first
        if gathered or count < batch:
            copy(source, address(group), 4 * block * count)
            source = address(group)
        w = address(repeated) + 4 * block * (first % per_row) if repeated.size else 0
        encode_batch(scratch, source, w, address(out) + block_bytes * first, count, *tables)


def blocks_encoder(
    name: str,
    encode_batch: Any,
    batch: int,
    scratch_bytes: int,
    gathered: bool = False,
    tables: Callable[[], Any] | None = None,
) -> Encoder:
    """Return the encoder of a type that encodes ``batch`` blocks at a time.

    gathered: copy the values into L1 first, because strided reads defeat the prefetcher.
    tables: returns arrays that encode_batch takes as further arguments.
    """
    t = BY_NAME[name]
    bound = {"encode_batch": encode_batch, "batch": batch, "scratch_bytes": scratch_bytes, "gathered": gathered}
    sizes = {"block": t.block, "block_bytes": t.block_bytes}
    compiled = specialize(encode_blocks, name.lower(), kernel, **bound, **sizes)
    if tables is None:
        return compiled  # type: ignore[no-any-return]

    def encode(x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
        compiled(x, weights, out, row0, row1, *tables())

    return encode


def if_weighted(weighted: Encoder, plain: Encoder) -> Encoder:
    """Return the encoder of a type that is ``weighted`` with an importance matrix, and ``plain`` without one."""

    def encode(x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
        (weighted if weights.size else plain)(x, weights, out, row0, row1)

    return encode

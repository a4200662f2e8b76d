"""Blocks from the integers of a search: the fields of any type, by its table of places (lattices.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import any_lane, f32_to_f16, f32x16, load, store, u8x16

U8 = np.uint8


@inline
def _pack_bytes(out: Any, o: Any, values: Any, v: Any, place: Any) -> None:
    """Store the fields of one run of a table in zeroed bytes; values: uint8, from ``v`` on."""
    field, byte, shift, first, mask = place[0], place[1], place[2], place[3], (1 << place[4]) - 1
    count = place[5]
    n_vectorized = count - count % 16
    for i in range(0, n_vectorized, 16):
        bits = (load(u8x16, values, v + field + i) >> U8(first)) & U8(mask)
        target = o + byte + i
        store(out, target, load(u8x16, out, target) | bits << U8(shift))
    for i in range(n_vectorized, count):
        bits = (np.int64(values[v + field + i]) >> first) & mask
        out[o + byte + i] |= U8(bits << shift)


@inline
def _pack_word(out: Any, o: Any, value: Any, place: Any) -> None:
    bits = (np.int64(value) >> place[3]) & ((1 << place[4]) - 1)
    out[o + place[1]] |= U8(bits << place[2])


@kernel
def pack_blocks(
    count: int, block: int, subs: int, q: Any, s: Any, m: Any, d: Any, dmin: Any, runs: Any, ends: Any, out: Any
) -> None:
    """Write the first ``count`` blocks into out, uint8 [count * block bytes].

    q: uint8 [blocks * block]. s, m: uint8 [blocks * subs]. d, dmin: float64 [blocks], numbers of f16. runs, ends: those
    of the type's ``Lattice``.
    """
    size = out.size // count
    out[:] = 0
    for b in range(count):
        for r in range(ends[0]):
            _pack_bytes(out, b * size, q, b * block, runs[r])
        for r in range(ends[0], ends[1]):
            _pack_bytes(out, b * size, s, b * subs, runs[r])
        for r in range(ends[1], ends[2]):
            _pack_bytes(out, b * size, m, b * subs, runs[r])
        for r in range(ends[2], ends[3]):
            _pack_word(out, b * size, f32_to_f16(np.float32(d[b])), runs[r])
        for r in range(ends[3], ends[4]):
            _pack_word(out, b * size, f32_to_f16(np.float32(dmin[b])), runs[r])


@kernel
def write_better(x: Any, indices: Any, data: Any, after: Any, exact: Any, blocks: Any) -> None:
    """Replace blocks that are less exact than new ones, but those of zeros alone, and their exactness.

    x: float32 [n]. indices: int64 [new], numbers of blocks. data: uint8 [new, block bytes]. after: uint8 [new], the
    exactness of the new blocks. exact, blocks: of all blocks.
    """
    block = x.size // exact.size
    for i in range(indices.size):
        b = indices[i]
        if after[i] <= exact[b]:
            continue
        has_weights = False
        for j in range(b * block, (b + 1) * block, 16):
            has_weights |= any_lane(load(f32x16, x, 4 * j) != np.float32(0))
        if has_weights:
            exact[b] = after[i]
            for k in range(data.shape[1]):
                blocks[b, k] = data[i, k]

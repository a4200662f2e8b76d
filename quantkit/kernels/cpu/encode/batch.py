"""Super-blocks in batches of ``LANES``: how their values come into lanes, and what stands in for those that lack.

Rows lie one behind the other, so the super-blocks of a range of rows are one sequence, and a batch is a piece of it
that may span rows. Only the importance row begins anew with every row: it is repeated beforehand, so that the weights
of any batch are one piece as well. The last batch is padded with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.encode.search import LANES, STEP, F
from quantkit.kernels.cpu.jit import inline
from quantkit.kernels.cpu.simd import f32x16, load, splat, store, transpose16_apart

#: Bytes of the 256 f32 of a super-block.
BLOCK_BYTES = 1024


@inline
def address(array: Any) -> Any:
    return np.intp(array.ctypes.data)


@inline
def aligned_scratch(size: Any) -> Any:
    """Return ``size`` bytes of float32 that begin at a cache line."""
    whole = np.empty(size // 4 + 16, np.float32)
    return whole[(-address(whole) & 63) // 4 :]


@inline
def periodic(weights: Any) -> Any:
    """Return the importance row repeated: wherever a batch begins in it, LANES super-blocks follow."""
    n = weights.size
    out = np.empty(n + LANES * 256 if n else 0, np.float32)
    k = 0
    for i in range(out.size):
        out[i] = weights[k]
        k = k + 1 if k + 1 < n else 0
    return out


@inline
def whole_batch(s: Any, tail: Any, x: Any, count: Any) -> Any:
    """Return the address of LANES super-blocks: x itself, or a copy of its ``count`` with zeros behind, in s."""
    if count == LANES:
        return x
    for at in range(0, LANES * BLOCK_BYTES, 64):
        inside = at < count * BLOCK_BYTES
        store(s, tail + at, load(f32x16, x, at) if inside else splat(f32x16, F(0)))
    return address(s) + tail


@inline
def load_group(x: Any, group: Any, n: Any, s: Any, to: Any) -> Any:
    """Transpose LANES sub-blocks of n values into [n][LANES]."""
    for half in range(LANES // 16):
        for part in range(n // 16):
            at = ((group * LANES + half * 16) * n + part * 16) * 4
            transpose16_apart(x, at, n * 4, s, to + part * 16 * STEP + half * 64, STEP)


@inline
def turn(s: Any, flat: Any, turned: Any, subs: Any) -> Any:
    """Transpose one number per sub-block from memory order to [sub-block][super-block]."""
    for half in range(LANES // 16):
        transpose16_apart(s, flat + half * 16 * subs * 4, subs * 4, s, turned + half * 64, STEP)

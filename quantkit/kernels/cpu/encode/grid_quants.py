"""IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S: magnitudes are points of a grid, signs are stored apart.

Bytes of a block of 256 values: quantkit/kernels/cpu/unpack/i_quants.py. A batch is LANES super-blocks, whose sub-blocks
are searched LANES at a time (grid_search.py):

| type    | sub-blocks | grid       | distances | signs | candidates           | rounded again              |
|---------|------------|------------|-----------|-------|----------------------|----------------------------|
| IQ2_XXS | 8 of 32    | 256 of 8   | 2         | 7     | 13 about a first fit | all                        |
| IQ2_XS  | 16 of 16   | 512 of 8   | 2         | 7     | 19                   | those off the grid         |
| IQ2_S   | 16 of 16   | 1024 of 8  | 1         | 8     | 19                   | those off the grid         |
| IQ3_XXS | 8 of 32    | 256 of 4   | 2         | 7     | 31                   | those off the grid         |
| IQ3_S   | 8 of 32    | 512 of 4   | 3         | 8     | 19                   | all, if one is off it      |

Seven sign bits stand for eight: the number of negative values is made even. Weights are importance * sqrt(mean square
+ x^2). The largest scale of a super-block becomes 31 d, the scales odd multiples of d.

Source: llama.cpp b11434 ggml-quants.c quantize_row_iq{2_xxs,2_xs,2_s,3_xxs,3_s}_impl.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32_to_f16, load, nearest_int, store
from quantkit.kernels.cpu.core.simd import select as choose
from quantkit.kernels.cpu.encode import grid_search as grid
from quantkit.kernels.cpu.encode.batch import load_group, store_sigma, weigh_by_importance
from quantkit.kernels.cpu.encode.grid_search import ALL, ALL_IF_ONE_IS_OFF, BEST, OFF_GRID, SIGNS, W, X
from quantkit.kernels.cpu.encode.search import EPSILON, LANES, STEP, WIDE, WIDE_INT, F, fit_positive

# Results of the search, by sub-block in memory order, up to 16 per superblock: scales, signs, the word of each group.
ROW = 16 * STEP
SIGMA, SCALES, BEST_SIGNS, BEST_WORDS = (grid.END + k * ROW for k in range(4))
#: Levels of a first fit; LANES sub-blocks.
LEVELS = BEST_WORDS + 8 * ROW
#: The smallest positive number.
DENORMAL = F(2.0**-149)

# ---------------------------------------------------------------- sub-blocks


@inline
def load_sub_blocks(s: Any, x: Any, w: Any, group: Any, n: Any, mean: Any) -> None:
    """Load LANES sub-blocks and their weights: without an importance matrix x^2, plus sigma / 4 if ``mean``."""
    load_group(x, group, n, s, X)
    if w:
        weigh_by_importance(s, w, group, n, X, W, SIGMA)
        return
    quarter = F(0.25) * load(WIDE, s, SIGMA + group * STEP)
    for offset in range(0, n * STEP, STEP):
        v = load(WIDE, s, X + offset)
        store(s, W + offset, quarter + v * v if mean else v * v)


@inline
def store_best(s: Any, group: Any, n: Any, size: Any, scale: Any, dead: Any, even: Any) -> None:
    """Store the result for LANES sub-blocks: scale -1 and zeros if dead. A negative scale changes all signs."""
    bits, offset = n // 8 * (7 if even else 8), group * STEP
    negative, signs = scale < F(0), load(WIDE_INT, s, SIGNS)
    signs = choose(negative, signs ^ (-1 if bits == 32 else (1 << bits) - 1), signs)
    store(s, SCALES + offset, choose(dead, F(-1), choose(negative, -scale, scale)))
    store(s, BEST_SIGNS + offset, choose(dead, 0, signs))
    for k in range(n // size):
        word = load(WIDE_INT, s, BEST + k * STEP) & (grid.OFF - 1)
        store(s, BEST_WORDS + k * ROW + offset, choose(dead, 0, word))


@inline
def _fit_sub_blocks(
    s: Any,
    x: Any,
    w: Any,
    lists: Any,
    count: Any,
    n: Any,
    size: Any,
    sigma: Any,
    even: Any,
    tiny: Any,
    steps: Any,
    selection: Any,
) -> None:
    """Search the sub-blocks of ``count`` super-blocks.

    sigma: times the mean square; even: seven signs; tiny: sub-blocks of smaller values are dead; steps: candidates on
    either side of the largest value's; selection: groups rounded again, with ALL after candidates about a first fit.
    """
    top = 7 if size == 4 else 2
    if w or size == 8:
        store_sigma(s, x, 256 // n, sigma, X, grid.SCALE, SIGMA)
    for group in range((count * (256 // n) + LANES - 1) // LANES):
        load_sub_blocks(s, x, w, group, n, size == 8)
        grid.take_signs(s, n, even)
        grid.derive_weights(s, n)
        largest = grid.largest_value(s, n)
        scale = largest / F(2 * top + 1)
        if selection == ALL:
            scale = fit_positive(s, X, W, LEVELS, n, top + 2)
            largest = choose(largest < tiny, F(0), scale * F(top + 1))
            dead = largest <= F(0)
        else:
            dead = largest < tiny
        largest, off = choose(dead, F(1), largest), selection == ALL_IF_ONE_IS_OFF
        scale, _ = grid.search_scale(s, lists, n, size, top, largest, scale, steps, 0.2 if size == 4 else 0.1, off)
        scale = grid.round_again(s, lists, n, size, top, scale, selection)
        store_best(s, group, n, size, scale, dead, even)


# ---------------------------------------------------------------- bytes


@inline
def largest_scale(s: Any, offset: Any, subs: Any) -> Any:
    """Return the largest scale of the super-block whose sub-blocks begin at byte ``offset``; 0 if all are dead."""
    largest = F(0)
    for ib in range(0, 4 * subs, 4):
        largest = max(largest, load(types.float32, s, SCALES + offset + ib))
    return largest


@inline
def scale_code(s: Any, offset: Any, inverse: Any) -> Any:
    """Return the 4-bit code of the scale of a sub-block."""
    scale = load(types.float32, s, SCALES + offset)
    return max(0, min(15, nearest_int(F(0.5) * (inverse * scale - F(1))))) if scale > F(0) else 0


@inline
def index_of(s: Any, lists: Any, offset: Any, k: Any) -> Any:
    """Return the index in the grid of group k of a sub-block."""
    return np.int64(load(types.uint16, lists[2], 2 * np.int64(load(types.int32, s, BEST_WORDS + k * ROW + offset))))


@inline
def _signs(s: Any, offset: Any) -> Any:
    return np.int64(load(types.uint32, s, BEST_SIGNS + offset))


@inline
def clear(out: Any, size: Any) -> None:
    """Set an even number of bytes to 0."""
    for offset in range(0, size, 2):
        store(out, offset, np.uint16(0))


@inline
def begin_block(s: Any, b: Any, subs: Any, codes: Any, gain: Any, out: Any, size: Any) -> Any:
    """Clear super-block ``b`` and store its scale d: the largest of its ``subs`` scales over ``codes``, times ``gain``.

    Return its address, the byte where its sub-blocks begin, whether any of them is alive, and 1 / d.
    """
    o, first = out + size * b, 4 * subs * b
    top = largest_scale(s, first, subs)
    d = top / codes
    clear(o, size)
    if top > F(0):
        store(o, 0, f32_to_f16(d * gain))
    return o, first, top > F(0), F(1) / d


@inline
def _write_xxs(
    s: Any, out: Any, count: Any, lists: Any, groups: Any, gain: Any, size: Any, words: Any, step: Any
) -> None:
    """Store super-blocks: 8 bytes apart the indices of 32 values, at ``words``, ``step`` apart, signs and scale."""
    for b in range(count):
        o, first, alive, inverse = begin_block(s, b, 8, F(31), gain, out, size)
        if alive:
            for ib in range(8):
                offset = first + 4 * ib
                for k in range(groups):
                    store(o, 2 + 8 * ib + k, np.uint8(index_of(s, lists, offset, k)))
                store(o, words + step * ib, np.uint32(_signs(s, offset) | scale_code(s, offset, inverse) << 28))


@inline
def iq2_xxs_batch(s: Any, x: Any, w: Any, out: Any, count: Any, *lists: Any) -> None:
    """Encode super-blocks as IQ2_XXS. Source: quantize_row_iq2_xxs_impl."""
    _fit_sub_blocks(s, x, w, lists, count, 32, 8, 1, True, EPSILON, 6, ALL)
    _write_xxs(s, out, count, lists, 4, F(1), 66, 6, 8)


@inline
def _store_nibbles(s: Any, first: Any, subs: Any, inverse: Any, o: Any) -> None:
    """Store the codes of scales, two in a byte."""
    for ib in range(0, subs, 2):
        low, high = scale_code(s, first + 4 * ib, inverse), scale_code(s, first + 4 * ib + 4, inverse)
        store(o, ib // 2, np.uint8(low | high << 4))


@inline
def iq2_xs_batch(s: Any, x: Any, w: Any, out: Any, count: Any, *lists: Any) -> None:
    """Encode super-blocks as IQ2_XS. Source: quantize_row_iq2_xs_impl."""
    _fit_sub_blocks(s, x, w, lists, count, 16, 8, 1, True, EPSILON, 9, OFF_GRID)
    write_iq2_xs(s, out, count, lists)


@inline
def write_iq2_xs(s: Any, out: Any, count: Any, lists: Any) -> None:
    """Store the search's scales and levels of ``count`` super-blocks."""
    for b in range(count):
        o, first, alive, inverse = begin_block(s, b, 16, F(31), F(1), out, 74)
        if alive:
            for ib in range(16):
                offset = first + 4 * ib
                signs = _signs(s, offset)
                store(o, 2 + 4 * ib, np.uint16(index_of(s, lists, offset, 0) | (signs & 127) << 9))
                store(o, 4 + 4 * ib, np.uint16(index_of(s, lists, offset, 1) | signs >> 7 << 9))
            _store_nibbles(s, first, 16, inverse, o + 66)


@inline
def iq2_s_batch(s: Any, x: Any, w: Any, out: Any, count: Any, *lists: Any) -> None:
    """Encode super-blocks as IQ2_S. Source: quantize_row_iq2_s_impl."""
    _fit_sub_blocks(s, x, w, lists, count, 16, 8, 2, False, F(1e-8), 9, OFF_GRID)
    for b in range(count):
        o, first, alive, inverse = begin_block(s, b, 16, F(31), F(0.9875), out, 82)
        for ib in range(0, 16, 2):
            high = 0
            for k in range(4):
                offset = first + 4 * (ib + k // 2)
                index = index_of(s, lists, offset, k % 2)
                store(o, 2 + 2 * ib + k, np.uint8(index))
                high |= index >> 8 << 2 * k
            store(o, 66 + ib // 2, np.uint8(high))
            store(o, 34 + 2 * ib, np.uint16(_signs(s, first + 4 * ib)))
            store(o, 36 + 2 * ib, np.uint16(_signs(s, first + 4 * ib + 4)))
        if alive:
            _store_nibbles(s, first, 16, inverse, o + 74)


@inline
def iq3_xxs_batch(s: Any, x: Any, w: Any, out: Any, count: Any, *lists: Any) -> None:
    """Encode super-blocks as IQ3_XXS. Source: quantize_row_iq3_xxs_impl."""
    _fit_sub_blocks(s, x, w, lists, count, 32, 4, 2, True, F(1e-8), 15, OFF_GRID)
    _write_xxs(s, out, count, lists, 8, F(1.0125), 98, 66, 4)


@inline
def iq3_s_batch(s: Any, x: Any, w: Any, out: Any, count: Any, *lists: Any) -> None:
    """Encode super-blocks as IQ3_S. Source: quantize_row_iq3_s_impl.

    It leaves sub-blocks of zeros out, so that qs and signs of later ones move forward; qh and scales do not.
    """
    _fit_sub_blocks(s, x, w, lists, count, 32, 4, 2, False, DENORMAL, 9, ALL_IF_ONE_IS_OFF)
    for b in range(count):
        o, first, alive, inverse = begin_block(s, b, 8, F(31), F(1.033), out, 110)
        place = 0
        for ib in range(8):
            offset, high = first + 4 * ib, 0
            if load(types.float32, s, SCALES + offset) < F(0):
                continue
            for k in range(8):
                index = index_of(s, lists, offset, k)
                store(o, 2 + 8 * place + k, np.uint8(index))
                high |= index >> 8 << k
            store(o, 66 + ib, np.uint8(high))
            store(o, 74 + 4 * place, np.uint32(_signs(s, offset)))
            place += 1
        if alive:
            _store_nibbles(s, first, 8, inverse, o + 106)

"""The encoders of ik_llama.cpp's types with a scale per row.

Sub-blocks of 32 values have a scale d * m with an integer m, and values that are plain or shifted (ik_levels.py).
Scales are searched (ik_search.py), d follows from the largest one of the row, and the others become multiples of it;
the values are rounded to levels again, and d is fitted to them.

A batch is two super-blocks, 16 sub-blocks, of one row, because d is the row's. Weights are importance * sqrt(a + x^2),
without importances x^2, or more generally b + x^2, where a and b are multiples of the mean square of the super-block.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq3_ks_impl, quantize_row_iq4_k_impl_bs128,
quantize_row_iq5_ks_impl.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline, kernel, specialize
from quantkit.kernels.cpu.core.simd import (
    convert,
    f32_to_f16,
    f32x16,
    i32x16,
    load,
    select,
    splat,
    store,
)
from quantkit.kernels.cpu.encode import Encoder
from quantkit.kernels.cpu.encode.batch import address, copy
from quantkit.kernels.cpu.encode.ik_levels import Levels
from quantkit.kernels.cpu.encode.ik_scales import fit_multiples, largest_scale, nearest_multiple
from quantkit.kernels.cpu.encode.ik_search import add_in_order, lift_weights, make_rounding, store_bytes
from quantkit.kernels.cpu.encode.tiles import (
    TILE,
    first_half,
    importance_weights,
    inverse_or_zero,
    load_tile,
    magnitude_weights,
    square_weights,
    sum_weights,
)
from quantkit.types import BY_NAME

F, I32 = np.float32, np.int32

# Offsets into the scratch of a call: tiles of 32 values, copies of the end of a row; levels, codes, sums over a row;
# then scales of a row, whether values are shifted, sums of weights, sums of squares.
X, W, TERMS, TERMS2, TAIL, WEIGHTS_TAIL = (2 * TILE * i for i in range(6))
LEVELS = 12 * TILE
CODES = 12 * TILE + 512
SUMQX = 12 * TILE + 576
SUMQ2 = 12 * TILE + 640
SCALES = 12 * TILE + 704

# ---------------------------------------------------------------- d of a row and its multiples


@inline
def scale_8_bit(scales, sums, count):
    """Return d and its inverse: the largest scale becomes 127, up to its sign."""
    d = abs(largest_scale(scales, count)) / F(127)
    return d, F(1) / d


@inline
def multiples_8_bit(scale, inverse):
    """Return odd multiples of d, -127..127."""
    return (nearest_multiple(F(0.5) * (scale * inverse + F(127)), 0, 127) << I32(1)) - I32(127)


@inline
def store_8_bit(s, multiple, shifted, h, out):
    """Store 8 scales of super-block h, and whether values are shifted in their lowest bits."""
    store(s, CODES, (multiple + I32(127)) | select(shifted, I32(1), splat(i32x16, I32(0))))
    for ib in range(8):
        store(out, ib, load(types.uint8, s, CODES + 32 * h + 4 * ib))


@inline
def scale_5_bit(scales, sums, count):
    """Return d and its inverse: the largest scale becomes -16."""
    d = -largest_scale(scales, count) / F(16)
    return d, F(1) / d


@inline
def multiples_5_bit(scale, inverse):
    """Return multiples of d, -16..15."""
    return nearest_multiple(scale * inverse, -16, 15)


@inline
def scale_fitted(scales, sums, count):
    """Return d whose multiples -16..15 fit the scales best, and the inverse that gives the multiples."""
    return fit_multiples(scales, sums, count, 16)


@inline
def store_5_bit(s, multiple, shifted, h, out, strided):
    """Store 8 scales: u16 of 8 high bits and 8 of whether values are shifted, in either order; u8 nibbles[4].

    strided: high bits come first, and nibbles of scales ib and ib + 4 share a byte; otherwise ib and ib + 1.
    """
    store(s, CODES, (multiple + I32(16)) | select(shifted, I32(32), splat(i32x16, I32(0))))
    high = 0
    up = 0
    low = 0
    for ib in range(8):
        code = load(types.int32, s, CODES + 32 * h + 4 * ib)
        high |= ((code >> 4) & 1) << ib
        up |= (code >> 5) << ib
        low |= (code & 15) << (8 * (ib & 3) + (ib & 4) if strided else 4 * ib)
    store(out, 0, np.uint16(high | up << 8 if strided else up | high << 8))
    store(out, 2, np.uint32(low))


@inline
def store_5_bit_apart(s, multiple, shifted, h, out):
    """``store_5_bit`` of which high bits come first."""
    store_5_bit(s, multiple, shifted, h, out, True)


@inline
def store_5_bit_pairs(s, multiple, shifted, h, out):
    """``store_5_bit`` of which high bits come last."""
    store_5_bit(s, multiple, shifted, h, out, False)


#: scale, multiples and storage, and its bytes, of a type.
SCALES_8_BIT = scale_8_bit, multiples_8_bit, store_8_bit, 8
SCALES_5_BIT = scale_5_bit, multiples_5_bit, store_5_bit_apart, 6
SCALES_FITTED = scale_fitted, multiples_5_bit, store_5_bit_pairs, 6

# ---------------------------------------------------------------- a batch of a row

#: Bindings: see ``row_encoder``.
sigma2_factor = sigma2_share = F(0)
round_levels: Any = None
multiples: Any = None
store_multiples: Any = None
pack: Any = None
paired = magnitudes = False
block_bytes = scales_bytes = 0


@inline
def _batch(row, n, first, tail):
    """Return the address of sub-blocks first .. first + 15 of a row: at its end a zero-padded copy at ``tail``."""
    n_tail = n // 32 - first
    if n_tail >= 16:
        return row + 128 * first
    copy(row + 128 * first, tail, 128 * n_tail)
    return tail


@inline
def _sum_of_squares(row, block):
    """Return the sum of squares of a super-block, in order."""
    squares = F(0)
    for i in range(1024 * block, 1024 * block + 1024, 4):
        v = load(types.float32, row, i)
        squares += v * v
    return squares


@inline
def sum_squares(row, n, squares):
    """Write the sum of squares of each super-block of a row."""
    for block in range(n // 256):
        store(squares, 4 * block, _sum_of_squares(row, block))


def _load_batch(s, row, weights, n, first, squares):
    """Load 16 sub-blocks of a row and their weights into X and W; weights: an address, or 0."""
    load_tile(_batch(row, n, first, s + TAIL), 0, 32, s + X)
    address = squares + first // 2
    half = first_half() != I32(0)
    square = select(
        half, splat(f32x16, load(types.float32, address, 0)), splat(f32x16, load(types.float32, address, 4))
    )
    sigma2 = sigma2_factor * square / F(256)
    if weights:
        load_tile(_batch(weights, n, first, s + WEIGHTS_TAIL), 0, 32, s + W)
        lift_weights(s + X, s + W, 32)
        importance_weights(s + X, s + W, 32, sigma2)
    elif magnitudes:
        magnitude_weights(s + X, s + W, 32)
    else:
        square_weights(s + X, s + W, 32, sigma2_share * sigma2 if sigma2_share else splat(f32x16, F(0)))


def _store_levels(s, d, multiple, shifted, count):
    """Round X to levels, write them to LEVELS, and add the terms of ``count`` sub-blocks to the sums; X is spent."""
    factor = convert(f32x16, multiple)
    inverse, alive = inverse_or_zero(factor * d), multiple != I32(0)
    round_levels(s + X, s + W, s + TERMS, s + TERMS2, inverse, factor, shifted, alive)
    store_bytes(s + LEVELS, s + X, 32)
    if paired:
        for j in range(0, TILE, 64):
            store(s, TERMS + j, load(f32x16, s, TERMS + j) + load(f32x16, s, TERMS + TILE + j))
            store(s, TERMS2 + j, load(f32x16, s, TERMS2 + j) + load(f32x16, s, TERMS2 + TILE + j))
    summed = 16 if paired else 32
    store(s, SUMQX, add_in_order(load(types.float32, s, SUMQX), s + TERMS, summed, count))
    store(s, SUMQ2, add_in_order(load(types.float32, s, SUMQ2), s + TERMS2, summed, count))


store_levels: Any = None


def _store_batch(s, scale, shifted, d, inverse, count, out):
    """Encode ``count`` sub-blocks, 8 or 16, of X with their weights W, scales and row scale d to blocks at ``out``."""
    multiple = multiples(scale, inverse)
    store_levels(s, d, multiple, shifted, count)
    for h in range(count // 8):
        store_multiples(s, multiple, shifted, h, out + block_bytes * h)
        pack(s + LEVELS + 256 * h, out + block_bytes * h + scales_bytes)


# ---------------------------------------------------------------- rows

#: Bindings: see ``row_encoder``.
search: Any = None
load_batch: Any = None
row_scale: Any = None
store_batch: Any = None
fit_row: Any = None
half_header = False
d_gain = F(0)


def _fit_row(s, row, weights, n, scales, shifted, squares, d, inverse, out):
    """Write the blocks of a row to address ``out``; return the scale that best fits their levels, else d."""
    store(s, SUMQX, splat(f32x16, F(0)))
    store(s, SUMQ2, splat(f32x16, F(0)))
    for first in range(0, n // 32, 16):
        load_batch(s, row, weights, n, first, squares)
        scale, up = load(f32x16, scales, 4 * first), load(f32x16, shifted, 4 * first) > F(0)
        store_batch(s, scale, up, d, inverse, min(16, n // 32 - first), out + block_bytes * (first // 8))
    sumq2 = load(types.float32, s, SUMQ2)
    return load(types.float32, s, SUMQX) / sumq2 if sumq2 > F(0) else d


def _encode_row(s, row, weights, n, out):
    """Encode a row of n values at address ``row``; weights: an address, or 0."""
    scales = s + SCALES
    shifted, sums = scales + n // 8 + 64, scales + 2 * (n // 8 + 64)
    squares = sums + n // 8 + 64
    if weights or sigma2_share:
        sum_squares(row, n, squares)
    for first in range(0, n // 32, 16):
        load_batch(s, row, weights, n, first, squares)
        search(s + X, s + W, scales + 4 * first, shifted + 4 * first)
        store(sums, 4 * first, sum_weights(s + W, 32))
    d, inverse = row_scale(scales, sums, n // 32)
    blocks = out + 2 if half_header else out + 4
    if d != F(0):
        d = fit_row(s, row, weights, n, scales, shifted, squares, d, inverse, blocks)
    else:
        for offset in range(0, n // 256 * block_bytes, 2):
            store(blocks, offset, np.uint16(0))
    if half_header:
        store(out, 0, f32_to_f16(d_gain * d))
    else:
        store(out, 0, d_gain * d)


encode_row: Any = None


def _encode_rows(x, weights, out, row0, row1):
    """Encode rows row0..row1 of x [rows, n], n a multiple of 256; weights [n] or empty."""
    n = x.shape[1]
    scratch = np.zeros(SCALES + 3 * (n // 8 + 64) + n // 64 + 64, np.uint8)
    for row in range(row0, row1):
        # Addresses are taken here: numba frees an array after its last use.
        w = address(weights) if weights.size else 0
        encode_row(address(scratch), address(x) + 4 * n * row, w, n, address(out) + out.shape[1] * row)


def rows_encoder(
    name: str,
    search: Any,
    row_scale: Any,
    store_batch: Any,
    *,
    sigma2_factor: float = 2,
    sigma2_share: float = 0,
    magnitudes: bool = False,
    d_gain: float = 1,
) -> Encoder:
    """Return the encoder of a type.

    search(xt, wt, scales, shifted): of 16 scales. row_scale(scales, sums of weights, n): d and 1 / d. store_batch: as
    ``_store_batch``. sigma2_factor: the multiple of the mean square in weights with importances; sigma2_share: the part
    of that without, added to squares; magnitudes: they are magnitudes instead. d_gain: a factor of d in the end.
    """
    key, t = name.lower(), BY_NAME[name]
    load_batch = specialize(
        _load_batch, key, helper, sigma2_factor=F(sigma2_factor), sigma2_share=F(sigma2_share), magnitudes=magnitudes
    )
    blocks = {"load_batch": load_batch, "block_bytes": t.block_bytes}
    encode_row = specialize(
        _encode_row, key, search=search, row_scale=row_scale, **blocks,
        fit_row=specialize(_fit_row, key, store_batch=store_batch, **blocks),
        half_header=t.row_header == 2, sigma2_share=F(sigma2_share), d_gain=F(d_gain),
    )  # fmt: skip
    return specialize(_encode_rows, key, kernel, encode_row=encode_row)  # type: ignore[no-any-return]


def row_encoder(
    name: str, levels: Levels, search: Any, scales: tuple[Any, Any, Any, int], pack: Any, *,
    paired: bool = False, zeros: bool = False, **options: Any,
) -> Encoder:  # fmt: skip
    """Return the encoder of a type.

    search(xt, wt, scales, shifted): of 16 scales. scales: that of a row, multiples of it, their storage and its bytes.
    paired: terms of values j and j + 16 are added to each other before they are summed. zeros: levels are 0
    where the scale is. options: of ``rows_encoder``.
    """
    key, (row_scale, multiples, store_multiples, scales_bytes) = name.lower(), scales
    rounding = make_rounding(key, levels, 32, zeros)
    store_levels = specialize(_store_levels, key, round_levels=rounding, paired=paired)
    bound = {"multiples": multiples, "store_multiples": store_multiples, "scales_bytes": scales_bytes, "pack": pack}
    block_bytes = BY_NAME[name].block_bytes
    store_batch = specialize(_store_batch, key, helper, store_levels=store_levels, block_bytes=block_bytes, **bound)
    return rows_encoder(name, search, row_scale, store_batch, **options)

"""The encoders of ik_llama.cpp's types with a scale per super-block.

Sub-blocks of 16 values have a scale d * m with an integer m, and values that are plain or shifted (ik_levels.py): the
16 of a super-block are a tile. Scales are searched (ik_search.py), d follows from the largest one, and the others
become multiples of it; the values are rounded to levels again, and d is fitted to them.

Weights are importance * sqrt(a + x^2), without importances b + x^2, where a and b are multiples of the mean square of
the super-block.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq3_k_impl, quantize_row_iq4_k_impl_bs16,
quantize_row_iq5_k_impl, quantize_row_iq6_k_impl.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline, specialize
from quantkit.kernels.cpu.core.simd import (
    convert,
    f32_to_f16,
    f32x16,
    i8x16,
    load,
    mask_bits,
    select,
    splat,
    store,
    vabs,
)
from quantkit.kernels.cpu.encode import Encoder
from quantkit.kernels.cpu.encode.batch import address, blocks_encoder
from quantkit.kernels.cpu.encode.ik_levels import Levels
from quantkit.kernels.cpu.encode.ik_scales import fit_multiples, largest_scale, nearest_multiple
from quantkit.kernels.cpu.encode.ik_search import (
    add_in_order,
    lift_weights,
    make_rounding,
    store_bytes,
)
from quantkit.kernels.cpu.encode.tiles import (
    TILE,
    importance_weights,
    inverse_or_zero,
    load_tile,
    square_weights,
    sum_weights,
    sums_of_squares,
)
from quantkit.types import BY_NAME

F, I32 = np.float32, np.int32

# Offsets into the scratch of a call: tiles; then scales, whether values are shifted, codes, sums of squares; levels.
X = 0
W = TILE
TERMS = 2 * TILE
TERMS2 = 3 * TILE
SCALES = 4 * TILE
SHIFTED = 4 * TILE + 64
CODES = 4 * TILE + 128
SQUARES = 4 * TILE + 192
LEVELS = 4 * TILE + 256
SCRATCH = 4 * TILE + 512

# ---------------------------------------------------------------- d and its multiples


@inline
def _inverse(d):
    return F(1) / d if d != F(0) else F(0)


@inline
def multiples_6_bit(s):
    """Return d and its multiples -32..31: the largest scale becomes -32."""
    d = -largest_scale(s + SCALES, 16) / F(32)
    return d, nearest_multiple(load(f32x16, s, SCALES) * _inverse(d), -32, 31)


@inline
def multiples_8_bit(s):
    """Return d and its multiples -127..127: the largest scale becomes -127."""
    d = -largest_scale(s + SCALES, 16) / F(127)
    return d, nearest_multiple(load(f32x16, s, SCALES) * _inverse(d), -127, 127)


@inline
def multiples_odd(s):
    """Return d and its odd multiples -31..31."""
    d, scale = abs(largest_scale(s + SCALES, 16)) / F(31), load(f32x16, s, SCALES)
    code = nearest_multiple(F(0.5) * (vabs(scale) * _inverse(d) - F(1)), 0, 15)
    odd = (code << I32(1)) + I32(1)
    return d, select(scale < F(0), -odd, odd)


@inline
def multiples_4_bit(s):
    """Return d and its multiples -8..7, fitted to the scales; the weight of a scale is the sum of its weights."""
    store(s, TERMS, sum_weights(s + W, 16))
    d = fit_multiples(s + SCALES, s + TERMS, 16, 8)[0]
    return d, nearest_multiple(load(f32x16, s, SCALES) * _inverse(d), -8, 7)


# ---------------------------------------------------------------- how they are stored


@inline
def _store_low_nibbles(s, out):
    """Store the low nibbles of 16 codes in 8 bytes."""
    nibbles = np.uint64(0)
    for ib in range(16):
        nibbles |= np.uint64(load(types.int32, s, CODES + 4 * ib) & I32(15)) << np.uint64(4 * ib)
    store(out, 0, nibbles)


@inline
def store_4_bit(s, multiple, out):
    """Store multiples, plus 8, as nibbles."""
    store(s, CODES, multiple + I32(8))
    _store_low_nibbles(s, out)


@inline
def store_6_bit(s, multiple, out):
    """Store multiples, plus 32: u16 high bits of 8 of them, twice, then 8 bytes of low nibbles."""
    store(s, CODES, multiple + I32(32))
    high = np.uint32(0)
    for ib in range(16):
        high |= np.uint32(load(types.int32, s, CODES + 4 * ib) >> I32(4)) << np.uint32(2 * ib)
    store(out, 0, high)
    _store_low_nibbles(s, out + 4)


@inline
def store_8_bit(s, multiple, out):
    """Store multiples as i8."""
    store(out, 0, convert(i8x16, multiple))


@inline
def store_odd(s, multiple, out):
    """Store odd multiples: u16 signs, then 8 bytes of (|m| - 1) / 2."""
    negative = multiple < I32(0)
    store(out, 0, np.uint16(mask_bits(negative)))
    store(s, CODES, (select(negative, -multiple, multiple) - I32(1)) >> I32(1))
    _store_low_nibbles(s, out + 2)


SCALES_4_BIT = multiples_4_bit, store_4_bit, 8
SCALES_6_BIT = multiples_6_bit, store_6_bit, 12
SCALES_8_BIT = multiples_8_bit, store_8_bit, 16
SCALES_ODD = multiples_odd, store_odd, 10

# ---------------------------------------------------------------- super-blocks

#: Bindings: see ``block_encoder``.
search: Any = None
round_any: Any = None
round_levels: Any = None
multiples: Any = None
store_multiples: Any = None
pack: Any = None
store_levels: Any = None
sigma2_factor = sigma2_share = d_gain = F(0)
block_bytes = scales_bytes = 0
refits = zeros = False


def _refit(s):
    """Fit the scales that are not 0 to the levels nearest to x / d."""
    d, shifted = load(f32x16, s, SCALES), load(f32x16, s, SHIFTED) > F(0)
    inverse = F(1) / d
    sumqx = splat(f32x16, F(0))
    sumq2 = splat(f32x16, F(0))
    for j in range(0, TILE, 64):
        x = load(f32x16, s, X + j)
        q = round_any(inverse * x, shifted)[1]
        wq = load(f32x16, s, W + j) * q
        sumqx, sumq2 = sumqx + wq * x, sumq2 + wq * q
    store(s, SCALES, select((d != F(0)) & (sumq2 > F(0)), sumqx / sumq2, d))


def _store_levels(s, d, multiple, shifted):
    """Round to levels, write them to LEVELS; return d fitted to them."""
    factor = convert(f32x16, multiple)
    scale = factor * d
    round_levels(s + X, s + W, s + TERMS, s + TERMS2, inverse_or_zero(scale), factor, shifted, scale != F(0))
    store_bytes(s + LEVELS, s + X, 16)
    sumqx = add_in_order(F(0), s + TERMS, 16, 16)
    sumq2 = add_in_order(F(0), s + TERMS2, 16, 16)
    return sumqx / sumq2 if sumq2 > F(0) else d


def _encode_block(s, out):
    """Encode a super-block from its scales; X and W are overwritten."""
    shifted = load(f32x16, s, SHIFTED) > F(0)
    d, multiple = multiples(s)
    if zeros and d == F(0):
        for offset in range(0, block_bytes, 2):
            store(out, offset, np.uint16(0))
        return
    d = store_levels(s, d, multiple, shifted)
    store(out, 0, f32_to_f16(d_gain * d))
    store(out, 2, np.uint16(mask_bits(shifted)))
    store_multiples(s, multiple, out + 4)
    pack(s + LEVELS, out + 4 + scales_bytes)


def _load_weights(s, weights, square):
    """Set the weights of the tile X; weights: an address, or 0; square: the sum of squares of the super-block."""
    sigma2 = sigma2_factor * square / F(256)
    if weights:
        load_tile(weights, 0, 16, s + W)
        lift_weights(s + X, s + W, 16)
        importance_weights(s + X, s + W, 16, splat(f32x16, sigma2))
    else:
        square_weights(s + X, s + W, 16, splat(f32x16, sigma2_share * sigma2 if sigma2_share else F(0)))


refit: Any = None
load_weights: Any = None
encode_block: Any = None


def _encode_16(scratch, x, weights, out, count):
    """Encode ``count`` super-blocks at address x, up to 16."""
    s = address(scratch)
    sums_of_squares(x, s + X, s + SQUARES)
    for b in range(count):
        load_tile(x + 1024 * b, 0, 16, s + X)
        load_weights(s, weights + 1024 * b if weights else 0, load(types.float32, s, SQUARES + 4 * b))
        search(s + X, s + W, s + SCALES, s + SHIFTED)
        if refits:
            refit(s)
        encode_block(s, out + block_bytes * b)


def block_encoder(
    name: str, levels: Levels, search: Any, scales: tuple[Any, Any, int], pack: Any, *, sigma2_factor: float = 2,
    sigma2_share: float = 0.25, refits: bool = True, zeros: bool = True, d_gain: float = 1,
) -> Encoder:  # fmt: skip
    """Return the encoder of a type.

    search(xt, wt, scales, shifted): of 16 scales. scales: ``multiples``, their storage and bytes. sigma2_factor: the
    multiple of the mean square in weights with importances; sigma2_share: the part of that without. refits: scales are
    fitted once more.
    zeros: sub-blocks and super-blocks whose scale is 0 are all zeros. d_gain: a factor of d in the end.
    """
    key, (multiples, store_multiples, scales_bytes) = name.lower(), scales
    store_levels = specialize(_store_levels, key, round_levels=make_rounding(key, levels, 16, zeros))
    bound = {"multiples": multiples, "store_multiples": store_multiples, "scales_bytes": scales_bytes, "pack": pack}
    block = {"zeros": zeros, "d_gain": F(d_gain), "block_bytes": BY_NAME[name].block_bytes}
    encode = specialize(
        _encode_16, key, search=search, refits=refits, block_bytes=block["block_bytes"],
        refit=specialize(_refit, key, round_any=levels.round_any),
        load_weights=specialize(_load_weights, key, sigma2_factor=F(sigma2_factor), sigma2_share=F(sigma2_share)),
        encode_block=specialize(_encode_block, key, helper, store_levels=store_levels, **bound, **block),
    )  # fmt: skip
    return blocks_encoder(name, encode, 16, SCRATCH)

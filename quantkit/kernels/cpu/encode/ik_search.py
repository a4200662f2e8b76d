"""Common parts of the encoders of ik_llama.cpp's types: weights, the search for scales, rounding and packing.

Sixteen sub-blocks of 16 or 32 values are a tile: transposed to [values][16], a lane each, so that every lane adds in
the reference's order.

The scale of a sub-block: candidates for 1 / d map the value of largest magnitude to or near the lowest value; each is
tried with both signs and, except the first, with plain and shifted values, and rated by sum(w q x)^2 / sum(w q q).
Importances become 1e-9 in sub-blocks where they, the values or their products are almost 0.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp: QHelper, quantize_row_iq4_k_impl_bs16 and its like.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import helper, inline, specialize
from quantkit.kernels.cpu.core.simd import (
    convert,
    f32x16,
    i32x16,
    load,
    select,
    splat,
    store,
    transpose16,
    u8x16,
    u8x32,
    vabs,
)
from quantkit.kernels.cpu.encode.ik_levels import Levels, find_bucket
from quantkit.kernels.cpu.encode.tiles import TILE, largest

F, I32 = np.float32, np.int32
TINY = F(1e-9)

# ---------------------------------------------------------------- weights


@inline
def lift_weights(xt, wt, span):
    """Set all importances of a sub-block to 1e-9 where they, its values or their products are almost 0."""
    w2 = x2 = wx = splat(f32x16, F(0))
    for j in range(span):
        x, w = load(f32x16, xt, 64 * j), load(f32x16, wt, 64 * j)
        w2 = w2 + w * w
        x2 = x2 + x * x
        wx = wx + w * vabs(x)
    least = F(span) * (TINY * TINY)
    fine = (w2 > least) & (x2 > least) & (wx > least)
    for j in range(span):
        store(wt, 64 * j, select(fine, load(f32x16, wt, 64 * j), TINY))


# ---------------------------------------------------------------- the search for 16 scales

#: Bindings of the templates below: values per sub-block, buckets per unit, rounding of one set of values.
span = 0
per_unit = F(0)
nearest: Any = None
mirrored: Any = None


def _rate(xt, wt, inverse):
    """Return sum(w q x) and sum(w q q) for the values q nearest to x * inverse, and the same for -inverse."""
    inverse_per_width, zero = inverse * per_unit, splat(f32x16, F(0))
    qx = zero
    q2 = zero
    minus_qx = zero
    minus_q2 = zero
    for j in range(span):
        x, w = load(f32x16, xt, 64 * j), load(f32x16, wt, 64 * j)
        v, bucket = inverse * x, find_bucket(x, inverse_per_width)
        q = nearest(v, bucket)
        wq = w * q
        qx, q2 = qx + wq * x, q2 + wq * q
        q = mirrored(v, bucket)
        wq = w * q
        minus_qx, minus_q2 = minus_qx + wq * x, minus_q2 + wq * q
    return qx, q2, -minus_qx, minus_q2


@inline
def keep_better(best, d, shifted, qx, q2, shift):
    """Return best, d and shifted, replaced in lanes where d = qx / q2 is rated better."""
    better = (q2 > F(0)) & (qx * qx > best * q2)
    ratio = qx / q2
    return select(better, ratio * qx, best), select(better, ratio, d), select(better, F(shift), shifted)


#: Bindings of ``_search``: the lowest values, tries on either side of them and their distance, whether a first
#: candidate without weight is ignored; and functions.
rate_plain: Any = None
rate_shifted: Any = None
low = low_shifted = tries = step = 0
guarded = False


def _search(xt, wt, scales, shifts):
    """Write the scales of 16 sub-blocks, 0 where all |x| < 1e-16, and 1 where values are shifted, else 0, as f32."""
    amax, top = largest(xt, span)
    first = top / F(-low)
    qx, q2, minus_qx, minus_q2 = rate_plain(xt, wt, F(1) / first)
    d, shifted = qx / q2, splat(f32x16, F(0))
    best = d * qx
    if guarded:
        d, best = select(q2 > F(0), d, first), select(q2 > F(0), best, F(0))
    best, d, shifted = keep_better(best, d, shifted, minus_qx, minus_q2, 0)
    for itry in range(-tries, tries + 1):
        qx, q2, minus_qx, minus_q2 = rate_plain(xt, wt, F(step * itry + low) / top)
        best, d, shifted = keep_better(best, d, shifted, qx, q2, 0)
        best, d, shifted = keep_better(best, d, shifted, minus_qx, minus_q2, 0)
        qx, q2, minus_qx, minus_q2 = rate_shifted(xt, wt, F(step * itry + low_shifted) / top)
        best, d, shifted = keep_better(best, d, shifted, qx, q2, 1)
        best, d, shifted = keep_better(best, d, shifted, minus_qx, minus_q2, 1)
    dead = amax < F(1e-16)
    store(scales, 0, select(dead, F(0), d))
    store(shifts, 0, select(dead, F(0), shifted))


def make_search(name: str, levels: Levels, values: int, tries_: int, step_: int = 1, guarded_: bool = False) -> Any:
    """Return search(xt, wt, scales, shifted) for sub-blocks of 16 or 32 values: see ``_search``."""
    common = {"span": values, "per_unit": levels.per_unit}
    rates = {
        f"rate_{kind}": specialize(_rate, name, **common, nearest=pair[0], mirrored=pair[1])
        for kind, pair in (("plain", levels.plain), ("shifted", levels.shifted))
    }
    lows = {"low": levels.lowest, "low_shifted": levels.lowest + levels.shift_by}
    return specialize(_search, name, helper, span=values, **rates, **lows, tries=tries_, step=step_, guarded=guarded_)


# ---------------------------------------------------------------- levels

#: Bindings of ``_round_levels``, besides ``span``: see ``make_rounding``.
round_any: Any = None
zeros = False


def _round_levels(xt, wt, terms, terms2, inverse, factor, shifted, alive):
    """Turn values into the levels of inverse * x; write the terms of sum(w q x) and sum(w q q), q = factor * level."""
    for j in range(0, 64 * span, 64):
        x, w = load(f32x16, xt, j), load(f32x16, wt, j)
        level, q = round_any(inverse * x, shifted)
        q = q * factor
        wq = w * q
        store(terms, j, wq * x)
        store(terms2, j, wq * q)
        store(xt, j, select(alive, level, I32(0)) if zeros else level)


def make_rounding(name: str, levels: Levels, values: int, zeros: bool) -> Any:
    """Return ``_round_levels`` for sub-blocks of 16 or 32 values; zeros: levels are 0 in lanes that are not alive."""
    return specialize(_round_levels, name, span=values, round_any=levels.round_any, zeros=zeros)


@inline
def store_bytes(levels, tile, span):
    """Write levels, an i32 tile, to ``levels`` as bytes in the order of the values; the tile is turned."""
    for part in range(span // 16):
        transpose16(tile, TILE * part, 64, tile, TILE * part)
        for i in range(16):
            store(levels, span * i + 16 * part, convert(u8x16, load(i32x16, tile, TILE * part + 64 * i)))


@inline
def add_in_order(total, tile, span, count):
    """Add a tile of terms, of the first ``count`` sub-blocks, to total in the order of the values; it is turned."""
    for part in range(span // 16):
        transpose16(tile, TILE * part, 64, tile, TILE * part)
    for i in range(count):
        for part in range(span // 16):
            for j in range(16):
                total += load(types.float32, tile, TILE * part + 64 * i + 4 * j)
    return total


@inline
def pack_plane(levels, out, bits, shift):
    """Write ``bits`` bits, from bit ``shift``, of the 256 levels of a super-block: each 32 * bits bytes.

    Byte j of row r of 32 holds value j of sub-blocks of 32 number r * 8 / bits and on, lowest bits first.
    """
    per_row = 8 // bits
    for r in range(bits):
        row = splat(u8x32, np.uint8(0))
        for k in range(per_row):
            part = load(u8x32, levels, 32 * (r * per_row + k)) >> np.uint8(shift)
            row = row | ((part & np.uint8((1 << bits) - 1)) << np.uint8(bits * k))
        store(out, 32 * r, row)


@inline
def pack_4(levels, out):
    """Write 256 levels of 4 bits: of each 32, the first 16 are low nibbles and the last 16 high ones."""
    for ib in range(8):
        first, last = load(u8x16, levels, 32 * ib), load(u8x16, levels, 32 * ib + 16)
        store(out, 16 * ib, first | (last << np.uint8(4)))


@inline
def pack_2(levels, out):
    """qs 64."""
    pack_plane(levels, out, 2, 0)


@inline
def pack_5(levels, out):
    """qs 128, qh 32."""
    pack_plane(levels, out, 4, 0)
    pack_plane(levels, out + 128, 1, 4)


@inline
def pack_6(levels, out):
    """qs 128, qh 64."""
    pack_plane(levels, out, 4, 0)
    pack_plane(levels, out + 128, 2, 4)


@inline
def pack_3(levels, out):
    """qs 64, qh 32."""
    pack_plane(levels, out, 2, 0)
    pack_plane(levels, out + 64, 1, 2)

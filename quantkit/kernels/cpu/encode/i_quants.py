"""IQ4_NL and IQ4_XS: 4-bit, unevenly spaced levels. IQ2 and IQ3 are in grid_quants.py, IQ1 in grid_ternary.py.

Levels 0..15 are indices of 16 values, denser around zero, as weights are::

    VALUES   -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
    IQ4_NL   f16 d, u8 qs[16]                                           32 values    x = d * VALUES[q]
    IQ4_XS   f16 d, u16 scales_h, u8 scales_l[4], u8 qs[8][16]          256 values   x = d * (scale - 32) * VALUES[q]

Value j of 32 is in the low nibbles of qs, value j + 16 in the high ones; the low 4 bits of a 6-bit scale are in
scales_l, two per byte, the high 2 in scales_h.

The scale of 32 values: 16 candidates for 1 / d map the value of largest magnitude to or near -127 (the first one to
+127); each rounds all values to levels and is rated by sum(w q x)^2 / sum(w q q), with the best d
sum(w q x) / sum(w q q). Weights are x^2, or importance * sqrt(2 mean x^2 + x^2). Then the levels are rounded again.

Each lane holds a sub-block of 32, which preserves the reference's order of additions; 16 are searched at once.
Rounding to a level is a table lookup (search.py: bucket_tables).

Source: llama.cpp b11434 ggml-quants.c, quantize_row_iq4_nl_impl and best_index_int8 with ntry = 7.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import helper, inline, specialize
from quantkit.kernels.cpu.core.simd import (
    any_lane,
    cast,
    convert,
    f32_to_f16,
    f32x16,
    i32x16,
    load,
    lookup16_f32,
    lookup32_f32,
    make_constant,
    nearest_int,
    select,
    splat,
    stack_bytes,
    store,
    u8x16,
    vabs,
    vmax,
    vmin,
)
from quantkit.kernels.cpu.encode import Encoder
from quantkit.kernels.cpu.encode.batch import blocks_encoder
from quantkit.kernels.cpu.encode.grid_quants import (
    iq2_s_batch,
    iq2_xs_batch,
    iq2_xxs_batch,
    iq3_s_batch,
    iq3_xxs_batch,
)
from quantkit.kernels.cpu.encode.grid_refined import iq1_m_batch_refined, iq2_xs_batch_refined
from quantkit.kernels.cpu.encode.grid_rows import (
    fit_blocks,
    fit_halves,
    grid_rows_encoder,
    store_block,
    store_halves,
    store_scale,
    store_scales,
)
from quantkit.kernels.cpu.encode.grid_ternary import SCRATCH, iq1_m_batch, iq1_s_batch
from quantkit.kernels.cpu.encode.neighbours import neighbour_lists
from quantkit.kernels.cpu.encode.search import LANES, MAGIC, bucket_tables
from quantkit.kernels.cpu.encode.tiles import (
    first_half,
    importance_weights,
    inverse_or_zero,
    largest,
    load_tile,
    square_weights,
    sums_of_squares,
)

F, I32 = np.float32, np.int32

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: Buckets are 10 wide. best_index_int8 takes the upper level at a tie: a boundary belongs to it.
_boundary, _below, _above = bucket_tables([(a + b) / 2 for a, b in zip(VALUES, VALUES[1:], strict=False)], 10)
_TENTH = F(0.1)
_boundary0 = make_constant(f32x16, _boundary[:16], "iq4_boundary0")
_boundary1 = make_constant(f32x16, _boundary[16:], "iq4_boundary1")
_below0 = make_constant(f32x16, [VALUES[i] for i in _below[:16]], "iq4_below0")
_below1 = make_constant(f32x16, [VALUES[i] for i in _below[16:]], "iq4_below1")
_above0 = make_constant(f32x16, [VALUES[i] for i in _above[:16]], "iq4_above0")
_above1 = make_constant(f32x16, [VALUES[i] for i in _above[16:]], "iq4_above1")
_level0 = make_constant(i32x16, _below[:16], "iq4_level0")
_level1 = make_constant(i32x16, _below[16:], "iq4_level1")

# ---------------------------------------------------------------- rounding to a level


@inline
def _values_of(bucket):
    """Return the values below and above the boundary of each bucket."""
    return lookup32_f32(_below0(), _below1(), bucket), lookup32_f32(_above0(), _above1(), bucket)


@inline
def _level_of(bucket):
    """Return the level below the boundary of each bucket."""
    return lookup32_f32(_level0(), _level1(), bucket)


@inline
def _boundary_of(bucket):
    """Return the boundary in each bucket, infinite in empty ones."""
    return lookup32_f32(_boundary0(), _boundary1(), bucket)


@inline
def _nearest_value(v, tenth):
    """Return the value nearest to v, |v| <= 150; tenth is v / 10 to within a few ulp."""
    bucket = cast(i32x16, tenth + MAGIC)
    low, high = _values_of(bucket)
    return select(v >= _boundary_of(bucket), high, low)


@inline
def _nearest_level(v):
    """Return the level nearest to any v, as i32; NaN gives 15, as in the reference."""
    v = vmax(vmin(v, F(130)), F(-130))
    bucket = cast(i32x16, v * _TENTH + MAGIC)
    return _level_of(bucket) + convert(i32x16, v >= _boundary_of(bucket))


@inline
def _store_levels(x, offset, inverse, out, o):
    """Round the 32 values at byte ``offset`` times 1 / d; store 16 bytes of nibbles."""
    d = splat(f32x16, inverse)
    low, high = _nearest_level(d * load(f32x16, x, offset)), _nearest_level(d * load(f32x16, x, offset + 64))
    store(out, o, convert(u8x16, low | (high << I32(4))))


# ---------------------------------------------------------------- the search for 16 scales


@inline
def _rate(xt, wt, inverse):
    """Return sum(w q x) and sum(w q q) of each lane for q = the values nearest to x * inverse."""
    tenth = inverse * _TENTH
    sumqx, sumq2 = splat(f32x16, F(0)), splat(f32x16, F(0))
    for j in range(32):
        x = load(f32x16, xt, 64 * j)
        q = _nearest_value(inverse * x, tenth * x)
        wq = load(f32x16, wt, 64 * j) * q
        sumqx = sumqx + wq * x
        sumq2 = sumq2 + wq * q
    return sumqx, sumq2


@helper
def _search(xt, wt, scales):
    """Write the scales of 16 sub-blocks, transposed to [32][16] with their weights; 0 where all |x| < 1e-15.

    |x| * candidate is at most 134, except in lanes of such small x, whose results are discarded.
    """
    zero = splat(f32x16, F(0))
    amax, top = largest(xt, 32)
    sumqx, sumq2 = _rate(xt, wt, F(1) / (top / F(127)))
    d = select(sumq2 > zero, sumqx / sumq2, zero)
    best = d * sumqx
    for itry in range(-7, 8):
        sumqx, sumq2 = _rate(xt, wt, F(itry - 127) / top)
        better = (sumq2 > zero) & (sumqx * sumqx > best * sumq2)
        d = select(better, sumqx / sumq2, d)
        best = select(better, d * sumqx, best)
    store(scales, 0, select(amax < F(1e-15), zero, d))


# ---------------------------------------------------------------- ik_llama.cpp's search, which then changes levels one
# by one

_GAPS = [float(b - a) for a, b in zip(VALUES, VALUES[1:], strict=False)]
_value = make_constant(f32x16, VALUES, "iq4_value")
_gap_below = make_constant(f32x16, [np.inf, *_GAPS], "iq4_gap_below")
_gap_above = make_constant(f32x16, [*_GAPS, np.inf], "iq4_gap_above")


@inline
def _nearest_move(xt, wt, levels, d):
    """Return the place of the level that the gradient of the error takes to the next one first, or -1, and its terms.

    (place, +-1, the gap to the next value, w x, w, the value)
    """
    zero = splat(f32x16, F(0))
    due, place = splat(f32x16, F(np.inf)), splat(i32x16, -1)
    slope_there = gap_there = wx = w_there = q_there = zero
    for j in range(32):
        x = load(f32x16, xt, 64 * j)
        w = load(f32x16, wt, 64 * j)
        level = load(i32x16, levels, 64 * j)
        q = lookup16_f32(_value(), level)
        slope = d * w * (x - d * q)
        index = level | select(slope > zero, I32(16), splat(i32x16, 0))
        gap = lookup32_f32(_gap_below(), _gap_above(), index)
        step = gap / vabs(slope)
        sooner = step < due
        due, place = select(sooner, step, due), select(sooner, I32(j), place)
        slope_there, gap_there = select(sooner, slope, slope_there), select(sooner, gap, gap_there)
        wx = select(sooner, w * x, wx)
        w_there = select(sooner, w, w_there)
        q_there = select(sooner, q, q_there)
    return place, select(slope_there > zero, F(1), splat(f32x16, F(-1))), gap_there, wx, w_there, q_there


@inline
def _move_levels(xt, wt, levels, alive, sumqx, sumq2, d):
    """Move levels to the next for as long as that raises sum(w q x)^2 / sum(w q q); return d."""
    best = d * sumqx
    for _ in range(1024):
        place, sign, gap, wx, w, q = _nearest_move(xt, wt, levels, d)
        step = sign * gap
        new_qx, new_q2 = sumqx + wx * step, sumq2 + w * (step * (q + q + step))
        moves = alive & (place >= I32(0)) & (new_q2 > F(0)) & (new_qx * new_qx > best * new_q2)
        if not any_lane(moves):
            break
        alive = moves
        sumqx, sumq2 = select(moves, new_qx, sumqx), select(moves, new_q2, sumq2)
        d = select(moves, new_qx / new_q2, d)
        best = select(moves, d * new_qx, best)
        place, direction = select(moves, place, I32(-1)), convert(i32x16, sign)
        for j in range(32):
            level = load(i32x16, levels, 64 * j)
            store(levels, 64 * j, select(place == I32(j), level + direction, level))
    return d


@inline
def _keep_better(fit, inverse, sumqx, sumq2):
    """Return (best, its 1 / d, its two sums) after a candidate."""
    best, best_inverse, best_qx, best_q2 = fit
    better = (sumq2 > F(0)) & (sumqx * sumqx > best * sumq2)
    best = select(better, sumqx / sumq2 * sumqx, best)
    return best, select(better, inverse, best_inverse), select(better, sumqx, best_qx), select(better, sumq2, best_q2)


@helper
def _search_refined(xt, wt, scales):
    """_search with candidates about both ends of the values. Weights that are all 0 give 0, in the reference NaN."""
    zero, levels = splat(f32x16, F(0)), stack_bytes(2048)
    amax, top = largest(xt, 32)
    inverse = F(1) / (top / F(127))
    sumqx, sumq2 = _rate(xt, wt, inverse)
    fit = select(sumq2 > zero, sumqx / sumq2 * sumqx, zero), inverse, sumqx, sumq2
    for itry in range(-7, 8):
        inverse = F(itry - 127) / top
        sumqx, sumq2 = _rate(xt, wt, inverse)
        fit = _keep_better(fit, inverse, sumqx, sumq2)
        inverse = F(itry + 113) / top
        sumqx, sumq2 = _rate(xt, wt, inverse)
        fit = _keep_better(fit, inverse, sumqx, sumq2)
    _, inverse, sumqx, sumq2 = fit
    for j in range(32):
        store(levels, 64 * j, _nearest_level(inverse * load(f32x16, xt, 64 * j)))
    alive, d = ~(amax < F(1e-15)), select(sumq2 > zero, sumqx / sumq2, zero)
    d = _move_levels(xt, wt, levels, alive, sumqx, sumq2, d)
    store(scales, 0, select(alive, d, zero))


@inline
def _nearest_level_below_2_31(v):
    """_nearest_level where ik_llama.cpp converts to an integer, which gives level 0 of anything beyond, and of NaN."""
    return select(vabs(v) < F(2.0**31), _nearest_level(v), I32(0))


_IK: dict[str, Any] = {
    "_search": _search_refined,
    "_store_levels": specialize(_store_levels, "ik", _nearest_level=_nearest_level_below_2_31),
}


# ---------------------------------------------------------------- IQ4_NL


@inline
def _encode_16_nl(s, x, weights, out, count):
    """Encode 16 blocks at address x with the importances at address weights (0: none); store ``count`` of them.

    Source: llama.cpp b11434 ggml-quants.c quantize_iq4_nl.
    """
    xt = s[:512]
    wt = s[512:1024]
    scales = s[1024:]
    load_tile(x, 0, 32, xt)
    if weights:
        load_tile(weights, 0, 32, wt)
        squares = splat(f32x16, F(0))
        for j in range(32):
            v = load(f32x16, xt, 64 * j)
            squares = squares + v * v
        importance_weights(xt, wt, 32, squares * F(2 / 32))
    else:
        square_weights(xt, wt, 32, F(0))
    _search(xt, wt, scales)
    store(scales, 64, inverse_or_zero(load(f32x16, scales, 0)))
    for b in range(count):
        store(out, 18 * b, f32_to_f16(scales[b]))
        _store_levels(x, 128 * b, scales[16 + b], out, 18 * b + 2)


encode_iq4_nl = blocks_encoder("IQ4_NL", _encode_16_nl, 16, 4 * 1056)
encode_iq4_nl_ik = blocks_encoder("IQ4_NL", specialize(_encode_16_nl, "ik", **_IK), 16, 4 * 1056)


# ---------------------------------------------------------------- IQ4_XS


@inline
def _super_scale(scales, h):
    """Return d of super-block h: the first sub-block scale of the largest magnitude becomes -32."""
    largest, top = F(0), F(0)
    for ib in range(8 * h, 8 * h + 8):
        magnitude = abs(scales[ib])
        if magnitude > largest:
            largest, top = magnitude, scales[ib]
    return -top / F(32)


@inline
def _round_scales(scales, codes):
    """Return d of two super-blocks; write the 6-bit codes of 16 scales, and 1 / (d * scale) after ``scales``."""
    d0, d1 = _super_scale(scales, 0), _super_scale(scales, 1)
    d = select(first_half() != I32(0), splat(f32x16, d0), splat(f32x16, d1))
    level = nearest_int(load(f32x16, scales, 0) * inverse_or_zero(d))
    level = vmax(vmin(level, I32(31)), I32(-32))
    store(scales, 64, inverse_or_zero(d * convert(f32x16, level)))
    store(codes, 0, level + I32(32))
    return d0, d1


@inline
def _store_scales(d, codes, h, out):
    """Store d and the 8 codes of super-block h: f16 d, u16 scales_h, u8 scales_l[4]."""
    low, high = I32(0), I32(0)
    for ib in range(8):
        code = codes[8 * h + ib]
        low |= (code & I32(15)) << I32(4 * ib)
        high |= code >> I32(4) << I32(2 * ib)
    store(out, 0, f32_to_f16(d))
    store(out, 2, np.uint16(high))
    store(out, 4, np.uint32(low))


@inline
def _encode_2_xs(x, weights, sigma2, out, xt, wt, scales, codes, count):
    """Encode two super-blocks at address x; store ``count`` of them. sigma2 is used with weights only."""
    load_tile(x, 0, 32, xt)
    if weights:
        load_tile(weights, 0, 32, wt)
        importance_weights(xt, wt, 32, sigma2)
    else:
        square_weights(xt, wt, 32, F(0))
    _search(xt, wt, scales)
    d0, d1 = _round_scales(scales, codes)
    _store_scales(d0, codes, 0, out)
    if count == 2:
        _store_scales(d1, codes, 1, out + 136)
    for ib in range(8 * count):
        _store_levels(x, 128 * ib, scales[16 + ib], out, 16 * ib + 8 * (ib // 8 + 1))


@inline
def _encode_16_xs(s, x, weights, out, count):
    """Encode ``count`` super-blocks at address x, up to 16. Source: llama.cpp b11434 ggml-quants.c quantize_iq4_xs."""
    xt = s[:512]
    wt = s[512:1024]
    scales = s[1024:1056]
    sigma2, codes = s[1056:1088], s[1088:].view(np.int32)
    if weights:
        sums_of_squares(x, xt, sigma2)
        store(sigma2, 0, load(f32x16, sigma2, 0) * F(2 / 256))
    for pair in range(0, count, 2):
        w = weights + 1024 * pair if weights else 0
        for lane in range(8):
            sigma2[16 + lane], sigma2[24 + lane] = sigma2[pair], sigma2[pair + 1]
        of_lane = load(f32x16, sigma2, 64)
        _encode_2_xs(x + 1024 * pair, w, of_lane, out + 136 * pair, xt, wt, scales, codes, min(2, count - pair))


encode_iq4_xs = blocks_encoder("IQ4_XS", _encode_16_xs, 16, 4 * 1104)
encode_iq4_xs_ik = blocks_encoder(
    "IQ4_XS", specialize(_encode_16_xs, "ik", _encode_2_xs=specialize(_encode_2_xs, "ik", **_IK)), 16, 4 * 1104
)


# ---------------------------------------------------------------- IQ1, IQ2 and IQ3


iq1_lists = partial(neighbour_lists, "iq1s_grid", 3)


def _grid_encoder(name: str, encode_batch: Any, distances: int, grid: str = "") -> Encoder:
    """Return the encoder of a type with a grid; lists of neighbours at this number of distances are built at the "
    "first call."""
    lists = partial(neighbour_lists, grid or f"{name.lower().replace('_', '')}_grid", distances)
    return blocks_encoder(name, encode_batch, LANES, SCRATCH, tables=lists)


encode_iq1_s = _grid_encoder("IQ1_S", iq1_s_batch, 3)
encode_iq1_m = _grid_encoder("IQ1_M", iq1_m_batch, 3, "iq1s_grid")
encode_iq1_m_ik = _grid_encoder("IQ1_M", iq1_m_batch_refined, 3, "iq1s_grid")
encode_iq1_s_row = grid_rows_encoder("IQ1_S_ROW", fit_blocks, store_block, store_scale, iq1_lists)
encode_iq1_m_row = grid_rows_encoder("IQ1_M_ROW", fit_halves, store_halves, store_scales, iq1_lists)
encode_iq2_xxs = _grid_encoder("IQ2_XXS", iq2_xxs_batch, 2)
encode_iq2_xs = _grid_encoder("IQ2_XS", iq2_xs_batch, 2)
encode_iq2_xs_ik = _grid_encoder("IQ2_XS", iq2_xs_batch_refined, 2)
encode_iq2_s = _grid_encoder("IQ2_S", iq2_s_batch, 1)
encode_iq3_xxs = _grid_encoder("IQ3_XXS", iq3_xxs_batch, 2)
encode_iq3_s = _grid_encoder("IQ3_S", iq3_s_batch, 3)

"""Encoders of the K-quants: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

A super-block is 256 values. Its sub-blocks have a small scale (and minimum) each, quantized in turn by one f16 scale
of the super-block: x ~ d * sc[j] * q - dmin * m[j], or x ~ d * sc[j] * q.

| type | sub-blocks | bytes, in order                                            | q     | sc     | m      |
|------|------------|------------------------------------------------------------|-------|--------|--------|
| Q2_K | 16 of 16   | sc and m 16, q 64, d, dmin                                 | 0..3  | 4 bits | 4 bits |
| Q3_K | 16 of 16   | high bits of q 32, low bits 64, sc 12, d                   | -4..3 | 6 bits |        |
| Q4_K | 8 of 32    | d, dmin, sc and m 12, q 128                                | 0..15 | 6 bits | 6 bits |
| Q5_K | 8 of 32    | d, dmin, sc and m 12, high bits of q 32, low bits 128      | 0..31 | 6 bits | 6 bits |
| Q6_K | 16 of 16   | low bits of q 128, high bits 64, sc 16, d                  | -32..31 | int8 |        |

An encoder works on batches of ``LANES`` super-blocks (batch.py) in three steps: fit every sub-block (one lane each,
search.py), quantize the scales (one super-block a lane), quantize the values by those and pack. Without an importance
matrix the weights come from x alone and the scales are divided by their largest; with one, the scales are fitted too.

Source: llama.cpp b11434, ggml/src/ggml-quants.c, quantize_row_q{2,3,4,5,6}_K_ref and _impl.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import inline, specialize
from quantkit.kernels.cpu.core.simd import (
    convert,
    f32x16,
    i32x16,
    load,
    load_f16,
    make_constant,
    mask_bits,
    nearest_int,
    splat,
    store,
    store_f16,
    u8x16,
    vabs,
    vmax,
    vmin,
    vsqrt,
)
from quantkit.kernels.cpu.core.simd import select as choose
from quantkit.kernels.cpu.encode.batch import (
    BLOCK_BYTES,
    address,
    blocks_encoder,
    if_weighted,
    load_group,
    store_sigma,
    turn,
    weigh_by_importance,
)
from quantkit.kernels.cpu.encode.search import (
    EPSILON,
    LANES,
    STEP,
    WIDE,
    WIDE_INT,
    F,
    fit_by_descent,
    fit_by_largest,
    fit_positive,
    fit_signed,
    fit_with_min,
    search_levels,
)
from quantkit.kernels.cpu.encode.search_refined import fit_signed_refined, fit_with_min_refined

_lane_numbers = make_constant(WIDE_INT, list(range(LANES)), "k_quants_lane_numbers")
#: Whether all levels are in slots.
_IN_SLOTS = False

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def _places(*sizes: int) -> list[int]:
    """Return the offset of each region of the scratch array, and the end."""
    return [sum(sizes[:k]) for k in range(len(sizes) + 1)]


# Scratch. [element][lane]: values, weights and levels of the sub-blocks in search. By sub-block, in memory order:
# results of the search. [sub-block][super-block]: the same for a lane per super-block, then the quantized scales.
_FLAT, _TURNED = 64 * LANES + 64, 16 * STEP
(
    _X, _W, _L,
    _SIGMA, _SCALE, _LOW, _SUM_W, _ISCALE, _BEST_LOW, _SLOT, _QUEUE,
    _SCALE_T, _LOW_T, _SUM_W_T, _CODE_T, _LOW_CODE_T, _D_T, _DMIN_T,
    _WORDS, _HALF, _HALF_MIN, _FITS, _END,
) = _places(
    32 * STEP, 32 * STEP, LANES * 1024,
    *[_FLAT] * 8,
    *[_TURNED] * 7,
    4 * STEP, 2 * LANES, 2 * LANES, 2 * STEP,
)  # fmt: skip


# ---------------------------------------------------------------- batches and weights


@inline
def _weigh_by_importance(s: Any, w: Any, group: Any, n: Any) -> Any:
    weigh_by_importance(s, w, group, n, _X, _W, _SIGMA)


@inline
def _store_sigma(s: Any, x: Any, subs: Any, factor: Any) -> Any:
    store_sigma(s, x, subs, factor, _X, _SCALE_T, _SIGMA)


@inline
def _weigh_by_size(s: Any, n: Any, mean: Any) -> Any:
    """weight = |x|, plus the root of the sub-block's mean square if ``mean``"""
    offset = splat(WIDE, F(0))
    if mean:
        for i in range(n):
            x = load(WIDE, s, _X + i * STEP)
            offset = offset + x * x
        offset = vsqrt(offset / F(n))
    for i in range(n):
        size = vabs(load(WIDE, s, _X + i * STEP))
        store(s, _W + i * STEP, offset + size if mean else size)


# ---------------------------------------------------------------- types with a minimum: Q2_K, Q4_K, Q5_K


@inline
def _fit_with_min(s: Any, x: Any, w: Any, weighted: Any, count: Any, n: Any, top: Any, start: Any, steps: Any) -> Any:
    """Search scale and minimum of every sub-block of the batch.

    ``start`` and ``steps`` are the grid without weights; with them it is -0.9, -0.85, ... 0.9 for all types.
    """
    if weighted:
        _store_sigma(s, x, 256 // n, 1 if n == 16 else 2)
    first, delta, last = (F(-0.9), F(0.05), 36) if weighted else (start, F(0.1), steps)
    for group in range((count * (256 // n) + LANES - 1) // LANES):
        load_group(x, group, n, s, _X)
        if weighted:
            _weigh_by_importance(s, w, group, n)
        else:
            _weigh_by_size(s, n, n == 32)
        scale, low, sum_w, iscale, best_low = fit_with_min(
            s, _X, _W, _L, n, top, first, delta, last, n == 16 and not weighted, weighted
        )
        store(s, _SCALE + group * STEP, scale)
        store(s, _LOW + group * STEP, low)
        store(s, _SUM_W + group * STEP, sum_w)
        store(s, _ISCALE + group * STEP, iscale)
        store(s, _BEST_LOW + group * STEP, best_low)
    for k in range(3):
        turn(s, _SCALE + k * _FLAT, _SCALE_T + k * _TURNED, 256 // n)


@inline
def _codes_by_largest(s: Any, values: Any, codes: Any, subs: Any, top: Any) -> Any:
    """Quantize one number per sub-block by the largest of the super-block; return the scale."""
    largest = splat(WIDE, F(0))
    for j in range(subs):
        largest = vmax(load(WIDE, s, values + j * STEP), largest)
    inverse = choose(largest > F(0), F(top) / largest, F(0))
    for j in range(subs):
        code = nearest_int(inverse * load(WIDE, s, values + j * STEP)) & 255
        store(s, codes + j * STEP, vmin(code, top) if top == 63 else code)
    return largest / F(top)


@inline
def _codes_by_fit(s: Any, values: Any, codes: Any, subs: Any, top: Any) -> Any:
    """Quantize one number per sub-block by the best scale under the sub-blocks' weights; return the scale."""
    scale = fit_positive(s, values, _SUM_W_T, _X, subs, top)
    for j in range(subs):
        store(s, codes + j * STEP, convert(WIDE_INT, load(WIDE, s, _X + j * STEP)))
    return scale


@inline
def _quantize_scales(s: Any, weighted: Any, subs: Any, top: Any) -> Any:
    """Quantize the scales, then the minima; store the codes, and d and dmin as halves."""
    for k in range(2):
        values, codes = _SCALE_T + k * _TURNED, _CODE_T + k * _TURNED
        fit = _codes_by_fit(s, values, codes, subs, top) if weighted else _codes_by_largest(s, values, codes, subs, top)
        store_f16(s, _HALF + k * 2 * LANES, fit)
        store(s, _FITS + k * STEP, fit)


@inline
def _store_word(s: Any, word: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    store(s, _WORDS + word * STEP, (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24))


@inline
def _write_words(s: Any, out: Any, lane: Any, words: Any) -> Any:
    for k in range(words):
        store(out, 4 * k, load(types.uint32, s, _WORDS + k * STEP + 4 * lane))


@inline
def _write_half(s: Any, offset: Any, out: Any, lane: Any) -> Any:
    store(out, 0, load(types.uint16, s, offset + 2 * lane))


@inline
def _code(s: Any, offset: Any, j: Any) -> Any:
    return load(WIDE_INT, s, offset + j * STEP)


@inline
def _pack_scales_q2(s: Any) -> Any:
    """Byte j holds scale j in its low half, minimum j in its high half."""
    d, dmin = load_f16(WIDE, s, _HALF), load_f16(WIDE, s, _HALF_MIN)
    for j in range(16):
        byte = (_code(s, _CODE_T, j) | (_code(s, _LOW_CODE_T, j) << 4)) & 255
        store(s, _CODE_T + j * STEP, byte)
        store(s, _D_T + j * STEP, d * convert(WIDE, byte & 15))
        store(s, _DMIN_T + j * STEP, dmin * convert(WIDE, byte >> 4))
    for k in range(4):
        offset = _CODE_T + 4 * k * STEP
        _store_word(s, k, _code(s, offset, 0), _code(s, offset, 1), _code(s, offset, 2), _code(s, offset, 3))


@inline
def _pack_scales_q4(s: Any) -> Any:
    """Bytes 0..3: scales 0..3, 4..7: minima 0..3, each with 2 high bits of scale or minimum 4..7; 8..11: their rest."""
    d, dmin = load_f16(WIDE, s, _HALF), load_f16(WIDE, s, _HALF_MIN)
    for j in range(4):
        scale, low = _code(s, _CODE_T, j + 4), _code(s, _LOW_CODE_T, j + 4)
        a = (_code(s, _CODE_T, j) | ((scale >> 4) << 6)) & 255
        b = (_code(s, _LOW_CODE_T, j) | ((low >> 4) << 6)) & 255
        c = (scale & 15) | ((low & 15) << 4)
        store(s, _D_T + j * STEP, d * convert(WIDE, a & 63))
        store(s, _DMIN_T + j * STEP, dmin * convert(WIDE, b & 63))
        store(s, _D_T + (j + 4) * STEP, d * convert(WIDE, (c & 15) | ((a >> 6) << 4)))
        store(s, _DMIN_T + (j + 4) * STEP, dmin * convert(WIDE, (c >> 4) | ((b >> 6) << 4)))
        store(s, _SCALE_T + j * STEP, a)
        store(s, _LOW_T + j * STEP, b)
        store(s, _SUM_W_T + j * STEP, c)
    for k, offset in enumerate((_SCALE_T, _LOW_T, _SUM_W_T)):
        _store_word(s, k, _code(s, offset, 0), _code(s, offset, 1), _code(s, offset, 2), _code(s, offset, 3))


@inline
def _found_levels(s: Any, v: Any, offset: Any, flat: Any, n: Any, top: Any, guarded: Any) -> Any:
    """Return the levels that the search found for 16 values of sub-block ``flat``, at byte ``offset`` of its block."""
    iscale = load(types.float32, s, _ISCALE + 4 * flat)
    return search_levels(v, iscale, load(types.float32, s, _BEST_LOW + 4 * flat), top, guarded)


@inline
def _gathered_levels(s: Any, flat: Any, n: Any, first: Any) -> Any:
    """Return 16 levels of the sub-block in slot ``flat`` of _L, from the ``first`` on."""
    offset = _L + flat // LANES * n * STEP + flat % LANES * 4
    for i in range(16):
        store(s, _W + 4 * i, load(types.float32, s, offset + (first + i) * STEP))
    return convert(i32x16, load(f32x16, s, _W))


@inline
def _levels_with_min(s: Any, x: Any, offset: Any, j: Any, lane: Any, subs: Any, top: Any, guarded: Any) -> Any:
    """Return the levels of 16 values of sub-block j; where its scale came out as 0, those of the search."""
    v = load(f32x16, x, offset)
    d = load(types.float32, s, _D_T + j * STEP + 4 * lane)
    if d == F(0):
        return _found_levels(s, v, offset, lane * subs + j, 256 // subs, top, guarded)
    low = load(types.float32, s, _DMIN_T + j * STEP + 4 * lane)
    return vmin(vmax(nearest_int((v + low) / d), 0), top)


@inline
def _write_q2(s: Any, x: Any, out: Any, lane: Any, weighted: Any) -> Any:
    """Byte l of each 128 values holds the levels l, l + 32, l + 64, l + 96."""
    _write_words(s, out, lane, 4)
    for chunk in range(2):
        for half in range(2):
            q = splat(i32x16, 0)
            for k in range(4):
                j = chunk * 8 + 2 * k + half
                q = q | (_levels_with_min(s, x, j * 64, j, lane, 16, 3, weighted) << (2 * k))
            store(out, 16 + chunk * 32 + half * 16, convert(u8x16, q))
    _write_half(s, _HALF, out + 80, lane)
    _write_half(s, _HALF_MIN, out + 82, lane)


@inline
def _write_q45(s: Any, x: Any, out: Any, lane: Any, top: Any, weighted: Any) -> Any:
    """Byte l of each 64 values holds levels l and l + 32; byte l of Q5_K's high bits has bit j for sub-block j."""
    _write_half(s, _HALF, out, lane)
    _write_half(s, _HALF_MIN, out + 2, lane)
    _write_words(s, out + 4, lane, 3)
    low_bits = out + (48 if top == 31 else 16)
    for half in range(2):
        high = splat(i32x16, 0)
        for chunk in range(4):
            offset = chunk * 256 + half * 64
            a = _levels_with_min(s, x, offset, 2 * chunk, lane, 8, top, weighted)
            b = _levels_with_min(s, x, offset + 128, 2 * chunk + 1, lane, 8, top, weighted)
            high = high | ((a >> 4) << (2 * chunk)) | ((b >> 4) << (2 * chunk + 1))
            store(low_bits, chunk * 32 + half * 16, convert(u8x16, (a & 15) | ((b & 15) << 4)))
        if top == 31:
            store(out, 16 + half * 16, convert(u8x16, high))


@inline
def _clamp_codes(s: Any) -> Any:
    """Clamp codes that wrapped around below 0; of ggml's encoders with an importance matrix only Q5_K's does."""
    for j in range(8):
        store(s, _CODE_T + j * STEP, vmin(_code(s, _CODE_T, j), 63))
        store(s, _LOW_CODE_T + j * STEP, vmin(_code(s, _LOW_CODE_T, j), 63))


@inline
def _finish_q45(s: Any, x: Any, out: Any, count: Any, top: Any, weighted: Any) -> None:
    """Quantize the scales that were found and write Q4_K, or Q5_K where the highest level is 31."""
    _quantize_scales(s, weighted, 8, 63)
    if top == 31:
        _clamp_codes(s)
    _pack_scales_q4(s)
    for b in range(count):
        _write_q45(s, x + b * BLOCK_BYTES, out + b * (176 if top == 31 else 144), b, top, weighted)


@inline
def _encode_q2_k(s: Any, x: Any, w: Any, out: Any, count: Any) -> None:
    """Encode super-blocks as Q2_K. Source: quantize_row_q2_K_ref, quantize_row_q2_K_impl."""
    weighted = w != 0
    _fit_with_min(s, x, w, weighted, count, 16, 3, F(-0.5), 15)
    _quantize_scales(s, weighted, 16, 15)
    _pack_scales_q2(s)
    for b in range(count):
        _write_q2(s, x + b * BLOCK_BYTES, out + b * 84, b, weighted)


encode_q2_k = blocks_encoder("Q2_K", _encode_q2_k, LANES, _END)


@inline
def _encode_q4_k(s: Any, x: Any, w: Any, out: Any, count: Any) -> None:
    """Encode super-blocks as Q4_K. Source: quantize_row_q4_K_ref, quantize_row_q4_K_impl."""
    _fit_with_min(s, x, w, w != 0, count, 32, 15, F(-1), 20)
    _finish_q45(s, x, out, count, 15, w != 0)


encode_q4_k = blocks_encoder("Q4_K", _encode_q4_k, LANES, _END)


@inline
def _encode_q5_k(s: Any, x: Any, w: Any, out: Any, count: Any) -> None:
    """Encode super-blocks as Q5_K. Source: quantize_row_q5_K_ref, quantize_row_q5_K_impl."""
    _fit_with_min(s, x, w, w != 0, count, 32, 31, F(-0.5), 15)
    _finish_q45(s, x, out, count, 31, w != 0)


encode_q5_k = blocks_encoder("Q5_K", _encode_q5_k, LANES, _END)


# ---------------------------------------------------------------- the same with an importance matrix, in ik_llama.cpp


@inline
def _fit_with_min_refined(s: Any, x: Any, w: Any, count: Any, n: Any, top: Any, sigma: Any) -> None:
    """Search scale and minimum of every sub-block of the batch; the levels are kept by the number of the sub-block."""
    store_sigma(s, x, 256 // n, sigma, _X, _SCALE_T, _SIGMA)
    for group in range((count * (256 // n) + LANES - 1) // LANES):
        load_group(x, group, n, s, _X)
        _weigh_by_importance(s, w, group, n)
        scale, low = fit_with_min_refined(s, _X, _W, _L + group * n * STEP, n, top)
        store(s, _SCALE + group * STEP, scale)
        store(s, _LOW + group * STEP, low)
        sum_w = splat(WIDE, F(0))
        for i in range(n):
            sum_w = sum_w + load(WIDE, s, _W + i * STEP)
        store(s, _SUM_W + group * STEP, sum_w)
    for k in range(3):
        turn(s, _SCALE + k * _FLAT, _SCALE_T + k * _TURNED, 256 // n)


@inline
def _kept_levels(s: Any, v: Any, offset: Any, flat: Any, n: Any, top: Any, guarded: Any) -> Any:
    """_found_levels where they are kept."""
    return _gathered_levels(s, flat, n, offset // 4 % n)


@inline
def _levels_q2_refined(s: Any, x: Any, offset: Any, j: Any, lane: Any, subs: Any, top: Any, guarded: Any) -> Any:
    """_levels_with_min by the scale as it was fitted, not as a half; where that is 0, level 0."""
    d = load(types.float32, s, _D_T + j * STEP + 4 * lane)
    low = load(types.float32, s, _DMIN_T + j * STEP + 4 * lane)
    inverse = F(1) / d if d != F(0) else F(0)
    return vmin(vmax(nearest_int((load(f32x16, x, offset) + low) * inverse), 0), top)


_quantize_scales_refined = specialize(
    _quantize_scales, "ik",
    _codes_by_fit=specialize(_codes_by_fit, "ik", fit_positive=specialize(fit_positive, "ik", EPSILON=F(1e-16))),
)  # fmt: skip
_write_q2_refined = specialize(_write_q2, "ik", _levels_with_min=_levels_q2_refined)
_finish_q45_refined = specialize(
    _finish_q45, "ik", _quantize_scales=_quantize_scales_refined, _write_q45=specialize(
        _write_q45, "ik", _levels_with_min=specialize(_levels_with_min, "ik", _found_levels=_kept_levels)
    ),
)  # fmt: skip


@inline
def _encode_q2_k_refined(s: Any, x: Any, w: Any, out: Any, count: Any) -> None:
    """Encode super-blocks as Q2_K. Source: ik_llama.cpp 8337e4cd3, quantize_row_q2_K_impl."""
    _fit_with_min_refined(s, x, w, count, 16, 3, F(0.75))
    _quantize_scales_refined(s, True, 16, 15)
    d, dmin = load(WIDE, s, _FITS), load(WIDE, s, _FITS + STEP)
    for j in range(0, 16 * STEP, STEP):  # of the complete codes; packing keeps half a byte of each
        store(s, _SCALE_T + j, d * convert(WIDE, load(WIDE_INT, s, _CODE_T + j)))
        store(s, _LOW_T + j, dmin * convert(WIDE, load(WIDE_INT, s, _LOW_CODE_T + j)))
    _pack_scales_q2(s)
    for j in range(0, 16 * STEP, STEP):
        store(s, _D_T + j, load(WIDE, s, _SCALE_T + j))
        store(s, _DMIN_T + j, load(WIDE, s, _LOW_T + j))
    for b in range(count):
        _write_q2_refined(s, x + b * BLOCK_BYTES, out + b * 84, b, True)


@inline
def _encode_q4_k_refined(s: Any, x: Any, w: Any, out: Any, count: Any) -> None:
    """Encode super-blocks as Q4_K. Source: ik_llama.cpp 8337e4cd3, quantize_row_q4_K_impl."""
    _fit_with_min_refined(s, x, w, count, 32, 15, 2)
    _finish_q45_refined(s, x, out, count, 15, True)


@inline
def _encode_q5_k_refined(s: Any, x: Any, w: Any, out: Any, count: Any) -> None:
    """Encode super-blocks as Q5_K. Source: ik_llama.cpp 8337e4cd3, quantize_row_q5_K_impl."""
    _fit_with_min_refined(s, x, w, count, 32, 31, 2)
    _finish_q45_refined(s, x, out, count, 31, True)


encode_q2_k_ik = if_weighted(blocks_encoder("Q2_K", _encode_q2_k_refined, LANES, _END), encode_q2_k)
encode_q4_k_ik = if_weighted(blocks_encoder("Q4_K", _encode_q4_k_refined, LANES, _END), encode_q4_k)
encode_q5_k_ik = if_weighted(blocks_encoder("Q5_K", _encode_q5_k_refined, LANES, _END), encode_q5_k)


# ---------------------------------------------------------------- types without a minimum: Q3_K, Q6_K


@inline
def _search_signed(s: Any, group: Any, nmax: Any) -> None:
    """Search LANES sub-blocks; keep their scales, and the iscale that gives the levels."""
    scale, iscale = fit_signed(s, _X, _W, 16, nmax, True)
    store(s, _SCALE + group * STEP, scale)
    store(s, _ISCALE + group * STEP, iscale)


@inline
def _search_refined(s: Any, group: Any, nmax: Any) -> None:
    """_search_signed as in ik_llama.cpp: the levels themselves are kept, in the slot of the sub-block's number."""
    scale, alive = fit_signed_refined(s, _X, _W, _L + group * 16 * STEP, 16, nmax)
    store(s, _SCALE + group * STEP, scale)
    store(s, _ISCALE + group * STEP, alive)
    store(s, _SLOT + group * STEP, _lane_numbers() + np.int32(group * LANES))


@inline
def _fit_signed(s: Any, x: Any, w: Any, weighted: Any, count: Any, nmax: Any) -> Any:
    """Search the scale of every sub-block of the batch (make_qx_quants)."""
    if nmax == 4:
        _store_sigma(s, x, 16, 2)
    for group in range((count * 16 + LANES - 1) // LANES):
        load_group(x, group, 16, s, _X)
        if nmax == 4:
            _weigh_by_importance(s, w, group, 16)
            sum_w = splat(WIDE, F(0))
            for i in range(16):
                sum_w = sum_w + load(WIDE, s, _W + i * STEP)
            store(s, _SUM_W + group * STEP, sum_w)
        elif weighted:
            load_group(w, group, 16, s, _W)
        else:
            for i in range(16):
                v = load(WIDE, s, _X + i * STEP)
                store(s, _W + i * STEP, v * v)
        _search_signed(s, group, nmax)
    turn(s, _SCALE, _SCALE_T, 16)


@inline
def _fit_by_descent(s: Any, x: Any, count: Any) -> Any:
    """Search the scale of every sub-block of the batch (make_q3_quants).

    Few sub-blocks move a level at all: those are queued, and searched LANES together afterwards.
    """
    queued = np.intp(0)
    for group in range((count * 16 + LANES - 1) // LANES):
        load_group(x, group, 16, s, _X)
        scale, iscale, moving = fit_by_largest(s, _X, 16, 4)
        store(s, _SCALE + group * STEP, scale)
        store(s, _ISCALE + group * STEP, iscale)
        store(s, _SLOT + group * STEP, splat(WIDE_INT, -1))
        bits = mask_bits(moving)
        for lane in range(LANES):
            store(s, _QUEUE + 4 * queued, np.int32(group * LANES + lane))
            queued += np.intp((bits >> np.uint64(lane)) & np.uint64(1))
    for slot in range(0, queued, 2 * LANES):
        _descend_queued(s, x, slot, min(2 * LANES, queued - slot))
    turn(s, _SCALE, _SCALE_T, 16)


@inline
def _descend_queued(s: Any, x: Any, slot: Any, count: Any) -> Any:
    """Search up to 2 * LANES queued sub-blocks; their levels are kept at _L by slot."""
    for k in range(2 * LANES):  # idle lanes repeat the last sub-block
        flat = load(types.int32, s, _QUEUE + 4 * (slot + min(k, count - 1)))
        store(s, _W + k * 64, load(f32x16, x, flat * 64))
    for k in range(2):
        load_group(address(s) + _W, k, 16, s, _X + k * 16 * STEP)
    first, second = fit_by_descent(s, _X, _L + slot // LANES * 16 * STEP, 16, 4)
    store(s, _W, first)
    store(s, _W + STEP, second)
    for k in range(count):
        flat = load(types.int32, s, _QUEUE + 4 * (slot + k))
        store(s, _SCALE + 4 * flat, load(types.float32, s, _W + 4 * k))
        store(s, _SLOT + 4 * flat, np.int32(slot + k))


@inline
def _largest_scale(s: Any) -> Any:
    """Return the super-block's first scale of the largest size."""
    value = size = splat(WIDE, F(0))
    for j in range(16):
        scale = load(WIDE, s, _SCALE_T + j * STEP)
        larger = vabs(scale) > size
        size, value = choose(larger, vabs(scale), size), choose(larger, scale, value)
    return value


@inline
def _signed_levels(s: Any, x: Any, j: Any, lane: Any, nmax: Any, slots: Any) -> Any:
    """Return the levels of sub-block j, from 0; where its scale came out as 0, those of the search, if in a slot."""
    v = load(f32x16, x, j * 64)
    d = load(types.float32, s, _D_T + j * STEP + 4 * lane)
    if d == F(0):
        flat = lane * 16 + j
        iscale = load(types.float32, s, _ISCALE + flat * 4)
        if iscale == F(0):
            return splat(i32x16, 0)
        slot = load(types.int32, s, _SLOT + flat * 4) if slots else -1
        if slot >= 0:
            return _gathered_levels(s, slot, 16, 0) + nmax
        return vmin(vmax(nearest_int(v * iscale), -nmax), nmax - 1) + nmax
    return vmin(vmax(nearest_int(v / d), -nmax), nmax - 1) + nmax


@inline
def _scales_q3_by_largest(s: Any) -> Any:
    """Quantize the scales to 6 bits by the largest; store d."""
    largest = _largest_scale(s)
    nonzero = largest != F(0)
    iscale = F(-32) / choose(nonzero, largest, F(1))
    for j in range(16):
        code = nearest_int(iscale * load(WIDE, s, _SCALE_T + j * STEP))
        code = vmin(vmax((code << 24) >> 24, -32), 31) + 32
        store(s, _CODE_T + j * STEP, choose(nonzero, code, 0))
    store_f16(s, _HALF, choose(nonzero, F(1) / iscale, F(0)))


@inline
def _scales_q3_by_fit(s: Any) -> Any:
    """Quantize the scales to 6 bits by make_qx_quants under the sub-blocks' weights; store d."""
    turn(s, _SUM_W, _SUM_W_T, 16)
    d, iscale = fit_signed(s, _SCALE_T, _SUM_W_T, 16, 32, True)
    # If sums overflow, ggml's iscale is -0, so every level is 0 with code 32, and d is a sum of zeros (or of NaN).
    infinite = vabs(_largest_scale(s)) == F(np.inf)
    nothing = splat(WIDE, F(0))
    for j in range(16):
        nothing = nothing + F(0) * load(WIDE, s, _SUM_W_T + j * STEP)
        code = vmin(vmax(nearest_int(iscale * load(WIDE, s, _SCALE_T + j * STEP)), -32), 31) + 32
        store(s, _CODE_T + j * STEP, choose((iscale != F(0)) | infinite, choose(infinite, 32, code), 0))
    store_f16(s, _HALF, choose(infinite, nothing, d))


@inline
def _pack_scales_q3(s: Any) -> Any:
    """Bytes 0..7: the low halves of codes j and j + 8; bytes 8..11: the high bits of codes j, j + 4, j + 8, j + 12."""
    d = load_f16(WIDE, s, _HALF)
    for k in range(2):
        offset, high = _CODE_T + 4 * k * STEP, _CODE_T + (8 + 4 * k) * STEP
        _store_word(
            s,
            k,
            _code(s, offset, 0) & 15 | (_code(s, high, 0) & 15) << 4,
            _code(s, offset, 1) & 15 | (_code(s, high, 1) & 15) << 4,
            _code(s, offset, 2) & 15 | (_code(s, high, 2) & 15) << 4,
            _code(s, offset, 3) & 15 | (_code(s, high, 3) & 15) << 4,
        )
    word = splat(WIDE_INT, 0)
    for j in range(16):
        code = _code(s, _CODE_T, j)
        word = word | (code >> 4) << (8 * (j % 4) + 2 * (j // 4))
        store(s, _D_T + j * STEP, d * convert(WIDE, code - 32))
    store(s, _WORDS + 2 * STEP, word)


@inline
def _write_q3(s: Any, x: Any, out: Any, lane: Any, slots: Any) -> Any:
    """Write a half as Q2_K does; byte l of the high bits has bit k for value 32 * k + l."""
    for half in range(2):
        high = splat(i32x16, 0)
        for chunk in range(2):
            q = splat(i32x16, 0)
            for k in range(4):
                level = _signed_levels(s, x, chunk * 8 + 2 * k + half, lane, 4, slots)
                q = q | (level & 3) << (2 * k)
                high = high | (level >> 2) << (4 * chunk + k)
            store(out, 32 + chunk * 32 + half * 16, convert(u8x16, q))
        store(out, half * 16, convert(u8x16, high))
    _write_words(s, out + 96, lane, 3)
    _write_half(s, _HALF, out + 108, lane)


@inline
def _encode_q3_k(s: Any, x: Any, w: Any, out: Any, count: Any) -> None:
    """Encode super-blocks as Q3_K. Source: quantize_row_q3_K_ref, quantize_row_q3_K_impl."""
    weighted = w != 0
    if weighted:
        _fit_signed(s, x, w, True, count, 4)
        _scales_q3_by_fit(s)
    else:
        _fit_by_descent(s, x, count)
        _scales_q3_by_largest(s)
    _pack_scales_q3(s)
    for b in range(count):
        _write_q3(s, x + b * BLOCK_BYTES, out + b * 110, b, not weighted)


encode_q3_k = blocks_encoder("Q3_K", _encode_q3_k, LANES, _END)

_fit_signed_refined = specialize(_fit_signed, "ik", _search_signed=_search_refined)


@inline
def _scales_q3_refined(s: Any) -> None:
    """Quantize the scales to 6 bits by ik_llama.cpp's make_qx_quants; store d."""
    turn(s, _SUM_W, _SUM_W_T, 16)
    d, _ = fit_signed_refined(s, _SCALE_T, _SUM_W_T, _X, 16, 32)
    for j in range(0, 16 * STEP, STEP):
        store(s, _CODE_T + j, convert(WIDE_INT, load(WIDE, s, _X + j)) + 32)
    store_f16(s, _HALF, d)


@inline
def _encode_q3_k_refined(s: Any, x: Any, w: Any, out: Any, count: Any) -> None:
    """Encode super-blocks as Q3_K. Source: ik_llama.cpp 8337e4cd3, quantize_row_q3_K_impl."""
    _fit_signed_refined(s, x, w, True, count, 4)
    _scales_q3_refined(s)
    _pack_scales_q3(s)
    for b in range(count):
        _write_q3(s, x + b * BLOCK_BYTES, out + b * 110, b, True)


encode_q3_k_ik = if_weighted(blocks_encoder("Q3_K", _encode_q3_k_refined, LANES, _END), encode_q3_k)


@inline
def _scales_q6(s: Any) -> Any:
    """Quantize the scales to int8 by the largest and pack them; a super-block of zeros gets d = 0 and codes 0."""
    largest = _largest_scale(s)
    dead = vabs(largest) < EPSILON
    iscale = F(-128) / choose(dead, F(1), largest)
    store_f16(s, _HALF, choose(dead, F(0), F(1) / iscale))
    d = load_f16(WIDE, s, _HALF)
    for j in range(16):
        code = vmin(nearest_int(iscale * load(WIDE, s, _SCALE_T + j * STEP)), 127)
        code = choose(dead, 0, (code << 24) >> 24)
        store(s, _CODE_T + j * STEP, code)
        store(s, _D_T + j * STEP, d * convert(WIDE, code))
    for k in range(4):
        offset = _CODE_T + 4 * k * STEP
        _store_word(s, k, _code(s, offset, 0), _code(s, offset, 1), _code(s, offset, 2), _code(s, offset, 3))
    return dead


@inline
def _write_q6(s: Any, x: Any, out: Any, lane: Any, slots: Any) -> Any:
    """Of each 128 values, byte l of 64 holds the low halves of l and l + 64; byte l of 32 four pairs of high bits."""
    for chunk in range(2):
        for half in range(2):
            a = _signed_levels(s, x, chunk * 8 + half, lane, 32, slots)
            b = _signed_levels(s, x, chunk * 8 + 2 + half, lane, 32, slots)
            c = _signed_levels(s, x, chunk * 8 + 4 + half, lane, 32, slots)
            d = _signed_levels(s, x, chunk * 8 + 6 + half, lane, 32, slots)
            store(out, chunk * 64 + half * 16, convert(u8x16, (a & 15) | (c & 15) << 4))
            store(out, chunk * 64 + 32 + half * 16, convert(u8x16, (b & 15) | (d & 15) << 4))
            high = a >> 4 | (b >> 4) << 2 | (c >> 4) << 4 | (d >> 4) << 6
            store(out, 128 + chunk * 32 + half * 16, convert(u8x16, high))
    _write_words(s, out + 192, lane, 4)
    _write_half(s, _HALF, out + 208, lane)


@inline
def _forget_levels(s: Any, dead: Any) -> Any:
    """Set all levels of superblocks of zeros to 0, regardless of the search."""
    store(s, _DMIN_T, choose(dead, F(0), splat(WIDE, F(1))))
    for b in range(LANES):
        if load(types.float32, s, _DMIN_T + 4 * b) == F(0):
            store(s, _ISCALE + b * 64, splat(f32x16, F(0)))


@inline
def _encode_q6_k(s: Any, x: Any, w: Any, out: Any, count: Any) -> None:
    """Encode super-blocks as Q6_K. Source: quantize_row_q6_K_ref, quantize_row_q6_K_impl."""
    weighted = w != 0
    _fit_signed(s, x, w, weighted, count, 32)
    _forget_levels(s, _scales_q6(s))
    for b in range(count):
        _write_q6(s, x + b * BLOCK_BYTES, out + b * 210, b, _IN_SLOTS)


encode_q6_k = blocks_encoder("Q6_K", _encode_q6_k, LANES, _END)

#: ik_llama.cpp's Q6_K, with and without an importance matrix.
encode_q6_k_ik = blocks_encoder(
    "Q6_K", specialize(_encode_q6_k, "ik", _fit_signed=_fit_signed_refined, _IN_SLOTS=True), LANES, _END
)

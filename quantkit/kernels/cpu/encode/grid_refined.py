"""IQ2_XS and IQ1_M as ik_llama.cpp encodes them: the same grids and bytes as in grid_quants.py and grid_ternary.py.

IQ2_XS: the candidates lie about the scale of the best partition of the sorted magnitudes into levels 1, 3 and 5; then
all groups are rounded again for as long as that helps, and d is fitted to the values of the whole super-block.

IQ1_M: weights depend on the mean square of 32 values, and if groups are off the grid, the shifts are chosen again.
Sub-blocks of zeros in a super-block with other values shift up; ik repeats what an earlier super-block of the same call
had there, so its bytes depend on the rows before.

Source: ik_llama.cpp 8337e4cd3 ggml-quants.c quantize_row_iq2_xs_impl, quantize_row_iq1_m_impl, iq1m_process_1block.
"""

from __future__ import annotations

from typing import Any

from numba import types

from quantkit.kernels.cpu.core.jit import inline, specialize
from quantkit.kernels.cpu.core.simd import (
    any_lane,
    f32_to_f16,
    f32x16,
    load,
    lookup16_f32,
    make_constant,
    splat,
    store,
    vabs,
    vmax,
)
from quantkit.kernels.cpu.core.simd import select as choose
from quantkit.kernels.cpu.encode import grid_search as grid
from quantkit.kernels.cpu.encode.batch import load_group, store_sigma
from quantkit.kernels.cpu.encode.grid_quants import (
    BEST_SIGNS,
    BEST_WORDS,
    SCALES,
    SIGMA,
    largest_scale,
    load_sub_blocks,
    scale_code,
    store_best,
    write_iq2_xs,
)
from quantkit.kernels.cpu.encode.grid_search import BEST, OFF, ROOT, SHIFT, SLOT, W, X, ternary
from quantkit.kernels.cpu.encode.grid_ternary import (
    EIGHTH,
    FACTORS,
    FITTED_2,
    FITTED_X,
    SORTED,
    SORTED_W,
    SUM_W,
    SUM_X,
    TERMS,
    iq1_m_batch,
    is_better,
    keep_better,
    largest_magnitude,
    sort_values,
    store_slots,
    sum_below,
    sum_terms,
)
from quantkit.kernels.cpu.encode.search import EPSILON, LANES, STEP, WIDE, WIDE_INT, F

# ---------------------------------------------------------------- IQ2_XS

#: The bytes of iq2xs_grid, near eight times the levels 1, 3 and 5.
_bytes_of_grid = make_constant(f32x16, [8, 25, 43, 0] * 4, "grid_refined_bytes")


@inline
def _scale_of_partitions(s: Any) -> Any:
    """Return the scale of the best partition of 16 sorted values into three runs of levels 1, 3 and 5; 0 if none."""
    sort_values(s, 16)
    sum_below(s, 16, -1)
    all_x, all_w = load(WIDE, s, SUM_X + 16 * STEP), load(WIDE, s, SUM_W + 16 * STEP)
    for j in range(0, 17 * STEP, STEP):
        store(s, TERMS + j, (all_x - load(WIDE, s, SUM_X + j)) * F(5))
        store(s, TERMS + 36 * STEP + j, (all_w - load(WIDE, s, SUM_W + j)) * F(25))
    best = scale = splat(WIDE, F(0))
    for i in range(0, 17 * STEP, STEP):
        x, w = load(WIDE, s, SUM_X + i), load(WIDE, s, SUM_W + i)
        for j in range(i, 17 * STEP, STEP):
            qx = x + (load(WIDE, s, SUM_X + j) - x) * F(3) + load(WIDE, s, TERMS + j)
            q2 = w + (load(WIDE, s, SUM_W + j) - w) * F(9) + load(WIDE, s, TERMS + 36 * STEP + j)
            better = is_better(best, qx, q2)
            if any_lane(better):
                ratio = qx / q2
                scale, best = choose(better, ratio, scale), choose(better, ratio * qx, best)
    return scale


@inline
def _round_on(s: Any, lists: Any, scale: Any, best: Any, dead: Any) -> Any:
    """Round all groups by the best scale, up to three times while that is better; return the scale."""
    moving = choose(dead, 0, choose(scale != F(0), splat(WIDE_INT, 1), 0))
    for _ in range(3):
        iscale = F(1) / choose(moving != 0, scale, F(1))
        for k in range(2):  # inactive lanes use point 0, which is on the grid
            store(s, SLOT + k * STEP, choose(moving != 0, grid.slot_of(s, iscale, k, 8, 2), 0))
        grid.slots_to_words(s, scale, lists, 16, 8, False)
        changed = splat(WIDE_INT, 0)
        for k in range(0, 2 * STEP, STEP):
            changed = changed | (load(WIDE_INT, s, SLOT + k) ^ load(WIDE_INT, s, BEST + k)) & (OFF - 1)
        qx, q2 = grid.rate_words(s, SLOT, STEP, 16, 8)
        better = is_better(best, choose((changed & -moving) != 0, qx, F(0)), q2)
        if not any_lane(better):
            break
        moving = choose(better, moving, 0)
        scale = choose(better, qx / q2, scale)
        best = choose(better, scale * qx, best)
        for k in range(0, 2 * STEP, STEP):
            store(s, BEST + k, choose(better, load(WIDE_INT, s, SLOT + k), load(WIDE_INT, s, BEST + k)))
    return scale


@inline
def _fit_iq2_xs(s: Any, x: Any, w: Any, lists: Any, count: Any) -> None:
    """Search the sub-blocks of ``count`` super-blocks."""
    store_sigma(s, x, 16, 1, X, grid.SCALE, SIGMA)
    for group in range((count * 16 + LANES - 1) // LANES):
        load_sub_blocks(s, x, w, group, 16, True)
        grid.take_signs(s, 16, True)
        grid.derive_weights(s, 16)
        dead = grid.largest_value(s, 16) < EPSILON
        scale = _scale_of_partitions(s)
        middle = choose(dead, F(1), choose(scale != F(0), scale * F(5), F(1)))
        scale, best = grid.search_scale(s, lists, 16, 8, 2, middle, scale, 7, 0.1, False)
        scale = _round_on(s, lists, scale, best, dead)
        store_best(s, group, 16, 8, scale, dead, True)


@inline
def _sign_of(bits: Any, i: Any) -> Any:
    """Return 1 or -1 for value i of 8 whose 7 sign bits are ``bits``; the number of negative ones is even."""
    if i == 7:
        bits = bits ^ bits >> 4
        bits = bits ^ bits >> 2
        bits = bits ^ bits >> 1
        i = 0
    return choose((bits >> i & 1) != 0, F(-1), splat(WIDE, F(1)))


@inline
def _store_terms(s: Any, group: Any) -> None:
    """Store the terms of sum(w q x) and sum(w q q) of LANES sub-blocks, whose factors are in FACTORS."""
    factor = F(0.125) * load(WIDE, s, FACTORS + group * STEP)
    signs = load(WIDE_INT, s, BEST_SIGNS + group * STEP)
    for k in range(2):
        word, bits = load(WIDE_INT, s, BEST_WORDS + k * 16 * STEP + group * STEP), signs >> 7 * k & 127
        for i in range(8):
            offset = (8 * k + i) * STEP
            q = factor * lookup16_f32(_bytes_of_grid(), word) * _sign_of(bits, i)
            word = word >> 2
            wq = load(WIDE, s, W + offset) * q
            store(s, SORTED + offset, wq * load(WIDE, s, X + offset))
            store(s, SORTED_W + offset, wq * q)


@inline
def iq2_xs_batch_refined(s: Any, x: Any, w: Any, out: Any, count: Any, *lists: Any) -> None:
    _fit_iq2_xs(s, x, w, lists, count)
    write_iq2_xs(s, out, count, lists)
    for b in range(count):
        inverse = F(1) / (largest_scale(s, 64 * b, 16) / F(31))
        for offset in range(64 * b, 64 * b + 64, 4):
            store(s, FACTORS + offset, F(2 * scale_code(s, offset, inverse) + 1))
    for group in range((count * 16 + LANES - 1) // LANES):
        load_sub_blocks(s, x, w, group, 16, True)
        _store_terms(s, group)
        sum_terms(s, group)
    for b in range(count):
        sum_q2 = load(types.float32, s, FITTED_2 + 4 * b)
        if largest_scale(s, 64 * b, 16) > F(0) and sum_q2 > F(0):
            store(out + 74 * b, 0, f32_to_f16(F(1.05) * load(types.float32, s, FITTED_X + 4 * b) / sum_q2))


# ---------------------------------------------------------------- IQ1_M

#: Terms of a boundary in TERMS: of sum(w q x) and sum(w q q), for both halves, with values shifted up and down.
_ROW = 18 * STEP


@inline
def _store_last_runs(s: Any) -> None:
    """Store the terms of the run of level 1 that begins at each boundary."""
    for half in range(2):
        sums_x = SUM_X + half * _ROW
        sums_w = SUM_W + half * _ROW
        offset = TERMS + 4 * half * _ROW
        all_x, all_w = load(WIDE, s, sums_x + 16 * STEP), load(WIDE, s, sums_w + 16 * STEP)
        for j in range(0, 17 * STEP, STEP):
            x, w = all_x - load(WIDE, s, sums_x + j), all_w - load(WIDE, s, sums_w + j)
            store(s, offset + j, x * F(1.125))
            store(s, offset + _ROW + j, x * F(0.875))
            store(s, offset + 2 * _ROW + j, w * F(1.125) * F(1.125))
            store(s, offset + 3 * _ROW + j, w * F(0.875) * F(0.875))


@inline
def _first_run(s: Any, half: Any, i: Any) -> Any:
    """Return the terms of the run of level -1 before boundary i."""
    x, w = load(WIDE, s, SUM_X + half * _ROW + i), load(WIDE, s, SUM_W + half * _ROW + i)
    return x * F(-0.875), x * F(-1.125), w * F(-0.875) * F(-0.875), w * F(-1.125) * F(-1.125)


@inline
def _middle_run(s: Any, half: Any, i: Any, j: Any) -> Any:
    """Return the terms of the run of level 0 between two boundaries, shifted up; down, the first is negative."""
    x = load(WIDE, s, SUM_X + half * _ROW + j) - load(WIDE, s, SUM_X + half * _ROW + i)
    w = load(WIDE, s, SUM_W + half * _ROW + j) - load(WIDE, s, SUM_W + half * _ROW + i)
    return x * EIGHTH, w * EIGHTH * EIGHTH


@inline
def _pair(below: Any, first: Any, middle: Any, last: Any) -> Any:
    return below + first + middle + last


@inline
def _search_boundaries(s: Any) -> Any:
    """Return the best scale of each lane, its boundaries, which halves shift down: 0 .. 3, bit 1 the first; or -1."""
    sum_below(s, 16, 0)
    sum_below(s, 16, 1)
    _store_last_runs(s)
    zero, none = splat(WIDE, F(0)), splat(WIDE_INT, 0)
    best = zero, zero, none, none, splat(WIDE_INT, -1)
    for i in range(17):
        a_up, a_down, a_up2, a_down2 = _first_run(s, 0, i * STEP)
        b_up, b_down, b_up2, b_down2 = _first_run(s, 1, i * STEP)
        for j in range(i, 17):
            last = TERMS + j * STEP
            a, a2 = _middle_run(s, 0, i * STEP, j * STEP)
            b, b2 = _middle_run(s, 1, i * STEP, j * STEP)
            x_up = a_up + a + load(WIDE, s, last)
            x_down = a_down - a + load(WIDE, s, last + _ROW)
            w_up = a_up2 + a2 + load(WIDE, s, last + 2 * _ROW)
            w_down = a_down2 + a2 + load(WIDE, s, last + 3 * _ROW)
            for k in range(4):
                x, w = (x_up, w_up) if k < 2 else (x_down, w_down)
                if k % 2 == 0:
                    qx, q2 = x + b_up + b, w + b_up2 + b2
                else:
                    qx, q2 = x + b_down - b, w + b_down2 + b2
                qx = qx + load(WIDE, s, last + (4 + k % 2) * _ROW)
                q2 = q2 + load(WIDE, s, last + (6 + k % 2) * _ROW)
                best = keep_better(best, qx, q2, i, j, k)
    return best[1:]


@inline
def _choose_shifts(s: Any, off: Any, scale: Any, shifts: Any) -> Any:
    """Return the scale and the shifts that fit the words in SLOT best, where ``off``."""
    zero = splat(WIDE, F(0))
    x_0 = x_1 = x_2 = x_3 = w_0 = w_1 = w_2 = w_3 = zero
    for k in range(2):
        word = load(WIDE_INT, s, SLOT + k * STEP)
        for i in range(8):
            offset, level = (8 * k + i) * STEP, lookup16_f32(ternary(), word)
            word = word >> 2
            w = load(WIDE, s, W + offset)
            up = level + EIGHTH
            down = level - EIGHTH
            wx = w * load(WIDE, s, X + offset)
            up_x = wx * up
            down_x = wx * down
            up_w = w * up * up
            down_w = w * down * down
            x_0 = x_0 + up_x
            x_3 = x_3 + down_x
            w_0 = w_0 + up_w
            w_3 = w_3 + down_w
            if k == 0:
                x_1 = x_1 + up_x
                x_2 = x_2 + down_x
                w_1 = w_1 + up_w
                w_2 = w_2 + down_w
            else:
                x_1 = x_1 + down_x
                x_2 = x_2 + up_x
                w_1 = w_1 + down_w
                w_2 = w_2 + up_w
    best = zero
    for k in range(4):
        qx, q2 = (x_0, w_0) if k == 0 else (x_1, w_1) if k == 1 else (x_2, w_2) if k == 2 else (x_3, w_3)
        better = is_better(best, choose((off != 0), vmax(qx, F(0)), F(0)), q2)
        ratio = qx / q2
        scale, best = choose(better, ratio, scale), choose(better, ratio * qx, best)
        shifts = choose(better, k, shifts)
    return scale, shifts


@inline
def _store_sigma_of_32(s: Any, x: Any, count: Any) -> None:
    """Store 1.5 times the mean square of 32 values for each sub-block of 16."""
    for group in range((count * 8 + LANES - 1) // LANES):
        load_group(x, group, 32, s, X)
        total = splat(WIDE, F(0))
        for i in range(0, 32 * STEP, STEP):
            v = load(WIDE, s, X + i)
            total = total + v * v
        store(s, grid.SCALE, F(1.5) * total / F(32))
        for lane in range(LANES):
            sigma, offset = load(types.float32, s, grid.SCALE + 4 * lane), SIGMA + 8 * (group * LANES + lane)
            store(s, offset, sigma)
            store(s, offset + 4, sigma)


@inline
def _use_squares_if_nothing_weighs(s: Any) -> None:
    """Weigh by x^2 where sum(w |x|) is 0; the first value is left out of the sum."""
    total = splat(WIDE, F(0))
    for offset in range(STEP, 16 * STEP, STEP):
        total = total + load(WIDE, s, W + offset) * vabs(load(WIDE, s, X + offset))
    nothing = total == F(0)
    if any_lane(nothing):
        for offset in range(0, 16 * STEP, STEP):
            x = load(WIDE, s, X + offset)
            store(s, W + offset, choose(nothing, x * x, load(WIDE, s, W + offset)))


@inline
def fit_half_loaded(s: Any, lists: Any, group: Any, least: Any) -> None:
    """Search LANES sub-blocks of 16 values with their weights; store the result as that of ``group``.

    least: sub-blocks of smaller values are dead.
    """
    for offset in range(0, 16 * STEP, STEP):
        store(s, ROOT + offset, load(WIDE, s, W + offset))
    largest = largest_magnitude(s, 16)
    sort_values(s, 16)
    scale, low, high, shifts = _search_boundaries(s)
    dead = choose(largest < least, -1, shifts) < 0
    negative = scale < F(0)
    shifts = choose(dead, 0, choose(negative, 3 - shifts, shifts))
    scale = choose(negative, -scale, scale)
    off = splat(WIDE_INT, 0)
    for k in range(2):
        down = (shifts & (1 if k else 2)) != 0
        store(s, SHIFT + k * STEP, choose(down, -EIGHTH, splat(WIDE, EIGHTH)))
    store_slots(s, 16, low, high, negative)
    grid.slots_to_words(s, scale, lists, 16, 8, True)
    for k in range(0, 2 * STEP, STEP):
        off = off | load(WIDE_INT, s, SLOT + k)
    scale, shifts = _choose_shifts(s, choose(dead, 0, off & OFF), scale, shifts)
    offset = group * STEP
    store(s, SCALES + offset, choose(dead, F(0), scale))
    store(s, BEST_SIGNS + offset, shifts)
    for k in range(2):
        word = load(WIDE_INT, s, SLOT + k * STEP) & (OFF - 1)
        store(s, BEST_WORDS + k * 16 * STEP + offset, choose(dead, 0, word))


@inline
def _fit_halves_refined(s: Any, x: Any, w: Any, lists: Any, count: Any) -> None:
    """Search the sub-blocks of ``count`` super-blocks. BEST_SIGNS gets the halves that shift down, bit 1 the first."""
    _store_sigma_of_32(s, x, count)
    for group in range((count * 16 + LANES - 1) // LANES):
        load_sub_blocks(s, x, w, group, 16, False)
        _use_squares_if_nothing_weighs(s)
        fit_half_loaded(s, lists, group, F(1e-7))


iq1_m_batch_refined = specialize(iq1_m_batch, "ik", _fit_halves=_fit_halves_refined, D_GAIN=F(1.085))

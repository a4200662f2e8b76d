"""Super-blocks on the lattice of a type whose sub-blocks have integer scales: d * s * level, or d * s * q - dmin * m.

Each sub-block alone allows few scales, one for each level that its extreme value may have. The sub-block with the
largest one then makes a d for each s that it may have, from the extreme one on, as encoders choose it; and every other
sub-block must have some s with which d * s lies in one of its intervals. Minimums follow in the same way, once d is
known. A super-block is on the lattice as a whole, or it is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import helper, inline, kernel
from quantkit.kernels.cpu.encode.lattice import (
    N_HALVES,
    are_representable,
    fits,
    half_between,
    list_levels,
    list_steps,
    n_scales,
    nth_half,
    nth_scale,
    scale_interval,
    store_bounds,
    store_codes,
    survey,
)
from quantkit.kernels.cpu.encode.lattice_blocks import extent, minimum_interval, step_interval, steps_fit, store_steps

#: Scales of a sub-block that are remembered, and numbers of each: value, least, greatest.
_MOST = 8
VALUE, LEAST, GREATEST = 0, 1, 2


@helper
def _list_scales(
    x: Any, begin: Any, span: Any, bits: Any, tries: Any, codes: Any, even: Any, low: Any, high: Any, candidates: Any,
    scales: Any,
) -> Any:  # fmt: skip
    """Store the scales that a sub-block allows; return their number, 0 for zeros and -1 if there is none."""
    largest, smallest, sign = survey(x, begin, span)
    if largest == 0:
        return 0
    n_levels = list_levels(x, begin, span, largest, smallest, bits, tries, candidates)
    if not n_levels:
        return -1
    count = 0
    store_bounds(x, begin, span, bits, low, high, 0)
    for other_sign in range(1 if sign == 0 else 2):
        for k in range(n_levels):
            level = np.float64(tries[candidates[k]])
            if sign != 0 and (largest * level * sign > 0) == (other_sign > 0):
                continue
            for i in range(n_scales(level, bits)):
                d = nth_scale(largest / level, i)
                if count == _MOST or not fits(x, begin, span, d, bits, codes, even):
                    continue
                least, greatest = scale_interval(x, begin, span, d, low, high, 0)
                if least > greatest:
                    continue
                # nearly the same scale makes the same levels
                if count and least == scales[count - 1, LEAST] and greatest == scales[count - 1, GREATEST]:
                    continue
                scales[count, VALUE], scales[count, LEAST], scales[count, GREATEST] = d, least, greatest
                count += 1
    return count if count else -1


@helper
def _divide(least: Any, greatest: Any, s: Any) -> Any:
    a, b = least / s, greatest / s
    return min(a, b), max(a, b)


@helper
def _share_scale(d: Any, least: Any, greatest: Any, scales: Any, counts: Any, s_codes: Any, choice: Any, s: Any) -> Any:
    """Return the interval of scales near d of which every sub-block has a multiple; empty if there is none."""
    for j in range(counts.size):
        s[j] = 0
        fit = counts[j] == 0
        for k in range(counts[j]):
            factor = np.rint(scales[j, k, VALUE] / d)
            if factor == 0 or abs(factor) > 128 or s_codes[np.int64(factor) + 128] < 0:
                continue
            a, b = _divide(scales[j, k, LEAST], scales[j, k, GREATEST], factor)
            if max(a, least) <= min(b, greatest):
                least, greatest = max(a, least), min(b, greatest)
                s[j], choice[j] = np.int64(factor), k
                fit = True
                break
        if not fit:
            return np.inf, -np.inf
    return least, greatest


@helper
def _largest(scales: Any, counts: Any) -> Any:
    best = -1
    for j in range(counts.size):
        if counts[j] > 0 and (best < 0 or abs(scales[j, 0, VALUE]) > abs(scales[best, 0, VALUE])):
            best = j
    return best


@inline
def _are_multiples(d: Any, scales: Any, counts: Any, s_codes: Any, choice: Any, s: Any) -> Any:
    """Return whether every sub-block has a scale that is a multiple of d, and store s and the choice."""
    for j in range(counts.size):
        s[j] = 0
        fit = counts[j] == 0
        for k in range(counts[j]):
            factor = np.rint(scales[j, k, VALUE] / d)
            if factor == 0 or abs(factor) > 128 or s_codes[np.int64(factor) + 128] < 0:
                continue
            if scales[j, k, LEAST] <= d * factor <= scales[j, k, GREATEST]:
                s[j], choice[j] = np.int64(factor), k
                fit = True
                break
        if not fit:
            return False
    return True


@helper
def _find_d(scales: Any, counts: Any, all_s: Any, s_codes: Any, choice: Any, s: Any) -> Any:
    """Return an f16 d of which every sub-block has a multiple, and store s and the choice; NaN if there is none."""
    best = _largest(scales, counts)
    if best < 0:
        return np.nan
    for k in range(counts[best]):
        for i in range(all_s.size):
            d = scales[best, k, VALUE] / all_s[i]
            least, greatest = _divide(scales[best, k, LEAST], scales[best, k, GREATEST], all_s[i])
            first = half_between(d, least, greatest)
            for n in range(N_HALVES if first == first else 0):
                half = nth_half(first, n, least, greatest)
                if half == half and half != 0 and _are_multiples(half, scales, counts, s_codes, choice, s):
                    return half
    return np.nan


@helper
def _find_super(
    x: Any, begin: Any, block: Any, span: Any, bits: Any, tries: Any, codes: Any, even: Any, all_s: Any, s_codes: Any,
    low: Any, high: Any, candidates: Any, scales: Any, counts: Any, choice: Any, factors: Any, q: Any, s: Any, b: Any,
) -> Any:  # fmt: skip
    """Return whether a super-block is on the lattice, and d; store its codes as those of the b-th block."""
    subs = block // span
    for j in range(subs):
        counts[j] = _list_scales(x, begin + j * span, span, bits, tries, codes, even, low, high, candidates, scales[j])
        if counts[j] < 0:
            return False, 0.0
    d = _find_d(scales, counts, all_s, s_codes, choice, factors)
    if d != d:
        return False, 0.0
    for j in range(subs):
        s[b * subs + j] = s_codes[factors[j] + 128]
        step = scales[j, choice[j], VALUE] if counts[j] else 0.0
        store_codes(x, begin + j * span, span, step, codes, even, q, b * block + j * span)
    return True, d


@kernel
def find_super_scales(
    x: Any, indices: Any, block: int, span: int, precisions: Any, tries: Any, codes: Any, even: Any, all_s: Any,
    s_codes: Any, q: Any, s: Any, d: Any, on_grid: Any,
) -> None:  # fmt: skip
    """Store which of some super-blocks of x, float32 [n], are on the lattice, and the q, s and d of these.

    indices: int64, the numbers of the super-blocks; results are one after another.
    """
    subs = block // span
    low, high = np.empty(span, np.float32), np.empty(span, np.float32)
    scales, candidates = np.empty((subs, _MOST, 3)), np.empty(tries.size, np.int64)
    counts, choice, factors = np.empty(subs, np.int64), np.zeros(subs, np.int64), np.empty(subs, np.int64)
    n_on_grid = 0
    for b in range(indices.size):
        begin = indices[b] * block
        on_grid[b] = False
        for p in range(precisions.size):
            bits = precisions[p]
            if p > 0 and not are_representable(x, begin, block, bits):
                break
            on_grid[b], d[n_on_grid] = _find_super(
                x, begin, block, span, bits, tries, codes, even, all_s, s_codes, low, high, candidates, scales, counts,
                choice, factors, q, s, n_on_grid,
            )  # fmt: skip
            if on_grid[b]:
                n_on_grid += 1
                break


# ---------------------------------------------------------------- with minimums


@helper
def _list_steps(
    x: Any, begin: Any, span: Any, top: Any, low: Any, high: Any, offset: Any, candidates: Any, scales: Any
) -> Any:
    """Store the steps that the values of a sub-block may be apart; return their number, 0 if all values are equal and
    not positive, and -1 if there is none; and the lowest value.
    """
    lowest, highest, widest = extent(x, begin, span, low, high, offset)
    if lowest == highest:
        return (0 if lowest <= 0 else -1), lowest
    count = 0
    n_steps = list_steps(x, begin, span, lowest, highest - lowest, widest, top, candidates)
    for c in range(n_steps):
        d = (highest - lowest) / candidates[c]
        if count < _MOST and steps_fit(x, begin, span, d, lowest, widest):
            least, greatest = step_interval(x, begin, span, d, lowest, low, high, offset)
            if least <= greatest and greatest > 0:
                scales[count, VALUE], scales[count, LEAST], scales[count, GREATEST] = d, least, greatest
                count += 1
    return (count if count else -1), lowest


@helper
def _list_minimums(
    x: Any, begin: Any, span: Any, top: Any, step: Any, d: Any, lowest: Any, low: Any, high: Any, offset: Any,
    minimums: Any,
) -> Any:  # fmt: skip
    """Store the minimums of a sub-block by the level of its lowest value; return the number of levels."""
    least, greatest = minimum_interval(x, begin, span, step, d, lowest, low, high, offset)
    bases = 1
    if step > 0:
        highest = lowest
        for i in range(span):
            highest = max(highest, np.float64(x[begin + i]))
        bases = top - np.int64(np.rint((highest - lowest) / step)) + 1
    for base in range(bases):  # a minimum is subtracted
        minimums[base, VALUE] = d * base - lowest
        minimums[base, LEAST], minimums[base, GREATEST] = d * base - greatest, d * base - least
    return bases


@helper
def _share_minimum(
    dmin: Any, least: Any, greatest: Any, minimums: Any, counts: Any, max_m: Any, m: Any, base: Any
) -> Any:
    """Return the interval of dmin of which every sub-block's minimum is a multiple; empty if there is none."""
    for j in range(counts.size):
        fit = False
        for k in range(counts[j]):
            a, b = minimums[j, k, LEAST], minimums[j, k, GREATEST]
            factor = np.rint(minimums[j, k, VALUE] / dmin) if dmin > 0 else 0.0
            if a > b or factor < 0 or factor > max_m:
                continue
            if factor == 0:
                fit = a <= 0 <= b
            else:
                fit = max(a / factor, least) <= min(b / factor, greatest)
                if fit:
                    least, greatest = max(a / factor, least), min(b / factor, greatest)
            if fit:
                m[j], base[j] = np.uint8(factor), k
                break
        if not fit:
            return np.inf, -np.inf
    return least, greatest


@helper
def _find_dmin(minimums: Any, counts: Any, max_m: Any, m: Any, base: Any) -> Any:
    """Return an f16 dmin of which every sub-block's minimum is a multiple, and store m and bases; NaN if none."""
    least, greatest = _share_minimum(0.0, -np.inf, np.inf, minimums, counts, max_m, m, base)
    if least <= greatest:
        return 0.0
    best = 0
    for j in range(counts.size):
        best = j if minimums[j, 0, VALUE] > minimums[best, 0, VALUE] else best
    for k in range(counts[best]):
        a, b = minimums[best, k, LEAST], minimums[best, k, GREATEST]
        if a > b or minimums[best, k, VALUE] <= 0:
            continue
        for factor in range(max_m, 0, -1):
            dmin = minimums[best, k, VALUE] / factor
            least, greatest = _share_minimum(dmin, a / factor, b / factor, minimums, counts, max_m, m, base)
            if least <= greatest:
                half = half_between(dmin, least, greatest)
                if half == half:
                    return half
    return np.nan


@helper
def _find_with_d(
    x: Any, begin: Any, span: Any, top: Any, d: Any, max_m: Any, low: Any, high: Any, scales: Any, counts: Any,
    choice: Any, factors: Any, lowest: Any, minimums: Any, bases: Any, base: Any, q: Any, m: Any, first: Any,
) -> Any:  # fmt: skip
    """Return the dmin of a super-block with scale d, NaN if there is none; store its levels from ``first`` on."""
    for j in range(counts.size):
        step = scales[j, choice[j], VALUE] if counts[j] else 0.0
        bases[j] = _list_minimums(
            x, begin + j * span, span, top, step, d * factors[j], lowest[j], low, high, j * span, minimums[j]
        )
    dmin = _find_dmin(minimums, bases, max_m, m, base)
    if dmin == dmin:
        for j in range(counts.size):
            step = scales[j, choice[j], VALUE] if counts[j] else 0.0
            store_steps(x, begin + j * span, span, step, lowest[j], base[j], q, first + j * span)
    return dmin


@helper
def _find_super_with_minimums(
    x: Any, begin: Any, block: Any, span: Any, bits: Any, top: Any, all_s: Any, s_codes: Any, max_m: Any, low: Any,
    high: Any, candidates: Any, scales: Any, counts: Any, choice: Any, factors: Any, lowest: Any, minimums: Any,
    bases: Any, base: Any, q: Any, s: Any, m: Any, first: Any,
) -> Any:  # fmt: skip
    """Return whether a super-block is on the lattice, d and dmin; store its codes, levels from ``first`` on."""
    for j in range(counts.size):
        store_bounds(x, begin + j * span, span, bits, low, high, j * span)
        counts[j], lowest[j] = _list_steps(x, begin + j * span, span, top, low, high, j * span, candidates, scales[j])
        if counts[j] < 0:
            return False, 0.0, 0.0
    best = _largest(scales, counts)
    for k in range(counts[best] if best >= 0 else 0):
        for i in range(all_s.size):
            d = scales[best, k, VALUE] / all_s[i]
            least, greatest = _divide(scales[best, k, LEAST], scales[best, k, GREATEST], all_s[i])
            least, greatest = _share_scale(d, least, greatest, scales, counts, s_codes, choice, factors)
            half = half_between(d, least, greatest) if least <= greatest else np.nan
            for n in range(N_HALVES if half == half else 0):
                scale = nth_half(half, n, least, greatest)
                if scale != scale or scale <= 0:
                    continue
                dmin = _find_with_d(
                    x, begin, span, top, scale, max_m, low, high, scales, counts, choice, factors, lowest, minimums,
                    bases, base, q, m, first,
                )  # fmt: skip
                if dmin == dmin:
                    s[:] = factors.astype(np.uint8)
                    return True, scale, dmin
    return False, 0.0, 0.0


@kernel
def find_super_scales_and_minimums(
    x: Any, indices: Any, block: int, span: int, precisions: Any, top: int, all_s: Any, s_codes: Any, max_m: int,
    q: Any, s: Any, m: Any, d: Any, dmin: Any, on_grid: Any,
) -> None:  # fmt: skip
    """Store which of some super-blocks of x, float32 [n], are on the lattice, and the q, s, m, d and dmin of these.

    indices: int64, the numbers of the super-blocks; results are one after another.
    """
    subs = block // span
    low, high = np.empty(block, np.float32), np.empty(block, np.float32)
    scales, lowest, candidates = np.empty((subs, _MOST, 3)), np.empty(subs), np.empty(top, np.int64)
    minimums = np.empty((subs, top + 1, 3))
    counts, choice, factors = np.empty(subs, np.int64), np.zeros(subs, np.int64), np.empty(subs, np.int64)
    bases, base = np.empty(subs, np.int64), np.empty(subs, np.int64)
    n_on_grid = 0
    for b in range(indices.size):
        begin = indices[b] * block
        on_grid[b] = False
        for p in range(precisions.size):
            bits = precisions[p]
            if p > 0 and not are_representable(x, begin, block, bits):
                break
            of_block = slice(n_on_grid * subs, (n_on_grid + 1) * subs)
            on_grid[b], d[n_on_grid], dmin[n_on_grid] = _find_super_with_minimums(
                x, begin, block, span, bits, top, all_s, s_codes, max_m, low, high, candidates, scales, counts, choice,
                factors, lowest, minimums, bases, base, q, s[of_block], m[of_block], n_on_grid * block,
            )  # fmt: skip
            if on_grid[b]:
                n_on_grid += 1
                break

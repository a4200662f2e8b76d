"""Blocks on the lattice of a type with a scale per block, and perhaps a minimum, or with scales that are codes.

The value of largest magnitude is at one of few levels, and each makes a scale, which all other values confirm or deny.
With a minimum, the difference of the extreme values is some number of steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import helper, inline, kernel
from quantkit.kernels.cpu.core.simd import any_lane, f64x8, hmax, hmin, round_even, splat, vabs, vmax, vmin
from quantkit.kernels.cpu.core.simd import select as choose
from quantkit.kernels.cpu.encode.lattice import (
    FARTHEST,
    N_HALVES,
    are_representable,
    decodes,
    fits,
    guess_half,
    half_between,
    list_levels,
    list_steps,
    n_scales,
    nth_half,
    nth_scale,
    round_half,
    scale_interval,
    store_bounds,
    store_codes,
    survey,
    values_at,
)


@inline
def _nearest_factor(factors: Any, d: Any, least: Any, greatest: Any) -> Any:
    """Return the code of the factor in least .. greatest that is nearest to d, or -1."""
    best = -1
    for code in range(factors.size):
        is_nearer = best < 0 or abs(factors[code] - d) < abs(factors[best] - d)
        if factors[code] > 0 and least <= factors[code] <= greatest and is_nearer:
            best = code
    return best


@inline
def _scale_of(
    x: Any, begin: Any, n: Any, d: Any, bits: Any, codes: Any, even: Any, factors: Any, low: Any, high: Any
) -> Any:
    """Return a scale near d that makes all values, NaN if there is none, and its code, if it has one."""
    if not factors.size:
        half = guess_half(x, begin, n, d)
        if half != 0 and decodes(x, begin, n, d, half, bits, codes, even):
            return np.float64(half), 0
    if not fits(x, begin, n, d, bits, codes, even):
        return np.nan, 0
    store_bounds(x, begin, n, bits, low, high, 0)
    least, greatest = scale_interval(x, begin, n, d, low, high, 0)
    if least > greatest:
        return np.nan, 0
    if not factors.size:
        return half_between(d, least, greatest), 0
    code = _nearest_factor(factors, d, least, greatest)
    return (factors[code] if code >= 0 else np.nan), code


@helper
def _find_scale(
    x: Any, begin: Any, n: Any, bits: Any, tries: Any, follows_sign: Any, codes: Any, even: Any, factors: Any, low: Any,
    high: Any, candidates: Any, q: Any, first: Any,
) -> Any:  # fmt: skip
    """Return whether values are on the lattice, with d and the code of a factor; store their levels' codes."""
    largest, least, sign = survey(x, begin, n)
    if largest == 0:
        store_codes(x, begin, n, 0.0, codes, even, q, first)
        return codes[128] >= 0, 0.0, 0
    count = list_levels(x, begin, n, largest, least, bits, tries, candidates)
    if follows_sign:
        sign = 0.0
    for other_sign in range(1 if sign == 0 else 2):
        for k in range(count):
            level = np.float64(tries[candidates[k]])
            if follows_sign and largest < 0:
                level = -level
            if sign != 0 and (largest * level * sign > 0) == (other_sign > 0):
                continue
            for i in range(n_scales(level, bits)):
                d = nth_scale(largest / level, i)
                scale, code = _scale_of(x, begin, n, d, bits, codes, even, factors, low, high)
                if scale == scale and scale != 0:
                    store_codes(x, begin, n, d, codes, even, q, first)
                    return True, scale, code
    return False, 0.0, 0


@kernel
def find_scales(
    x: Any, indices: Any, block: int, span: int, precisions: Any, tries: Any, follows_sign: bool, codes: Any, even: Any,
    factors: Any, q: Any, s: Any, d: Any, on_grid: Any,
) -> None:  # fmt: skip
    """Store which of some blocks of x, float32 [n], are on the lattice, and the q, s and d of these, one after another.

    indices: int64, the numbers of the blocks.
    """
    low, high = np.empty(span, np.float32), np.empty(span, np.float32)
    candidates = np.empty(tries.size, np.int64)
    subs = block // span
    n_on_grid = 0
    for b in range(indices.size):
        begin = indices[b] * block
        on_grid[b] = False
        for p in range(precisions.size):
            bits = precisions[p]
            if p > 0 and not are_representable(x, begin, block, bits):
                break
            fit = True
            for j in range(subs):
                fit, scale, code = _find_scale(
                    x, begin + j * span, span, bits, tries, follows_sign, codes, even, factors, low, high, candidates,
                    q, n_on_grid * block + j * span,
                )  # fmt: skip
                if not fit:
                    break
                s[n_on_grid * subs + j] = code
                d[n_on_grid] = scale
            on_grid[b] = fit
            if fit:
                n_on_grid += 1
                break


# ---------------------------------------------------------------- with a minimum


@inline
def extent(x: Any, begin: Any, n: Any, low: Any, high: Any, offset: Any) -> Any:
    """Return the lowest and the highest value, and the largest half unit of a value."""
    least, most, widest = splat(f64x8, np.inf), splat(f64x8, -np.inf), splat(f64x8, 0.0)
    for i in range(0, n, 8):
        value = values_at(x, begin + i)
        least, most = vmin(value, least), vmax(value, most)
        widest = vmax(values_at(high, offset + i) - values_at(low, offset + i), widest)
    return hmin(least), hmax(most), hmax(widest) / 2


@inline
def minimum_interval(
    x: Any, begin: Any, n: Any, step: Any, d: Any, lowest: Any, low: Any, high: Any, offset: Any
) -> Any:
    """Return the bounds of m with which values d * level + m round to x, if the lowest value has level 0.

    step: what the values are apart, about d; 0 if they are equal.
    """
    least, greatest = splat(f64x8, -np.inf), splat(f64x8, np.inf)
    inverse = 1 / step if step > 0 else 0.0
    for i in range(0, n, 8):
        value = round_even((values_at(x, begin + i) - lowest) * inverse) * d
        least = vmax(values_at(low, offset + i) - value, least)
        greatest = vmin(values_at(high, offset + i) - value, greatest)
    return hmax(least), hmin(greatest)


@inline
def store_steps(x: Any, begin: Any, n: Any, step: Any, lowest: Any, base: Any, q: Any, first: Any) -> None:
    """Store the levels of values by their steps, the lowest at ``base``, from ``first`` on; all there if step is 0."""
    inverse = 1 / step if step > 0 else 0.0
    for i in range(n):
        q[first + i] = np.uint8(np.rint((np.float64(x[begin + i]) - lowest) * inverse) + base)


@helper
def _find_scale_and_minimum(
    x: Any, begin: Any, n: Any, bits: Any, top: Any, low: Any, high: Any, candidates: Any, q: Any, first: Any
) -> Any:
    """Return whether values are d * q + m with q of 0 .. top, d and m; store q."""
    store_bounds(x, begin, n, bits, low, high, 0)
    lowest, highest, widest = extent(x, begin, n, low, high, 0)
    if lowest == highest:
        store_steps(x, begin, n, 0.0, lowest, 0, q, first)
        m = round_half(lowest)
        return m == lowest, 0.0, m
    count = list_steps(x, begin, n, lowest, highest - lowest, widest, top, candidates)
    for c in range(count):
        steps = candidates[c]
        d = (highest - lowest) / steps
        if not steps_fit(x, begin, n, d, lowest, widest):
            continue
        least, greatest = step_interval(x, begin, n, d, lowest, low, high, 0)
        half = half_between(d, least, greatest) if least <= greatest else np.nan
        if half != half:
            continue
        for k in range(N_HALVES):
            scale = nth_half(half, k, least, greatest)
            if scale != scale or scale <= 0:
                continue
            a, b = minimum_interval(x, begin, n, d, scale, lowest, low, high, 0)
            for base in range(top - steps + 1 if a <= b else 0):
                m = half_between(lowest - scale * base, a - scale * base, b - scale * base)
                if m == m:
                    store_steps(x, begin, n, d, lowest, base, q, first)
                    return True, scale, m
    return False, 0.0, 0.0


@inline
def steps_fit(x: Any, begin: Any, n: Any, d: Any, lowest: Any, widest: Any) -> Any:
    """Return whether all values may be steps of about d above the lowest; a necessary condition.

    widest: the largest half unit of a value.
    """
    inverse = 1 / d
    farthest = min(FARTHEST, 4 * widest * inverse)
    for i in range(begin, begin + n, 8):
        quotient = (values_at(x, i) - lowest) * inverse
        if any_lane(vabs(quotient - round_even(quotient)) > farthest):
            return False
    return True


@inline
def step_interval(x: Any, begin: Any, n: Any, d: Any, lowest: Any, low: Any, high: Any, offset: Any) -> Any:
    """Return bounds of a step with which all values are as many steps above the lowest as by d."""
    bottom = 0
    while np.float64(x[begin + bottom]) != lowest:
        bottom += 1
    below, above, inverse = np.float64(low[offset + bottom]), np.float64(high[offset + bottom]), 1 / d
    least, greatest = splat(f64x8, 0.0), splat(f64x8, np.inf)
    for i in range(0, n, 8):
        steps = round_even((values_at(x, begin + i) - lowest) * inverse)
        a, b = (values_at(low, offset + i) - above) / steps, (values_at(high, offset + i) - below) / steps
        least = vmax(choose(steps > 0.0, a, 0.0), least)
        greatest = vmin(choose(steps > 0.0, b, np.inf), greatest)
    return hmax(least), hmin(greatest)


@kernel
def find_scales_and_minimums(
    x: Any, indices: Any, block: int, precisions: Any, top: int, q: Any, d: Any, m: Any, on_grid: Any
) -> None:
    """Store which of some blocks of x, float32 [n], are on the lattice, and the q, d and m of these, one after another.

    indices: int64, the numbers of the blocks.
    """
    low, high = np.empty(block, np.float32), np.empty(block, np.float32)
    candidates = np.empty(top, np.int64)
    n_on_grid = 0
    for b in range(indices.size):
        begin = indices[b] * block
        on_grid[b] = False
        for p in range(precisions.size):
            bits = precisions[p]
            if p > 0 and not are_representable(x, begin, block, bits):
                break
            on_grid[b], d[n_on_grid], m[n_on_grid] = _find_scale_and_minimum(
                x, begin, block, bits, top, low, high, candidates, q, n_on_grid * block
            )
            if on_grid[b]:
                n_on_grid += 1
                break

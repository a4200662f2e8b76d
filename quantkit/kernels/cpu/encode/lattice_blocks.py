"""Blocks on the lattice of a type with a scale per block, and perhaps a minimum, or with scales that are codes.

The value of largest magnitude is at one of few levels, and each makes a scale, which all other values confirm or deny.
With a minimum, the difference of the extreme values is some number of steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import helper, kernel
from quantkit.kernels.cpu.encode.lattice import (
    FARTHEST,
    N_HALVES,
    are_representable,
    extreme,
    fits,
    half_between,
    n_scales,
    nth_half,
    nth_scale,
    round_half,
    scale_interval,
    sign_of_zeros,
    store_bounds,
    store_codes,
)


@helper
def _nearest_factor(factors: Any, d: Any, least: Any, greatest: Any) -> Any:
    """Return the code of the factor in least .. greatest that is nearest to d, or -1."""
    best = -1
    for code in range(factors.size):
        is_nearer = best < 0 or abs(factors[code] - d) < abs(factors[best] - d)
        if factors[code] > 0 and least <= factors[code] <= greatest and is_nearer:
            best = code
    return best


@helper
def _scale_of(x: Any, begin: Any, n: Any, d: Any, bits: Any, codes: Any, factors: Any, low: Any, high: Any) -> Any:
    """Return a scale near d that makes all values, NaN if there is none, and its code, if it has one."""
    if not fits(x, begin, n, d, bits, codes):
        return np.nan, 0
    store_bounds(x, begin, n, bits, low, high)
    least, greatest = scale_interval(x, begin, n, d, low, high, 0)
    if least > greatest:
        return np.nan, 0
    if not factors.size:
        return half_between(d, least, greatest), 0
    code = _nearest_factor(factors, d, least, greatest)
    return (factors[code] if code >= 0 else np.nan), code


@helper
def _find_scale(
    x: Any, begin: Any, n: Any, bits: Any, tries: Any, follows_sign: Any, codes: Any, factors: Any, low: Any, high: Any,
    q: Any,
) -> Any:  # fmt: skip
    """Return whether values are on the lattice, with d and the code of a factor; store their levels' codes."""
    largest = extreme(x, begin, n)
    if largest == 0:
        store_codes(x, begin, n, 0.0, codes, q)
        return codes[128] >= 0, 0.0, 0
    sign = 0.0 if follows_sign else sign_of_zeros(x, begin, n)
    for other_sign in range(1 if sign == 0 else 2):
        for k in range(tries.size):
            level = -tries[k] if follows_sign and largest < 0 else tries[k]
            if sign != 0 and (largest * level * sign > 0) == (other_sign > 0):
                continue
            for i in range(n_scales(k, level, bits)):
                d = nth_scale(largest / level, i)
                scale, code = _scale_of(x, begin, n, d, bits, codes, factors, low, high)
                if scale == scale and scale != 0:
                    store_codes(x, begin, n, d, codes, q)
                    return True, scale, code
    return False, 0.0, 0


@kernel
def find_scales(
    x: Any, block: int, span: int, precisions: Any, tries: Any, follows_sign: bool, codes: Any, factors: Any, q: Any,
    s: Any, d: Any, on_grid: Any,
) -> None:  # fmt: skip
    """Store which blocks of x, float32 [n], are on the lattice, with q [n], s [n / span] and d [n / block]."""
    low, high = np.empty(span, np.float32), np.empty(span, np.float32)
    subs = block // span
    for b in range(on_grid.size):
        on_grid[b] = False
        for p in range(precisions.size):
            bits = precisions[p]
            if p > 0 and not are_representable(x, b * block, block, bits):
                break
            fit = True
            for j in range(b * subs, (b + 1) * subs):
                fit, scale, code = _find_scale(
                    x, j * span, span, bits, tries, follows_sign, codes, factors, low, high, q
                )
                if not fit:
                    break
                s[j] = code
                d[b] = scale
            on_grid[b] = fit
            if fit:
                break


@helper
def _find_minimum(x: Any, begin: Any, n: Any, d: Any, base: Any, lowest: Any, low: Any, high: Any) -> Any:
    """Return the f16 minimum with which the lowest value has level ``base``; NaN if there is none."""
    least, greatest = -np.inf, np.inf
    for i in range(n):
        value = d * (np.rint((np.float64(x[begin + i]) - lowest) / d) + base)
        least, greatest = max(least, low[i] - value), min(greatest, high[i] - value)
    return half_between(lowest - d * base, least, greatest) if least <= greatest else np.nan


@helper
def _find_scale_and_minimum(x: Any, begin: Any, n: Any, bits: Any, top: Any, low: Any, high: Any, q: Any) -> Any:
    """Return whether values are d * q + m with q of 0 .. top, d and m; store q."""
    lowest, highest = np.float64(x[begin]), np.float64(x[begin])
    for i in range(begin + 1, begin + n):
        lowest, highest = min(lowest, np.float64(x[i])), max(highest, np.float64(x[i]))
    q[begin : begin + n] = 0
    if lowest == highest:
        m = round_half(lowest)
        return m == lowest, 0.0, m
    store_bounds(x, begin, n, bits, low, high)
    widest = 0.0
    for i in range(n):
        widest = max(widest, (high[i] - low[i]) / 2)
    for steps in range(top, 0, -1):
        d = (highest - lowest) / steps
        if not steps_fit(x, begin, n, d, lowest, widest):
            continue
        least, greatest = step_interval(x, begin, n, d, lowest, low, high, 0)
        first = half_between(d, least, greatest) if least <= greatest else np.nan
        if first != first:
            continue
        for k in range(N_HALVES):
            scale = nth_half(first, k, least, greatest)
            if scale != scale or scale <= 0:
                continue
            for base in range(top - steps + 1):
                m = _find_minimum(x, begin, n, scale, base, lowest, low, high)
                if m == m:
                    for i in range(begin, begin + n):
                        q[i] = np.uint8(np.rint((np.float64(x[i]) - lowest) / d) + base)
                    return True, scale, m
    return False, 0.0, 0.0


@helper
def steps_fit(x: Any, begin: Any, n: Any, d: Any, lowest: Any, widest: Any) -> Any:
    """Return whether all values may be steps of about d above the lowest; a necessary condition that fails early.

    widest: the largest half unit of a value.
    """
    inverse = 1 / d
    farthest = min(FARTHEST, 4 * widest * inverse)
    for i in range(begin, begin + n):
        quotient = (np.float64(x[i]) - lowest) * inverse
        if abs(quotient - np.rint(quotient)) > farthest:
            return False
    return True


@helper
def step_interval(x: Any, begin: Any, n: Any, d: Any, lowest: Any, low: Any, high: Any, offset: Any) -> Any:
    """Return bounds of a step with which all values are as many steps above the lowest as by d."""
    least, greatest = 0.0, np.inf
    bottom = 0
    for i in range(n):
        bottom = i if np.float64(x[begin + i]) == lowest else bottom
    for i in range(n):
        steps = np.rint((np.float64(x[begin + i]) - lowest) / d)
        if steps > 0:
            least = max(least, (low[offset + i] - high[offset + bottom]) / steps)
            greatest = min(greatest, (high[offset + i] - low[offset + bottom]) / steps)
    return least, greatest


@kernel
def find_scales_and_minimums(
    x: Any, block: int, precisions: Any, top: int, q: Any, d: Any, m: Any, on_grid: Any
) -> None:
    """Store which blocks of x, float32 [n], are on the lattice, with q [n], d and m [n / block]."""
    low, high = np.empty(block, np.float32), np.empty(block, np.float32)
    for b in range(on_grid.size):
        on_grid[b] = False
        for p in range(precisions.size):
            bits = precisions[p]
            if p > 0 and not are_representable(x, b * block, block, bits):
                break
            on_grid[b], d[b], m[b] = _find_scale_and_minimum(x, b * block, block, bits, top, low, high, q)
            if on_grid[b]:
                break

"""Numbers on a lattice: the functions that its searches share.

A source's number stands for the interval of reals that round to it. A scale d is right if d * level lies in the
interval of every value, so the intervals divided by levels intersect, and an f16 in the intersection is a scale that
decodes, rounded to the source's type, to the source.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.lattices import ZERO

#: Exponents of the smallest steps of BF16, F16 and F32.
_LEAST_BF16, _LEAST_F16, _LEAST_F32 = -133, -24, -149
#: The largest f16.
MAX_F16 = 65504.0
#: The least normal F16, and half a unit of the subnormal ones.
LEAST_NORMAL, HALF_SUBNORMAL = np.float32(2.0**-14), np.float32(2.0**-25)
#: F16 scales that are tried on each side of the first.
_STEPS = 12
_ROUNDING = 2.0**-50
#: The share of a level by which a quotient of two numbers of a type may miss it.
_SHARE_BF16, _SHARE_F16, _SHARE_F32 = 1.001 * 2.0**-7, 1.001 * 2.0**-10, 1.001 * 2.0**-23
#: The farthest from an integer that a quotient may be.
FARTHEST = 0.5


@inline
def least_exponent(bits: Any) -> Any:
    if bits == 8:
        return _LEAST_BF16
    return _LEAST_F16 if bits == 11 else _LEAST_F32


@helper
def round_half(value: Any) -> Any:
    """Return the nearest f16 as float64; infinity beyond their range."""
    fraction, exponent = math.frexp(abs(value))
    unit = math.ldexp(1.0, max(exponent - 11, _LEAST_F16))
    nearest = np.rint(abs(value) / unit) * unit
    return math.copysign(nearest if nearest <= MAX_F16 else np.inf, value)


@inline
def step_half(value: Any, steps: Any) -> Any:
    """Return the f16 that is some steps away, away from zero if ``steps`` is positive."""
    fraction, exponent = math.frexp(abs(value))
    return value + steps * math.copysign(math.ldexp(1.0, max(exponent - 11, _LEAST_F16)), value)


@helper
def nth_half(first: Any, n: Any, low: Any, high: Any) -> Any:
    """Return the n-th f16 around ``first`` in low .. high, NaN if that one is outside; n counts to ``2 * _STEPS``."""
    steps = (n + 1) // 2
    value = step_half(first, -steps if n & 1 else steps)
    return value if low <= value <= high and abs(value) <= MAX_F16 else np.nan


N_HALVES = 2 * _STEPS


@helper
def half_between(first: Any, low: Any, high: Any) -> Any:
    """Return an f16 in low .. high: the nearest to ``first``, or to the middle; NaN if there is none."""
    value = round_half(first)
    if not low <= value <= high:
        value = round_half((low + high) / 2)
    return value if low <= value <= high and abs(value) <= MAX_F16 else np.nan


@helper
def are_representable(x: Any, begin: Any, n: Any, bits: Any) -> Any:
    """Return whether the n values from ``begin`` on have mantissas of so many bits."""
    least = least_exponent(bits)
    for i in range(begin, begin + n):
        fraction, exponent = math.frexp(np.float64(x[i]))
        scaled = math.ldexp(fraction, min(bits, exponent - least))
        if scaled != math.floor(scaled) or (bits == 11 and abs(x[i]) > MAX_F16):
            return False
    return True


@inline
def half_unit(magnitude: Any, bits: Any) -> Any:
    """Return half a unit of a number, as a difference of the bits of floats; ties belong to even mantissas.

    A float has too few bits for half a unit of itself: a whole one stands for it.
    """
    if bits == 24:
        return np.int32(1) if magnitude else np.int32(0)
    if magnitude == 0:
        return np.int32(0)
    dropped = 24 - bits
    return (np.int32(1) << (dropped - 1)) - ((magnitude >> dropped) & np.int32(1))


@helper
def store_bounds(x: Any, begin: Any, n: Any, bits: Any, low: Any, high: Any) -> None:
    """Store the bounds of the reals that round to each of the values in low and high, float32 [n]."""
    x_bits, low_bits, high_bits = x.view(np.int32), low.view(np.int32), high.view(np.int32)
    for i in range(n):
        magnitude = x_bits[begin + i] & np.int32(0x7FFFFFFF)
        sign = x_bits[begin + i] & np.int32(-0x80000000)
        unit = half_unit(magnitude, bits)
        down, up = (magnitude - unit) | sign, (magnitude + unit) | sign
        low_bits[i] = up if sign else down
        high_bits[i] = down if sign else up
    if bits == 11:
        _widen_subnormals(x, begin, n, low, high)


@inline
def _widen_subnormals(x: Any, begin: Any, n: Any, low: Any, high: Any) -> None:
    """Set the bounds of subnormal F16, which have the same unit."""
    for i in range(n):
        if 0 < abs(x[begin + i]) < LEAST_NORMAL:
            low[i], high[i] = x[begin + i] - HALF_SUBNORMAL, x[begin + i] + HALF_SUBNORMAL


@helper
def sign_of_zeros(x: Any, begin: Any, n: Any) -> Any:
    """Return the sign of the scale that left its sign in the first zero: 1 or -1; 0 without zeros."""
    for i in range(begin, begin + n):
        if x[i] == 0:
            return math.copysign(1.0, x[i])
    return 0.0


@helper
def extreme(x: Any, begin: Any, n: Any) -> Any:
    """Return the first value of largest magnitude."""
    largest = np.float64(0)
    for i in range(begin, begin + n):
        if abs(np.float64(x[i])) > abs(largest):
            largest = np.float64(x[i])
    return largest


@helper
def fits(x: Any, begin: Any, n: Any, d: Any, bits: Any, codes: Any) -> Any:
    """Return whether all values may be levels times about d; a necessary condition that fails early."""
    inverse, share = 1 / d, _SHARE_F32
    excess = 0.0
    if bits == 11:
        share, excess = _SHARE_F16, np.float64(HALF_SUBNORMAL) * abs(inverse)
    elif bits == 8:
        share = _SHARE_BF16
    for i in range(begin, begin + n):
        quotient = np.float64(x[i]) * inverse
        level = np.rint(quotient)
        if abs(quotient - level) > min(abs(level) * share + excess, FARTHEST) or abs(level) > ZERO:
            return False
        if codes[np.int64(level) + ZERO] < 0:
            return False
    return True


@inline
def n_scales(k: Any, level: Any, bits: Any) -> Any:
    """Return the number of scales that are tried for the k-th level: a value of BF16 says too little about high ones.

    Of these only the first are tried, which encoders give to the largest value: the others would cost too much.
    """
    if bits == 8 and abs(level) >= 16:
        return 9 if k < 4 else 0
    return 1


@inline
def nth_scale(d: Any, n: Any) -> Any:
    """Return the n-th scale around d, within a half unit of BF16."""
    steps = (n + 1) // 2
    return d * (1 + (-steps if n & 1 else steps) * 2.0**-10)


@helper
def scale_interval(x: Any, begin: Any, n: Any, d: Any, low: Any, high: Any, offset: Any) -> Any:
    """Return the least and the greatest scale with which all values have the levels that they have by d."""
    least, greatest, inverse = -np.inf, np.inf, 1 / d
    for i in range(n):
        level = np.rint(np.float64(x[begin + i]) * inverse)
        if level == 0:
            if low[offset + i] > 0 or high[offset + i] < 0:
                return np.inf, -np.inf
            continue
        per_level = 1 / level
        a, b = low[offset + i] * per_level, high[offset + i] * per_level
        least, greatest = max(least, min(a, b)), min(greatest, max(a, b))
        if least > greatest * (1 + _ROUNDING) and least > greatest * (1 - _ROUNDING):
            break
    # bounds may be scales themselves, which rounding must not exclude
    return least - abs(least) * _ROUNDING, greatest + abs(greatest) * _ROUNDING


@helper
def store_codes(x: Any, begin: Any, n: Any, d: Any, codes: Any, q: Any) -> None:
    """Store the codes of the levels that values have by d; by d = 0, that of level 0."""
    inverse = 1 / d if d != 0 else 0.0
    for i in range(begin, begin + n):
        q[i] = codes[np.int64(np.rint(np.float64(x[i]) * inverse)) + ZERO]


@helper
def pack_field(out: Any, begin: Any, field: Any, value: Any, runs: Any, fields: Any) -> None:
    """Store the bits of a field in zeroed bytes, from ``begin`` on."""
    for run in range(fields[field], fields[field + 1]):
        bits = (value >> runs[run, 2]) & ((1 << runs[run, 3]) - 1)
        out[begin + runs[run, 0]] |= np.uint8(bits << runs[run, 1])

"""Numbers on a lattice: the functions that its searches share.

A source's number stands for the interval of reals that round to it. A scale d is right if d * level lies in the
interval of every value, so the intervals divided by levels intersect, and an f16 in the intersection is a scale that
decodes, rounded to the source's type, to the source.

The levels that the extreme value may have are filtered 16 at a time, one a lane, value by value until few remain: the
smallest value is first, because it rejects most. Those that remain are checked with values in lanes, in f64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.jit import helper, inline
from quantkit.kernels.cpu.core.simd import (
    any_lane,
    cast,
    convert,
    f32_to_f16,
    f32x8,
    f32x16,
    f64x8,
    hmax,
    hmin,
    hsum,
    i32x8,
    i32x16,
    load,
    make_constant,
    mask_bits,
    round_even,
    select,
    splat,
    store,
    trailing_zeros,
    u8x8,
    vabs,
    vmax,
    vmin,
)
from quantkit.kernels.cpu.core.simd import f16_to_f32 as widen_half
from quantkit.kernels.lattices import ZERO

F, I32, U64 = np.float32, np.int32, np.uint64
#: Exponent of the smallest step of F16.
_LEAST_F16 = -24
#: The largest f16.
MAX_F16 = 65504.0
#: The least normal F16, and half a unit of the subnormal ones.
LEAST_NORMAL, HALF_SUBNORMAL = np.float32(2.0**-14), np.float32(2.0**-25)
#: F16 scales that are tried on each side of the first.
_STEPS = 12
_ROUNDING = 2.0**-50
#: The share of a level by which a quotient of two numbers of a type may miss it.
_SHARE_BF16, _SHARE_F16, _SHARE_F32 = 1.004 * 2.0**-7, 1.001 * 2.0**-10, 1.001 * 2.0**-23
#: The farthest from an integer that a quotient may be.
FARTHEST = 0.5
#: A level from which on two values of BF16 are too coarse to tell it by their quotient; what that adds to the share.
_HIGH, _HIGH_SHARE = 65, 2.0**-8
#: What quotients in f32 may be off, in addition: as a share, and per step.
_F32_SHARE, _F32_STEPS = 2.0**-21, 2.0**-17
_lanes = make_constant(f32x16, range(16), "lattice.lanes")


# ---------------------------------------------------------------- f16


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


# ---------------------------------------------------------------- intervals of numbers


@helper
def are_representable(x: Any, begin: Any, n: Any, bits: Any) -> Any:
    """Return whether the n values from ``begin`` on, a multiple of 16, have mantissas of so many bits."""
    for i in range(begin, begin + n, 16):
        value = load(f32x16, x, 4 * i)
        number = load(i32x16, x, 4 * i)
        if bits == 8:
            wrong = (number & I32(0xFFFF)) != I32(0)
        else:
            magnitude, scaled = vabs(value), value * F(2.0**24)
            wrong = (magnitude >= LEAST_NORMAL) & ((number & I32(0x1FFF)) != I32(0)) | (magnitude > F(MAX_F16))
            wrong = wrong | (magnitude < LEAST_NORMAL) & (round_even(scaled) != scaled)
        if any_lane(wrong):
            return False
    return True


@inline
def half_units(magnitudes: Any, bits: Any) -> Any:
    """Return half units of numbers, as differences of the bits of floats; ties belong to even mantissas.

    A float has too few bits for half a unit of itself: a whole one stands for it. magnitudes: int32, vector.
    """
    if bits == 24:
        return select(magnitudes == I32(0), I32(0), splat(i32x16, I32(1)))
    dropped = I32(24 - bits)
    unit = (I32(1) << (dropped - I32(1))) - ((magnitudes >> dropped) & I32(1))
    return select(magnitudes == I32(0), I32(0), unit)


@inline
def store_bounds(x: Any, begin: Any, n: Any, bits: Any, low: Any, high: Any, offset: Any) -> None:
    """Store the bounds of the reals that round to each of the values in low and high, float32, from ``offset`` on."""
    for i in range(0, n, 16):
        value, number = load(f32x16, x, 4 * (begin + i)), load(i32x16, x, 4 * (begin + i))
        magnitude, sign = number & I32(0x7FFFFFFF), number & I32(-0x80000000)
        unit = half_units(magnitude, bits)
        down, up = (magnitude - unit) | sign, (magnitude + unit) | sign
        store(low, 4 * (offset + i), select(sign == I32(0), down, up))
        store(high, 4 * (offset + i), select(sign == I32(0), up, down))
        if bits == 11:  # subnormal F16 have the same unit
            small = (vabs(value) < LEAST_NORMAL) & (value != F(0))
            if any_lane(small):
                a, b = load(f32x16, low, 4 * (offset + i)), load(f32x16, high, 4 * (offset + i))
                store(low, 4 * (offset + i), select(small, value - HALF_SUBNORMAL, a))
                store(high, 4 * (offset + i), select(small, value + HALF_SUBNORMAL, b))


@inline
def survey(x: Any, begin: Any, n: Any) -> Any:
    """Return the first value of largest magnitude, the least magnitude but 0, and the sign of the first zero.

    That is the sign of the scale, which level 0 leaves: 1 or -1; 0 without zeros.
    """
    most, least = splat(f32x16, F(0)), splat(f32x16, F(np.inf))
    zero = -1
    for i in range(begin, begin + n, 16):
        value = load(f32x16, x, 4 * i)
        magnitude = vabs(value)
        most = vmax(magnitude, most)
        is_zero = magnitude == F(0)
        least = vmin(select(is_zero, F(np.inf), magnitude), least)
        if zero < 0 and any_lane(is_zero):
            zero = i + trailing_zeros(mask_bits(is_zero))
    sign = 0.0 if zero < 0 else math.copysign(1.0, np.float64(x[zero]))
    magnitude_of_largest = hmax(most)
    largest = np.float64(0)
    for i in range(begin, begin + n, 16):
        equal = mask_bits(vabs(load(f32x16, x, 4 * i)) == magnitude_of_largest)
        if equal != U64(0):
            largest = np.float64(x[i + trailing_zeros(equal)])
            break
    return largest, hmin(least), sign


# ---------------------------------------------------------------- levels that the extreme value may have


@inline
def _share(bits: Any) -> Any:
    if bits == 24:
        return _SHARE_F32
    return _SHARE_F16 if bits == 11 else _SHARE_BF16


@inline
def _is_few(lanes: Any, limit: Any) -> Any:
    """Return whether at most ``limit``, 1 or 2, bits are set."""
    lanes = lanes & (lanes - U64(1))
    if limit == 2:
        lanes = lanes & (lanes - U64(1))
    return lanes == U64(0)


@inline
def list_levels(x: Any, begin: Any, n: Any, largest: Any, least: Any, bits: Any, tries: Any, candidates: Any) -> Any:
    """Store the indices of the levels that the value ``largest`` may have; return their number.

    A necessary condition, in f32. tries: float32, a multiple of 16, NaN beyond the last. least: a magnitude that
    occurs. candidates: int64, as many as there are levels.
    """
    inverse = F(1 / largest)
    excess = F(0)
    if bits == 11:
        excess = F(np.float64(HALF_SUBNORMAL) * abs(1 / largest))
    count, first_stop = 0, begin + tries.size // 4
    for c in range(0, tries.size, 16):
        level = load(f32x16, tries, 4 * c)
        share = splat(f32x16, F(_share(bits) + _F32_SHARE))
        if bits == 8:
            share = select(vabs(level) >= F(_HIGH), share + F(_HIGH_SHARE), share)
        lanes = mask_bits(_is_multiple(least * inverse, level, share, excess))
        for i in range(begin, begin + n):
            if lanes == U64(0) or (i >= first_stop and _is_few(lanes, 2)):
                break
            lanes &= mask_bits(_is_multiple(x[i] * inverse, level, share, excess))
        while lanes != U64(0):
            candidates[count] = c + trailing_zeros(lanes)
            count += 1
            lanes &= lanes - U64(1)
    return count


@inline
def _is_multiple(ratio: Any, level: Any, share: Any, excess: Any) -> Any:
    """Return, for each level of the extreme value, whether a value with this ratio to it may have a level."""
    quotient = level * ratio
    nearest = round_even(quotient)
    return vabs(quotient - nearest) <= vmin(vabs(nearest) * share + vabs(level) * excess, F(FARTHEST))


@inline
def list_steps(x: Any, begin: Any, n: Any, lowest: Any, width: Any, widest: Any, top: Any, candidates: Any) -> Any:
    """Store the numbers of steps, the most first, that may lie between the extreme values; return how many there are.

    A necessary condition, in f32. width: the difference of the extreme values. widest: the largest half unit of a
    value. candidates: int64 [top].
    """
    inverse, low = F(1 / width), F(lowest)
    farthest = F(4 * widest / width)
    lane = F(top) - _lanes()
    count = 0
    for c in range(0, top, 16):
        steps = lane - F(c)
        limit = vmin(steps * farthest + F(_F32_STEPS), F(FARTHEST))
        lanes = mask_bits(steps > F(0))
        for i in range(begin, begin + n):
            if _is_few(lanes, 1):
                break
            quotient = steps * ((x[i] - low) * inverse)
            lanes &= mask_bits(vabs(quotient - round_even(quotient)) <= limit)
        while lanes != U64(0):
            candidates[count] = top - c - trailing_zeros(lanes)
            count += 1
            lanes &= lanes - U64(1)
    return count


# ---------------------------------------------------------------- values by their scale


@inline
def values_at(x: Any, i: Any) -> Any:
    """Return eight values as float64."""
    return convert(f64x8, load(f32x8, x, 4 * i))


@inline
def fits(x: Any, begin: Any, n: Any, d: Any, bits: Any, codes: Any, even: Any) -> Any:
    """Return whether all values may be levels times about d; a necessary condition.

    even: of a type whose levels are consecutive, the lowest, the highest, and the code of level 0 and a mask.
    """
    inverse, share = 1 / d, _share(bits)
    excess = 0.0
    if bits == 11:
        excess = np.float64(HALF_SUBNORMAL) * abs(inverse)
    lowest, highest = np.float64(-ZERO), np.float64(ZERO)
    if even[0] <= even[1]:
        lowest, highest = np.float64(even[0]), np.float64(even[1])
    for i in range(begin, begin + n, 8):
        quotient = values_at(x, i) * inverse
        level = round_even(quotient)
        is_far = vabs(quotient - level) > vmin(vabs(level) * share + excess, FARTHEST)
        if any_lane(is_far | (level < lowest) | (level > highest)):
            return False
    return even[0] <= even[1] or _have_codes(x, begin, n, inverse, codes)


@inline
def guess_half(x: Any, begin: Any, n: Any, d: Any) -> Any:
    """Return the f16, as float32, that is nearest to the quotient of the sums of magnitudes, and of levels by d."""
    inverse = F(1 / d)
    magnitudes, levels = splat(f32x16, F(0)), splat(f32x16, F(0))
    for i in range(begin, begin + n, 16):
        magnitude = vabs(load(f32x16, x, 4 * i))
        magnitudes = magnitudes + magnitude
        levels = levels + round_even(magnitude * abs(inverse))
    return widen_half(f32_to_f16(hsum(magnitudes) / (hsum(levels) if inverse > F(0) else -hsum(levels))))


@inline
def decodes(x: Any, begin: Any, n: Any, d: Any, half: Any, bits: Any, codes: Any, even: Any) -> Any:
    """Return whether the levels that values have by d, times the f16 ``half``, round to the values."""
    inverse = F(1 / d)
    lowest, highest = F(-ZERO), F(ZERO)
    if even[0] <= even[1]:
        lowest, highest = F(even[0]), F(even[1])
    for i in range(begin, begin + n, 16):
        value = load(f32x16, x, 4 * i)
        level = round_even(value * inverse)
        y = level * half
        if any_lane((level < lowest) | (level > highest) | (value != y) & far_from(value, y, bits)):
            return False
    return even[0] <= even[1] or _have_codes(x, begin, n, 1 / d, codes)


@inline
def _have_codes(x: Any, begin: Any, n: Any, inverse: Any, codes: Any) -> Any:
    """Return whether the levels that values have by 1 / inverse are among those with codes."""
    for i in range(begin, begin + n):  # noqa: SIM110 - numba compiles no generators
        if codes[np.int64(np.rint(np.float64(x[i]) * inverse)) + ZERO] < 0:
            return False
    return True


@inline
def far_from(x: Any, y: Any, bits: Any) -> Any:
    """Return which y, a vector, do not round to x; of equal ones, either."""
    a, b = cast(i32x16, x), cast(i32x16, y)
    magnitude = a & I32(0x7FFFFFFF)
    difference = a - b
    unit = half_units(magnitude, bits)
    is_far = ((a ^ b) < I32(0)) | (difference > unit) | (difference < -unit)
    if bits == 24:
        return x == x
    if bits == 11:
        is_far = select_mask(vabs(x) < LEAST_NORMAL, vabs(x - y) > HALF_SUBNORMAL, is_far)
    return is_far


@inline
def select_mask(mask: Any, a: Any, b: Any) -> Any:
    """Return a where the mask is set, else b, of masks."""
    return (mask & a) | (b & ~mask)


@inline
def scale_interval(x: Any, begin: Any, n: Any, d: Any, low: Any, high: Any, offset: Any) -> Any:
    """Return the least and the greatest scale with which all values have the levels that they have by d."""
    least, greatest, inverse = splat(f64x8, -np.inf), splat(f64x8, np.inf), 1 / d
    for i in range(0, n, 8):
        level = round_even(values_at(x, begin + i) * inverse)
        below, above = values_at(low, offset + i), values_at(high, offset + i)
        zero = level == 0.0
        if any_lane(zero & ((below > 0.0) | (above < 0.0))):
            return np.inf, -np.inf
        per_level = 1.0 / level
        a, b = below * per_level, above * per_level
        least = vmax(select(zero, -np.inf, vmin(a, b)), least)
        greatest = vmin(select(zero, np.inf, vmax(a, b)), greatest)
    # bounds may be scales themselves, which rounding must not exclude
    first, last = hmax(least), hmin(greatest)
    return first - abs(first) * _ROUNDING, last + abs(last) * _ROUNDING


@inline
def n_scales(level: Any, bits: Any) -> Any:
    """Return the number of scales that are tried for a level: a value of BF16 says too little about high ones."""
    return 9 if bits == 8 and abs(level) >= _HIGH else 1


@inline
def nth_scale(d: Any, n: Any) -> Any:
    """Return the n-th scale around d, within a half unit of BF16."""
    steps = (n + 1) // 2
    return d * (1 + (-steps if n & 1 else steps) * 2.0**-10)


@inline
def store_codes(x: Any, begin: Any, n: Any, d: Any, codes: Any, even: Any, q: Any, first: Any) -> None:
    """Store the codes of the levels that values have by d, from ``first`` on; by d = 0, that of level 0."""
    inverse = 1 / d if d != 0 else 0.0
    if even[0] <= even[1]:
        for i in range(0, n, 8):
            level = convert(i32x8, round_even(values_at(x, begin + i) * inverse))
            store(q, first + i, convert(u8x8, (level + I32(even[2])) & I32(even[3])))
        return
    for i in range(n):
        q[first + i] = codes[np.int64(np.rint(np.float64(x[begin + i]) * inverse)) + ZERO]

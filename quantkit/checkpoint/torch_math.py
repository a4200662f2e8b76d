"""Float32 arithmetic with the rounding of torch on x86: fused multiply-add, softplus.

torch computes softplus with the vector functions exp and log1p of SLEEF (sleef.org, 1.0 ulp), whose polynomials and
order of operations these are. Its results for the last values of a tensor, fewer than 16, are those of the C library.
"""

from __future__ import annotations

import numpy as np

from quantkit.checkpoint.expressions import F32

_ONE, _TWO = np.float32(1), np.float32(2)
_LOG2_E = np.float32(1.4426950408889634)
#: ln 2 as a sum, for reductions of exp.
_LN2 = (np.float32(0.693145751953125), np.float32(1.428606765330187e-06))
#: ln 2 as the sum of two float32, for log1p.
_LN2_PAIR = (np.float32(0.6931471824645996), np.float32(-1.904654323148236e-09))
_EXP = (
    0.00019852761761285365,
    0.0013930435525453415,
    0.00833336077630520,
    0.041666485369205475,
    0.16666667163372040,
    0.5,
)
_LOG1P = (0.3027294874, 0.3996108174, 0.6666694880)


def fma(x: F32 | np.float32, y: F32 | np.float32, z: F32 | np.float32) -> F32:
    """Return x * y + z, rounded once in nearly all cases: products of float32 are exact in float64, sums are not."""
    result: F32 = (np.asarray(x, np.float64) * y + z).astype(np.float32)
    return result


def softplus(x: F32) -> F32:
    """Return log(1 + exp(x)); x itself above 20."""
    with np.errstate(invalid="ignore"):
        result: F32 = np.where(x > 20, x, _log1p(_exp(np.clip(x, np.float32(-104), np.float32(20)))))
    return result


def inverse_softplus(y: F32) -> F32:
    """Return x of y = log(1 + exp(x)): the nearest BF16 value if its softplus is ``y`` to two units in the last place.

    Stored values are BF16 in nearly all checkpoints, and the last bits of a softplus differ between libraries. Of the
    values near 0 that have one softplus it is 0.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exact = np.asarray(y, np.float64)
        x: F32 = np.where(y > 20, y, (exact + np.log(-np.expm1(-exact))).astype(np.float32))
        bits = x.view(np.uint32)
        short = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32)
        result: F32 = np.where(np.abs(softplus(short) - y) <= 2 * np.spacing(np.abs(y)), short, x)
    return np.where(y == softplus(np.zeros_like(y)), np.float32(0), result)


def _polynomial(x: F32, coefficients: tuple[float, ...]) -> F32:
    """Return a polynomial of ``x`` by Horner's rule, from the highest power on."""
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = fma(value, x, np.full_like(x, coefficient))
    return value


def _exp(x: F32) -> F32:
    power = np.rint(x * _LOG2_E)
    fraction = fma(power, -_LN2[1], fma(power, -_LN2[0], x))
    value = _ONE + fma(fraction * fraction, _polynomial(fraction, _EXP), fraction)
    result: F32 = np.ldexp(value, power.astype(np.int32))
    return result


def _log1p(x: F32) -> F32:
    """Return log(1 + x) of x >= 0: e * ln 2 + 2 * atanh(m / (2 + m)), the sums as pairs of float32."""
    e = ((((x + _ONE) * np.float32(1 / 0.75)).view(np.int32) >> 23) & 255) - 127
    scale = np.ldexp(_ONE, -e).astype(np.float32)
    m, exponent = fma(x, scale, scale - _ONE), e.astype(np.float32)
    high = _LN2_PAIR[0] * exponent
    high_error = fma(_LN2_PAIR[1], exponent, fma(_LN2_PAIR[0], exponent, -high))
    divisor = _TWO + m
    divisor_rest = (_TWO - divisor) + m
    inverse = _ONE / divisor
    ratio = m * inverse
    error = fma(-divisor_rest, inverse, fma(-divisor, inverse, _ONE))
    ratio_rest = fma(ratio, error, fma(inverse, m, -ratio))
    square = ratio * ratio
    double, double_rest = ratio * _TWO, ratio_rest * _TWO
    total = high + double
    total_rest = (((high - total) + double) + high_error) + double_rest
    tail = (square * ratio) * _polynomial(square, _LOG1P)
    result = total + tail
    return result + (((total - result) + tail) + total_rest)


def silu(x: F32) -> F32:
    """Return x / (1 + exp(-x))."""
    result: F32 = x / (_ONE + _exp(np.clip(-x, np.float32(-104), np.float32(104))))
    return result

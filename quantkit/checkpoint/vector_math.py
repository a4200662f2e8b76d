"""exp, sin and cos of float32 with the bits of torch, which computes them with the vector functions of oneMKL 2024.

oneMKL has a variant for each kind of CPU. These are the bits of the one for CPUs that are not Intel's (torch 2.13 on an
AMD EPYC): sine and cosine are the same in oneMKL's variants up to AVX2, but exp of Intel's CPUs differs in the last bit
of 4 % of values. The constants follow from torch's results: all rounded values of the sine in [1/8, pi/2], and 144
million of larger arguments, agree.
"""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

#: exp: 2 ** (i / 128) as the sum of two float32, and log(2) / 128, of which 12 bits times a multiple are exact.
_POWERS = [Decimal(2) ** (Decimal(i) / 128) for i in range(128)]
_HIGH = np.array(_POWERS, np.float32)
_LOW = np.array([power - Decimal(float(high)) for power, high in zip(_POWERS, _HIGH, strict=True)], np.float32)
_STEPS = np.float32(128 / np.log(2))
_STEP = np.float32(float.fromhex("0x1.63p-8"))
_STEP_LOW = np.float32(float.fromhex("-0x1.bd0106p-20"))
#: sin: coefficients of x ** 3 to x ** 9 in [-pi/2, pi/2], and pi in two parts.
_SINE = (-0.16666659550427654, 0.00833306624607112, -0.00019809602900613051, 2.6057806340710834e-06)
_PI = (float.fromhex("0x1.921fb54p+1"), float.fromhex("0x1.10b4611a62633p-29"))


def exp(x: F32) -> F32:
    """Return exp(x) for x in [-87, 88]."""
    n = np.rint(x * _STEPS)
    remainder = (x - n * _STEP) - n * _STEP_LOW
    power = n.astype(np.int64)
    high, low = _HIGH[power & 127], _LOW[power & 127]
    result: F32 = np.ldexp(high + (low + high * (remainder + remainder * remainder * np.float32(0.5))), power >> 7)
    return result


def sin(x: F32) -> F32:
    """Return sin(x) for x in [-1500, 1500]."""
    wide = x.astype(np.float64)
    return _signed_sine(wide, np.rint(wide / np.pi), 0.0)


def cos(x: F32) -> F32:
    """Return cos(x) for x in [-1500, 1500]."""
    wide = np.abs(x.astype(np.float64))
    return _signed_sine(wide, np.rint(wide / np.pi + 0.5), 0.5)


def _signed_sine(x: npt.NDArray[np.float64], n: npt.NDArray[np.float64], shift: float) -> F32:
    """Return the sine of x - (n - shift) pi, negated for odd ``n``."""
    remainder = (x - (n - shift) * _PI[0]) - (n - shift) * _PI[1]
    square = remainder * remainder
    c3, c5, c7, c9 = _SINE
    sine = remainder + remainder * square * (c3 + square * (c5 + square * (c7 + square * c9)))
    values: F32 = np.where(n.astype(np.int64) & 1, -sine, sine).astype(np.float32)
    return values

"""Unpackers of IQ1_BN, IQ2_BN: levels -1, 0, 1, and one scale for the row.

Bytes of a row header and of a block of 64 values (ik_llama.cpp 8337e4cd3, ggml-common.h)::

    IQ1_BN  d f16 | ql 12 | extra 1     base-3 digits as in TQ1_0; value = d * (digit - 1)
    IQ2_BN  d f32 | qs 16               2 bits per value, byte b holds values b, b + 16, b + 32, b + 48; d * (q - 1)

IQ1_BN: of each 16 values, 15 are the digits of three bytes of ql, from digit 4 to digit 0; the last one is a digit of
extra: digit 4 in the first 16, digit 1 in the last.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32x16, load, make_constant, make_shuffle, splat, u8x16, u8x64
from quantkit.kernels.cpu.unpack.lanes import below, high_halves, high_quarters, low_halves, low_quarters
from quantkit.kernels.cpu.unpack.ternary import first_digits

#: IQ1_BN: the byte of each value, and the power of 3 that brings its digit to the front.
_BYTES = [12 if i % 16 == 15 else 3 * (i // 16) + i % 16 // 5 for i in range(64)]
_DIGITS = [4 - i // 16 if i % 16 == 15 else 4 - i % 16 % 5 for i in range(64)]
bytes_of_values = make_shuffle(_BYTES, "bitnet.bytes_of_values")
bytes_from_3 = make_shuffle([3 + byte for byte in _BYTES], "bitnet.bytes_from_3")
powers = make_constant(u8x64, [3**digit for digit in _DIGITS], "bitnet.powers")


@inline
def levels_iq1_bn(x: Any) -> Any:
    """Return 64 levels from the byte of each."""
    return first_digits(x * powers())


@inline
def unpack_iq1_bn(data: int, offset: int) -> Any:
    """4 blocks of 13 bytes."""
    l0 = levels_iq1_bn(bytes_of_values(load(u8x16, data, offset)))
    l1 = levels_iq1_bn(bytes_of_values(load(u8x16, data, offset + 13)))
    l2 = levels_iq1_bn(bytes_of_values(load(u8x16, data, offset + 26)))
    l3 = levels_iq1_bn(bytes_from_3(load(u8x16, data, offset + 36)))  # the last 16 bytes
    return l0, l1, l2, l3, splat(f32x16, types.float32(1)), None


@inline
def unpack_iq2_bn(data: int, offset: int) -> Any:
    """4 blocks of 16 bytes."""
    q = load(u8x64, data, offset)
    q0 = q & 3
    q1 = (q >> 2) & 3
    q2 = (q >> 4) & 3
    q3 = q >> 6
    a = low_quarters(q0, q1)
    b = low_quarters(q2, q3)
    c = high_quarters(q0, q1)
    d = high_quarters(q2, q3)
    l0 = low_halves(a, b)
    l1 = high_halves(a, b)
    l2 = low_halves(c, d)
    l3 = high_halves(c, d)
    return below(l0, 1), below(l1, 1), below(l2, 1), below(l3, 1), splat(f32x16, types.float32(1)), None

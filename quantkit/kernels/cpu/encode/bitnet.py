"""IQ1_BN and IQ2_BN of ik_llama.cpp: weights of -1, 0 and 1 (BitNet), with one scale for the row.

The scale is the largest magnitude of the row; a value is 0 below half of it, else its sign. Levels q = value + 1, bytes
of a block of 64 values (cpu/unpack/bitnet.py)::

    IQ1_BN  u8 ql[12], u8 extra   16 values are three bytes of five digits in base 3 and one digit of extra; the first
                                  digit is the lowest; a number n is stored as ceil(n * 256 / 243)
    IQ2_BN  u8 qs[16]             byte b: values b, b + 16, b + 32, b + 48, 2 bits each

In a row of zeros all levels are 2, times a scale of 0.

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, IQ1BNQuantizer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import convert, f32_to_f16, make_constant, make_shuffle, store, u8x16, u32x16
from quantkit.kernels.cpu.encode.batch import address
from quantkit.kernels.cpu.encode.ternary import (
    fraction,
    largest_magnitude,
    number_of_digits,
    quarter0,
    quarter1,
    quarter2,
    quarter3,
    trits,
)

F, U8 = np.float32, np.uint8
Rows = npt.NDArray[np.float32]


def _digit(j: int) -> list[int]:
    """Return the value of digit j of the 12 bytes of ql and of extra; the other lanes are not used."""
    last = 16 * j + 15 if j < 4 else 0
    return [16 * (byte // 3) + 5 * (byte % 3) + j for byte in range(12)] + [last] * 4


digit0, digit1, digit2, digit3, digit4 = (make_shuffle(_digit(j), f"bitnet.digit{j}") for j in range(5))
#: extra has only four digits.
has_digit4 = make_constant(u8x16, [255] * 12 + [0] * 4, "bitnet.has_digit4")


@inline
def _levels(x, offset, most):
    """Return 64 levels; ``most``: the largest magnitude of the row."""
    half = F(0.5) * most
    # Zeros are never below 0, not even where half is 0.
    return trits(x, offset, F(1), -half if half > F(0) else F(-1e-45), half)


@kernel
def encode_iq1_bn(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x [rows, n], n a multiple of 64; the importance matrix is ignored."""
    scratch = np.zeros(16, np.uint8)
    for row in range(row0, row1):
        source = address(x) + 4 * x.shape[1] * row
        most = largest_magnitude(source, 0, x.shape[1])
        store(out, row * out.shape[1], f32_to_f16(most))
        for block in range(x.shape[1] // 64):
            t = _levels(source, 256 * block, most)
            digits = number_of_digits(digit4(t) & has_digit4(), digit3(t), digit2(t), digit1(t), digit0(t))
            store(scratch, 0, convert(u8x16, fraction(convert(u32x16, digits))))
            for i in range(13):
                out[row, 2 + 13 * block + i] = scratch[i]


@kernel
def encode_iq2_bn(x: Rows, weights: Rows, out: npt.NDArray[np.uint8], row0: int, row1: int) -> None:
    """Encode rows row0..row1 of x [rows, n], n a multiple of 64; the importance matrix is ignored."""
    for row in range(row0, row1):
        source, target = address(x) + 4 * x.shape[1] * row, address(out) + out.shape[1] * row
        most = largest_magnitude(source, 0, x.shape[1])
        store(target, 0, most)
        for block in range(x.shape[1] // 64):
            t = _levels(source, 256 * block, most)
            low, high = quarter0(t) | (quarter1(t) << U8(2)), quarter2(t) | (quarter3(t) << U8(2))
            store(target, 4 + 16 * block, low | (high << U8(4)))

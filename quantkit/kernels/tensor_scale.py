"""I2_S, the type of Microsoft's BitNet files, with one scale for a whole tensor, and its conversion to IQ2_BN.

The scale follows the tensor's last row. Rows of IQ2_BN hold the same 2-bit levels in another order after their own
scale, so nothing is rounded. No runtime multiplies I2_S itself; ik_llama.cpp reads it to make IQ2_BN of it, too.

Layout after ik_llama.cpp 8337e4cd3: dequantize_row_ms_i2s in ggml/src/iqk/iqk_quantize.cpp, ggml_nbytes in
ggml/src/ggml.c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.errors import TypeNotSupported
from quantkit.types import BY_NAME, TensorType

U8 = npt.NDArray[np.uint8]

#: Bytes after the rows of a tensor: the scale, f32, and padding.
TAIL = 32
#: Values whose levels share 32 bytes: byte j has those of j, j + 32, j + 64 and j + 96, the first in the high bits.
_BLOCK = 128


#: The type of a tensor with one scale, and the type of rows with a scale each from which it is decoded.
TENSOR_SCALED, ROW_SCALED = BY_NAME["I2_S"], BY_NAME["IQ2_BN"]


def decoded_as(t: TensorType) -> TensorType:
    """Return the type that rows of type ``t`` have when they are decoded: mostly itself."""
    return ROW_SCALED if t is TENSOR_SCALED else t


def check_rows(n: int) -> None:
    """Raise TypeNotSupported if rows of ``n`` values would share blocks."""
    if n % _BLOCK:
        raise TypeNotSupported(f"I2_S: rows of {n} values are not a multiple of blocks of {_BLOCK}", "QK-E303")


def with_row_scales(rows: U8, scale: float) -> U8:
    """Return rows of I2_S, uint8 [rows, n / 4], as rows of IQ2_BN, uint8 [rows, 4 + n / 4], n a multiple of 128.

    Raises TypeNotSupported for other n.
    """
    count, nbytes = rows.shape
    check_rows(4 * nbytes)
    out = np.empty((count, 4 + nbytes), np.uint8)
    out[:, :4] = np.array([scale], "<f4").view(np.uint8)
    source = rows.reshape(count, -1, 2, 16)  # of 32 bytes: values 0 .. 15 and 16 .. 31 of each quarter
    target = out[:, 4:].reshape(count, -1, 2, 16)  # two blocks of 64, 16 values a stripe
    for half in range(2):  # quarters 0 and 1 are the first block, 2 and 3 the second
        first, second = (source >> (6 - 4 * half)) & 3, (source >> (4 - 4 * half)) & 3
        target[:, :, half] = first[:, :, 0] | first[:, :, 1] << 2 | second[:, :, 0] << 4 | second[:, :, 1] << 6
    return out

"""Decodes rows of weights to floats on the device: dequantize.cu."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.unpack import decoders
from quantkit.kernels.formats import FORMATS, format_of
from quantkit.types import TensorType

#: Output types of rows; f16 and bf16 are rounded to nearest even.
OUTPUTS = ("f32", "f16", "bf16")

#: Parts of 32 values that a block of threads takes.
_PARTS = 256


def _shape(name: str, t: TensorType, n: int, rows: int, **macros: int) -> Shape:
    kernel = Kernel("unpack/dequantize.cu", name).bind(TYPE=format_of(t).type.name, **macros)
    return Shape(kernel, (max(1, -(-rows * -(-n // 32) // _PARTS)), 1, 1))


def dequantize(t: TensorType, n: int, rows: int, for_product: bool = False) -> Shape:
    """Return the kernel and grid that decode rows of n values: slots w, row_bytes, rows, n, out, out_stride, to.

    to: the output type, an index in OUTPUTS. Values are those of quantkit.kernels.dequantize to the bit, or
    ``for_product`` those that products multiply (``Format.row_scale_gain``), then rounded. Rows of out are aligned to
    16 bytes (16-bit ones to 8), as far as the type is no plain float.
    """
    return _shape(
        "dequantize", t, n, rows, **({"FOR_PRODUCT": 1} if for_product and format_of(t).row_scale_gain != 1 else {})
    )


def embed(t: TensorType, n: int, rows: int) -> Shape:
    """Return the kernel and grid that write scale * the row of each token, or of its position.

    Slots: batch, w, row_bytes, rows, n, out, out_stride, by_position, scale.
    """
    return _shape("embed", t, n, rows)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for spec in (FORMATS[name] for name in sorted(decoders())):
        yield dequantize(spec.type, 256, 1).kernel
        if spec.row_scale_gain != 1:
            yield dequantize(spec.type, 256, 1, for_product=True).kernel
        yield embed(spec.type, 256, 1).kernel

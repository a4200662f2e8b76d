"""Rows of weights to floats on the device: dequantize.cu."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cuda.operation import Operation, Shape
from quantkit.types import BY_NAME, TensorType

#: The file of cuda/unpack that holds the unpacker of each type there is one for; the same as on the CPU.
FAMILY_FILES: dict[str, str] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), "legacy"),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), "k_quants"),
    **dict.fromkeys(
        ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), "i_quants"
    ),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), "ternary"),
    "Q1_0": "binary",
    **dict.fromkeys(("MXFP4", "NVFP4"), "fp4"),
}

#: Types that kernels read: these, and plain floats.
TYPES: tuple[TensorType, ...] = tuple(BY_NAME[name] for name in ("F32", "F16", "BF16", *FAMILY_FILES))

#: What rows are written as; f16 and bf16 are rounded to nearest even.
OUTPUTS = ("f32", "f16", "bf16")

#: Parts of 32 values that a block of threads takes.
_PARTS = 256


def supported(t: TensorType) -> TensorType:
    """Return the type; raise TypeNotSupported if there is no unpacker for it on the device."""
    if t not in TYPES:
        raise TypeNotSupported(f"CUDA kernels do not read {t.name}; they read {', '.join(k.name for k in TYPES)}")
    return t


def _shape(name: str, t: TensorType, n: int, rows: int) -> Shape:
    operation = Operation("dequantize.cu", name).bind(TYPE=supported(t).name)
    return Shape(operation, (max(1, -(-rows * -(-n // 32) // _PARTS)), 1, 1))


def dequantize(t: TensorType, n: int, rows: int) -> Shape:
    """Return how to decode rows of n values: slots w, row_bytes, rows, n, out, out_stride, to.

    to: what is written, its index in OUTPUTS. Values are those of quantkit.kernels.dequantize to the bit, then
    rounded. Rows of out are aligned to 16 bytes (16-bit ones to 8), as far as the type is no plain float.
    """
    return _shape("dequantize", t, n, rows)


def embed(t: TensorType, n: int, rows: int) -> Shape:
    """Return how to write scale * the row of each token: slots batch, w, row_bytes, rows, n, out, out_stride, scale."""
    return _shape("embed", t, n, rows)


def operations() -> Iterator[Operation]:
    """Yield every operation of this file."""
    for t in TYPES:
        yield dequantize(t, 256, 1).operation
        yield embed(t, 256, 1).operation

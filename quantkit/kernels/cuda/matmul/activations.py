"""Activations on the device, in the formats that weights are multiplied by: activations.cu."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.generated import Q8_UNIT
from quantkit.kernels.cuda.core.kernel import Kernel, Shape

#: Formats of activations besides f32; kernels/formats.py has that of each type of weights.
KINDS = ("q8_0", "q8_1", "q8_2", "q8_k", "q8_kv", "q8_k64", "f16", "bf16")
#: Formats with scales of a row, which launches with only a part of the row cannot compute.
OF_ROWS = ("q8_kv", "q8_k64")


def row_bytes(kind: str, n: int) -> int:
    """Return the bytes of a row of ``n`` activations in a format; f32 rows are not copied."""
    if kind in ("f32", "f16", "bf16"):
        return 4 * n
    return -(-n // 256) * Q8_UNIT


def quantize(kind: str, n: int, rows: int) -> Shape:
    """Return the kernel and grid that convert rows of n f32 values to a format: slots rows, x, x_stride, n, out.

    x_stride in bytes; rows of out are ``row_bytes(kind, n)`` apart, its start aligned to 32 bytes. Raises ValueError
    for another format.
    """
    if kind not in KINDS:
        raise ValueError(f"the formats of activations are {', '.join(KINDS)}; not {kind}")
    if kind in OF_ROWS:
        kernel = Kernel("matmul/activations.cu", "quantize_rows").bind(FORMAT=KINDS.index(kind))
        return Shape(kernel, (max(1, rows), 1, 1))
    blocks = -(-rows * -(-n // 256) // 4) if kind.startswith("q8") else rows * -(-n // 512)
    return Shape(Kernel("matmul/activations.cu", "quantize").bind(FORMAT=KINDS.index(kind)), (max(1, blocks), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for kind in KINDS:
        yield quantize(kind, 256, 1).kernel

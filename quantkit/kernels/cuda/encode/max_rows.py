"""Encodes rows of float32 of types whose rows have one scale, of the value of largest magnitude: max_rows.cu.

    max_rows    x out n

x: f32 [rows, n], out: the rows' bytes, both 16-byte aligned. Rows must be finite.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.encode import encoders, weighs
from quantkit.types import BY_NAME, TensorType


def has_one_scale(t: TensorType) -> bool:
    """Return whether this encodes the type."""
    return t.row_header > 0 and not weighs(t)


def max_rows_kernel(t: TensorType) -> Kernel:
    """Return the kernel that encodes a type."""
    return Kernel("encode/max_rows.cu", "max_rows").bind(ENCODER=f"Encode{t.name}")


def max_rows_launch(t: TensorType, x: int, rows: int, n: int, out: int) -> Launch:
    """Return what encodes rows; x and out are addresses."""
    kernel = max_rows_kernel(t)
    return Launch(kernel, (max(1, rows), 1, 1), kernel.block(x=x, out=out, n=n))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from map(max_rows_kernel, filter(has_one_scale, map(BY_NAME.__getitem__, encoders())))

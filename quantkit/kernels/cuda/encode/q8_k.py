"""Encodes rows of float32 as Q8_K_R8 and Q8_K_R16, groups of 8 or 16 rows together: q8_k.cu.

    q8_k    x out n

x: f32 [rows, n], out: the rows' bytes, both 16-byte aligned; rows are whole groups. Rows must be finite.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.formats import WOVEN_ENCODERS
from quantkit.types import BY_NAME, TensorType


def is_q8_k(t: TensorType) -> bool:
    """Return whether this encodes the type."""
    return t.name in WOVEN_ENCODERS


def q8_k_kernel(t: TensorType) -> Kernel:
    """Return the kernel that encodes a type."""
    return Kernel("encode/q8_k.cu", "q8_k").bind(ROWS=t.interleave)


def q8_k_launch(t: TensorType, x: int, rows: int, n: int, out: int) -> Launch:
    """Return what encodes rows; x and out are addresses."""
    kernel = q8_k_kernel(t)
    return Launch(kernel, (rows // t.interleave * (n // t.block), 1, 1), kernel.block(x=x, out=out, n=n))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from (q8_k_kernel(BY_NAME[name]) for name in WOVEN_ENCODERS)

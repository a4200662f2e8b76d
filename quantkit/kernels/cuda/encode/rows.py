"""Encoders of types whose rows begin with a scale.

    scales, rows   x importance out rows n       importance f32 [n] (0: none); the scales of sub-blocks follow: rows.cu
    max_rows       x out n                       no others, it is that of the largest magnitude: max_rows.cu

x: f32 [rows, n]; out: the rows' bytes, aligned to two, of max_rows to 16 as x. Rows must be finite.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.encode import encoders, weighs
from quantkit.kernels.cuda.encode.grid_rows import is_grid_row
from quantkit.kernels.cuda.encode.trellis import is_trellis
from quantkit.types import BY_NAME, TensorType

_FILE = "encode/rows.cu"
#: Sub-blocks of a block of threads, and values of each.
_LANES, _VALUES = 64, 32


def has_scales_of_row(t: TensorType) -> bool:
    """Return whether this encodes the type."""
    return t.row_header > 0 and weighs(t) and not is_trellis(t) and not is_grid_row(t)


def row_kernels(t: TensorType, weighted: bool) -> tuple[Kernel, Kernel]:
    """Return the kernels that encode a type, in the order of their launches."""
    defines: dict[str, str | int] = {"ENCODER": f"Encode{t.name}"}
    if weighted:
        defines["WEIGHTED"] = 1
    return Kernel(_FILE, "scales").bind(**defines), Kernel(_FILE, "rows").bind(**defines)


def row_launches(t: TensorType, x: int, rows: int, n: int, out: int, importance: int) -> list[Launch]:
    """Return the launches that encode rows; all but the first two numbers of the shape are addresses."""
    scales, encode = row_kernels(t, bool(importance) and weighs(t))
    block = scales.block(x=x, importance=importance, out=out, rows=rows, n=n)
    blocks = -(-rows * (n // _VALUES) // _LANES)
    return [Launch(scales, (max(1, blocks), 1, 1), block), Launch(encode, (max(1, rows), 1, 1), block)]


def has_one_scale(t: TensorType) -> bool:
    """Return whether this encodes the type."""
    return t.row_header > 0 and not weighs(t)


def max_rows_kernel(t: TensorType) -> Kernel:
    """Return the kernel that encodes a type."""
    return Kernel("encode/max_rows.cu", "max_rows").bind(ENCODER=f"Encode{t.name}")


def max_rows_launch(t: TensorType, x: int, rows: int, n: int, out: int) -> Launch:
    """Return the launch that encodes rows; x and out are addresses."""
    kernel = max_rows_kernel(t)
    return Launch(kernel, (max(1, rows), 1, 1), kernel.block(x=x, out=out, n=n))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of both files."""
    for t in filter(has_scales_of_row, map(BY_NAME.__getitem__, encoders())):
        for weighted in (False, True) if weighs(t) else (False,):
            yield from row_kernels(t, weighted)
    yield from map(max_rows_kernel, filter(has_one_scale, map(BY_NAME.__getitem__, encoders())))

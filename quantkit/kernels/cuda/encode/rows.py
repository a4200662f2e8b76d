"""Encodes rows of float32 of types whose rows begin with a scale, from which those of sub-blocks follow: rows.cu.

    scales, rows   x importance out rows n       importance f32 [n] (0: none)

x: f32 [rows, n]; out: the rows' bytes, aligned to two. Rows must be finite.
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
    """Return what encodes rows; all but the first two numbers of the shape are addresses."""
    scales, whole = row_kernels(t, bool(importance) and weighs(t))
    block = scales.block(x=x, importance=importance, out=out, rows=rows, n=n)
    blocks = -(-rows * (n // _VALUES) // _LANES)
    return [Launch(scales, (max(1, blocks), 1, 1), block), Launch(whole, (max(1, rows), 1, 1), block)]


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for t in filter(has_scales_of_row, map(BY_NAME.__getitem__, encoders())):
        for weighted in (False, True) if weighs(t) else (False,):
            yield from row_kernels(t, weighted)

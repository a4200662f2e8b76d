"""Encoders of types whose rows begin with a scale.

    scales, rows   x importance out rows n       importance f32 [n] (0: none); the scales of sub-blocks follow: rows.cu
    max_rows       x out n                       no others, it is that of the largest magnitude: max_rows.cu
    parts, codes   x importance scales out rows n points entries lists words; scales out n
                   scales f32 [rows, sub-blocks of a row]; the rows of IQ1_S_R4 and IQ1_M_R4: grid_rows.cu

x: f32 [rows, n]; out: the rows' bytes, aligned to two, of max_rows to 16 as x. Rows must be finite.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.core.lookups import grid_on
from quantkit.kernels.cuda.encode import Rows, encoders, weighs
from quantkit.kernels.cuda.encode.trellis import is_trellis
from quantkit.kernels.formats import FORMATS
from quantkit.types import BY_NAME, TensorType

_FILE = "encode/rows.cu"
#: Sub-blocks of a block of threads, and values of each.
_LANES, _VALUES = 64, 32
_GRID_FILE, _GRID_LANES = "encode/grid_rows.cu", 128


def has_scales_of_row(t: TensorType) -> bool:
    """Return whether this encodes the type."""
    return t.row_header > 0 and weighs(t) and not is_trellis(t) and not is_grid_row(t)


def row_kernels(t: TensorType, weighted: bool) -> tuple[Kernel, Kernel]:
    """Return the kernels that encode a type, in the order of their launches."""
    defines: dict[str, str | int] = {"ENCODER": f"Encode{t.name}"}
    if weighted:
        defines["WEIGHTED"] = 1
    return Kernel(_FILE, "scales").bind(**defines), Kernel(_FILE, "rows").bind(**defines)


def row_launches(t: TensorType, r: Rows) -> list[Launch]:
    """Return the launches that encode rows."""
    scales, encode = row_kernels(t, bool(r.importance) and weighs(t))
    block = scales.block(x=r.x, importance=r.importance, out=r.out, rows=r.rows, n=r.n)
    blocks = -(-r.rows * (r.n // _VALUES) // _LANES)
    return [Launch(scales, (max(1, blocks), 1, 1), block), Launch(encode, (max(1, r.rows), 1, 1), block)]


def has_one_scale(t: TensorType) -> bool:
    """Return whether this encodes the type."""
    return t.row_header > 0 and not weighs(t)


def max_rows_kernel(t: TensorType) -> Kernel:
    """Return the kernel that encodes a type."""
    return Kernel("encode/max_rows.cu", "max_rows").bind(ENCODER=f"Encode{t.name}")


def max_rows_launch(t: TensorType, r: Rows) -> Launch:
    """Return the launch that encodes rows."""
    kernel = max_rows_kernel(t)
    return Launch(kernel, (max(1, r.rows), 1, 1), kernel.block(x=r.x, out=r.out, n=r.n))


def is_grid_row(t: TensorType) -> bool:
    """Return whether this encodes the type."""
    return t.row_header > 0 and FORMATS[t.name].grid > 0


def grid_row_kernels(t: TensorType, weighted: bool) -> tuple[Kernel, Kernel]:
    """Return the kernels that encode a type, in the order of their launches."""
    defines: dict[str, str | int] = {"ENCODER": f"Encode{t.name}"}
    codes = Kernel(_GRID_FILE, "codes").bind(**defines)
    if weighted:
        defines["WEIGHTED"] = 1
    return Kernel(_GRID_FILE, "parts").bind(**defines), codes


def grid_row_bytes(t: TensorType, rows: int, n: int) -> int:
    """Return the working memory of a launch in bytes: the scales of sub-blocks."""
    return 4 * rows * (n // FORMATS[t.name].span)


def grid_row_launches(device: Device, t: TensorType, r: Rows) -> list[Launch]:
    """Return the launches that encode rows."""
    parts, codes = grid_row_kernels(t, bool(r.importance))
    block = parts.block(
        x=r.x, importance=r.importance, scales=r.work, out=r.out, rows=r.rows, n=r.n, **grid_on(device, t)._asdict()
    )
    blocks = -(-r.rows * (r.n // FORMATS[t.name].span) // _GRID_LANES)
    return [
        Launch(parts, (max(1, blocks), 1, 1), block),
        Launch(codes, (max(1, r.rows), 1, 1), codes.block(scales=r.work, out=r.out, n=r.n)),
    ]


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of these files."""
    for t in map(BY_NAME.__getitem__, encoders()):
        for weighted in (False, True):
            if has_scales_of_row(t):
                yield from row_kernels(t, weighted)
            if is_grid_row(t):
                yield from grid_row_kernels(t, weighted)
        if has_one_scale(t):
            yield max_rows_kernel(t)

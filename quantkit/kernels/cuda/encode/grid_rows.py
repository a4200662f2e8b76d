"""Encoders of grid types with a row scale, the rows of IQ1_S_R4 and IQ1_M_R4: grid_rows.cu.

    parts    x importance scales out rows n points entries lists words
                                     importance f32 [n] (0: none), scales f32 [rows, sub-blocks of a row]
    codes    scales out n

x: f32 [rows, n]; out: the rows' bytes. Rows must be finite.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.core.neighbours import grid_on
from quantkit.kernels.cuda.encode import encoders
from quantkit.kernels.formats import FORMATS
from quantkit.types import BY_NAME, TensorType

_FILE = "encode/grid_rows.cu"
_LANES = 128


def is_grid_row(t: TensorType) -> bool:
    """Return whether this encodes the type."""
    return t.row_header > 0 and FORMATS[t.name].grid > 0


def grid_row_kernels(t: TensorType, weighted: bool) -> tuple[Kernel, Kernel]:
    """Return the kernels that encode a type, in the order of their launches."""
    defines: dict[str, str | int] = {"ENCODER": f"Encode{t.name}"}
    codes = Kernel(_FILE, "codes").bind(**defines)
    if weighted:
        defines["WEIGHTED"] = 1
    return Kernel(_FILE, "parts").bind(**defines), codes


def grid_row_bytes(t: TensorType, rows: int, n: int) -> int:
    """Return the working memory of a launch in bytes: the scales of sub-blocks."""
    return 4 * rows * (n // FORMATS[t.name].span)


def grid_row_launches(
    device: Device, t: TensorType, x: int, rows: int, n: int, out: int, importance: int, work: int
) -> list[Launch]:
    """Return the launches that encode rows; x, out, importance and work are addresses."""
    parts, codes = grid_row_kernels(t, bool(importance))
    block = parts.block(
        x=x, importance=importance, scales=work, out=out, rows=rows, n=n, **grid_on(device, t)._asdict()
    )
    blocks = -(-rows * (n // FORMATS[t.name].span) // _LANES)
    return [
        Launch(parts, (max(1, blocks), 1, 1), block),
        Launch(codes, (max(1, rows), 1, 1), codes.block(scales=work, out=out, n=n)),
    ]


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for t in filter(is_grid_row, map(BY_NAME.__getitem__, encoders())):
        for weighted in (False, True):
            yield from grid_row_kernels(t, weighted)

"""Encodes rows of float32 as blocks of a type on the device: encode.cu, byte for byte as quantkit.kernels.quantize.

    encode         x importance squares out blocks per_row      importance f32 [n] (0: none)
                   points entries lists words                   of a type with a grid (core/neighbours.py), else 0
    mean_squares   x squares rows n                             squares f32 [rows]

x: f32 [rows, n]; out: the rows' bytes, 16-byte aligned. Rows must be finite; whether scales are is for the caller to
check, as for the CPU's encoders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import SOURCES, Kernel, Shape
from quantkit.kernels.cuda.core.neighbours import grid_on
from quantkit.kernels.formats import format_of
from quantkit.types import BY_NAME, TensorType

_FILE = "encode/encode.cu"
#: Lanes of a block of threads.
_LANES = 128


@cache
def encoders() -> dict[str, str]:
    """Return the types that can be encoded, each with the file its encoder is in."""
    files = sorted((SOURCES / "encode").glob("*.cuh"))
    found = [(name, f.name) for f in files for name in re.findall(r"^struct Encode(\w+)", f.read_text(), re.MULTILINE)]
    return dict(found)


def weighs(t: TensorType) -> bool:
    """Return whether a type's bytes depend on the importance of columns."""
    return t.imatrix != "ignored"


def _by_row(t: TensorType) -> bool:
    """Return whether weights come of the mean square of a whole row, not of a block's."""
    return t.family == "legacy"


def encode(t: TensorType, rows: int, n: int, weighted: bool = False) -> Shape:
    """Return how to encode rows of n values.

    Raises:
        TypeNotSupported: there is no encoder, or n is not a multiple of the type's block.
    """
    if t.name not in encoders() or n % t.block:
        raise TypeNotSupported(f"no CUDA device encodes rows of {n} values as {t.name}")
    kernel = Kernel(_FILE, "encode").bind(ENCODER=f"Encode{t.name}")
    if weighted:
        kernel = kernel.bind(WEIGHTED=1)
    blocks_at_once = _LANES * format_of(t).span // t.block  # a lane has a sub-block
    return Shape(kernel, (max(1, -(-rows * (n // t.block) // blocks_at_once)), 1, 1))


def mean_squares(t: TensorType, rows: int) -> Shape:
    """Return how to compute the mean square of rows that are to be encoded with an importance of columns."""
    kernel = Kernel(_FILE, "mean_squares").bind(ENCODER=f"Encode{t.name}", WEIGHTED=1)
    return Shape(kernel, (max(1, -(-rows // 32)), 1, 1))


def encode_rows(
    device: Device, t: TensorType, x: int, rows: int, n: int, out: int, importance: int = 0, squares: int = 0
) -> None:
    """Launch what encodes rows of float32.

    All are addresses: x f32 [rows, n], out uint8 [rows, row_bytes], importance f32 [n], or 0 for none; squares: room
    for 4 * rows bytes where there is an importance. It is ignored for a type that does not use one.
    """
    weighted = bool(importance) and weighs(t)
    shape = encode(t, rows, n, weighted)
    launches = []
    if weighted and _by_row(t):
        before = mean_squares(t, rows)
        launches.append(Launch(before.kernel, before.grid, before.kernel.block(x=x, squares=squares, rows=rows, n=n)))
    per_row = n // t.block
    by_row = squares if _by_row(t) else 0
    block = shape.kernel.block(
        x=x, importance=importance, squares=by_row, out=out, blocks=rows * per_row, per_row=per_row,
        **grid_on(device, t)._asdict(),
    )  # fmt: skip
    launches.append(Launch(shape.kernel, shape.grid, block))
    device.run(launches)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for name in encoders():
        t = BY_NAME[name]
        yield encode(t, 1, t.block).kernel
        if weighs(t):
            yield encode(t, 1, t.block, weighted=True).kernel
        if _by_row(t) and weighs(t):
            yield mean_squares(t, 1).kernel

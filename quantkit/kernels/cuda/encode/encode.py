"""Encodes rows of float32 as blocks of a type on the device: encode.cu, byte for byte as quantkit.kernels.quantize.

    encode         x importance squares out blocks per_row      importance f32 [n] (0: none)
                   points entries lists words                   of a type with a grid (core/lookups.py), else 0
    mean_squares   x squares rows n                             squares f32 [rows]

x: f32 [rows, n]; out: the rows' bytes, 16-byte aligned. Rows must be finite; whether scales are is for the caller to
check, as for the CPU's encoders.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.core.lookups import codebook_on, grid_on
from quantkit.kernels.cuda.encode import SEARCHES as SEARCHES
from quantkit.kernels.cuda.encode import Rows as Rows
from quantkit.kernels.cuda.encode import encoders as encoders
from quantkit.kernels.cuda.encode import struct_of
from quantkit.kernels.cuda.encode import weighs as weighs
from quantkit.kernels.cuda.encode.interleaved import (
    GUARDED,
    changing_kernels,
    changing_launches,
    is_guarded,
    is_q8_k,
    q8_k_kernel,
    q8_k_launch,
)
from quantkit.kernels.cuda.encode.rows import (
    grid_row_bytes,
    grid_row_kernels,
    grid_row_launches,
    has_one_scale,
    is_grid_row,
    max_rows_kernel,
    max_rows_launch,
    row_kernels,
    row_launches,
)
from quantkit.kernels.cuda.encode.trellis import is_trellis, trellis_kernel, trellis_launch, trellis_working_bytes
from quantkit.kernels.formats import format_of
from quantkit.types import BY_NAME, TensorType

_FILE = "encode/encode.cu"
_REFUSED = "CUDA devices cannot encode rows of {} values as {}"
#: Lanes of a block of threads; fewer if each needs more shared memory.
_LANES = 128
_FEWER_LANES = {"IQ2_K": 64, "Q6_0": 64}
#: Searches that also store levels, which in sub-blocks of 32 take as much memory as values.
_FEWER_LANES |= {f"{name}_IK": 64 for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS")}


def _by_row(t: TensorType) -> bool:
    """Return whether weights derive from the mean square of a row, not of a block."""
    return t.family == "legacy"


def _kernel(name: str, t: TensorType, search: str = "") -> Kernel:
    struct = struct_of(t, search)
    return Kernel(_FILE, name).bind(ENCODER=struct, LANES=_FEWER_LANES.get(struct.removeprefix("Encode"), _LANES))


def encode(
    t: TensorType, rows: int, n: int, weighted: bool = False, search: str = "", interleaved: bool = False
) -> Shape:
    """Return the kernel and grid that encode rows of n values; ``search``, ``interleaved`` as in ``encode_rows``.

    Raises:
        TypeNotSupported: there is no encoder, or n is not a multiple of the type's block.
    """
    if t.name not in encoders(search) or n % t.block:
        raise TypeNotSupported(_REFUSED.format(n, t.name), "QK-E302")
    kernel = _kernel("encode", t, search)
    if weighted:
        kernel = kernel.bind(WEIGHTED=1)
    if interleaved and is_guarded(t, weighted):
        kernel = kernel.bind(INTERLEAVED=GUARDED[t.name])
    blocks_at_once = kernel.threads * format_of(t).span // t.block  # a lane has a sub-block
    return Shape(kernel, (max(1, -(-rows * (n // t.block) // blocks_at_once)), 1, 1))


def mean_squares(t: TensorType, rows: int) -> Shape:
    """Return the kernel and grid that compute the mean square of rows, for encoders with an importance of columns."""
    kernel = _kernel("mean_squares", t).bind(WEIGHTED=1)
    return Shape(kernel, (max(1, -(-rows // 32)), 1, 1))


def working_bytes(t: TensorType, rows: int, n: int, weighted: bool = True) -> int:
    """Return the scratch bytes for encoding rows of n values, with an importance or without."""
    if is_trellis(t):
        return trellis_working_bytes(t, rows, n)
    if is_grid_row(t):
        return grid_row_bytes(t, rows, n)
    return 4 * rows if weighted and weighs(t) and _by_row(t) else 0


def encode_rows(device: Device, t: TensorType, r: Rows, *, search: str = "", interleaved: bool = False) -> None:
    """Launch the kernels that encode rows of float32.

    ``search``: one of ``SEARCHES``, if not that of the type's own project. ``interleaved``: as ik_llama.cpp encodes
    rows that it interleaves, in whole groups.
    """
    weighted = bool(r.importance) and weighs(t)
    if is_q8_k(t):
        if r.n % t.block or r.rows % t.interleave:
            raise TypeNotSupported(_REFUSED.format(r.n, t.name), "QK-E302")
        device.run([q8_k_launch(t, r)])
        return
    launches = _row_launches(device, t, r) if t.row_header else _block_launches(device, t, r, search, interleaved)
    device.run([*launches, *(changing_launches(t, r, weighted) if interleaved else [])])


def _block_launches(device: Device, t: TensorType, r: Rows, search: str, interleaved: bool) -> list[Launch]:
    weighted = bool(r.importance) and weighs(t)
    shape = encode(t, r.rows, r.n, weighted, search, interleaved)
    launches = []
    if weighted and _by_row(t):
        before = mean_squares(t, r.rows)
        block = before.kernel.block(x=r.x, squares=r.work, rows=r.rows, n=r.n)
        launches.append(Launch(before.kernel, before.grid, block))
    per_row = r.n // t.block
    block = shape.kernel.block(
        x=r.x, importance=r.importance, squares=r.work if _by_row(t) else 0, out=r.out, blocks=r.rows * per_row,
        per_row=per_row, **grid_on(device, t)._asdict(),
    )  # fmt: skip
    return [*launches, Launch(shape.kernel, shape.grid, block)]


def _row_launches(device: Device, t: TensorType, r: Rows) -> list[Launch]:
    if t.name not in encoders() or r.n % t.block:
        raise TypeNotSupported(_REFUSED.format(r.n, t.name), "QK-E302")
    if is_trellis(t):
        return [trellis_launch(device, t, r)]
    if has_one_scale(t):
        return [max_rows_launch(t, r)]
    if is_grid_row(t):
        return grid_row_launches(device, t, r)
    return row_launches(t, r)


def put_tables(device: Device, t: TensorType) -> None:
    """Upload the tables of a type's encoder to a device, where all streams find them."""
    if is_trellis(t):
        codebook_on(device, t)
    else:
        grid_on(device, t)


def kernels_of(t: TensorType, weighted: bool = False, search: str = "", interleaved: bool = False) -> list[Kernel]:
    """Return the kernels that encode a type; ``weighted``: with an importance; the rest is as in ``encode_rows``."""
    if is_q8_k(t):
        return [q8_k_kernel(t)]
    changing = changing_kernels(t, weighted) if interleaved else []
    if is_trellis(t):
        return [trellis_kernel(t)]
    if is_grid_row(t):
        return [*grid_row_kernels(t, weighted), *changing]
    if t.row_header:
        return [max_rows_kernel(t)] if has_one_scale(t) else [*row_kernels(t, weighted)]
    kernels_of_type = [encode(t, 1, t.block, weighted, search, interleaved).kernel, *changing]
    return [*kernels_of_type, mean_squares(t, 1).kernel] if weighted and _by_row(t) else kernels_of_type


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for search in SEARCHES:
        for name in encoders(search):
            t = BY_NAME[name]
            for weighted in (False, True) if weighs(t) else (False,):
                for interleaved in (False, True) if is_guarded(t, weighted) else (False,):
                    yield from (k for k in kernels_of(t, weighted, search, interleaved) if k.file == _FILE)

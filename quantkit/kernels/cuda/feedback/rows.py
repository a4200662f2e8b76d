"""Rows between bytes and tiles on a device: rows.cu.

    to_lanes       x out rows n
    read_scales    bytes ... by    a tile's scales, from bytes
    keep           loss best better rows share
    write          bytes better ... added

addresses: of tiles' arrays, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.feedback.sweeps import tiles
from quantkit.kernels.cuda.feedback.tables import Tables
from quantkit.kernels.levels import Bits, Levels

_FILE = "feedback/rows.cu"
#: Number of parts of a tile's bytes, or scales, one for each block of threads.
_PARTS = 16


class RowAddresses(NamedTuple):
    """Rows on a device, by addresses.

    target: f32 [rows, n], the values to approximate. blocks: uint8 [rows, row bytes], the reference's bytes, improved
    in place. start: bytes to begin with, for the target; may be ``blocks``. before, after: f64 [rows], the losses of
    the reference's bytes and of the best.
    """

    rows: int
    target: int
    blocks: int
    start: int
    before: int
    after: int


def launch(shape: Shape, **values: int | float) -> Launch:
    """Return a launch of a kernel with these arguments."""
    return Launch(shape.kernel, shape.grid, shape.kernel.block(**values), shape.shared)


def sub_blocks_of_d(layout: Levels, n: int) -> int:
    """Return the sub-blocks of a super-block."""
    return layout.type.block // layout.span if layout.d and not layout.d.startswith("row:") else n // layout.span


def to_lanes(rows: int, n: int, x: int, out: int) -> Launch:
    """Return the launch that makes tiles of rows f32 [rows, n]."""
    shape = Shape(Kernel(_FILE, "to_lanes"), (tiles(rows), n // 32, 1))
    return launch(shape, x=x, out=out, rows=rows, n=n)


def read_scales(on: Tables, layout: Levels, rows: int, n: int, source: int, addresses: dict[str, int]) -> Launch:
    """Return the launch that decodes the scales of tiles from bytes."""

    def bits(fields: Bits | None) -> int:
        return 0 if fields is None else fields.shape[1]

    arrays = ("scale", "minimum", "inverse", "m", "shift", "d", "dmin", "factor_index")
    return launch(
        _shape("read_scales", rows), rows=rows, **_layout(layout, n), bytes=source, factor_fields=on.factor_fields,
        minimum_fields=on.minimum_fields, shift_fields=on.shift_fields, d_field=on.d_field, dmin_field=on.dmin_field,
        factor_indices=on.factor_indices, factors=on.factors, **{name: addresses[name] for name in arrays},
        factor_bits=bits(layout.scale), minimum_bits=bits(layout.minimum), shift_bits=bits(layout.shift),
        by_row=int(layout.d.startswith("row:")), by=layout.shift_step,
    )  # fmt: skip


def keep(rows: int, best: int, addresses: dict[str, int], share: float) -> Launch:
    """Return the launch that marks rows whose loss is less than ``share`` of the best, and sets that."""
    shape = Shape(Kernel(_FILE, "keep"), (-(-rows // 128), 1, 1))
    return launch(shape, loss=addresses["loss"], best=best, better=addresses["better"], rows=rows, share=share)


def write(on: Tables, layout: Levels, rows: int, n: int, blocks: int, addresses: dict[str, int]) -> Launch:
    """Return the launch that writes the integers of rows that are better."""
    arrays, values = ("better", "levels", "m", "shift", "d", "dmin", "factor_index"), len(layout.levels)
    return launch(
        _shape("write", rows), rows=rows, **_layout(layout, n), bytes=blocks, sources=on.sources,
        level_codes=on.level_codes,
        factor_codes=on.factor_codes, **{name: addresses[name] for name in arrays}, n=n // layout.type.block * values,
        values=values,
    )  # fmt: skip


def _shape(name: str, rows: int) -> Shape:
    return Shape(Kernel(_FILE, name), (tiles(rows), _PARTS, 1))


def _layout(layout: Levels, n: int) -> dict[str, int]:
    """Return the arguments that reading and writing bytes share."""
    t = layout.type
    return {
        "row_bytes": t.row_bytes(n), "block_bytes": t.block_bytes, "header": t.row_header, "subs": n // layout.span,
        "super": sub_blocks_of_d(layout, n), "block": t.block // layout.span, "d_bits": _width(layout.d),
        "dmin_bits": _width(layout.dmin), "added": int(layout.added),
    }  # fmt: skip


def _width(kind: str) -> int:
    if not kind:
        return 0
    return 32 if "f32" in kind else 16


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for name in ("to_lanes", "read_scales", "keep", "write"):
        yield Kernel(_FILE, name)

"""Rows between bytes and tiles on a device: rows.cu.

    to_lanes       x out rows n
    read_scales    bytes ... by    a tile's scales, from bytes
    keep           loss best better rows share
    write          bytes better ... added

at: the addresses of tiles' arrays, by name.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.feedback.fields import Tables
from quantkit.kernels.cuda.feedback.tiles import tiles
from quantkit.kernels.levels import Bits, Levels

_FILE = "feedback/rows.cu"
#: Parts of a tile's bytes, or scales, that blocks of threads take.
_PARTS = 16


def launch(shape: Shape, **values: int | float) -> Launch:
    """Return a launch of a kernel with these arguments."""
    return Launch(shape.kernel, shape.grid, shape.kernel.block(**values), shape.shared)


def sub_blocks_of_d(of: Levels, n: int) -> int:
    """Return the sub-blocks of a super-block."""
    return of.type.block // of.span if of.d and not of.d.startswith("row:") else n // of.span


def to_lanes(rows: int, n: int, x: int, out: int) -> Launch:
    """Return what makes tiles of rows f32 [rows, n]."""
    shape = Shape(Kernel(_FILE, "to_lanes"), (tiles(rows), n // 32, 1))
    return launch(shape, x=x, out=out, rows=rows, n=n)


def read_scales(on: Tables, of: Levels, rows: int, n: int, source: int, at: dict[str, int]) -> Launch:
    """Return what sets the scales of tiles to those of bytes."""

    def bits(fields: Bits | None) -> int:
        return 0 if fields is None else fields.shape[1]

    arrays = ("scale", "low", "inverse", "m", "raised", "d", "dmin", "place")
    return launch(
        _shape("read_scales", rows), rows=rows, **_layout(of, n), bytes=source, factor_fields=on.factor_fields,
        minimum_fields=on.minimum_fields, shift_fields=on.shift_fields, d_field=on.d_field, dmin_field=on.dmin_field,
        places=on.places, factors=on.factors, **{name: at[name] for name in arrays}, factor_bits=bits(of.scale),
        minimum_bits=bits(of.minimum), shift_bits=bits(of.shift), by_row=int(of.d.startswith("row:")), by=of.by,
    )  # fmt: skip


def keep(rows: int, best: int, at: dict[str, int], share: float) -> Launch:
    """Return what decides which rows are better: their loss is less than so much of the best, which is set."""
    shape = Shape(Kernel(_FILE, "keep"), (-(-rows // 128), 1, 1))
    return launch(shape, loss=at["loss"], best=best, better=at["better"], rows=rows, share=share)


def write(on: Tables, of: Levels, rows: int, n: int, made: int, at: dict[str, int]) -> Launch:
    """Return what writes the integers of rows that are better."""
    arrays, values = ("better", "levels", "m", "raised", "d", "dmin", "place"), len(of.levels)
    return launch(
        _shape("write", rows), rows=rows, **_layout(of, n), bytes=made, sources=on.sources, level_codes=on.level_codes,
        factor_codes=on.factor_codes, **{name: at[name] for name in arrays}, n=n // of.type.block * values,
        values=values,
    )  # fmt: skip


def _shape(name: str, rows: int) -> Shape:
    return Shape(Kernel(_FILE, name), (tiles(rows), _PARTS, 1))


def _layout(of: Levels, n: int) -> dict[str, int]:
    """Return what reading and writing bytes takes alike."""
    t = of.type
    return {
        "row_bytes": t.row_bytes(n), "block_bytes": t.block_bytes, "header": t.row_header, "subs": n // of.span,
        "super": sub_blocks_of_d(of, n), "block": t.block // of.span, "d_bits": _width(of.d),
        "dmin_bits": _width(of.dmin), "added": int(of.added),
    }  # fmt: skip


def _width(kind: str) -> int:
    return 0 if not kind else 32 if "f32" in kind else 16


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for name in ("to_lanes", "read_scales", "keep", "write"):
        yield Kernel(_FILE, name)

"""Tiles of types with a grid, except in sweeps over groups: group_rows.cu.

    read_codes         bytes fields ... codes classes
    q_of_codes         codes q
    set_scales         factors factor_index d shift scale minimum inverse
    set_values         codes scale minimum x v e
    errors             x v e n
    gradient           h e g n
    losses             g e loss n
    copy_losses        loss before after rows
    fit_factors        h factors levels shift v g e c d factor_index
    fit_super_scales   the same

addresses: of tiles' arrays, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantkit.kernels.cpu.feedback.codebook_tree import tree_of
from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.feedback.rows import launch, sub_blocks_of_d
from quantkit.kernels.cuda.feedback.sweeps import tiles
from quantkit.kernels.cuda.feedback.tables import Tables, TreeTables, points_offset, tables
from quantkit.kernels.levels import Levels

Addresses = dict[str, int]

_FILE = "feedback/group_rows.cu"
#: Columns that a block of threads multiplies at once; number of parts of a tile, one for each block of threads.
_WIDE, _PARTS = 128, 16
_KERNELS = (
    "read_codes",
    "q_of_codes",
    "set_scales",
    "set_values",
    "errors",
    "gradient",
    "losses",
    "copy_losses",
    "fit_factors",
    "fit_super_scales",
)


def has_codebooks(layout: Levels) -> bool:
    """Return whether a bit of each sub-block names the half of the points that it may choose from."""
    return layout.grid is not None and layout.grid.codebooks > 1 and layout.shift is not None


def read_codes(
    on: TreeTables, fields: Tables, layout: Levels, rows: int, n: int, source: int, addresses: Addresses
) -> Launch:
    """Return the launch that decodes bytes to the codes of groups and the classes of sub-blocks."""
    t = layout.type
    return launch(
        _shape("read_codes", rows),
        **_codes(on, layout, rows, n, addresses),
        bytes=source,
        fields=fields.level_fields,
        shift_fields=fields.shift_fields,
        classes=addresses["classes"],
        row_bytes=t.row_bytes(n),
        block_bytes=t.block_bytes,
        header=t.row_header,
        block=t.block,
        bits=layout.levels.shape[1],
        span=layout.span,
        codebooks=2 if has_codebooks(layout) else 1,
    )


def q_of_codes(on: TreeTables, layout: Levels, rows: int, n: int, addresses: Addresses) -> Launch:
    """Return the launch that converts codes to the integers of groups."""
    return launch(_shape("q_of_codes", rows), **_codes(on, layout, rows, n, addresses), q=addresses["q"])


def _codes(on: TreeTables, layout: Levels, rows: int, n: int, addresses: Addresses) -> dict[str, Any]:
    grid = layout.grid
    assert grid is not None
    return {
        "order": on.order, "point_of_index": on.point_of_index, "signs": on.signs, "pattern_of": on.pattern_of, "codes":
        addresses["codes"], "rows": rows, "n": n, "size": grid.size, "parts": grid.points_per_group, "index_bits":
        grid.index_bits, "sign_bits": grid.signs, "even": int(grid.is_even), "point_bits":
        tree_of(layout.type.name).tree.bits,
    }  # fmt: skip


def set_scales(
    fields: Tables, layout: Levels, rows: int, n: int, addresses: Addresses, *, stored: bool = False
) -> Launch:
    """Return the launch that computes scales from factors and d; ``stored``: rounded as in bytes."""
    arrays = _select(addresses, "shift", "d", "factor_index", "scale", "minimum", "inverse")
    return launch(
        _shape("set_scales", rows),
        **arrays,
        factors=fields.factors,
        subs=n // layout.span,
        super=sub_blocks_of_d(layout, n),
        stored=int(stored and layout.has_half_scales),
    )


def losses(on: TreeTables, layout: Levels, rows: int, n: int, order: int, h: int, addresses: Addresses) -> list[Launch]:
    """Return the launches that compute v, g, e and the losses of tiles from codes and scales."""
    tree, size = tree_of(layout.type.name).tree, tree_of(layout.type.name).grid.size
    arrays = _select(addresses, "codes", "x", "scale", "minimum", "v", "e")
    points = on.lines + points_offset(layout.type)
    return [
        launch(_shape("set_values", rows), lines=points, signs=on.signs, order=order, **arrays, n=n, span=layout.span,
               size=size, point_bits=tree.bits, unit=tree.unit),
        gradient(rows, n, h, addresses),
        launch(_shape("losses", rows, 1), **_select(addresses, "g", "e", "loss"), n=n),
    ]  # fmt: skip


def copy_losses(rows: int, before: int, after: int, addresses: Addresses) -> Launch:
    """Return the launch that copies the losses, before and after, from tiles to rows."""
    shape = Shape(Kernel(_FILE, "copy_losses"), (-(-rows // 256), 1, 1))
    return launch(shape, loss=addresses["loss"], before=before, after=after, rows=rows)


def errors(rows: int, n: int, addresses: Addresses) -> Launch:
    """Return the launch that sets e = x - v."""
    return launch(_shape("errors", rows), **_select(addresses, "x", "v", "e"), n=n)


def gradient(rows: int, n: int, h: int, addresses: Addresses) -> Launch:
    """Return the launch that sets g = H e."""
    return launch(_shape("gradient", rows, -(-n // _WIDE)), h=h, **_select(addresses, "e", "g"), n=n)


def fit(fields: Tables, layout: Levels, rows: int, n: int, h: int, addresses: Addresses) -> list[Launch]:
    """Return the launches that fit the factors of sub-blocks, then d."""
    arrays = _select(addresses, "levels", "shift", "v", "g", "e", "c", "d", "factor_index")
    arguments = {
        "h": h, "factors": fields.factors, **arrays, "n": n, "span": layout.span,
        "super": sub_blocks_of_d(layout, n) * layout.span, "factor_count": len(tables(layout.type).factors),
        "half": int(layout.has_half_scales),
    }  # fmt: skip
    return [launch(_shape(name, rows, 1), **arguments) for name in ("fit_factors", "fit_super_scales")]


def _select(addresses: Addresses, *names: str) -> Addresses:
    return {name: addresses[name] for name in names}


def _shape(name: str, rows: int, parts: int = _PARTS) -> Shape:
    return Shape(Kernel(_FILE, name), (tiles(rows), parts, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from (Kernel(_FILE, name) for name in _KERNELS)

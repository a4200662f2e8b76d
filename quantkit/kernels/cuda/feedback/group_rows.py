"""What tiles of grids need beside sweeps over groups: group_rows.cu.

    read_codes         bytes fields ... codes classes
    q_of_codes         codes q
    set_scales         factors place d raised scale low inverse
    set_values         codes scale low x v e
    errors             x v e n
    gradient           h e g n
    losses             g e loss n
    copy_losses        loss before after rows
    fit_factors        h factors levels raised v g e c d place
    fit_super_scales   the same

at: the addresses of tiles' arrays, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantkit.kernels.cpu.feedback.books import book_of
from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.feedback.books import BookTables, first_byte_of_points
from quantkit.kernels.cuda.feedback.fields import Tables, tables
from quantkit.kernels.cuda.feedback.rows import launch, sub_blocks_of_d
from quantkit.kernels.cuda.feedback.tiles import tiles
from quantkit.kernels.levels import Levels

At = dict[str, int]

_FILE = "feedback/group_rows.cu"
#: Columns that a block of threads multiplies at once; parts of a tile that blocks of threads take.
_WIDE, _PARTS = 128, 16
_KERNELS = (
    *("read_codes", "q_of_codes", "set_scales", "set_values", "errors", "gradient", "losses", "copy_losses"),
    *("fit_factors", "fit_super_scales"),
)


def has_books(of: Levels) -> bool:
    """Return whether a bit of each sub-block names the half of the points that it may choose from."""
    return of.grid is not None and of.grid.books > 1 and of.shift is not None


def read_codes(on: BookTables, fields: Tables, of: Levels, rows: int, n: int, source: int, at: At) -> Launch:
    """Return what sets the codes of groups, and the classes of sub-blocks, to those of bytes."""
    t = of.type
    return launch(
        _shape("read_codes", rows), **_codes(on, of, rows, n, at), bytes=source, fields=fields.level_fields,
        shift_fields=fields.shift_fields, classes=at["classes"], row_bytes=t.row_bytes(n), block_bytes=t.block_bytes,
        header=t.row_header, block=t.block, bits=of.levels.shape[1], span=of.span, books=2 if has_books(of) else 1,
    )  # fmt: skip


def q_of_codes(on: BookTables, of: Levels, rows: int, n: int, at: At) -> Launch:
    """Return what sets the integers of groups to those of codes."""
    return launch(_shape("q_of_codes", rows), **_codes(on, of, rows, n, at), q=at["q"])


def _codes(on: BookTables, of: Levels, rows: int, n: int, at: At) -> dict[str, Any]:
    grid = of.grid
    assert grid is not None
    return {
        "order": on.order, "place": on.place, "signs": on.signs, "pattern_of": on.pattern_of, "codes": at["codes"],
        "rows": rows, "n": n, "size": grid.size, "parts": grid.parts, "index_bits": grid.index_bits,
        "sign_bits": grid.signs, "even": int(grid.is_even), "point_bits": book_of(of.type.name).tree.bits,
    }  # fmt: skip


def set_scales(fields: Tables, of: Levels, rows: int, n: int, at: At, *, stored: bool = False) -> Launch:
    """Return what sets scales to those of factors and d; ``stored``: as they are in bytes."""
    arrays = _of(at, "raised", "d", "place", "scale", "low", "inverse")
    return launch(
        _shape("set_scales", rows), **arrays, factors=fields.factors, subs=n // of.span, super=sub_blocks_of_d(of, n),
        stored=int(stored and of.has_half_scales),
    )  # fmt: skip


def losses(on: BookTables, of: Levels, rows: int, n: int, order: int, h: int, at: At) -> list[Launch]:
    """Return what sets the losses of tiles to those of what codes and scales stand for. v, g and e are set."""
    tree, size = book_of(of.type.name).tree, book_of(of.type.name).grid.size
    arrays = _of(at, "codes", "x", "scale", "low", "v", "e")
    points = on.lines + first_byte_of_points(of.type)
    return [
        launch(_shape("set_values", rows), lines=points, signs=on.signs, order=order, **arrays, n=n, span=of.span,
               size=size, point_bits=tree.bits, unit=tree.unit),
        gradient(rows, n, h, at),
        launch(_shape("losses", rows, 1), **_of(at, "g", "e", "loss"), n=n),
    ]  # fmt: skip


def copy_losses(rows: int, before: int, after: int, at: At) -> Launch:
    """Return what sets the losses of rows, before and after, to those of tiles."""
    shape = Shape(Kernel(_FILE, "copy_losses"), (-(-rows // 256), 1, 1))
    return launch(shape, loss=at["loss"], before=before, after=after, rows=rows)


def errors(rows: int, n: int, at: At) -> Launch:
    """Return what sets e = x - v."""
    return launch(_shape("errors", rows), **_of(at, "x", "v", "e"), n=n)


def gradient(rows: int, n: int, h: int, at: At) -> Launch:
    """Return what sets g = H e."""
    return launch(_shape("gradient", rows, -(-n // _WIDE)), h=h, **_of(at, "e", "g"), n=n)


def fit(fields: Tables, of: Levels, rows: int, n: int, h: int, at: At) -> list[Launch]:
    """Return what fits the factors of sub-blocks, then d."""
    arrays = _of(at, "levels", "raised", "v", "g", "e", "c", "d", "place")
    arguments = {
        "h": h, "factors": fields.factors, **arrays, "n": n, "span": of.span,
        "super": sub_blocks_of_d(of, n) * of.span, "factor_count": len(tables(of.type).factors),
        "half": int(of.has_half_scales),
    }  # fmt: skip
    return [launch(_shape(name, rows, 1), **arguments) for name in ("fit_factors", "fit_super_scales")]


def _of(at: At, *names: str) -> At:
    return {name: at[name] for name in names}


def _shape(name: str, rows: int, parts: int = _PARTS) -> Shape:
    return Shape(Kernel(_FILE, name), (tiles(rows), parts, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from (Kernel(_FILE, name) for name in _KERNELS)

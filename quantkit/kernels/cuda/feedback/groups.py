"""Tiles of types whose groups of columns have their levels from a grid: groups.cu.

    feed_groups        columns order group_of classes u h ... n span
    descend_groups     the same

The steps are those of the CPU's ``GroupTile.improve``, each a launch over all tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.books import book_of
from quantkit.kernels.cpu.feedback.options import Rounding
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.core.limits import shared_of_block
from quantkit.kernels.cuda.core.lookups import put_once
from quantkit.kernels.cuda.feedback import group_rows
from quantkit.kernels.cuda.feedback.books import book_macros, book_on
from quantkit.kernels.cuda.feedback.fields import tables_on
from quantkit.kernels.cuda.feedback.group_rows import At
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.feedback.rows import keep, launch, read_scales, sub_blocks_of_d, to_lanes, write
from quantkit.kernels.cuda.feedback.tiles import ROWS, tiles
from quantkit.kernels.levels import Grouping, Levels, all_levels
from quantkit.types import TensorType

Ints = npt.NDArray[np.int32]

_FILE = "feedback/groups.cu"
#: What search.cuh and group_sweeps.cuh count: lanes of a line, entries of a list, warps of a block of threads, columns
#: that are visited together, lines of a table where roots are all there is; bytes of operands of products (tiles.cuh).
_LANES, _MOST, _WARPS, _BLOCK, _TABLE_LINES, _CHUNKS = 16, 64, 8, 64, 32, 41984
#: Shared memory that a block may have on every device that is known.
_LEAST = 64 << 10


# ---------------------------------------------------------------- kernels


@cache
def _sizes(t: TensorType) -> dict[str, int]:
    """Return the macros of a sweep that are chosen so that its shared memory is what every device has."""
    usual, less = ({"HELD": held, "KEEPS_SQUARE": square} for held, square in ((8, 1), (4, 0)))
    chosen = next(each for each in (usual, less) if _shared_bytes(t, **each) <= _LEAST)
    return chosen | {"SHARED_BYTES": _shared_bytes(t, **chosen)}


def _shared_bytes(t: TensorType, HELD: int, KEEPS_SQUARE: int) -> int:  # noqa: N803
    """Return the shared memory of a sweep: group_sweeps.cuh's Shared, or two chunks."""
    book = book_of(t.name)
    grid, tree = book.grid, book.tree
    lines = grid.parts * tree.root_lines if tree.heights else min(tree.root_lines, _TABLE_LINES)
    room = 0 if tree.heights == 0 else 2 * _MOST + (HELD * _LANES if tree.heights > 1 else 0)
    words = lines * _LANES * grid.size + (_BLOCK**2 if KEEPS_SQUARE else 4)
    words += (2 * _BLOCK + grid.columns) * ROWS + 4 * grid.columns**2
    words += (2 * (4 + grid.parts) + grid.parts) * ROWS + 2 * _WARPS * (room + 1)
    return max(_CHUNKS, 4 * words)


def has_room(t: TensorType, capability: int) -> bool:
    """Tell whether devices of a compute capability have the shared memory that a type's grid takes."""
    return _sizes(t)["SHARED_BYTES"] <= shared_of_block(capability)


def _sweep(name: str, t: TensorType, rows: int) -> Shape:
    kernel = Kernel(_FILE, name).bind(**book_macros(t), **_sizes(t))
    return Shape(kernel, (tiles(rows), 1, 1), _sizes(t)["SHARED_BYTES"])


# ---------------------------------------------------------------- the order of columns


def _order(grouping: Grouping, n: int) -> tuple[Ints, Ints]:
    """Return the columns, group after group, and the group of each column: int32 [n]."""
    order = grouping.order(n).astype(np.int32)
    group_of = np.empty(n, np.int32)
    group_of[order] = np.arange(n, dtype=np.int32) // grouping.size
    return order, group_of


# ---------------------------------------------------------------- a launch after the other


def group_lines(of: Levels, n: int) -> dict[str, int]:
    """Return how many lines of a tile each array has, in the order in which they lie in working memory."""
    assert of.grid is not None
    subs = n // of.span
    lines = dict.fromkeys(("x", "levels", "v", "g", "e", "c"), n)
    lines |= dict.fromkeys(("scale", "low", "inverse", "m", "raised", "place", "classes"), subs)
    lines |= dict.fromkeys(("d", "dmin"), subs // sub_blocks_of_d(of, n))
    return lines | {"codes": n // of.grid.size, "q": n // of.grid.columns, "loss": 2, "better": 1}


def group_launches(
    device: Device, of: Levels, rows: int, target: int, made: int, start: int, by: DeviceMetric, how: Rounding,
    before: int, after: int, at: At,
) -> list[Launch]:  # fmt: skip
    """Return what improves rows, as rounding.py's ``round_rows`` says.

    at: the addresses of arrays of ``group_lines``. ValueError if the metric is not for the type's groups.
    """
    if by.grouping is None or by.grouping != of.grouping:
        raise ValueError(f"the metric is not for groups of columns as {of.type} has them")
    on, fields, n, h = book_on(device, of.type), tables_on(device, of.type), by.n, by.h
    order, group_of = put_once(device, _order, by.grouping, n)
    columns = order, group_of
    set_scales = partial(group_rows.set_scales, fields, of, rows, n, at)
    losses = group_rows.losses(on, of, rows, n, columns[0], h, at)
    descend = [_sweep_launch(device, "descend_groups", of, rows, by, columns, at)] * how.sweeps

    def read(source: int) -> list[Launch]:
        codes = group_rows.read_codes(on, fields, of, rows, n, source, at)
        return [codes, read_scales(fields, of, rows, n, source, at)]

    each = [
        set_scales(), _sweep_launch(device, "feed_groups", of, rows, by, columns, at),
        group_rows.errors(rows, n, at), group_rows.gradient(rows, n, h, at), *descend,
    ]  # fmt: skip
    if how.fits:
        each += [*group_rows.fit(fields, of, rows, n, h, at), set_scales(), *descend]
    written = at | {"levels": at["q"]}
    if group_rows.has_books(of):  # a shift names a book, and raises nothing: what is not 0 is one, also as a float
        written["raised"] = at["classes"]
    each += [
        set_scales(stored=True), *losses, keep(rows, after, at, 1.0), group_rows.q_of_codes(on, of, rows, n, at),
        write(fields, of, rows, n, made, written),
    ]  # fmt: skip
    return [
        to_lanes(rows, n, target, at["x"]), *read(made), *losses, group_rows.copy_losses(rows, before, after, at),
        *(read(start) if start != made else ()), *each * how.rounds,
    ]  # fmt: skip


def _sweep_launch(
    device: Device, name: str, of: Levels, rows: int, by: DeviceMetric, columns: tuple[int, int], at: At
) -> Launch:
    on = book_on(device, of.type)
    arrays = ("classes", "scale", "low", "inverse", "x", "levels", "v", "g", "e", "codes")
    return launch(
        _sweep(name, of.type, rows), columns=by.columns, order=columns[0], group_of=columns[1], u=by.u, h=by.h,
        fed=by.frames_fed, descended=by.frames_descended, roots=on.roots, lines=on.lines, signs=on.signs,
        **{each: at[each] for each in arrays}, n=by.n, span=of.span,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for of in all_levels().values():
        if of.grid is not None:
            yield from (_sweep(name, of.type, 1).kernel for name in ("feed_groups", "descend_groups"))

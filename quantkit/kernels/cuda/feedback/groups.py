"""Tiles of types whose groups of columns have their levels from a grid: groups.cu.

    error_feedback_groups        columns order group_of classes u h ... n span
    descend_groups     the same

The steps are those of the CPU's ``GroupTile.improve``, each a launch over all tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback import Rounding
from quantkit.kernels.cpu.feedback.codebook_tree import tree_of
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Kernel, Shape, shared_of_block
from quantkit.kernels.cuda.core.lookups import upload_once
from quantkit.kernels.cuda.feedback import group_rows
from quantkit.kernels.cuda.feedback.group_rows import Addresses
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.feedback.rows import (
    RowAddresses,
    keep,
    launch,
    read_scales,
    sub_blocks_of_d,
    to_lanes,
    write,
)
from quantkit.kernels.cuda.feedback.sweeps import ROWS, tiles
from quantkit.kernels.cuda.feedback.tables import tables_on, tree_macros, tree_on
from quantkit.kernels.levels import Grouping, Levels, all_levels
from quantkit.types import TensorType

Ints = npt.NDArray[np.int32]

_FILE = "feedback/groups.cu"
#: Constants of search.cuh and group_sweeps.cuh: lanes of a line, entries of a list, warps of a block of threads,
#: columns visited together, lines of a table without levels below the roots; bytes of operands of products (tiles.cuh).
_LANES = 16
_MOST = 64
_WARPS = 8
_BLOCK = 64
_TABLE_LINES = 32
_CHUNKS = 41984
#: Shared memory available to a block on every known device.
_LEAST = 64 << 10


# ---------------------------------------------------------------- kernels


@cache
def _sizes(t: TensorType) -> dict[str, int]:
    """Return the macros of a sweep, chosen so that its shared memory is within every device's."""
    usual, less = ({"HELD": n_held, "KEEPS_SQUARE": square} for n_held, square in ((8, 1), (4, 0)))
    macros = next(sizes for sizes in (usual, less) if _shared_bytes(t, **sizes) <= _LEAST)
    return macros | {"SHARED_BYTES": _shared_bytes(t, **macros)}


def _shared_bytes(t: TensorType, HELD: int, KEEPS_SQUARE: int) -> int:  # noqa: N803
    """Return the shared memory of a sweep: group_sweeps.cuh's Shared, or two chunks."""
    codebook_tree = tree_of(t.name)
    grid, tree = codebook_tree.grid, codebook_tree.tree
    lines = grid.points_per_group * tree.root_lines if tree.heights else min(tree.root_lines, _TABLE_LINES)
    list_length = 0 if tree.heights == 0 else 2 * _MOST + (HELD * _LANES if tree.heights > 1 else 0)
    words = lines * _LANES * grid.size + (_BLOCK**2 if KEEPS_SQUARE else 4)
    words += (2 * _BLOCK + grid.columns) * ROWS + 4 * grid.columns**2
    words += (2 * (4 + grid.points_per_group) + grid.points_per_group) * ROWS + 2 * _WARPS * (list_length + 1)
    return max(_CHUNKS, 4 * words)


def has_room(t: TensorType, capability: int) -> bool:
    """Return whether devices of a compute capability have enough shared memory for a type's grid."""
    return _sizes(t)["SHARED_BYTES"] <= shared_of_block(capability)


def _sweep(name: str, t: TensorType, rows: int) -> Shape:
    kernel = Kernel(_FILE, name).bind(**tree_macros(t), **_sizes(t))
    return Shape(kernel, (tiles(rows), 1, 1), _sizes(t)["SHARED_BYTES"])


# ---------------------------------------------------------------- the order of columns


def _order(grouping: Grouping, n: int) -> tuple[Ints, Ints]:
    """Return the columns, group after group, and the group of each column: int32 [n]."""
    order = grouping.order(n).astype(np.int32)
    group_of = np.empty(n, np.int32)
    group_of[order] = np.arange(n, dtype=np.int32) // grouping.size
    return order, group_of


# ---------------------------------------------------------------- the sequence of launches


def group_lines(layout: Levels, n: int) -> dict[str, int]:
    """Return the number of lines a tile of each array has, in the order of working memory."""
    assert layout.grid is not None
    subs = n // layout.span
    lines = dict.fromkeys(("x", "levels", "v", "g", "e", "c"), n)
    lines |= dict.fromkeys(("scale", "minimum", "inverse", "m", "shift", "factor_index", "classes"), subs)
    lines |= dict.fromkeys(("d", "dmin"), subs // sub_blocks_of_d(layout, n))
    return lines | {"codes": n // layout.grid.size, "q": n // layout.grid.columns, "loss": 2, "better": 1}


def group_launches(
    device: Device,
    layout: Levels,
    x: RowAddresses,
    metric: DeviceMetric,
    rounding: Rounding,
    addresses: Addresses,
) -> list[Launch]:
    """Return the launches that improve rows, as described in rounding.py's ``round_rows``.

    addresses: of the arrays of ``group_lines``. ValueError if the metric is not for the type's groups.
    """
    if metric.grouping is None or metric.grouping != layout.grouping:
        raise ValueError(f"the metric does not match the groups of columns of {layout.type}")
    on = tree_on(device, layout.type)
    fields = tables_on(device, layout.type)
    rows = x.rows
    n = metric.n
    h = metric.h
    order, group_of = upload_once(device, _order, metric.grouping, n)
    columns = order, group_of
    set_scales = partial(group_rows.set_scales, fields, layout, rows, n, addresses)
    losses = group_rows.losses(on, layout, rows, n, columns[0], h, addresses)
    descend = [_sweep_launch(device, "descend_groups", layout, rows, metric, columns, addresses)] * rounding.sweeps

    def read(source: int) -> list[Launch]:
        codes = group_rows.read_codes(on, fields, layout, rows, n, source, addresses)
        return [codes, read_scales(fields, layout, rows, n, source, addresses)]

    launches = [
        set_scales(), _sweep_launch(device, "error_feedback_groups", layout, rows, metric, columns, addresses),
        group_rows.errors(rows, n, addresses), group_rows.gradient(rows, n, h, addresses), *descend,
    ]  # fmt: skip
    if rounding.fits:
        launches += [*group_rows.fit(fields, layout, rows, n, h, addresses), set_scales(), *descend]
    outputs = addresses | {"levels": addresses["q"]}
    if group_rows.has_codebooks(layout):
        # Here a shift selects a codebook and does not add to levels: any nonzero value, also as a float, is codebook 1.
        outputs["shift"] = addresses["classes"]
    launches += [
        set_scales(stored=True),
        *losses,
        keep(rows, x.after, addresses, 1.0),
        group_rows.q_of_codes(on, layout, rows, n, addresses),
        write(fields, layout, rows, n, x.blocks, outputs),
    ]
    return [
        to_lanes(rows, n, x.target, addresses["x"]),
        *read(x.blocks),
        *losses,
        group_rows.copy_losses(rows, x.before, x.after, addresses),
        *(read(x.start) if x.start != x.blocks else ()),
        *launches * rounding.rounds,
    ]


def _sweep_launch(
    device: Device,
    name: str,
    layout: Levels,
    rows: int,
    metric: DeviceMetric,
    columns: tuple[int, int],
    addresses: Addresses,
) -> Launch:
    on = tree_on(device, layout.type)
    arrays = ("classes", "scale", "minimum", "inverse", "x", "levels", "v", "g", "e", "codes")
    return launch(
        _sweep(name, layout.type, rows),
        columns=metric.columns,
        order=columns[0],
        group_of=columns[1],
        u=metric.u,
        h=metric.h,
        feedback=metric.groups_feedback,
        descent=metric.groups_descent,
        roots=on.roots,
        lines=on.lines,
        signs=on.signs,
        **{array: addresses[array] for array in arrays},
        n=metric.n,
        span=layout.span,
    )


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for layout in all_levels().values():
        if layout.grid is not None:
            yield from (_sweep(name, layout.type, 1).kernel for name in ("error_feedback_groups", "descend_groups"))

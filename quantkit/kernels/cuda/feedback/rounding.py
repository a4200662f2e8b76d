"""Rows improved with error feedback on a device: the CPU's bytes and losses, given the same metric.

``round_rows`` improves the encoders' bytes on the device, in place.
"""

from __future__ import annotations

from functools import partial

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cpu.feedback import Rounding
from quantkit.kernels.cpu.feedback.refine import FIXED, HALF, INTEGER
from quantkit.kernels.cpu.feedback.rounding import MARGIN
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.feedback.groups import group_launches, group_lines, has_room
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
from quantkit.kernels.cuda.feedback.sweeps import ROWS, error_feedback, is_even, refine, residuals, scratch_lines, tiles
from quantkit.kernels.cuda.feedback.tables import Tables, tables, tables_on
from quantkit.kernels.cuda.unpack.dequantize import OUTPUTS, dequantize
from quantkit.kernels.levels import Levels, all_levels, levels_of
from quantkit.types import TensorType
from quantkit.units import round_up

_ALIGNED = 256


def can_round(t: TensorType, capability: int = 90) -> bool:
    """Return whether rows of a type are rounded by devices of a compute capability."""
    return (layout := all_levels().get(t.name)) is not None and (layout.grid is None or has_room(t, capability))


def working_bytes(t: TensorType, rows: int, n: int, rounding: Rounding | None = None) -> int:
    """Return the bytes that ``round_rows`` needs for rows of n values of type ``t``."""
    return sum(_room(_levels_of(t), rows, n, rounding or Rounding()).values())


def _levels_of(t: TensorType) -> Levels:
    if not can_round(t):
        raise TypeNotSupported(f"this version has no error feedback for {t} on CUDA devices", "QK-E302")
    return levels_of(t)


def _room(layout: Levels, rows: int, n: int, rounding: Rounding) -> dict[str, int]:
    """Return the bytes of each array of rows, in the order of working memory."""
    line, lines = 4 * ROWS * tiles(rows), group_lines(layout, n) if layout.grid else _lines(layout, n, rounding)
    return {name: round_up(line * count, _ALIGNED) for name, count in lines.items()}


def _lines(layout: Levels, n: int, rounding: Rounding) -> dict[str, int]:
    """Return the number of lines of a tile in each array."""
    subs = n // layout.span
    lines = dict.fromkeys(("x", "levels", "v", "e"), n)
    lines |= dict.fromkeys(("scale", "minimum", "inverse", "m", "shift", "factor_index"), subs)
    lines |= dict.fromkeys(("d", "dmin"), subs // sub_blocks_of_d(layout, n))
    return lines | {"loss": 2, "better": 1, "scratch": scratch_lines(layout, rounding)}


def round_rows(
    device: Device,
    t: TensorType,
    x: RowAddresses,
    metric: DeviceMetric,
    rounding: Rounding,
    work: int,
) -> None:
    """Launch the kernels that improve the bytes of rows.

    work: the address of ``working_bytes`` bytes, 256-byte aligned.

    Raises:
        TypeNotSupported: this type's rows are rounded by a CPU only.
    """
    layout, addresses = _levels_of(t), dict[str, int]()
    for name, nbytes in _room(layout, x.rows, metric.n, rounding).items():
        addresses[name], work = work, work + nbytes
    launches = group_launches if layout.grid else _launches
    device.run(launches(device, layout, x, metric, rounding, addresses))


def _launches(
    device: Device,
    layout: Levels,
    x: RowAddresses,
    metric: DeviceMetric,
    rounding: Rounding,
    addresses: dict[str, int],
) -> list[Launch]:
    rows, n, on = x.rows, metric.n, tables_on(device, layout.type)
    run = partial(launch, rows=rows)
    tile = _tile_arguments(on, layout, rows, metric, addresses)
    even = is_even(layout.codebook)
    options = {
        "passes": rounding.passes,
        "repeats": rounding.repeats,
        "fits": int(rounding.fits),
        "neighbour_scales": int(rounding.tries_neighbour_scales(n)),
    }
    round_ = [run(error_feedback(rows, even), **tile)]
    round_ += [run(refine(rows, layout, rounding), **tile, **options)] * rounding.sweeps_of(n)
    round_ += [keep(rows, x.after, addresses, 1 - MARGIN), write(on, layout, rows, n, x.blocks, addresses)]
    return [
        to_lanes(rows, n, x.target, addresses["x"]),
        *_reference(layout, rows, n, x.blocks, addresses),
        run(residuals(rows, even), **tile, before=x.before, best=x.after),
        read_scales(on, layout, rows, n, x.start, addresses),
        *round_ * rounding.rounds_of(n),
    ]


def _reference(layout: Levels, rows: int, n: int, blocks: int, addresses: dict[str, int]) -> list[Launch]:
    """Return the launches that set v to the values of the reference's bytes, via ``levels``."""
    decode, row_bytes = dequantize(layout.type, n, rows), layout.type.row_bytes(n)
    return [
        launch(decode, w=blocks, row_bytes=row_bytes, rows=rows, n=n, out=addresses["levels"], out_stride=4 * n,
               to=OUTPUTS.index("f32")),
        to_lanes(rows, n, addresses["levels"], addresses["v"]),
    ]  # fmt: skip


def _kind(is_integer: bool, is_half: bool) -> int:
    if is_integer:
        return INTEGER
    return HALF if is_half else FIXED


def _tile_arguments(
    on: Tables, layout: Levels, rows: int, metric: DeviceMetric, addresses: dict[str, int]
) -> dict[str, int]:
    """Return the arguments of all kernels over tiles (sweeps.cuh)."""
    per_d = sub_blocks_of_d(layout, metric.n)
    own_scales = per_d == 1 and layout.has_half_scales
    scale_kind = _kind(layout.scale is not None, own_scales and bool(layout.d))
    min_kind = _kind(layout.minimum is not None, own_scales and bool(layout.dmin))
    max_m = 0 if layout.minimum is None else (1 << layout.minimum.shape[1]) - 1
    arrays = (
        "x",
        "levels",
        "v",
        "e",
        "scale",
        "minimum",
        "inverse",
        "m",
        "shift",
        "d",
        "dmin",
        "scratch",
        "factor_index",
        "loss",
    )
    return {
        "columns": metric.columns,
        "u": metric.u,
        "pivots": metric.pivots,
        "h": metric.h,
        "per_diagonal": metric.per_diagonal,
        "codebook": on.codebook,
        "factors": on.factors,
        **{name: addresses[name] for name in arrays},
        "n": metric.n,
        "span": layout.span,
        "per_d": per_d,
        "scale_kind": scale_kind,
        "min_kind": min_kind,
        "max_m": max_m,
        "factor_count": len(tables(layout.type).factors),
    }

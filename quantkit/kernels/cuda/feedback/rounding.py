"""Rows improved with error feedback on a device: the CPU's bytes and losses, given the same metric.

``round_rows`` takes what encoders made, on the device, and leaves its bytes there.
"""

from __future__ import annotations

from functools import partial

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cpu.feedback.options import Rounding
from quantkit.kernels.cpu.feedback.refine import FIXED, HALF, INTEGER
from quantkit.kernels.cpu.feedback.rounding import MARGIN
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.feedback.fields import Tables, tables, tables_on
from quantkit.kernels.cuda.feedback.groups import group_launches, group_lines, has_room
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.feedback.refine import refine, scratch_lines
from quantkit.kernels.cuda.feedback.rows import keep, launch, read_scales, sub_blocks_of_d, to_lanes, write
from quantkit.kernels.cuda.feedback.sweeps import feed, is_even, residuals
from quantkit.kernels.cuda.feedback.tiles import ROWS, tiles
from quantkit.kernels.cuda.unpack.dequantize import OUTPUTS, dequantize
from quantkit.kernels.levels import Levels, all_levels, levels_of
from quantkit.types import TensorType
from quantkit.units import round_up

_ALIGNED = 256


def can_round(t: TensorType, capability: int = 90) -> bool:
    """Tell whether rows of a type are rounded by devices of a compute capability."""
    return (of := all_levels().get(t.name)) is not None and (of.grid is None or has_room(t, capability))


def working_bytes(t: TensorType, rows: int, n: int, how: Rounding | None = None) -> int:
    """Return the bytes that ``round_rows`` needs for rows of n values of type ``t``; how: by default ``Rounding()``."""
    return sum(_room(_levels_of(t), rows, n, how or Rounding()).values())


def _levels_of(t: TensorType) -> Levels:
    if not can_round(t):
        raise TypeNotSupported(f"levels of {t} cannot be chosen by a CUDA device in this version")
    return levels_of(t)


def _room(of: Levels, rows: int, n: int, how: Rounding) -> dict[str, int]:
    """Return the bytes of each array of rows, in the order in which they lie in working memory."""
    line, lines = 4 * ROWS * tiles(rows), group_lines(of, n) if of.grid else _lines(of, n, how)
    return {name: round_up(line * count, _ALIGNED) for name, count in lines.items()}


def _lines(of: Levels, n: int, how: Rounding) -> dict[str, int]:
    """Return how many lines of a tile each array has."""
    subs = n // of.span
    lines = dict.fromkeys(("x", "levels", "v", "e"), n)
    lines |= dict.fromkeys(("scale", "low", "inverse", "m", "raised", "place"), subs)
    lines |= dict.fromkeys(("d", "dmin"), subs // sub_blocks_of_d(of, n))
    return lines | {"loss": 2, "better": 1, "scratch": scratch_lines(of, how)}


def round_rows(
    device: Device,
    t: TensorType,
    x: int,
    rows: int,
    target: int,
    made: int,
    start: int,
    by: DeviceMetric,
    how: Rounding,
    before: int,
    after: int,
    work: int,
) -> None:
    """Launch what improves the bytes of rows.

    All are addresses: x and target f32 [rows, n], what encoders were given and what values shall come near to, which
    may be x; made uint8 [rows, row bytes], the reference's bytes, improved in place; start: bytes to begin with, made
    for the target, which may be ``made``; before and after f64 [rows], the losses of the reference's bytes and of the
    best; work: room for ``working_bytes``, 256-byte aligned.

    Raises:
        TypeNotSupported: this type's rows are rounded by a CPU only.
    """
    of, at = _levels_of(t), dict[str, int]()
    for name, nbytes in _room(of, rows, by.n, how).items():
        at[name], work = work, work + nbytes
    launches = group_launches if of.grid else _launches
    device.run(launches(device, of, rows, target, made, start, by, how, before, after, at))


def _launches(
    device: Device, of: Levels, rows: int, target: int, made: int, start: int, by: DeviceMetric, how: Rounding,
    before: int, after: int, at: dict[str, int],
) -> list[Launch]:  # fmt: skip
    n, on = by.n, tables_on(device, of.type)
    run = partial(launch, rows=rows)
    tile = _tile_arguments(on, of, rows, by, at)
    even = is_even(of.codebook)
    more = {"passes": how.passes, "repeats": how.repeats, "fits": int(how.fits), "beside": int(how.looks_beside(n))}
    each = [run(feed(rows, even), **tile)]
    each += [run(refine(rows, of, how), **tile, **more)] * how.sweeps_of(n)
    each += [keep(rows, after, at, 1 - MARGIN), write(on, of, rows, n, made, at)]
    return [
        to_lanes(rows, n, target, at["x"]),
        *_reference(of, rows, n, made, at),
        run(residuals(rows, even), **tile, before=before, best=after),
        read_scales(on, of, rows, n, start, at),
        *each * how.rounds_of(n),
    ]


def _reference(of: Levels, rows: int, n: int, made: int, at: dict[str, int]) -> list[Launch]:
    """Return what sets v to the values of the reference's bytes; they take the way over ``levels``."""
    decode, row_bytes = dequantize(of.type, n, rows), of.type.row_bytes(n)
    return [
        launch(decode, w=made, row_bytes=row_bytes, rows=rows, n=n, out=at["levels"], out_stride=4 * n,
               to=OUTPUTS.index("f32")),
        to_lanes(rows, n, at["levels"], at["v"]),
    ]  # fmt: skip


def _tile_arguments(on: Tables, of: Levels, rows: int, by: DeviceMetric, at: dict[str, int]) -> dict[str, int]:
    """Return the arguments of all kernels over tiles (sweeps.cuh)."""
    per_d = sub_blocks_of_d(of, by.n)
    own = per_d == 1 and of.has_half_scales
    kind = INTEGER if of.scale is not None else HALF if own and of.d else FIXED
    minimum = INTEGER if of.minimum is not None else HALF if own and of.dmin else FIXED
    most = 0 if of.minimum is None else (1 << of.minimum.shape[1]) - 1
    arrays = (
        "x",
        "levels",
        "v",
        "e",
        "scale",
        "low",
        "inverse",
        "m",
        "raised",
        "d",
        "dmin",
        "scratch",
        "place",
        "loss",
    )
    return {
        "columns": by.columns, "u": by.u, "pivots": by.pivots, "h": by.h, "per_diagonal": by.per_diagonal,
        "book": on.book, "factors": on.factors, **{name: at[name] for name in arrays}, "n": by.n,
        "span": of.span, "per_d": per_d, "kind": kind, "minimum": minimum, "most": most,
        "factor_count": len(tables(of.type).factors),
    }  # fmt: skip

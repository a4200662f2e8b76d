"""What lies between products and their readers and is done to every head, or column, by itself: parts.cu.

    parts    batch rows room, and of each of up to six parts, with _0 ... _5 after the name:
             width n pieces x stride each step repeat by plus n_plus activation times n_times norm kind group weight
             bias n_weight eps table head start n_rot neox floor_scale alpha offset gating gate gate_stride gate_each
             gate_step out out_stride out_each out_step cache cache_width cache_start cache_each cache_step
             quantized format q_width

rows: tokens, or pairs of a token and an expert. Strides in values. ``slots`` fills in what a part has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantkit.kernels.cuda.cache import TYPES
from quantkit.kernels.cuda.operation import Operation, Shape

#: When a part's norm is.
NEVER, BEFORE, AFTER = range(3)

#: Parts of a launch.
MAX_PARTS = 6

#: Columns of a piece at most: of a warp, whose block has four, and of a block.
MAX_OF_WARP, MAX_OF_BLOCK = 512, 8192

#: Slots of a part that is not there: others are given instead of some.
NOTHING = {
    "width": 0, "n": 1, "x": 0, "stride": 0, "each": 1 << 30, "step": 0, "repeat": 1, "by": 0, "plus": 0, "n_plus": 1,
    "activation": -1, "times": 0, "n_times": 1, "norm": NEVER, "kind": 0, "group": 1, "weight": 0, "bias": 0,
    "n_weight": 1, "eps": 0, "table": 0, "head": 1, "start": 0, "n_rot": 0, "neox": 0, "floor_scale": 0, "alpha": 0,
    "offset": 0, "gating": -1, "gate": 0, "gate_stride": 0, "gate_each": 1 << 30, "gate_step": 0, "out": 0,
    "out_stride": 0, "out_each": 1 << 30, "out_step": 0, "cache": 0, "cache_width": 0, "cache_start": 0,
    "cache_each": 1 << 30, "cache_step": 0, "quantized": 0, "format": 0, "q_width": 1,
}  # fmt: skip


def parts(kind: str, rows: int, sizes: Sequence[tuple[int, int]]) -> Shape:
    """Return how to launch parts, (width, n) each, of so many tokens; kind: of the cache."""
    longest = max(n for _, n in sizes)
    if longest > MAX_OF_BLOCK:
        raise ValueError(f"a piece of a part has up to {MAX_OF_BLOCK} columns, not {longest}")
    team, teams = (32, 4) if longest <= MAX_OF_WARP else (256, 1)
    pieces = sum(-(-width // n) for width, n in sizes)
    return Shape(_parts(kind, team), (rows, -(-pieces // teams), 1), 4 * teams * _room(longest))


def _room(longest: int) -> int:
    """Return the values of shared memory that a piece takes: whole 16 bytes."""
    return -(-longest // 4) * 4


def slots(some: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the slots of parts, each with those that are not as in NOTHING."""
    found: dict[str, Any] = {"room": _room(max(part["n"] for part in some))}
    for i, part in enumerate([*some, *[NOTHING] * (MAX_PARTS - len(some))]):
        given = {**NOTHING, **part, "pieces": -(-part["width"] // part["n"])}
        found |= {f"{name}_{i}": slot for name, slot in given.items()}
    return found


def _parts(kind: str, team: int) -> Operation:
    return Operation("parts.cu", "parts").bind(CACHE=TYPES.index(kind), TEAM=team, THREADS=128 if team == 32 else 256)


def operations() -> Iterator[Operation]:
    """Yield every operation of this file."""
    for kind in TYPES:
        for team in (32, 256):
            yield _parts(kind, team)

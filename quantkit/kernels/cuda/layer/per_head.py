"""The work on single heads or columns between products and their readers: per_head.cu.

    per_head batch rows room, and of each of up to six chains, with _0 ... _5 after the name:
             width n pieces x stride each step repeat by plus n_plus activation times n_times norm kind group weight
             bias n_weight eps table head start n_rot neox floor_scale alpha offset gating gate gate_stride gate_each
             gate_step out out_stride out_each out_step cache cache_width cache_start cache_each cache_step
             quantized format q_width

rows: tokens, or pairs of a token and an expert. Strides in values. ``slots`` fills in the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantkit.kernels.cuda.attention.cache import TYPES
from quantkit.kernels.cuda.core.kernel import Kernel, Shape

#: Position of a chain's norm.
NO_NORM, BEFORE, AFTER = range(3)

#: Maximum number of chains of a launch.
MAX_CHAINS = 6

#: Maximum columns of a piece: for a warp, whose block has four, and for a block.
MAX_OF_WARP, MAX_OF_BLOCK = 512, 8192

#: Slots of an absent chain; a chain overrides some.
NOTHING = {
    "width": 0, "n": 1, "x": 0, "stride": 0, "each": 1 << 30, "step": 0, "repeat": 1, "by": 0, "plus": 0, "n_plus": 1,
    "activation": -1, "times": 0, "n_times": 1, "norm": NO_NORM, "kind": 0, "group": 1, "weight": 0, "bias": 0,
    "n_weight": 1, "eps": 0, "table": 0, "head": 1, "start": 0, "n_rot": 0, "neox": 0, "floor_scale": 0, "alpha": 0,
    "offset": 0, "gating": -1, "gate": 0, "gate_stride": 0, "gate_each": 1 << 30, "gate_step": 0, "out": 0,
    "out_stride": 0, "out_each": 1 << 30, "out_step": 0, "cache": 0, "cache_width": 0, "cache_start": 0,
    "cache_each": 1 << 30, "cache_step": 0, "quantized": 0, "format": 0, "q_width": 1,
}  # fmt: skip


def per_head(kind: str, rows: int, sizes: Sequence[tuple[int, int]]) -> Shape:
    """Return the kernel and grid of chains, (width, n) each, for ``rows`` tokens; kind: of the cache."""
    longest = max(n for _, n in sizes)
    if longest > MAX_OF_BLOCK:
        raise ValueError(f"a piece of a chain can have up to {MAX_OF_BLOCK} columns, not {longest}")
    team, teams = (32, 4) if longest <= MAX_OF_WARP else (256, 1)
    pieces = sum(-(-width // n) for width, n in sizes)
    return Shape(_kernel_of(kind, team), (rows, -(-pieces // teams), 1), 4 * teams * _room(longest))


def _room(longest: int) -> int:
    """Return the shared memory of a piece in values, a multiple of 16 bytes."""
    return -(-longest // 4) * 4


def slots(chains: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the slots of chains, each given by those that differ from NOTHING."""
    arguments: dict[str, Any] = {"room": _room(max(chain["n"] for chain in chains))}
    for i, chain in enumerate([*chains, *[NOTHING] * (MAX_CHAINS - len(chains))]):
        slots_of_chain = {**NOTHING, **chain, "pieces": -(-chain["width"] // chain["n"])}
        arguments |= {f"{name}_{i}": slot for name, slot in slots_of_chain.items()}
    return arguments


def _kernel_of(kind: str, team: int) -> Kernel:
    return Kernel("layer/per_head.cu", "per_head").bind(
        CACHE=TYPES.index(kind), TEAM=team, THREADS=128 if team == 32 else 256
    )


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for kind in TYPES:
        for team in (32, 256):
            yield _kernel_of(kind, team)

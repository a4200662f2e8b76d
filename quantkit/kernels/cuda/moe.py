"""Which pairs every expert has, on the device: moe.cu, plan.cuh.

bucket    plan ids rows n_used n_expert      ids int32 [rows, n_used]; plan: plan_bytes, read by products by expert
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.operation import Operation, Shape

#: Tokens a tile of a product may have.
TILES = (32, 128)
_WARPS = 16
_HEAD = 16


def most_tiles(pairs: int, n_expert: int, tokens: int) -> int:
    """Return how many tiles of so many tokens pairs can make at most: each expert's last one may be short."""
    used = min(pairs, n_expert)
    return (pairs - used) // tokens + used


def plan_bytes(n_expert: int, n_used: int, rows: int) -> int:
    """Return the bytes of a plan for so many tokens; a plan of fewer needs no more."""
    pairs = rows * n_used
    return 4 * (_HEAD + -(-pairs // 4) * 4) + 16 * sum(most_tiles(pairs, n_expert, t) for t in TILES)


def bucket(n_expert: int) -> Shape:
    """Return how to make a plan."""
    return Shape(_OPERATION, (1, 1, 1), 4 * _WARPS * n_expert)


_OPERATION = Operation("moe.cu", "bucket")


def operations() -> Iterator[Operation]:
    """Yield every operation of this file."""
    yield _OPERATION

"""Norms of heads, rotary positions and keys and values into the cache, in one launch: heads.cu.

    heads    batch rows q q_heads q_stride q_step q_norm q_turn q_weight q_bias q_n_weight q_out
             k ... the same, and k_cache    v v_heads v_stride v_step v_cache
             head v_head table neox start n_rot kind eps

rows: tokens. Strides in values.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.cache import TYPES
from quantkit.kernels.cuda.operation import Operation, Shape

#: When a head's norm is.
NEVER, BEFORE, AFTER = range(3)

#: Columns of a head at most: four fit the shared memory of a block.
MAX_HEAD = 2048

#: Slots of parts that are missing.
NOTHING = {
    "q": 0, "q_heads": 0, "q_stride": 0, "q_step": 0, "q_norm": NEVER, "q_turn": 0, "q_weight": 0, "q_bias": 0,
    "q_n_weight": 1, "q_out": 0, "k": 0, "k_heads": 0, "k_stride": 0, "k_step": 0, "k_norm": NEVER, "k_turn": 0,
    "k_weight": 0, "k_bias": 0, "k_n_weight": 1, "k_out": 0, "k_cache": 0, "v": 0, "v_heads": 0, "v_stride": 0,
    "v_step": 0, "v_cache": 0, "head": 0, "v_head": 0, "table": 0, "neox": 0, "start": 0, "n_rot": 0,
    "kind": 0, "eps": 0,
}  # fmt: skip


def heads(kind: str, rows: int, count: int, longest: int) -> Shape:
    """Return how to launch so many heads of q, k and v together a token; kind: of the cache; longest: columns."""
    operation = Operation("heads.cu", "heads").bind(CACHE=TYPES.index(kind))
    return Shape(operation, (rows, -(-count // 4), 1), 4 * 4 * longest)


def operations() -> Iterator[Operation]:
    """Yield every operation of this file."""
    for kind in TYPES:
        yield heads(kind, 1, 1, 1).operation

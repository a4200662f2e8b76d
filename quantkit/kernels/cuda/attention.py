"""Attention over a cache on the device: attention.cu.

``attention`` says which way a layer's attention goes with so many tokens::

    few      up to 8 rows (tokens x heads of a group) a block, straight from the cache: generation
    tile     tiles of rows x 64 keys in f32: prompts
    tensor   the same on tensor cores, from a cache of f16: prompts, and generation where many heads share their keys

All take the same slots. With more than one part of the keys their results go to scratch and ``attention_combine``
follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.kernels.cuda.cache import TYPES
from quantkit.kernels.cuda.operation import Operation, Shape

MASKS = {"causal": 0, "sliding": 1, "chunked": 2}
FEW, TILE, TENSOR = range(3)

#: Parts of the keys at most, and about how many blocks of threads a launch should have.
SPLITS, BLOCKS = 64, 512
#: Up to how many tokens the way is ``few``.
FEW_TOKENS = 8


@dataclass(frozen=True)
class Attention:
    """A launch, how many parts of the keys it makes, bytes of scratch, and what combines them (None: one part)."""

    attend: Shape
    splits: int
    scratch: int
    combine: Shape | None


def attention(
    kind: str,
    n_head: int,
    n_head_kv: int,
    head_k: int,
    head_v: int,
    rows: int,
    n_ctx: int,
    *,
    mla: bool = False,
    way: int | None = None,
    splits: int | None = None,
) -> Attention:
    """Return how ``rows`` tokens attend to a cache of type ``kind``; way and splits: for tests, chosen without."""
    group = n_head // n_head_kv
    if way is None:
        way = FEW if rows <= FEW_TOKENS else TILE
    operation, size, shared = _few(rows * group, head_k, head_v) if way == FEW else _tile(head_k, head_v)
    tiles = -(-rows * group // size) * n_head_kv
    if splits is None:
        splits = max(1, min(SPLITS, BLOCKS // tiles, -(-n_ctx // 64)))
    bound = operation.bind(CACHE=TYPES.index(kind), HEAD_K=head_k, HEAD_V=head_v)
    attend = Shape(bound, (tiles, splits, 1), shared)
    if splits == 1:
        return Attention(attend, 1, 0, None)
    combine = Shape(Operation(bound.file, "attention_combine", bound.defines), (rows * n_head, 1, 1))
    return Attention(attend, splits, 4 * rows * n_head * splits * (head_v + 2), combine)


def _few(rows: int, head_k: int, head_v: int) -> tuple[Operation, int, int]:
    """Return the operation, rows of a block, bytes of shared memory."""
    size = 1
    while size < min(rows, 8 if max(head_k, head_v) <= 256 else 4):
        size *= 2
    return Operation("attention.cu", "attention").bind(WAY=FEW, ROWS=size, THREADS=128), size, 0


def _tile(head_k: int, head_v: int) -> tuple[Operation, int, int]:
    """Return the operation, rows of a block, bytes of shared memory: below 64 KiB, which every device has."""
    longest = max(head_k, head_v)
    size = 64 if longest <= 128 else 32 if longest <= 256 else 16
    q = -(-head_k // 32) * 32 + 4
    columns = -(-head_v // 64) * 64
    values = {1: 32, 2: 16, 3: 8, 4: 8}.get(columns // 64, 4) * columns
    shared = 4 * (size * (q + 68) + max(64 * 36, values))
    return (
        Operation("attention.cu", "attention").bind(WAY=TILE, ROWS=size, THREADS=4 * size, BLOCKS_AT_ONCE=2),
        size,
        shared,
    )


def operations() -> Iterator[Operation]:
    """Yield every operation of this file, for some sizes of heads."""
    for kind in TYPES:
        for n_head, n_head_kv, head_k, head_v in (
            (32, 4, 128, 128),
            (32, 8, 64, 64),
            (8, 4, 256, 256),
            (128, 1, 576, 512),
        ):
            for rows in (1, 512):
                chosen = attention(kind, n_head, n_head_kv, head_k, head_v, rows, 4096)
                yield chosen.attend.operation
                if chosen.combine is not None:
                    yield chosen.combine.operation

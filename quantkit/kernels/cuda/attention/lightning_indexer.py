"""The keys that the lightning indexer selects, on the device: lightning_indexer.cu."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.attention.cache import TYPES
from quantkit.kernels.cuda.core.kernel import Kernel, Shape

#: Keys that a block of threads scores at a time; bytes of stored scores; approximate blocks per launch.
KEYS = 64
SCRATCH = 64 << 20
BLOCKS = 1024

_FILE = "attention/lightning_indexer.cu"


def scratch_bytes(n_ctx: int, tokens: int) -> int:
    """Return the bytes of the scores of some tokens."""
    return 4 * n_ctx * tokens


def tokens_at_once(n_ctx: int, n_ubatch: int) -> int:
    """Return the number of tokens in a launch."""
    return max(1, min(n_ubatch, SCRATCH // (4 * n_ctx)))


def indexer_scores(kind: str, head: int, n_ctx: int, first: int, most: int, rows: int) -> Shape | None:
    """Return the kernel and grid that score the keys of tokens ``first`` ..., ``most`` of ``rows``; None if none."""
    tokens = min(rows - first, most)
    if tokens < 1:
        return None
    kernel = Kernel(_FILE, "indexer_scores").bind(CACHE=TYPES.index(kind), HEAD=head)
    return Shape(kernel, (min(-(-n_ctx // KEYS), max(8, BLOCKS // tokens)), tokens, 1))


def indexer_select(first: int, most: int, rows: int) -> Shape | None:
    """Return the kernel and grid that select keys by these scores."""
    tokens = min(rows - first, most)
    return Shape(Kernel(_FILE, "indexer_select").bind(CACHE=0, HEAD=128), (tokens, 1, 1)) if tokens > 0 else None


def kernels() -> Iterator[Kernel]:
    """Yield the kernels of this file, for every type of cache."""
    for kind in TYPES:
        for shape in (indexer_scores(kind, 128, 4096, 0, 1, 1), indexer_select(0, 1, 1)):
            assert shape is not None
            yield shape.kernel

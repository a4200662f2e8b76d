"""Rows of a cache that stand for blocks of positions, and the cells that tokens see, on the device: blocks.cu."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.attention.cache import TYPES
from quantkit.kernels.cuda.core.kernel import Kernel, Shape

_FILE = "attention/blocks.cu"


def block_write(kind: str, width: int, rows: int) -> Shape:
    """Return the kernel and grid that store those of ``rows`` tokens that end a block."""
    return Shape(Kernel(_FILE, "block_write").bind(CACHE=TYPES.index(kind)), (rows, -(-width // 256), 1))


def window_and_blocks(n_out: int, rows: int) -> Shape:
    """Return the kernel and grid that list the ``n_out`` cells that each token sees."""
    return Shape(Kernel(_FILE, "window_and_blocks").bind(CACHE=0), (-(-rows * n_out // 256), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for kind in TYPES:
        yield block_write(kind, 1, 1).kernel
    yield window_and_blocks(1, 1).kernel

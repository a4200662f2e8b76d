"""Keys and values in a cache on the device: cache.cu.

blocks.cu has the rows of a cache that stand for blocks of positions, and the cells that tokens see.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape

#: Types of a cache, in the order of cache.cuh.
TYPES = ("f32", "f16", "q8_0")


def row_bytes(kind: str, width: int) -> int:
    """Return the bytes of a row of ``width`` values; for q8_0, a multiple of 32."""
    return {"f32": 4 * width, "f16": 2 * width, "q8_0": width // 32 * 34}[kind]


def cache_write(kind: str, rows: int, k_width: int, v_width: int) -> Shape:
    """Return the kernel and grid that store the keys and values of ``rows`` tokens; v_width 0: keys only."""
    parts = -(-k_width // 32) + -(-v_width // 32)
    kernel = Kernel("attention/cache.cu", "cache_write").bind(CACHE=TYPES.index(kind))
    return Shape(kernel, (rows, -(-parts // 8), 1))


def block_write(kind: str, width: int, rows: int) -> Shape:
    """Return the kernel and grid that store those of ``rows`` tokens that end a block."""
    return Shape(
        Kernel("attention/blocks.cu", "block_write").bind(CACHE=TYPES.index(kind)), (rows, -(-width // 256), 1)
    )


def window_and_blocks(n_out: int, rows: int) -> Shape:
    """Return the kernel and grid that list the ``n_out`` cells visible to each token."""
    return Shape(Kernel("attention/blocks.cu", "window_and_blocks").bind(CACHE=0), (-(-rows * n_out // 256), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of both files."""
    for kind in TYPES:
        yield cache_write(kind, 1, 32, 32).kernel
        yield block_write(kind, 1, 1).kernel
    yield window_and_blocks(1, 1).kernel

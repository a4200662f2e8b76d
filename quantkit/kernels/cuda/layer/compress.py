"""One row for every block of positions, on the device: compress.cu."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape


def compress(width: int) -> Shape:
    """Return the kernel and grid that make rows of ``width`` columns, for any number of tokens."""
    return Shape(Kernel("layer/compress.cu", "compress"), (-(-width // 64), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield the kernel of this file."""
    yield compress(1).kernel

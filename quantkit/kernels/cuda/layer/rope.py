"""Rotary positions on the device: rope.cu."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape

KINDS = ("normal", "neox")


def rope_table(rows: int, pairs: int) -> Shape:
    """Return the kernel and grid that make the table of ``rows`` tokens: float32 [rows, pairs, 2], cos and sin."""
    return Shape(Kernel("layer/rope.cu", "rope_table").bind(NEOX=0), (-(-rows * pairs // 128), 1, 1))


def rope(kind: str, rows: int, width: int, head: int, n_rot: int) -> Shape:
    """Return the kernel and grid that rotate pairs of ``rows`` tokens; kind: normal, neox; width: values of a token."""
    items = width // head * (head - n_rot // 2)
    return Shape(Kernel("layer/rope.cu", "rope").bind(NEOX=KINDS.index(kind)), (rows, -(-items // 256), 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield rope_table(1, 1).kernel
    for kind in KINDS:
        yield rope(kind, 1, 2, 2, 2).kernel

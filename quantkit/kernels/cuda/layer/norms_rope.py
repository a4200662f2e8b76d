"""Norms and rotary positions on the device: norms.cu, rope.cu."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape

NORM_KINDS = ("rms", "layer", "l2")
ROPE_KINDS = ("normal", "neox")

#: Groups per block of threads: one warp for each.
_GROUPS = 8


def norm(kind: str, groups: int = 1) -> Shape:
    """Return the kernel and grid that normalize ``groups`` of columns in all rows; kind: rms, layer or l2."""
    return Shape(Kernel("layer/norms.cu", "norm").bind(KIND=NORM_KINDS.index(kind)), (-(-groups // _GROUPS), 1, 1))


def rope_table(rows: int, pairs: int) -> Shape:
    """Return the kernel and grid that make the table of ``rows`` tokens: float32 [rows, pairs, 2], cos and sin."""
    return Shape(Kernel("layer/rope.cu", "rope_table").bind(NEOX=0), (-(-rows * pairs // 128), 1, 1))


def rope(kind: str, rows: int, width: int, head: int, n_rot: int) -> Shape:
    """Return the kernel and grid that rotate pairs of ``rows`` tokens; kind: normal, neox; width: values of a token."""
    items = width // head * (head - n_rot // 2)
    return Shape(Kernel("layer/rope.cu", "rope").bind(NEOX=ROPE_KINDS.index(kind)), (rows, -(-items // 256), 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of both files."""
    for kind in NORM_KINDS:
        yield norm(kind).kernel
    yield rope_table(1, 1).kernel
    for kind in ROPE_KINDS:
        yield rope(kind, 1, 2, 2, 2).kernel

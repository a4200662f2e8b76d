"""Norms on the device: norms.cu."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape

KINDS = ("rms", "layer", "l2")

#: Groups that a block of threads takes: a warp to each.
_GROUPS = 8


def norm(kind: str, groups: int = 1) -> Shape:
    """Return the kernel and grid that normalize ``groups`` of columns in all rows; kind: rms, layer or l2."""
    return Shape(Kernel("layer/norms.cu", "norm").bind(KIND=KINDS.index(kind)), (-(-groups // _GROUPS), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for kind in KINDS:
        yield norm(kind).kernel

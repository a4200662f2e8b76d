"""Weights of the four residual streams in a layer's input and output: streams.cu.

stream_weights  before after across x scale base rows rounds eps
                ops.StreamWeights: before and after [4], across [16] of x [24] a row; scale: [3], base: [24]
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape


def stream_weights(rows: int) -> Shape:
    """Return the kernel and grid that compute the weights of streams: sixteen threads a row."""
    return Shape(Kernel("layer/streams.cu", "stream_weights"), (max(1, -(-rows // 8)), 1, 1))


def kernels() -> Iterator[Kernel]:
    """Yield the kernel of this file."""
    yield stream_weights(1).kernel

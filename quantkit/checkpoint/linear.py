"""Linear layers computed while converting: x @ W^T + b with torch's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from quantkit.checkpoint.expressions import F32, TYPE_F32, Expression, read_f32, size_of
from quantkit.checkpoint.quantized.rows import RowWise
from quantkit.checkpoint.torch_math import silu
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType


def _relu(x: F32) -> F32:
    return np.maximum(x, np.float32(0))


#: The activations that a layer may have.
ACTIVATIONS: dict[str, Callable[[F32], F32]] = {"silu": silu, "relu": _relu}


@dataclass(frozen=True)
class Linear(RowWise):
    """``x`` [rows, columns] through a layer: ``weight`` [outputs, columns], ``bias`` [outputs], then ``activation``.

    float32. torch (F.linear) multiplies by oneMKL's sgemm, then adds the bias.
    """

    x: Expression
    weight: Expression
    bias: Expression | None = None
    activation: str = ""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.x.shape[0], self.weight.shape[0]

    @property
    def type(self) -> TensorType:
        return TYPE_F32

    def fill(self, first: int, rows: U8) -> None:
        from quantkit.kernels.cpu.linear import multiply

        out = rows.view(np.float32)
        columns = self.x.shape[1]
        x = read_f32(self.x, first * columns, len(out) * columns).reshape(len(out), columns)
        out[...] = multiply(x, _cached_strips(self.weight), self.weight.shape[0])
        if self.bias is not None:
            out += read_f32(self.bias, 0, self.bias.shape[0])
        if self.activation:
            out[...] = ACTIVATIONS[self.activation](out)

    def parts(self) -> Iterator[StoredTensor]:
        for x in (self.x, self.weight, self.bias):
            if x is not None:
                yield from x.parts()


def _cached_strips(x: Expression) -> F32:
    """Return a weight as the kernel reads it; the last ones are cached, because every range of rows needs them."""
    stat = next(x.parts()).path.stat()
    weight: Any = x  # frozen, so it can be a key
    return _strips(weight, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _strips(x: Any, changed: int, size: int) -> F32:
    from quantkit.kernels.cpu.low_rank import strips

    return strips(np.ascontiguousarray(read_f32(x, 0, size_of(x)).reshape(x.shape).T))

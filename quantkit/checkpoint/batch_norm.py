"""Batch norms of encoders, folded into the scale and the offset that llama.cpp multiplies by and adds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from quantkit.checkpoint.expressions import (
    TYPE_F16,
    TYPE_F32,
    Constant,
    Expression,
    Zeros,
    from_f32,
    read_f32,
    value_bytes,
)
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType, type_by_name

#: Kinds of a batch norm's tensors.
_KINDS = ("weight", "bias", "running_mean", "running_var")
_I64 = type_by_name("I64")
#: Its sum with the epsilon is 1 in float32.
_UNIT_VARIANCE = float(np.float32(1) - np.float32(1e-5))


@dataclass(frozen=True)
class BatchNorm:
    """The scale or the offset of a batch norm in inference: scale = weight / sqrt(var + 1e-5), bias - mean * scale.

    Each operation is rounded to float32, or to float16 if all are stored so.
    """

    weight: Expression
    var: Expression
    bias: Expression | None = None
    mean: Expression | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def type(self) -> TensorType:
        return TYPE_F16 if all(x.type is TYPE_F16 for x in self._inputs) else TYPE_F32

    @property
    def _inputs(self) -> list[Expression]:
        return [x for x in (self.weight, self.var, self.bias, self.mean) if x is not None]

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        n = out.size // value_bytes(self.type, 1)
        dtype = np.float16 if self.type is TYPE_F16 else np.float32

        def round_to_type(values: np.ndarray) -> np.ndarray:
            return values.astype(dtype).astype(np.float32)

        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            deviation = round_to_type(np.sqrt(round_to_type(read_f32(self.var, start, n) + np.float32(1e-5))))
            values = round_to_type(read_f32(self.weight, start, n) / deviation)
            if self.bias is not None and self.mean is not None:
                values = read_f32(self.bias, start, n) - round_to_type(read_f32(self.mean, start, n) * values)
        from_f32(self.type, values, out)

    def parts(self) -> Iterator[StoredTensor]:
        for x in self._inputs:
            yield from x.parts()


@dataclass(frozen=True)
class FoldBatchNorm(Rule):
    """Folds the statistics of a layer's batch norm into its weight and bias.

    The inverse is a norm with other statistics, a mean of 0 and a variance that is 1 with the epsilon, which computes
    the same.

    A batch norm is complete with ``count`` tensors; ``pattern`` matches their names up to the kind.
    """

    pattern: str
    count: int

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None:
            return None
        stem, kind = tensor.name[: match.end()], tensor.name[match.end() :]
        parts = context.gather(self, stem, kind, tensor, self.count)
        if parts is None:
            return ()
        weight, bias, mean, var = (self._part(parts, kind, context) for kind in _KINDS)
        if len({x.shape for x in (weight, bias, mean, var)}) > 1:
            raise context.fail(tensor, "the tensors of its batch norm differ in shape")
        return [
            replace(tensor, name=f"{stem}weight", x=BatchNorm(weight, var)),
            replace(tensor, name=f"{stem}bias", x=BatchNorm(weight, var, bias, mean)),
        ]

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None or tensor.name[match.end() :] != "weight":
            return None
        stem, n = tensor.name[: match.end()], tensor.x.shape[0]
        mean, var = Constant((0.0,) * n), Constant((_UNIT_VARIANCE,) * n)
        return [
            tensor,
            replace(tensor, name=f"{stem}running_mean", x=mean),
            replace(tensor, name=f"{stem}running_var", x=var),
            replace(tensor, name=f"{stem}num_batches_tracked", x=Zeros((), _I64)),
        ]

    @staticmethod
    def _part(parts: dict[str, Tensor], kind: str, context: Context) -> Expression:
        if kind not in parts:
            raise context.fail(next(iter(parts.values())), f"its batch norm has no {kind}", "QK-E105")
        return parts[kind].x

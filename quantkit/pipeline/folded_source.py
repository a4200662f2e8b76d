"""A source whose tensors of NVFP4 with a scale are read as values: ``X.weight`` times ``X.scale``, without ``X.scale``.

Runtimes multiply the product by the scale whatever the type of the weights, except that of output.weight, but a type
with a scale of its own needs none, and no other tool expects one.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.gguf import TensorInfo
from quantkit.formats.ranges import U8
from quantkit.pipeline.source import Source, SourceView
from quantkit.types import BY_NAME

F32 = npt.NDArray[np.float32]

_F32, _NVFP4 = BY_NAME["F32"], BY_NAME["NVFP4"]


def scale_name(weight: str) -> str:
    """Return the name of the scale of a weight: X.scale of X.weight."""
    return f"{weight.removesuffix('.weight')}.scale"


def scale_of(source: Source, tensor: TensorInfo) -> TensorInfo | None:
    """Return the tensor with the scales of a tensor of NVFP4, one or one per matrix; None if it has none."""
    if tensor.type is not _NVFP4 or not tensor.name.endswith(".weight"):
        return None
    return source.tensors.get(scale_name(tensor.name))


def read_scales(source: Source, tensor: TensorInfo, scale: TensorInfo) -> F32:
    """Return the scales of a tensor, float32 [matrices]: of experts one each, or one of all.

    Raises FormatError for another type or number, and for values that are not positive.
    """
    matrices = math.prod(tensor.shape[2:])
    if scale.type is not _F32 or math.prod(scale.shape) not in (1, matrices):
        raise FormatError(
            f"{source.where(scale)}: tensor {scale.name} is {scale.type} {list(scale.shape)}, but the scale of "
            f"{tensor.name} is F32 [{matrices}]: convert the model again",
            "QK-E106",
        )
    values = np.empty(math.prod(scale.shape), np.float32)
    source.read(scale, values.view(np.uint8), 0)
    if not (np.isfinite(values) & (values > 0)).all():
        raise FormatError(
            f"{source.where(scale)}: tensor {scale.name} is {float(values[~(values > 0) | ~np.isfinite(values)][0])}, "
            "not a positive number: the source is damaged (a faulty conversion or download); no output was written",
            "QK-E108",
        )
    return np.broadcast_to(values, matrices) if values.size == 1 else values


@dataclass(frozen=True, eq=False)
class FoldedSource(SourceView):
    """A source with these tensors of NVFP4 as F32, multiplied by their scales, which it lacks."""

    scales: dict[str, F32]

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors; those that are multiplied are F32."""
        dropped = {scale_name(name) for name in self.scales}
        return {name: self._fold(t) for name, t in self.source.tensors.items() if name not in dropped}

    def _fold(self, t: TensorInfo) -> TensorInfo:
        return replace(t, type=_F32, nbytes=_F32.tensor_bytes(t.shape)) if t.name in self.scales else t

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.source.fingerprint()} times scales {sorted(self.scales)}".encode()).hexdigest()

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        """Fill ``out`` from byte ``offset`` of a tensor on; of multiplied ones whole rows."""
        scales = self.scales.get(tensor.name)
        if scales is None:
            self.source.read(tensor, out, offset, readahead)
            return
        from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

        n, stored = tensor.shape[0], self.source.tensors[tensor.name]
        x = out.view(np.float32).reshape(-1, n)
        first = offset // (4 * n)
        rows = np.empty((len(x), stored.type.row_bytes(n)), np.uint8)
        self.source.read(stored, rows.reshape(-1), first * rows.shape[1], readahead * rows.shape[1] // (4 * n))
        dequantize_rows(stored.type, rows, x)
        rows_of_matrix = tensor.shape[1] if len(tensor.shape) > 1 else 1
        x *= scales[np.arange(first, first + len(x)) // rows_of_matrix, None]

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        return None if tensor.name in self.scales else self.source.place(tensor)

"""A source with scales of tensors that are encoded as NVFP4: by these, their rows are divided first.

NVFP4's scales of blocks are 8-bit floats from 2^-9 to 448, so weights of usual sizes need a scale of the whole matrix
beside them. llama.cpp reads it from ``blk.N.X.scale``, float32 with one value per expert, and multiplies the product by
it. Here that is a tensor of the source, whose values are computed when they are first read: by the job that copies it,
or by the first job on rows of the matrix.

A matrix's scale depends on its own rows and importance only: largest magnitude / 2688, which makes the largest scale of
a block 448, times one of eight steps of an octave, the one with the least square error of a sample of rows. Of the rows
all are read once before they are encoded, one piece at a time.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.gguf import TensorInfo
from quantkit.formats.ranges import U8
from quantkit.kernels.formats import SCALED
from quantkit.pipeline.row_slices import RowSlice
from quantkit.pipeline.source import Source, SourceView
from quantkit.types import BY_NAME, TensorType

F32 = npt.NDArray[np.float32]

#: The largest value of a level, 6, times the largest scale of a block, 448.
LARGEST = 2688
#: Steps of an octave that are tried for a scale.
_STEPS = 8
#: Values decoded at a time, and values of the sample.
_PIECE, _SAMPLE = 1 << 17, 1 << 15
_NVFP4 = BY_NAME["NVFP4"]


def scale_info(name: str, part: RowSlice) -> TensorInfo:
    """Return the tensor ``name`` of the scales of a part: one float32 per matrix."""
    return TensorInfo(name, (part.matrices,), BY_NAME["F32"], 4 * part.matrices, 0, part.source.shard)


class _Scales:
    """The scales computed so far, by tensor and matrix; a copy in another process begins without any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[tuple[str, int], threading.Lock] = {}
        self.values: dict[tuple[str, int], np.float32] = {}

    def lock(self, key: tuple[str, int]) -> threading.Lock:
        """Return the lock of one scale, so that one thread computes it."""
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())

    def __reduce__(self) -> tuple[Any, ...]:
        return _Scales, ()


@dataclass(frozen=True, eq=False)
class ScaledSource(SourceView):
    """A source with scales of matrices, by the name of the scale the rows that it divides."""

    parts: Mapping[str, RowSlice]
    _scales: _Scales = field(default_factory=_Scales, repr=False)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {**self.source.tensors, **{name: scale_info(name, part) for name, part in self.parts.items()}}

    def stored_tensor(self, tensor: TensorInfo) -> TensorInfo:
        return tensor if tensor.name in self.parts else self.source.stored_tensor(tensor)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.source.fingerprint()} scales {sorted(self.parts)}".encode()).hexdigest()

    def where(self, tensor: TensorInfo) -> str:
        part = self.parts.get(tensor.name)
        return self.source.where(tensor if part is None else part.source)

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        return None if tensor.name in self.parts else self.source.place(tensor)

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        """Fill ``out`` from byte ``offset`` on; of a scale tensor whole values, which are computed.

        Raises FormatError for a matrix with values that are not finite.
        """
        if tensor.name not in self.parts:
            self.source.read(tensor, out, offset, readahead)
            return
        values = out.view(np.float32)
        for i in range(values.size):
            values[i] = self._scale(tensor.name, offset // 4 + i)

    def _scale(self, name: str, matrix: int) -> np.float32:
        key = (name, matrix)
        with self._scales.lock(key):
            if key not in self._scales.values:
                self._scales.values[key] = find_scale(self.source, self.parts[name], matrix)
        return self._scales.values[key]


def find_scale(source: Source, part: RowSlice, matrix: int) -> np.float32:
    """Return the scale of one matrix of a part; 1 for zeros. Raises FormatError for values that are not finite."""
    largest, sample = _read_matrix(source, part, matrix)
    if not np.isfinite(largest):
        raise FormatError(
            f"{source.where(part.source)}: tensor {part.source.name} has a value that is not finite: the source is "
            "damaged (a faulty conversion or download); no output was written",
            "QK-E108",
        )
    if not largest:
        return np.float32(1)
    weights = None if part.importance is None else part.importance.weights
    importance = np.zeros(0, np.float32) if weights is None else weights[matrix % len(weights)]
    least = np.float32(max(largest / LARGEST, float(np.finfo(np.float32).tiny)))
    scales = [least * np.float32(2 ** (step / _STEPS)) for step in range(_STEPS)]
    errors = [_square_error(sample, scale, importance) for scale in scales]
    return scales[int(np.argmin(errors))]


def _read_matrix(source: Source, part: RowSlice, matrix: int) -> tuple[float, F32]:
    """Return the largest magnitude of a matrix, not finite if one value is not, and evenly spread rows of it."""
    from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

    t, n = part.source.type, part.values
    step = _rows_at_once(t, n)
    stride = -(-part.rows // max(1, _SAMPLE // n))
    data = np.empty((step, t.row_bytes(n)), np.uint8)
    values = np.empty((step, n), np.float32)
    largest, sample = np.float32(0), list[F32]()
    for row in range(0, part.rows, step):
        count = min(step, part.rows - row)
        first = matrix * part.source_rows + part.source_row + row
        source.read(part.source, data[:count].reshape(-1), first * data.shape[1], data.nbytes)
        if t.name == "F32":
            x: F32 = data[:count].view(np.float32)
        else:
            x = values[:count]
            dequantize_rows(t, data[:count], x)
        largest = np.maximum(largest, np.maximum(x.max(initial=0), -x.min(initial=0)))
        sample.append(x[-row % stride :: stride].copy())
    return float(largest), np.concatenate(sample)


def _rows_at_once(t: TensorType, n: int) -> int:
    """Return the number of rows that are decoded at a time: whole groups of interleaved rows."""
    return max(t.interleave, _PIECE // n // t.interleave * t.interleave)


def _square_error(x: F32, scale: np.float32, weights: F32) -> float:
    """Return the square error of rows that are encoded with a scale, weighted if there are weights, in float64."""
    from quantkit.kernels.cpu.encode import encoder
    from quantkit.kernels.cpu.encode.check import error_sums
    from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

    scaled = x / scale
    rows, y = np.zeros((len(x), _NVFP4.row_bytes(x.shape[1])), np.uint8), np.empty_like(x)
    encoder(_NVFP4, SCALED)(scaled, weights, rows, 0, len(x))
    dequantize_rows(_NVFP4, rows, y)
    sums = error_sums(scaled, y, weights)
    return float(sums[3 if weights.size else 1]) * float(scale) ** 2

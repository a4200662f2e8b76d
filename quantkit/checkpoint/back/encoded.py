"""A tensor of a GGUF file as values, whatever its type."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.checkpoint.expressions import (
    F32,
    PIECE,
    TYPE_BF16,
    TYPE_F16,
    TYPE_F32,
    Expression,
    value_bytes,
)
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile, TensorInfo
from quantkit.formats.ranges import U8, read_range
from quantkit.formats.safetensors import StoredTensor
from quantkit.kernels.formats import has_decoder
from quantkit.kernels.tensor_scale import TAIL, TENSOR_SCALED, check_rows, decoded_as, with_row_scales
from quantkit.types import TensorType, type_by_name

_FLOATS = (TYPE_F32, TYPE_F16, TYPE_BF16)
_I32 = type_by_name("I32")
#: Types that stay as they are.
_KEPT = (*_FLOATS, _I32)


@dataclass(frozen=True)
class Encoded:
    """A tensor as it is in its file; of other types than F32, F16, BF16 and I32 the decoded values, float32.

    ``scales``: what they are multiplied by, all by one number or each of the matrices by its own.
    """

    path: Path
    info: TensorInfo
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        t = self.info.type
        if self.scales and (t in _KEPT or self._rows % len(self.scales) or not np.isfinite(self.scales).all()):
            raise FormatError(f"{self.path}: tensor {self.info.name}: {len(self.scales)} scales beside it do not fit")
        if t is TENSOR_SCALED:
            check_rows(self.info.shape[0])
        if t not in _KEPT and not has_decoder(decoded_as(t)):
            raise TypeNotSupported(
                f"{self.path}: tensor {self.info.name} is {t}, for which this version has no decoder"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape[::-1]

    @property
    def type(self) -> TensorType:
        return self.info.type if self.info.type in _KEPT and not self.scales else TYPE_F32

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        if self.info.type in _KEPT:
            read_range(self.path, into, self.info.offset + value_bytes(self.type, start), ahead)
            return
        values, width = into.view(np.float32), self.info.shape[0]
        group = self.info.type.interleave
        step, at = max(1, PIECE // width // group) * group, 0
        while at < values.size:
            row, skip = divmod(start + at, width)
            first = row // group * group
            last = -(-(start + values.size) // width)
            rows = min(step, -(-(last - first) // group) * group)
            begin = (row - first) * width + skip
            n = min(rows * width - begin, values.size - at)
            if begin == 0 and n == rows * width:
                self._decode(first, values[at : at + n].reshape(rows, width))
            else:
                whole = np.empty((rows, width), np.float32)
                self._decode(first, whole)
                values[at : at + n] = whole.reshape(-1)[begin : begin + n]
            at += n

    def _decode(self, first: int, values: F32) -> None:
        """Decode rows from ``first`` on, whole groups of them."""
        from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

        t, (rows, width) = self.info.type, values.shape
        nbytes = t.row_bytes(width)
        data = np.empty((rows, nbytes), np.uint8)
        read_range(self.path, data.reshape(-1), self.info.offset + first * nbytes, data.size)
        if t is TENSOR_SCALED:
            tail = np.empty(4, np.uint8)
            read_range(self.path, tail, self.info.offset + self.info.nbytes - TAIL)
            data = with_row_scales(data, float(tail.view("<f4")[0]))
        dequantize_rows(decoded_as(t), data, values)
        if self.scales:
            of_matrix = np.array(self.scales, np.float32)
            of = np.arange(first, first + rows) * of_matrix.size // self._rows
            values *= of_matrix[of, None]

    @property
    def _rows(self) -> int:
        return math.prod(self.shape[:-1])

    def parts(self) -> Iterator[StoredTensor]:
        t = self.info
        yield StoredTensor(t.name, t.type.name, self.shape, self.path, t.offset, t.nbytes)


def encoded_tensors(model: GGUFFile, kinds: Mapping[str, str]) -> dict[str, Expression]:
    """Return a file's tensors by name, with the scales of NVFP4 that lie beside them.

    Args:
        model: the file.
        kinds: of the architecture; a scale that the model itself has is one of them.
    """
    scales: dict[str, tuple[float, ...]] = {}
    for info in model.tensors.values():
        stem, _, suffix = info.name.rpartition(".")
        weight = f"{stem}.weight"
        if suffix in ("scale", "input_scale") and weight in model.tensors and _star(info.name) not in kinds:
            scales[info.name] = tuple(model.data(info.name).view(np.float32).tolist()) if suffix == "scale" else ()
    return {
        info.name: Encoded(model.paths[info.shard], info, scales.get(info.name.removesuffix("weight") + "scale", ()))
        for info in model.tensors.values()
        if info.name not in scales
    }


def _star(name: str) -> str:
    return re.sub(r"^(enc\.|dec\.)?blk\.\d+\.", lambda match: f"{match[1] or ''}*", name)

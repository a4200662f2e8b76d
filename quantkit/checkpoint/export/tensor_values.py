"""A tensor of a GGUF file of any type as values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
#: Types that are written unchanged.
_UNDECODED = (*_FLOATS, _I32)


#: Kinds of tensors whose last dimensions are 1 in a checkpoint, with their number of dimensions; for single
#: architectures.
_RANKS = {"*ffn_gate_inp_shexp": 2}
_RANKS_OF = {"kimi-linear": {"*ssm_a": 4}}


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor as stored; types other than F32, F16, BF16 and I32 are decoded to float32.

    ``scales``: factors, one for all or one per matrix.
    """

    path: Path
    info: TensorInfo
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        t = self.info.type
        if self.scales and (t in _UNDECODED or self._rows % len(self.scales) or not np.isfinite(self.scales).all()):
            raise FormatError(
                f"{self.path}: tensor {self.info.name}: its {len(self.scales)} scales do not match it", "QK-E106"
            )
        if t is TENSOR_SCALED:
            check_rows(self.info.shape[0])
        if t not in _UNDECODED and not has_decoder(decoded_as(t)):
            raise TypeNotSupported(
                f"{self.path}: tensor {self.info.name} is {t}, for which this version has no decoder", "QK-E302"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape[::-1]

    @property
    def type(self) -> TensorType:
        return self.info.type if self.info.type in _UNDECODED and not self.scales else TYPE_F32

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        if self.info.type in _UNDECODED:
            read_range(self.path, out, self.info.offset + value_bytes(self.type, start), readahead)
            return
        values, width = out.view(np.float32), self.info.shape[0]
        group = self.info.type.interleave
        step, position = max(1, PIECE // width // group) * group, 0
        while position < values.size:
            row, skip = divmod(start + position, width)
            first = row // group * group
            last = -(-(start + values.size) // width)
            rows = min(step, -(-(last - first) // group) * group)
            begin = (row - first) * width + skip
            n = min(rows * width - begin, values.size - position)
            if begin == 0 and n == rows * width:
                self._decode(first, values[position : position + n].reshape(rows, width))
            else:
                group_rows = np.empty((rows, width), np.float32)
                self._decode(first, group_rows)
                values[position : position + n] = group_rows.reshape(-1)[begin : begin + n]
            position += n

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
            matrix_of_row = np.arange(first, first + rows) * of_matrix.size // self._rows
            values *= of_matrix[matrix_of_row, None]

    @property
    def _rows(self) -> int:
        return math.prod(self.shape[:-1])

    def parts(self) -> Iterator[StoredTensor]:
        t = self.info
        yield StoredTensor(t.name, t.type.name, self.shape, self.path, t.offset, t.nbytes)


def read_tensors(model: GGUFFile, kinds: Mapping[str, str]) -> dict[str, Expression]:
    """Return a file's tensors by name, with their NVFP4 scales.

    Args:
        model: the file.
        kinds: of the architecture; a scale that the model itself has is one of them.
    """
    scales: dict[str, tuple[float, ...]] = {}
    for info in model.tensors.values():
        stem, _, suffix = info.name.rpartition(".")
        weight = f"{stem}.weight"
        if suffix in ("scale", "input_scale") and weight in model.tensors and _kind_pattern(info.name) not in kinds:
            scales[info.name] = tuple(model.data(info.name).view(np.float32).tolist()) if suffix == "scale" else ()
    ranks = _RANKS | _RANKS_OF.get(str(model.get("general.architecture")), {})
    return {
        info.name: EncodedTensor(
            model.paths[info.shard], _with_rank(info, ranks), scales.get(info.name.removesuffix("weight") + "scale", ())
        )
        for info in model.tensors.values()
        if info.name not in scales
    }


def _with_rank(info: TensorInfo, ranks: Mapping[str, int]) -> TensorInfo:
    """Return a tensor with the dimensions of 1 that llama-quantize has dropped from it."""
    missing = ranks.get(_kind_pattern(info.name).removesuffix(".weight"), 0) - len(info.shape)
    return replace(info, shape=info.shape + (1,) * missing) if missing > 0 else info


def _kind_pattern(name: str) -> str:
    return re.sub(r"^(enc\.|dec\.)?blk\.\d+\.", lambda match: f"{match[1] or ''}*", name)

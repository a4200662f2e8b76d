"""The checkpoint itself: a source whose tensors are computed while being read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

from quantkit.checkpoint.expressions import (
    TYPE_BF16,
    TYPE_F16,
    TYPE_F32,
    Expression,
    Shaped,
    Stored,
    as_floats,
    cast,
    size_of,
    value_bytes,
    values_in,
)
from quantkit.checkpoint.general import General
from quantkit.checkpoint.policy import OutType, type_of, type_of_float8
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf import Field, TensorInfo
from quantkit.formats.gguf.rules import GGML_DIMS, short
from quantkit.formats.ranges import U8, both_ends
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType
from quantkit.units import round_up

P = ParamSpec("P")

FLOATS = (TYPE_F32, TYPE_F16, TYPE_BF16)
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
#: Bytes hashed at each end of every stored tensor for the fingerprint.
_SAMPLE = 4096
#: Classes of expressions that have another name in fingerprints, which stay the same when a class is renamed.
_FINGERPRINT_NAMES = {
    "Centered": "AroundZero",
    "Concatenated": "Joined",
    "EncodedTensor": "Encoded",
    "ExpertTable": "Table",
}


@dataclass(frozen=True)
class ConvertedTensor:
    """A converted tensor: its info, its expression, its source name and its target type."""

    info: TensorInfo
    expr: Expression
    #: Its name in the checkpoint.
    source_name: str
    #: Its type in a file of the chosen type.
    target_type: TensorType


class Checkpoint:
    """An open checkpoint. ``outtype``: the type of files it is opened for; ``general``: the values of general.*.

    ``kind`` is "vocab" or "mtp" if only that part of the model is opened.

    ``tensors`` have the type that ``read`` returns; ``converted`` has the expression of each, and its target type.
    """

    def __init__(
        self,
        folder: Path,
        files: tuple[Path, ...],
        fields: dict[str, Field],
        converted: list[ConvertedTensor],
        outtype: OutType,
        identity: str = "",
    ) -> None:
        self.paths: tuple[Path, ...] = (folder,)
        self.files = files
        self.fields = fields
        self.converted: dict[str, ConvertedTensor] = {item.info.name: item for item in converted}
        self.tensors: dict[str, TensorInfo] = {item.info.name: item.info for item in converted}
        self.outtype = outtype
        #: Further data that determines its bytes, besides metadata and stored tensors.
        self.identity = identity
        self.general = General({}, {})
        self.kind = ""
        #: The checkpoint has vision or audio encoders, which are not in this file.
        self.has_encoders = False
        #: Notes for the user.
        self.notes: tuple[str, ...] = ()
        #: Settings of its files that a GGUF file cannot express.
        self.omissions: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Path, ...]:
        """See ``pipeline.source``."""
        return self.files

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key, or ``default`` if there is none."""
        field = self.fields.get(key)
        return default if field is None else field.value

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        """Fill ``out`` from byte ``offset`` of a tensor on; both must be whole values. See ``pipeline.source``."""
        self.converted[tensor.name].expr.read(values_in(tensor.type, offset), out, readahead)

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        """Return the place of a tensor's bytes, or None if it is computed."""
        x = self.converted[tensor.name].expr
        return (x.tensor.path, x.tensor.offset) if isinstance(x, Stored) and x.tensor.nbytes == tensor.nbytes else None

    def stored_tensor(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor unchanged."""
        return tensor

    def where(self, tensor: TensorInfo) -> str:
        """Return the file of a tensor, or of its first part."""
        part = next(self.converted[tensor.name].expr.parts(), None)
        return str(self.paths[0] if part is None else part.path)

    def fingerprint(self) -> str:
        """Return a SHA-256 over metadata, names and types, and both ends of every stored tensor."""
        digest = hashlib.sha256(self.identity.encode())
        for item in self.fields.values():
            digest.update(item.encode())
        parts: dict[tuple[Path, int], StoredTensor] = {}
        for tensor in self.converted.values():
            t = tensor.info
            expression = type(tensor.expr).__name__
            expression = _FINGERPRINT_NAMES.get(expression, expression)
            digest.update(f"{t.name} {t.shape} {t.type.id} {tensor.target_type.id} {expression}".encode())
            for part in tensor.expr.parts():
                parts.setdefault((part.path, part.offset), part)
        files: dict[Path, list[StoredTensor]] = {}
        for part in parts.values():
            files.setdefault(part.path, []).append(part)
        for path, stored in files.items():
            ends = both_ends(path, ((part.offset, part.nbytes) for part in stored), _SAMPLE)
            for part, sample in zip(stored, ends, strict=True):
                digest.update(f"{part.name} {part.dtype} {part.shape}".encode())
                digest.update(sample)
        return digest.hexdigest()


def converted_tensors(
    tensors: Iterable[tuple[str, Tensor]], names: TensorNames, outtype: OutType, exact: bool, q8: bool
) -> list[ConvertedTensor]:
    """Return the tensors of the file in order; ``q8``: store those of float8 as Q8_0."""
    converted: list[ConvertedTensor] = []
    offset = 0  # as in a separate file: only the order of offsets matters
    for name, tensor in tensors:
        converted.append(_convert(name, tensor, names, outtype, exact, offset, q8))
        offset += round_up(converted[-1].info.nbytes, 32)
    return converted


def _convert(
    name: str, tensor: Tensor, names: TensorNames, outtype: OutType, exact: bool, offset: int, q8: bool
) -> ConvertedTensor:
    x = tensor.x
    if not x.shape:
        x = Shaped(x, (1,))
    target_type = type_of(name, x, tensor.layer, names, outtype.type, tensor.file_type)
    if q8 and tensor.file_type is None and x.type.block == 1 and any(part.dtype in _FLOAT8 for part in x.parts()):
        target_type = type_of_float8(name, x)
    if x.type.name in ("Q4_0", "Q8_0") and type_of(name, as_floats(x), tensor.layer, names, TYPE_F16) is TYPE_F32:
        x, target_type = as_floats(x), TYPE_F32  # such as a router
    stored_type = x.type
    if stored_type.block == 1:
        stored_type = target_type if (not exact and target_type in FLOATS) or target_type is TYPE_F32 else x.type
        x = cast(x, stored_type)
    if len(x.shape) > GGML_DIMS or 0 in x.shape:
        part = next(x.parts(), None)
        where = part.path if part is not None else tensor.name
        raise FormatError(
            f"{where}: tensor {short(tensor.name)} has the shape {list(x.shape)}, which GGUF does not support",
            "QK-E305",
        )
    nbytes = value_bytes(stored_type, size_of(x))
    return ConvertedTensor(TensorInfo(name, x.shape[::-1], stored_type, nbytes, offset, 0), x, tensor.name, target_type)

"""Models as headers of GGUF files, their weights holes: the zoo, and every checkpoint as quantkit converts it.

They are encoded here and not by quantkit, whose writer refuses most damages of tests/lib/damage.py.
"""

from __future__ import annotations

import math
import os
import struct
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import checkpoints
import zoo
from quantkit.convert import ConvertOptions, plan_convert
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import Field, open_gguf
from quantkit.types import type_by_id

ALIGNMENT = 32


@dataclass(frozen=True)
class Tensor:
    """A tensor info: ``shape`` innermost first, ``type`` by its id; ``gap`` bytes precede its data."""

    name: str
    shape: tuple[int, ...]
    type: int
    gap: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of its data, the last block of a row rounded up; 4 per value of an unknown type."""
        row = self.shape[0] if self.shape else 1
        try:
            t = type_by_id(self.type)
        except TypeNotSupported:
            return 4 * math.prod(self.shape)
        blocks = -(-row // t.block) * math.prod(self.shape[1:])
        return t.row_header * math.prod(self.shape[1:]) + blocks * t.block_bytes

    def encode(self, offset: int) -> bytes:
        dims = struct.pack(f"<I{len(self.shape)}Q", len(self.shape), *self.shape)
        return _string(self.name) + dims + struct.pack("<IQ", self.type, offset)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"


@dataclass(frozen=True)
class Model:
    """The header of a GGUF file; ``n_missing``: bytes of data that the file lacks."""

    name: str
    fields: tuple[Field, ...]
    tensors: tuple[Tensor, ...]
    n_missing: int = 0

    @property
    def architecture(self) -> str:
        return next((str(f.value) for f in self.fields if f.key == "general.architecture"), "")

    def layout(self) -> tuple[bytes, int]:
        """Return the file up to its weights, and the size of the file."""
        infos, end = [], 0
        for tensor in self.tensors:
            offset = end + tensor.gap
            infos.append(tensor.encode(offset))
            end = offset + _aligned(tensor.nbytes)
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.fields))
        data = head + b"".join(_field_bytes(f) for f in self.fields) + b"".join(infos)
        data += bytes(_aligned(len(data)) - len(data))
        return data, len(data) + end - self.n_missing

    def write(self, path: Path) -> Path:
        """Write the file, its weights holes."""
        header, nbytes = self.layout()
        path.write_bytes(header)
        os.truncate(path, nbytes)
        return path


def _aligned(n: int) -> int:
    return n + -n % ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _field_bytes(item: Field) -> bytes:
    return _string(item.key) + struct.pack("<I", item.type) + bytes(item.raw)


def read_model(name: str, path: Path) -> Model:
    """Return the model of a GGUF file, or of its header alone."""
    with open_gguf(path, header_only=True) as file:
        fields = tuple(replace(f, raw=bytes(f.raw)) for f in file.fields.values())
        return Model(name, fields, tuple(Tensor(t.name, t.shape, t.type.id) for t in file.tensors.values()))


def zoo_model(name: str) -> Model:
    """Return the model ``name`` of the zoo."""
    return read_model(f"zoo/{name}", zoo.ZOO / "headers" / f"{name}.head")


def converted_model(name: str) -> Model:
    """Return the checkpoint ``name`` converted by quantkit, to F32 or else to the first type of its tests."""
    description = checkpoints.describe(name)
    outtype = "f32" if "f32" in description.outtypes else description.outtypes[0]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoints.write_description(description, Path(folder))
        options = ConvertOptions(**description.convert_keywords(), outtype=outtype)
        plan = plan_convert(checkpoint, Path(folder, "out.gguf"), None, options)
        head = Path(folder, "out.gguf")
        head.write_bytes(plan.shards[0].layout.header)
        return read_model(f"convert/{name}", head)


#: Checkpoints with encoders whose text models have architectures of their own.
TEXTS = ("mm-clef", "mm-cogvlm", "mm-glm5-next", "mm-pocket-tts", "mm-qwen3-asr", "mm-qwen3-tts", "mm-qwen4-exp")
#: Every model: SOURCE/NAME.
NAMES = (*(f"zoo/{name}" for name in zoo.NAMES), *(f"convert/{name}" for name in (*checkpoints.NAMES, *TEXTS)))


@cache
def model(name: str) -> Model:
    """Return a model by its name in NAMES."""
    source, _, base_name = name.partition("/")
    return zoo_model(base_name) if source == "zoo" else converted_model(base_name)

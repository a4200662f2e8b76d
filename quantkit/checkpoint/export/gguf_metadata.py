"""Typed access to the architecture metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.gguf.rules import short


def plain(value: Any) -> Any:
    """Return a value as in JSON; a float by the shortest digits that give its value."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(str(np.float32(value)))
    return value.item() if isinstance(value, np.generic) else value


class ModelMetadata:
    """The keys of one architecture, beginning with a dot, and the tensors of a file."""

    def __init__(self, model: GGUFFile, arch: str) -> None:
        self.model, self.arch = model, arch

    @property
    def path(self) -> str:
        return str(self.model.paths[0])

    def get(self, key: str) -> Any:
        """Return a value as JSON, None if the key is absent."""
        field = self.model.fields.get(f"{self.arch}{key}")
        return None if field is None else plain(field.value)

    def number(self, key: str) -> int:
        """Return a required count; the largest if there is one for each layer."""
        value = self.get(key)
        if isinstance(value, list) and value:
            value = max(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise FormatError(f"{self.path}: key {self.arch}{key} is {short(value)}, not a count", "QK-E123")
        return value

    def flags(self, key: str) -> list[bool] | None:
        """Return a flag for each layer, None without the key."""
        value = self.get(key)
        return [bool(item) for item in value] if isinstance(value, list) else None

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor; without a layer number, of the first layer."""
        return name in self.model.tensors or f"blk.0.{name}" in self.model.tensors

    def has_in_any_layer(self, ending: str) -> bool:
        """Return whether the name of a tensor of any layer ends like this."""
        return any(name.endswith(ending) for name in self.model.tensors)

    def layers_with(self, name: str) -> list[int]:
        """Return the layers that have a tensor ``name``."""
        return [i for i in range(self.number(".block_count")) if f"blk.{i}.{name}" in self.model.tensors]

    def per_layer(self, key: str) -> list[int]:
        """Return a count for each layer; files store one number if all are equal."""
        value = self.get(key)
        return (
            [int(item) for item in value]
            if isinstance(value, list)
            else [self.number(key)] * self.number(".block_count")
        )

    def values(self, name: str) -> list[float]:
        """Return the values of a small tensor of F32."""
        return [plain(item) for item in self.model.data(name).view(np.float32)]

    @property
    def head_width(self) -> int:
        """The width of a head."""
        width = self.get(".attention.key_length")
        if width is None:
            width = self.number(".embedding_length") // max(1, self.number(".attention.head_count"))
        return int(width)

"""What a GGUF file says of its model: keys of the architecture, and which tensors there are."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.gguf.rules import short


def plain(value: Any) -> Any:
    """Return a value as JSON has it; a float of a file by the shortest digits that mean it."""
    if isinstance(value, np.ndarray):
        return [plain(each) for each in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (float, np.floating)):
        return float(str(np.float32(value)))
    return value.item() if isinstance(value, np.generic) else value


class Said:
    """The keys of one architecture, beginning with a dot, and the tensors of a file."""

    def __init__(self, model: GGUFFile, arch: str) -> None:
        self.model, self.arch = model, arch

    @property
    def where(self) -> str:
        return str(self.model.paths[0])

    def get(self, key: str) -> Any:
        """Return a value as JSON has it, None if the file does not say it."""
        found = self.model.fields.get(f"{self.arch}{key}")
        return None if found is None else plain(found.value)

    def number(self, key: str) -> int:
        """Return a count that the model cannot do without; of one for each layer the largest."""
        found = self.get(key)
        if isinstance(found, list) and found:
            found = max(found)
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise FormatError(f"{self.where}: key {self.arch}{key} is {short(found)}, not a count")
        return found

    def flags(self, key: str) -> list[bool] | None:
        """Return what is said of each layer, None if nothing is."""
        found = self.get(key)
        return [bool(each) for each in found] if isinstance(found, list) else None

    def has(self, name: str) -> bool:
        """Tell whether there is a tensor of this name; without a layer, in the first."""
        return name in self.model.tensors or f"blk.0.{name}" in self.model.tensors

    def some(self, ending: str) -> bool:
        """Tell whether a tensor of any layer ends like this."""
        return any(name.endswith(ending) for name in self.model.tensors)

    def of_layers(self, key: str) -> list[int]:
        """Return a count of each layer, which files say once if all have the same."""
        found = self.get(key)
        return (
            [int(each) for each in found]
            if isinstance(found, list)
            else [self.number(key)] * self.number(".block_count")
        )

    def values(self, name: str) -> list[float]:
        """Return the values of a small tensor of F32."""
        return [plain(each) for each in self.model.data(name).view(np.float32)]

    @property
    def head(self) -> int:
        """The width of a head."""
        width = self.get(".attention.key_length")
        if width is None:
            width = self.number(".embedding_length") // max(1, self.number(".attention.head_count"))
        return int(width)

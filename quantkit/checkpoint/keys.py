"""Metadata of a converted model: an ordered list of keys.

Order, types and omissions are those of convert_hf_to_gguf.py (b11434: gguf_writer.py, TextModel. set_gguf_parameters):
a key that is set again keeps its place, empty strings and lists are not written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.gguf.rules import short

#: expert_gating_func, by the name in a configuration.
GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}


class Keys:
    """The keys of an output under construction; those beginning with a dot belong to the architecture.

    ``layers``: the number of layers in the file; ``file_type``: llama.cpp's number of the type.
    """

    def __init__(self, arch: str, where: Path, layers: int = 0, file_type: int = 0) -> None:
        self.arch, self.where = arch, where
        self.layers, self.file_type = layers, file_type
        self.fields: dict[str, Field] = {}
        #: Errors of values that cannot become keys.
        self.omissions: list[str] = []
        self.text("general.architecture", arch)

    @contextmanager
    def blame(self, path: Path) -> Iterator[None]:
        """Name ``path`` in errors about the values set in this context."""
        self.where, before = path, self.where
        try:
            yield
        finally:
            self.where = before

    def _set(self, key: str, value: Any, kind: ValueType, item: ValueType | None = None) -> None:
        name = f"{self.arch}{key}" if key.startswith(".") else key
        try:
            self.fields[name] = Field.of(name, value, kind, item)
        except (RecipeError, struct.error) as e:
            raise FormatError(f"{self.where}: {e}", "QK-E112") from None

    def u32(self, key: str, value: Any) -> None:
        """Set a count; a bool counts as 0 or 1."""
        self._set(key, int(value) if isinstance(value, bool) else value, ValueType.UINT32)

    def i32(self, key: str, value: Any) -> None:
        self._set(key, int(value) if isinstance(value, bool) else value, ValueType.INT32)

    def f32(self, key: str, value: Any) -> None:
        """Set a number; refuse NaN."""
        if isinstance(value, float) and math.isnan(value):
            raise FormatError(f"{self.where}: key {key} is NaN", "QK-E112")
        self._set(key, float(value) if isinstance(value, bool) else value, ValueType.FLOAT32)

    def flag(self, key: str, value: Any) -> None:
        self._set(key, bool(value), ValueType.BOOL)

    def text(self, key: str, value: Any) -> None:
        """Set a string, unless it is empty."""
        if value:
            if not isinstance(value, str):
                raise FormatError(
                    f"{self.where}: key {key}: {short(value)} is not a text; correct the model card", "QK-E112"
                )
            self._set(key, value, ValueType.STRING)

    def array(self, key: str, values: Sequence[Any]) -> None:
        """Set a list, unless it is empty; its item type is that of the first."""
        if not len(values):
            return
        first = values[0]
        kinds = ((bool, ValueType.BOOL), (str, ValueType.STRING), (int, ValueType.INT32), (float, ValueType.FLOAT32))
        item = next((kind for python, kind in kinds if isinstance(first, python)), None)
        if item is None or set(map(type, values)) != {type(first)}:
            raise FormatError(f"{self.where}: key {key}: {short(list(values))} is not a list of one type", "QK-E112")
        self._set(key, list(values), ValueType.ARRAY, item)

    def counts(self, key: str, values: Sequence[int]) -> None:
        """Set a list of counts, all >= 0."""
        self._set(key, list(values), ValueType.ARRAY, ValueType.UINT32)

    def wide_counts(self, key: str, values: Sequence[int]) -> None:
        """Set a list of counts of up to 64 bits, unless it is empty."""
        if values:
            self._set(key, list(values), ValueType.ARRAY, ValueType.UINT64)

    def octets(self, key: str, values: bytes) -> None:
        """Set a list of bytes, unless it is empty."""
        if values:
            self._set(key, list(values), ValueType.ARRAY, ValueType.UINT8)

    def remove(self, key: str) -> None:
        """Remove a key, if present."""
        self.fields.pop(f"{self.arch}{key}" if key.startswith(".") else key, None)

    def count(self, key: str, value: Any) -> None:
        """Set a count, or a list of counts: one for each layer."""
        if isinstance(value, (list, tuple)):
            self.array(key, list(value))
        else:
            self.u32(key, value)

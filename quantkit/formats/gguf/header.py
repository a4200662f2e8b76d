"""The header of a file as bytes: the infos of tensors as they are stored, and metadata that can be exchanged."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.files import open_input
from quantkit.formats.gguf.fields import Field, ValueType
from quantkit.formats.gguf.reader import Shard
from quantkit.formats.gguf.rules import MAGIC, PADDING_KEY
from quantkit.units import round_up

_COUNTS = struct.Struct("<4sIQQ")
#: The bytes of that key with an empty text: length, key, type, length.
_MIN_PADDING = 8 + len(PADDING_KEY) + 4 + 8
#: The most room for later edits.
MAX_ROOM = 64 << 20


def padding_field(room: int) -> Field:
    """Return the key that keeps ``room`` bytes of a header for later edits, its own bytes included."""
    return Field.of(PADDING_KEY, " " * max(0, room - _MIN_PADDING), ValueType.STRING)


def check_room(room: int) -> None:
    """Raise RecipeError for a room that is negative or beyond ``MAX_ROOM``."""
    if not 0 <= room <= MAX_ROOM:
        raise RecipeError(f"--reserve {room}: at most {MAX_ROOM >> 20} MiB can be reserved", "QK-E203")


@dataclass(frozen=True)
class Header:
    """A header; ``infos``: the infos of ``n_tensors`` tensors; ``size``: bytes up to the tensor data."""

    version: int
    alignment: int
    fields: tuple[Field, ...]
    infos: bytes
    n_tensors: int
    size: int

    @classmethod
    def from_shard(cls, shard: Shard) -> Header:
        """Return the header of a local file. Raises FormatError, OSError."""
        begin = _COUNTS.size + sum(len(field.encode()) for field in shard.fields.values())
        nbytes = sum(8 + len(t.name.encode()) + 4 + 8 * len(t.shape) + 4 + 8 for t in shard.tensors)
        with open_input(shard.path) as fd:
            infos = read_exactly(fd, shard.path, begin, nbytes)
        fields = tuple(shard.fields.values())
        size = round_up(begin + nbytes, shard.alignment)
        return cls(shard.version, shard.alignment, fields, infos, len(shard.tensors), size)

    def encode(self, fields: Iterable[Field], *, room: int = 0) -> bytes:
        """Return the header with other fields and at least ``room`` bytes for later edits, up to the tensor data."""
        data = self._encode(fields, room)
        return data.ljust(round_up(len(data), self.alignment), b"\0")

    def encode_to_size(self, fields: Iterable[Field]) -> bytes | None:
        """Return the header with other fields and exactly the present size.

        None if they need more bytes, or, with alignments below 32, if they need a few less than padding can fill.
        """
        fields = tuple(fields)
        excess = self.size - len(self._encode(fields, 0))
        if excess < 0 or self.alignment <= excess < _MIN_PADDING:
            return None
        return self._encode(fields, excess if excess >= self.alignment else 0).ljust(self.size, b"\0")

    def encode_present(self) -> bytes:
        """Return the header as it is."""
        head = _COUNTS.pack(MAGIC, self.version, self.n_tensors, len(self.fields))
        data = b"".join((head, *(field.encode() for field in self.fields), self.infos))
        return data.ljust(self.size, b"\0")

    def _encode(self, fields: Iterable[Field], room: int) -> bytes:
        fields = [field for field in fields if field.key != PADDING_KEY]
        if room:
            fields.append(padding_field(room))
        head = _COUNTS.pack(MAGIC, self.version, self.n_tensors, len(fields))
        return b"".join((head, *(field.encode() for field in fields), self.infos))


def read_exactly(fd: int, path: Path, offset: int, nbytes: int) -> bytes:
    """Return bytes of an open file. Raises FormatError if it ends before, OSError."""
    data = os.pread(fd, nbytes, offset)
    if len(data) != nbytes:
        raise FormatError(f"{path}: ends at byte {offset + len(data)}, within the header: truncated", "QK-E103")
    return data

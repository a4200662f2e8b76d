"""The header of a file as bytes: the infos of tensors as they are stored, and metadata that can be exchanged."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.files import open_input
from quantkit.formats.gguf.fields import Field, ValueType
from quantkit.formats.gguf.reader import Shard
from quantkit.formats.gguf.rules import MAGIC, PADDING_KEY
from quantkit.units import round_up

_COUNTS = struct.Struct("<4sIQQ")
#: Bytes of magic, version and the two counts, before the first key.
COUNTS_SIZE = _COUNTS.size
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

    @property
    def end(self) -> int:
        """The byte after the last info; zeros follow up to ``size``."""
        return self.infos_begin + len(self.infos)

    @property
    def infos_begin(self) -> int:
        """The byte after the last key."""
        return COUNTS_SIZE + sum(len(field.encode()) for field in self.fields)

    def encode(self) -> bytes:
        """Return the bytes of the header, up to the tensor data."""
        head = _COUNTS.pack(MAGIC, self.version, self.n_tensors, len(self.fields))
        data = b"".join((head, *(field.encode() for field in self.fields), self.infos))
        return data.ljust(self.size, b"\0")

    def with_fields(self, fields: Iterable[Field], *, room: int = 0) -> Header:
        """Return a header with other fields, ``room`` bytes for later edits being the last, of the size they need."""
        fields = [field for field in fields if field.key != PADDING_KEY]
        if room:
            fields.append(padding_field(room))
        header = replace(self, fields=tuple(fields))
        return replace(header, size=round_up(header.end, self.alignment))

    def fit(self, fields: Iterable[Field]) -> Header | None:
        """Return a header of this size with other fields; its infos stay in their place if padding can fill the rest.

        None if the fields need more bytes, or, with alignments below 32, a few less than padding can fill.
        """
        fields = tuple(fields)
        end = self.with_fields(fields).end
        if self.end - end >= _MIN_PADDING:
            room = self.end - end
        elif 0 <= self.size - end < self.alignment:
            room = 0
        elif self.size - end >= _MIN_PADDING:
            room = self.size - end
        else:
            return None
        return replace(self.with_fields(fields, room=room), size=self.size)


def read_exactly(fd: int, path: Path, offset: int, nbytes: int) -> bytes:
    """Return bytes of an open file. Raises FormatError if it ends before, OSError."""
    data = os.pread(fd, nbytes, offset)
    if len(data) != nbytes:
        raise FormatError(f"{path}: ends at byte {offset + len(data)}, within the header: truncated", "QK-E103")
    return data

"""Maps of GGUF-Tool-Suite (Thireus): a file per tensor, with the SHA-256 that it must have.

A line of tensors.TYPE.map describes the shard of one tensor, which lies beside the map::

    FILE:SHA256:TENSOR:shape=(7168, 129280):dtype=iq4_k:elements=926679040:bytes=521256960
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.errors import FormatError
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.gguf.reader import read_shard
from quantkit.formats.outputs import read_text

_LINE = re.compile(r"([^:/\\]+\.gguf):([0-9a-f]{64}):([^:]+):(.*)")


@dataclass(frozen=True, slots=True)
class MapEntry:
    """The shard of a tensor, and its SHA-256."""

    path: Path
    sha256: str
    tensor: str


def is_map(path: Path) -> bool:
    """Return whether a file is a map by its name."""
    return path.name.endswith(".map")


def read_map(path: Path) -> dict[str, MapEntry]:
    """Return the entries of a map by tensor. Raises FormatError."""
    entries: dict[str, MapEntry] = {}
    for number, line in enumerate(read_text(path).decode("utf-8", "replace").splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise FormatError(f"{path}: line {number} is not FILE:SHA256:TENSOR:shape=..", "QK-E111")
        if match[3] in entries:
            raise FormatError(f"{path}: line {number}: the tensor {match[3]} occurs twice", "QK-E107")
        entries[match[3]] = MapEntry(path.parent / match[1], match[2], match[3])
    if not entries:
        raise FormatError(f"{path}: contains no tensor", "QK-E111")
    return entries


def open_entries(entries: list[MapEntry]) -> GGUFFile:
    """Open the shards of some entries as one model. Raises FormatError if one lacks its tensor."""
    shards = []
    for i, entry in enumerate(entries):
        shard = read_shard(entry.path, i, header_only=False)
        tensors = [tensor for tensor in shard.tensors if tensor.name == entry.tensor]
        if not tensors:
            raise FormatError(f"{entry.path}: has no tensor {entry.tensor}, against the map", "QK-E105")
        shards.append(replace(shard, tensors=tensors))
    return GGUFFile(shards, header_only=False)

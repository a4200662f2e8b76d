"""Maps of GGUF-Tool-Suite (Thireus): a file per tensor, with the SHA-256 that it must have.

A line of tensors.TYPE.map describes the shard of one tensor, which lies beside the map::

    FILE:SHA256:TENSOR:shape=(7168, 129280):dtype=iq4_k:elements=926679040:bytes=521256960
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.errors import FormatError
from quantkit.formats.gguf import GGUFFile, TensorInfo, parse_split_path, split_path
from quantkit.formats.gguf.reader import Shard, read_shard
from quantkit.formats.outputs import read_text
from quantkit.types import TensorType, has_type, type_by_name

_LINE = re.compile(r"([^:/\\]+\.gguf):([0-9a-f]{64}):([^:]+):(.*)")
_SHAPE, _TYPE = re.compile(r"(?:^|:)shape=\(([\d, ]*)\)"), re.compile(r"(?:^|:)dtype=(\w+)")
#: The type in the names of a map, and of its shards.
_MAP_TYPE, _SHARD_TYPE = re.compile(r"tensors\.(\w+)\.map"), re.compile(r"-(\w+)-SPECIAL_(?:TENSOR|SPLIT)-\d+-of-\d+")


@dataclass(frozen=True, slots=True)
class MapEntry:
    """The shard of a tensor, its SHA-256, and the properties of the tensor as text."""

    path: Path
    sha256: str
    tensor: str
    properties: str = ""

    def info(self, path: Path) -> TensorInfo:
        """Return the tensor as the map ``path`` describes it, without a place. Raises FormatError."""
        shape, t = _SHAPE.search(self.properties), _TYPE.search(self.properties)
        if shape is None or t is None or not has_type(t[1]):
            raise FormatError(f"{path}: {self.tensor} has no shape=(..) and dtype=.. that quantkit knows", "QK-E111")
        return TensorInfo(self.tensor, tuple(map(int, re.findall(r"\d+", shape[1]))), type_by_name(t[1]), 0, 0, 0)


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
        entries[match[3]] = MapEntry(path.parent / match[1], match[2], match[3], match[4])
    if not entries:
        raise FormatError(f"{path}: contains no tensor", "QK-E111")
    return entries


def map_type(path: Path, entries: Iterable[MapEntry]) -> TensorType | None:
    """Return the type by which a map is known, from its name or those of its shards; None if they have none.

    Some tensors have another type: norms, and matrices whose rows do not fit.
    """
    names = [_MAP_TYPE.fullmatch(path.name), *(_SHARD_TYPE.search(entry.path.name) for entry in entries)]
    type_names = [match[1] for match in names if match is not None and has_type(match[1])]
    return type_by_name(type_names[0]) if type_names else None


def open_entries(path: Path, entries: Iterable[MapEntry], metadata_of: MapEntry | None = None) -> GGUFFile:
    """Open the shards of some entries as one model, with the metadata of the first shard of a set, beside the map.

    Raises FormatError if a shard lacks its tensor, or the first shard is missing.
    """
    shards = [] if metadata_of is None else [_metadata_shard(path, metadata_of)]
    for entry in entries:
        shard = read_shard(entry.path, len(shards), header_only=False)
        tensors = [tensor for tensor in shard.tensors if tensor.name == entry.tensor]
        if not tensors:
            raise FormatError(f"{entry.path}: has no tensor {entry.tensor}, against the map", "QK-E105")
        # Without metadata, which would keep a mapping of each shard.
        shards.append(replace(shard, tensors=tensors, fields={}))
    return GGUFFile(shards, header_only=False)


def _metadata_shard(path: Path, entry: MapEntry) -> Shard:
    split = parse_split_path(entry.path)
    if split is None:
        raise FormatError(f"{path}: {entry.path.name} is not named like a shard, -00002-of-00003.gguf", "QK-E104")
    first = split_path(split[0], 0, split[2])
    if not first.exists():
        raise FormatError(
            f"{path}: {first.name}, which has the metadata, does not lie beside it: download it, or begin with another "
            "file",
            "QK-E104",
        )
    return replace(read_shard(first, 0, header_only=False), tensors=[])

"""The files that a stitched model takes tensors from: GGUF models, and maps of GGUF-Tool-Suite."""

from __future__ import annotations

from collections.abc import Collection, KeysView, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from quantkit.errors import FormatError
from quantkit.formats.gguf import GGUFFile, TensorInfo, open_model
from quantkit.formats.tensor_map import MapEntry, is_map, map_type, open_entries, read_map
from quantkit.hash import file_digests
from quantkit.types import TensorType


@dataclass(frozen=True, eq=False)
class Part:
    """A file with tensors: its path, and an open model, or the entries of a map, whose shards may be absent."""

    path: Path
    model: GGUFFile | None
    entries: Mapping[str, MapEntry]

    @property
    def names(self) -> KeysView[str]:
        """The names of the tensors, in order."""
        return self.entries.keys() if self.model is None else self.model.tensors.keys()

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Names, shapes and types. Raises FormatError for a map that does not state them."""
        if self.model is not None:
            return self.model.tensors
        return {name: entry.info(self.path) for name, entry in self.entries.items()}

    @cached_property
    def label(self) -> TensorType | None:
        """The type that all tensors of a map have by its name, where some have another one that fits their rows."""
        return map_type(self.path, self.entries.values()) if self.model is None else None

    def offers(self, name: str, t: TensorType) -> bool:
        """Return whether the file has a tensor in a type."""
        return name in self.names and self.tensors[name].type is t

    def open(self, names: Collection[str], stack: ExitStack, *, with_metadata: bool = False) -> GGUFFile:
        """Open the model, or those shards of the map that have the tensors, whose SHA-256 is checked."""
        if self.model is not None:
            return self.model
        entries = [entry for name, entry in self.entries.items() if name in names]
        _check_present(self.path, entries)
        _check_digests(self.path, entries)
        metadata_of = next(iter(self.entries.values())) if with_metadata else None
        return stack.enter_context(open_entries(self.path, entries, metadata_of))


def open_part(path: Path, stack: ExitStack) -> Part:
    """Return a file as a part; models are closed by ``stack``. Raises FormatError."""
    if is_map(path):
        return Part(path, None, read_map(path))
    return Part(path, stack.enter_context(open_model(path)), {})


def _check_present(path: Path, entries: Sequence[MapEntry]) -> None:
    missing = [entry.path.name for entry in entries if not entry.path.exists()]
    if missing:
        suffix = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FormatError(
            f"{path}: {len(missing)} of the {len(entries)} shards to take tensors from do not lie beside it: "
            f"{', '.join(missing[:3])}{suffix}: download them",
            "QK-E104",
        )


def _check_digests(path: Path, entries: Sequence[MapEntry]) -> None:
    for entry, digest in zip(entries, file_digests([entry.path for entry in entries]), strict=True):
        if digest != entry.sha256:
            raise FormatError(
                f"{entry.path}: its SHA-256 is not that of {path.name}: download the shard again", "QK-E100"
            )

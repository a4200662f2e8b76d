"""The source of the pipeline: a GGUF file, or a model opened as one.

``GGUFFile`` is a source, and so is a checkpoint (``quantkit.checkpoint``), whose tensors are converted while being
read. Plans, jobs and runs use only this protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quantkit.formats.gguf import Field, TensorInfo
from quantkit.formats.ranges import U8


class Source(Protocol):
    """Metadata, tensors by name in their order, and their bytes. All methods may be called from any thread."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The shards of a GGUF file; the directory of a checkpoint. For messages; outputs must not be written there."""

    @property
    def inputs(self) -> tuple[Path, ...]:
        """All files that determine the bytes of its tensors."""

    @property
    def fields(self) -> dict[str, Field]: ...

    @property
    def tensors(self) -> dict[str, TensorInfo]: ...

    def stored_tensor(self, tensor: TensorInfo) -> TensorInfo:
        """Return a tensor as stored, possibly with fewer bits than when read."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key, or ``default``."""

    def fingerprint(self) -> str:
        """Return a SHA-256 that identifies this source without reading all of it."""

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        """Fill ``out`` from byte ``offset`` of a tensor; the next ``readahead`` bytes will be read soon.

        Raises FormatError if they are not there, OSError if they cannot be read.
        """

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        """Return the file and offset of the tensor's bytes, or None if it is computed."""

    def where(self, tensor: TensorInfo) -> str:
        """Return the file of a tensor, for messages."""


@dataclass(frozen=True, eq=False)
class SourceView:
    """A source that changes some tensors of another while they are read; metadata and files are that one's.

    Subclasses define ``tensors``, ``fingerprint``, ``read`` and ``place``.
    """

    source: Source

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.source.paths

    @property
    def inputs(self) -> tuple[Path, ...]:
        return self.source.inputs

    @property
    def fields(self) -> dict[str, Field]:
        return self.source.fields

    def get(self, key: str, default: Any = None) -> Any:
        return self.source.get(key, default)

    def stored_tensor(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor as the source stores it."""
        return self.source.stored_tensor(self.source.tensors[tensor.name])

    def where(self, tensor: TensorInfo) -> str:
        return self.source.where(self.source.tensors[tensor.name])

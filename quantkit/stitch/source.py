"""The tensors of several files as one source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.formats.gguf import Field, GGUFFile, TensorInfo
from quantkit.formats.ranges import U8


@dataclass(frozen=True, eq=False)
class StitchedSource:
    """The source of a stitched model: ``base`` has the metadata, ``owners`` the file of each tensor, in order."""

    base: GGUFFile
    owners: Mapping[str, GGUFFile]

    @property
    def parts(self) -> tuple[GGUFFile, ...]:
        """The other files."""
        return tuple({id(owner): owner for owner in self.owners.values() if owner is not self.base}.values())

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.base.paths

    @property
    def inputs(self) -> tuple[Path, ...]:
        return (*self.base.inputs, *(path for part in self.parts for path in part.inputs))

    @property
    def fields(self) -> dict[str, Field]:
        return self.base.fields

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: owner.tensors[name] for name, owner in self.owners.items()}

    def stored_tensor(self, tensor: TensorInfo) -> TensorInfo:
        return tensor

    def get(self, key: str, default: Any = None) -> Any:
        return self.base.get(key, default)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.base.fingerprint().encode())
        for part in self.parts:
            names = [name for name, owner in self.owners.items() if owner is part]
            digest.update("\n".join((part.fingerprint(), *names)).encode())
        return digest.hexdigest()

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        self.owners[tensor.name].read(tensor, out, offset, readahead)

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        return self.owners[tensor.name].place(tensor)

    def where(self, tensor: TensorInfo) -> str:
        return self.owners[tensor.name].where(tensor)

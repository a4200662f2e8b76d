"""A source with some experts of each layer: tensors by expert have fewer, no byte of the others changes.

Experts are always the last dimension in ggml's order, of matrices, biases, scales and rows of the router, so the bytes
of an expert are one range of its tensor, whatever the type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit.formats.gguf import Field, TensorInfo
from quantkit.formats.ranges import U8
from quantkit.pipeline.source import SourceView


@dataclass(frozen=True, eq=False)
class PrunedSource(SourceView):
    """A source whose tensors ``experts`` names have only these experts, ascending.

    ``metadata``: its fields. ``drop``: tensors that it lacks.
    """

    experts: Mapping[str, tuple[int, ...]]
    metadata: dict[str, Field]
    drop: frozenset[str] = frozenset()

    @property
    def fields(self) -> dict[str, Field]:
        return self.metadata

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: self._prune(t) for name, t in self.source.tensors.items() if name not in self.drop}

    def stored_tensor(self, tensor: TensorInfo) -> TensorInfo:
        return self._prune(self.source.stored_tensor(self.source.tensors[tensor.name]))

    def get(self, key: str, default: Any = None) -> Any:
        field = self.metadata.get(key)
        return default if field is None else field.value

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.source.fingerprint().encode())
        digest.update(repr((sorted(self.experts.items()), sorted(self.drop))).encode())
        return digest.hexdigest()

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        stored = self.source.tensors[tensor.name]
        experts = self.experts.get(tensor.name)
        if experts is None:
            self.source.read(stored, out, offset, readahead)
            return
        size = stored.nbytes // stored.shape[-1]
        while out.size:
            i, skip = divmod(offset, size)
            end = i + 1
            while end < len(experts) and experts[end] == experts[end - 1] + 1:
                end += 1
            n = min(out.size, (end - i) * size - skip)
            self.source.read(stored, out[:n], experts[i] * size + skip, readahead if n == out.size else 0)
            out, offset = out[n:], offset + n

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        return None if tensor.name in self.experts else self.source.place(self.source.tensors[tensor.name])

    def _prune(self, tensor: TensorInfo) -> TensorInfo:
        experts = self.experts.get(tensor.name)
        if experts is None:
            return tensor
        nbytes = tensor.nbytes // tensor.shape[-1] * len(experts)
        return replace(tensor, shape=(*tensor.shape[:-1], len(experts)), nbytes=nbytes)

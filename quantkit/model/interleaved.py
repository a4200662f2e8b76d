"""Row-interleaved tensors (Q4_K_R4) in memory: taken apart when a model is loaded, so that every kernel of their base
type runs, on every device.

It costs the memory of these tensors, and time at every start; ``quantkit quantize --unrepack`` does it once, in the
file. What is computed is the same, bit for bit.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile, TensorInfo
from quantkit.kernels.formats import has_decoder
from quantkit.kernels.interleave import base_of, is_woven, weaves_together
from quantkit.units import format_size


class PlainSource:
    """A GGUFFile whose interleaved tensors appear as tensors of their base type."""

    def __init__(self, source: GGUFFile) -> None:
        self.source = source
        self.tensors: dict[str, TensorInfo] = {name: _plain(info) for name, info in source.tensors.items()}
        self._made: dict[str, npt.NDArray[np.uint8]] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def data(self, tensor: TensorInfo | str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes; those of interleaved ones are made at the first call and stay in memory."""
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        woven = self.source.tensors[info.name]
        if woven.type is info.type:
            return self.source.data(woven)
        with self._lock:
            if info.name not in self._made:
                self._made[info.name] = self._apart(woven, info)
            return self._made[info.name]

    def _apart(self, woven: TensorInfo, info: TensorInfo) -> npt.NDArray[np.uint8]:
        from quantkit.kernels.cpu.interleave import deinterleave_rows

        n = info.shape[0]
        out = np.empty(info.nbytes, np.uint8)
        rows = self.source.data(woven).reshape(-1, woven.type.row_bytes(n))
        deinterleave_rows(woven.type, rows, out.reshape(-1, info.type.row_bytes(n)))
        self.source.forget(woven)
        return out

    def forget(self, tensor: TensorInfo | str) -> None:
        """Let go of a tensor's memory; views stay valid, and ``data`` makes it again."""
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        if self._made.pop(info.name, None) is None and self.source.tensors[info.name].type is info.type:
            self.source.forget(info)

    @property
    def notes(self) -> list[str]:
        """What a user should know."""
        apart = [t for name, t in self.source.tensors.items() if t.type is not self.tensors[name].type]
        if not apart:
            return []
        types = ", ".join(sorted({t.type.name for t in apart}))
        return [
            f"{len(apart)} tensors are row-interleaved ({types}): taken apart in memory, they take "
            f"{format_size(sum(self.tensors[t.name].nbytes for t in apart))} that cannot be mapped from the file; "
            "`quantkit quantize --unrepack` does that once"
        ]


def plain_source(source: GGUFFile) -> GGUFFile:
    """Return a file without interleaved tensors: itself, or one that takes them apart."""
    if not any(is_woven(t.type) for t in source.tensors.values()):
        return source
    return PlainSource(source)  # type: ignore[return-value]


def _plain(info: TensorInfo) -> TensorInfo:
    if not is_woven(info.type) or not has_decoder(info.type) or not weaves_together(info.type, *info.shape):
        return info
    base = base_of(info.type)
    return replace(info, type=base, nbytes=base.tensor_bytes(info.shape), offset=-1)

"""Views of a GGUF file that change how the engine gets its weights; each has the interface of GGUFFile.

    PlainSource    row-interleaved tensors (Q4_K_R4) as tensors of their base type, so that the kernels of that type run
                   on every device; the results are the same, bit for bit. ``quantkit quantize --unrepack`` does this in
                   the file
    CopiedSource   weights copied to memory instead of mapped (``--no-mmap``). Tokens generated one by one read weights
                   as fast as memory delivers them: pages of a mapped file are small and scattered over the page cache,
                   numpy's large arrays use huge pages where the system has them
    MergedSource   up and gate experts merged into one tensor, as ik_llama.cpp's ``-muge``. ``quantkit merge-up-gate``
                   does this in the file

All of them need memory for the tensors they change, and time at every start.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.experts import GATE, MERGED, UP, find_layers, merge_obstacle
from quantkit.formats.gguf import GGUFFile, TensorInfo
from quantkit.kernels.formats import has_decoder
from quantkit.kernels.interleave import base_of, can_interleave, is_interleaved
from quantkit.units import format_size

Bytes = npt.NDArray[np.uint8]

# ---------------------------------------------------------------- interleaved rows


class PlainSource:
    """A GGUFFile whose interleaved tensors appear as tensors of their base type."""

    def __init__(self, source: GGUFFile) -> None:
        self.source = source
        self.tensors: dict[str, TensorInfo] = {name: _plain(info) for name, info in source.tensors.items()}
        self._plain_data: dict[str, Bytes] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def data(self, tensor: TensorInfo | str) -> Bytes:
        """Return a tensor's bytes; interleaved ones are deinterleaved at the first call and stay in memory."""
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        interleaved = self.source.tensors[info.name]
        if interleaved.type is info.type:
            return self.source.data(interleaved)
        with self._lock:
            if info.name not in self._plain_data:
                self._plain_data[info.name] = self._deinterleave(interleaved, info)
            return self._plain_data[info.name]

    def _deinterleave(self, interleaved: TensorInfo, info: TensorInfo) -> Bytes:
        from quantkit.kernels.cpu.interleave import deinterleave_rows

        n = info.shape[0]
        out = np.empty(info.nbytes, np.uint8)
        rows = self.source.data(interleaved).reshape(-1, interleaved.type.row_bytes(n))
        deinterleave_rows(interleaved.type, rows, out.reshape(-1, info.type.row_bytes(n)))
        self.source.forget(interleaved)
        return out

    def forget(self, tensor: TensorInfo | str) -> None:
        """Free a tensor's memory; views stay valid, and ``data`` computes it again."""
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        if self._plain_data.pop(info.name, None) is None and self.source.tensors[info.name].type is info.type:
            self.source.forget(info)

    @property
    def notes(self) -> list[str]:
        """Notes for the user."""
        interleaved = [t for name, t in self.source.tensors.items() if t.type is not self.tensors[name].type]
        if not interleaved:
            return []
        types = ", ".join(sorted({t.type.name for t in interleaved}))
        size = format_size(sum(self.tensors[t.name].nbytes for t in interleaved))
        return [
            f"{len(interleaved)} tensors are row-interleaved ({types}) and are deinterleaved in memory, which needs "
            f"{size}; to do this once, use `quantkit quantize --unrepack`"
        ]


def plain_source(source: GGUFFile) -> GGUFFile:
    """Return the file itself, or a PlainSource if it has interleaved tensors."""
    if not any(is_interleaved(t.type) for t in source.tensors.values()):
        return source
    return PlainSource(source)  # type: ignore[return-value]


def _plain(info: TensorInfo) -> TensorInfo:
    if not is_interleaved(info.type) or not has_decoder(info.type) or not can_interleave(info.type, *info.shape):
        return info
    base = base_of(info.type)
    return replace(info, type=base, nbytes=base.tensor_bytes(info.shape), offset=-1)


# ---------------------------------------------------------------- copies


class CopiedSource:
    """A GGUFFile whose tensors are read into memory at their first use."""

    def __init__(self, source: GGUFFile) -> None:
        self.source = source
        self._copies: dict[str, Bytes] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def data(self, tensor: TensorInfo | str) -> Bytes:
        """Return a tensor's bytes, uint8 [nbytes]. Raises FormatError if the file has shrunk, OSError."""
        info = self.source.tensors[tensor] if isinstance(tensor, str) else tensor
        with self._lock:
            if info.name not in self._copies:
                self._copies[info.name] = _read(self.source, info)
            return self._copies[info.name]

    def forget(self, tensor: TensorInfo | str) -> None:
        """Free a tensor's copy; views stay valid, and ``data`` reads it again."""
        self._copies.pop(tensor if isinstance(tensor, str) else tensor.name, None)

    def close(self) -> None:
        """Close the file; copies stay valid where they are in use."""
        self._copies.clear()
        self.source.close()


def _read(source: GGUFFile, info: TensorInfo) -> Bytes:
    copy = np.empty(info.nbytes, np.uint8)
    source.read(info, copy, 0)
    copy.flags.writeable = False
    return copy


# ---------------------------------------------------------------- merged experts


class MergedSource:
    """A GGUFFile whose ``ffn_gate_exps`` and ``ffn_up_exps`` of equal type and shape appear as ``ffn_gate_up_exps``.

    refused: layers that are not merged, with the reason.
    """

    def __init__(self, source: GGUFFile) -> None:
        self.source = source
        self.tensors: dict[str, TensorInfo] = {}
        self.refused: dict[str, str] = {}
        self._halves: dict[str, tuple[TensorInfo, TensorInfo]] = {}
        self._merged_data: dict[str, Bytes] = {}
        halves = self._plan()
        for name, info in source.tensors.items():
            if name not in halves:
                self.tensors[name] = info
            elif GATE in name:
                merged = name.replace(GATE, MERGED)
                self.tensors[merged] = self._info(merged)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def _plan(self) -> set[str]:
        halves: set[str] = set()
        for prefix, has in find_layers(self.source.tensors).items():
            if f"{GATE}.weight" not in has:
                continue
            reason = merge_obstacle(has)
            if reason:
                self.refused[f"{prefix}{GATE}"] = reason
                continue
            for suffix in ("weight", "bias"):
                if f"{GATE}.{suffix}" in has:
                    pair = has[f"{GATE}.{suffix}"], has[f"{UP}.{suffix}"]
                    self._halves[f"{prefix}{MERGED}.{suffix}"] = pair
                    halves |= {half.name for half in pair}
        return halves

    def _info(self, merged: str) -> TensorInfo:
        gate, up = self._halves[merged]
        axis = 1 if merged.endswith(".weight") else 0
        shape = tuple(n * 2 if i == axis else n for i, n in enumerate(gate.shape))
        return replace(gate, name=merged, shape=shape, nbytes=gate.nbytes + up.nbytes, offset=-1)

    def data(self, tensor: TensorInfo | str) -> Bytes:
        """Return a tensor's bytes; merged ones are computed at the first call and stay in memory."""
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        if info.name not in self._halves:
            return self.source.data(info)
        if info.name not in self._merged_data:
            gate, up = (self.source.data(half).reshape(half.shape[-1], -1) for half in self._halves[info.name])
            self._merged_data[info.name] = np.concatenate([gate, up], axis=1).reshape(-1)
        return self._merged_data[info.name]

    def forget(self, tensor: TensorInfo | str) -> None:
        """Drop a tensor's pages; merged ones are not backed by a file and stay."""
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        if info.name not in self._halves:
            self.source.forget(info)

"""Merge up and gate experts in memory when a model is loaded, as ik_llama.cpp's ``-muge`` does.

It costs the memory of these tensors, and time at every start; ``quantkit merge-up-gate`` does it once, in the file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.experts import GATE, MERGED, UP, find_layers, why_not_merged
from quantkit.formats.gguf import GGUFFile, TensorInfo


class MergedSource:
    """A GGUFFile whose ``ffn_gate_exps`` and ``ffn_up_exps`` of equal type and shape appear as ``ffn_gate_up_exps``.

    refused: layers that stay as they are, with the reason.
    """

    def __init__(self, source: GGUFFile) -> None:
        self.source = source
        self.tensors: dict[str, TensorInfo] = {}
        self.refused: dict[str, str] = {}
        self._halves: dict[str, tuple[TensorInfo, TensorInfo]] = {}
        self._made: dict[str, npt.NDArray[np.uint8]] = {}
        gone = self._plan()
        for name, info in source.tensors.items():
            if name not in gone:
                self.tensors[name] = info
            elif GATE in name:
                merged = name.replace(GATE, MERGED)
                self.tensors[merged] = self._info(merged)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def _plan(self) -> set[str]:
        gone: set[str] = set()
        for prefix, has in find_layers(self.source.tensors).items():
            if f"{GATE}.weight" not in has:
                continue
            reason = why_not_merged(has)
            if reason:
                self.refused[f"{prefix}{GATE}"] = reason
                continue
            for suffix in ("weight", "bias"):
                if f"{GATE}.{suffix}" in has:
                    pair = has[f"{GATE}.{suffix}"], has[f"{UP}.{suffix}"]
                    self._halves[f"{prefix}{MERGED}.{suffix}"] = pair
                    gone |= {half.name for half in pair}
        return gone

    def _info(self, merged: str) -> TensorInfo:
        gate, up = self._halves[merged]
        at = 1 if merged.endswith(".weight") else 0
        shape = tuple(n * 2 if i == at else n for i, n in enumerate(gate.shape))
        return replace(gate, name=merged, shape=shape, nbytes=gate.nbytes + up.nbytes, offset=-1)

    def data(self, tensor: TensorInfo | str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes; merged ones are made at the first call and stay in memory."""
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        if info.name not in self._halves:
            return self.source.data(info)
        if info.name not in self._made:
            gate, up = (self.source.data(half).reshape(half.shape[-1], -1) for half in self._halves[info.name])
            self._made[info.name] = np.concatenate([gate, up], axis=1).reshape(-1)
        return self._made[info.name]

    def forget(self, tensor: TensorInfo | str) -> None:
        """Let go of a tensor's pages; merged ones have no file behind them and stay."""
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        if info.name not in self._halves:
            self.source.forget(info)

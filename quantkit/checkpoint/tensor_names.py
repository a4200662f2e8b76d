"""Names of tensors: in a GGUF file of each architecture, and in checkpoints.

Facts of llama.cpp b11434 (tensor_mapping of gguf-py), for its text models. A kind of tensor is named as in the file;
``*`` is the layer, in a kind ``blk.LAYER.``; a suffix after a colon distinguishes kinds with the same name in files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from quantkit.errors import TypeNotSupported

_DATA = Path(__file__).parent
#: Architecture -> the kinds of its tensors; kind -> its names in checkpoints, without .weight and .bias. If two kinds
#: of an architecture share a name, the later one applies. scripts/make_tensor_names.py generates both tables.
KINDS: dict[str, str] = json.loads((_DATA / "tensor_kinds.json").read_bytes())
PATTERNS: dict[str, str] = json.loads((_DATA / "tensor_names.json").read_bytes())

_LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)|^(\d+)(?=\.)")


class TensorNames:
    """The names of one architecture's tensors."""

    def __init__(self, arch: str, layers: int) -> None:
        """Raise TypeNotSupported for an architecture whose tensors are not known."""
        if arch not in KINDS:
            raise TypeNotSupported(
                f"unsupported architecture {arch}: its tensors are missing from tensor_kinds.json",
                "QK-E304",
            )
        self.arch, self.kinds = arch, KINDS[arch].split()
        self.layers = layers
        self._kind_of: dict[str, str] = {}
        for kind in [k for k in PATTERNS if "*" not in k] + [k for k in PATTERNS if "*" in k]:
            if kind in self.kinds:
                self._kind_of |= dict.fromkeys(
                    [kind.partition(":")[0].replace("*", "blk.*."), *PATTERNS[kind].split()], kind
                )

    def find(self, name: str) -> str | None:
        """Return the name in a file of the tensor ``name`` of a checkpoint, None if unknown."""
        for suffix in ("", ".weight", ".bias"):
            if name.endswith(suffix) and (kind := self._find(name.removesuffix(suffix))) is not None:
                return kind + suffix
        return None

    def _find(self, stem: str) -> str | None:
        if stem in self._kind_of and "*" not in stem:
            return self._kind_of[stem]
        for match in _LAYER.finditer(stem + "."):
            layer = match[0]
            kind = self._kind_of.get(f"{stem[: match.start()]}*{stem[match.end() :]}")
            if kind is not None and int(layer) < self.layers and str(int(layer)) == layer:
                return file_name(kind, int(layer))
        return None

    def is_kind(self, name: str, kind: str, layer: int | None, suffix: str = ".weight") -> bool:
        """Return whether the file's tensor ``name`` is of a kind that the architecture has, in this layer (or none)."""
        if kind not in self.kinds or ("*" in kind) != (layer is not None):
            return False
        return name == file_name(kind, layer) + suffix


def file_name(kind: str, layer: int | None = None) -> str:
    """Return the name of a kind of tensor in a file, without suffix."""
    return kind.partition(":")[0].replace("*", f"blk.{layer}.")

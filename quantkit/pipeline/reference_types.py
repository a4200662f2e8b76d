"""``--like FILE``: every tensor gets its type from that file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from quantkit.errors import FormatError, RecipeError, TypeNotSupported
from quantkit.formats.experts import GATE, MERGED, UP
from quantkit.formats.gguf import TensorInfo, open_model
from quantkit.formats.gguf.rules import n_dims
from quantkit.pipeline.facts import TensorLike, half_names, iteration_order
from quantkit.pipeline.presets import FTYPE_UNKNOWN, Preset, preset_by_name
from quantkit.types import TensorType
from quantkit.units import format_shape

#: TYPE if --like replaces it.
LIKE = "LIKE"
_HALF = re.compile(rf"(?:{GATE}|{UP})(?=\.)")


@dataclass(frozen=True, eq=False)
class ReferenceTypes:
    """The types of a file; ``path``: as given. ``names``: names in the file by names of the output."""

    path: Path
    architecture: str
    file_type: int | None
    tensors: Mapping[str, TensorInfo]
    names: Mapping[str, str]

    @cached_property
    def preset(self) -> Preset:
        """The preset of the file's general.file_type, with that number; without a number, the type of most tensors.

        It does not choose types, but the rules for the order of tensors and keys.
        """
        types = Counter(self.tensors[name].type.name for name in iteration_order(self.tensors))
        commonest = max(types, key=lambda name: types[name], default="F32")
        ftype = self.file_type
        try:
            preset = preset_by_name(commonest if ftype is None or ftype & FTYPE_UNKNOWN else str(ftype))
        except TypeNotSupported:
            preset = preset_by_name(commonest)
        if any(t.type.trees == "ik" for t in self.tensors.values()):
            preset = replace(preset, trees="ik")
        return replace(preset, ftype=preset.ftype | FTYPE_UNKNOWN if ftype is None else ftype)

    def check(self, architecture: str) -> None:
        """Raise FormatError if the file is of another architecture."""
        if self.architecture != architecture:
            raise FormatError(
                f"--like {self.path}: has architecture {self.architecture or 'none'}, but the model has {architecture}",
                "QK-E207",
            )

    def prune(self, renamed: Mapping[str, str]) -> ReferenceTypes:
        """Return the pattern for an output of fewer layers; ``renamed``: names of the source and of the output.

        The file may have all layers, or as many as the output.
        """
        renumbered = [old for old, new in renamed.items() if old != new]
        has_all_layers = all(
            old in self.tensors or any(h in self.tensors for h in half_names(old) or ()) for old in renumbered
        )
        return replace(self, names={new: old for old, new in renamed.items()} if renumbered and has_all_layers else {})

    def find(self, t: TensorLike) -> tuple[TensorType, str] | None:
        """Return the type of a tensor and the reason; None if the file has no similar tensor.

        Experts that are merged in one file and separate in the other have the same type. Raises FormatError if the
        shapes differ, RecipeError if halves do.
        """
        name = self.names.get(t.name, t.name)
        if (match := self.tensors.get(name)) is not None:
            if match.shape[: n_dims(match.shape)] != t.shape[: n_dims(t.shape)]:
                raise FormatError(
                    f"--like {self.path}: {t.name} is {_size(match)} in this file, but {_size(t)} in the model",
                    "QK-E207",
                )
            return match.type, f"--like {self.path.name}"
        halves = half_names(name)
        related = halves or ([_HALF.sub(MERGED, name)] if _HALF.search(name) else [])
        matches = [self.tensors[related_name] for related_name in related if related_name in self.tensors]
        if not matches or len(matches) < len(related):
            return None
        if misfits := [half for half in matches if half.shape[::2] != t.shape[::2]]:
            raise FormatError(
                f"--like {self.path}: {misfits[0].name} is {_size(misfits[0])} in this file, but {t.name} is "
                f"{_size(t)} in the model",
                "QK-E207",
            )
        types = dict.fromkeys(half.type for half in matches)
        if len(types) > 1:
            raise RecipeError(
                f"--like {self.path}: {' and '.join(f'{t.name} is {t.type}' for t in matches)}, but merged tensors "
                f"have one type: add a rule for {MERGED}, or omit --merge-up-gate",
                "QK-E211",
            )
        return matches[0].type, f"--like {self.path.name}, as {' and '.join(related)}"

    def notes(self, outputs: Sequence[str]) -> list[str]:
        """Return a note about tensors of the file that ``outputs`` lack, merged and split experts aside."""
        used = {self.names.get(name, name) for name in outputs}
        for name in list(used):
            used |= {*(half_names(name) or ()), _HALF.sub(MERGED, name)}
        unused = [name for name in self.tensors if name not in used]
        if not unused:
            return []
        suffix = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        return [f"--like: {self.path} also has {unused[0]}{suffix}, which this model does not have"]


def read_reference_types(path: Path) -> ReferenceTypes:
    """Read the types of a file, or of any shard of a model. Raises FormatError if it is not a model."""
    with open_model(path) as file:
        tensors, ftype = dict(file.tensors), file.get("general.file_type")
        architecture = file.get("general.architecture")
    if not isinstance(architecture, str) or not tensors:
        raise FormatError(f"--like {path}: not a model", "QK-E101")
    return ReferenceTypes(path, architecture, ftype if type(ftype) is int else None, tensors, {})


def _size(t: TensorLike) -> str:
    return format_shape(t.shape)

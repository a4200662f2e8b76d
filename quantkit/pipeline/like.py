"""An existing file as the pattern of another: ``--like FILE`` gives every tensor the type that it has there."""

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
from quantkit.pipeline.facts import TensorLike, half_names, iteration_order, n_dims
from quantkit.pipeline.presets import FTYPE_UNKNOWN, Preset, preset_by_name
from quantkit.types import TensorType

#: TYPE where --like takes its place.
LIKE = "LIKE"
_HALF = re.compile(rf"(?:{GATE}|{UP})(?=\.)")


@dataclass(frozen=True, eq=False)
class Like:
    """The types of a file; ``path`` is as it was given. ``names``: what a tensor of the output is called there."""

    path: Path
    architecture: str
    file_type: int | None
    tensors: Mapping[str, TensorInfo]
    names: Mapping[str, str]

    @cached_property
    def preset(self) -> Preset:
        """The preset that the file's type stands for, with that number; a mixture of no number has most tensors' type.

        It chooses no type: whose rules apply, for the order of tensors and keys, follows from it.
        """
        types = Counter(self.tensors[name].type.name for name in iteration_order(self.tensors))
        most = max(types, key=lambda name: types[name], default="F32")
        ftype = self.file_type
        try:
            found = preset_by_name(most if ftype is None or ftype & FTYPE_UNKNOWN else str(ftype))
        except TypeNotSupported:
            found = preset_by_name(most)
        if any(t.type.trees == "ik" for t in self.tensors.values()):
            found = replace(found, trees="ik")
        return replace(found, ftype=found.ftype | FTYPE_UNKNOWN if ftype is None else ftype)

    def check(self, architecture: str) -> None:
        """Raise FormatError if the file is of another architecture."""
        if self.architecture != architecture:
            raise FormatError(
                f"--like {self.path}: it is of architecture {self.architecture or 'none'}, the model of {architecture}"
            )

    def pruned(self, renamed: Mapping[str, str]) -> Like:
        """Return the pattern for an output of fewer layers; ``renamed``: names of the source and of the output.

        The file may have all layers, or as many as the output.
        """
        moved = [old for old, new in renamed.items() if old != new]
        there = all(old in self.tensors or any(h in self.tensors for h in half_names(old) or ()) for old in moved)
        return replace(self, names={new: old for old, new in renamed.items()} if moved and there else {})

    def find(self, t: TensorLike) -> tuple[TensorType, str] | None:
        """Return the type of a tensor and why; None if the file has nothing like it.

        Experts that are merged here and apart there, or the other way round, have the same type. Raises FormatError if
        the shapes differ, RecipeError if halves do.
        """
        name = self.names.get(t.name, t.name)
        if (found := self.tensors.get(name)) is not None:
            if found.shape[: n_dims(found.shape)] != t.shape[: n_dims(t.shape)]:
                raise FormatError(f"--like {self.path}: {t.name} is {_size(found)} there and {_size(t)} here")
            return found.type, f"--like {self.path.name}"
        halves = half_names(name)
        related = halves or ([_HALF.sub(MERGED, name)] if _HALF.search(name) else [])
        there = [self.tensors[each] for each in related if each in self.tensors]
        if not there or len(there) < len(related):
            return None
        if odd := [other for other in there if other.shape[::2] != t.shape[::2]]:
            raise FormatError(f"--like {self.path}: {odd[0].name} is {_size(odd[0])} there, {t.name} {_size(t)} here")
        types = dict.fromkeys(other.type for other in there)
        if len(types) > 1:
            raise RecipeError(
                f"--like {self.path}: {' and '.join(f'{o.name} is {o.type}' for o in there)}, but merged they can have "
                f"only one type: give a rule for {MERGED}, or omit --merge-up-gate"
            )
        return there[0].type, f"--like {self.path.name}, as {' and '.join(related)}"

    def notes(self, made: Sequence[str]) -> list[str]:
        """Return what the file has and an output of tensors ``made`` has not, merged and split experts aside."""
        used = {self.names.get(name, name) for name in made}
        for name in list(used):
            used |= {*(half_names(name) or ()), _HALF.sub(MERGED, name)}
        left = [name for name in self.tensors if name not in used]
        if not left:
            return []
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        return [f"--like: {self.path} also has {left[0]}{more}, which this model has not"]


def read_like(path: Path) -> Like:
    """Read the pattern in a file, or in any shard of one. Raises FormatError if that is no model."""
    with open_model(path) as file:
        tensors, ftype = dict(file.tensors), file.get("general.file_type")
        architecture = file.get("general.architecture")
    if not isinstance(architecture, str) or not tensors:
        raise FormatError(f"--like {path}: this is no model")
    return Like(path, architecture, ftype if type(ftype) is int else None, tensors, {})


def _size(t: TensorLike) -> str:
    return " x ".join(map(str, t.shape))

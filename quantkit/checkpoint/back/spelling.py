"""How a class of transformers spells what a file of its architecture says: a row of ``classes`` or ``named``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from quantkit.checkpoint.back.derived import Derive
from quantkit.checkpoint.back.said import Said
from quantkit.checkpoint.config import Config
from quantkit.checkpoint.tensors import Tensor

Json = dict[str, Any]


def _unchanged(config: Config, name: str) -> str:
    return name


def _none(said: Said) -> Iterable[Tensor]:
    return ()


def _always(said: Said) -> bool:
    return True


@dataclass(frozen=True)
class Spelling:
    """A class: its model_type, and what is particular about it."""

    model_type: str
    #: Names of tensors, where the usual ones are not this class's.
    names: str = ""
    #: The same of kinds that the name map cannot tell.
    kinds: dict[str, str] = field(default_factory=dict)
    #: Values of config.json where a file says nothing.
    otherwise: Json = field(default_factory=dict)
    #: Key -> its name in config.json, where it is none of the usual ones.
    keys: dict[str, str] = field(default_factory=dict)
    #: Keys of config.json that the class does not take as null.
    not_null: tuple[str, ...] = ()
    #: What config.json says beyond copies of keys.
    derived: tuple[Derive, ...] = ()
    #: Flags of config.json that say whether there are biases.
    biases: tuple[str, ...] = ()
    #: Experts, or projections, are one tensor where others have several.
    fused: bool = False
    #: Changes to names at the very end: regular expression, replacement.
    renamed: tuple[tuple[str, str], ...] = ()
    #: The same to names that depend on more: of a layer, say.
    last: Callable[[Config, str], str] = _unchanged
    #: Tensors of the checkpoint that are metadata in files.
    tensors: Callable[[Said], Iterable[Tensor]] = _none
    #: What is worth saying whenever a file is written as this class.
    note: str = ""
    #: The part of config.json that the text model is described in, and what is beside it.
    inside: str = ""
    beside: Json = field(default_factory=dict)
    #: Tells whether a file of the architecture is one of this class, if there are several; the first is taken.
    when: Callable[[Said], bool] = _always
    #: Architectures that files of this class have beside that of its row.
    archs: tuple[str, ...] = ()


def spelled(prefix: str, names: str) -> str:
    """Return names with what comes before them."""
    return " ".join(f"{prefix}{name}" for name in names.split())


def has(key: str) -> Callable[[Said], bool]:
    """Tell files that say something of a key."""
    return lambda said: bool(said.get(f".{key}"))

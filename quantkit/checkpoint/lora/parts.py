"""The two parts of a model with encoders, which are converted to files of their own, and an adapter's tensors in each.

An adapter names modules of transformers, not tensors of files. The names of the text model follow from the rules of its
row; those of encoders differ by a leading ``model.``, which some classes have in memory alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.encoders import Encoders, open_encoders
from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.registry import has_encoders
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensors import Context, text_tensors


class Part(Protocol):
    """A part of a model."""

    @property
    def config(self) -> Config:
        """The configuration of the model."""

    def tensors(self, name: str, x: Expression) -> list[tuple[str, Expression]]:
        """Return the tensors of this part that a tensor of an adapter changes, by their names in the part."""

    def leaves(self, name: str) -> bool:
        """Return whether a tensor of an adapter belongs to the other part."""


@dataclass(frozen=True)
class TextPart:
    """The text model."""

    row: Architecture
    context: Context

    @property
    def config(self) -> Config:
        return self.context.config

    def tensors(self, name: str, x: Expression) -> list[tuple[str, Expression]]:
        return list(text_tensors(self.row.stored, name, x, self.context))

    def leaves(self, name: str) -> bool:
        return self._encoders is not None and bool(_names_in(self._encoders, name))

    @cached_property
    def _encoders(self) -> Encoders | None:
        return open_encoders(self.config.path.parent, self.config.is_native) if has_encoders(self.config) else None


@dataclass(frozen=True)
class EncoderPart:
    """The encoders; ``names``: their tensors."""

    encoders: Encoders
    names: Collection[str]

    @property
    def config(self) -> Config:
        return self.encoders.config

    def tensors(self, name: str, x: Expression) -> list[tuple[str, Expression]]:
        variants = [list(self.encoders.tensors(variant, x)) for variant in _variants(name)]
        stored = [items for items in variants if items and all(text in self.names for text, _ in items)]
        return next(iter(stored or [items for items in variants if items]), [])

    def leaves(self, name: str) -> bool:
        return not _names_in(self.encoders, name)


def _variants(name: str) -> tuple[str, ...]:
    """Return the names that a module may have in files."""
    plain = name.removeprefix("model.")
    return tuple(dict.fromkeys((name, plain, f"model.{name}", f"model.{plain}")))


class _Nothing:
    """An expression without values, for its name alone."""

    shape: tuple[int, ...] = (0, 0)


def _names_in(encoders: Encoders, name: str) -> list[str]:
    """Return the names of a tensor in the encoders."""
    nothing: Expression = _Nothing()  # type: ignore[assignment]
    return [text for variant in _variants(name) for text, _ in encoders.tensors(variant, nothing)]


def base_of(part: Part) -> Path:
    """Return the directory of the checkpoint."""
    return part.config.path.parent

"""What a row of the table of architectures says (architectures.py): how checkpoints of a class become a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys, set_base_keys
from quantkit.checkpoint.quantized.found import Decoded
from quantkit.checkpoint.tensors import Rule, Tensor
from quantkit.errors import FormatError

#: Sets keys of one architecture.
SetKeys = Callable[[Keys, Config], None]


@dataclass(frozen=True)
class Copied:
    """A key that is a value of config.json: of the first of ``names`` that is there and not null.

    ``kind`` is the method of ``Keys`` that writes it. ``needed``: an error without it; ``unless_zero``: only if it is
    something else.
    """

    key: str
    names: str
    kind: str = "u32"
    needed: bool = False
    unless_zero: bool = False

    def __call__(self, keys: Keys, config: Config) -> None:
        value: Any = config.find(*self.names.split())
        if value is None and self.needed:
            raise FormatError(f"{config.path}: it has no {self.names.replace(' ', ' or ')}")
        if value is not None and (value or not self.unless_zero):
            getattr(keys, self.kind)(self.key, value)


@dataclass(frozen=True)
class Always:
    """A key that has the same value in all files. ``kind`` is the method of ``Keys`` that writes it."""

    key: str
    value: Any
    kind: str = "u32"

    def __call__(self, keys: Keys, config: Config) -> None:
        getattr(keys, self.kind)(self.key, self.value)


@dataclass(frozen=True)
class Architecture:
    """How checkpoints of some classes become a GGUF file."""

    arch: str
    #: Applied to names of stored tensors when files are indexed: they may only rename and drop.
    stored: tuple[Rule, ...] = ()
    #: Applied to tensors, in order.
    rules: tuple[Rule, ...] = ()
    #: The keys that most have, and those that follow them; ``base`` is the whole order of those that differ.
    base: Callable[[Keys, Config, int, int], None] = set_base_keys
    keys: tuple[SetKeys, ...] = ()
    #: A row of ``vocab.WRITERS``.
    vocab: str = "bpe"
    #: The number of layers in the file.
    layers: Callable[[Config], int] = field(default=lambda config: config.layers)
    #: Changes to the configuration before anything else.
    prepare: Callable[[Config], None] = field(default=lambda config: None)
    #: The same by the names of the stored tensors: what config.json does not say.
    look: Callable[[Config, Collection[str]], None] = field(default=lambda config, names: None)
    #: Another row for some configurations of the class.
    instead: Callable[[Config], Architecture | None] = field(default=lambda config: None)
    #: Tensors that are not stored; they come first.
    extra: Callable[[Config], Iterable[Tensor]] = field(default=lambda config: ())
    #: Puts tensors in another order before the rules.
    arrange: Callable[[Decoded, Config], Decoded] = field(default=lambda meant, config: meant)
    #: It may have layers that predict more tokens behind the others, which --no-nextn and --mtp are about (nextn.py).
    nextn: bool = False
    #: Keys that are set before general.type.
    early: tuple[SetKeys, ...] = ()

"""Type rules of llama.cpp and ik_llama.cpp: the form of their tables, and the lookup.

*Type rules* give more bits to the most sensitive tensors (``attn_v``, ``ffn_down`` of some layers, ``output``) and
sometimes fewer to others. Q4_K_M is "Q4_K, but Q6_K for half of attn_v and ffn_down". They are a set of tables, one per
category of tensor::

    table[preset] = ((condition, type), ...)        the first condition that holds; else the base type

A condition is one or more names in CONDITIONS, joined by commas, all of which must hold: questions about a ``Place``
(layer i of n, facts of the model, imatrix or not). Its text is also the reason shown to the user.

The tables are in type_rules_llama.py and type_rules_ik.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from quantkit.pipeline.facts import ModelFacts, TensorLike, layer_of
from quantkit.pipeline.presets import Preset
from quantkit.types import BY_NAME, TensorType

#: The step that decided: see ``choose``. "missing": the file of --like lacks the tensor.
Kind = Literal["kept", "option", "rule", "class", "COPY", "repack", "like", "missing", "preset"]
#: Cases reported to the user: class options that conflict on merged experts, one that applies to both halves of them,
#: and F16 that interleaving would round.
Case = Literal["", "conflict", "both halves", "lossy"]


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason for a tensor's type; ``str`` gives the words of a dry run.

    Attributes:
        kind: which step decided.
        text: why, in words.
        options: options of the command line, such as "--attn-v-type", that decided or contradict each other.
        case: what else is to be known.
        adjustments: what happened to the type afterwards, in words: a fallback, embeddings that stay plain.
    """

    kind: Kind
    text: str
    options: tuple[str, ...] = ()
    case: Case = ""
    adjustments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join((self.text, *self.adjustments))

    def adjust(self, text: str) -> Reason:
        """Return the reason with one more adjustment."""
        return replace(self, adjustments=(*self.adjustments, text))


#: The reason why embeddings that are also the output get the type of --output-tensor-type.
TIED_OUTPUT = Reason("preset", "--output-tensor-type, for the tied embeddings", ("--output-tensor-type",))


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor in the model, on which conditions depend.

    ``i`` of ``n`` is the layer: a running count of tensors of the category, or the number in the name.
    """

    i: int
    n: int
    facts: ModelFacts
    has_imatrix: bool


def use_more_bits(i: int, n: int) -> bool:
    """True for ggml's use_more_bits layers: the first and last eighth, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


#: Conditions of the tables. A name is also the reason shown to users.
CONDITIONS: Mapping[str, Callable[[Place], bool]] = {
    "always": lambda p: True,
    "tied": lambda p: not p.facts.has_output,
    "2+ heads per KV head": lambda p: p.facts.n_gqa >= 2,
    "4+ heads per KV head": lambda p: p.facts.n_gqa >= 4,
    "2+ heads per KV head or 2+ experts": lambda p: p.facts.n_gqa >= 2 or p.facts.n_expert >= 2,
    "4+ heads per KV head or 4+ experts": lambda p: p.facts.n_gqa >= 4 or p.facts.n_expert >= 4,
    "4+ experts": lambda p: p.facts.n_expert >= 4,
    "under 4 experts": lambda p: p.facts.n_expert < 4,
    "8+ experts": lambda p: p.facts.n_expert >= 8,
    "8 experts": lambda p: p.facts.n_expert == 8,
    "not 8 experts": lambda p: p.facts.n_expert != 8,
    "8B or 70B and 128k tokens": lambda p: p.facts.is_8b_or_70b and p.facts.n_vocab >= 127999,
    "imatrix": lambda p: p.has_imatrix,
    "no imatrix": lambda p: not p.has_imatrix,
    "first 2": lambda p: p.i < 2,
    "first 4": lambda p: p.i < 4,
    "first 16th": lambda p: p.i < p.n // 16,
    "first 8th": lambda p: p.i < p.n // 8,
    "favoured layer": lambda p: use_more_bits(p.i, p.n),
    "middle 6 8ths": lambda p: p.n // 8 <= p.i < 7 * p.n // 8,
}

Row = tuple[str, str]
Rows = tuple[Row, ...]
Table = Mapping[str, Rows]

#: Conditions of many rows.
GQA = "4+ heads per KV head"
GQA_2 = "2+ heads per KV head"
GQA_E = "4+ heads per KV head or 4+ experts"


def always(type_name: str) -> Rows:
    """Return the rows that give ``type_name`` everywhere."""
    return (("always", type_name),)


def for_presets(names: str, rows: Rows) -> dict[str, Rows]:
    """Return a table with the same rows for several presets, whose ``names`` are separated by spaces."""
    return dict.fromkeys(names.split(), rows)


def holds(condition: str, place: Place) -> bool:
    """True if all parts of a condition hold at ``place``."""
    return all(CONDITIONS[part](place) for part in condition.split(", "))


def pick(rows: Rows, place: Place) -> tuple[TensorType, str] | None:
    """Return the type of the first of ``rows`` that holds at ``place``, and the reason; None for the base."""
    return next(((BY_NAME[name], condition) for condition, name in rows if holds(condition, place)), None)


@dataclass(slots=True)
class TypeRules(ABC):
    """The type rules of one preset, applied tensor by tensor; the layer counters are the only state."""

    facts: ModelFacts
    preset: Preset
    base: TensorType
    has_imatrix: bool = False
    #: --output-tensor-type, which tied embeddings follow.
    output_type: TensorType | None = None
    counters: dict[str, int] = field(default_factory=dict)

    @abstractmethod
    def choose(self, t: TensorLike) -> tuple[TensorType, Reason]:
        """Return the type of the next tensor, and the reason."""

    def output_name(self) -> str:
        return "output" if self.facts.has_output else "embeddings, which are also the output"

    def keep_base(self) -> tuple[TensorType, Reason]:
        return self.base, Reason("preset", f"base of {self.preset}")

    def give(self, type_name: str, reason: str) -> tuple[TensorType, Reason]:
        return BY_NAME[type_name], Reason("preset", f"{self.preset}: {reason}")

    def from_rows(self, rows: Rows, subject: str, place: Place) -> tuple[TensorType, Reason]:
        """Return the type that the rows of a category give, or the base."""
        match = pick(rows, place)
        if match is None or match[0] == self.base:
            return self.keep_base()
        suffix = "" if match[1] == "always" else f", {match[1]}"
        return match[0], Reason("preset", f"{self.preset}: {subject}{suffix}")

    def place(self, counter: str, name: str | None = None) -> Place:
        """Return the place of the next tensor of a category; with experts, its layer comes from its ``name``."""
        f = self.facts
        i = self.counters.get(counter, 0)
        if name is not None and f.n_expert > 1 and layer_of(name) >= 0:
            i = layer_of(name)
        return Place(i, f.n_attention_wv if counter == "attn_v" else f.n_layer, f, self.has_imatrix)

    def count(self, counter: str) -> None:
        self.counters[counter] = self.counters.get(counter, 0) + 1

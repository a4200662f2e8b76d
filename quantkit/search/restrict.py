"""Which types groups may have, and which groups have one type: what a user's restrictions say, by names and classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.patterns import Pattern
from quantkit.sensitivity.file import Group
from quantkit.types import TensorType, type_by_name


@dataclass(frozen=True)
class Restriction:
    """The types of an option that names tensors by a regular expression."""

    text: str
    pattern: Pattern
    types: tuple[TensorType, ...]

    def matches(self, group: Group) -> bool:
        return any(self.pattern.search(name) is not None for name in group.tensors)


def named_type(name: str, option: str) -> TensorType:
    """Return the type ``name`` of an option. Raises TypeNotSupported, which names the option."""
    try:
        return type_by_name(name)
    except TypeNotSupported as e:
        raise TypeNotSupported(f"{option}: {e.message}") from None


def restrictions(texts: Iterable[str], option: str, groups: Sequence[Group]) -> list[Restriction]:
    """Return what ``RE=TYPE,TYPE`` say. Raises RecipeError for what cannot be read, and what matches nothing."""
    found = []
    for text in texts:
        pattern, equals, names = text.rpartition("=")
        if not equals or not pattern.strip() or not names.strip():
            raise RecipeError(f"{option} {text!r}: write RE=TYPE")
        types = tuple(named_type(name, option) for name in names.split(",") if name.strip())
        one = Restriction(f"{option} {text}", Pattern(pattern.strip(), option, ignore_case=True), types)
        if not any(map(one.matches, groups)):
            raise RecipeError(f"{option} {text}: no tensor matches; there are {_classes(groups)}")
        found.append(one)
    return found


def _classes(groups: Iterable[Group]) -> str:
    return ", ".join(dict.fromkeys(group.kind for group in groups))


class Allowed:
    """Which types a group may have; of each option the first restriction that matches it counts."""

    def __init__(
        self, groups: Sequence[Group], allow: Iterable[str], at_least: Iterable[str], at_most: Iterable[str]
    ) -> None:
        self.allow = restrictions(allow, "--allow", groups)
        self.at_least = restrictions(at_least, "--at-least", groups)
        self.at_most = restrictions(at_most, "--at-most", groups)
        for one in (*self.at_least, *self.at_most):
            if len(one.types) > 1:
                raise RecipeError(f"{one.text}: one type is a bound")

    def types(self, group: Group, types: Iterable[TensorType]) -> tuple[TensorType, ...]:
        """Return those of ``types``, or of those that are allowed instead, that a group may have."""
        allowed = next((r.types for r in self.allow if r.matches(group)), tuple(types))
        least = next((r.types[0].bpw for r in self.at_least if r.matches(group)), 0.0)
        most = next((r.types[0].bpw for r in self.at_most if r.matches(group)), math.inf)
        return tuple(t for t in allowed if least <= t.bpw <= most)

    def reasons(self, group: Group) -> list[str]:
        """Return the options that restrict a group."""
        kinds = (self.allow, self.at_least, self.at_most)
        return [r.text for kind in kinds for r in kind if r.matches(group)]


def tied(groups: Sequence[Group], same: Iterable[str], pairs: Iterable[tuple[str, str]] = ()) -> list[list[Group]]:
    """Return groups in lists that have one type: those that ``same`` names, and ``pairs`` of groups by name.

    An item of ``same`` lists classes, or parts of classes between underscores: with ``up,gate`` the classes
    ffn_up_exps and ffn_gate_exps of a layer go together, and ffn_up and ffn_gate.
    """
    owner = {group.name: group.name for group in groups}

    def root(name: str) -> str:
        while owner[name] != name:
            name = owner[name]
        return name

    for text in same:
        first: dict[tuple[int | None, str], str] = {}
        for key, name in _keys(groups, text):
            owner[root(name)] = root(first.setdefault(key, name))
    for one, other in pairs:
        owner[root(one)] = root(other)
    lists: dict[str, list[Group]] = {}
    for group in groups:
        lists.setdefault(root(group.name), []).append(group)
    return list(lists.values())


def _keys(groups: Sequence[Group], text: str) -> Iterable[tuple[tuple[int | None, str], str]]:
    """Yield, for every group that an item of ``same`` names, what those have in common that go together, and its name.

    Raises RecipeError for a part that names nothing.
    """
    items = [item.strip().lower() for item in text.split(",") if item.strip()]
    if len(items) < 2:
        raise RecipeError(f"--same {text}: name at least two classes, as up,gate")
    for item in items:
        found = False
        for group in groups:
            parts = group.kind.lower().split("_")
            if item == group.kind.lower():
                found = True
                yield (group.layer, ""), group.name
            elif item in parts:
                found = True
                yield (group.layer, "_".join("*" if part == item else part for part in parts)), group.name
        if not found:
            raise RecipeError(f"--same {text}: no class has a part {item!r}; there are {_classes(groups)}")

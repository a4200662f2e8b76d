"""Restrictions of a search: permitted types of groups (--allow, --at-least, --at-most), ties of groups (--same)."""

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
    """An option RE=TYPE,TYPE."""

    text: str
    pattern: Pattern
    types: tuple[TensorType, ...]

    def matches(self, group: Group) -> bool:
        return any(self.pattern.search(name) is not None for name in group.tensors)


def option_type(name: str, option: str) -> TensorType:
    """Return the type ``name`` of an option. Raises TypeNotSupported with the name of the option."""
    try:
        return type_by_name(name)
    except TypeNotSupported as e:
        raise TypeNotSupported(f"{option}: {e.message}", e.code) from None


def parse_restrictions(texts: Iterable[str], option: str, groups: Sequence[Group]) -> list[Restriction]:
    """Return the restrictions of texts RE=TYPE,TYPE. Raises RecipeError for malformed or unmatched ones."""
    result = []
    for text in texts:
        pattern, equals, names = text.rpartition("=")
        if not equals or not pattern.strip() or not names.strip():
            raise RecipeError(f"{option} {text!r}: write RE=TYPE", "QK-E204")
        types = tuple(option_type(name, option) for name in names.split(",") if name.strip())
        restriction = Restriction(f"{option} {text}", Pattern(pattern.strip(), option, ignore_case=True), types)
        if not any(map(restriction.matches, groups)):
            raise RecipeError(f"{option} {text}: matches no tensor; choose from {_classes(groups)}", "QK-E206")
        result.append(restriction)
    return result


def _classes(groups: Iterable[Group]) -> str:
    return ", ".join(dict.fromkeys(group.kind for group in groups))


class Restrictions:
    """Permitted types of groups; the first matching restriction of each option applies."""

    def __init__(
        self, groups: Sequence[Group], allow: Iterable[str], at_least: Iterable[str], at_most: Iterable[str]
    ) -> None:
        self.allow = parse_restrictions(allow, "--allow", groups)
        self.at_least = parse_restrictions(at_least, "--at-least", groups)
        self.at_most = parse_restrictions(at_most, "--at-most", groups)
        for restriction in (*self.at_least, *self.at_most):
            if len(restriction.types) > 1:
                raise RecipeError(f"{restriction.text}: a bound must be a single type", "QK-E203")

    def types(self, group: Group, types: Iterable[TensorType]) -> tuple[TensorType, ...]:
        """Return the permitted types of a group: of --allow, by default of ``types``, within the bounds."""
        allowed = next((r.types for r in self.allow if r.matches(group)), tuple(types))
        least = next((r.types[0].bpw for r in self.at_least if r.matches(group)), 0.0)
        most = next((r.types[0].bpw for r in self.at_most if r.matches(group)), math.inf)
        return tuple(t for t in allowed if least <= t.bpw <= most)

    def reasons(self, group: Group) -> list[str]:
        """Return the texts of the options that restrict a group."""
        kinds = (self.allow, self.at_least, self.at_most)
        return [r.text for kind in kinds for r in kind if r.matches(group)]


def tie_groups(
    groups: Sequence[Group], tied_classes: Iterable[str], pairs: Iterable[tuple[str, str]] = ()
) -> list[list[Group]]:
    """Return lists of groups that get the same type: those of ``tied_classes``, and ``pairs`` of groups by name.

    An item of ``tied_classes`` lists classes, or parts of classes between underscores: with ``up,gate`` the classes
    ffn_up_exps and ffn_gate_exps of a layer are tied, as are ffn_up and ffn_gate.
    """
    owner = {group.name: group.name for group in groups}

    def root(name: str) -> str:
        while owner[name] != name:
            name = owner[name]
        return name

    for text in tied_classes:
        first: dict[tuple[int | None, str], str] = {}
        for key, name in _tie_keys(groups, text):
            owner[root(name)] = root(first.setdefault(key, name))
    for a, b in pairs:
        owner[root(a)] = root(b)
    lists: dict[str, list[Group]] = {}
    for group in groups:
        lists.setdefault(root(group.name), []).append(group)
    return list(lists.values())


def _tie_keys(groups: Sequence[Group], text: str) -> Iterable[tuple[tuple[int | None, str], str]]:
    """Yield the key and the name of each group that an item of ``tied_classes`` names; groups of one key are tied.

    Raises RecipeError for a part that names no class.
    """
    items = [item.strip().lower() for item in text.split(",") if item.strip()]
    if len(items) < 2:
        raise RecipeError(f"--same {text}: give at least two classes, such as up,gate", "QK-E204")
    for item in items:
        has_match = False
        for group in groups:
            parts = group.kind.lower().split("_")
            if item == group.kind.lower():
                has_match = True
                yield (group.layer, ""), group.name
            elif item in parts:
                has_match = True
                yield (group.layer, "_".join("*" if part == item else part for part in parts)), group.name
        if not has_match:
            raise RecipeError(
                f"--same {text}: {item!r} is not part of any class; choose from {_classes(groups)}", "QK-E206"
            )

"""Allocations as recipes: few rules, anchored, so that each matches exactly the tensors it is for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from quantkit.pipeline.facts import layer_of
from quantkit.pipeline.recipe import Rule
from quantkit.types import TensorType


def exact_rules(types: Mapping[str, TensorType]) -> tuple[Rule, ...]:
    """Return rules that give every tensor of ``types`` its type and match no other, whatever their order.

    Of a type, tensors of all layers that have the same kinds of tensors in it go into one rule.
    """
    layers: dict[tuple[TensorType, str], list[int]] = {}
    whole: dict[TensorType, list[str]] = {}
    for name, t in types.items():
        layer = layer_of(name)
        prefix = f"blk.{layer}."
        if layer >= 0 and name.startswith(prefix):
            layers.setdefault((t, name.removeprefix(prefix)), []).append(layer)
        else:
            whole.setdefault(t, []).append(name)
    kinds: dict[tuple[TensorType, tuple[int, ...]], list[str]] = {}
    for (t, kind), found in layers.items():
        kinds.setdefault((t, tuple(sorted(found))), []).append(kind)
    rules = [(f"^{_one_of(sorted(names))}$", t) for t, names in whole.items()]
    rules += [
        (rf"^blk\.{_one_of(map(str, found))}\.{_one_of(sorted(names))}$", t) for (t, found), names in kinds.items()
    ]
    return tuple(Rule(pattern, t, "search") for pattern, t in rules)


def _one_of(texts: Iterable[str]) -> str:
    escaped = [re.escape(text) for text in texts]
    if len(escaped) == 1:
        return escaped[0]
    ends = {text.rpartition(r"\.")[2] for text in escaped if r"\." in text} or {""}
    end = rf"\.{ends.pop()}"
    if not ends and all(text.endswith(end) for text in escaped):
        return f"({'|'.join(text.removesuffix(end) for text in escaped)}){end}"
    return f"({'|'.join(escaped)})"


def recipe_text(rules: Iterable[Rule], comments: Iterable[str]) -> str:
    """Return a recipe as `quantkit quantize -r` reads it, with comments before the rules."""
    head = [f"# {line}".rstrip() for line in comments]
    return "\n".join([*head, *(f"{rule.pattern} = {rule.type}" for rule in rules)]) + "\n"

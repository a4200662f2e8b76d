"""What the rules of a row (``tensors``) did, undone: from a file's tensors to those of a checkpoint.

``undone`` knows the inverse of each kind of rule, and ``CHANGES`` that of each change of values; those of single
families are in ``families``. Rules are undone from the last to the first; one without an inverse makes its architecture
one that cannot be exported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Protocol, runtime_checkable

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Mapped, Shaped, Transposed, joined, taken
from quantkit.checkpoint.tensors import (
    EXPERT_COUNTS,
    Changed,
    Context,
    Dropped,
    Experts,
    Full,
    Named,
    Renamed,
    Rule,
    Split,
    Tensor,
    key_heads,
    negative_exp,
    plus_one,
    query_heads,
    restored,
    squeezed,
    transposed,
)
from quantkit.errors import TypeNotSupported


@dataclass
class Backward:
    """What is known on the way back, and what waits for others: ``held`` by rule and merged name.

    ``fused``: the class keeps in one tensor what the file, or another class, has in several.
    """

    context: Context
    fused: bool = False
    held: dict[tuple[int, str], dict[str, Tensor]] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.context.config


@singledispatch
def undone(rule: Rule, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Return what a tensor was made of, as rules return what they make of one."""
    raise TypeNotSupported(
        f"{back.config.architecture} cannot be exported by this version: "
        f"what {type(rule).__name__} does to its tensors has no inverse yet"
    )


@undone.register
def _(rule: Renamed, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Name it as before, unless only other tools' checkpoints are called so."""
    if rule.foreign or not rule.by or not rule.when(back.config):
        return None
    pattern, by = _backward(rule)
    name = re.sub(pattern, by, tensor.name)
    return None if name == tensor.name else (replace(tensor, name=name),)


def _backward(rule: Renamed) -> tuple[str, str]:
    """Return what a renaming with at most one group looks for on the way back, and what it puts there."""
    group = re.search(r"(?<!\\)\((.*)\)", rule.pattern)
    ends = "$" if "$" in rule.pattern else ""
    found = re.escape(rule.by).replace(r"\\1", f"({group[1].removesuffix('$')})" if group else "") + ends
    return found, literal(rule.pattern if group is None else rule.pattern.replace(group[0], r"\1"))


@undone.register(Full)
@undone.register
def _(rule: Named, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    return None


@undone.register
def _(rule: Dropped, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    return None


def _heads_back(tensor: Tensor, context: Context) -> Expression:
    return restored(tensor, context.config.number("n_heads", "num_attention_heads"))


def _key_heads_back(tensor: Tensor, context: Context) -> Expression:
    heads = context.config.find("n_kv_heads", "num_key_value_heads")
    return restored(tensor, context.config.number("n_heads", "num_attention_heads") if heads is None else heads)


def _minus_one(tensor: Tensor, context: Context) -> Expression:
    return Mapped(tensor.x, "minus one")


def _transposed(tensor: Tensor, context: Context) -> Expression:
    return Transposed(tensor.x)


def _log(tensor: Tensor, context: Context) -> Expression:
    return Mapped(tensor.x, "log of negative")


def _unsqueezed(tensor: Tensor, context: Context) -> Expression:
    """Give a convolution of single channels the dimension that says so; biases have none."""
    return tensor.x if len(tensor.x.shape) != 2 else Shaped(tensor.x, (tensor.x.shape[0], 1, tensor.x.shape[1]))


#: A change of values or shape (``Changed.by``) -> the one that undoes it.
CHANGES: dict[Callable[[Tensor, Context], Expression], Callable[[Tensor, Context], Expression]] = {
    query_heads: _heads_back,
    key_heads: _key_heads_back,
    plus_one: _minus_one,
    transposed: _transposed,
    negative_exp: _log,
    squeezed: _unsqueezed,
}


@runtime_checkable
class Undoable(Protocol):
    """A change that knows what undoes it."""

    def back(self) -> Callable[[Tensor, Context], Expression]: ...


@undone.register
def _(rule: Changed, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    if not re.search(rule.pattern, tensor.name):
        return None
    inverse = rule.by.back() if isinstance(rule.by, Undoable) else CHANGES.get(rule.by)
    if inverse is None:
        raise TypeNotSupported(
            f"{back.config.architecture} cannot be exported by this version: what "
            f"{getattr(rule.by, '__name__', rule.by)} does to {tensor.name} has no inverse yet"
        )
    return Changed(rule.pattern, inverse)(tensor, back.context)


@undone.register
def _(rule: Experts, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Take a tensor of all experts apart."""
    if back.fused:
        return None
    weight = next((w for w in rule.weights if tensor.name == rule.merged.format(layer=tensor.layer, weight=w)), None)
    if weight is None:
        return None
    n = back.config.number(*EXPERT_COUNTS) // rule.shared
    x = tensor.x
    if len(x.shape) != 3 or x.shape[0] != n:
        raise back.context.fail(tensor, f"its shape {list(x.shape)} is not that of {n} experts")
    return [
        replace(
            tensor,
            name=rule.name.format(layer=tensor.layer, expert=expert, weight=weight),
            x=Shaped(taken(x, 0, range(expert, expert + 1)), x.shape[1:]),
        )
        for expert in range(n)
    ]


@undone.register
def _(rule: Split, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Join the parts again, where the class keeps them in one tensor."""
    ends = [(name, re.search(re.escape(name).replace(r"\1", ".*") + r"$", tensor.name)) for name in rule.names]
    name = next((name for name, match in ends if match), None)
    if name is None or not (back.fused or rule.always):
        return None
    whole = tensor.name[: -len(name)] + literal(rule.pattern)
    held = back.held.setdefault((id(rule), whole), {})
    held[name] = tensor
    if len(held) < len(rule.names):
        return ()
    parts = [held.pop(each).x for each in rule.names]
    del back.held[id(rule), whole]
    axis = rule.axis % len(parts[0].shape)
    return (replace(tensor, name=whole, x=_woven(parts, axis) if rule.interleaved else joined(parts, axis)),)


def _woven(parts: Sequence[Expression], axis: int) -> Expression:
    """Return slices along ``axis`` of one part and another in turn."""
    n, size = len(parts), parts[0].shape[axis]
    return taken(joined(parts, axis), axis, *(range(i, n * size, size) for i in range(size)))


def literal(pattern: str) -> str:
    """Return the shortest text that a simple regular expression matches: optional groups and what is beside are not."""
    return re.sub(r"\(\?<?[!=][^()]*\)|\([^()]*\)\?|[$^]", "", pattern).replace("\\.", ".")


def all_undone(rules: Sequence[Rule], tensor: Tensor, back: Backward) -> list[Tensor]:
    """Return what rules, from the last to the first, were applied to."""
    tensors = [tensor]
    for rule in reversed(rules):
        found = [(t, undone(rule, t, back)) for t in tensors]
        tensors = [new for t, made in found for new in ((t,) if made is None else made)]
    return tensors

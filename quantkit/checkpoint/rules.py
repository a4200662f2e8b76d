"""Conversion rules for the tensors of ``models``, each with its inverse.

Rules are described in ``tensors``. A rule that only one family needs is a class in that family's module; values and
shapes change by a ``Transform``, which names the function and its inverse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import (
    TYPE_F32,
    Expression,
    Mapped,
    Shaped,
    Transposed,
    concatenate,
    permute_heads,
    restore_heads,
    size_of,
    stack,
    take,
)
from quantkit.checkpoint.tensor_names import file_name
from quantkit.checkpoint.tensors import OF_FILE, Context, InverseContext, OneWayRule, Rule, Tensor
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short
from quantkit.names import shorten

#: A change of values or shape.
Change = Callable[[Tensor, Context], Expression]


@dataclass(frozen=True)
class Rename(Rule):
    """Replaces the regular expression ``pattern`` in names; with ``when``, only if it is true.

    ``foreign``: names of tools other than transformers, which export does not use.
    """

    pattern: str
    replacement: str
    when: Callable[[Config], bool] = lambda config: True
    foreign: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        name = re.sub(self.pattern, self.replacement, tensor.name)
        return None if name == tensor.name or not self.when(context.config) else (replace(tensor, name=name),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        if self.foreign or not self.replacement or not self.when(context.config):
            return None
        name = re.sub(*self._inverse(), tensor.name)
        return None if name == tensor.name else (replace(tensor, name=name),)

    def _inverse(self) -> tuple[str, str]:
        """Return the pattern and the replacement of the inverse; ``pattern`` has at most one group."""
        group = re.search(r"(?<!\\)\((.*)\)", self.pattern)
        end = "$" if "$" in self.pattern else ""
        inner = f"({group[1].removesuffix('$')})" if group else ""
        pattern = re.escape(self.replacement).replace(r"\\1", inner) + end
        return pattern, literal(self.pattern if group is None else self.pattern.replace(group[0], r"\1"))


@dataclass(frozen=True)
class AssignKind(OneWayRule):
    """Assigns a ``kind`` that the name map lacks to tensors whose names match ``pattern``.

    ``name``: the complete name, ``*`` for the layer.
    """

    pattern: str
    kind: str
    suffix: str
    name: str

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not re.search(self.pattern, tensor.name):
            return None
        return (replace(tensor, name_in_file=file_name(self.kind, tensor.layer) + self.suffix),)


@dataclass(frozen=True)
class KeepF32(OneWayRule):
    """Keeps tensors whose names match ``pattern`` in F32, regardless of the type of the file."""

    pattern: str
    when: Callable[[Config], bool] = lambda config: True

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        matches = re.search(self.pattern, tensor.name) and self.when(context.config)
        return (replace(tensor, file_type=TYPE_F32),) if matches else None


@dataclass(frozen=True)
class UseFileType(OneWayRule):
    """Converts tensors whose names match ``pattern`` to the type of the file, though their kind is F32."""

    pattern: str

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        return (replace(tensor, file_type=OF_FILE),) if re.search(self.pattern, tensor.name) else None


@dataclass(frozen=True)
class Drop(OneWayRule):
    """Drops tensors whose names match ``pattern``; with ``when``, only if it is true."""

    pattern: str
    when: Callable[[Config], bool] = lambda config: True

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        return () if re.search(self.pattern, tensor.name) and self.when(context.config) else None


@dataclass(frozen=True)
class Transform(Rule):
    """Changes values or shape of tensors whose names match ``pattern``: ``change``, and ``inverse`` on export.

    Without an inverse the architecture cannot be exported.
    """

    pattern: str
    change: Change
    inverse: Change | None

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        return self._apply(self.change, tensor, context)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        if self.inverse is None and re.search(self.pattern, tensor.name):
            raise TypeNotSupported(
                f"{context.config.architecture} cannot be exported by this version: the change "
                f"{getattr(self.change, '__name__', self.change)} of {tensor.name} has no inverse",
                "QK-E304",
            )
        return None if self.inverse is None else self._apply(self.inverse, tensor, context)

    def _apply(self, change: Change, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not re.search(self.pattern, tensor.name):
            return None
        try:
            return (replace(tensor, x=change(tensor, context)),)
        except (ValueError, IndexError, ZeroDivisionError) as e:
            reason = shorten(str(e), 200)
            raise context.fail(
                tensor, f"its shape {list(tensor.x.shape)} is not that of this model: {reason}"
            ) from None


def identity(tensor: Tensor, context: Context) -> Expression:
    """Return the tensor unchanged: the inverse of a change that need not be undone."""
    return tensor.x


def plus_one(tensor: Tensor, context: Context) -> Expression:
    """Return x + 1 (norms of Gemma and Qwen3-Next)."""
    return Mapped(tensor.x, "plus one")


def minus_one(tensor: Tensor, context: Context) -> Expression:
    """Return x - 1."""
    return Mapped(tensor.x, "minus one")


def negative_exp(tensor: Tensor, context: Context) -> Expression:
    """Return -exp(x) (A_log)."""
    return Mapped(tensor.x, "negative exp")


def log_of_negative(tensor: Tensor, context: Context) -> Expression:
    """Return log(-x)."""
    return Mapped(tensor.x, "log of negative")


def transpose(tensor: Tensor, context: Context) -> Expression:
    """Transpose the last two dimensions; a transposed view returns its source."""
    return tensor.x.x if isinstance(tensor.x, Transposed) else Transposed(tensor.x)


def transpose_stored(tensor: Tensor, context: Context) -> Expression:
    """Exchange the last two dimensions."""
    return Transposed(tensor.x)


def squeeze(tensor: Tensor, context: Context) -> Expression:
    """Remove dimensions of 1."""
    return Shaped(tensor.x, tuple(n for n in tensor.x.shape if n != 1))


def unsqueeze_channels(tensor: Tensor, context: Context) -> Expression:
    """Return a convolution of single channels as [channels, 1, width]; biases are unchanged."""
    return tensor.x if len(tensor.x.shape) != 2 else Shaped(tensor.x, (tensor.x.shape[0], 1, tensor.x.shape[1]))


def flatten(tensor: Tensor, context: Context) -> Expression:
    """Return all values in one dimension."""
    return Shaped(tensor.x, (size_of(tensor.x),))


def flatten_experts(tensor: Tensor, context: Context) -> Expression:
    """Concatenate the matrices of all experts along their rows."""
    return Shaped(tensor.x, (size_of(tensor.x) // tensor.x.shape[-1], tensor.x.shape[-1]))


def flatten_transposed_experts(tensor: Tensor, context: Context) -> Expression:
    """Concatenate the transposed matrices of all experts along their rows."""
    return flatten_experts(replace(tensor, x=Transposed(tensor.x)), context)


def permute_queries(tensor: Tensor, context: Context) -> Expression:
    """Undo the permutation of queries for rope (LlamaModel.permute)."""
    return permute_rows(tensor, context.config.number("n_heads", "num_attention_heads"))


def permute_keys(tensor: Tensor, context: Context) -> Expression:
    """Undo the permutation of keys for rope."""
    return permute_rows(tensor, _key_head_count(context.config))


def restore_queries(tensor: Tensor, context: Context) -> Expression:
    """Permute queries for rope."""
    return restore_rows(tensor, context.config.number("n_heads", "num_attention_heads"))


def restore_keys(tensor: Tensor, context: Context) -> Expression:
    """Permute keys for rope."""
    return restore_rows(tensor, _key_head_count(context.config))


def _key_head_count(config: Config) -> int:
    names = ("n_kv_heads", "num_key_value_heads")
    return config.number(*(names if config.find(*names) is not None else ("n_heads", "num_attention_heads")))


def permute_rows(tensor: Tensor, heads: int) -> Expression:
    """Invert the permutation of rows for rope, for a number of heads."""
    x = tensor.x
    if not x.shape or heads < 1 or x.shape[0] % (2 * heads):
        raise ValueError(f"its rows are not a multiple of {heads} heads")
    return permute_heads(x, heads)


def restore_rows(tensor: Tensor, heads: int) -> Expression:
    """Permute the rows for rope: the inverse of ``permute_rows``."""
    if heads < 1 or not tensor.x.shape or tensor.x.shape[0] % (2 * heads):
        raise ValueError(f"its rows are not a multiple of {heads} heads")
    return restore_heads(tensor.x, heads)


@dataclass(frozen=True)
class Split(Rule):
    """Splits a tensor along ``axis``, with names ``pattern`` replaced by each of ``names``.

    They are equal, or of ``sizes``; ``interleaved``: the parts are every n-th slice, not runs of them. ``always``: all
    classes store them in one tensor.
    """

    pattern: str
    names: tuple[str, ...]
    axis: int = 0
    interleaved: bool = False
    sizes: Callable[[Config], Sequence[int]] | None = None
    always: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not re.search(self.pattern, tensor.name):
            return None
        shape = tensor.x.shape
        if not -len(shape) <= self.axis < len(shape):
            raise context.fail(tensor, f"its shape {list(shape)} cannot be split into {len(self.names)}")
        parts = self._parts(shape[self.axis], context.config)
        if sum(map(len, parts)) != shape[self.axis]:
            raise context.fail(tensor, f"its shape {list(shape)} cannot be split into {[len(part) for part in parts]}")
        return [
            replace(tensor, name=re.sub(self.pattern, name, tensor.name), x=take(tensor.x, self.axis, part))
            for name, part in zip(self.names, parts, strict=True)
        ]

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Join the parts again, if the class stores them in one tensor."""
        if not (context.fused or self.always):
            return None
        ends = [(name, re.search(re.escape(name).replace(r"\1", ".*") + _SUFFIX, tensor.name)) for name in self.names]
        name, match = next(((name, match) for name, match in ends if match), ("", None))
        if match is None:
            return None
        joined_name = tensor.name[: match.end(0) - len(match[1]) - len(name)] + literal(self.pattern) + match[1]
        tensors = context.gather(self, joined_name, name, tensor, len(self.names))
        if tensors is None:
            return ()
        parts = [tensors[part].x for part in self.names]
        axis = self.axis % len(parts[0].shape)
        if len({(*x.shape[:axis], *x.shape[axis + 1 :]) for x in parts}) > 1:
            raise context.fail(tensor, f"the parts of {short(joined_name)} differ in shape")
        x = _interleave(parts, axis) if self.interleaved else concatenate(parts, axis)
        return (replace(tensor, name=joined_name, x=x),)

    def _parts(self, size: int, config: Config) -> list[range]:
        """Return the rows of each part; equal parts omit a remainder."""
        n = len(self.names)
        if self.interleaved:
            return [range(i, size // n * n, n) for i in range(n)]
        sizes = [size // n] * n if self.sizes is None else self.sizes(config)
        ends = list(accumulate(sizes))
        return [range(end - n_rows, end) for n_rows, end in zip(sizes, ends, strict=True)]


@dataclass(frozen=True)
class InverseRule(Rule):
    """A reversed rule: its inverse on conversion, the rule itself on export."""

    rule: Rule

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        return self.rule.invert(tensor, InverseContext(context.config, context.names, context.waiting))

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        return self.rule(tensor, context)


#: Keys of the number of experts.
EXPERT_COUNTS = ("moe_num_primary_experts", "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class StackExperts(Rule):
    """Stacks the experts of a layer into one tensor for each of ``weights``, in that order.

    They take the place of the last expert. ``name`` is that of an expert's tensor, ``{layer}``, ``{expert}`` and
    ``{weight}`` left open; ``merged`` that of all. Every name that contains ``marked`` must be an expert's. ``shared``:
    experts of the configuration that share one.
    """

    weights: tuple[str, ...] = ("down_proj", "gate_proj", "up_proj")
    name: str = "model.layers.{layer}.mlp.experts.{expert}.{weight}.weight"
    merged: str = "model.layers.{layer}.mlp.experts.{weight}.weight"
    marked: str = r"experts\.\d+\."
    shared: int = 1

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not re.search(self.marked, tensor.name):
            return None
        if tensor.layer is None:
            raise context.fail(tensor, "an expert outside of any layer", "QK-E107")
        n = context.config.number(*EXPERT_COUNTS) // self.shared
        if not n:
            raise context.fail(tensor, "an expert, but the model has none by config.json", "QK-E107")
        parts = context.gather(self, tensor.layer, tensor.name, tensor, n * len(self.weights))
        return () if parts is None else list(self._merge(parts, tensor, tensor.layer, n, context))

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Return the tensors of single experts."""
        if context.fused:
            return None
        merged = {self.merged.format(layer=tensor.layer, weight=weight): weight for weight in reversed(self.weights)}
        weight = merged.get(tensor.name)
        if weight is None:
            return None
        n = context.config.number(*EXPERT_COUNTS) // self.shared
        x = tensor.x
        if len(x.shape) != 3 or x.shape[0] != n:
            raise context.fail(tensor, f"its shape {list(x.shape)} does not match {n} experts")
        return [
            replace(
                tensor,
                name=self.name.format(layer=tensor.layer, expert=expert, weight=weight),
                x=Shaped(take(x, 0, range(expert, expert + 1)), x.shape[1:]),
            )
            for expert in range(n)
        ]

    def missing(self, waiting: Collection[str], layer: int | str, context: Context) -> str:
        """Return the reason why experts of a layer are incomplete: missing or extra tensors."""
        n = context.config.number(*EXPERT_COUNTS) // self.shared
        count_key = next(key for key in EXPERT_COUNTS if key in context.config)
        expected = f"{context.config.path} has {count_key} {context.config[count_key]}"
        if (stray := next((name for name in waiting if not self._is_one(name, layer, n)), None)) is not None:
            return f"{short(stray)} belongs to an extra expert: {expected}"
        names = (self.name.format(layer=layer, expert=e, weight=w) for e in range(n) for w in self.weights)
        absent = next(name for name in names if name not in waiting)
        count = n * len(self.weights) - len(waiting)
        remainder = f" and {count - 1} more" if count > 1 else ""
        return f"{short(absent)}{remainder}; a file of the checkpoint is missing, or this number is wrong: {expected}"

    def _is_one(self, name: str, layer: int | str, n: int) -> bool:
        """Return whether a tensor is of one of ``n`` experts of a layer."""
        parts = [self.name.format(layer=layer, expert="\n", weight=weight).split("\n") for weight in self.weights]
        numbers = (name[len(a) : -len(b)] for a, b in parts if name.startswith(a) and name.endswith(b))
        return any(number.isdecimal() and int(number) < n for number in numbers)

    def _merge(
        self, waiting: dict[str, Tensor], last: Tensor, layer: int, n: int, context: Context
    ) -> Iterator[Tensor]:
        for weight in self.weights:
            names = [self.name.format(layer=layer, expert=expert, weight=weight) for expert in range(n)]
            if not waiting.keys() >= set(names):
                raise context.fail(last, self.missing(waiting, layer, context), "QK-E105")
            experts = [waiting[name] for name in names]
            mismatch = next((expert for expert in experts if expert.x.shape != experts[0].x.shape), None)
            if mismatch is not None:
                raise context.fail(
                    mismatch, f"{list(mismatch.x.shape)}, but other experts have {list(experts[0].x.shape)}"
                )
            name = self.merged.format(layer=last.layer, weight=weight)
            yield replace(last, name=name, x=stack([expert.x for expert in experts]))


#: The end of a name after a part that ends in a point.
_SUFFIX = r"((?<=\.)(?:weight|bias)|)$"


def _interleave(parts: Sequence[Expression], axis: int) -> Expression:
    """Return slices along ``axis`` of each part in turn."""
    n, size = len(parts), parts[0].shape[axis]
    return take(concatenate(parts, axis), axis, *(range(i, n * size, size) for i in range(size)))


def literal(pattern: str) -> str:
    """Return the shortest text that a simple regular expression matches: without optional groups and assertions."""
    return re.sub(r"\(\?<?[!=][^()]*\)|\([^()]*\)\?|[$^]", "", pattern).replace("\\.", ".")


#: Experts in the order in which LlamaModel's children have them.
STACK_GATE_FIRST = StackExperts(weights=("gate_proj", "up_proj", "down_proj"))
#: A bias of the router that is stored without a suffix.
ROUTER_BIAS = Rename(r"\.expert_bias$", ".expert_bias.bias")


def is_tied(config: Config) -> bool:
    """Return whether the embeddings are also the output matrix."""
    return bool(config.get("tie_word_embeddings", False))


#: An output matrix that is stored although it is tied.
TIED_OUTPUT = Drop(r"^(model\.)?lm_head\.weight$", is_tied)

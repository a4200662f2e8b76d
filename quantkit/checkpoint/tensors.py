"""Rules by which the tensors of a checkpoint become those of a GGUF file.

A rule is a function of one tensor: it returns what takes its place, in order, nothing if it drops or holds it back, or
None if the tensor does not concern it. The rules of an architecture (``architectures.ROWS``) are applied one after
another to whatever the one before gave; what is left is named by ``TensorNames``. Rules are plain data, so that they
can be read backwards, too (export).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import (
    TYPE_F32,
    Expression,
    Mapped,
    Shaped,
    Transposed,
    head_permuted,
    head_restored,
    stacked,
    taken,
)
from quantkit.checkpoint.tensor_names import TensorNames, file_name
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.names import shorten
from quantkit.types import TensorType

#: The type of the file.
OF_FILE = "of the file"


@dataclass(frozen=True)
class Tensor:
    """A tensor on its way: its name in the checkpoint, what it is made of, and its layer, the first number in the name.

    ``name_in_file`` is set by rules that know it; the name map is not asked then. ``typed``: its type in every file, or
    OF_FILE: that of the file, whatever its kind.
    """

    name: str
    x: Expression
    layer: int | None
    name_in_file: str | None = None
    typed: TensorType | str | None = None


@dataclass
class Context:
    """What rules know, and what they hold back: ``held`` by rule and layer."""

    config: Config
    names: TensorNames
    held: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)

    def fail(self, tensor: Tensor, what: str) -> FormatError:
        part = next(tensor.x.parts(), None)
        where = self.config.path.parent if part is None else part.path
        return FormatError(f"{where}: tensor {short(tensor.name)}: {what}")


class Rule(Protocol):
    """See the module."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None: ...


@dataclass(frozen=True)
class Renamed:
    """Names in which the regular expression ``pattern`` is found get ``by`` in its place; with ``when``, only then.

    ``foreign``: names that transformers does not use, so that nothing is called so on the way back.
    """

    pattern: str
    by: str
    when: Callable[[Config], bool] = lambda config: True
    foreign: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        name = re.sub(self.pattern, self.by, tensor.name)
        return None if name == tensor.name or not self.when(context.config) else (replace(tensor, name=name),)


@dataclass(frozen=True)
class Named:
    """Tensors whose names the regular expression finds are of a ``kind`` that the name map cannot tell.

    ``name``: the whole of such a name, ``*`` for the layer.
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
class Full:
    """Tensors whose names the regular expression finds are F32, whatever the type of the file."""

    pattern: str
    when: Callable[[Config], bool] = lambda config: True

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        found = re.search(self.pattern, tensor.name) and self.when(context.config)
        return (replace(tensor, typed=TYPE_F32),) if found else None


@dataclass(frozen=True)
class AsFile:
    """Tensors whose names the regular expression finds have the type of the file, also those of kinds that are F32."""

    pattern: str

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        return (replace(tensor, typed=OF_FILE),) if re.search(self.pattern, tensor.name) else None


@dataclass(frozen=True)
class Dropped:
    """Tensors whose names the regular expression finds are not part of the model; with ``when``, only then."""

    pattern: str
    when: Callable[[Config], bool] = lambda config: True

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        return () if re.search(self.pattern, tensor.name) and self.when(context.config) else None


@dataclass(frozen=True)
class Changed:
    """Tensors whose names the regular expression finds are changed, values or shape: see ``plus_one`` and others."""

    pattern: str
    by: Callable[[Tensor, Context], Expression]

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not re.search(self.pattern, tensor.name):
            return None
        try:
            return (replace(tensor, x=self.by(tensor, context)),)
        except (ValueError, IndexError, ZeroDivisionError) as e:
            why = shorten(str(e), 200)
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not that of this model: {why}") from None


def plus_one(tensor: Tensor, context: Context) -> Expression:
    """Add one (Gemma's and Qwen3-Next's norms)."""
    return Mapped(tensor.x, "plus one")


def negative_exp(tensor: Tensor, context: Context) -> Expression:
    """Return -exp(x) (A_log)."""
    return Mapped(tensor.x, "negative exp")


def transposed(tensor: Tensor, context: Context) -> Expression:
    """Exchange the last two dimensions; of what was stored the other way round already, take that."""
    return tensor.x.x if isinstance(tensor.x, Transposed) else Transposed(tensor.x)


def squeezed(tensor: Tensor, context: Context) -> Expression:
    """Leave out dimensions of one."""
    return Shaped(tensor.x, tuple(n for n in tensor.x.shape if n != 1))


def query_heads(tensor: Tensor, context: Context) -> Expression:
    """Undo the permutation of queries for rope (LlamaModel.permute)."""
    return permuted(tensor, context.config.number("n_heads", "num_attention_heads"))


def key_heads(tensor: Tensor, context: Context) -> Expression:
    """Undo the permutation of keys for rope."""
    heads = ("n_kv_heads", "num_key_value_heads")
    if context.config.find(*heads) is None:
        heads = ("n_heads", "num_attention_heads")
    return permuted(tensor, context.config.number(*heads))


def permuted(tensor: Tensor, heads: int) -> Expression:
    """Undo the permutation of the rows of so many heads for rope."""
    x = tensor.x
    if not x.shape or heads < 1 or x.shape[0] % (2 * heads):
        raise ValueError(f"its rows make no {heads} heads")
    return head_permuted(x, heads)


def restored(tensor: Tensor, heads: int) -> Expression:
    """Permute the rows of so many heads again: undoes ``permuted``."""
    if heads < 1 or not tensor.x.shape or tensor.x.shape[0] % (2 * heads):
        raise ValueError(f"its rows make no {heads} heads")
    return head_restored(tensor.x, heads)


@dataclass(frozen=True)
class Split:
    """A tensor becomes parts along ``axis``, each under a name: ``pattern`` replaced by one of ``names``.

    They are equal, or of ``sizes``; ``interleaved``: the parts are every n-th slice, not runs of them. ``always``: all
    classes have them in one.
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
            replace(tensor, name=re.sub(self.pattern, name, tensor.name), x=taken(tensor.x, self.axis, part))
            for name, part in zip(self.names, parts, strict=True)
        ]

    def _parts(self, size: int, config: Config) -> list[range]:
        """Return the slices of each part; equal ones leave out what cannot be divided."""
        n = len(self.names)
        if self.interleaved:
            return [range(i, size // n * n, n) for i in range(n)]
        sizes = [size // n] * n if self.sizes is None else self.sizes(config)
        ends = list(accumulate(sizes))
        return [range(end - each, end) for each, end in zip(sizes, ends, strict=True)]


#: What configurations call the number of experts.
EXPERT_COUNTS = ("moe_num_primary_experts", "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, each with its own tensors, become one tensor for each of ``weights``, in that order.

    They come where the last of them was. ``name`` is that of an expert's tensor, ``{layer}``, ``{expert}`` and
    ``{weight}`` left open; ``merged`` that of all. Every name in which ``marked`` is found must be one of them. There
    is one for ``shared`` experts that the configuration speaks of.
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
            raise context.fail(tensor, "an expert outside of any layer")
        n = context.config.number(*EXPERT_COUNTS) // self.shared
        if not n:
            raise context.fail(tensor, "an expert, of which config.json says that there are none")
        held = context.held.setdefault((id(self), tensor.layer), {})
        held[tensor.name] = tensor
        if len(held) < n * len(self.weights):
            return ()
        return list(self._merge(held, tensor, n, context))

    def _merge(self, held: dict[str, Tensor], last: Tensor, n: int, context: Context) -> Iterator[Tensor]:
        for weight in self.weights:
            names = [self.name.format(layer=last.layer, expert=expert, weight=weight) for expert in range(n)]
            missing = next((name for name in names if name not in held), None)
            if missing is not None:
                raise context.fail(last, f"{missing} is missing beside it")
            experts = [held.pop(name) for name in names]
            other = next((each for each in experts if each.x.shape != experts[0].x.shape), None)
            if other is not None:
                raise context.fail(other, f"{list(other.x.shape)}, not {list(experts[0].x.shape)} as other experts")
            name = self.merged.format(layer=last.layer, weight=weight)
            yield replace(last, name=name, x=stacked([each.x for each in experts]))


#: Names with these endings are buffers of old checkpoints, not weights.
_BUFFERS = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")
#: Parts of models that also see and hear: not of the text model.
_OTHER_STARTS = (
    *("mlp", "vit.", "vpm.", "siglip2.", "conformer.", "merger.", "resampler.", "sound_encoder.", "sound_projection."),
    "speech_embeddings.",
)
_OTHER_PARTS = (
    *("visual.", "vision.", "audio.", "talker.", "vision_", "audio_", "token2wav.", "code2wav.", "projector."),
    *("pre_mm_projector_norm", "image_newline", "view_seperator", "patch_embed", "patch_embedding", "patch_merger."),
    *("patch_merge_mlp.", "model.connector."),
)


def text_name(name: str) -> str | None:
    """Return the name of a stored tensor without what wraps the text model, None if it belongs to another part."""
    if name.startswith(_OTHER_STARTS) or any(part in name for part in _OTHER_PARTS):
        return None
    if name.endswith("e_score_correction_bias"):
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    return name.replace("language_model.", "")


def text_tensors(
    stored: Sequence[Rule], name: str, x: Expression, context: Context
) -> Iterator[tuple[str, Expression]]:
    """Yield what ``stored``, the rules of an index, make of a stored tensor, by its name in the text model, if any."""
    for tensor in applied(stored, Tensor(name, x, None), context):
        found = text_name(tensor.name)
        if found is not None:
            yield found, tensor.x


def layer_of(name: str) -> int | None:
    """Return the first number in a name."""
    return next((int(part) for part in name.split(".") if part.isdecimal() and len(part) < 10), None)


def named_tensors(
    stored: Mapping[str, Expression],
    rules: Sequence[Rule],
    context: Context,
    extra: Iterable[Tensor] = (),
    first: Mapping[str, Expression] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the output, in order, with its name there.

    Args:
        stored: the tensors of the checkpoint, under the names of its text model.
        rules: of the architecture.
        context: what the rules know.
        extra: tensors that are not stored, which come before.
        first: tensors that come before all others.

    Raises:
        FormatError: a tensor has no name in a file, or was held back and never came out.
    """
    seen: set[str] = set()
    early, given = ([Tensor(name, x, layer_of(name)) for name, x in of.items()] for of in (first or {}, stored))
    for original in (*early, *extra, *given):
        if original.name.endswith(_BUFFERS):
            continue
        for tensor in applied(rules, original, context):
            name = tensor.name_in_file or context.names.find(tensor.name)
            if name is None:
                raise context.fail(tensor, "this architecture has no such tensor; nothing is left out silently")
            if name in seen:
                raise context.fail(tensor, f"{name} is there twice")
            seen.add(name)
            yield name, tensor
    left = [tensor for held in context.held.values() for tensor in held.values()]
    if left:
        raise context.fail(left[0], f"{len(left)} tensors wait for others of their layer, which are missing")


def applied(rules: Sequence[Rule], tensor: Tensor, context: Context) -> list[Tensor]:
    """Return what rules, one after another, make of a tensor."""
    tensors = [tensor]
    for rule in rules:
        found = [(t, rule(t, context)) for t in tensors]
        tensors = [new for t, made in found for new in ((t,) if made is None else made)]
    return tensors

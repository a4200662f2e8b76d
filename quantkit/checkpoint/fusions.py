"""Fused tensors of a file: gate and up of experts; queries, keys and values.

The options --fuse-gate-up-exps and --fuse-qkv of convert_hf_to_gguf.py (b11434, ModelBase.modify_tensors): a fused
tensor takes the place of the last of its parts. ``split_tensors`` is the inverse, for export.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, concatenate, take
from quantkit.checkpoint.tensor_names import TensorNames, file_name
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf.rules import short

NamedTensor = tuple[str, Tensor]
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Fusion:
    """Tensors of the kinds ``parts`` in one layer, concatenated along ``axis`` to one of the kind ``fused``."""

    option: str
    parts: tuple[str, ...]
    fused: str
    axis: int
    #: Only in layers that have all parts; otherwise it is an error.
    where_complete: bool = False


FUSIONS = (
    Fusion("--fuse-gate-up-exps", ("*ffn_gate_exps", "*ffn_up_exps"), "*ffn_gate_up_exps", 1),
    Fusion("--fuse-qkv", ("*attn_q", "*attn_k", "*attn_v"), "*attn_qkv", 0, where_complete=True),
)


@dataclass
class _Layers:
    """The parts of one fusion so far, by layer and suffix."""

    fusion: Fusion
    #: The names of the parts that may be fused; None: all.
    allowed: Collection[str] | None
    waiting: dict[tuple[int, str], dict[str, Tensor]] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, context: Context) -> Iterator[NamedTensor]:
        place = self._place(name, tensor)
        if place is None:
            yield name, tensor
            return
        layer, kind, suffix = place
        parts_of_layer = self.waiting.setdefault((layer, suffix), {})
        parts_of_layer[kind] = tensor
        if len(parts_of_layer) < len(self.fusion.parts):
            return
        parts = [self.waiting[layer, suffix][kind].x for kind in self.fusion.parts]
        del self.waiting[layer, suffix]
        axis = self.fusion.axis
        shapes = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in parts}
        if len(shapes) > 1 or len(parts[0].shape) <= axis:
            shape_texts = ", ".join(str(list(x.shape)) for x in parts)
            raise context.fail(tensor, f"{self.fusion.option}: the shapes {shape_texts} do not match", "QK-E211")
        yield (
            file_name(self.fusion.fused, layer) + suffix,
            replace(tensor, x=concatenate(parts, axis)),
        )

    def _place(self, name: str, tensor: Tensor) -> tuple[int, str, str] | None:
        """Return layer, kind and suffix of a tensor that is one of the parts."""
        match = _LAYER.match(name)
        if match is None or tensor.layer is None or (self.allowed is not None and name not in self.allowed):
            return None
        layer = int(match[1])
        stem, dot, suffix = name.rpartition(".")
        if self.allowed is None and suffix != "weight":
            return None
        kind = next((kind for kind in self.fusion.parts if stem == file_name(kind, layer)), None)
        return None if kind is None else (layer, kind, dot + suffix)


def fuse_tensors(
    tensors: Iterable[NamedTensor], options: Collection[str], stored: Iterable[str], context: Context
) -> Iterator[NamedTensor]:
    """Yield the tensors of a file, with those of ``options`` fused.

    Args:
        tensors: names in the file and tensors, in order.
        options: of FUSIONS.
        stored: the names of the stored tensors: only layers with separate queries, keys and values are fused.
        context: of the conversion.

    Raises:
        RecipeError: the architecture has no such tensor.
        FormatError: a part is missing.
    """
    names = context.names
    fusions = [f for f in FUSIONS if f.option in options]
    for fusion in fusions:
        if fusion.fused not in names.kinds:
            raise RecipeError(
                f"{context.config.path}: {names.arch} has no {fusion.fused[1:]}: omit {fusion.option}", "QK-E211"
            )
    layers = [_Layers(f, _complete_names(f, names, stored) if f.where_complete else None) for f in fusions]
    for item in tensors:
        items = [item]
        for layer in layers:
            items = [new for name, tensor in items for new in layer.add(name, tensor, context)]
        yield from items
    for layer in layers:
        for waiting in layer.waiting.values():
            raise context.fail(
                next(iter(waiting.values())),
                f"{layer.fusion.option}: the other tensors of its layer are missing",
                "QK-E211",
            )


def _complete_names(fusion: Fusion, names: TensorNames, stored: Iterable[str]) -> set[str]:
    """Return the names of the parts in layers that have them all; their biases, where there are all or none."""
    stored_names = {name for name in map(names.find, stored) if name is not None}
    complete: set[str] = set()
    for layer in range(names.layers):
        weights, biases = ({file_name(kind, layer) + end for kind in fusion.parts} for end in (".weight", ".bias"))
        if stored_names.issuperset(weights) and len(stored_names & biases) in (0, len(biases)):
            complete |= weights | (stored_names & biases)
    return complete


def split_tensors(
    parts: Mapping[str, Expression], kinds: Mapping[str, str], class_names: str, config: Config
) -> tuple[dict[str, Expression], list[str]]:
    """Return a file's tensors with fused ones split, and the options that fuse them again.

    Args:
        parts: tensors by their names in the file.
        kinds: names in a checkpoint of the architecture's kinds of tensors.
        class_names: names in a checkpoint of tensors that the class also fuses.
        config: of the checkpoint.
    """
    tensors: dict[str, Expression] = {}
    options = []
    split_fusions = [f for f in FUSIONS if f.fused in kinds and kinds[f.fused] not in class_names.split()]
    for name, x in parts.items():
        stem, dot, suffix = name.rpartition(".")
        match = re.match(r"blk\.(\d+)\.", name)
        layer = int(match[1]) if match else -1
        fusion = next((f for f in split_fusions if match and stem == file_name(f.fused, layer)), None)
        if fusion is None:
            tensors[name] = x
            continue
        options.append(fusion.option)
        start = 0
        for kind, size in zip(fusion.parts, _part_sizes(fusion, name, x, config), strict=True):
            tensors[f"{file_name(kind, layer)}{dot}{suffix}"] = take(x, fusion.axis, range(start, start + size))
            start += size
    return tensors, list(dict.fromkeys(options))


def _part_sizes(fusion: Fusion, name: str, x: Expression, config: Config) -> list[int]:
    have = x.shape[fusion.axis] if len(x.shape) > fusion.axis else 0
    n = len(fusion.parts)
    sizes = [have // n] * n
    if fusion.option == "--fuse-qkv":
        heads = (config.number("num_attention_heads"), *[config.number("num_key_value_heads")] * 2)
        sizes = [head * config.head_dim for head in heads]
    if sum(sizes) != have or not have:
        raise FormatError(
            f"{config.path.parent}: tensor {short(name)}: {list(x.shape)} cannot be split into {sizes}", "QK-E106"
        )
    return sizes

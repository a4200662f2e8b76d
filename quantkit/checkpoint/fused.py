"""Tensors of a file that become one: gate and up of experts, queries, keys and values.

The options --fuse-gate-up-exps and --fuse-qkv of convert_hf_to_gguf.py (b11434, ModelBase.modify_tensors): what is
fused comes where the last of its parts was.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from quantkit.checkpoint.expressions import joined
from quantkit.checkpoint.tensor_names import TensorNames, file_name
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.errors import RecipeError

Named = tuple[str, Tensor]
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Fusion:
    """Tensors of the kinds ``parts`` in one layer become one of the kind ``whole``, along ``axis``."""

    option: str
    parts: tuple[str, ...]
    whole: str
    axis: int
    #: Only in layers that have all parts; others are an error.
    where_complete: bool = False


FUSIONS = (
    Fusion("--fuse-gate-up-exps", ("*ffn_gate_exps", "*ffn_up_exps"), "*ffn_gate_up_exps", 1),
    Fusion("--fuse-qkv", ("*attn_q", "*attn_k", "*attn_v"), "*attn_qkv", 0, where_complete=True),
)


@dataclass
class _Layers:
    """The parts of one fusion that came already, by layer and suffix."""

    fusion: Fusion
    #: The names of parts that may be fused; None: all.
    allowed: Collection[str] | None
    held: dict[tuple[int, str], dict[str, Tensor]] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, context: Context) -> Iterator[Named]:
        place = self._place(name, tensor)
        if place is None:
            yield name, tensor
            return
        layer, kind, suffix = place
        here = self.held.setdefault((layer, suffix), {})
        here[kind] = tensor
        if len(here) < len(self.fusion.parts):
            return
        parts = [self.held[layer, suffix][kind].x for kind in self.fusion.parts]
        del self.held[layer, suffix]
        axis = self.fusion.axis
        shapes = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in parts}
        if len(shapes) > 1 or len(parts[0].shape) <= axis:
            shown = ", ".join(str(list(x.shape)) for x in parts)
            raise context.fail(tensor, f"{self.fusion.option}: the shapes {shown} do not fit")
        yield (
            file_name(self.fusion.whole, layer) + suffix,
            replace(tensor, x=joined(parts, axis)),
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


def fused(
    tensors: Iterable[Named], options: Collection[str], stored: Iterable[str], context: Context
) -> Iterator[Named]:
    """Yield the tensors of a file with those that ``options`` name fused.

    Args:
        tensors: names in the file and tensors, in order.
        options: of FUSIONS.
        stored: the names of the stored tensors: only layers that have queries, keys and values apart are fused.
        context: of the conversion.

    Raises:
        RecipeError: the architecture has no such tensor.
        FormatError: a part never came.
    """
    names = context.names
    chosen = [f for f in FUSIONS if f.option in options]
    for fusion in chosen:
        if fusion.whole not in names.kinds:
            raise RecipeError(
                f"{context.config.path}: {names.arch} has no {fusion.whole[1:]}: leave {fusion.option} away"
            )
    layers = [_Layers(f, _complete(f, names, stored) if f.where_complete else None) for f in chosen]
    for item in tensors:
        items = [item]
        for each in layers:
            items = [new for name, tensor in items for new in each.add(name, tensor, context)]
        yield from items
    for each in layers:
        for held in each.held.values():
            raise context.fail(next(iter(held.values())), f"{each.fusion.option}: the others of its layer are missing")


def _complete(fusion: Fusion, names: TensorNames, stored: Iterable[str]) -> set[str]:
    """Return the names of the parts in layers that have them all; their biases, where there are all or none."""
    known = {name for name in map(names.find, stored) if name is not None}
    complete: set[str] = set()
    for layer in range(names.layers):
        weights, biases = ({file_name(kind, layer) + end for kind in fusion.parts} for end in (".weight", ".bias"))
        if known.issuperset(weights) and len(known & biases) in (0, len(biases)):
            complete |= weights | (known & biases)
    return complete

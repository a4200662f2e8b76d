"""The weights of a model by place: layers, their experts, what stays in memory, and the output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

#: Tensors that llama.cpp keeps on the CPU: it looks up rows.
_INPUTS = frozenset({"token_embd", "position_embd", "token_types", "per_layer_token_embd"})
#: Tensors outside layers that llama.cpp places with the first layer.
_FIRST_LAYER = ("token_embd_norm", "rope_freqs", "rope_factors", "per_layer_model_proj", "per_layer_proj_norm")
_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
#: The tensors of llama.cpp's -ncmoe.
_EXPERTS = re.compile(r"ffn_(up|down|gate|gate_up)_(ch|)exps")


class Part(Enum):
    """The part of a model that llama.cpp places as a whole."""

    DENSE, EXPERTS, INPUTS, OUTPUT, UNLOADED = range(5)


@dataclass(frozen=True)
class Weights:
    """Bytes of weights by place."""

    #: Of each layer: all but routed experts.
    dense: tuple[int, ...]
    experts: tuple[int, ...]
    #: Embeddings, always in memory.
    inputs: int
    output: int
    #: Bytes that the output needs besides on a GPU, because it is the embeddings; 0 if it has a tensor.
    tied: int
    #: Prediction layers, which llama.cpp loads only to draft.
    unloaded: int
    #: Bytes by name.
    tensors: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all loaded tensors."""
        return sum(self.dense) + sum(self.experts) + self.inputs + self.output

    @property
    def n_layer(self) -> int:
        return len(self.dense)

    @property
    def has_experts(self) -> bool:
        return any(self.experts)


def part_of(name: str, n_layer: int) -> tuple[Part, int]:
    """Return the part of a tensor, and its layer, which matters only to the first two."""
    match = _LAYER.match(name)
    if match and int(match[1]) >= n_layer:
        return Part.UNLOADED, 0
    if match:
        return (Part.EXPERTS if _EXPERTS.match(match[2]) else Part.DENSE), int(match[1])
    if name.partition(".")[0] in _INPUTS:
        return Part.INPUTS, 0
    return (Part.DENSE if name.startswith(_FIRST_LAYER) and n_layer else Part.OUTPUT), 0


def weights_of(sizes: Iterable[tuple[str, int]], n_layer: int) -> Weights:
    """Return the weights of a model from the names and bytes of its tensors."""
    tensors = dict(sizes)
    dense, experts = [0] * n_layer, [0] * n_layer
    sums = dict.fromkeys((Part.INPUTS, Part.OUTPUT, Part.UNLOADED), 0)
    for name, nbytes in tensors.items():
        part, layer = part_of(name, n_layer)
        if part in sums:
            sums[part] += nbytes
        else:
            (experts if part is Part.EXPERTS else dense)[layer] += nbytes
    tied = 0 if "output.weight" in tensors else tensors.get("token_embd.weight", 0)
    inputs, output, unloaded = sums.values()
    return Weights(tuple(dense), tuple(experts), inputs, output, tied, unloaded, tensors)


def is_expert(name: str, n_layers: int) -> bool:
    """Return whether a tensor has routed experts of one of the first layers."""
    match = _LAYER.match(name)
    return bool(match and int(match[1]) < n_layers and _EXPERTS.match(match[2]))

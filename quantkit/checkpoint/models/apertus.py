"""Apertus.

Facts of llama.cpp b11434, conversion/llama.py (ApertusModel).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata, plain
from quantkit.checkpoint.expressions import Constant, Shaped, read_f32, size_of
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import LAYER, Architecture, HfClass
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.errors import TypeNotSupported

_XIELU = ("alpha_n", "alpha_p", "beta", "eps")


@dataclass(frozen=True)
class ReadActivations(OneWayRule):
    """Store the xIELU parameters of each layer in the configuration, from which they become metadata."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(r"\.act_fn\.(\w+)$", tensor.name)
        if match is None or match[1] not in _XIELU or tensor.layer is None:
            return None
        if size_of(tensor.x) != 1:
            raise context.fail(tensor, "a parameter of more than one value")
        context.config.values.setdefault(f"xielu_{match[1]}", {})[tensor.layer] = float(read_f32(tensor.x, 0, 1)[0])
        return ()


def set_activations(keys: Keys, config: Config) -> None:
    """Set the parameters of xIELU, those that all layers have."""
    for name in _XIELU:
        values = config.get(f"xielu_{name}") or {}
        if len(values) == config.layers:
            keys.array(f"xielu.{name}", [values[layer] for layer in sorted(values)])


ARCHITECTURES: dict[str, Architecture] = {
    "ApertusForCausalLM": Architecture(
        "apertus",
        rules=(ReadActivations(),),
        keys=llama.LLAMA_KEYS,
        vocab=llama.write_llama,
        head_keys=(set_activations,),
        synthetic=llama.rope_factors,
    ),
}


def make_activations(meta: ModelMetadata) -> Iterable[Tensor]:
    """Restore the tensors of each layer's xIELU parameters (Apertus)."""
    for name, shape in (("alpha_n", (1,)), ("alpha_p", (1,)), ("beta", ()), ("eps", ())):
        field = meta.model.get(f"xielu.{name}")
        values = [] if field is None else list(plain(field))
        if len(values) != meta.number(".block_count"):
            raise TypeNotSupported(f"{meta.path}: xielu.{name} of each layer is missing", "QK-E305")
        for layer, value in enumerate(values):
            x = Shaped(Constant((float(value),)), shape)
            yield Tensor(f"model.layers.{layer}.mlp.act_fn.{name}", x, layer)


CLASSES: dict[str, HfClass] = {
    "ApertusForCausalLM": HfClass(
        "apertus",
        f"{LAYER}attention_layernorm {LAYER}feedforward_layernorm",
        synthetic=make_activations,
    ),
}

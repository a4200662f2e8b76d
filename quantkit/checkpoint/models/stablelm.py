"""StableLM.

Facts of llama.cpp b11434, conversion/stablelm.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Shaped, stack, take
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor


@dataclass(frozen=True)
class StackHeadNorms(Rule):
    """Stack the norms of single heads into one tensor, one row a head.

    convert_hf_to_gguf.py means to do that and drops them: it converts no StableLM that has them (2-12B).
    """

    pattern: str = r"(self_attn\.[qk]_layernorm)\.norms\.(\d{1,6})\.weight$"

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None:
            return None
        name = tensor.name[: match.end(1)] + ".weight"
        of_keys = match[1].endswith("k_layernorm")
        n = context.config.number("num_key_value_heads" if of_keys else "num_attention_heads")
        norms_by_head = context.waiting.setdefault((id(self), (tensor.layer or 0) * 2 + of_keys), {})
        norms_by_head[match[2]] = tensor
        if len(norms_by_head) < n:
            return ()
        missing = next((i for i in range(n) if str(i) not in norms_by_head), None)
        if missing is not None:
            raise context.fail(tensor, f"there are {n} heads, but the norm of head {missing} is missing")
        norms = [norms_by_head.pop(str(i)) for i in range(n)]
        if len({norm.x.shape for norm in norms}) > 1:
            raise context.fail(tensor, "the norms of the heads are not of one shape")
        return (replace(tensor, name=name, x=stack([norm.x for norm in norms])),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        match = re.search(r"self_attn\.[qk]_layernorm(?=\.weight$)", tensor.name)
        if match is None:
            return None
        heads, width = tensor.x.shape
        return [
            replace(
                tensor,
                name=f"{tensor.name[: match.end()]}.norms.{head}.weight",
                x=Shaped(take(tensor.x, 0, range(head, head + 1)), (width,)),
            )
            for head in range(heads)
        ]


def set_stablelm_keys(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of StableLM, in the converter's order."""
    heads = config.number("num_attention_heads")
    keys.u32(".context_length", config["max_position_embeddings"])
    keys.u32(".embedding_length", config["hidden_size"])
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    part = config.rotary_part(0.25)
    keys.u32(".rope.dimension_count", int(part * (config.number("hidden_size") // max(1, heads))))
    keys.u32(".attention.head_count", heads)
    keys.u32(".attention.head_count_kv", config["num_key_value_heads"])
    keys.flag(".use_parallel_residual", config.get("use_parallel_residual", True))
    keys.f32(".attention.layer_norm_epsilon", config.find("layer_norm_eps", "norm_eps"))
    keys.u32("general.file_type", file_type)


_STABLELM = Architecture("stablelm", rules=(StackHeadNorms(),), base=set_stablelm_keys)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "StableLmForCausalLM": _STABLELM,
    "StableLMEpochForCausalLM": _STABLELM,
    "LlavaStableLMEpochForCausalLM": _STABLELM,
}


@dataclass(frozen=True)
class SetFlag:
    """Set ``name`` of config.json to whether the model, or its first layer, has such a tensor."""

    name: str
    tensor: str

    def __call__(self, meta: ModelMetadata, config: Json) -> None:
        config[self.name] = meta.has(self.tensor)


#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "StableLmForCausalLM": HfClass(
        "stablelm",
        "model.layers.*.self_attn.q_layernorm model.layers.*.self_attn.k_layernorm",
        config_setters=(
            config_values.set_rotary_part,
            SetFlag("qk_layernorm", "attn_q_norm.weight"),
        ),
    ),
}

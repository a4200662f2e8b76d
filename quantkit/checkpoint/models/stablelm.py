"""StableLM.

Facts of llama.cpp b11434, conversion/stablelm.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Shaped, stack, take
from quantkit.checkpoint.key_rows import BLOCK_COUNT, FILE_TYPE, Copied, SetKeys, divided_head_dim, rotary_width
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor


@dataclass(frozen=True)
class StackHeadNorms(Rule):
    """Stack the norms of single heads into one tensor, one row per head.

    convert_hf_to_gguf.py drops them by mistake, so it cannot convert a StableLM that has them (2-12B).
    """

    pattern: str = r"(self_attn\.[qk]_layernorm)\.norms\.(\d{1,6})\.weight$"

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None:
            return None
        name = tensor.name[: match.end(1)] + ".weight"
        of_keys = match[1].endswith("k_layernorm")
        n = context.config.number("num_key_value_heads" if of_keys else "num_attention_heads")
        norms_by_head = context.gather(self, name, match[2], tensor, n)
        if norms_by_head is None:
            return ()
        missing = next((i for i in range(n) if str(i) not in norms_by_head), None)
        if missing is not None:
            raise context.fail(tensor, f"there are {n} heads, but the norm of head {missing} is missing")
        norms = [norms_by_head[str(i)] for i in range(n)]
        if len({norm.x.shape for norm in norms}) > 1:
            raise context.fail(tensor, "the norms of the heads differ in shape")
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


STABLELM_BASE: tuple[SetKeys, ...] = (
    Copied(".context_length", "max_position_embeddings", required=True),
    Copied(".embedding_length", "hidden_size", required=True),
    BLOCK_COUNT,
    Copied(".feed_forward_length", "intermediate_size", required=True),
    rotary_width(0.25, divided_head_dim),
    Copied(".attention.head_count", "num_attention_heads", required=True),
    Copied(".attention.head_count_kv", "num_key_value_heads", required=True),
    Copied(".use_parallel_residual", "use_parallel_residual", "flag", default=True),
    Copied(".attention.layer_norm_epsilon", "layer_norm_eps norm_eps", "f32", required=True),
    FILE_TYPE,
)
_STABLELM = Architecture("stablelm", rules=(StackHeadNorms(),), base=STABLELM_BASE)

ARCHITECTURES: dict[str, Architecture] = {
    "StableLmForCausalLM": _STABLELM,
    "StableLMEpochForCausalLM": _STABLELM,
    "LlavaStableLMEpochForCausalLM": _STABLELM,
}


def _set_head_norms(meta: ModelMetadata, config: Json) -> None:
    """Set whether queries and keys are normalized."""
    config["qk_layernorm"] = meta.has("attn_q_norm.weight")


CLASSES: dict[str, HfClass] = {
    "StableLmForCausalLM": HfClass(
        "stablelm",
        "model.layers.*.self_attn.q_layernorm model.layers.*.self_attn.k_layernorm",
        config_setters=(_set_head_norms,),
    ),
}

"""GroveMoE.

Facts of llama.cpp b11434, conversion/grovemoe.py.
"""

from __future__ import annotations

from quantkit.checkpoint.row import Always, Architecture, Copied, HfClass, SetKeys
from quantkit.checkpoint.rules import Drop, StackExperts

_EXPERT_WIDTH = Copied(".expert_feed_forward_length", "moe_intermediate_size")

#: GroveMoE: experts of Qwen 3 in pairs, each pair with a narrow one of its own. Constants of its modeling file.
GROVE_KEYS: tuple[SetKeys, ...] = (
    lambda keys, config: keys.u32(".expert_chunk_feed_forward_length", config.get("head_dim") or 128),
    Always(".experts_per_group", 2),
    Always(".expert_group_scale", 0.05, "f32"),
)

_GROVE_MOE = Architecture(
    "grovemoe",
    rules=(
        Drop(r"\.expert_bias$"),
        StackExperts(
            name="model.layers.{layer}.mlp.chunk_experts.{expert}.{weight}.weight",
            merged="model.layers.{layer}.mlp.chunk_experts.{weight}.weight",
            marked=r"chunk_experts\.\d+\.",
            shared=2,
        ),
        StackExperts(),
    ),
    keys=(_EXPERT_WIDTH, *GROVE_KEYS),
)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "GroveMoeForCausalLM": _GROVE_MOE,
    "modeling_grove_moe.GroveMoeForCausalLM": _GROVE_MOE,
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "GroveMoeForCausalLM": HfClass(
        "grove_moe", keys={".expert_count": "num_experts"}, defaults={"norm_topk_prob": True}
    ),
}

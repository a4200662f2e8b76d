"""More rows of the table of architectures: classes that are converted, and not run by model/.

Facts of llama.cpp b11434, conversion/*.py; see architectures.py, which has the others.
"""

from __future__ import annotations

from quantkit.checkpoint.families import bailing, cohere, deepseek, glm, hunyuan, others, qwen
from quantkit.checkpoint.families.llama import LLAMA_KEYS, ROPE_PERMUTED, rope_factors, set_rope_width
from quantkit.checkpoint.families.others import exaone4_rope
from quantkit.checkpoint.row import Architecture, Copied
from quantkit.checkpoint.tensors import Dropped, Experts, Renamed

#: A bias of the router is stored without an ending.
_ROUTER_BIAS = Renamed(r"\.expert_bias$", ".expert_bias.bias")
#: Of the order in which LlamaModel's children have them.
_GATE_FIRST = Experts(weights=("gate_proj", "up_proj", "down_proj"))
_EXPERT_WIDTH = Copied(".expert_feed_forward_length", "moe_intermediate_size")

_EXAONE_MOE = Architecture(
    "exaone-moe",
    rules=(others.LayersBehind(), Experts()),
    keys=(*others.EXAONE4_KEYS, *others.EXAONE_MOE_KEYS),
    layers=deepseek.all_layers,
    extra=exaone4_rope,
)
_GROVE_MOE = Architecture(
    "grovemoe",
    rules=(
        Dropped(r"\.expert_bias$"),
        Experts(
            name="model.layers.{layer}.mlp.chunk_experts.{expert}.{weight}.weight",
            merged="model.layers.{layer}.mlp.chunk_experts.{weight}.weight",
            marked=r"chunk_experts\.\d+\.",
            shared=2,
        ),
        Experts(),
    ),
    keys=(_EXPERT_WIDTH, *qwen.GROVE_KEYS),
)

#: Class of transformers -> how it is converted.
NAMED: dict[str, Architecture] = {
    "DeepseekForCausalLM": Architecture(
        "deepseek", rules=(*ROPE_PERMUTED, Experts()), keys=deepseek.FIRST_KEYS, vocab="sentencepiece or bpe"
    ),
    "BailingMoeForCausalLM": Architecture(
        "bailingmoe",
        rules=(bailing.QUERY_KEY_VALUE, *ROPE_PERMUTED, Experts()),
        keys=(set_rope_width, *bailing.FIRST_KEYS),
        prepare=bailing.refuse_normed_head,
    ),
    "Cohere2MoeForCausalLM": Architecture(
        "cohere2moe", rules=(cohere.NoBias(), Experts()), keys=cohere.COHERE2_MOE_KEYS, layers=deepseek.all_layers
    ),
    **dict.fromkeys(("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"), _EXAONE_MOE),
    **dict.fromkeys(("GroveMoeForCausalLM", "modeling_grove_moe.GroveMoeForCausalLM"), _GROVE_MOE),
    "AfmoeForCausalLM": Architecture(
        "afmoe",
        stored=(_ROUTER_BIAS,),
        rules=(_GATE_FIRST,),
        keys=(
            *LLAMA_KEYS,
            Copied(".expert_shared_count", "num_shared_experts"),
            _EXPERT_WIDTH,
            Copied(".leading_dense_block_count", "num_dense_layers"),
            Copied(".expert_weights_norm", "route_norm", "flag"),
            Copied(".expert_weights_scale", "route_scale", "f32"),
            Copied(".attention.sliding_window", "sliding_window"),
        ),
        vocab="llama",
        extra=rope_factors,
    ),
    "HYV3ForCausalLM": Architecture(
        "hy_v3",
        stored=(Renamed(r"(\.layers\.\d+)\.final_layernorm\.", r"\1.shared_head.norm."),),
        rules=(Experts(),),
        keys=(*hunyuan.V3_KEYS, glm.set_predicting_layers),
        layers=deepseek.all_layers,
        nextn=True,
    ),
    "SmallThinkerForCausalLM": Architecture(
        "smallthinker",
        rules=(
            Experts(
                weights=("down", "gate", "up"),
                name="model.layers.{layer}.block_sparse_moe.experts.{expert}.{weight}.weight",
                merged="model.layers.{layer}.block_sparse_moe.experts.{weight}.weight",
            ),
        ),
        keys=others.SMALL_THINKER_KEYS,
    ),
}

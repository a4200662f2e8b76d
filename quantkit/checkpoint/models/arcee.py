"""Arcee's AFM: dense, and a mixture of experts (Trinity).

Facts of llama.cpp b11434, conversion/llama.py (ArceeModel), conversion/afmoe.py.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.key_rows import Copied
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.pooling import set_pooling
from quantkit.checkpoint.row import LAYER, Architecture, HfClass
from quantkit.checkpoint.rules import ROUTER_BIAS, STACK_GATE_FIRST

_EXPERT_WIDTH = Copied(".expert_feed_forward_length", "moe_intermediate_size")

ARCHITECTURES: dict[str, Architecture] = {
    "ArceeForCausalLM": replace(llama.LLAMA, arch="arcee", keys=(*llama.LLAMA_KEYS, set_pooling)),
    "AfmoeForCausalLM": Architecture(
        "afmoe",
        stored=(ROUTER_BIAS,),
        rules=(STACK_GATE_FIRST,),
        keys=(
            *llama.LLAMA_KEYS,
            Copied(".expert_shared_count", "num_shared_experts"),
            _EXPERT_WIDTH,
            Copied(".leading_dense_block_count", "num_dense_layers"),
            Copied(".expert_weights_norm", "route_norm", "flag"),
            Copied(".expert_weights_scale", "route_scale", "f32"),
            Copied(".attention.sliding_window", "sliding_window"),
        ),
        vocab=llama.write_llama,
        synthetic=llama.rope_factors,
    ),
}

CLASSES: dict[str, HfClass] = {
    "ArceeForCausalLM": HfClass("arcee"),
    "AfmoeForCausalLM": HfClass(
        "afmoe",
        f"{LAYER}post_mlp_layernorm {LAYER}pre_mlp_layernorm {LAYER}mlp.expert_bias {LAYER}mlp.router.gate",
        keys={".expert_count": "num_experts", ".expert_gating_func": "score_func"},
        # llama.cpp scales embeddings, and has windows except in every fourth layer.
        defaults={"mup_enabled": True, "global_attn_every_n_layers": 4},
        config_setters=(config_values.SetEveryFourthFull(last=True), config_values.set_rope_parameters),
    ),
}

"""Spark 2.5.

Facts of llama.cpp b11434, conversion/spark2_5.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import LAYER, Architecture, HfClass
from quantkit.checkpoint.rules import Rename
from quantkit.errors import FormatError


def set_spark(keys: Keys, config: Config) -> None:
    """Set the windows of Spark 2.5, and the rotary widths of heads in layers with and without a window."""
    gate = config.get("gate_attn_act_mode"), config.get("headwise_attn_output_gate"), config.get("hidden_act")
    kinds = config["layer_types"]
    if gate != ("sigmoid", True, "gelu") or len(kinds) != config.layers:
        raise FormatError(
            f"{config.path}: gates, activation or layer_types are not those that llama.cpp runs", "QK-E305"
        )
    keys.u32(".vocab_size", config["vocab_size"])
    keys.u32(".attention.sliding_window", config["sliding_window"])
    keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds])
    for key, layer_kind in (("", "full_attention"), ("_swa", "sliding_attention")):
        part = config.rotary_part(None, rope=config.rope[layer_kind])
        keys.u32(f".rope.dimension_count{key}", int(config.number("head_dim") * part))


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "Spark2_5ForCausalLM": Architecture(
        "spark2_5", rules=(Rename(r"\.self_attn\.q_k_v_proj\.", ".self_attn.qkv_proj."),), keys=(set_spark,)
    ),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "Spark2_5ForCausalLM": HfClass(
        "spark2_5",
        f"{LAYER}self_attn.g_proj {LAYER}self_attn.qkv_proj",
        defaults={"gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True, "hidden_act": "gelu"},
        config_setters=(config_values.set_layer_types, config_values.set_two_ropes),
    ),
}

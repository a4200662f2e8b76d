"""Mellum.

Facts of llama.cpp b11434, conversion/mellum.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, Copied, HfClass
from quantkit.checkpoint.rules import StackExperts

_EXPERT_WIDTH = Copied(".expert_feed_forward_length", "moe_intermediate_size")


def set_mellum_window(keys: Keys, config: Config) -> None:
    """Set the window of Mellum, unless it is not used, and which layers have it."""
    used, window = config.get("use_sliding_window"), config.get("sliding_window")
    if used in (True, None) and window is not None:
        keys.u32(".attention.sliding_window", window)
        kinds = config["layer_types"]
        keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds])


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "MellumForCausalLM": Architecture("mellum", rules=(StackExperts(),), keys=(_EXPERT_WIDTH, set_mellum_window)),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "MellumForCausalLM": HfClass(
        "mellum",
        defaults={"norm_topk_prob": True},
        config_setters=(config_values.set_layer_types, config_values.set_mlp_layer_types, config_values.set_two_ropes),
    ),
}

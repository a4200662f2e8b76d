"""Maple.

Facts of llama.cpp b11434, conversion/maple.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass, SetKeys
from quantkit.checkpoint.rules import StackExperts
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

_REQUIRED = {"hidden_act": "silu", "num_shared_experts": 0, "norm_topk_prob": True, "nope_on_global_attention": True}


def _set_maple(keys: Keys, config: Config) -> None:
    for key, value in _REQUIRED.items():
        if bool(config.get(key, key == "norm_topk_prob")) != bool(value) or (value == "silu" != config.get(key)):
            raise FormatError(f"{config.path}: {key} is {short(config.get(key))}; only {value} is known", "QK-E305")
    keys.u32(".vocab_size", config["vocab_size"])
    keys.u32(".rope.dimension_count", int(config.head_dim * config.rotary_part(1.0)))
    keys.u32(".attention.sliding_window", config["sliding_window"])
    keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in config["layer_types"]])
    keys.u32(".expert_feed_forward_length", config["moe_intermediate_size"])
    keys.array(".swiglu_clamp_exp", [7.0] * config.layers)  # a constant of its modeling file


MAPLE_KEYS: tuple[SetKeys, ...] = (_set_maple,)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "MapleForCausalLM": Architecture("maple", rules=(StackExperts(),), keys=MAPLE_KEYS),
}

_MAPLE_CLASS = HfClass(
    "maple",
    keys={".expert_count": "num_experts", ".swiglu_clamp_exp": ""},
    # What llama.cpp has in its code.
    defaults={
        "hidden_act": "silu",
        "num_shared_experts": 0,
        "norm_topk_prob": True,
        "nope_on_global_attention": True,
    },
    config_setters=(config_values.set_layer_types, config_values.set_rotary_part),
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "MapleForCausalLM": _MAPLE_CLASS,
}

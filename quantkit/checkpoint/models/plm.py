"""PLM.

Facts of llama.cpp b11434, conversion/plm.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass


def set_plm_heads(keys: Keys, config: Config) -> None:
    """Set the widths of PLM's latent and heads."""
    rope = config.number("qk_rope_head_dim")
    keys.u32(".vocab_size", config["vocab_size"])
    keys.u32(".attention.kv_lora_rank", config["kv_lora_rank"])
    keys.u32(".attention.key_length", config.number("qk_nope_head_dim") + rope)
    keys.u32(".attention.value_length", config["v_head_dim"])
    keys.u32(".rope.dimension_count", rope)


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "PLMForCausalLM": Architecture("plm", keys=(set_plm_heads,)),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "PLMForCausalLM": HfClass("plm", config_setters=(config_values.set_merged_latent_widths,)),
}

"""OLMo 1 to 3 and OLMoE.

Facts of llama.cpp b11434, conversion/olmo.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import Architecture, Copied, HfClass, has_key
from quantkit.checkpoint.rules import StackExperts


def set_olmo_norms(keys: Keys, config: Config) -> None:
    """The norms of the first OLMo have no weights, but an epsilon."""
    keys.f32(".attention.layer_norm_epsilon", 1e-5)
    Copied(".attention.clamp_kqv", "clip_qkv", "f32")(keys, config)


def set_window_pattern(keys: Keys, config: Config) -> None:
    """Set the window of OLMo 3 and its layers: by default all but every fourth.

    A window of null is none, as of OLMo 2; convert_hf_to_gguf.py stops there.
    """
    if config.get("sliding_window") is None:
        return
    keys.u32(".attention.sliding_window", config["sliding_window"])
    kinds = config.get("layer_types")
    slides = [(i + 1) % 4 != 0 for i in range(config.layers)]
    if isinstance(kinds, list):
        slides = [kind == "sliding_attention" for kind in kinds]
    keys.array(".attention.sliding_window_pattern", slides)


def set_epsilon(keys: Keys, config: Config) -> None:
    """Set OLMoE's constant epsilon: its norms ignore the configuration's."""
    keys.f32(".attention.layer_norm_rms_epsilon", 1e-5)


_OLMO = Architecture("olmo", rules=llama.ROPE_PERMUTED, keys=(set_olmo_norms,))
_OLMO2 = Architecture("olmo2", keys=(set_window_pattern,))

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "OlmoForCausalLM": _OLMO,
    "OLMoForCausalLM": _OLMO,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO2,
    "OlmoeForCausalLM": Architecture("olmoe", rules=(StackExperts(),), keys=(set_epsilon,)),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "OlmoForCausalLM": HfClass("olmo"),
    "Olmo3ForCausalLM": HfClass(
        "olmo3", config_setters=(config_values.set_layer_types,), matches=has_key("attention.sliding_window")
    ),
    "Olmo2ForCausalLM": HfClass("olmo2"),
    "OlmoeForCausalLM": HfClass("olmoe", defaults={"norm_topk_prob": False}),
}

"""OLMo 1 to 3 and OLMoE.

Facts of llama.cpp b11434, conversion/olmo.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.key_rows import Always, Computed, Copied, SetKeys, set_layer_types
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import Architecture, HfClass, has_key
from quantkit.checkpoint.rules import StackExperts


def _slides(config: Config) -> list[bool] | None:
    """Return which layers of OLMo 3 have a window: by default all but every fourth.

    null means no window, as in OLMo 2; convert_hf_to_gguf.py fails on it.
    """
    kinds = config.get("layer_types")
    if config.get("sliding_window") is None:
        return None
    if isinstance(kinds, list):
        return [kind == "sliding_attention" for kind in kinds]
    return [(i + 1) % 4 != 0 for i in range(config.layers)]


#: The norms of the first OLMo have no weights, but an epsilon; those of OLMoE ignore the configured epsilon.
_OLMO_KEYS: tuple[SetKeys, ...] = (
    Always(".attention.layer_norm_epsilon", 1e-5, "f32", "layer_norm_eps"),
    Copied(".attention.clamp_kqv", "clip_qkv", "f32"),
)
_OLMO2_KEYS: tuple[SetKeys, ...] = (
    Copied(".attention.sliding_window", "sliding_window"),
    Computed(".attention.sliding_window_pattern", _slides, "array", inverse=set_layer_types),
)
_OLMO = Architecture("olmo", rules=llama.ROPE_PERMUTED, keys=_OLMO_KEYS)
_OLMO2 = Architecture("olmo2", keys=_OLMO2_KEYS)

ARCHITECTURES: dict[str, Architecture] = {
    "OlmoForCausalLM": _OLMO,
    "OLMoForCausalLM": _OLMO,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO2,
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        rules=(StackExperts(),),
        keys=(Always(".attention.layer_norm_rms_epsilon", 1e-5, "f32", "rms_norm_eps"),),
    ),
}

CLASSES: dict[str, HfClass] = {
    "OlmoForCausalLM": HfClass("olmo"),
    "Olmo3ForCausalLM": HfClass("olmo3", matches=has_key("attention.sliding_window")),
    "Olmo2ForCausalLM": HfClass("olmo2"),
    "OlmoeForCausalLM": HfClass("olmoe", defaults={"norm_topk_prob": False}),
}

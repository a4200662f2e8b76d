"""SmallThinker.

Facts of llama.cpp b11434, conversion/smallthinker.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.row import LAYER, Architecture, Copied, HfClass, SetKeys
from quantkit.checkpoint.rules import StackExperts


def _set_small_thinker(keys: Keys, config: Config) -> None:
    if (width := config.get("moe_ffn_hidden_size")) is not None:
        keys.u32(".expert_feed_forward_length", width)
        keys.u32(".feed_forward_length", width)
    keys.u32(".expert_gating_func", GATING["softmax" if config.get("moe_primary_router_apply_softmax") else "sigmoid"])
    if any(config.get("sliding_window_layout") or ()) and (window := config.get("sliding_window_size")):
        keys.u32(".attention.sliding_window", window)


SMALL_THINKER_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_count", "moe_num_primary_experts"),
    Copied(".expert_used_count", "moe_num_active_primary_experts"),
    _set_small_thinker,
)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "SmallThinkerForCausalLM": Architecture(
        "smallthinker",
        rules=(
            StackExperts(
                weights=("down", "gate", "up"),
                name="model.layers.{layer}.block_sparse_moe.experts.{expert}.{weight}.weight",
                merged="model.layers.{layer}.block_sparse_moe.experts.{weight}.weight",
            ),
        ),
        keys=SMALL_THINKER_KEYS,
    ),
}


def set_window_layout(meta: ModelMetadata, config: Json) -> None:
    """Set the layers with window and rope, all but every fourth from the first, and the gating function."""
    layers, slides = range(meta.number(".block_count")), meta.get(".attention.sliding_window") is not None
    config |= {
        "moe_primary_router_apply_softmax": meta.get(".expert_gating_func") == 1,
        "sliding_window_layout": [int(slides and i % 4 != 0) for i in layers],
        "rope_layout": [int(not slides or i % 4 != 0) for i in layers],
    }


_NO_GATING_KEY = {".expert_gating_func": ""}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "SmallThinkerForCausalLM": HfClass(
        "smallthinker",
        " ".join(
            f"{LAYER}block_sparse_moe.{name}"
            for name in ("primary_router", "experts.down", "experts.gate", "experts.up")
        ),
        keys={
            ".expert_count": "moe_num_primary_experts",
            ".expert_used_count": "moe_num_active_primary_experts",
            ".expert_feed_forward_length": "moe_ffn_hidden_size",
            ".feed_forward_length": "",
            **_NO_GATING_KEY,
            ".attention.sliding_window": "sliding_window_size",
        },
        config_setters=(set_window_layout,),
    ),
}

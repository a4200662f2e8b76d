"""Llama 4: experts in one tensor, stored the other way round."""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Renamed, Split, transposed

EXPERTS = (
    Changed(r"experts\.(gate_up|down)_proj$", transposed),
    Split(r"experts\.gate_up_proj$", ("experts.gate_proj.weight", "experts.up_proj.weight"), -2),
    Renamed(r"experts\.down_proj$", "experts.down_proj.weight"),
)


def swap_widths(config: Config) -> None:
    """Call the width of dense layers what it is called elsewhere; it is that of experts here."""
    config.values["intermediate_size_moe"] = config["intermediate_size"]
    config.values["intermediate_size"] = config["intermediate_size_mlp"]


def _set_no_window(keys: Keys, config: Config) -> None:
    """Say so if no layer attends to chunks only (MobileLLM)."""
    types = config.get("layer_types")
    if isinstance(types, list) and all(each == "full_attention" for each in types):
        keys.u32(".attention.sliding_window", 0)


KEYS: tuple[SetKeys, ...] = (
    Copied(".interleave_moe_layer_step", "interleave_moe_layer_step", needed=True),
    Copied(".expert_feed_forward_length", "intermediate_size_moe", needed=True),
    _set_no_window,
)

"""Laguna.

Facts of llama.cpp b11434, conversion/laguna.py.
"""

from __future__ import annotations

from itertools import takewhile

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def _set_heads(keys: Keys, config: Config) -> None:
    keys.u32(".vocab_size", config["vocab_size"])
    layers = config.layers
    heads = config.get("num_attention_heads_per_layer") or [config.number("num_attention_heads")] * layers
    if len(heads) != layers:
        raise FormatError(f"{config.path}: num_attention_heads_per_layer is {short(heads)}, not of {layers} layers")
    keys.array(".attention.head_count", heads)
    _check_gates(config)
    if window := config.get("sliding_window") or 0:
        keys.u32(".attention.sliding_window", window)


def _check_gates(config: Config) -> None:
    """Refuse gates that other programs would read otherwise: those of single values must be called so."""
    said, kinds = config.get("gating"), config.get("gating_types")
    alike = str(said).replace("_", "-")
    if alike not in ("per-element", "per-head") and said is not True and not kinds:
        raise FormatError(f"{config.path}: gating is {short(said)}; known are per-head and per-element")
    if kinds and any("element" in str(kind) for kind in kinds) and alike != "per-element":
        raise FormatError(f"{config.path}: gating_types has gates per element, but gating is {short(said)}")


def _set_rope(keys: Keys, config: Config) -> None:
    keys.u32(
        ".leading_dense_block_count", len(list(takewhile(lambda kind: kind == "dense", config["mlp_layer_types"])))
    )
    width = config.number("head_dim")
    keys.u32(".rope.dimension_count", int(width * config.rotary_part(1.0, of=config.rope["full_attention"])))
    if (sliding := config.rope.get("sliding_attention")) is not None:
        keys.u32(".rope.dimension_count_swa", int(width * config.rotary_part(1.0, of=sliding)))


KEYS: tuple[SetKeys, ...] = (
    _set_heads,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", needed=True),
    Copied(".expert_shared_feed_forward_length", "shared_expert_intermediate_size", needed=True),
    Always(".expert_weights_norm", True, "flag"),
    Copied(".expert_weights_scale", "moe_routed_scaling_factor", "f32", needed=True),
    Always(".expert_gating_func", GATING["sigmoid"]),
    _set_rope,
)

"""Hunyuan, dense and with experts."""

from __future__ import annotations

from typing import Any

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import GATING, Keys, set_base_keys
from quantkit.checkpoint.row import SetKeys
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

#: Of rope that is scaled by alpha: what the model is made for, and the lengths that its config.json may say.
_CONTEXT, _SAID = 256 * 1024, (32 * 1024, 256 * 1024)


def _same(config: Config, key: str) -> Any:
    """Return the value that all layers have."""
    values = config[key]
    if not isinstance(values, list) or not values or any(value != values[0] for value in values):
        raise FormatError(f"{config.path}: {key} is {short(values)}, not a list of one value for all layers")
    return values[0]


def set_dense_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """The base keys; num_experts, which some have, is not one of them."""
    set_base_keys(keys, config.without("num_experts"), layers, file_type)


def _set_experts(keys: Keys, config: Config) -> None:
    keys.u32(".expert_shared_feed_forward_length", config["intermediate_size"])
    keys.u32(".expert_feed_forward_length", _same(config, "moe_intermediate_size"))
    keys.u32(".expert_used_count", _same(config, "moe_topk"))
    keys.u32(".expert_shared_count", _same(config, "num_shared_expert"))


def _set_scaled_rope(keys: Keys, config: Config, alpha: float, width: int) -> None:
    """Set a base that is scaled by alpha in place of a scale, and the length that is possible by it."""
    rope = config.rope
    if rope.get("rope_type") != "dynamic":
        return
    alpha, theta = rope.get("alpha", alpha), rope.get("rope_theta", 10000.0)
    numbers = all(isinstance(each, (int, float)) for each in (alpha, theta))
    if not numbers or not 0 < alpha < 1e9 or theta != 10000.0 or width <= 2:
        raise FormatError(f"{config.path}: rope is scaled by {short(alpha)} from {short(theta)}, which is not known")
    if config.get("max_position_embeddings") not in _SAID:
        raise FormatError(
            f"{config.path}: max_position_embeddings is {short(config.get('max_position_embeddings'))}; with dynamic "
            f"rope only {_SAID[0]} and {_SAID[1]} are known"
        )
    keys.f32(".rope.freq_base", theta * (alpha ** (width / (width - 2))))
    keys.text(".rope.scaling.type", "none")
    keys.f32(".rope.scaling.factor", 1)
    keys.u32(".rope.scaling.original_context_length", _CONTEXT)
    keys.u32(".context_length", _CONTEXT)


def _set_dense_rope(keys: Keys, config: Config) -> None:
    if config.rope.get("rope_type") == "dynamic":
        _set_scaled_rope(keys, config, 50, config.number("head_dim"))


def _set_moe_rope(keys: Keys, config: Config) -> None:
    width = config.number("hidden_size") // max(1, config.number("num_attention_heads"))
    if config.rope.get("rope_type") == "dynamic" and (config.rope.get("alpha", 1000) != 1000 or width != 128):
        alpha = short(config.rope.get("alpha"))
        raise FormatError(f"{config.path}: dynamic rope of alpha {alpha}, heads of {width}, which is not known")
    _set_scaled_rope(keys, config, 1000, width)


DENSE_KEYS: tuple[SetKeys, ...] = (_set_dense_rope,)
MOE_KEYS: tuple[SetKeys, ...] = (_set_experts, _set_moe_rope)

# --- Hunyuan 3 -------------------------------------------------------------------------------------------------------


def _set_v3(keys: Keys, config: Config) -> None:
    width = config.number("moe_intermediate_size")
    keys.u32(".expert_feed_forward_length", width)
    keys.u32(".expert_shared_feed_forward_length", width * config.get("num_shared_experts", 1))
    keys.flag(".expert_weights_norm", config.get("route_norm", True))
    keys.f32(".expert_weights_scale", float(config.get("router_scaling_factor", 1.0)))
    keys.u32(".expert_gating_func", GATING["sigmoid"])


V3_KEYS: tuple[SetKeys, ...] = (_set_v3,)

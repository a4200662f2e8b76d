"""Mistral 3 and 4, Ministral 3."""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys
from quantkit.errors import FormatError


def set_scaling(keys: Keys, config: Config) -> None:
    """Of Ministral 3: how YaRN and the temperature of attention are scaled."""
    if config.get("model_type") != "ministral3":
        return
    rope = config.rope
    missing = [name for name in ("mscale_all_dim", "llama_4_scaling_beta") if rope.get(name) is None]
    if rope.get("rope_type") != "yarn" or missing:
        raise FormatError(f"{config.path}: rope of Ministral 3 is YaRN with mscale_all_dim and llama_4_scaling_beta")
    keys.f32(".rope.scaling.yarn_log_multiplier", rope["mscale_all_dim"])
    keys.f32(".attention.temperature_scale", rope["llama_4_scaling_beta"])

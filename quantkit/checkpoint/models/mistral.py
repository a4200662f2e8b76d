"""Mistral, Mixtral, Ministral and Voxtral.

Facts of llama.cpp b11434, conversion/mistral.py, conversion/mistral3.py.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import deepseek, llama
from quantkit.checkpoint.row import Architecture, HfClass, has_key
from quantkit.checkpoint.rules import TIED_OUTPUT, Rename
from quantkit.errors import FormatError


def set_scaling(keys: Keys, config: Config) -> None:
    """Set YaRN and the attention temperature (Ministral 3)."""
    if config.get("model_type") != "ministral3":
        return
    rope = config.rope
    missing = [name for name in ("mscale_all_dim", "llama_4_scaling_beta") if rope.get(name) is None]
    if rope.get("rope_type") != "yarn" or missing:
        raise FormatError(
            f"{config.path}: rope must be YaRN with mscale_all_dim and llama_4_scaling_beta, as in Ministral 3",
            "QK-E112",
        )
    keys.f32(".rope.scaling.yarn_log_multiplier", rope["mscale_all_dim"])
    keys.f32(".attention.temperature_scale", rope["llama_4_scaling_beta"])


_MISTRAL_4 = replace(
    deepseek.LATENT,
    arch="mistral4",
    rules=(TIED_OUTPUT, deepseek.SplitLatentHeads(), Rename(r"\.(down_proj|gate_up_proj)$", r".\1.weight")),
)

_MISTRAL_3 = replace(
    llama.LLAMA,
    arch="mistral3",
    keys=(*llama.LLAMA_KEYS, set_scaling),
    dispatch=lambda config: _MISTRAL_4 if config.get("model_type") == "mistral4" else None,
)

ARCHITECTURES: dict[str, Architecture] = {
    "MistralForCausalLM": llama.LLAMA,
    "MixtralForCausalLM": llama.LLAMA,
    "Mistral3ForConditionalGeneration": _MISTRAL_3,
    "Ministral3ForCausalLM": _MISTRAL_3,
    "VoxtralForConditionalGeneration": llama.LLAMA,
}


def set_temperature(meta: ModelMetadata, config: Json) -> None:
    """Set the scales of YaRN and of the attention temperature (Ministral 3)."""
    if "rope_scaling" in config:
        scale, beta = meta.get(".rope.scaling.yarn_log_multiplier"), meta.get(".attention.temperature_scale")
        config["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": beta}


_IMAGE_SIZES: Json = {"image_size": 28, "patch_size": 14}
_NO_WINDOW: Json = {"sliding_window": None}


def has_no_key_length(meta: ModelMetadata) -> bool:
    """Return whether the file has no key length, as Mistral's configurations with a null head_dim."""
    return meta.get(".attention.key_length") is None and not meta.has("rope_freqs.weight")


CLASSES: dict[str, HfClass] = {
    "MixtralForCausalLM": HfClass(
        "mixtral",
        "model.layers.*.block_sparse_moe.gate layers.*.feed_forward.experts.w1 layers.*.feed_forward.experts.w2 "
        "layers.*.feed_forward.experts.w3",
        defaults=_NO_WINDOW,
        matches=has_key("expert_count"),
    ),
    "MistralForCausalLM": HfClass("mistral", defaults=_NO_WINDOW, matches=has_no_key_length),
    "Ministral3ForCausalLM": HfClass(
        "ministral3",
        defaults=_NO_WINDOW,
        config_setters=(set_temperature, config_values.set_rope_parameters),
        matches=has_key("attention.temperature_scale"),
    ),
    "Mistral3ForConditionalGeneration": HfClass(
        "mistral",
        defaults=_NO_WINDOW,
        config_setters=(
            config_values.AddTower(
                {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, **_IMAGE_SIZES}
            ),
        ),
        renames=((r"^", "language_model."),),
        outer_type="mistral3",
    ),
}

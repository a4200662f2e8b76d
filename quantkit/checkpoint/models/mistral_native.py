"""Mistral's own format, params.json and consolidated*.safetensors: dense models, mixtures, Pixtral's encoder.

Facts of llama.cpp b11434, conversion/mistral.py, conversion/pixtral.py, conversion/llava.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.config import Config, Json, optional_json
from quantkit.checkpoint.expressions import Shaped, take
from quantkit.checkpoint.key_rows import Computed, SetKeys
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import EncoderKey, Key, Mmproj, MmprojConfig, constant, layer_norm_epsilon, projector
from quantkit.checkpoint.models import deepseek
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import Rename
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.checkpoint.vocab.tekken import write_native
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short


def _describe_float8(config: Config) -> None:
    """Describe a quantization as config.json does."""
    quantization = config.get("quantization")
    if quantization is None:
        return
    kind = quantization.get("qformat_weight") if isinstance(quantization, dict) else quantization
    if kind != "fp8_e4m3":
        raise TypeNotSupported(
            f"{config.path}: weights quantized as {short(kind)} are not supported; supported is fp8_e4m3", "QK-E304"
        )
    config.values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": None}


def _write_yarn(keys: Keys, config: Config) -> None:
    """Write YaRN and the attention temperature."""
    if "yarn" in config:
        yarn = config.with_values(config.table("yarn"))
        keys.text(".rope.scaling.type", "yarn")
        keys.f32(".rope.scaling.factor", yarn["factor"])
        keys.f32(".rope.scaling.yarn_beta_fast", yarn["beta"])
        keys.f32(".rope.scaling.yarn_beta_slow", yarn["alpha"])
        keys.f32(".rope.scaling.yarn_log_multiplier", 0.0 if yarn["apply_scale"] else 1.0)
        keys.u32(".rope.scaling.original_context_length", yarn.number("original_max_position_embeddings"))
    if config.get("llama_4_scaling") is not None:
        keys.f32(".attention.temperature_scale", config.with_values(config.table("llama_4_scaling"))["beta"])


def _head_width(config: Config) -> int:
    return (
        config.head_dim
        if config.get("head_dim") is not None
        else config.number("hidden_size") // config.number("num_attention_heads")
    )


# --- Mixtures of experts: DeepSeek's attention -----------------------------------------------------------------------

#: Names in params.json -> those of DeepSeek's config.json.
_NAMES = {
    "dim": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
}
_EXPERT_NAMES = {
    "route_every_n": "moe_layer_freq",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_experts": "n_routed_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "routed_scale": "routed_scaling_factor",
    "num_shared_experts": "n_shared_experts",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}


def _rename_settings(config: Config) -> None:
    """Set the hyperparameters by the names of DeepSeek."""
    values, experts = config.values, config.table("moe")
    values |= {new: values[name] for name, new in _NAMES.items() if name in values}
    values["tie_word_embeddings"] = values.get("tied_embeddings", False)
    values.setdefault("max_position_embeddings", 128_000)
    values |= {new: experts[name] for name, new in _EXPERT_NAMES.items() if name in experts}
    values |= {"norm_topk_prob": True, "scoring_func": "softmax"}
    _describe_float8(config)


def _write_moe_yarn(keys: Keys, config: Config) -> None:
    """Write YaRN, which such models always have, and the context from which the temperature counts."""
    if "yarn" not in config:
        raise FormatError(f"{config.path}: has no yarn, which a mixture of experts needs", "QK-E112")
    _write_yarn(keys, config)
    yarn = config.with_values(config.table("yarn"))
    keys.u32(".attention.temperature_length", yarn.number("original_max_position_embeddings"))
    keys.f32(".rope.scaling.yarn_log_multiplier", 0.1)


_EXPERT = r"^(layers\.\d+\.)experts\."
_MOE_STORED = (
    Rename(r"\.qscale_act$", ".input_scale"),
    Rename(r"\.qscale_weight$", ".weight_scale"),
    Rename(r"\.wkv_b\.", ".kv_b_proj."),
    *(
        Rename(rf"^(layers\.\d+\.experts\.\d+\.){name}\.", rf"\1{new}.")
        for name, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
    ),
    Rename(_EXPERT, r"model.\1mlp.experts."),
)

_DENSE_KEYS: tuple[SetKeys, ...] = (Computed(".rope.dimension_count", _head_width), _write_yarn)
_DENSE = Architecture("llama", keys=_DENSE_KEYS, vocab=write_native, patch_config=_describe_float8)

NATIVE: dict[str, Architecture] = {
    "dense": replace(
        _DENSE,
        dispatch=lambda config: replace(_DENSE, arch="mistral3") if "llama_4_scaling" in config else None,
    ),
    "moe": replace(
        deepseek.LATENT,
        stored=(*_MOE_STORED, *deepseek.LATENT.stored),
        keys=(*deepseek.LATENT.keys, _write_moe_yarn),
        vocab=write_native,
        patch_config=_rename_settings,
    ),
}


# --- Pixtral's encoder -----------------------------------------------------------------------------------------------

_BREAK_TOKEN = "[IMG_BREAK]"


def _break_token(folder: Path) -> int:
    """Return the id of the token that ends a row of patches, from the tokenizer's file."""
    lists = (
        ("tekken.json", "special_tokens", "token_str", "rank"),
        ("tokenizer.json", "added_tokens", "content", "id"),
    )
    for file, name, text, number in lists:
        for entry in (optional_json(folder / file) or {}).get(name) or ():
            if entry.get(text) == _BREAK_TOKEN:
                return int(entry[number])
    raise FormatError(f"{folder}: its tokenizer has no {_BREAK_TOKEN}, of which files have the embedding", "QK-E112")


#: What images are normalized by: constants of the package mistral-common.
_CHANNELS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def _read_vision(config: Config) -> Json:
    """Return params.json with the width of the text model by its usual name."""
    return {**config.outer, "hidden_size": config.get("dim")}


def _patch_vision(config: MmprojConfig) -> None:
    config.preprocessor.values.clear()
    config.preprocessor.values.update(_CHANNELS)
    token = config.vision.get("image_break_token_id")
    if type(token) is not int:
        raise FormatError(f"{config.path}: image_break_token_id is {short(token)}, not a token", "QK-E112")
    config.vision.values["image_break_token_id"] = token if token >= 0 else _break_token(config.path.parent)


@dataclass(frozen=True)
class _BreakEmbedding(OneWayRule):
    """Extracts the embedding of the break token."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if "tok_embeddings.weight" not in tensor.name:
            return None
        assert isinstance(context.config, MmprojConfig)
        token, shape = context.config.vision.number("image_break_token_id"), tensor.x.shape
        if token <= 0:
            return ()
        if len(shape) != 2 or token >= shape[0]:
            raise context.fail(tensor, f"its shape {list(shape)} has no row of {_BREAK_TOKEN}, token {token}")
        row = Shaped(take(tensor.x, 0, range(token, token + 1)), shape[1:])
        return (replace(tensor, x=row, name_in_file="v.token_embd.img_break"),)


def _merge_size(config: MmprojConfig) -> int | None:
    """Return the side of the squares of patches that are merged, if any are."""
    merges = config.vision.get("mm_projector_id") == "patch_merge"
    return config.vision.number("spatial_merge_size") if merges else None


NATIVE_MMPROJ: dict[str, Mmproj] = {
    "pixtral": Mmproj(
        (
            projector("pixtral"),
            layer_norm_epsilon("norm_eps", section="model"),
            EncoderKey(".rope.freq_base", "rope_theta", "f32"),
            constant(".use_silu", True, "flag"),
            Key(".vision.spatial_merge_size", _merge_size),
        ),
        tensors=r"^((vision_encoder|vision_language_adapter|patch_merger)\.|pre_mm_projector_norm)|tok_embeddings\.weight",
        rules=(
            _BreakEmbedding(),
            Rename(r"^vision_language_adapter\.w_in\.", "mm.1."),
            Rename(r"^vision_language_adapter\.w_out\.", "mm.2."),
        ),
        vision_config=lambda outer: outer.get("vision_encoder"),
        read_config=_read_vision,
        patch_config=_patch_vision,
    ),
}

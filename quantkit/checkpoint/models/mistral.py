"""Mistral, Mixtral, Ministral and Voxtral; the encoders of Pixtral and Mistral 3.

Facts of llama.cpp b11434, conversion/mistral.py, conversion/mistral3.py, conversion/llava.py,
conversion/lighton_ocr.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.config import Config, Json, large_json, optional_json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Shaped, take
from quantkit.checkpoint.hf_encoders import (
    USUAL_COUNTS,
    HfEncoders,
    add_token_ids,
    hidden_act,
    image_values,
    of_text_class,
)
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import Activation, EncoderKey, Mmproj, MmprojConfig, layer_norm_epsilon, projector
from quantkit.checkpoint.models import deepseek, llama, qwen
from quantkit.checkpoint.row import Architecture, HfClass, has_key
from quantkit.checkpoint.rules import TIED_OUTPUT, Rename, Transform, permute_queries, restore_queries
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


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


# --- Encoders of Pixtral, Mistral 3 and LightOnOCR -------------------------------------------------------------------

_BREAK_TOKEN = "[IMG_BREAK]"


def _break_token(folder: Path) -> int:
    """Return the id of the token that ends a row of patches."""
    added = (optional_json(folder / "tokenizer_config.json") or {}).get("added_tokens_decoder") or {}
    tokens = {id_: token.get("content") for id_, token in added.items()}
    if _BREAK_TOKEN not in tokens.values():
        tokens = {token["id"]: token["content"] for token in large_json(folder / "tokenizer.json")["added_tokens"]}
    id_ = next((id_ for id_, content in tokens.items() if content == _BREAK_TOKEN), None)
    if id_ is None:
        raise FormatError(
            f"{folder}: its tokenizer has no {_BREAK_TOKEN}, of which files have the embedding", "QK-E112"
        )
    return int(id_)


def _patch_lighton(config: MmprojConfig) -> None:
    """Default the epsilon; other encoders than Pixtral's have no row."""
    kind = config.vision.get("model_type")
    if kind != "pixtral":
        raise FormatError(
            f"{config.path}: model_type of vision_config is {short(kind)}; of this class only pixtral is converted",
            "QK-E305",
        )
    config.vision.values.setdefault("layer_norm_eps", 1e-5)


def _patch_pixtral(config: MmprojConfig) -> None:
    _patch_lighton(config)
    config.outer["image_break_token_id"] = _break_token(config.path.parent)


@dataclass(frozen=True)
class _BreakEmbedding(OneWayRule):
    """Extracts the embedding of the break token from those of all tokens, if they are not under language_model."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if "embed_tokens.weight" not in tensor.name or re.match(_PIXTRAL_PARTS, tensor.name):
            return None
        token, shape = context.config.outer.get("image_break_token_id", 0), tensor.x.shape
        if token <= 0:
            return ()
        if len(shape) != 2 or token >= shape[0]:
            raise context.fail(tensor, f"its shape {list(shape)} has no row of {_BREAK_TOKEN}, token {token}")
        row = Shaped(take(tensor.x, 0, range(token, token + 1)), shape[1:])
        return (replace(tensor, x=row, name_in_file="v.token_embd.img_break"),)


_PIXTRAL_PARTS = (
    r"(multi_modal_projector|vision_tower|vision_encoder|vision_language_adapter|patch_merger)\.|pre_mm_projector_norm"
)
_PIXTRAL_KEYS = (
    layer_norm_epsilon("layer_norm_eps"),
    Activation(),
    EncoderKey(".vision.spatial_merge_size", "spatial_merge_size", section="model", optional=True),
)
_PIXTRAL = Mmproj(
    (projector("pixtral"), *_PIXTRAL_KEYS),
    tensors=rf"^({_PIXTRAL_PARTS})|embed_tokens\.weight",
    rules=(_BreakEmbedding(), Transform(r"[qk]_proj\.(weight|bias)$", permute_queries, restore_queries)),
    patch_config=_patch_pixtral,
)

MMPROJ: dict[str, Mmproj] = {
    "LlavaForConditionalGeneration": _PIXTRAL,
    "Mistral3ForConditionalGeneration": _PIXTRAL,
    "LightOnOCRForConditionalGeneration": replace(
        _PIXTRAL,
        keys=(projector("lightonocr"), *_PIXTRAL_KEYS),
        stored=(
            Rename(r"model\.vision_encoder\.", "vision_tower."),
            Rename(r"model\.vision_projection\.", "multi_modal_projector."),
        ),
        patch_config=_patch_lighton,
    ),
}


# --- export ---------------------------------------------------------------------------------------------------------


def _set_pixtral(meta: ClipMetadata, config: Json) -> None:
    """Describe Pixtral's tower; llama.cpp uses the output of its last layer."""
    vision = meta.counts(USUAL_COUNTS) | {"model_type": "pixtral"}
    heads = max(1, vision["num_attention_heads"])
    config["vision_config"] = vision | {"hidden_act": hidden_act(meta), "head_dim": vision["hidden_size"] // heads}
    config |= {"multimodal_projector_bias": meta.has("mm.1.bias"), "vision_feature_layer": -1}
    if (merged := meta.get(".vision.spatial_merge_size")) is not None:
        config["spatial_merge_size"] = merged
    else:
        config["vision_feature_select_strategy"] = "full"
    add_token_ids(meta, config, image_token_index="[IMG]")


def _pixtral_preprocessor(meta: ClipMetadata) -> Json:
    patch = meta.number(".vision.patch_size")
    sizes = {
        "patch_size": {"height": patch, "width": patch},
        "size": {"longest_edge": meta.number(".vision.image_size")},
    }
    return image_values(meta, "PixtralImageProcessor") | sizes


def _set_lighton(meta: ClipMetadata, config: Json) -> None:
    """Describe Pixtral's tower beside Qwen 3."""
    _set_pixtral(meta, config)
    for name in ("multimodal_projector_bias", "vision_feature_layer", "image_token_index"):
        config.pop(name, None)
    add_token_ids(meta, config, image_token_id="<|image_pad|>")


_MISTRAL3_ENCODERS = HfEncoders(
    "pixtral",
    CLASSES["Mistral3ForConditionalGeneration"],
    "vision_tower.transformer. vision_tower.patch_conv vision_tower.ln_pre multi_modal_projector.",
    _set_pixtral,
    _pixtral_preprocessor,
)
HF_ENCODERS: dict[str, HfEncoders] = {
    "Mistral3ForConditionalGeneration": _MISTRAL3_ENCODERS,
    "LlavaForConditionalGeneration": replace(
        _MISTRAL3_ENCODERS,
        text=HfClass("mistral", defaults=_NO_WINDOW, renames=((r"^", "language_model."),), outer_type="llava"),
        matches=lambda meta: meta.get(".vision.spatial_merge_size") is None,
    ),
    "LightOnOCRForConditionalGeneration": replace(
        _MISTRAL3_ENCODERS,
        projector="lightonocr",
        text=of_text_class(qwen.CLASSES["Qwen3ForCausalLM"], "lighton_ocr", "model.language_model."),
        set_config=_set_lighton,
        text_class="Qwen3ForCausalLM",
    ),
}

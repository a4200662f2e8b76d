"""EXAONE 3 to 4.5 and K-EXAONE.

Facts of llama.cpp b11434, conversion/exaone.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.encoder_rules import SplitFrames
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.hf_encoders import HfEncoders
from quantkit.checkpoint.key_rows import (
    VOCAB_SIZE,
    Always,
    Computed,
    Copied,
    SetKeys,
    divided_head_dim,
    number_or,
    set_layer_types,
)
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import USE_SILU, EncoderKey, Key, Mmproj, MmprojConfig, projector
from quantkit.checkpoint.models import llama, qwen_vl
from quantkit.checkpoint.nextn import (
    MTP_NAMES,
    NEXTN_IF_ANY,
    MtpRule,
    layers_with_nextn,
    nextn_layers,
    subtract_nextn_layers,
)
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, has_key
from quantkit.checkpoint.rules import Drop, StackExperts
from quantkit.checkpoint.tensors import Context, Tensor


def _slides(config: Config) -> list[bool] | None:
    """Return which layers of EXAONE 4 have a window: a list of kinds, a word such as LLLG, or a period."""
    kinds, pattern, layers = config.get("layer_types"), config.get("sliding_window_pattern"), config.layers
    if config.get("sliding_window") is None:
        return None
    if isinstance(kinds, list):
        return [kind == "sliding_attention" for kind in kinds]
    if isinstance(pattern, str) and pattern:
        return [pattern[i % len(pattern)] == "L" for i in range(layers)]
    return [(i + 1) % pattern != 0 for i in range(layers)] if isinstance(pattern, int) and pattern > 0 else None


def _set_layer_types(meta: ModelMetadata, config: Json) -> None:
    """Set which layers have a window: none in a file without one."""
    set_layer_types(meta, config)
    if meta.get(".attention.sliding_window") is None:
        config["layer_types"] = ["full_attention"] * meta.number(".block_count")


EXAONE4_KEYS: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    Copied(".attention.sliding_window", "sliding_window"),
    Computed(".attention.sliding_window_pattern", _slides, "array", inverse=_set_layer_types),
)
#: The factors of its rope, unless the configuration sets them.
exaone4_rope = partial(llama.rope_factors, factor=16.0)


@dataclass(frozen=True)
class RenameMtpLayers(MtpRule):
    """Rename mtp.* to layers after the last; the tensors that MTP layers share are copied to each (ExaoneMoEModel)."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.match(r"mtp\.(?:layers\.(\d{1,4})|(\w+))\.(.+)$", tensor.name)
        if match is None:
            return None
        n, config = context.config.layers, context.config
        if match[1] is not None:
            shared = range(nextn_layers(config)) if config.get("mtp_share_layers") else (int(match[1]),)
            return [replace(tensor, name=f"model.layers.{n + i}.{match[3]}") for i in shared]
        if match[2] not in MTP_NAMES:
            return None
        name = f"{MTP_NAMES[match[2]]}.{match[3]}"
        return [replace(tensor, name=f"model.layers.{i}.{name}") for i in range(n, n + nextn_layers(config))]


def _shared_width(config: Config) -> int:
    return config.number("moe_intermediate_size") * config.number("num_shared_experts")


def _set_nextn(meta: ModelMetadata, config: Json) -> None:
    config["num_nextn_predict_layers"] = meta.get(".nextn_predict_layers")
    subtract_nextn_layers(meta, config)


EXAONE_MOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Copied(".expert_shared_count", "num_shared_experts", required=True),
    Computed(".expert_shared_feed_forward_length", _shared_width),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
    number_or(".leading_dense_block_count", "first_k_dense_replace first_last_k_dense_replace", 0),
    Computed(".nextn_predict_layers", nextn_layers, inverse=_set_nextn),
    Always(".rope.scaling.type", "none", "text"),
)
_EXAONE_ROPE = Computed(".rope.dimension_count", lambda config: int(config.rotary_part(1.0) * divided_head_dim(config)))

_EXAONE_MOE = Architecture(
    "exaone-moe",
    rules=(RenameMtpLayers(), StackExperts()),
    keys=(*EXAONE4_KEYS, *EXAONE_MOE_KEYS),
    layers=layers_with_nextn,
    synthetic=exaone4_rope,
)

ARCHITECTURES: dict[str, Architecture] = {
    "ExaoneForCausalLM": Architecture("exaone", keys=(_EXAONE_ROPE,), synthetic=llama.rope_factors),
    "Exaone4ForCausalLM": Architecture("exaone4", keys=EXAONE4_KEYS, synthetic=exaone4_rope),
    "ExaoneMoEForCausalLM": _EXAONE_MOE,
    "ExaoneMoeForCausalLM": _EXAONE_MOE,
    "Exaone4_5_ForConditionalGeneration": Architecture(
        "exaone4",
        rules=(Drop(r"^mtp\.", when=lambda config: not nextn_layers(config)), RenameMtpLayers()),
        keys=(*EXAONE4_KEYS, NEXTN_IF_ANY),
        layers=layers_with_nextn,
        synthetic=exaone4_rope,
    ),
}


_NO_WINDOW: Json = {"sliding_window": None}

_EXAONE_TOWER = config_values.AddTower(
    {"depth": 1, "num_heads": 2, "num_key_value_heads": 2, "fullatt_block_indexes": [0]}, "out_hidden_size"
)

CLASSES: dict[str, HfClass] = {
    "ExaoneForCausalLM": HfClass(
        "exaone",
        "transformer.wte transformer.ln_f transformer.h.*.ln_1 transformer.h.*.ln_2 "
        "transformer.h.*.attn.attention.q_proj transformer.h.*.attn.attention.k_proj "
        "transformer.h.*.attn.attention.v_proj transformer.h.*.attn.attention.out_proj "
        "transformer.h.*.mlp.c_fc_0 transformer.h.*.mlp.c_fc_1 transformer.h.*.mlp.c_proj",
        keys={".block_count": "num_layers", ".attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
    ),
    "Exaone4ForCausalLM": HfClass(
        "exaone4",
        defaults={**_NO_WINDOW, "sliding_window_pattern": None},
        matches=lambda meta: not meta.get(".nextn_predict_layers"),
    ),
    "ExaoneMoeForCausalLM": HfClass(
        "exaone_moe",
        f"{LAYER}mlp.e_score_correction",
        keys={".expert_count": "num_experts"},
        config_setters=(
            config_values.set_mlp_layer_types,
            config_values.set_rope_parameters,
        ),
    ),
    "Exaone4_5_ForConditionalGeneration": HfClass(
        "exaone4",
        defaults={"sliding_window": None, "sliding_window_pattern": None, "mtp_share_layers": False},
        config_setters=(_EXAONE_TOWER,),
        renames=((r"^model\.", "model.language_model."),),
        outer_type="exaone4_5",
        matches=has_key("nextn_predict_layers"),
    ),
}


# --- Encoders of EXAONE 4.5 -------------------------------------------------------------------------------------------


def _vision_epsilon(config: MmprojConfig) -> float | None:
    """Return the epsilon of the vision encoder, or that of the model."""
    epsilon: float | None = config.vision.get("rms_norm_eps", config.model.get("rms_norm_eps", 1e-6))
    return epsilon


def _write_period(keys: Keys, config: MmprojConfig) -> None:
    if config.vision.get("fullatt_block_indexes"):
        qwen_vl.write_period(keys, config)


MMPROJ: dict[str, Mmproj] = {
    "Exaone4_5_ForConditionalGeneration": replace(
        qwen_vl.QWEN2_VL,
        keys=(
            projector("exaone4_5"),
            USE_SILU,
            EncoderKey(".vision.image_min_pixels", "min_pixels", section="preprocessor"),
            EncoderKey(".vision.image_max_pixels", "max_pixels", section="preprocessor"),
            Key(".vision.attention.head_count_kv", lambda config: config.vision.get("num_key_value_heads")),
            Key(".vision.attention.layer_norm_epsilon", _vision_epsilon, "f32"),
            Key(".vision.window_size", lambda config: config.vision.get("window_size")),
            _write_period,
        ),
        stored=qwen_vl.QWEN3_STORED,
        rules=(SplitFrames(r"patch_embed\.proj\.weight"),),
    ),
}


# --- export ----------------------------------------------------------------------------------------------------------


def _set_exaone45(meta: ClipMetadata, config: Json) -> None:
    """Describe the tower of Qwen2.5-VL, with fewer keys than queries."""
    qwen_vl.set_qwen25(meta, config)
    config["vision_config"] |= {
        "model_type": "exaone4_5_vision",
        "num_key_value_heads": meta.get(".vision.attention.head_count_kv"),
        "window_size": meta.get(".vision.window_size"),
        "rms_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
    }


def _exaone45_preprocessor(meta: ClipMetadata) -> Json:
    limits = {f"{end}_pixels": meta.number(f".vision.image_{end}_pixels") for end in ("min", "max")}
    return qwen_vl.qwen_preprocessor(meta) | limits


HF_ENCODERS: dict[str, HfEncoders] = {
    "Exaone4_5_ForConditionalGeneration": HfEncoders(
        "exaone4_5",
        CLASSES["Exaone4_5_ForConditionalGeneration"],
        qwen_vl.QWEN25_NAMES,
        _set_exaone45,
        _exaone45_preprocessor,
        qwen_vl.QWEN2_KINDS,
    ),
}

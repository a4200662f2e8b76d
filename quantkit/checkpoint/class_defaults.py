"""Defaults of transformers' configuration classes, for keys that config.json lacks.

Facts of transformers 4.57.6 (models/*/configuration_*.py), the version that llama.cpp b11434 pins: only values that
convert_hf_to_gguf.py reads. Later versions have other defaults, so the keys of a sparse config.json depend on the
version that reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

#: Of every class: the last resort for the context length.
_COMMON: Json = {"max_length": 20, "tie_word_embeddings": True, "is_decoder": False}
#: Model type -> key -> value: class_defaults.json, which scripts/make_class_defaults.py makes.
DEFAULTS: dict[str, Json] = json.loads((Path(__file__).parent / "class_defaults.json").read_bytes())
#: The same of the parts that describe encoders, under ``model_type.key``, or under their own model type.
ENCODERS: dict[str, Json] = json.loads((Path(__file__).parent / "encoder_defaults.json").read_bytes())


def _default_kv_heads(values: Json) -> None:
    """Of a class with num_key_value_heads null: as many as there are heads."""
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")


def _derive_head_dim(values: Json) -> None:
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if values.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads:
        values["head_dim"] = width // heads


def _disable_window(values: Json) -> None:
    if "use_sliding_window" in values and not values["use_sliding_window"]:
        values["sliding_window"] = None
    values.setdefault("sliding_window", None)


def _derive_missing_head_dim(values: Json) -> None:
    """Derive head_dim if it is absent; a value from config.json, null included, is kept."""
    if "head_dim" not in values:
        _derive_head_dim(values)


@dataclass(frozen=True)
class _LayerTypes:
    """Fill in layer_types that is null: every ``period``-th layer has full attention, the others are ``other_kind``.

    ``key`` of the configuration may set another period.
    """

    period: int
    other_kind: str = "sliding_attention"
    key: str = ""

    def __call__(self, values: Json) -> None:
        layers, period = values.get("num_hidden_layers"), values.get(self.key, self.period)
        if values.get("layer_types") is not None or not isinstance(layers, int) or not 0 <= layers < 1 << 16:
            return
        full = isinstance(period, int) and period or layers + 1
        values["layer_types"] = [self.other_kind if (i + 1) % full else "full_attention" for i in range(layers)]


def _rename_longrope(values: Json) -> None:
    """Phi 3's rope_scaling is of the kind longrope, also if it is called su or yarn."""
    rope = values.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("type") in ("su", "yarn"):
        values["rope_scaling"] = {**rope, "type": "longrope"}


def _copy_rope_type(values: Json) -> None:
    """Read the kind of rope from type, the old name of rope_type."""
    rope = values.get("rope_scaling")
    if isinstance(rope, dict) and "type" in rope:
        values["rope_scaling"] = {**rope, "rope_type": rope["type"]}


def _use_rope_head_dim(values: Json) -> None:
    values["head_dim"] = values["qk_rope_head_dim"]


def _llama4_layer_types(values: Json) -> None:
    """Llama 4: layers attend to chunks, except those without rope."""
    rope = values.get("no_rope_layers")
    interval = values["no_rope_layer_interval"]
    n = values["num_hidden_layers"]
    if not rope and isinstance(n, int) and isinstance(interval, int) and interval and n < 1 << 16:
        rope = [int((i + 1) % interval != 0) for i in range(n)]
    if values.get("layer_types") is None and isinstance(rope, list):
        values["layer_types"] = ["chunked_attention" if item else "full_attention" for item in rope]


def _falcon_kv_heads(values: Json) -> None:
    """Falcon: KV heads default to the number of heads; the old name of the width is accepted."""
    values["hidden_size"] = values.get("n_embed") or values["hidden_size"]
    if values.get("num_kv_heads") is None:
        values["num_kv_heads"] = values.get("num_attention_heads")


def _derive_dt_rank(values: Json) -> None:
    """Jamba: the rank of time steps defaults to 1/16 of the width."""
    if values.get("mamba_dt_rank") == "auto":
        values["mamba_dt_rank"] = -(values["hidden_size"] // -16)


def _bloom_hidden_size(values: Json) -> None:
    """Accept the old name of BLOOM's width."""
    values["hidden_size"] = values.get("n_embed") or values["hidden_size"]


def _nest_text_config(values: Json) -> None:
    """Move the flat settings of a Qwen 2 VL configuration into text_config, as its class does."""
    kind, text = f"{values['model_type']}_text", values.get("text_config")
    if not isinstance(text, dict):
        text = {k: v for k, v in values.items() if k not in ("vision_config", "text_config", "model_type")}
    values["text_config"] = with_defaults({"model_type": kind, **text})


def _lfm2_layer_types(values: Json) -> None:
    """LFM 2's layers are convolutions, except those listed; its old names are accepted."""
    values["intermediate_size"] = values.get("block_ff_dim", values["intermediate_size"])
    values["rope_theta"] = values.get("theta", values["rope_theta"])
    layers, full = values.get("num_hidden_layers"), values.get("full_attn_idxs")
    if values.get("layer_types") is None and isinstance(layers, int) and 0 <= layers < 1 << 16:
        attends = range(layers) if full is None else full
        values["layer_types"] = ["full_attention" if i in attends else "conv" for i in range(layers)]


def _drop_eod_token(values: Json) -> None:
    """Hunyuan: drop eod_token_id, which its classes ignore."""
    values.pop("eod_token_id", None)


def _filter_mpt_attention(values: Json) -> None:
    """Keep only the attn_config keys that the MPT class accepts."""
    allowed = ("attn_type", "attn_pdrop", "attn_impl", "clip_qkv", "softmax_scale", "alibi", "alibi_bias_max")
    if isinstance(attention := values.get("attn_config"), dict):
        values["attn_config"] = {key: value for key, value in attention.items() if key in allowed}


def _default_labels(values: Json) -> None:
    """Name labels by number; the default is two."""
    labels = values.get("id2label")
    if labels is None:
        values["id2label"] = {i: f"LABEL_{i}" for i in range(min(int(values.get("num_labels", 2)), 1 << 16))}
    else:
        values["id2label"] = {int(i): text for i, text in labels.items()}


#: Model type -> the functions that compute values from others, in order.
DERIVED: dict[str, tuple[Callable[[Json], None], ...]] = {
    "deepseek_v2": (_default_kv_heads, _use_rope_head_dim, _copy_rope_type),
    "deepseek_v3": (_default_kv_heads, _use_rope_head_dim, _copy_rope_type),
    "dots1": (_default_kv_heads,),
    "ernie4_5": (_default_kv_heads, _derive_head_dim, _copy_rope_type),
    "ernie4_5_moe": (_copy_rope_type,),
    "glm4_moe": (_copy_rope_type,),
    "glm4v_text": (_default_kv_heads, _copy_rope_type),
    "glm4v_moe_text": (_copy_rope_type,),
    "gpt_oss": (_default_kv_heads, _derive_head_dim, _copy_rope_type),
    "hunyuan_v1_dense": (_default_kv_heads, _drop_eod_token),
    "hunyuan_v1_moe": (_default_kv_heads, _drop_eod_token),
    "llama4_text": (_default_kv_heads, _llama4_layer_types),
    "llama": (_default_kv_heads, _derive_head_dim),
    "mistral": (_default_kv_heads,),
    "mixtral": (_default_kv_heads,),
    "qwen2": (_default_kv_heads, _disable_window),
    "qwen2_moe": (_disable_window,),
    "qwen3": (_default_kv_heads, _disable_window),
    "qwen3_moe": (_default_kv_heads, _disable_window),
    "qwen3_next": (_LayerTypes(4, "linear_attention", "full_attention_interval"),),
    "qwen3_vl_text": (_default_kv_heads,),
    "qwen3_vl_moe_text": (_default_kv_heads, _derive_head_dim),
    "gemma2": (_LayerTypes(2),),
    "gemma3_text": (_LayerTypes(6, key="sliding_window_pattern"),),
    "phi": (_default_kv_heads, _copy_rope_type),
    "phi3": (_default_kv_heads, _rename_longrope),
    "phimoe": (_default_kv_heads,),
    "olmo": (_default_kv_heads,),
    "olmo2": (_default_kv_heads,),
    "olmo3": (_default_kv_heads, _LayerTypes(4)),
    "olmoe": (_default_kv_heads, _copy_rope_type),
    "granite": (_default_kv_heads,),
    "granitemoe": (_default_kv_heads,),
    "granitemoeshared": (_default_kv_heads,),
    "cohere": (_default_kv_heads,),
    "cohere2": (_default_kv_heads, _derive_missing_head_dim, _LayerTypes(4, key="sliding_window_pattern")),
    "arcee": (_default_kv_heads, _derive_head_dim, _copy_rope_type),
    "smollm3": (_default_kv_heads, _copy_rope_type),
    "seed_oss": (_default_kv_heads, _derive_head_dim, _copy_rope_type),
    "exaone4": (_LayerTypes(4, key="sliding_window_pattern"),),
    "starcoder2": (_copy_rope_type,),
    "stablelm": (_copy_rope_type,),
    "bitnet": (_default_kv_heads,),
    "qwen2_vl": (_nest_text_config,),
    "qwen2_vl_text": (_default_kv_heads, _disable_window),
    "qwen2_5_vl": (_nest_text_config,),
    "qwen2_5_vl_text": (_default_kv_heads, _disable_window),
    "lfm2": (_lfm2_layer_types,),
    "nemotron": (_default_kv_heads, _derive_head_dim),
    "apertus": (_default_kv_heads,),
    "bloom": (_bloom_hidden_size,),
    "jamba": (_derive_dt_rank,),
    "falcon": (_falcon_kv_heads,),
    "bert": (_default_labels,),
    "distilbert": (_default_labels,),
    "mpt": (_filter_mpt_attention,),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), (_default_labels,)),
    "modernbert": (_default_labels,),
}

#: Model type -> keys that hold the configuration of a part, and its type if it does not name one.
PARTS: dict[str, dict[str, str]] = {
    "qwen3_vl": {"text_config": "qwen3_vl_text"},
    "qwen3_vl_moe": {"text_config": "qwen3_vl_moe_text"},
    "gemma3": {"text_config": "gemma3_text"},
    "glm4v": {"text_config": "glm4v_text"},
    "glm4v_moe": {"text_config": "glm4v_moe_text"},
    "llama4": {"text_config": "llama4_text"},
    "mistral3": {"text_config": "mistral"},
    "llava": {"text_config": "llama"},
    "janus": {"text_config": "llama"},
    "voxtral": {"text_config": "llama"},
    "qwen3_omni_moe": {"thinker_config": "qwen3_omni_moe_thinker"},
    "qwen3_omni_moe_thinker": {"text_config": "qwen3_omni_moe_text"},
}


def with_defaults(values: Json, kind: str | None = None) -> Json:
    """Return a configuration as AutoConfig does; unchanged if its type is unknown."""
    model_type = values.get("model_type", kind)
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        return dict(values)
    parts = {key: (values.get(key) or {}, inner) for key, inner in PARTS.get(model_type, {}).items()}
    parts = {key: (part, inner) for key, (part, inner) in parts.items() if isinstance(part, dict)}
    if any(str(part.get("model_type", inner)) not in DEFAULTS for part, inner in parts.values()):
        return dict(values)  # AutoConfig fails then, and the JSON is read as it is
    config = {**_COMMON, **DEFAULTS[model_type], **values}
    for key, (part, inner) in parts.items():
        config[key] = with_defaults(part, inner)
    for derive in DERIVED.get(model_type, ()):
        derive(config)
    return config


#: Model type -> keys of encoders that AutoConfig reads by their own model type, and the type of those without one.
_ENCODER_TYPES: dict[str, dict[str, str]] = {
    "llava": {"vision_config": "clip_vision_model"},
    "mistral3": {"vision_config": "pixtral"},
    "lfm2_vl": {"vision_config": "siglip2_vision_model"},
    "voxtral": {"audio_config": "voxtral_encoder"},
    "qwen2_audio": {"audio_config": "qwen2_audio_encoder"},
    "granite_speech": {"projector_config": "blip_2_qformer"},
}
_ENCODER_KEYS = ("vision_config", "audio_config", "encoder_config", "projector_config")


def with_encoder_defaults(values: Json, kind: str = "") -> Json:
    """Return a configuration with the defaults of its encoders, as AutoConfig does; other types are unchanged."""
    kind = kind or str(values.get("model_type"))
    config = dict(values)
    for key in _ENCODER_KEYS:
        part = {} if values.get(key) is None else values[key]
        if not isinstance(part, dict):
            continue
        name, default = f"{kind}.{key}", _ENCODER_TYPES.get(kind, {}).get(key)
        if name not in ENCODERS and default is not None:
            name = str(part.get("model_type", default))
        if name in ENCODERS:
            config[key] = {**ENCODERS[name], **part}
    if isinstance(thinker := values.get("thinker_config"), dict):
        config["thinker_config"] = with_encoder_defaults(thinker, kind)
    return config

"""ChatGLM, GLM 4, 4.5, 4.7 Flash and 5, and Solar Open; the encoders of GLM 4V to 5.3.

Facts of llama.cpp b11434, conversion/chatglm.py, conversion/glm.py, conversion/qwen3vl.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, Gathered
from quantkit.checkpoint.hf_encoders import HfEncoders, add_token_ids, hidden_act, image_values, of_text_class
from quantkit.checkpoint.key_rows import (
    BLOCK_COUNT,
    FILE_TYPE,
    Always,
    Computed,
    Copied,
    SetKeys,
    rotary_width,
    set_rotary_part,
)
from quantkit.checkpoint.keys import GATING
from quantkit.checkpoint.mmproj import (
    OPTIONAL_ACTIVATION,
    EncoderKey,
    Key,
    Mmproj,
    MmprojConfig,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.models import deepseek, qwen_vl
from quantkit.checkpoint.nextn import NEXTN_IF_ANY, NEXTN_KEY, layers_with_nextn
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, has_key
from quantkit.checkpoint.rules import Rename, StackExperts, Transform
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.vocab.bpe import GLM_4_SPECIAL, GLM_SPECIAL, write_bpe
from quantkit.errors import FormatError


def to_halves(tensor: Tensor, context: Context) -> Expression:
    """Separate the pairs of rope if positions have several dimensions (Glm4Model.normal_to_neox)."""
    return _reorder(tensor, context, lambda h, n: (range(h, h + n, 2), range(h + 1, h + n, 2)))


def to_pairs(tensor: Tensor, context: Context) -> Expression:
    """Interleave the pairs again: the inverse of ``to_halves``."""
    return _reorder(tensor, context, lambda h, n: [range(h + i, h + n, n // 2) for i in range(n // 2)])


ROPE_TO_HALVES = (Transform(r"[qk]_proj\.(weight|bias)$", to_halves, to_pairs),)


MOE_KEYS: tuple[SetKeys, ...] = (
    rotary_width(0.5),
    Copied(".expert_count", "n_routed_experts"),
    Copied(".expert_feed_forward_length", "moe_intermediate_size"),
    Copied(".expert_shared_count", "n_shared_experts"),
    Copied(".leading_dense_block_count", "first_k_dense_replace"),
    Always(".expert_gating_func", GATING["sigmoid"]),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32"),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag"),
    NEXTN_KEY,
)


def _chat_width(config: Config) -> int:
    return config.number("hidden_size", "n_embd", "n_embed")


def _chat_rope_width(config: Config) -> int:
    heads = config.number("n_head", "num_attention_heads")
    turned = config["attention_dim"] if "attention_dim" in config else _chat_width(config) // max(1, heads)
    return int(turned * config.rotary_part(0.5))


def _chat_kv_heads(config: Config) -> int:
    groups: int | None = config.find("multi_query_group_num", "num_key_value_heads")
    return config.number("n_head", "num_attention_heads") if groups is None else groups


def _fourfold_width(config: Config) -> int:
    feed_forward: int | None = config.find("ffn_hidden_size", "intermediate_size")
    return 4 * _chat_width(config) if feed_forward is None else feed_forward


#: ChatGLM's (ChatGLMModel).
CHAT_BASE: tuple[SetKeys, ...] = (
    Computed(
        ".context_length", lambda config: config.get("seq_length", _chat_width(config)), names="max_position_embeddings"
    ),
    Copied(".embedding_length", "hidden_size n_embd n_embed", required=True),
    Computed(".feed_forward_length", _fourfold_width, names="intermediate_size"),
    BLOCK_COUNT,
    Copied(".attention.head_count", "n_head num_attention_heads", required=True, exported="num_attention_heads"),
    Computed(".attention.head_count_kv", _chat_kv_heads, names="num_key_value_heads"),
    Copied(".attention.layer_norm_rms_epsilon", "layernorm_epsilon", "f32", default=1e-5, exported="rms_norm_eps"),
    FILE_TYPE,
    Computed(".rope.dimension_count", _chat_rope_width, inverse=set_rotary_part),
    Always("tokenizer.ggml.add_bos_token", False, "flag"),
    Computed(".rope.freq_base", lambda config: 10000 * config.get("rope_ratio", 1), "f32", names="rope_theta"),
)


def _reorder(tensor: Tensor, context: Context, order: Callable[[int, int], Sequence[range]]) -> Expression:
    """Return rows of which ``order`` permutes the rotary ones, from the first of a head and their number."""
    config, x = context.config, tensor.x
    if "mrope_section" not in config.rope:
        return x
    width = config.head_dim
    turned = int(width * config.rotary_part(0.5))
    if x.shape[0] % width or turned % 2:
        raise ValueError(f"it is not a multiple of heads of {width} rows, {turned} of them rotated by rope")
    heads = range(0, x.shape[0], width)
    parts = ((*order(h, turned), range(h + turned, h + width)) for h in heads)
    return Gathered(x, 0, tuple(part for head in parts for part in head))


def _indexer_types(config: Config) -> list[bool] | None:
    """Return which layers of GLM 5 have an indexer; others reuse another layer's tokens."""
    types = config.get("indexer_types")
    if types is not None and not isinstance(types, list):
        raise FormatError(f"{config.path}: indexer_types is not a list", "QK-E112")
    return None if types is None else [item == "full" for item in types]


def _latent_rope_width(config: Config) -> int:
    return int(config.number("qk_rope_head_dim") * config.rotary_part(1.0))


_CHAT_GLM_SPECIAL = {"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>"}
_SOLAR_SPECIAL = {"eos": "<|endoftext|>", "eot": "<|endoftext|>", "unk": "<unk>", "bos": "<|startoftext|>"}

_GLM_4 = Architecture(
    "glm4", rules=ROPE_TO_HALVES, keys=(rotary_width(0.5),), vocab=partial(write_bpe, special=GLM_4_SPECIAL)
)

_GLM_4_MOE = Architecture(
    "glm4moe",
    rules=(StackExperts(),),
    keys=MOE_KEYS,
    vocab=partial(write_bpe, special=GLM_SPECIAL),
    layers=layers_with_nextn,
    nextn=True,
)

_CHAT_GLM = Architecture(
    "chatglm",
    stored=(Rename(r"^transformer\.", ""),),
    base=CHAT_BASE,
    vocab=partial(write_bpe, special=_CHAT_GLM_SPECIAL),
)

ARCHITECTURES: dict[str, Architecture] = {
    "GlmMoeDsaForCausalLM": replace(
        deepseek.LATENT,
        arch="glm-dsa",
        keys=(
            *deepseek.LATENT.keys,
            Computed(".rope.dimension_count", _latent_rope_width),
            NEXTN_KEY,
            *deepseek.INDEXER,
            Computed(".attention.indexer.types", _indexer_types, "array", inverse=deepseek.set_indexer_types),
        ),
        vocab=partial(write_bpe, special=GLM_SPECIAL),
        layers=layers_with_nextn,
        nextn=True,
    ),
    "Glm4MoeLiteForCausalLM": replace(
        deepseek.LATENT,
        rules=(deepseek.DropNextnLayers(unless_named=True), *deepseek.LATENT.rules),
        keys=(*deepseek.LATENT.keys, NEXTN_IF_ANY),
        vocab=partial(write_bpe, special=GLM_SPECIAL),
        layers=layers_with_nextn,
        nextn=True,
    ),
    "Glm4ForCausalLM": _GLM_4,
    "Glm4vForConditionalGeneration": _GLM_4,
    "GlmOcrForConditionalGeneration": replace(_GLM_4, keys=(*_GLM_4.keys, NEXTN_KEY), layers=layers_with_nextn),
    "Glm4MoeForCausalLM": _GLM_4_MOE,
    "Glm4vMoeForConditionalGeneration": _GLM_4_MOE,
    "SolarOpenForCausalLM": replace(_GLM_4_MOE, vocab=partial(write_bpe, special=_SOLAR_SPECIAL), nextn=False),
    "GlmForCausalLM": _CHAT_GLM,
    "ChatGLMModel": _CHAT_GLM,
    "ChatGLMForConditionalGeneration": _CHAT_GLM,
}


def set_chatglm_names(meta: ModelMetadata, config: Json) -> None:
    """Also set the values under ChatGLM's own names."""
    theta = config.get("rope_theta") or 10000.0
    ratio = config_values.shortest_argument(theta / 10000.0, lambda x: 10000 * x)
    config |= {"layernorm_epsilon": config["rms_norm_eps"], "rope_ratio": ratio, "head_dim": meta.head_width}
    config["seq_length"] = config["max_position_embeddings"]


_FUSED_NAMES = "model.layers.*.self_attn.qkv_proj model.layers.*.mlp.gate_up_proj"
_ROUTED_KEYS = {".expert_count": "n_routed_experts"}

CLASSES: dict[str, HfClass] = {
    "Glm4MoeLiteForCausalLM": HfClass(
        "glm4_moe_lite",
        keys=_ROUTED_KEYS,
        defaults=deepseek.LATENT_V3_DEFAULTS,
        config_setters=(config_values.set_rope_parameters,),
        matches=has_key("nextn_predict_layers"),
    ),
    "GlmMoeDsaForCausalLM": HfClass(
        "glm_moe_dsa",
        keys=_ROUTED_KEYS,
        defaults=deepseek.LATENT_V3_DEFAULTS,
        config_setters=(config_values.set_rope_parameters,),
    ),
    "Glm4ForCausalLM": HfClass(
        "glm4",
        f"{_FUSED_NAMES} model.layers.*.post_self_attn_layernorm model.layers.*.post_mlp_layernorm",
    ),
    "Glm4MoeForCausalLM": HfClass(
        "glm4_moe",
        defaults={"scoring_func": "sigmoid"},
        config_setters=(config_values.set_head_norms,),
    ),
    "GlmForCausalLM": HfClass(
        "glm",
        f"{LAYER}mlp.gate_up_proj",
        config_setters=(set_chatglm_names,),
    ),
}


# --- Encoders of GLM 4V to 5.3 ---------------------------------------------------------------------------------------


def _pixel_limit(end: str) -> Key:
    """Return the row of a limit of pixels, which the preprocessor states in tokens."""

    def compute(config: MmprojConfig) -> int | None:
        settings = config.preprocessor
        tokens = settings.get(f"{end}_image_tokens")
        side = int(settings.get("patch_size", 14)) * int(settings.get("merge_size", 2))
        return None if tokens is None else int(tokens) * side**2

    return Key(f".vision.image_{end}_pixels", compute)


_GLM_VISION_KEYS = (OPTIONAL_ACTIVATION, layer_norm_epsilon("rms_norm_eps", 1e-5))
_GLM_4V = replace(qwen_vl.QWEN3_VL, keys=(projector("glm4v"), *_GLM_VISION_KEYS), rules=qwen_vl.QWEN3_PATCHES)
MMPROJ: dict[str, Mmproj] = {
    "Glm4vForConditionalGeneration": _GLM_4V,
    "Glm4vMoeForConditionalGeneration": _GLM_4V,
    "GlmOcrForConditionalGeneration": _GLM_4V,
    "Glm5NextForConditionalGeneration": replace(
        _GLM_4V,
        keys=(
            projector("glm5v"),
            *_GLM_VISION_KEYS,
            EncoderKey(".vision.spatial_merge_size", "spatial_merge_size", default=2),
            Key(".vision.swiglu_clamp", lambda config: config.vision.get("swiglu_limit"), "f32"),
            _pixel_limit("min"),
            _pixel_limit("max"),
        ),
    ),
}


# --- export ----------------------------------------------------------------------------------------------------------


def _set_glm4v(meta: ClipMetadata, config: Json) -> None:
    """Describe the tower of GLM 4V, whose projector merges patches by a convolution."""
    names = {"embedding_length": "hidden_size", "block_count": "depth", "attention.head_count": "num_heads"}
    vision = meta.counts({**names, "patch_size": "patch_size", "image_size": "image_size"})
    merged = meta.shape("mm.patch_merger.weight")
    config["vision_config"] = vision | {
        "hidden_act": hidden_act(meta),
        "intermediate_size": meta.number(".vision.feed_forward_length"),
        "out_hidden_size": merged[0],
        "spatial_merge_size": merged[-1],
        "temporal_patch_size": sum(name.startswith("v.patch_embd.weight") for name in meta.model.tensors),
        "in_channels": meta.shape("v.patch_embd.weight")[1],
        "rms_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
        "attention_bias": meta.has("v.blk.0.attn_qkv.bias"),
    }
    add_token_ids(
        meta,
        config,
        image_token_id="<|image|>",
        video_token_id="<|video|>",
        image_start_token_id="<|begin_of_image|>",
        image_end_token_id="<|end_of_image|>",
        video_start_token_id="<|begin_of_video|>",
        video_end_token_id="<|end_of_video|>",
    )


def _glm4v_preprocessor(meta: ClipMetadata) -> Json:
    frames = sum(name.startswith("v.patch_embd.weight") for name in meta.model.tensors)
    sizes = {"patch_size": meta.number(".vision.patch_size"), "temporal_patch_size": frames}
    return image_values(meta, "Glm4vImageProcessor") | sizes | {"merge_size": meta.shape("mm.patch_merger.weight")[-1]}


_GLM_4V_NAMES = (
    "visual.blocks.*.mlp.up_proj visual.blocks.*.mlp.down_proj visual.embeddings.position_embedding "
    "visual.post_layernorm visual."
)


def _glm4v_encoders(name: str, model_type: str) -> HfEncoders:
    """Return the row of a class; ``name``: the class of its text model."""
    text = of_text_class(CLASSES[name], model_type, "model.language_model.", model_type=f"{model_type}_text")
    return HfEncoders("glm4v", text, _GLM_4V_NAMES, _set_glm4v, _glm4v_preprocessor)


HF_ENCODERS: dict[str, HfEncoders] = {
    "Glm4vForConditionalGeneration": replace(
        _glm4v_encoders("Glm4ForCausalLM", "glm4v"), matches=lambda meta: not meta.has("v.blk.0.attn_q_norm.weight")
    ),
    "GlmOcrForConditionalGeneration": replace(
        _glm4v_encoders("Glm4ForCausalLM", "glm_ocr"), matches=lambda meta: meta.has("v.blk.0.attn_q_norm.weight")
    ),
    "Glm4vMoeForConditionalGeneration": _glm4v_encoders("Glm4MoeForCausalLM", "glm4v_moe"),
}

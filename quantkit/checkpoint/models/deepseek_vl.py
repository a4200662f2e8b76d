"""The vision encoders of DeepSeek-OCR, Unlimited-OCR, DeepSeek-OCR-2 and DeepSeek V4.

Facts of llama.cpp b11434, conversion/deepseek.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.encoder_rules import ForceType
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.expressions import TYPE_F32, Expression, Shaped
from quantkit.checkpoint.hf_encoders import REMOTE_NOTE, HfEncoders, image_values
from quantkit.checkpoint.mmproj import (
    USE_GELU,
    USE_SILU,
    EncoderKey,
    Key,
    Mmproj,
    MmprojConfig,
    SetMmprojKeys,
    constant,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.models import deepseek, deepseek4
from quantkit.checkpoint.rules import Rename, Split, Transform
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

# --- DeepSeek-OCR ---------------------------------------------------------------------------------------------------


def _patch_ocr(config: MmprojConfig) -> None:
    """Replace the table of encoders, ``width``, by that of CLIP; SAM's becomes ``sam``."""
    vision = config.vision.values
    encoders = config.vision.table("width")
    vision["sam"] = _encoder(config, "sam_vit_b")
    if encoders.get("clip-l-14-224") is not None:
        vision |= _encoder(config, "clip-l-14-224")
    if type(vision["width"]) is int:
        vision["hidden_size"] = vision["width"]
    if vision.get("heads") is not None:
        vision["num_heads"] = config.vision.number("heads")
        vision["intermediate_size"] = vision["num_heads"] * 4


def _encoder(config: MmprojConfig, name: str) -> Json:
    """Return the configuration of one of the encoders in ``width``."""
    encoder = config.vision.table("width").get(name)
    if not isinstance(encoder, dict):
        raise FormatError(f"{config.path}: width.{name} of vision_config is {short(encoder)}, not an object", "QK-E112")
    return encoder


def _sam(config: MmprojConfig, name: str) -> int:
    sam = config.vision.with_values(config.vision["sam"])
    return sam.number(name) if name in config.vision["sam"] else sam.without(name).number(name)


def _downsample_factor(config: MmprojConfig) -> int | None:
    """Return the patches per embedding in each direction, unless there are 4, as in all published models."""
    length = config.preprocessor.get("image_seq_length", 256)
    side = int(length**0.5) if isinstance(length, int) and length > 0 else 0
    size, patch = config.vision.number("image_size"), config.vision.number("patch_size")
    if not side or not patch:
        raise FormatError(
            f"{config.path}: patches of {patch} pixels, {short(length)} embeddings an image: both must be above 0",
            "QK-E112",
        )
    factor = size // patch // side
    return None if factor in (0, 4) else factor


def _ocr_keys(name: str, tiles: int) -> tuple[SetMmprojKeys, ...]:
    """Return the keys of a projector and the most tiles of an image."""
    return (
        projector(name),
        layer_norm_epsilon("layer_norm_eps", 1e-6),
        USE_GELU,
        Key(".vision.projector.scale_factor", _downsample_factor),
        EncoderKey(".vision.window_size", "window_size", default=14),
        constant(".vision.preproc_min_tiles", 2),
        constant(".vision.preproc_max_tiles", tiles),
        Key(".vision.sam.block_count", lambda config: _sam(config, "layers")),
        Key(".vision.sam.embedding_length", lambda config: _sam(config, "width")),
        Key(".vision.sam.head_count", lambda config: _sam(config, "heads")),
    )


def _prepend_dimension(tensor: Tensor, context: Context) -> Expression:
    return Shaped(tensor.x, (1, *tensor.x.shape))


def _drop_dimension(tensor: Tensor, context: Context) -> Expression:
    return Shaped(tensor.x, tensor.x.shape[1:]) if len(tensor.x.shape) > 1 else tensor.x


_OCR = Mmproj(
    _ocr_keys("deepseekocr", 9),
    tensors=r"^(?!lm_head\.|model\.(embed_tokens|layers|norm)\.)",
    stored=(Rename(r"(pos_embed|rel_pos_h|rel_pos_w)$", r"\1.weight"),),
    rules=(
        Transform(r"view_seperator$", _prepend_dimension, _drop_dimension),
        ForceType(r"\.embeddings\.|pos_embed|\.rel_pos_[hw]|\.neck\.|\.net_", TYPE_F32),
    ),
    patch_config=_patch_ocr,
)

#: Sizes of the Qwen2 encoder of DeepSeek-OCR-2, which config.json may omit.
_QWEN2_SIZES = {"layers": 24, "patch_size": 16, "intermediate_size": 4864, "num_attention_heads": 14}


def _patch_ocr2(config: MmprojConfig) -> None:
    _patch_ocr(config)
    vision = config.vision.values
    vision["hidden_size"] = _encoder(config, "qwen2-0-5b").get("dim")
    vision |= {name: size for name, size in _QWEN2_SIZES.items() if vision.get(name) is None}


_OCR2 = replace(
    _OCR,
    keys=(*_ocr_keys("deepseekocr2", 6), constant(".vision.attention.head_count_kv", 2)),
    patch_config=_patch_ocr2,
)


# --- DeepSeek V4 ----------------------------------------------------------------------------------------------------

#: Names of MmprojModel's settings -> their names in config.json.
_V4_NAMES = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "downsample_ratio": "vision_downsample_ratio",
    "min_pixels": "vision_min_pixels",
}
#: Settings with which clip.cpp computes, and which a file does not state.
_V4_LIMITS = {"vision_max_n_token": 384, "vision_max_wh_ratio": 8}


def _v4_vision(outer: Json) -> Json | None:
    return {"architectures": outer.get("architectures")} if outer.get("vision_n_layers") else None


def _patch_v4(config: MmprojConfig) -> None:
    model: Config = config.model
    for name, limit in _V4_LIMITS.items():
        if model[name] != limit:
            raise FormatError(f"{config.path}: {name} is {short(model[name])}; llama.cpp computes {limit}", "QK-E305")
    vision = config.vision.values
    vision |= {name: model.number(stored) for name, stored in _V4_NAMES.items()}
    vision["image_size"] = vision["patch_size"] * vision["downsample_ratio"] * 16
    for name in ("image_mean", "image_std"):
        config.preprocessor.values.setdefault(name, [0.5] * 3)


def _as_linear(tensor: Tensor, context: Context) -> Expression:
    return Shaped(tensor.x, (tensor.x.shape[0], math.prod(tensor.x.shape[1:])))


def _as_convolution(tensor: Tensor, context: Context) -> Expression:
    """Return the linear layer over patches as a convolution: [out, channels, height, width]."""
    assert isinstance(context.config, MmprojConfig)
    patch = context.config.vision.number("patch_size")
    return Shaped(tensor.x, (tensor.x.shape[0], 3, patch, patch))


_V4 = Mmproj(
    (
        projector("deepseek4v"),
        constant(".vision.attention.layer_norm_epsilon", 1e-6, "f32"),
        USE_SILU,
        EncoderKey(".vision.projector.scale_factor", "downsample_ratio"),
        EncoderKey(".vision.image_min_pixels", "min_pixels"),
    ),
    tensors=r"^(vision\.|aligner\.|image_)",
    rules=(
        Transform(r"^vision\.patch_embed\.proj\.weight$", _as_convolution, _as_linear),
        Split(r"\.mlp\.w1\.", (".mlp.w1_gate.", ".mlp.w1_up.")),
    ),
    vision_config=_v4_vision,
    patch_config=_patch_v4,
)

MMPROJ = {
    "DeepseekOCRForCausalLM": _OCR,
    "UnlimitedOCRForCausalLM": replace(_OCR, keys=_ocr_keys("deepseekocr", 32)),
    "DeepseekOCR2ForCausalLM": _OCR2,
    "DeepseekV4ForCausalLM": _V4,
}


# --- export ----------------------------------------------------------------------------------------------------------


def _sam_config(meta: ClipMetadata) -> Json:
    """Return the settings of SAM's encoder by the names of remote code; layers of whole images have longer tables."""
    layers = meta.number(".vision.sam.block_count")
    positions = [meta.shape(f"v.sam.blk.{i}.attn.pos_h.weight")[0] for i in range(layers)]
    windowed = 2 * meta.number(".vision.window_size") - 1
    return {
        "downsample_channels": [meta.shape(f"v.sam.net_{i}.weight")[0] for i in (2, 3)],
        "global_attn_indexes": [i for i, count in enumerate(positions) if count != windowed],
        "heads": meta.number(".vision.sam.head_count"),
        "layers": layers,
        "width": meta.number(".vision.sam.embedding_length"),
    }


def _sam_image_size(meta: ClipMetadata) -> int:
    return meta.shape("v.sam.pos_embd.weight")[1] * meta.shape("v.sam.patch_embd.weight")[-1]


def _set_ocr(meta: ClipMetadata, config: Json) -> None:
    """Describe the encoders of DeepSeek-OCR: SAM's, then CLIP's."""
    clip = {
        "heads": meta.number(".vision.attention.head_count"),
        "image_size": meta.number(".vision.image_size"),
        "layers": meta.number(".vision.block_count"),
        "patch_size": meta.number(".vision.patch_size"),
        "width": meta.number(".vision.embedding_length"),
    }
    config["vision_config"] = {
        "model_type": "vision",
        "model_name": "deeplip_b_l",
        "image_size": _sam_image_size(meta),
        "width": {"clip-l-14-224": clip, "sam_vit_b": _sam_config(meta)},
    }
    config["language_config"]["architectures"] = ["DeepseekV2ForCausalLM"]


def _set_ocr2(meta: ClipMetadata, config: Json) -> None:
    """Describe the encoders of DeepSeek-OCR-2, SAM's, then Qwen2's, by the names of remote code and of transformers."""
    sam, width = _sam_config(meta), meta.number(".vision.embedding_length")
    qwen2 = {
        "num_attention_heads": meta.number(".vision.attention.head_count"),
        "intermediate_size": meta.number(".vision.feed_forward_length"),
    }
    layers, patch = meta.number(".vision.block_count"), meta.number(".vision.patch_size")
    config["vision_config"] = {
        "model_type": "vision",
        "model_name": "deepencoderv2",
        "image_size": meta.number(".vision.image_size"),
        "layers": layers,
        "patch_size": patch,
        **qwen2,
        "width": {"sam_vit_b": sam, "qwen2-0-5b": {"dim": width}},
        "sam_config": {
            "hidden_size": sam["width"],
            "num_hidden_layers": sam["layers"],
            "num_attention_heads": sam["heads"],
            "image_size": _sam_image_size(meta),
            "patch_size": meta.shape("v.sam.patch_embd.weight")[-1],
            "output_channels": meta.shape("v.sam.neck.0.weight")[0],
            "mlp_dim": meta.shape("v.sam.blk.0.mlp.lin1.weight")[0],
            "window_size": meta.number(".vision.window_size"),
            "global_attn_indexes": sam["global_attn_indexes"],
            "downsample_channels": sam["downsample_channels"],
        },
        "encoder_config": {
            **qwen2,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_key_value_heads": meta.number(".vision.attention.head_count_kv"),
        },
    }
    text = config["language_config"]
    text["architectures"] = ["DeepseekV2ForCausalLM"]
    kinds = ["dense" if i < text["first_k_dense_replace"] else "sparse" for i in range(text["num_hidden_layers"])]
    config["text_config"] = text | {"model_type": "deepseek_ocr2_text", "mlp_layer_types": kinds}


def _set_v4(meta: ClipMetadata, config: Json) -> None:
    """Describe the tower of DeepSeek V4, beside the settings of the text model."""
    config |= {
        "vision_n_layers": meta.number(".vision.block_count"),
        "vision_dim": meta.number(".vision.embedding_length"),
        "vision_n_heads": meta.number(".vision.attention.head_count"),
        "vision_inter_dim": meta.number(".vision.feed_forward_length"),
        "vision_patch_size": meta.number(".vision.patch_size"),
        "vision_downsample_ratio": meta.number(".vision.projector.scale_factor"),
        "vision_min_pixels": meta.number(".vision.image_min_pixels"),
        "vision_rope_theta": 10000.0,
        **_V4_LIMITS,
    }


def _v4_preprocessor(meta: ClipMetadata) -> Json:
    return {name: meta.get(f".vision.{name}") for name in ("image_mean", "image_std")}


def _ocr_preprocessor(meta: ClipMetadata) -> Json:
    values = image_values(meta, "DeepseekVLV2Processor")
    if (factor := meta.get(".vision.projector.scale_factor")) is not None:
        side = meta.number(".vision.image_size") // max(1, meta.number(".vision.patch_size")) // max(1, factor)
        values["image_seq_length"] = side**2
    return values


_OCR_TEXT = replace(deepseek.CLASSES["DeepseekOCRForCausalLM"], note="")
_OCR_ENCODERS = HfEncoders(
    "deepseekocr",
    replace(_OCR_TEXT, note=f"DeepseekOCRForCausalLM {REMOTE_NOTE}"),
    "model.sam_model. model.vision_model.transformer. model.vision_model.embeddings. model.vision_model.pre_layrnorm "
    "model.projector model.image_newline model.view_seperator",
    _set_ocr,
    _ocr_preprocessor,
    matches=lambda meta: meta.get(".vision.preproc_max_tiles") == 9,
)
HF_ENCODERS: dict[str, HfEncoders] = {
    "DeepseekOCRForCausalLM": _OCR_ENCODERS,
    "UnlimitedOCRForCausalLM": replace(_OCR_ENCODERS, matches=lambda meta: meta.get(".vision.preproc_max_tiles") == 32),
    "DeepseekOCR2ForCausalLM": replace(
        _OCR_ENCODERS,
        projector="deepseekocr2",
        text=replace(_OCR_TEXT, outer_type="deepseek_ocr2"),
        names="model.sam_model. model.qwen2_model. model.projector model.view_seperator",
        set_config=_set_ocr2,
        text_class="DeepseekOCRForCausalLM",
        matches=lambda meta: True,
    ),
    "DeepseekV4ForCausalLM": HfEncoders(
        "deepseek4v",
        replace(
            deepseek4.CLASSES["DeepseekV4ForCausalLM"],
            note="DeepseekV4ForCausalLM of transformers loads the text model only, without the tower",
        ),
        "vision. aligner. image_",
        _set_v4,
        _v4_preprocessor,
    ),
}

"""The encoders of Qwen's vision and audio models: Qwen2-VL to Qwen3.5, Omni and ASR; of Sarashina 2.2 and Clef.

Facts of llama.cpp b11434, conversion/qwenvl.py, conversion/qwen3vl.py, conversion/qwen4exp.py,
conversion/sarashina2.py, conversion/clef.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from quantkit.checkpoint import vector_math
from quantkit.checkpoint.config import Json
from quantkit.checkpoint.encoder_rules import ForceType, NameInFile, SplitFrames, add_axes
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.expressions import TYPE_F16, TYPE_F32, Array
from quantkit.checkpoint.hf_encoders import HfEncoders, add_token_ids, audio_preprocessor, image_values
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import (
    MERGE_SIZE,
    USE_GELU,
    EncoderKey,
    FindPart,
    Key,
    Mmproj,
    MmprojConfig,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.models import qwen, qwen3_next
from quantkit.checkpoint.rules import Rename, Split, Transform, flatten
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def rename_counts(config: MmprojConfig) -> None:
    """Copy the numbers of heads and layers of a vision encoder to their usual names."""
    vision = config.vision.values
    vision["num_attention_heads"], vision["num_hidden_layers"] = vision.get("num_heads"), vision.get("depth")


# --- Qwen2-VL, Qwen2.5-VL -------------------------------------------------------------------------------------------


def patch_qwen2(config: MmprojConfig) -> None:
    """Default the size of images; Qwen2-VL calls the width embed_dim, and that of the text model hidden_size."""
    vision = config.vision.values
    vision["image_size"] = vision.get("image_size", 560)
    rename_counts(config)
    if "embed_dim" in vision:
        vision["intermediate_size"], vision["hidden_size"] = vision.get("hidden_size"), vision.get("embed_dim")


_QWEN2_PROJECTORS = {
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen2_5_omni": "qwen2.5o",
}


@dataclass(frozen=True)
class _Qwen2Keys:
    """The projector and the period of layers with full attention (Qwen2VLVisionModel)."""

    @property
    def projectors(self) -> Mapping[str, tuple[str, ...]]:
        """The types that each key may have."""
        return {"clip.projector_type": ("qwen2vl_merger", "qwen2.5vl_merger")}

    def __call__(self, keys: Keys, config: MmprojConfig) -> None:
        kind = config.model["model_type"]
        if kind not in _QWEN2_PROJECTORS:
            raise FormatError(
                f"{config.path}: model_type is {short(kind)}; those of Qwen2-VL's encoders are "
                f"{', '.join(_QWEN2_PROJECTORS)}",
                "QK-E305",
            )
        keys.text("clip.projector_type", _QWEN2_PROJECTORS[kind])
        if kind == "qwen2_vl":
            return
        keys.flag("clip.use_silu", True)
        write_period(keys, config)


def write_period(keys: Keys, config: MmprojConfig) -> None:
    """Write the period of layers with full attention."""
    layers = config.vision.get("fullatt_block_indexes")
    if not isinstance(layers, list) or not layers or any(type(layer) is not int for layer in layers):
        raise FormatError(f"{config.path}: fullatt_block_indexes is {short(layers)}, not a list of layers", "QK-E112")
    period = layers[0] + 1
    if any(after - before != period for before, after in zip(layers, layers[1:], strict=False)):
        raise FormatError(f"{config.path}: fullatt_block_indexes {short(layers)} has no period", "QK-E305")
    keys.u32(".vision.n_wa_pattern", period)


QWEN2_RULES = (
    SplitFrames(r"patch_embed\.proj\.weight"),
    Split(r"\.qkv\.", (".q.", ".k.", ".v.")),
)
_QWEN2_EPSILON = layer_norm_epsilon("rms_norm_eps", 1e-6, section="model")
QWEN2_VL = Mmproj(
    (_Qwen2Keys(), _QWEN2_EPSILON),
    tensors=r"^visual\.",
    rules=QWEN2_RULES,
    forced=((".position_embd.", TYPE_F32),),
    patch_config=patch_qwen2,
)


# --- Qwen3-VL, Qwen3.5 ----------------------------------------------------------------------------------------------


def patch_qwen3(config: MmprojConfig) -> None:
    """Derive the size of images from the number of position embeddings."""
    vision = config.vision.values
    if "image_size" not in vision:
        positions, patch = vision.get("num_position_embeddings", 2304), vision.get("patch_size", 16)
        vision["image_size"] = int(positions**0.5 * patch)
    rename_counts(config)


def _deepstack_layers(config: MmprojConfig) -> list[int]:
    """Return the layers whose outputs go to the text model."""
    layers, count = config.vision.get("deepstack_visual_indexes", []), config.vision.number("num_hidden_layers")
    if not isinstance(layers, list) or any(type(layer) is not int or not 0 <= layer < count for layer in layers):
        raise FormatError(
            f"{config.path}: deepstack_visual_indexes is {short(layers)}, not a list of layers below {count}",
            "QK-E112",
        )
    return layers


def _deepstack_flags(config: MmprojConfig) -> list[bool]:
    layers = _deepstack_layers(config)
    return [layer in layers for layer in range(config.vision.number("num_hidden_layers"))]


#: The ends of names of mergers of intermediate outputs: in files, and in checkpoints.
_DEEPSTACK = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


@dataclass(frozen=True)
class _NameDeepstack(Rule):
    """Names the mergers of intermediate outputs by the layers of these."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.match(r"visual\.deepstack_merger_list\.(\d+)\.(norm|linear_fc([12]))\.(.*)", tensor.name)
        if match is None:
            return None
        assert isinstance(context.config, MmprojConfig)
        layers = _deepstack_layers(context.config)
        if int(match[1]) >= len(layers):
            raise context.fail(tensor, f"deepstack_visual_indexes has {len(layers)} layers", "QK-E107")
        kind = "norm" if match[2] == "norm" else f"fc{match[3]}"
        return (replace(tensor, name_in_file=f"v.deepstack.{layers[int(match[1])]}.{kind}.{match[4]}"),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Number the mergers again in the order of their layers."""
        match = re.match(r"(visual\.deepstack_merger_list\.)(\d+)(\..*)", tensor.name)
        if match is None:
            return None
        assert isinstance(context.config, MmprojConfig)
        layers = _deepstack_layers(context.config)
        if int(match[2]) not in layers:
            raise context.fail(tensor, f"the outputs of layer {match[2]} do not go to the text model", "QK-E107")
        return (replace(tensor, name=f"{match[1]}{layers.index(int(match[2]))}{match[3]}"),)


QWEN3_STORED = (Rename(r"^model\.visual\.", "visual."),)
QWEN3_PATCHES = (
    SplitFrames(r"^visual\.patch_embed\.proj\.weight$"),
    NameInFile(r"^visual\.patch_embed\.proj\.bias$", "v.patch_embd.bias"),
)
_QWEN3_MERGER = (
    _NameDeepstack(),
    NameInFile(r"^visual\.merger\.linear_fc1\.", "mm.0."),
    NameInFile(r"^visual\.merger\.linear_fc2\.", "mm.2."),
    NameInFile(r"^visual\.merger\.norm\.", "v.post_ln."),
)
QWEN3_ENCODER_KEYS = (
    USE_GELU,
    MERGE_SIZE,
    Key(
        ".vision.attention.layer_norm_epsilon",
        lambda config: config.outer["text_config"].get("rms_norm_eps", 1e-6),
        "f32",
    ),
)
_QWEN3_KEYS = (
    *QWEN3_ENCODER_KEYS,
    Key(".vision.is_deepstack_layers", _deepstack_flags, "array"),
)
QWEN3_VL = Mmproj(
    (projector("qwen3vl_merger"), *_QWEN3_KEYS),
    tensors=r"^visual\.",
    stored=QWEN3_STORED,
    rules=(*_QWEN3_MERGER, *QWEN3_PATCHES),
    patch_config=patch_qwen3,
)


# --- Omni and ASR ---------------------------------------------------------------------------------------------------


def _patch_audio(config: MmprojConfig) -> None:
    audio = config.audio.values
    audio["hidden_size"], audio["intermediate_size"], audio["num_attention_heads"] = (
        config.audio[name] for name in ("d_model", "encoder_ffn_dim", "encoder_attention_heads")
    )


def _patch_omni(config: MmprojConfig) -> None:
    _patch_audio(config)
    patch_qwen2(config)


def _patch_omni3(config: MmprojConfig) -> None:
    _patch_audio(config)
    patch_qwen3(config)


def _positions(config: MmprojConfig) -> list[Tensor]:
    """Return the sinusoidal positions of 1500 frames, [1500, width] (SinusoidsPositionEmbedding)."""
    half = config.audio.number("hidden_size") // 2
    if half < 2:
        raise FormatError(f"{config.path}: the audio encoder is {2 * half} values wide", "QK-E112")
    exponents = np.float32(-np.log(10000) / (half - 1)) * np.arange(half, dtype=np.float32)
    angles = np.arange(1500, dtype=np.float32)[:, None] * vector_math.exp(exponents)[None, :]
    values = np.concatenate([vector_math.sin(angles), vector_math.cos(angles)], axis=1)
    return [Tensor("audio_tower.embed_positions.weight", Array(values), None)]


def _of_thinker(name: str) -> FindPart:
    """Return where a part lies in the configuration of an Omni model."""

    def find(outer: Json) -> object:
        thinker = outer.get("thinker_config")
        return thinker.get(name) if isinstance(thinker, dict) else None

    return find


_AUDIO_QWEN_KEYS = (
    EncoderKey(".audio.num_mel_bins", "num_mel_bins", section="audio"),
    layer_norm_epsilon("layer_norm_eps", 1e-5, section="audio"),
)
_F16_CONVOLUTIONS = ForceType(r"\.conv.*\.weight", TYPE_F16)
_QWEN25_OMNI = Mmproj(
    (*_AUDIO_QWEN_KEYS, *QWEN2_VL.keys, projector("qwen2.5o")),
    tensors=r"^(visual|audio_tower)\.(?!.*audio_bos_eos_token)",
    stored=(Rename(r"thinker\.", ""),),
    rules=(
        *QWEN2_RULES,
        Transform(r"^audio_tower\..*conv[12]\.bias", add_axes(0, 1), None),
        _F16_CONVOLUTIONS,
    ),
    forced=QWEN2_VL.forced,
    audio=True,
    patch_config=_patch_omni,
    synthetic=_positions,
    vision_config=_of_thinker("vision_config"),
    audio_config=_of_thinker("audio_config"),
)

#: The names of Qwen 3 Omni's mergers -> those of Qwen3-VL.
_OMNI3_STORED = (
    *QWEN3_STORED,
    Rename(r"^thinker\.audio_tower\.", "audio_tower."),
)
_OMNI3_RULES = (
    Rename(r"^visual\.merger_list\.", "visual.deepstack_merger_list."),
    *(
        Rename(rf"(^visual\.(?:deepstack_merger_list|merger)\..*)\b{old}\b", rf"\1{new}")
        for old, new in (("ln_q", "norm"), (r"mlp\.0", "linear_fc1"), (r"mlp\.2", "linear_fc2"))
    ),
    Transform(r"^audio_tower\..*conv2d.*\.bias$", add_axes(0, 2), flatten),
    Transform(r"^audio_tower\..*conv[12]\.bias", add_axes(0, 1), flatten),
    _F16_CONVOLUTIONS,
    *QWEN3_VL.rules,
)
_QWEN3_OMNI = Mmproj(
    (
        *_AUDIO_QWEN_KEYS,
        *_QWEN3_KEYS,
        projector("qwen3vl_merger", "clip.vision.projector_type"),
        projector("qwen3a", "clip.audio.projector_type"),
    ),
    tensors=r"visual\.|audio_tower\.",
    stored=_OMNI3_STORED,
    rules=_OMNI3_RULES,
    audio=True,
    patch_config=_patch_omni3,
    synthetic=_positions,
    vision_config=_of_thinker("vision_config"),
    audio_config=_of_thinker("audio_config"),
)
_QWEN3_ASR = replace(
    _QWEN3_OMNI,
    vision=False,
    keys=(*_AUDIO_QWEN_KEYS, projector("qwen3a", "clip.audio.projector_type")),
    patch_config=_patch_audio,
)

MMPROJ: dict[str, Mmproj] = {
    **dict.fromkeys(
        ("Qwen2VLModel", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), QWEN2_VL
    ),
    **dict.fromkeys(
        (
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "OpenJevModel",
            "Qwen4ExpForConditionalGeneration",
            "ClefModel",
        ),
        QWEN3_VL,
    ),
    "Sarashina2VisionForCausalLM": replace(QWEN2_VL, keys=(projector("qwen2vl_merger"), _QWEN2_EPSILON)),
    "Qwen2_5OmniModel": _QWEN25_OMNI,
    "Qwen3OmniMoeForConditionalGeneration": _QWEN3_OMNI,
    "Qwen3ASRForConditionalGeneration": _QWEN3_ASR,
}


# --- export ---------------------------------------------------------------------------------------------------------


def _blocks(meta: ClipMetadata, width: str) -> Json:
    """Return the settings of a tower that all of these classes have; ``width``: the name of its width."""
    names = {"embedding_length": width, "block_count": "depth", "attention.head_count": "num_heads"}
    settings = meta.counts({**names, "patch_size": "patch_size"})
    merged = meta.shape("mm.0.weight")[1] // max(1, settings[width])
    frames = sum(name.startswith("v.patch_embd.weight") for name in meta.model.tensors)
    channels = meta.shape("v.patch_embd.weight")[1]
    return settings | {
        "spatial_merge_size": math.isqrt(merged),
        "temporal_patch_size": frames,
        "in_channels": channels,
        "in_chans": channels,
    }


def _add_tokens(meta: ClipMetadata, config: Json) -> None:
    add_token_ids(
        meta,
        config,
        image_token_id="<|image_pad|>",
        video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>",
        vision_end_token_id="<|vision_end|>",
    )


def _set_qwen2(meta: ClipMetadata, config: Json) -> None:
    """Describe the tower of Qwen2-VL, whose hidden_size is the width of the text model."""
    vision = _blocks(meta, "embed_dim")
    rows, width = meta.shape("v.blk.0.ffn_up.weight")[:2]
    vision |= {"mlp_ratio": rows // width if rows % width == 0 else rows / width}
    config["vision_config"] = vision | {
        "hidden_size": meta.shape("mm.2.weight")[0],
        "image_size": meta.number(".vision.image_size"),
    }
    _add_tokens(meta, config)


def set_qwen25(meta: ClipMetadata, config: Json) -> None:
    """Describe the tower of Qwen2.5-VL; layers with full attention have a period."""
    vision = _blocks(meta, "hidden_size")
    period = meta.get(".vision.n_wa_pattern")
    full = [] if period is None else list(range(int(period) - 1, vision["depth"], max(1, int(period))))
    config["vision_config"] = vision | {
        "intermediate_size": meta.number(".vision.feed_forward_length"),
        "out_hidden_size": meta.shape("mm.2.weight")[0],
        "fullatt_block_indexes": full,
        "image_size": meta.number(".vision.image_size"),
    }
    _add_tokens(meta, config)


def set_qwen3(meta: ClipMetadata, config: Json) -> None:
    """Describe the tower of Qwen3-VL and Qwen3.5."""
    flags = meta.get(".vision.is_deepstack_layers") or []
    config["vision_config"] = _blocks(meta, "hidden_size") | {
        "intermediate_size": meta.number(".vision.feed_forward_length"),
        "out_hidden_size": meta.shape("mm.2.weight")[0],
        "num_position_embeddings": meta.shape("v.position_embd.weight")[0],
        "deepstack_visual_indexes": [layer for layer, flag in enumerate(flags) if flag],
    }
    _add_tokens(meta, config)


def qwen_preprocessor(meta: ClipMetadata) -> Json:
    vision = _blocks(meta, "hidden_size")
    sizes = {"merge_size": vision["spatial_merge_size"], "temporal_patch_size": vision["temporal_patch_size"]}
    return image_values(meta, "Qwen2VLImageProcessor") | {"patch_size": vision["patch_size"]} | sizes


QWEN25_NAMES = "visual.blocks.*.mlp.up_proj visual.blocks.*.mlp.down_proj visual."
QWEN2_KINDS = {"v.post_ln": "visual.merger.ln_q"}
QWEN3_NAMES = "visual.blocks.*.mlp.linear visual."
_QWEN3_KINDS = {
    "v.post_ln": "visual.merger.norm",
    "mm.0": "visual.merger.linear_fc1",
    "mm.2": "visual.merger.linear_fc2",
    **{f"v.deepstack.#.{end}": f"visual.deepstack_merger_list.*.{name}" for end, name in _DEEPSTACK.items()},
}
_QWEN3_ENCODERS = HfEncoders(
    "qwen3vl_merger",
    qwen.CLASSES["Qwen3VLForConditionalGeneration"],
    QWEN3_NAMES,
    set_qwen3,
    qwen_preprocessor,
    _QWEN3_KINDS,
)
_QWEN35 = qwen3_next.CLASSES["Qwen3_5MoeForConditionalGeneration"]


def _set_qwen3_asr(meta: ClipMetadata, config: Json) -> None:
    """Describe the encoder of Qwen3-ASR. Files lack the lengths of its windows: these are those of the release."""
    thinker = config["thinker_config"]
    thinker["model_type"] = "qwen3_asr"
    thinker["audio_config"] = {
        "model_type": "qwen3_asr_audio_encoder",
        "d_model": meta.number(".audio.embedding_length"),
        "encoder_ffn_dim": meta.number(".audio.feed_forward_length"),
        "encoder_layers": meta.number(".audio.block_count"),
        "num_hidden_layers": meta.number(".audio.block_count"),
        "encoder_attention_heads": meta.number(".audio.attention.head_count"),
        "num_mel_bins": meta.number(".audio.num_mel_bins"),
        "downsample_hidden_size": meta.shape("a.conv2d.1.weight")[0],
        "output_dim": meta.shape("mm.a.mlp.2.weight")[0],
        "max_source_positions": meta.shape("a.position_embd.weight")[0],
        "activation_function": "gelu",
        "scale_embedding": False,
        "n_window": 50,
        "n_window_infer": 800,
        "conv_chunksize": 500,
    }
    add_token_ids(
        meta, thinker, audio_token_id="<|audio_pad|>", audio_start_token_id="<|audio_start|>",
        audio_end_token_id="<|audio_end|>",
    )  # fmt: skip


_QWEN3_ASR_TEXT = replace(
    qwen.CLASSES["Qwen3VLForConditionalGeneration"],
    model_type="qwen3_asr_text",
    config_setters=(config_values.interleave_sections,),
    renames=((r"^", "thinker."),),
    outer_type="qwen3_asr",
    text_key="thinker_config.text_config",
    note="Qwen3-ASR's names are those of Qwen's own package qwen-asr; transformers 5.18 has others",
)
HF_ENCODERS: dict[str, HfEncoders] = {
    "Qwen2VLForConditionalGeneration": HfEncoders(
        "qwen2vl_merger",
        qwen.CLASSES["Qwen2VLForConditionalGeneration"],
        "visual.blocks.*.mlp.fc visual.",
        _set_qwen2,
        qwen_preprocessor,
        QWEN2_KINDS,
    ),
    "Qwen2_5_VLForConditionalGeneration": HfEncoders(
        "qwen2.5vl_merger",
        qwen.CLASSES["Qwen2_5_VLForConditionalGeneration"],
        QWEN25_NAMES,
        set_qwen25,
        qwen_preprocessor,
        QWEN2_KINDS,
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3_ENCODERS,
    "Qwen3VLMoeForConditionalGeneration": replace(
        _QWEN3_ENCODERS, text=qwen.CLASSES["Qwen3VLMoeForConditionalGeneration"]
    ),
    "Qwen3_5ForConditionalGeneration": replace(
        _QWEN3_ENCODERS,
        text=replace(qwen3_next.CLASSES["Qwen3_5ForCausalLM"], renames=_QWEN35.renames, outer_type="qwen3_5"),
    ),
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN3_ENCODERS, text=_QWEN35),
    "Qwen3ASRForConditionalGeneration": HfEncoders(
        "qwen3a",
        _QWEN3_ASR_TEXT,
        "audio_tower.",
        _set_qwen3_asr,
        audio_preprocessor,
        {"a.post_ln": "audio_tower.ln_post"},
    ),
}

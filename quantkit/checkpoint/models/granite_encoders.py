"""The encoders of Granite Speech and Granite 4 Vision.

Facts of llama.cpp b11434, conversion/granite.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from quantkit.checkpoint.batch_norm import FoldBatchNorm
from quantkit.checkpoint.config import Json
from quantkit.checkpoint.encoder_rules import ForceType, add_axes, remove_axis
from quantkit.checkpoint.export.clip_metadata import ClipMetadata, without_null
from quantkit.checkpoint.expressions import TYPE_F32, Expression
from quantkit.checkpoint.hf_encoders import USUAL_COUNTS, HfEncoders, add_token_ids, image_values, of_text_class
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import (
    USE_GELU,
    EncoderKey,
    Key,
    Mmproj,
    MmprojConfig,
    constant,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.models import granite
from quantkit.checkpoint.models.granite import projectors
from quantkit.checkpoint.rules import Drop, Split, Transform, unsqueeze_channels
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

# --- Granite Speech -------------------------------------------------------------------------------------------------


def _patch_speech(config: MmprojConfig) -> None:
    """Copy the sizes of the conformer to their usual names."""
    audio = config.audio
    audio.values |= {
        "hidden_size": audio.number("hidden_dim"),
        "intermediate_size": audio.number("hidden_dim") * audio.number("feedforward_mult"),
        "num_attention_heads": audio["num_heads"],
        "num_hidden_layers": audio["num_layers"],
    }


def _projector_heads(config: MmprojConfig) -> int:
    return config.model.table("projector_config")["num_attention_heads"]  # type: ignore[no-any-return]


def _set_feature_layers(keys: Keys, config: MmprojConfig) -> None:
    """Set the layers whose outputs the projector gets beside that of the last."""
    layers = config.audio.get("cat_hidden_layers")
    if not layers:
        return
    keys.array(".audio.feature_layer", layers)
    width = config.audio.number("hidden_dim") * (len(layers) + 1)
    stated = config.model.table("projector_config").get("encoder_hidden_size")
    if stated != width:
        raise FormatError(
            f"{config.path}: encoder_hidden_size of projector_config is {short(stated)}, not {width}: that of the last "
            f"layer and of cat_hidden_layers {short(layers)}",
            "QK-E112",
        )


def _squeeze_column(tensor: Tensor, context: Context) -> Expression:
    """Return a convolution of width 1 as a matrix."""
    return remove_axis(2)(tensor, context) if tensor.x.shape[2:] == (1,) else tensor.x


def _squeeze_channel(tensor: Tensor, context: Context) -> Expression:
    """Return a convolution of single channels as a matrix."""
    return remove_axis(1)(tensor, context) if len(tensor.x.shape) == 3 and tensor.x.shape[1] == 1 else tensor.x


_SPEECH = Mmproj(
    (
        projector("granite_speech"),
        EncoderKey(".audio.num_mel_bins", "input_dim", section="audio"),
        constant(".audio.attention.layer_norm_epsilon", 1e-5, "f32"),
        EncoderKey(".audio.chunk_size", "context_size", section="audio"),
        EncoderKey(".audio.conv_kernel_size", "conv_kernel_size", section="audio"),
        EncoderKey(".audio.max_pos_emb", "max_pos_emb", section="audio"),
        EncoderKey(".audio.projector.window_size", "window_size", section="model"),
        EncoderKey(".audio.projector.downsample_rate", "downsample_rate", section="model"),
        Key(".audio.projector.head_count", _projector_heads),
    ),
    stored=(Drop(r"attention_dists|num_batches_tracked"),),
    rules=(
        ForceType(r"^(?=.*(encoder|projector))(?=.*\.conv).*\.weight", TYPE_F32),
        FoldBatchNorm(r"encoder\.layers\.\d+\.conv\.batch_norm\.", 4),
        Split(r"\.attn\.to_kv\.", (".attn.to_k.", ".attn.to_v.")),
        Transform(r"(up|down)_conv.*\.weight$", _squeeze_column, add_axes(0, 1)),
        Transform(r"depth_conv.*\.weight$", _squeeze_channel, unsqueeze_channels),
    ),
    vision=False,
    audio=True,
    audio_config=lambda outer: outer.get("encoder_config"),
    patch_config=_patch_speech,
)


# --- Granite 4 Vision -----------------------------------------------------------------------------------------------


def _set_windows(keys: Keys, config: MmprojConfig) -> None:
    """Set the sides of windows and of the queries in them: downsample_rate is "queries/window"."""
    rate = config.model["downsample_rate"]
    match = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", rate) if isinstance(rate, str) else None
    if match is None:
        raise FormatError(f"{config.path}: downsample_rate is {short(rate)}, not a fraction", "QK-E112")
    keys.u32(".vision.projector.query_side", int(match[1]))
    keys.u32(".vision.projector.window_side", int(match[2]))


def _grid(config: MmprojConfig) -> list[Any]:
    """Return the resolutions of images, width before height."""
    return [side for height, width in config.model.get("image_grid_pinpoints") or [] for side in (width, height)]


@dataclass(frozen=True)
class _NumberProjectors(Rule):
    """Numbers the projectors in order, in place of their layers, of which each has one."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.match(r"(model\.(layerwise|spatial)_projectors)\.(\d+)\.(.*)", tensor.name)
        if match is None:
            return None
        assert isinstance(context.config, MmprojConfig)
        names = [(item.kind, str(item.number)) for item in projectors(context.config.model)]
        if (match[2], match[3]) not in names:
            return None
        number = names.index((match[2], match[3]))
        end, count = re.subn(r"\.\d+\.", f".{number}.", match[4])
        if count > 1:
            raise context.fail(tensor, "its name has more than two numbers", "QK-E107")
        return (replace(tensor, name=f"{match[1]}.{end}" if count else f"{match[1]}.{number}.{match[4]}"),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Return a projector to its kind, and its number there; each has one layer."""
        match = re.fullmatch(r"model\.layerwise_projectors\.(.*\.layer\.)?(\d+)\.(.*)", tensor.name)
        if match is None:
            return None
        assert isinstance(context.config, MmprojConfig)
        rows = projectors(context.config.model)
        if int(match[2]) >= len(rows):
            raise context.fail(tensor, f"of projector {match[2]}, but there are {len(rows)}", "QK-E107")
        row, layer = rows[int(match[2])], f"{match[1]}0." if match[1] else ""
        return (replace(tensor, name=f"model.{row.kind}_projectors.{row.number}.{layer}{match[3]}"),)


_VISION = Mmproj(
    (
        projector("granite4_vision"),
        layer_norm_epsilon("layer_norm_eps", 1e-6),
        USE_GELU,
        EncoderKey(".vision.preproc_image_size", "image_size", default=384),
        _set_windows,
        Key(".vision.feature_layer", lambda config: [item.layer for item in projectors(config.model)], "array"),
        Key(
            ".vision.projector.spatial_offsets",
            lambda config: [item.number if item.kind == "spatial" else -1 for item in projectors(config.model)],
            "array",
        ),
        Key(".vision.image_grid_pinpoints", _grid, "array"),
    ),
    stored=(Drop(r"vision_model\.head|^lm_head"),),
    rules=(_NumberProjectors(),),
)

MMPROJ: dict[str, Mmproj] = {
    "GraniteSpeechForConditionalGeneration": _SPEECH,
    "GraniteSpeechPlusForConditionalGeneration": replace(_SPEECH, keys=(*_SPEECH.keys, _set_feature_layers)),
    "Granite4VisionForConditionalGeneration": _VISION,
}


# --- export ----------------------------------------------------------------------------------------------------------


def _set_granite4(meta: ClipMetadata, config: Json) -> None:
    """Describe SigLIP's tower and the projectors, by layers counted from the last, as the published models.

    The text model's file has the layer that gets each output but the first, which is its input.
    """
    vision = meta.counts(USUAL_COUNTS) | {"model_type": "siglip_vision_model", "vision_use_head": False}
    config["vision_config"] = vision | {"layer_norm_eps": meta.get(".vision.attention.layer_norm_epsilon")}
    mapping = list(meta.text.get(".deepstack_mapping") or [])
    layers, spatial = meta.get(".vision.feature_layer") or [], meta.get(".vision.projector.spatial_offsets") or []
    rows = [
        (layer - vision["num_hidden_layers"], mapping.index(number) if number else 0, offset)
        for number, (layer, offset) in enumerate(zip(layers, spatial, strict=True))
    ]
    of_areas = sorted((offset, target) for _, target, offset in rows if offset >= 0)
    sides = meta.get(".vision.image_grid_pinpoints") or []
    width = vision["hidden_size"]
    config["qformer_config"] = {
        "model_type": "blip_2_qformer",
        "num_hidden_layers": 1,
        "hidden_size": width,
        "encoder_hidden_size": width,
        "num_attention_heads": max(1, width // 64),
        "intermediate_size": meta.shape("v.proj_blk.0.ffn_up.weight")[0],
        "cross_attention_frequency": 1,
        "max_position_embeddings": 2048,
    }
    config |= {
        "deepstack_layer_map": sorted([layer, target] for layer, target, offset in rows if offset < 0),
        "spatial_target_layers": [target for _, target in of_areas],
        "spatial_vision_layer": next((layer for layer, _, offset in rows if offset >= 0), -1),
        "use_spatial_sampling": bool(of_areas),
        "downsample_rate": "/".join(str(meta.number(f".vision.projector.{x}_side")) for x in ("query", "window")),
        "image_grid_pinpoints": [list(pair) for pair in zip(sides[1::2], sides[::2], strict=True)],
    }
    add_token_ids(meta, config, image_token_id="<image>")


def _set_speech(meta: ClipMetadata, config: Json) -> None:
    """Describe the conformer of Granite Speech and its Q-Former. The release's adapter is a file of its own."""
    hidden = meta.number(".audio.embedding_length")
    config["encoder_config"] = without_null(
        {
            "model_type": "granite_speech_encoder",
            "input_dim": meta.number(".audio.num_mel_bins"),
            "num_layers": meta.number(".audio.block_count"),
            "hidden_dim": hidden,
            "feedforward_mult": meta.number(".audio.feed_forward_length") // max(1, hidden),
            "num_heads": meta.number(".audio.attention.head_count"),
            "dim_head": meta.shape("a.blk.0.attn_rel_pos_emb")[1],
            "output_dim": meta.shape("a.enc_ctc_out.weight")[0],
            "context_size": meta.number(".audio.chunk_size"),
            "max_pos_emb": meta.number(".audio.max_pos_emb"),
            "conv_kernel_size": meta.number(".audio.conv_kernel_size"),
            "conv_expansion_factor": meta.shape("a.blk.0.conv_dw.weight")[0] // max(1, hidden),
            "cat_hidden_layers": meta.get(".audio.feature_layer"),
        }
    )
    config["projector_config"] = {
        "model_type": "blip_2_qformer",
        "num_hidden_layers": sum(name.endswith(".self_attn_q.weight") for name in meta.model.tensors),
        "hidden_size": meta.shape("a.proj_query")[2],
        "encoder_hidden_size": meta.shape("a.proj_blk.0.cross_attn_k.weight")[1],
        "num_attention_heads": meta.number(".audio.projector.head_count"),
        "intermediate_size": meta.shape("a.proj_blk.0.ffn_up.weight")[0],
        "cross_attention_frequency": 1,
    }
    config |= {
        "window_size": meta.number(".audio.projector.window_size"),
        "downsample_rate": meta.number(".audio.projector.downsample_rate"),
        "has_lora_adapter": False,
    }
    add_token_ids(meta, config, audio_token_index="<|audio|>")


def _speech_preprocessor(meta: ClipMetadata) -> Json:
    return {
        "feature_extractor_type": "GraniteSpeechFeatureExtractor",
        "projector_window_size": meta.number(".audio.projector.window_size"),
        "projector_downsample_rate": meta.number(".audio.projector.downsample_rate"),
        "sampling_rate": 16000,
    }


def _speech_encoders(model_type: str, *, has_layers: bool) -> HfEncoders:
    """Return the row of a class; ``has_layers``: the projector also gets the outputs of other layers."""
    return HfEncoders(
        "granite_speech",
        of_text_class(
            granite.CLASSES["GraniteForCausalLM"],
            model_type,
            note="the statistics of batch norms are others, with which they compute the same",
        ),
        "encoder.layers.*.attn. encoder.layers.*.ff encoder.layers.*.conv. encoder.layers.*.post_norm "
        "encoder.input_linear encoder.out projector.",
        _set_speech,
        _speech_preprocessor,
        text_class="GraniteForCausalLM",
        matches=lambda meta: bool(meta.get(".audio.feature_layer")) is has_layers,
    )


def _granite4_preprocessor(meta: ClipMetadata) -> Json:
    side = meta.number(".vision.image_size")
    return image_values(meta, "Granite4VisionImageProcessor") | {"size": {"height": side, "width": side}}


HF_ENCODERS: dict[str, HfEncoders] = {
    "GraniteSpeechForConditionalGeneration": _speech_encoders("granite_speech", has_layers=False),
    "GraniteSpeechPlusForConditionalGeneration": _speech_encoders("granite_speech_plus", has_layers=True),
    "Granite4VisionForConditionalGeneration": HfEncoders(
        "granite4_vision",
        of_text_class(
            granite.CLASSES["GraniteForCausalLM"],
            "granite4_vision",
            "model.language_model.",
            model_type="granite4_vision_text",
        ),
        "model.layerwise_projectors. model.vision_tower.vision_model. model.",
        _set_granite4,
        _granite4_preprocessor,
        text_class="GraniteForCausalLM",
    ),
}

"""The encoders of dots.ocr and dots3-note.

Facts of llama.cpp b11434, conversion/dotsocr.py, conversion/dots3.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.expressions import TYPE_F32, Shaped, stack, take
from quantkit.checkpoint.hf_encoders import REMOTE_NOTE, USUAL_COUNTS, HfEncoders, add_token_ids, image_values
from quantkit.checkpoint.mmproj import (
    PIXELS,
    USE_SILU,
    EncoderKey,
    Key,
    Mmproj,
    MmprojConfig,
    constant,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.models import dots, qwen
from quantkit.checkpoint.rules import Rename, Split
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def _any_size(config: MmprojConfig) -> None:
    """Set the size of images, which have any, to 0."""
    config.vision.values["image_size"] = 0


_DOTS_OCR = Mmproj(
    (
        projector("dots_ocr"),
        *PIXELS,
        layer_norm_epsilon("rms_norm_eps"),
        EncoderKey(".vision.projector.scale_factor", "spatial_merge_size"),
        USE_SILU,
    ),
    tensors=r"^vision_tower\.",
    rules=(
        Rename(r"^vision_tower\.(blocks\..*\.mlp\.)", r"visual.\1"),
        *(
            Rename(rf"^(visual\..*)\.{old}\.", rf"\1.{new}.")
            for old, new in (("fc1", "gate_proj"), ("fc2", "down_proj"), ("fc3", "up_proj"))
        ),
    ),
    patch_config=_any_size,
)


# --- dots3-note -----------------------------------------------------------------------------------------------------

#: Settings of the vision encoder: what they must be, and their value if absent.
_VISION_SETTINGS = {
    "adapter_type": ("patch_merger", None),
    "pre_pixel_shuffle": (True, None),
    "router_scoring_func": ("sigmoid", "sigmoid"),
    "router_scale": (1.0, 1.0),
    "temporal_patch_size": (1, 1),
    "use_bias": (False, False),
    "use_qk_norm": (True, None),
}
_AUDIO_SETTINGS = {
    "use_conv2d_stem": (True, None),
    "use_rope": (True, None),
    "use_rms_norm": (True, None),
    "use_causal": (False, False),
    "merge_factor": (1, 1),
    "chunk_seconds": (60, None),
}
_ROPE_SETTINGS = {"partial_rotary_factor": (0.5, None), "rope_theta": (10000.0, None)}
_WHISPER_SETTINGS = {"activation_function": ("swiglu", None)}
#: Names of MmprojModel's settings -> those of Whisper.
_WHISPER_NAMES = {
    "hidden_size": "d_model",
    "intermediate_size": "encoder_ffn_dim",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}


def _require(config: MmprojConfig, values: object, settings: Mapping[str, tuple[object, object]]) -> None:
    """Raise FormatError if the encoders need computations that llama.cpp lacks."""
    table = values if isinstance(values, dict) else {}
    for name, (value, default) in settings.items():
        stored = table.get(name, default)
        if (bool(stored) if isinstance(value, bool) else stored) != value:
            raise FormatError(
                f"{config.path}: {name} is {short(stored)}; llama.cpp computes {short(value)} only", "QK-E305"
            )


def _pyramid(config: MmprojConfig) -> list[int]:
    """Return the number of experts of each layer of the vision encoder; 0: it has none."""
    counts = config.vision["pyramid_num_routed"]
    if not isinstance(counts, list) or any(type(count) is not int or count >= 1 << 16 for count in counts):
        raise FormatError(f"{config.path}: pyramid_num_routed is {short(counts)}, not a list of counts", "QK-E112")
    return [max(0, count) for count in counts]


def _patch_note(config: MmprojConfig) -> None:
    vision, audio = config.vision.values, config.audio.values
    images = config.preprocessor.get("vision_config", {})
    config.preprocessor.values |= images if isinstance(images, dict) else {}
    vision["hidden_size"] = config.vision["embed_dim"]
    _any_size(config)
    _pyramid(config)
    _require(config, vision, _VISION_SETTINGS)
    _require(config, audio, _AUDIO_SETTINGS)
    whisper = config.audio.table("whisper_config")
    _require(config, whisper, _WHISPER_SETTINGS)
    _require(config, audio.get("rope_parameters"), _ROPE_SETTINGS)
    audio |= {name: whisper.get(stored) for name, stored in _WHISPER_NAMES.items()}
    audio["num_mel_bins"] = whisper.get("num_mel_bins")


def _capacity(config: MmprojConfig) -> int:
    factor = config.vision["capacity_factor"]
    if not isinstance(factor, (int, float)) or not 0 <= factor < 1 << 16:
        raise FormatError(f"{config.path}: capacity_factor is {short(factor)}, not a number of experts", "QK-E112")
    return int(factor)


@dataclass(frozen=True)
class _StackPyramid(Rule):
    """Stacks the experts of a layer, whose number depends on the layer."""

    weights: tuple[str, ...] = ("fc1", "fc2", "fc3")

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if ".mlp.experts." not in tensor.name:
            return None
        n, layer = self._count(tensor.layer, context), tensor.layer
        if not n or layer is None:
            raise context.fail(tensor, "an expert, but pyramid_num_routed says that its layer has none", "QK-E107")
        parts = context.gather(self, layer, tensor.name, tensor, n * len(self.weights))
        if parts is None:
            return ()
        merged = []
        for weight in self.weights:
            names = [f"vision_encoder.blocks.{layer}.mlp.experts.{expert}.{weight}.weight" for expert in range(n)]
            absent = next((name for name in names if name not in parts), None)
            if absent is not None:
                raise context.fail(tensor, f"{absent} is missing: pyramid_num_routed says {n} experts", "QK-E105")
            experts = [parts[name].x for name in names]
            if len({x.shape for x in experts}) > 1:
                raise context.fail(tensor, f"{weight} of the experts of its layer differ in shape")
            name = f"vision_encoder.blocks.{layer}.mlp.experts.{weight}.weight"
            merged.append(replace(tensor, name=name, x=stack(experts)))
        return merged

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Return the tensors of single experts."""
        match = re.fullmatch(r"(vision_encoder\.blocks\.(\d+)\.mlp\.experts)\.(fc[123])\.weight", tensor.name)
        if match is None:
            return None
        n, shape = self._count(int(match[2]), context), tensor.x.shape
        if len(shape) != 3 or shape[0] != n:
            raise context.fail(tensor, f"its shape {list(shape)} does not match {n} experts")
        return [
            replace(
                tensor,
                name=f"{match[1]}.{expert}.{match[3]}.weight",
                x=Shaped(take(tensor.x, 0, range(expert, expert + 1)), shape[1:]),
            )
            for expert in range(n)
        ]

    def missing(self, waiting: Collection[str], place: int | str, context: Context) -> str:
        """Return the number of experts that a layer should have."""
        n = self._count(int(place), context)
        return f"pyramid_num_routed says {n} experts of {len(self.weights)} tensors, but there are {len(waiting)}"

    def _count(self, layer: int | None, context: Context) -> int:
        assert isinstance(context.config, MmprojConfig)
        counts = _pyramid(context.config)
        return counts[layer] if layer is not None and layer < len(counts) else 0


_NOTE = Mmproj(
    (
        projector("dots3note_v", "clip.vision.projector_type"),
        USE_SILU,
        layer_norm_epsilon("rms_norm_eps"),
        EncoderKey(".vision.spatial_merge_size", "spatial_merge_size"),
        *PIXELS,
        Key(".vision.expert_count_per_layer", _pyramid, "array"),
        Key(".vision.expert_used_count", _capacity),
        projector("dots3note_a", "clip.audio.projector_type"),
        EncoderKey(".audio.num_mel_bins", "num_mel_bins", section="audio"),
        constant(".audio.attention.layer_norm_epsilon", 1e-6, "f32"),
    ),
    tensors=r"^(vision|audio)_encoder\.",
    rules=(
        Rename(r"(\.gate_weight|\.router_bias)$", r"\1.weight"),
        _StackPyramid(),
        Split(r"(?<=\d)\.fc1\.", (".fc1_gate.", ".fc1_up.")),
    ),
    audio=True,
    forced=tuple((part, TYPE_F32) for part in (".ffn_gate_inp.", ".exp_probs_b.", ".conv2d", "a.conv_out")),
    audio_config=lambda outer: outer.get("audio_config"),
    patch_config=_patch_note,
)


MMPROJ = {
    "DotsOCRForCausalLM": _DOTS_OCR,
    **dict.fromkeys(("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"), _NOTE),
}


# --- export ----------------------------------------------------------------------------------------------------------


def _set_dots_ocr(meta: ClipMetadata, config: Json) -> None:
    """Describe the tower of dots.ocr, beside the settings of the text model."""
    vision = {name: count for name, count in meta.counts(USUAL_COUNTS).items() if name != "image_size"}
    config["vision_config"] = vision | {
        "embed_dim": vision["hidden_size"],
        "num_channels": meta.shape("v.patch_embd.weight")[1],
        "rms_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
        "spatial_merge_size": meta.number(".vision.projector.scale_factor"),
        "temporal_patch_size": 1,
        "post_norm": meta.has("mm.post_norm.weight"),
        "use_bias": meta.has("v.blk.0.attn_qkv.bias"),
    }
    add_token_ids(meta, config, image_token_id="<|imgpad|>")


def _dots_ocr_preprocessor(meta: ClipMetadata) -> Json:
    sizes = {
        "patch_size": meta.number(".vision.patch_size"),
        "merge_size": meta.number(".vision.projector.scale_factor"),
        "temporal_patch_size": 1,
    }
    limits = {f"{end}_pixels": meta.number(f".vision.image_{end}_pixels") for end in ("min", "max")}
    return image_values(meta, "Qwen2VLImageProcessor") | sizes | limits


def _set_note(meta: ClipMetadata, config: Json) -> None:
    """Describe the encoders of dots3-note. Settings without a key have the only values that llama.cpp computes."""
    counts = {key: name for key, name in USUAL_COUNTS.items() if key != "image_size"}
    experts = meta.get(".vision.expert_count_per_layer") or []
    config["vision_config"] = meta.counts(counts) | {
        "embed_dim": meta.number(".vision.embedding_length"),
        "hidden_size": meta.number(".vision.projection_dim"),
        "num_channels": meta.shape("v.patch_embd.weight")[1],
        "rms_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
        "spatial_merge_size": meta.number(".vision.spatial_merge_size"),
        "pyramid_num_routed": [count or -1 for count in experts],
        "capacity_factor": float(meta.number(".vision.expert_used_count")),
        **{name: value for name, (value, _) in _VISION_SETTINGS.items()},
    }
    whisper = {stored: meta.number(f".audio.{key}") for key, stored in _WHISPER_KEYS.items()}
    config["audio_config"] = {name: value for name, (value, _) in _AUDIO_SETTINGS.items()} | {
        "rope_parameters": {name: value for name, (value, _) in _ROPE_SETTINGS.items()},
        "whisper_config": whisper | {name: value for name, (value, _) in _WHISPER_SETTINGS.items()},
    }


_WHISPER_KEYS = {
    "embedding_length": "d_model",
    "feed_forward_length": "encoder_ffn_dim",
    "attention.head_count": "encoder_attention_heads",
    "block_count": "encoder_layers",
    "num_mel_bins": "num_mel_bins",
}


def _note_preprocessor(meta: ClipMetadata) -> Json:
    limits = {f"{end}_pixels": meta.number(f".vision.image_{end}_pixels") for end in ("min", "max")}
    return {"vision_config": {name: meta.get(f".vision.{name}") for name in ("image_mean", "image_std")} | limits}


HF_ENCODERS: dict[str, HfEncoders] = {
    "DotsOCRForCausalLM": HfEncoders(
        "dots_ocr",
        replace(
            qwen.CLASSES["Qwen2ForCausalLM"],
            model_type="dots_ocr",
            defaults={"attention_bias": True},
            note=f"DotsOCRForCausalLM {REMOTE_NOTE}",
        ),
        "visual.blocks.*.mlp.gate_proj visual.blocks.*.mlp.up_proj visual.blocks.*.mlp.down_proj "
        "vision_tower.blocks. vision_tower.patch_embed.patchifier. vision_tower.merger. vision_tower.post_trunk_norm",
        _set_dots_ocr,
        _dots_ocr_preprocessor,
    ),
    "Dots3NoteForCausalLM": HfEncoders(
        "dots3note_v",
        replace(dots.CLASSES["Dots3NoteForCausalLM"], note=f"Dots3NoteForCausalLM {REMOTE_NOTE}"),
        "vision_encoder.blocks. vision_encoder.patch_embed. vision_encoder.post_trunk_norm vision_encoder.adapter. "
        "audio_encoder.dots_encoder. audio_encoder.audio_adapter.",
        _set_note,
        _note_preprocessor,
        audio_projector="dots3note_a",
    ),
}

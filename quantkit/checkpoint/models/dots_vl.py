"""The encoders of dots.ocr and dots3-note.

Facts of llama.cpp b11434, conversion/dotsocr.py, conversion/dots3.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from quantkit.checkpoint.expressions import TYPE_F32, stack
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
from quantkit.checkpoint.rules import Rename, Split
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
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
            Rename(rf"^(visual\..*)\.{old}\b", rf"\1.{new}")
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
class _StackPyramid(OneWayRule):
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
        Split(r"(\.speech_encoder\.layers\..*)\.fc1\.", (r"\1.fc1_gate.", r"\1.fc1_up.")),
        _StackPyramid(),
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

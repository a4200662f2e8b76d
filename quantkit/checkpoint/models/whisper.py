"""Audio encoders in the form of Whisper's: Ultravox, Voxtral, Qwen2-Audio, Audio Flamingo 3, GLM-ASR, MERaLiON 2.

Facts of llama.cpp b11434, conversion/ultravox.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.encoder_rules import ForceType, NameInFile, add_axes, squeeze_last
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.expressions import TYPE_F16, TYPE_F32, Shaped, stack, take
from quantkit.checkpoint.hf_encoders import REMOTE_NOTE, HfEncoders, add_token_ids, audio_preprocessor, of_text_class
from quantkit.checkpoint.mmproj import EncoderKey, Mmproj, MmprojConfig, constant, layer_norm_epsilon, projector
from quantkit.checkpoint.models import llama, qwen
from quantkit.checkpoint.rules import Drop, Rename, Transform
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor


def _patch(config: MmprojConfig) -> None:
    """Copy Whisper's names of sizes to the usual ones."""
    audio = config.audio.values
    if "hidden_size" not in audio and "intermediate_size" not in audio:
        audio["hidden_size"], audio["intermediate_size"], audio["num_attention_heads"] = (
            config.audio[name] for name in ("d_model", "encoder_ffn_dim", "encoder_attention_heads")
        )


_STACK_FACTOR = ".audio.projector.stack_factor"
_CONVOLUTIONS = r"\.conv.*\.weight"
_WHISPER = Mmproj(
    (
        projector("qwen2a"),
        EncoderKey(".audio.num_mel_bins", "num_mel_bins", section="audio"),
        layer_norm_epsilon("layer_norm_eps", 1e-5, section="audio"),
    ),
    stored=(Rename(r"^multi_modal_projector", "audio.multi_modal_projector"),),
    rules=(ForceType(_CONVOLUTIONS, TYPE_F16), Transform(r"conv[12]\.bias", add_axes(0, 1), squeeze_last)),
    vision=False,
    audio=True,
    patch_config=_patch,
)
#: The layers of MERaLiON's adapter, in the order of their numbers in the file.
_ADAPTER = (r"mlp_adapter\.0", "gate_proj", "pool_proj", "out_proj")
_MERALION = replace(
    _WHISPER,
    keys=(
        *_WHISPER.keys,
        projector("meralion"),
        EncoderKey(_STACK_FACTOR, "speech_mlp_scale_factor", section="model", default=15),
    ),
    audio_config=lambda outer: outer.get("speech_config"),
    stored=(Drop(r"^text_decoder\."), Rename(r"speech_encoder\.", "audio_tower."), *_WHISPER.stored),
    rules=(
        *_WHISPER.rules,
        Drop(rf"^speech_audio_adapter\.(?!({'|'.join(_ADAPTER)})\.)"),
        NameInFile(r"^ln_speech\.", "mm.a.norm_pre."),
        *(NameInFile(rf"^speech_audio_adapter\.{part}\.", f"mm.a.mlp.{i}.") for i, part in enumerate(_ADAPTER)),
    ),
)


_BOUNDARIES = ("model.vision.boi", "model.vision.eoi")


@dataclass(frozen=True)
class _SplitBoundaries(Rule):
    """Splits the embeddings of the begin and the end of audio, which have the names of those of an image."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.startswith("audio_encoder.audio_bos_eos_token."):
            return None
        shape = tensor.x.shape
        if len(shape) != 2 or shape[0] < 2:
            raise context.fail(tensor, f"its shape {list(shape)} is not that of two embeddings")
        return [
            replace(tensor, name=name, x=Shaped(take(tensor.x, 0, range(i, i + 1)), shape[1:]))
            for i, name in enumerate(_BOUNDARIES)
        ]

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Stack the embeddings again."""
        if tensor.name not in _BOUNDARIES:
            return None
        name = "audio_encoder.audio_bos_eos_token.weight"
        parts = context.gather(self, name, tensor.name, tensor, len(_BOUNDARIES))
        return () if parts is None else (replace(tensor, name=name, x=stack([parts[part].x for part in _BOUNDARIES])),)


_PROJECTOR = r"^(audio\.multi_modal_projector\..*?)"
_GLM_ASR = replace(
    _WHISPER,
    keys=(*_WHISPER.keys, projector("glma"), EncoderKey(_STACK_FACTOR, "merge_factor", section="model")),
    stored=(
        Drop(r"^(model|lm_head)\."),
        Rename(r"^audio_encoder\.whisper\.", "audio_tower."),
        Rename(r"audio_encoder\.(?=(layer_norm|proj)\.)", "audio_encoder.adapting.", foreign=True),
        Rename(r"^audio_encoder\.adapting\.", "audio.multi_modal_projector.", foreign=True),
        Rename(_PROJECTOR + r"\blayer_norm\.", r"\1ln_pre.", foreign=True),
        Rename(_PROJECTOR + r"\b0\.", r"\1linear_1.", foreign=True),
        Rename(_PROJECTOR + r"\b2\.", r"\1linear_2.", foreign=True),
    ),
    rules=(_SplitBoundaries(), *_WHISPER.rules),
)

MMPROJ: dict[str, Mmproj] = {
    "UltravoxModel": replace(
        _WHISPER,
        keys=(*_WHISPER.keys, projector("ultravox"), EncoderKey(_STACK_FACTOR, "stack_factor", section="model")),
    ),
    "VoxtralForConditionalGeneration": replace(
        _WHISPER, keys=(*_WHISPER.keys, projector("voxtral"), constant(_STACK_FACTOR, 4))
    ),
    "Qwen2AudioForConditionalGeneration": _WHISPER,
    "AudioFlamingo3ForConditionalGeneration": replace(
        _WHISPER,
        keys=(*_WHISPER.keys, projector("musicflamingo")),
        rules=(ForceType(_CONVOLUTIONS, TYPE_F32), *_WHISPER.rules[1:]),
    ),
    "GlmasrModel": _GLM_ASR,
    "MERaLiON2ForConditionalGeneration": _MERALION,
}


# --- export ----------------------------------------------------------------------------------------------------------

#: Ends of keys of an audio encoder, and the names of Voxtral's and of Qwen2-Audio's configuration.
_COUNTS = {
    "embedding_length": ("hidden_size", "d_model"),
    "feed_forward_length": ("intermediate_size", "encoder_ffn_dim"),
    "block_count": ("num_hidden_layers", "encoder_layers"),
    "attention.head_count": ("num_attention_heads", "encoder_attention_heads"),
    "num_mel_bins": ("num_mel_bins", "num_mel_bins"),
}


def _encoder(meta: ClipMetadata, names: int) -> Json:
    """Return the settings of an encoder; ``names``: which of ``_COUNTS``."""
    counts = {pair[names]: meta.number(f".audio.{key}") for key, pair in _COUNTS.items()}
    return counts | {
        "max_source_positions": meta.shape("a.position_embd.weight")[0],
        "activation_function": "gelu",
        "scale_embedding": False,
    }


def _set_voxtral(meta: ClipMetadata, config: Json) -> None:
    config["audio_config"] = _encoder(meta, 0) | {"model_type": "voxtral_encoder"}
    config["hidden_size"] = meta.number(".audio.projection_dim")
    config["projector_hidden_act"] = "gelu"
    add_token_ids(meta, config, audio_token_id="[AUDIO]")


def _set_qwen2_audio(meta: ClipMetadata, config: Json) -> None:
    layers = {"num_hidden_layers": meta.number(".audio.block_count"), "model_type": "qwen2_audio_encoder"}
    config["audio_config"] = _encoder(meta, 1) | layers
    add_token_ids(meta, config, audio_token_index="<|AUDIO|>")


def _set_flamingo(meta: ClipMetadata, config: Json) -> None:
    config["audio_config"] = _encoder(meta, 0) | {"model_type": "audioflamingo3_encoder"}
    config |= {"projector_hidden_act": "gelu", "projector_bias": meta.has("mm.a.mlp.1.bias")}
    add_token_ids(meta, config, audio_token_id="<sound>")


def _set_glm_asr(meta: ClipMetadata, config: Json) -> None:
    """Describe Whisper's encoder, which has rope here."""
    config["whisper_config"] = _encoder(meta, 1) | {"model_type": "whisper"}
    config |= {"merge_factor": meta.number(_STACK_FACTOR), "use_rope": True, "mlp_adapter_act": "gelu"}


_TOWER = "audio.multi_modal_projector. audio_tower."
HF_ENCODERS: dict[str, HfEncoders] = {
    "VoxtralForConditionalGeneration": HfEncoders(
        "voxtral",
        of_text_class(llama.CLASSES["LlamaForCausalLM"], "voxtral"),
        _TOWER,
        _set_voxtral,
        audio_preprocessor,
    ),
    "Qwen2AudioForConditionalGeneration": HfEncoders(
        "qwen2a",
        of_text_class(qwen.CLASSES["Qwen2ForCausalLM"], "qwen2_audio"),
        _TOWER,
        _set_qwen2_audio,
        audio_preprocessor,
    ),
    "AudioFlamingo3ForConditionalGeneration": HfEncoders(
        "musicflamingo",
        of_text_class(qwen.CLASSES["Qwen2ForCausalLM"], "audioflamingo3"),
        _TOWER,
        _set_flamingo,
        audio_preprocessor,
    ),
    "GlmasrModel": HfEncoders(
        "glma",
        replace(
            llama.CLASSES["LlamaForCausalLM"],
            outer_type="Glmasr",
            text_key="lm_config",
            note=f"GlmasrModel {REMOTE_NOTE}; transformers 5.18 has other names, which llama.cpp does not convert",
        ),
        "audio_tower. model.vision.",
        _set_glm_asr,
        audio_preprocessor,
        {
            "mm.a.norm_pre": "audio_encoder.layer_norm",
            "mm.a.mlp.1": "audio_encoder.adapting.0",
            "mm.a.mlp.2": "audio_encoder.adapting.2",
        },
        text_class="LlamaForCausalLM",
    ),
}

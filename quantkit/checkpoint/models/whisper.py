"""Audio encoders in the form of Whisper's: Ultravox, Voxtral, Qwen2-Audio, Audio Flamingo 3, GLM-ASR, MERaLiON 2.

Facts of llama.cpp b11434, conversion/ultravox.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.encoder_rules import ForceType, NameInFile, add_axes
from quantkit.checkpoint.expressions import TYPE_F16, TYPE_F32, Shaped, take
from quantkit.checkpoint.mmproj import EncoderKey, Mmproj, MmprojConfig, constant, layer_norm_epsilon, projector
from quantkit.checkpoint.rules import Drop, Rename, Transform
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor


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
    rules=(ForceType(_CONVOLUTIONS, TYPE_F16), Transform(r"conv[12]\.bias", add_axes(0, 1), None)),
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


@dataclass(frozen=True)
class _SplitBoundaries(OneWayRule):
    """Splits the embeddings of the begin and the end of audio, which have the names of those of an image."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.startswith("audio_encoder.audio_bos_eos_token."):
            return None
        shape = tensor.x.shape
        if len(shape) != 2 or shape[0] < 2:
            raise context.fail(tensor, f"its shape {list(shape)} is not that of two embeddings")
        return [
            replace(tensor, name=name, x=Shaped(take(tensor.x, 0, range(i, i + 1)), shape[1:]))
            for i, name in enumerate(("model.vision.boi", "model.vision.eoi"))
        ]


_PROJECTOR = r"^(audio\.multi_modal_projector\..*?)"
_GLM_ASR = replace(
    _WHISPER,
    keys=(*_WHISPER.keys, projector("glma"), EncoderKey(_STACK_FACTOR, "merge_factor", section="model")),
    stored=(
        Drop(r"^(model|lm_head)\."),
        Rename(r"^audio_encoder\.whisper\.", "audio_tower."),
        Rename(r"audio_encoder\.(?=(layer_norm|proj)\.)", "audio_encoder.adapting."),
        Rename(r"^audio_encoder\.adapting\.", "audio.multi_modal_projector."),
        Rename(_PROJECTOR + r"\blayer_norm\.", r"\1ln_pre."),
        Rename(_PROJECTOR + r"\b0\.", r"\1linear_1."),
        Rename(_PROJECTOR + r"\b2\.", r"\1linear_2."),
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

"""Rows of classes with encoders (``models``), for the export of a text model with its mmproj file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export.clip_metadata import ClipMetadata, without_null
from quantkit.checkpoint.row import HfClass

#: Ends of keys of a vision encoder, and the names that most classes have for them.
USUAL_COUNTS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "image_size": "image_size",
    "patch_size": "patch_size",
}

#: A note on classes that transformers lacks.
REMOTE_NOTE = "is a class of remote code: copy the *.py files and auto_map from the original"

#: Projectors of mmproj files that no checkpoint can be made of, some beside one architecture, and what is lost.
NOT_EXPORTED = {
    "cogvlm": "files of text models lack the weights that the model has for images",
    "gemma3na": "files lack the norms of the audio encoder's first convolutions",
    "gemma3nv": "files lack the norms of the audio encoder's first convolutions",
    "glm5v": "the text model's files have its attention split, and lack the padding of A_log",
    "hunyuanvl": "files lack the position of the class token",
    "janus_pro": "files lack the parts that generate images",
    "lfm2a": "files lack the transformer that generates sounds, and the statistics of the batch norms",
    "meralion": "llama.cpp's converter makes no file of its text model",
    "mimo_audio": "files lack the decoder of the audio tokenizer, and the averages of its codebooks",
    "mimovl": "files of the audio encoder lack the decoder of its tokenizer, and the averages of its codebooks",
    "minicpmv4_6": "at 4x, files lack the merger of the encoder",
    "muse-glimmer": "files have the sum of the convolutions of two frames, not each",
    "nemotron_v2_vl": "files lack the patches of videos, and the positions are resized to those of one image size",
    "paddleocr": "files lack the packing positions",
    "parakeet": "files lack the patches of videos of the vision encoder beside it",
    "phi4": "files lack the last layer of the encoder, its head and its norm",
    "pockettts_gen": "the embeddings contain what the latents were projected to",
    "pockettts_spkenc": "the embeddings contain what the latents were projected to",
    "qwen2.5o": "files lack the talker and its vocoder",
    "qwen2vl_merger llama": "files lack the norm that Sarashina 2.2 Vision has after its projector",
    "qwen3a": "files of Qwen3-Omni lack the talker and its vocoder",
    "qwen3tts_gen": "two layers of the text model are folded into its embeddings",
    "qwen3tts_spkenc": "two layers of the text model are folded into its embeddings",
    "qwen3vl_merger clef": "the head of Clef is another file",
    "qwen3vl_merger qwen4exp": "the text model's files have the shards of the embeddings of n-grams joined",
    "ultravox": "its text model is a checkpoint of its own",
}


@dataclass(frozen=True)
class HfEncoders:
    """The text model, tensor names and settings of a transformers class with encoders.

    Facts of transformers 4.57.6 (models/*/modeling_*.py, configuration_*.py, image_processing_*.py). ``text`` has the
    names and settings of the text model within the whole. Tensors have the first name of the name map that begins with
    one of ``names``, in their order, or that of ``kinds``; then the inverses of the rules of ``MMPROJ`` are applied.
    ``set_config`` sets vision_config and the settings of the whole, ``preprocessor`` returns preprocessor_config.json;
    both are converted again, and must give the keys of the file. Either projector may be of sound; a file with both has
    ``audio_projector``, too.
    """

    projector: str
    text: HfClass
    names: str
    set_config: Callable[[ClipMetadata, Json], None]
    preprocessor: Callable[[ClipMetadata], Json]
    kinds: dict[str, str] = field(default_factory=dict)
    #: The class of text_config, where the class of the whole is not one of a text model.
    text_class: str = ""
    #: The class of the whole, if it has several rows, one for each class of text models.
    architecture: str = ""
    #: The projector of sound of a file with two encoders.
    audio_projector: str = ""
    #: Whether a file is of this class, if others have its projector, too.
    matches: Callable[[ClipMetadata], bool] = field(default=lambda meta: True)

    @property
    def projectors(self) -> tuple[str, ...]:
        """The projectors of a file with all encoders."""
        return (self.projector, *([self.audio_projector] if self.audio_projector else []))


def image_values(meta: ClipMetadata, processor: str) -> Json:
    """Return the settings of an image processor that files state."""
    return {
        "image_processor_type": processor,
        "do_normalize": True,
        "image_mean": meta.get(".vision.image_mean"),
        "image_std": meta.get(".vision.image_std"),
    }


def audio_preprocessor(meta: ClipMetadata) -> Json:
    """Return the settings of Whisper's feature extractor."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": meta.number(".audio.num_mel_bins"),
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
    }


def add_token_ids(meta: ClipMetadata, config: Json, **texts: str) -> None:
    """Set ids of tokens by their names in config.json, if the vocabulary has them."""
    config |= without_null({name: meta.token_id(text) for name, text in texts.items()})


def hidden_act(meta: ClipMetadata) -> str:
    """Return the activation of a vision encoder; llama.cpp's is the approximate GELU without a flag."""
    return next((name for name in ("gelu", "silu") if meta.get(f".use_{name}")), "gelu_pytorch_tanh")


def of_text_class(text: HfClass, outer_type: str, prefix: str = "language_model.", **changes: Any) -> HfClass:
    """Return a class of text models as the text model of a whole, whose names begin with ``prefix``."""
    start = r"^model\." if prefix.startswith("model.") else "^"
    return replace(text, renames=(*text.renames, (start, prefix)), outer_type=outer_type, **changes)

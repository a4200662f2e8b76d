"""Pocket TTS: its language model, its speaker encoder, its decoder of latents and Mimi's decoder.

Facts of llama.cpp b11434, conversion/pockettts.py. The model has no config.json: its sizes are those of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.encoder_rules import NameInFile, squeeze_last
from quantkit.checkpoint.expressions import TYPE_F16, Expression, Shaped, cast, concatenate, size_of
from quantkit.checkpoint.linear import Linear
from quantkit.checkpoint.mmproj import EncoderKey, Key, Mmproj, constant, projector
from quantkit.checkpoint.row import Architecture, Layout
from quantkit.checkpoint.rules import Drop, Rename, Split, Transform
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.checkpoint.vocab.sentencepiece import Piece, read_model, sentencepiece_tokens, set_pieces
from quantkit.checkpoint.vocab.tokenizer import CONTROL, Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.safetensors import read_header

_MIMI = "mimi.encoder_transformer.transformer.layers."
#: A vector that all its checkpoints have.
_START = "flow_lm.bos_emb"
#: A vector that some have, before a voice.
_VOICE = "flow_lm.bos_before_voice"


def _only_file(folder: Path) -> Path | None:
    files = list(folder.glob("model*.safetensors"))
    return files[0] if len(files) == 1 else None


def _is_pocket(folder: Path) -> bool:
    """Return whether the only file of a checkpoint has the vector; a damaged file is reported elsewhere."""
    file = _only_file(folder)
    try:
        return file is not None and _START in read_header(file)
    except (FormatError, OSError):
        return False


def _read_sizes(folder: Path) -> Config:
    """Return a configuration from the shapes of tensors."""
    path = _only_file(folder)
    assert path is not None
    shapes = {name: t.shape for name, t in read_header(path).items()}

    def size(name: str, axis: int) -> int:
        if len(shapes.get(name, ())) <= axis:
            raise FormatError(f"{path}: has no tensor {name}, whose shape Pocket TTS's sizes follow from", "QK-E105")
        return shapes[name][axis]

    def layers(prefix: str) -> int:
        return sum(bool(re.fullmatch(rf"{re.escape(prefix)}\d+\.norm1\.weight", name)) for name in shapes)

    embeddings, width = "flow_lm.conditioner.embed.weight", size(f"{_MIMI}0.norm1.weight", 0)
    values = {
        "architectures": ["PocketTTSModel"],
        "model_type": "pockettts",
        "num_hidden_layers": layers("flow_lm.transformer.layers."),
        "hidden_size": size(embeddings, 1),
        "intermediate_size": size("flow_lm.transformer.layers.0.linear1.weight", 0),
        "max_position_embeddings": 4096,
        "num_attention_heads": size(embeddings, 1) // 64,
        "vocab_size": size(embeddings, 0) + 1 + (_VOICE in shapes),
        "rope_theta": 10000.0,
        "layer_norm_eps": 1e-5,
        "insert_bos_before_voice": _VOICE in shapes,
        "audio_config": {
            "num_hidden_layers": layers(_MIMI),
            "hidden_size": width,
            "intermediate_size": size(f"{_MIMI}0.linear1.weight", 0),
            "num_attention_heads": width // 64,
        },
    }
    return Config(path, values)


LAYOUTS = (Layout(_is_pocket, _read_sizes),)


# --- The language model ----------------------------------------------------------------------------------------------


def _write_vocab(v: Vocabulary) -> None:
    """Write a Unigram model; the last rows of the embeddings are no pieces of it (PocketTTSModel)."""
    model = read_model(v.folder / "tokenizer.model")
    if not model.is_unigram:
        raise FormatError(f"{v.folder / 'tokenizer.model'}: not a Unigram model", "QK-E114")
    tokens = sentencepiece_tokens(v)
    names = ("<|pad|>", *(("<|bos_before_voice|>",) if v.config["insert_bos_before_voice"] else ()), "<|audio_bos|>")
    tokens[-len(names) :] = [Piece(name, -1000.0, CONTROL) for name in names]
    set_pieces(v, tokens, "t5")
    v.keys.flag("tokenizer.ggml.add_space_prefix", model.adds_prefix)
    v.keys.flag("tokenizer.ggml.remove_extra_whitespaces", model.removes_spaces)
    v.keys.octets("tokenizer.ggml.precompiled_charsmap", model.charsmap)
    v.keys.flag("tokenizer.ggml.add_bos_token", False)
    v.keys.flag("tokenizer.ggml.add_eos_token", False)


@dataclass(frozen=True)
class _AppendVectors(OneWayRule):
    """Appends the learned vectors before a voice and before speech to the embeddings; the last one is a latent."""

    names = ("flow_lm.conditioner.embed.weight", _START, "flow_lm.input_linear.weight")

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        voice = (_VOICE,) if context.config["insert_bos_before_voice"] else ()
        if tensor.name not in (*self.names, *voice):
            return None
        parts = context.gather(self, "embeddings", tensor.name, tensor, len(self.names) + len(voice))
        if parts is None:
            return ()
        table, latent, matrix = (parts[name].x for name in self.names)
        width = table.shape[-1]
        if matrix.shape != (width, size_of(latent)) or any(size_of(parts[name].x) != width for name in voice):
            raise context.fail(tensor, "the shapes of its embeddings, vectors and input_linear do not match")
        rows: list[Expression] = [Shaped(parts[name].x, (1, width)) for name in voice]
        rows = [*rows, Linear(Shaped(latent, (1, size_of(latent))), matrix)]
        rows = [cast(row, TYPE_F16) if table.type is TYPE_F16 else row for row in rows]
        return (replace(tensor, name="model.embed_tokens.weight", x=concatenate((table, *rows))),)


_LAYER = r"^flow_lm\.transformer\.layers\.(\d+)\."
#: Names in a layer -> those that the name map has.
_TEXT_NAMES = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    r"self_attn\.out_proj": "self_attn.o_proj",
    "linear1": "mlp.up_proj",
    "linear2": "mlp.down_proj",
    r"self_attn\.q": "self_attn.q_proj",
    r"self_attn\.k": "self_attn.k_proj",
    r"self_attn\.v": "self_attn.v_proj",
}

ARCHITECTURES: dict[str, Architecture] = {
    "PocketTTSModel": Architecture(
        "pockettts",
        rules=(
            _AppendVectors(),
            Rename(r"^flow_lm\.out_norm\.", "model.norm."),
            Split(
                rf"{_LAYER}self_attn\.in_proj\.", tuple(rf"flow_lm.transformer.layers.\1.self_attn.{x}." for x in "qkv")
            ),
            *(Rename(rf"{_LAYER}{stored}\.", rf"model.layers.\1.{name}.") for stored, name in _TEXT_NAMES.items()),
            Drop(r"^(flow_lm|mimi)\."),
        ),
        vocab=_write_vocab,
    ),
}


# --- Encoders --------------------------------------------------------------------------------------------------------

_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}


def _size_keys(part: str, order: str) -> tuple[Key | EncoderKey, ...]:
    """Return the keys of the sizes of Mimi's encoder or decoder, which are equal."""
    return (
        Key(f".{part}.projection_dim", lambda config: config.text_width),
        *(EncoderKey(f".{part}.{key}", _SIZES[key], section="audio") for key in order.split()),
        constant(f".{part}.attention.layer_norm_epsilon", 1e-5, "f32"),
    )


#: Parts of names of a layer of Mimi's transformers -> those in the file.
_LAYER_NAMES = {
    "norm1": "ln1",
    "norm2": "ln2",
    r"self_attn\.out_proj": "attn_out",
    "linear1": "ffn_up",
    "linear2": "ffn_down",
}
#: Names of the rest, and those in the file, complete.
_NAMES = {
    r"flow_lm\.speaker_proj_weight": "a.speaker_proj.weight",
    r"flow_lm\.input_linear\.weight": "a.gen.input_linear.weight",
    r"flow_lm\.emb_(mean|std)": r"a.gen.emb_\1",
    r"flow_lm\.out_eos\.(.*)": r"a.gen.out_eos.\1",
    r"flow_lm\.flow_net\.input_proj\.(.*)": r"a.gen.flow.input_proj.\1",
    r"flow_lm\.flow_net\.cond_embed\.(.*)": r"a.gen.flow.cond_embd.\1",
    r"flow_lm\.flow_net\.final_layer\.linear\.(.*)": r"a.gen.flow.final.proj.\1",
    r"flow_lm\.flow_net\.final_layer\.adaLN_modulation\.1\.(.*)": r"a.gen.flow.final.ada.\1",
    r"flow_lm\.flow_net\.time_embed\.(\d+)\.freqs": r"a.gen.flow.time.\1.freqs",
    r"flow_lm\.flow_net\.time_embed\.(\d+)\.mlp\.0\.(.*)": r"a.gen.flow.time.\1.up.\2",
    r"flow_lm\.flow_net\.time_embed\.(\d+)\.mlp\.2\.(.*)": r"a.gen.flow.time.\1.down.\2",
    r"flow_lm\.flow_net\.time_embed\.(\d+)\.mlp\.3\.alpha": r"a.gen.flow.time.\1.norm",
    r"flow_lm\.flow_net\.res_blocks\.(\d+)\.in_ln\.(.*)": r"a.gen.flow.blk.\1.norm.\2",
    r"flow_lm\.flow_net\.res_blocks\.(\d+)\.mlp\.0\.(.*)": r"a.gen.flow.blk.\1.up.\2",
    r"flow_lm\.flow_net\.res_blocks\.(\d+)\.mlp\.2\.(.*)": r"a.gen.flow.blk.\1.down.\2",
    r"flow_lm\.flow_net\.res_blocks\.(\d+)\.adaLN_modulation\.1\.(.*)": r"a.gen.flow.blk.\1.ada.\2",
    r"mimi\.downsample\.conv\.conv\.weight": "a.downsample.conv.weight",
    r"mimi\.upsample\.convtr\.convtr\.weight": "a.gen.wav.upsample.weight",
    r"mimi\.quantizer\.output_proj\.weight": "a.gen.wav.quant_out.weight",
}


def _transformer_names(part: str, file: str) -> Iterator[tuple[str, str]]:
    """Yield the names of Mimi's encoder or decoder transformer."""
    layer = rf"mimi\.{part}_transformer\.transformer\.layers\.(\d+)\."
    yield layer + r"layer_scale_([12])\.scale", rf"{file}.blk.\1.ls\2.weight"
    yield layer + r"self_attn\.in_proj\.([qkv])", rf"{file}.blk.\1.attn_\2.weight"
    for stored, name in _LAYER_NAMES.items():
        yield rf"{layer}{stored}\.(weight|bias)", rf"{file}.blk.\1.{name}.\2"


def _seanet_names(part: str, file: str, residual: int, scale: int) -> Iterator[tuple[str, str]]:
    """Yield the names of SEANet; ``residual``, ``scale``: the first module of each kind, one in three is of it."""
    module = rf"mimi\.{part}\.model\."
    yield rf"{module}0\..*\.(weight|bias)", rf"{file}.seanet.conv_in.\1"
    yield rf"{module}11\..*\.(weight|bias)", rf"{file}.seanet.conv_out.\1"
    for stage in range(3):
        block = f"{file}.seanet.blk.{stage}"
        yield rf"{module}{scale + 3 * stage}\..*\.(weight|bias)", rf"{block}.scale_conv.\1"
        yield rf"{module}{residual + 3 * stage}\.block\.1\..*\.(weight|bias)", rf"{block}.res_conv1.\1"
        yield rf"{module}{residual + 3 * stage}\.block\.3\..*\.(weight|bias)", rf"{block}.res_conv2.\1"


MMPROJ = {
    "PocketTTSModel": Mmproj(
        (
            constant(".has_audio_encoder", True, "flag"),
            projector("pockettts_spkenc", "clip.audio.projector_type"),
            *_size_keys("audio", "block_count embedding_length feed_forward_length attention.head_count"),
            constant(".audio.num_mel_bins", 1),
            constant(".has_gen_audio_encoder", True, "flag"),
            projector("pockettts_gen", "clip.gen.audio.projector_type"),
            *_size_keys("gen.audio", "embedding_length feed_forward_length block_count attention.head_count"),
            Key(".gen.audio.model_variant", lambda config: config.path.parent.name, "text"),
        ),
        tensors=r"^flow_lm\.(speaker_proj_weight|input_linear|emb_mean|emb_std|out_eos|flow_net)"
        r"|^mimi\.(downsample|upsample|quantizer\.output_proj|(en|de)coder(_transformer)?)\.",
        rules=(
            Transform(r"^mimi\.quantizer\.output_proj\.weight$", squeeze_last, None),
            Split(r"\.in_proj\.weight$", (".in_proj.q", ".in_proj.k", ".in_proj.v")),
            *(
                NameInFile(f"^{stored}$", name)
                for stored, name in chain(
                    _NAMES.items(),
                    _transformer_names("encoder", "a"),
                    _transformer_names("decoder", "a.gen.wav.tfm"),
                    _seanet_names("encoder", "a", 1, 3),
                    _seanet_names("decoder", "a.gen.wav", 3, 2),
                )
            ),
        ),
        vision=False,
        audio=True,
        base=(),
        forced=(
            (".seanet.", TYPE_F16),
            ("a.downsample.conv.weight", TYPE_F16),
            ("a.gen.wav.upsample.weight", TYPE_F16),
        ),
    ),
}

"""Pocket TTS: its speaker encoder, its decoder of latents and Mimi's decoder.

Facts of llama.cpp b11434, conversion/pockettts.py. The model has no config.json: its sizes are those of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.encoder_rules import NameInFile, squeeze_last
from quantkit.checkpoint.expressions import TYPE_F16
from quantkit.checkpoint.mmproj import EncoderKey, Key, Mmproj, constant, projector
from quantkit.checkpoint.rules import Split, Transform
from quantkit.errors import FormatError
from quantkit.formats.safetensors import read_checkpoint

_MIMI = "mimi.encoder_transformer.transformer.layers."


def _read_sizes(config: Config) -> Json:
    """Return a configuration from the shapes of tensors."""
    folder = config.path.parent
    shapes = {name: t.shape for shard in read_checkpoint(folder) for name, t in shard.items()}

    def size(name: str, axis: int) -> int:
        if len(shapes.get(name, ())) <= axis:
            raise FormatError(f"{folder}: has no tensor {name}, whose shape Pocket TTS's sizes follow from", "QK-E105")
        return shapes[name][axis]

    width = size(f"{_MIMI}0.norm1.weight", 0)
    return {
        "architectures": ["PocketTTSModel"],
        "model_type": "pockettts",
        "hidden_size": size("flow_lm.conditioner.embed.weight", 1),
        "audio_config": {
            "num_hidden_layers": sum(bool(re.fullmatch(rf"{_MIMI}\d+\.norm1\.weight", name)) for name in shapes),
            "hidden_size": width,
            "intermediate_size": size(f"{_MIMI}0.linear1.weight", 0),
            "num_attention_heads": width // 64,
        },
    }


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
        read_config=_read_sizes,
        forced=(
            (".seanet.", TYPE_F16),
            ("a.downsample.conv.weight", TYPE_F16),
            ("a.gen.wav.upsample.weight", TYPE_F16),
        ),
    ),
}

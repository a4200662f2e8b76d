"""T5, mT5 and UMT5, with a decoder or alone.

Facts of llama.cpp b11434, conversion/t5.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.checkpoint.vocab.unigram import write_t5

_EMBEDDINGS = ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "shared.weight")


@dataclass(frozen=True)
class ShareEmbeddings(OneWayRule):
    """Use the first of several names of the shared embeddings for encoder and decoder."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name not in _EMBEDDINGS:
            return None
        first = context.config.values.setdefault("_shared", tensor.name)
        return (replace(tensor, name="shared.weight"),) if first == tensor.name else ()


RULES = (ShareEmbeddings(),)


def set_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of T5, in the converter's order."""
    length, epsilon = config.get("n_positions"), config["layer_norm_epsilon"]
    has_decoder = keys.arch == "t5"
    keys.u32(".context_length", 512 if length is None else length)
    keys.u32(".embedding_length", config["d_model"])
    keys.u32(".feed_forward_length", config["d_ff"])
    keys.u32(".block_count", layers)
    if has_decoder and (n := config.get("num_decoder_layers")) is not None:
        keys.u32(".decoder_block_count", n)
    keys.u32(".attention.head_count", config["num_heads"])
    keys.u32(".attention.key_length", config["d_kv"])
    keys.u32(".attention.value_length", config["d_kv"])
    keys.f32(".attention.layer_norm_epsilon", epsilon)
    keys.u32(".attention.relative_buckets_count", config["relative_attention_num_buckets"])
    keys.f32(".attention.layer_norm_rms_epsilon", epsilon)
    if has_decoder:
        keys.u32(".decoder_start_token_id", config["decoder_start_token_id"])
    keys.u32("general.file_type", file_type)


_T5 = Architecture("t5", rules=RULES, base=set_base, vocab=write_t5)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "T5ForConditionalGeneration": _T5,
    "T5WithLMHeadModel": _T5,
    "MT5ForConditionalGeneration": _T5,
    "UMT5ForConditionalGeneration": _T5,
    "UMT5Model": _T5,
    "T5EncoderModel": replace(_T5, arch="t5encoder"),
}


def _set_gated(meta: ModelMetadata, config: Json) -> None:
    """Set whether the feed-forward is gated, and whether the model has a decoder."""
    has_decoder = meta.arch == "t5"
    gated = any(name.endswith(".ffn_gate.weight") for name in meta.model.tensors)
    config |= {"feed_forward_proj": "gated-gelu" if gated else "relu", "is_encoder_decoder": has_decoder}
    if has_decoder and config.get("num_decoder_layers") is None:
        config["num_decoder_layers"] = config["num_layers"]


def _rename_gated(config: Config, name: str) -> str:
    """Rename the up matrix of a gated feed-forward, which differs from an ungated one."""
    gated = config.get("feed_forward_proj") == "gated-gelu"
    return name.replace(".DenseReluDense.wi.", ".DenseReluDense.wi_1.") if gated else name


def has_bias_in_every_layer(meta: ModelMetadata) -> bool:
    """Return whether each layer has relative position biases (UMT5)."""
    return "enc.blk.1.attn_rel_b.weight" in meta.model.tensors


_T5_CLASS = HfClass(
    "t5",
    "shared encoder.final_layer_norm",
    keys={
        ".context_length": "n_positions",
        ".embedding_length": "d_model",
        ".feed_forward_length": "d_ff",
        ".block_count": "num_layers",
        ".decoder_block_count": "num_decoder_layers",
        ".attention.head_count": "num_heads",
        ".attention.key_length": "d_kv",
        ".attention.layer_norm_epsilon": "layer_norm_epsilon",
        ".attention.layer_norm_rms_epsilon": "",
        ".attention.relative_buckets_count": "relative_attention_num_buckets",
        ".decoder_start_token_id": "decoder_start_token_id",
    },
    config_setters=(_set_gated,),
    rename_last=_rename_gated,
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "UMT5ForConditionalGeneration": replace(_T5_CLASS, model_type="umt5", matches=has_bias_in_every_layer),
    "T5ForConditionalGeneration": _T5_CLASS,
    "T5EncoderModel": _T5_CLASS,
}

"""T5, mT5 and UMT5, with a decoder or alone.

Facts of llama.cpp b11434, conversion/t5.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import FILE_TYPE, Copied, SetKeys, block_count, number_or
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


def _base_keys(*, decoder: bool) -> tuple[SetKeys, ...]:
    """Return the rows of T5, with or without a decoder."""
    return (
        number_or(".context_length", "n_positions", 512),
        Copied(".embedding_length", "d_model", required=True),
        Copied(".feed_forward_length", "d_ff", required=True),
        block_count("num_layers"),
        *((Copied(".decoder_block_count", "num_decoder_layers"),) if decoder else ()),
        Copied(".attention.head_count", "num_heads", required=True),
        Copied(".attention.key_length", "d_kv", required=True),
        Copied(".attention.value_length", "d_kv", required=True),
        Copied(".attention.layer_norm_epsilon", "layer_norm_epsilon", "f32", required=True),
        Copied(".attention.relative_buckets_count", "relative_attention_num_buckets", required=True),
        Copied(".attention.layer_norm_rms_epsilon", "layer_norm_epsilon", "f32", required=True),
        *((Copied(".decoder_start_token_id", "decoder_start_token_id", required=True),) if decoder else ()),
        FILE_TYPE,
    )


_T5 = Architecture("t5", rules=RULES, base=_base_keys(decoder=True), vocab=write_t5)

ARCHITECTURES: dict[str, Architecture] = {
    "T5ForConditionalGeneration": _T5,
    "T5WithLMHeadModel": _T5,
    "MT5ForConditionalGeneration": _T5,
    "UMT5ForConditionalGeneration": _T5,
    "UMT5Model": _T5,
    "T5EncoderModel": replace(_T5, arch="t5encoder", base=_base_keys(decoder=False)),
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
    config_setters=(_set_gated,),
    rename_last=_rename_gated,
)

CLASSES: dict[str, HfClass] = {
    "UMT5ForConditionalGeneration": replace(_T5_CLASS, model_type="umt5", matches=has_bias_in_every_layer),
    "T5ForConditionalGeneration": _T5_CLASS,
    "T5EncoderModel": _T5_CLASS,
}

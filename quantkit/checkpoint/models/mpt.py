"""MPT.

Facts of llama.cpp b11434, conversion/mpt.py.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import Always, Computed, Copied, SetKeys, block_count
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.tokenizer import Vocabulary


def _alibi_bias(config: Config) -> float:
    attention = config.table("attn_config")
    bias: float = attention.get("alibi_bias_max", 8) if attention.get("alibi", True) else 0.0
    return bias


def _set_alibi(meta: ModelMetadata, config: Json) -> None:
    bias = float(meta.get(".attention.max_alibi_bias") or 0.0)
    config.setdefault("attn_config", {}).update(
        {
            "alibi": bias > 0,
            # Later versions of transformers accept only an integer.
            "alibi_bias_max": (int(bias) if bias.is_integer() else bias) or 8,
        }
    )


#: MPT's, without a file type.
MPT_BASE: tuple[SetKeys, ...] = (
    Copied(".context_length", "max_seq_len", required=True),
    Copied(".embedding_length", "d_model", required=True),
    block_count("n_layers"),
    Computed(".feed_forward_length", lambda config: 4 * config.number("d_model")),
    Copied(".attention.head_count", "n_heads", required=True),
    Copied(".attention.head_count_kv", "attn_config.kv_n_heads", unless_zero=True),
    Always(".attention.layer_norm_epsilon", 1e-5, "f32", "layer_norm_epsilon"),
    Copied(".attention.clamp_kqv", "attn_config.clip_qkv", "f32"),
    Computed(".attention.max_alibi_bias", _alibi_bias, "f32", inverse=_set_alibi),
)


def write_mpt(v: Vocabulary) -> None:
    """Write a BPE vocabulary, or SEA-LION's SentencePiece (MPTModel)."""
    if v.has("tokenizer.json") or not v.has("tokenizer.model"):
        write_bpe(v)
        return
    write_sentencepiece(v)
    v.keys.flag("tokenizer.ggml.add_bos_token", False)
    for kind, number in (("padding", 3), ("eos", 1), ("unknown", 0)):
        v.keys.u32(f"tokenizer.ggml.{kind}_token_id", number)


_MPT = Architecture("mpt", base=MPT_BASE, vocab=write_mpt)

ARCHITECTURES: dict[str, Architecture] = {
    # transformers saves the second name, which convert_hf_to_gguf.py does not read.
    "MPTForCausalLM": _MPT,
    "MptForCausalLM": _MPT,
}


def _set_attention(meta: ModelMetadata, config: Json) -> None:
    """Set the settings of attention and feed-forward that tensors show."""
    attention = {"clip_qkv": None, **config["attn_config"], "qk_ln": meta.has("attn_q_norm.weight")}
    if "kv_n_heads" in attention:
        attention["attn_type"] = "grouped_query_attention"
    config["attn_config"] = attention
    config["no_bias"] = not meta.has("attn_qkv.bias")
    config["expansion_ratio"] = meta.number(".feed_forward_length") // max(1, meta.number(".embedding_length"))


_MPT_CLASS = HfClass(
    "mpt",
    "transformer.wte transformer.wpe transformer.norm_f "
    + add_prefix(
        "transformer.blocks.*.",
        "norm_1 norm_2 attn.Wqkv attn.out_proj attn.q_ln attn.k_ln ffn.up_proj ffn.down_proj ffn.act",
    ),
    config_setters=(_set_attention,),
)

CLASSES: dict[str, HfClass] = {
    "MptForCausalLM": replace(_MPT_CLASS, matches=lambda meta: meta.get(".attention.head_count_kv") is None),
    "MPTForCausalLM": _MPT_CLASS,
}

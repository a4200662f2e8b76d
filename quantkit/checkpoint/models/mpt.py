"""MPT.

Facts of llama.cpp b11434, conversion/mpt.py.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass, prefixed
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.tokenizer import Vocabulary


def set_mpt_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of MPT, without a file type."""
    attention, width = config["attn_config"], config.number("d_model")
    keys.u32(".context_length", config["max_seq_len"])
    keys.u32(".embedding_length", width)
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", 4 * width)
    keys.u32(".attention.head_count", config["n_heads"])
    if heads := attention.get("kv_n_heads"):
        keys.u32(".attention.head_count_kv", heads)
    keys.f32(".attention.layer_norm_epsilon", 1e-5)
    if (clip := attention.get("clip_qkv")) is not None:
        keys.f32(".attention.clamp_kqv", clip)
    keys.f32(".attention.max_alibi_bias", attention.get("alibi_bias_max", 8) if attention.get("alibi", True) else 0.0)


def write_mpt(v: Vocabulary) -> None:
    """BPE; SentencePiece of SEA-LION (MPTModel)."""
    if v.has("tokenizer.json") or not v.has("tokenizer.model"):
        write_bpe(v)
        return
    write_sentencepiece(v)
    v.keys.flag("tokenizer.ggml.add_bos_token", False)
    for kind, number in (("padding", 3), ("eos", 1), ("unknown", 0)):
        v.keys.u32(f"tokenizer.ggml.{kind}_token_id", number)


_MPT = Architecture("mpt", base=set_mpt_base, vocab=write_mpt)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    # transformers saves the second name, which convert_hf_to_gguf.py does not know.
    "MPTForCausalLM": _MPT,
    "MptForCausalLM": _MPT,
}


def _set_attn_config(meta: ModelMetadata, config: Json) -> None:
    """Set the nested configuration of attention."""
    bias = float(meta.get(".attention.max_alibi_bias") or 0.0)
    config["attn_config"] = {
        "alibi": bias > 0,
        # Later versions of transformers take only a whole number.
        "alibi_bias_max": (int(bias) if bias.is_integer() else bias) or 8,
        "clip_qkv": meta.get(".attention.clamp_kqv"),
        "qk_ln": meta.has("attn_q_norm.weight"),
    }
    if (keys := meta.get(".attention.head_count_kv")) is not None:
        config["attn_config"] |= {"kv_n_heads": keys, "attn_type": "grouped_query_attention"}
    config["no_bias"] = not meta.has("attn_qkv.bias")
    config["expansion_ratio"] = meta.number(".feed_forward_length") // max(1, meta.number(".embedding_length"))


_MPT_CLASS = HfClass(
    "mpt",
    "transformer.wte transformer.wpe transformer.norm_f "
    + prefixed(
        "transformer.blocks.*.",
        "norm_1 norm_2 attn.Wqkv attn.out_proj attn.q_ln attn.k_ln ffn.up_proj ffn.down_proj ffn.act",
    ),
    keys={
        ".block_count": "n_layers",
        ".context_length": "max_seq_len",
        ".embedding_length": "d_model",
        ".feed_forward_length": "",
        ".attention.head_count": "n_heads",
        ".attention.head_count_kv": "",
        ".attention.layer_norm_epsilon": "layer_norm_epsilon",
        ".attention.clamp_kqv": "",
    },
    config_setters=(_set_attn_config,),
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "MptForCausalLM": replace(_MPT_CLASS, matches=lambda meta: meta.get(".attention.head_count_kv") is None),
    "MPTForCausalLM": _MPT_CLASS,
}

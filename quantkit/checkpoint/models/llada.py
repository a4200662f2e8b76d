"""LLaDA, dense and with experts: language models that fill in masked tokens.

Facts of llama.cpp b11434, conversion/llada.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.pooling import set_pooling
from quantkit.checkpoint.row import Always, Architecture, Copied, HfClass, SetKeys, prefixed
from quantkit.checkpoint.rules import StackExperts
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.tokenizer import Vocabulary

LLADA_MOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "expert_intermediate_size"),
    Always("tokenizer.ggml.mask_token_id", 156895),
    Always(".attention.causal", False, "flag"),
    Always("diffusion.shift_logits", False, "flag"),
)


def _set_llada(keys: Keys, config: Config) -> None:
    keys.u32(".vocab_size", config["vocab_size"])
    width, heads = config.number("hidden_size", "d_model"), config.number("num_attention_heads", "n_heads")
    keys.u32(".rope.dimension_count", width // max(1, heads) if config.get("head_dim") is None else config["head_dim"])
    for key, name, default in (
        (".context_length", "max_sequence_length", 4096),
        (".embedding_length", "d_model", 4096),
        (".feed_forward_length", "mlp_hidden_size", 12288),
    ):
        keys.u32(key, config.get(name, default))
    keys.flag(".attention.causal", False)
    keys.flag("diffusion.shift_logits", False)


LLADA_KEYS: tuple[SetKeys, ...] = (set_pooling, _set_llada)


def write_llada(v: Vocabulary) -> None:
    """Write a BPE vocabulary with BOS (LLaDAModel)."""
    write_bpe(v, as_listed=True)
    v.keys.flag("tokenizer.ggml.add_bos_token", True)


_LLADA_MOE = Architecture("llada-moe", rules=(StackExperts(),), keys=LLADA_MOE_KEYS)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "LLaDAModelLM": Architecture("llada", rules=llama.ROPE_PERMUTED, keys=LLADA_KEYS, vocab=write_llada),
    "LLaDAMoEModel": _LLADA_MOE,
    "LLaDAMoEModelLM": _LLADA_MOE,
}


def _set_llada_names(meta: ModelMetadata, config: Json) -> None:
    """Set the values that only LLaDA has names for."""
    config_values.set_mask_token(meta, config)
    config |= {
        "embedding_size": config["vocab_size"],
        "weight_tying": config["tie_word_embeddings"],
        "rope": True,
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "include_bias": False,
    }


_LLADA_CLASS = HfClass(
    "llada",
    "model.transformer.wte model.transformer.ln_f model.transformer.ff_out "
    + prefixed("model.transformer.blocks.*.", "attn_norm ff_norm q_proj k_proj v_proj attn_out ff_proj up_proj ff_out"),
    keys={
        ".block_count": "n_layers",
        ".context_length": "max_sequence_length",
        ".embedding_length": "d_model",
        ".feed_forward_length": "mlp_hidden_size",
        ".attention.head_count": "n_heads",
        ".attention.head_count_kv": "n_kv_heads",
    },
    config_setters=(_set_llada_names,),
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "LLaDAMoEModelLM": HfClass("llada_moe", keys={".expert_count": "num_experts"}),
    "LLaDAModelLM": _LLADA_CLASS,
}

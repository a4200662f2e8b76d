"""Language models that fill in masked tokens: Dream, LLaDA, dense and with experts, and RND1.

Facts of llama.cpp b11434, conversion/dream.py, conversion/llada.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import VOCAB_SIZE, Always, Computed, Copied, SetKeys
from quantkit.checkpoint.models import llama, qwen
from quantkit.checkpoint.pooling import set_pooling
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import StackExperts
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.tokenizer import Vocabulary

#: Attention is bidirectional.
_ALL_SEEN = Always(".attention.causal", False, "flag")
#: Logits predict the token at their own position, not the next one.
_NOT_SHIFTED = Always("diffusion.shift_logits", False, "flag")
DREAM_KEYS: tuple[SetKeys, ...] = (_ALL_SEEN, Copied("tokenizer.ggml.mask_token_id", "mask_token_id"))
LLADA_MOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "expert_intermediate_size"),
    Always("tokenizer.ggml.mask_token_id", 156895),
    _ALL_SEEN,
    _NOT_SHIFTED,
)


def _head_width(config: Config) -> int:
    width, heads = config.number("hidden_size", "d_model"), config.number("num_attention_heads", "n_heads")
    head: int = width // max(1, heads) if config.get("head_dim") is None else config["head_dim"]
    return head


LLADA_KEYS: tuple[SetKeys, ...] = (
    set_pooling,
    VOCAB_SIZE,
    Computed(".rope.dimension_count", _head_width),
    Copied(".context_length", "max_sequence_length", default=4096),
    Copied(".embedding_length", "d_model", default=4096),
    Copied(".feed_forward_length", "mlp_hidden_size", default=12288),
    _ALL_SEEN,
    _NOT_SHIFTED,
)


def write_dream(v: Vocabulary) -> None:
    """Write a SentencePiece vocabulary, else BPE (DreamModel)."""
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
    else:
        write_bpe(v, as_listed=True)


def write_llada(v: Vocabulary) -> None:
    """Write a BPE vocabulary with BOS (LLaDAModel)."""
    write_bpe(v, as_listed=True)
    v.keys.flag("tokenizer.ggml.add_bos_token", True)


_LLADA_MOE = Architecture("llada-moe", rules=(StackExperts(),), keys=LLADA_MOE_KEYS)

ARCHITECTURES: dict[str, Architecture] = {
    "DreamModel": Architecture("dream", keys=(set_pooling, *DREAM_KEYS), vocab=write_dream),
    "RND1": Architecture("rnd1", rules=qwen.STACK_EXPERTS, keys=(*qwen.EXPERT_WIDTHS, *DREAM_KEYS)),
    "LLaDAModelLM": Architecture("llada", rules=llama.ROPE_PERMUTED, keys=LLADA_KEYS, vocab=write_llada),
    "LLaDAMoEModel": _LLADA_MOE,
    "LLaDAMoEModelLM": _LLADA_MOE,
}


def _set_llada_names(meta: ModelMetadata, config: Json) -> None:
    """Set the values that only LLaDA has names for."""
    config |= {
        "embedding_size": config["vocab_size"],
        "weight_tying": config["tie_word_embeddings"],
        "rope": True,
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "include_bias": False,
    }


CLASSES: dict[str, HfClass] = {
    "DreamModel": HfClass("Dream"),
    "RND1": HfClass("rnd1", keys={".expert_count": "num_experts"}),
    "LLaDAMoEModelLM": HfClass("llada_moe", keys={".expert_count": "num_experts"}),
    "LLaDAModelLM": HfClass(
        "llada",
        "model.transformer.wte model.transformer.ln_f model.transformer.ff_out "
        + add_prefix(
            "model.transformer.blocks.*.", "attn_norm ff_norm q_proj k_proj v_proj attn_out ff_proj up_proj ff_out"
        ),
        keys={
            ".block_count": "n_layers",
            ".attention.head_count": "n_heads",
            ".attention.head_count_kv": "n_kv_heads",
        },
        config_setters=(_set_llada_names,),
    ),
}

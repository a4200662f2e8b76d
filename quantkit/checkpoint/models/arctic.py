"""Snowflake Arctic.

Facts of llama.cpp b11434, conversion/arctic.py.
"""

from __future__ import annotations

from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, prefixed
from quantkit.checkpoint.vocab.sentencepiece import Piece, plain_tokens, write_pieces
from quantkit.checkpoint.vocab.tokenizer import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary


def write_arctic(v: Vocabulary) -> None:
    """Write a SentencePiece vocabulary with tokens renamed by tokenizer_config.json (ArcticModel)."""
    tokens, unknown = plain_tokens(v), v.tokenizer_config.get("unk_token")
    for number, entry in v.decoder_entries:
        if number < len(tokens):
            text = entry["content"]
            kind = (UNKNOWN if text == unknown else CONTROL) if entry.get("special") else USER_DEFINED
            tokens[number] = Piece(text, 0.0 if entry.get("special") else -10000.0, kind)
    write_pieces(v, tokens)


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "ArcticForCausalLM": Architecture(
        "arctic", rules=(*llama.ROPE_PERMUTED, llama.STACK_MIXTRAL_EXPERTS), keys=llama.LLAMA_KEYS, vocab=write_arctic
    ),
}

_ARCTIC_CLASS = HfClass(
    "arctic",
    prefixed(LAYER, "post_attention_layernorm residual_mlp.w1 residual_mlp.w2 residual_mlp.w3 block_sparse_moe.gate")
    + " layers.*.feed_forward.experts.w1 layers.*.feed_forward.experts.w2 layers.*.feed_forward.experts.w3",
    # What llama.cpp has in its code.
    defaults={"moe_layer_frequency": 1, "parallel_attn_mlp_res": True},
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "ArcticForCausalLM": _ARCTIC_CLASS,
}

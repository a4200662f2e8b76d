"""Llama's pieces in a tokenizer.json: BPE with bytes to fall back on (gguf-py's LlamaHfVocab)."""

from __future__ import annotations

import re

from quantkit.checkpoint.vocab.sentencepiece import Piece, write_pieces
from quantkit.checkpoint.vocab.tokenizer import BYTE, CONTROL, NORMAL, USER_DEFINED, Vocabulary

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def is_llama_hf(v: Vocabulary) -> bool:
    """Tell whether the tokenizer.json is one of these; else it is byte-level BPE."""
    model = v.model
    decoder = v.json.get("decoder")
    if model.get("type") != "BPE" or not model.get("byte_fallback", False):
        return False
    return isinstance(decoder, dict) and decoder.get("type") == "Sequence"


def llama_hf_tokens(v: Vocabulary) -> list[Piece]:
    """Return the tokens of the model, and behind them those that were added."""
    special = {token.number for token in v.added.values() if token.special and token.text in v.special_texts}
    size = len(v.base)
    by_id = {number: text for text, number in v.base.items()}
    beyond = sorted((t for t in v.added.values() if t.number >= size), key=lambda t: t.number)

    def kind(number: int, text: str) -> int:
        return BYTE if _BYTE.fullmatch(text) else CONTROL if number in special else NORMAL

    tokens = [Piece(by_id[n], -1000.0, kind(n, by_id[n])) for n in range(size) if n in by_id]
    for token in beyond:
        tokens.append(Piece(token.text, -1000.0, kind(token.number, "") if token.number in special else USER_DEFINED))
    return tokens


def write_llama_hf(v: Vocabulary) -> None:
    """Set the keys of such a vocabulary."""
    write_pieces(v, llama_hf_tokens(v))

"""WordPiece: tokenizer.json or vocab.txt as llama.cpp's "bert" vocabulary (BertModel.set_vocab)."""

from __future__ import annotations

from quantkit.checkpoint.vocab.bpe import bpe_tokens
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import CONTROL, Vocabulary

#: What continues a word has this in a tokenizer.json; in a file, what begins one has a space.
_CONTINUES, _BEGINS = "##", "\u2581"


def write_wordpiece(v: Vocabulary) -> None:
    """Set the keys of a WordPiece vocabulary, and how many types of tokens there are."""
    tokens, types = bpe_tokens(v)
    set_token_types(v)
    v.keys.text("tokenizer.ggml.model", "bert")
    v.keys.text("tokenizer.ggml.pre", v.pre_name)
    v.keys.array("tokenizer.ggml.tokens", [_piece(t, kind) for t, kind in zip(tokens, types, strict=True)])
    v.keys.array("tokenizer.ggml.token_type", types)
    special_tokens(v.folder, n_tokens=len(tokens)).write(v.keys)


def set_token_types(v: Vocabulary) -> None:
    """Set how many types of tokens there are: first text, second text."""
    v.keys.u32("tokenizer.ggml.token_type_count", v.config.get("type_vocab_size", 1))


def _piece(text: str, kind: int) -> str:
    if kind == CONTROL:
        return text
    return text.removeprefix(_CONTINUES) if text.startswith(_CONTINUES) else _BEGINS + text

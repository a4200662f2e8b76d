"""Byte-level BPE: tokenizer.json as llama.cpp's "gpt2" vocabulary (TextModel.get_vocab_base, _set_vocab_gpt2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from quantkit.checkpoint.vocab.special import KINDS, special_tokens
from quantkit.checkpoint.vocab.tokenizer import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    AddedToken,
    Vocabulary,
    checked_size,
    looks_special,
)
from quantkit.errors import FormatError

NONE: Mapping[str, str] = MappingProxyType({})


def bpe_tokens(v: Vocabulary, as_listed: bool = False) -> tuple[list[str], list[int]]:
    """Return the text and the type of every token; numbers without one are filled up.

    ``as_listed``: added tokens are what the files say, whatever the tokenizer makes of them.
    """
    size = checked_size(v, v.config.get("vocab_size", len(v.by_id)), max(v.by_id, default=0))
    tokens, types = [], []
    for number in range(size):
        text = v.by_id.get(number)
        if text is None:
            tokens.append(f"[PAD{number}]")
            types.append(UNUSED)
            continue
        kind = NORMAL
        if text in v.added:
            token = v.added[text]
            text, kind = (text, CONTROL if token.special else USER_DEFINED) if as_listed else _added(v, token)
        tokens.append(text)
        types.append(kind)
    return tokens, types


def _added(v: Vocabulary, token: AddedToken) -> tuple[str, int]:
    text = token.text if token.normalized else v.spelled(token)
    if token.special or looks_special(text):
        return text, CONTROL
    return text.replace("\u2581", " "), USER_DEFINED


def write_bpe(
    v: Vocabulary, special: Mapping[str, str] = NONE, kinds: Sequence[str] = KINDS, as_listed: bool = False
) -> None:
    """Set the keys of a byte-level BPE vocabulary.

    Args:
        v: the vocabulary.
        special: kind -> added token, where files name none of that kind.
        kinds: of special tokens that files are asked for.
        as_listed: see ``bpe_tokens``.
    """
    tokens, types = bpe_tokens(v, as_listed)
    v.keys.text("tokenizer.ggml.model", "gpt2")
    v.keys.text("tokenizer.ggml.pre", v.pre_name)
    v.keys.array("tokenizer.ggml.tokens", tokens)
    v.keys.array("tokenizer.ggml.token_type", types)
    found = special_tokens(v.folder, merges=True, kinds=kinds)
    for kind, text in special.items():
        if text not in v.added:
            raise FormatError(f"{v.where}: it has no token {text}, which tokenizers of this model have")
        found.set(kind, v.added[text].number)
    found.write(v.keys)

"""tokenizer.json as llama.cpp's vocabularies: BPE, of bytes or of pieces, and WordPiece.

Byte-level BPE is "gpt2" (TextModel.get_vocab_base, _set_vocab_gpt2), BPE of pieces "llama" (LlamaHfVocab), WordPiece
"bert" (BertModel.set_vocab).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quantkit.checkpoint.vocab.sentencepiece import Piece, write_pieces, write_sentencepiece
from quantkit.checkpoint.vocab.special import KINDS, special_tokens
from quantkit.checkpoint.vocab.tokenizer import (
    BYTE,
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
#: The special tokens of GLM 4.5 and later (TextModel._set_vocab_glm), and of GLM 4 (TextModel._set_vocab_glmedge).
GLM_SPECIAL = MappingProxyType({"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"})
GLM_4_SPECIAL = MappingProxyType(
    {"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>", "bos": "<|endoftext|>"}
)


def bpe_tokens(v: Vocabulary, as_listed: bool = False) -> tuple[list[str], list[int]]:
    """Return the text and the type of every token; missing ids are filled with padding.

    ``as_listed``: use added tokens as in the files, not as the tokenizer changes them.
    """
    v.run()
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
            text, kind = (text, CONTROL if token.special else USER_DEFINED) if as_listed else _classify_added(v, token)
        tokens.append(text)
        types.append(kind)
    return tokens, types


def _classify_added(v: Vocabulary, token: AddedToken) -> tuple[str, int]:
    text = v.round_trip(token)
    if token.special or looks_special(text):
        return text, CONTROL
    return text.replace("\u2581", " "), USER_DEFINED


def write_bpe(
    v: Vocabulary, special: Mapping[str, str] = NONE, kinds: Sequence[str] = KINDS, as_listed: bool = False
) -> None:
    """Set the keys of a byte-level BPE vocabulary.

    Args:
        v: the vocabulary.
        special: kind -> added token, used if files have none of that kind.
        kinds: the kinds of special tokens to read from files.
        as_listed: see ``bpe_tokens``.
    """
    v.run()
    v.check_model("BPE")
    tokens, types = bpe_tokens(v, as_listed)
    v.keys.text("tokenizer.ggml.model", "gpt2")
    v.keys.text("tokenizer.ggml.pre", v.pre_name)
    v.keys.array("tokenizer.ggml.tokens", tokens)
    v.keys.array("tokenizer.ggml.token_type", types)
    special_ids = special_tokens(v.folder, merges=True, kinds=kinds)
    for kind, text in special.items():
        if text not in v.added:
            raise FormatError(f"{v.where}: has no token {text}, which this model needs", "QK-E114")
        special_ids.set(kind, v.added[text].number)
    special_ids.write(v.keys)


def write_sentencepiece_or_bpe(v: Vocabulary) -> None:
    """Write tokenizer.model if present, else tokenizer.json (Qwen2Model)."""
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
    else:
        write_bpe(v)


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def is_llama_hf(v: Vocabulary) -> bool:
    """Return whether tokenizer.json has Llama's pieces; otherwise it is byte-level BPE."""
    model = v.model
    decoder = v.json.get("decoder")
    if model.get("type") != "BPE" or not model.get("byte_fallback", False):
        return False
    return isinstance(decoder, dict) and decoder.get("type") == "Sequence"


def is_byte_level(v: Vocabulary) -> bool:
    """Return whether the tokens of tokenizer.json are spelled in byte-level BPE."""
    return any(_has_type(v.json.get(step), "ByteLevel") for step in ("pre_tokenizer", "decoder"))


def _has_type(step: Any, name: str) -> bool:
    """Return whether a step of a tokenizer.json, or one of its sequence, is of a type."""
    if not isinstance(step, dict):
        return False
    inner = step.get("pretokenizers") or step.get("decoders") or []
    return step.get("type") == name or any(isinstance(item, dict) and item.get("type") == name for item in inner)


def llama_hf_tokens(v: Vocabulary) -> list[Piece]:
    """Return the tokens of the model, followed by the added ones.

    Raises FormatError: the tokenizer.json is of another kind.
    """
    v.run()
    if not is_llama_hf(v):
        raise FormatError(f"{v.where}: not a BPE of pieces with byte fallback, which this model needs", "QK-E114")
    special = {token.number for token in v.added.values() if token.special and token.text in v.special_texts}
    size = len(v.base)
    by_id = {number: text for text, number in v.base.items()}
    beyond = sorted((t for t in v.added.values() if t.number >= size), key=lambda t: t.number)

    def kind(number: int, text: str) -> int:
        if _BYTE.fullmatch(text):
            return BYTE
        return CONTROL if number in special else NORMAL

    tokens = [Piece(by_id[n], -1000.0, kind(n, by_id[n])) for n in range(size) if n in by_id]
    for token in beyond:
        tokens.append(Piece(token.text, -1000.0, kind(token.number, "") if token.number in special else USER_DEFINED))
    return tokens


def write_tokenizer_json(v: Vocabulary) -> None:
    """Write the keys of tokenizer.json: Llama's pieces, or byte-level BPE."""
    v.run()
    if is_llama_hf(v):
        write_llama_hf(v)
    else:
        write_bpe(v)


def write_llama_hf(v: Vocabulary) -> None:
    """Set the keys of such a vocabulary."""
    write_pieces(v, llama_hf_tokens(v))


#: Prefix of a word's continuation in tokenizer.json; in GGUF, the start of a word has a space.
_CONTINUES, _WORD_START = "##", "\u2581"


def write_wordpiece(v: Vocabulary) -> None:
    """Set the keys of a WordPiece vocabulary, and the number of token types."""
    tokens, types = bpe_tokens(v)
    set_token_types(v)
    v.keys.text("tokenizer.ggml.model", "bert")
    v.keys.text("tokenizer.ggml.pre", v.pre_name)
    v.keys.array("tokenizer.ggml.tokens", [_piece(t, kind) for t, kind in zip(tokens, types, strict=True)])
    v.keys.array("tokenizer.ggml.token_type", types)
    special_tokens(v.folder, n_tokens=len(tokens)).write(v.keys)


def set_token_types(v: Vocabulary) -> None:
    """Set the number of token types: first text, second text."""
    v.keys.u32("tokenizer.ggml.token_type_count", v.config.get("type_vocab_size", 1))


def _piece(text: str, kind: int) -> str:
    if kind == CONTROL:
        return text
    return text.removeprefix(_CONTINUES) if text.startswith(_CONTINUES) else _WORD_START + text


def write_nomic_words(v: Vocabulary) -> None:
    """Write a WordPiece vocabulary from tokenizer.json (NomicBertModel)."""
    v.check_model("WordPiece")
    write_wordpiece(v)

"""Vocabularies of older models: InternLM 2, Xverse, Qwen 1, PLaMo 2 and 3, Refact, MPT, RWKV."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import MAX_JSON, optional_json
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.sentencepiece import Piece, read_model, set_pieces, write_sentencepiece
from quantkit.checkpoint.vocab.special import SpecialTokens, special_tokens, template_file
from quantkit.checkpoint.vocab.tiktoken import QWEN, write_ranks
from quantkit.checkpoint.vocab.tokenizer import (
    BYTE,
    CONTROL,
    MAX_PADDING,
    MAX_TOKENS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    checked_size,
)
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")

# --- InternLM 2 ------------------------------------------------------------------------------------------------------

#: The end of a turn, which ends a text of chat models.
_TURN = "<|im_end|>"


def write_internlm2(v: Vocabulary) -> None:
    """SentencePiece; what files add replaces pieces, or follows them (InternLM2Model)."""
    path = v.folder / "tokenizer.model"
    model = read_model(path)
    size = v.config.get("vocab_size", len(model.pieces))
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= len(model.pieces):
        raise FormatError(f"{path}: it has {len(model.pieces)} tokens, and vocab_size of config.json is {short(size)}")
    tokens = [_without_zero(piece) for piece in model.pieces[:size]]
    added = optional_json(v.folder / "added_tokens.json") or {}
    tokens += [Piece(text, -1000.0, USER_DEFINED) for text in added]
    end = None
    for number, text, special in _added(v):
        if number >= len(tokens):
            raise FormatError(f"{v.folder}: the added token {number} lies beyond the {len(tokens)} of {path.name}")
        end = number if text == _TURN else end
        tokens[number] = Piece(text, -1000.0, CONTROL if special else USER_DEFINED)
    set_pieces(v, tokens)
    v.keys.flag("tokenizer.ggml.add_space_prefix", model.adds_prefix)
    special_of_all = special_tokens(v.folder, n_tokens=len(tokens))
    if end is not None:
        special_of_all.ids["eos"] = end
    special_of_all.write(v.keys)


def _without_zero(piece: Piece) -> Piece:
    """Return a piece that C can read; those for nothing are unused."""
    text = "\U0001f409" if piece.text == "\0" else piece.text
    return Piece(text, piece.score, UNUSED if piece.text.startswith("[UNUSED") else piece.type)


def _added(v: Vocabulary) -> Iterator[tuple[int, str, bool]]:
    for number, entry in v.listed:
        yield number, entry["content"], bool(entry.get("special"))
    if v.has("tokenizer.json"):
        for token in v.added_in_json:
            yield token.number, token.text, token.special


# --- Xverse ----------------------------------------------------------------------------------------------------------


def write_xverse(v: Vocabulary) -> None:
    """Pieces of a tokenizer.json, without scores (XverseModel)."""
    size = checked_size(v, v.config.get("vocab_size", len(v.by_id)), max(v.by_id, default=0))
    missing = next((number for number in range(size) if number not in v.by_id), None)
    if missing is not None:
        raise FormatError(f"{v.where}: it has no token {missing}, and vocab_size of config.json is {size}")
    pieces = [_typed(v, v.by_id[number]) for number in range(size)]
    v.keys.text("tokenizer.ggml.model", "llama")
    v.keys.text("tokenizer.ggml.pre", "default")
    v.keys.array("tokenizer.ggml.tokens", [text for text, _ in pieces])
    v.keys.array("tokenizer.ggml.token_type", [kind for _, kind in pieces])
    special_tokens(v.folder, n_tokens=size).write(v.keys)


def _typed(v: Vocabulary, text: str) -> tuple[str, int]:
    if text == "\0":
        return "<b'\\x00'>", BYTE
    if _BYTE.fullmatch(text):
        return text, BYTE
    if text in v.added:
        return text, CONTROL if v.added[text].special else USER_DEFINED
    return text, NORMAL


# --- Qwen 1 ----------------------------------------------------------------------------------------------------------


def write_qwen(v: Vocabulary) -> None:
    """Ranks; texts begin and end with one token, unless config.json says otherwise (TextModel._set_vocab_qwen)."""

    def complete(special: SpecialTokens, ids: dict[str, int]) -> None:
        end = ids["<|endoftext|>"]
        for kind in ("unk",) if special.ids else ("bos", "eos", "unk"):
            special.set(kind, end)

    write_ranks(v, QWEN, complete)


# --- PLaMo -----------------------------------------------------------------------------------------------------------

_PLAMO_TYPES = {"UNKNOWN": UNKNOWN, "CONTROL": CONTROL, "BYTE": BYTE}
_PLAMO_KINDS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("sep", "seperator"), ("unk", "unknown"))


def _json_lines(path: Path) -> Iterator[Any]:
    for at, line in enumerate(read_whole(path, MAX_JSON).splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                raise FormatError(f"{path}: line {at} is no JSON: {short(line)}") from None


def _plamo_pieces(path: Path) -> list[Piece]:
    pieces = []
    for entry in _json_lines(path):
        listed = isinstance(entry, list) and len(entry) > 1 and isinstance(entry[0], str)
        if not listed or isinstance(entry[1], bool) or not isinstance(entry[1], (int, float)):
            raise FormatError(f"{path}: {short(entry)} is no token with its score")
        kind = _PLAMO_TYPES.get(entry[2] if len(entry) > 2 and isinstance(entry[2], str) else "")
        if kind is None:
            kind = CONTROL if entry[0].startswith("<|plamo:") and entry[0].endswith("|>") else NORMAL
        pieces.append(Piece(entry[0], float(entry[1]), kind))
    return pieces


def write_plamo(v: Vocabulary) -> None:
    """Tokens of a tokenizer.jsonl (TextModel._set_vocab_plamo)."""
    path = v.folder / "tokenizer.jsonl"
    if not path.is_file():
        raise FormatError(f"{v.folder}: it has no tokenizer.jsonl, so there is no vocabulary")
    pieces, size = _plamo_pieces(path), v.config.number("vocab_size")
    if size > min(MAX_TOKENS, len(pieces) + MAX_PADDING):
        raise FormatError(f"{path}: it has {len(pieces)} tokens, and vocab_size of config.json is {size}")
    pieces += [Piece(f"[PAD{i}]", -1000.0, UNUSED) for i in range(1, size - len(pieces) + 1)]
    set_pieces(v, pieces, "plamo2")
    texts, config = [piece.text for piece in pieces], v.tokenizer_config
    for kind, key in _PLAMO_KINDS:
        if (text := config.get(f"{kind}_token")) is not None:
            if text not in texts:
                raise FormatError(f"{path}: it has no token {short(text)}, the {kind}_token of tokenizer_config.json")
            v.keys.u32(f"tokenizer.ggml.{key}_token_id", texts.index(text))
    v.keys.u32("tokenizer.ggml.eot_token_id", 4)  # <|plamo:op|>
    v.keys.flag("tokenizer.ggml.add_space_prefix", False)
    for kind in ("bos", "eos"):
        if (adds := config.get(f"add_{kind}_token")) is not None:
            v.keys.flag(f"tokenizer.ggml.add_{kind}_token", adds)


def write_plamo3(v: Vocabulary) -> None:
    """The same with a chat template, of which chat_template.jinja counts (Plamo3Model)."""
    write_plamo(v)
    found = v.tokenizer_config.get("chat_template")
    v.keys.text("tokenizer.chat_template", template_file(v.folder) if v.has("chat_template.jinja") else found)


# --- Refact, MPT -----------------------------------------------------------------------------------------------------


def write_refact(v: Vocabulary) -> None:
    """BPE with tokens to fill in the middle, for which there are no keys any more (RefactModel)."""
    write_bpe(v)
    special = special_tokens(v.folder, kinds=("prefix", "suffix", "middle", "eot"))
    special.template = None
    special.write(v.keys)


def write_mpt(v: Vocabulary) -> None:
    """BPE; SentencePiece of SEA-LION (MPTModel)."""
    if v.has("tokenizer.json") or not v.has("tokenizer.model"):
        write_bpe(v)
        return
    write_sentencepiece(v)
    v.keys.flag("tokenizer.ggml.add_bos_token", False)
    for kind, number in (("padding", 3), ("eos", 1), ("unknown", 0)):
        v.keys.u32(f"tokenizer.ggml.{kind}_token_id", number)


# --- RWKV ------------------------------------------------------------------------------------------------------------

_RWKV = "rwkv_vocab_v20230424.txt"


def _rwkv_text(path: Path, at: int, line: str) -> str:
    """Return a token as Python writes bytes: a line is its number, a literal, and how many bytes it has."""
    try:
        _, *literal, length = line.split(" ")
        found = ast.literal_eval(" ".join(literal))
        token = found.encode() if isinstance(found, str) else found
        if not isinstance(token, bytes) or len(token) != int(length):
            raise ValueError
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise FormatError(f"{path}: line {at} is no token with its length: {short(line)}") from None
    return repr(token)[2:-1]


def write_rwkv(v: Vocabulary) -> None:
    """Bytes, of the longest token that fits; two new lines end a turn (TextModel._set_vocab_rwkv_world)."""
    path = v.folder / _RWKV
    if not path.is_file():
        raise FormatError(f"{v.folder}: it has no {_RWKV}, so there is no vocabulary")
    lines = read_whole(path, MAX_JSON).decode().removesuffix("\n").split("\n")
    tokens = ["<s>", *(_rwkv_text(path, at, line) for at, line in enumerate(lines, 1))]
    size = v.config.get("vocab_size", 65536)
    if not isinstance(size, int) or not len(tokens) <= size <= min(MAX_TOKENS, len(tokens) + MAX_PADDING):
        raise FormatError(f"{path}: it has {len(tokens)} tokens, and vocab_size of config.json is {short(size)}")
    v.keys.text("tokenizer.ggml.model", "rwkv")
    v.keys.array("tokenizer.ggml.tokens", tokens + [f"[PAD{i}]" for i in range(len(tokens), size)])
    types = [CONTROL] + [NORMAL] * (len(tokens) - 1) + [UNUSED] * (size - len(tokens))
    v.keys.array("tokenizer.ggml.token_type", types)
    special = special_tokens(v.folder)
    special.template = special.template or "rwkv-world"  # llama.cpp's name of a template of its own
    special.set("eot", 261)
    special.ids |= {"bos": 0, "eos": 0}
    special.write(v.keys)

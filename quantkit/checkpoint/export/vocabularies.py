"""Vocabularies of specific families: Unigram (T5, XLM-RoBERTa), PLaMo's and RWKV's lists, and Qwen 1's ranks.

Facts of transformers 4.57.6 (convert_slow_tokenizer.py) and of the files of those models.
"""

from __future__ import annotations

import ast
import base64
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantkit.checkpoint.export.tokens import ID_NAMES, META, Json, Tokens, template, tokenizer_json
from quantkit.checkpoint.vocab.sentencepiece import Piece
from quantkit.checkpoint.vocab.special import KINDS
from quantkit.checkpoint.vocab.tiktoken import to_bytes
from quantkit.checkpoint.vocab.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

# --- Unigram ---------------------------------------------------------------------------------------------------------

#: Architectures of XLM-RoBERTa, and the first tokens, which sentencepiece.bpe.model has in another order.
_XLM = ("bert", "nomic-bert-moe")
_FIRST = ["<s>", "<pad>", "</s>", "<unk>"]
#: Spaces, except the last one before a word.
_NOT_SINGLE = r"^ +| +(?= )| +$"


def write_unigram(tokens: Tokens) -> tuple[Json, dict[str, bytes]]:
    """Write pieces with their scores: tokenizer.json, and the model's file under the name that its class reads."""
    scores, of_xlm = tokens.scores(), tokens.model.get("general.architecture") in _XLM
    charsmap = bytes(tokens.octets("precompiled_charsmap"))
    prefix, removes = (tokens.flag(name) is not False for name in ("add_space_prefix", "remove_extra_whitespaces"))
    normalizer_settings, pieces = NormalizerSettings(prefix, removes, charsmap), pieces_of(tokens, scores)
    of_file = _xlm_file(tokens, pieces, normalizer_settings) if of_xlm else {}
    steps: list[Json] = []
    if charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    always = removes or prefix
    if prefix and not removes and (of_file or not of_xlm):  # otherwise a map beside other normalizers would be missed
        steps.append({"type": "Prepend", "prepend": META})
        always = False
    space: Json = {"type": "Metaspace", "replacement": META, "prepend_scheme": "always" if always else "never"}
    single: Json = {"type": "Split", "pattern": {"Regex": _NOT_SINGLE}, "behavior": "Removed", "invert": False}
    parts = [single, {**space, "split": False}]
    normalizer = steps[0] if steps else None
    if len(steps) > 1:
        normalizer = {"type": "Sequence", "normalizers": steps}
    tokenizer = tokenizer_json(
        tokens,
        normalizer=normalizer,
        pre_tokenizer={"type": "Sequence", "pretokenizers": parts} if removes else parts[1],
        post_processor=template(tokens, (False, True), separates=of_xlm),
        decoder={**space, "prepend_scheme": "always" if prefix or removes else "never", "split": False},
        model={},
    )
    tokenizer["model"] = {
        "type": "Unigram",
        "unk_id": next((i for i, piece in enumerate(pieces) if piece.type == UNKNOWN), None),
        "vocab": [[piece.text, piece.score] for piece in pieces],
        "byte_fallback": False,  # as llama.cpp and transformers do
    }
    if of_xlm:
        return tokenizer, of_file
    added = {piece.text: i for i, piece in enumerate(pieces) if piece.type == USER_DEFINED}
    files = {"spiece.model": model_file(tokens, pieces, normalizer_settings, unigram=True)}
    if added:
        files["added_tokens.json"] = (json.dumps(added, indent=2, ensure_ascii=False) + "\n").encode()
    return tokenizer, files


def _xlm_file(tokens: Tokens, pieces: list[Piece], normalizer_settings: NormalizerSettings) -> dict[str, bytes]:
    """Return sentencepiece.bpe.model for a vocabulary of XLM-R, which pads it with [PAD] tokens; otherwise nothing.

    The file has three pieces instead of the vocabulary's four.
    """
    last = len(tokens.texts) - 1
    if tokens.texts[:4] != _FIRST or tokens.texts[last] != f"[PAD{last - 1}]" or USER_DEFINED in tokens.types:
        return {}
    while len(pieces) > 4 and pieces[-1].type == UNUSED:
        pieces = pieces[:-1]
    first = [Piece(text, 0.0, kind) for text, kind in (("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL))]
    return {"sentencepiece.bpe.model": model_file(tokens, first + pieces[4:], normalizer_settings, unigram=True)}


def unigram_config(tokens: Tokens) -> Json:
    """Return tokenizer_config.json: `quantkit convert` reads the treatment of spaces from it, as llama.cpp's
    converter does.
    """
    if tokens.model.get("general.architecture") not in _XLM:
        return {}
    return {
        "add_prefix_space": tokens.flag("add_space_prefix") is not False,
        "clean_up_tokenization_spaces": tokens.flag("remove_extra_whitespaces") is not False,
    }


# --- PLaMo -----------------------------------------------------------------------------------------------------------

_PLAMO_TYPES = {UNKNOWN: "UNKNOWN", CONTROL: "CONTROL", BYTE: "BYTE"}


def write_plamo(tokens: Tokens) -> dict[str, bytes]:
    """Write a line for each token: its text, its score, its type."""
    scores = tokens.scores()
    size = len(tokens.texts)
    while size and tokens.types[size - 1] == UNUSED:
        size -= 1
    rows = [[tokens.texts[i], scores[i], _PLAMO_TYPES.get(tokens.types[i], "NORMAL"), None] for i in range(size)]
    return {"tokenizer.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()}


# --- RWKV ------------------------------------------------------------------------------------------------------------


def write_rwkv(tokens: Tokens) -> dict[str, bytes]:
    """Write a line for each token but the first: number, Python literal, length in bytes."""
    lines = []
    for number, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True)):
        if number == 0 or kind == UNUSED:
            continue
        token = _bytes_of(tokens, text)
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{number} {literal} {len(token)}\n")
    return {"rwkv_vocab_v20230424.txt": "".join(lines).encode()}


def _bytes_of(tokens: Tokens, text: str) -> bytes:
    """Return the bytes that Python writes as ``text``, between quotes of either kind."""
    for quote in ("'", '"'):
        try:
            token = ast.literal_eval(f"b{quote}{text}{quote}")
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(token, bytes) and repr(token)[2:-1] == text:
            return token
    raise FormatError(f"{tokens.where}: the token {short(text)} is not a Python bytes literal", "QK-E123")


# --- Qwen 1 ----------------------------------------------------------------------------------------------------------


def write_ranks(tokens: Tokens) -> dict[str, bytes]:
    """Write a line for each plain token: its bytes in Base64, and its id."""
    lines = (
        base64.b64encode(to_bytes(text)) + b" %d\n" % number
        for number, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True))
        if kind == NORMAL
    )
    return {"qwen.tiktoken": b"".join(lines)}


@dataclass(frozen=True)
class NormalizerSettings:
    """Normalization of texts before they are encoded."""

    prefix: bool = True
    removes_spaces: bool = False
    charsmap: bytes = b""


def pieces_of(tokens: Tokens, scores: Sequence[float]) -> list[Piece]:
    """Return all tokens except those that only pad the vocabulary to the length of the embeddings."""
    size = len(tokens.texts)
    while size and (tokens.is_filler(size - 1) or tokens.types[size - 1] == UNUSED and scores[size - 1] == -10000.0):
        size -= 1
    return [Piece(tokens.texts[i], scores[i], tokens.types[i]) for i in range(size)]


def model_file(
    tokens: Tokens, pieces: Sequence[Piece], normalizer_settings: NormalizerSettings, *, unigram: bool = False
) -> bytes:
    """Return the file of these pieces: BPE, or Unigram."""
    ids = {kind: tokens.model.get(f"tokenizer.ggml.{ID_NAMES.get(kind, kind)}_token_id") for kind in KINDS}
    unknown = next((i for i, piece in enumerate(pieces) if piece.type == UNKNOWN), 0)
    parts = [_bytes_field(1, _encode_piece(piece)) for piece in pieces]
    numbers = [(3, 1 if unigram else 2), (4, len(pieces)), (35, BYTE in tokens.types), (40, unknown)]
    numbers += [
        (field_number, -1 if ids[kind] is None else ids[kind])
        for field_number, kind in ((41, "bos"), (42, "eos"), (43, "pad"))
    ]
    trainer = b"".join(_number_field(field_number, int(value)) for field_number, value in numbers)
    normalizer = _bytes_field(1, b"identity") + (
        _bytes_field(2, normalizer_settings.charsmap) if normalizer_settings.charsmap else b""
    )
    normalizer += (
        _number_field(3, normalizer_settings.prefix)
        + _number_field(4, normalizer_settings.removes_spaces)
        + _number_field(5, 1)
    )
    return b"".join((*parts, _bytes_field(2, trainer), _bytes_field(3, normalizer)))


def _encode_piece(piece: Piece) -> bytes:
    data = _bytes_field(1, piece.text.encode("utf-8", "surrogateescape"))
    return data + b"\x15" + struct.pack("<f", piece.score) + _number_field(3, piece.type if 0 < piece.type < 7 else 1)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _number_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value & (1 << 64) - 1)


def _varint(value: int) -> bytes:
    return bytes(_septets(value))


def _septets(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value

"""SentencePiece: tokenizer.model as llama.cpp's "llama" vocabulary (TextModel._create_vocab_sentencepiece).

A tokenizer.model is a protobuf message; only the pieces are read (field 1: text, score, type), the kind of model (field
2, its field 3), and the normalization of texts (field 3).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quantkit.checkpoint.config import MAX_JSON, optional_json
from quantkit.checkpoint.vocab.special import special_tokens
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
    looks_special,
)
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole

#: Types in a tokenizer.model (NORMAL 1 .. BYTE 6) that are kept; user-defined pieces (4) become normal ones, as in the
#: reference.
_PIECE_TYPES = {2: UNKNOWN, 3: CONTROL, 5: UNUSED, 6: BYTE}


class Piece(NamedTuple):
    """A token with its score and its type in llama.cpp."""

    text: str
    score: float
    type: int


@dataclass
class PieceModel:
    """A SentencePiece model: its pieces, Unigram or BPE, and the normalization of texts."""

    pieces: list[Piece] = field(default_factory=list)
    is_unigram: bool = True
    charsmap: bytes = b""
    adds_prefix: bool = True
    removes_spaces: bool = True


def read_model(path: Path) -> PieceModel:
    """Return the contents of a tokenizer.model. Raises FormatError."""
    data = read_whole(path, MAX_JSON)
    model = PieceModel()
    try:
        for number, body in _fields(data):
            if isinstance(body, bytes):
                _add_field(model, number, body)
    except (IndexError, UnicodeDecodeError, struct.error) as e:
        raise FormatError(f"{path}: not a SentencePiece model: {e}", "QK-E114") from None
    if not model.pieces:
        raise FormatError(f"{path}: has no pieces, so the vocabulary is missing: download it again", "QK-E114")
    return model


def _add_field(model: PieceModel, number: int, body: bytes) -> None:
    if number == 1:
        model.pieces.append(_piece(body))
    elif number == 2:
        model.is_unigram = dict(_fields(body)).get(3, 1) == 1
    elif number == 3:
        normalizer = dict(_fields(body))
        charsmap = normalizer.get(2, b"")
        model.charsmap = charsmap if isinstance(charsmap, bytes) else b""
        model.adds_prefix, model.removes_spaces = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))


def _piece(data: bytes) -> Piece:
    text = ""
    score = 0.0
    kind = 1
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode()
        elif number == 2 and isinstance(value, bytes):
            score = struct.unpack("<f", value)[0]
        elif number == 3 and isinstance(value, int):
            kind = value
    return Piece(text, score, _PIECE_TYPES.get(kind, NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield number and value of each field of a protobuf message. Raises IndexError if it ends too early."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire, value = tag & 7, 0
        if wire == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            n, position = _varint(data, position)
        elif wire in (1, 5):
            n = 8 if wire == 1 else 4
        else:
            raise IndexError(f"a field of wire type {wire} at byte {position}")
        if n > len(data) - position:
            raise IndexError(f"a field ends beyond the file at byte {position}")
        yield tag >> 3, data[position : position + n]
        position += n


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[position]
        value = value | (byte & 0x7F) << shift
        position = position + 1
        shift = shift + 7
        if byte < 0x80:
            return value, position
    raise IndexError(f"a number of more than 64 bits at byte {position}")


def sentencepiece_tokens(v: Vocabulary) -> list[Piece]:
    """Return all tokens: the pieces, some replaced by added_tokens.json and tokenizer_config.json."""
    tokens = _pad_tokens(v, "vocab_size_per_layer_input", "vocab_size")
    for where, number, text, special in _decoder_tokens(v):
        if _is_in_vocabulary(where, number, len(tokens)):
            control = special or looks_special(text)
            tokens[number] = Piece(
                text if control else text.replace("\u2581", " "), -1000.0, CONTROL if control else USER_DEFINED
            )
    return tokens


def phi_tokens(v: Vocabulary) -> list[Piece]:
    """Return the tokens of Phi 3, where only tokens marked special are control tokens, also in tokenizer.json."""
    tokens = _pad_tokens(v, "vocab_size")
    added = [(v.where, t.number, t.text, t.special) for t in v.added_in_json] if v.has("tokenizer.json") else []
    for where, number, text, special in (*_decoder_tokens(v), *added):
        if _is_in_vocabulary(where, number, len(tokens)):
            tokens[number] = Piece(text, -1000.0, CONTROL if special else USER_DEFINED)
    return tokens


def plain_tokens(v: Vocabulary, *size_keys: str, file: str = "tokenizer.model") -> list[Piece]:
    """Return the pieces of a file, as many as the vocabulary has."""
    v.source = f"quantkit does not run SentencePiece, which {file} needs"
    pieces = read_model(v.folder / file).pieces
    size = v.config.find(*size_keys or ("vocab_size",)) or len(pieces)
    if not isinstance(size, int) or not 0 < size <= min(MAX_TOKENS, len(pieces) + MAX_PADDING):
        raise FormatError(f"{v.config.path}: vocab_size is {short(size)}", "QK-E112")
    return pieces[:size] + [Piece(f"[PAD{i}]", -10000.0, UNUSED) for i in range(len(pieces), size)]


def _pad_tokens(v: Vocabulary, *size_keys: str) -> list[Piece]:
    """Return the tokens with those of added_tokens.json in their places."""
    tokens = plain_tokens(v, *size_keys)
    add_added_tokens(v, tokens)
    return tokens


def add_added_tokens(v: Vocabulary, tokens: list[Piece]) -> None:
    """Put the tokens of added_tokens.json in their places."""
    where = v.folder / "added_tokens.json"
    for text, number in (optional_json(where) or {}).items():
        if _is_in_vocabulary(where, number, len(tokens)):
            tokens[number] = Piece(text, -1000.0, USER_DEFINED)


def _decoder_tokens(v: Vocabulary) -> Iterator[tuple[Path, int, str, bool]]:
    """Yield the tokens of added_tokens_decoder: where, id, text, whether marked as special."""
    where = v.folder / "tokenizer_config.json"
    entries = v.tokenizer_config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise FormatError(f"{where}: added_tokens_decoder is not a table of tokens by id", "QK-E114")
    for key, entry in entries.items():
        text = entry.get("content") if isinstance(entry, dict) else None
        if not str(key).isdecimal() or not isinstance(text, str):
            raise FormatError(f"{where}: the added token {short(entry)} has no id or no content", "QK-E114")
        yield where, int(key), text, bool(entry.get("special"))


def _is_in_vocabulary(where: Path, number: object, size: int) -> bool:
    """Return whether a token is in the vocabulary; others are dropped."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise FormatError(f"{where}: {short(number)} is not a token id", "QK-E114")
    return number < size


def set_pieces(v: Vocabulary, tokens: list[Piece], model: str = "llama") -> None:
    """Set the keys of pieces, without special tokens; ``model`` is tokenizer.ggml.model."""
    v.keys.text("tokenizer.ggml.model", model)
    v.keys.text("tokenizer.ggml.pre", "default")
    v.keys.array("tokenizer.ggml.tokens", [piece.text for piece in tokens])
    v.keys.array("tokenizer.ggml.scores", [piece.score for piece in tokens])
    v.keys.array("tokenizer.ggml.token_type", [piece.type for piece in tokens])


def write_pieces(v: Vocabulary, tokens: list[Piece]) -> None:
    """Set the keys of a vocabulary of pieces."""
    set_pieces(v, tokens)
    special_tokens(v.folder, n_tokens=len(tokens)).write(v.keys)


def write_sentencepiece(v: Vocabulary) -> None:
    """Set the keys of a tokenizer.model."""
    write_pieces(v, sentencepiece_tokens(v))

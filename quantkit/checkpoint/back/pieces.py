"""A tokenizer.model, the protobuf message that SentencePiece reads: pieces, and of the training and of what is done to
texts only what is needed to encode.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantkit.checkpoint.back.tokens import ID_NAMES, Tokens
from quantkit.checkpoint.vocab.sentencepiece import Piece
from quantkit.checkpoint.vocab.special import KINDS
from quantkit.checkpoint.vocab.tokenizer import BYTE, UNKNOWN, UNUSED


@dataclass(frozen=True)
class Normalizing:
    """What is done to texts before they are encoded."""

    prefix: bool = True
    removes_spaces: bool = False
    charsmap: bytes = b""


def pieces_of(tokens: Tokens, scores: Sequence[float]) -> list[Piece]:
    """Return all tokens but those that only make the vocabulary as long as the embeddings."""
    size = len(tokens.texts)
    while size and (tokens.is_filler(size - 1) or tokens.types[size - 1] == UNUSED and scores[size - 1] == -10000.0):
        size -= 1
    return [Piece(tokens.texts[i], scores[i], tokens.types[i]) for i in range(size)]


def model_file(tokens: Tokens, pieces: Sequence[Piece], how: Normalizing, *, unigram: bool = False) -> bytes:
    """Return the file of these pieces: BPE, or Unigram."""
    ids = {kind: tokens.model.get(f"tokenizer.ggml.{ID_NAMES.get(kind, kind)}_token_id") for kind in KINDS}
    unknown = next((i for i, piece in enumerate(pieces) if piece.type == UNKNOWN), 0)
    parts = [_bytes_field(1, _piece(each)) for each in pieces]
    numbers = [(3, 1 if unigram else 2), (4, len(pieces)), (35, BYTE in tokens.types), (40, unknown)]
    numbers += [(at, -1 if ids[kind] is None else ids[kind]) for at, kind in ((41, "bos"), (42, "eos"), (43, "pad"))]
    trainer = b"".join(_number_field(at, int(value)) for at, value in numbers)
    normalizer = _bytes_field(1, b"identity") + (_bytes_field(2, how.charsmap) if how.charsmap else b"")
    normalizer += _number_field(3, how.prefix) + _number_field(4, how.removes_spaces) + _number_field(5, 1)
    return b"".join((*parts, _bytes_field(2, trainer), _bytes_field(3, normalizer)))


def _piece(piece: Piece) -> bytes:
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

r"""RWKV's tokenizer (tokenizer.ggml.model rwkv): at each byte the longest token.

Tokens are written with escapes: \t, \n, \r, \xHH; any other character after a backslash is itself. llama.cpp b11434
llm_tokenizer_rwkv_session.
"""

from __future__ import annotations

import re

from quantkit.errors import FormatError
from quantkit.formats.tokenizer.merge import longest_by_start
from quantkit.formats.tokenizer.vocab import KEY, Vocab

_ESCAPE = re.compile(rb"\\(?:x(..)|(.))", re.S)
_ESCAPED_BYTES = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class Rwkv:
    """Ids of a text by longest matches of bytes."""

    def __init__(self, vocab: Vocab) -> None:
        """Raises FormatError for an invalid escape."""
        self._vocab = vocab
        self._pieces = [_unescape(text.encode("utf-8", "surrogateescape"), vocab.path) for text in vocab.tokens]
        self._ids = {piece: i for i, piece in enumerate(self._pieces) if piece}
        self._lengths = longest_by_start(self._ids)

    def encode(self, text: bytes, first: bool) -> list[int]:
        """Return the ids of a piece of text without special tokens. Raises FormatError if a byte has no token."""
        ids = self._ids
        out = []
        position = 0
        while position < len(text):
            for length in range(self._lengths.get(text[position : position + 2], 1), 0, -1):
                token_id = ids.get(text[position : position + length])
                if token_id is not None:
                    out.append(token_id)
                    position += length
                    break
            else:
                out.append(self._unknown(text[position]))
                position += 1
        return out

    def _unknown(self, byte: int) -> int:
        if "unknown" not in self._vocab.special:
            raise FormatError(
                f"{self._vocab.path}: no token begins with byte 0x{byte:02X}, and {KEY}unknown_token_id is missing",
                "QK-E114",
            )
        return self._vocab.special["unknown"]

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._pieces[token]


def _unescape(text: bytes, path: str) -> bytes:
    def replace_escape(match: re.Match[bytes]) -> bytes:
        try:
            return bytes([int(match[1], 16)]) if match[1] else _ESCAPED_BYTES.get(match[2], match[2])
        except ValueError:
            raise FormatError(f"{path}: the token {text!r} has an invalid escape: {match[0]!r}", "QK-E114") from None

    return _ESCAPE.sub(replace_escape, text)

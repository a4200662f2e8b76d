"""SentencePiece's BPE (tokenizer.ggml.model llama): merge neighbours whose joined text is the best-scored token.

A space is U+2581. Remaining symbols that are not tokens become byte tokens <0xXX>. llama.cpp b11434
llm_tokenizer_spm_session.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from quantkit.errors import FormatError
from quantkit.formats.tokenizer.merge import Seams, WordCache, ids_of, inner_pairs, merge
from quantkit.formats.tokenizer.vocab import SPACE, Vocab

#: The length of a character by its first byte alone, as llama.cpp does; less at the end of the text.
_CHARACTER = re.compile(rb"[\xc0-\xdf].?|[\xe0-\xef].{0,2}|[\xf0-\xff].{0,3}|.", re.S)


class Spm:
    """Ids of a text by the scores of tokens."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab, self.piece = vocab, vocab.piece
        self._space_prefix = vocab.flag("add_space_prefix", True)
        self._order = dict(zip(vocab.tokens, (-vocab.scores).tolist(), strict=True))
        self._cache = WordCache(lambda word: self._merge(list(word)))
        self._seams: Seams | None = None

    def encode(self, text: bytes, first: bool) -> list[int]:
        """Return the ids of a piece of text without special tokens; ``first``: it begins the text or follows one."""
        text = (b" " + text if first and self._space_prefix else text).replace(b" ", SPACE.encode())
        try:
            return self._encode_valid(text.decode())
        except UnicodeDecodeError:
            pass
        if not self._tokens_are_valid:
            return self._merge([c.decode("utf-8", "surrogateescape") for c in _CHARACTER.findall(text)])
        out: list[int] = []
        valid: list[str] = []
        for character in _CHARACTER.findall(text):
            try:
                valid.append(character.decode())
            except UnicodeDecodeError:
                # No token contains it, so nothing merges with it.
                out += self._encode_valid("".join(valid))
                out += self._bytes(character.decode("utf-8", "surrogateescape"))
                valid.clear()
        return out + self._encode_valid("".join(valid))

    def _encode_valid(self, text: str) -> list[int]:
        if self._seams is None:
            self._seams = Seams(inner_pairs(self._vocab.tokens))
        return self._cache.ids(self._seams.pieces(text)) if text else []

    @cached_property
    def _tokens_are_valid(self) -> bool:
        return not any("\udc80" <= character <= "\udcff" for character in set("".join(self._vocab.tokens)))

    def _merge(self, symbols: list[str]) -> list[int]:
        return ids_of(merge(symbols, self._order, ""), self._vocab.ids, self._bytes)

    def _bytes(self, symbol: str) -> Iterator[int]:
        ids = self._vocab.ids
        for byte in symbol.encode("utf-8", "surrogateescape"):
            token_id = ids.get(f"<0x{byte:02X}>", ids.get(bytes([byte]).decode("utf-8", "surrogateescape")))
            if token_id is None:
                raise FormatError(
                    f"{self._vocab.path}: the vocabulary has no token for {symbol!r} and none for its byte "
                    f"0x{byte:02X} (<0x{byte:02X}>); llama.cpp crashes on such a text",
                    "QK-E114",
                )
            yield token_id

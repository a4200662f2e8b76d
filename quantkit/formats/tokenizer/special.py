"""Find special tokens in a text before it is tokenized.

User-defined tokens are always recognized, control and unknown ones only if a text may contain special tokens
(``parse_special``). The longest token is searched first, in the whole text, then the next in the remaining text: not
the same as the longest match from left to right (llama.cpp b11434 tokenizer_st_partition). Overlapping tokens of equal
length are taken in order of ids; llama.cpp's unstable sort leaves that open.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quantkit.formats.tokenizer.vocab import Attr, Vocab

_SPACES = b" \t\n\v\f\r"
#: A piece of text, or the id of a special token.
Fragment = bytes | int


class SpecialTokens:
    """The tokens to search for, longest first."""

    def __init__(self, vocab: Vocab) -> None:
        ids = vocab.ids_with(Attr.CONTROL | Attr.USER_DEFINED | Attr.UNKNOWN)
        texts = {i: vocab.tokens[i].encode("utf-8", "surrogateescape") for i in ids}
        self._ids = sorted(ids, key=lambda i: -len(texts[i]))
        self._texts = [texts[i] for i in self._ids]
        self._attrs = [Attr(int(vocab.attrs[i])) for i in self._ids]
        # Adjacent bytes of all texts (a single byte twice), to rule out most tokens at once.
        pairs = [_pairs(text if len(text) > 1 else text * 2) for text in self._texts]
        self._pairs = np.concatenate(pairs) if pairs else np.zeros(0, np.uint16)
        self._starts = np.cumsum([0, *map(len, pairs)])[:-1]

    def split(self, text: bytes, parse_special: bool) -> list[Fragment]:
        """Return a text as pieces and special ids, in order; pieces are never empty."""
        fragments: list[Fragment] = [text] if text else []
        for index in self._candidates(text):
            if parse_special or not self._attrs[index] & (Attr.CONTROL | Attr.UNKNOWN):
                token = self._texts[index]
                if token in text:
                    fragments = [
                        part
                        for fragment in fragments
                        for part in (self._cut_out(fragment, index) if isinstance(fragment, bytes) else (fragment,))
                    ]
        return fragments

    def _candidates(self, text: bytes) -> list[int]:
        """Return the tokens all of whose adjacent byte pairs occur in the text."""
        if not self._texts or not text:
            return []
        present = np.zeros(1 << 16, bool)
        present[_pairs(text)] = True
        singles = np.frombuffer(text, np.uint8).astype(np.uint16)
        present[singles << 8 | singles] = True  # longer than the text, so that tokens of one byte are found
        return np.flatnonzero(np.logical_and.reduceat(present[self._pairs], self._starts)).tolist()

    def _cut_out(self, text: bytes, index: int) -> Iterator[Fragment]:
        token = self._texts[index]
        attr = self._attrs[index]
        ident = self._ids[index]
        if token not in text:
            yield text
            return
        start = 0
        while (position := text.find(token, start)) >= 0:
            before = text[start:position]
            before = before.rstrip(_SPACES) if attr & Attr.LSTRIP else before
            if before:
                yield before
            yield ident
            start = position + len(token)
            while attr & Attr.RSTRIP and start < len(text) and text[start] in _SPACES:
                start += 1
        if start < len(text):
            yield text[start:]


def _pairs(text: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    codes = np.frombuffer(text, np.uint8).astype(np.uint16)
    return codes[:-1] << np.uint16(8) | codes[1:]

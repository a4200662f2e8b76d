"""Byte-pair encoding (tokenizer.ggml.model gpt2, gemma4, whitespace): split into words, merge by the list of merges.

GPT-2 writes each byte of a word as a separate letter (printable ones as themselves, the others from U+0100 on), so
every byte is a symbol of the vocabulary. The *raw* kind (Gemma 4) merges characters, a space being U+2581, and writes
missing characters as tokens <0xXX>. A symbol that is not a token and has no such bytes is dropped, as llama.cpp b11434
does (llm_tokenizer_bpe_session).

quantkit has its own merge loop because the ``tokenizers`` library drops unknown characters *before* merging, so that
their neighbours may join; prefers the last of two equal merges, where llama.cpp uses the first; and refuses merges
whose parts or result are not tokens, which llama.cpp allows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats.gguf import ValueType
from quantkit.formats.tokenizer import unicode
from quantkit.formats.tokenizer.merge import Seams, WordCache, ids_of, merge
from quantkit.formats.tokenizer.pre import PRE, Pre
from quantkit.formats.tokenizer.split import Splitter
from quantkit.formats.tokenizer.vocab import KEY, SPACE, Attr, Vocab, c_strings


def _byte_letters() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(letters)) for byte in range(256)]


#: GPT-2's letter for each byte, and the inverse.
BYTE_LETTERS = dict(enumerate(_byte_letters()))
LETTER_BYTES = {letter: byte for byte, letter in BYTE_LETTERS.items()}


def pre_of(vocab: Vocab) -> Pre:
    """Return the pre-tokenizer of this file; FormatError for an unknown name."""
    name = "gemma4" if vocab.model == "gemma4" else vocab.source.get(KEY + "pre", "")
    if not isinstance(name, str) or name not in PRE:
        raise FormatError(
            f"{vocab.path}: {KEY}pre is {name!r}, which is unknown to this version of quantkit. Give token ids instead "
            "of text: --tokens 1,2,3 or --tokens @FILE.i32",
            "QK-E115",
        )
    return PRE[name]


class Bpe:
    """Ids of a text by a list of merges."""

    def __init__(self, vocab: Vocab) -> None:
        """Raises FormatError for an unknown pre-tokenizer, or missing merges."""
        self._vocab, self._pre = vocab, pre_of(vocab)
        self._splitter = Splitter(self._pre.patterns)
        self._ranks = _ranks(vocab)
        self._cache = WordCache(self._encode_word)
        self._seams: Seams | None = None
        self._lowercase = vocab.flag("normalizer.lowercase", False)

    def encode(self, text: bytes, first: bool) -> list[int]:
        """Return the ids of a piece of text without special tokens."""
        return [i for part in self._parts(unicode.from_utf8(text)) for i in self._cache.ids(self._words(part))]

    def piece(self, token: int) -> bytes:
        """Return the bytes that a normal or byte token stands for."""
        text = self._vocab.tokens[token]
        if self._vocab.attrs[token] & Attr.NORMAL and not self._pre.escape_spaces:
            return b"".join(_letter_bytes(letter, text) for letter in text)
        return self._vocab.piece(token)

    def _parts(self, text: str) -> Iterator[str]:
        """The model ``whitespace`` drops white space; the others keep the text unchanged."""
        if self._vocab.model != "whitespace":
            yield text.replace(" ", SPACE) if self._pre.escape_spaces else text
            return
        points = unicode.code_points(text)
        part: list[str] = []
        for character, blank in zip(text, unicode.whitespace()[points].tolist(), strict=True):
            if not blank:
                low = unicode.lower().get(ord(character)) if self._lowercase else None
                part.append(character if low is None else chr(low))
            elif part:
                yield "".join(part)
                part = []
        if part:
            yield "".join(part)

    def _words(self, text: str) -> Iterator[str]:
        """Split a text into pieces that are merged separately."""
        for word in self._splitter.words(text):
            if not self._pre.raw or (self._pre.newline_words and not word.strip("\n")):
                yield word
            elif self._pre.metaspace:
                head, *tail = (word if word.startswith(SPACE) else SPACE + word)[1:].split(SPACE)
                yield from (SPACE + part for part in (head, *tail))
            else:
                yield from self._merge_seams().pieces(word)

    def _merge_seams(self) -> Seams:
        if self._seams is None:
            self._seams = Seams(_seam_pairs(list(self._ranks)))
        return self._seams

    def _encode_word(self, word: str) -> list[int]:
        ids = self._vocab.ids
        symbols = word if self._pre.raw else unicode.to_utf8(word).decode("latin-1").translate(BYTE_LETTERS)
        token_id = ids.get(symbols)
        if token_id is not None and (self._pre.ignore_merges or (self._pre.newline_words and not word.strip("\n"))):
            return [token_id]
        return ids_of(merge(list(symbols), self._ranks, " "), ids, self._bytes)

    def _bytes(self, symbol: str) -> Iterator[int]:
        """The ids of a symbol that is not a token: those of its bytes that are tokens."""
        for byte in unicode.to_utf8(symbol):
            text = f"<0x{byte:02X}>" if self._pre.raw else bytes([byte]).decode("utf-8", "surrogateescape")
            if text in self._vocab.ids:
                yield self._vocab.ids[text]


def _ranks(vocab: Vocab) -> dict[str, int]:
    """Return the merges "left right" and their ranks; the first of equal ones counts."""
    field = vocab.source.fields.get(KEY + "merges")
    if field is None and vocab.source.get(KEY + "pre") == "kimi-k2":
        return {}
    if field is None or field.item_type is not ValueType.STRING:
        kind = "missing" if field is None else field.describe()
        raise FormatError(f"{vocab.path}: {KEY}merges is {kind}, not an array of strings; BPE needs them", "QK-E123")
    merges = c_strings(field.value)
    return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))


def _seam_pairs(merges: list[str]) -> str:
    """Return the characters on both sides of the first space of each merge "left right", as one string of pairs."""
    points = unicode.code_points("".join(merges))
    lengths = np.fromiter(map(len, merges), np.intp, len(merges))
    ends = np.cumsum(lengths)
    spaces = np.append(np.flatnonzero(points == ord(" ")), len(points) + 1)
    # A space at the beginning is part of the left symbol.
    places = spaces[np.searchsorted(spaces, ends - lengths + 1)]
    places = places[places < ends - 1]
    return unicode.from_code_points(np.stack([points[places - 1], points[places + 1]], 1))


def _letter_bytes(letter: str, text: str) -> bytes:
    if letter in LETTER_BYTES:
        return bytes([LETTER_BYTES[letter]])
    # llama.cpp's text for a letter that represents no byte.
    utf8 = letter.encode("utf-8", "surrogateescape")
    return f"[UNK_BYTE_0x{utf8.hex()}".encode() + text.encode("utf-8", "surrogateescape") + b"]"

"""WordPiece (tokenizer.ggml.model bert): words, then the longest token at each place; a word begins with U+2581.

White space separates words; punctuation and Chinese characters are separate words; control characters are removed. With
normalizer.lowercase (the default) letters lose case and, unless normalizer.strip_accents is false, accents. A word that
tokens do not cover becomes the unknown token. llama.cpp b11434 llm_tokenizer_wpm_session.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.errors import FormatError
from quantkit.formats.tokenizer import unicode
from quantkit.formats.tokenizer.merge import WordCache
from quantkit.formats.tokenizer.vocab import SPACE, Attr, Vocab

_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    # From 0x2B920, not 0x2B820: an error of the original that all implementations share.
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPiece:
    """Ids of a text by longest matches within words."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._lowercase = vocab.flag("normalizer.lowercase", True)
        self._strip = vocab.flag("normalizer.strip_accents", self._lowercase)
        self._ids = {text.encode("utf-8", "surrogateescape"): i for text, i in vocab.ids.items()}
        self._longest = max(map(len, self._ids), default=0)
        self._cache = WordCache(self._encode_word)
        #: The replacement of a character: text in a word, a separate word (after "\\1"), a separator " ", or nothing.
        self._roles: dict[str, str] = {}

    def encode(self, text: bytes, first: bool) -> list[int]:
        """Return the ids of a piece of text without special tokens."""
        return self._cache.ids(self._words(unicode.from_utf8(text)))

    def piece(self, token: int) -> bytes:
        """Return the bytes of a normal token."""
        if self._vocab.attrs[token] & Attr.NORMAL:
            return self._vocab.piece(token)
        text = self._vocab.tokens[token]
        raise FormatError(
            f"{self._vocab.path}: token {token} ({text!r}) is a byte token, in a WordPiece vocabulary", "QK-E114"
        )

    def _words(self, text: str) -> Iterator[str]:
        roles = self._roles
        for character in set(text) - roles.keys():
            roles[character] = self._role(ord(character))
        return (w for w in "".join([roles[c] for c in text]).split(" ") if w)

    def _role(self, point: int) -> str:
        """Return a character's text, with spaces around it if it is a separate word, " " if it ends one."""
        if self._strip:
            point = int(unicode.bases()[point])
        category = chr(unicode.categories()[point])
        if unicode.whitespace()[point]:
            return " "
        if point in (0, 0xFFFD) or category == "C" or (self._strip and category == "M"):
            return ""
        alone = (
            category == "P"
            or (point < 0x7F and category == "S")
            or any(first <= point <= last for first, last in _CHINESE)
        )
        text = chr(unicode.lower().get(point, point) if self._lowercase else point)
        return f" {text} " if alone else text

    def _encode_word(self, word: str) -> list[int]:
        data = unicode.to_utf8(SPACE + word)
        out, position = [], 0
        while position < len(data):
            for end in range(min(len(data), position + self._longest + 1), position, -1):
                token_id = self._ids.get(data[position:end])
                if token_id is not None:
                    out.append(token_id)
                    position = end
                    break
            else:
                out = []
                break
        if out:
            return out
        if "unknown" not in self._vocab.special:
            raise FormatError(
                f"{self._vocab.path}: no token for {word!r}, and no unknown token; llama.cpp gives id -1", "QK-E114"
            )
        return [self._vocab.special["unknown"]]

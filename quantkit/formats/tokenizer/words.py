"""A cache of words and bounds on token lengths, which make tokenizing in Python fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import AnyStr

#: Most words kept, and the longest: some 20 MB at most.
_MAX_WORDS, _MAX_LENGTH = 1 << 16, 64


class WordCache:
    """Calls ``encode`` once per distinct word: natural text repeats itself."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._kept: dict[str, list[int]] = {}

    def ids(self, words: Iterable[str]) -> list[int]:
        """Return the ids of all words, in order."""
        kept, out = self._kept, []
        for word in words:
            found = kept.get(word)
            if found is None:
                found = self._encode(word)
                if len(word) <= _MAX_LENGTH:
                    if len(kept) >= _MAX_WORDS:
                        kept.clear()
                    kept[word] = found
            out += found
        return out


def longest_by_start(tokens: Iterable[AnyStr]) -> dict[AnyStr, int]:
    """Return the length of the longest token that begins with each two characters (or is one), to end searches."""
    longest: dict[AnyStr, int] = {}
    for token in tokens:
        start = token[:2]
        longest[start] = max(longest.get(start, 0), len(token))
    return longest

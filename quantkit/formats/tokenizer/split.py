r"""Splitting a text into words by the patterns of pre.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from quantkit.formats.tokenizer import unicode
from quantkit.formats.tokenizer.pre import THREES_AFTER, THREES_WITHIN

#: \p{...} in the collapsed text: the ASCII characters of a category, and the one that represents the others.
_CLASSES = {
    "N": "0-9" + unicode.NUMBER,
    "L": "A-Za-z" + unicode.LETTER + unicode.HAN_LETTER,
    "Lo": unicode.LETTER,
    "P": r"!-#%-*,-/:;?@\[-\]_{}" + unicode.PUNCTUATION,
    "M": unicode.MARK,
    "S": r"$+<->\^`|\~" + unicode.SYMBOL,
    "Han": unicode.HAN_LETTER + unicode.HAN,
    "NotHan": "A-Za-z" + unicode.LETTER,
}
_NUMBERS = f"[{_CLASSES['N']}]+"


class Splitter:
    """The compiled patterns of one pre-tokenizer."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)

    def words(self, text: str) -> list[str]:
        """Return the words of a text; joined, they are the text."""
        ends = self._ends(text)
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def _ends(self, text: str) -> list[int]:
        ends = [len(text)] if text else []
        for pattern in self._patterns:
            if pattern == THREES_AFTER:
                ends = _threes_after(unicode.collapse(text), ends)
            elif pattern == THREES_WITHIN:
                ends = _threes_within(text, ends)
            else:
                by_category = r"\p{" in pattern
                view = unicode.collapse(text, r"\p{Han}" in pattern) if by_category else unicode.ascii_spaces(text)
                ends = _matches(_compile(pattern), view, ends)
        return ends


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Return a pattern with \\p{...} written out: inside brackets unchanged, elsewhere in its own brackets."""
    out = []
    in_brackets = False
    position = 0
    while position < len(pattern):
        category = re.compile(r"\\p\{(\w+)\}").match(pattern, position)
        if category:
            characters = _CLASSES[category[1]]
            out.append(characters if in_brackets else f"[{characters}]")
            position = category.end()
            continue
        width = 2 if pattern[position] == "\\" else 1
        in_brackets = (in_brackets or pattern[position] == "[") and pattern[position] != "]"
        out.append(pattern[position : position + width])
        position += width
    return re.compile("".join(out), re.ASCII)


def _segments(ends: Iterable[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for end in ends:
        yield start, end
        start = end


def _matches(pattern: re.Pattern[str], text: str, ends: Sequence[int]) -> list[int]:
    """Return the ends of all matches and of the gaps between them, segment by segment."""
    out: list[int] = []
    for start, end in _segments(ends):
        position = start
        for match in pattern.finditer(text, start, end):
            first, last = match.span()
            if first > position:
                out.append(first)
            out.append(last)
            position = last
        if position < end:
            out.append(end)
    return out


def _threes_after(collapsed: str, ends: Sequence[int]) -> list[int]:
    """llama.cpp b11434 unicode.cpp unicode_regex_split_custom_afmoe: no split between digits and the text before."""
    numbers = re.compile(_NUMBERS)
    out: list[int] = []
    for start, end in _segments(ends):
        position = start
        for match in numbers.finditer(collapsed, start, end):
            first, position = match.span()
            out += range(position - (position - first - 1) // 3 * 3, position + 1, 3)
        if position < end:
            out.append(end)
    return out


def _threes_within(text: str, ends: Sequence[int]) -> list[int]:
    r"""Return the matches of (?=(\d{3})+(?!\d)): before each group of three ASCII digits, counted from the right."""
    numbers = re.compile("[0-9]+")
    out: list[int] = []
    for start, end in _segments(ends):
        for match in numbers.finditer(text, start, end):
            first, last = match.span()
            cuts = range(last - (last - first) // 3 * 3, last, 3)
            out += [position for position in cuts if position > start]
        out.append(end)
    return out

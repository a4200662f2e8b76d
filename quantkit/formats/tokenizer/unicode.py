"""Code points as in llama.cpp: lenient UTF-8, general categories, and a text collapsed to them.

To split a text into words, only the category of a character matters: letter, number, mark, punctuation, symbol or white
space. So a text is *collapsed*: ASCII is kept, any other character becomes one byte that represents its category, and
Python's ``re`` runs over the result with re.ASCII. llama.cpp b11434 does the same (unicode.cpp, unicode_regex_split),
so ids depend neither on Python's version nor on another regex library.

``unicode.npz`` (scripts/make_unicode.py) holds Unicode 15.1::

    starts, categories     runs of code points of one general category, as its first letter; 0 is unassigned
    lower [n, 2]           code points and their (first) lower-case code point
    base_starts, bases     runs of code points whose NFD form begins with another code point, that one; 0 for none

White space is category Z and U+0009..U+000D, U+0085.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.errors import RecipeError

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]

_COUNT = 0x110000
#: The collapsed character of each category; all others are _OTHER.
NUMBER, LETTER, PUNCTUATION, MARK, SYMBOL, HAN_LETTER, HAN = (chr(c) for c in range(0xD1, 0xD8))
_OTHER_BYTE, _SPACE = 0xD0, 0x0B
_HAN_RANGES = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2CEB0, 0x2EBEF),
    (0x2F800, 0x2FA1F),
)
#: The length of a sequence by its first byte alone: llama.cpp also accepts overlong ones, surrogates and F5..F7.
_LENIENT = re.compile(rb"[\0-\x7f]+|[\xc0-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf7][\x80-\xbf]{3}|.", re.S)


@cache
def _tables() -> dict[str, npt.NDArray[np.uint32]]:
    with np.load(Path(__file__).with_name("unicode.npz")) as npz:
        return {name: npz[name] for name in npz.files}


@cache
def categories() -> U8:
    """Return the general category of every code point: ord of its first letter, 0 if unassigned."""
    t = _tables()
    table = np.repeat(t["categories"].astype(np.uint8), np.diff(t["starts"], append=_COUNT))
    table.setflags(write=False)
    return table


@cache
def whitespace() -> npt.NDArray[np.bool_]:
    """Return for every code point whether it is white space."""
    table: npt.NDArray[np.bool_] = categories() == ord("Z")
    table[[*range(9, 14), 0x85]] = True
    table.setflags(write=False)
    return table


@cache
def bases() -> U32:
    """Return for every code point the first one of its NFD form."""
    t = _tables()
    table = np.repeat(t["bases"], np.diff(t["base_starts"], append=_COUNT))
    return np.where(table == 0, np.arange(_COUNT, dtype=np.uint32), table)


@cache
def lower() -> dict[int, int]:
    """Return the code points with a lower case, and its first code point."""
    return {int(c): int(low) for c, low in _tables()["lower"]}


@cache
def _collapse(han: bool) -> U8:
    """Return the byte that represents each code point; with ``han``, Han characters are two separate classes."""
    kinds = {"N": NUMBER, "L": LETTER, "P": PUNCTUATION, "M": MARK, "S": SYMBOL}
    by_category = np.full(256, _OTHER_BYTE, np.uint8)
    for letter, byte in kinds.items():
        by_category[ord(letter)] = ord(byte)
    table = np.asarray(by_category[categories()])
    table[whitespace()] = _SPACE
    for first, last in _HAN_RANGES if han else ():
        part = table[first : last + 1]
        part[:] = np.where(part == ord(LETTER), ord(HAN_LETTER), ord(HAN))
    table[:128] = np.arange(128)
    return table


def code_points(text: str) -> U32:
    """Return the code points of a text, surrogates unchanged."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def from_code_points(points: npt.NDArray[np.uint32]) -> str:
    """Return the text of code points, surrogates unchanged."""
    return points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def to_utf8(text: str) -> bytes:
    """Return a text's UTF-8, surrogates as three bytes each, as llama.cpp writes them."""
    return text.encode("utf-8", "surrogatepass")


def from_utf8(data: bytes) -> str:
    """Decode as llama.cpp's unicode_cpts_from_utf8: each byte that does not begin a sequence becomes U+FFFD.

    Raises RecipeError for a sequence beyond U+10FFFF, on which llama.cpp crashes.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        pass
    points: list[int] = []
    for match in _LENIENT.finditer(data):
        sequence = match[0]
        if sequence[0] < 0x80:
            points.extend(sequence)
        elif len(sequence) == 1:
            points.append(0xFFFD)
        else:
            point = sequence[0] & (0x7F >> len(sequence))
            for byte in sequence[1:]:
                point = point << 6 | byte & 0x3F
            if point >= _COUNT:
                raise RecipeError(
                    f"the text is not UTF-8: byte {match.start()} starts U+{point:X}, which exceeds U+10FFFF",
                    "QK-E121",
                )
            points.append(point)
    return from_code_points(np.array(points, np.uint32))


def collapse(text: str, han: bool = False) -> str:
    """Return a text with every character beyond ASCII replaced by one that represents its category."""
    return text if text.isascii() else _collapse(han)[code_points(text)].tobytes().decode("latin-1")


def ascii_spaces(text: str) -> str:
    """Return a text with all white space beyond ASCII replaced by U+000B."""
    if text.isascii():
        return text
    points = code_points(text)
    return from_code_points(np.where((points > 0x7F) & whitespace()[points], np.uint32(_SPACE), points))

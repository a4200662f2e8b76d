"""Tensor classes, and text from files made safe for one line of a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def tensor_class(name: str) -> str:
    """Return the class of a tensor: its name without layer and suffix (ffn_down_exps)."""
    parts = [p for p in name.split(".") if not p.isdecimal() and p != "blk"]
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] in ("weight", "bias") else ".".join(parts)


def printable(text: object) -> str:
    """Return a text or path on one line, with control characters and invalid UTF-8 escaped."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def span(names: Sequence[str], noun: str = "tensors") -> str:
    """Return names as one part of a sentence: blk.0.attn_q.weight .. blk.9.attn_q.weight (10 tensors)."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} {noun})"


def group_notes(notes: Iterable[tuple[str, str]], noun: str = "tensors") -> list[str]:
    """Return one line for all notes, each about a name, that differ only in numbers, which become ranges."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, note in notes:
        groups.setdefault(_NUMBER.sub("#", note), []).append((name, note))
    return [
        f"{span(list(dict.fromkeys(name for name, _ in group)), noun)}: {_with_ranges([note for _, note in group])}"
        for group in groups.values()
    ]


#: Not longer than int() converts quickly.
_NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


def _with_ranges(notes: Sequence[str]) -> str:
    """Return the text of notes that differ only in numbers: 3..17 of 128 experts."""
    ranges = [(min(column, key=int), max(column, key=int)) for column in zip(*map(_NUMBER.findall, notes), strict=True)]
    texts = iter(low if low == high else f"{low}..{high}" for low, high in ranges)
    return _NUMBER.sub(lambda _: next(texts), notes[0])


def shorten(text: str, width: int) -> str:
    """Return ``text`` cut to ``width`` characters, ending in "…" if anything is missing."""
    return text if len(text) <= width else text[: width - 1] + "…"


def file_name(path: str) -> str:
    """Return the name of a file without its directories (also Windows'), which would reveal private data."""
    return path.replace("\\", "/").rpartition("/")[2]

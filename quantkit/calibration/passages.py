"""Cutting documents into passages, and dropping those that say nothing new.

A passage ends at a blank line, else at the end of a line, else between words, and is at most ``size`` bytes long (the
last resort, between characters, is for text without spaces). It is dropped when

    its text, ignoring white space and case, was seen before                        (exact duplicate)
    at least NEAR of its shingles were in passages kept before                      (near duplicate)
    more than LEAK of its shingles are in the held-out part, or all passages        (would be calibrated on)
    together would share more than LEAK_ALL of the held-out part's

Shingles are those of quantkit.calibration.overlap. Sharing is measured against everything kept so far, not passage by
passage: a mosaic of known sentences is as dull as a copy. LEAK_ALL lets phrases pass that every file has (licenses,
imports), once each, and is far below the overlap that is warned about.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from quantkit.calibration.overlap import shingles

NEAR = 0.8
LEAK = 0.1
LEAK_ALL = 0.005


def cut(document: str, size: int) -> Iterator[str]:
    """Yield the passages of ``document``, stripped of outer blank lines, each at most ``size`` bytes of UTF-8."""
    rest = document
    while rest:
        end = _end(rest, size)
        passage = rest[:end].strip("\n").rstrip()
        rest = rest[end:]
        if passage.strip():
            yield passage


def _end(text: str, size: int) -> int:
    """Return where the next passage ends, in characters; always more than 0."""
    limit = min(len(text), size)
    # Count bytes only where they can differ from characters.
    if not text[:limit].isascii():
        limit = max(1, len(text[:limit].encode()[:size].decode(errors="ignore")))
    if limit == len(text):
        return limit
    # Not so early that passages become tiny.
    least = limit // 2
    for mark in ("\n\n", "\n", " "):
        at = text.rfind(mark, least, limit)
        if at >= 0:
            return at + len(mark)
    return limit


def passage_hash(passage: str) -> str:
    """Return a hash of a passage, ignoring white space and case: 32 hex digits of a SHA-256."""
    return hashlib.sha256(" ".join(passage.casefold().split()).encode()).hexdigest()[:32]


@dataclass
class Seen:
    """The shingles kept so far, and counts of what was dropped, by reason."""

    exact: set[str] = field(default_factory=set, repr=False)
    kept: set[int] = field(default_factory=set, repr=False)
    held_out: set[int] = field(default_factory=set, repr=False)
    #: Shingles of the held-out part that the calibration text still has.
    leaked: set[int] = field(default_factory=set, repr=False)
    exact_dropped: int = 0
    near_dropped: int = 0
    leak_dropped: int = 0

    def take(self, passage: str, *, held_out: bool = False) -> bool:
        """Return whether to keep ``passage``; if so, remember it."""
        digest = passage_hash(passage)
        if digest in self.exact:
            self.exact_dropped += 1
            return False
        mine = set(shingles(passage).tolist())
        leak = set() if held_out else mine & self.held_out
        if len(leak) > LEAK * len(mine) or len(leak | self.leaked) > LEAK_ALL * len(self.held_out):
            self.leak_dropped += 1
            return False
        if mine and len(mine & self.kept) >= NEAR * len(mine):
            self.near_dropped += 1
            return False
        self.exact.add(digest)
        self.leaked |= leak
        self.kept |= mine
        if held_out:
            self.held_out |= mine
        return True

"""Splitting documents into passages, and dropping repetitions.

A passage ends at a blank line, else at the end of a line, else between words, and is at most ``size`` bytes long (text
without spaces is split between characters). It is dropped if

    its text, ignoring white space and case, was seen before                        (exact duplicate)
    at least NEAR_DUPLICATE of its shingles are in earlier passages                 (near duplicate)
    more than LEAK of its shingles are in the held-out part, or all passages        (would be calibrated on)
    together would share more than LEAK_ALL of the held-out part's

Shingles are those of quantkit.calibration.overlap. A passage is compared with all earlier ones together: a mosaic of
known sentences adds as little as a copy. LEAK_ALL lets phrases pass that every file has (licenses, imports), once each,
and is far below the overlap that causes a warning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from quantkit.calibration.overlap import shingles

NEAR_DUPLICATE = 0.8
LEAK = 0.1
LEAK_ALL = 0.005


def split_passages(document: str, size: int) -> Iterator[str]:
    """Yield the passages of ``document``, stripped of outer blank lines, each at most ``size`` bytes of UTF-8."""
    remainder = document
    while remainder:
        end = _end(remainder, size)
        passage = remainder[:end].strip("\n").rstrip()
        remainder = remainder[end:]
        if passage.strip():
            yield passage


def _end(text: str, size: int) -> int:
    """Return the end of the next passage, in characters; always more than 0."""
    limit = min(len(text), size)
    # Count bytes only where they can differ from characters.
    if not text[:limit].isascii():
        limit = max(1, len(text[:limit].encode()[:size].decode(errors="ignore")))
    if limit == len(text):
        return limit
    # Passages must not become too short.
    least = limit // 2
    for mark in ("\n\n", "\n", " "):
        position = text.rfind(mark, least, limit)
        if position >= 0:
            return position + len(mark)
    return limit


def passage_hash(passage: str) -> str:
    """Return a hash of a passage, ignoring white space and case: 32 hex digits of a SHA-256."""
    return hashlib.sha256(" ".join(passage.casefold().split()).encode()).hexdigest()[:32]


@dataclass
class Deduplicator:
    """Shingles of the passages so far, and counts of dropped ones, by reason."""

    exact: set[str] = field(default_factory=set, repr=False)
    seen_shingles: set[int] = field(default_factory=set, repr=False)
    held_out: set[int] = field(default_factory=set, repr=False)
    #: Shingles of the held-out part that the calibration text still has.
    leaked: set[int] = field(default_factory=set, repr=False)
    exact_dropped: int = 0
    near_dropped: int = 0
    leak_dropped: int = 0

    def take(self, passage: str, *, held_out: bool = False) -> bool:
        """Return whether to use ``passage``; if so, record it."""
        digest = passage_hash(passage)
        if digest in self.exact:
            self.exact_dropped += 1
            return False
        hashes = set(shingles(passage).tolist())
        leak = set() if held_out else hashes & self.held_out
        if len(leak) > LEAK * len(hashes) or len(leak | self.leaked) > LEAK_ALL * len(self.held_out):
            self.leak_dropped += 1
            return False
        if hashes and len(hashes & self.seen_shingles) >= NEAR_DUPLICATE * len(hashes):
            self.near_dropped += 1
            return False
        self.exact.add(digest)
        self.leaked |= leak
        self.seen_shingles |= hashes
        if held_out:
            self.held_out |= hashes
        return True

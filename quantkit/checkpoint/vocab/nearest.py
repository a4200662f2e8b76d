"""A pre-tokenizer whose hash is not known: which of those that llama.cpp has splits texts like it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from quantkit.checkpoint.vocab.pre_hashes import TEXT
from quantkit.formats.tokenizer.pre import PRE
from quantkit.formats.tokenizer.split import Splitter

#: How many names are told.
_TOLD = 4


def ends_of(tokenizer: Any) -> set[int]:
    """Return where the words of the check text end, for a tokenizer of the package tokenizers."""
    if tokenizer.pre_tokenizer is None:
        return {len(TEXT)}
    return {end for _, (_, end) in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)}


def nearest(ends: set[int], ignore_merges: bool) -> tuple[float, list[str]]:
    """Return the share of words that end in the same places, at best, and the names of those that are so near.

    Of several with one share those come first that look up whole words as the tokenizer does (``ignore_merges``).
    """
    shares: dict[tuple[str, ...], float] = {}
    for pre in PRE.values():
        if pre.patterns not in shares:
            found = set(accumulate(map(len, Splitter(pre.patterns).words(TEXT))))
            shares[pre.patterns] = len(found & ends) / len(found | ends)
    best = max(shares.values())
    names = [name for name, pre in PRE.items() if shares[pre.patterns] == best and name not in ("", "default")]
    return best, sorted(names, key=lambda name: PRE[name].ignore_merges != ignore_merges)


def advice(tokenizer: Any, ignore_merges: bool) -> str:
    """Return what to try, as the end of a message."""
    share, (first, *others) = nearest(ends_of(tokenizer), ignore_merges)
    more = ", ".join(others[:_TOLD]) + (", .." if len(others) > _TOLD else "")
    if share == 1:
        return f"--pre {first} splits a difficult text as this tokenizer does{more and f' (so do {more})'}"
    return f"nearest is --pre {first}, which ends {share:.0%} of the words of a difficult text where this one does"

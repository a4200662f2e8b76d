"""Merging neighbours, lowest rank first, leftmost of equal ones: the loop of BPE and of SentencePiece's BPE.

BPE ranks a pair by the position of "left right" among the merges, SentencePiece (SPM) by the score of the joined token,
highest first. Nothing else differs, so both share a loop: ``order`` maps left + between + right to a rank.

A vocabulary without words, such as SPM's, merges over a whole text. Neighbours that no merge can join still divide it
(``Seams``) into pieces, in practice words, so that each is merged once and then looked up (``WordCache``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import AnyStr

import numpy as np

from quantkit.formats.tokenizer.unicode import code_points

_NO_RANK = float("inf")
#: Up to this many symbols, a scan of all pairs is faster than a heap.
_SHORT = 48


def merge(symbols: list[str], order: Mapping[str, float], between: str) -> list[str]:
    """Return the symbols after all merges; may modify ``symbols``.

    The order of merges is that of llama.cpp b11434 llama-vocab.cpp, llm_tokenizer_bpe_session and _spm_session.
    """
    return _merge_short(symbols, order, between) if len(symbols) <= _SHORT else _merge_long(symbols, order, between)


def _merge_short(symbols: list[str], order: Mapping[str, float], between: str) -> list[str]:
    rank = order.get
    ranks = [rank(a + between + b, _NO_RANK) for a, b in zip(symbols, symbols[1:], strict=False)]
    while ranks:
        lowest = min(ranks)
        if lowest == _NO_RANK:
            break
        position = ranks.index(lowest)
        symbols[position : position + 2] = [symbols[position] + symbols[position + 1]]
        del ranks[position]
        if position:
            ranks[position - 1] = rank(symbols[position - 1] + between + symbols[position], _NO_RANK)
        if position < len(ranks):
            ranks[position] = rank(symbols[position] + between + symbols[position + 1], _NO_RANK)
    return symbols


def _merge_long(symbols: list[str], order: Mapping[str, float], between: str) -> list[str]:
    """Merge with a heap: a symbol merged into its left neighbour becomes "", and stale pairs are skipped."""
    count, rank = len(symbols), order.get
    left, right = list(range(-1, count - 1)), list(range(1, count + 1))
    heap: list[tuple[float, int, int, int]] = []

    def push(a: int, b: int) -> None:
        if a >= 0 and b < count:
            pair_rank = rank(symbols[a] + between + symbols[b])
            if pair_rank is not None:
                heapq.heappush(heap, (pair_rank, a, b, len(symbols[a]) + len(symbols[b])))

    for position in range(count - 1):
        push(position, position + 1)
    while heap:
        _, a, b, size = heapq.heappop(heap)
        if not symbols[a] or not symbols[b] or len(symbols[a]) + len(symbols[b]) != size:
            continue
        symbols[a] += symbols[b]
        symbols[b] = ""
        right[a] = right[b]
        if right[a] < count:
            left[right[a]] = a
        push(left[a], a)
        push(a, right[a])
    return [symbol for symbol in symbols if symbol]


def ids_of(symbols: Iterable[str], ids: Mapping[str, int], parts: Callable[[str], Iterable[int]]) -> list[int]:
    """Return the ids of symbols; a symbol that is not a token gives those of its parts."""
    out: list[int] = []
    for symbol in symbols:
        token_id = ids.get(symbol)
        if token_id is not None:
            out.append(token_id)
        else:
            out += parts(symbol)
    return out


class Seams:
    """Divides a text between neighbours that no merge can join."""

    def __init__(self, pairs: Iterable[str]) -> None:
        """``pairs``: the two characters at every place where a merge may join."""
        points = code_points("".join(pairs)).astype(np.uint64)
        # Greater than any pair, so that every insertion point is a valid index.
        self._pairs = np.append(np.unique(points[::2] << np.uint64(32) | points[1::2]), np.uint64(1 << 63))

    def pieces(self, text: str) -> list[str]:
        """Return the pieces of a text; joined, they are the text."""
        if len(text) < 2:
            return [text]
        points = code_points(text).astype(np.uint64)
        pairs = points[:-1] << np.uint64(32) | points[1:]
        is_seam = self._pairs[np.searchsorted(self._pairs, pairs)] != pairs
        ends = (np.flatnonzero(is_seam) + 1).tolist()
        return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def inner_pairs(tokens: Iterable[str]) -> str:
    """Return the pairs of neighbours within tokens, as one string of twos (and pairs of their ends with U+0000)."""
    points = code_points("\0".join(tokens))
    pairs = np.stack([points[:-1], points[1:]], 1)
    unique = np.unique(pairs.astype(np.uint64) @ np.array([1 << 32, 1], np.uint64))
    columns = np.stack([unique >> np.uint64(32), unique & np.uint64(0xFFFFFFFF)], 1).astype("<u4")
    return columns.tobytes().decode("utf-32-le", "surrogatepass")


#: Maximum number and length of cached words: at most 20 MB.
_MAX_WORDS, _MAX_LENGTH = 1 << 16, 64


class WordCache:
    """Calls ``encode`` once per distinct word, because words repeat."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._ids: dict[str, list[int]] = {}

    def ids(self, words: Iterable[str]) -> list[int]:
        """Return the ids of all words, in order."""
        cache, out = self._ids, []
        for word in words:
            ids = cache.get(word)
            if ids is None:
                ids = self._encode(word)
                if len(word) <= _MAX_LENGTH:
                    if len(cache) >= _MAX_WORDS:
                        cache.clear()
                    cache[word] = ids
            out += ids
        return out


def longest_by_start(tokens: Iterable[AnyStr]) -> dict[AnyStr, int]:
    """Return the length of the longest token with each two-character prefix, to end searches."""
    longest: dict[AnyStr, int] = {}
    for token in tokens:
        start = token[:2]
        longest[start] = max(longest.get(start, 0), len(token))
    return longest

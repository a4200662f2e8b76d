"""SentencePiece's unigram model (tokenizer.ggml.model t5): the tokens of a text whose scores sum highest (Viterbi).

The text is first normalized by a map of prefixes in the file (precompiled_charsmap)::

    u32 n, n bytes of a double array (u32 each), then texts that end with a NUL
    double array: children of a node at (node ^ base(node)) ^ byte, where the low byte, or bit 31, must equal it;
    bit 8: the node ends a prefix, and its base leads to the offset of the text that replaces it

Sums are float64 over the whole text, as in llama.cpp b11434 (llm_tokenizer_ugm_session): rounding decides between
nearly equal paths, so each piece continues from the previous sum.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.gguf import ValueType
from quantkit.formats.tokenizer.merge import Seams, inner_pairs, longest_by_start
from quantkit.formats.tokenizer.vocab import KEY, SPACE, Attr, Vocab

_MAX_WORDS = 1 << 16
#: Score of an unknown character below the lowest token.
_UNKNOWN_PENALTY = np.float32(10)
_LEAST = -float(np.finfo(np.float64).max)
#: Length of a character, by the high half of its first byte.
_LENGTHS = (1,) * 12 + (2, 2, 3, 4)
#: A part of a piece: start, end, score, id.
Edge = tuple[int, int, float, int]


class Charsmap:
    """The map of prefixes to their normal forms."""

    def __init__(self, data: bytes, path: str) -> None:
        """Raises FormatError if the map is truncated."""
        size = int.from_bytes(data[:4], "little")
        if len(data) < 4 or 4 + size >= len(data) or size < 4:
            raise FormatError(f"{path}: {KEY}precompiled_charsmap of {len(data)} bytes is truncated", "QK-E123")
        self._path = path
        self._array: list[int] = np.frombuffer(data, "<u4", size // 4, 4).tolist()
        self._texts = data[4 + size :]

    def _node(self, index: int) -> int:
        if index >= len(self._array):
            raise FormatError(
                f"{self._path}: {KEY}precompiled_charsmap points to entry {index} of {len(self._array)}", "QK-E123"
            )
        return self._array[index]

    def _base(self, index: int) -> int:
        node = self._node(index)
        return (node >> 10) << ((node & 1 << 9) >> 6)

    def longest(self, text: bytes, start: int) -> tuple[int, bytes] | None:
        """Return the length of the longest prefix at ``start`` with a replacement, and that replacement."""
        node, replacement = self._base(0), None
        for position in range(start, len(text)):
            byte = text[position]
            node ^= byte
            if byte == 0 or self._node(node) & 0x800000FF != byte:
                break
            ends = self._node(node) >> 8 & 1
            node ^= self._base(node)
            if ends:
                replacement = position - start + 1, self._node(node) & 0x7FFFFFFF
        if replacement is None:
            return None
        end = self._texts.find(b"\0", replacement[1])
        if end < 0:
            raise FormatError(
                f"{self._path}: {KEY}precompiled_charsmap has no end of text at {replacement[1]}", "QK-E123"
            )
        return replacement[0], self._texts[replacement[1] : end]

    @cached_property
    def spaces_stand_alone(self) -> bool:
        """Whether only single spaces are prefixes with a space, so that words can be normalized one by one."""
        array = np.array(self._array, np.uint32)
        by_space = np.flatnonzero(array & np.uint32(0x800000FF) == 0x20)
        single = self._base(0) ^ 0x20
        if not np.isin(by_space, [single]).all():
            return False
        return self.is_leaf(single) if len(by_space) else True

    def is_leaf(self, index: int) -> bool:
        """Whether a node has no children."""
        base = index ^ self._base(index)
        return not any(
            (child := base ^ byte) < len(self._array) and self._array[child] & 0x800000FF == byte
            for byte in range(1, 256)
        )


class Unigram:
    """Ids of a text by the best sum of scores."""

    def __init__(self, vocab: Vocab) -> None:
        """Raises FormatError for a damaged charsmap, or a missing unknown token."""
        self._vocab, self.piece = vocab, vocab.piece
        self._prefix = vocab.flag("add_space_prefix", False)
        self._merge_spaces = vocab.flag("remove_extra_whitespaces", False)
        self._charsmap = _charsmap(vocab)
        if "unknown" not in vocab.special:
            raise FormatError(f"{vocab.path}: {KEY}unknown_token_id is missing, and unigram needs one", "QK-E123")
        self._unknown = vocab.special["unknown"]
        normal = vocab.scores[vocab.types == Attr.NORMAL]
        lowest = normal.min() if len(normal) else np.finfo(np.float32).max
        self._unknown_score = float(np.float32(lowest - _UNKNOWN_PENALTY))
        scores = np.where(vocab.attrs & Attr.USER_DEFINED, 0, vocab.scores).tolist()
        matchable = np.flatnonzero(vocab.types & (Attr.NORMAL | Attr.USER_DEFINED | Attr.UNUSED)).tolist()
        self._tokens = {vocab.tokens[i]: (scores[i], i) for i in matchable}
        self._lengths = longest_by_start(self._tokens)
        defined = [vocab.tokens[i] for i in np.flatnonzero(vocab.types & Attr.USER_DEFINED).tolist()]
        user = [text.encode("utf-8", "surrogateescape") for text in defined]
        # llama.cpp does not change any prefix of a user-defined token, not only complete ones.
        self._protected = {text[:n] for text in user for n in range(1, len(text) + 1)}
        self._seams = Seams(inner_pairs(self._tokens))
        self._normal_words: dict[bytes, bytes] = {}
        self._edges: dict[str, list[Edge]] = {}

    def encode(self, text: bytes, first: bool) -> list[int]:
        """Return the ids of a piece of text without special tokens."""
        normal = self._escape_spaces(self._normalize(text))
        try:
            pieces = self._seams.pieces(normal.decode())
        except UnicodeDecodeError:
            return self._merge_unknown(self._best_path(self._edges_of_bytes(normal), len(normal), 0.0)[1])
        total, out = 0.0, []
        for piece in pieces:
            total, ids = self._best_path(self._edges_of_text(piece), len(piece), total)
            out += ids
        return self._merge_unknown(out)

    def _merge_unknown(self, ids: list[int]) -> list[int]:
        """Merge adjacent unknown tokens into one."""
        return [i for before, i in zip([None, *ids], ids, strict=False) if i != self._unknown or before != i]

    def _normalize(self, text: bytes) -> bytes:
        """Replace prefixes, word by word if that is equivalent."""
        alone = self._charsmap is None or self._charsmap.spaces_stand_alone
        if not alone or any(b" " in prefix for prefix in self._protected):
            return self._replace(text)
        words, normal_words = text.split(b" "), self._normal_words
        for word in set(words) - normal_words.keys():
            if len(normal_words) >= _MAX_WORDS:
                normal_words.clear()
            normal_words[word] = self._replace(word)
        return self._replace(b" ").join([normal_words[w] if w in normal_words else self._replace(w) for w in words])

    def _replace(self, text: bytes) -> bytes:
        out, position = [], 0
        while position < len(text):
            length = 0
            while length < len(text) - position and text[position : position + length + 1] in self._protected:
                length += 1
            replacement = None if length or self._charsmap is None else self._charsmap.longest(text, position)
            if length or replacement is None:
                length, part = (length, text[position : position + length]) if length else _character(text, position)
            else:
                length, part = replacement
            out.append(part)
            position += length
        return b"".join(out)

    def _escape_spaces(self, text: bytes) -> bytes:
        """Write spaces as U+2581, according to the file's flags."""
        space = SPACE.encode()
        if self._merge_spaces:
            return b"".join(space + word for word in text.split(b" ") if word)
        stripped = text.lstrip(b" ")
        prefix = space if stripped and self._prefix else b""
        return space * (len(text) - len(stripped)) + prefix + stripped.replace(b" ", space)

    def _best_path(self, edges: list[Edge], length: int, total: float) -> tuple[float, list[int]]:
        """Return the best sum over the segmentations of a piece, starting from ``total``, and its ids."""
        sums = [total] + [_LEAST] * length
        back_pointers: list[tuple[int, int]] = [(0, 0)] * (length + 1)
        for start, end, score, token in edges:
            challenger = sums[start] + score
            if challenger > sums[end]:
                sums[end], back_pointers[end] = challenger, (start, token)
        ids, position = [], length
        while position:
            position, token = back_pointers[position]
            ids.append(token)
        return sums[-1], ids[::-1]

    def _edges_of_text(self, piece: str) -> list[Edge]:
        """Return the tokens at all places of a piece, in order; a character without a token is the unknown token."""
        edges = self._edges.get(piece)
        if edges is None:
            if len(self._edges) >= _MAX_WORDS:
                self._edges.clear()
            edges = self._edges[piece] = []
            for start in range(len(piece)):
                longest = max(self._lengths.get(piece[start : start + 2], 0), 1)
                ends = range(start + 1, min(start + longest, len(piece)) + 1)
                parts = ((end, self._tokens.get(piece[start:end])) for end in ends)
                matches = [(start, end, *token) for end, token in parts if token is not None]
                edges += matches
                if not matches or matches[0][1] != start + 1:
                    edges.append((start, start + 1, self._unknown_score, self._unknown))
        return edges

    @cached_property
    def _by_bytes(self) -> tuple[dict[bytes, tuple[float, int]], dict[bytes, int]]:
        tokens = {text.encode("utf-8", "surrogateescape"): token for text, token in self._tokens.items()}
        return tokens, longest_by_start(tokens)

    def _edges_of_bytes(self, text: bytes) -> list[Edge]:
        """Return the edges of invalid UTF-8: the first byte alone gives a character's length."""
        tokens, lengths = self._by_bytes
        edges: list[Edge] = []
        start = 0
        while start < len(text):
            after = min(start + _LENGTHS[text[start] >> 4], len(text))
            longest = max(lengths.get(text[start : start + 2], 0), 1)
            ends = range(start + 1, min(start + longest, len(text)) + 1)
            parts = ((end, tokens.get(text[start:end])) for end in ends)
            matches = [(start, end, *token) for end, token in parts if token is not None]
            edges += matches
            if all(edge[1] != after for edge in matches):
                edges.append((start, after, self._unknown_score, self._unknown))
            start = after
        return edges


def _character(text: bytes, position: int) -> tuple[int, bytes]:
    """Return the length and bytes of the character at a place; U+FFFD for a byte that does not begin one."""
    length = _LENGTHS[text[position] >> 4]
    continuation = text[position + 1 : position + length]
    if (
        text[position] >> 6 == 2
        or len(continuation) != length - 1
        or any(byte >> 6 != 2 for byte in continuation)
        or text[position] >= 0xF8
    ):
        return 1, "\ufffd".encode()
    return length, text[position : position + length]


def _charsmap(vocab: Vocab) -> Charsmap | None:
    field = vocab.source.fields.get(KEY + "precompiled_charsmap")
    if field is None:
        return None
    if field.item_type not in (ValueType.UINT8, ValueType.INT8):
        raise FormatError(
            f"{vocab.path}: {KEY}precompiled_charsmap is {field.describe()}, not an array of bytes", "QK-E123"
        )
    data: npt.NDArray[np.uint8] = field.array.view(np.uint8)
    return Charsmap(data.tobytes(), vocab.path) if len(data) else None

"""The text that base logits belong to: its tokens, cut into chunks of one context length."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Chunks:
    """The tokens, int32 [n_chunks, n_ctx], as in the text, and the size of the vocabulary.

    BOS is not substituted: llama-perplexity puts it in position 0 when it evaluates a chunk.
    """

    n_vocab: int
    tokens: I32

    @property
    def n_chunks(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def n_ctx(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def first(self) -> int:
        """The first position of a chunk whose prediction is scored."""
        return self.n_ctx // 2

    @property
    def rows(self) -> int:
        """Scored positions of a chunk; the target of its last token is unknown."""
        return scored_rows(self.n_ctx)

    def sha256(self) -> bytes:
        """Return the hash that identifies the text: of the tokens, int32, little-endian."""
        return hashlib.sha256(self.tokens.astype("<i4").tobytes()).digest()


def scored_rows(n_ctx: int) -> int:
    """Return the number of scored positions of a chunk (llama.cpp b11434 perplexity.cpp: n_ctx - 1 - n_ctx / 2)."""
    return n_ctx - 1 - n_ctx // 2


def check_header(path: Path, n_ctx: int, n_vocab: int, n_chunks: int) -> None:
    """Raise FormatError unless these are valid in a header of base logits."""
    for name, value, least in (("n_ctx", n_ctx, 3), ("n_vocab", n_vocab, 1), ("n_chunk", n_chunks, 1)):
        if value < least:
            raise FormatError(
                f"{path}: header: {name} is {value}, but must be at least {least}: not base logits, or damaged"
            )


def read_tokens(path: Path, raw: bytes, n_ctx: int, n_vocab: int, offset: int) -> Chunks:
    """Return the chunks of int32 tokens at byte ``offset``. Raises FormatError for ids beyond the vocabulary."""
    tokens = np.frombuffer(raw, "<i4").astype(np.int32).reshape(-1, n_ctx)
    bad = np.flatnonzero((tokens.ravel() < 0) | (tokens.ravel() >= n_vocab))
    if bad.size:
        position = int(bad[0])
        raise FormatError(
            f"{path}: token {position} of the text, byte {offset + 4 * position}, is {tokens.ravel()[position]}:"
            f" the vocabulary has {n_vocab} tokens"
        )
    return Chunks(n_vocab, tokens)

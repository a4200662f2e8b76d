"""--repack and --unrepack: tensors whose rows are interleaved, or taken apart, without a value being touched.

As in ik_llama.cpp 8337e4cd3 (iqk_repacked_type) every tensor of a type that has an interleaved one is repacked, if its
rows make whole groups and it is no embedding. F16 alone stays as it is: ik may make BF16_R16 of it, which loses bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.kernels.interleave import is_woven, plain_of, weaves_together, woven_of
from quantkit.patterns import Pattern
from quantkit.pipeline.facts import TOKEN_EMBD_NAMES, TensorLike
from quantkit.types import TensorType


class Repack:
    """What to do with tensors: ``interleaved``, or the way back; with ``patterns``, of names that one of them finds."""

    def __init__(self, interleaved: bool, patterns: Sequence[str] = ()) -> None:
        self.interleaved = interleaved
        self.patterns = [Pattern(text, "--repack-pattern") for text in patterns]

    def choose(self, t: TensorLike, rows: int) -> tuple[TensorType, str]:
        """Return the type a tensor gets, and why; ``rows``: how many lie together wherever it may be cut."""
        if self.patterns and not any(pattern.search(t.name) for pattern in self.patterns):
            return t.type, "no --repack-pattern matches"
        return self._interleaved(t, rows) if self.interleaved else self._apart(t)

    def _interleaved(self, t: TensorLike, rows: int) -> tuple[TensorType, str]:
        woven = woven_of(t.type)
        if woven is None:
            return t.type, f"{t.type} has no interleaved type"
        if t.name in TOKEN_EMBD_NAMES:
            return t.type, "embeddings are read row by row"
        if not weaves_together(woven, t.shape[0], rows):
            return t.type, f"{rows} rows of {t.shape[0]} do not divide into groups of {woven.interleave}"
        return woven, "--repack"

    def _apart(self, t: TensorLike) -> tuple[TensorType, str]:
        if not is_woven(t.type):
            return t.type, f"{t.type}: rows are not interleaved"
        plain = plain_of(t.type)
        if plain is None:
            return t.type, f"{t.type} is a format of its own: no type of single rows holds its values"
        if t.shape[0] % plain.block:  # IQ1_S_R4 has blocks of 32, IQ1_S of 256
            return t.type, f"rows of {t.shape[0]} do not divide into {plain}'s blocks of {plain.block}"
        return plain, "--unrepack"

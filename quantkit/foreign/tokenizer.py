"""A tokenizer.json run by the tokenizers package: damaged tables abort the process, and normalizers may grow."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers, processors


class Tokenizer:
    """The tokenizer that a tokenizer.json describes, given as ``data``."""

    def __init__(self, data: bytes) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8-sig"))

    def adapt(
        self,
        added: list[tuple[str, dict[str, bool]]],
        byte_level: dict[str, bool] | None,
        bert: dict[str, bool] | None,
        special_tokens: tuple[list[str], list[str]] | None,
    ) -> None:
        """Change the tokenizer as transformers changes it.

        Args:
            added: tokens in addition to those of the model: text, and options of tokenizers.AddedToken.
            byte_level: options of the ByteLevel that replaces its pre-tokenizer, or None.
            bert: options of the BertNormalizer that replaces its normalizer, or None.
            special_tokens: tokens before and after a text, which replace its template, or None.
        """
        tokenizer = self._tokenizer
        # All in one call, because each call compiles the search for all added tokens.
        tokenizer.add_tokens([tokenizers.AddedToken(content, **options) for content, options in added])
        # transformers truncates and pads as its caller requests, regardless of tokenizer.json.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if byte_level is not None:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**byte_level)
        if bert is not None:
            tokenizer.normalizer = normalizers.BertNormalizer(**bert)
        if special_tokens is not None:
            before, after = special_tokens
            single = " ".join([*(f"{t}:0" for t in before), "$A:0", *(f"{t}:0" for t in after)])
            tokens = [(t, tokenizer.token_to_id(t)) for t in (*before, *after)]
            tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text, with special tokens around it or without."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def round_trips(self, texts: list[str]) -> list[str]:
        """Return decode(encode(text)) for each text."""
        return [self._round_trip(text) for text in texts]

    def _round_trip(self, text: str) -> Any:
        return self._tokenizer.decode(self.ids(text, False), skip_special_tokens=False)

    def word_ends(self, text: str) -> list[int]:
        """Return the end offsets of the words of a text."""
        if self._tokenizer.pre_tokenizer is None:
            return [len(text)]
        return [end for _, (_, end) in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]

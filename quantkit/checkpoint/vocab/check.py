"""A check that the written vocabulary tokenizes like the original: it compares the ids of a test text.

A model class does not determine its tokenizer, and the name of a pre-tokenizer may be wrong. The written vocabulary is
run by quantkit's GGUF tokenizer, the original by the tokenizers package or by ranks.
"""

from __future__ import annotations

from itertools import zip_longest

from quantkit.checkpoint.vocab.pre_tokenizers import TEXT, advice
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError, QuantkitError
from quantkit.formats.gguf.rules import short
from quantkit.formats.tokenizer import Tokenizer
from quantkit.formats.tokenizer.vocab import KEY, Metadata

#: Number of ids in a message.
_MAX_SHOWN = 4


def check_ids(v: Vocabulary, gguf: Metadata, allowed: bool) -> tuple[str, ...]:
    """Compare the ids of the test text; return notes on differences, or the reason why nothing was compared.

    Raises FormatError: --pre makes them differ, unless that is ``allowed``. Without --pre, a difference is a limit of
    llama.cpp, because the hash identifies the model's own pre-tokenizer.
    """
    if isinstance(v.source, str):
        return (f"token ids are not checked: {v.source}",)
    try:
        text, expected = v.source()
    except QuantkitError as e:
        return (f"token ids are not checked: {e.message}",)
    try:
        ids = Tokenizer.from_gguf(gguf).encode(text, add_special=False, parse_special=True).tolist()
    except QuantkitError as e:
        return (f"token ids are not checked, because quantkit cannot run the written tokenizer: {e.message}",)
    if ids == expected:
        return ()
    difference = _difference(v, gguf, ids, expected)
    if v.pre is None or allowed or gguf.get(f"{KEY}model") != "gpt2":
        return (difference,)
    tried = advice(set(v.library.call("word_ends", TEXT)), bool(v.model.get("ignore_merges", False)))
    raise FormatError(f"{difference} with --pre {v.pre}; {tried}; use --allow-other-ids to write it anyway", "QK-E115")


def _difference(v: Vocabulary, gguf: Metadata, ids: list[int], expected: list[int]) -> str:
    position = next(i for i, (a, b) in enumerate(zip_longest(ids, expected)) if a != b)
    tokens = gguf.get(f"{KEY}tokens")

    def format_ids(token_ids: list[int]) -> str:
        return ", ".join(
            f"{i} {short(tokens[i]) if i < len(tokens) else '?'}" for i in token_ids[position : position + _MAX_SHOWN]
        )

    return (
        f"{v.folder}: for the test text, llama.cpp's token ids differ from those of the checkpoint's tokenizer: from "
        f"position {position} {format_ids(ids)} instead of {format_ids(expected)}"
    )

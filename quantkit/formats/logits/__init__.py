"""Base logits: a reference model's predictions for a text, stored for comparison with quantized files.

There are two formats. llama.cpp's (``llama.py``) has a 16-bit code for every token of the vocabulary, 300 KB per
position for a large one; every runtime reads it. quantkit's (``compact.py``) has only the most probable tokens,
exactly, and the mass of the rest: a few KB per position, with a bound on the error.

Both contain the tokens of the evaluated text in chunks of ``n_ctx``; the predictions at positions n_ctx // 2 to n_ctx -
2 of each chunk are scored, as in llama-perplexity. ``open_logits`` opens either and validates everything.
"""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import FormatError, os_error_code
from quantkit.formats.logits.chunks import Chunks
from quantkit.formats.logits.compact import CODECS, CompactLogits, CompactRows, CompactWriter, join_rows
from quantkit.formats.logits.llama import CLIPS, LlamaLogits, LlamaRows, LlamaSharer, LlamaWriter, encode_rows
from quantkit.formats.remote import locate

LogitsFile = LlamaLogits | CompactLogits

__all__ = [
    "CLIPS",
    "CODECS",
    "Chunks",
    "CompactLogits",
    "CompactRows",
    "CompactWriter",
    "LlamaLogits",
    "LlamaRows",
    "LlamaSharer",
    "LlamaWriter",
    "LogitsFile",
    "encode_rows",
    "join_rows",
    "open_logits",
]


def open_logits(path: str | Path) -> LogitsFile:
    """Open a file of base logits, llama.cpp's or quantkit's, detected by its first 8 bytes.

    Raises FormatError if it is neither, is damaged, or does not have the size in its header.
    """
    path = locate(path)
    if not path.is_file():
        raise FormatError(
            f"{path}: no such file of base logits; quantkit perplexity --save-all-logits writes one", "QK-E401"
        )
    try:
        with path.open("rb") as file:
            magic = file.read(8)
        for kind in (LlamaLogits, CompactLogits):
            if magic == kind.magic:
                return kind(path)
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror or e}", os_error_code(e)) from e
    raise FormatError(
        f"{path}: starts with {magic!r}: not base logits of llama.cpp ({LlamaLogits.magic!r}) or quantkit"
    )

"""The texts of a file: its lines, or its paragraphs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.outputs import read_text

#: What separates texts, by name; a paragraph ends at an empty line.
SEPARATORS = {"lines": r"\r?\n", "paragraphs": r"(?:[ \t]*\r?\n){2,}"}


def read_texts(path: str | Path, split: str = "lines", n_texts: int | None = None) -> list[str]:
    """Return the texts of a UTF-8 file, stripped, without empty and repeated ones.

    A repeated text would be its own nearest neighbour under both files.

    Args:
        path: the file; - for stdin.
        split: lines or paragraphs.
        n_texts: the number of texts, the first ones; None: all.

    Raises:
        RecipeError: ``split`` is neither.
        FormatError: the file is not UTF-8, or has no text.
    """
    if split not in SEPARATORS:
        raise RecipeError(f"texts cannot be split at {split!r}: choose {' or '.join(SEPARATORS)}", "QK-E203")
    try:
        text = read_text(Path(path)).decode("utf-8")
    except UnicodeDecodeError as e:
        raise FormatError(f"{path}: byte {e.start} is not UTF-8: convert the text", "QK-E121") from None
    parts: Sequence[str] = [part.strip() for part in re.split(SEPARATORS[split], text)]
    texts = list(dict.fromkeys(part for part in parts if part))
    if not texts:
        raise FormatError(f"{path} has no text", "QK-E121")
    return texts[:n_texts]

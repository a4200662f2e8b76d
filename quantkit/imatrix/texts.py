"""The input of a calibration: texts, conversations and token ids, divided into chunks of one context.

Each text is divided separately and its remainder dropped, so one run over several texts equals the merge of a run over
each. The model's chat template renders each conversation (``quantkit.chat``); the texts of a file are concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quantkit.calibration.heldout import HeldOut, find_held_out, merge_held_out
from quantkit.calibration.overlap import Sketch, merge_sketches, sketch
from quantkit.chat import chat_template, conversations
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.outputs import read_text

I32 = npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """The part of a tokenizer that a calibration uses."""

    bos: int | None
    eos: int | None

    def encode(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> I32: ...

    def piece(self, token: int) -> bytes: ...


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks int32 [n, n_ctx], names of their sources, a sketch of the texts, and held-out parts of their corpora."""

    windows: I32
    datasets: tuple[str, ...]
    sketch: Sketch | None
    notes: tuple[str, ...]
    held_out: HeldOut | None = None


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """The tokens of one source, its text if any, and its corpus's held-out part."""

    name: str
    tokens: I32
    text: bytes | None
    held_out: HeldOut | None = None


def text_part(path: Path, tokenizer: Tokenizer, parse_special: bool) -> TokenizedText:
    """Read a text as llama-imatrix does: unchanged bytes without one final newline."""
    raw = read_text(path)
    part = text_of(str(path), raw.removesuffix(b"\n"), tokenizer, parse_special)
    # The recorded hash is that of the file.
    return replace(part, text=raw, held_out=find_held_out(path, raw))


def text_of(name: str, text: bytes, tokenizer: Tokenizer, parse_special: bool) -> TokenizedText:
    """Return a tokenized text. Raises RecipeError, naming it, if it cannot be tokenized."""
    try:
        return TokenizedText(name, tokenizer.encode(text, parse_special=parse_special), text)
    except RecipeError as e:
        raise RecipeError(f"{name}: {e.message}", e.code) from None


def chat_part(path: Path, tokenizer: Tokenizer, source: GGUFFile) -> TokenizedText:
    """Read conversations and render them by the model's template.

    Raises:
        FormatError: a line is not a conversation, or the model has no template.
        ResourceError: jinja2 is not installed.
    """
    with chat_template(source, tokenizer) as child:
        rendered: list[str] = [child.call("render", messages) for messages in conversations(path)]
    if not rendered:
        raise FormatError(f"{path}: contains no conversation", "QK-E121")
    ids = [tokenizer.encode(text, add_special=False, parse_special=True) for text in rendered]
    text = "".join(rendered).encode("utf-8", "surrogateescape")
    return TokenizedText(str(path), np.concatenate(ids), text, find_held_out(path, read_text(path), text))


def cut_chunks(parts: Iterable[TokenizedText], n_ctx: int, from_chunk: int = 0, chunks: int | None = None) -> Chunks:
    """Divide texts into chunks; skip the first ``from_chunk`` of them and take ``chunks``.

    Raises QuantkitError if none is left.
    """
    if n_ctx < 4:
        raise RecipeError(f"-c {n_ctx}: a chunk needs at least 4 tokens", "QK-E203")
    windows = [np.empty((0, n_ctx), np.int32)]
    names = []
    texts = []
    notes = []
    held_out = []
    total = 0
    for part in parts:
        n = len(part.tokens) // n_ctx
        names.append(part.name)
        total += len(part.tokens)
        if n == 0:
            notes.append(f"{part.name}: {len(part.tokens)} tokens are less than one chunk of {n_ctx}: skipped")
            continue
        windows.append(part.tokens[: n * n_ctx].reshape(n, n_ctx))
        if part.text is not None:
            texts.append(sketch(part.text))
        if part.held_out is not None:
            held_out.append(part.held_out)
    all_windows = np.concatenate(windows)
    selected = all_windows[from_chunk:][:chunks]
    if not len(selected):
        skip_note = f"; --chunk {from_chunk} skips all of its {len(all_windows)} chunks" if len(all_windows) else ""
        raise QuantkitError(
            f"{total} tokens are less than one chunk of {n_ctx}{skip_note}: use more text, or a smaller -c", "QK-E203"
        )
    merged = merge_sketches(texts) if texts else None
    return Chunks(selected, tuple(names), merged, tuple(notes), merge_held_out(held_out))

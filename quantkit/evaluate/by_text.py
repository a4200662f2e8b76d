"""Perplexity of several texts and conversations in one run, with a total, and by position in the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from quantkit.activations import RUNTIME
from quantkit.arguments import checked
from quantkit.errors import RecipeError
from quantkit.evaluate.on_nodes import nodes_and_activations
from quantkit.evaluate.passes import (
    F32,
    I32,
    EvaluationOptions,
    Window,
    activations_of,
    bos_of,
    loaded_model,
    note_calibration,
    note_context,
    run_windows,
)
from quantkit.evaluate.scores import nll_of, softmax
from quantkit.evaluate.statistics import Estimate, NllSums
from quantkit.evaluate.texts import Text, Texts, position_ranges, read_texts, with_bos
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.kernels.first_run import working_seconds

F64 = npt.NDArray[np.float64]


class TextsProgress(NamedTuple):
    """Progress after a window: windows done and in total, the perplexity so far."""

    current: int
    total: int
    ppl: Estimate


@dataclass(frozen=True, eq=False)
class TextPerplexities(HtmlTable):
    """Result of ``perplexity_of_texts``: sums of all tokens, of each text by name, and of ranges of positions."""

    model: Path
    n_ctx: int
    n_windows: int
    bos: int | None
    sums: NllSums
    by_text: tuple[tuple[str, NllSums], ...]
    by_position: dict[tuple[int, int], NllSums]
    activations: str
    seconds: float
    notes: tuple[str, ...] = field(default=())

    def as_table(self) -> Table:
        """Return a row per text, and the total: tokens, perplexity and its error."""
        rows = [(name, sums.n, *sums.ppl) for name, sums in (*self.by_text, ("total", self.sums))]
        return table_of("text, tokens, perplexity, standard error", rows, self.model.name)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``quantkit perplexity --json`` writes for several texts."""
        return {
            "model": str(self.model),
            "n_ctx": self.n_ctx,
            "n_chunks": self.n_windows,
            "bos": self.bos,
            "activations": self.activations,
            "seconds": self.seconds,
            "notes": list(self.notes),
            **_statistics(self.sums),
            "by_text": [{"name": name, **_statistics(sums)} for name, sums in self.by_text],
            "by_position": [
                {"first": first, "end": end, **_statistics(sums)} for (first, end), sums in self.by_position.items()
            ],
        }


def _statistics(sums: NllSums) -> dict[str, Any]:
    return {"n_scored": sums.n, "ppl": sums.ppl.as_dict(), "ln_ppl": sums.mean.as_dict()}


@checked
def perplexity_of_texts(
    model: str | Path,
    texts: Texts,
    *,
    n_ctx: int = 512,
    n_batch: int = 2048,
    chunks: int | None = None,
    by_position: bool = False,
    progress: Callable[[TextsProgress], None] | None = None,
    **load: Unpack[EvaluationOptions],
) -> TextPerplexities:
    """Return the perplexity of each of several texts, and of all of their tokens, with one load of the model.

    Args:
        model: path of a GGUF file, loaded with the options ``load``.
        n_ctx: tokens of a chunk, and most tokens of a conversation.
        n_batch: tokens of a pass.
        chunks: chunks or conversations of each text; None: all.
        by_position: evaluate every position of a chunk and add statistics of ranges of positions.

    Raises:
        QuantkitError: no text, or one that is too short.
    """
    start = working_seconds()
    nodes, options, notes = nodes_and_activations(model, load, RUNTIME)
    if nodes is not None:
        raise RecipeError("with --ray, give one text with -f, -p or --tokens", "QK-E210")
    with loaded_model(model, n_ctx, options) as loaded:
        parts = read_texts(texts, loaded, n_ctx, chunks, notes, all_positions=by_position)
        notes += loaded.notes
        note_context(loaded, n_ctx, notes)
        for text in parts:
            note_calibration(loaded, text.content, text.tokens, notes)
        bos = bos_of(loaded, notes)
        run = _TextsRun(parts, bos, position_ranges(n_ctx) if by_position else [], progress)
        threads = load.get("threads")
        run_windows(loaded, run.windows, run.score, run.finish, n_batch=n_batch, bos=None, threads=threads)
        by_text = tuple((text.name, sums) for text, sums in zip(parts, run.by_text, strict=True))
        statistics = (run.sums, by_text, run.by_position, activations_of(loaded))
    n = len(run.windows)
    return TextPerplexities(
        locate(model), n_ctx, n, bos, *statistics, working_seconds() - start, tuple(dict.fromkeys(notes))
    )


class _TextsRun:
    """Likelihoods of the windows of all texts, added to the sums of their text and positions."""

    def __init__(
        self,
        texts: list[Text],
        bos: int | None,
        ranges: list[tuple[int, int]],
        progress: Callable[[TextsProgress], None] | None,
    ) -> None:
        self.texts, self.progress = texts, progress
        self.windows: list[Window] = [with_bos(window, text, bos) for text in texts for window in text.windows]
        self.text_of = [number for number, text in enumerate(texts) for _ in text.windows]
        self.sums = NllSums()
        self.by_text = [NllSums() for _ in texts]
        self.by_position = {part: NllSums() for part in ranges}
        self._nll: dict[int, F64] = {}

    def score(self, window: int, row: int, logits: F32, following: I32) -> None:
        # If two threads reach a new window, both use one array: setdefault is atomic.
        nll = self._nll.setdefault(window, np.empty(self.windows[window].rows))
        nll[row : row + len(logits)] = nll_of(logits, softmax(logits), following)

    def finish(self, begin: int, end: int) -> None:
        for window in range(begin, end):
            nll, number = self._nll.pop(window), self.text_of[window]
            positions = np.flatnonzero(self.windows[window].is_scored)
            selected = nll[positions >= self.texts[number].first]
            self.sums.add(selected)
            self.by_text[number].add(selected)
            for (first, last), sums in self.by_position.items():
                sums.add(nll[(positions >= first) & (positions < last)])
            if self.progress is not None:
                self.progress(TextsProgress(window + 1, len(self.windows), self.sums.ppl))

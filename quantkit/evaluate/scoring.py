"""Score the windows of a text, on this machine or on the nodes of a cluster: the same scores, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from quantkit.evaluate.on_nodes import Pass, There, run_on_nodes
from quantkit.evaluate.passes import F32, I32, Model, bos_of, note_calibration, note_context, run_windows


class PerWindow(Protocol):
    """Scores tiles of windows, from several threads, and gives what a whole window came to."""

    def score(self, window: int, row: int, logits: F32, following: I32) -> None: ...

    def take(self, window: int) -> Any: ...


class Scorer(Protocol):
    """Scores the predictions of windows, see ``run_windows``."""

    def score(self, window: int, row: int, logits: F32, following: I32) -> None: ...

    def done(self, begin: int, end: int) -> None: ...

    @property
    def scorer(self) -> Callable[[], PerWindow]:
        """What makes a scorer of single windows, on a node."""

    def add(self, window: int, found: Any) -> None:
        """Take what a window came to on a node; in order."""


def score_text(
    model: Model,
    text: str | bytes | None,
    tokens: I32,
    windows: I32,
    first: int,
    by: Scorer,
    *,
    n_batch: int,
    threads: int | None,
    there: There | None = None,
) -> tuple[int, int | None, tuple[str, ...]]:
    """Score windows of a text, of these ``tokens``; return the windows of a pass, BOS, and notes on model and text.

    ``there``: run on the nodes of a cluster.
    """
    notes = list(model.notes)
    n, n_ctx = windows.shape
    note_context(model, n_ctx, notes)
    note_calibration(model, text, tokens, notes)
    bos, n_seq = bos_of(model, notes), min(n, max(1, n_batch // n_ctx))
    if there is None:
        run_windows(model, windows, first, by.score, by.done, n_batch=n_batch, bos=bos, threads=threads)
    else:

        def take(begin: int, end: int, found: Sequence[Any]) -> None:
            for window in range(begin, end):
                by.add(window, found[window - begin])

        shared = Scoring(there, n_ctx, n_batch, n_seq, first, bos, by.scorer)
        run_on_nodes(there.nodes, begin_scoring, shared, windows, n_seq, take, notes.append)
    return n_seq, bos, tuple(notes)


# ---------------------------------------------------------------- on nodes


@dataclass(frozen=True)
class Scoring:
    """What nodes need to score windows; ``scorer`` makes what scores them there."""

    model: There
    n_ctx: int
    n_batch: int
    n_seq: int
    first: int
    bos: int | None
    scorer: Callable[[], PerWindow]


def begin_scoring(shared: Scoring, threads: int) -> Callable[[list[Pass]], list[Any]]:
    """Load the model in a worker process; return what scores passes and gives what each window came to."""
    from quantkit.model.engine import load

    scorer = shared.scorer()
    model = load(shared.model.path, n_ctx=shared.n_ctx, **shared.model.options_here(threads))
    session = model.session(shared.n_ctx, shared.n_seq)

    def run(passes: list[Pass]) -> list[Any]:
        found: list[Any] = []
        for begin, windows in passes:
            run_windows(
                model,
                windows,
                shared.first,
                partial(_score, scorer, begin),
                lambda begin, end: None,
                n_batch=shared.n_batch,
                bos=shared.bos,
                threads=threads,
                session=session,
            )
            found += [scorer.take(begin + window) for window in range(len(windows))]
        return found

    return run


def _score(scorer: PerWindow, begin: int, window: int, row: int, logits: F32, following: I32) -> None:
    scorer.score(begin + window, row, logits, following)

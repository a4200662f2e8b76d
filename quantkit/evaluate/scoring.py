"""Scoring of the windows of a text, on this machine or on the nodes of a cluster, with equal results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from quantkit.evaluate.on_nodes import NodeModel, Pass, run_on_nodes
from quantkit.evaluate.passes import (
    F32,
    I32,
    Model,
    bos_of,
    note_calibration,
    note_context,
    run_windows,
    text_windows,
)


class WindowScorer(Protocol):
    """Scores tiles of windows, from several threads; ``take`` returns the result of a complete window."""

    def score(self, window: int, row: int, logits: F32, following: I32) -> None: ...

    def take(self, window: int) -> Any: ...


class Scorer(Protocol):
    """Scores the predictions of windows (see ``run_windows``) and collects results in order."""

    def score(self, window: int, row: int, logits: F32, following: I32) -> None: ...

    def finish(self, begin: int, end: int) -> None: ...

    @property
    def scorer(self) -> Callable[[], WindowScorer]:
        """The constructor of a WindowScorer on nodes."""

    def add(self, window: int, result: Any) -> None:
        """Add the result of a window from a node; called in order."""


def score_text(
    model: Model,
    text: str | bytes | None,
    tokens: I32,
    windows: I32,
    first: int,
    scorer: Scorer,
    *,
    n_batch: int,
    threads: int | None,
    node_model: NodeModel | None = None,
) -> tuple[int, int | None, tuple[str, ...]]:
    """Score windows of a text; return the windows of a pass, BOS, and notes on model and text.

    node_model: run on the nodes of a cluster.
    """
    notes = list(model.notes)
    n, n_ctx = windows.shape
    note_context(model, n_ctx, notes)
    note_calibration(model, text, tokens, notes)
    bos, n_seq = bos_of(model, notes), min(n, max(1, n_batch // n_ctx))
    if node_model is None:
        contexts = text_windows(windows, first)
        run_windows(model, contexts, scorer.score, scorer.finish, n_batch=n_batch, bos=bos, threads=threads)
    else:

        def take(begin: int, end: int, results: Sequence[Any]) -> None:
            for window in range(begin, end):
                scorer.add(window, results[window - begin])

        shared = Scoring(node_model, n_ctx, n_batch, n_seq, first, bos, scorer.scorer)
        run_on_nodes(node_model.nodes, begin_scoring, shared, windows, n_seq, take, notes.append)
    return n_seq, bos, tuple(notes)


# ---------------------------------------------------------------- on nodes


@dataclass(frozen=True)
class Scoring:
    """Arguments of nodes that score windows; scorer: the constructor of their WindowScorer."""

    model: NodeModel
    n_ctx: int
    n_batch: int
    n_seq: int
    first: int
    bos: int | None
    scorer: Callable[[], WindowScorer]


def begin_scoring(shared: Scoring, threads: int) -> Callable[[list[Pass]], list[Any]]:
    """Load the model in a worker process; return a function from passes to the results of their windows."""
    from quantkit.model.engine import load

    scorer = shared.scorer()
    model = load(shared.model.path, n_ctx=shared.n_ctx, **shared.model.load_options(threads))
    session = model.session(shared.n_ctx, shared.n_seq)

    def run(passes: list[Pass]) -> list[Any]:
        results: list[Any] = []
        for begin, windows in passes:
            run_windows(
                model,
                text_windows(windows, shared.first),
                partial(_score, scorer, begin),
                lambda begin, end: None,
                n_batch=shared.n_batch,
                bos=shared.bos,
                threads=threads,
                session=session,
            )
            results += [scorer.take(begin + window) for window in range(len(windows))]
        return results

    return run


def _score(scorer: WindowScorer, begin: int, window: int, row: int, logits: F32, following: I32) -> None:
    scorer.score(begin + window, row, logits, following)

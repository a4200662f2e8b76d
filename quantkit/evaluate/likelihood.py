"""Perplexity: exp of the mean negative log-likelihood of a text's tokens.

By chunks (llama.cpp b11434 perplexity.cpp perplexity): the text is cut into contexts, and the second half of each is
scored; one chunk of text is enough, whereas llama.cpp requires two. With a stride (perplexity_v2), windows of n_ctx
tokens begin every ``stride`` tokens, and the last ``stride`` tokens of each are scored: every token once, with more
context.

Two errors of llama.cpp's stride mode are fixed: it evaluates a window before placing BOS at its start, so BOS has no
effect; and its windows are not -c tokens long but -c (times n_batch / n_ctx) plus half a stride, rounded up to 256. It
also rounds each probability to float32. For a model without BOS and the same window the values agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from quantkit.activations import EXACT, RUNTIME
from quantkit.arguments import checked
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate.on_nodes import NodeModel, nodes_and_activations
from quantkit.evaluate.passes import (
    F32,
    I32,
    EvaluationOptions,
    Model,
    activations_of,
    loaded_model,
    path_of,
    text_tokens,
)
from quantkit.evaluate.scores import nll_of, softmax
from quantkit.evaluate.scoring import score_text
from quantkit.evaluate.sinks import SaveLogits, Sink, open_sink
from quantkit.evaluate.statistics import Estimate, NllSums
from quantkit.formats.logits import CompactRows
from quantkit.formats.outputs import Output, atomic_write, check_apart
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.kernels.first_run import working_seconds

F64 = npt.NDArray[np.float64]


class PerplexityProgress(NamedTuple):
    """Progress after a chunk: chunks done, chunks in total, perplexity so far."""

    current: int
    total: int
    ppl: Estimate
    log_ppl: Estimate

    @property
    def text(self) -> str:
        return f"perplexity {self.ppl.text(4)}"


@dataclass(frozen=True)
class Perplexity(HtmlTable):
    """Result of ``perplexity``; running: the value after each chunk."""

    model: Path
    n_tokens: int
    n_scored: int
    n_ctx: int
    n_chunks: int
    stride: int
    n_seq: int
    bos: int | None
    ppl: Estimate
    log_ppl: Estimate
    running: tuple[Estimate, ...]
    seconds: float
    saved: Path | None = None
    activations: str = RUNTIME
    notes: tuple[str, ...] = field(default=())

    def as_table(self) -> Table:
        """Return the perplexity and its logarithm, with standard errors."""
        rows = (("perplexity", *self.ppl), ("ln(perplexity)", *self.log_ppl))
        caption = f"{self.model.name}: {self.n_scored:,} tokens scored, {self.n_chunks} chunks of {self.n_ctx}"
        return table_of("statistic, value, standard error", rows, caption)


@checked
def perplexity(
    model: str | Path | Model,
    text: str | bytes | None = None,
    *,
    tokens: npt.ArrayLike | None = None,
    n_ctx: int = 512,
    n_batch: int = 2048,
    chunks: int | None = None,
    stride: int = 0,
    save_logits: SaveLogits | None = None,
    progress: Callable[[PerplexityProgress], None] | None = None,
    **load: Unpack[EvaluationOptions],
) -> Perplexity:
    """Return the perplexity of a text, or of tokens [n], under a model.

    Args:
        model: path of a GGUF file, loaded with the options ``load`` (those of quantkit.load), or a loaded model.
        n_ctx: tokens of a chunk.
        n_batch: tokens of a pass, which has max(1, n_batch // n_ctx) chunks.
        chunks: the number to evaluate; None: all.
        stride: tokens between windows, which replace chunks; 0: chunks.
        save_logits: a base for ``kld``; then the default of ``activations`` is exact, else runtime.

    Raises:
        QuantkitError: too few tokens, or an invalid window or stride.
    """
    start = working_seconds()
    if stride and save_logits is not None:
        raise RecipeError(
            "--save-all-logits and --ppl-stride are mutually exclusive: base logits are computed in chunks", "QK-E201"
        )
    with ExitStack() as stack:
        part = None
        if save_logits is not None:
            check_apart([save_logits.path], [path_of(model)])
            part = atomic_write(stack.enter_context(Output(save_logits.path, overwrite=save_logits.overwrite)).path)
        nodes, load_options, mode_notes = nodes_and_activations(model, load, RUNTIME if save_logits is None else EXACT)
        if nodes is not None and not isinstance(model, (str, Path)):
            raise RecipeError("with --ray, models must be files: give a path", "QK-E210")
        loaded = stack.enter_context(loaded_model(model, n_ctx, load_options))
        ids = text_tokens(loaded, text, tokens)
        windows = _stride_windows(ids, n_ctx, stride, chunks) if stride else split_chunks(ids, n_ctx, chunks)
        first = n_ctx - stride - 1 if stride else n_ctx // 2
        sink: Sink | None = None
        if save_logits is not None and part is not None:
            sink = open_sink(loaded, windows, save_logits, stack.enter_context(part), stack)
        run = _PerplexityRun(windows, first, sink, progress)
        node_model = None if nodes is None else NodeModel.from_path(loaded.path, nodes, load_options)
        n_seq, bos, notes = score_text(
            loaded, text, ids, windows, first, run, n_batch=n_batch, threads=load.get("threads"), node_model=node_model
        )
        path = locate(loaded.path)
        n = len(windows)
        sums = run.sums
        running = tuple(run.running)
        if sink is not None:
            sink.finish()
        activations = activations_of(loaded)
    saved, seconds = locate(save_logits.path) if save_logits is not None else None, working_seconds() - start
    scored = (len(ids), sums.n, n_ctx, n, stride, n_seq, bos)
    return Perplexity(path, *scored, sums.ppl, sums.mean, running, seconds, saved, activations, (*mode_notes, *notes))


def split_chunks(ids: I32, n_ctx: int, chunks: int | None) -> I32:
    """Return the chunks of a text, int32 [n, n_ctx]."""
    if n_ctx < 4:
        raise RecipeError(f"a context of {n_ctx} tokens leaves nothing to score; use at least 4", "QK-E203")
    n = len(ids) // n_ctx
    if n == 0:
        raise QuantkitError(
            f"the text has {len(ids)} tokens, less than one chunk of {n_ctx}: use more text, or a smaller -c", "QK-E203"
        )
    n = n if chunks is None else min(n, chunks)
    return ids[: n * n_ctx].reshape(n, n_ctx)


def _stride_windows(ids: I32, n_ctx: int, stride: int, chunks: int | None) -> I32:
    """Return the windows of a text, int32 [n, n_ctx], each ``stride`` tokens after the previous one."""
    if not 0 < stride < n_ctx:
        raise RecipeError(
            f"--ppl-stride {stride} must be greater than 0 and less than the context of {n_ctx} tokens", "QK-E203"
        )
    if len(ids) <= n_ctx:
        raise QuantkitError(
            f"the text has {len(ids)} tokens; a context of {n_ctx} with a stride needs more than that", "QK-E203"
        )
    n = -(-(len(ids) - n_ctx) // stride)
    n = n if chunks is None else min(n, chunks)
    return np.lib.stride_tricks.sliding_window_view(ids, n_ctx)[::stride][:n]


class _Nll:
    """Negative log-likelihoods of windows, ``rows`` of each."""

    def __init__(self, rows: int, sink: Sink | None = None) -> None:
        self.rows, self.sink = rows, sink
        self.nll: dict[int, F64] = {}

    def score(self, window: int, row: int, logits: F32, following: I32) -> None:
        parts = softmax(logits)
        # If two threads reach a new window, both use one array: setdefault is atomic.
        nll = self.nll.setdefault(window, np.empty(self.rows))
        nll[row : row + len(logits)] = nll_of(logits, parts, following)
        if self.sink is not None:
            self.sink.write(window, row, logits, parts, following)

    def take(self, window: int) -> tuple[F64, CompactRows | None]:
        """Return and remove the likelihoods of a window, float64 [rows], and its rows that are not written yet."""
        return self.nll.pop(window), None if self.sink is None else self.sink.take(window)


@dataclass(frozen=True)
class _NllFactory:
    """Constructor of ``_Nll`` on a node; ``sink`` creates the node's sink of logits, if there is one."""

    rows: int
    sink: Callable[[], Sink] | None

    def __call__(self) -> _Nll:
        return _Nll(self.rows, None if self.sink is None else self.sink())


class _PerplexityRun:
    """A run of ``perplexity``: collects the scores of windows in order."""

    def __init__(
        self, windows: I32, first: int, sink: Sink | None, progress: Callable[[PerplexityProgress], None] | None
    ) -> None:
        self.n = len(windows)
        self.progress = progress
        self.sink = sink
        self.scorer = _NllFactory(windows.shape[1] - 1 - first, None if sink is None else sink.node_sink())
        self._nll = _Nll(self.scorer.rows, sink)
        self.score = self._nll.score
        self.sums, self.running = NllSums(), list[Estimate]()

    def finish(self, begin: int, end: int) -> None:
        for window in range(begin, end):
            self.add(window, self._nll.take(window))

    def add(self, window: int, result: tuple[F64, CompactRows | None]) -> None:
        """Add a window's likelihoods, float64 [rows], and save its rows of logits."""
        nll, rows = result
        if self.sink is not None and rows is not None:
            self.sink.save(rows)
        self.sums.add(nll)
        self.running.append(self.sums.ppl)
        if self.progress is not None:
            self.progress(PerplexityProgress(window + 1, self.n, self.sums.ppl, self.sums.mean))

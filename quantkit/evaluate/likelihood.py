"""Perplexity: exp of the mean negative log-likelihood of a text's tokens.

By chunks (llama.cpp b11434 perplexity.cpp perplexity): the text is cut into contexts, and the second half of each is
scored; llama.cpp demands two chunks of text, here one is enough. With a stride (perplexity_v2): windows of n_ctx tokens
begin every ``stride`` tokens, and the last ``stride`` tokens of each are scored, so that each is scored once, with
more before it.

llama.cpp's stride mode has two quirks that are repaired here: it evaluates every window before it puts BOS at its
begin, so BOS has no effect; and its windows are not -c tokens long but -c (times n_batch / n_ctx) plus half a stride,
rounded up to 256. It also rounds each probability to float32. For a model without BOS and the same window the
values agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate.passes import (
    F32,
    I32,
    LoadOptions,
    Model,
    bos_of,
    note_calibration,
    note_context,
    opened,
    run_windows,
    text_tokens,
)
from quantkit.evaluate.scores import Softmax, most_probable, nll_of, softmax
from quantkit.evaluate.statistics import Estimate, NllSums
from quantkit.formats.gguf import open_gguf
from quantkit.formats.logits import Chunks, CompactRows, CompactWriter, LlamaWriter, join_rows


@dataclass(frozen=True)
class SaveLogits:
    """Keep the logits of all scored positions in ``path``, as a base for ``kld``.

    ``format``: "llama.cpp", of which ``clip`` is 16, or 24 as ik_llama.cpp's; or "compact", with the ``top_k`` most
    probable tokens of a position, fewer once no more than ``residual`` mass is left, packed by ``codec``.
    """

    path: str | Path
    format: str = "llama.cpp"
    clip: float = 16
    top_k: int = 1024
    residual: float = 1e-5
    codec: str = "zlib"
    overwrite: bool = False


class PerplexityProgress(NamedTuple):
    """After a chunk: how many are done, of how many, and the perplexity so far."""

    chunk: int
    n_chunks: int
    ppl: Estimate
    log_ppl: Estimate


@dataclass(frozen=True)
class Perplexity:
    """What ``perplexity`` found: the running value after each chunk is in ``running``."""

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
    notes: tuple[str, ...] = field(default=())


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
    **load: Unpack[LoadOptions],
) -> Perplexity:
    """Return the perplexity of a text, or of tokens [n], under a model.

    Args:
        model: path of a GGUF file, loaded with the options ``load`` (those of quantkit.load), or a loaded model.
        n_ctx: tokens of a chunk; ``n_batch``: tokens of a pass, so max(1, n_batch // n_ctx) chunks run at once.
        chunks: evaluate only so many; ``stride``: windows every so many tokens instead of chunks.

    Raises:
        QuantkitError: too few tokens, or a window or stride that makes no sense.
    """
    started = time.perf_counter()
    if stride and save_logits is not None:
        raise RecipeError("a base of logits has chunks: --save-all-logits excludes --ppl-stride")
    if save_logits is not None and Path(save_logits.path).exists() and not save_logits.overwrite:
        raise QuantkitError(f"{save_logits.path} exists; give another name, or --overwrite to replace it")
    with (
        opened(model, n_ctx, load) as loaded,
        ExitStack() as stack,
    ):
        ids = text_tokens(loaded, text, tokens)
        windows = _strided(ids, n_ctx, stride, chunks) if stride else _chunked(ids, n_ctx, chunks)
        first = n_ctx - stride - 1 if stride else n_ctx // 2
        sink: _Sink | None = None
        if save_logits is not None:
            sink = _sink(loaded, windows, save_logits)
            stack.enter_context(sink)
        notes: list[str] = list(loaded.notes)
        note_context(loaded, n_ctx, notes)
        note_calibration(loaded, text, ids, notes)
        bos = bos_of(loaded, notes)
        run = _Run(windows, first, sink, progress)
        run_windows(loaded, windows, first, run.score, run.done, n_batch=n_batch, bos=bos, threads=load.get("threads"))
        path = Path(loaded.path)
    return Perplexity(
        path,
        len(ids),
        run.sums.n,
        n_ctx,
        len(windows),
        stride,
        min(len(windows), max(1, n_batch // n_ctx)),
        bos,
        run.sums.ppl,
        run.sums.mean,
        tuple(run.running),
        time.perf_counter() - started,
        Path(save_logits.path) if save_logits is not None else None,
        tuple(notes),
    )


def _chunked(ids: I32, n_ctx: int, chunks: int | None) -> I32:
    """Return the chunks of a text, int32 [n, n_ctx]."""
    if n_ctx < 4:
        raise RecipeError(f"a context of {n_ctx} tokens leaves nothing to score; at least 4 are needed")
    n = len(ids) // n_ctx
    if n == 0:
        raise QuantkitError(f"the text has {len(ids)} tokens, not one chunk of {n_ctx}: use more text, or a smaller -c")
    n = n if chunks is None else min(n, chunks)
    return ids[: n * n_ctx].reshape(n, n_ctx)


def _strided(ids: I32, n_ctx: int, stride: int, chunks: int | None) -> I32:
    """Return the windows of a text, int32 [n, n_ctx], each ``stride`` tokens after the one before."""
    if not 0 < stride < n_ctx:
        raise RecipeError(f"--ppl-stride {stride} must be above 0 and below the context of {n_ctx} tokens")
    if len(ids) <= n_ctx:
        raise QuantkitError(f"the text has {len(ids)} tokens; a context of {n_ctx} with a stride needs more than that")
    n = -(-(len(ids) - n_ctx) // stride)
    n = n if chunks is None else min(n, chunks)
    return np.lib.stride_tricks.sliding_window_view(ids, n_ctx)[::stride][:n]


class _Run:
    """Collects the scores of windows and puts them together in order."""

    def __init__(
        self, windows: I32, first: int, sink: _Sink | None, progress: Callable[[PerplexityProgress], None] | None
    ) -> None:
        self.n, self.rows, self.sink, self.progress = len(windows), windows.shape[1] - 1 - first, sink, progress
        self.nll: dict[int, npt.NDArray[np.float64]] = {}
        self.sums, self.running = NllSums(), list[Estimate]()

    def score(self, window: int, row: int, logits: F32, following: I32) -> None:
        parts = softmax(logits)
        # Of two threads that come first to a window, one makes the array: setdefault is one step.
        nll = self.nll.setdefault(window, np.empty(self.rows))
        nll[row : row + len(logits)] = nll_of(logits, parts, following)
        if self.sink is not None:
            self.sink.write(window, row, logits, parts, following)

    def done(self, begin: int, end: int) -> None:
        for window in range(begin, end):
            self.sums.add(self.nll.pop(window))
            self.running.append(self.sums.ppl)
            if self.sink is not None:
                self.sink.finish(window)
            if self.progress is not None:
                self.progress(PerplexityProgress(window + 1, self.n, self.sums.ppl, self.sums.mean))


# --- keeping the logits ---


class _LlamaSink:
    """Rows go to the file as they come."""

    def __init__(self, writer: LlamaWriter) -> None:
        self.writer = writer

    def write(self, window: int, row: int, logits: F32, parts: Softmax, following: I32) -> None:
        # The exponentials have done their work.
        self.writer.write(window, row, logits, parts.log_total, scratch=parts.exps)

    def finish(self, window: int) -> None:
        """Do nothing: all is written."""

    def __enter__(self) -> _LlamaSink:
        self.writer.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.writer.__exit__(*exception)  # type: ignore[arg-type]


class _CompactSink:
    """Rows are kept until their chunk is whole."""

    def __init__(self, writer: CompactWriter, residual: float) -> None:
        self.writer, self.residual = writer, residual
        self.parts: dict[int, dict[int, CompactRows]] = {}

    def write(self, window: int, row: int, logits: F32, parts: Softmax, following: I32) -> None:
        rows = most_probable(logits, parts, following, self.writer.top_k, self.residual)
        self.parts.setdefault(window, {})[row] = rows

    def finish(self, window: int) -> None:
        parts = self.parts.pop(window)
        self.writer.write(join_rows([parts[row] for row in sorted(parts)]))

    def __enter__(self) -> _CompactSink:
        self.writer.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.writer.__exit__(*exception)  # type: ignore[arg-type]


_Sink = _LlamaSink | _CompactSink


def _sink(model: Model, windows: I32, save: SaveLogits) -> _Sink:
    from quantkit.pipeline.plan import source_fingerprint

    chunks = Chunks(model.n_vocab, windows)
    if save.format == "llama.cpp":
        return _LlamaSink(LlamaWriter(save.path, chunks, save.clip))
    if save.format != "compact":
        raise RecipeError(f"no format {save.format!r} of base logits; there are llama.cpp and compact")
    if save.top_k < 1 or not 0 <= save.residual < 1:
        raise RecipeError(f"top-k {save.top_k} must be above 0, and a residual of {save.residual} within [0, 1)")
    with open_gguf(model.path) as source:
        fingerprint = source_fingerprint(source)
    name = Path(model.path).name
    kept = min(save.top_k, model.n_vocab)
    writer = CompactWriter(save.path, chunks, top_k=kept, codec=save.codec, model=name, fingerprint=fingerprint)
    return _CompactSink(writer, save.residual)

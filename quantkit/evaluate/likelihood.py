"""Perplexity: exp of the mean negative log-likelihood of a text's tokens.

By chunks (llama.cpp b11434 perplexity.cpp perplexity): the text is cut into contexts, and the second half of each is
scored; one chunk of text is enough here, llama.cpp requires two. With a stride (perplexity_v2), windows of n_ctx tokens
begin every ``stride`` tokens, and the last ``stride`` tokens of each are scored: every token once, with more context.

Two quirks of llama.cpp's stride mode are fixed here: it evaluates a window before placing BOS at its start, so BOS has
no effect; and its windows are not -c tokens long but -c (times n_batch / n_ctx) plus half a stride,
rounded up to 256. It also rounds each probability to float32. For a model without BOS and the same window the
values agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from quantkit.cluster import Refused
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.evaluate.on_nodes import There, without_nodes
from quantkit.evaluate.passes import F32, I32, EvaluationOptions, Model, opened, path_of, text_tokens
from quantkit.evaluate.scores import Softmax, most_probable, nll_of, softmax
from quantkit.evaluate.scoring import score_text
from quantkit.evaluate.statistics import Estimate, NllSums
from quantkit.formats.gguf import open_gguf
from quantkit.formats.logits import Chunks, CompactRows, CompactWriter, LlamaSharer, LlamaWriter, join_rows
from quantkit.formats.outputs import Output, check_apart, written
from quantkit.kernels.first_run import working_seconds

F64 = npt.NDArray[np.float64]


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
    """Progress after a chunk: chunks done, chunks in total, perplexity so far."""

    chunk: int
    n_chunks: int
    ppl: Estimate
    log_ppl: Estimate


@dataclass(frozen=True)
class Perplexity:
    """What ``perplexity`` found; ``running`` has the value after each chunk."""

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
    **load: Unpack[EvaluationOptions],
) -> Perplexity:
    """Return the perplexity of a text, or of tokens [n], under a model.

    Args:
        model: path of a GGUF file, loaded with the options ``load`` (those of quantkit.load), or a loaded model.
        n_ctx: tokens of a chunk; ``n_batch``: tokens of a pass, so max(1, n_batch // n_ctx) chunks run at once.
        chunks: how many to evaluate; ``stride``: tokens between windows, instead of chunks.

    Raises:
        QuantkitError: too few tokens, or a window or stride that makes no sense.
    """
    started = working_seconds()
    if stride and save_logits is not None:
        raise RecipeError("a base of logits has chunks: --save-all-logits excludes --ppl-stride")
    with ExitStack() as stack:
        part = None
        if save_logits is not None:
            check_apart([save_logits.path], [path_of(model)])
            part = written(stack.enter_context(Output(save_logits.path, overwrite=save_logits.overwrite)).path)
        nodes, own = without_nodes(load)
        if nodes is not None and not isinstance(model, (str, Path)):
            raise RecipeError("a cluster runs models from files: name one")
        loaded = stack.enter_context(opened(model, n_ctx, own))
        ids = text_tokens(loaded, text, tokens)
        windows = _strided(ids, n_ctx, stride, chunks) if stride else chunked(ids, n_ctx, chunks)
        first = n_ctx - stride - 1 if stride else n_ctx // 2
        sink: _Sink | None = None
        if save_logits is not None and part is not None:
            sink = _sink(loaded, windows, save_logits, stack.enter_context(part), stack)
        run = _Run(windows, first, sink, progress)
        there = None if nodes is None else There.of(loaded.path, nodes, own)
        n_seq, bos, notes = score_text(
            loaded, text, ids, windows, first, run, n_batch=n_batch, threads=load.get("threads"), there=there
        )
        path, n, sums, running = Path(loaded.path), len(windows), run.sums, tuple(run.running)
    saved, took = Path(save_logits.path) if save_logits is not None else None, working_seconds() - started
    scored = (len(ids), sums.n, n_ctx, n, stride, n_seq, bos)
    return Perplexity(path, *scored, sums.ppl, sums.mean, running, took, saved, notes)


def chunked(ids: I32, n_ctx: int, chunks: int | None) -> I32:
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


class _Nll:
    """Negative log-likelihoods of windows, ``rows`` of each."""

    def __init__(self, rows: int, sink: _Sink | None = None) -> None:
        self.rows, self.sink = rows, sink
        self.nll: dict[int, F64] = {}

    def score(self, window: int, row: int, logits: F32, following: I32) -> None:
        parts = softmax(logits)
        # If two threads reach a window first, only one array counts: setdefault is atomic.
        nll = self.nll.setdefault(window, np.empty(self.rows))
        nll[row : row + len(logits)] = nll_of(logits, parts, following)
        if self.sink is not None:
            self.sink.write(window, row, logits, parts, following)

    def take(self, window: int) -> tuple[F64, CompactRows | None]:
        """Return what a window came to, float64 [rows], and what is to be kept of it and is not written yet."""
        return self.nll.pop(window), None if self.sink is None else self.sink.take(window)


@dataclass(frozen=True)
class _There:
    """Scores windows on a node, and keeps logits as ``sink`` does, if there is one."""

    rows: int
    sink: Callable[[], _Sink] | None

    def __call__(self) -> _Nll:
        return _Nll(self.rows, None if self.sink is None else self.sink())


class _Run:
    """Collects the scores of windows in order."""

    def __init__(
        self, windows: I32, first: int, sink: _Sink | None, progress: Callable[[PerplexityProgress], None] | None
    ) -> None:
        self.n, self.progress, self.sink = len(windows), progress, sink
        self.scorer = _There(windows.shape[1] - 1 - first, None if sink is None else sink.there())
        self._nll = _Nll(self.scorer.rows, sink)
        self.score = self._nll.score
        self.sums, self.running = NllSums(), list[Estimate]()

    def done(self, begin: int, end: int) -> None:
        for window in range(begin, end):
            self.add(window, self._nll.take(window))

    def add(self, window: int, found: tuple[F64, CompactRows | None]) -> None:
        """Count a window's likelihoods, float64 [rows], and write what is to be kept."""
        nll, kept = found
        if self.sink is not None and kept is not None:
            self.sink.keep(kept)
        self.sums.add(nll)
        self.running.append(self.sums.ppl)
        if self.progress is not None:
            self.progress(PerplexityProgress(window + 1, self.n, self.sums.ppl, self.sums.mean))


# --- keeping the logits ---


class _LlamaSink:
    """Writes rows as they come."""

    def __init__(self, writer: LlamaWriter) -> None:
        self.writer = writer

    def write(self, window: int, row: int, logits: F32, parts: Softmax, following: I32) -> None:
        # The exponentials are no longer needed.
        self.writer.write(window, row, logits, parts.log_total, scratch=parts.exps)

    def take(self, window: int) -> None:
        """Return when all of a window is written."""
        if isinstance(self.writer, LlamaSharer):
            self.writer.sync()

    def keep(self, rows: CompactRows) -> None:
        """Do nothing: everything is written."""

    def there(self) -> Callable[[], _LlamaSink]:
        """Return what keeps logits on a node: in the same file."""
        return partial(_shared_sink, self.writer.path.absolute(), self.writer.chunks, self.writer.clip)


def _shared_sink(path: Path, chunks: Chunks, clip: float) -> _LlamaSink:
    try:
        return _LlamaSink(LlamaSharer(path, chunks, clip))
    except (OSError, FormatError) as e:
        raise Refused(f"{path} cannot be written there: {e}") from None


class _CompactSink:
    """Keeps rows until their chunk is complete; ``writer`` is none on a node, which sends them."""

    def __init__(self, top_k: int, residual: float, writer: CompactWriter | None) -> None:
        self.top_k, self.residual, self.writer = top_k, residual, writer
        self.parts: dict[int, dict[int, CompactRows]] = {}

    def write(self, window: int, row: int, logits: F32, parts: Softmax, following: I32) -> None:
        rows = most_probable(logits, parts, following, self.top_k, self.residual)
        self.parts.setdefault(window, {})[row] = rows

    def take(self, window: int) -> CompactRows:
        """Return the rows of a window."""
        parts = self.parts.pop(window)
        return join_rows([parts[row] for row in sorted(parts)])

    def keep(self, rows: CompactRows) -> None:
        """Write the rows of the next window."""
        if self.writer is not None:
            self.writer.write(rows)

    def there(self) -> Callable[[], _CompactSink]:
        """Return what keeps logits on a node, and gives them to this one."""
        return partial(_CompactSink, self.top_k, self.residual, None)


_Sink = _LlamaSink | _CompactSink


def _sink(model: Model, windows: I32, save: SaveLogits, path: Path, stack: ExitStack) -> _Sink:
    chunks = Chunks(model.n_vocab, windows)
    if save.format == "llama.cpp":
        return _LlamaSink(LlamaWriter(path, chunks, save.clip))
    if save.format != "compact":
        raise RecipeError(f"no format {save.format!r} of base logits; there are llama.cpp and compact")
    if save.top_k < 1 or not 0 <= save.residual < 1:
        raise RecipeError(f"top-k {save.top_k} must be above 0, and a residual of {save.residual} within [0, 1)")
    with open_gguf(model.path) as source:
        fingerprint = source.fingerprint()
    name = Path(model.path).name
    kept = min(save.top_k, model.n_vocab)
    writer = CompactWriter(path, chunks, top_k=kept, codec=save.codec, model=name, fingerprint=fingerprint)
    return _CompactSink(kept, save.residual, stack.enter_context(writer))

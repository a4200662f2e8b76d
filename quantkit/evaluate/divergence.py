"""KL divergence of a model from a base: llama-perplexity --kl-divergence, on base logits of either kind.

The tokens come from the base file. Each scored position has one divergence sum(p log(p / q)) of the model's
prediction q from the base's p; five scalars are kept per position. With llama.cpp's base the sum leaves out tokens with
log p <= -16, as llama.cpp does; with ours, tokens missing from the file are estimated, with a bound on the error.

Another vocabulary or a truncated file, which llama.cpp accepts, is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from quantkit.cluster import Refused
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.evaluate.on_nodes import There, without_nodes
from quantkit.evaluate.passes import F32, I32, EvaluationOptions, Model, opened
from quantkit.evaluate.scores import compare_with_compact, compare_with_llama
from quantkit.evaluate.scoring import score_text
from quantkit.evaluate.statistics import KldSums, Scores, finite
from quantkit.formats.logits import CompactLogits, LogitsFile, open_logits
from quantkit.kernels.first_run import working_seconds


class KldProgress(NamedTuple):
    """Progress after a chunk: chunks done, chunks in total, statistics so far."""

    chunk: int
    n_chunks: int
    sums: KldSums


@dataclass(frozen=True)
class Kld:
    """What ``kld`` found. ``bound``: how far off the mean divergence can be (0 with llama.cpp's base)."""

    model: Path
    base: Path
    base_kind: str
    base_model: str
    n_ctx: int
    n_chunks: int
    chunks_in_base: int
    n_seq: int
    bos: int | None
    sums: KldSums
    seconds: float
    notes: tuple[str, ...]

    @property
    def bound(self) -> float:
        return self.sums.bound / self.sums.n

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, as ``quantkit kld --json`` writes it."""
        sums = self.sums
        return {
            "model": str(self.model),
            "base": str(self.base),
            "base_model": self.base_model or None,
            "n_ctx": self.n_ctx,
            "n_chunks": self.n_chunks,
            "n_seq": self.n_seq,
            "n_scored": sums.n,
            "bos": self.bos,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "ppl_q": sums.nll.ppl.as_dict(),
            "ppl_base": sums.nll_base.ppl.as_dict(),
            "correlation": finite(sums.correlation),
            "ln_ppl_ratio": sums.ln_ratio.as_dict(),
            "ppl_ratio": sums.ratio.as_dict(),
            "ppl_difference": sums.difference.as_dict(),
            "kld": sums.kld.mean.as_dict(),
            "kld_bound": finite(self.bound),
            "kld_percentiles": {label: finite(value) for label, value in sums.kld_distribution().rows},
            "p_diff": sums.p_diff.mean.as_dict(),
            "p_diff_percentiles": {label: finite(value) for label, value in sums.p_diff_distribution().rows},
            "p_diff_rms": sums.rms_p_diff.as_dict(),
            "same_top_p": sums.same_top_p.as_dict(),
        }


def kld(
    model: str | Path | Model,
    base: str | Path | LogitsFile,
    *,
    n_ctx: int | None = None,
    n_batch: int = 2048,
    chunks: int | None = None,
    progress: Callable[[KldProgress], None] | None = None,
    **load: Unpack[EvaluationOptions],
) -> Kld:
    """Compare a model with base logits, which ``perplexity(save_logits=...)`` or llama-perplexity wrote.

    Args:
        model: path of a GGUF file, loaded with the options ``load`` (those of quantkit.load), or a loaded model.
        n_ctx: only checked against that of the base; ``chunks``: how many of its chunks to use.

    Raises:
        FormatError: the base is broken or cut short. QuantkitError: it belongs to another vocabulary or context.
    """
    started = working_seconds()
    file = base if not isinstance(base, (str, Path)) else open_logits(base)
    text = file.chunks
    n = _chunks_to_do(file, chunks)
    if n_ctx is not None and n_ctx != text.n_ctx:
        raise RecipeError(f"{file.path} has chunks of {text.n_ctx} tokens, not {n_ctx}: leave -c out")
    nodes, own = without_nodes(load)
    if nodes is not None and not isinstance(model, (str, Path)):
        raise RecipeError("a cluster runs models from files: name one")
    with opened(model, text.n_ctx, own) as loaded:
        if loaded.n_vocab != text.n_vocab:
            raise QuantkitError(
                f"{file.path} was computed with a vocabulary of {text.n_vocab} tokens, {loaded.path} has"
                f" {loaded.n_vocab}: these are not the same model"
            )
        run, windows = _Run(file, n, progress), text.tokens[:n]
        there = None if nodes is None else There.of(loaded.path, nodes, own)
        ids, threads = windows.reshape(-1), load.get("threads")
        n_seq, bos, notes = score_text(
            loaded, None, ids, windows, text.first, run, n_batch=n_batch, threads=threads, there=there
        )
        path = Path(loaded.path)
    of = file.model if isinstance(file, CompactLogits) else ""
    took = working_seconds() - started
    return Kld(path, file.path, file.description, of, text.n_ctx, n, text.n_chunks, n_seq, bos, run.sums, took, notes)


def _chunks_to_do(file: LogitsFile, chunks: int | None) -> int:
    n = file.chunks.n_chunks if chunks is None else min(chunks, file.chunks.n_chunks)
    if n > file.n_whole:
        raise FormatError(
            f"{file.path}: only {file.n_whole} of its {file.chunks.n_chunks} chunks are whole: it was truncated; write"
            f" it again, or use --chunks {file.n_whole}"
        )
    return n


class _Compared:
    """Compares windows with a base."""

    def __init__(self, base: LogitsFile) -> None:
        self.base = base
        self.parts: dict[int, dict[int, Scores]] = {}

    def score(self, window: int, row: int, logits: F32, following: I32) -> None:
        if isinstance(self.base, CompactLogits):
            scores = compare_with_compact(logits, self.base.rows(window, row, row + len(logits)), following)
        else:
            scores = compare_with_llama(logits, self.base.rows(window, row, row + len(logits)), following)
        self.parts.setdefault(window, {})[row] = scores

    def take(self, window: int) -> Scores:
        """Return what a window came to."""
        parts = self.parts.pop(window)
        columns = zip(*(parts[row] for row in sorted(parts)), strict=True)
        return Scores(*map(np.concatenate, columns))


@dataclass(frozen=True)
class _Base:
    """A base that nodes open: where it lies, and what tells it from others."""

    path: Path
    nbytes: int
    tokens: bytes

    @classmethod
    def of(cls, file: LogitsFile) -> _Base:
        """Return an open file as others can find it."""
        tokens = hashlib.sha256(file.chunks.tokens.tobytes()).digest()
        return cls(Path(file.path).absolute(), Path(file.path).stat().st_size, tokens)

    def __call__(self) -> _Compared:
        try:
            file = open_logits(self.path)
        except (OSError, FormatError) as e:
            raise Refused(f"{self.path} cannot be read there: {e}") from None
        if _Base.of(file) != self:
            raise Refused(f"{self.path} is not the same file there: an older one, or another")
        return _Compared(file)


class _Run:
    """Scores rows against the base and collects chunks in order."""

    def __init__(self, base: LogitsFile, n: int, progress: Callable[[KldProgress], None] | None) -> None:
        self.base, self.n, self.progress = base, n, progress
        self._compared = _Compared(base)
        self.score = self._compared.score
        self.sums = KldSums()

    @property
    def scorer(self) -> Callable[[], _Compared]:
        return _Base.of(self.base)

    def done(self, begin: int, end: int) -> None:
        for window in range(begin, end):
            self.add(window, self._compared.take(window))

    def add(self, window: int, scores: Scores) -> None:
        """Count a window's scores."""
        self.sums.add(scores)
        if self.progress is not None:
            self.progress(KldProgress(window + 1, self.n, self.sums))

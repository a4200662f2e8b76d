"""KL divergence of a model from a base: llama-perplexity --kl-divergence, on base logits of either kind.

The tokens come from the base file. Each scored position has one divergence sum(p log(p / q)) of the model's prediction
q from the base's p; five scalars are kept per position. With llama.cpp's base, the sum omits tokens with log p <= -16,
as llama.cpp does; with quantkit's format, tokens missing from the file are estimated, with a bound on the error.

Another vocabulary or a truncated file, which llama.cpp accepts, is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from quantkit.activations import EXACT, RUNTIME
from quantkit.arguments import checked
from quantkit.cluster import NodeRefusal
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.evaluate.on_nodes import NodeModel, nodes_and_activations
from quantkit.evaluate.passes import F32, I32, EvaluationOptions, Model, activations_of, loaded_model
from quantkit.evaluate.scores import compare_with_compact, compare_with_llama
from quantkit.evaluate.scoring import score_text
from quantkit.evaluate.statistics import Estimate, KldSums, Scores, finite
from quantkit.formats.logits import CompactLogits, LogitsFile, open_logits
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.kernels.first_run import working_seconds


class KldProgress(NamedTuple):
    """Progress after a chunk: chunks done, chunks in total, statistics so far."""

    current: int
    total: int
    sums: KldSums

    @property
    def text(self) -> str:
        return f"KL divergence {self.sums.kld.mean.text(5)}"


@dataclass(frozen=True)
class Kld(HtmlTable):
    """Result of ``kld``. mean: the mean KL divergence, in nats per token, with its standard error.

    ``sums`` has all other statistics. bound: of the error of the mean divergence (0 with llama.cpp's base).
    """

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
    activations: str = RUNTIME
    base_activations: str = RUNTIME

    @property
    def mean(self) -> Estimate:
        return self.sums.kld.mean

    @property
    def bound(self) -> float:
        return self.sums.bound / self.sums.n

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``quantkit kld --json`` writes."""
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
            "activations": self.activations,
            "base_activations": self.base_activations,
            "seconds": self.seconds,
            "notes": list(self.notes),
            **statistics_dict(sums),
        }

    def as_table(self) -> Table:
        """Return the statistics, with standard errors; divergences in nats per token, probabilities as shares."""
        sums = self.sums
        estimates = {
            "mean KL divergence": sums.kld.mean,
            "perplexity": sums.nll.ppl,
            "perplexity of the base": sums.nll_base.ppl,
            "perplexity / base's": sums.ratio,
            "root mean square of dp": sums.rms_p_diff,
            "same top token": sums.same_top_p,
        }
        rows: list[tuple[str, float, float | None]] = [(name, *estimate) for name, estimate in estimates.items()]
        rows += [(f"KL divergence, {label}", value, None) for label, value in sums.kld_distribution().rows]
        caption = f"{self.model.name}: {sums.n:,} tokens scored, {self.n_chunks} chunks of {self.n_ctx}"
        return table_of("statistic, value, standard error", rows, caption)


def statistics_dict(sums: KldSums) -> dict[str, Any]:
    """Return the statistics of a comparison for JSON."""
    return {
        "ppl_q": sums.nll.ppl.as_dict(),
        "ppl_base": sums.nll_base.ppl.as_dict(),
        "correlation": finite(sums.correlation),
        "ln_ppl_ratio": sums.ln_ratio.as_dict(),
        "ppl_ratio": sums.ratio.as_dict(),
        "ppl_difference": sums.difference.as_dict(),
        "kld": sums.kld.mean.as_dict(),
        "kld_bound": finite(sums.bound / sums.n),
        "kld_percentiles": {label: finite(value) for label, value in sums.kld_distribution().rows},
        "p_diff": sums.p_diff.mean.as_dict(),
        "p_diff_percentiles": {label: finite(value) for label, value in sums.p_diff_distribution().rows},
        "p_diff_rms": sums.rms_p_diff.as_dict(),
        "same_top_p": sums.same_top_p.as_dict(),
    }


@checked
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
    """Return statistics of a model against base logits, from ``perplexity(save_logits=...)`` or llama-perplexity.

    Args:
        model: path of a GGUF file, loaded with the options ``load`` (those of quantkit.load), or a loaded model.
            ``activations`` are exact by default; on GPUs, which cannot, those of the runtime.
        n_ctx: if given, must equal that of the base. chunks: the number of its chunks to use; None: all.

    Raises:
        FormatError: the base is damaged or truncated.
        QuantkitError: it has another vocabulary or context.
    """
    start = working_seconds()
    file = base if not isinstance(base, (str, Path)) else open_logits(base)
    text = file.chunks
    n = _chunks_to_do(file, chunks)
    if n_ctx is not None and n_ctx != text.n_ctx:
        raise RecipeError(f"{file.path} has chunks of {text.n_ctx} tokens, not {n_ctx}: omit -c", "QK-E203")
    nodes, load_options, mode_notes = nodes_and_activations(model, load, EXACT)
    if nodes is not None and not isinstance(model, (str, Path)):
        raise RecipeError("with --ray, models must be files: give a path", "QK-E210")
    with loaded_model(model, text.n_ctx, load_options) as loaded:
        if loaded.n_vocab != text.n_vocab:
            raise QuantkitError(
                f"{file.path} was computed with a vocabulary of {text.n_vocab} tokens, {loaded.path} has "
                f"{loaded.n_vocab}: use base logits of the same model",
                "QK-E207",
            )
        run, windows = _KldRun(file, n, progress), text.tokens[:n]
        node_model = None if nodes is None else NodeModel.from_path(loaded.path, nodes, load_options)
        ids, threads = windows.reshape(-1), load.get("threads")
        n_seq, bos, notes = score_text(
            loaded, None, ids, windows, text.first, run, n_batch=n_batch, threads=threads, node_model=node_model
        )
        path, activations = locate(loaded.path), activations_of(loaded)
    base_model = file.model if isinstance(file, CompactLogits) else ""
    seconds = working_seconds() - start
    return Kld(
        path,
        file.path,
        file.description,
        base_model,
        text.n_ctx,
        n,
        text.n_chunks,
        n_seq,
        bos,
        run.sums,
        seconds,
        (*mode_notes, *_note_base(file, activations), *notes),
        activations,
        file.activations,
    )


def _note_base(base: LogitsFile, activations: str) -> list[str]:
    """Return a note on base logits whose activations are rounded otherwise than the model's."""
    if base.activations == activations:
        return []
    if activations == EXACT:
        return [
            f"{base.path} was computed with activations rounded as by the runtime, to BF16 for BF16 weights: the "
            "divergence includes that; quantkit perplexity --save-all-logits writes exact base logits"
        ]
    return [f"{base.path} was computed with exact activations: the divergence includes the rounding of the model's"]


def _chunks_to_do(file: LogitsFile, chunks: int | None) -> int:
    n = file.chunks.n_chunks if chunks is None else min(chunks, file.chunks.n_chunks)
    if n > file.n_whole:
        raise FormatError(
            f"{file.path}: truncated: only {file.n_whole} of {file.chunks.n_chunks} chunks are complete; write it "
            f"again, or use --chunks {file.n_whole}",
            "QK-E103",
        )
    return n


class _Comparison:
    """Comparison of windows with a base."""

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
        """Return and remove the scores of a window."""
        parts = self.parts.pop(window)
        columns = zip(*(parts[row] for row in sorted(parts)), strict=True)
        return Scores(*map(np.concatenate, columns))


@dataclass(frozen=True)
class _BaseFile:
    """A base file for nodes: its path, size and digest of its tokens."""

    path: Path
    nbytes: int
    tokens: bytes

    @classmethod
    def from_file(cls, file: LogitsFile) -> _BaseFile:
        """Return the reference of an open file."""
        tokens = hashlib.sha256(file.chunks.tokens.tobytes()).digest()
        return cls(locate(file.path).absolute(), locate(file.path).stat().st_size, tokens)

    def __call__(self) -> _Comparison:
        try:
            file = open_logits(self.path)
        except (OSError, FormatError) as e:
            raise NodeRefusal(f"{self.path} cannot be read on this node: {e}") from None
        if _BaseFile.from_file(file) != self:
            raise NodeRefusal(f"{self.path} is another file on this node, or an older version")
        return _Comparison(file)


class _KldRun:
    """A run of ``kld``: scores rows against the base and collects chunks in order."""

    def __init__(self, base: LogitsFile, n: int, progress: Callable[[KldProgress], None] | None) -> None:
        self.base = base
        self.n = n
        self.progress = progress
        self._comparison = _Comparison(base)
        self.score = self._comparison.score
        self.sums = KldSums()

    @property
    def scorer(self) -> Callable[[], _Comparison]:
        return _BaseFile.from_file(self.base)

    def finish(self, begin: int, end: int) -> None:
        for window in range(begin, end):
            self.add(window, self._comparison.take(window))

    def add(self, window: int, scores: Scores) -> None:
        """Add the scores of a window."""
        self.sums.add(scores)
        if self.progress is not None:
            self.progress(KldProgress(window + 1, self.n, self.sums))

"""Divergence of several models from a base, in one run: the base is computed once for all of them.

Windows are taken in rounds. In each the base runs first, and its logits stay in memory, f32, those of as many windows
as ``base_bytes`` hold. Then every model runs over the round's windows. One model is open at a time: memory has the
weights and the cache of one (525 MiB for five files of SmolLM2 135M, 1,467 MiB if all are open), and a file is read
once per round. Models that take turns within a batch would each read all of their weights for every batch. With a
vocabulary of 150,000, a round has 3,600 tokens in chunks of 512: opening a file is nothing beside it.

If a single window does not fit (of more than 3,600 tokens with such a vocabulary), all are kept in the compact form
(``formats/logits/compact.py``), and a note says so. Otherwise divergences are exact up to float32.

With ``until``, windows are drawn at random, and the run ends as soon as the interval of each model's mean divergence is
narrow enough (``intervals``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from quantkit.activations import EXACT
from quantkit.arguments import checked
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate.base_rows import MOST_ROW_BYTES, TOP_K, MostProbableRows, WholeRows
from quantkit.evaluate.comparison import Comparison, ModelDivergence, Stop
from quantkit.evaluate.intervals import ChunkMean, alpha_of_look, chunk_mean, looks
from quantkit.evaluate.passes import (
    F32,
    I32,
    EvaluationOptions,
    LoadOptions,
    Model,
    Window,
    bos_of,
    choose_activations,
    loaded_model,
    note_calibration,
    note_context,
    run_windows,
)
from quantkit.evaluate.statistics import KldSums, Scores
from quantkit.evaluate.texts import Text, Texts, position_ranges, read_texts, with_bos
from quantkit.formats.gguf import open_model
from quantkit.formats.remote import locate
from quantkit.kernels.first_run import working_seconds
from quantkit.units import format_size

I64 = npt.NDArray[np.int64]

#: Default of the bytes of base logits in memory.
BASE_BYTES = 1 << 30


class ComparisonProgress(NamedTuple):
    """Progress after a window: windows done and in total, of all models and the base; the model that runs."""

    current: int
    total: int
    model: str


@checked
def compare_models(
    base: str | Path,
    models: Sequence[str | Path],
    texts: Texts,
    *,
    n_ctx: int = 512,
    n_batch: int = 2048,
    chunks: int | None = None,
    by_position: bool = False,
    until: float | None = None,
    seed: int = 0,
    base_bytes: int = BASE_BYTES,
    progress: Callable[[ComparisonProgress], None] | None = None,
    **load: Unpack[EvaluationOptions],
) -> Comparison:
    """Return the divergences of models from a base model on texts.

    Args:
        base: path of the base model, a GGUF file. models: paths of the models, with the same vocabulary.
        n_ctx: tokens of a chunk, and most tokens of a conversation.
        n_batch: tokens of a pass.
        chunks: chunks or conversations of each text; None: all.
        by_position: evaluate every position of a chunk and add statistics of ranges of positions. The others remain
            those of the second half.
        until: stop when each model's interval is within this share of its mean divergence on each side.
        seed: of the order of windows with ``until``.
        base_bytes: memory for logits of the base.
        load: options of quantkit.load, for all models; ``activations`` are exact by default, on GPUs the runtime's.

    Raises:
        QuantkitError: a model has another vocabulary, or a text is too short.
    """
    start = working_seconds()
    if load.get("nodes") is not None:
        raise RecipeError("--ray computes one model: write base logits with perplexity --save-all-logits", "QK-E210")
    if not models:
        raise RecipeError("give at least one model to compare with the base", "QK-E201")
    if until is not None and not 0 < until < 1:
        raise RecipeError(f"--until {until}: give a share above 0 and below 1, such as 2%", "QK-E203")
    options, notes = choose_activations(_load_options(load), EXACT)
    run = _Run(locate(base), [locate(model) for model in models], options, n_ctx, n_batch, base_bytes)
    run.read(texts, chunks, notes, all_positions=by_position)
    notes += run.form_notes()
    order = np.arange(len(run.windows))
    if until is not None:
        order = np.random.default_rng(seed).permutation(order)
    sizes = looks(len(order), max(1, n_batch // n_ctx))
    ends = (len(order),) if until is None else sizes
    is_met = False
    for begin, end in _rounds(ends, run.windows_per_round):
        run.compute(order[begin:end], begin, notes, progress)
        if until is not None and end in ends and run.is_narrow(until, alpha_of_look(len(ends))):
            is_met = True
            break
    sizes_of_texts = [sum(run.text_of[i] == t for i in order[:end]) for t in range(len(run.texts))]
    return Comparison(
        run.base,
        tuple(sums.result() for sums in run.sums),
        tuple((text.name, int(n)) for text, n in zip(run.texts, sizes_of_texts, strict=True)),
        n_ctx,
        end,
        run.bos,
        options["activations"],
        None if until is None else Stop(until, ends, is_met),
        working_seconds() - start,
        tuple(dict.fromkeys(notes)),
    )


def _load_options(load: EvaluationOptions) -> LoadOptions:
    options = load.copy()
    options.pop("nodes", None)
    return options


def _rounds(ends: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield first and end of rounds of at most ``most`` windows, one of which ends at each of ``ends``."""
    begin = 0
    for end in ends:
        while begin < end:
            yield begin, (begin := min(end, begin + most))


class _Run:
    """The state of a comparison: the texts, and the sums of every model."""

    def __init__(
        self, base: Path, models: Sequence[Path], options: LoadOptions, n_ctx: int, n_batch: int, base_bytes: int
    ) -> None:
        self.base, self.options, self.n_ctx, self.n_batch, self.base_bytes = base, options, n_ctx, n_batch, base_bytes
        self.models = models
        self.bos: int | None = None
        self.n_vocab = 0
        self.texts: list[Text] = []
        self.windows: list[Window] = []
        self.text_of: list[int] = []
        self.sums: list[_ModelSums] = []
        self.n_finished = 0

    def read(self, texts: Texts, chunks: int | None, notes: list[str], *, all_positions: bool) -> None:
        """Read the texts with the base's tokenizer."""
        with loaded_model(self.base, self.n_ctx, self.options) as model:
            self.n_vocab = model.n_vocab
            self.texts = read_texts(texts, model, self.n_ctx, chunks, notes, all_positions=all_positions)
            self.bos = bos_of(model, notes)
        for number, text in enumerate(self.texts):
            for window in text.windows:
                self.windows.append(with_bos(window, text, self.bos))
                self.text_of.append(number)
        self.sums = [_ModelSums(path, self, all_positions=all_positions) for path in self.models]

    @property
    def _most_rows(self) -> int:
        return max(window.rows for window in self.windows)

    @property
    def is_whole(self) -> bool:
        """Whether the logits of any single window fit."""
        return 4 * self.n_vocab * self._most_rows <= self.base_bytes

    @property
    def windows_per_round(self) -> int:
        """Windows of which the base's predictions fit, whole passes if possible."""
        row_bytes = 4 * self.n_vocab if self.is_whole else MOST_ROW_BYTES
        n = max(1, self.base_bytes // (self._most_rows * row_bytes))
        n_pass = max(1, self.n_batch // self.n_ctx)
        return n // n_pass * n_pass or n

    def form_notes(self) -> list[str]:
        """Return a note if the compact form is used."""
        if self.is_whole:
            return []
        size = format_size(4 * self.n_vocab * self._most_rows)
        return [
            f"the base's logits of a chunk of {self._most_rows} positions need {size}: the {TOP_K} most probable "
            "tokens of each position are kept, and the rest is estimated"
        ]

    def compute(
        self, numbers: I64, begin: int, notes: list[str], progress: Callable[[ComparisonProgress], None] | None
    ) -> None:
        """Evaluate windows, by number, with the base and then with every model."""
        windows = [self.windows[i] for i in numbers]
        base = WholeRows(windows, self.n_vocab) if self.is_whole else MostProbableRows()
        self._pass(self.base, windows, base, [] if begin else notes, progress)
        for sums in self.sums:
            scorer = _RoundScores(base, numbers, sums)
            self._pass(sums.path, windows, scorer, [] if begin else notes, progress)

    def _pass(
        self,
        path: Path,
        windows: Sequence[Window],
        scorer: WholeRows | MostProbableRows | _RoundScores,
        notes: list[str],
        progress: Callable[[ComparisonProgress], None] | None,
    ) -> None:
        with loaded_model(path, self.n_ctx, self.options) as model:
            if model.n_vocab != self.n_vocab:
                raise QuantkitError(
                    f"{path} has a vocabulary of {model.n_vocab} tokens, {self.base} one of {self.n_vocab}: compare "
                    "files of the same model",
                    "QK-E207",
                )
            notes += self._notes(model)

            def finish(begin: int, end: int) -> None:
                scorer.finish(begin, end)
                self.n_finished += end - begin
                if progress is not None:
                    total = len(self.windows) * (1 + len(self.models))
                    progress(ComparisonProgress(self.n_finished, total, path.name))

            threads = self.options.get("threads")
            run_windows(model, windows, scorer.score, finish, n_batch=self.n_batch, bos=None, threads=threads)

    def _notes(self, model: Model) -> list[str]:
        notes = list(model.notes)
        note_context(model, self.n_ctx, notes)
        for text in self.texts:
            note_calibration(model, text.content, text.tokens, notes)
        return notes

    def is_narrow(self, share: float, alpha: float) -> bool:
        """Return whether the interval of every model's mean divergence is within ``share`` of it on each side."""
        means = [sums.mean for sums in self.sums]
        return all(mean.half_width(alpha) <= share * mean.value for mean in means)


class _RoundScores:
    """Scores of a model against the base's rows, added to its sums; numbers: those of the round's windows."""

    def __init__(self, base: WholeRows | MostProbableRows, numbers: I64, sums: _ModelSums) -> None:
        self.base, self.numbers, self.sums = base, numbers, sums
        self.parts: dict[int, dict[int, Scores]] = {}

    def score(self, window: int, row: int, logits: F32, following: I32) -> None:
        self.parts.setdefault(window, {})[row] = self.base.compare(window, row, logits, following)

    def finish(self, begin: int, end: int) -> None:
        for window in range(begin, end):
            parts = self.parts.pop(window)
            columns = zip(*(parts[row] for row in sorted(parts)), strict=True)
            self.sums.add(int(self.numbers[window]), Scores._make(map(np.concatenate, columns)))


class _ModelSums:
    """Running sums of a model: all tokens, those of each text, those of each range of positions."""

    def __init__(self, path: Path, run: _Run, *, all_positions: bool) -> None:
        self.path, self.run = path, run
        with open_model(path) as file:
            self.nbytes = sum(p.stat().st_size for p in file.paths)
            tensors = list(file.tensors.values())
            values = sum(int(np.prod(t.shape)) for t in tensors)
            self.bpw = 8 * sum(t.nbytes for t in tensors) / max(1, values)
        self.sums = KldSums()
        self.by_text = [KldSums() for _ in run.texts]
        self.by_position = {part: KldSums() for part in position_ranges(run.n_ctx)} if all_positions else {}
        self.totals: list[float] = []
        self.counts: list[int] = []

    def add(self, number: int, scores: Scores) -> None:
        """Add the scores of the window ``number``."""
        text = self.run.text_of[number]
        positions = np.flatnonzero(self.run.windows[number].is_scored)
        selected = _select(scores, positions >= self.run.texts[text].first)
        self.sums.add(selected)
        self.by_text[text].add(selected)
        self.totals.append(float(selected.kld.sum()))
        self.counts.append(selected.kld.size)
        for (first, end), sums in self.by_position.items():
            is_inside = (positions >= first) & (positions < end)
            if is_inside.any():
                sums.add(_select(scores, is_inside))

    @property
    def mean(self) -> ChunkMean:
        return chunk_mean(np.array(self.totals), np.array(self.counts))

    def result(self) -> ModelDivergence:
        statistics = (self.sums, tuple(self.by_text), self.by_position)
        return ModelDivergence(
            self.path, self.nbytes, self.bpw, *statistics, np.array(self.totals), np.array(self.counts)
        )


def _select(scores: Scores, mask: npt.NDArray[np.bool_]) -> Scores:
    return scores if mask.all() else Scores._make(column[mask] for column in scores)

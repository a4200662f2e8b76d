"""KL divergence of a model on several texts, from a file of base logits of each, with a total."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from quantkit.activations import EXACT
from quantkit.arguments import checked
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate.divergence import Kld, KldProgress, kld, statistics_dict
from quantkit.evaluate.folder import list_texts
from quantkit.evaluate.passes import EvaluationOptions, LoadOptions, Model, choose_activations, loaded_model
from quantkit.evaluate.statistics import Estimate, KldSums
from quantkit.evaluate.texts import Text, Texts, read_texts
from quantkit.formats.logits import LogitsFile, open_logits
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.kernels.first_run import working_seconds
from quantkit.names import printable


@dataclass(frozen=True, eq=False)
class TextKlds(HtmlTable):
    """Result of ``kld_of_texts``: the divergences by name of the text, and the statistics of all tokens."""

    model: Path
    by_text: tuple[tuple[str, Kld], ...]
    sums: KldSums
    seconds: float
    notes: tuple[str, ...] = field(default=())

    @property
    def mean(self) -> Estimate:
        return self.sums.kld.mean

    @property
    def activations(self) -> str:
        """Those of the model."""
        return self.by_text[0][1].activations

    def as_table(self) -> Table:
        """Return a row per text, and the total: tokens, divergence and its error, ratio of perplexities, ..."""
        header = "text, tokens, KL divergence, standard error, PPL ratio, same top token, 99 % below"
        parts = (*((name, part.sums) for name, part in self.by_text), ("total", self.sums))
        rows = [
            (name, s.n, *s.kld.mean, s.ratio.value, s.same_top_p.value, s.kld_distribution()["99.0%"])
            for name, s in parts
        ]
        return table_of(header, rows, self.model.name)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``quantkit kld --json`` writes for several base files."""
        return {
            "model": str(self.model),
            "activations": self.activations,
            "n_scored": self.sums.n,
            "seconds": self.seconds,
            "notes": list(self.notes),
            **statistics_dict(self.sums),
            "by_text": [{"name": name, **part.as_dict()} for name, part in self.by_text],
        }


@checked
def kld_of_texts(
    model: str | Path,
    bases: Sequence[str | Path],
    texts: Texts | None = None,
    *,
    n_ctx: int | None = None,
    n_batch: int = 2048,
    chunks: int | None = None,
    progress: Callable[[KldProgress], None] | None = None,
    **load: Unpack[EvaluationOptions],
) -> TextKlds:
    """Return the divergence of a model from each of several base files, and that of all their tokens.

    Args:
        model: path of a GGUF file, loaded once with the options ``load``; ``activations`` are exact by default.
        bases: files of base logits, each of one text.
        texts: the texts of the bases, in any order, which give the names; None: the names of the bases.
        n_ctx: if given, must equal that of every base. chunks: of each base; None: all.
        progress: as of ``kld``, with all chunks and tokens.

    Raises:
        FormatError: a base is damaged or truncated.
        QuantkitError: it has another vocabulary or context, or is not that of a text.
    """
    start = working_seconds()
    if not bases:
        raise RecipeError("give at least one file of base logits", "QK-E201")
    if texts is not None and texts.chat:
        raise RecipeError("--chat needs --base-model: base logits are of texts, not of conversations", "QK-E201")
    files = [open_logits(path) for path in bases]
    nodes = load.get("nodes")
    options, notes = choose_activations(_load_options(load), EXACT, nodes)
    run = _Progress([_chunks(file, chunks) for file in files], progress)
    parts = []
    with loaded_model(model, max(file.chunks.n_ctx for file in files), options) as loaded:
        names = [printable(str(file.path)) for file in files]
        if texts is not None:
            names = _text_names(files, _read(texts, loaded, min(file.chunks.n_ctx for file in files), notes))
        shared: EvaluationOptions = load if nodes is not None else {"threads": load.get("threads")}
        for file in files:
            part = kld(
                model if nodes is not None else loaded,
                file,
                n_ctx=n_ctx,
                n_batch=n_batch,
                chunks=chunks,
                progress=run.report,
                **shared,
            )
            run.finish(part.sums)
            parts.append(part)
            notes += part.notes
    by_text = tuple(zip(names, parts, strict=True))
    return TextKlds(locate(model), by_text, run.sums, working_seconds() - start, tuple(dict.fromkeys(notes)))


def _load_options(load: EvaluationOptions) -> LoadOptions:
    options = load.copy()
    options.pop("nodes", None)
    return options


def _read(texts: Texts, model: Model, n_ctx: int, notes: list[str]) -> list[Text]:
    """Return the texts, without the conversations of folders, of which there are no base logits."""
    files, chats = list_texts(texts.files, notes)
    notes += [f"{printable(str(path))}: not compared, because base logits are of texts" for path in chats]
    return read_texts(replace(texts, files=tuple(files)), model, n_ctx, None, notes, all_positions=False)


def _chunks(file: LogitsFile, chunks: int | None) -> int:
    return file.chunks.n_chunks if chunks is None else min(chunks, file.chunks.n_chunks)


class _Progress:
    """Progress and sums over all bases, from those of each."""

    def __init__(self, sizes: Sequence[int], report: Callable[[KldProgress], None] | None) -> None:
        self.total, self._report = sum(sizes), report
        self.sums, self._n_done, self._current = KldSums(), 0, 0

    def report(self, now: KldProgress) -> None:
        """Report the progress of a base."""
        self._current = now.current
        if self._report is not None:
            sums = KldSums()
            sums.merge(self.sums)
            sums.merge(now.sums)
            self._report(KldProgress(self._n_done + now.current, self.total, sums))

    def finish(self, sums: KldSums) -> None:
        """Add the sums of a base."""
        self.sums.merge(sums)
        self._n_done += self._current


def _text_names(files: Sequence[LogitsFile], texts: Sequence[Text]) -> list[str]:
    """Return the name of each base's text, the one with its tokens. Raises QuantkitError if there is none."""
    remaining = list(texts)
    names = []
    for file in files:
        tokens = file.chunks.tokens.ravel()
        text = next((t for t in remaining if np.array_equal(t.tokens[: tokens.size], tokens)), None)
        if text is None:
            raise QuantkitError(
                f"{file.path}: its tokens are not those of a text that is given: give the text that it was computed "
                "on with -f, or no text",
                "QK-E207",
            )
        remaining.remove(text)
        names.append(text.name)
    if remaining:
        raise QuantkitError(
            f"{remaining[0].name}: no base has its tokens: write one with perplexity --save-all-logits, or omit the "
            "text",
            "QK-E207",
        )
    return names

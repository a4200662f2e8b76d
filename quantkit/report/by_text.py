"""Divergence of files from the base on each of several texts, for a report."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.errors import RecipeError
from quantkit.evaluate import ComparisonProgress, KldSums, Texts, compare_models
from quantkit.evaluate.folder import list_texts
from quantkit.evaluate.passes import LoadOptions
from quantkit.formats.outputs import read_text
from quantkit.names import file_name, printable
from quantkit.report.data import File, Report, StepReport, TextQuality, digest_of


def list_report_texts(paths: Sequence[Path]) -> list[Path]:
    """Return the texts and conversations that paths name, files and folders. Raises RecipeError for equal names."""
    texts, chats = list_texts(paths, [])
    names = [path.name for path in (*texts, *chats)]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(
            f"two texts are named {duplicate}, and a report shows names without folders: rename one", "QK-E203"
        )
    return [*texts, *chats]


def measure_texts(
    report: Report,
    paths: Sequence[Path],
    base: Path | None,
    texts: Sequence[Path],
    load: LoadOptions,
    progress: StepReport,
    **settings: Any,
) -> Iterator[tuple[int, File]]:
    """Yield the number and the record of each file that is measured; those of an earlier run with equal keys are kept.

    settings: n_ctx, n_batch and chunks, as of ``compare_models``.

    Raises:
        RecipeError: there is no base, or two texts have the same name.
    """
    if not texts:
        return
    if base is None:
        raise RecipeError("--texts compares files with the base model: also give --base", "QK-E202")
    digests = [hashlib.sha256(read_text(path)).hexdigest() for path in list_report_texts(texts)]
    key = digest_of("texts", report.base_digest, digests, settings["n_ctx"], settings["chunks"], load["activations"])
    pending = [i for i, file in enumerate(report.files) if file.texts_key != key]
    if not pending:
        return

    def on_window(now: ComparisonProgress) -> None:
        progress("divergence by text", now.current, now.total)

    result = compare_models(
        base, [paths[i] for i in pending], Texts(files=tuple(texts)), progress=on_window, **settings, **load
    )
    names = [printable(file_name(name)) for name, _ in result.texts]
    for i, model in zip(pending, result.models, strict=True):
        qualities = tuple(_quality(name, sums) for name, sums in zip(names, model.by_text, strict=True))
        yield i, replace(report.files[i], by_text=qualities, texts_key=key)


def _quality(name: str, sums: KldSums) -> TextQuality:
    return TextQuality(name, sums.n, sums.kld.mean, sums.ratio, sums.same_top_p)

"""Accuracy of files and base on the same multiple-choice tasks, for a report."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from quantkit.activations import RUNTIME
from quantkit.errors import RecipeError
from quantkit.evaluate.passes import LoadOptions
from quantkit.formats.outputs import read_whole
from quantkit.names import printable
from quantkit.report.data import Base, File, Report, StepReport, TaskScore, digest_of
from quantkit.score import ScoreProgress, TaskScores, score

Model = TypeVar("Model", File, Base)


@dataclass(frozen=True)
class _Tasks:
    """A file of tasks: its name and bytes, the number of tasks to score, and how models are loaded."""

    name: str
    data: bytes
    n_tasks: int | None
    load: LoadOptions

    @cached_property
    def key(self) -> str:
        """The key of scores."""
        tasks = hashlib.sha256(self.data).hexdigest()
        return digest_of(tasks, self.n_tasks, self.load.get("activations", RUNTIME))

    def score(self, path: Path, name: str, progress: StepReport) -> TaskScores:
        """Return the answers of a model."""

        def on_pass(now: ScoreProgress) -> None:
            progress(f"{name}: {self.name}", now.current, now.total)

        return score(path, self.data, n_tasks=self.n_tasks, progress=on_pass, **self.load)

    def with_scores(self, model: Model, scores: TaskScores, base: TaskScores | None, base_digest: str) -> Model:
        """Return a model's record with its scores, in place of earlier ones on these tasks."""
        differences = scores.compare(base) if base is not None else {}
        records = [s for s in model.scores if s.tasks != self.name]
        for metric, accuracy in scores.accuracies.items():
            difference, mode = differences.get(metric), scores.activations
            records.append(TaskScore(self.name, scores.kind, metric, self.key, accuracy, difference, base_digest, mode))
        return replace(model, scores=tuple(records))


def measure_scores(
    report: Report,
    paths: Sequence[Path],
    base: Path | None,
    task_files: Sequence[Path],
    n_tasks: int | None,
    load: LoadOptions,
    progress: StepReport,
) -> Iterator[Report]:
    """Yield the report after each model that is scored; scores that it has are not measured again.

    Args:
        report: the numbers so far.
        paths: of its files.
        base: path of the base; None: scores without a difference.
        task_files: files of tasks, each with a name of its own.
        n_tasks: as in ``quantkit.score``.
        load: how models are loaded.

    Raises:
        RecipeError: two files of tasks have one name. FormatError: as ``quantkit.score``.
    """
    names = [path.name for path in task_files]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(f"--score: two files are named {duplicate}: rename one", "QK-E203")
    report = _without_stale_scores(report)
    yield report
    for path in task_files:
        tasks = _Tasks(printable(path.name), read_whole(path), n_tasks, load)
        pending = [i for i, f in enumerate(report.files) if all(s.key != tasks.key for s in f.scores)]
        base_scores = None
        if pending and base is not None and report.base is not None:
            base_scores = tasks.score(base, report.base.name, progress)
            report = replace(report, base=tasks.with_scores(report.base, base_scores, None, report.base_digest))
            yield report
        for i in pending:
            file = report.files[i]
            scores = tasks.score(paths[i], file.name, progress)
            file = tasks.with_scores(file, scores, base_scores, report.base_digest)
            report = replace(report, files=(*report.files[:i], file, *report.files[i + 1 :]))
            yield report


def _without_stale_scores(report: Report) -> Report:
    """Return a report without differences from another base."""
    files = (replace(f, scores=tuple(s for s in f.scores if s.base == report.base_digest)) for f in report.files)
    return replace(report, files=tuple(files))

"""``quantkit.score``: the answers of a model to multiple-choice tasks.

Scores are those of llama-perplexity --hellaswag, --winogrande and --multiple-choice: the same tasks in the same order,
and the choice with the largest mean log-likelihood of its scored tokens ("acc_norm"). Requests have the two metrics of
lm-evaluation-harness: "acc" by the sum, "acc_norm" by the sum over the characters of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Unpack, cast

import numpy as np
import numpy.typing as npt

from quantkit.activations import RUNTIME
from quantkit.arguments import checked
from quantkit.evaluate.passes import LoadOptions, loaded_model, note_context
from quantkit.formats.outputs import read_whole
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.kernels.first_run import working_seconds
from quantkit.model.engine import Model
from quantkit.score.accuracy import Accuracy, Bools, PairedAccuracy, accuracy_of, compare_accuracies
from quantkit.score.files import KINDS, Question, read_questions
from quantkit.score.likelihood import F64, log_likelihoods
from quantkit.score.order import select_tasks
from quantkit.score.tokens import Choice, choices_of

I64 = npt.NDArray[np.int64]


class ScoreProgress(NamedTuple):
    """Progress after a pass: tasks done, tasks in total, accuracy so far."""

    current: int
    total: int
    accuracy: Accuracy

    @property
    def text(self) -> str:
        return f"accuracy {100 * self.accuracy.value:.2f} %"


@dataclass(frozen=True, eq=False)
class TaskScores(HtmlTable):
    """Result of ``score``.

    Attributes:
        model: the path of the model.
        kind: the format of the tasks, a key of ``quantkit.score.files.KINDS``.
        numbers: int64 [n], the tasks in their order, by their place in the file.
        likelihoods: for each task the log-likelihoods of its choices, float64 [choices].
        answers: by metric ("acc", "acc_norm") the numbers of the answers, int64 [n].
        correct: by metric whether they are correct, bool [n].
        seconds: without the compilation of kernels.
        activations: "runtime" or "exact" (quantkit.activations).
    """

    model: Path
    kind: str
    n_in_file: int
    numbers: I64
    likelihoods: tuple[F64, ...]
    answers: dict[str, I64]
    correct: dict[str, Bools]
    seconds: float
    activations: str = RUNTIME
    notes: tuple[str, ...] = field(default=())

    @property
    def accuracies(self) -> dict[str, Accuracy]:
        """The accuracy by each metric."""
        return {metric: accuracy_of(correct) for metric, correct in self.correct.items()}

    def compare(self, base: TaskScores) -> dict[str, PairedAccuracy]:
        """Return by metric the paired difference from another model. Raises RecipeError if the tasks differ."""
        return {
            metric: compare_accuracies(base.correct[metric], correct, base.answers[metric], self.answers[metric])
            for metric, correct in self.correct.items()
        }

    def as_table(self) -> Table:
        """Return the accuracy by metric, with its 95 % interval."""
        rows = [(metric, a.value, *a.interval()) for metric, a in self.accuracies.items()]
        caption = f"{self.model.name}: {len(self.numbers):,} of {self.n_in_file:,} tasks, {KINDS[self.kind]}"
        return table_of("metric, accuracy, from, to", rows, caption)


@checked
def score(
    model: str | Path | Model,
    tasks: str | Path | bytes,
    *,
    kind: str | None = None,
    n_tasks: int | None = None,
    n_batch: int = 2048,
    progress: Callable[[ScoreProgress], None] | None = None,
    **load: Unpack[LoadOptions],
) -> TaskScores:
    """Return a model's answers to multiple-choice tasks.

    Activations are those of llama.cpp, unless ``load`` has activations="exact".

    Args:
        model: path of a GGUF file, loaded with the options ``load`` (those of quantkit.load), or a loaded model.
        tasks: a file of tasks, or its bytes.
        kind: hellaswag, winogrande, multiple-choice or requests; None: by the contents.
        n_tasks: the number of tasks, selected as by llama-perplexity; 0: all; None: its default, 400 of HellaSwag and
            all others.
        n_batch: tokens of a pass, of at least one task.

    Raises:
        FormatError: a task is malformed, or the model has no tokenizer. Errors of ``quantkit.load``.
    """
    start = working_seconds()
    name = "tasks" if isinstance(tasks, bytes) else str(tasks)
    file = read_questions(tasks if isinstance(tasks, bytes) else read_whole(tasks), name, kind)
    numbers = select_tasks(file.kind, len(file.questions), n_tasks)
    questions = [file.questions[i] for i in numbers]
    with loaded_model(model, None, load) as opened:
        loaded = cast(Model, opened)
        notes = [*loaded.notes, *file.notes]
        choices = [choices_of(file.kind, q, loaded.tokenizer, name) for q in questions]
        note_context(loaded, max(len(choice.tokens) for task in choices for choice in task), notes)

        n_correct = 0

        def report(begin: int, end: int, sums: F64) -> None:
            nonlocal n_correct
            answers = _answers(file.kind, choices[begin:end], sums)["acc_norm"]
            n_correct += int(_correct(questions[begin:end], answers).sum())
            if progress is not None:
                progress(ScoreProgress(end, len(questions), Accuracy(n_correct, end)))

        sums = log_likelihoods(loaded, choices, n_batch=n_batch, threads=load.get("threads"), progress=report)
        path, activations = loaded.path, loaded.activations
    answers = _answers(file.kind, choices, sums)
    return TaskScores(
        model=path,
        kind=file.kind,
        n_in_file=len(file.questions),
        numbers=np.array([q.number for q in questions], np.int64),
        likelihoods=tuple(_by_task(choices, sums)),
        answers=answers,
        correct={metric: _correct(questions, rows) for metric, rows in answers.items()},
        seconds=working_seconds() - start,
        activations=activations,
        notes=tuple(notes),
    )


def _by_task(tasks: Sequence[Sequence[Choice]], values: F64) -> list[F64]:
    """Return the values of the choices of each task."""
    return np.split(values, np.cumsum([len(task) for task in tasks])[:-1])


def _answers(kind: str, tasks: Sequence[Sequence[Choice]], sums: F64) -> dict[str, I64]:
    """Return by metric the number of the best choice of each task, int64 [n]."""
    divisors = np.array([choice.divisor for task in tasks for choice in task])
    metrics = {"acc": sums, "acc_norm": sums / divisors} if kind == "requests" else {"acc_norm": sums / divisors}
    best = _last_best if kind == "winogrande" else np.argmax
    return {name: np.array([best(row) for row in _by_task(tasks, values)]) for name, values in metrics.items()}


def _last_best(values: F64) -> int:
    """Return the number of the largest value; of equal ones the last, as llama-perplexity's WinoGrande does."""
    return len(values) - 1 - int(np.argmax(values[::-1]))


def _correct(questions: Sequence[Question], answers: I64) -> Bools:
    """Return whether answers to the first questions are correct, bool [n]."""
    return np.array([answer in q.answers for answer, q in zip(answers.tolist(), questions, strict=False)], bool)

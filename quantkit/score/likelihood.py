"""Log-likelihoods of choices: the tokens that the choices of a task share are evaluated once.

A pass has as many tasks as its tokens allow, a sequence each. All prompts are evaluated together, then the first
choices of all tasks, which are removed from the sequences, then the second choices, and so on. Models whose layers have
a state cannot remove tokens: there, and where tokens attend to later ones, each choice is a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.cpus import available_cpus
from quantkit.evaluate.passes import F32, I32
from quantkit.evaluate.scores import TILE, softmax
from quantkit.model.engine import Model, Session
from quantkit.score.tokens import Choice, common_prefix

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Sequence:
    """Tokens that share a beginning: ``prefix`` int32 [n], then each of ``suffixes`` int32 [m].

    ``predictions`` are those of the prefix, and of each suffix: rows (position, token, choice). The token is predicted
    at this position of the sequence, for the choice of this number.
    """

    prefix: I32
    suffixes: tuple[I32, ...]
    predictions: tuple[I32, ...]


def log_likelihoods(
    model: Model,
    tasks: Sequence[Sequence[Choice]],
    *,
    n_batch: int,
    threads: int | None = None,
    progress: Callable[[int, int, F64], None] | None = None,
) -> F64:
    """Return the sum of the log-likelihoods of the scored tokens of all choices, float64 [choices of all tasks].

    Args:
        model: a loaded model.
        tasks: the choices of each task.
        n_batch: tokens of a pass, of at least one task.
        threads: of the softmax; None: all available CPUs.
        progress: called after a pass with the range of its tasks, begin and end, and the sums of their choices.
    """
    shares_prompts = not model.graph.states and not model.is_bidirectional
    starts = np.concatenate([[0], np.cumsum([len(task) for task in tasks])]).tolist()
    sums = np.zeros(starts[-1])
    longest = max(len(choice.tokens) for task in tasks for choice in task)
    sequences = [_sequences(task, start, shares_prompts) for task, start in zip(tasks, starts, strict=False)]
    n_seq = max(1, n_batch // longest, *map(len, sequences))
    session = model.session(longest, min(n_seq, sum(map(len, sequences))))
    with ThreadPoolExecutor(threads or available_cpus()) as pool:
        begin = 0
        for end, group in _groups(sequences, n_seq):
            _run(session, group, _Sums(pool, sums))
            if progress is not None:
                progress(begin, end, sums[starts[begin] : starts[end]])
            begin = end
    return sums


def _sequences(task: Sequence[Choice], start: int, shares_prompts: bool) -> list[_Sequence]:
    """Return the sequences of a task, whose choices are numbered from ``start``."""
    predictions = [_predictions(task, i, start) for i in range(len(task))]
    if not shares_prompts:
        prefix, no_predictions = np.empty(0, np.int32), np.empty((0, 3), np.int32)
        return [
            _Sequence(prefix, (_trim(choice.tokens, rows),), (no_predictions, rows))
            for choice, rows in zip(task, predictions, strict=True)
        ]
    n = min(common_prefix([choice.tokens for choice in task]), min(choice.first for choice in task))
    in_prefix = [rows[:, 0] < n for rows in predictions]
    of_prefix = np.concatenate([rows[mask] for rows, mask in zip(predictions, in_prefix, strict=True)])
    of_suffixes = [rows[~mask] for rows, mask in zip(predictions, in_prefix, strict=True)]
    suffixes = tuple(_trim(c.tokens, rows)[n:] for c, rows in zip(task, of_suffixes, strict=True))
    return [_Sequence(task[0].tokens[:n], suffixes, (of_prefix, *of_suffixes))]


def _predictions(task: Sequence[Choice], i: int, start: int) -> I32:
    """Return the predictions in the tokens of a choice, int32 [n, 3], in the order of positions."""
    choice = task[i]
    first = choice.first if choice.predictor is None else choice.first + 1
    rows = [(k - 1, int(choice.tokens[k]), start + i) for k in range(first, choice.end)]
    last = len(choice.tokens) - 1
    rows += [(last, int(c.tokens[c.first]), start + j) for j, c in enumerate(task) if c.predictor == i]
    return np.array(rows, np.int32).reshape(-1, 3)


def _trim(tokens: I32, predictions: I32) -> I32:
    """Return tokens without those after the last prediction."""
    return tokens[: int(predictions[:, 0].max(initial=-1)) + 1]


def _groups(sequences: Sequence[list[_Sequence]], n_seq: int) -> Iterator[tuple[int, list[_Sequence]]]:
    """Yield the sequences of passes, at most ``n_seq`` of whole tasks each, with the number of tasks so far."""
    group: list[_Sequence] = []
    for i, task in enumerate(sequences):
        if group and len(group) + len(task) > n_seq:
            yield i, group
            group = []
        group = [*group, *task]
    yield len(sequences), group


def _run(session: Session, group: Sequence[_Sequence], sums: _Sums) -> None:
    """Evaluate the sequences of a pass."""
    session.clear()
    _decode(session, [(i, 0, s.prefix, s.predictions[0]) for i, s in enumerate(group)], sums)
    for k in range(max(len(s.suffixes) for s in group)):
        parts = [
            (i, len(s.prefix), s.suffixes[k], s.predictions[k + 1]) for i, s in enumerate(group) if k < len(s.suffixes)
        ]
        _decode(session, parts, sums)
        for i, length, _, _ in parts:
            session.rewind(i, length)


def _decode(session: Session, parts: Sequence[tuple[int, int, I32, I32]], sums: _Sums) -> None:
    """Append tokens to sequences: (number of the sequence, its length, the tokens, their predictions)."""
    parts = [part for part in parts if len(part[2])]
    if not parts:
        return
    tokens = np.concatenate([part[2] for part in parts])
    numbers = np.repeat(np.array([part[0] for part in parts], np.int32), [len(part[2]) for part in parts])
    starts = np.cumsum([0, *(len(part[2]) for part in parts[:-1])])
    offsets = [start - length for start, (_, length, _, _) in zip(starts, parts, strict=True)]
    predictions = np.concatenate(
        [p + np.array([offset, 0, 0]) for offset, (_, _, _, p) in zip(offsets, parts, strict=True)]
    )
    outputs = np.zeros(len(tokens), bool)
    outputs[predictions[:, 0]] = True
    if not outputs.any():
        session.decode(tokens, numbers, outputs)
        return
    # The rows of logits are those of the outputs.
    row_of = np.cumsum(outputs) - 1
    sums.expect(row_of[predictions[:, 0]], predictions[:, 1], predictions[:, 2])
    session.decode(tokens, numbers, outputs, consume=sums.consume)
    sums.add()


class _Sums:
    """Adds the log-likelihoods of predictions to the sums of their choices, float64 [choices]."""

    def __init__(self, pool: ThreadPoolExecutor, sums: F64) -> None:
        self.pool, self.sums = pool, sums

    def expect(self, rows: npt.NDArray[np.int64], tokens: I32, choices: I32) -> None:
        """Set the predictions of the next blocks: the row of logits, the token and the choice of each, [n]."""
        order = np.argsort(rows, kind="stable")
        self.rows, self.tokens, self.choices = rows[order], tokens[order], choices[order]
        self.nll = np.empty(len(rows))

    def consume(self, index: int, logits: F32) -> None:
        """Score a block of logits, f32 [k, n_vocab], whose first row is the output ``index``."""
        step = max(1, TILE // logits.shape[1])
        jobs = [
            self.pool.submit(self._score, index + start, logits[start : start + step])
            for start in range(0, len(logits), step)
        ]
        # The engine reuses the block after the return, so wait for all jobs, failed ones included.
        wait(jobs)
        for job in jobs:
            job.result()

    def _score(self, begin: int, logits: F32) -> None:
        part = slice(*np.searchsorted(self.rows, [begin, begin + len(logits)]).tolist())
        rows = self.rows[part] - begin
        parts = softmax(logits)
        log_total = parts.log_total[rows]
        self.nll[part] = log_total - (logits[rows, self.tokens[part]] - parts.top[rows])

    def add(self) -> None:
        """Add the scores of all predictions that were set."""
        np.subtract.at(self.sums, self.choices, self.nll)

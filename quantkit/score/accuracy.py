"""Accuracy on tasks, and the paired difference of two models that answer the same ones.

Intervals are of 95 %. That of an accuracy is Wilson's (J. Am. Stat. Assoc. 22, 1927), as llama-perplexity prints it;
that of a difference is the adjusted Wald interval of Agresti and Min (Stat. Med. 24, 2005), which adds 0.5 to each
cell. McNemar's test is exact (two-sided binomial). The required number of tasks follows Connor (Biometrics 43, 1987),
for a significance level of 5 % and a power of 80 %.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.errors import RecipeError

Bools = npt.NDArray[np.bool_]

#: Quantiles of the normal distribution: two-sided 95 %, a power of 80 %.
Z_95, _Z_POWER = 1.95996398454, 0.8416212336


class Accuracy(NamedTuple):
    """The number of tasks with a correct answer, and of all tasks."""

    n_correct: int
    n: int

    @property
    def value(self) -> float:
        return self.n_correct / self.n

    def interval(self) -> tuple[float, float]:
        """Return the ends of the 95 % interval."""
        p, z = self.value, Z_95 * Z_95 / self.n
        half = z * math.sqrt(self.n * (4 * p * (1 - p) + z)) / (2 * Z_95)
        return (p + z / 2 - half) / (1 + z), (p + z / 2 + half) / (1 + z)


class PairedAccuracy(NamedTuple):
    """Two models on the same ``n`` tasks.

    ``gains`` and ``losses`` are the tasks that only the second and only the first answers correctly, ``changes`` those
    with another answer, correct or not.
    """

    n: int
    gains: int
    losses: int
    changes: int

    @property
    def flips(self) -> int:
        """Tasks whose answer turns correct or wrong."""
        return self.gains + self.losses

    @property
    def difference(self) -> float:
        """The difference of the accuracies."""
        return (self.gains - self.losses) / self.n

    def interval(self) -> tuple[float, float]:
        """Return the ends of the 95 % interval of the difference."""
        n, gains, losses = self.n + 2, self.gains + 0.5, self.losses + 0.5
        difference = (gains - losses) / n
        half = Z_95 * math.sqrt(gains + losses - (gains - losses) ** 2 / n) / n
        return max(-1.0, difference - half), min(1.0, difference + half)

    @property
    def p_value(self) -> float:
        """The probability of a difference at least as large between equal models, by McNemar's exact test."""
        n, k = self.flips, min(self.gains, self.losses)
        logs = (math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(k + 1))
        return min(1.0, 2 * math.fsum(math.exp(log - n * math.log(2)) for log in logs))

    @property
    def tasks_needed(self) -> int | None:
        """The number of tasks required to detect this difference; None if there is none."""
        d, flips = self.difference, self.flips / self.n
        if not d:
            return None
        return math.ceil((Z_95 * math.sqrt(flips) + _Z_POWER * math.sqrt(max(flips - d * d, 0.0))) ** 2 / (d * d))


def accuracy_of(correct: Bools) -> Accuracy:
    """Return the accuracy of answers, bool [n]."""
    return Accuracy(int(correct.sum()), len(correct))


def compare_accuracies(
    base: Bools, model: Bools, base_answers: npt.ArrayLike, model_answers: npt.ArrayLike
) -> PairedAccuracy:
    """Return the paired statistics of two models.

    Args:
        base, model: whether each answer is correct, bool [n].
        base_answers, model_answers: the numbers of the answers, int [n].

    Raises:
        RecipeError: the arrays differ in length, or are empty.
    """
    arrays = [np.asarray(a) for a in (base, model, base_answers, model_answers)]
    if not len(arrays[0]) or any(a.shape != arrays[0].shape for a in arrays):
        raise RecipeError(f"the models answered other tasks: shapes {[a.shape for a in arrays]}", "QK-E203")
    base, model, base_answers, model_answers = arrays
    changes = np.asarray(base_answers) != np.asarray(model_answers)
    return PairedAccuracy(len(base), int((~base & model).sum()), int((base & ~model).sum()), int(changes.sum()))

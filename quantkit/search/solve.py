"""Choice of one item from every row at minimum cost within limits: an integer program, solved by HiGHS.

This is the multiple-choice knapsack problem (Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004, chapter 11) with
any number of limits, and with excluded answers, for the second best. The linear relaxation first drops choices that
cannot be in an optimum: those whose reduced cost exceeds the difference of a rounded answer from the bound. The
remaining program is small, and HiGHS proves the optimum.

HiGHS computes in floating point, within tolerances. So an answer is checked here, with integers where weights are
integers; one that exceeds a limit is excluded by a cut, and the program is solved again.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.errors import ResourceError
from quantkit.extras import SEARCH, check_extras
from quantkit.search.rounding import Exchanges

F64 = npt.NDArray[np.float64]
#: Weights of the choices of a row; int64 if they are exact.
Weights = npt.NDArray[np.int64] | F64
#: Scale of objective and limits: the tolerances and the gap of HiGHS are absolute, 1e-6.
_SCALE = 1e6
#: Maximum number of solutions excluded because rounding makes them exceed a limit.
_CUTS = 64


@dataclass(frozen=True)
class Limit:
    """Upper bound ``most`` of the sum of the ``weights`` of the choices, an array per row."""

    weights: Sequence[Weights]
    most: float

    def total(self, picks: Sequence[int]) -> float:
        """Return the sum of the weights of an answer, exact for integers."""
        weights = [row[pick].item() for row, pick in zip(self.weights, picks, strict=True)]
        return sum(weights) if all(isinstance(weight, int) for weight in weights) else math.fsum(weights)


@dataclass(frozen=True)
class Exclusion:
    """An excluded answer: others must differ from it in at least ``min_difference`` rows."""

    picks: tuple[int, ...]
    min_difference: int = 1

    def allows(self, picks: Sequence[int]) -> bool:
        """Return whether an answer differs enough."""
        return sum(a != b for a, b in zip(picks, self.picks, strict=True)) >= self.min_difference


@dataclass(frozen=True)
class Answer:
    """A choice for every row. ``cost``: their sum; ``gap``: bound of its distance from the optimum, 0 if proven."""

    picks: tuple[int, ...]
    cost: float
    gap: float = 0.0


def solve(
    costs: Sequence[F64],
    limits: Sequence[Limit],
    *,
    exclusions: Sequence[Exclusion] = (),
    time_limit: float = 60.0,
    gap: float = 0.0,
    exact: bool = True,
) -> Answer | None:
    """Return the answer of least cost; None if the limits allow none.

    Args:
        costs: of the choices of each row, float64 [n], n > 0.
        limits: bounds of other sums, with as many weights.
        exclusions: excluded answers.
        time_limit: seconds, after which the best answer so far is returned with its gap.
        gap: accepted relative distance from the optimum.
        exact: False: a good answer near the relaxation is enough, if there is one.

    Raises:
        ResourceError: scipy is not installed, or no answer was found within the time.
    """
    check_extras(SEARCH)
    program, end = Program(costs, limits, tuple(exclusions)), time.monotonic() + time_limit
    for _ in range(_CUTS):
        relaxation = program.relax()
        if relaxation is None:
            return None
        rounded = program.round_shares(relaxation)
        if rounded is not None and not exact:
            cost = program.cost(rounded)
            return Answer(rounded, cost, max(0.0, cost - relaxation.bound))
        columns = program.reduce(relaxation, rounded)
        answer, proven = program.milp(columns, max(end - time.monotonic(), 0.1), gap)
        if answer is not None and not program.allows(answer):
            program.exclude(answer)
            continue
        if answer is None and rounded is None:
            if proven:
                return None
            raise ResourceError(f"found no allocation within {time_limit:g} s: raise --time-limit", "QK-E213")
        best = min((picks for picks in (answer, rounded) if picks is not None), key=program.cost)
        cost = program.cost(best)
        return Answer(best, cost, 0.0 if proven else max(0.0, cost - relaxation.bound))
    raise ResourceError("the solver's results exceed the limits by rounding errors: change the target slightly")


def relax(program: Program) -> tuple[float | None, F64 | None]:
    """Return the cost of the linear relaxation, a lower bound for all answers, and the multipliers of the limits.

    The cost is None if the limits allow no answer, and minus infinity if HiGHS does not decide, which happens near the
    limits of what is possible; there are no multipliers then.
    """
    check_extras(SEARCH)
    try:
        relaxation = program.relax()
    except ResourceError:
        return -math.inf, None
    if relaxation is None:
        return None, None
    return relaxation.bound, relaxation.multipliers * program.limit_scales()


class Relaxation(NamedTuple):
    """The linear relaxation: a bound, shares and reduced costs of all choices, multipliers of the scaled limits."""

    bound: float
    shares: F64
    reduced_costs: F64
    multipliers: F64


class Program:
    """The program, with the choices of all rows in one array: ``row`` of each, ``first`` choice of each row."""

    def __init__(self, costs: Sequence[F64], limits: Sequence[Limit], exclusions: tuple[Exclusion, ...] = ()) -> None:
        self.costs, self.limits = costs, limits
        self.exclusions = list(exclusions)
        counts = [len(row) for row in costs]
        self.first = np.cumsum([0, *counts])
        self.row = np.repeat(np.arange(len(costs)), counts)
        self.cost_of = np.concatenate(costs)
        self.least = np.array([row.min() for row in costs])
        self.weights = [np.concatenate([w.astype(np.float64) for w in limit.weights]) for limit in limits]

    def cost(self, picks: Sequence[int]) -> float:
        return math.fsum(row[pick] for row, pick in zip(self.costs, picks, strict=True))

    def allows(self, picks: Sequence[int]) -> bool:
        within = all(limit.total(picks) <= limit.most for limit in self.limits)
        return within and all(exclusion.allows(picks) for exclusion in self.exclusions)

    def exclude(self, picks: tuple[int, ...]) -> None:
        """Exclude one answer."""
        self.exclusions.append(Exclusion(picks))

    def dual(self, multipliers: F64) -> float:
        """Return the lower bound of the cost by multipliers of the limits, none negative."""
        costs = self.cost_of.copy()
        for multiplier, weights in zip(multipliers, self.weights, strict=True):
            costs += multiplier * weights
        most = math.fsum(m * limit.most for m, limit in zip(multipliers, self.limits, strict=True))
        return float(np.minimum.reduceat(costs, self.first[:-1]).sum()) - most

    def limit_scales(self) -> F64:
        """Return the factors by which ``constraint_rows`` of all choices multiplies the limits."""
        scales = []
        for limit, weights in zip(self.limits, self.weights, strict=True):
            least = np.minimum.reduceat(weights, self.first[:-1])
            scales.append(_scale_of(limit.most - math.fsum(least), weights - least[self.row]))
        return np.array(scales)

    def constraint_rows(self, columns: npt.NDArray[np.intp]) -> tuple[list[F64], list[float]]:
        """Return the limits and exclusions over the choices ``columns``: coefficients [len(columns)], and upper bounds.

        Weights are relative to the least of each row, and scaled.
        """
        coefficients, bounds = [], []
        for limit, weights in zip(self.limits, self.weights, strict=True):
            least = np.full(len(self.costs), np.inf)
            np.minimum.at(least, self.row[columns], weights[columns])
            above = weights[columns] - least[self.row[columns]]
            remainder = limit.most - math.fsum(least)
            scale = _scale_of(remainder, above)
            coefficients.append(above * scale)
            bounds.append(remainder * scale)
        for exclusion in self.exclusions:
            indicator = np.zeros(len(self.row))
            indicator[self.first[:-1] + np.array(exclusion.picks)] = 1.0
            coefficients.append(indicator[columns])
            bounds.append(float(len(exclusion.picks) - exclusion.min_difference))
        return coefficients, bounds

    def selection_matrix(self, columns: npt.NDArray[np.intp]) -> Any:
        """Return the sparse matrix [rows, len(columns)] that counts the selected choices of each row."""
        from scipy.sparse import csr_array

        ones, n = np.ones(len(columns)), len(self.costs)
        return csr_array((ones, (self.row[columns], np.arange(len(columns)))), shape=(n, len(columns)))

    def relax(self) -> Relaxation | None:
        """Return the linear relaxation; None: infeasible."""
        from scipy.optimize import linprog

        columns = np.arange(len(self.row))
        above = self.cost_of - self.least[self.row]
        scale = _SCALE / max(float(above.max()), 1e-300)
        coefficients, bounds = self.constraint_rows(columns)
        matrix = np.array(coefficients) if coefficients else None
        with _silence_stdout():
            result = linprog(
                above * scale,
                A_ub=matrix,
                b_ub=bounds or None,
                A_eq=self.selection_matrix(columns),
                b_eq=np.ones(len(self.costs)),
                method="highs",
            )
        if result.status == 2:
            return None
        if not result.success:
            raise ResourceError(f"the solver failed: {result.message}")
        reduced_costs = above * scale - result.eqlin.marginals[self.row]
        multipliers = np.zeros(0)
        if matrix is not None:
            reduced_costs -= matrix.T @ result.ineqlin.marginals
            multipliers = -result.ineqlin.marginals
        bound = result.fun / scale + math.fsum(self.least)
        return Relaxation(bound, result.x, reduced_costs / scale, multipliers / scale)

    def reduce(self, relaxation: Relaxation, picks: tuple[int, ...] | None) -> npt.NDArray[np.intp]:
        """Return the choices that a better answer than ``picks`` may have."""
        if picks is None:
            return np.arange(len(self.row))
        cost = self.cost(picks)
        gap = cost - relaxation.bound + 1e-9 * max(abs(cost), float(self.cost_of.max()))
        selected = np.zeros(len(self.row), bool)
        selected[self.first[:-1] + np.array(picks)] = True
        return np.flatnonzero((relaxation.reduced_costs <= gap) | selected)

    def round_shares(self, relaxation: Relaxation) -> tuple[int, ...] | None:
        """Return a good answer near the relaxation."""
        columns = np.arange(len(self.row))
        coefficients, bounds = self.constraint_rows(columns)
        weights = np.array(coefficients).reshape(len(bounds), len(columns))
        _, shares, reduced_costs, multipliers = relaxation
        exchanges = Exchanges(self.cost_of, weights, np.array(bounds), self.row, shares, reduced_costs, multipliers)
        choices = exchanges.best()
        if choices is None:
            return None
        picks = tuple(int(i) for i in choices - self.first[:-1])
        return picks if self.allows(picks) else None

    def milp(self, columns: npt.NDArray[np.intp], seconds: float, gap: float) -> tuple[tuple[int, ...] | None, bool]:
        """Return the best answer of the choices ``columns``, or None, and whether that is proven."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        least = np.full(len(self.costs), np.inf)
        np.minimum.at(least, self.row[columns], self.cost_of[columns])
        above = self.cost_of[columns] - least[self.row[columns]]
        above *= _SCALE / max(float(above.max()), 1e-300)
        coefficients, bounds = self.constraint_rows(columns)
        constraints = [LinearConstraint(self.selection_matrix(columns), 1, 1)]
        constraints += [LinearConstraint(np.array(coefficients), -np.inf, bounds)] if coefficients else []
        options = {"mip_rel_gap": gap, "time_limit": seconds}
        with _silence_stdout():
            result = milp(above, integrality=1, bounds=Bounds(0, 1), constraints=constraints, options=options)
        if result.x is None:
            if result.status in (1, 2):
                return None, result.status == 2
            raise ResourceError(f"the solver failed: {result.message}")
        selected = columns[np.rint(result.x) > 0]
        return tuple(int(i) for i in selected - self.first[self.row[selected]]), result.status == 0


def _scale_of(remainder: float, above: F64) -> float:
    """Return the factor of a limit by which its bound and weights, above the least of each row, are at most 1e6."""
    return _SCALE / max(abs(remainder), float(above.max()), 1e-300)


@contextmanager
def _silence_stdout() -> Iterator[None]:
    """Discard HiGHS's output to stdout, which ignores its settings and would corrupt --json."""
    sys.stdout.flush()
    libc = ctypes.CDLL(None)
    try:
        stdout_copy = os.dup(1)
    except OSError:  # no standard output
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        libc.fflush(None)
        os.dup2(null, 1)
        yield
    finally:
        with suppress(OSError):
            libc.fflush(None)
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
        os.close(null)

"""One choice from every row so that the costs are least and no limit is exceeded: an integer program, solved by HiGHS.

This is the multiple-choice knapsack problem (Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004, chapter 11) with
any number of limits, and with answers to keep away from, for the second best. The linear relaxation first drops what
cannot be in an optimum: a choice whose reduced cost alone is more than what a rounded answer is above the bound. What
is left is small, and HiGHS proves the optimum.

HiGHS computes in floating point, within tolerances. So an answer is summed up here again, in integers where weights are
integers, and one that exceeds a limit is excluded by a cut, and the program solved again.
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
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import ResourceError

F64 = npt.NDArray[np.float64]
#: Weights of a row's choices: int64 where they are exact.
Weights = npt.NDArray[np.int64] | F64
#: What objective and limits are scaled to: HiGHS' tolerances and its gap are absolute, 1e-6.
_SCALE = 1e6
#: Answers beyond a limit, by rounding, that are cut off one by one.
_CUTS = 64


@dataclass(frozen=True)
class Limit:
    """The most that the ``weights`` of the choices, an array a row, may sum up to."""

    weights: Sequence[Weights]
    most: float

    def used(self, picks: Sequence[int]) -> float:
        """Return the sum of the weights of an answer, exact for integers."""
        found = [row[pick].item() for row, pick in zip(self.weights, picks, strict=True)]
        return sum(found) if all(isinstance(each, int) for each in found) else math.fsum(found)


@dataclass(frozen=True)
class Apart:
    """An answer that others must differ from in at least ``least`` rows."""

    picks: tuple[int, ...]
    least: int = 1

    def allows(self, picks: Sequence[int]) -> bool:
        """Tell whether an answer differs enough."""
        return sum(a != b for a, b in zip(picks, self.picks, strict=True)) >= self.least


@dataclass(frozen=True)
class Answer:
    """A choice for every row, what it costs, and how much less the optimum may cost: 0 if it is proven to be one."""

    picks: tuple[int, ...]
    cost: float
    gap: float = 0.0


def check_solver() -> None:
    """Raise ResourceError, with how to install it, if there is no solver."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise ResourceError("search solves integer programs by scipy: pip install 'gguf-quantkit[search]'") from None


def solve(
    costs: Sequence[F64],
    limits: Sequence[Limit],
    *,
    apart: Sequence[Apart] = (),
    time_limit: float = 60.0,
    gap: float = 0.0,
) -> Answer | None:
    """Return the answer of least cost; None if there is none within the limits.

    Args:
        costs: of the choices of each row, float64 [n], n > 0.
        limits: each with as many weights.
        apart: answers not to return.
        time_limit: seconds; the best answer so far is returned then, with its gap.
        gap: share of the cost that the answer may be above the optimum.

    Raises:
        ResourceError: no scipy; or no answer was found within the time, though there may be one.
    """
    check_solver()
    program, end = _Program(costs, limits, tuple(apart)), time.monotonic() + time_limit
    for _ in range(_CUTS):
        relaxed = program.relaxed()
        if relaxed is None:
            return None
        known, keep = program.reduced(*relaxed)
        answer, proven = program.milp(keep, max(end - time.monotonic(), 0.1), gap)
        if answer is not None and not program.allows(answer):
            program.cut(answer)
            continue
        if answer is None and known is None:
            if proven:
                return None
            raise ResourceError(f"no allocation was found within {time_limit:g} s: raise --time-limit")
        best = min((each for each in (answer, known) if each is not None), key=program.cost)
        cost = program.cost(best)
        return Answer(best, cost, 0.0 if proven else max(0.0, cost - relaxed[0]))
    raise ResourceError("the solver's answers exceed the limits by rounding: change the target slightly")


class _Program:
    """The program, its choices in one row each: ``row`` is whose, ``first`` where a row begins."""

    def __init__(self, costs: Sequence[F64], limits: Sequence[Limit], apart: tuple[Apart, ...]) -> None:
        self.costs, self.limits, self.apart = costs, limits, list(apart)
        counts = [len(row) for row in costs]
        self.first = np.cumsum([0, *counts])
        self.row = np.repeat(np.arange(len(costs)), counts)
        self.cost_of = np.concatenate(costs)
        self.least = np.array([row.min() for row in costs])
        self.weights = [np.concatenate([w.astype(np.float64) for w in limit.weights]) for limit in limits]

    def cost(self, picks: Sequence[int]) -> float:
        return math.fsum(row[pick] for row, pick in zip(self.costs, picks, strict=True))

    def allows(self, picks: Sequence[int]) -> bool:
        within = all(limit.used(picks) <= limit.most for limit in self.limits)
        return within and all(each.allows(picks) for each in self.apart)

    def cut(self, picks: tuple[int, ...]) -> None:
        """Exclude one answer."""
        self.apart.append(Apart(picks))

    def rows(self, keep: npt.NDArray[np.intp]) -> tuple[list[F64], list[float]]:
        """Return the limits and cuts over the choices ``keep``: coefficients, and the most they may sum up to.

        Limits count from the least weight of each row, which every answer has, and are scaled.
        """
        made, most = [], []
        for limit, weights in zip(self.limits, self.weights, strict=True):
            least = np.full(len(self.costs), np.inf)
            np.minimum.at(least, self.row[keep], weights[keep])
            above = weights[keep] - least[self.row[keep]]
            room = limit.most - math.fsum(least)
            scale = _SCALE / max(abs(room), float(above.max()), 1e-300)
            made.append(above * scale)
            most.append(room * scale)
        for each in self.apart:
            same = np.zeros(len(self.row))
            same[self.first[:-1] + np.array(each.picks)] = 1.0
            made.append(same[keep])
            most.append(float(len(each.picks) - each.least))
        return made, most

    def one_of_each(self, keep: npt.NDArray[np.intp]) -> Any:
        """Return the matrix, sparse, that counts how many choices of a row are taken."""
        from scipy.sparse import csr_array

        ones, n = np.ones(len(keep)), len(self.costs)
        return csr_array((ones, (self.row[keep], np.arange(len(keep)))), shape=(n, len(keep)))

    def relaxed(self) -> tuple[float, F64, F64] | None:
        """Return the linear relaxation: its bound, the share of every choice and its reduced cost; None: infeasible."""
        from scipy.optimize import linprog

        every = np.arange(len(self.row))
        above = self.cost_of - self.least[self.row]
        scale = _SCALE / max(float(above.max()), 1e-300)
        made, most = self.rows(every)
        matrix = np.array(made) if made else None
        with _quiet():
            found = linprog(
                above * scale,
                A_ub=matrix,
                b_ub=most or None,
                A_eq=self.one_of_each(every),
                b_eq=np.ones(len(self.costs)),
                method="highs",
            )
        if found.status == 2:
            return None
        if not found.success:
            raise ResourceError(f"the solver failed: {found.message}")
        reduced = above * scale - found.eqlin.marginals[self.row]
        if matrix is not None:
            reduced -= matrix.T @ found.ineqlin.marginals
        return found.fun / scale + math.fsum(self.least), found.x, reduced / scale

    def reduced(self, bound: float, shares: F64, reduced: F64) -> tuple[tuple[int, ...] | None, npt.NDArray[np.intp]]:
        """Return a rounded answer, if there is one, and the choices that a better one may have."""
        picks = self.rounded(shares)
        if picks is None:
            return None, np.arange(len(self.row))
        cost = self.cost(picks)
        room = cost - bound + 1e-9 * max(abs(cost), float(self.cost_of.max()))
        taken = np.zeros(len(self.row), bool)
        taken[self.first[:-1] + np.array(picks)] = True
        return picks, np.flatnonzero((reduced <= room) | taken)

    def rounded(self, shares: F64) -> tuple[int, ...] | None:
        """Return the relaxation with whole choices: of shared ones the lightest, then what the room left pays for."""
        picks = []
        for i in range(len(self.costs)):
            span = slice(self.first[i], self.first[i + 1])
            some = np.flatnonzero(shares[span] > 1e-9)
            by = self.weights[0][span] if self.weights else self.costs[i]
            picks.append(int(some[by[some].argmin()]))
        if not all(limit.used(picks) <= limit.most for limit in self.limits):
            return None
        at = self.first[:-1] + np.array(picks)
        while True:
            gain = self.cost_of[at][self.row] - self.cost_of
            for limit, weights in zip(self.limits, self.weights, strict=True):
                gain[weights - weights[at][self.row] > limit.most - limit.used(picks)] = 0.0
            best = int(gain.argmax())
            if gain[best] <= 0.0:
                break
            at[self.row[best]] = best
            picks[self.row[best]] = int(best - self.first[self.row[best]])
        return tuple(picks) if self.allows(picks) else None

    def milp(self, keep: npt.NDArray[np.intp], seconds: float, gap: float) -> tuple[tuple[int, ...] | None, bool]:
        """Return the best answer of the choices ``keep``, or None, and whether that is proven."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        least = np.full(len(self.costs), np.inf)
        np.minimum.at(least, self.row[keep], self.cost_of[keep])
        above = self.cost_of[keep] - least[self.row[keep]]
        above *= _SCALE / max(float(above.max()), 1e-300)
        made, most = self.rows(keep)
        constraints = [LinearConstraint(self.one_of_each(keep), 1, 1)]
        constraints += [LinearConstraint(np.array(made), -np.inf, most)] if made else []
        options = {"mip_rel_gap": gap, "time_limit": seconds}
        with _quiet():
            found = milp(above, integrality=1, bounds=Bounds(0, 1), constraints=constraints, options=options)
        if found.x is None:
            if found.status in (1, 2):
                return None, found.status == 2
            raise ResourceError(f"the solver failed: {found.message}")
        taken = keep[np.rint(found.x) > 0]
        return tuple(int(i) for i in taken - self.first[self.row[taken]]), found.status == 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what HiGHS prints in spite of its settings: it would stand in the output of --json."""
    sys.stdout.flush()
    libc = ctypes.CDLL(None)
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
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
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)

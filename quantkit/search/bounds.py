"""Lower bounds of programs that resemble each other: the relaxations of a few, and their multipliers for the others.

Any multipliers of the limits give a bound (the Lagrangian dual), and those of a similar program a good one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from quantkit.search.solve import F64, Program, relax


class Bounds:
    """Bounds of programs with the same kinds of limits."""

    def __init__(self) -> None:
        self._multipliers: list[F64] = []

    def estimate(self, program: Program) -> float:
        """Return a lower bound by the multipliers of earlier programs."""
        return max(map(program.dual, self._multipliers), default=-math.inf)

    def relax(self, program: Program) -> float | None:
        """Return the cost of the linear relaxation; None if the limits allow no answer."""
        bound, multipliers = relax(program)
        if multipliers is not None:
            self._multipliers.append(multipliers)
        return bound

    def rank(self, programs: Sequence[Program], constants: Sequence[float]) -> Iterator[tuple[float, int]]:
        """Yield relaxed cost plus constant, and number, of each program that has answers, least first."""
        if not programs:
            return
        middle = len(programs) // 2
        exact = {middle: self.relax(programs[middle])}
        queue = [(self.estimate(program) + constants[i], i) for i, program in enumerate(programs)]
        heapq.heapify(queue)
        while queue:
            bound, i = heapq.heappop(queue)
            if i not in exact:
                estimate = self.estimate(programs[i]) + constants[i]
                if queue and estimate > queue[0][0]:
                    heapq.heappush(queue, (estimate, i))
                    continue
                exact[i] = self.relax(programs[i])
            cost = exact[i]
            if cost is None:
                continue
            if cost + constants[i] > bound and queue and cost + constants[i] > queue[0][0]:
                heapq.heappush(queue, (cost + constants[i], i))
                continue
            yield cost + constants[i], i

"""Good answers near a linear relaxation: its fractions rounded, then choices exchanged in one row or in two.

An answer beyond a limit pays a multiple of the limit's multiplier, the price in the relaxation, so that exchanges lead
back to the limits.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
#: Price of what is beyond a limit, in multipliers, which rises by this factor while no answer is within the limits.
_PENALTY, _PRICES = 20.0, 4
#: Choices of least reduced cost that are exchanged in pairs, and the maximum number of exchanges.
_CANDIDATES, _EXCHANGES = 256, 300
#: Maximum number of rounded answers that are compared.
_MAX_ROUNDED = 512
#: What limits may be exceeded by: rounding errors of sums, in units of the scale of ``solve``, 1e6.
_TOLERANCE = 1e-7


class Exchanges:
    """The choices of a program in one array.

    cost: of each choice, float64 [n]. weights, most: limits as rows of [m, n] and [m]. row: the row of each choice, in
    order. shares, reduced_costs, multipliers: of the relaxation.
    """

    def __init__(
        self,
        cost: F64,
        weights: F64,
        most: F64,
        row: Indices,
        shares: F64,
        reduced_costs: F64,
        multipliers: F64,
    ) -> None:
        self.cost, self.weights, self.most, self.row, self.shares = cost, weights, most, row, shares
        span = float(cost.max() - cost.min())
        # A limit without a price in the relaxation has a small one here.
        floor = 1e-3 * span / np.maximum(np.abs(weights).max(axis=1), 1e-300)
        self.price = _PENALTY * np.maximum(multipliers, floor)
        self.candidates = np.argsort(reduced_costs, kind="stable")[:_CANDIDATES]

    def best(self) -> Indices | None:
        """Return the choices of a good answer, one for each row; None if none is within the limits."""
        picks = self._round()
        for _ in range(_PRICES):
            for _ in range(_EXCHANGES):
                move = self._find_exchange(picks)
                if move is None:
                    break
                for choice in move:
                    picks[self.row[choice]] = choice
            if self._excess(self.weights[:, picks].sum(axis=1)).max(initial=0.0) <= 0:
                return picks
            self.price *= _PENALTY
        return None

    def _excess(self, totals: F64) -> F64:
        """Return the excess of totals [m, ..] over the limits, 0 within."""
        excess = totals - self.most.reshape(-1, *[1] * (totals.ndim - 1))
        return np.where(excess > _TOLERANCE, excess, 0.0)

    def _value(self, cost: F64, totals: F64) -> F64:
        return cost + np.tensordot(self.price, self._excess(totals), 1)

    def _round(self) -> Indices:
        """Return the best of the combinations of the choices with a share."""
        shared = [np.flatnonzero((self.row == i) & (self.shares > 1e-9)) for i in range(self.row[-1] + 1)]
        picks = np.array([choices[self.shares[choices].argmax()] for choices in shared])
        open_rows = [choices for choices in shared if len(choices) > 1]
        combinations = np.array(list(itertools.islice(itertools.product(*open_rows), _MAX_ROUNDED)), np.intp)
        if not open_rows:
            return picks
        rows = self.row[combinations[0]]
        base = np.delete(picks, rows)
        totals = self.weights[:, base].sum(axis=1)[:, None] + self.weights[:, combinations].sum(axis=2)
        best = int(self._value(self.cost[combinations].sum(axis=1), totals).argmin())
        picks[rows] = combinations[best]
        return picks

    def _find_exchange(self, picks: Indices) -> tuple[int, ...] | None:
        """Return the choice, or the two, whose exchange improves an answer most; None if none does."""
        totals = self.weights[:, picks].sum(axis=1)
        value = float(self._value(np.zeros(()), totals))
        least = -1e-12 * max(float(np.abs(self.cost).max()), abs(value))
        more_cost = self.cost - self.cost[picks][self.row]
        more_weight = self.weights - self.weights[:, picks][:, self.row]
        change = self._value(more_cost, totals[:, None] + more_weight) - value
        best = int(change.argmin())
        if change[best] < least:
            return (best,)
        candidates, rows = self.candidates, self.row[self.candidates]
        cost, weight = more_cost[candidates], more_weight[:, candidates]
        pairs = totals[:, None, None] + weight[:, :, None] + weight[:, None, :]
        change = self._value(cost[:, None] + cost[None, :], pairs) - value
        change[rows[:, None] == rows[None, :]] = np.inf
        i, j = np.unravel_index(int(change.argmin()), change.shape)
        return (int(candidates[i]), int(candidates[j])) if change[i, j] < least else None

"""What groups cost, guessed from the error that they leave at the end of their layer.

That error, relative to each token's values there, for the norm that follows divides by these, has seen the activations,
and costs no layer behind. How a group's divergence k follows from its error e is told by the types of the group that
ran to the end of the model: k = a * (e + kink * sqrt(e)), for routers that flip behind the layer add a part that goes
with the size of the error, not its square (search/combine.py). The kink is searched for on a grid, by least squares of
logarithms, weighted by the noise of the measurements; that of a group is held near the one that suits all groups, for
few types of each tell little of it. The factor a is the group's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.model.ops import Value
from quantkit.sensitivity.encode import Pair
from quantkit.sensitivity.file import LAYER, Cost
from quantkit.sensitivity.variants import Values

F64 = npt.NDArray[np.float64]
#: Kinks that are tried, roots of relative squared errors, from one that is none to one beside which the rest is none.
_KINKS = 10.0 ** (np.arange(41) / 8 - 4)
#: The standard deviations, in natural logarithms, of what the rule misses, and of the kinks of groups.
_MISSED, _APART = 0.1, 2.0
#: What a group's kink adds for being apart from the common one, float64 [common, own].
_HELD = ((np.log(_KINKS)[:, None] - np.log(_KINKS)) / _APART) ** 2


class _Point(NamedTuple):
    """A pair that was measured: its error, the logarithm of its divergence, and how much it counts."""

    error: float
    y: float
    weight: float


def error_between(changed: Values, own: Values, leaves: Sequence[Value]) -> list[float]:
    """Return the number of rows, and the sum over these of squared errors, each relative to the row's square."""
    rows, total = 0, 0.0
    for value in leaves:
        if value.integer:
            continue
        a, b = own[value], changed[value]
        rows = max(rows, len(a))
        square = np.einsum("ij,ij->i", a, a, dtype=np.float64)
        error = np.subtract(b, a)
        total += float((np.einsum("ij,ij->i", error, error, dtype=np.float64) / np.maximum(square, 1e-30)).sum())
    return [float(max(rows, 1)), total]


def with_layer_errors(costs: Mapping[Pair, Cost], errors: Mapping[Pair, float]) -> dict[Pair, Cost]:
    """Return costs with what the ``errors`` at the ends of layers predict, by the others of a group that were measured.

    Where none was as a pair is encoded, with error feedback or without, by those encoded in the other way. And with the
    share of the divergence that the kink makes, by the rule of all that were measured.
    """
    known: dict[tuple[str, bool], dict[Pair, _Point]] = {}
    for pair, error in errors.items():
        kld, noise = costs[pair].kld, costs[pair].kld_error or 0.0
        if kld is not None and kld > 0 and error > 0:
            point = _Point(error, math.log(kld), 1 / (_MISSED**2 + (noise / kld) ** 2))
            known.setdefault((pair.group.name, pair.feedback), {})[pair] = point
    held = _HELD[_common_kink([list(each.values()) for each in known.values()])]
    made = dict(costs)
    for pair, error in errors.items():
        name = pair.group.name
        found = known.get((name, pair.feedback)) or known.get((name, not pair.feedback), {})
        points = [point for other, point in found.items() if other is not pair]
        if points:
            guess = _guess(points, error, held) if error > 0 else 0.0
            made[pair] = replace(costs[pair], proxies={**costs[pair].proxies, LAYER: guess})
        if found and error > 0:
            flips = _KINKS[_rule(list(found.values()), held)[0]] * math.sqrt(error)
            made[pair] = replace(made[pair], flips=float(flips / (error + flips)))
    return made


def _common_kink(groups: Sequence[Sequence[_Point]]) -> int:
    """Return which kink suits all groups; that which is none, if no group has two points."""
    total = np.zeros(len(_KINKS))
    for points in groups:
        total += (_misfit(points)[1] + _HELD).min(axis=1)
    return int(total.argmin())


def _guess(points: Sequence[_Point], error: float, held: F64) -> float:
    """Return the divergence that belongs to an error by the rule that is nearest to the points."""
    kink, factor = _rule(points, held)
    return math.exp(factor + _shape(error)[kink])


def _rule(points: Sequence[_Point], held: F64) -> tuple[int, float]:
    """Return which kink is nearest to the points, and the logarithm of the factor that goes with it."""
    factors, misfit = _misfit(points)
    best = int((misfit + held).argmin())
    return best, float(factors[best])


def _misfit(points: Sequence[_Point]) -> tuple[F64, F64]:
    """Return for each kink the logarithm of the best factor, and the weighted squares that remain, each [kinks]."""
    weight = np.array([p.weight for p in points])
    off = np.array([p.y - _shape(p.error) for p in points])
    factors = weight @ off / weight.sum()
    return factors, weight @ (off - factors) ** 2


def _shape(error: float) -> F64:
    """Return the logarithms of e + kink * sqrt(e), float64 [kinks]."""
    return np.log(error + _KINKS * math.sqrt(error))

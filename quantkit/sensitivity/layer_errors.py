"""Costs predicted from the activation error at the end of a group's layer.

The error e is squared and relative to each token's values, because the next norm divides by these. It includes the
effect of activations and costs no later layer. A group's divergence is

    k = a * (e + kink * sqrt(e))

where the second term comes from routers that flip in later layers (search/combine.py). Types of the group that ran to
the end of the model determine a and kink: the kink on a grid, by least squares of logarithms weighted by measurement
noise, with a penalty for distance from the kink that fits all groups, because a group has few types.
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
#: Grid of kinks, as roots of relative squared errors, from negligible to dominant.
_KINKS = 10.0 ** (np.arange(41) / 8 - 4)
#: Standard deviations, in natural logarithms, of the fit and of the kinks of groups.
_FIT_DEVIATION, _KINK_DEVIATION = 0.1, 2.0
#: Penalty of a group's kink for its distance from the common one, float64 [common, own].
_KINK_PENALTY = ((np.log(_KINKS)[:, None] - np.log(_KINKS)) / _KINK_DEVIATION) ** 2


class _Point(NamedTuple):
    """A measured pair: its error, the logarithm of its divergence, and its weight."""

    error: float
    y: float
    weight: float


def relative_error(changed: Values, base: Values, leaves: Sequence[Value]) -> list[float]:
    """Return the number of rows, and the sum of their squared errors, each relative to the row's square."""
    rows, total = 0, 0.0
    for value in leaves:
        if value.integer:
            continue
        a, b = base[value], changed[value]
        rows = max(rows, len(a))
        square = np.einsum("ij,ij->i", a, a, dtype=np.float64)
        error = np.subtract(b, a)
        total += float((np.einsum("ij,ij->i", error, error, dtype=np.float64) / np.maximum(square, 1e-30)).sum())
    return [float(max(rows, 1)), total]


def with_layer_errors(costs: Mapping[Pair, Cost], errors: Mapping[Pair, float]) -> dict[Pair, Cost]:
    """Return costs with the predictions of ``errors``, by the other measured types of each group.

    Without measured types of the same kind (with error feedback or without), those of the other kind are used.
    ``flips`` is the share of the kink term, from all measured types.
    """
    group_points: dict[tuple[str, bool], dict[Pair, _Point]] = {}
    for pair, error in errors.items():
        kld, noise = costs[pair].kld, costs[pair].kld_error or 0.0
        if kld is not None and kld > 0 and error > 0:
            point = _Point(error, math.log(kld), 1 / (_FIT_DEVIATION**2 + (noise / kld) ** 2))
            group_points.setdefault((pair.group.name, pair.feedback), {})[pair] = point
    penalty = _KINK_PENALTY[_common_kink([list(pair_points.values()) for pair_points in group_points.values()])]
    result = dict(costs)
    for pair, error in errors.items():
        name = pair.group.name
        neighbours = group_points.get((name, pair.feedback)) or group_points.get((name, not pair.feedback), {})
        points = [point for key, point in neighbours.items() if key is not pair]
        if points:
            prediction = _predict(points, error, penalty) if error > 0 else 0.0
            result[pair] = replace(costs[pair], proxies={**costs[pair].proxies, LAYER: prediction})
        if neighbours and error > 0:
            flips = _KINKS[_fit(list(neighbours.values()), penalty)[0]] * math.sqrt(error)
            result[pair] = replace(result[pair], flips=float(flips / (error + flips)))
    return result


def _common_kink(groups: Sequence[Sequence[_Point]]) -> int:
    """Return the index of the kink that fits all groups; no kink if no group has two points."""
    total = np.zeros(len(_KINKS))
    for points in groups:
        total += (_misfit(points)[1] + _KINK_PENALTY).min(axis=1)
    return int(total.argmin())


def _predict(points: Sequence[_Point], error: float, penalty: F64) -> float:
    """Return the divergence for an error, by the formula that fits the points best."""
    kink, factor = _fit(points, penalty)
    return math.exp(factor + _shape(error)[kink])


def _fit(points: Sequence[_Point], penalty: F64) -> tuple[int, float]:
    """Return the index of the best kink, and the logarithm of its factor a."""
    factors, misfit = _misfit(points)
    best = int((misfit + penalty).argmin())
    return best, float(factors[best])


def _misfit(points: Sequence[_Point]) -> tuple[F64, F64]:
    """Return for each kink the logarithm of the best factor, and the weighted squares that remain, each [kinks]."""
    weight = np.array([p.weight for p in points])
    residuals = np.array([p.y - _shape(p.error) for p in points])
    factors = weight @ residuals / weight.sum()
    return factors, weight @ (residuals - factors) ** 2


def _shape(error: float) -> F64:
    """Return the logarithms of e + kink * sqrt(e), float64 [kinks]."""
    return np.log(error + _KINKS * math.sqrt(error))

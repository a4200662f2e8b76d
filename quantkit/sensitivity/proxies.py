"""What groups cost, guessed from errors, and how well that predicts what was measured.

The divergence of a small change is about quadratic in it. So for a group it goes with the squared error of its weights,
each weighted by the importance of its column, by a slope that one type of the group, the *probe*, shows.

Nearer is the error of what leaves the group's layer, relative to each token's values there, for the norm that follows
divides by these: it has seen the activations, and costs no layer behind. Where several types of a group are measured,
their line through logarithms of error and divergence tells the others: routers that flip bend it (search/combine.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quantkit.model.ops import Value
from quantkit.pipeline.jobs import ErrorSums
from quantkit.sensitivity.encode import Pair
from quantkit.sensitivity.file import LAYER, Cost
from quantkit.sensitivity.variants import Values

WEIGHTED, RELATIVE, COVARIANCE = "weighted_error", "relative_error", "covariance_loss"
#: How much, in squared logarithms of errors, the line of a group is held to be of slope 1.
_HELD = 0.1


def probes_of(pairs: Sequence[Pair]) -> set[Pair]:
    """Return the pair of each group that tells its slope: that of its type in the middle, by bits."""
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        if not pair.feedback:
            found.setdefault(pair.group.name, []).append(pair)
    return {sorted(each, key=lambda p: p.type.bpw)[(len(each) - 1) // 2] for each in found.values()}


def spread(pairs: Sequence[Pair], count: int) -> set[Pair]:
    """Return ``count`` pairs of each group, with error feedback and without: evenly by the order of bits."""
    found: dict[tuple[str, bool], list[Pair]] = {}
    for pair in pairs:
        found.setdefault((pair.group.name, pair.feedback), []).append(pair)
    chosen = set[Pair]()
    for each in found.values():
        each.sort(key=lambda p: p.type.bpw)
        n = min(count, len(each))
        chosen.update(each[((2 * i + 1) * len(each) - 1) // (2 * n)] for i in range(n))
    return chosen


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


def with_layer_errors(
    costs: Mapping[Pair, Cost], errors: Mapping[Pair, float], of: Sequence[Pair] | set[Pair] | None
) -> dict[Pair, Cost]:
    """Return costs with what the ``errors`` at the ends of layers predict, by the pairs ``of``.

    Without, by all that were measured; of these each by the others of its group.
    """
    known: dict[tuple[str, bool], dict[Pair, tuple[float, float]]] = {}
    for pair, error in errors.items():
        kld = costs[pair].kld
        if kld is not None and kld > 0 and error > 0 and (of is None or pair in of):
            known.setdefault((pair.group.name, pair.feedback), {})[pair] = math.log(error), math.log(kld)
    made = dict(costs)
    for pair, error in errors.items():
        name = pair.group.name
        found = known.get((name, pair.feedback)) or known.get((name, not pair.feedback), {})
        points = [point for other, point in found.items() if of is not None or other is not pair]
        if points:
            guess = math.exp(_on_line(points, math.log(error))) if error > 0 else 0.0
            made[pair] = replace(costs[pair], proxies={**costs[pair].proxies, LAYER: guess})
    return made


def _on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at x of the line through points, whose slope is 1 as long as few tell otherwise."""
    middle_x, middle_y = (math.fsum(each) / len(points) for each in zip(*points, strict=True))
    both = math.fsum((a - middle_x) * (b - middle_y) for a, b in points)
    slope = (both + _HELD) / (math.fsum((a - middle_x) ** 2 for a, _ in points) + _HELD)
    return middle_y + slope * (x - middle_x)


def with_proxies(
    costs: Mapping[Pair, Cost], sums: Mapping[Pair, ErrorSums], probes: Sequence[Pair] | set[Pair]
) -> dict[Pair, Cost]:
    """Return costs with what the errors ``sums`` of their pairs predict; ``probes`` are measured."""
    fed = {p._replace(feedback=False): s for p, s in sums.items() if p.feedback}
    slopes: dict[str, dict[str, float]] = {}
    for probe in probes:
        kld, errors = costs[probe].kld, _errors(probe, sums, fed)
        if kld is not None:
            slopes[probe.group.name] = {name: kld / error for name, error in errors.items() if error > 0}
    logs = [math.log(each[RELATIVE]) for each in slopes.values() if each.get(RELATIVE, 0) > 0]
    common = math.exp(math.fsum(logs) / len(logs)) if logs else 0.0  # the same in any order: probes are a set
    made = {}
    for pair, cost in costs.items():
        own = {**slopes.get(pair.group.name, {}), RELATIVE: common}
        errors = _errors(pair, sums, fed)
        made[pair] = replace(cost, proxies={n: own[n] * e for n, e in errors.items() if n in own})
    return made


def _errors(pair: Pair, sums: Mapping[Pair, ErrorSums], fed: Mapping[Pair, ErrorSums]) -> dict[str, float]:
    own = sums[pair]
    found = {WEIGHTED: own.weighted_error, RELATIVE: own.weighted_error / (own.weighted_square or 1.0)}
    if pair.feedback:
        found[COVARIANCE] = own.loss_after
    elif pair in fed:
        found[COVARIANCE] = fed[pair].loss_before
    return found


def rank_correlations(costs: Mapping[Pair, Cost], probes: Sequence[Pair] | set[Pair]) -> dict[str, float]:
    """Return Spearman's rank correlation of each proxy with what was measured, probes left out."""
    left = [c for pair, c in costs.items() if pair not in probes and c.kld is not None]
    found = {}
    for name in dict.fromkeys(n for c in left for n in c.proxies):
        both = [(c.proxies[name], c.kld) for c in left if name in c.proxies and c.kld is not None]
        if len(both) > 2:
            found[name] = _spearman(*(np.array(x) for x in zip(*both, strict=True)))
    return found


def _spearman(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / size if size else 1.0


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ranks; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], np.float64)

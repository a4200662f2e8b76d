"""What groups cost, guessed from errors, and how well that predicts what was measured.

The divergence of a small change is about quadratic in it. So for a group it goes with the squared error of its weights,
each weighted by the importance of its column, by a slope that one type of the group, the *probe*, shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quantkit.pipeline.jobs import ErrorSums
from quantkit.sensitivity.encode import Pair
from quantkit.sensitivity.file import Cost

WEIGHTED, RELATIVE, COVARIANCE = "weighted_error", "relative_error", "covariance_loss"


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

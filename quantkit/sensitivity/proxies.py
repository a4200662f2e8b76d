"""Costs predicted from weight errors, and their rank correlation with measured costs.

The divergence of a small change is about quadratic in it. So a group's divergence is proportional to the squared error
of its weights, each weighted by the importance of its column; one measured type of the group, the *probe*, gives the
slope.
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

WEIGHTED = "weighted_error"
RELATIVE = "relative_error"
COVARIANCE = "covariance_loss"


def probes_of(pairs: Sequence[Pair]) -> set[Pair]:
    """Return the probe of each group: the pair of its median type by bits per weight."""
    pairs_by_group: dict[str, list[Pair]] = {}
    for pair in pairs:
        if not pair.feedback:
            pairs_by_group.setdefault(pair.group.name, []).append(pair)
    return {sorted(members, key=lambda p: p.type.bpw)[(len(members) - 1) // 2] for members in pairs_by_group.values()}


def select_evenly(pairs: Sequence[Pair], count: int) -> set[Pair]:
    """Return ``count`` pairs of each group, with error feedback and without, evenly spaced in bits per weight."""
    pairs_by_group: dict[tuple[str, bool], list[Pair]] = {}
    for pair in pairs:
        pairs_by_group.setdefault((pair.group.name, pair.feedback), []).append(pair)
    result = set[Pair]()
    for members in pairs_by_group.values():
        members.sort(key=lambda p: p.type.bpw)
        n = min(count, len(members))
        result.update(members[((2 * i + 1) * len(members) - 1) // (2 * n)] for i in range(n))
    return result


def with_proxies(
    costs: Mapping[Pair, Cost], sums: Mapping[Pair, ErrorSums], probes: Sequence[Pair] | set[Pair]
) -> dict[Pair, Cost]:
    """Return costs with the predictions from the error ``sums`` of their pairs; ``probes`` are measured."""
    with_feedback = {p._replace(feedback=False): s for p, s in sums.items() if p.feedback}
    slopes: dict[str, dict[str, float]] = {}
    for probe in probes:
        kld, errors = costs[probe].kld, _errors(probe, sums, with_feedback)
        if kld is not None:
            slopes[probe.group.name] = {name: kld / error for name, error in errors.items() if error > 0}
    logs = [math.log(slope[RELATIVE]) for slope in slopes.values() if slope.get(RELATIVE, 0) > 0]
    common = math.exp(math.fsum(logs) / len(logs)) if logs else 0.0  # independent of the order: probes are a set
    result = {}
    for pair, cost in costs.items():
        group_slopes = {**slopes.get(pair.group.name, {}), RELATIVE: common}
        errors = _errors(pair, sums, with_feedback)
        result[pair] = replace(cost, proxies={n: group_slopes[n] * e for n, e in errors.items() if n in group_slopes})
    return result


def _errors(pair: Pair, sums: Mapping[Pair, ErrorSums], with_feedback: Mapping[Pair, ErrorSums]) -> dict[str, float]:
    error_sums = sums[pair]
    errors = {
        WEIGHTED: error_sums.weighted_error,
        RELATIVE: error_sums.weighted_error / (error_sums.weighted_square or 1.0),
    }
    if pair.feedback:
        errors[COVARIANCE] = error_sums.loss_after
    elif pair in with_feedback:
        errors[COVARIANCE] = with_feedback[pair].loss_before
    return errors


def rank_correlations(costs: Mapping[Pair, Cost], probes: Sequence[Pair] | set[Pair]) -> dict[str, float]:
    """Return Spearman's rank correlation of each proxy with the measured costs, without probes."""
    comparable = [c for pair, c in costs.items() if pair not in probes and c.kld is not None]
    correlations = {}
    for name in dict.fromkeys(n for c in comparable for n in c.proxies):
        points = [(c.proxies[name], c.kld) for c in comparable if name in c.proxies and c.kld is not None]
        if len(points) > 2:
            correlations[name] = _spearman(*(np.array(x) for x in zip(*points, strict=True)))
    return correlations


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

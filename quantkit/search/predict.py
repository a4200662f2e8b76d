"""Predicted divergence of groups in types, from measurements with noise and gaps.

A divergence is approximately the product of the sensitivity of a group and the coarseness of a type, so its logarithm
is fitted by least squares, weighted by the errors of the measurements:

    log kld = a[group] + b[type]

The variance of the residuals beyond these errors is that of the model. An estimate is the mean of the measured value
and the fitted one, each weighted by its precision (empirical Bayes: Efron and Morris, 1975). For a pair that was not
measured, it is the fitted value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.sensitivity.file import LAYER, Cost, Sensitivity
from quantkit.types import TensorType

F64 = npt.NDArray[np.float64]
T = TypeVar("T")
#: Rounds of the fit; the variance of the residuals converges within a few.
_ROUNDS = 20
#: Lower bounds of a divergence, in nats, and of its relative error.
_MIN_KLD, _MIN_ERROR = 1e-12, 1e-6
#: Relative error of a proxy, and of the one measured on activations at the end of the layer.
_PROXY_ERROR, _LAYER_ERROR = 0.5, 0.25


class Predictor:
    """Predicted divergence of groups in types, in nats per token.

    ``feedback``: prefer measurements with error feedback. ``proxy``: name of the proxy that replaces a missing
    measurement; None: the proxy that ranks the measured pairs best.
    """

    def __init__(self, sensitivity: Sensitivity, *, feedback: bool = False, proxy: str | None = None) -> None:
        costs: dict[tuple[str, TensorType], Cost] = {}
        for cost in sensitivity.costs:
            if cost.feedback <= feedback and (cost.feedback or (cost.group, cost.type) not in costs):
                costs[cost.group, cost.type] = cost
        names = _rank_proxies(sensitivity) if proxy is None else [proxy]
        values = {key: _kld_and_error(cost, names) for key, cost in costs.items()}
        self._values = {key: value for key, value in values.items() if value is not None}
        self._flips = {key: _flips_share(cost) for key, cost in costs.items()}

    @property
    def types(self) -> tuple[TensorType, ...]:
        """The types with measurements or proxies, in the order of the file."""
        return tuple(dict.fromkeys(t for _, t in self._values))

    def kld(self, group: str, t: TensorType) -> float | None:
        """Return the estimate for a pair that was measured or has a proxy; None for others."""
        return self._estimates.get((group, t))

    def flips(self, group: str, t: TensorType) -> float:
        """Return the share of a divergence that is proportional to the error, not to its square; 0 if unknown."""
        return self._flips.get((group, t), 0.0)

    def extrapolated_kld(self, group: str, t: TensorType) -> float | None:
        """Return the estimate, for a pair of a known group and a known type also the fitted value; None for others."""
        estimate = self._estimates.get((group, t))
        if estimate is None and group in self._groups and t in self._types:
            a, b, _ = self._fit
            return float(np.exp(a[self._groups[group]] + b[self._types[t]]))
        return estimate

    @cached_property
    def _groups(self) -> Mapping[str, int]:
        return _index_items(group for group, _ in self._values)

    @cached_property
    def _types(self) -> Mapping[TensorType, int]:
        return _index_items(t for _, t in self._values)

    @cached_property
    def _observations(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], F64, F64]:
        """Group, type, logarithm of the divergence and the variance of that, each [n]."""
        value, error = (np.array(column) for column in zip(*self._values.values(), strict=True))
        value = np.maximum(value, np.maximum(error / 2, _MIN_KLD))
        indices = [(self._groups[group], self._types[t]) for group, t in self._values]
        group, kind = (np.array(column) for column in zip(*indices, strict=True))
        return group, kind, np.log(value), np.maximum(error / value, _MIN_ERROR) ** 2

    @cached_property
    def _fit(self) -> tuple[F64, F64, float]:
        """The sensitivities of groups, the coarseness of types and the variance of the residuals."""
        group, kind, y, noise = self._observations
        a, b = np.zeros(len(self._groups)), np.zeros(len(self._types))
        spread = 1.0
        for _ in range(_ROUNDS):
            weight = 1 / (noise + spread)
            for _ in range(_ROUNDS):
                a = np.bincount(group, weight * (y - b[kind])) / np.bincount(group, weight)
                b = np.bincount(kind, weight * (y - a[group])) / np.bincount(kind, weight)
            squares = (y - a[group] - b[kind]) ** 2
            freedom = max(len(y) - len(a) - len(b) + 1, 1) / len(y)
            spread = max(float(np.average(squares / freedom - noise, weights=weight)), _MIN_ERROR)
        return a, b, spread

    @cached_property
    def _estimates(self) -> dict[tuple[str, TensorType], float]:
        if not self._values:
            return {}
        group, kind, y, noise = self._observations
        a, b, spread = self._fit
        share = spread / (spread + noise)
        estimates = np.exp(share * y + (1 - share) * (a[group] + b[kind]))
        return dict(zip(self._values, estimates.tolist(), strict=True))


def _rank_proxies(sensitivity: Sensitivity) -> list[str]:
    """Return the names of all proxies: the error at the end of the layer, then by rank correlation with divergences."""
    correlations = sensitivity.settings.get("rank_correlation")
    rank_of = correlations if isinstance(correlations, Mapping) else {}
    names = dict.fromkeys(name for cost in sensitivity.costs for name in cost.proxies)
    rank = {name: rank_of[name] for name in names if isinstance(rank_of.get(name), (int, float))}
    return sorted(names, key=lambda name: (name != LAYER, -rank.get(name, 0.0)))


def _kld_and_error(cost: Cost, proxies: Sequence[str]) -> tuple[float, float] | None:
    """Return a divergence and its error, measured or from a proxy; None if unknown. Raises FormatError."""
    kld, error = cost.kld, cost.kld_error or 0.0
    if kld is None:
        name = next((name for name in proxies if name in cost.proxies), "")
        kld = cost.proxies.get(name)
        error = (_LAYER_ERROR if name == LAYER else _PROXY_ERROR) * kld if isinstance(kld, (int, float)) else 0.0
    for value in (kld, error):
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value)):
            raise FormatError(f"the sensitivities have an invalid cost of {cost.group} as {cost.type}", "QK-E122")
    return None if kld is None else (kld, error)


def _flips_share(cost: Cost) -> float:
    """Return ``flips`` of a cost, 0 for None. Raises FormatError for values outside of [0, 1]."""
    share = 0.0 if cost.flips is None else cost.flips
    if not (isinstance(share, (int, float)) and 0 <= share <= 1):
        raise FormatError(
            f"the sensitivities have invalid flips of {cost.group} as {cost.type}: not a share", "QK-E122"
        )
    return float(share)


def _index_items(items: Iterable[T]) -> dict[T, int]:
    return {item: i for i, item in enumerate(dict.fromkeys(items))}

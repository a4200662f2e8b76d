"""What quantizing a group costs, from what was measured: noise taken out, and gaps filled where that is sound.

A divergence is near the product of how sensitive a group is and how coarse a type is, so its logarithm is fitted by
a[group] + b[type], weighted by the errors of the measurements. The spread of the residuals beyond these errors says how
far the product is from the truth. An estimate is the mean of the measured value and the fitted one, each weighted by
its precision (empirical Bayes: Efron and Morris, 1975): a value far above its error stays as it was measured, one that
is all noise becomes the product. Of a pair that was not measured, there is only the product.
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
#: Rounds of the fit; the spread of the residuals settles within a few.
_ROUNDS = 20
#: The least divergence, in nats, and the least relative error of one.
_LEAST, _EXACT = 1e-12, 1e-6
#: The relative error of a proxy, and of the one that has seen the activations.
_GUESSED, _SEEN = 0.5, 0.25


class Predictor:
    """Predicted divergence of groups in types, in nats per token. ``feedback``: of what is encoded with it, if known.

    What was not measured counts as its ``proxy`` says: that of the name, or the one that predicts best what was.
    """

    def __init__(self, sensitivity: Sensitivity, *, feedback: bool = False, proxy: str | None = None) -> None:
        chosen: dict[tuple[str, TensorType], Cost] = {}
        for cost in sensitivity.costs:
            if cost.feedback <= feedback and (cost.feedback or (cost.group, cost.type) not in chosen):
                chosen[cost.group, cost.type] = cost
        names = _best_proxies(sensitivity) if proxy is None else [proxy]
        values = {key: _value(cost, names) for key, cost in chosen.items()}
        self._values = {key: value for key, value in values.items() if value is not None}
        self._flips = {key: _share(cost) for key, cost in chosen.items()}

    @property
    def types(self) -> tuple[TensorType, ...]:
        """The types of which something is known, in the order of the file."""
        return tuple(dict.fromkeys(t for _, t in self._values))

    def kld(self, group: str, t: TensorType) -> float | None:
        """Return the estimate for a group and a type that were measured together; None for others."""
        return self._estimates.get((group, t))

    def flips(self, group: str, t: TensorType) -> float:
        """Return which share of a divergence goes with the size of the error, not its square; 0 if nothing tells."""
        return self._flips.get((group, t), 0.0)

    def filled(self, group: str, t: TensorType) -> float | None:
        """Return the estimate also for a pair of which only group and type are known, each with others."""
        found = self._estimates.get((group, t))
        if found is None and group in self._groups and t in self._types:
            a, b, _ = self._fit
            return float(np.exp(a[self._groups[group]] + b[self._types[t]]))
        return found

    @cached_property
    def _groups(self) -> Mapping[str, int]:
        return _numbered(group for group, _ in self._values)

    @cached_property
    def _types(self) -> Mapping[TensorType, int]:
        return _numbered(t for _, t in self._values)

    @cached_property
    def _observed(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], F64, F64]:
        """Group, type, logarithm of the divergence and the variance of that, each [n]."""
        value, error = (np.array(each) for each in zip(*self._values.values(), strict=True))
        value = np.maximum(value, np.maximum(error / 2, _LEAST))
        at = [(self._groups[group], self._types[t]) for group, t in self._values]
        group, kind = (np.array(each) for each in zip(*at, strict=True))
        return group, kind, np.log(value), np.maximum(error / value, _EXACT) ** 2

    @cached_property
    def _fit(self) -> tuple[F64, F64, float]:
        """The sensitivities of groups, the coarseness of types and the variance of the residuals."""
        group, kind, y, noise = self._observed
        a, b, spread = np.zeros(len(self._groups)), np.zeros(len(self._types)), 1.0
        for _ in range(_ROUNDS):
            weight = 1 / (noise + spread)
            for _ in range(_ROUNDS):
                a = np.bincount(group, weight * (y - b[kind])) / np.bincount(group, weight)
                b = np.bincount(kind, weight * (y - a[group])) / np.bincount(kind, weight)
            rest = (y - a[group] - b[kind]) ** 2
            free = max(len(y) - len(a) - len(b) + 1, 1) / len(y)
            spread = max(float(np.average(rest / free - noise, weights=weight)), _EXACT)
        return a, b, spread

    @cached_property
    def _estimates(self) -> dict[tuple[str, TensorType], float]:
        if not self._values:
            return {}
        group, kind, y, noise = self._observed
        a, b, spread = self._fit
        share = spread / (spread + noise)
        estimates = np.exp(share * y + (1 - share) * (a[group] + b[kind]))
        return dict(zip(self._values, estimates.tolist(), strict=True))


def _best_proxies(sensitivity: Sensitivity) -> list[str]:
    """Return the names of all proxies, first the error at a layer's end, then by how they rank what was measured."""
    told = sensitivity.settings.get("rank_correlation")
    known = told if isinstance(told, Mapping) else {}
    names = dict.fromkeys(name for cost in sensitivity.costs for name in cost.proxies)
    rank = {name: known[name] for name in names if isinstance(known.get(name), (int, float))}
    return sorted(names, key=lambda name: (name != LAYER, -rank.get(name, 0.0)))


def _value(cost: Cost, proxies: Sequence[str]) -> tuple[float, float] | None:
    """Return a divergence and its error, measured or guessed; None without. FormatError for what is no number."""
    found, error = cost.kld, cost.kld_error or 0.0
    if found is None:
        name = next((name for name in proxies if name in cost.proxies), "")
        found = cost.proxies.get(name)
        error = (_SEEN if name == LAYER else _GUESSED) * found if isinstance(found, (int, float)) else 0.0
    for value in (found, error):
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value)):
            raise FormatError(f"the sensitivities have a cost of {cost.group} as {cost.type} that is no number")
    return None if found is None else (found, error)


def _share(cost: Cost) -> float:
    """Return ``flips`` of a cost, 0 for None. FormatError for what is no share."""
    found = 0.0 if cost.flips is None else cost.flips
    if not (isinstance(found, (int, float)) and 0 <= found <= 1):
        raise FormatError(f"the sensitivities have flips of {cost.group} as {cost.type} that are no share")
    return float(found)


def _numbered(items: Iterable[T]) -> dict[T, int]:
    return {item: i for i, item in enumerate(dict.fromkeys(items))}

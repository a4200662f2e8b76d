"""Combination of the divergences of groups quantized alone to that of all groups together.

Small independent errors add up in the variance of the logits, and the divergence k is near that variance: it adds up.
Where a small error can make a large difference (a router that chooses another expert, an argmax) there is a second part
that is proportional to the error, not to its square, and does not add up: many groups that each change the routes of
some tokens change those of the same tokens. Of this part the squares add up. Its share of a group's divergence,
``Cost.flips``, follows from the errors at the end of its layer; nothing else is fitted:

    k = sum of (1 - flips) * k_group + sqrt(sum of (flips * k_group)^2)

If the file of sensitivities has no such share (``--proxies-only``), one kink of all groups replaces it. The additive
part s of a group's divergence k follows from k = s + kink * sqrt(s), and for the sum s of all groups

    k = scale * (s + kink * sqrt(s))

Kink and scale are fitted to allocations that were measured as a whole, ``settings["together"]``, a list of {"types":
{group: type}, "kld": nats, "kld_error": nats}. Without these, divergences add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.sensitivity.file import Sensitivity
from quantkit.types import TensorType, type_by_name

#: Kinks to try, in nats^0.5, and the minimum number of allocations for a fit.
_KINKS = (0.0, *(10 ** (i / 8 - 4) for i in range(25)))
_MIN_ALLOCATIONS = 3


@dataclass(frozen=True)
class Combination:
    """The rule with one kink. ``n``: number of measured allocations it is fitted to; 0: divergences add up."""

    kink: float = 0.0
    scale: float = 1.0
    n: int = 0

    def additive_part(self, kld: float) -> float:
        """Return the additive part s of a group with the divergence ``kld`` = s + kink * sqrt(s)."""
        return ((math.sqrt(self.kink**2 + 4 * max(kld, 0.0)) - self.kink) / 2) ** 2

    def total(self, additive_sum: float) -> float:
        """Return the divergence of groups with the sum s of additive parts: scale * (s + kink * sqrt(s))."""
        return self.scale * (additive_sum + self.kink * math.sqrt(max(additive_sum, 0.0)))

    def slope(self, additive_sum: float) -> float:
        """Return the derivative of ``total``; it falls with the sum."""
        return self.scale * (1 + (self.kink / (2 * math.sqrt(additive_sum)) if additive_sum > 0 else 0.0))

    def inverse(self, kld: float) -> float:
        """Return the sum of additive parts that gives the divergence ``kld``: the inverse of ``total``."""
        return self.additive_part(kld / self.scale)


@dataclass(frozen=True)
class MeasuredAllocation:
    """An allocation that was measured as a whole."""

    types: dict[str, TensorType]
    kld: float
    error: float


def read_measured_allocations(sensitivity: Sensitivity) -> list[MeasuredAllocation]:
    """Return the allocations of a file that were measured as a whole. Raises FormatError for invalid ones."""
    try:
        return [
            MeasuredAllocation(
                {str(group): type_by_name(t) for group, t in row["types"].items()},
                float(row["kld"]),
                float(row.get("kld_error") or 0.0),
            )
            for row in sensitivity.settings.get("together") or ()
        ]
    except (KeyError, TypeError, ValueError, AttributeError, TypeNotSupported) as e:
        raise FormatError(f"settings.together of the sensitivities cannot be read: {e!r}", "QK-E122") from None


def fit_combination(
    allocations: Sequence[MeasuredAllocation], kld: Callable[[str, TensorType], float | None]
) -> Combination:
    """Return the rule of least squared difference between logarithms of measured and predicted divergences.

    ``kld``: divergence of a group alone in a type; None: unknown, and the allocation is ignored.
    """
    samples = []
    for allocation in allocations:
        parts = [kld(group, t) for group, t in allocation.types.items()]
        if allocation.kld > 0 and all(part is not None for part in parts):
            samples.append((math.log(allocation.kld), [part for part in parts if part is not None]))
    if len(samples) < _MIN_ALLOCATIONS:
        return Combination()
    best = (math.inf, Combination())
    for kink in _KINKS:
        rule = Combination(kink)
        residuals = [
            y - math.log(max(rule.total(math.fsum(map(rule.additive_part, parts))), 1e-300)) for y, parts in samples
        ]
        mean = math.fsum(residuals) / len(residuals)
        spread = math.fsum((residual - mean) ** 2 for residual in residuals)
        best = min(best, (spread, Combination(kink, math.exp(mean), len(samples))), key=lambda pair: pair[0])
    return best[1]

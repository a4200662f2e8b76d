"""How divergences of groups quantized alone become that of all together.

Small independent errors add up in the variance of the logits, and the divergence k is near that variance: it adds up.
Where a small error can make a large difference (a router that chooses another expert, an argmax) there is a second part
that goes with the size of the error, not its square, and does not add up: many groups that each change the routes of
some tokens change those of the same tokens. Of this part the squares add up. Which share of a group's divergence it is,
``Cost.flips``, the errors of its types at the end of its layer tell; nothing else is fitted:

    k = sum of (1 - flips) * k_group + sqrt(sum of (flips * k_group)^2)

Where the file of sensitivities tells no share (``--proxies-only``), one kink of all groups stands for it: of a group
alone k = s + kink * sqrt(s), what is summed up is s, and the divergence of an allocation is scale * (s + kink *
sqrt(s)) of the sum. Kink and scale come from allocations that were measured as a whole, if there are any, as
``settings["together"]``: a list of {"types": {group: type}, "kld": nats, "kld_error": nats}. Without, divergences add
up as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.sensitivity.file import Sensitivity
from quantkit.types import TensorType, type_by_name

#: Kinks that are tried, roots of nats, and the fewest allocations from which one is fitted.
_KINKS = (0.0, *(10 ** (i / 8 - 4) for i in range(25)))
_FEWEST = 3


@dataclass(frozen=True)
class Combination:
    """The rule of one kink, and how many measured allocations it was fitted to; 0: none, so that divergences add up."""

    kink: float = 0.0
    scale: float = 1.0
    n: int = 0

    def part(self, kld: float) -> float:
        """Return what is summed up of a group that alone has the divergence ``kld``."""
        return ((math.sqrt(self.kink**2 + 4 * max(kld, 0.0)) - self.kink) / 2) ** 2

    def total(self, summed: float) -> float:
        """Return the divergence of groups whose parts sum up to ``summed``."""
        return self.scale * (summed + self.kink * math.sqrt(max(summed, 0.0)))

    def summed(self, kld: float) -> float:
        """Return to what the parts may sum up for a divergence of ``kld``: the inverse of ``total``."""
        return self.part(kld / self.scale)


@dataclass(frozen=True)
class Together:
    """An allocation that was measured as a whole."""

    types: dict[str, TensorType]
    kld: float
    error: float


def measured_together(sensitivity: Sensitivity) -> list[Together]:
    """Return the allocations of a file that were measured as a whole. Raises FormatError for what cannot be read."""
    try:
        return [
            Together(
                {str(group): type_by_name(t) for group, t in row["types"].items()},
                float(row["kld"]),
                float(row.get("kld_error") or 0.0),
            )
            for row in sensitivity.settings.get("together") or ()
        ]
    except (KeyError, TypeError, ValueError, AttributeError, TypeNotSupported) as e:
        raise FormatError(f"settings.together of the sensitivities cannot be read: {e!r}") from None


def fitted(together: Sequence[Together], kld: Callable[[str, TensorType], float | None]) -> Combination:
    """Return the rule under which the logarithms of measured allocations are nearest to those predicted.

    ``kld``: what a group in a type has alone, or None; allocations with a group of which nothing is known do not count.
    """
    known = []
    for each in together:
        parts = [kld(group, t) for group, t in each.types.items()]
        if each.kld > 0 and all(part is not None for part in parts):
            known.append((math.log(each.kld), [part for part in parts if part is not None]))
    if len(known) < _FEWEST:
        return Combination()
    best = (math.inf, Combination())
    for kink in _KINKS:
        rule = Combination(kink)
        off = [y - math.log(max(rule.total(math.fsum(map(rule.part, parts))), 1e-300)) for y, parts in known]
        mean = math.fsum(off) / len(off)
        spread = math.fsum((each - mean) ** 2 for each in off)
        best = min(best, (spread, Combination(kink, math.exp(mean), len(known))), key=lambda pair: pair[0])
    return best[1]

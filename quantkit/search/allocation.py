"""What a search finds: a type for every group, and the file that comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.evaluate import Kld
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.recipe import Rule
from quantkit.quantize import QuantizeOptions
from quantkit.search.space import Part
from quantkit.types import TensorType


@dataclass(frozen=True)
class Allocation:
    """A type for every group, by name, and what comes of it.

    ``kld``: predicted nats per token. ``part``: bytes of all tensors. ``type_name``: TYPE of the plan. ``gap``: how
    much less divergence the optimum may have, where the solver's time was up. ``check``: the divergence measured.
    """

    types: Mapping[str, TensorType]
    kld: float
    part: Part
    rules: tuple[Rule, ...]
    type_name: str
    options: QuantizeOptions
    plan: Plan
    gap: float
    picks: tuple[int, ...]
    check: Kld | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.plan.nbytes

    @property
    def bpw(self) -> float:
        return self.plan.bpw

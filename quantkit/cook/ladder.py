"""The types that a search chooses from, where nobody named any: those around the goals, and few, as each costs time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quantkit.cook.targets import Goal
from quantkit.types import TensorType, type_by_name

#: Of either runtime, by bits: each better than its neighbours at its size.
_LADDERS = {
    "llama.cpp": ("IQ1_M", "IQ2_XXS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "Q5_K", "Q6_K", "Q8_0"),
    "ik_llama.cpp": ("IQ1_M", "IQ2_KS", "IQ2_KL", "IQ3_KS", "IQ3_K", "IQ4_KS", "IQ5_KS", "IQ6_K", "Q8_0"),
}
#: How far from a goal, as factors of its bits per weight, a type is still of use.
_BELOW, _ABOVE = 0.6, 1.9
#: Bits per weight of anything between very small and nearly exact, for goals that are no sizes.
_ANY = (3.3, 4.5)


def types_for(goals: Iterable[Goal], runtime: str, weights: int) -> tuple[str, ...]:
    """Return the names of types worth measuring for goals, smallest first; ``weights``: those of the model."""
    wanted: set[TensorType] = set()
    ladder = [type_by_name(name) for name in _LADDERS[runtime]]
    for goal in goals:
        for bpw in _bits(goal, weights):
            near = [t for t in ladder if _BELOW * bpw <= t.bpw <= _ABOVE * bpw]
            wanted |= set(near or _nearest(ladder, bpw))
    return tuple(t.name for t in ladder if t in wanted)


def _bits(goal: Goal, weights: int) -> Sequence[float]:
    """Return bits per weight that a goal may come to."""
    if goal.kind == "bpw":
        return (goal.value,)
    return (8 * goal.value / max(1, weights),) if goal.kind == "size" else _ANY


def _nearest(ladder: Sequence[TensorType], bpw: float) -> Sequence[TensorType]:
    return sorted(ladder, key=lambda t: abs(t.bpw - bpw))[:2]

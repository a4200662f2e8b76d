"""Tensors that keep their grid, and how many of their weights the output holds exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.pipeline.jobs import ErrorSums
from quantkit.pipeline.plan import Plan


@dataclass(frozen=True, slots=True)
class ExactTensor:
    """A tensor encoded with --keep-grid: its type, its weights, and those that decode to the source's numbers.

    ambiguous_blocks: exact blocks of which the numbers do not tell the sign of a scale, because two values of opposite
    signs are the largest: a file that was dequantized may have had the other one.
    """

    name: str
    type: str
    values: int
    exact: int
    ambiguous_blocks: int = 0


def exact_tensors(plan: Plan, sums: Mapping[str, ErrorSums]) -> list[ExactTensor]:
    """Return the tensors of a run that keep their grid, in the order of the file.

    A weight is exact if the rest of its block is, too: blocks decode, rounded to the type of the source, to its bits.
    """
    return [
        ExactTensor(t.name, str(t.type), t.n_values, int(sums[t.name].exact), int(sums[t.name].ambiguous))
        for t in plan.tensors
        if t.keeps_grid and t.name in sums
    ]

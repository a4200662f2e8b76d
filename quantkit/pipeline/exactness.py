"""Tensors that keep their grid, and how many of their weights the output holds exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.formats.gguf import Field, ValueType
from quantkit.pipeline.jobs import ErrorSums
from quantkit.pipeline.plan import Plan

#: Keys of the names of tensors that keep their grid, and of the numbers of their weights that are exact.
GRID_TENSORS, GRID_EXACT = "quantkit.quantize.grid.tensors", "quantkit.quantize.grid.exact"


@dataclass(frozen=True, slots=True)
class ExactTensor:
    """A tensor counts with --keep-grid: its type, its weights, and those that decode to the source's numbers.

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


def grid_fields(names: Iterable[str]) -> list[Field]:
    """Return the keys that record the exact weights of tensors with these names; none without names.

    The numbers are 0 in a plan: the run counts them (``header_with_counts``).
    """
    tensor_names = list(names)
    if not tensor_names:
        return []
    counts = Field.of(GRID_EXACT, [0] * len(tensor_names), ValueType.ARRAY, ValueType.UINT64)
    return [Field.of(GRID_TENSORS, tensor_names, ValueType.ARRAY, ValueType.STRING), counts]


def _place_of_counts(plan: Plan) -> slice | None:
    """Return where the header of the first file has the numbers of exact weights; None without them."""
    fields = {field.key: field for field in plan.fields}
    if not any(t.keeps_grid for t in plan.tensors) or GRID_EXACT not in fields:
        return None
    counts = fields[GRID_EXACT].encode()
    end = plan.shards[0].layout.header.rindex(counts) + len(counts)
    return slice(end - 8 * len(fields[GRID_TENSORS].value), end)


def header_with_counts(plan: Plan, sums: Mapping[str, ErrorSums]) -> bytes | None:
    """Return the header of the first file with the numbers of exact weights; None if it has no key for them."""
    place = _place_of_counts(plan)
    if place is None:
        return None
    names = next(field.value for field in plan.fields if field.key == GRID_TENSORS)
    header = bytearray(plan.shards[0].layout.header)
    header[place] = np.array([sums[name].exact for name in names], "<u8").tobytes()
    return bytes(header)


def without_counts(plan: Plan, header: bytes) -> bytes:
    """Return the header of a finished first file as the plan has it: with 0 for the numbers of exact weights."""
    place = _place_of_counts(plan)
    if place is None or len(header) < place.stop:
        return header
    return header[: place.start] + bytes(place.stop - place.start) + header[place.stop :]


def exact_weights(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of exact weights that a file's metadata record, by the name of the tensor."""
    names, counts = (metadata.get(key) for key in (GRID_TENSORS, GRID_EXACT))
    if not isinstance(names, (list, tuple, np.ndarray)) or not isinstance(counts, (list, tuple, np.ndarray)):
        return {}
    if len(names) != len(counts):
        return {}
    return {str(name): int(count) for name, count in zip(names, counts, strict=True) if isinstance(name, str)}

"""Fallbacks: tensors whose rows do not fit the requested type, and the cost of the replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.types import TensorType
from quantkit.units import format_size


@dataclass(frozen=True)
class Fallback:
    """Tensors with the same cause. ``requested``, ``type``: before and after; ``requested_bytes``: size in the
    requested type, by its bits per weight.
    """

    requested: TensorType
    type: TensorType
    cause: str
    tensors: int
    nbytes: int
    requested_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        types = {"chosen": self.requested.name, "type": self.type.name, "cause": self.cause, "tensors": self.tensors}
        return {**types, "bytes": self.nbytes, "chosen_bytes": self.requested_bytes}


def fallbacks(tensors: Sequence[PlannedTensor]) -> list[Fallback]:
    """Return the fallbacks of a plan, the largest first."""
    groups: dict[tuple[TensorType, TensorType, str], list[PlannedTensor]] = {}
    for t in tensors:
        if t.fallback_from is not None:
            groups.setdefault((t.fallback_from, t.type, _cause(t, t.fallback_from)), []).append(t)
    result = (
        Fallback(*key, len(group), sum(t.nbytes for t in group), sum(_bytes(t, key[0]) for t in group))
        for key, group in groups.items()
    )
    return sorted(result, key=lambda fallback: -fallback.nbytes)


def _cause(tensor: PlannedTensor, requested: TensorType) -> str:
    n = tensor.shape[0]
    if n % requested.block:
        return f"rows of {n} are not a multiple of blocks of {requested.block}"
    return f"the number of rows is not a multiple of {requested.interleave}"


def _bytes(tensor: PlannedTensor, t: TensorType) -> int:
    rows = tensor.n_values // max(1, tensor.shape[0])
    return rows * t.row_header + round(tensor.n_values / t.block * t.block_bytes)


def fallback_line(tensors: Sequence[PlannedTensor]) -> str:
    """Return the line of a summary about fallbacks: count, causes, cost in bytes; "" if there are none."""
    groups = fallbacks(tensors)
    if not groups:
        return ""
    count, matrices = sum(f.tensors for f in groups), sum(len(t.shape) > 1 for t in tensors)
    types: dict[tuple[str, str], int] = {}
    for f in groups:
        types[f.requested.name, f.type.name] = types.get((f.requested.name, f.type.name), 0) + f.tensors
    changes = ", ".join(f"{n} {requested} to {t}" for (requested, t), n in types.items())
    causes = "; ".join(dict.fromkeys(f.cause for f in groups))
    extra = sum(f.nbytes - f.requested_bytes for f in groups)
    nbytes, values = sum(t.nbytes for t in tensors), max(1, sum(t.n_values for t in tensors))
    size = f"{format_size(abs(extra))} {'more' if extra >= 0 else 'less'}"
    bpw = f"{8 * nbytes / values:.2f} bits per weight instead of {8 * (nbytes - extra) / values:.2f}"
    return f"fallback in {count} of {matrices} matrices: {changes} ({causes}): {size}, {bpw}"

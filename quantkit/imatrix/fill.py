"""Values for experts without tokens, and the record that distinguishes them from data.

An encoder uses ones for an expert without tokens: all columns have the same weight. A fill is another guess:

    none       nothing: the count stays 0 and both llama-quantize programs read ones
    ones       x^2 = 1 in every column; the effect of "none", made explicit
    mean       the mean over the tensor's experts with tokens, every token with the same weight
    neighbour  the nearest expert by number that has tokens; the lower of two

A filled expert has a count of 1, the least a file can hold. The file records it: quantkit.imatrix.fill is the policy,
quantkit.imatrix.filled lists "tensor: experts". Anything that reads the file as data (merge, coverage, diff, another
collection) restores the zeros. ik_llama.cpp instead fills the live statistics, so that later tokens are added to
invented ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.imatrix import F32Array, Imatrix, ImatrixEntry
from quantkit.imatrix.rows import raw
from quantkit.options.imatrix import FILLS

FILL_KEY = "quantkit.imatrix.fill"
FILLED_KEY = "quantkit.imatrix.filled"


def apply_fill(imatrix: Imatrix, policy: str) -> Imatrix:
    """Return ``imatrix`` with its empty experts filled by ``policy`` and the fill recorded; the argument is unchanged.

    An earlier fill is undone first. A .dat is made raw (quantkit.imatrix.raw). "mean" and "neighbour" leave a tensor
    in which no expert has tokens. Raises RecipeError for an unknown policy.
    """
    if policy not in FILLS:
        raise RecipeError(f"unknown fill policy {policy!r}; choose one of {', '.join(FILLS)}", "QK-E203")
    imatrix = without_fill(raw(imatrix))
    if policy == "none":
        return imatrix
    entries, fills = dict(imatrix.entries), {}
    for name, entry in imatrix.entries.items():
        empty = np.flatnonzero(entry.counts == 0)
        if entry.counts.size > 1 and empty.size and (policy == "ones" or empty.size < entry.counts.size):
            entries[name], fills[name] = _fill(entry, empty, policy), empty
    record = [f"{name}: {' '.join(map(str, experts))}" for name, experts in sorted(fills.items())]
    extra = {
        **imatrix.extra,
        FILL_KEY: Field.of(FILL_KEY, policy),
        FILLED_KEY: Field.of(FILLED_KEY, record, ValueType.ARRAY, ValueType.STRING),
    }
    return replace(imatrix, entries=entries, extra=extra)


def _fill(entry: ImatrixEntry, empty: npt.NDArray[np.intp], policy: str) -> ImatrixEntry:
    sums, counts = entry.sums.copy(), entry.counts.copy()
    in_sum = None if entry.in_sum is None else entry.in_sum.copy()
    with_tokens = np.flatnonzero(counts > 0)
    for expert in empty:
        # argmin takes the first of two equal distances: the lower number.
        sources = with_tokens if policy != "neighbour" else with_tokens[[np.argmin(np.abs(with_tokens - expert))]]
        sums[expert] = 1 if policy == "ones" else _mean(entry.sums, entry.counts, sources)
        if in_sum is not None and entry.in_sum is not None:
            in_sum[expert] = 0 if policy == "ones" else _mean(entry.in_sum, entry.counts, sources)
        counts[expert] = 1
    return ImatrixEntry(sums, counts, in_sum, None, entry.saliency)


def _mean(sums: F32Array, counts: npt.NDArray[np.int64], experts: npt.NDArray[np.intp]) -> F32Array:
    mean: F32Array = (sums[experts].sum(axis=0, dtype=np.float64) / counts[experts].sum()).astype(np.float32)
    return mean


def filled_experts(imatrix: Imatrix) -> dict[str, tuple[int, ...]]:
    """Return the filled experts of each entry, as the file records them. Raises FormatError."""
    record = imatrix.extra.get(FILLED_KEY)
    if record is None:
        return {}
    if record.item_type is not ValueType.STRING:
        raise FormatError(f"{imatrix.path}: the key {FILLED_KEY} must be an array of strings", "QK-E118")
    return dict(_parse(imatrix, line) for line in record.value)


def _parse(imatrix: Imatrix, line: str) -> tuple[str, tuple[int, ...]]:
    name, _, numbers = line.rpartition(": ")
    experts = tuple(int(n) for n in numbers.split() if n.isdecimal())
    entry = imatrix.entries.get(name)
    if entry is None or len(experts) != len(numbers.split()) or max(experts, default=0) >= entry.counts.size:
        raise FormatError(
            f"{imatrix.path}: the key {FILLED_KEY} contains {line!r}, which is not an expert of the file", "QK-E118"
        )
    return name, experts


def without_fill(imatrix: Imatrix) -> Imatrix:
    """Return ``imatrix`` as before apply_fill, without tokens for filled experts."""
    fills = filled_experts(imatrix)
    if not fills and FILL_KEY not in imatrix.extra:
        return imatrix
    entries = dict(imatrix.entries)
    for name, experts in fills.items():
        entries[name] = _empty(entries[name], experts)
    extra = {key: value for key, value in imatrix.extra.items() if key not in (FILL_KEY, FILLED_KEY)}
    return replace(imatrix, entries=entries, extra=extra)


def _empty(entry: ImatrixEntry, experts: Iterable[int]) -> ImatrixEntry:
    indices = list(experts)
    sums, counts = entry.sums.copy(), entry.counts.copy()
    sums[indices], counts[indices] = 0, 0
    in_sum = None if entry.in_sum is None else entry.in_sum.copy()
    if in_sum is not None:
        in_sum[indices] = 0
    return ImatrixEntry(sums, counts, in_sum, None, entry.saliency)


def with_entries(imatrix: Imatrix, change: Callable[[dict[str, ImatrixEntry]], dict[str, ImatrixEntry]]) -> Imatrix:
    """Return ``imatrix`` with its entries changed (renamed, dropped) by ``change``; an earlier fill is redone."""
    policy = imatrix.extra.get(FILL_KEY)
    unfilled = without_fill(imatrix)
    changed = replace(unfilled, entries=change(unfilled.entries))
    return changed if policy is None else apply_fill(changed, str(policy.value))

"""Accumulators of observing operations: arrays by name, kept from run to run, an accumulator for each label.

    SumColumns   sums f64 [n_mat, 4, columns]: sum of squares, its rounding error, sum, its error; counts i64 [n_mat]
    Covariance   sums, weighted f64 [experts, n, n]; counts i64 [experts], weight f64 [experts] (sum of weights^2)
    Similarity   total f64 [1], counts i64 [1]

The arrays are live: restoring copies of them (a snapshot) continues from there. A row that is not finite invalidates
its sums; it is reported, and the caller restores a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.model.batch import Batch, Floats, Ints
from quantkit.model.ops import Covariance, Op, Similarity, SumColumns
from quantkit.units import round_up

Accumulator = dict[str, npt.NDArray[Any]]

#: Columns of sums are a multiple of this (kernels/cpu/observe.py).
COLUMNS = 8


@dataclass(frozen=True)
class NotFinite:
    """A value that is not finite: the label of its accumulator, its sequence and position."""

    label: str
    sequence: int
    position: int


#: Called with a label and the index of the token whose row is not finite.
Report = Callable[[str, int], None]


def padded_width(width: int) -> int:
    """Return the allocated columns of sums."""
    return round_up(width, COLUMNS)


def new_accumulator(op: Op) -> Accumulator:
    """Return the empty accumulator of an observing operation."""
    if isinstance(op, SumColumns):
        sums = np.zeros((op.n_mat, 4, padded_width(op.x.width)), np.float64)
        return {"sums": sums, "counts": np.zeros(op.n_mat, np.int64)}
    if isinstance(op, Similarity):
        return {"total": np.zeros(1), "counts": np.zeros(1, np.int64)}
    assert isinstance(op, Covariance)
    n_mat, n = op.experts[1] - op.experts[0], op.x.width // op.heads
    accumulator: Accumulator = {"counts": np.zeros(n_mat, np.int64)}
    if op.plain:
        accumulator["sums"] = np.zeros((n_mat, n, n))
    if op.weights is not None:
        accumulator |= {"weighted": np.zeros((n_mat, n, n)), "weight": np.zeros(n_mat)}
    return accumulator


def not_finite(label: str, batch: Batch, row: int) -> NotFinite:
    """Return the report of a token's row."""
    return NotFinite(label, int(batch.sequences[row]), int(batch.positions[row]))


# ---------------------------------------------------------------- in numpy


def sum_columns(op: SumColumns, accumulator: Accumulator, x: Floats, ids: Ints | None, report: Report) -> None:
    """Add the rows of x, in float64 sums: the reference of SumColumns."""
    wide = x.astype(np.float64)
    _check(op.label, wide, x.shape[0] if ids is None else ids.shape[0], report)
    n = x.shape[1]
    for e, rows in _by_expert(wide, ids, (0, op.n_mat)):
        accumulator["sums"][e, 0, :n] += np.square(rows).sum(axis=0)
        accumulator["sums"][e, 2, :n] += rows.sum(axis=0)
        accumulator["counts"][e] += len(rows)


def similarity(op: Similarity, accumulator: Accumulator, a: Floats, b: Floats, report: Report) -> None:
    """Add the cosine of every row of a with that of b."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    _check(op.label, x, len(x), report)
    _check(op.label, y, len(y), report)
    with np.errstate(all="ignore"):
        cosines = (x * y).sum(axis=1) / np.sqrt(np.square(x).sum(axis=1) * np.square(y).sum(axis=1))
    accumulator["total"] += cosines[np.isfinite(cosines)].sum()
    accumulator["counts"] += len(cosines)


def covariance(
    op: Covariance, accumulator: Accumulator, x: Floats, ids: Ints | None, weights: Floats | None, report: Report
) -> None:
    """Add x x^T, float64 products by BLAS."""
    wide = x.astype(np.float64)
    _check(op.label, wide, x.shape[0] if ids is None else ids.shape[0], report)
    if op.heads > 1:
        _by_head(op, accumulator, wide)
        return
    squares = None if weights is None else np.square(weights.astype(np.float64)).reshape(-1)
    first = op.experts[0]
    for e, pairs in _pairs(len(x), ids, op.experts):
        rows = wide[pairs if ids is None or len(x) == ids.size else pairs // ids.shape[1]]
        accumulator["counts"][e - first] += len(rows)
        if "sums" in accumulator:
            accumulator["sums"][e - first] += rows.T @ rows
        if squares is not None:
            accumulator["weighted"][e - first] += (rows * squares[pairs, None]).T @ rows
            accumulator["weight"][e - first] += squares[pairs].sum()


def _by_head(op: Covariance, accumulator: Accumulator, x: Any) -> None:
    first, end = op.experts
    heads = x.reshape(len(x), op.heads, -1)
    for h in range(first, end):
        accumulator["sums"][h - first] += heads[:, h].T @ heads[:, h]
    accumulator["counts"] += len(x)


def _pairs(n: int, ids: Ints | None, experts: tuple[int, int]) -> list[tuple[int, Any]]:
    """Return every expert with tokens, and its pairs (t, j) as indices t * n_used + j; without ids one, all rows."""
    if ids is None:
        return [(0, slice(0, n))]
    flat = ids.reshape(-1)
    return [(int(e), np.flatnonzero(flat == e)) for e in np.unique(flat) if experts[0] <= e < experts[1]]


def _by_expert(x: Any, ids: Ints | None, experts: tuple[int, int]) -> list[tuple[int, Any]]:
    pairs = _pairs(len(x), ids, experts)
    return [(e, x[p if ids is None or len(x) == ids.size else p // ids.shape[1]]) for e, p in pairs]


def _check(label: str, x: Any, tokens: int, report: Report) -> None:
    with np.errstate(all="ignore"):
        bad = np.flatnonzero(~np.isfinite(x.sum(axis=1)))
    if len(bad):
        report(label, int(bad[0]) // max(1, len(x) // max(1, tokens)))

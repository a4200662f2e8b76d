"""What observing operations keep from run to run: arrays by name, an accumulator for each ``of``.

    SumColumns   sums f64 [n_mat, 4, columns]: sum of squares, what it lacks, sum, what it lacks; counts i64 [n_mat]
    Covariance   sums, weighted f64 [experts, n, n]; counts i64 [experts], weight f64 [experts] (sum of weights^2)
    Similarity   total f64 [1], counts i64 [1]

The arrays are live: restoring copies of them (a checkpoint) continues from there. A row that is not finite spoils its
sums; it is reported, and the caller goes back to a checkpoint.
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
    """A value that is not finite: of which accumulator, at which position of which sequence."""

    of: str
    sequence: int
    position: int


#: Called with the accumulator and the row among the tokens that is not finite.
Report = Callable[[str, int], None]


def padded(width: int) -> int:
    """Return the columns that sums have room for."""
    return round_up(width, COLUMNS)


def new_accumulator(op: Op) -> Accumulator:
    """Return the empty accumulator of an observing operation."""
    if isinstance(op, SumColumns):
        sums = np.zeros((op.n_mat, 4, padded(op.x.width)), np.float64)
        return {"sums": sums, "counts": np.zeros(op.n_mat, np.int64)}
    if isinstance(op, Similarity):
        return {"total": np.zeros(1), "counts": np.zeros(1, np.int64)}
    assert isinstance(op, Covariance)
    n_mat, n = op.experts[1] - op.experts[0], op.x.width // op.heads
    made: Accumulator = {"counts": np.zeros(n_mat, np.int64)}
    if op.plain:
        made["sums"] = np.zeros((n_mat, n, n))
    if op.weights is not None:
        made |= {"weighted": np.zeros((n_mat, n, n)), "weight": np.zeros(n_mat)}
    return made


def not_finite(of: str, batch: Batch, row: int) -> NotFinite:
    """Return where a token's row is."""
    return NotFinite(of, int(batch.sequences[row]), int(batch.positions[row]))


# ---------------------------------------------------------------- in numpy


def sum_columns(op: SumColumns, to: Accumulator, x: Floats, ids: Ints | None, report: Report) -> None:
    """Add the rows of x, float64 sums; what SumColumns means."""
    wide = x.astype(np.float64)
    _check(op.of, wide, x.shape[0] if ids is None else ids.shape[0], report)
    n = x.shape[1]
    for e, rows in _by_expert(wide, ids, (0, op.n_mat)):
        to["sums"][e, 0, :n] += np.square(rows).sum(axis=0)
        to["sums"][e, 2, :n] += rows.sum(axis=0)
        to["counts"][e] += len(rows)


def similarity(op: Similarity, to: Accumulator, a: Floats, b: Floats, report: Report) -> None:
    """Add the cosine of every row of a with that of b."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    _check(op.of, x, len(x), report)
    _check(op.of, y, len(y), report)
    with np.errstate(all="ignore"):
        cosines = (x * y).sum(axis=1) / np.sqrt(np.square(x).sum(axis=1) * np.square(y).sum(axis=1))
    to["total"] += cosines[np.isfinite(cosines)].sum()
    to["counts"] += len(cosines)


def covariance(
    op: Covariance, to: Accumulator, x: Floats, ids: Ints | None, weights: Floats | None, report: Report
) -> None:
    """Add x x^T, float64 products by BLAS."""
    wide = x.astype(np.float64)
    _check(op.of, wide, x.shape[0] if ids is None else ids.shape[0], report)
    if op.heads > 1:
        _by_head(op, to, wide)
        return
    squares = None if weights is None else np.square(weights.astype(np.float64)).reshape(-1)
    first = op.experts[0]
    for e, chosen in _pairs(len(x), ids, op.experts):
        rows = wide[chosen if ids is None or len(x) == ids.size else chosen // ids.shape[1]]
        to["counts"][e - first] += len(rows)
        if "sums" in to:
            to["sums"][e - first] += rows.T @ rows
        if squares is not None:
            to["weighted"][e - first] += (rows * squares[chosen, None]).T @ rows
            to["weight"][e - first] += squares[chosen].sum()


def _by_head(op: Covariance, to: Accumulator, x: Any) -> None:
    first, end = op.experts
    heads = x.reshape(len(x), op.heads, -1)
    for h in range(first, end):
        to["sums"][h - first] += heads[:, h].T @ heads[:, h]
    to["counts"] += len(x)


def _pairs(n: int, ids: Ints | None, experts: tuple[int, int]) -> list[tuple[int, Any]]:
    """Return every expert that has any, and its pairs (t, j), counted t * n_used + j; all rows without ids."""
    if ids is None:
        return [(0, slice(0, n))]
    flat = ids.reshape(-1)
    return [(int(e), np.flatnonzero(flat == e)) for e in np.unique(flat) if experts[0] <= e < experts[1]]


def _by_expert(x: Any, ids: Ints | None, experts: tuple[int, int]) -> list[tuple[int, Any]]:
    pairs = _pairs(len(x), ids, experts)
    return [(e, x[p if ids is None or len(x) == ids.size else p // ids.shape[1]]) for e, p in pairs]


def _check(of: str, x: Any, tokens: int, report: Report) -> None:
    with np.errstate(all="ignore"):
        bad = np.flatnonzero(~np.isfinite(x.sum(axis=1)))
    if len(bad):
        report(of, int(bad[0]) // max(1, len(x) // max(1, tokens)))

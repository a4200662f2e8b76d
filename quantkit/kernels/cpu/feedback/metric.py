"""The metric for rounding rows: a covariance, with its factors, packed for sweeps.

Where columns have one index in groups, also the groups' order in error feedback, and the metric within each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.factor import cholesky
from quantkit.kernels.cpu.feedback.products import correct
from quantkit.kernels.cpu.feedback.tiles import STRIP, pack_columns, pack_upper
from quantkit.kernels.levels import Grouping

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GroupMetric:
    """T and B of each group, float32 [groups, 2, columns, columns], as group_sweeps.py says.

    feedback: of groups in the order of error feedback. descent: of groups in their own order, when all other columns
    stay.
    """

    grouping: Grouping
    feedback: F32
    descent: F32


@dataclass(frozen=True, eq=False)
class Metric:
    """A covariance, ready for sweeps.

    columns: in descending order of their variance, or of their groups', int32 [n]; u, pivots: the factors U, packed,
    and D of the covariance in that order. frames: those of groups of columns, if they are rounded together. h: the
    covariance, packed, columns in their own order; per_diagonal: 1 / H_kk. correction: M, packed, of a row x whose
    target is x + x M; None: x itself. offset: an additional term of the targets, float32 [rows, n]. importance: of the
    columns, float32 [n], for encoders without an importance matrix; None: unknown.
    """

    columns: Ints
    u: F32
    pivots: F32
    h: F32
    per_diagonal: F32
    correction: F32 | None = None
    offset: F32 | None = None
    importance: F32 | None = None
    groups: GroupMetric | None = None

    @property
    def n(self) -> int:
        """Columns."""
        return len(self.columns)


def metric(covariance: F64, damping: float, threads: int = 1, grouping: Grouping | None = None) -> Metric:
    """Return the metric of a covariance [n, n] whose diagonal is raised by ``damping`` times its mean.

    It is for types that group columns so. Raises numpy.linalg.LinAlgError if it is not positive definite even so.
    """
    diagonal = np.diagonal(covariance)
    damped = diagonal + damping * diagonal.mean()
    columns = column_order(damped, grouping)
    last_first = columns[::-1]
    r = covariance[np.ix_(last_first, last_first)].astype(np.float64, copy=False)
    np.fill_diagonal(r, damped[last_first])
    upper = cholesky(r, threads)[::-1, ::-1].T  # H = upper upper^T; values below the diagonal are undefined
    roots = np.diagonal(upper)
    h = pack_columns(covariance)
    column = np.arange(len(h) * STRIP)
    h[column // STRIP, column, column % STRIP] = damped
    u, pivots = pack_upper(upper), (roots * roots).astype(np.float32)
    groups = None if grouping is None else group_metric_of(covariance, damped, upper, grouping)
    return Metric(columns.astype(np.int32), u, pivots, h, (1 / damped).astype(np.float32), groups=groups)


def target_of(x: F32, metric: Metric, row: int = 0) -> F32 | None:
    """Return the targets of rows x, from ``row`` of their matrix on, of a metric; None: the rows themselves."""
    if metric.correction is None:
        return None
    target = correct(x, metric.correction)
    return target if metric.offset is None else target + metric.offset[row : row + len(x)]


def column_order(variances: F64, grouping: Grouping | None) -> I64:
    """Return the order of columns in error feedback, int64 [n]: by variance, groups by its sum."""
    if grouping is None:
        return np.argsort(-variances, kind="stable")
    groups = grouping.order(len(variances)).reshape(-1, grouping.size)
    return groups[np.argsort(-variances[groups].sum(1), kind="stable")].ravel()


def group_factors(descent: F64, diagonal: F64, upper: F64, grouping: Grouping) -> tuple[F32, F32]:
    """Return T and B of each group, in the order of error feedback and in their own, f32 [groups, 2, columns, columns].

    descent: blocks of the covariance, float64 [groups, columns, columns], of groups in their own order; diagonal:
    replaces its diagonal, float64 [n]. upper: blocks of U, of groups in the order of error feedback; only the upper
    triangles are read.
    """
    size, t = grouping.size, np.triu(upper)
    feedback = np.stack([t, np.diagonal(t, axis1=1, axis2=2)[:, :, None] * np.eye(size)], 1)
    descent = descent.copy()
    descent[:, np.arange(size), np.arange(size)] = diagonal[grouping.order(len(diagonal)).reshape(-1, size)]
    descent_t = np.linalg.cholesky(descent[:, ::-1, ::-1])[:, ::-1, ::-1]
    return feedback.astype(np.float32), np.stack([descent_t, np.linalg.inv(descent_t)], 1).astype(np.float32)


def group_metric_of(covariance: F64, diagonal: F64, upper: F64, grouping: Grouping) -> GroupMetric:
    """Return the group metric of a covariance with another diagonal: upper upper^T, columns in error feedback's order.

    Values below the diagonal of ``upper`` are ignored.
    """
    size, n = grouping.size, len(covariance)
    descent = _blocks(covariance, grouping.order(n).reshape(-1, size)).astype(np.float64)
    upper = _blocks(upper, np.arange(n).reshape(-1, size))
    return GroupMetric(grouping, *group_factors(descent, diagonal, upper, grouping))


def _blocks(matrix: F64, groups: I64) -> F64:
    return matrix[groups[:, :, None], groups[:, None, :]]

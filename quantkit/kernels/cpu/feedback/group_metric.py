"""Groups of columns with one index: their order in error feedback, and the metric within each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.kernels.levels import Grouping

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
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


def column_order(variances: F64, grouping: Grouping | None) -> I64:
    """Return the order of columns in error feedback, int64 [n]: by variance, groups by its sum."""
    if grouping is None:
        return np.argsort(-variances, kind="stable")
    groups = grouping.order(len(variances)).reshape(-1, grouping.size)
    return groups[np.argsort(-variances[groups].sum(1), kind="stable")].ravel()


def group_metric_of(covariance: F64, diagonal: F64, upper: F64, grouping: Grouping) -> GroupMetric:
    """Return the group metric of a covariance with another diagonal: upper upper^T, columns in error feedback's order.

    What is below the diagonal of ``upper`` is not looked at.
    """
    size, n = grouping.size, len(covariance)
    t = np.triu(_blocks(upper, np.arange(n).reshape(-1, size)))
    feedback = np.stack([t, np.diagonal(t, axis1=1, axis2=2)[:, :, None] * np.eye(size)], 1)
    groups = grouping.order(n).reshape(-1, size)
    blocks = _blocks(covariance, groups).astype(np.float64)
    blocks[:, np.arange(size), np.arange(size)] = diagonal[groups]
    own_t = np.linalg.cholesky(blocks[:, ::-1, ::-1])[:, ::-1, ::-1]
    return GroupMetric(
        grouping, feedback.astype(np.float32), np.stack([own_t, np.linalg.inv(own_t)], 1).astype(np.float32)
    )


def _blocks(matrix: F64, groups: I64) -> F64:
    return matrix[groups[:, :, None], groups[:, None, :]]

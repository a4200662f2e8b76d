"""Groups of columns that are rounded together: the order in which they are fed, and the metric within each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.kernels.levels import Grouping

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Frames:
    """T and B of each group, float32 [groups, 2, columns, columns], as group_sweeps.py says.

    fed: of groups as they are fed. descended: of groups in their own order, when all other columns stay.
    """

    grouping: Grouping
    fed: F32
    descended: F32


def visited(variances: F64, grouping: Grouping | None) -> I64:
    """Return the order in which columns are fed, int64 [n]: by variance, groups by its sum."""
    if grouping is None:
        return np.argsort(-variances, kind="stable")
    groups = grouping.order(len(variances)).reshape(-1, grouping.size)
    return groups[np.argsort(-variances[groups].sum(1), kind="stable")].ravel()


def frames_of(covariance: F64, diagonal: F64, upper: F64, grouping: Grouping) -> Frames:
    """Return the frames of a covariance with another diagonal, that is upper upper^T with its columns as they are fed.

    What is below the diagonal of ``upper`` is not looked at.
    """
    size, n = grouping.size, len(covariance)
    t = np.triu(_blocks(upper, np.arange(n).reshape(-1, size)))
    fed = np.stack([t, np.diagonal(t, axis1=1, axis2=2)[:, :, None] * np.eye(size)], 1)
    groups = grouping.order(n).reshape(-1, size)
    own = _blocks(covariance, groups).astype(np.float64)
    own[:, np.arange(size), np.arange(size)] = diagonal[groups]
    own_t = np.linalg.cholesky(own[:, ::-1, ::-1])[:, ::-1, ::-1]
    return Frames(grouping, fed.astype(np.float32), np.stack([own_t, np.linalg.inv(own_t)], 1).astype(np.float32))


def _blocks(matrix: F64, groups: I64) -> F64:
    return matrix[groups[:, :, None], groups[:, None, :]]

"""Groups of columns that are rounded together: their frames, from what a device has of a metric.

These are few numbers, which LAPACK makes for the CPU (kernels/cpu/feedback/frames.py), so the host does it here, too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.kernels.levels import Grouping

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def frames_of(own: F64, diagonal: F64, upper: F64, grouping: Grouping) -> tuple[F32, F32]:
    """Return T and B of each group, as they are fed and in their own order, float32 [groups, 2, columns, columns].

    own: blocks of the covariance, float64 [groups, columns, columns], of groups in their own order; diagonal: what
    takes the place of its diagonal, float64 [n]. upper: blocks of U, of groups as they are fed; what is below their
    diagonals is not looked at.
    """
    size, t = grouping.size, np.triu(upper)
    fed = np.stack([t, np.diagonal(t, axis1=1, axis2=2)[:, :, None] * np.eye(size)], 1)
    own = own.copy()
    own[:, np.arange(size), np.arange(size)] = diagonal[grouping.order(len(diagonal)).reshape(-1, size)]
    own_t = np.linalg.cholesky(own[:, ::-1, ::-1])[:, ::-1, ::-1]
    return fed.astype(np.float32), np.stack([own_t, np.linalg.inv(own_t)], 1).astype(np.float32)

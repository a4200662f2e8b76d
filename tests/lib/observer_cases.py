"""Observing operations: checks of the sums of the CPU and CUDA devices against exact sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matmul_cases import routed

ROWS, N_EXPERT, N_USED = 70, 6, 3


def random_rows(width: int, rows: int = ROWS) -> Any:
    rng = np.random.default_rng(width)
    return (rng.normal(size=(rows, width)) * np.exp(4 * rng.normal(size=(rows, width)))).astype(np.float32)


def experts() -> Any:
    """Return ids of all experts except the last."""
    return routed(ROWS, N_USED, N_EXPERT - 1)


def check_sums(actual: Any, x: Any) -> None:
    """Compare sums [4, padded], of squares and of values, two parts each, with those of columns of x."""
    width = x.shape[1]
    for parts, power in ((actual[:2], 2), (actual[2:], 1)):
        exact = [math.fsum(float(v) ** power for v in column) for column in x.T]
        assert np.array_equal(parts[0, :width] + parts[1, :width], exact)
    assert not actual[:, width:].any()


def check_by_expert(sums: Any, counts: Any, x: Any, ids: Any) -> None:
    """Compare sums [n_expert, 4, padded] and counts; rows of x are those of tokens or of pairs."""
    pairs = np.repeat(x, ids.size // len(x), 0)
    for e in range(N_EXPERT):
        rows = pairs[ids.ravel() == e]
        assert counts[e] == len(rows)
        check_sums(sums[e], rows)

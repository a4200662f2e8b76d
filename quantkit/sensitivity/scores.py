"""Divergence of a changed model from the base, batch by batch, with the base's logits in memory.

For logits p of the base and q of the changed model: KL = sum e^(p - P) (p - q) + Q - P, where P and Q are their
log-sum-exps. Logits are subtracted before weighting, so that small divergences keep their precision.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.evaluate.scores import TILE, nll_of, softmax
from quantkit.evaluate.statistics import mean_and_error

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]


class Sums(NamedTuple):
    """Sums over tokens: count, KL divergence d and change x of the negative log-likelihood, d^2 and x^2."""

    n: float = 0.0
    kld: float = 0.0
    kld2: float = 0.0
    change: float = 0.0
    change2: float = 0.0

    def add(self, sums: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(self, sums, strict=True)))

    def means(self) -> tuple[float, float, float, float]:
        """Return the mean divergence and its standard error, then those of the change."""
        n = int(self.n)
        return *mean_and_error(self.kld, self.kld2, n), *mean_and_error(self.change, self.change2, n)


class Base:
    """Predictions of the base for a batch: logits f32 [rows, n_vocab], and the tokens that follow, int32 [rows]."""

    def __init__(self, logits: F32, following: I32, pool: ThreadPoolExecutor) -> None:
        self.logits = logits.copy()
        self.following = following
        self._pool = pool
        self.weights = np.empty_like(self.logits)
        rows, n_vocab = logits.shape
        self.log_sum, self.nll, self.total = (np.empty(rows, np.float64) for _ in range(3))
        step = max(1, TILE // n_vocab)
        self._tiles = [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
        list(pool.map(self._prepare, self._tiles))

    def _prepare(self, tile: slice) -> None:
        parts = softmax(self.logits[tile])
        np.divide(parts.exps, parts.total[:, None], out=self.weights[tile])
        self.total[tile] = self.weights[tile].sum(axis=1, dtype=np.float64)  # 1, except for rounding
        self.log_sum[tile] = parts.top + parts.log_total
        self.nll[tile] = nll_of(self.logits[tile], parts, self.following[tile])

    def compare(self, logits: F32) -> Sums:
        """Return the sums for a changed model. Its logits, f32 [rows, n_vocab], may be overwritten."""
        columns = [np.empty(len(self.nll), np.float64) for _ in range(2)]

        def score(tile: slice) -> None:
            q, weights = logits[tile], self.weights[tile]
            parts = softmax(q)
            change = nll_of(q, parts, self.following[tile])
            shift = parts.top + parts.log_total
            terms = np.subtract(self.logits[tile], q, out=parts.exps)
            mean = np.multiply(terms, weights, out=terms).sum(axis=1, dtype=np.float64) / self.total[tile]
            columns[0][tile] = np.maximum(mean + shift - self.log_sum[tile], 0)
            columns[1][tile] = change - self.nll[tile]

        list(self._pool.map(score, self._tiles))
        kld, change = columns
        return Sums(len(kld), *(float(x) for x in (kld.sum(), kld @ kld, change.sum(), change @ change)))

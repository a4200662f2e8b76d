"""Statistics of the drift of embeddings: cosines by text, and the agreement on nearest neighbours.

Similarities are cosines between the embeddings of two texts under one file. Rank correlation is Spearman's, over all
pairs of texts; pairs share texts, so its error is that of a jackknife that leaves out a group of texts at a time
(Wolter, Introduction to Variance Estimation, 2007, chapter 4). Equal nearest neighbours are shares of texts, with
Wilson's interval; recall@k is the mean over texts of the share of their k nearest neighbours that both files agree on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.evaluate.statistics import Distribution, Estimate, distribution
from quantkit.score.accuracy import Accuracy

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

#: Groups of the jackknife.
GROUPS = 20
#: Texts whose neighbours are compared, at most: all pairs are held in memory.
MOST_NEIGHBOURS = 4096
_FRACTIONS = (0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001)


class Neighbours(NamedTuple):
    """Agreement of two files on the nearest neighbours of ``n`` texts.

    rank_correlation: Spearman's, of the similarities of all pairs. same_nearest: texts with the same nearest neighbour.
    recall: the mean share of the ``k`` nearest that both files agree on.
    """

    n: int
    k: int
    rank_correlation: Estimate
    same_nearest: Accuracy
    recall: Estimate


def cosines(a: F32, b: F32) -> F64:
    """Return the cosine of each row of a [n, width], of length 1, with that of b, float64 [n]."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    products: F64 = (x * y).sum(1) / np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return np.minimum(products, 1.0)


def mean_of(values: F64) -> Estimate:
    """Return the mean of independent values and its standard error, 0 for fewer than two."""
    n = len(values)
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else 0.0)


def percentiles(values: F64) -> Distribution:
    """Return maximum, percentiles and minimum of cosines."""
    return distribution(values.astype(np.float32), _FRACTIONS)


def neighbours(a: F32, b: F32, k: int) -> Neighbours | None:
    """Compare the neighbours of texts under two files, rows [n, width] of length 1; None for fewer than three texts.

    k: of recall; at most n - 1.
    """
    n = min(len(a), MOST_NEIGHBOURS)
    if n < 3:
        return None
    k = min(k, n - 1)
    similar_a, similar_b = (_similarities(rows[:n]) for rows in (a, b))
    nearest_a, nearest_b = (_nearest(similar, k) for similar in (similar_a, similar_b))
    shared = np.array([len(np.intersect1d(x, y)) for x, y in zip(nearest_a, nearest_b, strict=True)]) / k
    n_same = int((nearest_a[:, 0] == nearest_b[:, 0]).sum())
    return Neighbours(n, k, _rank_correlation(similar_a, similar_b), Accuracy(n_same, n), mean_of(shared))


def _similarities(rows: F32) -> F32:
    """Return the cosines of all pairs of rows, -infinity for a row with itself."""
    similar: F32 = rows @ rows.T
    np.fill_diagonal(similar, -np.inf)
    return similar


def _nearest(similar: F32, k: int) -> I64:
    """Return the numbers of the k nearest of each row, nearest first; of equal ones the first."""
    return np.argsort(-similar, axis=1, kind="stable")[:, :k]


def _rank_correlation(a: F32, b: F32) -> Estimate:
    """Return Spearman's correlation of the pairs of two matrices, and its error by the jackknife."""
    n = len(a)
    value = _spearman(a, b, np.arange(n))
    groups = np.array_split(np.random.default_rng(0).permutation(n), min(GROUPS, n // 3))
    if len(groups) < 2:
        return Estimate(value, 0.0)
    parts = np.array([_spearman(a, b, np.setdiff1d(np.arange(n), group)) for group in groups])
    g = len(groups)
    return Estimate(value, math.sqrt((g - 1) / g * float(np.square(parts - parts.mean()).sum())))


def _spearman(a: F32, b: F32, texts: I64) -> float:
    """Return Spearman's correlation of the pairs of some texts; 1 if neither varies, 0 if one does not."""
    rows, columns = np.triu_indices(len(texts), 1)
    x, y = (ranks(similar[texts[rows], texts[columns]]) for similar in (a, b))
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / scale if scale else float(not x.any() and not y.any())


def ranks(values: F32) -> F64:
    """Return the ranks of values from 0, equal ones the mean of theirs, float64 [n]."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    result: F64 = (last - (counts - 1) / 2)[inverse]
    return result

"""Intervals of a mean over the tokens of some chunks, and a rule for when to stop measuring.

Divergences of tokens in one chunk correlate, so chunks are the units: the error of a mean is that of a ratio of sums
over chunks (linearization; Cochran, Sampling Techniques, 1977, 6.4), which with equally many tokens per chunk is the
error of the mean of their means. Its quantile is Student's.

``looks`` and ``alpha_of_look`` make an interval valid although a run stops as soon as it is narrow. The numbers of
chunks at which a run may stop are fixed beforehand, and each look spends an equal part of the 5 % (Bonferroni): the
probability that any of the intervals misses the mean, and so that the one at which the run stops does, is at most 5 %,
whatever the dependence of looks. Pocock (Biometrika 64, 1977) describes designs with repeated looks; his constants, for
equal steps, are a few percent narrower.

Chunks must then be drawn at random: those at the start of a text resemble each other more than the rest. Without
replacement the error is smaller than that of independent draws (Hoeffding, JASA 58, 1963, theorem 4), so intervals
are conservative for the mean of the whole text.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

#: The probability that an interval does not contain the mean.
ALPHA = 0.05
#: Chunks at the first look, and the growth from look to look.
FIRST_LOOK, GROWTH = 16, 1.5
#: Degrees of freedom above which Student's distribution is taken as normal: quantiles differ by less than 0.1 %.
_NORMAL_FROM = 2000


class ChunkMean(NamedTuple):
    """The mean per token over ``n`` chunks, and its standard error; infinite for a single chunk."""

    value: float
    error: float
    n: int

    def half_width(self, alpha: float = ALPHA) -> float:
        """Return half the width of the interval that does not contain the mean with probability ``alpha``."""
        return student_quantile(1 - alpha / 2, self.n - 1) * self.error if self.n > 1 else math.inf

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return the ends of the interval."""
        half = self.half_width(alpha)
        return self.value - half, self.value + half


def chunk_mean(totals: F64, counts: I64) -> ChunkMean:
    """Return the mean per token of chunks with sums ``totals`` [n] over ``counts`` [n] tokens."""
    n, tokens = len(totals), int(counts.sum())
    mean = float(totals.sum()) / tokens
    if n < 2:
        return ChunkMean(mean, math.inf, n)
    residuals = totals - mean * counts
    return ChunkMean(mean, math.sqrt(n / (n - 1) * float(residuals @ residuals)) / tokens, n)


def looks(n: int, multiple: int = 1) -> tuple[int, ...]:
    """Return the numbers of chunks at which a run over ``n`` may stop, multiples of ``multiple``; the last is n."""
    result, size = list[int](), float(FIRST_LOOK)
    while size < n:
        look = -(-math.ceil(size) // multiple) * multiple
        result += [look] if look < n and look not in result else []
        size *= GROWTH
    return (*result, n)


def alpha_of_look(n_looks: int) -> float:
    """Return the part of ALPHA that each of the looks may spend."""
    return ALPHA / n_looks


@cache
def student_quantile(p: float, degrees: int) -> float:
    """Return the quantile of Student's distribution for p above 0.5 (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    if degrees > _NORMAL_FROM:
        return NormalDist().inv_cdf(p)
    low, high = 0.0, 1.0
    while _central_mass(high, degrees) < 2 * p - 1:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_mass(middle, degrees) < 2 * p - 1 else (low, middle)
    return high


def _central_mass(t: float, degrees: int) -> float:
    """Return the probability of absolute values below t."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine2 = math.cos(angle) ** 2
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for i in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cosine2 * (i - 1) / i
        total += term
    mass = math.sin(angle) * total
    return 2 / math.pi * (angle + mass) if is_odd else mass

"""Statistics over scored tokens: llama-perplexity's, with its names, definitions, errors and roundings.

Each scored token has: nll and nll_base, its negative log-probability under the compared and the base model; kld, the
divergence of the whole predictions there; p_diff, the difference of the token's probabilities; and whether both models
have the same top token. Definitions from llama.cpp b11434 perplexity.cpp kl_divergence:

    mean +- error              sum / n +- sqrt((sum2 / n - mean^2) / (n - 1)), the error 0 up to 10 tokens
    PPL +- error               exp(mean nll) +- PPL * its error
    Cor, ln ratio, ratio, diff errors by the covariance of nll and nll_base
    RMS dp                     sqrt(mean dp^2) +- error of mean dp^2 / (2 * RMS)
    percentiles                linear between sorted values, in float32

It squares in float32 where llama.cpp does. Where llama.cpp prints nan (0 / 0 or the root of -1e-20, for a
model compared with itself), the result is 0, and 1 for a correlation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

#: The minimum number of tokens for which statistics are printed.
MIN_TOKENS = 100

_KLD_FRACTIONS = (0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001)
_P_DIFF_FRACTIONS = (0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001)


def finite(x: float) -> float | str:
    """Return a float, or its name if JSON cannot hold it."""
    return x if math.isfinite(x) else str(x)


#: Standard errors on each side of 95 % of a normal distribution.
_Z_95 = 1.96


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float

    def text(self, decimals: int) -> str:
        """Return the text "0.01493 ± 0.00190"."""
        return f"{self.value:.{decimals}f} ± {self.error:.{decimals}f}"

    def interval(self) -> tuple[float, float]:
        """Return the ends of its 95 % interval."""
        return self.value - _Z_95 * self.error, self.value + _Z_95 * self.error

    def as_dict(self) -> dict[str, float | str]:
        """Return the object for JSON."""
        return {"value": finite(self.value), "error": finite(self.error)}


class Scores(NamedTuple):
    """Scores of some tokens, arrays [n].

    ``nll``, ``nll_base``, ``p_diff`` f32; ``kld`` f64; ``same_top`` bool; ``bound`` f64: of the error of
    ``kld``, 0 if the base has every token.
    """

    nll: F32
    nll_base: F32
    kld: F64
    p_diff: F32
    same_top: npt.NDArray[np.bool_]
    bound: F64


class Distribution(NamedTuple):
    """Percentiles, largest first: label ("99.9%", "Median", ...) and value."""

    rows: tuple[tuple[str, float], ...]

    def __getitem__(self, label: object) -> float:  # type: ignore[override]
        return dict(self.rows)[str(label)]


def mean_and_error(total: float, squares: float, n: int) -> Estimate:
    """Return the mean and its error, from the sum, the sum of squares and the count."""
    if n < 1:
        return Estimate(0.0, 0.0)
    mean = total / n
    variance = squares / n - mean * mean
    return Estimate(mean, math.sqrt(variance / (n - 1)) if variance > 0 and n > 10 else 0.0)


def percentile(values: F32, fraction: float) -> float:
    """Return a percentile of sorted values f32 [n], with float32 positions as llama.cpp b11434's lambda percentile."""
    position = np.float32(fraction) * np.float32(values.size - 1)
    below = min(int(position), values.size - 1)
    part = position - np.float32(below)
    return float((np.float32(1) - part) * values[below] + part * values[min(below + 1, values.size - 1)])


def distribution(values: F32, fractions: Sequence[float]) -> Distribution:
    """Return maximum, percentiles and minimum of values, f32 [n]."""
    x = np.sort(values)
    half = x.size // 2
    median = float(np.float32(0.5) * (x[half] + x[half - 1]) if x.size % 2 == 0 else x[half])
    rows = [("Maximum", float(x[-1]))]
    for fraction in fractions:
        rows.append(("Median", median) if fraction == 0.5 else (f"{100 * fraction:.1f}%", percentile(x, fraction)))
    return Distribution((*rows, ("Minimum", float(x[0]))))


@dataclass
class NllSums:
    """Running sums of negative log-likelihoods."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, nll: npt.NDArray[np.floating]) -> None:
        """Add the tokens of a chunk, [n]; float32 values are squared in float32."""
        self.n += nll.size
        self.total += float(nll.sum(dtype=np.float64))
        self.squares += float((nll * nll).sum(dtype=np.float64))

    def merge(self, sums: NllSums) -> None:
        """Add the tokens of other sums."""
        self.n += sums.n
        self.total += sums.total
        self.squares += sums.squares

    @property
    def mean(self) -> Estimate:
        """The mean negative log-likelihood."""
        return mean_and_error(self.total, self.squares, self.n)

    @property
    def ppl(self) -> Estimate:
        mean, error = self.mean
        value = math.exp(mean) if mean < 700 else math.inf
        return Estimate(value, value * error)


@dataclass
class KldSums:
    """Running sums of a comparison; 8 bytes a token are stored for percentiles."""

    nll: NllSums = field(default_factory=NllSums)
    nll_base: NllSums = field(default_factory=NllSums)
    product: float = 0.0
    kld: NllSums = field(default_factory=NllSums)
    p_diff: NllSums = field(default_factory=NllSums)
    p_diff4: float = 0.0
    same_top: int = 0
    bound: float = 0.0
    klds: list[F32] = field(default_factory=list)
    p_diffs: list[F32] = field(default_factory=list)

    def add(self, scores: Scores) -> None:
        """Add the tokens of a chunk."""
        self.nll.add(scores.nll)
        self.nll_base.add(scores.nll_base)
        self.product += float((scores.nll * scores.nll_base).sum(dtype=np.float64))
        self.kld.add(scores.kld)
        self.p_diff.add(scores.p_diff)
        self.p_diff4 += float(np.square((scores.p_diff * scores.p_diff).astype(np.float64)).sum())
        self.same_top += int(scores.same_top.sum())
        self.bound += float(scores.bound.sum())
        self.klds.append(scores.kld.astype(np.float32))
        self.p_diffs.append(scores.p_diff)

    def merge(self, sums: KldSums) -> None:
        """Add the tokens of other sums."""
        for target, part in (
            *((self.nll, sums.nll), (self.nll_base, sums.nll_base)),
            *((self.kld, sums.kld), (self.p_diff, sums.p_diff)),
        ):
            target.merge(part)
        self.product += sums.product
        self.p_diff4 += sums.p_diff4
        self.same_top += sums.same_top
        self.bound += sums.bound
        self.klds += sums.klds
        self.p_diffs += sums.p_diffs

    @property
    def n(self) -> int:
        return self.nll.n

    @property
    def covariance(self) -> float:
        """The covariance of the means of nll and nll_base; 0 below 10 tokens."""
        if self.n < 10:
            return 0.0
        a, b = self.nll.total / self.n, self.nll_base.total / self.n
        return (self.product / self.n - a * b) / (self.n - 1)

    @property
    def correlation(self) -> float:
        errors = self.nll.mean.error * self.nll_base.mean.error
        return self.covariance / errors if errors > 0 else 1.0

    @property
    def ln_ratio(self) -> Estimate:
        """ln(PPL(Q) / PPL(base))."""
        q, base = self.nll.mean, self.nll_base.mean
        return Estimate(q.value - base.value, _root(q.error**2 + base.error**2 - 2 * self.covariance))

    @property
    def ratio(self) -> Estimate:
        value, error = self.ln_ratio
        ratio = math.exp(min(value, 700))
        return Estimate(ratio, ratio * error)

    @property
    def difference(self) -> Estimate:
        q, base = self.nll.ppl, self.nll_base.ppl
        if not math.isfinite(q.value - base.value):
            return Estimate(math.inf, math.inf)
        covariance = q.value * base.value * self.covariance
        return Estimate(q.value - base.value, _root(q.error**2 + base.error**2 - 2 * covariance))

    @property
    def rms_p_diff(self) -> Estimate:
        mean, error = mean_and_error(self.p_diff.squares, self.p_diff4, self.n)
        rms = _root(mean)
        return Estimate(rms, 0.5 / rms * error if rms > 0 else 0.0)

    @property
    def same_top_p(self) -> Estimate:
        share = self.same_top / self.n
        return Estimate(share, _root(share * (1 - share) / (self.n - 1)) if self.n > 1 else 0.0)

    def kld_distribution(self) -> Distribution:
        return distribution(np.concatenate(self.klds), _KLD_FRACTIONS)

    def p_diff_distribution(self) -> Distribution:
        return distribution(np.concatenate(self.p_diffs), _P_DIFF_FRACTIONS)


def _root(x: float) -> float:
    return math.sqrt(x) if x > 0 else 0.0

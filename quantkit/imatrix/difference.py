"""Comparison of two importance matrices, weight by weight, as an encoder sees them.

With a and b the E[x^2] of the experts with enough tokens in both files::

    relative   |a - b| / |a|           cosine   a b / (|a| |b|)
    worst      the expert with the largest relative difference, and that difference

Token counts are compared where both files have them, and experts with tokens in only one file are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.formats.imatrix import Imatrix, ImatrixEntry
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.imatrix.fill import without_fill
from quantkit.imatrix.rows import EXPERTS, means, raw, split_experts


@dataclass(frozen=True)
class TensorDifference:
    """One weight in both files; NaN if the two cannot be compared."""

    name: str
    relative: float
    cosine: float
    #: The expert that differs most, and its difference; None for weights without experts.
    worst: int | None
    worst_relative: float
    #: Tokens of all experts, and the largest relative difference of a count; None for a .dat.
    tokens_a: int | None
    tokens_b: int | None
    counts: float | None
    #: Experts with too few tokens in either file, and experts empty in just one of them.
    n_skipped: int = 0
    one_sided: int = 0
    #: The reason why nothing can be compared.
    note: str = ""

    @property
    def figure(self) -> float:
        """The figure a limit applies to: the relative difference, or the worst expert's; NaN exceeds any limit."""
        return max(self.relative, self.worst_relative) if self.worst is not None else self.relative


@dataclass(frozen=True)
class Difference(HtmlTable):
    """The differences between two importance matrices."""

    tensors: tuple[TensorDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def beyond(self, limit: float) -> list[str]:
        """Return the reasons why the two differ by more than ``limit``, a relative difference."""
        reasons = [f"{name}: only in A" for name in self.only_a] + [f"{name}: only in B" for name in self.only_b]
        for t in self.tensors:
            if t.note:
                reasons.append(f"{t.name}: {t.note}")
            elif not t.figure <= limit:
                where = "" if t.worst is None else f" (expert {t.worst})"
                reasons.append(f"{t.name}: relative difference {t.figure:.3g}{where}")
            elif t.one_sided:
                reasons.append(f"{t.name}: {t.one_sided} experts have tokens in one file only")
        return reasons

    def as_table(self) -> Table:
        """Return the weights, the most different ones first."""
        ordered = sorted(self.tensors, key=lambda t: (not math.isnan(t.figure), -t.figure))
        rows = ((t.name, t.relative, t.cosine, t.worst, t.worst_relative, t.tokens_a, t.tokens_b) for t in ordered)
        header = "weight, relative difference, cosine, worst expert, its difference, tokens A, tokens B"
        return table_of(
            header, rows, f"{len(self.tensors)} weights, {len(self.only_a)} only in A, {len(self.only_b)} in B"
        )


def difference(a: Imatrix, b: Imatrix, *, min_tokens: int = 1, experts: Mapping[str, int] | None = None) -> Difference:
    """Compare two importance matrices of any format.

    Args:
        a: the reference.
        min_tokens: experts with fewer tokens in either file are skipped.
        experts: numbers of experts known from a model (rows.expert_counts).
    """
    has_counts = a.format == b.format == "gguf"
    a, b = (without_fill(raw(i, experts=experts)) for i in (a, b))
    return Difference(
        tuple(_compare(n, a.entries[n], b.entries[n], min_tokens, has_counts) for n in sorted(_common_names(a, b))),
        tuple(sorted(a.entries.keys() - b.entries.keys())),
        tuple(sorted(b.entries.keys() - a.entries.keys())),
    )


def _common_names(a: Imatrix, b: Imatrix) -> Iterable[str]:
    return a.entries.keys() & b.entries.keys()


def _compare(name: str, a: ImatrixEntry, b: ImatrixEntry, min_tokens: int, has_counts: bool) -> TensorDifference:
    if a.sums.size != b.sums.size or a.counts.size != b.counts.size and 1 not in (a.counts.size, b.counts.size):
        note = f"{a.sums.size} values of {a.counts.size} experts and {b.sums.size} of {b.counts.size}"
        return TensorDifference(name, math.nan, math.nan, None, math.nan, None, None, None, note=note)
    one_count = a.counts.size != b.counts.size
    n_mat = max(a.counts.size, b.counts.size)
    a, b = (split_experts(entry, n_mat) for entry in (a, b))
    sufficient = (a.counts >= max(1, min_tokens)) & (b.counts >= max(1, min_tokens))
    one_sided = int(((a.counts > 0) != (b.counts > 0)).sum())
    comparable = has_counts and not one_count
    tokens_a, tokens_b = (int(a.counts.sum()), int(b.counts.sum())) if comparable else (None, None)
    counts = _counts(a.counts, b.counts) if comparable else None
    if not sufficient.any():
        note = "no expert has enough tokens in both files" if n_mat > 1 else "not enough tokens in both files"
        undefined = (math.nan, math.nan, None, math.nan)
        return TensorDifference(name, *undefined, tokens_a, tokens_b, counts, n_mat, one_sided, note)
    x, y = means(a)[sufficient], means(b)[sufficient]
    rows = _relative(x, y)
    worst = int(np.argmax(np.where(np.isnan(rows), np.inf, rows)))
    experts = EXPERTS in name
    return TensorDifference(
        name,
        float(_relative(x.reshape(1, -1), y.reshape(1, -1))[0]),
        _cosine(x, y),
        int(np.flatnonzero(sufficient)[worst]) if experts else None,
        float(rows[worst]),
        tokens_a,
        tokens_b,
        counts,
        int((~sufficient).sum()),
        one_sided,
    )


def _relative(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return |a - b| / |a| of every row; 0 for two null rows, infinity if only a is null."""
    with np.errstate(all="ignore"):
        error, square = np.square(a - b).sum(axis=1), np.square(a).sum(axis=1)
        relative: npt.NDArray[np.float64] = np.where(error == 0, 0.0, np.sqrt(error / square))
    return relative


def _cosine(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    with np.errstate(all="ignore"):
        return float((a * b).sum() / np.sqrt(np.square(a).sum() * np.square(b).sum()))


def _counts(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> float:
    return float((np.abs(a - b) / np.maximum(1, np.maximum(a, b))).max())

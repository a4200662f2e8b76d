"""Scores of tokens from logits: log-softmax, divergence from a base, the most probable tokens.

Functions work on tiles: a few rows of logits, f32 [rows, n_vocab], that fit a core's cache, one thread each; numpy
releases the GIL throughout. Large temporaries are reused from tile to tile, one set per thread: fresh pages would cost
more than the arithmetic. Exponentials are float32, sums of them float64, as in llama.cpp b11434
perplexity.cpp; its float32 roundings are kept in what goes into a base file or a comparison.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.errors import QuantkitError
from quantkit.evaluate.statistics import Scores
from quantkit.formats.logits import CompactRows, LlamaRows
from quantkit.formats.ranges import Buffers

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

#: Values of a tile, or one row: with its temporaries it fits into a core's cache.
TILE = 1 << 17

#: llama.cpp excludes tokens from the divergence that are less probable than this in the base.
_LEAST_LOG_P = np.float32(-16)


class _Scratch(Buffers, threading.local):
    """Per-thread temporaries of the size of a tile, by name."""

    def like(self, logits: F32, name: str, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """Return an uninitialized array of the shape of ``logits``."""
        kind = np.dtype(dtype)
        return self.get(name, kind.itemsize * logits.size).view(kind).reshape(logits.shape)


_scratch = _Scratch()


class Softmax(NamedTuple):
    """Softmax terms of rows of logits: maximum ``top`` f32 [rows]; ``exps`` f32 [rows, n_vocab] = exp(logits - top);
    sum ``total`` f64 [rows].

    ``exps`` is scratch of the thread, valid until its next tile.
    """

    top: F32
    exps: F32
    total: F64

    @property
    def log_total(self) -> F64:
        """The log-sum-exp without the maximum, f64 [rows]."""
        return np.asarray(np.log(self.total), np.float64)


def softmax(logits: F32) -> Softmax:
    """Return the terms of each row's softmax. Raises QuantkitError on NaN and +Inf."""
    top = logits.max(axis=1)
    if not np.isfinite(top).all():
        raise QuantkitError(
            "the logits are NaN or infinite: the file is damaged (see quantkit inspect, quantkit compare), or values "
            "exceed --kv-type f16",
            "QK-E108",
        )
    exps = np.subtract(logits, top[:, None], out=_scratch.like(logits, "exps"))
    np.exp(exps, out=exps)
    return Softmax(top, exps, exps.sum(axis=1, dtype=np.float64))


def following_logits(logits: F32, following: I32) -> F32:
    """Return the logit of the token that follows each row, f32 [rows]."""
    return np.asarray(logits[np.arange(len(logits)), following])


def nll_of(logits: F32, parts: Softmax, following: I32) -> F64:
    """Return the negative log-likelihood of the tokens that follow, f64 [rows]."""
    return parts.log_total - (following_logits(logits, following) - parts.top)


def compare_with_llama(logits: F32, base: LlamaRows, following: I32) -> Scores:
    """Score rows of logits against rows of llama.cpp's base file (b11434 perplexity.cpp log_softmax with kld)."""
    parts = softmax(logits)
    log_total = parts.log_total.astype(np.float32)
    nll = parts.top + log_total - following_logits(logits, following)
    log_p = base.log_probs(_scratch.like(logits, "log_p"))
    nll_base = -following_logits(log_p, following)
    same_top = logits.argmax(axis=1) == log_p.argmax(axis=1)
    # p * (log p - logit + log-sum-exp), each step in float32. Excluded tokens get p = 0: assigning through a mask
    # takes twenty times as long.
    counts = np.greater(log_p, _LEAST_LOG_P, out=_scratch.like(logits, "counts", np.bool_))
    terms = np.subtract(log_p, logits, out=_scratch.like(logits, "terms"))
    terms += (parts.top + log_total)[:, None]
    p = np.exp(log_p, out=parts.exps)
    p *= counts
    if np.isneginf(logits.min()):
        terms[~counts] = 0  # 0 * Inf
    terms *= p
    kld = terms.sum(axis=1, dtype=np.float64)
    return Scores(nll, nll_base, kld, np.exp(-nll) - np.exp(-nll_base), same_top, np.zeros_like(kld))


def compare_with_logits(logits: F32, base: F32, following: I32) -> Scores:
    """Score rows of logits against the base's own, both f32 [rows, n_vocab]; equal logits have a divergence of 0."""
    q = softmax(logits)
    log_sum_q = q.top + q.log_total
    p = softmax(base)  # in the scratch of q, whose exponentials are no longer needed
    log_sum_p = p.top + p.log_total
    probabilities = p.exps
    probabilities /= p.total[:, None].astype(np.float32)
    with np.errstate(invalid="ignore"):
        terms = np.subtract(base, logits, out=_scratch.like(logits, "terms"))
        terms *= probabilities
    if np.isneginf(min(base.min(), logits.min())):
        terms[probabilities == 0] = 0  # Inf - Inf, 0 * Inf
    kld = terms.sum(axis=1, dtype=np.float64) - (log_sum_p - log_sum_q)
    nll = (log_sum_q - following_logits(logits, following)).astype(np.float32)
    nll_base = (log_sum_p - following_logits(base, following)).astype(np.float32)
    same_top = logits.argmax(axis=1) == base.argmax(axis=1)
    return Scores(nll, nll_base, kld, np.exp(-nll) - np.exp(-nll_base), same_top, np.zeros_like(kld))


def compare_with_compact(logits: F32, base: CompactRows, following: I32) -> Scores:
    """Score rows of logits against rows of quantkit's base file; the formula is in formats/logits/compact.py."""
    parts = softmax(logits)
    rows, n_vocab = logits.shape
    begin, counts = base.starts[:-1], np.diff(base.starts)
    row_of = np.repeat(np.arange(rows), counts)
    shift = parts.top + parts.log_total
    flat = base.ids + row_of * n_vocab
    log_p = base.log_probs.astype(np.float64)
    log_q = logits.ravel()[flat] - shift[row_of]
    p, least_p = np.exp(log_p), np.minimum.reduceat(log_p, begin)
    terms = p * (log_p - log_q)
    # The model's probability of the other tokens: both sums have the same exponentials, so the difference is exact to
    # 1e-16.
    q = parts.exps.ravel()[flat] / parts.total[row_of]
    least_q = logits.min(axis=1) - shift
    model_residual = np.maximum(1 - np.add.reduceat(q, begin), (n_vocab - counts) * np.exp(least_q))
    residual = base.residual.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        tail = np.where(residual > 0, residual * np.log(residual / model_residual), 0.0)
        slack = np.where(residual > 0, np.maximum(residual * (least_p - least_q) - tail, 0), 0.0)
        guess = np.minimum(residual * _divergence_at_edge(log_p - least_p[row_of] < 2, p, q, terms, begin), slack)
    nll = (shift - following_logits(logits, following)).astype(np.float32)
    nll_base = -base.next
    same_top = logits.argmax(axis=1) == base.ids[_first_top(base.log_probs, base.starts)]
    kld = np.add.reduceat(terms, begin) + tail + guess
    bound = np.maximum(guess, slack - guess) + 1e-6
    return Scores(nll, nll_base, kld, np.exp(-nll) - np.exp(-nll_base), same_top, bound)


def _divergence_at_edge(edge: npt.NDArray[np.bool_], p: F64, q: F64, terms: F64, begin: I64) -> F64:
    """Return the divergence of the tokens marked by ``edge``, renormalized by row; f64 [rows]."""
    p_mass, q_mass, total = (np.add.reduceat(np.where(edge, x, 0), begin) for x in (p, q, terms))
    divergence = total / p_mass - np.log(p_mass / q_mass)
    return np.where(np.isfinite(divergence), np.maximum(divergence, 0), 0.0)


def _first_top(log_probs: F32, starts: I64) -> I64:
    """Return the index of each row's largest value, the first of equal ones."""
    counts = np.diff(starts)
    is_top = log_probs == np.repeat(np.maximum.reduceat(log_probs, starts[:-1]), counts)
    indices = np.flatnonzero(is_top)
    row = np.repeat(np.arange(counts.size), counts)[indices]
    return indices[np.unique(row, return_index=True)[1]]


def most_probable(logits: F32, parts: Softmax, following: I32, top_k: int, residual: float) -> CompactRows:
    """Return the most probable tokens of every row: ``top_k``, or fewer whose residual mass is at most ``residual``."""
    log_total = parts.log_total
    ids, residuals = [], []
    for row, x in enumerate(logits):
        candidates = largest(x, top_k)
        order = np.argsort(-x[candidates], kind="stable")
        tails = 1 - np.cumsum(parts.exps[row, candidates[order]], dtype=np.float64) / parts.total[row]
        # tails are descending; find the first one that is small enough.
        count = min(tails.size, int(np.searchsorted(-tails, -residual)) + 1)
        ids.append(np.sort(candidates[order[:count]]))
        residuals.append(max(0.0, float(tails[count - 1])) if count < x.size else 0.0)
    starts = np.cumsum([0, *(i.size for i in ids)])
    token_ids = np.concatenate(ids)
    row_of = np.repeat(np.arange(len(ids)), np.diff(starts))
    log_probs = logits[row_of, token_ids] - parts.top[row_of] - log_total[row_of]
    return CompactRows(
        (parts.top + log_total).astype(np.float32),
        np.array(residuals, np.float32),
        -nll_of(logits, parts, following).astype(np.float32).clip(min=0),
        starts,
        token_ids,
        np.minimum(log_probs, 0).astype(np.float32),
    )


def largest(x: F32, k: int) -> I64:
    """Return the indices of the ``k`` largest values of x, f32 [n], ascending; the first of equal ones at the limit."""
    if k >= x.size:
        return np.arange(x.size)
    # Partitioning 150000 values takes a millisecond; a sample gives a threshold that a few thousand exceed.
    stride = max(1, min(64, x.size // (4 * k)))
    sample = x[::stride]
    rank = min(sample.size - 1, 3 * k // (2 * stride) + 16)
    candidates = np.flatnonzero(x >= np.partition(sample, sample.size - 1 - rank)[sample.size - 1 - rank])
    if candidates.size < k:
        candidates = np.arange(x.size)
    values = x[candidates]
    edge = np.partition(values, values.size - k)[values.size - k]
    above, equal = candidates[values > edge], candidates[values == edge]
    return np.sort(np.concatenate([above, equal[: k - above.size]]))

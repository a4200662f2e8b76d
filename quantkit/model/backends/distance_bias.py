"""Biases of attention by distance for tokens that also attend to later ones: ALiBi's, and T5's learned buckets.

Both are a table with a row per head, so kernels add a number that they look up by the distance of a key.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from quantkit.model.ops import Attention

#: From this distance on, T5 has one bias.
MAX_DISTANCE = 128
#: Columns after the last distance, which vectors of keys beyond a sequence's end may read.
PADDING = 64


def has_table(op: Attention) -> bool:
    """Return whether attention has biases that also depend on distances to later tokens."""
    return op.mask == "whole" and (op.alibi > 0 or op.buckets is not None)


def bias_table(op: Attention, n_ctx: int, buckets: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    """Return the biases of all distances up to ``n_ctx`` - 1.

    Args:
        op: attention with ALiBi or buckets.
        n_ctx: the longest sequence.
        buckets: float32 [n_buckets * n_head], the values of ``op.buckets``.

    Returns:
        float32 [n_head, 2 * n_ctx + PADDING]: column n_ctx - 1 + d is the bias of a key d positions after the token.
    """
    distances = np.arange(1 - n_ctx, n_ctx)
    table = np.zeros((op.n_head, 2 * n_ctx + PADDING), np.float32)
    if op.alibi:
        slopes = np.array([alibi_slope(op.alibi, op.n_head, head) for head in range(op.n_head)], np.float32)
        table[:, : len(distances)] -= slopes[:, None] * np.abs(distances).astype(np.float32)
    if buckets is not None:
        by_bucket = buckets.reshape(-1, op.n_head)
        table[:, : len(distances)] += by_bucket[distance_buckets(distances, len(by_bucket))].T
    return table


def alibi_slope(largest: float, n_head: int, head: int) -> np.float32:
    """Return ALiBi's slope of a head: a geometric series over the largest power of two, then the values between."""
    n = 1 << math.floor(math.log2(n_head))
    if head < n:
        return np.float32((2.0 ** (-largest / n)) ** (head + 1))
    return np.float32((2.0 ** (-largest / 2 / n)) ** (2 * (head - n) + 1))


def distance_buckets(distances: npt.NDArray[np.int64], n_buckets: int) -> npt.NDArray[np.int64]:
    """Return T5's bucket of each distance: half of the buckets are for later tokens (Raffel et al. 2020).

    Of each half, half are exact distances; the others grow with the logarithm up to MAX_DISTANCE, rounded to f32 where
    llama.cpp b11434's llama_relative_position_bucket rounds.
    """
    half = n_buckets // 2
    exact = half // 2
    sizes = np.abs(distances)
    logs = np.log((np.maximum(sizes, 1) / exact).astype(np.float32)) * np.float32(half - exact)
    steps = logs.astype(np.float64) / math.log(MAX_DISTANCE / exact)
    log_buckets = np.floor((exact + steps).astype(np.float32)).astype(np.int64)
    buckets = np.where(sizes < exact, sizes, np.minimum(log_buckets, half - 1))
    result: npt.NDArray[np.int64] = buckets + half * (distances > 0)
    return result

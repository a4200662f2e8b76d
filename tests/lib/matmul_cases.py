"""Products: results in double, and the weights, experts and rows for the CPU and for CUDA devices."""

from __future__ import annotations

from typing import Any

import numpy as np
from blocks import random_rows

from quantkit.kernels.formats import format_of
from quantkit.kernels.reference import decode_rows
from quantkit.types import TensorType

f32, f64 = np.float32, np.float64


def draw_weights(t: TensorType, shape: tuple[int, ...], rng: Any, scale: tuple[float, float] = (0.001, 0.02)) -> Any:
    """Return random rows, uint8 [..., row_bytes], with moderate scales."""
    if t.block == 1:
        values = rng.standard_normal(shape).astype(f32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16) if t.name == "BF16" else values
        return (values.astype(np.float16) if t.name == "F16" else bits).view(np.uint8)
    return random_rows(t, *shape, seed=rng, scale=scale)


def decode(w: Any, t: TensorType) -> Any:
    return decode_rows(t, w).astype(f64)


def products(w: Any, t: TensorType, values: Any, excess: Any) -> Any:
    """Return x w^T for w [n_out, row_bytes], float64 [rows, n_out].

    Weights multiply the values of x. Minimums multiply the sum of a block less the excess, because s of q8_1 is rounded
    separately.
    """
    y = values @ decode(w, t).T * float(f32(format_of(t).row_scale_gain))
    if t.name in ("Q4_1", "Q5_1"):
        m = np.ascontiguousarray(w.reshape(len(w), -1, t.block_bytes)[..., 2:4]).view(np.float16)[..., 0]
        y -= excess @ m.astype(f64).T
    return y


def routed(rows: int, n_used: int, experts: Any, seed: Any = 5) -> Any:
    """Return the ids of the experts of rows, int32 [rows, n_used]; ``experts``: their number, or a list."""
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(experts)[:n_used] for _ in range(rows)], np.int32)


def products_by_expert(w: Any, t: TensorType, values: Any, excess: Any, ids: Any) -> Any:
    """Return every pair's product with its expert, float64 [pairs, n_out]; rows of x are those of tokens or pairs."""
    y, per = np.empty((ids.size, w.shape[1])), ids.size // len(values)
    for e in np.unique(ids):
        pairs = np.flatnonzero(ids == e)
        y[pairs] = products(w[e], t, values[pairs // per], excess[pairs // per])
    return y


def awkward_rows(n: int) -> Any:
    """Return rows of very different magnitudes: zeros, ties of both signs, halves to round, denormals, single
    spikes."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((11, n)).astype(f32)
    x[1] *= f32(1e-3) * np.exp2(np.arange(n) // 32 % 7).astype(f32)
    x[2] = np.round(x[2] * 127) / 2  # many ties of magnitude, and halves
    x[3] *= f32(1e-39)
    x[4] = 0
    x[5] = np.where(np.arange(n) % 300 == 17, x[5] * f32(1e6), f32(0))
    x[6, : n // 2], x[6, n // 2 :] = -2.5, 2.5
    x[7] *= f32(5e-37)
    x[8] *= f32(3e35)
    x[9] = np.where((np.arange(n) + np.arange(n) // 256) % 2, f32(2.5), f32(-2.5))
    x[10] *= np.exp(rng.standard_normal(n))
    x[10, :32], x[10, 40:64] = 0, 0
    return x

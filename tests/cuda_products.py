"""What tests of products on the device share: weights drawn for a type, activations by numpy in the device's layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blocks import random_rows
from device_memory import Memory

from quantkit.kernels.formats import activation_format
from quantkit.kernels.reference import decode_rows
from quantkit.types import TensorType

f32, f64 = np.float32, np.float64


def draw_weights(t: TensorType, shape: tuple[int, ...], rng: Any) -> Any:
    """Return random rows, uint8 [..., row_bytes], whose scales are sensible numbers."""
    if t.block == 1:
        values = rng.standard_normal(shape).astype(f32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16) if t.name == "BF16" else values
        return (values.astype(np.float16) if t.name == "F16" else bits).view(np.uint8)
    return random_rows(t, *shape, seed=rng, scale=(0.001, 0.02))


def quantize(x: Any, kind: str) -> tuple[Any, Any, Any]:
    """Return levels [rows, n_pad], d [rows, n_pad / 32] and sums [rows, n_pad / 16] as the contract has them."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 256)))
    blocks = x.reshape(len(x), -1, 256 if kind == "q8_k" else 32)
    amax = np.abs(blocks).max(-1)
    if kind == "q8_k":
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
        factor = np.divide(f32(-127), largest, where=largest != 0, out=np.zeros_like(largest))
        d = np.divide(f32(1), factor, where=factor != 0, out=np.zeros_like(factor))
    else:
        factor = np.divide(f32(127), amax, where=amax > 2.0**-120, out=np.zeros_like(amax))
        d = (amax / f32(127)).astype(np.float16).astype(f32)
    levels = np.minimum(np.rint(blocks * factor[..., None]), 127).reshape(x.shape).astype(np.int8)
    of16 = levels.reshape(len(x), -1, 16).sum(-1, dtype=f32)
    if kind == "q8_k":
        return levels, d.repeat(8, 1), of16 * d.repeat(16, 1)
    sums = np.zeros_like(of16)
    if kind == "q8_1":
        sums[:, ::2] = (of16.reshape(len(x), -1, 2).sum(-1) * (amax / f32(127))).astype(np.float16)
    return levels, d, sums


def rows_of(x: Any, t: TensorType) -> tuple[Any, Any, Any]:
    """Return rows for the device (uint8), the values that weights multiply, and what minimums multiply besides.

    The value of a minimum's product is its own number (sums), not the sum of the values.
    """
    kind = activation_format(t)
    if t.block == 1:
        rounded = x
        if kind == "f16":
            rounded = x.astype(np.float16).astype(f32)
        elif kind == "bf16":
            u = x.view(np.uint32)
            rounded = ((u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(f32)
        return rounded.view(np.uint8), rounded.astype(f64), None
    levels, d, sums = quantize(x, kind)
    n = x.shape[1]
    values = levels.astype(f64) * d.astype(f64).repeat(32, 1)
    excess = values.reshape(len(x), -1, 32).sum(-1) - sums.astype(f64).reshape(len(x), -1, 2).sum(-1)
    rows = np.concatenate([a.view(np.uint8) for a in (levels, d, sums)], 1)
    return rows, values[:, :n], excess[:, : n // 32]


def decode(w: Any, t: TensorType) -> Any:
    return decode_rows(t, w).astype(f64)


def products(w: Any, t: TensorType, values: Any, excess: Any) -> Any:
    """Return x w^T for w [n_out, row_bytes], float64 [rows, n_out]."""
    y = values @ decode(w, t).T
    if t.name in ("Q4_1", "Q5_1"):  # s of q8_1 is rounded by itself
        m = np.ascontiguousarray(w.reshape(len(w), -1, t.block_bytes)[..., 2:4]).view(np.float16)[..., 0]
        y -= excess @ m.astype(f64).T
    return y


def check(got: Any, want: Any) -> None:
    error = np.square(got - want).sum() / np.square(want).sum()
    assert error < 1e-12, error


def put_rows(memory: Memory, x: Any, t: TensorType) -> tuple[dict[str, int], Any, Any]:
    rows, values, excess = rows_of(x, t)
    return {"x": memory.put(rows), "x_stride": rows.shape[1]}, values, excess


def on(memory: Memory, capability: int) -> int:
    """Let the device be of some capability, if it is not of a lower one; a GPU is what it is. Return its capability."""
    if memory.device.capability > capability:
        if type(memory.device).__name__ == "CUDADevice":
            pytest.skip(f"this device is no sm_{capability}")
        memory.device.capability = capability
    return int(memory.device.capability)

"""Shared by tests of products on the device: activations by numpy in the device's layout, a check of each kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from matmul_cases import draw_weights, f32, f64, products, products_by_expert

from quantkit.kernels.cuda.core.kernel import Shape
from quantkit.kernels.cuda.layer.glu import limits
from quantkit.kernels.cuda.matmul import moe
from quantkit.kernels.cuda.matmul.activations import OF_ROWS
from quantkit.kernels.formats import activation_format
from quantkit.kernels.parameters import Activation
from quantkit.model.backends.reference import gate as gated
from quantkit.types import TensorType


def quantize(x: Any, kind: str) -> tuple[Any, Any, Any]:
    """Return levels [rows, n_pad], d [rows, n_pad / 32] and sums [rows, n_pad / 16] as specified in activations.cuh."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 256)))
    if kind in OF_ROWS:
        return quantize_rows(x, kind)
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


def quantize_rows(x: Any, kind: str) -> tuple[Any, Any, Any]:
    """Return the same for a format with row scales; the levels of q8_k64 are by words."""
    words = x.reshape(len(x), -1, 4, 4)
    amax = np.abs(words).max((1, 3))
    if kind == "q8_kv":
        amax = np.broadcast_to(amax.max(1, keepdims=True), amax.shape)
    d = amax / f32(127)
    levels = np.rint(words * np.divide(f32(1), d, where=d > 0, out=np.zeros_like(d))[:, None, :, None]).astype(np.int8)
    if kind == "q8_k64":
        levels = by_words(levels.reshape(x.shape))
    return levels.reshape(x.shape), np.tile(d, x.shape[1] // 128), np.zeros((len(x), x.shape[1] // 16), f32)


def by_words(values: Any) -> Any:
    """Return values, [rows, units * 256], in the order of q8_k64: the words g of each 16 bytes of 128 side by side."""
    return values.reshape(len(values), -1, 8, 4, 4).swapaxes(2, 3).reshape(values.shape)


def in_order(values: Any) -> Any:
    """Return values stored by words in order."""
    return values.reshape(len(values), -1, 4, 8, 4).swapaxes(2, 3).reshape(values.shape)


def rows_of(x: Any, t: TensorType) -> tuple[Any, Any, Any]:
    """Return rows for the device (uint8), the decoded values, and their excess (matmul_cases.products)."""
    kind = activation_format(t)
    if t.block == 1:
        rounded = x
        if kind == "f16":
            rounded = x.astype(np.float16).astype(f32)
        elif kind == "bf16":
            u = x.view(np.uint32)
            rounded = ((u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(f32)
        return rounded.view(np.uint8), rounded.astype(f64), np.zeros((len(x), 0))
    levels, d, sums = quantize(x, kind)
    n = x.shape[1]
    values = levels.astype(f64) * d.astype(f64).repeat(32, 1)
    if kind == "q8_k64":
        values = in_order(values)
    excess = values.reshape(len(x), -1, 32).sum(-1) - sums.astype(f64).reshape(len(x), -1, 2).sum(-1)
    rows = np.concatenate([a.view(np.uint8) for a in (levels, d, sums)], 1)
    return rows, values[:, :n], excess[:, : n // 32]


def check(actual: Any, want: Any) -> None:
    error = np.square(actual - want).sum() / np.square(want).sum()
    assert error < 1e-12, error


def put_rows(memory: Memory, x: Any, t: TensorType) -> tuple[dict[str, int], Any, Any]:
    rows, values, excess = rows_of(x, t)
    return {"x": memory.put(rows), "x_stride": rows.shape[1]}, values, excess


def on(memory: Memory, capability: int) -> int:
    """Set the device's capability, unless its own is lower; a GPU's cannot be set. Return its capability."""
    if memory.device.capability > capability:
        if type(memory.device).__name__ == "CUDADevice":
            pytest.skip(f"this device is not sm_{capability}")
        memory.device.capability = capability
    return int(memory.device.capability)


def multiply(memory: Memory, shape: Shape, t: TensorType, w: Any, x: Any) -> tuple[Any, Any]:
    """Return a kernel's result for rows x, and the expected one."""
    place, values, excess = put_rows(memory, x, t)
    rows, n_out, n_in = len(x), len(w), x.shape[1]
    out = memory.allocate((rows, n_out))
    memory.run(
        shape, **place, rows=rows, w=memory.put(w), row_bytes=w.shape[1], n_in=n_in, n_out=n_out, out=out,
        out_stride=4 * n_out, bias=0, scale=0,
    )  # fmt: skip
    return memory.get(out, (rows, n_out)), products(w, t, values, excess)


def check_mul_mat(memory: Memory, shape: Shape, t: TensorType, n_in: int, n_out: int, rows: int) -> None:
    """Check a product, by itself and with scale and bias; rows of the output are longer than the result."""
    rng = np.random.default_rng(3)
    w, x = draw_weights(t, (n_out, n_in), rng), rng.standard_normal((rows, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    bias, scale = rng.standard_normal(n_out).astype(f32), np.array([0.75], f32)
    y = products(w, t, values, excess)
    stride = n_out + 3
    out, weights = memory.allocate((rows, stride)), memory.put(w)
    for b, s, want in ((0, 0, y), (memory.put(bias), memory.put(scale), y * 0.75 + bias)):
        memory.run(
            shape, **place, rows=rows, w=weights, row_bytes=w.shape[1], n_in=n_in, n_out=n_out, out=out,
            out_stride=4 * stride, bias=b, scale=s,
        )  # fmt: skip
        actual = memory.get(out, (rows, stride))
        check(actual[:, :n_out], want)
        assert np.isnan(actual[:, n_out:]).all()


def check_heads(memory: Memory, shape: Shape, t: TensorType, n_in: int, n_out: int, rows: int, heads: int) -> None:
    """Check the products of heads; outputs of heads are not contiguous."""
    rng, room = np.random.default_rng(5), n_out + 3
    w, x = draw_weights(t, (heads, n_out, n_in), rng), rng.standard_normal((rows * heads, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    out = memory.allocate((rows, heads, room))
    memory.run(
        shape, rows=rows, x=place["x"], x_stride=heads * place["x_stride"], x_head_bytes=place["x_stride"],
        w=memory.put(w), row_bytes=w.shape[2], head_bytes=w[0].nbytes, heads=heads, n_in=n_in, n_out=n_out,
        out=out, out_stride=4 * heads * room, out_head_bytes=4 * room,
    )  # fmt: skip
    actual = memory.get(out, (rows, heads, room))
    check(
        actual[..., :n_out], np.stack([products(w[h], t, values[h::heads], excess[h::heads]) for h in range(heads)], 1)
    )
    assert np.isnan(actual[..., n_out:]).all()


def check_gated(actual: Any, a: Activation, g: Any, u: Any) -> None:
    want = gated(a, g.astype(f32), u.astype(f32))
    if a.kind in ("gelu", "gelu_quick"):  # through f16: the last bit of the product may change the last bit of the f16
        np.testing.assert_allclose(actual, want, rtol=1.1e-3, atol=1e-4)
        assert np.mean(np.abs(actual - want) > 1e-5 * np.abs(want)) < 0.1
    else:
        check(actual, want)


def check_up_gate(memory: Memory, shape: Shape, t: TensorType, a: Activation, n_in: int, n_out: int, rows: int) -> None:
    """Check a gated product, alone and with biases and scales, which bring it to the limits."""
    rng = np.random.default_rng(7)
    w, x = draw_weights(t, (2, n_out, n_in), rng), rng.standard_normal((rows, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    u, g = (products(part, t, values, excess) for part in w)
    biases = rng.standard_normal((2, n_out)).astype(f32)
    scales = np.array([[0.5], [1.25]], f32) / f32(u.std())
    out, weights = memory.allocate(u.shape), {"up": memory.put(w[0]), "gate": memory.put(w[1])}
    for with_both in (False, True):
        extra = dict.fromkeys(("up_bias", "gate_bias", "up_scale", "gate_scale"), 0)
        if with_both:
            u, g = u * scales[0] + biases[0], g * scales[1] + biases[1]
            extra = {name: memory.put(v) for name, v in zip(extra, (*biases, *scales), strict=True)}
        memory.run(
            shape, **place, **weights, **extra, **limits(a), rows=rows, row_bytes=w.shape[2], n_in=n_in, n_out=n_out,
            out=out, out_stride=4 * n_out,
        )  # fmt: skip
        check_gated(memory.get(out, u.shape), a, g, u)


def plan_for(memory: Memory, ids: Any, n_expert: int) -> dict[str, int]:
    """Make a plan; return the slots of products by expert."""
    rows, n_used = ids.shape
    plan, address = memory.allocate((moe.plan_bytes(n_expert, n_used, rows),), np.uint8), memory.put(ids)
    card = memory.device.capability
    memory.run(
        moe.bucket(n_expert, card), plan=plan, ids=address, rows=rows, n_used=n_used, n_expert=n_expert,
        runs=moe.bucket_runs(n_expert, card),
    )  # fmt: skip
    return {"rows": rows, "ids": address, "plan": plan, "n_expert": n_expert, "n_used": n_used}


def no_plan(memory: Memory, ids: Any, n_expert: int) -> dict[str, int]:
    """Return the slots of products by expert that need no plan."""
    return {"rows": len(ids), "ids": memory.put(ids), "plan": 0, "n_expert": n_expert, "n_used": ids.shape[1]}


def check_mul_mat_id(
    memory: Memory, shape: Shape, t: TensorType, n_in: int, n_out: int, ids: Any, pairs: dict[str, int], x_per: int
) -> None:
    """Check products by expert, by themselves and with scales and biases. pairs: the slots of ``plan_for``."""
    rng, flat, n_expert = np.random.default_rng(8), ids.ravel(), pairs["n_expert"]
    w = draw_weights(t, (n_expert, n_out, n_in), rng)
    place, values, excess = put_rows(memory, rng.standard_normal((ids.size // x_per, n_in)).astype(f32), t)
    bias, scale = rng.standard_normal((n_expert, n_out + 4)).astype(f32), rng.uniform(0.5, 2, n_expert).astype(f32)
    y = products_by_expert(w, t, values, excess, ids)
    out, weights = memory.allocate(y.shape), memory.put(w)
    for b, s, want in ((0, 0, y), (memory.put(bias), memory.put(scale), y * scale[flat, None] + bias[flat, :n_out])):
        memory.run(
            shape, **place, **pairs, x_per=x_per, w=weights, row_bytes=w.shape[2], expert_bytes=w[0].nbytes, n_in=n_in,
            n_out=n_out, out=out, bias=b, bias_stride=bias[0].nbytes, scale=s,
        )  # fmt: skip
        check(memory.get(out, y.shape), want)


def check_up_gate_id(
    memory: Memory, shape: Shape, t: TensorType, a: Activation, n_in: int, n_out: int, ids: Any,
    pairs: dict[str, int], merged: bool,
) -> None:  # fmt: skip
    """Check gated products by expert. merged: an expert's gate rows, then its up rows, in one tensor."""
    rng, experts, n_expert = np.random.default_rng(9), ids.ravel(), pairs["n_expert"]
    w = draw_weights(t, (n_expert, 2, n_out, n_in), rng)
    place, values, excess = put_rows(memory, rng.standard_normal((len(ids), n_in)).astype(f32), t)
    gate, up = (products_by_expert(w[:, i], t, values, excess, ids) for i in range(2))
    bias, half = rng.standard_normal((n_expert, 2, n_out)).astype(f32), w[0, 0].nbytes
    scale = rng.uniform(0.5, 2, (2, n_expert)).astype(f32) / f32(up.std())
    if merged:
        address = memory.put(w)
        weights = {"gate": address, "up": address + half, "gate_expert_bytes": 2 * half, "up_expert_bytes": 2 * half}
    else:
        weights = {"gate": memory.put(w[:, 0]), "up": memory.put(w[:, 1])}
        weights |= {"gate_expert_bytes": half, "up_expert_bytes": half}
    b, s, out = memory.put(bias), memory.put(scale), memory.allocate(up.shape)
    memory.run(
        shape, **place, **pairs, **weights, x_per=ids.shape[1], row_bytes=w.shape[-1], n_in=n_in, n_out=n_out,
        out=out, up_bias=b + 4 * n_out, gate_bias=b, up_bias_stride=8 * n_out, gate_bias_stride=8 * n_out,
        up_scale=s, gate_scale=s + 4 * n_expert, **limits(a),
    )  # fmt: skip
    up, gate = up * scale[0, experts, None] + bias[experts, 1], gate * scale[1, experts, None] + bias[experts, 0]
    check_gated(memory.get(out, up.shape), a, gate, up)

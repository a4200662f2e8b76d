"""Products of few rows on the device against numpy, activations quantized by numpy to the device's layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_products import check, draw_weights, on, products, put_rows
from device_memory import Memory
from host_device import HostDevice, compiler

from quantkit.kernels.cuda.layer.glu import GATES, limits
from quantkit.kernels.cuda.matmul import mat_vec
from quantkit.kernels.parameters import Activation
from quantkit.model.backends.reference import gate as gated
from quantkit.types import BY_NAME, TensorType

f32 = np.float32


@pytest.fixture
def as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices are computed as large ones are: several rows at once, by a warp."""
    monkeypatch.setattr(mat_vec, "_FEW", 0)
    monkeypatch.setattr(mat_vec, "_MANY", 0)


#: One type of each way to unpack, with row lengths that leave lanes idle, use fewer lanes, or more warps.
SMALL = [
    ("Q8_0", 2048, 37, 1),
    ("Q4_1", 1056, 19, 8),
    ("Q2_K", 1024, 9, 1),
    ("IQ1_M", 2048, 5, 4),
    ("IQ4_KS", 2304, 19, 1),
    ("IQ6_K", 1024, 9, 1),
    ("IQ4_KSS", 2304, 5, 4),
    ("F16", 2064, 11, 2),
    ("BF16", 49, 9, 8),
]
LARGE = [
    ("Q8_0", 96, 21, 5),
    ("Q4_K", 768, 70, 2),
    ("Q6_K", 2304, 19, 3),
    ("Q3_K", 2048, 21, 1),
    ("IQ3_XXS", 512, 41, 1),
    ("IQ4_KS", 768, 41, 8),
    ("IQ2_KS", 1024, 21, 5),
    ("IQ2_K", 512, 41, 1),
    ("IQ5_KS", 768, 19, 3),
    ("IQ2_KL", 1024, 21, 2),
    ("IQ1_BN", 320, 21, 1),
    ("IQ2_BN", 192, 17, 4),
    ("Q6_0", 96, 21, 1),
    ("Q8_KV", 160, 21, 2),
    ("MXFP4", 160, 21, 1),
    ("NVFP4", 128, 17, 7),
    ("TQ1_0", 256, 70, 4),
    ("IQ1_S", 2560, 13, 1),
    ("Q1_0", 1536, 35, 1),
    ("F32", 100, 13, 3),
]


@pytest.mark.parametrize(("name", "n_in", "n_out", "rows"), SMALL)
def test_mul_mat_agrees_with_numpy(memory: Memory, name: str, n_in: int, n_out: int, rows: int) -> None:
    check_mul_mat(memory, name, n_in, n_out, rows)


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize(("name", "n_in", "n_out", "rows"), LARGE)
def test_mul_mat_of_several_rows_at_once(memory: Memory, name: str, n_in: int, n_out: int, rows: int) -> None:
    check_mul_mat(memory, name, n_in, n_out, rows)


def test_mul_mat_of_several_rows_by_several_warps(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mat_vec, "_FEW", 0)
    check_mul_mat(memory, "Q5_0", 4128, 13, 3)


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize(("name", "n_in", "n_out", "rows"), [SMALL[0], LARGE[1], SMALL[5]])
def test_turing_copies_through_registers(memory: Memory, name: str, n_in: int, n_out: int, rows: int) -> None:
    on(memory, 75)
    check_mul_mat(memory, name, n_in, n_out, rows)


def check_mul_mat(memory: Memory, name: str, n_in: int, n_out: int, rows: int) -> None:
    t, rng = BY_NAME[name], np.random.default_rng(3)
    w, x = draw_weights(t, (n_out, n_in), rng), rng.standard_normal((rows, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    bias, scale = rng.standard_normal(n_out).astype(f32), np.array([0.75], f32)
    y = products(w, t, values, excess)
    stride = n_out + 3
    out, weights = memory.room((rows, stride)), memory.put(w)
    for b, s, want in ((0, 0, y), (memory.put(bias), memory.put(scale), y * 0.75 + bias)):
        memory.run(
            mat_vec.mul_mat(t, n_in, n_out, rows),
            **place, rows=rows, w=weights, row_bytes=w.shape[1], n_in=n_in, n_out=n_out, out=out,
            out_stride=4 * stride, bias=b, scale=s,
        )  # fmt: skip
        got = memory.get(out, (rows, stride))
        check(got[:, :n_out], want)
        assert np.isnan(got[:, n_out:]).all()


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "F16"])
def test_a_row_does_not_depend_on_its_companions(memory: Memory, name: str) -> None:
    t, rng, n_in, n_out = BY_NAME[name], np.random.default_rng(4), 2048, 11
    w, x = draw_weights(t, (n_out, n_in), rng), rng.standard_normal((8, n_in)).astype(f32)
    place, _, _ = put_rows(memory, x, t)
    weights, alone, out = memory.put(w), memory.room((8, n_out)), memory.room((8, n_out))
    common = {"x_stride": place["x_stride"], "w": weights, "row_bytes": w.shape[1], "n_in": n_in, "n_out": n_out}
    common |= {"out_stride": 4 * n_out, "bias": 0, "scale": 0}
    for i in range(8):
        at = {"x": place["x"] + i * place["x_stride"], "out": alone + 4 * n_out * i}
        memory.run(mat_vec.mul_mat(t, n_in, n_out, 1), rows=1, **at, **common)
    want = memory.get(alone, (8, n_out))
    for rows in (3, 8):
        memory.run(mat_vec.mul_mat(t, n_in, n_out, rows), rows=rows, x=place["x"], out=out, **common)
        np.testing.assert_array_equal(memory.get(out, (rows, n_out)), want[:rows])


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler: install g++")
@pytest.mark.parametrize("name", ["Q8_0", "IQ1_S", "F16"])
def test_an_early_launch_asks_for_weights_only_before_it_waits(name: str) -> None:
    """x, what the launch before writes, is forbidden memory until then (and not for the test's own copy)."""
    device = HostDevice()
    memory = Memory(device)
    t, rng, n_in, n_out = BY_NAME[name], np.random.default_rng(4), 1024, 11
    w, x = draw_weights(t, (n_out, n_in), rng), rng.standard_normal((1, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    out = memory.room((1, n_out))
    slots = {**place, "w": memory.put(w), "row_bytes": w.shape[1], "n_in": n_in, "n_out": n_out, "out": out}
    try:
        device.not_ready(place["x"], place["x_stride"])
        memory.run(mat_vec.mul_mat(t, n_in, n_out, 1), rows=1, out_stride=4 * n_out, bias=0, scale=0, **slots)
    finally:
        device.not_ready(0, 0)
    check(memory.get(out, (1, n_out)), products(w, t, values, excess))
    memory.close()


@pytest.mark.parametrize(("name", "n_in", "n_out"), [("Q8_0", 64, 7), ("Q4_K", 256, 70), ("F32", 64, 5)])
def test_mul_mat_heads_agrees_with_numpy(memory: Memory, name: str, n_in: int, n_out: int) -> None:
    t, rng, heads, rows = BY_NAME[name], np.random.default_rng(5), 3, 2
    w, x = draw_weights(t, (heads, n_out, n_in), rng), rng.standard_normal((rows * heads, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    room = n_out + 3  # what a head gives is not beside the next one's
    out = memory.room((rows, heads, room))
    memory.run(
        mat_vec.mul_mat_heads(t, n_in, n_out, rows, heads),
        rows=rows, x=place["x"], x_stride=heads * place["x_stride"], x_head_bytes=place["x_stride"],
        w=memory.put(w), row_bytes=w.shape[2], head_bytes=w[0].nbytes, heads=heads, n_in=n_in, n_out=n_out,
        out=out, out_stride=4 * heads * room, out_head_bytes=4 * room,
    )  # fmt: skip
    want = [
        products(w[i % heads], t, values[[i]], None if excess is None else excess[[i]]) for i in range(rows * heads)
    ]
    found = memory.get(out, (rows, heads, room))
    check(found[..., :n_out], np.reshape(want, (rows, heads, n_out)))
    assert np.isnan(found[..., n_out:]).all()


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize(("name", "n_in", "n_out"), [("Q4_0", 768, 41), ("IQ4_KS", 512, 18), ("BF16", 64, 10)])
@pytest.mark.parametrize("x_per", [1, 2])
def test_mul_mat_id_agrees_with_numpy(memory: Memory, name: str, n_in: int, n_out: int, x_per: int) -> None:
    t, rng, n_expert, tokens, n_used = BY_NAME[name], np.random.default_rng(6), 5, 3, 2
    w = draw_weights(t, (n_expert, n_out, n_in), rng)
    x = rng.standard_normal((tokens * n_used // x_per, n_in)).astype(f32)
    ids = np.array([[4, 0], [2, 1], [0, 3]], np.int32)
    bias, scale = rng.standard_normal((n_expert, n_out + 4)).astype(f32), rng.uniform(0.5, 2, n_expert).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    out, pairs = memory.room((tokens * n_used, n_out)), list(enumerate(ids.reshape(-1)))
    y = np.stack(
        [products(w[e], t, values[p // x_per], None if excess is None else excess[p // x_per]) for p, e in pairs]
    )
    experts, flat = memory.put(w), ids.reshape(-1)
    for b, s, want in (
        (0, 0, y),
        (memory.put(bias), memory.put(scale), y * scale[flat, None] + bias[flat, :n_out]),
    ):
        memory.run(
            mat_vec.mul_mat_id(t, n_in, n_out, tokens, n_used),
            **place, rows=tokens, x_per=x_per, ids=memory.put(ids), plan=0, n_expert=n_expert, n_used=n_used,
            w=experts, row_bytes=w.shape[2], expert_bytes=w[0].nbytes, n_in=n_in, n_out=n_out, out=out,
            bias=b, bias_stride=bias[0].nbytes, scale=s,
        )  # fmt: skip
        check(memory.get(out, y.shape), want)


def activations() -> list[Activation]:
    plain = [Activation(kind) for kind in GATES]
    return [*plain, Activation("silu", act_limit=0.4, up_limit=0.5), Activation("swiglu_oai", 1.3, 0.3, 0.0, 0.6)]


@pytest.mark.parametrize("activation", activations(), ids=lambda a: f"{a.kind}{a.up_limit or ''}")
def test_up_gate_agrees_with_numpy(memory: Memory, activation: Activation) -> None:
    t, rng, n_in, n_out, rows = BY_NAME["Q5_1"], np.random.default_rng(7), 96, 19, 3
    up, gate = draw_weights(t, (2, n_out, n_in), rng)
    check_up_gate(memory, t, activation, up, gate, rng.standard_normal((rows, n_in)).astype(f32))


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize(
    ("name", "n_in", "n_out", "rows"),
    [("Q4_K", 1536, 9, 8), ("Q2_K", 2048, 5, 1), ("F16", 1024, 7, 1), ("F32", 70, 5, 4)],
)
def test_up_gate_of_types_and_shapes(memory: Memory, name: str, n_in: int, n_out: int, rows: int) -> None:
    t, rng = BY_NAME[name], np.random.default_rng(8)
    up, gate = draw_weights(t, (2, n_out, n_in), rng)
    check_up_gate(memory, t, Activation("silu"), up, gate, rng.standard_normal((rows, n_in)).astype(f32))


def check_up_gate(memory: Memory, t: TensorType, a: Activation, up: Any, gate: Any, x: Any) -> None:
    rows, n_in, n_out = *x.shape, len(up)
    rng = np.random.default_rng(9)
    biases, scales = rng.standard_normal((2, n_out)).astype(f32), np.array([[0.5], [0.75]], f32)
    place, values, excess = put_rows(memory, x, t)
    u, g = products(up, t, values, excess), products(gate, t, values, excess)
    out, weights = memory.room(u.shape), {"up": memory.put(up), "gate": memory.put(gate)}
    for with_both in (False, True):
        extra = dict.fromkeys(("up_bias", "gate_bias", "up_scale", "gate_scale"), 0)
        if with_both:
            u, g = u * 0.5 + biases[0], g * 0.75 + biases[1]
            extra = {name: memory.put(v) for name, v in zip(extra, (*biases, *scales), strict=True)}
        memory.run(
            mat_vec.up_gate(t, a, n_in, n_out, rows),
            **place, **weights, **extra, **limits(a), rows=rows, row_bytes=up.shape[1], n_in=n_in, n_out=n_out,
            out=out, out_stride=4 * n_out,
        )  # fmt: skip
        check_gated(memory.get(out, u.shape), a, g, u)


def check_gated(got: Any, a: Activation, g: Any, u: Any) -> None:
    want = gated(a, g.astype(f32), u.astype(f32))
    if a.kind in ("gelu", "gelu_quick"):  # through half precision: a last bit of the product is one of a half
        np.testing.assert_allclose(got, want, rtol=1.1e-3, atol=1e-4)
        assert np.mean(np.abs(got - want) > 1e-5 * np.abs(want)) < 0.1
    else:
        check(got, want)


@pytest.mark.parametrize(("name", "n_in", "n_out"), [("Q4_0", 64, 11), ("Q6_K", 768, 37), ("F16", 64, 5)])
def test_up_gate_id_of_merged_halves(memory: Memory, name: str, n_in: int, n_out: int) -> None:
    t, rng, n_expert, tokens, n_used = BY_NAME[name], np.random.default_rng(10), 4, 2, 2
    merged = draw_weights(t, (n_expert, 2 * n_out, n_in), rng)  # the gate's rows come first
    x, ids = rng.standard_normal((tokens, n_in)).astype(f32), np.array([[3, 1], [0, 3]], np.int32)
    bias, scales = (
        rng.standard_normal((n_expert, 2 * n_out)).astype(f32),
        rng.uniform(0.5, 2, (2, n_expert)).astype(f32),
    )
    place, values, excess = put_rows(memory, x, t)
    w, b, flat, a = (
        memory.put(merged),
        memory.put(bias),
        ids.reshape(-1),
        Activation("swiglu_oai", 1.702, 7.0, 0.0, 7.0),
    )
    y = np.concatenate(
        [
            products(merged[e], t, values[[i // 2]], None if excess is None else excess[[i // 2]])
            for i, e in enumerate(flat)
        ]
    )
    g, u = (
        y[:, :n_out] * scales[1, flat, None] + bias[flat, :n_out],
        y[:, n_out:] * scales[0, flat, None] + bias[flat, n_out:],
    )
    out = memory.room(u.shape)
    memory.run(
        mat_vec.up_gate_id(t, a, n_in, n_out, tokens, n_used),
        **place, **limits(a), rows=tokens, x_per=n_used, ids=memory.put(ids), plan=0, n_expert=n_expert, n_used=n_used,
        up=w + n_out * merged.shape[2], gate=w, up_expert_bytes=merged[0].nbytes, gate_expert_bytes=merged[0].nbytes,
        row_bytes=merged.shape[2], n_in=n_in, n_out=n_out, out=out, up_bias=b + 4 * n_out, gate_bias=b,
        up_bias_stride=8 * n_out, gate_bias_stride=8 * n_out, up_scale=memory.put(scales[0]),
        gate_scale=memory.put(scales[1]),
    )  # fmt: skip
    check_gated(memory.get(out, u.shape), a, g, u)


def test_long_matrices_and_many_experts_fit_the_grid() -> None:
    t = BY_NAME["Q8_0"]
    for n_in, n_out in ((768, 2048), (2048, 768), (4096, 151936)):
        shape = mat_vec.mul_mat(t, n_in, n_out)
        lanes, rows = (int(dict(shape.kernel.defines)[name]) for name in ("LANES", "ROWS"))
        assert shape.grid[0] * rows * 128 // lanes >= n_out
        assert mat_vec.mul_mat(t, n_in, n_out, 8).kernel.defines[1] == ("LANES", str(lanes))
    with pytest.raises(ValueError, match="1 to 8 rows"):
        mat_vec.mul_mat(t, 768, 768, 9)

"""Products of many rows on the device against numpy, activations quantized by numpy to the device's layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_products import check, decode, draw_weights, f32, on, products, put_rows
from device_memory import Memory

from quantkit.kernels.cuda.layer.glu import limits
from quantkit.kernels.cuda.matmul import mat_mat, moe
from quantkit.kernels.formats import FORMATS
from quantkit.kernels.parameters import Activation
from quantkit.model.backends.reference import gate as gated
from quantkit.types import BY_NAME


def test_blocks_fit_the_shared_memory_of_every_device() -> None:
    for t in (of.type for of in FORMATS.values()):
        assert 2 * (mat_mat.shared_bytes(t, mat_mat.LARGE) + 1024) <= 228 << 10  # two at once on sm_90
        assert mat_mat.shared_bytes(t, mat_mat.SMALL) <= 48 << 10
        assert all(mat_mat.tile_for(t, 4096, 512, 1, c) == mat_mat.LARGE for c in (80, 90, 100))
    small = [
        ("Q4_K", 4096, 512, 1, 75),
        ("Q6_K", 4096, 512, 1, 89),
        ("Q4_K", 4096, 32, 1, 90),
        ("Q4_K", 1024, 64, 1, 90),
        ("Q4_K", 1536, 4, 26, 90),
    ]
    large = [("Q4_K", 4096, 512, 1, 89), ("Q4_K", 1024, 64, 8, 90), ("Q4_K", 1536, 4, 27, 90)]
    for cases, tile in ((small, mat_mat.SMALL), (large, mat_mat.LARGE)):
        assert {mat_mat.tile_for(BY_NAME[name], *sizes) for name, *sizes in cases} == {tile}


@pytest.fixture(autouse=True)
def _large_tiles_for_small_matrices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "memory" in request.fixturenames:
        monkeypatch.setattr(mat_mat, "_FEW", 1)


#: One type of each way to multiply; both tiles, with tails of rows, outputs and inputs; capability.
MATRICES = [
    ("Q8_0", 96, 21, 9, 90),
    ("Q8_0", 544, 150, 150, 90),
    ("Q4_1", 288, 37, 20, 90),
    ("Q4_K", 512, 130, 40, 90),
    ("Q6_K", 512, 40, 35, 90),
    ("IQ2_S", 256, 35, 17, 90),
    ("Q2_K", 256, 135, 40, 90),
    ("NVFP4", 192, 33, 12, 90),
    ("NVFP4", 320, 140, 40, 90),
    ("IQ4_KS", 512, 130, 40, 90),
    ("IQ2_KS", 768, 35, 17, 75),
    ("IQ3_K", 512, 130, 40, 90),
    ("IQ5_K", 256, 35, 17, 75),
    ("IQ2_KL", 512, 40, 35, 90),
    ("IQ1_BN", 320, 35, 17, 90),
    ("Q8_KV", 544, 130, 40, 90),
    ("NVFP4", 64, 33, 12, 75),
    ("F32", 100, 130, 40, 90),
    ("F32", 77, 13, 11, 90),
    ("F16", 49, 33, 10, 90),
    ("BF16", 136, 11, 129, 90),
    ("Q8_0", 160, 40, 40, 75),
    ("Q2_K", 512, 31, 12, 75),
    ("F16", 96, 40, 20, 75),
    ("BF16", 72, 20, 35, 75),
]


@pytest.mark.parametrize(("name", "n_in", "n_out", "rows", "capability"), MATRICES)
def test_mul_mat_agrees_with_numpy(
    memory: Memory, name: str, n_in: int, n_out: int, rows: int, capability: int
) -> None:
    capability = on(memory, capability)
    t, rng = BY_NAME[name], np.random.default_rng(3)
    w, x = draw_weights(t, (n_out, n_in), rng), rng.standard_normal((rows, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    y = products(w, t, values, excess)
    bias, scale = rng.standard_normal(n_out).astype(f32), np.array([0.75], f32)
    stride = n_out + 3
    out, weights = memory.room((rows, stride)), memory.put(w)
    for b, s, want in ((0, 0, y), (memory.put(bias), memory.put(scale), y * 0.75 + bias)):
        memory.run(
            mat_mat.mul_mat(t, n_in, n_out, rows, capability),
            **place, rows=rows, w=weights, row_bytes=w.shape[1], n_in=n_in, n_out=n_out, out=out,
            out_stride=4 * stride, bias=b, scale=s,
        )  # fmt: skip
        got = memory.get(out, (rows, stride))
        check(got[:, :n_out], want)
        assert np.isnan(got[:, n_out:]).all()


@pytest.mark.parametrize("name", ["Q3_K", "Q6_K", "IQ6_K"])
def test_levels_at_the_ends_of_their_range(memory: Memory, name: str) -> None:
    """Folded levels: the largest products of a level and a scale, which need all their bits."""
    t, n_in, n_out, rows = BY_NAME[name], 256, 32, 9
    w = np.zeros((n_out, t.block_bytes), np.uint8)  # q: the least
    if name == "Q6_K":
        w[:, 192:208], w[:, 208:210] = 128, np.array([0.01], np.float16).view(np.uint8)  # s = -128, d
    elif name == "IQ6_K":
        w[:, 4:20], w[:, :2] = 128, np.array([0.01], np.float16).view(np.uint8)
    else:
        w[:, 108:110] = np.array([0.01], np.float16).view(np.uint8)  # s = -32
    x = np.full((rows, n_in), -1, f32)
    x[:, 0] = 1
    place, values, excess = put_rows(memory, x, t)
    out = memory.room((rows, n_out))
    memory.run(
        mat_mat.mul_mat(t, n_in, n_out, rows, memory.device.capability),
        **place, rows=rows, w=memory.put(w), row_bytes=t.block_bytes, n_in=n_in, n_out=n_out, out=out,
        out_stride=4 * n_out, bias=0, scale=0,
    )  # fmt: skip
    check(memory.get(out, (rows, n_out)), products(w, t, values, excess))


def test_every_scale_of_nvfp4(memory: Memory) -> None:
    """Products of an E2M1 and an E4M3 are multiplied as halves: the least and the largest must be exact in them."""
    t, n_in, n_out, rows, rng = BY_NAME["NVFP4"], 256, 128, 40, np.random.default_rng(3)
    w = draw_weights(t, (n_out, n_in), rng).reshape(n_out, -1, t.block_bytes)
    w[..., :4] = np.arange(n_out, dtype=np.uint8)[:, None, None] + rng.integers(0, 2, (n_out, 4, 4), np.uint8) * 128
    x = rng.standard_normal((rows, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    out = memory.room((rows, n_out))
    memory.run(
        mat_mat.mul_mat(t, n_in, n_out, rows, memory.device.capability),
        **place, rows=rows, w=memory.put(w), row_bytes=t.row_bytes(n_in), n_in=n_in, n_out=n_out, out=out,
        out_stride=4 * n_out, bias=0, scale=0,
    )  # fmt: skip
    got, want = memory.get(out, (rows, n_out)), products(w.reshape(n_out, -1), t, values, excess)
    for row in range(n_out):  # each by itself: scales differ by 2^17
        assert not want[:, row].any() or np.abs(got[:, row] - want[:, row]).max() < 1e-5 * np.abs(want[:, row]).max()


def test_a_row_does_not_depend_on_the_others(memory: Memory) -> None:
    t, rng, n_in, n_out = BY_NAME["Q4_K"], np.random.default_rng(4), 256, 20
    w, x = memory.put(draw_weights(t, (n_out, n_in), rng)), rng.standard_normal((100, n_in)).astype(f32)
    results = []
    for rows in (100, 40, 9):
        place, _, _ = put_rows(memory, x[:rows], t)
        out = memory.room((rows, n_out))
        memory.run(
            mat_mat.mul_mat(t, n_in, n_out, rows, memory.device.capability),
            **place, rows=rows, w=w, row_bytes=t.row_bytes(n_in), n_in=n_in, n_out=n_out, out=out,
            out_stride=4 * n_out, bias=0, scale=0,
        )  # fmt: skip
        results.append(memory.get(out, (rows, n_out)))
    np.testing.assert_array_equal(results[0][:40], results[1])
    np.testing.assert_array_equal(results[0][:9], results[2])


@pytest.mark.parametrize(("name", "rows"), [("Q8_0", 35), ("F16", 10)])
def test_mul_mat_heads_agrees_with_numpy(memory: Memory, name: str, rows: int) -> None:
    t, rng = BY_NAME[name], np.random.default_rng(5)
    heads, n_in, n_out = 3, 96, 40
    w, x = draw_weights(t, (heads, n_out, n_in), rng), rng.standard_normal((rows * heads, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    head_bytes = place["x_stride"]
    room = n_out + 7  # what a head gives is not beside the next one's
    out = memory.room((rows, heads, room))
    memory.run(
        mat_mat.mul_mat_heads(t, n_in, n_out, rows, heads, memory.device.capability),
        rows=rows, x=place["x"], x_stride=heads * head_bytes, x_head_bytes=head_bytes, w=memory.put(w),
        row_bytes=w.shape[-1], head_bytes=n_out * w.shape[-1], heads=heads, n_in=n_in, n_out=n_out, out=out,
        out_stride=4 * heads * room, out_head_bytes=4 * room,
    )  # fmt: skip
    y = [products(w[h], t, values[h::heads], None if excess is None else excess[h::heads]) for h in range(heads)]
    found = memory.get(out, (rows, heads, room))
    check(found[..., :n_out], np.stack(y, 1))
    assert np.isnan(found[..., n_out:]).all()


@pytest.mark.parametrize(
    ("name", "kind", "n_in", "n_out", "rows", "capability"),
    [
        ("Q8_0", "silu", 288, 70, 40, 90),
        ("Q4_K", "swiglu_oai", 256, 20, 12, 90),
        ("BF16", "silu", 96, 65, 64, 90),
        ("F32", "silu", 64, 9, 9, 90),
        ("Q8_0", "silu", 64, 33, 40, 75),
    ],
)
def test_up_gate_agrees_with_numpy(
    memory: Memory, name: str, kind: str, n_in: int, n_out: int, rows: int, capability: int
) -> None:
    capability = on(memory, capability)
    t, rng = BY_NAME[name], np.random.default_rng(6)
    w, x = draw_weights(t, (2, n_out, n_in), rng), rng.standard_normal((rows, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    up, gate = (products(w[i], t, values, excess) for i in range(2))
    scales, biases = (
        np.array([0.5, 1.25], f32) / np.sqrt(up.var()).astype(f32),
        rng.standard_normal((2, n_out)).astype(f32),
    )
    a = Activation(kind, gate_limit=0.8, act_limit=0.6, up_limit=0.7)
    out, s, b = memory.room((rows, n_out)), memory.put(scales), memory.put(biases)
    memory.run(
        mat_mat.up_gate(t, a, n_in, n_out, rows, capability),
        **place, rows=rows, up=memory.put(w[0]), gate=memory.put(w[1]), row_bytes=w.shape[-1], n_in=n_in, n_out=n_out,
        out=out, out_stride=4 * n_out, up_bias=b, gate_bias=b + 4 * n_out, up_scale=s, gate_scale=s + 4, **limits(a),
    )  # fmt: skip
    check(memory.get(out, (rows, n_out)), expected_gate(a, gate * scales[1] + biases[1], up * scales[0] + biases[0]))


def expected_gate(a: Activation, gate: Any, up: Any) -> Any:
    return gated(Activation(a.kind, a.alpha, 0, a.act_limit, a.up_limit), np.minimum(gate, a.gate_limit or np.inf), up)


#: Tokens, experts a token, experts, and those that are chosen at all: many pairs each, few, all of one, some of none.
ROUTED = [(40, 2, 3, 3), (9, 3, 8, 5), (140, 1, 2, 1)]


def route(rng: Any, rows: int, n_used: int, n_expert: int, chosen: int) -> Any:
    of = np.sort(rng.permutation(n_expert)[:chosen])
    return np.stack([rng.permutation(of)[:n_used] for _ in range(rows)]).astype(np.int32)


def plan_for(memory: Memory, ids: Any, n_expert: int) -> dict[str, int]:
    """Make a plan; return the slots of products by expert."""
    rows, n_used = ids.shape
    plan, at = memory.room((moe.plan_bytes(n_expert, n_used, rows),), np.uint8), memory.put(ids)
    memory.run(moe.bucket(n_expert), plan=plan, ids=at, rows=rows, n_used=n_used, n_expert=n_expert)
    return {"rows": rows, "ids": at, "plan": plan, "n_expert": n_expert, "n_used": n_used}


@pytest.mark.parametrize(
    ("name", "per_token", "capability"), [("Q8_0", True, 90), ("Q8_0", False, 75), ("F16", False, 90)]
)
@pytest.mark.parametrize("shape", ROUTED)
def test_mul_mat_id_agrees_with_numpy(
    memory: Memory, name: str, per_token: bool, capability: int, shape: tuple[int, int, int, int]
) -> None:
    capability = on(memory, capability)
    rows, n_used, n_expert, chosen = shape
    t, rng, n_in, n_out = BY_NAME[name], np.random.default_rng(8), 96, 37
    ids = route(rng, rows, n_used, n_expert, chosen)
    w = draw_weights(t, (n_expert, n_out, n_in), rng)
    x = rng.standard_normal((rows if per_token else rows * n_used, n_in)).astype(f32)
    place, values, _ = put_rows(memory, x, t)
    bias, scale = rng.standard_normal((n_expert, 2 * n_out)).astype(f32), rng.uniform(0.5, 2, n_expert).astype(f32)
    slots, out = plan_for(memory, ids, n_expert), memory.room((rows * n_used, n_out))
    weights, b, s = memory.put(w), memory.put(bias), memory.put(scale)
    plain = np.einsum("pi,poi->po", values.repeat(n_used, 0) if per_token else values, decode(w, t)[ids.ravel()])
    of = ids.ravel()
    for biased, want in ((False, plain), (True, plain * scale[of, None] + bias[of, :n_out])):
        memory.run(
            mat_mat.mul_mat_id(t, n_in, n_out, rows, n_used, n_expert, capability),
            **place, **slots, x_per=n_used if per_token else 1, w=weights, row_bytes=w.shape[-1],
            expert_bytes=n_out * w.shape[-1], n_in=n_in, n_out=n_out, out=out, bias=b if biased else 0,
            bias_stride=8 * n_out, scale=s if biased else 0,
        )  # fmt: skip
        check(memory.get(out, (rows * n_used, n_out)), want)


@pytest.mark.parametrize(("name", "merged"), [("Q4_K", True), ("IQ4_KS", False)])
@pytest.mark.parametrize("shape", ROUTED)
def test_up_gate_id_agrees_with_numpy(
    memory: Memory, name: str, merged: bool, shape: tuple[int, int, int, int]
) -> None:
    rows, n_used, n_expert, chosen = shape
    t, rng, n_in, n_out = BY_NAME[name], np.random.default_rng(9), 256, 20
    ids = route(rng, rows, n_used, n_expert, chosen)
    of, row_bytes = ids.ravel(), t.row_bytes(n_in)
    w = draw_weights(t, (n_expert, 2, n_out, n_in), rng)  # merged: an expert's gate rows, then its up rows
    x = rng.standard_normal((rows, n_in)).astype(f32)
    place, values, _ = put_rows(memory, x, t)
    gate, up = (np.einsum("pi,poi->po", values.repeat(n_used, 0), decode(w[:, i], t)[of]) for i in range(2))
    bias, half = rng.standard_normal((n_expert, 2, n_out)).astype(f32), n_out * row_bytes
    a = Activation("silu", up_limit=1.5)
    scale = np.stack(
        [1 / np.full(n_expert, up.std(), f32), rng.uniform(0.5, 2, n_expert).astype(f32) / gate.std()]
    ).astype(f32)
    if merged:
        at = memory.put(w)
        weights = {"gate": at, "up": at + half, "gate_expert_bytes": 2 * half, "up_expert_bytes": 2 * half}
    else:
        weights = {
            "gate": memory.put(w[:, 0]),
            "up": memory.put(w[:, 1]),
            "gate_expert_bytes": half,
            "up_expert_bytes": half,
        }
    b, s, out = memory.put(bias), memory.put(scale), memory.room((rows * n_used, n_out))
    memory.run(
        mat_mat.up_gate_id(t, a, n_in, n_out, rows, n_used, n_expert, memory.device.capability),
        **place, **plan_for(memory, ids, n_expert), **weights, x_per=n_used, row_bytes=row_bytes, n_in=n_in,
        n_out=n_out, out=out, up_bias=b + 4 * n_out, gate_bias=b, up_bias_stride=8 * n_out, gate_bias_stride=8 * n_out,
        up_scale=s, gate_scale=s + 4 * n_expert, **limits(a),
    )  # fmt: skip
    up = up * scale[0, of, None] + bias[of, 1]
    gate = gate * scale[1, of, None] + bias[of, 0]
    check(memory.get(out, (rows * n_used, n_out)), expected_gate(a, gate, up))

"""Products of many rows on the device against numpy, activations quantized by numpy to the device's layout."""

from __future__ import annotations

from typing import Any

import cuda_products
import numpy as np
import pytest
from cuda_products import check, multiply, on, plan_for
from device_memory import Memory
from matmul_cases import draw_weights, f32, routed

from quantkit.kernels.cuda.core.kernel import shared_of_block, shared_of_multiprocessor
from quantkit.kernels.cuda.matmul import mat_mat
from quantkit.kernels.formats import FORMATS
from quantkit.kernels.parameters import Activation
from quantkit.types import BY_NAME, TensorType


def test_blocks_fit_the_shared_memory_of_every_device() -> None:
    """Two at once, as registers do: on sm_80 some of middle tiles only."""
    for t in (record.type for record in FORMATS.values()):
        assert mat_mat.shared_bytes(t, mat_mat.SMALL) <= 48 << 10
        assert all(mat_mat.tile_for(t, 4096, 512, 1, c) == mat_mat.LARGE for c in (90, 100))
        for card in (75, 80, 86, 87, 89, 90, 100, 103, 120, 121):
            tile = mat_mat.tile_for(t, 4096, 512, 1, card)
            assert mat_mat.shared_bytes(t, tile) <= shared_of_block(card)
            at_once = shared_of_multiprocessor(card) // (mat_mat.shared_bytes(t, tile) + 1024)
            assert at_once >= 2 or card not in (80, 87, 90, 100, 103)
    small = [
        ("Q4_K", 4096, 512, 1, 75),
        ("Q4_K", 4096, 32, 1, 90),
        ("Q4_K", 1024, 64, 1, 90),
        ("Q4_K", 1536, 4, 26, 90),
    ]
    middle = [("Q6_K", 4096, 512, 1, 89), ("Q4_K", 4096, 512, 1, 80), ("Q4_0", 4096, 512, 1, 75)]
    large = [
        ("F16", 4096, 512, 1, 80),
        ("Q4_K", 4096, 512, 1, 89),
        ("Q4_K", 1024, 64, 8, 90),
        ("Q4_K", 1536, 4, 27, 90),
    ]
    for cases, tile in ((small, mat_mat.SMALL), (middle, mat_mat.MIDDLE), (large, mat_mat.LARGE)):
        assert {mat_mat.tile_for(BY_NAME[name], *sizes) for name, *sizes in cases} == {tile}


@pytest.fixture(autouse=True)
def _large_tiles_for_small_matrices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "memory" in request.fixturenames:
        monkeypatch.setattr(mat_mat, "_FEW_BLOCKS", 1)


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
    ("IQ1_S_ROW", 544, 40, 35, 90),
    ("IQ1_M_ROW", 320, 140, 40, 90),
    ("IQ1_M_ROW", 64, 33, 12, 75),
    ("NVFP4", 64, 33, 12, 75),
    ("F32", 100, 130, 40, 90),
    ("F32", 77, 13, 11, 90),
    ("F16", 49, 33, 10, 90),
    ("BF16", 136, 11, 129, 90),
    ("Q4_K", 512, 130, 40, 80),
    ("Q6_K", 256, 70, 129, 80),
    ("F16", 100, 70, 40, 75),
    ("Q8_0", 160, 40, 40, 75),
    ("Q2_K", 512, 31, 12, 75),
    ("F16", 96, 40, 20, 75),
    ("BF16", 72, 20, 35, 75),
]


@pytest.mark.parametrize(("name", "n_in", "n_out", "rows", "capability"), MATRICES)
def test_mul_mat_agrees_with_numpy(
    memory: Memory, name: str, n_in: int, n_out: int, rows: int, capability: int
) -> None:
    t = BY_NAME[name]
    shape = mat_mat.mul_mat(t, n_in, n_out, rows, on(memory, capability))
    cuda_products.check_mul_mat(memory, shape, t, n_in, n_out, rows)


def multiplied(memory: Memory, t: TensorType, w: Any, x: Any) -> tuple[Any, Any]:
    return multiply(memory, mat_mat.mul_mat(t, x.shape[1], len(w), len(x), memory.device.capability), t, w, x)


@pytest.mark.parametrize("name", ["Q3_K", "Q6_K", "IQ6_K"])
def test_extreme_levels(memory: Memory, name: str) -> None:
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
    check(*multiplied(memory, t, w, x))


def test_every_scale_of_nvfp4(memory: Memory) -> None:
    """Products of an E2M1 and an E4M3 are multiplied as halves: the least and the largest must be exact in them."""
    t, n_in, n_out, rows, rng = BY_NAME["NVFP4"], 256, 128, 40, np.random.default_rng(3)
    w = draw_weights(t, (n_out, n_in), rng).reshape(n_out, -1, t.block_bytes)
    w[..., :4] = np.arange(n_out, dtype=np.uint8)[:, None, None] + rng.integers(0, 2, (n_out, 4, 4), np.uint8) * 128
    x = rng.standard_normal((rows, n_in)).astype(f32)
    actual, want = multiplied(memory, t, w.reshape(n_out, -1), x)
    for row in range(n_out):  # each by itself: scales differ by 2^17
        assert not want[:, row].any() or np.abs(actual[:, row] - want[:, row]).max() < 1e-5 * np.abs(want[:, row]).max()


def test_a_row_does_not_depend_on_the_others(memory: Memory) -> None:
    t, rng, n_in, n_out = BY_NAME["Q4_K"], np.random.default_rng(4), 256, 20
    w, x = draw_weights(t, (n_out, n_in), rng), rng.standard_normal((100, n_in)).astype(f32)
    results = [multiplied(memory, t, w, x[:rows])[0] for rows in (100, 40, 9)]
    np.testing.assert_array_equal(results[0][:40], results[1])
    np.testing.assert_array_equal(results[0][:9], results[2])


@pytest.mark.parametrize(("name", "rows"), [("Q8_0", 35), ("F16", 10)])
def test_mul_mat_heads_agrees_with_numpy(memory: Memory, name: str, rows: int) -> None:
    t, heads, n_in, n_out = BY_NAME[name], 3, 96, 40
    shape = mat_mat.mul_mat_heads(t, n_in, n_out, rows, heads, memory.device.capability)
    cuda_products.check_heads(memory, shape, t, n_in, n_out, rows, heads)


@pytest.mark.parametrize(
    ("name", "kind", "n_in", "n_out", "rows", "capability"),
    [
        ("Q8_0", "silu", 288, 70, 40, 90),
        ("Q4_K", "swiglu_oai", 256, 20, 12, 90),
        ("BF16", "silu", 96, 65, 64, 90),
        ("F32", "silu", 64, 9, 9, 90),
        ("Q4_K", "silu", 256, 70, 40, 80),
        ("Q8_0", "silu", 64, 33, 40, 75),
    ],
)
def test_up_gate_agrees_with_numpy(
    memory: Memory, name: str, kind: str, n_in: int, n_out: int, rows: int, capability: int
) -> None:
    t, a = BY_NAME[name], Activation(kind, gate_limit=0.8, act_limit=0.6, up_limit=0.7)
    shape = mat_mat.up_gate(t, a, n_in, n_out, rows, on(memory, capability))
    cuda_products.check_up_gate(memory, shape, t, a, n_in, n_out, rows)


#: Tokens, experts a token, experts, and those that are chosen at all: many pairs each, few, all of one, some of none.
ROUTED = [(40, 2, 3, 3), (9, 3, 8, 5), (140, 1, 2, 1)]


def some_experts(rows: int, n_used: int, n_expert: int, n_chosen: int) -> Any:
    return routed(rows, n_used, np.random.default_rng(8).permutation(n_expert)[:n_chosen])


@pytest.mark.parametrize(
    ("name", "per_token", "capability"), [("Q8_0", True, 90), ("Q8_0", False, 75), ("F16", False, 90)]
)
@pytest.mark.parametrize("shape", ROUTED)
def test_mul_mat_id_agrees_with_numpy(
    memory: Memory, name: str, per_token: bool, capability: int, shape: tuple[int, int, int, int]
) -> None:
    rows, n_used, n_expert, _ = shape
    t, n_in, n_out, ids = BY_NAME[name], 96, 37, some_experts(*shape)
    product = mat_mat.mul_mat_id(t, n_in, n_out, rows, n_used, n_expert, on(memory, capability))
    pairs = plan_for(memory, ids, n_expert)
    cuda_products.check_mul_mat_id(memory, product, t, n_in, n_out, ids, pairs, n_used if per_token else 1)


@pytest.mark.parametrize(("name", "merged"), [("Q4_K", True), ("IQ4_KS", False)])
@pytest.mark.parametrize("shape", ROUTED)
def test_up_gate_id_agrees_with_numpy(
    memory: Memory, name: str, merged: bool, shape: tuple[int, int, int, int]
) -> None:
    rows, n_used, n_expert, _ = shape
    t, n_in, n_out, ids = BY_NAME[name], 256, 20, some_experts(*shape)
    a = Activation("silu", up_limit=1.5)
    product = mat_mat.up_gate_id(t, a, n_in, n_out, rows, n_used, n_expert, memory.device.capability)
    cuda_products.check_up_gate_id(memory, product, t, a, n_in, n_out, ids, plan_for(memory, ids, n_expert), merged)

"""Products of few rows on the device against numpy, activations quantized by numpy to the device's layout."""

from __future__ import annotations

import re

import cuda_products
import numpy as np
import pytest
from cuda_products import check, no_plan, on, put_rows
from device_memory import Memory
from host_device import HostDevice, compiler
from matmul_cases import draw_weights, f32, products
from ptx.device import ptx_of, why_not

from quantkit.kernels.cuda.layer.glu import GATES
from quantkit.kernels.cuda.matmul import mat_vec
from quantkit.kernels.parameters import Activation
from quantkit.types import BY_NAME


@pytest.fixture
def as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices are computed as large ones are: several rows at once, by a warp."""
    monkeypatch.setattr(mat_vec, "_FEW_WARPS", 0)
    monkeypatch.setattr(mat_vec, "_MANY_WARPS", 0)
    monkeypatch.setattr(mat_vec, "_TWO_EACH", 0)
    monkeypatch.setattr(mat_vec, "_ONE_EACH", 0)


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
    ("IQ1_S_ROW", 160, 21, 1),
    ("IQ1_M_ROW", 224, 17, 4),
    ("IQ2_BN", 192, 17, 4),
    ("Q6_0", 96, 21, 1),
    ("Q8_KV", 160, 21, 2),
    ("MXFP4", 160, 21, 1),
    ("NVFP4", 128, 17, 7),
    ("TQ1_0", 256, 70, 4),
    ("IQ1_S", 2560, 13, 1),
    ("Q1_0", 1536, 35, 1),
    ("F32", 100, 13, 3),
    ("IQ1_KT", 1536, 67, 1),
    ("IQ2_KT", 2304, 37, 1),
    ("IQ3_KT", 1024, 37, 1),
]


@pytest.mark.parametrize(("name", "n_in", "n_out", "rows"), SMALL)
def test_mul_mat_agrees_with_numpy(memory: Memory, name: str, n_in: int, n_out: int, rows: int) -> None:
    check_one(memory, name, n_in, n_out, rows)


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize(("name", "n_in", "n_out", "rows"), LARGE)
def test_mul_mat_of_several_rows_at_once(memory: Memory, name: str, n_in: int, n_out: int, rows: int) -> None:
    check_one(memory, name, n_in, n_out, rows)


def test_mul_mat_of_several_rows_by_several_warps(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mat_vec, "_FEW_WARPS", 0)
    check_one(memory, "Q5_0", 4128, 13, 3)


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize(("name", "n_in", "n_out", "rows"), [SMALL[0], LARGE[1], SMALL[5], LARGE[-1]])
def test_turing_copies_by_registers(memory: Memory, name: str, n_in: int, n_out: int, rows: int) -> None:
    on(memory, 75)
    check_one(memory, name, n_in, n_out, rows)


def check_one(memory: Memory, name: str, n_in: int, n_out: int, rows: int) -> None:
    t = BY_NAME[name]
    cuda_products.check_mul_mat(memory, mat_vec.mul_mat(t, n_in, n_out, rows), t, n_in, n_out, rows)


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "F16", "IQ1_KT", "IQ2_KT", "IQ3_KT"])
def test_a_row_does_not_depend_on_the_others(memory: Memory, name: str) -> None:
    t, rng, n_in, n_out = BY_NAME[name], np.random.default_rng(4), 2048, 11
    w, x = draw_weights(t, (n_out, n_in), rng), rng.standard_normal((8, n_in)).astype(f32)
    place, _, _ = put_rows(memory, x, t)
    weights, alone, out = memory.put(w), memory.allocate((8, n_out)), memory.allocate((8, n_out))
    common = {"x_stride": place["x_stride"], "w": weights, "row_bytes": w.shape[1], "n_in": n_in, "n_out": n_out}
    common |= {"out_stride": 4 * n_out, "bias": 0, "scale": 0}
    for i in range(8):
        addresses = {"x": place["x"] + i * place["x_stride"], "out": alone + 4 * n_out * i}
        memory.run(mat_vec.mul_mat(t, n_in, n_out, 1), rows=1, **addresses, **common)
    want = memory.get(alone, (8, n_out))
    for rows in (3, 8):
        memory.run(mat_vec.mul_mat(t, n_in, n_out, rows), rows=rows, x=place["x"], out=out, **common)
        np.testing.assert_array_equal(memory.get(out, (rows, n_out)), want[:rows])


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler: install g++")
@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize("name", ["Q8_0", "IQ1_S", "F16", "IQ2_KT"])
def test_dependent_launches_prefetch_only_weights(name: str) -> None:
    """x, what the launch before writes, is forbidden memory until then (and not for the test's own copy)."""
    device = HostDevice()
    memory = Memory(device)
    t, rng, n_in, n_out = BY_NAME[name], np.random.default_rng(4), 1024, 11
    w, x = draw_weights(t, (n_out, n_in), rng), rng.standard_normal((1, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, t)
    out = memory.allocate((1, n_out))
    slots = {**place, "w": memory.put(w), "row_bytes": w.shape[1], "n_in": n_in, "n_out": n_out, "out": out}
    try:
        device.not_ready(place["x"], place["x_stride"])
        memory.run(mat_vec.mul_mat(t, n_in, n_out, 1), rows=1, out_stride=4 * n_out, bias=0, scale=0, **slots)
    finally:
        device.not_ready(0, 0)
    check(memory.get(out, (1, n_out)), products(w, t, values, excess))
    memory.close()


@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize("name", ["Q4_K", "F32", "BF16"])
def test_weights_are_prefetched_before_the_wait(name: str) -> None:
    kernel = mat_vec.mul_mat(BY_NAME[name], 2048, 128).kernel  # a router's sizes
    text = ptx_of(kernel.file, kernel.defines, 90)
    entry = text[text.index(".entry quantkit_mul_mat(") :]
    before = entry[: entry.index("\n}")].rpartition("griddepcontrol.wait")[0]
    assert re.search(r"ld\.global\.\S*v4|cp\.async", before)


@pytest.mark.parametrize(("name", "n_in", "n_out"), [("Q8_0", 64, 7), ("Q4_K", 256, 70), ("F32", 64, 5)])
def test_mul_mat_heads_agrees_with_numpy(memory: Memory, name: str, n_in: int, n_out: int) -> None:
    t, rows, heads = BY_NAME[name], 2, 3
    cuda_products.check_heads(memory, mat_vec.mul_mat_heads(t, n_in, n_out, rows, heads), t, n_in, n_out, rows, heads)


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize(
    ("name", "n_in", "n_out"), [("Q4_0", 768, 41), ("IQ4_KS", 512, 18), ("BF16", 64, 10), ("IQ3_KT", 768, 37)]
)
@pytest.mark.parametrize("x_per", [1, 2])
def test_mul_mat_id_agrees_with_numpy(memory: Memory, name: str, n_in: int, n_out: int, x_per: int) -> None:
    t, ids = BY_NAME[name], np.array([[4, 0], [2, 1], [0, 3]], np.int32)
    shape = mat_vec.mul_mat_id(t, n_in, n_out, *ids.shape)
    cuda_products.check_mul_mat_id(memory, shape, t, n_in, n_out, ids, no_plan(memory, ids, 5), x_per)


def activations() -> list[Activation]:
    plain = [Activation(kind) for kind in GATES]
    return [*plain, Activation("silu", act_limit=0.4, up_limit=0.5), Activation("swiglu_oai", 1.3, 0.3, 0.0, 0.6)]


@pytest.mark.parametrize("activation", activations(), ids=lambda a: f"{a.kind}{a.up_limit or ''}")
def test_up_gate_agrees_with_numpy(memory: Memory, activation: Activation) -> None:
    t, sizes = BY_NAME["Q5_1"], (96, 19, 3)
    cuda_products.check_up_gate(memory, mat_vec.up_gate(t, activation, *sizes), t, activation, *sizes)


@pytest.mark.usefixtures("as_large")
@pytest.mark.parametrize(
    ("name", "n_in", "n_out", "rows"),
    [("Q4_K", 1536, 9, 8), ("Q2_K", 2048, 5, 1), ("F16", 1024, 7, 1), ("F32", 70, 5, 4), ("IQ1_KT", 1536, 37, 1)],
)
def test_up_gate_of_types_and_shapes(memory: Memory, name: str, n_in: int, n_out: int, rows: int) -> None:
    t, a = BY_NAME[name], Activation("silu")
    cuda_products.check_up_gate(memory, mat_vec.up_gate(t, a, n_in, n_out, rows), t, a, n_in, n_out, rows)


@pytest.mark.parametrize(("name", "n_in", "n_out"), [("Q4_0", 64, 11), ("Q6_K", 768, 37), ("F16", 64, 5)])
def test_up_gate_id_of_merged_halves(memory: Memory, name: str, n_in: int, n_out: int) -> None:
    t, a, ids = BY_NAME[name], Activation("swiglu_oai", 1.702, 7.0, 0.0, 7.0), np.array([[3, 1], [0, 3]], np.int32)
    shape = mat_vec.up_gate_id(t, a, n_in, n_out, *ids.shape)
    cuda_products.check_up_gate_id(memory, shape, t, a, n_in, n_out, ids, no_plan(memory, ids, 4), merged=True)


def test_long_matrices_and_many_experts_fit_the_grid() -> None:
    t = BY_NAME["Q8_0"]
    for n_in, n_out in ((768, 2048), (2048, 768), (4096, 151936)):
        shape = mat_vec.mul_mat(t, n_in, n_out)
        lanes, rows = (int(dict(shape.kernel.defines)[name]) for name in ("LANES", "ROWS"))
        assert shape.grid[0] * rows * 128 // lanes >= n_out
        assert mat_vec.mul_mat(t, n_in, n_out, 8).kernel.defines[1] == ("LANES", str(lanes))
    with pytest.raises(ValueError, match="1 to 8 rows"):
        mat_vec.mul_mat(t, 768, 768, 9)

"""Products of many rows on the device against numpy, activations quantized by numpy to the device's layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda import Memory
from cuda_products import check, decode, draw_weights, f32, products, put_rows

from quantkit.kernels.cuda import mat_mat, moe
from quantkit.kernels.cuda.glu import limits
from quantkit.kernels.parameters import Activation
from quantkit.model.backends.reference import gate as gated
from quantkit.types import BY_NAME


def test_what_python_knows_of_types_is_what_the_table_says() -> None:
    assert {n for n in mat_mat.TYPES if BY_NAME[n].trees in ("both", "mainline")} == set(mat_mat.TYPES)
    assert mat_mat.shared_bytes(BY_NAME["Q8_0"], mat_mat.LARGE) * 2 <= 226 << 10
    for name in mat_mat.TYPES:
        # Two blocks at once on sm_80 and sm_90, one on sm_86 and sm_89; a small tile on sm_75.
        assert mat_mat.shared_bytes(BY_NAME[name], mat_mat.LARGE) <= 99 << 10 if name != "Q8_0" else True
        assert mat_mat.shared_bytes(BY_NAME[name], mat_mat.SMALL) <= 48 << 10


#: One type of each way to multiply; both tiles, with tails of rows, outputs and inputs; capability.
MATRICES = [
    ("Q8_0", 96, 21, 9, 90),
    ("Q8_0", 544, 150, 150, 90),
    ("Q4_0", 288, 33, 97, 90),
    ("Q4_1", 416, 37, 33, 90),
    ("Q4_K", 768, 130, 64, 90),
    ("Q6_K", 512, 40, 70, 90),
    ("Q2_K", 256, 35, 130, 90),
    ("Q2_K", 512, 35, 31, 90),
    ("F32", 100, 130, 40, 90),
    ("F32", 77, 13, 11, 90),
    ("F16", 200, 70, 40, 90),
    ("F16", 49, 70, 10, 90),
    ("BF16", 136, 11, 129, 90),
    ("Q8_0", 160, 40, 40, 75),
    ("Q6_K", 512, 31, 12, 75),
    ("F16", 96, 40, 20, 75),
    ("BF16", 72, 20, 35, 75),
]


@pytest.mark.parametrize(("name", "n_in", "n_out", "rows", "capability"), MATRICES)
def test_mul_mat_agrees_with_numpy(
    memory: Memory, name: str, n_in: int, n_out: int, rows: int, capability: int
) -> None:
    if memory.device.capability > capability:
        if type(memory.device).__name__ != "HostDevice":
            pytest.skip("this device is what it is")
        memory.device.capability = capability
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

"""Several matrices times the same rows, on the device against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_products import check, draw_weights, products, put_rows
from device_memory import Memory

from quantkit.kernels.cuda import mat_vec_several
from quantkit.types import BY_NAME

f32 = np.float32


@pytest.mark.parametrize(
    ("name", "n_in", "rows"), [("Q6_K", 512, 2), ("Q8_0", 2048, 1), ("F32", 100, 3), ("Q3_K Q5_K", 768, 1)]
)
def test_several_matrices_at_once(memory: Memory, name: str, n_in: int, rows: int) -> None:
    """The last one is of another type, if there are two."""
    kinds = [BY_NAME[part] for part in name.split()]
    rng, n_outs = np.random.default_rng(8), (70, 6, 33, 1)
    x = rng.standard_normal((rows, n_in)).astype(f32)
    place, values, excess = put_rows(memory, x, kinds[0])
    for count in (2, 4):
        types = [kinds[0]] * (count - 1) + [kinds[-1]]
        matrices, want = list[dict[str, int]](), list[Any]()
        for i, (t, n_out) in enumerate(zip(types, n_outs, strict=False)):
            w, bias = draw_weights(t, (n_out, n_in), rng), rng.standard_normal(n_out).astype(f32)
            slots = {"w": memory.put(w), "n_out": n_out, "out": memory.room((rows, n_out)), "bias": 0, "scale": 0}
            y = products(w, t, values, excess)
            if i == 1:
                slots |= {"bias": memory.put(bias), "scale": memory.put(np.array([0.75], f32))}
                y = y * 0.75 + bias
            matrices.append(slots)
            want.append(y)
        common = {"rows": rows, "n_in": n_in, "n_first": types.count(types[0]), **place}
        common |= {"row_bytes": types[0].row_bytes(n_in), "other_row_bytes": types[-1].row_bytes(n_in)}
        shape = mat_vec_several.mul_mats(types, n_in, n_outs[:count], rows)
        memory.run(shape, **common, **mat_vec_several.slots(matrices))
        for slots, y in zip(matrices, want, strict=True):
            check(memory.get(slots["out"], y.shape), y)

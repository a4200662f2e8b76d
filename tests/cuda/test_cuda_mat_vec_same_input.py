"""Several matrices times the same rows, on the device against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_products import check, put_rows
from device_memory import Memory
from matmul_cases import draw_weights, f32, products

from quantkit.kernels.cuda.layer import route
from quantkit.kernels.cuda.matmul import mat_vec_same_input
from quantkit.kernels.parameters import Routing
from quantkit.types import BY_NAME


@pytest.mark.parametrize(
    ("name", "n_in", "rows"), [("Q6_K", 512, 2), ("Q8_0", 2048, 1), ("F32", 100, 3), ("Q3_K IQ4_KS", 768, 1)]
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
            slots = {"w": memory.put(w), "n_out": n_out, "out": memory.allocate((rows, n_out)), "bias": 0, "scale": 0}
            y = products(w, t, values, excess)
            if i == 1:
                slots |= {"bias": memory.put(bias), "scale": memory.put(np.array([0.75], f32))}
                y = y * 0.75 + bias
            matrices.append(slots)
            want.append(y)
        common = {"rows": rows, "n_in": n_in, "n_first": types.count(types[0]), **place}
        common |= {"row_bytes": types[0].row_bytes(n_in), "other_row_bytes": types[-1].row_bytes(n_in)}
        shape = mat_vec_same_input.mul_mats(types, n_in, n_outs[:count], rows)
        memory.run(shape, **common, **mat_vec_same_input.slots(matrices))
        for slots, y in zip(matrices, want, strict=True):
            check(memory.get(slots["out"], y.shape), y)


@pytest.mark.parametrize(("name", "rows", "groups"), [("F32", 1, 1), ("F32", 3, 4), ("Q8_0", 1, 1)])
def test_a_router_chooses(memory: Memory, name: str, rows: int, groups: int) -> None:
    """The second matrix is the router; its choice is that of the kernel that does nothing else."""
    t, rng, n_in, n_outs = BY_NAME[name], np.random.default_rng(9), 96, (1, 40)
    routing = Routing(40, 6, "sigmoid", norm=True, scale=2.5, n_group=groups, n_group_used=max(1, groups // 2))
    place, _, _ = put_rows(memory, rng.standard_normal((rows, n_in)).astype(f32), t)
    bias, counter = memory.put(rng.standard_normal(40).astype(f32)), memory.put(np.zeros(1, np.int32))
    matrices = [
        {"w": memory.put(draw_weights(t, (n, n_in), rng)), "n_out": n, "out": memory.allocate((rows, n))}
        for n in n_outs
    ]
    both = mat_vec_same_input.slots([{**matrix, "bias": 0, "scale": 0} for matrix in matrices])
    common = {"rows": rows, "n_in": n_in, "n_first": 2, **place, "row_bytes": t.row_bytes(n_in), "other_row_bytes": 0}
    router_slots = {"logits": matrices[1]["out"], "bias": bias, **routing.slots()}
    actual, want = ([memory.allocate((rows, 6), np.int32), memory.allocate((rows, 6))] for _ in range(2))
    shape = mat_vec_same_input.mul_mats_route([t, t], n_in, n_outs, routing, rows)
    for _ in range(2):
        memory.run(shape, **common, **both, **router_slots, ids=actual[0], weights=actual[1], counter=counter)
        memory.run(route.route(routing, rows), **router_slots, chosen=0, rows=rows, ids=want[0], weights=want[1])
        for address, expected_address in zip(actual, want, strict=True):
            assert np.array_equal(
                memory.get(address, (rows, 6), np.uint32), memory.get(expected_address, (rows, 6), np.uint32)
            )
        assert memory.get(counter, (1,), np.int32)[0] == 0

"""Products whose last blocks bring their result to a format, and those beside a shared expert's, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_products import check, put_rows
from device_memory import Memory
from matmul_cases import draw_weights, f32, products, products_by_expert

from quantkit.kernels.cuda.layer.glu import limits
from quantkit.kernels.cuda.matmul import activations, mat_vec, mat_vec_shared_expert
from quantkit.kernels.parameters import Activation
from quantkit.types import BY_NAME

SILU = Activation("silu")
NO_BOTH = dict.fromkeys(("up_bias", "gate_bias", "up_scale", "gate_scale"), 0)


def to_format(memory: Memory, kind: str, out: int, n: int, rows: int) -> Any:
    """Return rows of a result brought to a format by the kernel that does nothing else."""
    size = rows, activations.row_bytes(kind, n)
    target = memory.allocate(size, np.uint8)
    slots = {"rows": rows, "x": out, "x_stride": 4 * n, "n": n, "out": target}
    memory.run(activations.quantize(kind, n, rows), **slots)
    return memory.get(target, size, np.uint8)


class Format:
    """Room for rows in a format, and the slots that name it."""

    def __init__(self, memory: Memory, kind: str, n: int, rows: int) -> None:
        self.memory, self.kind, self.n, self.rows = memory, kind, n, rows
        self.size = rows, activations.row_bytes(kind, n)
        self.counters = memory.put(np.zeros(rows * -(-n // 256), np.int32))
        self.quantized = memory.allocate(self.size, np.uint8)
        self.slots = {"format": activations.KINDS.index(kind), "quantized": self.quantized, "counters": self.counters}

    def check(self, out: int) -> None:
        """The same bytes as from the result in memory, and counters that may be used again."""
        want = to_format(self.memory, self.kind, out, self.n, self.rows)
        assert np.array_equal(self.memory.get(self.quantized, self.size, np.uint8), want)
        assert not self.memory.get(self.counters, (self.rows * -(-self.n // 256),), np.int32).any()


@pytest.mark.parametrize(
    ("name", "n_in", "n_out", "kind"), [("Q8_0", 64, 300, "q8_0"), ("Q4_K", 768, 520, "q8_k"), ("BF16", 64, 75, "bf16")]
)
def test_up_gate(memory: Memory, name: str, n_in: int, n_out: int, kind: str) -> None:
    t, rng = BY_NAME[name], np.random.default_rng(1)
    up, gate = draw_weights(t, (2, n_out, n_in), rng)
    place, _, _ = put_rows(memory, rng.standard_normal((1, n_in)).astype(f32), t)
    slots = {"rows": 1, **place, "up": memory.put(up), "gate": memory.put(gate), "row_bytes": up.shape[1], "n_in": n_in}
    slots |= {"n_out": n_out, "out_stride": 4 * n_out, **NO_BOTH, **limits(SILU)}
    plain, out, target = memory.allocate((1, n_out)), memory.allocate((1, n_out)), Format(memory, kind, n_out, 1)
    memory.run(mat_vec.up_gate(t, SILU, n_in, n_out), **slots, out=plain)
    for _ in range(2):
        memory.run(mat_vec.up_gate_to(t, SILU, n_in, n_out), **slots, out=out, **target.slots)
        assert np.array_equal(memory.get(out, (1, n_out)), memory.get(plain, (1, n_out)))
        target.check(plain)


def test_up_gate_of_experts(memory: Memory) -> None:
    t, rng, n_in, n_out, tokens, n_used = BY_NAME["Q4_0"], np.random.default_rng(2), 96, 270, 2, 3
    up, gate = draw_weights(t, (2, 4, n_out, n_in), rng)
    place, _, _ = put_rows(memory, rng.standard_normal((tokens, n_in)).astype(f32), t)
    ids = memory.put(np.array([[3, 1, 0], [0, 3, 2]], np.int32))
    slots = {"rows": tokens, **place, "x_per": n_used, "ids": ids, "plan": 0, "n_expert": 4, "n_used": n_used}
    slots |= {"up": memory.put(up), "gate": memory.put(gate), "row_bytes": up.shape[2], "n_in": n_in, "n_out": n_out}
    slots |= {"up_expert_bytes": up[0].nbytes, "gate_expert_bytes": up[0].nbytes, "up_bias_stride": 0, **NO_BOTH}
    slots |= {"gate_bias_stride": 0, **limits(SILU)}
    rows = tokens * n_used
    plain, out, target = (
        memory.allocate((rows, n_out)),
        memory.allocate((rows, n_out)),
        Format(memory, "q8_1", n_out, rows),
    )
    memory.run(mat_vec.up_gate_id(t, SILU, n_in, n_out, tokens, n_used), **slots, out=plain)
    memory.run(mat_vec.up_gate_id_to(t, SILU, n_in, n_out, tokens, n_used), **slots, out=out, **target.slots)
    assert np.array_equal(memory.get(out, (rows, n_out)), memory.get(plain, (rows, n_out)))
    target.check(plain)


@pytest.mark.parametrize(
    ("n_in", "n_out", "heads", "kind"), [(64, 128, 5, "q8_0"), (32, 512, 3, "q8_k"), (96, 64, 2, "f16")]
)
def test_mul_mat_heads(memory: Memory, n_in: int, n_out: int, heads: int, kind: str) -> None:
    t, rng, width = BY_NAME["Q8_0"], np.random.default_rng(3), heads * n_out
    w = draw_weights(t, (heads, n_out, n_in), rng)
    place, _, _ = put_rows(memory, rng.standard_normal((heads, n_in)).astype(f32), t)
    slots = {"rows": 1, "x": place["x"], "x_stride": heads * place["x_stride"], "x_head_bytes": place["x_stride"]}
    slots |= {"w": memory.put(w), "row_bytes": w.shape[2], "head_bytes": w[0].nbytes, "heads": heads, "n_in": n_in}
    slots |= {"n_out": n_out, "out_stride": 4 * width, "out_head_bytes": 4 * n_out}
    plain, out, target = memory.allocate((1, width)), memory.allocate((1, width)), Format(memory, kind, width, 1)
    memory.run(mat_vec.mul_mat_heads(t, n_in, n_out, 1, heads), **slots, out=plain)
    shape = mat_vec.mul_mat_heads_to(t, n_in, n_out, heads)
    assert shape is not None
    memory.run(shape, **slots, out=out, **target.slots)
    assert np.array_equal(memory.get(out, (1, width)), memory.get(plain, (1, width)))
    target.check(plain)


def test_heads_narrower_than_a_unit_use_another_launch() -> None:
    assert mat_vec.mul_mat_heads_to(BY_NAME["Q8_0"], 64, 96, 4) is None


# ---------------------------------------------------------------- a shared expert beside the experts

#: Types of experts and of the shared one, values of a row, and rows of both.
SHARED_CASES = [("Q8_0", "Q8_0", 64, 40, 300), ("Q4_K", "Q6_K", 512, 70, 30), ("F32", "F32", 100, 9, 20)]


@pytest.mark.parametrize(("name", "dense_name", "n_in", "n_out", "dense_n_out"), SHARED_CASES)
def test_up_gate_with_a_shared_expert(
    memory: Memory, name: str, dense_name: str, n_in: int, n_out: int, dense_n_out: int
) -> None:
    t, dense, rng, n_used = BY_NAME[name], BY_NAME[dense_name], np.random.default_rng(4), 3
    up, gate = draw_weights(t, (2, 5, n_out, n_in), rng)
    dense_up, dense_gate = draw_weights(dense, (2, dense_n_out, n_in), rng)
    ids, biases = np.array([4, 0, 2], np.int32), rng.standard_normal((4, dense_n_out)).astype(f32)
    scales = rng.uniform(0.5, 2, (2, 5)).astype(f32)
    place, values, excess = put_rows(memory, rng.standard_normal((1, n_in)).astype(f32), t)
    outs = memory.allocate((n_used, n_out)), memory.allocate((1, dense_n_out))
    slots = {"rows": 1, **place, "x_per": n_used, "ids": memory.put(ids), "plan": 0, "n_expert": 5, "n_used": n_used}
    slots |= {"up": memory.put(up), "gate": memory.put(gate), "row_bytes": up.shape[2], "n_in": n_in, "n_out": n_out}
    slots |= {"up_expert_bytes": up[0].nbytes, "gate_expert_bytes": up[0].nbytes, "up_bias_stride": 0, **NO_BOTH}
    slots |= {"gate_bias_stride": 0, **limits(SILU), "out": outs[0], "dense_x": place["x"], "dense_out": outs[1]}
    slots |= {"up_scale": memory.put(scales[0]), "gate_scale": memory.put(scales[1]), "dense_n_out": dense_n_out}
    slots |= {"dense_up": memory.put(dense_up), "dense_gate": memory.put(dense_gate)}
    slots |= {"dense_row_bytes": dense_up.shape[1], "dense_up_scale": 0, "dense_gate_scale": 0}
    slots |= {"dense_up_bias": memory.put(biases[0]), "dense_gate_bias": memory.put(biases[1])}
    units = -(-n_out // 256), -(-dense_n_out // 256)
    target = Format(memory, "f16", n_out, n_used), Format(memory, "q8_k", dense_n_out, 1)
    counters = memory.put(np.zeros(n_used * units[0] + units[1], np.int32))
    kinds = [activations.KINDS.index(form.kind) for form in target]
    slots |= {"format": kinds[0], "dense_format": kinds[1]}
    slots |= {"quantized": target[0].quantized, "dense_quantized": target[1].quantized}
    shape = mat_vec_shared_expert.up_gate(t, dense, SILU, n_in, n_out, n_used, dense_n_out)
    memory.run(shape, **slots, counters=counters)

    def product(w: Any, inputs: Any) -> Any:
        return products(w, inputs, values, excess)[0]

    def gated(g: Any, u: Any) -> Any:
        return g / (1 + np.exp(np.minimum(-g, 700))) * u

    y = [gated(product(gate[e], t) * scales[1, e], product(up[e], t) * scales[0, e]) for e in ids]
    check(memory.get(outs[0], (n_used, n_out)), np.stack(y))
    shared = gated(product(dense_gate, dense) + biases[1], product(dense_up, dense) + biases[0])
    check(memory.get(outs[1], (1, dense_n_out))[0], shared)
    for form, out in zip(target, outs, strict=True):
        form.check(out)
    assert not memory.get(counters, (n_used * units[0] + units[1],), np.int32).any()
    memory.run(shape, **{**slots, "format": -1, "dense_format": -1}, counters=0)


@pytest.mark.parametrize(("name", "dense_name", "n_in", "n_out", "dense_n_out"), SHARED_CASES)
def test_mul_mat_with_a_shared_expert(
    memory: Memory, name: str, dense_name: str, n_in: int, n_out: int, dense_n_out: int
) -> None:
    """Inputs of the shared expert are longer than those of the experts, each of which has its own."""
    t, dense, rng, n_used, dense_n_in = BY_NAME[name], BY_NAME[dense_name], np.random.default_rng(5), 3, 2 * n_in
    w, dense_w = draw_weights(t, (5, n_out, n_in), rng), draw_weights(dense, (dense_n_out, dense_n_in), rng)
    ids, bias = np.array([4, 0, 2], np.int32), rng.standard_normal((5, n_out)).astype(f32)
    place, values, excess = put_rows(memory, rng.standard_normal((n_used, n_in)).astype(f32), t)
    other_place, dense_address, other_excess = put_rows(memory, rng.standard_normal((1, dense_n_in)).astype(f32), dense)
    outs = memory.allocate((n_used, n_out)), memory.allocate((1, dense_n_out))
    slots = {"rows": 1, **place, "x_per": 1, "ids": memory.put(ids), "plan": 0, "n_expert": 5, "n_used": n_used}
    slots |= {"w": memory.put(w), "row_bytes": w.shape[2], "expert_bytes": w[0].nbytes, "n_in": n_in, "n_out": n_out}
    slots |= {"bias": memory.put(bias), "bias_stride": bias[0].nbytes, "scale": 0, "out": outs[0]}
    slots |= {"dense_x": other_place["x"], "dense_w": memory.put(dense_w), "dense_row_bytes": dense_w.shape[1]}
    slots |= {"dense_n_in": dense_n_in, "dense_n_out": dense_n_out, "dense_out": outs[1], "dense_bias": 0}
    slots |= {"dense_scale": memory.put(np.array([0.75], f32))}
    memory.run(mat_vec_shared_expert.mul_mat(t, dense, n_in, n_out, n_used, dense_n_out), **slots)
    check(memory.get(outs[0], (n_used, n_out)), products_by_expert(w, t, values, excess, ids) + bias[ids])
    check(memory.get(outs[1], (1, dense_n_out)), 0.75 * products(dense_w, dense, dense_address, other_excess))

"""Row epilogues on the device: fused, they give the same bits as the kernels one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from layer_cases import normed

from quantkit.kernels.cuda.layer import elementwise, glu, norms_rope, route, row_epilogue
from quantkit.kernels.cuda.matmul import activations
from quantkit.kernels.parameters import Activation


class OneByOne:
    """The kernels that a row epilogue fuses, each by itself; a norm is one with nothing else."""

    def __init__(self, memory: Memory, rows: int, width: int) -> None:
        self.memory, self.rows, self.width = memory, rows, width

    def allocate(self) -> int:
        return self.memory.allocate((self.rows, self.width))

    def add(self, a: int, b: int) -> int:
        out = self.allocate()
        slots = {"a": a, "b": b, "out": out, "width": self.width, "rows": self.rows}
        self.memory.run(elementwise.add(self.width, self.rows), **slots)
        return out

    def scale(self, x: int, factor: float) -> int:
        out = self.allocate()
        slots = {"x": x, "out": out, "width": self.width, "rows": self.rows}
        self.memory.run(elementwise.scale(self.width, self.rows), by=factor, **slots)
        return out

    def combine(self, x: int, weights: int, n_used: int) -> int:
        out = self.allocate()
        slots = {"x": x, "weights": weights, "out": out, "width": self.width, "rows": self.rows, "n_used": n_used}
        self.memory.run(route.combine(self.width, self.rows), **slots)
        return out

    def norm(self, x: int, **slots: Any) -> int:
        out = self.allocate()
        self.epilogue(x, normed=out, **slots)
        return out

    def quantize(self, kind: str, x: int) -> int:
        out = self.memory.allocate((self.rows, activations.row_bytes(kind, self.width)), np.uint8)
        slots = {"rows": self.rows, "x": x, "x_stride": 4 * self.width, "n": self.width, "out": out}
        self.memory.run(activations.quantize(kind, self.width, self.rows), **slots)
        return out

    def epilogue(self, x: int, **slots: Any) -> None:
        all_slots = {**row_epilogue.NOTHING, "batch": 0, "rows": self.rows, "width": self.width, "x": x, **slots}
        self.memory.run(row_epilogue.row_epilogue(self.width, self.rows), **all_slots)

    def get(self, address: int) -> Any:
        return self.memory.get(address, (self.rows, self.width), np.uint32)


SIZES = [(1, 256), (3, 200), (2, 1030), (2, 2048)]


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_all_steps_together(memory: Memory, rows: int, width: int) -> None:
    rng, n_used = np.random.default_rng(width), 3
    kernels = OneByOne(memory, rows, width)
    x = memory.put(rng.standard_normal((rows * n_used, width)).astype(np.float32))
    weights = memory.put(rng.random((rows, n_used)).astype(np.float32))
    addend, too = (memory.put(rng.standard_normal((rows, width)).astype(np.float32)) for _ in range(2))
    w, b, w2 = (memory.put(rng.standard_normal(width).astype(np.float32)) for _ in range(3))
    for kind, post, form in (("rms", -1, "q8_k"), ("layer", 0, "q8_0"), ("l2", -1, "q8_1"), ("rms", 1, "bf16")):
        of_norm = {
            "kind": norms_rope.NORM_KINDS.index(kind),
            "weight": w,
            "bias": b if kind == "layer" else 0,
            "eps": 1e-5,
        }
        t = kernels.combine(x, weights, n_used)
        if post >= 0:
            t = kernels.norm(t, kind=post, weight=w2, bias=b, eps=1e-6)
        y = kernels.add(too, kernels.scale(kernels.add(addend, t), 0.3))
        z = kernels.norm(y, **of_norm)
        q = kernels.quantize(form, z)
        size = rows, activations.row_bytes(form, width)
        actual = kernels.allocate(), kernels.allocate(), memory.allocate(size, np.uint8)
        of_post = {"post_kind": post, "post_weight": w2, "post_bias": b, "post_eps": 1e-6}
        all_slots = {
            **of_norm,
            **of_post,
            "weights": weights,
            "n_used": n_used,
            "plus": addend,
            "plus_too": too,
            "by": 0.3,
        }
        all_slots |= {"format": row_epilogue.format_of(form), "quantized": actual[2]}
        kernels.epilogue(x, sum=actual[0], normed=actual[1], **all_slots)
        assert np.array_equal(kernels.get(actual[0]), kernels.get(y))
        assert np.array_equal(kernels.get(actual[1]), kernels.get(z))
        assert np.array_equal(memory.get(actual[2], size, np.uint8), memory.get(q, size, np.uint8))


@pytest.mark.parametrize("form", activations.KINDS)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_a_sum_with_its_format(memory: Memory, rows: int, width: int, form: str) -> None:
    """No norm; the sum lies where one of its parts was."""
    rng = np.random.default_rng(3)
    kernels = OneByOne(memory, rows, width)
    x, addend = (memory.put(rng.standard_normal((rows, width)).astype(np.float32)) for _ in range(2))
    y = kernels.add(x, addend)
    q = kernels.quantize(form, y)
    size = rows, activations.row_bytes(form, width)
    actual = memory.allocate(size, np.uint8)
    kernels.epilogue(x, plus=addend, sum=addend, format=row_epilogue.format_of(form), quantized=actual)
    assert np.array_equal(kernels.get(addend), kernels.get(y))
    assert np.array_equal(memory.get(actual, size, np.uint8), memory.get(q, size, np.uint8))


@pytest.mark.parametrize("plain", [False, True])
def test_a_plain_sum_of_experts(memory: Memory, plain: bool) -> None:
    rng, rows, width, n_used = np.random.default_rng(4), 3, 200, 4
    kernels = OneByOne(memory, rows, width)
    x = memory.put(rng.standard_normal((rows * n_used, width)).astype(np.float32))
    weights = 0 if plain else memory.put(rng.random((rows, n_used)).astype(np.float32))
    out = kernels.allocate()
    kernels.epilogue(x, weights=weights, n_used=n_used, sum=out)
    assert np.array_equal(kernels.get(out), kernels.get(kernels.combine(x, weights, n_used)))


def test_a_gate_and_output_rows(memory: Memory) -> None:
    rng, rows, width = np.random.default_rng(5), 3, 300
    kernels = OneByOne(memory, rows, width)
    x, addend = (rng.standard_normal((7, width)).astype(np.float32) for _ in range(2))
    gate, outputs = rng.standard_normal((rows, 1)).astype(np.float32), np.array([1, 2, 6])
    limits, gated = glu.limits(Activation("sigmoid")), kernels.allocate()
    slots = {"gate": memory.put(gate), "up": memory.put(addend[:rows]), "width": width, "gate_width": 1, "rows": rows}
    memory.run(glu.glu(Activation("sigmoid"), width, rows), out=gated, **slots, **limits)
    out = kernels.allocate()
    kernels.epilogue(memory.put(x[:rows]), plus=slots["up"], gate=slots["gate"], sum=out)
    assert np.array_equal(kernels.get(out), kernels.get(kernels.add(memory.put(x[:rows]), gated)))
    batch = memory.batch(range(7), range(7), outputs=outputs)
    kernels.epilogue(memory.put(x), plus_too=memory.put(addend), selected=1, batch=batch, sum=out)
    want = kernels.add(memory.put(x[outputs]), memory.put(addend[outputs]))
    assert np.array_equal(kernels.get(out), kernels.get(want))


@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
@pytest.mark.parametrize(("rows", "width"), [*SIZES, (1, 9000)])
def test_norms_of_rows_agree_with_numpy(memory: Memory, kind: str, rows: int, width: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((rows, width)).astype(np.float32) + 0.5
    weight, bias = rng.standard_normal((2, width)).astype(np.float32)
    kernels = OneByOne(memory, rows, width)
    slots = {
        "kind": norms_rope.NORM_KINDS.index(kind),
        "eps": 1e-5,
        "weight": memory.put(weight),
        "bias": memory.put(bias),
    }
    actual = memory.get(kernels.norm(memory.put(x), **slots), (rows, width))
    np.testing.assert_allclose(actual, normed(x, kind, width, weight, bias), rtol=2e-6, atol=2e-6)


def test_wide_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 12288 columns"):
        row_epilogue.row_epilogue(12289, 1)

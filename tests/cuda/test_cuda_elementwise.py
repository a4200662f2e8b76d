"""Element by element, columns that move, activations and gates on the device, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from glu_cases import KINDS, activated, close, gated
from reference_op import batch_of, matrix, meaning

from quantkit.kernels.cuda.layer import elementwise, glu
from quantkit.model.ops import (
    Activation,
    Add,
    Clamp,
    Join,
    MultiplyBy,
    Op,
    Scale,
    ScaleByPosition,
    SelectOutputs,
    Shift,
    Softcap,
    Take,
    Value,
    Xielu,
)

#: Rows and width: less than four, odd ones, whole vectors, more than one block.
SHAPES = [(3, 5), (7, 36), (1, 1), (2, 1027), (3, 2060), (2, 6)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
XIELU = {"alpha_n": 0.75, "alpha_p": 1.25, "beta": 0.5, "eps": -0.125}


def values(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


def value(array: Any, name: str = "x") -> Value:
    return Value(name, array.shape[1])


def out(width: int, **options: Any) -> Value:
    return Value("out", width, **options)


def launched(memory: Memory, shape: Any, size: tuple[int, int], **slots: Any) -> Any:
    """Return out of a launch; arrays among the slots are brought to the device."""
    addresses = {k: memory.put(v) if isinstance(v, np.ndarray) else v for k, v in slots.items()}
    out = memory.allocate((size[0] + 1, size[1]))
    addresses = {"out": out, "width": size[1], "rows": size[0], **addresses}
    memory.run(shape, **{k: v for k, v in addresses.items() if k in shape.kernel.slots})
    actual = memory.get(out, (size[0] + 1, size[1]))
    assert np.isnan(actual[-1]).all(), "a row behind the value was written"
    return actual[:-1]


@shapes
def test_maps(memory: Memory, shape: tuple[int, int]) -> None:
    x, b = values(*shape), values(*shape, seed=2)
    v, w = value(x), value(b, "b")
    cases: list[tuple[Any, Op, dict[str, Any]]] = [
        (elementwise.add, Add(out=out(shape[1]), a=v, b=w), {"a": x, "b": b}),
        (elementwise.scale, Scale(out=out(shape[1]), x=v, factor=0.37), {"x": x, "by": 0.37}),
        (elementwise.shift, Shift(out=out(shape[1]), x=v, offset=0.37), {"x": x, "by": 0.37}),
        (elementwise.clamp, Clamp(out=out(shape[1]), x=v, limit=1.5), {"x": x, "by": 1.5}),
        (elementwise.softcap, Softcap(out=out(shape[1]), x=v, cap=3.0), {"x": x, "by": 3.0}),
        (elementwise.xielu, Xielu(out=out(shape[1]), x=v, **XIELU), {"x": x, **XIELU}),
    ]
    for launch, op, slots in cases:
        actual = launched(memory, launch(shape[1], shape[0]), shape, **slots)
        want = meaning(op, {v: x, w: b}, rows=shape[0])
        tolerances = {elementwise.softcap: {"rtol": 4e-7}, elementwise.xielu: {"rtol": 4e-7, "atol": 3e-7}}
        np.testing.assert_allclose(actual, want, **tolerances.get(launch, {"rtol": 0}))


def test_out_may_be_the_input(memory: Memory) -> None:
    x = values(3, 1030)
    address = memory.put(x)
    shape = elementwise.scale(1030, 3)
    memory.run(shape, x=address, out=address, width=1030, rows=3, by=2.0)
    np.testing.assert_array_equal(memory.get(address, x.shape), 2 * x)


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("per", [1, 3])
def test_scale_by_position(memory: Memory, outputs: bool, per: int) -> None:
    positions, picks = np.arange(12) * 2777, np.array([1, 5, 9, 11])
    n = len(picks) if outputs else len(positions)
    x = values(n * per, 52)
    v = Value("x", 52, outputs=outputs)
    op = ScaleByPosition(out=out(52), x=v, floor_scale=8192, alpha=0.1, offset=1.0)
    positions_of_rows = np.repeat(
        positions[picks] if outputs else positions, per
    )  # the reference knows rows of tokens only
    want = meaning(op, {v: x}, batch=batch_of(positions_of_rows))
    actual = launched(
        memory,
        elementwise.scale_by_position(52, n * per),
        x.shape,
        batch=memory.batch(np.zeros(12), positions, outputs=picks),
        x=x,
        rows_of=int(outputs),
        per=per,
        floor_scale=8192.0,
        alpha=0.1,
        offset=1.0,
    )
    assert len(np.unique(np.round(want / x, 4))) > 2
    np.testing.assert_allclose(actual, want, rtol=3e-7)


@pytest.mark.parametrize("repeat", [1, 2, 3])
@shapes
def test_vectors_along_rows(memory: Memory, repeat: int, shape: tuple[int, int]) -> None:
    x, vector = values(shape[0], shape[1] * repeat), values(1, shape[1], seed=3)[0]
    v, w = value(x), matrix(vector)
    for launch, kind in ((elementwise.multiply_by, "times"), (elementwise.plus_vector, "plus")):
        actual = launched(memory, launch(x.shape[1], len(x)), x.shape, x=x, vector=vector, n=len(vector))
        op = MultiplyBy(out=out(x.shape[1]), x=v, vector=w, kind=kind)
        np.testing.assert_array_equal(actual, meaning(op, {v: x}, rows=len(x), weights={w: vector}))


@pytest.mark.parametrize(
    ("groups", "period", "start", "n"),
    [(1, 41, 8, 33), (4, 24, 0, 16), (17, 200, 72, 128), (4, 24, 3, 8), (4, 10, 4, 4)],
)
def test_take(memory: Memory, groups: int, period: int, start: int, n: int) -> None:
    x = values(3, groups * period)
    v, out_value = value(x), out(groups * n)
    slots = {"x_width": x.shape[1], "start": start, "period": period}
    actual = launched(memory, elementwise.take(out_value.width, 3), (3, out_value.width), x=x, **slots)
    np.testing.assert_array_equal(actual, meaning(Take(out=out_value, x=v, start=start, period=period), {v: x}, rows=3))


@pytest.mark.parametrize(
    ("a_groups", "b_groups", "period_a", "period_b"),
    [(1, 1, 5, 3), (16, 1, 48, 24), (4, 2, 7, 9), (1, 1, 4, 8), (4, 2, 4, 3), (4, 4, 3, 4)],
)
def test_join(memory: Memory, a_groups: int, b_groups: int, period_a: int, period_b: int) -> None:
    a, b = values(3, a_groups * period_a), values(3, b_groups * period_b, seed=2)
    v, w, out_value = value(a), value(b, "b"), out(a_groups * (period_a + period_b))
    slots = {"a_width": v.width, "b_width": w.width, "period_a": period_a, "period_b": period_b}
    actual = launched(memory, elementwise.join(out_value.width, 3), (3, out_value.width), a=a, b=b, **slots)
    op = Join(out=out_value, a=v, b=w, period_a=period_a, period_b=period_b)
    np.testing.assert_array_equal(actual, meaning(op, {v: a, w: b}, rows=3))


@pytest.mark.parametrize("width", [33, 1100])
def test_select_outputs(memory: Memory, width: int) -> None:
    x, indices = values(10, width), [9, 3, 4]
    v, out_value = value(x), out(width, outputs=True)
    batch = memory.batch(np.zeros(10), np.arange(10), outputs=indices)
    actual = launched(memory, elementwise.select_outputs(width, 3), (3, width), batch=batch, x=x)
    want = meaning(SelectOutputs(out=out_value, x=v), {v: x}, batch=batch_of(np.arange(10), outputs=indices))
    np.testing.assert_array_equal(actual, want)


def test_empty_inputs_are_valid(memory: Memory) -> None:
    batch = memory.batch(np.zeros(2), np.arange(2))
    actual = launched(memory, elementwise.select_outputs(8, 0), (0, 8), batch=batch, x=values(2, 8))
    assert actual.shape == (0, 8)
    assert launched(memory, elementwise.scale(8, 0), (0, 8), x=values(2, 8), by=2.0).shape == (0, 8)


# ---------------------------------------------------------------- activations and gates


@pytest.mark.parametrize("a", KINDS, ids=str)
def test_glu(memory: Memory, a: Activation) -> None:
    slots = glu.limits(a)
    for width, gate_width, both in ((1028, 1028, False), (61, 61, False), (36, 36, True), (7, 7, True), (48, 3, False)):
        g = values(4, 2 * width if both else gate_width) * 3
        up = values(4, width, seed=2) * 3
        actual = launched(
            memory, glu.glu(a, width, 4), (4, width), gate=g, up=0 if both else up, gate_width=gate_width, **slots
        )
        gate, factor = np.split(g, 2, 1) if both else (np.repeat(g, width // gate_width, 1), up)
        close(a, actual, gated(a, gate, factor), tolerance=3e-6)


@pytest.mark.parametrize("a", [*KINDS, Activation("softplus")], ids=str)
def test_activate(memory: Memory, a: Activation) -> None:
    x = values(5, 83) * 5
    x[0, :6] = 0, -0.0, 88, -88, 20.5, 3e4
    actual = launched(memory, glu.activate(a, 83, 5), x.shape, x=x, **glu.limits(a))
    close(a, actual, activated(a, x), tolerance=3e-6)


def test_gelu_beyond_its_table(memory: Memory) -> None:
    a = Activation("gelu")
    x = np.array([[-np.inf, -10, -9.999, 9.999, 10.0001, 12345.678, np.inf, 0, np.nan]], np.float32)
    actual = launched(memory, glu.activate(a, 9, 1), x.shape, x=x, **glu.limits(a))
    assert actual[0, :8].tolist() == [0, 0, 0, 10, x[0, 4], x[0, 5], np.inf, 0]
    assert np.isnan(actual[0, 8])


@pytest.mark.parametrize("kind", ["relu", "silu", "sigmoid"])
def test_limits_propagate_nan(memory: Memory, kind: str) -> None:
    a = Activation(kind, gate_limit=1.0, act_limit=0.5, up_limit=2.0)
    x = np.array([[np.nan, 1.0, 3.0, -3.0]], np.float32)
    up = np.array([[1.0, np.nan, 5.0, -5.0]], np.float32)
    actual = launched(memory, glu.glu(a, 4, 1), (1, 4), gate=x, up=up, gate_width=4, **glu.limits(a))
    assert np.isnan(actual[0, :2]).all()
    assert np.isfinite(actual[0, 2:]).all()

"""Rows by their own statistics, and groups of columns mixed, on the CPU and on the device, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from op_runner import run_operation
from reference_op import matrix, meaning

from quantkit.kernels.cpu.core.tape import N_TOKENS
from quantkit.kernels.cpu.layer import mixing as cpu
from quantkit.kernels.cuda.layer import mixing as cuda
from quantkit.model.ops import Bonus, Exceed, Lerp, Mix, ToLength, Value

ROWS = [1, 3]
#: Columns of a group: one, less than a vector, odd, whole vectors.
GROUPS = [1, 6, 33, 64, 1030]
threads = pytest.mark.parametrize("threads", [1, 2, 3])


def values(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(0.5, 2, shape).astype(np.float32)


def on_cpu(operation: Any, width: int, rows: int, n_threads: int, slots: dict[str, Any]) -> Any:
    shape = (rows, width)
    return run_operation(operation, shape, threads=n_threads, width=width, rows_of=N_TOKENS, per=1, **slots)


def on_device(memory: Memory, launch: Any, width: int, rows: int, slots: dict[str, Any]) -> Any:
    out = memory.allocate((rows + 1, width))
    addresses = {k: memory.put(v) if isinstance(v, np.ndarray) else v for k, v in slots.items()}
    memory.run(launch, out=out, width=width, rows=rows, **addresses)
    actual = memory.get(out, (rows + 1, width))
    assert np.isnan(actual[-1]).all(), "a row behind the value was written"
    return actual[:-1]


def exceed(rows: int, width: int) -> tuple[dict[str, Any], Any]:
    x = values(rows, width)
    v = Value("x", width)
    return {"x": x, "factor": 0.625}, meaning(Exceed(out=Value("out", width), x=v, factor=0.625), {v: x}, rows=rows)


def to_length(rows: int, group: int, n: int) -> tuple[dict[str, Any], Any]:
    x, like = values(rows, n * group), values(rows, group, seed=2)
    v, w = Value("x", n * group), Value("like", group)
    op = ToLength(out=Value("out", n * group), x=v, like=w, group=group)
    return {"x": x, "like": like, "group": group}, meaning(op, {v: x, w: like}, rows=rows)


def mix(rows: int, group: int, n: int, m: int) -> tuple[dict[str, Any], Any]:
    arrays = {
        "x": values(rows, n * group),
        "weights": values(rows, n * m, seed=2),
        "base": values(rows, m * group, seed=3),
    }
    values_by_name = {name: Value(name, array.shape[1]) for name, array in arrays.items()}
    op = Mix(out=Value("out", m * group), n=n, offset=0.75, **values_by_name)
    want = meaning(op, {values_by_name[name]: array for name, array in arrays.items()}, rows=rows)
    return arrays | {"group": group, "n": n, "offset": 0.75}, want


def lerp(rows: int, group: int, n: int, form: str = "by weights") -> tuple[dict[str, Any], Any]:
    """of: what says how far."""
    inputs: dict[str, Any] = {"x": values(rows, group), "to": values(rows, group, seed=2), "n": group}
    weights_of_x, weights = values(n * group, seed=3), values(rows, n * group, seed=4)
    x, value_to, w = Value("x", group), Value("to", group), Value("w", n * group)
    m = matrix(weights_of_x)
    operands = {"by": m if "by" in form else None, "weights": w if "weights" in form else None}
    op = Lerp(out=Value("out", n * group), x=x, target=value_to, vector=operands["by"], weights=operands["weights"])  # type: ignore[arg-type]
    arrays = {x: inputs["x"], value_to: inputs["to"], w: weights}
    inputs |= {"by": weights_of_x if "by" in form else 0, "weights": weights if "weights" in form else 0}
    return inputs, meaning(op, arrays, rows=rows, weights={m: weights_of_x})


def bonus(rows: int, head: int, n: int) -> tuple[dict[str, Any], Any]:
    arrays = {name: values(rows, n * head, seed=i) for i, name in enumerate("xrkv")}
    values_by_name, vector = {name: Value(name, n * head) for name in arrays}, values(n * head, seed=5)
    op = Bonus(out=Value("out", n * head), vector=matrix(vector), head=head, **values_by_name)
    want = meaning(op, {values_by_name[name]: x for name, x in arrays.items()}, rows=rows, weights={op.vector: vector})
    return {**arrays, "vector": vector, "head": head}, want


def close(actual: Any, want: Any) -> None:
    np.testing.assert_allclose(actual, want, rtol=2e-6, atol=4e-6)


@threads
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", GROUPS[1:])
def test_exceed(width: int, rows: int, threads: int) -> None:
    slots, want = exceed(rows, width)
    assert (want == 0).any()
    assert (want > 0).any()
    close(on_cpu(cpu.exceed, width, rows, threads, slots), want)


@threads
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("group", GROUPS)
def test_to_length(group: int, rows: int, threads: int) -> None:
    slots, want = to_length(rows, group, 3)
    close(on_cpu(cpu.to_length, 3 * group, rows, threads, slots), want)


@threads
@pytest.mark.parametrize(("n", "m"), [(4, 4), (1, 4), (3, 2)])
@pytest.mark.parametrize("group", GROUPS)
def test_mix(group: int, n: int, m: int, threads: int) -> None:
    slots, want = mix(3, group, n, m)
    close(on_cpu(cpu.mix, m * group, 3, threads, slots), want)


@threads
@pytest.mark.parametrize("form", ["by", "weights", "by weights"])
@pytest.mark.parametrize("group", GROUPS)
def test_lerp(group: int, form: str, threads: int) -> None:
    slots, want = lerp(3, group, 5, form)
    close(on_cpu(cpu.lerp, 5 * group, 3, threads, slots), want)


@threads
@pytest.mark.parametrize("head", GROUPS)
def test_bonus(head: int, threads: int) -> None:
    slots, want = bonus(3, head, 3)
    np.testing.assert_allclose(on_cpu(cpu.bonus, 3 * head, 3, threads, slots), want, rtol=2e-5, atol=2e-4 * head**0.5)


@pytest.mark.parametrize("group", GROUPS)
def test_on_the_device(memory: Memory, group: int) -> None:
    for rows in ROWS:
        if group > 1:
            slots, want = exceed(rows, group)
            close(on_device(memory, cuda.exceed(rows), group, rows, slots), want)
        slots, want = to_length(rows, group, 3)
        close(on_device(memory, cuda.to_length(3, rows), 3 * group, rows, slots), want)
        for n, m in ((4, 4), (1, 4), (3, 2)):
            slots, want = mix(rows, group, n, m)
            close(on_device(memory, cuda.mix(m * group, rows), m * group, rows, slots), want)
        for form in ("by", "weights", "by weights"):
            slots, want = lerp(rows, group, 5, form)
            close(on_device(memory, cuda.lerp(5 * group, rows), 5 * group, rows, slots), want)
        slots, want = bonus(rows, group, 3)
        actual = on_device(memory, cuda.bonus(3 * rows), 3 * group, rows, slots)
        np.testing.assert_allclose(actual, want, rtol=2e-5, atol=2e-4 * group**0.5)

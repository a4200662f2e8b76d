"""Observing operations on the device: sums that lose nothing, as the reference's, and rows that are bad."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from observer_cases import N_EXPERT, N_USED, ROWS, check_by_expert, check_sums, experts, random_rows
from reference_op import batch_of, meaning, program

from quantkit.kernels.cuda import observe
from quantkit.model.backends.accumulators import padded_width
from quantkit.model.ops import CountUp, Covariance, Similarity, SumColumns, Value


def zeros(memory: Memory, *shape: int, dtype: Any = np.float64) -> int:
    return memory.put(np.zeros(shape, dtype))


@pytest.mark.parametrize("width", [1, 24, 63, 130])
def test_sums_of_columns_are_exact(memory: Memory, width: int) -> None:
    x = random_rows(width)
    sums, count, bad = (zeros(memory, 4, padded_width(width)), zeros(memory, 1), zeros(memory, 1))
    targets = {"sums": sums, "count": count, "bad": bad, "width": width}
    parts = np.split(x, [1, 40])
    for part in parts:
        memory.run(observe.sum_columns(width), x=memory.put(part), rows=len(part), **targets)
    check_sums(memory.get(sums, (4, padded_width(width)), np.float64), x)
    assert memory.get(count, (1,), np.int64)[0] == ROWS
    assert memory.get(bad, (1,), np.int64)[0] == 0
    x[41, width - 1] = np.nan
    x[50, 0] = np.inf
    memory.run(observe.sum_columns(width), x=memory.put(x), rows=ROWS, **targets)
    assert memory.get(bad, (1,), np.int64)[0] == 42


def test_cancelling_sums_are_exact(memory: Memory) -> None:
    x = np.array([[1e30], [1.0], [-1e30], [2.0**-40]] * 9, np.float32)
    sums = zeros(memory, 4, 8)
    slots = {"count": zeros(memory, 1), "bad": zeros(memory, 1), "width": 1}
    memory.run(observe.sum_columns(1), x=memory.put(x), rows=len(x), sums=sums, **slots)
    actual = memory.get(sums, (4, 8), np.float64)
    assert actual[2, 0] + actual[3, 0] == 9 + 9 * 2.0**-40


def reference(op: Any, values: dict[Value, Any]) -> Any:
    compiled = program(op)
    compiled.values.update(values)
    compiled.run(batch_of(np.arange(ROWS)))
    return compiled.accumulators[op.label]


@pytest.mark.parametrize("one_row_a_token", [True, False])
@pytest.mark.parametrize("width", [40, 131])
def test_sums_by_expert_are_exact(memory: Memory, width: int, one_row_a_token: bool) -> None:
    x, ids = random_rows(width, ROWS if one_row_a_token else ROWS * N_USED), experts()
    sums, counts = zeros(memory, N_EXPERT, 4, padded_width(width)), zeros(memory, N_EXPERT)
    bad = zeros(memory, 1)
    slots = {"ids": memory.put(ids), "width": width, "rows": ROWS, "n_used": N_USED}
    slots |= {"x_per": N_USED if one_row_a_token else 1, "sums": sums, "counts": counts, "bad": bad}
    shape = observe.sum_columns_id(width, N_EXPERT)
    memory.run(shape, x=memory.put(x), **slots)
    actual = memory.get(sums, (N_EXPERT, 4, padded_width(width)), np.float64)
    assert memory.get(bad, (1,), np.int64)[0] == 0
    actual_counts = memory.get(counts, (N_EXPERT,), np.int64)
    check_by_expert(actual, actual_counts, x, ids)
    vx, vi = Value("x", width, per=1 if one_row_a_token else N_USED), Value("ids", N_USED, integer=True)
    want = reference(SumColumns(x=vx, label="w", names=("w",), ids=vi, n_mat=N_EXPERT), {vx: x, vi: ids})
    np.testing.assert_array_equal(actual_counts, want["counts"])
    np.testing.assert_allclose(actual[:, 0] + actual[:, 1], want["sums"][:, 0], rtol=1e-12)
    x[17 if one_row_a_token else 17 * N_USED + 2, 8] = -np.inf
    memory.run(shape, x=memory.put(x), **slots)
    assert (memory.get(bad, (1,), np.int64)[0] - 1) // N_USED == 17


@pytest.mark.parametrize("case", ["dense", "one row a token", "one row a pair"])
@pytest.mark.parametrize("width", [30, 130])
def test_covariance(memory: Memory, width: int, case: str) -> None:
    rng = np.random.default_rng(width)
    dense, first, end = case == "dense", 1, N_EXPERT
    x = rng.normal(size=(ROWS * N_USED if case == "one row a pair" else ROWS, width)).astype(np.float32)
    ids, weights = experts(), rng.uniform(size=(ROWS, N_USED)).astype(np.float32)
    per = N_USED if case == "one row a pair" else 1
    vx, vi, vw = Value("x", width, per=per), Value("ids", N_USED, integer=True), Value("weights", N_USED)
    if dense:
        op = Covariance(x=vx, label="w", names=("w",))
    else:
        op = Covariance(x=vx, label="w", names=("w",), ids=vi, weights=vw, experts=(first, end))
    n = 1 if dense else end - first
    targets = {name: zeros(memory, n, width, width) for name in ("sums", "weighted")}
    counts, weight = zeros(memory, n), zeros(memory, n)
    slots = {"x": memory.put(x), "width": width, "rows": ROWS, "n_used": 1 if dense else N_USED}
    slots |= {"ids": 0 if dense else memory.put(ids), "first": 0 if dense else first}
    slots["x_per"] = N_USED if case == "one row a token" else 1
    shape = observe.covariance(width, n)
    for _ in range(2):  # sums are added to
        memory.run(shape, sums=targets["sums"], counts=counts, weights=0, weight=0, **slots)
        if not dense:
            w = memory.put(weights)
            memory.run(shape, sums=targets["weighted"], counts=0, weights=w, weight=weight, **slots)
    want = reference(op, {vx: x, vi: ids, vw: weights})
    for name in ("sums", "weighted")[: 1 if dense else 2]:
        actual = memory.get(targets[name], (n, width, width), np.float64)
        np.testing.assert_allclose(actual, 2 * want[name], rtol=1e-12, atol=1e-12)
        assert np.array_equal(actual, actual.transpose(0, 2, 1))
    np.testing.assert_array_equal(memory.get(counts, (n,), np.int64), 2 * want["counts"])
    if not dense:
        np.testing.assert_allclose(memory.get(weight, (n,), np.float64), 2 * want["weight"], rtol=1e-13)


@pytest.mark.parametrize("width", [5, 300])
def test_similarity(memory: Memory, width: int) -> None:
    a, b = random_rows(width, 9), random_rows(width, 10)[1:]
    a[4] = 0
    va, vb = Value("a", width), Value("b", width)
    total, count, bad, cosines = zeros(memory, 1), zeros(memory, 1), zeros(memory, 1), memory.allocate((9,), np.float64)
    slots = {"width": width, "rows": 9, "cosines": cosines, "bad": bad}

    def launch() -> None:
        memory.run(observe.similarity(9), a=memory.put(a), b=memory.put(b), **slots)
        memory.run(observe.add_cosines(), cosines=cosines, rows=9, total=total, count=count)

    launch()
    want = reference(Similarity(a=va, b=vb, label="s"), {va: a, vb: b})
    np.testing.assert_allclose(memory.get(total, (1,), np.float64), want["total"], rtol=1e-13)
    assert memory.get(count, (1,), np.int64)[0] == want["counts"][0] == 9
    assert memory.get(bad, (1,), np.int64)[0] == 0
    b[7, 2] = np.nan
    launch()
    assert memory.get(bad, (1,), np.int64)[0] == 8


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_nonfinite_rows_are_detected(memory: Memory, wrong: float) -> None:
    x, bad = random_rows(67, 21), zeros(memory, 1)
    x[0, 0] = 3e38
    memory.run(observe.not_finite(21), x=memory.put(x), width=67, rows=21, bad=bad)
    assert memory.get(bad, (1,), np.int64)[0] == 0
    x[20, 66] = x[13, 1] = x[19, 3] = wrong
    memory.run(observe.not_finite(21), x=memory.put(x), width=67, rows=21, bad=bad)
    assert memory.get(bad, (1,), np.int64)[0] == 14


def test_count_up(memory: Memory) -> None:
    like, out = Value("x", 4), Value("ids", 7, integer=True)
    address = memory.allocate((41, 7), np.int32)
    memory.run(observe.count_up(7, 40), out=address, first=5, n_used=7, rows=40)
    actual = memory.get(address, (41, 7), np.int32)
    np.testing.assert_array_equal(actual[:-1], meaning(CountUp(out=out, like=like, first=5), {}, rows=40))
    assert (actual[-1] == -1).all()

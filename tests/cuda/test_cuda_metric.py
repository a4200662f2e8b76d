"""Metrics made on the device: every number has the CPU's bits, for sizes that fill no tile, too."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from device_memory import Memory
from refusals import refuses
from test_feedback import covariance

from quantkit.errors import FormatError
from quantkit.kernels.cpu.feedback import factor as on_cpu
from quantkit.kernels.cpu.feedback.metric import Metric, metric
from quantkit.kernels.cpu.feedback.products import Products, times_inverse
from quantkit.kernels.cpu.feedback.products import correct as correct_on_cpu
from quantkit.kernels.cpu.feedback.tiles import pack_columns
from quantkit.kernels.cuda.feedback import matrices
from quantkit.kernels.cuda.feedback import metric as on_device
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.feedback.pinned_transfer import PinnedTransfer
from quantkit.kernels.levels import Grouping, levels_of
from quantkit.sequential import inputs as stage_inputs
from quantkit.sequential.inputs import StageInputs
from quantkit.types import BY_NAME

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def run(memory: Memory, *launches: matrices.Launch) -> None:
    memory.device.run(launches)
    memory.device.synchronize()


@pytest.mark.parametrize("n", [96, 208])
def test_the_factor_equals_the_cpus(memory: Memory, n: int) -> None:
    """Rows and columns in another order; a matrix that is not positive definite says at which column."""
    h = covariance(1, n)
    order = np.random.default_rng(2).permutation(n).astype(np.int32)
    raised = np.diagonal(h) * 1.01
    r = h[np.ix_(order, order)]
    np.fill_diagonal(r, raised[order])
    expected = np.triu(on_cpu.cholesky(r.copy()))
    address, pivots, bad = (
        memory.allocate((n, n), np.float64),
        memory.allocate((2, n), np.float64),
        memory.put(np.zeros(1, np.int64)),
    )
    run(memory, matrices.permute(memory.put(h), memory.put(raised), memory.put(order), address, n))
    run(memory, *matrices.cholesky(address, pivots, bad, n))
    assert memory.get(bad, (1,), np.int64)[0] == 0
    assert (np.triu(memory.get(address, (n, n), np.float64)) == expected).all()
    assert (memory.get(pivots, (2, n), np.float64)[1] == 1 / np.diagonal(expected)).all()
    r[70, 70] = 0
    with pytest.raises(np.linalg.LinAlgError, match=f"column 70 of {n}"):
        on_cpu.cholesky(r.copy())
    run(memory, *matrices.cholesky(memory.put(r), pivots, bad, n))
    assert memory.get(bad, (1,), np.int64)[0] == 71


@pytest.mark.parametrize(("n", "m"), [(96, 48), (160, 240)])
def test_solutions_equal_the_cpus(memory: Memory, n: int, m: int) -> None:
    """Sums over runs of rows, of which the last is short; then the product with the inverse, packed and not."""
    rng = np.random.default_rng(3)
    sums, square, cross = Products(n, m, 1), memory.put(np.zeros((n, n))), memory.put(np.zeros((n, m)))
    for rows in (300, 40):
        x, z = (rng.standard_normal((rows, width)).astype(np.float32) for width in (n, m))
        sums.add(x, z)
        address = memory.put(x)
        run(memory, matrices.products(address, address, square, rows, n, n))
        run(memory, matrices.products(address, memory.put(z), cross, rows, n, m))
    run(memory, matrices.mirror(square, n))
    sums.finish()
    assert (memory.get(square, (n, n), np.float64) == sums.square).all()
    assert (sums.cross == memory.get(cross, (n, m), np.float64).T).all()
    expected = times_inverse(sums.cross, sums.square, 0.05)
    raised = np.diagonal(sums.square) + 0.05 * np.diagonal(sums.square).mean()
    r, pivots, bad = (
        memory.allocate((n, n), np.float64),
        memory.allocate((2, n), np.float64),
        memory.put(np.zeros(1, np.int64)),
    )
    run(memory, matrices.permute(square, memory.put(raised), memory.put(np.arange(n, dtype=np.int32)), r, n))
    run(memory, *matrices.cholesky(r, pivots, bad, n), *matrices.solve(cross, r, pivots + 8 * n, m, n))
    assert (expected == memory.get(cross, (n, m), np.float64).T).all()
    rows, first = 20, m - 20
    out = memory.allocate((rows, n))
    run(memory, matrices.to_f32(cross, out, n, rows, first, m))
    assert (memory.get(out, (rows, n)) == expected[first:].astype(np.float32)).all()
    if m >= n:
        packed_columns = memory.allocate((n // 4, n, 4))
        run(memory, matrices.pack_columns(cross, packed_columns, n, stride=m, transposed=True))
        assert (memory.get(packed_columns, (n // 4, n, 4)) == pack_columns(expected[:n])).all()


def test_targets_equal_the_cpus(memory: Memory) -> None:
    rng, rows, n = np.random.default_rng(4), 70, 96
    x, offset = (rng.standard_normal((rows, n)).astype(np.float32) for _ in range(2))
    packed_columns = pack_columns(rng.standard_normal((n, n)).astype(np.float32))
    expected, out, places = (
        correct_on_cpu(x, packed_columns),
        memory.allocate((rows, n)),
        [memory.put(a) for a in (x, packed_columns)],
    )
    run(memory, matrices.correct(*places, 0, out, rows, n))
    assert (memory.get(out, (rows, n)) == expected).all()
    run(memory, matrices.correct(*places, memory.put(offset), out, rows, n))
    assert (memory.get(out, (rows, n)) == expected + offset).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_sums_are_detected(memory: Memory, bad: float) -> None:
    sums, flag = np.full(700, 1e300), memory.put(np.zeros(1, np.int32))
    run(memory, matrices.not_finite_sum(memory.put(sums), flag, 700))
    assert memory.get(flag, (1,), np.int32)[0] == 0
    sums[-1] = bad
    run(memory, matrices.not_finite_sum(memory.put(sums), flag, 700))
    assert memory.get(flag, (1,), np.int32)[0] == 1


def assert_same(memory: Memory, actual: DeviceMetric, expected: Metric) -> None:
    """Compare all that a metric has."""
    assert actual.n == expected.n
    groups = expected.groups
    for name, array in (
        *((name, getattr(expected, name)) for name in ("columns", "u", "pivots", "h", "per_diagonal")),
        *((name, getattr(expected, name)) for name in ("correction", "offset")),
        ("groups_feedback", None if groups is None else groups.feedback),
        ("groups_descent", None if groups is None else groups.descent),
    ):
        address = getattr(actual, name)
        assert (address == 0) == (array is None), name
        if array is not None:
            assert (memory.get(address, array.shape, array.dtype) == array).all(), name
    assert actual.grouping == (None if groups is None else groups.grouping)
    if expected.importance is not None:
        assert actual.importance is not None
        assert (actual.importance == expected.importance).all()
    n_owned = len(actual.owned)
    assert (
        n_owned
        == len(set(actual.owned))
        == 5 + (expected.correction is not None) + (expected.offset is not None) + 2 * (groups is not None)
    )
    actual.close()


@pytest.mark.parametrize("grouping", [None, Grouping(8), levels_of(BY_NAME["IQ4_KSS"]).grouping], ids=["", "8", "kss"])
def test_a_metric_equals_the_cpus(memory: Memory, grouping: Grouping | None) -> None:
    h = covariance(5, 256)
    carrier = PinnedTransfer(memory.device.new_stream())
    assert_same(memory, on_device.metric(carrier, h, 0.02, grouping), metric(h, 0.02, 1, grouping))
    h[9] = h[:, 9] = 0
    h[9, 9] = -1e3
    lines = []
    for make in (partial(on_device.metric, carrier), metric):
        with pytest.raises(np.linalg.LinAlgError, match="not positive definite: column") as e:
            make(h, 0.0, grouping=grouping)
        lines.append(str(e.value))
    assert lines[0] == lines[1]


def watched(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes that a device gives away from now on: those it has not got back, and the most at any time."""
    sizes, peaks, allocate, free = dict[int, int](), [0, 0], device.allocate, device.free

    def give(nbytes: int) -> int:
        sizes[address := allocate(nbytes)] = nbytes
        peaks[:] = peaks[0] + nbytes, max(peaks[1], peaks[0] + nbytes)
        return int(address)

    def take(address: int) -> None:
        free(address)
        peaks[0] -= sizes.pop(address)

    monkeypatch.setattr(device, "allocate", give)
    monkeypatch.setattr(device, "free", take)
    return peaks


@pytest.mark.parametrize("residual", [0, 384])
def test_a_metric_of_two_streams_equals_the_cpus(
    memory: Memory, residual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over rows that come in parts, targets' corrections, what a residual stream lacks; in no more room than told.

    Of as few columns, rows on their way would take more than all else.
    """
    monkeypatch.setattr(on_device, "_ROWS", matrices.ROWS_AT_ONCE)
    rng, n, tokens = np.random.default_rng(6), 128, 600
    mixed = rng.standard_normal((n, n)) * np.exp(rng.standard_normal(n))
    x = (rng.standard_normal((tokens, n)) @ mixed).astype(np.float32)
    z = rng.standard_normal((tokens, n + residual)).astype(np.float32) + 0.1 * x[:, :1]
    stage = StageInputs("blk.0.ffn_down.weight", n, 1)
    stage.tokens, share = (tokens,), np.ones((tokens, 1), np.float32)
    counts = rng.uniform(0.5, 2, (tokens, 1)).astype(np.float32)
    rows = [(x[:400], x[:400] + z[:400, :n]), (x[400:], x[400:] + z[400:, :n])]
    batches = np.split(np.arange(tokens), [400])
    monkeypatch.setattr(stage, "_stage", types.SimpleNamespace(source=None))
    monkeypatch.setattr(stage_inputs, "_width", lambda stage: residual)
    monkeypatch.setattr(
        stage, "_rows", lambda matrix: ((x, y, a, share[a]) for (x, y), a in zip(rows, batches, strict=True))
    )
    monkeypatch.setattr(stage, "_targets", lambda tokens: (z[tokens, n:], counts[tokens]))
    carrier, peak = PinnedTransfer(memory.device.new_stream()), watched(memory.device, monkeypatch)
    actual = stage.metric_on(carrier, 0)
    assert peak[0] <= stage.metric_bytes // 4
    assert peak[1] <= stage.metric_bytes
    assert_same(memory, actual, stage.build_metric(0, 1))
    assert peak[0] == 0
    x[3, 3] = np.inf
    for make in (partial(stage.metric_on, carrier), partial(stage.build_metric, threads=1)):
        with refuses(FormatError, "QK-E108 blk.0.ffn_down.weight"):
            make(0)

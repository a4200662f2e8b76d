"""Metrics made on the device: every number has the CPU's bits, for sizes that fill no tile, too."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from device_memory import Memory
from test_feedback import covariance

from quantkit.errors import FormatError
from quantkit.kernels.cpu.feedback import factor as on_cpu
from quantkit.kernels.cpu.feedback.metric import Metric, metric
from quantkit.kernels.cpu.feedback.products import Products, times_inverse
from quantkit.kernels.cpu.feedback.products import corrected as corrected_on_cpu
from quantkit.kernels.cpu.feedback.tiles import pack_columns
from quantkit.kernels.cuda.feedback import factor, metric_kernels, packing, products
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.feedback.pinned_transfer import PinnedTransfer
from quantkit.kernels.levels import Grouping, levels_of
from quantkit.sequential import inputs as stage_inputs
from quantkit.sequential.inputs import StageInputs
from quantkit.types import BY_NAME

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def run(memory: Memory, *launches: factor.Launch) -> None:
    memory.device.run(launches)
    memory.device.synchronize()


@pytest.mark.parametrize("n", [96, 208])
def test_the_factor_is_the_cpus(memory: Memory, n: int) -> None:
    """Rows and columns in another order; a matrix that is not positive definite says at which column."""
    h = covariance(1, n)
    order = np.random.default_rng(2).permutation(n).astype(np.int32)
    raised = np.diagonal(h) * 1.01
    r = h[np.ix_(order, order)]
    np.fill_diagonal(r, raised[order])
    wanted = np.triu(on_cpu.cholesky(r.copy()))
    at, by, bad = memory.room((n, n), np.float64), memory.room((2, n), np.float64), memory.put(np.zeros(1, np.int64))
    run(memory, factor.permute(memory.put(h), memory.put(raised), memory.put(order), at, n))
    run(memory, *factor.cholesky(at, by, bad, n))
    assert memory.get(bad, (1,), np.int64)[0] == 0
    assert (np.triu(memory.get(at, (n, n), np.float64)) == wanted).all()
    assert (memory.get(by, (2, n), np.float64)[1] == 1 / np.diagonal(wanted)).all()
    r[70, 70] = 0
    with pytest.raises(np.linalg.LinAlgError, match=f"column 70 of {n}"):
        on_cpu.cholesky(r.copy())
    run(memory, *factor.cholesky(memory.put(r), by, bad, n))
    assert memory.get(bad, (1,), np.int64)[0] == 71


@pytest.mark.parametrize(("n", "m"), [(96, 48), (160, 240)])
def test_what_is_solved_is_the_cpus(memory: Memory, n: int, m: int) -> None:
    """Sums over runs of rows, of which the last is short; then the product with the inverse, packed and not."""
    rng = np.random.default_rng(3)
    sums, square, cross = Products(n, m, 1), memory.put(np.zeros((n, n))), memory.put(np.zeros((n, m)))
    for rows in (300, 40):
        x, z = (rng.standard_normal((rows, width)).astype(np.float32) for width in (n, m))
        sums.add(x, z)
        at = memory.put(x)
        run(memory, products.products(at, at, square, rows, n, n))
        run(memory, products.products(at, memory.put(z), cross, rows, n, m))
    run(memory, products.mirror(square, n))
    sums.finish()
    assert (memory.get(square, (n, n), np.float64) == sums.square).all()
    assert (sums.cross == memory.get(cross, (n, m), np.float64).T).all()
    wanted = times_inverse(sums.cross, sums.square, 0.05)
    raised = np.diagonal(sums.square) + 0.05 * np.diagonal(sums.square).mean()
    r, by, bad = memory.room((n, n), np.float64), memory.room((2, n), np.float64), memory.put(np.zeros(1, np.int64))
    run(memory, factor.permute(square, memory.put(raised), memory.put(np.arange(n, dtype=np.int32)), r, n))
    run(memory, *factor.cholesky(r, by, bad, n), *factor.solve(cross, r, by + 8 * n, m, n))
    assert (wanted == memory.get(cross, (n, m), np.float64).T).all()
    rows, first = 20, m - 20
    out = memory.room((rows, n))
    run(memory, packing.to_f32(cross, out, n, rows, first, m))
    assert (memory.get(out, (rows, n)) == wanted[first:].astype(np.float32)).all()
    if m >= n:
        packed = memory.room((n // 4, n, 4))
        run(memory, packing.pack_columns(cross, packed, n, stride=m, transposed=True))
        assert (memory.get(packed, (n // 4, n, 4)) == pack_columns(wanted[:n])).all()


def test_targets_are_the_cpus(memory: Memory) -> None:
    rng, rows, n = np.random.default_rng(4), 70, 96
    x, offset = (rng.standard_normal((rows, n)).astype(np.float32) for _ in range(2))
    packed = pack_columns(rng.standard_normal((n, n)).astype(np.float32))
    wanted, out, places = corrected_on_cpu(x, packed), memory.room((rows, n)), [memory.put(a) for a in (x, packed)]
    run(memory, products.correct(*places, 0, out, rows, n))
    assert (memory.get(out, (rows, n)) == wanted).all()
    run(memory, products.correct(*places, memory.put(offset), out, rows, n))
    assert (memory.get(out, (rows, n)) == wanted + offset).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sums_that_are_not_finite_are_found(memory: Memory, bad: float) -> None:
    sums, found = np.full(700, 1e300), memory.put(np.zeros(1, np.int32))
    run(memory, products.not_finite_sum(memory.put(sums), found, 700))
    assert memory.get(found, (1,), np.int32)[0] == 0
    sums[-1] = bad
    run(memory, products.not_finite_sum(memory.put(sums), found, 700))
    assert memory.get(found, (1,), np.int32)[0] == 1


def same(memory: Memory, made: DeviceMetric, wanted: Metric) -> None:
    """Compare all that a metric has."""
    assert made.n == wanted.n
    groups = wanted.groups
    for name, array in (
        *((name, getattr(wanted, name)) for name in ("columns", "u", "pivots", "h", "per_diagonal")),
        *((name, getattr(wanted, name)) for name in ("correction", "offset")),
        ("groups_feedback", None if groups is None else groups.feedback),
        ("groups_descent", None if groups is None else groups.descent),
    ):
        address = getattr(made, name)
        assert (address == 0) == (array is None), name
        if array is not None:
            assert (memory.get(address, array.shape, array.dtype) == array).all(), name
    assert made.grouping == (None if groups is None else groups.grouping)
    if wanted.importance is not None:
        assert made.importance is not None
        assert (made.importance == wanted.importance).all()
    held = len(made.owned)
    assert (
        held
        == len(set(made.owned))
        == 5 + (wanted.correction is not None) + (wanted.offset is not None) + 2 * (groups is not None)
    )
    made.close()


@pytest.mark.parametrize("grouping", [None, Grouping(8), levels_of(BY_NAME["IQ4_KSS"]).grouping], ids=["", "8", "kss"])
def test_a_metric_is_the_cpus(memory: Memory, grouping: Grouping | None) -> None:
    h = covariance(5, 256)
    carrier = PinnedTransfer(memory.device.new_stream())
    same(memory, metric_kernels.metric(carrier, h, 0.02, grouping), metric(h, 0.02, 1, grouping))
    h[9] = h[:, 9] = 0
    h[9, 9] = -1e3
    said = []
    for make in (partial(metric_kernels.metric, carrier), metric):
        with pytest.raises(np.linalg.LinAlgError, match="not positive definite: column") as e:
            make(h, 0.0, grouping=grouping)
        said.append(str(e.value))
    assert said[0] == said[1]


def watched(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes that a device gives away from now on: those it has not got back, and the most at any time."""
    sizes, found, allocate, free = dict[int, int](), [0, 0], device.allocate, device.free

    def give(nbytes: int) -> int:
        sizes[address := allocate(nbytes)] = nbytes
        found[:] = found[0] + nbytes, max(found[1], found[0] + nbytes)
        return int(address)

    def take(address: int) -> None:
        free(address)
        found[0] -= sizes.pop(address)

    monkeypatch.setattr(device, "allocate", give)
    monkeypatch.setattr(device, "free", take)
    return found


@pytest.mark.parametrize("residual", [0, 384])
def test_a_metric_of_two_streams_is_the_cpus(memory: Memory, residual: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over rows that come in parts, targets' corrections, what a residual stream lacks; in no more room than told.

    Of as few columns, rows on their way would take more than all else.
    """
    monkeypatch.setattr(metric_kernels, "_ROWS", products.ROWS_AT_ONCE)
    rng, n, tokens = np.random.default_rng(6), 128, 600
    mixed = rng.standard_normal((n, n)) * np.exp(rng.standard_normal(n))
    x = (rng.standard_normal((tokens, n)) @ mixed).astype(np.float32)
    z = rng.standard_normal((tokens, n + residual)).astype(np.float32) + 0.1 * x[:, :1]
    seen = StageInputs("blk.0.ffn_down.weight", n, 1)
    seen.tokens, share = (tokens,), np.ones((tokens, 1), np.float32)
    counts = rng.uniform(0.5, 2, (tokens, 1)).astype(np.float32)
    rows = [(x[:400], x[:400] + z[:400, :n]), (x[400:], x[400:] + z[400:, :n])]
    at = np.split(np.arange(tokens), [400])
    monkeypatch.setattr(seen, "_stage", types.SimpleNamespace(source=None))
    monkeypatch.setattr(stage_inputs, "_width", lambda seen: residual)
    monkeypatch.setattr(seen, "_rows", lambda matrix: ((x, y, a, share[a]) for (x, y), a in zip(rows, at, strict=True)))
    monkeypatch.setattr(seen, "_targets", lambda tokens: (z[tokens, n:], counts[tokens]))
    carrier, given = PinnedTransfer(memory.device.new_stream()), watched(memory.device, monkeypatch)
    made = seen.metric_on(carrier, 0)
    assert given[0] <= seen.metric_bytes // 4
    assert given[1] <= seen.metric_bytes
    same(memory, made, seen.build_metric(0, 1))
    assert given[0] == 0
    x[3, 3] = np.inf
    for make in (partial(seen.metric_on, carrier), partial(seen.build_metric, threads=1)):
        with pytest.raises(FormatError, match=r"the inputs of blk.0.ffn_down.weight are not finite"):
            make(0)

"""Error feedback on the device: the CPU's bytes and losses, given the same metric."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from device_memory import Memory
from test_feedback import covariance, random_values

from edge_rows import encode
from quantkit.kernels.cpu.feedback import Rounding
from quantkit.kernels.cpu.feedback.metric import Metric
from quantkit.kernels.cpu.feedback.metric import metric as metric_of
from quantkit.kernels.cpu.feedback.rounding import Rounded
from quantkit.kernels.cpu.feedback.rounding import round_rows as on_cpu
from quantkit.kernels.cuda.feedback.metric import upload
from quantkit.kernels.cuda.feedback.rounding import can_round, round_rows, working_bytes
from quantkit.kernels.cuda.feedback.rows import RowAddresses
from quantkit.kernels.levels import Grouping, all_levels, levels_of
from quantkit.types import BY_NAME, TensorType

F32 = npt.NDArray[np.float32]
TYPES = [layout.type for layout in all_levels().values() if layout.grid is None]
GROUPED = [layout.type for layout in all_levels().values() if layout.grid is not None]
#: One round and one sweep, as wide rows have; all that narrow ones have, but fewer sweeps.
WIDE, NARROW = Rounding(max_sweeps=1, extra_rounds=0, neighbour_scales=False), Rounding(max_sweeps=2)


@cache
def metric(n: int, grouping: Grouping | None) -> Metric:
    """Return the metric of rows of n values, for types that group columns so."""
    return metric_of(covariance(4, n), 0.02, grouping=grouping)


def reference(t: TensorType, x: F32, out: npt.NDArray[np.uint8]) -> None:
    """Fill in the reference's bytes of rows."""
    weights = np.ones(x.shape[1] if t.imatrix == "required" else 0, np.float32)
    out[:] = encode(t, x, weights)


def on_device(
    memory: Memory, t: TensorType, x: F32, rounding: Rounding, target: F32 | None, metric_of_x: Metric
) -> Rounded:
    """Round rows; what is before and after their bytes, and losses, must stay as it was."""
    rows, n = x.shape
    rows_out = np.full(rows * t.row_bytes(n) + 64, 255, np.uint8)
    reference(t, x, rows_out[:-64].reshape(rows, -1))
    address = begin = memory.put(rows_out)
    if target is not None:
        start = np.zeros((rows, t.row_bytes(n)), np.uint8)
        reference(t, target, start)
        begin = memory.put(start)
    losses = [memory.allocate((rows + 1,), np.float64) for _ in range(2)]
    target_address = memory.put(x if target is None else target)
    device_metric = upload(memory.device, metric_of_x)
    work = memory.allocate((working_bytes(t, rows, n, rounding),), np.uint8)
    round_rows(
        memory.device, t, RowAddresses(rows, target_address, address, begin, *losses), device_metric, rounding, work
    )
    data = memory.get(address, rows_out.shape, np.uint8)
    device_metric.close()
    assert (data[-64:] == 255).all()
    before, after = (memory.get(loss, (rows + 1,), np.float64) for loss in losses)
    assert np.isnan([before[-1], after[-1]]).all()
    return Rounded(data[:-64].reshape(rows, -1), before[:-1], after[:-1])


def check(memory: Memory, t: TensorType, x: F32, rounding: Rounding, target: F32 | None = None) -> Rounded:
    """Compare both; return what was found."""
    metric_of_x = metric(x.shape[1], levels_of(t).grouping)
    actual = on_device(memory, t, x, rounding, target, metric_of_x)
    expected = on_cpu(t, x, lambda rows, out: reference(t, rows, out), metric_of_x, rounding, target)
    np.testing.assert_array_equal(actual.before, expected.before)
    np.testing.assert_array_equal(actual.after, expected.after)
    np.testing.assert_array_equal(actual.rows, expected.rows)
    return actual


@pytest.mark.parametrize("t", TYPES, ids=str)
def test_bytes_and_losses_equal_the_cpus(memory: Memory, t: TensorType) -> None:
    """Rows of two tiles, with all that narrow ones have; then three with a target, as wide ones are done."""
    n = t.block if t.block > 64 else 3 * max(t.block, 32)
    x = random_values(5, 33, n)
    x[1], x[2, :32], x[3] = 0, 0, 40 * x[3]
    actual = check(memory, t, x, NARROW)
    assert (actual.after < actual.before).mean() > 0.5
    check(memory, t, x[4:7], WIDE, random_values(6, 3, n) / 8 + x[4:7])


#: Another number of everything than usual: none of it changes the code, but the columns of a window.
ROUNDINGS = (
    Rounding(sweeps=2, max_sweeps=1, passes=2, repeats=2),
    Rounding(fits=False, neighbour_scales=False, extra_rounds=2, max_sweeps=1),
)


@pytest.mark.parametrize("t", [BY_NAME["Q4_K"], BY_NAME["IQ3_KS"]], ids=str)
def test_rows_of_many_windows(memory: Memory, t: TensorType) -> None:
    """Several super-blocks a row, as often as options say."""
    for rounding in ROUNDINGS:
        check(memory, t, random_values(7, 2, 768), rounding)


@pytest.mark.parametrize("t", GROUPED, ids=str)
def test_groups_of_columns_choose_the_cpus_points(memory: Memory, t: TensorType) -> None:
    """Rows of one tile, which start from a target's bytes; for two rounds and tiles the one of the fewest points."""
    rows, rounding = (33, Rounding(rounds=2, sweeps=2)) if t.name == "IQ2_KL" else (3, Rounding())
    x = random_values(5, rows, 256)
    x[1], x[2, :32] = 0, 0
    actual = check(memory, t, x, rounding, random_values(6, rows, 256) / 8 + x)
    assert (actual.after < actual.before).mean() > 0.5


def test_every_grid_fits_every_generation() -> None:
    assert all(can_round(t, capability) for t in GROUPED for capability in (75, 80, 86, 90, 120))
    assert not can_round(GROUPED[0], 0)

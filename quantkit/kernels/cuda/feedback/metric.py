"""The metric for rounding rows, on a device: copied from the host, or computed there with the same bits.

The sums of two streams for a metric (kernels/cpu/feedback/products.py) are also computed there.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.metric import Metric, column_order, group_factors
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.feedback import matrices
from quantkit.kernels.cuda.feedback.pinned_transfer import Allocations, PinnedTransfer
from quantkit.kernels.levels import Grouping

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


@dataclass(eq=False)
class DeviceMetric:
    """``Metric`` on a device: addresses of arrays of the same layouts; 0 where it has none.

    columns: int32 [n]. u, h: float32 [n / 4, n, 4]; pivots, per_diagonal: float32 [n]. correction: packed as u is;
    offset: float32 [rows, n]. frames_fed, frames_descended: float32 [groups, 2, columns, columns], for columns that
    ``grouping`` groups. importance is on the host, float32 [n], or None. owned: what ``close`` frees.
    """

    device: Device
    n: int
    columns: int
    u: int
    pivots: int
    h: int
    per_diagonal: int
    correction: int = 0
    offset: int = 0
    groups_feedback: int = 0
    groups_descent: int = 0
    grouping: Grouping | None = None
    importance: F32 | None = None
    owned: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Give its memory back."""
        for address in self.owned:
            with suppress(Exception):  # even if the device has failed
                self.device.free(address)
        self.owned.clear()


def upload(device: Device, metric: Metric) -> DeviceMetric:
    """Copy a host's metric to a device; ResourceError if memory does not suffice."""
    owned: list[int] = []

    def upload_array(array: npt.NDArray[Any] | None) -> int:
        if array is None:
            return 0
        owned.append(device.allocate(array.nbytes))
        device.upload(owned[-1], array)
        return owned[-1]

    groups = metric.groups
    try:
        return DeviceMetric(
            device,
            metric.n,
            upload_array(metric.columns),
            upload_array(metric.u),
            upload_array(metric.pivots),
            upload_array(metric.h),
            upload_array(metric.per_diagonal),
            upload_array(metric.correction),
            upload_array(metric.offset),
            upload_array(None if groups is None else groups.feedback),
            upload_array(None if groups is None else groups.descent),
            None if groups is None else groups.grouping,
            metric.importance,
            owned,
        )
    except BaseException:
        for address in owned:
            device.free(address)
        raise


#: Number of rows uploaded at a time.
_ROWS = 2 * matrices.ROWS_AT_ONCE


def metric(transfer: PinnedTransfer, covariance: F64, damping: float, grouping: Grouping | None = None) -> DeviceMetric:
    """Return the CPU's ``metric``, on a device.

    Raises numpy.linalg.LinAlgError where that does, ResourceError if memory is insufficient or the device fails.
    """
    with transfer.allocations() as memory:
        result = _metric(transfer, memory, memory.upload(covariance), np.diagonal(covariance), damping, grouping)
        transfer.wait()
        result.owned = memory.release(result.owned)
        return result


def _metric(
    transfer: PinnedTransfer,
    memory: Allocations,
    covariance: int,
    diagonal: F64,
    damping: float,
    grouping: Grouping | None,
) -> DeviceMetric:
    """Return the metric of a covariance at an address, which is then freed."""
    n = len(diagonal)
    damped = diagonal + damping * diagonal.mean()
    columns = column_order(damped, grouping).astype(np.int32)
    on_device = memory.upload(damped)
    h = memory.allocate(4 * n * n)
    blocks = None if grouping is None else _blocks(transfer, memory, covariance, grouping.order(n), grouping.size)
    r, _ = _factor(
        transfer, memory, covariance, on_device, columns[::-1], [matrices.pack_columns(covariance, h, n, on_device)]
    )
    u, pivots = memory.allocate(4 * n * n), memory.allocate(4 * n)
    transfer.run([matrices.pack_upper(r, u, pivots, n)])
    groups: list[int] = []
    if grouping is not None and blocks is not None:
        upper = _blocks(transfer, memory, r, np.arange(n)[::-1], grouping.size).transpose(0, 2, 1)
        groups = [memory.upload(factors) for factors in group_factors(blocks, damped, upper, grouping)]
    order, per_diagonal = memory.upload(columns), memory.upload((1 / damped).astype(np.float32))
    feedback, descent = groups or (0, 0)
    memory.free(r, on_device)
    return DeviceMetric(
        transfer.device, n, order, u, pivots, h, per_diagonal, groups_feedback=feedback, groups_descent=descent,
        grouping=grouping, owned=[order, u, pivots, h, per_diagonal, *groups],
    )  # fmt: skip


def _blocks(transfer: PinnedTransfer, memory: Allocations, matrix: int, order: npt.NDArray[np.int64], size: int) -> F64:
    """Return the diagonal blocks of a matrix for groups of columns, float64 [groups, size, size]."""
    n = len(order)
    order_at, out = memory.upload(order.astype(np.int32)), memory.allocate(8 * n * size)
    transfer.run([matrices.blocks(matrix, order_at, out, n, size)])
    blocks: F64 = transfer.download(out, (n // size, size, size), np.float64)
    memory.free(order_at, out)
    return blocks


def _factor(
    transfer: PinnedTransfer,
    memory: Allocations,
    matrix: int,
    diagonal: int,
    order: Ints,
    before: list[Launch],
    keeps: bool = False,
) -> tuple[int, int]:
    """Return R with R^T R = a matrix with another diagonal, in an order; then, n doubles on, 1 over its diagonal.

    before: further launches that read the matrix, which is then freed, unless ``keeps``. Raises
    numpy.linalg.LinAlgError if it is not positive definite.
    """
    n = len(order)
    order_at = memory.upload(order)
    r = memory.allocate(8 * n * n)
    pivots = memory.allocate(16 * n)
    bad = memory.allocate(8, zero=True)
    transfer.run([*before, matrices.permute(matrix, diagonal, order_at, r, n)])
    if not keeps:
        memory.free(matrix)
    transfer.run(list(matrices.cholesky(r, pivots, bad, n)), n**3 / 3)
    column = int(transfer.download(bad, (1,), np.int64)[0])
    memory.free(order_at, bad)
    if column:
        raise np.linalg.LinAlgError(f"not positive definite: column {column - 1} of {n}")
    return r, pivots


class DeviceSums:
    """Sums over rows of both streams on a device, and their metric.

    As ``Products``: of x^T x, ``square``, and of z^T x, whose first n rows are for corrections, the others for offsets.
    """

    def __init__(self, transfer: PinnedTransfer, memory: Allocations, n: int, m: int) -> None:
        self.n = n
        self.m = m
        self._transfer = transfer
        self._allocations = memory
        self._square, self._cross = memory.allocate(8 * n * n, zero=True), memory.allocate(8 * n * m, zero=True)
        self._x, self._z = memory.allocate(4 * _ROWS * n), memory.allocate(4 * _ROWS * m)

    def add(self, x: F32, z: F32) -> None:
        """Add rows x and z, float32 [rows, n] and [rows, m]."""
        for first in range(0, len(x), _ROWS):
            x_part, z_part = x[first : first + _ROWS], z[first : first + _ROWS]
            self._transfer.upload(self._x, x_part)
            self._transfer.upload(self._z, z_part)
            self._transfer.run([
                matrices.products(self._x, self._x, self._square, len(x_part), self.n, self.n),
                matrices.products(self._x, self._z, self._cross, len(x_part), self.n, self.m),
            ])  # fmt: skip

    def finish(self) -> None:
        """Copy the upper triangle to the lower."""
        self._allocations.free(self._x, self._z)
        self._transfer.run([matrices.mirror(self._square, self.n)])

    @property
    def is_finite(self) -> bool:
        """Return whether all sums are finite."""
        flag = self._allocations.allocate(4, zero=True)
        sizes = ((self._square, self.n * self.n), (self._cross, self.n * self.m))
        self._transfer.run([matrices.not_finite_sum(sums, flag, size) for sums, size in sizes])
        return not self._transfer.download(flag, (1,), np.int32)[0]

    def diagonal(self) -> F64:
        """Return the diagonal of ``square``, float64 [n]."""
        diagonal_at = self._allocations.allocate(8 * self.n)
        self._transfer.run([matrices.diagonal(self._square, diagonal_at, self.n)])
        diagonal: F64 = self._transfer.download(diagonal_at, (self.n,), np.float64)
        self._allocations.free(diagonal_at)
        return diagonal

    def metric(
        self, diagonal: F64, count: int, damping: float, of_target: float, grouping: Grouping | None
    ) -> DeviceMetric:
        """Return the metric of ``count`` tokens, with another diagonal, and the correction of targets, damped by
        ``of_target``.

        Raises numpy.linalg.LinAlgError if a matrix is not positive definite.
        """
        n = self.n
        m = self.m
        transfer = self._transfer
        memory = self._allocations
        diagonal_at = memory.upload(diagonal + of_target * diagonal.mean())
        r, pivots = _factor(transfer, memory, self._square, diagonal_at, np.arange(n, dtype=np.int32), [], keeps=True)
        transfer.run(list(matrices.solve(self._cross, r, pivots + 8 * n, m, n)), n * n * m)
        memory.free(diagonal_at, r, pivots)
        correction, offset = memory.allocate(4 * n * n), memory.allocate(4 * n * (m - n)) if m > n else 0
        launches = [matrices.pack_columns(self._cross, correction, n, stride=m, transposed=True)]
        launches += [matrices.to_f32(self._cross, offset, n, m - n, n, m)] * (m > n)
        transfer.run(launches)
        memory.free(self._cross)
        result = _metric(transfer, memory, self._square, diagonal, damping, grouping)
        result.correction, result.offset = correction, offset
        result.importance = (diagonal / max(1, count)).astype(np.float32)
        result.owned = memory.release([*result.owned, correction, *([offset] if offset else [])])
        return result

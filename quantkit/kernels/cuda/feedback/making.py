"""Metrics made on a device: the bits of kernels/cpu/feedback/metric.py, and of the sums of two streams before it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.frames import visited
from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.feedback import factor, packing, products
from quantkit.kernels.cuda.feedback.carrier import Carrier, Rooms
from quantkit.kernels.cuda.feedback.frames import frames_of
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.levels import Grouping

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

#: Rows that are sent at a time.
_ROWS = 2 * products.ROWS_AT_ONCE


def metric(carrier: Carrier, covariance: F64, damping: float, grouping: Grouping | None = None) -> DeviceMetric:
    """Return what the CPU's ``metric`` returns, on a device.

    Raises numpy.linalg.LinAlgError where that does, ResourceError if there is no room or the device fails.
    """
    with carrier.rooms() as rooms:
        made = _metric(carrier, rooms, rooms.put(covariance), np.diagonal(covariance), damping, grouping)
        carrier.wait()
        made.owned = rooms.keep(made.owned)
        return made


def _metric(
    carrier: Carrier, rooms: Rooms, covariance: int, diagonal: F64, damping: float, grouping: Grouping | None
) -> DeviceMetric:
    """Return the metric of a covariance at an address, which is given back."""
    n = len(diagonal)
    raised = diagonal + damping * diagonal.mean()
    columns = visited(raised, grouping).astype(np.int32)
    on_device = rooms.put(raised)
    h = rooms.make(4 * n * n)
    own = None if grouping is None else _blocks(carrier, rooms, covariance, grouping.order(n), grouping.size)
    r, _ = _factor(
        carrier, rooms, covariance, on_device, columns[::-1], [packing.pack_columns(covariance, h, n, on_device)]
    )
    u, pivots = rooms.make(4 * n * n), rooms.make(4 * n)
    carrier.run([packing.pack_upper(r, u, pivots, n)])
    frames: list[int] = []
    if grouping is not None and own is not None:
        upper = _blocks(carrier, rooms, r, np.arange(n)[::-1], grouping.size).transpose(0, 2, 1)
        frames = [rooms.put(each) for each in frames_of(own, raised, upper, grouping)]
    order, per_diagonal = rooms.put(columns), rooms.put((1 / raised).astype(np.float32))
    fed, descended = frames or (0, 0)
    rooms.free(r, on_device)
    return DeviceMetric(
        carrier.device, n, order, u, pivots, h, per_diagonal, frames_fed=fed, frames_descended=descended,
        grouping=grouping, owned=[order, u, pivots, h, per_diagonal, *frames],
    )  # fmt: skip


def _blocks(carrier: Carrier, rooms: Rooms, matrix: int, order: npt.NDArray[np.int64], size: int) -> F64:
    """Return what groups of columns of a matrix have among themselves, float64 [groups, size, size]."""
    n = len(order)
    at, out = rooms.put(order.astype(np.int32)), rooms.make(8 * n * size)
    carrier.run([packing.blocks(matrix, at, out, n, size)])
    found: F64 = carrier.get(out, (n // size, size, size), np.float64)
    rooms.free(at, out)
    return found


def _factor(
    carrier: Carrier,
    rooms: Rooms,
    matrix: int,
    diagonal: int,
    order: Ints,
    before: list[Launch],
    keeps: bool = False,
) -> tuple[int, int]:
    """Return R with R^T R = a matrix with another diagonal, in an order; then, n doubles on, 1 over its diagonal.

    before: launches that read the matrix, too, which is given back then, unless one ``keeps`` it.
    Raises numpy.linalg.LinAlgError if it is not positive definite.
    """
    n = len(order)
    at, r, by, bad = rooms.put(order), rooms.make(8 * n * n), rooms.make(16 * n), rooms.make(8, zero=True)
    carrier.run([*before, factor.arranged(matrix, diagonal, at, r, n)])
    if not keeps:
        rooms.free(matrix)
    carrier.run(list(factor.cholesky(r, by, bad, n)), n**3 / 3)
    column = int(carrier.get(bad, (1,), np.int64)[0])
    rooms.free(at, bad)
    if column:
        raise np.linalg.LinAlgError(f"not positive definite: column {column - 1} of {n}")
    return r, by


class Sums:
    """Sums over rows of both streams on a device, and the metric that they give.

    As ``Products``: of x^T x, ``square``, and of z^T x, whose first n rows are for corrections, the others for offsets.
    """

    def __init__(self, carrier: Carrier, rooms: Rooms, n: int, m: int) -> None:
        self.n, self.m, self._carrier, self._rooms = n, m, carrier, rooms
        self._square, self._cross = rooms.make(8 * n * n, zero=True), rooms.make(8 * n * m, zero=True)
        self._x, self._z = rooms.make(4 * _ROWS * n), rooms.make(4 * _ROWS * m)

    def add(self, x: F32, z: F32) -> None:
        """Add rows x and z, float32 [rows, n] and [rows, m]."""
        for first in range(0, len(x), _ROWS):
            some, others = x[first : first + _ROWS], z[first : first + _ROWS]
            self._carrier.fill(self._x, some)
            self._carrier.fill(self._z, others)
            self._carrier.run([
                products.products(self._x, self._x, self._square, len(some), self.n, self.n),
                products.products(self._x, self._z, self._cross, len(some), self.n, self.m),
            ])  # fmt: skip

    def finish(self) -> None:
        """Fill in what lies below the diagonal."""
        self._rooms.free(self._x, self._z)
        self._carrier.run([products.mirrored(self._square, self.n)])

    @property
    def is_finite(self) -> bool:
        """Whether all sums are."""
        found = self._rooms.make(4, zero=True)
        sizes = ((self._square, self.n * self.n), (self._cross, self.n * self.m))
        self._carrier.run([products.not_finite_sum(sums, found, size) for sums, size in sizes])
        return not self._carrier.get(found, (1,), np.int32)[0]

    def diagonal(self) -> F64:
        """Return the diagonal of ``square``, float64 [n]."""
        at = self._rooms.make(8 * self.n)
        self._carrier.run([packing.diagonal(self._square, at, self.n)])
        found: F64 = self._carrier.get(at, (self.n,), np.float64)
        self._rooms.free(at)
        return found

    def metric(
        self, diagonal: F64, count: int, damping: float, of_target: float, grouping: Grouping | None
    ) -> DeviceMetric:
        """Return the metric of ``count`` tokens, with another diagonal, and the correction of targets, damped by
        ``of_target``.

        Raises numpy.linalg.LinAlgError if a matrix is not positive definite.
        """
        n, m, carrier, rooms = self.n, self.m, self._carrier, self._rooms
        at = rooms.put(diagonal + of_target * diagonal.mean())
        r, by = _factor(carrier, rooms, self._square, at, np.arange(n, dtype=np.int32), [], keeps=True)
        carrier.run(list(factor.solved(self._cross, r, by + 8 * n, m, n)), n * n * m)
        rooms.free(at, r, by)
        correction, offset = rooms.make(4 * n * n), rooms.make(4 * n * (m - n)) if m > n else 0
        launches = [packing.pack_columns(self._cross, correction, n, apart=m, transposed=True)]
        launches += [packing.narrowed(self._cross, offset, n, m - n, n, m)] * (m > n)
        carrier.run(launches)
        rooms.free(self._cross)
        made = _metric(carrier, rooms, self._square, diagonal, damping, grouping)
        made.correction, made.offset = correction, offset
        made.importance = (diagonal / max(1, count)).astype(np.float32)
        made.owned = rooms.keep([*made.owned, correction, *([offset] if offset else [])])
        return made

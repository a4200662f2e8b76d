"""The metric that rows are rounded in, on a device."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.metric import Metric
from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.levels import Grouping

F32 = npt.NDArray[np.float32]


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
            with suppress(Exception):  # whatever became of the device
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

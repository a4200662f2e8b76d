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
    """What ``Metric`` has, as addresses of arrays of the same layouts; 0 where it has none.

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
    frames_fed: int = 0
    frames_descended: int = 0
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
    """Copy a host's metric to a device; ResourceError if there is no room."""
    owned: list[int] = []

    def put(array: npt.NDArray[Any] | None) -> int:
        if array is None:
            return 0
        owned.append(device.allocate(array.nbytes))
        device.upload(owned[-1], array)
        return owned[-1]

    frames = metric.frames
    try:
        return DeviceMetric(
            device, metric.n, put(metric.columns), put(metric.u), put(metric.pivots), put(metric.h),
            put(metric.per_diagonal), put(metric.correction), put(metric.offset),
            put(None if frames is None else frames.fed), put(None if frames is None else frames.descended),
            None if frames is None else frames.grouping, metric.importance, owned,
        )  # fmt: skip
    except BaseException:
        for address in owned:
            device.free(address)
        raise

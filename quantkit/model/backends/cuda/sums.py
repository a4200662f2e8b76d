"""Accumulators of observing operations on a device, mirrored on the host.

The arrays on the host are updated when they are read after a run, and uploaded before the next run, since the caller
may have changed them (a restored snapshot, cleared sums).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cuda.core.device import Device
from quantkit.model.backends.accumulators import Accumulator, new_accumulator
from quantkit.model.ops import Covariance, Similarity, SumColumns


class Sums:
    """The accumulators of a program; their device memory is appended to ``owned``."""

    def __init__(self, device: Device, owned: list[tuple[int, int]]) -> None:
        self._device, self._owned = device, owned
        self._host: dict[str, Accumulator] = {}
        self._addresses: dict[str, dict[str, int]] = {}
        self._fresh, self._exposed = True, False
        #: The label and the rows of a token, of every watching operation.
        self._watched: list[tuple[str, int]] = []
        self._flags = 0

    def addresses(self, op: SumColumns | Covariance | Similarity) -> dict[str, int]:
        """Return the addresses of an operation's arrays on the device; several may share them."""
        if op.label not in self._host:
            self._host[op.label] = new_accumulator(op)
            self._addresses[op.label] = {name: self._copy(array) for name, array in self._host[op.label].items()}
        return self._addresses[op.label]

    def _copy(self, array: npt.NDArray[Any]) -> int:
        address = self._device.allocate(array.nbytes)
        self._owned.append((address, array.nbytes))
        self._device.upload(address, array)
        return address

    # ------------------------------------------------------------ rows that are not finite

    #: The largest number of watching operations.
    FLAGS = 16384

    def watch(self, label: str, per: int) -> int:
        """Return the address where an operation reports the first row that is not finite; per: rows of a token."""
        if not self._flags:
            self._flags = self._copy(np.zeros(self.FLAGS, np.int64))
        if len(self._watched) == self.FLAGS:
            raise ValueError(f"more than {self.FLAGS} operations observe")
        self._watched.append((label, per))
        return self._flags + 8 * (len(self._watched) - 1)

    def take_not_finite(self) -> list[tuple[str, int]]:
        """Return and clear the labels of operations with a row that is not finite, and its token."""
        if not self._watched:
            return []
        flags = np.empty(len(self._watched), np.int64)
        self._device.download(self._flags, flags)
        if flags.any():
            self._device.zero(self._flags, flags.nbytes)
        return [(*self._watched[i][:1], int(flags[i] - 1) // self._watched[i][1]) for i in np.flatnonzero(flags)]

    # ------------------------------------------------------------ host and device

    def before_run(self) -> None:
        """Upload arrays that may have changed."""
        if self._exposed:
            for label, arrays in self._host.items():
                for name, array in arrays.items():
                    self._device.upload(self._addresses[label][name], array)
        self._exposed = self._fresh = False

    def on_host(self) -> dict[str, Accumulator]:
        """Return the current arrays on the host."""
        if not self._fresh:
            for label, arrays in self._host.items():
                for name, array in arrays.items():
                    self._device.download(self._addresses[label][name], array)
        self._fresh = self._exposed = True
        return self._host

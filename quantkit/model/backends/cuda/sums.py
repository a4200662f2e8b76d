"""The sums of observing operations on a device, and the same arrays on the host to read and set.

The arrays on the host are updated when asked for after a run, and sent back before the next run, since the caller may
have changed them (a checkpoint that is loaded, sums that are cleared).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cuda.core.device import Device
from quantkit.model.backends.accumulators import Accumulator, new_accumulator
from quantkit.model.ops import Covariance, Similarity, SumColumns


class Sums:
    """The accumulators of a program; ``owned`` collects the device memory they take."""

    def __init__(self, device: Device, owned: list[tuple[int, int]]) -> None:
        self._device, self._owned = device, owned
        self._host: dict[str, Accumulator] = {}
        self._at: dict[str, dict[str, int]] = {}
        self._fresh, self._shown = True, False
        #: Of every operation that watches: its ``of`` and the rows of a token.
        self._watched: list[tuple[str, int]] = []
        self._flags = 0

    def of(self, op: SumColumns | Covariance | Similarity) -> dict[str, int]:
        """Return the addresses of an operation's arrays on the device; several may share them."""
        if op.of not in self._host:
            self._host[op.of] = new_accumulator(op)
            self._at[op.of] = {name: self._copy(array) for name, array in self._host[op.of].items()}
        return self._at[op.of]

    def _copy(self, array: npt.NDArray[Any]) -> int:
        address = self._device.allocate(array.nbytes)
        self._owned.append((address, array.nbytes))
        self._device.upload(address, array)
        return address

    # ------------------------------------------------------------ rows that are not finite

    #: Operations that may watch.
    FLAGS = 16384

    def watch(self, of: str, per: int) -> int:
        """Return the address where an operation reports the first row that is not finite; per: rows of a token."""
        if not self._flags:
            self._flags = self._copy(np.zeros(self.FLAGS, np.int64))
        if len(self._watched) == self.FLAGS:
            raise ValueError(f"more than {self.FLAGS} operations observe")
        self._watched.append((of, per))
        return self._flags + 8 * (len(self._watched) - 1)

    def take_bad(self) -> list[tuple[str, int]]:
        """Return the operations with a row that was not finite since the last call, and its token."""
        if not self._watched:
            return []
        flags = np.empty(len(self._watched), np.int64)
        self._device.download(self._flags, flags)
        if flags.any():
            self._device.zero(self._flags, flags.nbytes)
        return [(*self._watched[i][:1], int(flags[i] - 1) // self._watched[i][1]) for i in np.flatnonzero(flags)]

    # ------------------------------------------------------------ host and device

    def before_run(self) -> None:
        """Send back what may have changed."""
        if self._shown:
            for of, arrays in self._host.items():
                for name, array in arrays.items():
                    self._device.upload(self._at[of][name], array)
        self._shown = self._fresh = False

    def on_host(self) -> dict[str, Accumulator]:
        """Return the arrays as they are now."""
        if not self._fresh:
            for of, arrays in self._host.items():
                for name, array in arrays.items():
                    self._device.download(self._at[of][name], array)
        self._fresh = self._shown = True
        return self._host

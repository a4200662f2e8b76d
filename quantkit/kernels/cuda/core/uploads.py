"""Copies arrays to a device by way of pinned memory.

The device executes a copy from pinned memory later, and possibly one from other memory: the documentation does not
guarantee more ("API synchronization behavior" of the CUDA driver), and a GPU that reads the host's page tables need not
copy first. So an array goes piece by piece into slots of pinned memory. A slot is reused when an event shows that the
device has finished with it, so the host fills one while the device reads another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: Number of slots, and bytes of each, so large that the cost of its event is negligible.
SLOTS, SLOT_BYTES = 4, 4 << 20

#: Alignment of small arrays, which share a slot.
_ALIGNMENT = 64


class Uploads:
    """The slots of a device.

    pinned: allocates bytes of pinned memory. copy: lets the device copy (to, from, bytes), in order. event:
    returns a new event; record: lets the device record one, in order.
    """

    def __init__(
        self,
        pinned: Callable[[int], Bytes],
        copy: Callable[[int, int, int], None],
        event: Callable[[], Any],
        record: Callable[[Any], None],
    ) -> None:
        self._pinned = pinned
        self._copy = copy
        self._event = event
        self._record = record
        self._slots: list[tuple[Bytes, Any]] = []
        self._slot_index = self._used = 0

    def send(self, address: int, data: Bytes) -> None:
        """Copy bytes to the device; they have been read when this returns."""
        offset = 0
        while offset < len(data):
            slot = self._slot()
            n = min(len(data) - offset, SLOT_BYTES - self._used)
            piece = slot[self._used : self._used + n]
            piece[:] = data[offset : offset + n]
            self._copy(address + offset, piece.ctypes.data, n)
            offset += n
            self._used += -(-n // _ALIGNMENT) * _ALIGNMENT

    def _slot(self) -> Bytes:
        """Return the next free slot, once the device has read its previous content."""
        if not self._slots:
            self._slots = [(self._pinned(SLOT_BYTES), self._event()) for _ in range(SLOTS)]
        if self._used == SLOT_BYTES:
            self._record(self._slots[self._slot_index][1])
            self._slot_index, self._used = (self._slot_index + 1) % SLOTS, 0
            self._slots[self._slot_index][1].synchronize()  # an event that was never recorded counts as done
        return self._slots[self._slot_index][0]

"""Arrays on their way to a card and back, in pieces through pinned memory, each of which is waited for only so long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cuda.core.device import Device, DeviceHangs, Launch, abandon
from quantkit.kernels.cuda.encode.pipeline import Lane

#: Bytes of pinned memory: enough that a piece takes longer than its start.
PIECE = 4 << 20


class Carrier:
    """A lane of a device with pinned memory of its own.

    limit: seconds that so many multiply-adds of doubles may take; given_up: whether the device is. A device that hangs
    raises DeviceHangs here instead of keeping a thread for ever.
    """

    def __init__(
        self, lane: Lane, limit: Callable[[float], float] = lambda work: inf, given_up: Callable[[], bool] = bool
    ) -> None:
        self.lane, self._limit, self._given_up = lane, limit, given_up
        #: Memory comes from the device itself, not from one of its lanes, which would keep what they give back.
        self.device: Device = getattr(lane, "owner", lane)
        self._pinned = lane.host_array(PIECE, np.uint8)

    def fill(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copy an array to the device."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for at in range(0, flat.size, PIECE):
            piece = flat[at : at + PIECE]
            self._pinned[: piece.size] = piece
            self.lane.start_upload(address + at, self._pinned[: piece.size])
            self.wait()

    def get(self, address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array of the device, once all earlier work is done."""
        out = np.empty(shape, dtype)
        flat = out.reshape(-1).view(np.uint8)
        for at in range(0, flat.size, PIECE):
            piece = flat[at : at + PIECE]
            self.lane.start_download(address + at, self._pinned[: piece.size])
            self.wait()
            piece[:] = self._pinned[: piece.size]
        return out

    def run(self, launches: Sequence[Launch], work: float = 0) -> None:
        """Carry out launches of so many multiply-adds, and wait for them."""
        self.lane.run(launches)
        self.wait(work)

    def wait(self, work: float = 0) -> None:
        """Wait until everything is done."""
        self.lane.wait(self._limit(work), self._given_up)

    @contextmanager
    def rooms(self) -> Iterator[Rooms]:
        """Yield what gives memory, and takes all back at the end but what was kept."""
        rooms = Rooms(self)
        try:
            try:
                yield rooms
            finally:
                self.wait()  # nothing is given back that it may still write to
        except DeviceHangs:
            abandon(rooms, self.device)
            raise
        except BaseException:
            rooms.free(*rooms.owned)
            raise
        rooms.free(*rooms.owned)


class Rooms:
    """Memory of a device: that of work that is going on."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self.owned: list[int] = []

    def make(self, nbytes: int, zero: bool = False) -> int:
        """Return the address of new memory; ResourceError if there is none."""
        address = self._carrier.device.allocate(nbytes)
        self.owned.append(address)
        if zero:
            self._carrier.lane.zero(address, nbytes)
        return address

    def put(self, array: npt.NDArray[Any]) -> int:
        """Return the address of a copy of an array."""
        address = self.make(array.nbytes)
        self._carrier.fill(address, array)
        return address

    def free(self, *addresses: int) -> None:
        """Give memory back."""
        for address in addresses:
            self.owned.remove(address)
            with suppress(Exception):  # whatever became of the device
                self._carrier.device.free(address)

    def keep(self, addresses: Sequence[int]) -> list[int]:
        """Give back all but these, and return them: they are somebody else's from now on."""
        self.free(*(address for address in self.owned if address not in addresses))
        kept, self.owned = self.owned, []
        return kept

"""Transfers of arrays to a GPU and back, in pieces through pinned memory, each with a time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cuda.core.device import Device, DeviceHangs, Launch, abandon
from quantkit.kernels.cuda.encode.pipeline import Stream

#: Bytes of pinned memory, so large that the transfer of a piece takes longer than its launch.
PIECE = 4 << 20


class PinnedTransfer:
    """A lane of a device with its own pinned memory.

    limit: the time limit in seconds for a number of multiply-adds of doubles; given_up: whether the device is
    abandoned. If the device hangs, DeviceHangs is raised, so that no thread waits forever.
    """

    def __init__(
        self, lane: Stream, limit: Callable[[float], float] = lambda work: inf, given_up: Callable[[], bool] = bool
    ) -> None:
        self.stream = lane
        self._limit = limit
        self._given_up = given_up
        #: Memory comes from the device itself, not from its lanes, which would cache freed memory.
        self.device: Device = getattr(lane, "owner", lane)
        self._pinned = lane.host_array(PIECE, np.uint8)

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copy an array to the device."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for offset in range(0, flat.size, PIECE):
            piece = flat[offset : offset + PIECE]
            self._pinned[: piece.size] = piece
            self.stream.start_upload(address + offset, self._pinned[: piece.size])
            self.wait()

    def download(self, address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array of the device, once all earlier work is done."""
        out = np.empty(shape, dtype)
        flat = out.reshape(-1).view(np.uint8)
        for offset in range(0, flat.size, PIECE):
            piece = flat[offset : offset + PIECE]
            self.stream.start_download(address + offset, self._pinned[: piece.size])
            self.wait()
            piece[:] = self._pinned[: piece.size]
        return out

    def run(self, launches: Sequence[Launch], work: float = 0) -> None:
        """Run launches, wait for them, at most as long as their multiply-adds may take."""
        self.stream.run(launches)
        self.wait(work)

    def wait(self, work: float = 0) -> None:
        """Wait until everything is done."""
        self.stream.wait(self._limit(work), self._given_up)

    @contextmanager
    def allocations(self) -> Iterator[Allocations]:
        """Yield an allocator; at the end, free its memory except arrays that were released."""
        memory = Allocations(self)
        try:
            try:
                yield memory
            finally:
                self.wait()  # no memory is freed that the device may still write to
        except DeviceHangs:
            abandon(memory, self.device)
            raise
        except BaseException:
            memory.free(*memory.owned)
            raise
        memory.free(*memory.owned)


class Allocations:
    """Device memory of the work in flight."""

    def __init__(self, transfer: PinnedTransfer) -> None:
        self._transfer = transfer
        self.owned: list[int] = []

    def allocate(self, nbytes: int, zero: bool = False) -> int:
        """Return the address of new memory; ResourceError if there is not enough."""
        address = self._transfer.device.allocate(nbytes)
        self.owned.append(address)
        if zero:
            self._transfer.stream.zero(address, nbytes)
        return address

    def upload(self, array: npt.NDArray[Any]) -> int:
        """Return the address of a copy of an array."""
        address = self.allocate(array.nbytes)
        self._transfer.upload(address, array)
        return address

    def free(self, *addresses: int) -> None:
        """Give memory back."""
        for address in addresses:
            self.owned.remove(address)
            with suppress(Exception):  # even if the device has failed
                self._transfer.device.free(address)

    def release(self, addresses: Sequence[int]) -> list[int]:
        """Free all but these, and return them to the caller, who then owns them."""
        self.free(*(address for address in self.owned if address not in addresses))
        released, self.owned = self.owned, []
        return released

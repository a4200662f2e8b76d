"""Arrays that kernels look up: put on a device when they are first asked for, where they stay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy.typing as npt

from quantkit.kernels.cuda.core.device import Device

_on_device: WeakKeyDictionary[Device, dict[Hashable, tuple[int, ...]]] = WeakKeyDictionary()
_lock = Lock()


def put_once(device: Device, arrays: Callable[..., Sequence[npt.NDArray[Any]]], *of: Hashable) -> tuple[int, ...]:
    """Return the addresses on a device of the arrays that ``arrays(*of)`` returns, 0 of an empty one."""
    owner: Device = getattr(device, "owner", device)  # all lanes of a device read the same
    with _lock:
        held = _on_device.setdefault(owner, {})
        if (arrays, of) not in held:
            held[arrays, of] = tuple(_put(owner, array) for array in arrays(*of))
            owner.synchronize()  # no lane's stream waits for this one
        return held[arrays, of]


def _put(device: Device, array: npt.NDArray[Any]) -> int:
    if not array.size:
        return 0
    address = device.allocate(array.nbytes)
    device.upload(address, array)
    return address

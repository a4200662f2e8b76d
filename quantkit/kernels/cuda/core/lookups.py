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


def upload_once(
    device: Device, arrays: Callable[..., Sequence[npt.NDArray[Any]]], *arguments: Hashable
) -> tuple[int, ...]:
    """Return the addresses on a device of the arrays that ``arrays(*arguments)`` returns, 0 of an empty one."""
    owner: Device = getattr(device, "owner", device)  # all lanes of a device read the same
    with _lock:
        uploaded = _on_device.setdefault(owner, {})
        if (arrays, arguments) not in uploaded:
            uploaded[arrays, arguments] = tuple(_upload(owner, array) for array in arrays(*arguments))
            owner.synchronize()  # no lane's stream waits for this one
        return uploaded[arrays, arguments]


def _upload(device: Device, array: npt.NDArray[Any]) -> int:
    if not array.size:
        return 0
    address = device.allocate(array.nbytes)
    device.upload(address, array)
    return address

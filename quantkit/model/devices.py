"""Which devices this machine has for -ot and --backend; CuPy is imported only where CUDA is wanted."""

from __future__ import annotations

from quantkit.model.placement import Placement


def available_devices() -> tuple[str, ...]:
    """Return the devices that -ot can name. REFERENCE is the numpy backend: slow, the specification."""
    return ("CPU", "REFERENCE", *cuda_devices())


def cuda_devices() -> tuple[str, ...]:
    """Return the names of this machine's CUDA devices."""
    from quantkit.kernels.cuda.core.device import count_devices

    return tuple(f"CUDA{i}" for i in range(count_devices()))


def check_devices(placement: Placement) -> None:
    """Raise ResourceError for a device that does not exist here; CuPy is imported only where CUDA is wanted."""
    if not any(device.startswith("CUDA") for device in placement.wanted()):
        placement.check(("CPU", "REFERENCE"))
        return
    from quantkit.kernels.cuda.core.device import why_none

    found = available_devices()
    placement.check(found, "" if len(found) > 2 else why_none())

"""Programmatic dependent launch, which CuPy does not offer: cuLaunchKernelEx of the CUDA driver, by ctypes.

A launch may then begin while the one before it still runs; its kernel waits where it needs the other's results
(device.cuh: wait_for_previous). Compute capability 9.0 and later; CUDA graphs record it as they record launches.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, ClassVar

from quantkit.errors import ResourceError

#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_PROGRAMMATIC = 6


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_: ClassVar = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar = [
        *((f"grid_{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block_{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("n_attributes", ctypes.c_uint),
    ]


def launch_dependent(
    function: int, grid: tuple[int, int, int], threads: int, shared: int, stream: int, arguments: int
) -> None:
    """Launch a kernel that may start before its predecessor on the stream ends.

    arguments: the address of the array of pointers to its arguments.

    Raises:
        ResourceError: the driver refuses.
    """
    attribute = Attribute(_PROGRAMMATIC, b"", (ctypes.c_int * 16)(1))
    config = LaunchConfig(*grid, threads, 1, 1, shared, stream, ctypes.pointer(attribute), 1)
    error = driver().cuLaunchKernelEx(ctypes.byref(config), function, arguments, None)
    if error:
        raise ResourceError(f"programmatic dependent launch failed: CUDA error {error}", "QK-E411")


@cache
def driver() -> Any:
    """Return the CUDA driver; ResourceError if it has no cuLaunchKernelEx (before CUDA 12)."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(name)
            library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
            return library
        except (OSError, AttributeError):
            continue
    raise ResourceError("the CUDA driver has no programmatic dependent launch (cuLaunchKernelEx of CUDA 12)", "QK-E411")

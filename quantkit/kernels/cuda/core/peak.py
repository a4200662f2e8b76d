"""The peak of a GPU, measured: copying its memory, and multiplying bf16 matrices (cuBLAS)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from quantkit.errors import ResourceError
from quantkit.kernels.cuda.core.device import CUDADevice, open_device

#: Bytes to copy, and rows and columns to multiply: far larger than caches, and enough to fill a large GPU.
_COPIED = 1 << 30
_SIDE = 8192


def peaks(name: str) -> tuple[float, float]:
    """Return GB copied (read and written bytes) and GOP of bf16 GEMM a second of the device CUDA0, CUDA1, ...

    Raises:
        ResourceError: it does not exist, or has not enough memory.
    """
    device = open_device(name)
    if not isinstance(device, CUDADevice):
        raise ResourceError(f"{name} is not a CUDA device: its speed cannot be measured", "QK-E411")
    return copy_gb_s(device), gemm_gops(device)


def copy_gb_s(device: CUDADevice, repetitions: int = 10) -> float:
    """Return the GB/s that a copy within GPU memory reads and writes."""
    a, b = (device.allocate(_COPIED) for _ in range(2))
    try:
        device.zero(a, _COPIED)
        seconds = median_seconds(device, lambda: device.copy(b, a, _COPIED), repetitions)
    finally:
        device.free(a)
        device.free(b)
    return 2 * _COPIED / seconds / 1e9


def gemm_gops(device: CUDADevice, repetitions: int = 10) -> float:
    """Return the billions of operations (two a multiply-add) a second of a bf16 GEMM on random values, sums in f32."""
    n = _SIDE
    a, b, c = (device.allocate(size * n * n) for size in (2, 2, 4))
    rng = np.random.default_rng(1)
    try:
        for address in (a, b):
            values = rng.standard_normal(n * n).astype(np.float32)
            device.upload(address, (values.view(np.uint32) >> 16).astype(np.uint16))
        seconds = median_seconds(device, lambda: device.gemm_bf16(n, n, n, a, b, c), repetitions)
    finally:
        for address in (a, b, c):
            device.free(address)
    return 2 * n**3 / seconds / 1e9


def median_seconds(device: CUDADevice, work: Callable[[], None], repetitions: int = 10, warm: int = 2) -> float:
    """Return the median seconds of ``work`` on the device, by its own events."""
    for _ in range(warm):
        work()
    return statistics.median(device.seconds(work) for _ in range(repetitions))

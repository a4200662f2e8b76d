"""What a card can do at most, measured: copying its memory, and multiplying bf16 matrices (cuBLAS)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from quantkit.errors import ResourceError
from quantkit.kernels.cuda.device import CUDADevice, open_device

#: cuBLAS: bf16 matrices, f32 sums, its own choice of algorithm.
_BF16, _COMPUTE_F32, _DEFAULT_ALGORITHM, _TRANSPOSED, _AS_IS = 14, 68, -1, 1, 0

#: Bytes that are copied, and rows and columns that are multiplied: far beyond caches, and enough to fill a large card.
_COPIED = 1 << 30
_SIDE = 8192


def peaks(name: str) -> tuple[float, float]:
    """Return what the device CUDA0, CUDA1, ... does a second: GB copied (read and written bytes), GOP of bf16 GEMM.

    Raises:
        ResourceError: it is not there, or has no room.
    """
    device = open_device(name)
    if not isinstance(device, CUDADevice):
        raise ResourceError(f"{name} is no card whose speed could be measured")
    return copy_gb_s(device), gemm_gops(device)


def copy_gb_s(device: CUDADevice, repetitions: int = 10) -> float:
    """Return the gigabytes a second that a copy within the card's memory reads and writes."""
    a, b = (device.allocate(_COPIED) for _ in range(2))
    try:
        device.zero(a, _COPIED)
        seconds = timed(device, lambda: device.copy(b, a, _COPIED), repetitions)
    finally:
        device.free(a)
        device.free(b)
    return 2 * _COPIED / seconds / 1e9


def gemm_gops(device: CUDADevice, repetitions: int = 10) -> float:
    """Return the billions of operations (two a multiply-add) a second of a bf16 GEMM on random values."""
    n = _SIDE
    a, b, c = (device.allocate(2 * n * n) for _ in range(3))
    rng = np.random.default_rng(1)
    try:
        for address in (a, b):
            values = rng.standard_normal(n * n).astype(np.float32)
            device.upload(address, (values.view(np.uint32) >> 16).astype(np.uint16))
        seconds = timed(device, lambda: gemm_bf16(device, n, n, n, a, b, c), repetitions)
    finally:
        for address in (a, b, c):
            device.free(address)
    return 2 * n**3 / seconds / 1e9


def gemm_bf16(device: CUDADevice, rows: int, n_out: int, n_in: int, x: int, w: int, out: int) -> None:
    """out [rows, n_out] = x [rows, n_in] w^T, w [n_out, n_in]: bf16 at these addresses, sums in f32, by cuBLAS."""
    from cupy_backends.cuda.libs import cublas

    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    with device.here():
        handle: Any = device.cublas()
        cublas.setStream(handle, device.stream.ptr)
        cublas.gemmEx(
            handle, _TRANSPOSED, _AS_IS, n_out, rows, n_in, one.ctypes.data, w, _BF16, n_in, x, _BF16, n_in,
            zero.ctypes.data, out, _BF16, n_out, _COMPUTE_F32, _DEFAULT_ALGORITHM,
        )  # fmt: skip


def timed(device: CUDADevice, work: Callable[[], None], repetitions: int = 10, warm: int = 2) -> float:
    """Return the median seconds of ``work`` on the device, by its own events."""
    for _ in range(warm):
        work()
    return statistics.median(device.seconds(work) for _ in range(repetitions))

"""Shared by tests of CUDA kernels: run a kernel on arrays, on the host shim and, if present, on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Shape


class Memory:
    """Arrays on a device during a test."""

    def __init__(self, device: Any) -> None:
        self.device, self._arrays = device, list[tuple[int, npt.NDArray[Any]]]()

    def put(self, array: npt.NDArray[Any]) -> int:
        """Copy an array to the device; return its address."""
        flat = np.ascontiguousarray(array)
        address = self.device.allocate(flat.nbytes)
        self.device.upload(address, flat)
        self._arrays.append((address, flat))
        return int(address)

    def allocate(self, shape: tuple[int, ...], dtype: Any = np.float32) -> int:
        """Allocate an array of bytes 255 (NaN, -1), which reveal values that are never written."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.put(np.full(count, 255, np.uint8))

    def get(self, address: int, shape: tuple[int, ...], dtype: Any = np.float32) -> npt.NDArray[Any]:
        """Copy an array back."""
        out = np.empty(shape, dtype)
        self.device.download(address, out)
        return out

    def batch(self, tokens: Any, positions: Any, sequences: Any = 0, outputs: Any = (), n_ctx: int = 64) -> int:
        """Make the batch block of device.cuh; return its address."""
        ids = np.asarray(tokens, np.int32)
        row_sequences = np.broadcast_to(np.asarray(sequences, np.int32), ids.shape)
        rows = np.asarray(outputs, np.int32)
        parts = [self.put(np.asarray(a, np.int32)) for a in (ids, positions, row_sequences, rows)]
        return self.put(np.array([len(ids), len(rows), *parts, n_ctx], np.int64))

    def run(self, shape: Shape, **slots: int | float) -> None:
        """Launch a kernel and wait."""
        kernel = shape.kernel
        self.device.run([Launch(kernel, shape.grid, kernel.block(**slots), shape.shared)])
        self.device.synchronize()

    def close(self) -> None:
        """Free all arrays."""
        for address, _ in self._arrays:
            self.device.free(address)
        self._arrays.clear()

"""A CUDA device: its memory, its modules, and launches on one stream. All of CuPy that quantkit uses is in this file.

``Device`` is what the rest needs; the tests bring another one, which runs the same sources on the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quantkit.errors import ResourceError
from quantkit.kernels.cuda.core.compile import cubin
from quantkit.kernels.cuda.core.early import launch_early
from quantkit.kernels.cuda.core.kernel import Kernel

#: Readable bytes after the end of every allocation: kernels read 16 bytes at a time.
PADDING = 256


#: cuBLAS's numbers: types of matrices, sums in f32, its own choice of algorithm.
_BF16, _F32, _COMPUTE_F32, _DEFAULT_ALGORITHM, _TRANSPOSED, _AS_IS = 14, 0, 68, -1, 1, 0


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments packed, ready to run any number of times."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: bytes
    shared: int = 0


class Device(Protocol):
    """A device: memory by address, launches of a ``Kernel``; everything happens in order.

    name: CUDA0, ...; capability: 75, 80, 90 ...: compute capability, ten times the major version plus the minor one.
    """

    name: str
    capability: int
    multiprocessors: int

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory, 256-byte aligned, contents undefined; ResourceError if there is none."""

    def free(self, address: int) -> None:
        """Free memory."""

    def upload(self, address: int, data: npt.NDArray[Any]) -> None:
        """Copy an array (C order) to the device; the array may be changed afterwards."""

    def download(self, address: int, out: npt.NDArray[Any]) -> None:
        """Fill an array (C order) from the device, after all earlier work."""

    def zero(self, address: int, nbytes: int) -> None:
        """Set memory to zero."""

    def host_array(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array [count] on the host that downloads fill at full speed."""

    def gemm_bf16(self, rows: int, n_out: int, n_in: int, x: int, w: int, out: int) -> None:
        """out [rows, n_out] f32 = x [rows, n_in] w^T, w [n_out, n_in], both bf16, at these addresses; by cuBLAS."""

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compile kernels before their launch, several at once."""

    def run(self, launches: Sequence[Launch]) -> None:
        """Carry out launches, in order."""

    def record(self, launches: Sequence[Launch]) -> Callable[[], None]:
        """Return a function that runs these launches at once: a CUDA graph."""

    def synchronize(self) -> None:
        """Wait until everything is done; ResourceError if a kernel failed."""


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as e:
        raise ResourceError(
            f"CUDA devices need CuPy, which is not here ({e}): pip install 'gguf-quantkit[cuda12]' or "
            "'gguf-quantkit[cuda13]', by the version of your driver"
        ) from None
    return cupy


@cache
def count_devices() -> int:
    """Return how many CUDA devices there are; 0 without CuPy or a driver."""
    try:
        return int(_cupy().cuda.runtime.getDeviceCount())
    except Exception:  # whatever a broken installation raises: there is no device to be used
        return 0


def why_none() -> str:
    """Say, in a line, why there is no CUDA device."""
    try:
        cupy = _cupy()
    except ResourceError as e:
        return str(e)
    try:
        n = cupy.cuda.runtime.getDeviceCount()
    except Exception as e:
        return f"CuPy {cupy.__version__} finds no CUDA device: {e}"
    return f"there are {n} CUDA devices: CUDA0 to CUDA{n - 1}" if n else "CuPy finds no CUDA device"


@cache
def open_device(name: str) -> Device:
    """Return the device CUDA0, CUDA1, ...; ResourceError if it does not exist."""
    return CUDADevice(int(name.removeprefix("CUDA")))


class CUDADevice:
    """A device of the CUDA driver, through CuPy; one stream, memory from CuPy's pool."""

    def __init__(self, index: int = 0) -> None:
        cupy = _cupy()
        if index >= count_devices():
            raise ResourceError(f"there is no device CUDA{index}: {why_none()}")
        self._cupy, self.index, self.name = cupy, index, f"CUDA{index}"
        self._device = cupy.cuda.Device(index)
        major, minor = divmod(int(self._device.compute_capability), 10)
        self.capability = 10 * major + minor
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.multiprocessors = int(properties["multiProcessorCount"])
        self.card = properties["name"].decode()
        with self._device:
            self.stream = cupy.cuda.Stream(non_blocking=True)
        self._memory: dict[int, Any] = {}
        self._modules: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._functions: dict[Kernel, int] = {}
        self._kernels: list[Any] = []
        self._shared: dict[Kernel, int] = {}
        #: Launches may begin before the one before them is done, and wait where they need it (device.cuh).
        self.early = False

    # ------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> int:
        with self.here():
            try:
                memory = self._cupy.cuda.alloc(nbytes + PADDING)
            except self._cupy.cuda.memory.OutOfMemoryError as e:
                raise ResourceError(f"{self.name} has no room for {nbytes} bytes more: {e}") from None
        self._memory[memory.ptr] = memory
        return int(memory.ptr)

    def free(self, address: int) -> None:
        del self._memory[address]

    def upload(self, address: int, data: npt.NDArray[Any]) -> None:
        runtime = self._cupy.cuda.runtime
        flat = np.ascontiguousarray(data)
        with self.here():
            # From pageable memory: the call returns when the array has been read.
            runtime.memcpyAsync(address, flat.ctypes.data, flat.nbytes, runtime.memcpyHostToDevice, self.stream.ptr)

    def download(self, address: int, out: npt.NDArray[Any]) -> None:
        runtime = self._cupy.cuda.runtime
        with self.here():
            runtime.memcpyAsync(out.ctypes.data, address, out.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)
            self.synchronize()

    def zero(self, address: int, nbytes: int) -> None:
        with self.here():
            self._cupy.cuda.runtime.memsetAsync(address, 0, nbytes, self.stream.ptr)

    def host_array(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        with self.here():  # pages that the system may not move
            memory = self._cupy.cuda.alloc_pinned_memory(max(1, count) * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count)

    # ------------------------------------------------------------ kernels

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        from concurrent.futures import ThreadPoolExecutor

        wanted = {(op.file, op.defines): op for op in kernels if (op.file, op.defines) not in self._modules}
        with ThreadPoolExecutor() as pool:  # NVRTC lets go of Python's lock
            codes = list(pool.map(lambda op: cubin(op, self.capability), wanted.values()))
        with self.here():
            for key, code in zip(wanted, codes, strict=True):
                self._modules[key] = self._cupy.cuda.function.Module()
                self._modules[key].load(code)

    def _function(self, kernel: Kernel) -> int:
        """Return a kernel's handle."""
        if kernel not in self._functions:
            self.prepare([kernel])
            with self.here():
                function = self._modules[kernel.file, kernel.defines].get_function(f"quantkit_{kernel.name}")
            self._kernels.append(function)
            self._functions[kernel] = int(function.ptr)
        return self._functions[kernel]

    def _allow_shared(self, launch: Launch) -> None:
        """Ask for more than 48 KiB of shared memory, with what the source declares, as the driver requires."""
        driver = self._cupy.cuda.driver
        if launch.shared > max(40 << 10, self._shared.get(launch.kernel, 0)):
            function = self._function(launch.kernel)
            with self.here():
                driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared)
                # All that a multiprocessor has, so that two blocks of 100 KiB fit at once.
                driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
            self._shared[launch.kernel] = launch.shared

    def run(self, launches: Sequence[Launch]) -> None:
        driver, stream, early = self._cupy.cuda.driver, self.stream.ptr, self.early and self.capability >= 90
        with self.here():
            for launch in launches:
                self._allow_shared(launch)
                function, arguments = self._function(launch.kernel), _Arguments(launch.arguments)
                threads, shared = launch.kernel.threads, launch.shared
                if early:
                    launch_early(function, launch.grid, threads, shared, stream, arguments.address)
                else:
                    driver.launchKernel(function, *launch.grid, threads, 1, 1, shared, stream, arguments.address, 0)

    def record(self, launches: Sequence[Launch]) -> Callable[[], None]:
        for launch in launches:
            self._function(launch.kernel)  # nothing may be loaded while the stream is captured
            self._allow_shared(launch)
        with self.here():
            self.stream.begin_capture()
            try:
                self.run(launches)
            finally:
                graph = self.stream.end_capture()

        def replay() -> None:
            with self.here():
                graph.launch(self.stream)

        return replay

    def synchronize(self) -> None:
        try:
            self.stream.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as e:
            raise ResourceError(f"{self.name} failed: {e}") from None

    def gemm_bf16(self, rows: int, n_out: int, n_in: int, x: int, w: int, out: int) -> None:
        try:
            from cupy_backends.cuda.libs import cublas
        except ImportError as e:
            raise ResourceError(f"--cublas needs cuBLAS, which CuPy does not find: {e}") from None
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        with self.here():
            handle = int(self._device.cublas_handle)
            cublas.setStream(handle, self.stream.ptr)
            cublas.gemmEx(
                handle, _TRANSPOSED, _AS_IS, n_out, rows, n_in, one.ctypes.data, w, _BF16, n_in, x, _BF16, n_in,
                zero.ctypes.data, out, _F32, n_out, _COMPUTE_F32, _DEFAULT_ALGORITHM,
            )  # fmt: skip

    # ------------------------------------------------------------ for measurements (peak.py, scripts/gpu_check)

    @property
    def cupy(self) -> Any:
        """CuPy itself."""
        return self._cupy

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy within the device's memory."""
        runtime = self._cupy.cuda.runtime
        with self.here():
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDeviceToDevice, self.stream.ptr)

    def seconds(self, work: Callable[[], None]) -> float:
        """Return how long the device takes for ``work``."""
        cuda = self._cupy.cuda
        with self.here():
            began, ended = cuda.Event(), cuda.Event()
            began.record(self.stream)
            work()
            ended.record(self.stream)
            ended.synchronize()
            return float(cuda.get_elapsed_time(began, ended)) / 1e3

    @contextmanager
    def here(self) -> Iterator[None]:
        """Make this device and its stream CuPy's current ones."""
        with self._device, self.stream:
            yield


class _Arguments:
    """The array of pointers to arguments that a launch wants: one, to the struct. Keeps both alive."""

    def __init__(self, block: bytes) -> None:
        self._block = ctypes.create_string_buffer(block, len(block))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._block))
        self.address = ctypes.addressof(self._pointers)

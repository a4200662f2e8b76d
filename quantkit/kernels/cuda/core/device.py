"""A CUDA device: its memory, its modules, and launches on one stream. All of CuPy that quantkit uses is in this file.

``Device`` is the interface that other modules use; the tests have another implementation, which runs the same sources
on the host.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from time import monotonic, sleep
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quantkit.errors import ResourceError
from quantkit.kernels.cuda.core.compile import machine_code
from quantkit.kernels.cuda.core.dependent_launch import launch_dependent
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.core.uploads import Uploads
from quantkit.kernels.first_run import compile_in_order

#: Readable bytes after the end of every allocation: kernels read 16 bytes at a time.
PADDING = 256


#: Constants of cuBLAS: types of matrices, sums in f32, default algorithm.
_BF16 = 14
_F32 = 0
_COMPUTE_F32 = 68
_DEFAULT_ALGORITHM = -1
_TRANSPOSED = 1
_AS_IS = 0


#: cudaEventQuery's result for an event that has not been reached.
_NOT_READY = 600
#: Seconds between two polls of a device: initial, and maximum.
_SOON, _SELDOM = 1e-4, 5e-3


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes of the host's memory that ``host_array`` takes: CuPy's pool rounds up to a power of two."""
    return max(512, 1 << (nbytes - 1).bit_length()) if nbytes > 0 else 512


class DeviceHangs(ResourceError):
    """A device hangs: nothing that waits for it, such as freeing its memory, may be called any more."""


def wait_for(is_done: Callable[[], bool], seconds: float, given_up: Callable[[], bool]) -> float | None:
    """Poll until ``done``; return None, or the seconds waited if it never is.

    Time in which this process did not run is not counted: the device may have finished meanwhile.
    """
    waited, last = 0.0, monotonic()
    while not is_done():
        if waited > seconds or given_up():
            return waited
        sleep(min(max(waited / 8, _SOON), _SELDOM))
        now = monotonic()
        waited, last = waited + min(now - last, 1.0), now
    return None


def abandon(*objects: object) -> None:
    """Keep objects of a device that hangs: freeing them would wait for the device, even at exit."""
    for object_ in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(object_))


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
        """Return the address of new memory, 256-byte aligned, contents undefined; ResourceError without space."""

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
        """Run launches, and return a function that repeats them at once: a CUDA graph."""

    def synchronize(self) -> None:
        """Wait until everything is done; ResourceError if a kernel failed."""


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as e:
        raise ResourceError(
            f"CuPy is not installed ({e}): pip install 'gguf-quantkit[cuda12]' or 'gguf-quantkit[cuda13]', depending "
            "on your driver",
            "QK-E410",
        ) from None
    return cupy


@cache
def count_devices() -> int:
    """Return the number of CUDA devices; 0 without CuPy or a driver."""
    try:
        return int(_cupy().cuda.runtime.getDeviceCount())
    except Exception:  # any error of a faulty installation: there is no usable device
        return 0


def why_none() -> str:
    """Return the reason why there is no CUDA device, one line."""
    try:
        cupy = _cupy()
    except ResourceError as e:
        return str(e)
    try:
        n = cupy.cuda.runtime.getDeviceCount()
    except Exception as e:
        return f"CuPy {cupy.__version__} finds no CUDA device: {e}"
    return f"available CUDA devices: CUDA0 to CUDA{n - 1}" if n else "CuPy finds no CUDA device"


@cache
def open_device(name: str) -> Device:
    """Return the device CUDA0, CUDA1, ...; ResourceError if it does not exist."""
    return CUDADevice(int(name.removeprefix("CUDA")))


class CUDADevice:
    """A device of the CUDA driver, through CuPy; one stream, memory from CuPy's pool."""

    def __init__(self, index: int = 0) -> None:
        cupy = _cupy()
        if index >= count_devices():
            raise ResourceError(f"no device CUDA{index}: {why_none()}", "QK-E411")
        self._cupy = cupy
        self.index = index
        self.name = f"CUDA{index}"
        self._device = cupy.cuda.Device(index)
        major, minor = divmod(int(self._device.compute_capability), 10)
        self.capability = 10 * major + minor
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.multiprocessors = int(properties["multiProcessorCount"])
        self.card = properties["name"].decode()
        self._use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._memory: dict[int, Any] = {}
        self._modules: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._functions: dict[Kernel, int] = {}
        self._kernels: list[Any] = []
        self._shared: dict[Kernel, int] = {}  # maximum dynamic shared memory of a kernel
        self._loading = threading.RLock()  # lanes, each used by a thread, load for all of them
        self._uploads = self._own_uploads()
        self._end_event: Any = None
        #: The device that this lane belongs to.
        self.owner = self
        #: Whether launches may begin before the previous one is done, and wait where they need its results
        #: (device.cuh).
        self.dependent_launches = False

    # ------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> int:
        with self.current():
            try:
                memory = self._cupy.cuda.alloc(nbytes + PADDING)
            except self._cupy.cuda.memory.OutOfMemoryError as e:
                raise ResourceError(f"{self.name} has no memory for {nbytes} more bytes: {e}", "QK-E407") from None
        self._memory[memory.ptr] = memory
        return int(memory.ptr)

    def free(self, address: int) -> None:
        del self._memory[address]

    def upload(self, address: int, data: npt.NDArray[Any]) -> None:
        with self.current():
            self._uploads.send(address, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def _own_uploads(self) -> Uploads:
        return Uploads(partial(self.host_array, dtype=np.uint8), self._send, self._event, self._record_event)

    def _send(self, target: int, source: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyHostToDevice, self.stream.ptr)

    def _event(self) -> Any:
        return self._cupy.cuda.Event(disable_timing=True)

    def _record_event(self, event: Any) -> None:
        event.record(self.stream)

    def download(self, address: int, out: npt.NDArray[Any]) -> None:
        runtime = self._cupy.cuda.runtime
        with self.current():
            runtime.memcpyAsync(out.ctypes.data, address, out.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)
            self.synchronize()

    def zero(self, address: int, nbytes: int) -> None:
        with self.current():
            self._cupy.cuda.runtime.memsetAsync(address, 0, nbytes, self.stream.ptr)

    def host_array(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        with self.current():  # pages that the system may not move
            memory = self._cupy.cuda.alloc_pinned_memory(max(1, count) * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count)

    # ------------------------------------------------------------ lanes beside other work

    def new_stream(self) -> CUDADevice:
        """Return the same device for another thread: its memory and modules, on a separate stream."""
        stream = copy(self)
        stream._use()
        stream.stream = self._cupy.cuda.Stream(non_blocking=True)
        stream._end_event = self._cupy.cuda.Event(block=True, disable_timing=True)
        stream._uploads = stream._own_uploads()
        return stream

    def start_upload(self, address: int, data: npt.NDArray[Any]) -> None:
        """Copy pinned memory to the device some time before ``wait`` returns."""
        with self.current():
            self._send(address, data.ctypes.data, data.nbytes)

    def start_download(self, address: int, out: npt.NDArray[Any]) -> None:
        """Fill pinned memory from the device some time before ``wait`` returns."""
        runtime = self._cupy.cuda.runtime
        with self.current():
            runtime.memcpyAsync(out.ctypes.data, address, out.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)

    def wait(self, seconds: float = inf, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until everything is done; a CPU does other work meanwhile. Of a lane.

        Raises:
            DeviceHangs: it is not done after ``seconds``, or ``given_up``, and may never be.
            ResourceError: it failed.
        """
        runtime = self._cupy.cuda.runtime
        with self.current():
            self._end_event.record(self.stream)
            # The driver has no wait with a time limit.
            waited = wait_for(lambda: runtime.eventQuery(self._end_event.ptr) != _NOT_READY, seconds, given_up)
            if waited is not None:
                raise DeviceHangs(f"{self.name} does not respond: its work is not finished after {waited:.0f} seconds")
            self._end_event.synchronize()  # raises the error, if any

    # ------------------------------------------------------------ kernels

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        to_compile = {(op.file, op.defines): op for op in kernels if (op.file, op.defines) not in self._modules}
        # Processes: NVRTC compiles one module at a time.
        compile_in_order([partial(machine_code, op, self.capability) for op in to_compile.values()])
        for kernel in to_compile.values():
            self._module(kernel)

    def _module(self, kernel: Kernel) -> Any:
        key = kernel.file, kernel.defines
        with self._loading:
            if key not in self._modules:
                with self.current():
                    module = self._cupy.cuda.function.Module()
                    module.load(machine_code(kernel, self.capability))
                self._modules[key] = module
            return self._modules[key]

    def _function(self, kernel: Kernel) -> int:
        """Return a kernel's handle."""
        driver = self._cupy.cuda.driver
        with self._loading:
            if kernel in self._functions:
                return self._functions[kernel]
            with self.current():
                function = self._module(kernel).get_function(f"quantkit_{kernel.name}")
                declared = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
            self._kernels.append(function)
            self._shared[kernel] = (48 << 10) - declared
            self._functions[kernel] = int(function.ptr)
            return self._functions[kernel]

    def _allow_shared(self, launch: Launch) -> None:
        """Request more than 48 KiB of shared memory, the source's included, as the driver requires.

        How a multiprocessor's memory is divided into shared memory and cache is left to the driver, which ensures that
        shared memory does not keep blocks out, and that launches with other preferences need not wait.
        """
        driver = self._cupy.cuda.driver
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._loading:
            function = self._function(launch.kernel)
            if launch.shared <= self._shared[launch.kernel]:
                return
            with self.current():
                try:
                    driver.funcSetAttribute(function, attribute, launch.shared)
                except driver.CUDADriverError as e:
                    needs = f"{launch.kernel.name} needs {launch.shared} bytes of shared memory"
                    raise ResourceError(f"{needs}, but {self.name} has less: {e}", "QK-E411") from None
            self._shared[launch.kernel] = launch.shared

    def run(self, launches: Sequence[Launch]) -> None:
        driver = self._cupy.cuda.driver
        stream = self.stream.ptr
        dependent = self.dependent_launches and self.capability >= 90
        with self.current():
            for launch in launches:
                self._allow_shared(launch)
                function, arguments = self._function(launch.kernel), _Arguments(launch.arguments)
                threads, shared = launch.kernel.threads, launch.shared
                if dependent:
                    launch_dependent(function, launch.grid, threads, shared, stream, arguments.address)
                else:
                    driver.launchKernel(function, *launch.grid, threads, 1, 1, shared, stream, arguments.address, 0)

    def record(self, launches: Sequence[Launch]) -> Callable[[], None]:
        self.run(launches)  # a first launch loads kernels and allocates memory, which is impossible while recording
        with self.current():
            self.stream.begin_capture()
            try:
                self.run(launches)
            except BaseException:
                with suppress(Exception):  # its error would hide the cause
                    self.stream.end_capture()
                raise
            graph = self.stream.end_capture()

        def replay() -> None:
            with self.current():
                graph.launch(self.stream)

        return replay

    def synchronize(self) -> None:
        with self.current():
            self.stream.synchronize()

    def gemm_bf16(self, rows: int, n_out: int, n_in: int, x: int, w: int, out: int) -> None:
        try:
            from cupy_backends.cuda.libs import cublas
        except ImportError as e:
            raise ResourceError(f"--cublas needs cuBLAS, but CuPy does not find it: {e}", "QK-E410") from None
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        with self.current():
            try:
                handle = int(self._device.cublas_handle)
            except Exception as e:  # found, but does not work: any error of CuPy or the loader
                raise ResourceError(
                    f"--cublas needs cuBLAS, which does not work on this machine: {e}", "QK-E411"
                ) from None
            cublas.setStream(handle, self.stream.ptr)
            try:
                cublas.gemmEx(
                    handle, _TRANSPOSED, _AS_IS, n_out, rows, n_in, one.ctypes.data, w, _BF16, n_in, x, _BF16, n_in,
                    zero.ctypes.data, out, _F32, n_out, _COMPUTE_F32, _DEFAULT_ALGORITHM,
                )  # fmt: skip
            except cublas.CUBLASError as e:
                raise ResourceError(f"--cublas needs cuBLAS, which fails on {self.card}: {e}", "QK-E411") from None

    # ------------------------------------------------------------ for measurements (peak.py, scripts/gpu_check)

    @property
    def cupy(self) -> Any:
        """CuPy itself."""
        return self._cupy

    def bytes_free(self) -> int:
        """Return the bytes of free memory, including those in CuPy's pool."""
        with self.current():
            self._cupy.get_default_memory_pool().free_all_blocks()
            return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device's memory."""
        runtime = self._cupy.cuda.runtime
        with self.current():
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, self.stream.ptr)

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the duration of ``work`` on the device."""
        cuda = self._cupy.cuda
        with self.current():
            start, end = cuda.Event(), cuda.Event()
            start.record(self.stream)
            work()
            end.record(self.stream)
            end.synchronize()
            return float(cuda.get_elapsed_time(start, end)) / 1e3

    def _use(self) -> None:
        """Make this device the thread's current one permanently; a reset would initialize an unused GPU."""
        runtime = self._cupy.cuda.runtime
        if runtime.getDevice() != self.index:
            runtime.setDevice(self.index)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device and its stream CuPy's current ones; CUDA errors become ResourceError."""
        try:
            self._use()
            with self.stream:
                yield
        except (self._cupy.cuda.runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError) as e:
            raise ResourceError(f"{self.name} failed: {e}", "QK-E411") from e


class _Arguments:
    """The array of pointers to arguments that a launch takes: one, to the struct. Keeps both alive."""

    def __init__(self, block: bytes) -> None:
        self._block = ctypes.create_string_buffer(block, len(block))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._block))
        self.address = ctypes.addressof(self._pointers)

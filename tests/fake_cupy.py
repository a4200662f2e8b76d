"""The part of CuPy that quantkit uses, over the host shim: so that the code which talks to CuPy runs without a card.

Names and signatures are CuPy 14's (looked up in the real package by test_cuda_device.py where it is installed).
"""

from __future__ import annotations

import ctypes
import time
import types
from typing import Any

import host_device
import numpy as np

from quantkit.kernels.cuda.core.device import PADDING

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3


class Memory:
    """What alloc returns; given back when nobody holds it."""

    def __init__(self, shim: host_device.HostDevice, nbytes: int) -> None:
        self._shim = shim
        self.ptr = shim.allocate(nbytes - PADDING)

    def __del__(self) -> None:
        self._shim.free(self.ptr)


class Stream:
    current: Stream | None = None

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking
        self.ptr, self.captured = 7, None

    def __enter__(self) -> Stream:
        self.before, Stream.current = Stream.current, self
        return self

    def __exit__(self, *error: object) -> None:
        Stream.current = self.before

    def begin_capture(self, mode: int | None = None) -> None:
        assert self.captured is None
        self.captured: list[Any] | None = []

    def end_capture(self) -> Any:
        work, self.captured = self.captured, None
        assert work is not None

        def launch(stream: Stream) -> None:
            for launch in work:
                launch()

        return types.SimpleNamespace(launch=launch)

    def synchronize(self) -> None:
        assert self.captured is None


class Kernel:
    """cupy.cuda.function.Function."""

    def __init__(self, function: Any, name: str) -> None:
        self.ptr = ctypes.cast(function, ctypes.c_void_p).value
        KERNELS[self.ptr] = name
        SHARED.setdefault(self.ptr, 48 << 10)


#: Kernels' names, and the shared memory they may have, by handle.
KERNELS: dict[int, str] = {}
SHARED: dict[int, int] = {}


class Module:
    """cupy.cuda.function.Module; its machine code is the source text."""

    def load(self, cubin: bytes) -> None:
        self.library = host_device._module(cubin.decode(), 900)

    def get_function(self, name: str) -> Kernel:
        return Kernel(getattr(self.library, name), name)


class Context:
    """cupy.cuda.Device."""

    cublas_handle = 11

    def __init__(self, index: int) -> None:
        self.compute_capability = "90"

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Event:
    def record(self, stream: Stream) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass


class CUDARuntimeError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


def module(devices: int = 1, room: int = 1 << 30) -> Any:
    """Return a module that can stand for cupy; room: bytes that may be had at once."""
    shim = host_device.HostDevice()
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: devices,
        getDeviceProperties=lambda index: {"multiProcessorCount": 4, "name": b"shim"},
        driverGetVersion=lambda: 12000,
        memcpyHostToDevice=HOST_TO_DEVICE,
        memcpyDeviceToHost=DEVICE_TO_HOST,
        memcpyDeviceToDevice=DEVICE_TO_DEVICE,
        CUDARuntimeError=CUDARuntimeError,
    )

    def here(stream: int) -> Stream:
        assert Stream.current is not None
        assert stream == Stream.current.ptr
        return Stream.current

    def memcpy(to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert here(stream).captured is None
        ctypes.memmove(to, source, nbytes)

    def memset(to: int, value: int, nbytes: int, stream: int) -> None:
        assert here(stream).captured is None
        ctypes.memset(to, value, nbytes)

    def alloc(nbytes: int) -> Memory:
        if nbytes > room:
            raise OutOfMemoryError(f"{nbytes} bytes")
        return Memory(shim, nbytes)

    def launch_kernel(
        f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int, params: int, extra: int
    ) -> None:
        name = KERNELS[f]
        assert shared <= SHARED[f]
        assert not extra
        block = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0]
        kept = ctypes.create_string_buffer(ctypes.string_at(block, ARGUMENT_BYTES[name]))

        def work() -> None:
            grid, threads = (ctypes.c_uint * 3)(gx, gy, gz), (ctypes.c_uint * 3)(bx, by, bz)
            shim._runtime.host_launch(
                ctypes.c_void_p(f), name.encode(), grid, threads, ctypes.c_uint64(shared), kept, 0
            )

        captured = here(stream).captured
        if captured is None:
            work()
        else:
            captured.append(work)

    def launch_kernel_ex(config: Any, f: int, params: int, extra: None) -> int:
        c = config._obj
        assert (c.n_attributes, c.attributes[0].id, list(c.attributes[0].value)) == (1, 6, [1] + [0] * 15)
        grid, threads = (c.grid_x, c.grid_y, c.grid_z), (c.block_x, c.block_y, c.block_z)
        launch_kernel(f, *grid, *threads, c.shared, c.stream, params, 0)
        return 0

    def set_attribute(f: int, attribute: int, value: int) -> None:
        if attribute == 8:
            SHARED[f] = value
        else:
            assert (attribute, value) == (9, 100)

    runtime.memcpyAsync, runtime.memsetAsync = memcpy, memset
    cuda = types.SimpleNamespace(
        runtime=runtime,
        driver=types.SimpleNamespace(
            launchKernel=launch_kernel,
            funcSetAttribute=set_attribute,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9,
        ),
        function=types.SimpleNamespace(Module=Module),
        Device=Context,
        Stream=Stream,
        alloc=alloc,
        alloc_pinned_memory=bytearray,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        Event=Event,
        get_elapsed_time=lambda a, b: 1e3 * (b.at - a.at),
    )
    libcuda = types.SimpleNamespace(cuLaunchKernelEx=launch_kernel_ex)
    return types.SimpleNamespace(cuda=cuda, libcuda=libcuda, __version__="14")


def cublas() -> Any:
    """Return a module that can stand for cupy_backends.cuda.libs.cublas: gemmEx of bf16 matrices, by numpy."""

    def gemm(
        handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, a_type: int, lda: int,
        b: int, b_type: int, ldb: int, beta: int, c: int, c_type: int, ldc: int, compute_type: int, algorithm: int,
    ) -> None:  # fmt: skip
        assert (handle, transa, transb, lda, ldb, ldc) == (Context.cublas_handle, 1, 0, k, k, m)
        assert (a_type, b_type, c_type, compute_type, algorithm) == (14, 14, 0, 68, -1)
        assert [ctypes.cast(p, ctypes.POINTER(ctypes.c_float))[0] for p in (alpha, beta)] == [1, 0]
        assert Stream.current is not None
        assert Stream.current.captured is None

        def matrix(address: int, rows: int) -> Any:
            bits = np.frombuffer(ctypes.string_at(address, 2 * rows * k), np.uint16).astype(np.uint32)
            return (bits << 16).view(np.float32).reshape(rows, k)

        out = np.ascontiguousarray(matrix(b, n) @ matrix(a, m).T)  # columns of cuBLAS are our rows
        ctypes.memmove(c, out.ctypes.data, out.nbytes)

    def set_stream(handle: int, stream: int) -> None:
        assert (handle, stream) == (Context.cublas_handle, 7)

    return types.SimpleNamespace(gemmEx=gemm, setStream=set_stream)


#: Bytes of the arguments of kernels that tests launch, by name.
ARGUMENT_BYTES: dict[str, int] = {}

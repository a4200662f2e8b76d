"""The part of CuPy that quantkit uses, on the host shim, so that code which uses CuPy runs without a GPU.

Names and signatures are CuPy 14's (compared with the real package by test_cuda_device.py if it is installed). A stream
executes its work as late as possible, when a caller waits for it, including copies from host memory. Threads may use
it, each with its own streams. ``Faults`` makes GPUs fail.
"""

from __future__ import annotations

import ctypes
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import host_device
import numpy as np
import pytest

from quantkit.kernels.cuda.core import device as devices
from quantkit.kernels.cuda.core.compile import preamble
from quantkit.kernels.cuda.core.device import PADDING

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3

Work = Callable[[], None]


@dataclass
class Faults:
    """Faults of GPUs, by number: the operations before they fail, or hang; the total bytes of each.

    given_back: how often memory of a hung GPU was freed.
    """

    left: dict[int, int] = field(default_factory=dict)
    hangs: dict[int, int] = field(default_factory=dict)
    room: int | None = None
    allocated: dict[int, int] = field(default_factory=dict)
    given_back: int = 0

    def strike(self, card: int) -> None:
        """Raise, permanently, once a GPU has done its number of operations."""
        if card in self.left:
            self.left[card] -= 1
            if self.left[card] < 0:
                raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


#: The faults of the latest module.
FAULTS = Faults()


class _ThreadState(threading.local):
    """The current GPU and stream of a thread."""

    card = 0
    stream: Stream | None = None


THREAD_STATE = _ThreadState()


class Memory:
    """The result of alloc; freed with its last reference."""

    def __init__(self, shim: host_device.HostDevice, nbytes: int) -> None:
        self._shim, self._nbytes, self._card, self._faults = shim, nbytes, THREAD_STATE.card, FAULTS
        FAULTS.allocated[self._card] = FAULTS.allocated.get(self._card, 0) + nbytes
        self.ptr = shim.allocate(nbytes - PADDING)

    def __del__(self) -> None:
        with host_device.ALONE:
            try:
                for stream in Stream.all:
                    if stream.card == self._card and stream.trouble is self._faults:
                        stream.flush(quietly=True)  # a memory pool outlives the pending work that uses it
            except WaitsForEver:  # a pool takes it back anyway, but the next allocation may wait
                self._faults.given_back += 1
                return
            self._faults.allocated[self._card] -= self._nbytes
            self._shim.free(self.ptr)


class Stream:
    all: list[Stream] = []  # noqa: RUF012

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking
        Stream.all.append(self)
        self.ptr, self.card, self.trouble = 6 + len(Stream.all), THREAD_STATE.card, FAULTS
        self.captured: list[Work] | None = None
        self.waiting: list[Work] = []

    def __enter__(self) -> Stream:
        assert THREAD_STATE.card == self.card
        self.before, THREAD_STATE.stream = THREAD_STATE.stream, self
        return self

    def __exit__(self, *error: object) -> None:
        THREAD_STATE.stream = self.before

    def do(self, work: Work) -> None:
        """Queue work, or record it."""
        (self.waiting if self.captured is None else self.captured).append(work)

    def moves(self) -> bool:
        """Return whether the GPU executes the next operation; a wait for a hung GPU never ends."""
        with host_device.ALONE:
            if self.card in self.trouble.hangs and self.waiting:
                self.trouble.hangs[self.card] -= 1
            return self.trouble.hangs.get(self.card, 0) >= 0

    def flush(self, quietly: bool = False) -> None:
        """Execute the queued work."""
        with host_device.ALONE:
            while self.waiting:
                if not self.moves():
                    raise WaitsForEver
                try:
                    self.trouble.strike(self.card)
                except CUDARuntimeError:
                    self.waiting.clear()
                    if not quietly:
                        raise
                    return
                self.waiting.pop(0)()
            if not quietly and self.trouble.left.get(self.card, 0) < 0:
                raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    def begin_capture(self, mode: int | None = None) -> None:
        assert self.captured is None
        self.captured = []

    def end_capture(self) -> Any:
        recorded, self.captured = self.captured, None
        assert recorded is not None

        def launch(stream: Stream) -> None:
            for work in recorded:
                stream.do(work)

        return types.SimpleNamespace(launch=launch)

    def synchronize(self) -> None:
        assert self.captured is None
        self.flush()


class Kernel:
    """cupy.cuda.function.Function."""

    def __init__(self, function: Any, name: str) -> None:
        self.ptr = int(ctypes.cast(function, ctypes.c_void_p).value or 0)
        KERNELS[self.ptr] = name


#: Kernels' names, by handle; the shared memory they declare, by name, and may ask for, by handle.
KERNELS: dict[int, str] = {}
DECLARED: dict[str, int] = {}
MAY_ASK: dict[int, int] = {}


class Module:
    """cupy.cuda.function.Module; its machine code is the source text."""

    def load(self, cubin: bytes) -> None:
        self.text = cubin.decode()

    def get_function(self, name: str) -> Kernel:
        return Kernel(getattr(host_device._module(self.text, 900), name), name)


class Context:
    """cupy.cuda.Device."""

    cublas_handle = 11

    def __init__(self, index: int) -> None:
        self.compute_capability = "90"


class Event:
    all: list[Event] = []  # noqa: RUF012

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        Event.all.append(self)
        self.stream: Stream | None = None
        self.ptr = len(Event.all)

    def record(self, stream: Stream) -> None:
        self.stream = stream
        stream.do(self._passed)

    def _passed(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.flush()


class CUDARuntimeError(RuntimeError):
    pass


class WaitsForEver(BaseException):
    """A caller waited for a hung GPU."""


class CUDADriverError(RuntimeError):
    pass


class CUBLASError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


def _query(event: int) -> int:
    """cudaEventQuery: 0, cudaErrorNotReady, or an error."""
    stream = Event.all[event - 1].stream
    assert stream is not None
    try:
        stream.flush()
    except WaitsForEver:
        return 600
    except CUDARuntimeError:
        return 700
    return 0


def _set_device(card: int) -> None:
    THREAD_STATE.card = card


def _move(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


def _fill(target: int, value: int, nbytes: int) -> None:
    ctypes.memset(target, value, nbytes)


def module(devices: int = 1, room: int = 1 << 30) -> Any:
    """Return a replacement for the module cupy; room: bytes that can be allocated at once."""
    global FAULTS
    FAULTS, THREAD_STATE.card = Faults(), 0
    shim = host_device.HostDevice()
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: devices,
        getDevice=lambda: THREAD_STATE.card,
        setDevice=_set_device,
        getDeviceProperties=lambda index: {"multiProcessorCount": 4, "name": b"shim"},
        driverGetVersion=lambda: 12000,
        memGetInfo=lambda: (FAULTS.room or room, FAULTS.room or room),
        memcpyHostToDevice=HOST_TO_DEVICE,
        memcpyDeviceToHost=DEVICE_TO_HOST,
        memcpyDeviceToDevice=DEVICE_TO_DEVICE,
        CUDARuntimeError=CUDARuntimeError,
        eventQuery=_query,
    )

    def current_stream(stream: int) -> Stream:
        assert THREAD_STATE.stream is not None
        assert stream == THREAD_STATE.stream.ptr
        assert THREAD_STATE.card == THREAD_STATE.stream.card
        return THREAD_STATE.stream

    def memcpy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert current_stream(stream).captured is None
        current_stream(stream).do(partial(_move, target, source, nbytes))

    def memset(target: int, value: int, nbytes: int, stream: int) -> None:
        assert current_stream(stream).captured is None
        current_stream(stream).do(partial(_fill, target, value, nbytes))

    def alloc(nbytes: int) -> Memory:
        if (
            nbytes > room
            or FAULTS.room is not None
            and FAULTS.allocated.get(THREAD_STATE.card, 0) + nbytes > FAULTS.room
        ):
            raise OutOfMemoryError(f"{nbytes} bytes")
        return Memory(shim, nbytes)

    def launch_kernel(
        f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int, params: int, extra: int
    ) -> None:
        name = KERNELS[f]
        if shared > MAY_ASK.get(f, (48 << 10) - DECLARED.get(name, 0)):
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        assert not extra
        block = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0]
        arguments = ctypes.create_string_buffer(ctypes.string_at(block, ARGUMENT_BYTES[params]))

        def work() -> None:
            grid, threads = (ctypes.c_uint * 3)(gx, gy, gz), (ctypes.c_uint * 3)(bx, by, bz)
            shim._runtime.host_launch(
                ctypes.c_void_p(f), name.encode(), grid, threads, ctypes.c_uint64(shared), arguments, 0
            )

        current_stream(stream).do(work)

    def launch_kernel_ex(config: Any, f: int, params: int, extra: None) -> int:
        c = config._obj
        assert (c.n_attributes, c.attributes[0].id, list(c.attributes[0].value)) == (1, 6, [1] + [0] * 15)
        grid, threads = (c.grid_x, c.grid_y, c.grid_z), (c.block_x, c.block_y, c.block_z)
        launch_kernel(f, *grid, *threads, c.shared, c.stream, params, 0)
        return 0

    def set_attribute(f: int, attribute: int, value: int) -> None:
        assert attribute == 8
        if value + DECLARED.get(KERNELS[f], 0) > 227 << 10:
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        MAY_ASK[f] = value

    def get_attribute(attribute: int, f: int) -> int:
        assert attribute == 1
        return DECLARED.get(KERNELS[f], 0)

    runtime.memcpyAsync, runtime.memsetAsync = memcpy, memset
    cuda = types.SimpleNamespace(
        runtime=runtime,
        driver=types.SimpleNamespace(
            launchKernel=launch_kernel,
            funcSetAttribute=set_attribute,
            funcGetAttribute=get_attribute,
            CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            CUDADriverError=CUDADriverError,
        ),
        function=types.SimpleNamespace(Module=Module),
        Device=Context,
        Stream=Stream,
        alloc=alloc,
        alloc_pinned_memory=bytearray,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        Event=Event,
        get_elapsed_time=lambda a, b: 1e3 * (b.time - a.time),
    )
    libcuda, pool = types.SimpleNamespace(cuLaunchKernelEx=launch_kernel_ex), types.SimpleNamespace()
    pool.free_all_blocks = lambda: None  # memory is freed immediately
    return types.SimpleNamespace(cuda=cuda, libcuda=libcuda, get_default_memory_pool=lambda: pool, __version__="14")


@contextmanager
def install(monkeypatch: pytest.MonkeyPatch, count: int = 2) -> Iterator[Any]:
    """Replace CuPy, with a number of GPUs; NVRTC's output is the source text."""
    fake = module(devices=count)
    monkeypatch.setattr(devices, "_cupy", lambda: fake)
    monkeypatch.setattr(devices, "machine_code", lambda kernel, capability: preamble(kernel).encode())

    class Arguments(devices._Arguments):
        def __init__(self, block: bytes) -> None:
            super().__init__(block)
            ARGUMENT_BYTES[self.address] = len(block)

    monkeypatch.setattr(devices, "_Arguments", Arguments)
    functions = devices.count_devices, devices.open_device
    for function in functions:
        function.cache_clear()
    yield fake
    for function in functions:
        function.cache_clear()


def cublas() -> Any:
    """Return a replacement for cupy_backends.cuda.libs.cublas: gemmEx of bf16 matrices, by numpy."""

    def gemm(
        handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, a_type: int, lda: int,
        b: int, b_type: int, ldb: int, beta: int, c: int, c_type: int, ldc: int, compute_type: int, algorithm: int,
    ) -> None:  # fmt: skip
        assert (handle, transa, transb, lda, ldb, ldc) == (Context.cublas_handle, 1, 0, k, k, m)
        assert (a_type, b_type, c_type, compute_type, algorithm) == (14, 14, 0, 68, -1)
        assert [ctypes.cast(p, ctypes.POINTER(ctypes.c_float))[0] for p in (alpha, beta)] == [1, 0]
        assert THREAD_STATE.stream is not None
        assert THREAD_STATE.stream.captured is None

        def matrix(address: int, rows: int) -> Any:
            bits = np.frombuffer(ctypes.string_at(address, 2 * rows * k), np.uint16).astype(np.uint32)
            return (bits << 16).view(np.float32).reshape(rows, k)

        def work() -> None:
            out = np.ascontiguousarray(matrix(b, n) @ matrix(a, m).T)  # columns of cuBLAS are quantkit's rows
            ctypes.memmove(c, out.ctypes.data, out.nbytes)

        THREAD_STATE.stream.do(work)

    def set_stream(handle: int, stream: int) -> None:
        assert THREAD_STATE.stream is not None
        assert (handle, stream) == (Context.cublas_handle, THREAD_STATE.stream.ptr)

    return types.SimpleNamespace(gemmEx=gemm, setStream=set_stream, CUBLASError=CUBLASError)


#: Bytes of the arguments of launches, by the address of the array of pointers to them.
ARGUMENT_BYTES: dict[int, int] = {}

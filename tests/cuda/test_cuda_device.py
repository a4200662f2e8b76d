"""The code that talks to CuPy, with the shim in CuPy's place; and that CuPy has what it asks for."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cupy
import host_device
import numpy as np
import pytest
from refusals import refuses

from quantkit.errors import ResourceError
from quantkit.kernels import first_run
from quantkit.kernels.cuda.core import compile as compiling
from quantkit.kernels.cuda.core import dependent_launch, uploads
from quantkit.kernels.cuda.core import device as devices
from quantkit.kernels.cuda.core.device import CUDADevice, Launch
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.layer import elementwise, norms_rope
from zoo import expected, write_zoo

pytestmark = pytest.mark.skipif(host_device.compiler() is None, reason="no C++ compiler: install g++")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake_cupy.install(monkeypatch) as fake:
        yield fake


def launch(shape: Shape, **slots: int | float) -> Launch:
    return Launch(shape.kernel, shape.grid, shape.kernel.block(**slots), shape.shared)


def test_arrays_are_uploaded_and_downloaded(cupy: Any) -> None:
    device = CUDADevice(0)
    assert (device.name, device.capability, device.multiprocessors) == ("CUDA0", 90, 4)
    x = np.arange(100, dtype=np.float32)
    a, b = device.allocate(x.nbytes), device.allocate(x.nbytes)
    device.upload(a, x)
    device.copy(b, a, x.nbytes)
    actual = np.empty_like(x)
    device.download(b, actual)
    assert np.array_equal(actual, x)
    device.zero(b, x.nbytes)
    device.download(b, actual)
    assert not actual.any()
    device.free(a)
    device.free(b)


def test_an_array_may_change_after_its_upload(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU reads the host's memory later, pinned or not."""
    monkeypatch.setattr(uploads, "SLOT_BYTES", 256)
    device = CUDADevice(0)
    for x in (np.arange(1000, dtype=np.float32), device.host_array(1000, np.float32)):
        x[:] = np.arange(1000)
        a = device.allocate(x.nbytes)
        for part in (slice(0, 3), slice(3, 1000)):  # beside one that waits in the same slot; more than all slots hold
            device.upload(a + 4 * part.start, x[part])
        x[:] = -1
        actual = np.empty_like(x)
        device.download(a, actual)
        assert np.array_equal(actual, np.arange(1000))


def test_kernels_run_now_or_recorded(cupy: Any) -> None:
    device = CUDADevice(0)
    x = np.arange(64, dtype=np.float32)
    a = device.allocate(x.nbytes)
    device.upload(a, x)
    doubled = launch(elementwise.scale(64, 1), x=a, out=a, width=64, rows=1, by=2.0)
    normed = launch(
        norms_rope.norm("rms", 1), x=a, out=a, weight=0, bias=0, groups=1, group=64, per_row=1, n_weight=64, eps=0.0
    )
    device.prepare([doubled.kernel, normed.kernel])
    device.run([doubled])
    replay = device.record([doubled, doubled])
    actual = np.empty_like(x)
    device.download(a, actual)
    assert np.array_equal(actual, 8 * x), "recording runs them once, and never while it records"
    replay()
    replay()
    device.download(a, actual)
    assert np.array_equal(actual, 128 * x)
    device.run([normed])
    device.download(a, actual)
    np.testing.assert_allclose(actual, x / np.sqrt(np.square(x).mean()), rtol=1e-6)
    assert device.seconds(lambda: device.run([doubled])) > 0


def test_products_by_cublas(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    libs = types.ModuleType("cupy_backends.cuda.libs")
    for name in ("cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", libs)
    device, rng = CUDADevice(0), np.random.default_rng(1)
    x, w, actual = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((5, 16), (7, 16), (5, 7)))
    addresses = [device.allocate(a.nbytes) for a in (x, w, actual)]
    for address, a in zip(addresses, (x, w), strict=False):
        device.upload(address, (a.view(np.uint32) >> 16).astype(np.uint16))
    with refuses(ResourceError, "QK-E410 cuBLAS"):
        device.gemm_bf16(5, 7, 16, *addresses)
    libs.cublas = fake_cupy.cublas()  # type: ignore[attr-defined]
    device.gemm_bf16(5, 7, 16, *addresses)
    device.download(addresses[2], actual)
    np.testing.assert_array_equal(actual, x @ w.T)

    def fail(*arguments: Any) -> None:
        raise fake_cupy.CUBLASError("CUBLAS_STATUS_ARCH_MISMATCH")

    libs.cublas.gemmEx = fail
    with refuses(ResourceError, "QK-E411 cuBLAS CUBLAS_STATUS_ARCH_MISMATCH"):
        device.gemm_bf16(5, 7, 16, *addresses)


def test_programmatic_dependent_launches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # include/cuda.h of CUDA 13: CUlaunchConfig, CUlaunchAttribute
    assert (ctypes.sizeof(dependent_launch.LaunchConfig), dependent_launch.LaunchConfig.stream.offset) == (56, 32)
    assert (ctypes.sizeof(dependent_launch.Attribute), dependent_launch.Attribute.value.offset) == (72, 8)
    monkeypatch.setattr(dependent_launch, "driver", lambda: cupy.libcuda)
    device = CUDADevice(0)
    device.dependent_launches = True
    x = np.arange(64, dtype=np.float32)
    a = device.allocate(x.nbytes)
    device.upload(a, x)
    doubled = launch(elementwise.scale(64, 1), x=a, out=a, width=64, rows=1, by=2.0)
    device.run([doubled, doubled])
    device.record([doubled])()
    actual = np.empty_like(x)
    device.download(a, actual)
    assert np.array_equal(actual, 16 * x)


def test_a_failed_recording_names_its_cause(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a broken recording fails too, and says only that it is broken."""
    device = CUDADevice(0)
    a = device.allocate(256)
    doubled = launch(elementwise.scale(64, 1), x=a, out=a, width=64, rows=1, by=2.0)
    launch_kernel = cupy.cuda.driver.launchKernel

    def fail(*arguments: Any) -> None:
        if device.stream.captured is not None:
            raise fake_cupy.CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY")
        launch_kernel(*arguments)

    def end(stream: Any) -> None:
        stream.captured = None
        raise fake_cupy.CUDARuntimeError("cudaErrorStreamCaptureInvalidated")

    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", fail)
    monkeypatch.setattr(fake_cupy.Stream, "end_capture", end)
    with refuses(ResourceError, "QK-E411 CUDA0 CUDA_ERROR_OUT_OF_MEMORY"):
        device.record([doubled])
    assert device.stream.captured is None
    device.run([doubled])


def test_declared_shared_memory_counts(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """47 KiB at its launch, and 2 KiB of its own, are more than a kernel has without asking."""
    device = CUDADevice(0)
    a = device.allocate(256)
    doubled = launch(elementwise.scale(64, 1), x=a, out=a, width=64, rows=1, by=2.0)
    monkeypatch.setitem(fake_cupy.DECLARED, "quantkit_scale", 2 << 10)
    monkeypatch.setattr(fake_cupy, "MAY_ASK", {})
    device.run([replace(doubled, shared=46 << 10)])
    assert not fake_cupy.MAY_ASK
    device.run([replace(doubled, shared=47 << 10)])
    assert list(fake_cupy.MAY_ASK.values()) == [47 << 10]
    with refuses(ResourceError, "QK-E411 231424 CUDA0"):
        device.run([replace(doubled, shared=226 << 10)])


def test_concurrent_loads_load_once(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel may use the largest requested shared memory, independent of the order of requests."""
    device = CUDADevice(0)
    a = device.allocate(256)
    doubled = launch(elementwise.scale(64, 1), x=a, out=a, width=64, rows=1, by=2.0)
    monkeypatch.setattr(fake_cupy, "MAY_ASK", {})
    ask, most = cupy.cuda.driver.funcSetAttribute, list(range(60 << 10, 200 << 10, 20 << 10))

    def slowly(f: int, attribute: int, value: int) -> None:
        time.sleep(0.02 * (len(most) - most.index(value)))  # the largest would be the first
        ask(f, attribute, value)

    monkeypatch.setattr(cupy.cuda.driver, "funcSetAttribute", slowly)
    lanes = [device.new_stream() for _ in most]
    threads = [
        threading.Thread(target=lane._allow_shared, args=(replace(doubled, shared=shared),))
        for lane, shared in zip(lanes, most, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(fake_cupy.MAY_ASK.values()) == [most[-1]]


def test_modules_are_compiled_in_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVRTC compiles one at a time; who compiled is what is kept."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "_target", lambda capability: "sm_90")
    monkeypatch.setattr(compiling, "_version", lambda: "12.9")
    monkeypatch.setattr(first_run, "available_cpus", lambda: 3)

    def compile_module(*arguments: Any) -> tuple[bytes, str]:
        time.sleep(0.2)
        return str(os.getpid()).encode(), ""

    monkeypatch.setattr(compiling, "compile_module", compile_module)
    fake = fake_cupy.module()
    loaded: list[bytes] = []
    fake.cuda.function.Module = lambda: types.SimpleNamespace(load=loaded.append)
    monkeypatch.setattr(devices, "_cupy", lambda: fake)
    monkeypatch.setattr(devices, "count_devices", lambda: 1)
    CUDADevice(0).prepare([Kernel("layer/norms.cu", "norm").bind(KIND=i) for i in range(6)])
    assert len(loaded) == 6
    assert len(set(loaded)) > 1


def test_a_full_device_is_an_error(cupy: Any) -> None:
    with refuses(ResourceError, "QK-E407 CUDA0 4294967296"):
        CUDADevice(0).allocate(1 << 32)


def test_a_gpu_error_has_no_traceback(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next operation raises the error before."""
    device, array = CUDADevice(0), np.zeros(4, np.float32)
    a = device.allocate(array.nbytes)

    def fail(*arguments: Any) -> None:
        raise fake_cupy.CUDARuntimeError("cudaErrorIllegalAddress")

    for name in ("memcpyAsync", "memsetAsync"):
        monkeypatch.setattr(cupy.cuda.runtime, name, fail)
    monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", fail)
    for ask in (
        lambda: device.download(a, array),
        lambda: device.zero(a, 4),
        lambda: device.upload(a, array),
        lambda: device.host_array(4, np.uint8),
        lambda: device.new_stream().start_upload(a, array),
    ):
        with refuses(ResourceError, "QK-E411 CUDA0 cudaErrorIllegalAddress"):
            ask()


def test_unselected_gpus_are_not_used(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selecting a GPU creates a context of half a gigabyte, which fails on a GPU in exclusive use."""
    used, use = set[int](), cupy.cuda.runtime.setDevice

    def noted(card: int) -> None:
        used.add(card)
        use(card)

    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", noted)
    device, x = CUDADevice(1), np.arange(64, dtype=np.float32)
    a = device.allocate(x.nbytes)
    device.upload(a, x)
    device.synchronize()

    def elsewhere() -> None:
        lane = device.new_stream()
        lane.run([launch(elementwise.scale(64, 1), x=a, out=a, width=64, rows=1, by=2.0)])
        lane.wait()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    device.record([launch(elementwise.scale(64, 1), x=a, out=a, width=64, rows=1, by=2.0)])()
    actual = np.empty_like(x)
    device.download(a, actual)
    assert np.array_equal(actual, 8 * x)
    assert used == {1}


def test_memory_in_cupys_pool_counts_as_free(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is closed leaves its memory to CuPy's pool, which gives it to others when the driver has no more."""
    pool_bytes = [600]
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (1000 - sum(pool_bytes), 1000))
    monkeypatch.setattr(cupy.get_default_memory_pool(), "free_all_blocks", pool_bytes.clear)
    assert CUDADevice(0).bytes_free() == 1000


@pytest.mark.parametrize("nbytes", [1, 512, 513, 36 << 20, (4 << 20) + 1])
def test_pinned_memory_is_counted_as_allocated_by_cupy(nbytes: int) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            from cupy.cuda import PinnedMemoryPool
    except ImportError:
        pytest.skip("no CuPy: pip install cupy-cuda12x")
    sizes: list[int] = []

    def driver(size: int) -> None:
        sizes.append(size)
        raise MemoryError

    with pytest.raises(MemoryError):
        PinnedMemoryPool(driver).malloc(nbytes)
    assert sizes == [devices.pinned_bytes(nbytes)]


def test_missing_devices_are_refused(cupy: Any) -> None:
    assert devices.count_devices() == 2
    with refuses(ResourceError, "QK-E411 CUDA2"):
        devices.open_device("CUDA2")


def test_a_whole_model_through_cupy_on_two_gpus(cupy: Any, tmp_path: Path) -> None:
    """The first GPU computes the next tokens before the second has copied its previous results."""
    from libllama import nmse
    from quantkit.model.engine import load
    from quantkit.model.placement import cuda_devices, placement_of

    tokens, logits = expected("qwen3moe-moe")
    path = write_zoo("qwen3moe-moe", tmp_path / "model.gguf")
    assert cuda_devices() == ("CUDA0", "CUDA1")
    with load(path, kv_type="f32", n_ubatch=8, placement=placement_of("cuda", None, (), cuda_devices())) as model:
        assert len(model.segments) == 2
        session, last = model.session(64), np.arange(24) == 23
        actual = [
            session.decode(tokens[:24], outputs=last),
            *(session.decode(tokens[i : i + 1]) for i in range(24, 28)),
        ]
        assert nmse(np.concatenate(actual), logits[23:28]) <= 1e-8


def test_cupy_has_the_used_names() -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            import cupy
            from cupy.cuda import driver, function
    except ImportError:
        pytest.skip("no CuPy: pip install cupy-cuda12x")
    assert "extra)" in driver.launchKernel.__doc__
    assert driver.launchKernel.__doc__.count(",") == 10
    assert hasattr(function.Function, "ptr")
    assert "bytes cubin" in function.Module.load.__doc__
    assert "int attribute, int value" in driver.funcSetAttribute.__doc__
    assert {"load", "get_function"} <= set(dir(function.Module))
    assert driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == 8
    assert "int attribute, intptr_t f" in driver.funcGetAttribute.__doc__
    assert driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES == 1
    assert issubclass(driver.CUDADriverError, Exception)
    assert "disable_timing" in cupy.cuda.Event.__doc__
    assert {"getSupportedArchs", "getPTX", "getCUBIN"} <= set(dir(cupy.cuda.nvrtc))
    assert cupy.cuda.runtime.eventQuery(0) not in (0, 600), "a number that says what is wrong"
    runtime = {"memcpyAsync", "memsetAsync", "getDeviceCount", "getDeviceProperties", "driverGetVersion"}
    runtime |= {"getDevice", "setDevice", "memGetInfo"}
    constants = {"memcpyHostToDevice", "memcpyDeviceToHost", "memcpyDeviceToDevice", "CUDARuntimeError"}
    assert runtime | constants <= set(dir(cupy.cuda.runtime))
    assert {"begin_capture", "end_capture", "synchronize", "ptr"} <= set(dir(cupy.cuda.Stream)) | {"ptr"}
    assert {"compute_capability", "cublas_handle"} <= set(dir(cupy.cuda.Device))
    assert hasattr(cupy.cuda.graph.Graph, "launch")
    for name in ("alloc", "alloc_pinned_memory", "Event", "get_elapsed_time"):
        assert hasattr(cupy.cuda, name)
    assert hasattr(cupy.get_default_memory_pool(), "free_all_blocks")
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, Exception)

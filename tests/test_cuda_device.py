"""The code that talks to CuPy, with the shim in CuPy's place; and that CuPy has what it asks for."""

from __future__ import annotations

import ctypes
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cupy
import host_device
import numpy as np
import pytest

from quantkit.errors import ResourceError
from quantkit.kernels.cuda.core import device as devices
from quantkit.kernels.cuda.core import early
from quantkit.kernels.cuda.core.compile import preamble
from quantkit.kernels.cuda.core.device import CUDADevice, Launch
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.layer import elementwise, norms
from zoo import expected, write_zoo

pytestmark = pytest.mark.skipif(host_device.compiler() is None, reason="no C++ compiler: install g++")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = fake_cupy.module()
    monkeypatch.setattr(devices, "_cupy", lambda: made)
    monkeypatch.setattr(devices, "cubin", lambda kernel, capability: preamble(kernel).encode())
    block = Kernel.block

    def noted(kernel: Kernel, **values: int | float) -> bytes:
        packed = block(kernel, **values)
        fake_cupy.ARGUMENT_BYTES[f"quantkit_{kernel.name}"] = len(packed)
        return packed

    monkeypatch.setattr(Kernel, "block", noted)
    devices.count_devices.cache_clear()
    devices.open_device.cache_clear()
    yield made
    devices.count_devices.cache_clear()
    devices.open_device.cache_clear()


def launch(shape: Shape, **slots: int | float) -> Launch:
    return Launch(shape.kernel, shape.grid, shape.kernel.block(**slots), shape.shared)


def test_arrays_go_there_and_back(cupy: Any) -> None:
    device = CUDADevice(0)
    assert (device.name, device.capability, device.multiprocessors) == ("CUDA0", 90, 4)
    x = np.arange(100, dtype=np.float32)
    a, b = device.allocate(x.nbytes), device.allocate(x.nbytes)
    device.upload(a, x)
    device.copy(b, a, x.nbytes)
    found = np.empty_like(x)
    device.download(b, found)
    assert np.array_equal(found, x)
    device.zero(b, x.nbytes)
    device.download(b, found)
    assert not found.any()
    device.free(a)
    device.free(b)


def test_kernels_run_now_or_recorded(cupy: Any) -> None:
    device = CUDADevice(0)
    x = np.arange(64, dtype=np.float32)
    a = device.allocate(x.nbytes)
    device.upload(a, x)
    doubled = launch(elementwise.scale(64, 1), x=a, out=a, width=64, rows=1, by=2.0)
    normed = launch(
        norms.norm("rms", 1), x=a, out=a, weight=0, bias=0, groups=1, group=64, per_row=1, n_weight=64, eps=0.0
    )
    device.prepare([doubled.kernel, normed.kernel])
    device.run([doubled])
    replay = device.record([doubled, doubled])
    found = np.empty_like(x)
    device.download(a, found)
    assert np.array_equal(found, 2 * x), "recording runs nothing"
    replay()
    replay()
    device.download(a, found)
    assert np.array_equal(found, 32 * x)
    device.run([normed])
    device.download(a, found)
    np.testing.assert_allclose(found, x / np.sqrt(np.square(x).mean()), rtol=1e-6)
    assert device.seconds(lambda: device.run([doubled])) > 0


def test_products_by_cublas(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    libs = types.ModuleType("cupy_backends.cuda.libs")
    for name in ("cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", libs)
    device, rng = CUDADevice(0), np.random.default_rng(1)
    x, w, found = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((5, 16), (7, 16), (5, 7)))
    at = [device.allocate(a.nbytes) for a in (x, w, found)]
    for address, a in zip(at, (x, w), strict=False):
        device.upload(address, (a.view(np.uint32) >> 16).astype(np.uint16))
    with pytest.raises(ResourceError, match="needs cuBLAS"):
        device.gemm_bf16(5, 7, 16, *at)
    libs.cublas = fake_cupy.cublas()  # type: ignore[attr-defined]
    device.gemm_bf16(5, 7, 16, *at)
    device.download(at[2], found)
    np.testing.assert_array_equal(found, x @ w.T)


def test_launches_may_be_early(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # include/cuda.h of CUDA 13: CUlaunchConfig, CUlaunchAttribute
    assert (ctypes.sizeof(early.LaunchConfig), early.LaunchConfig.stream.offset) == (56, 32)
    assert (ctypes.sizeof(early.Attribute), early.Attribute.value.offset) == (72, 8)
    monkeypatch.setattr(early, "driver", lambda: cupy.libcuda)
    device = CUDADevice(0)
    device.early = True
    x = np.arange(64, dtype=np.float32)
    a = device.allocate(x.nbytes)
    device.upload(a, x)
    doubled = launch(elementwise.scale(64, 1), x=a, out=a, width=64, rows=1, by=2.0)
    device.run([doubled, doubled])
    device.record([doubled])()
    found = np.empty_like(x)
    device.download(a, found)
    assert np.array_equal(found, 8 * x)


def test_a_device_that_is_full_says_so(cupy: Any) -> None:
    with pytest.raises(ResourceError, match="CUDA0 has no room for 4294967296 bytes"):
        CUDADevice(0).allocate(1 << 32)


def test_devices_that_are_not_there(cupy: Any) -> None:
    assert devices.count_devices() == 1
    with pytest.raises(ResourceError, match="no device CUDA1: there are 1 CUDA devices"):
        devices.open_device("CUDA1")


def test_a_whole_model_through_cupy(cupy: Any, tmp_path: Path) -> None:
    from libllama import nmse
    from quantkit.model.engine import load
    from quantkit.model.placement import placement_of

    tokens, logits = expected("qwen3moe-moe")
    path = write_zoo("qwen3moe-moe", tmp_path / "model.gguf")
    from quantkit.model.devices import cuda_devices

    assert cuda_devices() == ("CUDA0",)
    with load(path, kv_type="f32", placement=placement_of("cuda", None, (), cuda_devices())) as model:
        session = model.session(64)
        found = np.concatenate([session.decode(part) for part in (tokens[:20], *tokens[20:25, None])])
        assert nmse(found, logits[:25]) <= 1e-8


def test_cupy_has_what_is_asked_of_it() -> None:
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
    assert driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT == 9
    runtime = {"memcpyAsync", "memsetAsync", "getDeviceCount", "getDeviceProperties", "driverGetVersion"}
    constants = {"memcpyHostToDevice", "memcpyDeviceToHost", "memcpyDeviceToDevice", "CUDARuntimeError"}
    assert runtime | constants <= set(dir(cupy.cuda.runtime))
    assert {"begin_capture", "end_capture", "synchronize", "ptr"} <= set(dir(cupy.cuda.Stream)) | {"ptr"}
    assert {"compute_capability", "cublas_handle"} <= set(dir(cupy.cuda.Device))
    assert hasattr(cupy.cuda.graph.Graph, "launch")
    for name in ("alloc", "alloc_pinned_memory", "Event", "get_elapsed_time"):
        assert hasattr(cupy.cuda, name)
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, Exception)

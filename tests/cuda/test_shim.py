"""The shim finds what it is there for: each of these kernels has one mistake that a GPU might let pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import host_device
import pytest

pytestmark = pytest.mark.skipif(host_device.compiler() is None, reason="no C++ compiler: install g++")

HEAD = '#include "core/device.cuh"\nstruct broken_args { float* x; int64_t n; };\nKERNEL(broken, 64) {\n'

MISTAKES = {
    "past the end": ("a.x[a.n + 64 + threadIdx.x] = 1;", "use-after-poison|heap-buffer-overflow"),
    "past shared memory": (
        "__shared__ float s[64]; s[threadIdx.x + 1] = 1; __syncthreads(); a.x[0] = s[0];",
        "global-buffer-overflow|index 64 out of bounds",
    ),
    "past dynamic shared memory": (
        "DYNAMIC_SHARED(s); s[a.n + threadIdx.x] = 1; a.x[0] = s[0];",
        "use-after-poison|heap-buffer-overflow",
    ),
    "misaligned": ("a.x[0] = *(const float*)((const char*)a.x + 2);", "misaligned"),
    "a barrier not for all": (
        "if (threadIdx.x < 40) __syncthreads(); else __syncwarp();",
        "wait for others|at different",
    ),
    "lanes apart": ("if (threadIdx.x & 1) a.x[0] = __shfl_xor_sync(FULL, a.x[1], 1);", "wait for others"),
    "a shift too far": ("a.x[0] = 1 << (threadIdx.x + a.n);", "shift exponent"),
}

RUN = """
import sys, ctypes, numpy as np
sys.path.insert(0, {tests!r})
import host_device
device = host_device.HostDevice()
module = host_device._module(open({text!r}).read(), 900)
for order in {orders}:
    x = np.arange(64, dtype=np.float32)
    address = device.allocate(x.nbytes)
    device.upload(address, x)
    if {early}:
        device._runtime.host_not_ready(ctypes.c_void_p(address), ctypes.c_uint64(x.nbytes))
    grid, block = (ctypes.c_uint * 3)(1, 1, 1), (ctypes.c_uint * 3)(64, 1, 1)
    arguments = (ctypes.c_int64 * 2)(address, 64)
    device._runtime.host_launch(module.quantkit_broken, b"broken", grid, block, ctypes.c_uint64(64), arguments, order)
    device.download(address, x)
    print(x.tobytes().hex())
"""


def run(
    tmp_path: Path, body: str, orders: Sequence[int] = (0,), dependent: bool = False
) -> subprocess.CompletedProcess[str]:
    text = tmp_path / "broken.cu"
    head = HEAD.replace("KERNEL", "KERNEL_THAT_WAITS") if dependent else HEAD
    text.write_text(head + body + "\n}\n")
    code = RUN.format(
        tests=str(Path(__file__).parents[1] / "lib"), text=str(text), orders=list(orders), early=dependent
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_kernels_abort_with_a_message(tmp_path: Path, mistake: str) -> None:
    body, message = MISTAKES[mistake]
    process = run(tmp_path, body)
    assert process.returncode != 0
    assert any(part in process.stderr for part in message.split("|")), process.stderr[-3000:]


def outputs(tmp_path: Path, body: str, orders: Sequence[int] = range(8)) -> set[str]:
    """Return the results of a kernel in several orders."""
    process = run(tmp_path, body, orders)
    assert process.returncode == 0, process.stderr
    return set(process.stdout.splitlines())


def test_a_missing_barrier_changes_the_result_between_orders(tmp_path: Path) -> None:
    """Also one between warps that alternate as long as they wait for their own lanes."""
    body = "__shared__ float s[64]; s[threadIdx.x] = a.x[threadIdx.x];{}a.x[threadIdx.x] = s[63 - threadIdx.x];"
    assert len(outputs(tmp_path, body.format("__syncthreads();"))) == 1
    assert len(outputs(tmp_path, body.format(""), (0, 1))) == 2
    between = body.format("__syncwarp(); __syncwarp();")
    assert len(outputs(tmp_path, between, (0, 1))) == 1
    assert len(outputs(tmp_path, between)) > 1


def test_uninitialized_shared_memory_is_detected(tmp_path: Path) -> None:
    """That of a function, of a template, and sized at launch."""
    for body in (
        "__shared__ float s[64]; if (a.n < 0) s[0] = 1; a.x[threadIdx.x] = s[threadIdx.x];",
        "auto of = [&](auto x) { __shared__ decltype(x) s[64]; if (a.n < 0) s[0] = x; return s[threadIdx.x]; };"
        "a.x[threadIdx.x] = of(1.0f);",
        "DYNAMIC_SHARED(s); a.x[threadIdx.x % 16] = ((float*)s)[threadIdx.x % 16];",
    ):
        assert len(outputs(tmp_path, body, (0, 2))) == 2


def test_a_dependent_launch_waits_for_the_previous_one(tmp_path: Path) -> None:
    uses = "a.x[threadIdx.x] += 1;"
    assert run(tmp_path, f"wait_for_previous(); {uses}", dependent=True).returncode == 0
    assert "use-after-poison" in run(tmp_path, f"{uses} wait_for_previous();", dependent=True).stderr
    forgets = run(tmp_path, "if (threadIdx.x == 40) return; wait_for_previous();", dependent=True)
    assert "has not waited" in forgets.stderr

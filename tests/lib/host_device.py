"""A device without a GPU: CUDA sources compiled as C++ with tests/shim, under the address and UB sanitizers."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cuda.core.compile import preamble
from quantkit.kernels.cuda.core.device import PADDING, Launch
from quantkit.kernels.cuda.core.generated import headers
from quantkit.kernels.cuda.core.kernel import SOURCES, Kernel, shared_of_block

SHIM = Path(__file__).parents[1] / "shim"
CACHE = Path(os.environ.get("QUANTKIT_CACHE", Path.home() / ".cache/quantkit")) / "cuda-host"


def _has_fma() -> bool:
    """Return whether this CPU has an fmaf instruction; otherwise compilers call a function."""
    try:
        return " fma " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


FLAGS = [
    "-std=c++17",
    # Passes of -O2 that make kernels faster by a quarter without a longer compilation.
    *("-O1", "-finline-small-functions", "-ftree-vrp", "-fexpensive-optimizations"),
    *(["-mfma"] if _has_fma() else []),
    "-g1",
    "-fPIC",
    "-shared",
    "-w",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fsanitize=address,undefined",
    # The errors that these checks find end the process anyway, as soon as such an address is used.
    "-fno-sanitize=vptr,null,pointer-overflow,object-size",
    "-fno-sanitize-recover=all",
    "-DQUANTKIT_HOST",
]
#: A library finds its dependencies beside itself, so a copied or moved cache has no stale paths.
RUNPATH = "-Wl,-rpath,$ORIGIN:$ORIGIN/../cuda-host"


def compiler() -> str | None:
    """Return the C++ compiler, or None."""
    return next(
        (path for name in (os.environ.get("CXX", ""), "g++", "clang++") if name and (path := shutil.which(name))), None
    )


@cache
def version() -> str:
    """Return the version text of the C++ compiler."""
    return subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout


@cache
def _included(text: str) -> dict[str, str]:
    """Return all files that a text includes (CUDA sources, generated ones and the shim's), each with its text."""
    files: dict[str, str] = {}
    for name in re.findall(r'^ *# *include "(.*)"', text, re.MULTILINE):
        places = [folder / name for folder in (SOURCES, SHIM) if (folder / name).exists()]
        body = places[0].read_text() if places else headers()[name]
        files |= {name: body, **_included(body)}
    return files


def digest(text: str, *items: object) -> str:
    """Return a digest of a text, of all files that it includes, and of further strings."""
    parts = [text, *(body for _, body in sorted(_included(text).items())), *map(str, items)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def build(text: str, arch: int = 900, *libraries: Path) -> Path:
    """Compile C++ text to a library, linked to others, once for each digest of its inputs."""
    library = CACHE / f"{digest(text, version(), FLAGS, RUNPATH, arch, *(path.name for path in libraries))}.so"
    if library.exists():
        return library
    flags = [*FLAGS, f"-DQUANTKIT_HOST_ARCH={arch}", f"-I{SOURCES}", f"-I{SHIM}"]
    return make_library(library, text, flags, libraries)


def make_library(library: Path, text: str, flags: Sequence[str], libraries: Sequence[Path]) -> Path:
    """Compile C++ text to a file that appears only when complete."""
    command = compiler()
    assert command is not None, "no C++ compiler"
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        unit, output = Path(folder) / "unit.cpp", Path(folder) / "unit.so"
        unit.write_text(text)
        for name, generated in headers().items():
            header = Path(folder) / name
            header.parent.mkdir(exist_ok=True)
            header.write_text(generated)
        flags = [*flags, f"-I{folder}", f"-Wl,-soname,{library.name}", RUNPATH]
        arguments = [command, *flags, str(unit), *map(str, libraries), "-o", str(output)]
        process = subprocess.run(arguments, capture_output=True, text=True)
        assert process.returncode == 0, f"{process.stderr[-6000:]}\n{text[:300]}"
        output.rename(library)
    return library


@cache
def _runtime_path() -> Path:
    return build((SHIM / "runtime.cpp").read_text())


@cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_runtime_path()))
    library.host_allocate.restype = ctypes.c_void_p
    library.host_allocate.argtypes = [ctypes.c_uint64]
    library.host_free.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return library


@cache
def _module(text: str, arch: int) -> ctypes.CDLL:
    # Never RTLD_GLOBAL: libraries loaded later would use the sanitizer's operator new, and some of them not its delete.
    return ctypes.CDLL(str(build(text, arch, _runtime_path())))


#: Kernels run one after another, also those of different threads.
ALONE = threading.RLock()


def check_launch(launch: Launch, capability: int) -> None:
    """Refuse a launch that a GPU would refuse."""
    name, (x, y, z) = launch.kernel.name, launch.grid
    assert launch.shared <= shared_of_block(capability), f"{name}: {launch.shared} bytes of shared memory"
    assert 0 < x < 1 << 31, f"{name}: a grid of {launch.grid} blocks"
    assert min(y, z) > 0, f"{name}: a grid of {launch.grid} blocks"
    assert max(y, z) < 1 << 16, f"{name}: a grid of {launch.grid} blocks"


class HostDevice:
    """Runs launches immediately, one block after another. order: one of runtime.cpp's; by default, all in rotation."""

    def __init__(self, capability: int = 90, order: int | None = None, name: str = "CUDA0") -> None:
        self.capability, self.order, self.name, self.multiprocessors = capability, order, name, 4
        self._runtime, self._sizes, self._count = _runtime(), dict[int, int](), 0
        self.launched = set[tuple[Kernel, int]]()  # kernels, each with a capability

    def allocate(self, nbytes: int) -> int:
        address = int(self._runtime.host_allocate(nbytes + PADDING))
        self._sizes[address] = nbytes + PADDING
        return address

    def free(self, address: int) -> None:
        self._runtime.host_free(address, self._sizes.pop(address))

    def upload(self, address: int, data: npt.NDArray[Any]) -> None:
        flat = np.ascontiguousarray(data)
        ctypes.memmove(address, flat.ctypes.data, flat.nbytes)

    def download(self, address: int, out: npt.NDArray[Any]) -> None:
        assert out.flags.c_contiguous
        ctypes.memmove(out.ctypes.data, address, out.nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def host_array(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.empty(count, dtype)

    def gemm_bf16(self, rows: int, n_out: int, n_in: int, x: int, w: int, out: int) -> None:
        def matrix(address: int, n: int) -> npt.NDArray[Any]:
            bits = np.empty((n, n_in), np.uint16)
            self.download(address, bits)
            return (bits.astype(np.uint32) << 16).view(np.float32)

        self.upload(out, matrix(x, rows) @ matrix(w, n_out).T)

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        pass  # kernels are compiled at their first launch: most of these never run

    def run(self, launches: Sequence[Launch]) -> None:
        with ALONE:
            for launch in launches:
                self._launch(launch)

    def _launch(self, launch: Launch) -> None:
        kernel = launch.kernel
        function = getattr(_module(preamble(kernel), 10 * self.capability), f"quantkit_{kernel.name}")
        check_launch(launch, self.capability)
        grid, block = (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(kernel.threads, 1, 1)
        arguments = ctypes.create_string_buffer(launch.arguments, len(launch.arguments))
        self._count += 1
        self.launched.add((kernel, self.capability))
        order = self._count if self.order is None else self.order
        self._runtime.host_launch(
            function, kernel.name.encode(), grid, block, ctypes.c_uint64(launch.shared), arguments, order
        )

    def record(self, launches: Sequence[Launch]) -> Callable[[], None]:
        recorded_launches = list(launches)
        self.run(recorded_launches)
        return lambda: self.run(recorded_launches)

    def synchronize(self) -> None:
        pass

    def new_stream(self) -> HostDevice:
        return self

    def start_upload(self, address: int, data: npt.NDArray[Any]) -> None:
        self.upload(address, data)

    def start_download(self, address: int, out: npt.NDArray[Any]) -> None:
        self.download(address, out)

    def wait(self, seconds: float = 0, given_up: Callable[[], bool] | None = None) -> None:
        pass

    def bytes_free(self) -> int:
        return 1 << 40

    def not_ready(self, address: int, nbytes: int) -> None:
        """Use programmatic dependent launches: memory that the previous launch writes is poisoned until a thread waits
        for it."""
        self._runtime.host_not_ready(ctypes.c_void_p(address), ctypes.c_uint64(nbytes))

    def seconds(self, work: Callable[[], None]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

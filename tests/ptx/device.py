"""A device that runs the PTX that NVRTC makes of our sources, on the fibers of tests/shim.

PTX and the libraries made of it are kept, by a hash of all that they are made of.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import host_device
from host_device import CACHE, HostDevice, check_launch, digest

from ptx.parse import Module, parse
from ptx.translate import translate
from quantkit.kernels.cuda.core.compile import compile_options, create_program, preamble
from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel

FOLDER = Path(__file__).parent

#: Code that is checked where it touches memory needs no sanitizers of its own. Uninitialized memory is neither zero nor
#: leftover data.
FLAGS = [
    "-std=c++17", "-Og", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno",
    "-ftrivial-auto-var-init=pattern",
]  # fmt: skip

#: Shared memory that a block may ask for, KiB; what a source declares by itself is 48 KiB at most.
SHARED_KIB = {75: 64, 80: 163, 90: 227}


#: The generation of which test_cuda_compile.py compiles every module of quantkit's to machine code.
NEWEST = 90


def nvrtc() -> Any:
    """Return CuPy's NVRTC.

    Raises:
        ImportError: it is not here.
    """
    with warnings.catch_warnings(action="ignore"):  # CuPy looks for a toolkit, which is not needed
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    return nvrtc


def why_not() -> str | None:
    """Return the reason why PTX cannot be generated or run here; None if it can."""
    try:
        nvrtc()
    except (ImportError, RuntimeError):
        return "no NVRTC: pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12"
    if host_device.compiler() is None:
        return "no C++ compiler: kernels for the GPU are not tested; install g++"
    return None


def keep(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.rename(path)


def compile_kernel(kernel: Kernel, target: str) -> Path:
    """Compile a module with the options of a real device, once for each version of the sources; return its PTX's path.

    Of machine code (target: sm_N) the compiler's report is beside it: one compilation gives both.
    """
    compiler = nvrtc()
    is_code = target.startswith("sm")
    options = (*compile_options(target), *(["--ptxas-options=-v"] if is_code else []))
    path = CACHE.parent / "nvrtc" / f"{digest(preamble(kernel), options[1:], compiler.getVersion())}.ptx"
    if not path.exists():
        program = create_program(compiler, kernel)
        try:
            compiler.compileProgram(program, options)
            if is_code:
                assert bytes(compiler.getCUBIN(program)).startswith(b"\x7fELF")
                keep(path.with_suffix(".log"), str(compiler.getProgramLog(program)).encode())
            keep(path, bytes(compiler.getPTX(program)))
        except compiler.NVRTCError as e:
            raise RuntimeError(f"{kernel}: {compiler.getProgramLog(program)}") from e
        finally:
            compiler.destroyProgram(program)
    return path


@cache
def ptx_of(file: str, defines: tuple[tuple[str, str], ...], capability: int) -> str:
    """Return the PTX of a module."""
    has_code = capability == NEWEST and not Path(file).is_absolute()
    target = f"{'sm' if has_code else 'compute'}_{capability}"
    return compile_kernel(Kernel(file, "", defines), target).read_text().rstrip("\0")


@cache
def parsed(text: str) -> Module:
    return parse(text)


def module_of(file: str, defines: tuple[tuple[str, str], ...], capability: int) -> Module:
    return parsed(ptx_of(file, defines, capability))


@cache
def machine() -> Path:
    """Return machine.cpp as a library, compiled as the shim is: with sanitizers."""
    text = "\n".join((FOLDER / name).read_text() for name in ("machine.h", "machine.cpp"))
    text = text.replace('#include "machine.h"', "").replace("#pragma once", "")
    return host_device.build(text, 900, host_device._runtime_path())


@cache
def translator() -> str:
    """Return the text of what makes a library of PTX."""
    files = [FOLDER / name for name in ("machine.h", "parse.py", "instructions.py", "translate.py")]
    return "".join(f.read_text() for f in files)


def build(text: str, entry: str, *flags: str) -> Path:
    """Return the library of one entry of a module of PTX; flags: flags of the compiler."""
    name = digest(text, entry, translator(), machine().name, host_device.version(), [*FLAGS, *flags])
    library = CACHE.parent / "ptx" / f"{name}.so"
    if library.exists():
        return library
    libraries = [machine(), host_device._runtime_path()]
    return host_device.make_library(library, translate(parsed(text), entry), [*FLAGS, *flags, f"-I{FOLDER}"], libraries)


@cache
def load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))


@cache
def library_of(kernel: Kernel, capability: int, *flags: str) -> ctypes.CDLL:
    """Return a kernel's library."""
    return load(build(ptx_of(kernel.file, kernel.defines, capability), f"quantkit_{kernel.name}", *flags))


class PTXDevice(HostDevice):
    """A HostDevice whose kernels are compiled by NVRTC for a compute capability."""

    #: More flags that kernels are compiled with.
    flags: tuple[str, ...] = ()

    def run(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self._count += 1
            self.launched.add((launch.kernel, self.capability))
            self.launch(launch, self._count if self.order is None else self.order)

    def shared_of(self, launch: Launch) -> int:
        """Return the shared memory of a block: the size declared in the source, then that of the launch."""
        library = library_of(launch.kernel, self.capability, *self.flags)
        declared = ctypes.c_uint.in_dll(library, "shared_bytes").value
        assert declared <= 48 << 10, f"{launch.kernel} declares {declared} bytes of shared memory"
        return -(-declared // 16) * 16 + launch.shared if launch.shared else declared

    def launch(self, launch: Launch, order: int) -> None:
        """Run one kernel, its threads in an order of the shim's."""
        kernel, shared = launch.kernel, self.shared_of(launch)
        check_launch(launch, self.capability)
        library = library_of(kernel, self.capability, *self.flags)
        at_most = ctypes.c_uint.in_dll(library, "threads_at_most").value
        assert shared <= SHARED_KIB[self.capability] << 10, f"{kernel}: {shared} bytes of shared memory"
        assert kernel.threads <= at_most, f"{kernel}: {kernel.threads} threads of {at_most}"
        grid, block = (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(kernel.threads, 1, 1)
        arguments = ctypes.create_string_buffer(launch.arguments, len(launch.arguments))
        self._runtime.host_launch(
            library[f"quantkit_{kernel.name}"], kernel.name.encode(), grid, block, ctypes.c_uint64(shared),
            arguments, order,
        )  # fmt: skip

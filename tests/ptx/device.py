"""A device that runs the PTX that NVRTC makes of our sources, on the fibers of tests/shim.

PTX and the libraries made of it are kept, by a hash of all that they are made of.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import host_device
from host_device import CACHE, HostDevice

from ptx.parse import Module, parse
from ptx.translate import translate
from quantkit.kernels.cuda.compile import compile_options, preamble, sources_hash
from quantkit.kernels.cuda.device import Launch
from quantkit.kernels.cuda.operation import Operation

HERE = Path(__file__).parent

#: Code that is checked where it touches memory needs no sanitizers of its own. What is read before it is written is
#: neither zero nor what was there by chance.
FLAGS = [
    "-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno",
    "-ftrivial-auto-var-init=pattern",
]  # fmt: skip

#: Shared memory that a block may ask for, KiB; what a source declares by itself is 48 KiB at most.
SHARED_KIB = {75: 64, 80: 163, 90: 227}


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
    """Say why PTX cannot be made or run here; None if it can."""
    try:
        nvrtc()
    except (ImportError, RuntimeError):
        return "no NVRTC: pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12"
    if host_device.compiler() is None:
        return "no C++ compiler: kernels for the GPU are not tested; install g++"
    return None


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def keep(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.rename(path)


@cache
def ptx_of(file: str, defines: tuple[tuple[str, str], ...], capability: int) -> str:
    """Return the PTX of a module, made with the options of a real device."""
    operation = Operation(file, "", defines)
    compiler = nvrtc()
    *options, _ = compile_options(capability)
    options.append(f"-arch=compute_{capability}")
    kept = (
        CACHE.parent / "ptx" / f"{digest(sources_hash(), preamble(operation), options[1:], compiler.getVersion())}.ptx"
    )
    if not kept.exists():
        program = compiler.createProgram(preamble(operation), file, (), ())
        try:
            compiler.compileProgram(program, tuple(options))
            keep(kept, bytes(compiler.getPTX(program)))
        except compiler.NVRTCError as e:
            raise RuntimeError(f"{operation}: {compiler.getProgramLog(program)}") from e
        finally:
            compiler.destroyProgram(program)
    return kept.read_text().rstrip("\0")


@cache
def module_of(file: str, defines: tuple[tuple[str, str], ...], capability: int) -> Module:
    return parse(ptx_of(file, defines, capability))


@cache
def machine() -> Path:
    """Return machine.cpp as a library, compiled as the shim is: with sanitizers."""
    text = "\n".join((HERE / name).read_text() for name in ("machine.h", "machine.cpp"))
    text = text.replace('#include "machine.h"', "").replace("#pragma once", "")
    return host_device.build(text, 900, host_device._runtime_path())


@cache
def translator_hash() -> str:
    """Return a hash of what a library depends on besides its PTX."""
    files = [HERE / name for name in ("machine.h", "parse.py", "instructions.py", "translate.py")]
    return digest(*(f.read_text() for f in files), *FLAGS)


def build(text: str, entry: str, module: Module | None = None) -> Path:
    """Return the library of one entry of a module of PTX."""
    library = CACHE.parent / "ptx" / f"{digest(translator_hash(), machine(), entry, text)}.so"
    if library.exists():
        return library
    command = host_device.compiler()
    assert command is not None, "no C++ compiler"
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        unit, made = Path(folder) / "unit.cpp", Path(folder) / "unit.so"
        unit.write_text(translate(module or parse(text), entry))
        libraries = [str(machine()), str(host_device._runtime_path())]
        done = subprocess.run(
            [command, *FLAGS, f"-I{HERE}", str(unit), *libraries, "-o", str(made)], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{entry}: {done.stderr[-6000:]}"
        made.rename(library)
    return library


@cache
def load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))


@cache
def library_of(operation: Operation, capability: int) -> ctypes.CDLL:
    """Return the library of an operation's kernel."""
    at = (operation.file, operation.defines, capability)
    return load(build(ptx_of(*at), f"quantkit_{operation.name}", module_of(*at)))


class PTXDevice(HostDevice):
    """HostDevice, but a kernel is what NVRTC makes of it for a compute capability."""

    def prepare(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            library_of(operation, self.capability)

    def run(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self._count += 1
            self.launch(launch, self._count % 2 if self.order == 2 else self.order)

    def launch(self, launch: Launch, order: int) -> None:
        """Run one kernel, its threads forwards (order 0) or backwards."""
        operation = launch.operation
        library = library_of(operation, self.capability)
        declared = ctypes.c_uint.in_dll(library, "shared_bytes").value
        at_most = ctypes.c_uint.in_dll(library, "threads_at_most").value
        shared = -(-declared // 16) * 16 + launch.shared if launch.shared else declared
        assert declared <= 48 << 10, f"{operation} declares {declared} bytes of shared memory"
        assert shared <= SHARED_KIB[self.capability] << 10, f"{operation}: {shared} bytes of shared memory"
        assert operation.threads <= at_most, f"{operation}: {operation.threads} threads of {at_most}"
        grid, block = (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(operation.threads, 1, 1)
        arguments = ctypes.create_string_buffer(launch.arguments, len(launch.arguments))
        self._runtime.host_launch(
            library[f"quantkit_{operation.name}"], operation.name.encode(), grid, block, ctypes.c_uint64(shared),
            arguments, order,
        )  # fmt: skip

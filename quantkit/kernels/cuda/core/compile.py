"""Compiles sources to machine code by NVRTC, kept on disk by a hash of all sources, options and the compiler's version.

For a GPU newer than the compiler, that is machine code for the newest supported GPU of its generation, or
PTX, which the driver compiles.

CuPy's own RawModule is no way here: it flushes denormals (-ftz=true), repeats options, and does not see that an
included file has changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.errors import ResourceError
from quantkit.kernels.cache_folder import cache_folder
from quantkit.kernels.cuda.core.generated import headers
from quantkit.kernels.cuda.core.kernel import SOURCES, Kernel, source
from quantkit.kernels.first_run import compilation

#: Architectures of systems on a chip (Jetson, Drive), whose machine code runs nowhere else.
_ON_CHIP = frozenset({53, 62, 72, 87, 101, 110})


def preamble(kernel: Kernel) -> str:
    """Return the source text of a kernel's module: its macros, then its file."""
    lines = [f"#define {name} {value}" for name, value in kernel.defines]
    return "\n".join([*lines, source(kernel.file)])


def target_of(capability: int, targets: Sequence[int]) -> str:
    """Return the target to compile for on a GPU: sm_N, machine code, or compute_N, PTX; targets: the compiler's.

    Machine code runs on GPUs of the same major version and the same or a later minor one.

    Raises:
        ResourceError: the compiler has no target as old as the GPU.
    """
    if capability in targets:
        return f"sm_{capability}"
    supported = [n for n in targets if n < capability and n not in _ON_CHIP]
    if not supported:
        raise ResourceError(
            f"NVRTC {_version()} does not support a GPU of compute capability {capability // 10}.{capability % 10}",
            "QK-E411",
        )
    same_major = max(supported) // 10 == capability // 10 and capability not in _ON_CHIP
    return f"{'sm' if same_major else 'compute'}_{max(supported)}"


@cache
def _target(capability: int) -> str:
    return target_of(capability, _nvrtc().getSupportedArchs())


def compile_options(target: int | str) -> tuple[str, ...]:
    """Return NVRTC's options for kernels: no contraction of a product and a sum, so that results can be compared.

    target: a compute capability, or a result of ``target_of``.
    """
    return (
        f"-I{SOURCES}",
        "--std=c++17",
        "--fmad=false",
        # Without it, a lambda in a kernel is host code.
        "--device-as-default-execution-space",
        f"-arch={target if isinstance(target, str) else f'sm_{target}'}",
    )


@cache
def sources_hash() -> str:
    """Return a hash of all CUDA sources, the generated ones included."""
    files = sorted(SOURCES.rglob("*.cu*"))
    digest = hashlib.sha256(str(headers()).encode())
    for file in files:
        digest.update(file.relative_to(SOURCES).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def create_program(nvrtc: Any, kernel: Kernel) -> Any:
    """Return NVRTC's handle of a kernel's module, with the generated headers."""
    names, texts = zip(*((name.encode(), text.encode()) for name, text in headers().items()), strict=True)
    return nvrtc.createProgram(preamble(kernel), kernel.file, texts, names)


def compile_module(kernel: Kernel, target: int | str, *options: str) -> tuple[bytes, str]:
    """Compile a kernel's module to a cubin, or PTX; return it and the compiler's report. ``options``: further options.

    Raises:
        RuntimeError: the source does not compile, which is a bug of quantkit or the compiler.
    """
    nvrtc = _nvrtc()
    program = create_program(nvrtc, kernel)
    try:
        nvrtc.compileProgram(program, (*compile_options(target), *options))
        code = nvrtc.getPTX(program) if str(target).startswith("compute") else nvrtc.getCUBIN(program)
        # CuPy drops the last byte: in a cubin the end of a table whose entries end with zeros, in PTX the final NUL.
        return bytes(code) + b"\0", str(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as e:
        raise RuntimeError(f"{kernel} does not compile: {e}\n{nvrtc.getProgramLog(program)}") from e
    finally:
        nvrtc.destroyProgram(program)


def machine_code(kernel: Kernel, capability: int) -> bytes:
    """Return the machine code or PTX of a kernel's module, compiled unless it is on disk."""
    target = _target(capability)
    key = f"{_version()} {compile_options(target)[1:]} {preamble(kernel)}"
    suffix = "ptx" if target.startswith("compute") else "cubin"
    path = cache_folder("cuda", sources_hash()[:16]) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.{suffix}"
    try:
        return path.read_bytes()
    except OSError:
        with compilation():
            code = compile_module(kernel, target)[0]
    _keep(path, code)
    return code


@cache
def _version() -> str:
    return ".".join(map(str, _nvrtc().getVersion()))


def _nvrtc() -> Any:
    from cupy.cuda import nvrtc

    return nvrtc


def _keep(path: Path, code: bytes) -> None:
    """Write a file whole or not at all; where the folder is not writable, kernels are compiled each time."""
    part = path.with_suffix(f".{os.getpid()}-{id(code)}")
    try:
        part.write_bytes(code)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)

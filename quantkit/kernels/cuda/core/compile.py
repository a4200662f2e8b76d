"""Compiles sources to machine code by NVRTC, kept on disk by a hash of all sources, options and the compiler's version.

CuPy's own RawModule is no way here: it flushes denormals (-ftz=true), repeats options, and does not see that an
included file has changed.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.kernels.cache_folder import cache_folder
from quantkit.kernels.cuda.core.generated import headers
from quantkit.kernels.cuda.core.kernel import SOURCES, Kernel, source
from quantkit.kernels.first_run import compiling


def preamble(kernel: Kernel) -> str:
    """Return the source text of a kernel's module: its macros, then its file."""
    lines = [f"#define {name} {value}" for name, value in kernel.defines]
    return "\n".join([*lines, source(kernel.file)])


def compile_options(capability: int) -> tuple[str, ...]:
    """Return NVRTC's options for kernels: no contraction of a product and a sum, so that results can be compared."""
    return (
        f"-I{SOURCES}",
        "--std=c++17",
        "--fmad=false",
        # Otherwise a lambda in a kernel belongs to the host.
        "--device-as-default-execution-space",
        f"-arch=sm_{capability}",
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
    """Return NVRTC's handle of a kernel's module, the generated headers at hand."""
    names, texts = zip(*((name.encode(), text.encode()) for name, text in headers().items()), strict=True)
    return nvrtc.createProgram(preamble(kernel), kernel.file, texts, names)


def compile_module(kernel: Kernel, capability: int, *more: str) -> tuple[bytes, str]:
    """Compile a kernel's module to a cubin; return it and the compiler's report. ``more``: further options.

    Raises:
        RuntimeError: the source does not compile, which is a bug of ours or of the compiler.
    """
    nvrtc = _nvrtc()
    program = create_program(nvrtc, kernel)
    try:
        nvrtc.compileProgram(program, (*compile_options(capability), *more))
        # CuPy drops the last byte, the end of a table whose entries end with zeros.
        return bytes(nvrtc.getCUBIN(program)) + b"\0", str(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as e:
        raise RuntimeError(f"{kernel} does not compile: {e}\n{nvrtc.getProgramLog(program)}") from e
    finally:
        nvrtc.destroyProgram(program)


def cubin(kernel: Kernel, capability: int) -> bytes:
    """Return the machine code of a kernel's module, compiled when it is not on disk yet."""
    version = ".".join(map(str, _nvrtc().getVersion()))
    key = f"{version} {compile_options(capability)[1:]} {preamble(kernel)}"
    path = cache_folder("cuda", sources_hash()[:16]) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        with compiling():
            code = compile_module(kernel, capability)[0]
    _keep(path, code)
    return code


def _nvrtc() -> Any:
    from cupy.cuda import nvrtc

    return nvrtc


def _keep(path: Path, code: bytes) -> None:
    """Write a file, whole or not at all; where nothing can be written it is compiled anew each time."""
    part = path.with_suffix(f".{os.getpid()}-{id(code)}")
    try:
        part.write_bytes(code)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)

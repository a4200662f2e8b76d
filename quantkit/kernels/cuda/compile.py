"""Sources to machine code by NVRTC, kept on disk by a hash of all sources, options and the compiler's version.

CuPy's own RawModule is no way here: it flushes denormals (-ftz=true), repeats options, and does not see that an
included file has changed.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.kernels.cuda.operation import SOURCES, Operation, source


def preamble(operation: Operation) -> str:
    """Return the source text of an operation's module: its macros, then its file."""
    lines = [f"#define {name} {value}" for name, value in operation.defines]
    return "\n".join([*lines, source(operation.file)])


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
    """Return a hash of all CUDA sources."""
    files = sorted(SOURCES.rglob("*.cu*"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.relative_to(SOURCES).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def compile_module(operation: Operation, capability: int, *more: str) -> tuple[bytes, str]:
    """Compile an operation's module to a cubin; return it and the compiler's report. ``more``: further options.

    Raises:
        RuntimeError: the source does not compile, which is a bug of ours or of the compiler.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(preamble(operation), operation.file, (), ())
    try:
        nvrtc.compileProgram(program, (*compile_options(capability), *more))
        # CuPy leaves out the last byte, the end of a table whose entries end with zeros.
        return bytes(nvrtc.getCUBIN(program)) + b"\0", str(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as e:
        raise RuntimeError(f"{operation} does not compile: {e}\n{nvrtc.getProgramLog(program)}") from e
    finally:
        nvrtc.destroyProgram(program)


def cubin(operation: Operation, capability: int) -> bytes:
    """Return the machine code of an operation's module, compiled when it is not on disk yet."""
    version = ".".join(map(str, _nvrtc().getVersion()))
    key = f"{sources_hash()} {version} {compile_options(capability)[1:]} {preamble(operation)}"
    path = _directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = compile_module(operation, capability)[0]
    _keep(path, code)
    return code


def _nvrtc() -> Any:
    from cupy.cuda import nvrtc

    return nvrtc


def _directory() -> Path:
    """Return where machine code is kept ($QUANTKIT_CACHE, else the user's cache)."""
    base = os.environ.get("QUANTKIT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quantkit"
    )
    return Path(base) / "cuda"


def _keep(path: Path, code: bytes) -> None:
    """Write a file, whole or not at all; where nothing can be written it is compiled anew each time."""
    part = path.with_suffix(f".{os.getpid()}-{id(code)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(code)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)

"""How kernels are compiled: lazily, without the GIL, into a cache named by what they were made of.

numba's own cache does not notice when a helper in another file changes, and then runs stale code. So the cache
directory carries a hash of every kernel source and of the compiler's versions: any change means a new directory.
fastmath stays off and LLVM does not contract a*b+c by itself, so f32 arithmetic is what the source says.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
from numba.core import config

F = TypeVar("F", bound=Callable[..., Any])

_ROOT = Path(__file__).parent.parent
_STALE_SECONDS = 60 * 86400


def source_hash() -> str:
    """Return a hash of all kernel sources and tables, CUDA's left out, and of the numba and llvmlite versions."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    sources = [*_ROOT.glob("*.py"), *_ROOT.glob("*.npz"), *(_ROOT / "cpu").rglob("*.py")]
    for path in sorted(sources):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    """Return a writable directory for compiled kernels ($QUANTKIT_CACHE, else the user's cache)."""
    base = os.environ.get("QUANTKIT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quantkit"
    )
    path = Path(base) / "kernels" / source_hash()
    try:
        path.mkdir(parents=True, exist_ok=True)
        os.utime(path)
        _remove_stale(path.parent)
    except OSError:
        pass
    if not os.access(path, os.W_OK):
        # Read-only homes (containers, CI): compile anew into a private directory rather than fail.
        path = Path(tempfile.gettempdir()) / f"quantkit-kernels-{os.getuid()}-{source_hash()}"
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def _remove_stale(parent: Path) -> None:
    """Drop cache directories of sources that nobody has run for two months."""
    for entry in parent.iterdir():
        if entry.is_dir() and time.time() - entry.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(entry, ignore_errors=True)


_CACHE = str(cache_directory())


def _njit(function: F, **options: Any) -> F:
    before, config.CACHE_DIR = config.CACHE_DIR, _CACHE
    try:
        return numba.njit(error_model="numpy", boundscheck=False, **options)(function)  # type: ignore[no-any-return]
    finally:
        config.CACHE_DIR = before


def kernel(function: F) -> F:
    """Compile an entry point: called from Python, cached on disk, runs without the GIL."""
    return _njit(function, nogil=True, cache=True)


def inline(function: F) -> F:
    """Compile a helper that LLVM must inline into every kernel that calls it."""
    return _njit(function, nogil=True, forceinline=True)


def helper(function: F) -> F:
    """Compile a helper that is called, not inlined: large bodies used from several places."""
    return _njit(function, nogil=True)


def specialize(function: Callable[..., Any], suffix: str, compiled: Callable[..., Any] = inline, **bound: Any) -> Any:
    """Return a copy of a plain function with other globals, named ``function_suffix``; inlined, or a ``helper``."""
    made = types.FunctionType(
        function.__code__, {**function.__globals__, **bound}, f"{function.__name__}_{suffix}", function.__defaults__
    )
    made.__qualname__ = made.__name__
    return compiled(made)

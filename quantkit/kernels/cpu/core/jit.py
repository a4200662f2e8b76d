"""Compilation of kernels: lazy, without the GIL, into a cache named after their sources.

numba's own cache misses changes of a helper in another file and runs stale code. So the name of the cache directory
contains a hash of all kernel sources and compiler versions: any change means a new directory. fastmath is off and LLVM
does not contract a*b+c, so f32 arithmetic is exactly that of the source.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
from numba.core import config
from numba.core.registry import cpu_target
from numba.core.types.misc import unliteral

from quantkit.kernels.cache_folder import cache_folder
from quantkit.kernels.cpu.core.disk_cache import KernelCache
from quantkit.kernels.cpu.core.library import EntryCompiler, HelperCompiler
from quantkit.kernels.cpu.core.specialize import rebind

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_ROOT = Path(__file__).parent.parent.parent
#: Protects numba's cache setting, which numba reads twice per compilation; if it were unset in between, numba would
#: cache beside the caller.
_SETTING = threading.RLock()


@cache
def source_hash() -> str:
    """Return a hash of all kernel sources and tables except CUDA's, and of the numba and llvmlite versions."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    sources = [*_ROOT.glob("*.py"), *_ROOT.glob("*.npz"), *(_ROOT / "cpu").rglob("*.py")]
    for path in sorted(sources):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """Return a name for the target CPU: machines of different kinds may share a home directory, but not an index "
    "file."""
    name, features = cpu_target.target_context.codegen().magic_tuple()[1:]
    return f"{name}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


@cache
def kernel_folder() -> Path:
    """Return the cache folder for these sources and this CPU."""
    return cache_folder("kernels", source_hash(), _cpu())


def to_cache(make: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call ``make`` with numba's disk cache in quantkit's folder, one thread at a time."""
    with _SETTING:
        before, config.CACHE_DIR = config.CACHE_DIR, str(kernel_folder())
        try:
            return make(*arguments, **options)
        finally:
            config.CACHE_DIR = before


def _njit(function: F, compiler: type[EntryCompiler], **options: Any) -> F:
    options |= {"error_model": "numpy", "boundscheck": False, "nogil": True, "pipeline_class": compiler}
    dispatcher = numba.njit(**options)(function)
    dispatcher.get_call_template = partial(_any_number, dispatcher.get_call_template)
    return dispatcher  # type: ignore[no-any-return]


def _any_number(template: Callable[..., Any], args: Any, kws: Any) -> Any:
    """Type a call without constant values: numba would compile a version per value, and LLVM propagates constants "
    "anyway."""
    return template([unliteral(a) for a in args], {name: unliteral(a) for name, a in kws.items()})


def _cached_njit(function: F, compiler: type[EntryCompiler]) -> F:
    dispatcher = _njit(function, compiler)
    dispatcher._cache = KernelCache(function)  # type: ignore[attr-defined]
    return dispatcher


def _no_entry(name: str, args: Any, kws: Any) -> Any:
    raise TypeError(f"{name} is an entry point, whose code other kernels cannot call: make it a helper")


def kernel(function: F) -> F:
    """Compile an entry point: called from Python only, cached on disk, runs without the GIL."""
    dispatcher = to_cache(_cached_njit, function, EntryCompiler)
    dispatcher.get_call_template = partial(_no_entry, function.__name__)
    return dispatcher  # type: ignore[no-any-return]


def inline(function: F) -> F:
    """Compile a helper that LLVM must inline into every kernel that calls it."""
    return _njit(function, HelperCompiler, forceinline=True)


def helper(function: F) -> F:
    """Compile a helper that is called, not inlined: large bodies with several callers."""
    return _njit(function, HelperCompiler)


def specialize(function: Callable[..., Any], suffix: str, compiled: Any = inline, /, **bound: Any) -> Any:
    """Compile a function with other globals (``rebind``): inlined, or as a ``helper`` or ``kernel``.

    A compiled function is replaced by its plain source function.
    """
    return compiled(rebind(getattr(function, "py_func", function), suffix, **bound))

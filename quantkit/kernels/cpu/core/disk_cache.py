"""numba's cache of compiled functions, which loads one without what only compilation needs.

Before it looks for a function on disk, numba imports and registers everything that it can compile, with scipy's linear
algebra: a second of each process. ``CompilerBase`` does so as well, before it compiles.
"""

from __future__ import annotations

from typing import Any

from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys


class KernelCache(FunctionCache):
    """The functions of one Python function, by signature."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function of a signature, or None if it is not on disk."""
        rtsys.initialize(target_context)  # symbols that its code may refer to
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


class Callback(CFunc):
    """A C callback that is loaded from a KernelCache, or compiled into it."""

    def enable_caching(self) -> None:
        self._cache = KernelCache(self._pyfunc)  # type: ignore[attr-defined]

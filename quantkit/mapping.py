"""Mapped files that are truncated while being read: an error instead of a crash.

Reading a page of a mapping whose file has become shorter raises SIGBUS, which no ``except`` catches: the process ends
silently. For quantkit's own mappings, a handler maps zeros in place of the missing pages, so that the reader continues;
``check_unchanged``, called before and after, then detects the truncation.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import signal
import struct
import sys
import threading
import weakref
from functools import cache

import numpy as np

#: Begin and end of each mapping, by number: an address may be mapped again before its previous owner is finished.
_mappings: dict[int, tuple[int, int]] = {}
_numbers = itertools.count()
_SIGINFO, _FIXED = 4, 0x10
#: Offset of the address in siginfo_t, on 64-bit Linux.
_ADDRESS_AT = 16
#: struct sigaction of glibc and musl: handler, a mask of 128 bytes, flags, restorer.
_ACTION = struct.Struct("P128xi4xP")


def map_descriptor(fd: int, nbytes: int) -> memoryview:
    """Return a file mapped read-only. Raises OSError, ValueError."""
    mapping = mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ)
    if guard_mappings():
        begin, number = np.frombuffer(mapping, np.uint8).ctypes.data, next(_numbers)
        _mappings[number] = (begin, begin + nbytes)
        weakref.finalize(mapping, _mappings.pop, number, None).atexit = False
    return memoryview(mapping)


def guard_mappings() -> bool:
    """Install the handler unless it is installed; libraries such as Ray and faulthandler replace it.

    Returns False on systems without it: not Linux, or 32 bits.
    """
    guard = _guard()
    return guard is not None and guard.install()


@cache
def _guard() -> _Guard | None:
    return _Guard() if sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8 else None


class _Guard:
    """The handler of SIGBUS, which must live as long as the process."""

    def __init__(self) -> None:
        self._libc = libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._handle)
        self._address = ctypes.cast(self._handler, ctypes.c_void_p).value
        self._previous: list[bytes] = []
        self._lock = threading.Lock()

    def install(self) -> bool:
        """Make this the handler of SIGBUS and keep those it replaces."""
        current = ctypes.create_string_buffer(_ACTION.size)
        with self._lock:
            if self._libc.sigaction(int(signal.SIGBUS), None, current) != 0:
                return False
            if _ACTION.unpack(current.raw)[0] == self._address:
                return True
            self._previous.append(current.raw)
            action = _ACTION.pack(self._address, _SIGINFO, 0)
            return bool(self._libc.sigaction(int(signal.SIGBUS), action, None) == 0)

    def _handle(self, number: int, info: int, context: int) -> None:
        address = ctypes.c_size_t.from_address(info + _ADDRESS_AT).value
        page = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = next((end for begin, end in list(_mappings.values()) if begin <= address < end), None)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        if end is None or self._libc.mmap(page, end - page, mmap.PROT_READ, flags, -1, 0) != page:
            # The access is repeated under the previous handler, which may restore this one in turn: each is tried once,
            # the system's default last.
            previous = self._previous.pop() if self._previous else bytes(_ACTION.size)
            self._libc.sigaction(int(signal.SIGBUS), previous, None)

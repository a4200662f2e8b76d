"""Locks on files that a process writes, which end with the process."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def take_lock(path: Path) -> int:
    """Lock a file, created if it is missing, until ``drop_lock`` or the end of the process; return its descriptor.

    Raises BlockingIOError while another process holds it, OSError if it cannot be created.
    """
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise
        except OSError:  # a file system without locks
            return lock
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        os.close(lock)  # its run has ended meanwhile and removed it


def drop_lock(path: Path, lock: int) -> None:
    """Remove a file that is locked, and end the lock."""
    if os.fstat(lock).st_size == 0:  # otherwise it is a user's file of this name
        path.unlink(missing_ok=True)
    os.close(lock)

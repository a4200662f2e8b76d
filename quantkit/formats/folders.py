"""Folders that other users may write to: links in them are not followed.

Every name is looked up in an open folder, one part at a time, so that it cannot be replaced by a link in the meantime.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def open_folder(root: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of the folder that ``names`` lead to from ``root``, which itself may be a link.

    ``make``: create missing folders. Raises OSError, also for links.
    """
    fd = os.open(root, _FOLDER)
    try:
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=fd)
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def open_file(name: str, flags: int, folder: int) -> int:
    """Return a descriptor of a regular file in an open folder. Raises OSError, also for links and pipes."""
    fd = os.open(name, flags | _FILE, 0o666, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "not a regular file", name)
    return fd


def regular_files(folder: int) -> dict[str, os.stat_result]:
    """Return the regular files of an open folder, sorted by name."""
    files = {}
    for name in sorted(os.listdir(folder)):
        with suppress(OSError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                files[name] = status
    return files

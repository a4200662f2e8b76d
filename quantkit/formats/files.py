"""Local inputs, held open: all reads are from the file that was opened first.

A ``File`` is a ``Path``, like a ``URL``, so every function that reads files accepts it. If the file is replaced by
another of its name, the opened one is still read. If it is written to or truncated, ``check_unchanged``, always called
at the end, raises an error, by its size and times.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PosixPath
from typing import IO, Any, NamedTuple

from quantkit.errors import FormatError
from quantkit.formats.remote import URL

#: Descriptors kept open at once, the last ones used: there may be thousands of shards. A file that is opened again is
#: compared with before.
_OPEN = 128
_REPLACED = "the file was replaced or changed while it was being read; start over"


class Stamp(NamedTuple):
    """The identity of a file and of its contents: inode, size and times."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def from_status(cls, status: os.stat_result) -> Stamp:
        """Return the stamp of a file's status."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class _Descriptor:
    """A descriptor that closes with its last user."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.fd)


_recent: deque[weakref.ref[File]] = deque()
_lock = threading.Lock()


class File(PosixPath):
    """A held input, created by ``File.hold``; paths derived from it are not held. Another process opens it again."""

    _status: os.stat_result | None = None
    _descriptor: _Descriptor | None = None
    _is_held = False

    @classmethod
    def hold(cls, path: str | os.PathLike[str]) -> File:
        """Open a file for reading its present contents only. Raises OSError."""
        file = cls(os.fspath(path))
        file._is_held = True
        file.descriptor()
        return file

    def __reduce__(self) -> Any:
        return _reopen_file if self._is_held else Path, (os.fspath(self),)

    @property
    def is_held(self) -> bool:
        return self._is_held

    def absolute(self) -> File:
        """Return the whole path, held as this one."""
        path = File(os.path.abspath(self))
        path._is_held, path._status = self._is_held, self._status
        return path

    def descriptor(self) -> _Descriptor:
        """Return the open descriptor. Raises FormatError if it had to be opened again and another file has its name."""
        if (descriptor := self._descriptor) is not None:
            return descriptor
        descriptor = _Descriptor(os.fspath(self))
        status = os.fstat(descriptor.fd)
        if self._status is None:
            self._status = status
        elif Stamp.from_status(status)[:3] != Stamp.from_status(self._status)[:3]:
            raise FormatError(f"{self}: {_REPLACED}", "QK-E109")
        self._descriptor = descriptor
        with _lock:
            _recent.append(weakref.ref(self))
            while len(_recent) > _OPEN:
                if (first := _recent.popleft()()) is not None:
                    first._descriptor = None
        return descriptor

    @property
    def stamp(self) -> Stamp:
        """The stamp at the first access. Raises OSError."""
        if self._status is None:
            self.descriptor()
        assert self._status is not None
        return Stamp.from_status(self._status)

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:  # type: ignore[override]
        """Open it like ``Path.open``. Also raises FormatError if it is held and another file has its name."""
        file: IO[Any] = super().open(mode, *args, **kwargs)
        if (
            self._is_held
            and self._status
            and Stamp.from_status(os.fstat(file.fileno()))[:3] != Stamp.from_status(self._status)[:3]
        ):
            file.close()
            raise FormatError(f"{self}: {_REPLACED}", "QK-E109")
        return file

    def check(self) -> None:
        """Raise FormatError if the file was written to or truncated since the first access. Raises OSError."""
        # Held until its status is read: another thread may evict the file, and its number would become another's.
        descriptor = self.descriptor()
        before, now = self._status, os.fstat(descriptor.fd)
        if before is None or Stamp.from_status(before) == Stamp.from_status(now):
            return
        if Stamp.from_status(before)[:3] == Stamp.from_status(now)[:3] and self._has_moved(before, now):
            return
        raise FormatError(
            f"{self}: the file changed while it was being read ({_difference(before, now)}); start over", "QK-E109"
        )

    def _has_moved(self, before: os.stat_result, now: os.stat_result) -> bool:
        """Return whether only names or permissions changed: linking or replacing a file leaves its bytes."""
        if any(getattr(before, name) != getattr(now, name) for name in ("st_nlink", "st_mode", "st_uid", "st_gid")):
            return True
        try:
            return not os.path.samestat(os.stat(self), now)
        except OSError:
            return True


def _reopen_file(path: str) -> File:
    file = File(path)
    file._is_held = True
    return file


def _difference(before: os.stat_result, now: os.stat_result) -> str:
    if before.st_size != now.st_size:
        return f"{now.st_size} bytes, not {before.st_size}"
    return "its modification time differs"


@contextmanager
def open_input(path: Path) -> Iterator[int]:
    """Yield a descriptor for pread; for a held file, of that same file. Raises FormatError, OSError."""
    if isinstance(path, File) and path.is_held:
        descriptor = path.descriptor()
        yield descriptor.fd
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def check_unchanged(paths: Iterable[Path]) -> None:
    """Raise FormatError if an input has changed since it was first read. Also raises OSError."""
    for path in paths:
        if isinstance(path, (URL, File)):
            path.check()


def hold(path: Path) -> Path:
    """Return an input for reading; local files are held. Raises OSError."""
    if isinstance(path, URL) or isinstance(path, File) and path.is_held:
        return path
    try:
        return File.hold(path)
    except ValueError as e:  # a name with a null byte
        raise OSError(errno.EINVAL, str(e), str(path)) from None


def stamp_of(path: Path) -> list[int | str]:
    """Return the stamp of an input for JSON; for a URL, its size and tag. Raises OSError."""
    if isinstance(path, URL):
        return [path.facts.size, path.facts.tag]
    if isinstance(path, File) and path.is_held:
        return list(path.stamp)
    return list(Stamp.from_status(os.stat(path)))

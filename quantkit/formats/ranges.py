"""Byte ranges of files: read, written in place and synced.

Tensors are read with pread into per-thread buffers: mapped pages would count as this process's memory, and a file that
shrinks under a mapping kills it. A held input (``files``) is read from the file opened first; others are opened for
each call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.files import open_input
from quantkit.formats.remote import URL
from quantkit.formats.remote.reader import read_into

U8 = npt.NDArray[np.uint8]


class Buffers:
    """Reusable buffers of one thread, by name."""

    def __init__(self) -> None:
        self._buffers: dict[str, U8] = {}

    def get(self, name: str, nbytes: int) -> U8:
        """Return the first ``nbytes`` of the buffer ``name``, uint8; any dtype may view them."""
        have = self._buffers.get(name)
        if have is None or have.size < nbytes:
            have = self._buffers[name] = np.empty(-(-nbytes // 64) * 64, np.uint8)
        return have[:nbytes]


def read_range(path: Path, out: U8, offset: int, readahead: int = 0, within: tuple[int, int] | None = None) -> None:
    """Fill ``out`` from byte ``offset`` on, and request the next ``readahead`` bytes from the kernel or the store.

    ``within``: begin and end of the tensor, which limit requests to a store. Raises FormatError if the file ends early,
    OSError if it cannot be read.
    """
    if isinstance(path, URL):
        read_into(path, out, offset, readahead, within)
        return
    try:
        with open_input(path) as fd:
            n_read = 0
            while n_read < out.size:
                n = os.preadv(fd, [out.data[n_read:]], offset + n_read)
                if n == 0:
                    raise FormatError(
                        f"{path}: ends at byte {offset + n_read}, within tensor data: truncated", "QK-E103"
                    )
                n_read += n
            if readahead and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, offset + n_read, readahead, os.POSIX_FADV_WILLNEED)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None


def read_strided(path: Path, out: U8, offset: int, width: int, stride: int) -> None:
    """Fill ``out`` with pieces of ``width`` bytes, which begin every ``stride`` bytes; see ``read_range``."""
    if width == stride:
        read_range(path, out, offset)
        return
    if isinstance(path, URL):
        for number, start in enumerate(range(0, out.size, width)):
            read_into(path, out[start : start + width], offset + number * stride)
        return
    try:
        with open_input(path) as fd:
            view = out.data
            for number, start in enumerate(range(0, len(view), width)):
                piece, where = view[start : start + width], offset + number * stride
                while (n := os.preadv(fd, [piece], where)) < len(piece):
                    if n == 0:
                        raise FormatError(f"{path}: ends at byte {where}, within tensor data: truncated", "QK-E103")
                    piece, where = piece[n:], where + n
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None


def write_range(path: Path, data: U8, offset: int, *, make: bool = False) -> None:
    """Write ``data`` at byte ``offset`` of an existing file, or with ``make`` of a new one. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | (os.O_CREAT if make else 0), 0o666)
    try:
        write_open(fd, path, data, offset)
    finally:
        os.close(fd)


def write_open(fd: int, path: Path, data: U8, offset: int) -> None:
    """Write ``data`` at byte ``offset`` of an open file; ``path`` names it in errors. Raises OSError."""
    view, position = data.data, 0
    try:
        while position < len(view):
            position += os.pwrite(fd, view[position:], offset + position)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None


def reserve(path: Path, nbytes: int) -> None:
    """Extend a file to ``nbytes`` with its disk space allocated. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # a file system that does not support it
                raise
        os.ftruncate(fd, nbytes)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None
    finally:
        os.close(fd)


def copy_range(source: Path, target: Path, source_offset: int, target_offset: int, nbytes: int) -> bool:
    """Let the kernel copy bytes from file to file (copy_file_range); False if it cannot: the target is then undefined.

    Raises FormatError if the source ends early, OSError from the disk.
    """
    if isinstance(source, URL):
        return False
    fd = os.open(target, os.O_WRONLY)
    try:
        return copy_open(source, fd, target, source_offset, target_offset, nbytes)
    finally:
        os.close(fd)


def copy_open(source: Path, fd: int, target: Path, source_offset: int, target_offset: int, nbytes: int) -> bool:
    """Do ``copy_range`` into an open file; ``target`` names it in errors."""
    if isinstance(source, URL) or not hasattr(os, "copy_file_range"):
        return False
    try:
        with open_input(source) as read_fd:
            position = 0
            while position < nbytes:
                n = os.copy_file_range(
                    read_fd, fd, nbytes - position, source_offset + position, target_offset + position
                )
                if n == 0:
                    end = source_offset + position
                    raise FormatError(f"{source}: ends at byte {end}, within tensor data: truncated", "QK-E103")
                position += n
        start_writeback(fd, target_offset, nbytes)
    except OSError as e:
        # Two file systems, or one without the call: the caller has the bytes and can write them.
        if e.errno in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return False
        raise OSError(e.errno, e.strerror, str(target)) from None
    return True


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the kernel write a range of an open file to the disk, without waiting; do nothing outside Linux.

    The sync at the end then waits for the last ranges only.
    """
    call = _sync_file_range()
    if call is not None:
        write = 2  # SYNC_FILE_RANGE_WRITE; errors are reported by the sync at the end
        call(fd, ctypes.c_longlong(offset), ctypes.c_longlong(nbytes), ctypes.c_uint(write))


@cache
def _sync_file_range() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


def both_ends(path: Path, ranges: Iterable[tuple[int, int]], sample: int) -> Iterator[bytes]:
    """Yield for each range of a file, an offset and a length, ``sample`` bytes at both of its ends.

    For an object of a store, yields its identity, without a request.
    """
    if isinstance(path, URL):
        yield from (f"{path.facts.size} {path.facts.tag}".encode() for _ in ranges)
        return
    with open_input(path) as fd:
        for offset, nbytes in ranges:
            ends = (offset, offset + max(0, nbytes - sample))
            yield b"".join(os.pread(fd, min(sample, nbytes), start) for start in ends)


def crc32_range(path: Path, offset: int, nbytes: int) -> int:
    """Return the CRC-32 of a range of a file, or -1 if the file ends before it."""
    crc = 0
    with open(path, "rb") as file:
        file.seek(offset)
        while nbytes:
            data = file.read(min(nbytes, 1 << 22))
            if not data:
                return -1
            crc = zlib.crc32(data, crc)
            nbytes -= len(data)
    return crc


def punch(path: Path, offset: int, nbytes: int) -> None:
    """Deallocate a range of a file, which then reads as zeros; do nothing where fallocate is missing."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return
    fd = os.open(path, os.O_WRONLY)
    try:
        keep_size, punch_hole = 1, 2
        fallocate(fd, keep_size | punch_hole, ctypes.c_longlong(offset), ctypes.c_longlong(nbytes))
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, to disk (fsync). Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

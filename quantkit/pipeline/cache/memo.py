"""Digests of source tensors from earlier runs, so that cache hits do not read the source.

Each source has a folder, in which each run writes its own file. A line is an identity (``keys.identity``), a digest,
and the CRC-32 of both; damaged lines are ignored.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path

from quantkit.formats.folders import open_file, open_folder, regular_files

_LINE = re.compile(rb"^([0-9a-f]{64}) ([0-9a-f]{64}) ([0-9a-f]{8})$", re.M)
#: Above this number files are combined into one; files written within the last hour are not removed.
_MAX_FILES, _HOUR = 8, 3600
#: Maximum bytes read of a file: a million lines.
_MAX_BYTES = 138 << 20


class Memo:
    """Known digests of one source, in the cache's folder ``names``; ``file_name`` is the run's own file."""

    def __init__(self, root: Path, names: tuple[str, ...], file_name: str) -> None:
        self._open, self._file_name = partial(open_folder, root, *names), file_name
        self._digests: dict[str, str] = {}
        self._files: dict[str, os.stat_result] = {}
        with suppress(OSError), self._open() as folder:
            self._files = regular_files(folder)
            for name in self._files:
                self._digests |= _read(folder, name)
            os.utime(folder)  # records of sources in use are kept

    def get(self, identity: str | None) -> str | None:
        """Return the digest of an identity, None if it is unknown."""
        return None if identity is None else self._digests.get(identity)

    def add(self, identity: str, digest: str) -> None:
        """Record a digest. Raises OSError."""
        if self._digests.get(identity) != digest:
            self._digests[identity] = digest
            self._write([(identity, digest)], os.O_APPEND)

    def forget(self) -> None:
        """Forget all digests of this source."""
        self._digests.clear()
        with suppress(OSError), self._open() as folder:
            for name in regular_files(folder):
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)

    def tidy(self) -> None:
        """Merge many files into one. Raises OSError."""
        if len(self._files) <= _MAX_FILES:
            return
        self._write(list(self._digests.items()), os.O_TRUNC)
        with self._open() as folder:
            for name, status in self._files.items():
                if name != self._file_name and time.time() - status.st_mtime > _HOUR:
                    os.unlink(name, dir_fd=folder)

    def _write(self, pairs: list[tuple[str, str]], mode: int) -> None:
        texts = (f"{identity} {digest}".encode() for identity, digest in pairs)
        with self._open(make=True) as folder:
            fd = open_file(self._file_name, os.O_WRONLY | os.O_CREAT | mode, folder)
        with open(fd, "wb") as file:
            file.write(b"".join(b"%b %08x\n" % (text, zlib.crc32(text)) for text in texts))


def _read(folder: int, name: str) -> dict[str, str]:
    try:
        with open(open_file(name, os.O_RDONLY, folder), "rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError:
        return {}
    return {a.decode(): b.decode() for a, b, crc in _LINE.findall(data) if int(crc, 16) == zlib.crc32(a + b" " + b)}

"""Digests of sources that were read before, so that a second recipe need not read what it takes from the cache.

Beside the entries, each source has a folder, in it each run a file of its own, to which nobody else writes. A line is
an identity (``keys.identity``), a digest, and the CRC-32 of both; one that is cut or damaged is as good as none.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from contextlib import suppress
from pathlib import Path

_LINE = re.compile(rb"^([0-9a-f]{64}) ([0-9a-f]{64}) ([0-9a-f]{8})$", re.M)
#: More files than these are written as one; none that was written to within an hour is removed.
_FILES, _HOUR = 8, 3600
#: The most that is read of a file: a million lines.
_MOST = 138 << 20


class Memo:
    """What is known of one source; ``name`` is the run's own file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self._own = folder, folder / name
        self._known: dict[str, str] = {}
        self._files = _files_in(folder)
        for path in self._files:
            self._known |= _read(path)
        with suppress(OSError):
            os.utime(folder)  # what is asked for is not forgotten

    def get(self, identity: str | None) -> str | None:
        """Return the digest of what has this identity, if it is known."""
        return None if identity is None else self._known.get(identity)

    def add(self, identity: str, digest: str) -> None:
        """Remember a digest. Raises OSError."""
        if self._known.get(identity) != digest:
            self._known[identity] = digest
            self._write([(identity, digest)], "ab")

    def forget(self) -> None:
        """Remove all that is known of this source."""
        self._known.clear()
        for path in _files_in(self.folder):
            with suppress(OSError):
                path.unlink()

    def tidy(self) -> None:
        """Write many files as one. Raises OSError."""
        if len(self._files) <= _FILES:
            return
        self._write(list(self._known.items()), "wb")
        for path in self._files:
            if path != self._own and time.time() - path.stat().st_mtime > _HOUR:
                path.unlink()

    def _write(self, known: list[tuple[str, str]], mode: str) -> None:
        os.makedirs(self.folder, exist_ok=True)
        texts = (f"{identity} {digest}".encode() for identity, digest in known)
        with open(self._own, mode) as file:
            file.write(b"".join(b"%b %08x\n" % (text, zlib.crc32(text)) for text in texts))


def _files_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    except OSError:
        return []


def _read(path: Path) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST)
    except OSError:
        return {}
    return {a.decode(): b.decode() for a, b, crc in _LINE.findall(data) if int(crc, 16) == zlib.crc32(a + b" " + b)}

"""The folder of a tensor cache, which users, and machines with a common file system, may share.

    cache.json               its size limit
    entries/ab/HOW-FIRST-SOURCE    a tensor's encoded rows (formats/cache_entry.py)
    sources/SOURCE/RUN       digests of what was read (``memo``)
    runs.jsonl               a line for each run that used it
    tmp/                     what is being written

Links in it are not followed, and nothing is locked. A file is complete and synced before it is renamed to its final
name; a reader whose entry is evicted in the meantime encodes instead. Entries with the same name have the same bytes,
so the order of two writers does not matter. The modification time of an entry is that of its last use: the least
recently used are evicted first.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.errors import ResourceError, os_error_code
from quantkit.formats.cache_entry import EntryName, Header, parse_name
from quantkit.formats.folders import open_file, open_folder, regular_files
from quantkit.pipeline.cache.memo import Memo

#: Leftovers in tmp/ are removed after a day, unused digests after a year.
DAY = 86400
_YEAR = 365 * DAY
_KIND = "quantkit tensor cache, 1"
_CONFIG = "cache.json"
_ENTRIES = "entries"
_SOURCES = "sources"
_RUNS = "runs.jsonl"
_TEMPORARY = "tmp"
#: Maximum bytes read of cache.json, and of runs.jsonl, which is cut in half above it.
_MAX_CONFIG, _MAX_RUNS = 1 << 16, 1 << 20
#: Share of the limit that an eviction frees, so that not every entry evicts another.
_EVICTION_MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry in the folder; ``used``: the time of its last use, in seconds."""

    path: Path
    name: EntryName
    nbytes: int
    used: float


class Store:
    """An open cache: see ``open_store``."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.run = f"{int(time.time()):x}-{secrets.token_hex(8)}"
        self._names: dict[str, list[EntryName]] = {}

    # ------------------------------------------------------------ queries

    def entries(self) -> Iterator[StoredEntry]:
        """Yield all entries; other files are ignored."""
        for prefix in (f"{i:02x}" for i in range(256)):
            with suppress(OSError), open_folder(self.folder, _ENTRIES, prefix) as folder:
                for text, status in regular_files(folder).items():
                    if (name := parse_name(text)) is not None:
                        yield StoredEntry(self.path(name), name, status.st_size, status.st_mtime)

    def path(self, name: EntryName) -> Path:
        """Return the path of an entry, whether it exists or not."""
        return self.folder / _ENTRIES / name.settings[:2] / str(name)

    def find(self, encoding: str) -> list[EntryName]:
        """Return the entries with an encoding, as of the first request for its prefix."""
        prefix = encoding[:2]
        if prefix not in self._names:
            names: list[str] = []
            with suppress(OSError), open_folder(self.folder, _ENTRIES, prefix) as folder:
                names = sorted(os.listdir(folder))
            self._names[prefix] = [name for text in names if (name := parse_name(text)) is not None]
        return [name for name in self._names[prefix] if name.settings == encoding]

    def memo(self, fingerprint: str) -> Memo:
        """Return the known digests of a source."""
        return Memo(self.folder, (_SOURCES, fingerprint[:32]), self.run)

    def temporary(self) -> dict[str, os.stat_result]:
        """Return the temporary files of running and killed runs."""
        with suppress(OSError), open_folder(self.folder, _TEMPORARY) as folder:
            return regular_files(folder)
        return {}

    def runs(self) -> list[dict[str, Any]]:
        """Return the notes of earlier runs."""
        runs = []
        for line in _read_head(self.folder, _RUNS, 2 * _MAX_RUNS).split(b"\n"):
            with suppress(ValueError, RecursionError):
                note = json.loads(line)
                if isinstance(note, dict):
                    runs.append(note)
        return runs

    # ------------------------------------------------------------ changes

    def add(
        self, name: EntryName, header: Header, file: Path, ranges: Sequence[tuple[int, int]], records: bytes
    ) -> int:
        """Add ranges (offset, length) of a file as an entry; return its bytes. Raises OSError."""
        with self._new_file(_ENTRIES, name.settings[:2], str(name)) as target, open(file, "rb") as source:
            target.write(header.encode())
            target.flush()
            for offset, nbytes in ranges:
                _copy(source.fileno(), target.fileno(), offset, nbytes)
            target.seek(0, os.SEEK_END)
            target.write(records)
            return target.tell()

    def touch(self, path: Path) -> None:
        """Record the use of an entry; errors are ignored."""
        with suppress(OSError), open_folder(self.folder, _ENTRIES, path.parent.name) as folder:
            os.utime(path.name, dir_fd=folder, follow_symlinks=False)

    def remove(self, path: Path) -> None:
        """Remove an entry. Raises OSError."""
        with open_folder(self.folder, _ENTRIES, path.parent.name) as folder:
            os.unlink(path.name, dir_fd=folder)

    def evict(
        self, limit: int, *, spare: frozenset[Path] | set[Path] = frozenset(), before: float = 0
    ) -> list[StoredEntry]:
        """Remove entries last used before a time, then the least recently used until at most ``limit`` bytes remain."""
        entries = sorted(self.entries(), key=lambda entry: entry.used)
        nbytes, evicted = sum(entry.nbytes for entry in entries), []
        for entry in entries:
            if (nbytes > limit or entry.used < before) and entry.path not in spare:
                with suppress(OSError):
                    self.remove(entry.path)
                    nbytes -= entry.nbytes
                    evicted.append(entry)
        return evicted

    def make_room(self, nbytes: int, spare: set[Path]) -> int:
        """Return the bytes of all entries; evict entries, except ``spare``, if ``nbytes`` more exceed the limit."""
        total = self.nbytes()
        if total + nbytes > self.limit:
            total -= sum(
                entry.nbytes for entry in self.evict(int(self.limit * (1 - _EVICTION_MARGIN)) - nbytes, spare=spare)
            )
        return total

    def nbytes(self) -> int:
        """Return the bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries())

    def clear_temporary(self, age: float = DAY) -> int:
        """Remove temporary files last written ``age`` seconds ago or earlier; return their number."""
        removed = 0
        with suppress(OSError), open_folder(self.folder, _TEMPORARY) as folder:
            for name, status in regular_files(folder).items():
                if time.time() - status.st_mtime > age:
                    with suppress(OSError):
                        os.unlink(name, dir_fd=folder)
                        removed += 1
        return removed

    def forget_sources(self, age: float = _YEAR) -> None:
        """Remove digests of unused sources."""
        with suppress(OSError), open_folder(self.folder, _SOURCES) as folder:
            for name in os.listdir(folder):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > age:
                    shutil.rmtree(name, ignore_errors=True, dir_fd=folder)

    def note(self, entry: dict[str, Any]) -> None:
        """Add a line about a run. Raises OSError."""
        with open_folder(self.folder) as folder:
            fd = open_file(_RUNS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, folder)
        with open(fd, "ab") as file:
            file.write(b"\n" + json.dumps(entry).encode())  # on a new line even if a kill truncated the last one
            long = file.tell() > _MAX_RUNS
        if long:
            lines = _read_head(self.folder, _RUNS, 2 * _MAX_RUNS).splitlines(keepends=True)
            self._write(_RUNS, b"".join(lines[len(lines) // 2 :]))

    def resize(self, limit: int) -> None:
        """Set the size limit. Raises OSError."""
        self.limit = limit
        self._write(_CONFIG, json.dumps({"kind": _KIND, "size": limit}).encode() + b"\n")

    def _write(self, name: str, data: bytes) -> None:
        with self._new_file(name) as file:
            file.write(data)

    @contextmanager
    def _new_file(self, *names: str) -> Iterator[BinaryIO]:
        """Yield a new file that is renamed into the cache when it is complete on the disk."""
        temporary = self.make_temporary()
        with open_folder(self.folder, _TEMPORARY) as folder:
            try:
                with open(open_file(temporary.name, os.O_WRONLY, folder), "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                with open_folder(self.folder, *names[:-1], make=True) as target:
                    os.replace(temporary.name, names[-1], src_dir_fd=folder, dst_dir_fd=target)
            finally:
                with suppress(OSError):
                    os.unlink(temporary.name, dir_fd=folder)

    def make_temporary(self) -> Path:
        """Return a new file in tmp/. Raises OSError."""
        name = f"{self.run}-{secrets.token_hex(4)}"
        with open_folder(self.folder, _TEMPORARY, make=True) as folder:
            os.close(open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder))
        return self.folder / _TEMPORARY / name

    def remove_temporary(self, path: Path) -> None:
        """Remove a file of ``make_temporary`` if it exists."""
        with suppress(OSError), open_folder(self.folder, _TEMPORARY) as folder:
            os.unlink(path.name, dir_fd=folder)


def open_store(folder: Path, *, size: int | None = None, make: bool = True) -> Store:
    """Open a cache; ``make``: create it if missing, in an empty folder. ``size``: set its limit.

    The default limit is a quarter of the free disk space. Raises ResourceError if the folder is not a cache.
    """
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        limit = _read_limit(folder)
        if limit is None and not make:
            raise ResourceError(f"{folder} is not a tensor cache; --cache {folder} creates one", "QK-E401")
        store = Store(folder, 0 if limit is None else limit)
        if limit is None:
            store.resize(shutil.disk_usage(folder).free // 4 if size is None else size)
        elif size is not None and size != limit:
            store.resize(size)
    except OSError as e:
        raise ResourceError(
            f"{e.filename or folder}: {e.strerror or e}: {folder} cannot be used as the tensor cache", os_error_code(e)
        ) from None
    return store


def _read_limit(folder: Path) -> int | None:
    """Return the size limit of a cache, or None if the folder is empty; ResourceError if it is not a cache."""
    names = set(os.listdir(folder))
    if _CONFIG not in names:
        if names - {_TEMPORARY}:
            raise ResourceError(
                f"{folder} is not a tensor cache and contains other files ({min(names)}): choose an empty or new "
                "folder",
                "QK-E402",
            )
        return None
    try:
        config = json.loads(_read_head(folder, _CONFIG, _MAX_CONFIG))
        if config["kind"] == _KIND and type(config["size"]) is int and config["size"] >= 0:
            return int(config["size"])
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise ResourceError(
        f"{folder / _CONFIG} does not belong to a tensor cache of this version: choose another folder", "QK-E122"
    )


def _read_head(root: Path, name: str, nbytes: int) -> bytes:
    """Return the first ``nbytes`` bytes of a file in a folder; empty if it is not a file."""
    with suppress(OSError), open_folder(root) as folder, open(open_file(name, os.O_RDONLY, folder), "rb") as file:
        return file.read(nbytes)
    return b""


def _copy(source: int, target: int, offset: int, nbytes: int) -> None:
    """Append a range of a file to another, in the kernel if possible, which may share extents."""
    end = os.lseek(target, 0, os.SEEK_END)
    copied = 0
    with suppress(OSError, AttributeError):
        while copied < nbytes and (
            n := os.copy_file_range(source, target, nbytes - copied, offset + copied, end + copied)
        ):
            copied += n
    while copied < nbytes:
        data = os.pread(source, min(nbytes - copied, 1 << 22), offset + copied)
        if not data:
            raise OSError(0, "the output ends before its tensor")
        copied += os.pwrite(target, data, end + copied)

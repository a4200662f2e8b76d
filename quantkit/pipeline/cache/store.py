"""The folder of a tensor cache. It may be shared by users, and by machines on one file system.

    cache.json               its size limit
    entries/ab/HOW-FIRST-SOURCE    a tensor's encoded rows (formats/cache_entry.py)
    sources/SOURCE/RUN       digests of what was read (``memo``)
    runs.jsonl               a line for each run that used it
    tmp/                     what is being written

Nothing is locked. A file is written to its end and synced before it gets its name, by rename; who reads one that is
evicted meanwhile encodes instead. Entries of one name have the same bytes, so it does not matter which of two writers
is the last. The time of an entry's last change is that of its last use: the least recently used go first.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import ResourceError
from quantkit.formats.cache_entry import EntryName, Header, parse_name

#: What is left behind in tmp/ is removed after a day; digests that nobody asked for after a year.
DAY = 86400
_YEAR = 365 * DAY
_KIND = "quantkit tensor cache, 1"
_CONFIG, _ENTRIES, _SOURCES, _RUNS, _TEMPORARY = "cache.json", "entries", "sources", "runs.jsonl", "tmp"
#: The most that is read of cache.json, and of runs.jsonl, which is cut in half beyond it.
_SMALL, _MOST_RUNS = 1 << 16, 1 << 20
#: How much of the limit is free after an eviction, so that not every entry evicts another.
_ROOM = 0.05


@dataclass(frozen=True, slots=True)
class Kept:
    """An entry in the folder: ``used`` is when, in seconds."""

    path: Path
    name: EntryName
    nbytes: int
    used: float


class Store:
    """An open cache: see ``open_store``."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.run = f"{int(time.time()):x}-{secrets.token_hex(8)}"
        self._listed: dict[str, list[EntryName]] = {}

    # ------------------------------------------------------------ what is there

    def entries(self) -> Iterator[Kept]:
        """Yield all entries; other files are left alone."""
        for prefix in (f"{i:02x}" for i in range(256)):
            with suppress(OSError), os.scandir(self.folder / _ENTRIES / prefix) as found:
                for each in found:
                    name = parse_name(each.name)
                    with suppress(OSError):
                        if name is not None and each.is_file(follow_symlinks=False):
                            status = each.stat(follow_symlinks=False)
                            yield Kept(Path(each.path), name, status.st_size, status.st_mtime)

    def path(self, name: EntryName) -> Path:
        """Return where an entry lies, or would."""
        return self.folder / _ENTRIES / name.how[:2] / str(name)

    def encoded(self, how: str) -> list[EntryName]:
        """Return the entries that were encoded in some way when it was first asked for any like it."""
        prefix = how[:2]
        if prefix not in self._listed:
            try:
                names = sorted(os.listdir(self.folder / _ENTRIES / prefix))
            except OSError:
                names = []
            self._listed[prefix] = [found for name in names if (found := parse_name(name)) is not None]
        return [name for name in self._listed[prefix] if name.how == how]

    def sources(self, fingerprint: str) -> Path:
        """Return the folder of what is remembered of a source."""
        return self.folder / _SOURCES / fingerprint[:32]

    def temporary(self) -> list[Path]:
        """Return the files that are being written, or were when their runs were killed."""
        try:
            return [path for path in (self.folder / _TEMPORARY).iterdir() if path.is_file() and not path.is_symlink()]
        except OSError:
            return []

    def runs(self) -> list[dict[str, Any]]:
        """Return what runs noted."""
        runs = []
        for line in _start_of(self.folder / _RUNS, 2 * _MOST_RUNS).split(b"\n"):
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
                if isinstance(found, dict):
                    runs.append(found)
        return runs

    # ------------------------------------------------------------ what changes it

    def put(
        self, name: EntryName, header: Header, file: Path, ranges: Sequence[tuple[int, int]], records: bytes
    ) -> int:
        """Keep ranges (offset, length) of a file as an entry; return its bytes. Raises OSError."""
        temporary, path = self.temporary_path(), self.path(name)
        try:
            with open(file, "rb") as source, open(temporary, "xb") as target:
                target.write(header.encode())
                target.flush()
                for offset, nbytes in ranges:
                    _copy(source.fileno(), target.fileno(), offset, nbytes)
                target.seek(0, os.SEEK_END)
                target.write(records)
                target.flush()
                os.fsync(target.fileno())
                nbytes = target.tell()
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink()
        return nbytes

    def touch(self, path: Path) -> None:
        """Enter that an entry was used; nothing if it cannot be."""
        with suppress(OSError):
            os.utime(path)

    def evict(self, to: int, *, spare: frozenset[Path] | set[Path] = frozenset(), before: float = 0) -> list[Kept]:
        """Remove entries last used before a time, then the least recently used until ``to`` bytes are left."""
        entries = sorted(self.entries(), key=lambda kept: kept.used)
        left, gone = sum(kept.nbytes for kept in entries), []
        for kept in entries:
            if (left > to or kept.used < before) and kept.path not in spare:
                with suppress(OSError):
                    kept.path.unlink()
                    left -= kept.nbytes
                    gone.append(kept)
        return gone

    def room(self, nbytes: int, spare: set[Path]) -> int:
        """Return the bytes of all entries; where ``nbytes`` more would be too many, some go, none of ``spare``."""
        total = self.nbytes()
        if total + nbytes > self.limit:
            total -= sum(kept.nbytes for kept in self.evict(int(self.limit * (1 - _ROOM)) - nbytes, spare=spare))
        return total

    def nbytes(self) -> int:
        """Return the bytes of all entries."""
        return sum(kept.nbytes for kept in self.entries())

    def clear_temporary(self, age: float = DAY) -> int:
        """Remove what killed runs left behind, ``age`` seconds after it was last written; return how many files."""
        removed = 0
        for path in self.temporary():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > age:
                    path.unlink()
                    removed += 1
        return removed

    def forget_sources(self, age: float = _YEAR) -> None:
        """Remove digests of sources that nobody has asked for."""
        with suppress(OSError):
            for folder in (self.folder / _SOURCES).iterdir():
                if not folder.is_symlink() and time.time() - folder.stat().st_mtime > age:
                    shutil.rmtree(folder, ignore_errors=True)

    def note(self, entry: dict[str, Any]) -> None:
        """Add a line about a run. Raises OSError."""
        path = self.folder / _RUNS
        with open(path, "ab") as file:
            file.write(b"\n" + json.dumps(entry).encode())  # not behind a line that a kill cut off
            long = file.tell() > _MOST_RUNS
        if long:
            lines = _start_of(path, 2 * _MOST_RUNS).splitlines(keepends=True)
            self._write(path, b"".join(lines[len(lines) // 2 :]))

    def resize(self, limit: int) -> None:
        """Set the size limit. Raises OSError."""
        self.limit = limit
        self._write(self.folder / _CONFIG, json.dumps({"kind": _KIND, "size": limit}).encode() + b"\n")

    def _write(self, path: Path, data: bytes) -> None:
        temporary = self.temporary_path()
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink()

    def temporary_path(self) -> Path:
        """Return a new name in tmp/. Raises OSError."""
        folder = self.folder / _TEMPORARY
        folder.mkdir(exist_ok=True)
        return folder / f"{self.run}-{secrets.token_hex(4)}"


def open_store(folder: Path, *, size: int | None = None, make: bool = True) -> Store:
    """Open a cache; ``make``: a new one where there is none, in an empty folder. ``size``: set its limit.

    By itself a new one takes up to a quarter of what is free on its disk. Raises ResourceError: no cache, or not ours.
    """
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        limit = _limit(folder)
        if limit is None and not make:
            raise ResourceError(f"{folder} is no tensor cache: --cache {folder} makes it one")
        store = Store(folder, 0 if limit is None else limit)
        if limit is None:
            store.resize(shutil.disk_usage(folder).free // 4 if size is None else size)
        elif size is not None and size != limit:
            store.resize(size)
    except OSError as e:
        raise ResourceError(f"{e.filename or folder}: {e.strerror or e}: {folder} cannot be the tensor cache") from None
    return store


def _limit(folder: Path) -> int | None:
    """Return the size limit of a cache, or None if the folder is empty; ResourceError if it is something else."""
    names = set(os.listdir(folder))
    if _CONFIG not in names:
        if names - {_TEMPORARY}:
            raise ResourceError(
                f"{folder} is no tensor cache, but holds other files ({min(names)}): name an empty folder, or a new one"
            )
        return None
    try:
        found = json.loads(_start_of(folder / _CONFIG, _SMALL))
        if found["kind"] == _KIND and type(found["size"]) is int and found["size"] >= 0:
            return int(found["size"])
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise ResourceError(f"{folder / _CONFIG} is not that of a tensor cache of this version: name another folder")


def _start_of(path: Path, most: int) -> bytes:
    """Return at most ``most`` bytes of a file, none of what is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with open(fd, "rb") as file:
        try:
            return file.read(most) or b""
        except OSError:
            return b""


def _copy(source: int, target: int, offset: int, nbytes: int) -> None:
    """Append a range of a file to another, by the kernel where it can: then extents may be shared."""
    end = os.lseek(target, 0, os.SEEK_END)
    done = 0
    with suppress(OSError, AttributeError):
        while done < nbytes and (got := os.copy_file_range(source, target, nbytes - done, offset + done, end + done)):
            done += got
    while done < nbytes:
        data = os.pread(source, min(nbytes - done, 1 << 22), offset + done)
        if not data:
            raise OSError(0, "the output ends before its tensor")
        done += os.pwrite(target, data, end + done)

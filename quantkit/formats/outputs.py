"""Inputs and outputs of commands: checked for overlap, locked, and written completely or not at all.

Before any work, ``check_apart`` refuses an output that is an input or another output, under any name. An ``Output``
is then held for the duration of its run by a lock on OUT.lock; a killed run leaves the file behind, but not the lock. A
file of ``atomic_write`` appears completely or not at all: it is written as OUT.part and renamed.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TextIO

from quantkit.errors import FormatError, ResourceError, os_error_code
from quantkit.formats.gguf import parse_split_path, split_path
from quantkit.formats.locks import drop_lock, take_lock
from quantkit.formats.ranges import sync
from quantkit.formats.remote import URL, locate
from quantkit.units import format_size

#: Maximum bytes read of a text, and of any pipe; a split model has at most 65535 shards.
MAX_TEXT, _MOST_SHARDS = 1 << 30, (1 << 16) - 1


def read_text(path: str | Path) -> bytes:
    """Return the bytes of a text; ``-`` is standard input. Raises FormatError, also beyond ``MAX_TEXT`` bytes."""
    if str(path) != "-":
        return read_whole(path, MAX_TEXT)
    if sys.stdin is None:
        raise FormatError("standard input is closed: give a file", "QK-E401")
    return _standard_input(sys.stdin)


@lru_cache(maxsize=1)
def _standard_input(stream: TextIO) -> bytes:
    """Read it once; each call reads the text again."""
    return _read_bounded(stream.buffer, "standard input", MAX_TEXT)


def _read_bounded(file: BinaryIO, name: str | Path, max_bytes: int) -> bytes:
    pieces, size = [], 0
    while piece := file.read(1 << 20):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise _too_large(name, max_bytes)
    return b"".join(pieces)


def _too_large(name: str | Path, max_bytes: int) -> FormatError:
    return FormatError(
        f"{name}: larger than {format_size(max_bytes)}, the limit; check that it is the right file", "QK-E120"
    )


def read_whole(path: str | Path, max_bytes: int = MAX_TEXT) -> bytes:
    """Return all bytes of a file, or of a shell pipe such as ``<(command)``.

    Raises FormatError beyond ``max_bytes``, and for devices, which never end, and named pipes, which may have no
    writer.
    """
    path = locate(path)
    try:
        if isinstance(path, URL):
            if path.facts.size > max_bytes:
                raise _too_large(path, max_bytes)
            return path.read_bytes()
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                _check_pipe(path, status.st_mode)
                os.set_blocking(file.fileno(), True)
            if status.st_size > max_bytes:
                raise _too_large(path, max_bytes)
            return _read_bounded(file, path, max_bytes)
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror or e}", os_error_code(e)) from None


def _check_pipe(path: str | Path, mode: int) -> None:
    """Refuse a path that is neither a file nor a pipe opened by the shell (/proc/.., without a name in a folder)."""
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise FormatError(f"{path}: a device, neither a file nor a pipe: give a file", "QK-E120")
    if not stat.S_ISFIFO(mode) or not os.path.realpath(path).startswith("/proc/"):
        raise FormatError(f"{path}: not a regular file: give a file", "QK-E120")


def part_path(path: Path) -> Path:
    """Return the temporary name of an output."""
    return sibling_path(path, ".part")


def lock_path(path: Path) -> Path:
    """Return the lock file of a run that writes ``path``."""
    return sibling_path(path, ".lock")


def sibling_path(path: Path, suffix: str) -> Path:
    """Return a file beside an output; for a store, in the spool folder."""
    place = path.local if isinstance(path, URL) else path
    return place.with_name(place.name + suffix)


def resolve_links(path: str | Path) -> Path:
    """Return the real path of an output, with links resolved."""
    path = locate(path)
    if isinstance(path, URL):
        return path
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)


# ---------------------------------------------------------------- before any work


def check_apart(outputs: Iterable[str | Path | None], inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise ResourceError if an output, or a name it is written by, is an input or another output.

    None is a missing argument, - standard input. For an input that is a shard, all shards count. Files are identified
    by device and inode, missing ones by folder and name, so links do not matter.
    """
    read = (locate("/dev/stdin" if str(path) == "-" else path) for path in inputs if path is not None)
    owners = {_identity(shard): (shard, True) for path in read for shard in shards_of(path)}
    for output in (resolve_links(path) for path in outputs if path is not None):
        names = {_identity(name): name for name in (output, part_path(output), lock_path(output))}
        for identity, name in names.items():
            if identity in owners:
                raise ResourceError(_describe_clash(output, name, *owners[identity]), "QK-E403")
        owners |= {identity: (name, False) for identity, name in names.items()}


def _describe_clash(output: Path, name: Path, owner: Path, is_input: bool) -> str:
    through = "" if name == output else f", which grows as {name},"
    if is_input:
        subject = "itself" if owner == name else f"{owner} itself"
        return f"{output}{through} is the input {subject}; choose another output"
    outputs = f"two outputs, {output}," if name == owner == output else f"{output}{through} and {owner}"
    return f"{outputs} are the same file; give each output its own name"


def _identity(path: Path) -> tuple[object, ...]:
    if isinstance(path, URL):
        return (path.identity,)
    with suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    real = Path(os.path.realpath(path))
    with suppress(OSError):
        folder = os.stat(real.parent)
        return folder.st_dev, folder.st_ino, real.name
    return (real,)


def shards_of(path: Path) -> Iterator[Path]:
    """Yield a file and, if its name is that of a shard, all shards of the model, whether they exist or not."""
    split = parse_split_path(path)
    yield path
    if split is not None and split[2] <= _MOST_SHARDS:
        yield from (split_path(split[0], no, split[2]) for no in range(split[2]))


def check_free(path: str | Path, *, overwrite: bool) -> None:
    """Raise ResourceError if a file cannot appear at ``path``, or would replace one without ``overwrite``."""
    path = locate(path)
    if isinstance(path, URL):
        _check_url(path, overwrite)
        return
    if not os.path.isdir(os.path.dirname(resolve_links(path)) or "."):
        raise ResourceError(f"{path}: its folder does not exist; create it first", "QK-E401")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as e:
        raise ResourceError(f"{path}: {e.strerror or e}; choose another file", os_error_code(e)) from None
    if stat.S_ISDIR(mode):
        raise ResourceError(f"{path} is a directory; give a file", "QK-E120")
    if not stat.S_ISREG(mode):
        raise ResourceError(f"{path} is not a regular file; choose another output", "QK-E120")
    if not overwrite:
        raise ResourceError(f"{path} exists; choose another name, or use --overwrite to replace it", "QK-E402")


def _check_url(url: URL, overwrite: bool) -> None:
    url.store.check_writable(url)
    try:
        if not overwrite and URL(url.address).is_file():  # its present state, not the one read before
            raise ResourceError(f"{url} exists; choose another name, or use --overwrite to replace it", "QK-E402")
    except OSError as e:
        raise ResourceError(f"{url}: {e.strerror or e}", "QK-E412") from None


# ---------------------------------------------------------------- while it is written


class Output:
    """A context in which no other run writes a file.

    ``atomic_write`` may be used on it any number of times. ``overwrite``: replace an existing file. Raises on entry as
    ``check_free``, and ResourceError while another run has the lock.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path, self.overwrite = resolve_links(path), overwrite
        self._lock = -1

    def __enter__(self) -> Output:
        check_free(self.path, overwrite=True)
        try:
            self._lock = self._take_lock()
        except OSError as e:
            lock_name = f"the lock {lock_path(self.path).name} cannot: {e.strerror or e}"
            raise ResourceError(f"{self.path} cannot be written, because {lock_name}", "QK-E405") from None
        try:
            check_free(self.path, overwrite=self.overwrite)
        except ResourceError:
            self.__exit__(None, None, None)
            raise
        return self

    def _take_lock(self) -> int:
        path = lock_path(self.path)
        if isinstance(self.path, URL):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return take_lock(path)
        except BlockingIOError:
            raise ResourceError(f"{self.path}: another run is writing it; wait for it or stop it", "QK-E404") from None

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        drop_lock(lock_path(self.path), self._lock)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path for ``path``; it is renamed at the end, and removed on failure.

    Raises ResourceError for errors of the disk.
    """
    path = locate(path)
    part = part_path(path)
    try:
        if isinstance(path, URL):
            part.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        yield part
        if isinstance(path, URL):
            path.store.upload_file(path, part)
            return
        sync(part)
        part.replace(path)
        sync(path.parent)
    except OSError as e:
        if e.filename is not None and Path(os.fsdecode(e.filename)) != part:
            raise
        advice = "try again" if isinstance(path, URL) else "free some space"
        raise ResourceError(
            f"{path}: {e.strerror or e}; nothing was written: {advice}, or write elsewhere", "QK-E406"
        ) from e
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)

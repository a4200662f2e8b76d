"""Replace the header of a file in place: a crash, or another reader, never sees half of the new one.

FILE.quantkit-header, the journal, has the old and the new header. It is complete on the disk before the first byte of
the file changes, and removed after the last one has reached the disk. ``settle``, which every reader of GGUF files
calls, waits for a writer that lives, and puts the old header back after one that was killed.

    "QKHEADER"  u64 size of the file  u64 bytes of a header  old header  new header  SHA-256 of all before
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, ResourceError, os_error_code
from quantkit.formats.locks import drop_lock, take_lock
from quantkit.formats.ranges import sync, write_range

_MAGIC = b"QKHEADER"
_HEAD = struct.Struct("<8sQQ")
#: How long readers wait for a writer, in seconds; a header is written in milliseconds.
PATIENCE = 30.0


def journal_path(path: Path) -> Path:
    """Return the journal of a file, beside the file that its links lead to."""
    real = Path(os.path.realpath(path))
    return real.with_name(real.name + ".quantkit-header")


def is_edited(path: Path) -> bool:
    """Return whether the header of a file is being replaced, or was when a process was killed."""
    try:
        return os.path.lexists(journal_path(path))
    except ValueError:  # a name with a null byte, which no file has
        return False


def replace_header(path: Path, old: bytes, new: bytes) -> None:
    """Replace the first bytes of a file, ``old``, by as many others. The caller holds the file's lock.

    Raises FormatError if the file does not begin with ``old``, OSError from the disk; the file is then unchanged.
    """
    assert len(old) == len(new)
    journal = journal_path(path)
    real = Path(os.path.realpath(path))
    if _read_beginning(real, len(old)) != old:
        raise FormatError(f"{path}: its header has changed meanwhile; start over", "QK-E109")
    content = _HEAD.pack(_MAGIC, real.stat().st_size, len(old)) + old + new
    try:
        with open(journal, "xb") as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        sync(journal.parent)
        write_range(real, np.frombuffer(new, np.uint8), 0)
        sync(real)
    except BaseException:
        with suppress(OSError, FormatError):
            _restore(real, journal)
        raise
    _remove(journal)


def settle(path: Path) -> None:
    """Wait until no process replaces the header of a local file; put back the old header if such a process was killed.

    Raises:
        ResourceError: a writer takes too long, or the old header cannot be written.
        FormatError: the file is not the one whose header was being replaced.
    """
    if not is_edited(path):
        return
    journal, real = journal_path(path), Path(os.path.realpath(path))
    with _lock(real, journal) as locked:
        if locked and os.path.lexists(journal):
            try:
                _restore(real, journal)
            except OSError as e:
                raise ResourceError(
                    f"{path}: an edit of its header was interrupted, and the header cannot be restored from "
                    f"{journal.name}: {e.strerror or e}; run the command where both files can be written",
                    os_error_code(e),
                ) from None


@contextmanager
def _lock(real: Path, journal: Path) -> Iterator[bool]:
    """Hold a file's lock; yield whether it was free before the journal disappeared."""
    lock_path = real.with_name(real.name + ".lock")
    end = time.monotonic() + PATIENCE
    while True:
        try:
            lock = take_lock(lock_path)
            break
        except BlockingIOError:
            if not os.path.lexists(journal):
                yield False
                return
            if time.monotonic() > end:
                message = f"{real}: another process is replacing its header; wait for it"
                raise ResourceError(message, "QK-E404") from None
            time.sleep(0.02)
        except OSError as e:
            raise ResourceError(
                f"{real}: an edit of its header was interrupted; to restore it, run the command where {lock_path.name} "
                f"can be written: {e.strerror or e}",
                os_error_code(e),
            ) from None
    try:
        yield True
    finally:
        drop_lock(lock_path, lock)


def _restore(real: Path, journal: Path) -> None:
    """Put the old header back, if any byte of it was replaced, and remove the journal."""
    headers = _read_journal(real, journal)
    if headers is not None:
        old, new = headers
        present = np.frombuffer(_read_beginning(real, len(old)), np.uint8)
        before, after = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
        if len(present) != len(before) or not np.all((present == before) | (present == after)):
            raise FormatError(
                f"{real}: {journal.name} is of an interrupted edit of another file with this name; if this file is "
                f"right, delete {journal.name}",
                "QK-E409",
            )
        write_range(real, before, 0)
        sync(real)
    _remove(journal)


def _read_journal(real: Path, journal: Path) -> tuple[bytes, bytes] | None:
    """Return the old and the new header; None for a journal that was not finished, whose file is unchanged."""
    content = journal.read_bytes()
    if len(content) < _HEAD.size + 32 or hashlib.sha256(content[:-32]).digest() != content[-32:]:
        if content[:8] not in (_MAGIC[: len(content)], _MAGIC):
            raise FormatError(f"{real}: {journal.name} beside it is not a journal of quantkit: rename it", "QK-E122")
        return None
    _, size, n = _HEAD.unpack_from(content)
    if len(content) != _HEAD.size + 2 * n + 32 or real.stat().st_size != size:
        raise FormatError(f"{real}: {journal.name} is the journal of a file of {size} bytes: delete it", "QK-E409")
    return content[_HEAD.size : _HEAD.size + n], content[_HEAD.size + n : -32]


def _read_beginning(path: Path, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(nbytes)


def _remove(journal: Path) -> None:
    journal.unlink()
    sync(journal.parent)

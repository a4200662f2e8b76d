"""Replace the header of a file in place, so that an edit that is interrupted can be undone.

FILE.quantkit-header, the journal, has the old header and the writes that replace it (``header_writes``). It is complete
on the disk before the first byte of the file changes, and removed after the last one has reached the disk. Each write
is on the disk before the next one. ``settle``, which every reader of GGUF files calls, waits for a writer that lives,
and undoes the writes of one that was killed, the last one first.

    "QKHEADER"  u64 size of the file  u64 bytes of the old header  u64 number of writes
    old header  (u64 offset  u64 bytes  bytes) of each write  SHA-256 of all before
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quantkit.errors import FormatError, ResourceError, os_error_code
from quantkit.formats.locks import drop_lock, take_lock
from quantkit.formats.ranges import sync, write_range

_MAGIC = b"QKHEADER"
_HEAD = struct.Struct("<8sQQQ")
_WRITE = struct.Struct("<QQ")
#: How long readers wait for a writer, in seconds; a header is written in milliseconds.
PATIENCE = 30.0


class Write(NamedTuple):
    """``data`` at byte ``offset`` of a file."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """The byte after the last one that is written."""
        return self.offset + len(self.data)


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


def replace_header(path: Path, old: bytes, writes: Sequence[Write]) -> None:
    """Replace the header ``old`` of a file by writes within it. The caller holds the file's lock.

    Raises FormatError if the file does not begin with ``old``, OSError from the disk; the file is then unchanged.
    """
    assert writes
    assert all(write.end <= len(old) for write in writes)
    journal = journal_path(path)
    real = Path(os.path.realpath(path))
    if _read_beginning(real, len(old)) != old:
        raise FormatError(f"{path}: its header has changed meanwhile; start over", "QK-E109")
    parts = [_HEAD.pack(_MAGIC, real.stat().st_size, len(old), len(writes)), old]
    for write in writes:
        parts += [_WRITE.pack(write.offset, len(write.data)), write.data]
    content = b"".join(parts)
    try:
        with open(journal, "xb") as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        sync(journal.parent)
        for write in writes:
            _apply(real, write)
    except BaseException:
        with suppress(OSError, FormatError):
            _restore(real, journal)
        raise
    _remove(journal)


def _apply(real: Path, write: Write) -> None:
    write_range(real, np.frombuffer(write.data, np.uint8), write.offset)
    sync(real)


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
    """Undo the writes that reached the file, the last one in part, and remove the journal."""
    content = _read_journal(real, journal)
    if content is not None:
        old, writes = content
        inverse = _inverse(old, writes, _read_beginning(real, len(old)))
        if inverse is None:
            raise FormatError(
                f"{real}: {journal.name} is of an interrupted edit of another file with this name; if this file is "
                f"right, delete {journal.name}",
                "QK-E409",
            )
        for write in inverse:
            _apply(real, write)
    _remove(journal)


def _inverse(old: bytes, writes: Sequence[Write], present: bytes) -> list[Write] | None:
    """Return the writes that lead back to the old header; None if no part of ``writes`` leads to the present one."""
    inverse: list[Write] = []
    state = bytearray(old)
    for write in writes:
        before = bytes(state[write.offset : write.end])
        inverse.insert(0, Write(write.offset, before))
        other_parts = (slice(write.offset), slice(write.end, None))
        if len(present) == len(old) and all(present[part] == state[part] for part in other_parts):
            bytes_now, bytes_before, bytes_after = (
                np.frombuffer(data, np.uint8) for data in (present[write.offset : write.end], before, write.data)
            )
            if np.all((bytes_now == bytes_before) | (bytes_now == bytes_after)):
                return inverse
        state[write.offset : write.end] = write.data
    return None


def _read_journal(real: Path, journal: Path) -> tuple[bytes, list[Write]] | None:
    """Return the old header and the writes; None for a journal that was not finished, whose file is unchanged."""
    content = journal.read_bytes()
    if len(content) < _HEAD.size + 32 or hashlib.sha256(content[:-32]).digest() != content[-32:]:
        if content[:8] not in (_MAGIC[: len(content)], _MAGIC):
            raise FormatError(f"{real}: {journal.name} beside it is not a journal of quantkit: rename it", "QK-E122")
        return None
    _, size, nbytes, count = _HEAD.unpack_from(content)
    if real.stat().st_size != size:
        raise FormatError(f"{real}: {journal.name} is the journal of a file of {size} bytes: delete it", "QK-E409")
    position, writes = _HEAD.size + nbytes, []
    for _ in range(count):
        offset, length = _WRITE.unpack_from(content, position)
        position += _WRITE.size + length
        writes.append(Write(offset, content[position - length : position]))
    return content[_HEAD.size : _HEAD.size + nbytes], writes


def _read_beginning(path: Path, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(nbytes)


def _remove(journal: Path) -> None:
    journal.unlink()
    sync(journal.parent)

"""Identity of files: by stamp and, if stamps differ, by a digest of all bytes.

Interrupted or finished work is valid as long as its inputs have the same bytes. A copy has another inode and other
times, but the same bytes; an overwritten file may have the same header, size and time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.cpus import available_cpus
from quantkit.formats.files import check_unchanged, open_input, stamp_of
from quantkit.formats.ranges import read_range
from quantkit.formats.remote import URL
from quantkit.records import record

#: Bytes of a digest piece.
_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file, or all shards of a model: the stamps that identify each, and a digest of their bytes."""

    stamps: list[list[int | str]]
    digest: str

    @classmethod
    def read(cls, paths: Sequence[Path], candidates: Iterable[FileRecord | None] = ()) -> FileRecord:
        """Return the record of files in their current state; a record of ``candidates`` with the same stamps is
        returned without reading.

        Raises OSError, and FormatError for a file that changes while it is read.
        """
        stamps = stamps_of(paths)
        match = next(
            (candidate for candidate in candidates if candidate is not None and candidate.stamps == stamps), None
        )
        return match or cls(stamps, content_digest(paths))


class Origin:
    """The source files of a run, as they were opened, and their record, which is computed on request.

    A state from which a run can continue contains the record as JSON.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._record: FileRecord | None = None

    def record(self) -> FileRecord:
        """Return the record; the files are read once. Raises as ``FileRecord.read``."""
        self._record = FileRecord.read(self.paths, [self._record])
        return self._record

    def matches(self, state: Any) -> bool:
        """Return whether a state's record has the same bytes. Raises as ``record`` and as ``records.record``."""
        earlier: FileRecord = record(FileRecord, state)
        self._record = FileRecord.read(self.paths, [self._record, earlier])
        return self._record.digest == earlier.digest


def stamps_of(paths: Iterable[Path]) -> list[list[int | str]]:
    """Return the stamp of each file: see ``formats.files.stamp_of``. Raises OSError."""
    return [stamp_of(path) for path in paths]


def content_digest(paths: Sequence[Path]) -> str:
    """Return a digest of all bytes of files. Raises OSError, FormatError for a file that changes while it is read."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(available_cpus()) as pool:
        for path in paths:
            size = _size(path)
            digest.update(f"{size}:".encode())
            for piece in pool.map(partial(_piece_digest, path, size), range(0, size, _PIECE)):
                digest.update(piece)
    check_unchanged(paths)
    return digest.hexdigest()


def _size(path: Path) -> int:
    if isinstance(path, URL):
        return path.facts.size
    with open_input(path) as fd:
        return os.fstat(fd).st_size


def _piece_digest(path: Path, size: int, offset: int) -> bytes:
    from quantkit.kernels.cpu.digest import digest_of

    data = np.empty(min(_PIECE, size - offset), np.uint8)
    read_range(path, data, offset)
    return digest_of(data).to_bytes(8, "little")

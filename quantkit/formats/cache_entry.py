"""Entries of the tensor cache: files with the encoded rows of one tensor.

==============  ==========================================================================================
byte 0          a line of JSON (``Header``), a line with its SHA-256, spaces up to byte 4096
byte 4096       the rows, matrix by matrix
behind them     a record (``RECORD``, 120 bytes) for each piece of rows: the SHA-256 of what was encoded, half a
                SHA-256 of rows and error sums here, and those sums
==============  ==========================================================================================

A *piece* is the rows encoded at a time. Jobs consist of whole pieces, so each can check its bytes, however the rows
were divided when encoded; the digest of all encoded rows is computed from the digests of the pieces.

Entries may come from anyone and may be truncated, damaged or forged: data is compared with the digests, never
interpreted.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.formats.ranges import U8

#: Where rows begin: at a page, so that file systems can share extents.
DATA = 4096
RECORD = np.dtype([("source", "V32"), ("check", "V16"), ("sums", "<f8", 9)])
#: Maximum number of pieces that is accepted, that of a tensor of 4 T values, and maximum bytes of a piece.
_MOST_PIECES, _MOST_BYTES = 1 << 25, 1 << 29
_KIND = "quantkit cached tensor, 4"


#: Keys of the JSON line -> fields of ``Header``, in their order.
_JSON_KEYS = {
    "how": "settings",
    "source": "source",
    "pieces": "pieces",
    "measured": "has_errors",
    "weighted": "weighted",
    "made": "origin",
}


class DamagedEntry(Exception):
    """An entry is damaged, or the file is not an entry."""


class EntryName(NamedTuple):
    """The name of an entry: digests of its encoding, of its first piece of source rows, and of all of them."""

    settings: str
    first_piece: str
    source: str

    def __str__(self) -> str:
        return "-".join(self)


def parse_name(name: str) -> EntryName | None:
    """Return the digests that a file's name stands for, or None."""
    parts = name.split("-")
    if [len(part) for part in parts] != [64, 16, 64] or set(name) - set("0123456789abcdef-"):
        return None
    return EntryName(*parts)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of ``matrices`` with ``rows`` rows each: ``piece`` rows of one matrix at a time."""

    matrices: int
    rows: int
    row_bytes: int
    piece: int

    @property
    def per_matrix(self) -> int:
        """Pieces of a matrix."""
        return -(-self.rows // self.piece)

    @property
    def count(self) -> int:
        return self.matrices * self.per_matrix

    @property
    def nbytes(self) -> int:
        return self.matrices * self.rows * self.row_bytes

    def is_aligned(self, row: int, rows: int) -> bool:
        """Return whether rows of a matrix are whole pieces."""
        return row % self.piece == 0 and (rows % self.piece == 0 or row + rows == self.rows)

    def span(self, matrix: int, row: int, rows: int) -> slice:
        """Return the pieces of rows of a matrix."""
        first = matrix * self.per_matrix + row // self.piece
        return slice(first, first - (-rows // self.piece))

    def row_offset(self, matrix: int, row: int) -> int:
        """Return the byte offset of a row in an entry."""
        return DATA + (matrix * self.rows + row) * self.row_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The description of an entry. ``origin`` is for people."""

    settings: str
    source: str
    pieces: Pieces
    #: Whether there are error sums besides losses, and the digest of the importance that weights them.
    has_errors: bool = False
    weighted: str | None = None
    origin: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the first ``DATA`` bytes of the entry."""
        values = {key: getattr(self, name) for key, name in _JSON_KEYS.items()}
        values |= {"kind": _KIND, "pieces": asdict(self.pieces)}
        line = json.dumps(values).encode()
        assert len(line) < DATA - 66
        return (line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n").ljust(DATA)


def parse_header(data: bytes) -> Header:
    """Return the header of an entry. Raises DamagedEntry."""
    line, _, tail = data.partition(b"\n")
    if tail[:64] != hashlib.sha256(line).hexdigest().encode():
        raise DamagedEntry("its header is damaged")
    try:
        values: dict[str, Any] = json.loads(line)
        if values.pop("kind") != _KIND:
            raise DamagedEntry("of another version")
        pieces = Pieces(**values.pop("pieces"))
        header = Header(pieces=pieces, **{_JSON_KEYS[key]: value for key, value in values.items()})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DamagedEntry("its header is not that of an entry") from None
    numbers = (pieces.matrices, pieces.rows, pieces.row_bytes, pieces.piece)
    if not all(type(n) is int and 0 < n < 1 << 48 for n in numbers) or pieces.count > _MOST_PIECES:
        raise DamagedEntry("its header has invalid numbers")
    if pieces.piece * pieces.row_bytes > _MOST_BYTES:
        raise DamagedEntry("its pieces are too large")
    texts = isinstance(header.settings, str) and isinstance(header.source, str) and isinstance(header.origin, dict)
    if not texts or not all(isinstance(s, str) for s in (*header.origin, *header.origin.values())):
        raise DamagedEntry("its header is not that of an entry")
    return header


class Entry:
    """An open entry, a context manager. Raises DamagedEntry, and OSError if it is missing or unreadable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Do not follow links, and do not wait for the writer of a pipe.
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            self.header = self._header()
        except BaseException:
            os.close(self._fd)
            raise

    def _header(self) -> Header:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedEntry("no file")
        header = parse_header(self._read(0, DATA))
        name, pieces = parse_name(self.path.name), header.pieces
        if name is not None and (name.settings, name.source) != (header.settings, header.source):
            raise DamagedEntry("its header belongs to another entry")
        if status.st_size != DATA + pieces.nbytes + pieces.count * RECORD.itemsize:
            raise DamagedEntry("it has the wrong length")
        return header

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes and (chunk := os.pread(self._fd, nbytes - len(data), offset + len(data))):
            data += chunk
        return data

    def read(self, out: U8, offset: int) -> None:
        """Fill ``out`` from byte ``offset`` on."""
        filled_bytes = 0
        while filled_bytes < out.size:
            n = os.preadv(self._fd, [out.data[filled_bytes:]], offset + filled_bytes)
            if not n:
                raise DamagedEntry("it is truncated")
            filled_bytes += n

    def records(self) -> npt.NDArray[np.void]:
        """Return all records, whose digests of the source are those the entry is named by."""
        pieces = self.header.pieces
        records = np.frombuffer(self._read(DATA + pieces.nbytes, pieces.count * RECORD.itemsize), RECORD)
        if source_digest(records) != self.header.source:
            raise DamagedEntry("the digests of its pieces are damaged")
        return records


def source_digest(records: npt.NDArray[np.void]) -> str:
    """Return the digest of a source whose pieces have these records."""
    return hashlib.sha256(records["source"].tobytes()).hexdigest()


def digest(data: U8, suffix: bytes = b"") -> bytes:
    """Return the SHA-256 of a piece followed by ``suffix``."""
    sha256 = hashlib.sha256(data.data)
    sha256.update(suffix)
    return sha256.digest()


def make_records(
    sources: Sequence[bytes], encoded_rows: Sequence[U8], sums: npt.NDArray[np.float64]
) -> npt.NDArray[np.void]:
    """Return the records of pieces: the digests of their sources, their encoded rows, error sums [pieces, 7]."""
    records = np.zeros(len(sources), RECORD)
    records["source"] = np.frombuffer(b"".join(sources), "V32")
    records["sums"] = sums
    checks = (
        digest(rows, error_sums.tobytes())[:16] for rows, error_sums in zip(encoded_rows, records["sums"], strict=True)
    )
    records["check"] = np.frombuffer(b"".join(checks), "V16")
    return records


def are_intact(records: npt.NDArray[np.void], encoded_rows: Sequence[U8]) -> bool:
    """Return whether pieces, and the error sums in their records, match their digests."""
    if len(records) != len(encoded_rows):
        return False
    return all(
        digest(rows, r["sums"].tobytes())[:16] == r["check"].tobytes()
        for r, rows in zip(records, encoded_rows, strict=True)
    )

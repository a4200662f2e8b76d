"""The files of an unfinished output, each under a temporary name until all are complete.

Workers write ranges of them, in any order and at the same time; a run reserves, syncs, checks and publishes them.
"""

from __future__ import annotations

import os
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import numpy as np

from quantkit.errors import FormatError, ResourceError
from quantkit.formats.gguf.byte_order import swap, unit_bytes
from quantkit.formats.outputs import part_path
from quantkit.formats.ranges import (
    U8,
    copy_open,
    copy_range,
    crc32_range,
    read_range,
    reserve,
    sync,
    write_open,
    write_range,
)
from quantkit.types import TensorType
from quantkit.units import format_size

#: Bytes that are reversed at a time.
_SWAPPED_BYTES = 1 << 20


class Target(Protocol):
    """An output from the viewpoint of workers. All methods may be called from any thread; files are counted by shard
    number."""

    def write(self, shard: int, data: U8, offset: int) -> None:
        """Write bytes at ``offset``. Raises OSError."""

    def copy(self, shard: int, file: Path, begin: int, offset: int, nbytes: int) -> bool:
        """Copy bytes from ``begin`` of ``file`` to ``offset`` in the kernel; False if it cannot."""

    def sync(self, shards: Iterable[int]) -> None:
        """Flush everything written so far to the disk. Raises OSError."""


class LedgerTarget(Target, Protocol):
    """An output from the viewpoint of the ledger."""

    def file(self, shard: int) -> Path | None:
        """Return the unfinished file, or None if written data cannot be read again."""

    def can_skip(self, shard: int, offset: int, nbytes: int) -> bool:
        """Return whether a job may be skipped because its bytes are already safe."""

    def commit(self, shard: int, offset: int, nbytes: int) -> None:
        """Count these bytes as written, each once; may block. Raises OSError."""


class RunTarget(LedgerTarget, Protocol):
    """An output from the viewpoint of the run."""

    #: Whether ``crc`` can read back the output.
    readable: bool

    def reserve(self, headers: Sequence[bytes]) -> None:
        """Reserve space for every file, and write its header. Raises OSError, ResourceError."""

    def has(self, shard: int, offset: int, nbytes: int) -> bool:
        """Return whether bytes are already safe."""

    def crc(self, shard: int, offset: int, nbytes: int) -> int:
        """Return the CRC-32 of bytes that were written, or -1 if they are missing."""

    def is_whole(self) -> bool:
        """Return whether all files of a sealed run exist, under either name."""

    def finish(self) -> None:
        """Complete the output durably. Raises OSError."""

    def publish(self) -> None:
        """Give the finished files their names, unless they have them."""

    def discard(self) -> None:
        """Remove the written files."""

    def close(self) -> None:
        """Release the files, whether the run succeeded or not."""


class Files:
    """The files of an output in a folder of this machine: OUT.part until ``publish`` renames it."""

    readable = True

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int]) -> None:
        self._files, self._sizes = tuple((path, part_path(path)) for path in paths), list(sizes)

    @property
    def parts(self) -> tuple[Path, ...]:
        """The unfinished files under their temporary names."""
        return tuple(part for _, part in self._files)

    @property
    def folder(self) -> Path:
        return self._files[0][0].parent

    def reserve(self, headers: Sequence[bytes]) -> None:
        """Give every file its length and header. Raises ResourceError if the disk is too small."""
        have = sum(_allocated_bytes(part) for _, part in self._files)
        free, need = shutil.disk_usage(self.folder).free, sum(self._sizes) - have
        if need > free:
            raise ResourceError(
                f"{self.folder}: needs {format_size(need)}, but only {format_size(free)} are free", "QK-E406"
            )
        for (_, part), nbytes, header in zip(self._files, self._sizes, headers, strict=True):
            reserve(part, nbytes)
            write_range(part, np.frombuffer(header, np.uint8), 0)

    def write(self, shard: int, data: U8, offset: int) -> None:
        write_range(self._files[shard][1], data, offset)

    def copy(self, shard: int, file: Path, begin: int, offset: int, nbytes: int) -> bool:
        return copy_range(file, self._files[shard][1], begin, offset, nbytes)

    def file(self, shard: int) -> Path | None:
        return self._files[shard][1]

    def sync(self, shards: Iterable[int]) -> None:
        for shard in shards:
            sync(self._files[shard][1])

    def finish(self) -> None:
        self.sync(range(len(self._files)))

    def has(self, shard: int, offset: int, nbytes: int) -> bool:
        return False  # the journal records it

    def can_skip(self, shard: int, offset: int, nbytes: int) -> bool:
        return False

    def commit(self, shard: int, offset: int, nbytes: int) -> None:
        pass

    def close(self) -> None:
        pass

    def crc(self, shard: int, offset: int, nbytes: int) -> int:
        """Return the CRC-32 of bytes that were written, or -1 if the file ends before them."""
        return crc32_range(self._files[shard][1], offset, nbytes)

    def is_whole(self) -> bool:
        """Return whether every file exists, under either name, with its full length."""
        paths = [next((p for p in (part, path) if p.exists()), None) for path, part in self._files]
        return [0 if path is None else path.stat().st_size for path in paths] == self._sizes

    def publish(self) -> None:
        """Rename the finished files, except those that an earlier attempt has renamed."""
        for path, part in self._files:
            if part.exists():
                part.replace(path)
            elif not path.exists():
                raise ResourceError(f"{part} no longer exists; run again with --overwrite", "QK-E401")
        sync(self.folder)

    def discard(self) -> None:
        """Remove the unfinished files."""
        for _, part in self._files:
            part.unlink(missing_ok=True)


class BigEndianFiles(Files):
    """Files whose numbers are reversed while they are written; others see little-endian bytes.

    ``tensors``: shard, offset, length and type of each.
    """

    def __init__(
        self, paths: Sequence[Path], sizes: Sequence[int], tensors: Iterable[tuple[int, int, int, TensorType]]
    ) -> None:
        super().__init__(paths, sizes)
        self._tensors: list[list[tuple[int, TensorType]]] = [[] for _ in paths]
        for shard, offset, nbytes, tensor_type in tensors:
            if nbytes:
                self._tensors[shard].append((offset, tensor_type))
        for places in self._tensors:
            places.sort(key=itemgetter(0))

    def write(self, shard: int, data: U8, offset: int) -> None:
        for first, piece, tensor_type in self._pieces(shard, offset, data.size):
            copy = data[first : first + piece].copy()
            swap(copy, tensor_type)
            super().write(shard, copy, offset + first)

    def copy(self, shard: int, file: Path, begin: int, offset: int, nbytes: int) -> bool:
        return False

    def file(self, shard: int) -> Path | None:
        return None

    def crc(self, shard: int, offset: int, nbytes: int) -> int:
        """Return the CRC-32 of little-endian bytes that were written, or -1 if the file ends before them."""
        crc = 0
        for first, piece, tensor_type in self._pieces(shard, offset, nbytes):
            data = np.empty(piece, np.uint8)
            try:
                read_range(self.parts[shard], data, offset + first)
            except FormatError:
                return -1
            swap(data, tensor_type)
            crc = zlib.crc32(data.data, crc)
        return crc

    def _pieces(self, shard: int, offset: int, nbytes: int) -> Iterator[tuple[int, int, TensorType]]:
        """Yield begin, length and type of pieces of whole blocks in a range within a tensor."""
        places = self._tensors[shard]
        tensor_type = places[bisect_right(places, offset, key=itemgetter(0)) - 1][1]
        unit = unit_bytes(tensor_type)
        step = max(1, _SWAPPED_BYTES // unit) * unit
        for first in range(0, nbytes, step):
            yield first, min(step, nbytes - first), tensor_type


class OpenFiles:
    """Files that another process reserved, held open: late writes never reach files that replaced them.

    They are write-only: NFS may write back a whole page that was read, over another machine's bytes.
    """

    def __init__(self, parts: Sequence[Path]) -> None:
        self._parts = tuple(parts)
        self._open = [os.open(part, os.O_WRONLY) for part in parts]
        for fd in self._open:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def write(self, shard: int, data: U8, offset: int) -> None:
        write_open(self._open[shard], self._parts[shard], data, offset)

    def copy(self, shard: int, file: Path, begin: int, offset: int, nbytes: int) -> bool:
        return copy_open(file, self._open[shard], self._parts[shard], begin, offset, nbytes)

    def sync(self, shards: Iterable[int]) -> None:
        for shard in shards:
            os.fdatasync(self._open[shard])

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)


def _allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.exists() else 0

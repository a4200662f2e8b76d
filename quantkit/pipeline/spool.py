"""Outputs in stores. Jobs write to a folder of this machine, the spool, from which the output is uploaded.

``MultipartFiles``, for S3: a file is divided into parts. When all bytes of a part are written, it is uploaded and its
disk space released, so the spool contains only parts in progress. The journal lists every uploaded part, so a killed
run continues the same upload and encodes only what was not uploaded. The object appears when all parts are uploaded and
the upload is completed; a failed run aborts it.

``WholeFiles``, for other stores: complete files are written to the spool, as in a local run, and then uploaded, each
under a temporary name until it is complete.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from quantkit.errors import RecipeError, ResourceError
from quantkit.formats.outputs import part_path
from quantkit.formats.ranges import U8, copy_range, punch, write_range
from quantkit.formats.remote import URL
from quantkit.formats.remote import s3 as store
from quantkit.formats.remote.s3 import S3, UploadedPart
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.target import BigEndianFiles, Files, RunTarget
from quantkit.units import format_size

#: Number of parallel uploads, and of finished parts that may wait before jobs block.
UPLOADERS, WAITING = 4, 4


def open_target(plan: Plan, journal: Journal, *, measure: bool, overwrite: bool) -> RunTarget:
    """Return the target files of a plan: beside their final names, or in the spool of a store."""
    paths = [shard.path for shard in plan.shards]
    sizes = [shard.layout.nbytes for shard in plan.shards]
    urls = [path for path in paths if isinstance(path, URL)]
    if plan.big_endian and urls:
        raise RecipeError("--bigendian writes local files: give a local OUT and upload it", "QK-E201")
    if plan.big_endian:
        return BigEndianFiles(paths, sizes, ((t.shard, t.offset, t.nbytes, t.type) for t in plan.tensors))
    if not urls:
        return Files(paths, sizes)
    if not isinstance(urls[0].store, S3):
        return WholeFiles(urls, sizes, overwrite=overwrite)
    ranges: list[list[tuple[int, int]]] = [[(0, len(shard.layout.header))] for shard in plan.shards]
    for tensor in plan.tensors:
        ranges[tensor.shard].append((tensor.offset, tensor.nbytes))
    return MultipartFiles(urls, sizes, ranges, journal, measure=measure, overwrite=overwrite)


class WholeFiles(Files):
    """Files in the spool that are uploaded to a store when finished."""

    def __init__(self, urls: Sequence[URL], sizes: Sequence[int], *, overwrite: bool) -> None:
        super().__init__([url.local for url in urls], sizes)
        self._urls = urls
        self._overwrite = overwrite
        self._nbytes = sizes

    def is_whole(self) -> bool:
        files = zip(self._urls, self._nbytes, strict=True)
        return all(_length(part_path(url)) == nbytes or _has_length(url, nbytes) for url, nbytes in files)

    def publish(self) -> None:
        for url in self._urls:
            part = part_path(url)
            if part.exists():
                if not self._overwrite and URL(url.address).is_file():
                    raise ResourceError(
                        f"{url} was created in the meantime; replace it with --resume --overwrite", "QK-E402"
                    )
                url.store.upload_file(url, part)
                part.unlink()
            elif not URL(url.address).is_file():
                raise ResourceError(f"{part} no longer exists; run again with --overwrite", "QK-E401")


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _has_length(url: URL, nbytes: int) -> bool:
    with suppress(OSError):
        return URL(url.address).facts.size == nbytes
    return False


class _File:
    """One file of an output: its spool, its upload, its parts, and the missing bytes of each."""

    def __init__(self, url: URL, nbytes: int, ranges: Iterable[tuple[int, int]], step: int) -> None:
        self.url = url
        self.nbytes = nbytes
        self.step = step
        self.spool = part_path(url)
        self.upload = ""
        self.uploaded: dict[int, UploadedPart] = {}
        self.published = False
        self.missing = [0] * (-(-nbytes // step))
        self.queued: set[int] = set()
        for offset, length in ranges:
            for part, count in self.split(offset, length):
                self.missing[part] += count

    def split(self, offset: int, nbytes: int) -> Iterable[tuple[int, int]]:
        """Yield the parts, from 0, that a range overlaps, and the bytes in each."""
        for part in range(offset // self.step, -(-(offset + nbytes) // self.step)):
            begin = part * self.step
            yield part, min(offset + nbytes, begin + self.step) - max(offset, begin)

    def range_of(self, part: int) -> tuple[int, int]:
        """Return offset and length of a part."""
        begin = part * self.step
        return begin, min(self.step, self.nbytes - begin)

    @property
    def parts(self) -> list[UploadedPart]:
        return [self.uploaded[part] for part in sorted(self.uploaded)]


class MultipartFiles:
    """Objects that grow in parts."""

    readable = False

    def __init__(
        self,
        urls: Sequence[URL],
        sizes: Sequence[int],
        ranges: Sequence[Iterable[tuple[int, int]]],
        journal: Journal,
        *,
        measure: bool,
        overwrite: bool,
    ) -> None:
        self._files = [
            _File(url, nbytes, file_ranges, store.part_bytes(nbytes, store.PART))
            for url, nbytes, file_ranges in zip(urls, sizes, ranges, strict=True)
        ]
        self._journal = journal
        self._measure = measure
        self._overwrite = overwrite
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._ready: queue.SimpleQueue[tuple[_File, int] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._failure: BaseException | None = None
        self._closing = False
        #: Unfinished uploads of an earlier run, by the names of their objects.
        self._left = [(note["name"], note["upload"]) for note in journal.read_notes() if "upload" in note]
        self._uploaders: list[threading.Thread] = []

    def _store(self, file: _File) -> S3:
        result = file.url.store
        assert isinstance(result, S3)
        return result

    # ---------------------------------------------------------------- before jobs run

    def reserve(self, headers: Sequence[bytes]) -> None:
        """Start the uploads, or resume those of the journal."""
        folder = self._files[0].spool.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._find_uploaded()
        need = min(sum(f.nbytes for f in self._files), (UPLOADERS + WAITING + 2) * max(f.step for f in self._files))
        free = shutil.disk_usage(folder).free
        if need > free:
            raise ResourceError(
                f"{folder}: needs {format_size(need)}, but only {format_size(free)} are free; choose another --spool",
                "QK-E406",
            )
        for number, (file, header) in enumerate(zip(self._files, headers, strict=True)):
            fd = os.open(file.spool, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.ftruncate(fd, file.nbytes)
            finally:
                os.close(fd)
            if not file.upload:
                file.upload = self._store(file).begin(file.url)
                note = {"upload": file.upload, "shard": number, "name": file.url.name, "part_bytes": file.step}
                self._journal.note(note)
            write_range(file.spool, np.frombuffer(header, np.uint8), 0)
        self._uploaders = [
            threading.Thread(target=self._send, name=f"upload-{i}", daemon=True) for i in range(UPLOADERS)
        ]
        for thread in self._uploaders:
            thread.start()
        for number, header in enumerate(headers):
            self.commit(number, 0, len(header))

    def _find_uploaded(self) -> None:
        """Find the parts that an earlier run uploaded: those that both the journal and the store have."""
        journal_parts: list[dict[int, UploadedPart]] = [{} for _ in self._files]
        for file in self._files:
            file.upload, file.uploaded = "", {}
        for note in list(self._journal.notes):
            file = self._files[note["shard"]]
            if "upload" in note:
                file.upload = note["upload"] if note["part_bytes"] == file.step else ""
                journal_parts[note["shard"]] = {}
            elif "part" in note:
                journal_parts[note["shard"]][note["part"]] = UploadedPart(note["part"], note["etag"], note["bytes"])
        for file, parts in zip(self._files, journal_parts, strict=True):
            if not file.upload:
                continue
            uploaded = self._store(file).list_parts(file.url, file.upload)
            if uploaded is not None:
                file.uploaded = {n - 1: part for n, part in parts.items() if uploaded.get(n) == part}
            elif len(parts) == len(file.missing) and self._store(file).is_complete(
                file.url, [parts[n] for n in sorted(parts)]
            ):
                file.published = True
            else:
                file.upload = ""  # the store has discarded it

    def has(self, shard: int, offset: int, nbytes: int) -> bool:
        file = self._files[shard]
        return all(part in file.uploaded for part, _ in file.split(offset, nbytes))

    def can_skip(self, shard: int, offset: int, nbytes: int) -> bool:
        # Errors are measured over whole tensors, so none of their jobs may be skipped.
        return not self._measure and self.has(shard, offset, nbytes)

    # ---------------------------------------------------------------- while jobs run

    def write(self, shard: int, data: U8, offset: int) -> None:
        write_range(self._files[shard].spool, data, offset)

    def copy(self, shard: int, file: Path, begin: int, offset: int, nbytes: int) -> bool:
        return copy_range(file, self._files[shard].spool, begin, offset, nbytes)

    def sync(self, shards: Iterable[int]) -> None:
        """Do nothing: only uploaded data counts."""

    def file(self, shard: int) -> Path | None:
        return None

    def crc(self, shard: int, offset: int, nbytes: int) -> int:
        return -1

    def commit(self, shard: int, offset: int, nbytes: int) -> None:
        file = self._files[shard]
        for part, count in file.split(offset, nbytes):
            if part in file.uploaded:  # encoded again to measure errors, or because a job extends beyond the part
                punch(file.spool, *file.range_of(part))
                continue
            with self._lock:
                file.missing[part] -= count
                complete = file.missing[part] == 0
            if complete:
                self._queue(file, part)
        if self._failure is not None:
            raise self._failure

    def _queue(self, file: _File, part: int) -> None:
        """Queue a part for upload; wait while the queue is full."""
        with self._free:
            if part in file.queued:
                return
            file.queued.add(part)
            self._waiting += 1
            self._ready.put((file, part))
            self._free.wait_for(lambda: self._waiting <= UPLOADERS + WAITING or self._failure is not None)

    def _send(self) -> None:
        """Upload queued parts until the queue ends."""
        while (item := self._ready.get()) is not None:
            try:
                if self._failure is None and not self._closing:
                    self._upload(*item)
            except BaseException as e:  # raised in the waiting thread
                self._failure = self._failure or e
            with self._free:
                self._waiting -= 1
                self._free.notify_all()

    def _upload(self, file: _File, part: int) -> None:
        begin, nbytes = file.range_of(part)
        with open(file.spool, "rb") as spool:
            spool.seek(begin)
            data = spool.read(nbytes)
        uploaded = self._store(file).upload(file.url, file.upload, part + 1, data)
        shard = self._files.index(file)
        self._journal.note({"shard": shard, "part": uploaded.number, "etag": uploaded.tag, "bytes": uploaded.nbytes})
        with self._lock:
            file.uploaded[part] = uploaded
        punch(file.spool, begin, nbytes)

    # ---------------------------------------------------------------- at the end

    def _end(self) -> None:
        for _ in self._uploaders:
            self._ready.put(None)
        for thread in self._uploaders:
            thread.join()
        self._uploaders = []

    def finish(self) -> None:
        """Upload the remaining parts and wait for all of them. Raises OSError."""
        for file in self._files:
            for part in range(len(file.missing)):
                if part not in file.uploaded:
                    self._queue(file, part)
        self._end()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Start no further upload, and wait for those in flight."""
        self._closing = True
        self._end()

    def is_whole(self) -> bool:
        self._find_uploaded()
        return all(file.published or len(file.uploaded) == len(file.missing) for file in self._files)

    def publish(self) -> None:
        for file in self._files:
            if not file.published:
                try:
                    self._store(file).complete(file.url, file.upload, file.parts, overwrite=self._overwrite)
                except FileExistsError as e:
                    raise ResourceError(
                        f"{file.url}: {e.strerror}; replace it with --resume --overwrite", "QK-E402"
                    ) from None
                except (ProcessLookupError, FileNotFoundError):
                    raise ResourceError(
                        f"{file.url}: its upload no longer exists; run again with --overwrite", "QK-E412"
                    ) from None
            file.spool.unlink(missing_ok=True)

    def discard(self) -> None:
        """Abort the uploads of this run and of an earlier one."""
        self.close()
        uploads = [(file.url, file.upload) for file in self._files if file.upload and not file.published]
        uploads += [(self._files[0].url.with_name(name), upload) for name, upload in self._left]
        for url, upload in dict.fromkeys(uploads):
            with suppress(OSError):
                self._store(self._files[0]).abort(url, upload)
        self._left = []
        self._closing = False
        self._failure = None
        for file in self._files:
            file.upload = ""
            file.spool.unlink(missing_ok=True)

"""Outputs in stores. What jobs write grows in a folder of this machine, the spool, and goes on from there.

``Parts``, for S3: a file is cut into parts. As soon as all bytes of one are written it is uploaded and its place on the
disk given back, so the spool never holds more than what is under way. The journal knows every part that is there, so a
killed run goes on with the same upload, and makes only what was not uploaded. The object appears when all parts are
there and the upload is completed; a run that fails aborts it.

``Whole``, for other stores: the files lie whole in the spool, as a run on this machine leaves them, and are then put
where they belong, each under another name until all of it is there.
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

from quantkit.errors import ResourceError
from quantkit.formats.outputs import part_path
from quantkit.formats.ranges import U8, copy_range, punch, write_range
from quantkit.formats.remote import URL
from quantkit.formats.remote import s3 as store
from quantkit.formats.remote.s3 import S3, Uploaded
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.target import Files, Place
from quantkit.units import format_size

#: Uploads at the same time, and finished parts that may wait for one before jobs wait for them.
UPLOADERS, WAITING = 4, 4


def place_of(plan: Plan, journal: Journal, *, measure: bool, overwrite: bool) -> Place:
    """Return where the files of a plan grow: beside their names, or in the spool of a store."""
    paths = [shard.path for shard in plan.shards]
    sizes = [shard.layout.nbytes for shard in plan.shards]
    urls = [path for path in paths if isinstance(path, URL)]
    if not urls:
        return Files(paths, sizes)
    if not isinstance(urls[0].store, S3):
        return Whole(urls, sizes, overwrite=overwrite)
    ranges: list[list[tuple[int, int]]] = [[(0, len(shard.layout.header))] for shard in plan.shards]
    for tensor in plan.tensors:
        ranges[tensor.shard].append((tensor.offset, tensor.nbytes))
    return Parts(urls, sizes, ranges, journal, measure=measure, overwrite=overwrite)


class Whole(Files):
    """Files in the spool that are put into a store when they are finished."""

    def __init__(self, urls: Sequence[URL], sizes: Sequence[int], *, overwrite: bool) -> None:
        super().__init__([url.local for url in urls], sizes)
        self._urls, self._overwrite, self._nbytes = urls, overwrite, sizes

    def is_whole(self) -> bool:
        files = zip(self._urls, self._nbytes, strict=True)
        return all(_length(part_path(url)) == nbytes or _has_length(url, nbytes) for url, nbytes in files)

    def publish(self) -> None:
        for url in self._urls:
            part = part_path(url)
            if part.exists():
                if not self._overwrite and URL(url.address).is_file():
                    raise ResourceError(f"{url} has appeared meanwhile; --resume --overwrite replaces it")
                url.store.put(url, part)
                part.unlink()
            elif not URL(url.address).is_file():
                raise ResourceError(f"{part} has vanished; run again with --overwrite")


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _has_length(url: URL, nbytes: int) -> bool:
    with suppress(OSError):
        return URL(url.address).facts.size == nbytes
    return False


class _File:
    """One file of an output: its spool, its upload, its parts, and how many bytes each of them still lacks."""

    def __init__(self, url: URL, nbytes: int, ranges: Iterable[tuple[int, int]], step: int) -> None:
        self.url, self.nbytes, self.step, self.spool = url, nbytes, step, part_path(url)
        self.upload = ""
        self.uploaded: dict[int, Uploaded] = {}
        self.published = False
        self.lacks = [0] * (-(-nbytes // step))
        self.queued: set[int] = set()
        for offset, length in ranges:
            for part, here in self.cut(offset, length):
                self.lacks[part] += here

    def cut(self, offset: int, nbytes: int) -> Iterable[tuple[int, int]]:
        """Yield the parts, from 0, that a range lies in, and how many of its bytes are in each."""
        for part in range(offset // self.step, -(-(offset + nbytes) // self.step)):
            begin = part * self.step
            yield part, min(offset + nbytes, begin + self.step) - max(offset, begin)

    def range_of(self, part: int) -> tuple[int, int]:
        """Return where a part begins, and its length."""
        begin = part * self.step
        return begin, min(self.step, self.nbytes - begin)

    @property
    def parts(self) -> list[Uploaded]:
        return [self.uploaded[part] for part in sorted(self.uploaded)]


class Parts:
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
            _File(url, nbytes, held, store.part_bytes(nbytes, store.PART))
            for url, nbytes, held in zip(urls, sizes, ranges, strict=True)
        ]
        self._journal, self._measure, self._overwrite = journal, measure, overwrite
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._ready: queue.SimpleQueue[tuple[_File, int] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._failure: BaseException | None = None
        self._stopped = False
        #: Uploads that an earlier run has left, by the names of their objects.
        self._left = [(note["name"], note["upload"]) for note in journal.left() if "upload" in note]
        self._uploaders: list[threading.Thread] = []

    def _store(self, file: _File) -> S3:
        found = file.url.store
        assert isinstance(found, S3)
        return found

    # ---------------------------------------------------------------- before jobs run

    def reserve(self, headers: Sequence[bytes]) -> None:
        """Begin the uploads, or go on with those of the journal."""
        folder = self._files[0].spool.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._take_over()
        need = min(sum(f.nbytes for f in self._files), (UPLOADERS + WAITING + 2) * max(f.step for f in self._files))
        free = shutil.disk_usage(folder).free
        if need > free:
            raise ResourceError(
                f"{folder}: {format_size(need)} are needed and {format_size(free)} are free; name another --spool"
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
            self.done(number, 0, len(header))

    def _take_over(self) -> None:
        """Find the parts that an earlier run uploaded: those of the journal that the store has, too."""
        noted: list[dict[int, Uploaded]] = [{} for _ in self._files]
        for file in self._files:
            file.upload, file.uploaded = "", {}
        for note in list(self._journal.notes):
            file = self._files[note["shard"]]
            if "upload" in note:
                file.upload = note["upload"] if note["part_bytes"] == file.step else ""
                noted[note["shard"]] = {}
            elif "part" in note:
                noted[note["shard"]][note["part"]] = Uploaded(note["part"], note["etag"], note["bytes"])
        for file, known in zip(self._files, noted, strict=True):
            if not file.upload:
                continue
            there = self._store(file).uploaded(file.url, file.upload)
            if there is not None:
                file.uploaded = {n - 1: part for n, part in known.items() if there.get(n) == part}
            elif len(known) == len(file.lacks) and self._store(file).is_complete(
                file.url, [known[n] for n in sorted(known)]
            ):
                file.published = True
            else:
                file.upload = ""  # the store has thrown it away

    def has(self, shard: int, offset: int, nbytes: int) -> bool:
        file = self._files[shard]
        return all(part in file.uploaded for part, _ in file.cut(offset, nbytes))

    def spares(self, shard: int, offset: int, nbytes: int) -> bool:
        # Errors are measured of whole tensors, so none of their jobs may be left out.
        return not self._measure and self.has(shard, offset, nbytes)

    # ---------------------------------------------------------------- while jobs run

    def write(self, shard: int, data: U8, offset: int) -> None:
        write_range(self._files[shard].spool, data, offset)

    def copy(self, shard: int, file: Path, begin: int, offset: int, nbytes: int) -> bool:
        return copy_range(file, self._files[shard].spool, begin, offset, nbytes)

    def sync(self, shards: Iterable[int]) -> None:
        """Do nothing: what counts is what was uploaded."""

    def file(self, shard: int) -> Path | None:
        return None

    def crc(self, shard: int, offset: int, nbytes: int) -> int:
        return -1

    def done(self, shard: int, offset: int, nbytes: int) -> None:
        file = self._files[shard]
        for part, here in file.cut(offset, nbytes):
            if part in file.uploaded:  # made again for its errors, or because a job reaches beyond the part
                punch(file.spool, *file.range_of(part))
                continue
            with self._lock:
                file.lacks[part] -= here
                complete = file.lacks[part] == 0
            if complete:
                self._queue(file, part)
        if self._failure is not None:
            raise self._failure

    def _queue(self, file: _File, part: int) -> None:
        """Have a part uploaded; wait while too many others are to be."""
        with self._free:
            if part in file.queued:
                return
            file.queued.add(part)
            self._waiting += 1
            self._ready.put((file, part))
            self._free.wait_for(lambda: self._waiting <= UPLOADERS + WAITING or self._failure is not None)

    def _send(self) -> None:
        """Upload what is ready, until told to end."""
        while (item := self._ready.get()) is not None:
            try:
                if self._failure is None and not self._stopped:
                    self._upload(*item)
            except BaseException as e:  # raised by whoever waits
                self._failure = self._failure or e
            with self._free:
                self._waiting -= 1
                self._free.notify_all()

    def _upload(self, file: _File, part: int) -> None:
        begin, nbytes = file.range_of(part)
        with open(file.spool, "rb") as spool:
            spool.seek(begin)
            data = spool.read(nbytes)
        sent = self._store(file).upload(file.url, file.upload, part + 1, data)
        shard = self._files.index(file)
        self._journal.note({"shard": shard, "part": sent.number, "etag": sent.tag, "bytes": sent.nbytes})
        with self._lock:
            file.uploaded[part] = sent
        punch(file.spool, begin, nbytes)

    # ---------------------------------------------------------------- at the end

    def _end(self) -> None:
        for _ in self._uploaders:
            self._ready.put(None)
        for thread in self._uploaders:
            thread.join()
        self._uploaders = []

    def finish(self) -> None:
        """Upload what is left, and return when every part is there. Raises OSError."""
        for file in self._files:
            for part in range(len(file.lacks)):
                if part not in file.uploaded:
                    self._queue(file, part)
        self._end()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Begin no further upload, and wait for those under way."""
        self._stopped = True
        self._end()

    def is_whole(self) -> bool:
        self._take_over()
        return all(file.published or len(file.uploaded) == len(file.lacks) for file in self._files)

    def publish(self) -> None:
        for file in self._files:
            if not file.published:
                try:
                    self._store(file).complete(file.url, file.upload, file.parts, overwrite=self._overwrite)
                except FileExistsError as e:
                    raise ResourceError(f"{file.url}: {e.strerror}; --resume --overwrite replaces it") from None
                except (ProcessLookupError, FileNotFoundError):
                    raise ResourceError(f"{file.url}: its upload has vanished; run again with --overwrite") from None
            file.spool.unlink(missing_ok=True)

    def discard(self) -> None:
        """Abort the uploads, and those of an earlier run."""
        self.close()
        uploads = [(file.url, file.upload) for file in self._files if file.upload and not file.published]
        uploads += [(self._files[0].url.with_name(name), upload) for name, upload in self._left]
        for url, upload in dict.fromkeys(uploads):
            with suppress(OSError):
                self._store(self._files[0]).abort(url, upload)
        self._left, self._stopped, self._failure = [], False, None
        for file in self._files:
            file.upload = ""
            file.spool.unlink(missing_ok=True)

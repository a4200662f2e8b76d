"""One run's use of the tensor cache: what it takes from there, and what it leaves.

Before the run, ``look_up`` asks which entries are known to have what the plan encodes: their jobs read nothing of the
source. Where the source was not read before, the first piece of its rows tells whether an entry may have them; such
jobs read and digest their rows, and compare. What is encoded is copied to the cache from the output, when a tensor is
on the disk and before it is in the journal. Whatever goes wrong in the cache's folder, the run goes on, with a note.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats.cache_entry import (
    DATA,
    RECORD,
    DamagedEntry,
    Entry,
    EntryName,
    Header,
    Pieces,
    digest,
    source_digest,
)
from quantkit.kernels.tensor_scale import TAIL, TENSOR_SCALED
from quantkit.pipeline.cache.keys import how_digest, identity, importance_digest, is_encoded, pieces_of
from quantkit.pipeline.cache.memo import Memo
from quantkit.pipeline.cache.store import Store
from quantkit.pipeline.jobs import MENDED, TAKEN, Cached, Job, JobResult
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.planned import PlannedTensor, RowSlice
from quantkit.pipeline.source import Source
from quantkit.types import TensorType
from quantkit.units import format_size
from quantkit.version import __version__

#: The most characters of a name that an entry is labelled with: any of them fit into its header.
_LABEL = 100


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a cache did for a run, or would do: of ``tensors`` that are encoded, ``taken`` came from it.

    Of some it can only be told by reading (``unread``); ``damaged`` entries were made anew, ``kept`` ones are new.
    """

    folder: Path
    tensors: int
    taken: int
    unread: int = 0
    taken_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    damaged: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.taken} of {self.tensors} tensors"


@dataclass(slots=True)
class _Part:
    """A part of a tensor that is encoded: ``source``, the digest of its rows, is None if nobody remembers it."""

    how: str
    importance: str | None
    identity: str | None
    source: str | None
    #: The entry that is known to have it, or those that may.
    entries: list[EntryName]

    @property
    def is_known(self) -> bool:
        return self.source is not None and bool(self.entries)


class RunCache:
    """The cache of a run of ``plan``, or of a dry run, which changes nothing.

    ``measure``: entries must have error sums; ``done``: tensors left out.
    """

    def __init__(
        self, store: Store, plan: Plan, *, measure: bool, done: Collection[str] = (), dry: bool = False
    ) -> None:
        self.store, self.plan, self.measure, self.dry = store, plan, measure, dry
        self.fingerprint = plan.source.fingerprint()
        self.memo = Memo(store.sources(self.fingerprint), store.run)
        self._model = _model_name(plan.source)
        #: What this run took or kept, which it does not evict; bytes of all entries, once they are counted.
        self._ours: set[Path] = set()
        self._total: int | None = None
        self._taken: list[PlannedTensor] = []
        self._kept, self._damaged, self._too_many = list[int](), 0, 0
        self._short_of_memory = False
        #: Entries in the making, by tensor and part, where jobs write them.
        self._own: dict[tuple[str, int], Path] = {}
        #: Why nothing more is kept.
        self._trouble = ""
        #: By tensor and by number, without tensors that have none.
        self._parts = {t.name: found for t in plan.tensors if t.name not in done and (found := self._look_up(t))}

    # ------------------------------------------------------------ before a job

    def _look_up(self, tensor: PlannedTensor) -> dict[int, _Part]:
        parts = enumerate(tensor.parts)
        return {number: self._look_up_part(tensor, part) for number, part in parts if is_encoded(part, tensor.type)}

    def _look_up_part(self, tensor: PlannedTensor, part: RowSlice) -> _Part:
        importance = importance_digest(part)
        how = how_digest(part, tensor, importance)
        what = identity(self.plan.source, self.fingerprint, part, tensor.type)
        source = self.memo.get(what)
        entries = [name for name in self.store.encoded(how) if source in (None, name.source)]
        found = _Part(how, importance, what, source, entries)
        if found.is_known and self._open(found, entries[0]) is None:
            found.entries = []
        return found

    def _open(self, part: _Part, name: EntryName) -> Header | None:
        """Return the header of an entry that serves this run, or None; one that is damaged is removed."""
        try:
            with Entry(self.store.path(name)) as entry:
                header = entry.header
        except (OSError, DamagedEntry) as e:
            self._remove(name, e)
            return None
        return header if not self.measure or (header.measured and header.weighted == part.importance) else None

    def _remove(self, name: EntryName, why: Exception) -> None:
        if isinstance(why, DamagedEntry):
            self._damaged += 1
            with suppress(OSError):
                if not self.dry:
                    self.store.path(name).unlink()

    def is_known(self, tensor: PlannedTensor) -> bool:
        """Tell whether all that would be encoded of a tensor is known to be in the cache."""
        parts = self._parts.get(tensor.name, {})
        return bool(parts) and all(part.is_known for part in parts.values())

    def foreseen(self) -> CacheUse:
        """Return what the cache would do, as far as can be told without reading the source."""
        unread = sum(any(p.source is None and p.entries for p in parts.values()) for parts in self._parts.values())
        return CacheUse(self.store.folder, len(self._parts), sum(map(self.is_known, self.plan.tensors)), unread)

    def prepare(self, tensor: PlannedTensor, jobs: Sequence[Job], file: Path | None) -> list[Job]:
        """Return a tensor's jobs with what the cache is to do for them; ``file``: as for ``keep``."""
        entries: dict[int, tuple[EntryName, bytes] | None] = {}
        out = []
        for job in jobs:
            part = self._parts.get(tensor.name, {}).get(job.part)
            if part is None:
                out.append(job)
                continue
            pieces = pieces_of(tensor.parts[job.part], tensor.type)
            if not pieces.whole(job.row, job.rows):
                self._short_of_memory = True
                out.append(job)
                continue
            if job.part not in entries:
                entries[job.part] = self._entry(tensor.parts[job.part], tensor.type, part, pieces)
            cached = self._cached(job, pieces, part, entries[job.part])
            if file is None and not self._trouble:
                self._try(partial(self._make_own, tensor, job.part))
                cached = replace(cached, keep=self._own.get((tensor.name, job.part)))
            out.append(replace(job, cached=cached))
        return out

    def _cached(self, job: Job, pieces: Pieces, part: _Part, found: tuple[EntryName, bytes] | None) -> Cached:
        at = pieces.at(job.matrix, job.row)
        if found is None:
            return Cached(at=at)
        name, records = found
        span, size = pieces.span(job.matrix, job.row, job.rows), RECORD.itemsize
        own = records[span.start * size : span.stop * size]
        return Cached(self.store.path(name).absolute(), at, own, part.is_known)

    def _make_own(self, tensor: PlannedTensor, number: int) -> None:
        """Name the file that a part's jobs write to."""
        if (tensor.name, number) not in self._own:
            self._own[tensor.name, number] = self.store.temporary_path().absolute()

    def _entry(
        self, part: RowSlice, target: TensorType, found: _Part, pieces: Pieces
    ) -> tuple[EntryName, bytes] | None:
        """Return the entry that has a part, or may have it, and its records."""
        names = found.entries
        if names and not found.is_known:
            first = self._first(part, pieces)
            names = [name for name in names if name.first == first]
        for name in names[:1]:
            header = self._open(found, name)
            if header is None or header.pieces != pieces:
                continue
            try:
                with Entry(self.store.path(name)) as entry:
                    return name, entry.records().tobytes()
            except (OSError, DamagedEntry) as e:
                self._remove(name, e)
        return None

    def _first(self, part: RowSlice, pieces: Pieces) -> str:
        """Return the digest of the first piece of a part, as entries are named by it; "" if it cannot be read."""
        row_bytes = part.source.type.row_bytes(part.values)
        data, tail = np.empty(min(pieces.piece, pieces.rows) * row_bytes, np.uint8), np.empty(0, np.uint8)
        try:
            self.plan.source.read(part.source, data, part.source_row * row_bytes)
            if part.source.type is TENSOR_SCALED:
                tail = np.empty(4, np.uint8)
                self.plan.source.read(part.source, tail, part.source.nbytes - TAIL)
        except (OSError, FormatError):  # the job will say so
            return ""
        return digest(data, tail.tobytes()).hex()[:16]

    # ------------------------------------------------------------ after a tensor's jobs

    def keep(self, tensor: PlannedTensor, results: Iterable[tuple[Job, JobResult]], file: Path | None) -> None:
        """Keep what was encoded of a tensor, whose bytes are in ``file``, or where its jobs were told to write them.

        Raises FormatError if the source is not what it was when its digest was remembered.
        """
        by_part: dict[int, list[tuple[Job, JobResult]]] = {}
        for job, result in results:
            if job.cached is not None:
                by_part.setdefault(job.part, []).append((job, result))
        for number, done in by_part.items():
            done.sort(key=lambda each: (each[0].matrix, each[0].row))
            try:
                self._keep_part(tensor, number, done, file)
            finally:
                self._drop_own(tensor, number)
        ready = {number for number, done in by_part.items() if all(result.origin == TAKEN for _, result in done)}
        if tensor.name in self._parts and ready == self._parts[tensor.name].keys():
            self._taken.append(tensor)

    def _keep_part(
        self, tensor: PlannedTensor, number: int, done: list[tuple[Job, JobResult]], file: Path | None
    ) -> None:
        part, found = tensor.parts[number], self._parts[tensor.name][number]
        data = b"".join(result.records for _, result in done)
        pieces, records = pieces_of(part, tensor.type), np.frombuffer(data, RECORD)
        if len(records) != pieces.count:
            return
        source = source_digest(records)
        if found.source not in (None, source) and any(result.origin == TAKEN for _, result in done):
            self.memo.forget()
            where = self.plan.source.where(part.source)
            raise FormatError(
                f"{where}: tensor {part.source.name} is not what it was when the cache {self.store.folder} took note "
                "of it, though the file's size and time are the same; that note is removed: run again"
            )
        name = EntryName(found.how, records["source"][0].tobytes().hex()[:16], source)
        path = self.store.path(name)
        if any(result.origin == MENDED for _, result in done):
            self._remove(name, DamagedEntry())
        if all(result.origin == TAKEN for _, result in done):
            self.store.touch(path)
            self._ours.add(path)
        else:
            own = self._own.get((tensor.name, number))
            header = self._header(tensor, found, source, pieces)
            if file is not None:
                self._put(name, header, file, _ranges(tensor, part, pieces), data)
            elif own is not None and not any(result.origin == TAKEN for _, result in done):
                self._put(name, header, own, [(DATA, pieces.nbytes)], data)
        if found.identity is not None:
            self._try(partial(self.memo.add, found.identity, source))

    def _header(self, tensor: PlannedTensor, found: _Part, source: str, pieces: Pieces) -> Header:
        made = {"model": self._model, "tensor": tensor.name[:_LABEL], "type": tensor.type.name, "by": __version__}
        weighted = found.importance if self.measure else None
        return Header(found.how, source, pieces, measured=self.measure, weighted=weighted, made=made)

    def _drop_own(self, tensor: PlannedTensor, number: int) -> None:
        if (own := self._own.pop((tensor.name, number), None)) is not None:
            with suppress(OSError):
                own.unlink()

    def _put(self, name: EntryName, header: Header, file: Path, ranges: list[tuple[int, int]], records: bytes) -> None:
        """Make an entry of ranges of a file."""
        self._try(partial(self._put_if_room, name, header, file, ranges, records))

    def _put_if_room(
        self, name: EntryName, header: Header, file: Path, ranges: list[tuple[int, int]], records: bytes
    ) -> None:
        nbytes = DATA + header.pieces.nbytes + len(records)
        if nbytes > self.store.limit:  # for which nothing is to be evicted
            self._too_many += 1
            return
        if self._total is None:
            self.store.clear_temporary()
        if self._total is None or self._total + nbytes > self.store.limit:
            self._total = self.store.room(nbytes, self._ours)
        if self._total + nbytes > self.store.limit:
            self._too_many += 1
            return
        self._ours.add(self.store.path(name))
        self._kept.append(self.store.put(name, header, file, ranges, records))
        self._total += self._kept[-1]

    def _try(self, change: Callable[[], None]) -> None:
        """Change the cache's folder; if that fails, nothing more is tried."""
        if not self._trouble:
            try:
                change()
            except OSError as e:
                self._trouble = f"{e.filename or self.store.folder}: {e.strerror or e}"

    # ------------------------------------------------------------ at the end

    def drop(self) -> None:
        """Remove what jobs wrote to the cache and nobody asked for, because the run failed."""
        for path in self._own.values():
            with suppress(OSError):
                path.unlink()
        self._own.clear()

    def close(self) -> CacheUse:
        """Note the run in the cache, and return what it did."""
        tensors, taken = len(self._parts), len(self._taken)
        use = CacheUse(
            *(self.store.folder, tensors, taken, 0, sum(t.nbytes for t in self._taken)),
            *(len(self._kept), sum(self._kept), self._damaged),
        )
        if tensors:
            entry = {"time": int(time.time()), "model": self._model, "type": self.plan.title, "tensors": tensors}
            entry |= {"taken": taken, "bytes": use.taken_bytes, "kept": use.kept}
            self._try(partial(self.store.note, entry))
            self._try(self.memo.tidy)
        return replace(use, notes=tuple(self._notes()))

    def _notes(self) -> Iterable[str]:
        where = f"the cache {self.store.folder}"
        if self._damaged:
            yield f"{where}: {_count(self._damaged, 'entry was', 'entries were')} damaged and removed"
        if self._trouble:
            yield f"{where} is not written to: {self._trouble}; what is in it was used all the same"
        if self._too_many:
            tensors = _count(self._too_many, "tensor was", "tensors were")
            yield f"{where} is full: {tensors} not kept; its limit is {format_size(self.store.limit)} (--cache-size)"
        if self._short_of_memory:
            yield f"{where} was not used for tensors whose rows are too many for --max-ram: give more of it"


def _ranges(tensor: PlannedTensor, part: RowSlice, pieces: Pieces) -> list[tuple[int, int]]:
    """Return where the rows of a part lie in the file of the output: offset and length."""
    if part.rows == part.target_rows:
        return [(tensor.offset, pieces.nbytes)]
    begins = (matrix * part.target_rows + part.target_row for matrix in range(part.matrices))
    return [(tensor.offset + begin * pieces.row_bytes, pieces.rows * pieces.row_bytes) for begin in begins]


def _count(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _model_name(source: Source) -> str:
    found = source.get("general.name") or source.get("general.basename") or source.paths[0].name
    return str(found)[:_LABEL]

"""A run's use of the tensor cache: entries it reads, and entries it adds.

Before the run, ``look_up`` finds the entries that are known to match the plan: their jobs do not read the source. If
the source was not read before, the first piece of its rows decides whether an entry may match; such jobs read and
digest their rows, and compare. Encoded tensors are copied to the cache from the output, after a tensor is on the disk
and before it is journaled. If anything fails in the cache's folder, the run continues, with a note.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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
from quantkit.kernels.tensor_scale import TAIL
from quantkit.pipeline.cache.keys import encoding_digest, identity, importance_digest, is_cached, pieces_of
from quantkit.pipeline.cache.store import Store
from quantkit.pipeline.jobs import FROM_CACHE, REPAIRED, Cached, Job, JobResult
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.row_slices import PlannedPart, PlannedTensor
from quantkit.pipeline.source import Source
from quantkit.units import format_size
from quantkit.version import __version__

#: Maximum length of a name in an entry's labels, so that they fit into its header.
_LABEL = 100


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Statistics of a run's cache: ``hits`` of ``tensors`` came from it.

    ``unread``: tensors for which only reading the source decides; ``damaged`` entries were encoded again, ``stored``
    ones are new.
    """

    folder: Path
    tensors: int
    hits: int
    unread: int = 0
    hit_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    damaged: int = 0
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        names = {"hits": "taken", "hit_bytes": "taken_bytes", "stored": "kept", "stored_bytes": "kept_bytes"}
        return {names.get(name, name): value for name, value in asdict(self).items()} | {"folder": str(self.folder)}

    def __str__(self) -> str:
        return f"{self.hits} of {self.tensors} tensors"


@dataclass(slots=True)
class _Lookup:
    """A part of a tensor that is encoded: ``source``, the digest of its rows, is None if unknown."""

    encoding: str
    importance: str | None
    identity: str | None
    source: str | None
    #: The entry known to match, or the candidates.
    entries: list[EntryName]

    @property
    def is_known(self) -> bool:
        return self.source is not None and bool(self.entries)


class RunCache:
    """The cache of a run of ``plan``, or of a dry run, which does not change it.

    ``measure``: entries must have error sums; ``skip``: names of tensors to skip.
    """

    def __init__(
        self, store: Store, plan: Plan, *, measure: bool, skip: Collection[str] = (), dry: bool = False
    ) -> None:
        self.store = store
        self.plan = plan
        self.measure = measure
        self.dry = dry
        self.fingerprint = plan.source.fingerprint()
        self.memo = store.memo(self.fingerprint)
        self._model = _model_name(plan.source)
        #: Entries of this run, which it does not evict; bytes of all entries, once they are counted.
        self._pinned: set[Path] = set()
        self._total: int | None = None
        self._hits: list[PlannedTensor] = []
        self._stored = list[int]()
        self._n_damaged = 0
        self._n_rejected = 0
        self._short_of_memory = False
        #: Temporary files of new entries, by tensor and part, where jobs write them.
        self._temporary: dict[tuple[str, int], Path] = {}
        #: The error after which nothing more is stored.
        self._failure = ""
        #: By tensor and by number, without tensors that have none.
        self._parts = {t.name: parts for t in plan.tensors if t.name not in skip and (parts := self._look_up(t))}

    # ------------------------------------------------------------ before a job

    def _look_up(self, tensor: PlannedTensor) -> dict[int, _Lookup]:
        parts = enumerate(tensor.parts)
        return {number: self._look_up_part(part) for number, part in parts if is_cached(part)}

    def _look_up_part(self, part: PlannedPart) -> _Lookup:
        importance = importance_digest(part)
        encoding = encoding_digest(part, importance)
        source_id = identity(self.plan.source, self.fingerprint, part)
        source = self.memo.get(source_id)
        entries = [name for name in self.store.find(encoding) if source in (None, name.source)]
        lookup = _Lookup(encoding, importance, source_id, source, entries)
        if lookup.is_known and self._open(lookup, entries[0]) is None:
            lookup.entries = []
        return lookup

    def _open(self, part: _Lookup, name: EntryName) -> Header | None:
        """Return the header of an entry that this run can use, or None; a damaged entry is removed."""
        try:
            with Entry(self.store.path(name)) as entry:
                header = entry.header
        except (OSError, DamagedEntry) as e:
            self._remove(name, e)
            return None
        return header if not self.measure or (header.has_errors and header.weighted == part.importance) else None

    def _remove(self, name: EntryName, error: Exception) -> None:
        if isinstance(error, DamagedEntry):
            self._n_damaged += 1
            with suppress(OSError):
                if not self.dry:
                    self.store.remove(self.store.path(name))

    def is_known(self, tensor: PlannedTensor) -> bool:
        """Return whether all encoded rows of a tensor are known to be in the cache."""
        parts = self._parts.get(tensor.name, {})
        return bool(parts) and all(part.is_known for part in parts.values())

    def forecast(self) -> CacheUse:
        """Return the expected use, as far as it is known without reading the source."""
        unread = sum(any(p.source is None and p.entries for p in parts.values()) for parts in self._parts.values())
        return CacheUse(self.store.folder, len(self._parts), sum(map(self.is_known, self.plan.tensors)), unread)

    def prepare(self, tensor: PlannedTensor, jobs: Sequence[Job], file: Path | None) -> list[Job]:
        """Return a tensor's jobs with their cache records; ``file``: as for ``add``."""
        entries: dict[int, tuple[EntryName, bytes] | None] = {}
        out = []
        for job in jobs:
            part = self._parts.get(tensor.name, {}).get(job.part)
            if part is None:
                out.append(job)
                continue
            pieces = pieces_of(tensor.parts[job.part])
            if not pieces.is_aligned(job.row, job.rows):
                self._short_of_memory = True
                out.append(job)
                continue
            if job.part not in entries:
                entries[job.part] = self._entry(tensor.parts[job.part], part, pieces)
            cached = self._describe(job, pieces, part, entries[job.part])
            if file is None and not self._failure:
                self._try(partial(self._make_temporary, tensor, job.part))
                cached = replace(cached, temporary=self._temporary.get((tensor.name, job.part)))
            out.append(replace(job, cached=cached))
        return out

    def _describe(self, job: Job, pieces: Pieces, part: _Lookup, entry: tuple[EntryName, bytes] | None) -> Cached:
        offset = pieces.row_offset(job.matrix, job.row)
        if entry is None:
            return Cached(offset=offset)
        name, records = entry
        span, size = pieces.span(job.matrix, job.row, job.rows), RECORD.itemsize
        job_records = records[span.start * size : span.stop * size]
        return Cached(self.store.path(name).absolute(), offset, job_records, part.is_known)

    def _make_temporary(self, tensor: PlannedTensor, number: int) -> None:
        """Create the file that a part's jobs write to."""
        if (tensor.name, number) not in self._temporary:
            self._temporary[tensor.name, number] = self.store.make_temporary().absolute()

    def _entry(self, part: PlannedPart, lookup: _Lookup, pieces: Pieces) -> tuple[EntryName, bytes] | None:
        """Return the entry that contains a part, or may contain it, and its records."""
        names = lookup.entries
        if names and not lookup.is_known:
            first = self._first_digest(part, pieces)
            names = [name for name in names if name.first_piece == first]
        for name in names[:1]:
            header = self._open(lookup, name)
            if header is None or header.pieces != pieces:
                continue
            try:
                with Entry(self.store.path(name)) as entry:
                    return name, entry.records().tobytes()
            except (OSError, DamagedEntry) as e:
                self._remove(name, e)
        return None

    def _first_digest(self, part: PlannedPart, pieces: Pieces) -> str:
        """Return the digest of the first piece of a part, by which entries are named; "" if it cannot be read."""
        row_bytes = part.source.type.row_bytes(part.values)
        data, tail = np.empty(min(pieces.piece, pieces.rows) * row_bytes, np.uint8), np.empty(0, np.uint8)
        try:
            self.plan.source.read(part.source, data, part.source_row * row_bytes)
            if part.encoding.has_tensor_scale:
                tail = np.empty(4, np.uint8)
                self.plan.source.read(part.source, tail, part.source.nbytes - TAIL)
        except (OSError, FormatError):  # the job reports it
            return ""
        return digest(data, tail.tobytes()).hex()[:16]

    # ------------------------------------------------------------ after a tensor's jobs

    def add(self, tensor: PlannedTensor, results: Iterable[tuple[Job, JobResult]], file: Path | None) -> None:
        """Add the encoded rows of a tensor, which are in ``file``, or in the temporary files of its jobs.

        Raises FormatError if the source has changed since its digest was recorded.
        """
        by_part: dict[int, list[tuple[Job, JobResult]]] = {}
        for job, result in results:
            if job.cached is not None:
                by_part.setdefault(job.part, []).append((job, result))
        for number, part_results in by_part.items():
            part_results.sort(key=lambda pair: (pair[0].matrix, pair[0].row))
            try:
                self._add_part(tensor, number, part_results, file)
            finally:
                self._drop_temporary(tensor, number)
        cached_parts = {
            number for number, pairs in by_part.items() if all(result.origin == FROM_CACHE for _, result in pairs)
        }
        if tensor.name in self._parts and cached_parts == self._parts[tensor.name].keys():
            self._hits.append(tensor)

    def _add_part(
        self, tensor: PlannedTensor, number: int, results: list[tuple[Job, JobResult]], file: Path | None
    ) -> None:
        part, lookup = tensor.parts[number], self._parts[tensor.name][number]
        data = b"".join(result.records for _, result in results)
        pieces, records = pieces_of(part), np.frombuffer(data, RECORD)
        if len(records) != pieces.count:
            return
        source = source_digest(records)
        if lookup.source not in (None, source) and any(result.origin == FROM_CACHE for _, result in results):
            self.memo.forget()
            where = self.plan.source.where(part.source)
            raise FormatError(
                f"{where}: tensor {part.source.name} has changed since the cache {self.store.folder} recorded it, "
                "although the file's size and time are the same; the record is removed: run again",
                "QK-E109",
            )
        name = EntryName(lookup.encoding, records["source"][0].tobytes().hex()[:16], source)
        path = self.store.path(name)
        if any(result.origin == REPAIRED for _, result in results):
            self._remove(name, DamagedEntry())
        if all(result.origin == FROM_CACHE for _, result in results):
            self.store.touch(path)
            self._pinned.add(path)
        else:
            temporary = self._temporary.get((tensor.name, number))
            header = self._header(tensor, lookup, source, pieces)
            if file is not None:
                self._try_store(name, header, file, _ranges(tensor, part, pieces), data)
            elif temporary is not None and not any(result.origin == FROM_CACHE for _, result in results):
                self._try_store(name, header, temporary, [(DATA, pieces.nbytes)], data)
        if lookup.identity is not None:
            self._try(partial(self.memo.add, lookup.identity, source))

    def _header(self, tensor: PlannedTensor, lookup: _Lookup, source: str, pieces: Pieces) -> Header:
        labels = {"model": self._model, "tensor": tensor.name[:_LABEL], "type": tensor.type.name, "by": __version__}
        weighted = lookup.importance if self.measure else None
        return Header(lookup.encoding, source, pieces, has_errors=self.measure, weighted=weighted, origin=labels)

    def _drop_temporary(self, tensor: PlannedTensor, number: int) -> None:
        if (path := self._temporary.pop((tensor.name, number), None)) is not None:
            self.store.remove_temporary(path)

    def _try_store(
        self, name: EntryName, header: Header, file: Path, ranges: list[tuple[int, int]], records: bytes
    ) -> None:
        """Create an entry from ranges of a file."""
        self._try(partial(self._store_if_room, name, header, file, ranges, records))

    def _store_if_room(
        self, name: EntryName, header: Header, file: Path, ranges: list[tuple[int, int]], records: bytes
    ) -> None:
        nbytes = DATA + header.pieces.nbytes + len(records)
        if nbytes > self.store.limit:  # for which nothing should be evicted
            self._n_rejected += 1
            return
        if self._total is None:
            self.store.clear_temporary()
        if self._total is None or self._total + nbytes > self.store.limit:
            self._total = self.store.make_room(nbytes, self._pinned)
        if self._total + nbytes > self.store.limit:
            self._n_rejected += 1
            return
        self._pinned.add(self.store.path(name))
        self._stored.append(self.store.add(name, header, file, ranges, records))
        self._total += self._stored[-1]

    def _try(self, change: Callable[[], None]) -> None:
        """Change the cache's folder; do nothing after a failure."""
        if not self._failure:
            try:
                change()
            except OSError as e:
                self._failure = f"{e.filename or self.store.folder}: {e.strerror or e}"

    # ------------------------------------------------------------ at the end

    def drop(self) -> None:
        """Remove unfinished cache entries of jobs, because the run failed."""
        for path in self._temporary.values():
            self.store.remove_temporary(path)
        self._temporary.clear()

    def close(self) -> CacheUse:
        """Record the run in the cache, and return its use."""
        tensors, hits = len(self._parts), len(self._hits)
        use = CacheUse(
            folder=self.store.folder,
            tensors=tensors,
            hits=hits,
            hit_bytes=sum(t.nbytes for t in self._hits),
            stored=len(self._stored),
            stored_bytes=sum(self._stored),
            damaged=self._n_damaged,
        )
        if tensors:
            entry = {"time": int(time.time()), "model": self._model, "type": self.plan.title, "tensors": tensors}
            entry |= {"taken": hits, "bytes": use.hit_bytes, "kept": use.stored}
            self._try(partial(self.store.note, entry))
            self._try(self.memo.tidy)
        return replace(use, notes=tuple(self._notes()))

    def _notes(self) -> Iterable[str]:
        where = f"the cache {self.store.folder}"
        if self._n_damaged:
            yield f"{where}: {_count(self._n_damaged, 'entry was', 'entries were')} damaged and removed"
        if self._failure:
            yield f"{where} cannot be written: {self._failure}; its entries were still used"
        if self._n_rejected:
            tensors = _count(self._n_rejected, "tensor was", "tensors were")
            yield f"{where} is full: {tensors} not stored; its limit is {format_size(self.store.limit)} (--cache-size)"
        if self._short_of_memory:
            yield f"{where} was not used for tensors that exceed --max-ram: raise --max-ram"


def _ranges(tensor: PlannedTensor, part: PlannedPart, pieces: Pieces) -> list[tuple[int, int]]:
    """Return the ranges (offset, length) of a part's rows in the output file."""
    if part.rows == part.target_rows:
        return [(tensor.offset, pieces.nbytes)]
    starts = (matrix * part.target_rows + part.target_row for matrix in range(part.matrices))
    return [(tensor.offset + begin * pieces.row_bytes, pieces.rows * pieces.row_bytes) for begin in starts]


def _count(n: int, singular: str, plural: str) -> str:
    return f"{n} {singular if n == 1 else plural}"


def _model_name(source: Source) -> str:
    name = source.get("general.name") or source.get("general.basename") or source.paths[0].name
    return str(name)[:_LABEL]

"""The ledger of a run: finished jobs, and the steps after the last job of a tensor.

Results come from any executor, in any order. A tensor is journaled only after its bytes were flushed to the disk.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Protocol

from quantkit.pipeline.cache.run_cache import RunCache
from quantkit.pipeline.jobs import NO_CRC, ErrorSums, Job, JobResult, cut_jobs
from quantkit.pipeline.journal import Journal, JournalEntry
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.pipeline.target import LedgerTarget, Target
from quantkit.pipeline.worker import origin_digest


class RunObserver(Protocol):
    """Callbacks of a run, called from worker threads, one call at a time."""

    def on_resume(self, tensors: int, nbytes: int) -> None:
        """Report that ``tensors`` with ``nbytes`` in total exist already."""

    def on_write(self, nbytes: int) -> None:
        """Report that ``nbytes`` of output were written."""

    def on_tensor(self, tensor: PlannedTensor) -> None:
        """Report that a tensor is complete."""

    def on_note(self, text: str) -> None:
        """Report a note on the nodes of a cluster to the user."""

    def on_stage(self, stage: int, stages: int, tokens: int, total: int) -> None:
        """Report that ``done`` of ``total`` calibration tokens have passed a stage of the model."""


@dataclass(frozen=True)
class NodeShare:
    """The share of a cluster node in a run."""

    name: str
    cpus: int
    nbytes: int


@dataclass
class _Tally:
    """The results of one tensor's jobs, by offset, until they are complete."""

    missing: int
    results: dict[int, tuple[Job, JobResult]] = field(default_factory=dict)

    def entry(self, tensor: PlannedTensor, values: int) -> JournalEntry:
        """Return the journal entry of a tensor; sums are added in the order of the bytes."""
        crc = 0
        sums = ErrorSums()
        losses = dict[tuple[int, int], ErrorSums]()
        results = [self.results[offset] for offset in sorted(self.results)]
        for job, result in results:
            for piece in result.sums:
                sums = sums + piece
                losses[job.part, job.matrix] = losses.get((job.part, job.matrix), ErrorSums()) + piece
            crc = NO_CRC if result.crc == NO_CRC else crc32_combine(crc, result.crc, job.target_bytes)
        by_matrix = list[list[float]]()
        for (part, matrix), s in sorted(losses.items()):
            inputs = tensor.parts[part].inputs
            if inputs is not None and inputs.tokens is not None:
                by_matrix.append([part, matrix, inputs.tokens[matrix], s.loss_before, s.loss_after, s.rows_improved])
        checks = [result.source for _, result in results if result.source is not None]
        is_complete = len(checks) == len(results) and sum(job.target_bytes for job, _ in results) == tensor.nbytes
        source = (values, origin_digest(tensor, checks)) if is_complete else None
        return JournalEntry(crc, list(sums), by_matrix, source)


class Work(Protocol):
    """The work of an executor: a ledger, or a part of one."""

    plan: Plan
    max_ram: int
    stop: threading.Event

    @property
    def target(self) -> Target: ...

    def to_encode(self) -> list[PlannedTensor]: ...

    def jobs(self) -> Iterator[Job]: ...

    def finish(self, job: Job, result: JobResult) -> None: ...

    def fail(self, e: BaseException) -> None: ...


class Ledger:
    """The remaining work of a plan and its records: a context manager whose thread flushes and journals tensors.

    Leaving it waits until every complete tensor is journaled and, with a ``cache``, cached.
    """

    def __init__(
        self,
        plan: Plan,
        target: LedgerTarget,
        journal: Journal,
        values: int,
        max_ram: int,
        observer: RunObserver | None,
        cache: RunCache | None = None,
    ) -> None:
        self.plan = plan
        self.target = target
        self.journal = journal
        self.observer = observer
        self.values = values
        self.max_ram = max_ram
        self.cache = cache
        #: Set when the run is to end early, because something failed or was interrupted.
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._tallies: dict[int, _Tally] = {}
        self._complete_tensors: queue.SimpleQueue[tuple[PlannedTensor, _Tally] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._flusher = threading.Thread(target=self._flush, name="journal")

    def __enter__(self) -> Ledger:
        self._flusher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._complete_tensors.put(None)
        self._flusher.join()
        if e is None and self._failure is not None:
            raise self._failure

    def to_encode(self) -> list[PlannedTensor]:
        """Return the tensors that need kernels: neither journaled nor in the cache."""
        pending = (tensor for tensor in self.plan.tensors if tensor.name not in self.journal.crcs)
        return [tensor for tensor in pending if self.cache is None or not self.cache.is_known(tensor)]

    def jobs(self, names: Collection[str] | None = None) -> Iterator[Job]:
        """Yield the jobs of tensors that are not in the journal, in order; for one thread at a time.

        names: only the jobs of these tensors, each of which may be requested once.
        """
        journaled = set(self.journal.crcs)
        for index, tensor in enumerate(self.plan.tensors):
            if tensor.name in journaled or names is not None and tensor.name not in names:
                continue
            if not tensor.nbytes:
                with self._lock:
                    self._complete(tensor, _Tally(0))
                continue
            jobs = list(cut_jobs(index, tensor, self.values))
            pending = [j for j in jobs if not self.target.can_skip(tensor.shard, j.target_offset, j.target_bytes)]
            if self.cache is not None and len(pending) == len(jobs):  # an entry is a whole tensor
                pending = self.cache.prepare(tensor, jobs, self.target.file(tensor.shard))
            jobs = pending
            self._tallies[index] = _Tally(len(jobs))
            yield from jobs

    def finish(self, job: Job, result: JobResult) -> None:
        """Record a job's result, from any thread, once per job."""
        tensor = self.plan.tensors[job.tensor]
        self.target.commit(tensor.shard, job.target_offset, job.target_bytes)
        with self._lock:
            tally = self._tallies[job.tensor]
            tally.results[job.target_offset] = (job, result)
            tally.missing -= 1
            complete = tally.missing == 0
            if self.observer is not None:
                self.observer.on_write(job.target_bytes)
            if complete:
                del self._tallies[job.tensor]
                self._complete(tensor, tally)

    def _complete(self, tensor: PlannedTensor, tally: _Tally) -> None:
        """Record a completely written tensor; the caller holds the lock."""
        if self.observer is not None:
            self.observer.on_tensor(tensor)
        self._complete_tensors.put((tensor, tally))

    def part(self, names: Collection[str], order: Callable[[Job], Any] | None = None) -> LedgerPart:
        """Return the work of some tensors, its jobs sorted by ``order``."""
        return LedgerPart(self, frozenset(names), order)

    def fail(self, e: BaseException) -> None:
        """End the run; the first failure is raised at its end."""
        with self._lock:
            self._failure = self._failure or e
        self.stop.set()

    def _flush(self) -> None:
        """Flush and journal finished tensors, all those together that finished during the last flush."""
        is_last = False
        while not is_last:
            batch = [self._complete_tensors.get()]
            with suppress(queue.Empty):
                while True:
                    batch.append(self._complete_tensors.get_nowait())
            is_last = None in batch
            tensors = [entry for entry in batch if entry is not None]
            try:
                self.target.sync({tensor.shard for tensor, _ in tensors})
                if self.cache is not None:
                    for tensor, tally in tensors:
                        self.cache.add(tensor, tally.results.values(), self.target.file(tensor.shard))
                if tensors:
                    self.journal.add({tensor.name: tally.entry(tensor, self.values) for tensor, tally in tensors})
            except BaseException as e:  # raised again at the end of the run
                self.fail(e)
                return


class LedgerPart:
    """The work of some tensors of a ledger; see ``Work``."""

    def __init__(self, ledger: Ledger, names: frozenset[str], order: Callable[[Job], Any] | None) -> None:
        self._ledger = ledger
        self._names = names
        self._order = order
        self.plan = ledger.plan
        self.target = ledger.target
        self.max_ram = ledger.max_ram
        self.stop = ledger.stop
        self.finish, self.fail = ledger.finish, ledger.fail

    def to_encode(self) -> list[PlannedTensor]:
        return [tensor for tensor in self._ledger.to_encode() if tensor.name in self._names]

    def jobs(self) -> Iterator[Job]:
        jobs = self._ledger.jobs(self._names)
        return jobs if self._order is None else iter(sorted(jobs, key=self._order))


# ---------------------------------------------------------------- checksums


_POLY = 0xEDB88320


def _crc_multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo the CRC-32 polynomial (bit-reversed, as zlib keeps them)."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLY if b & 1 else b >> 1
        bit >>= 1
    return product


@lru_cache(maxsize=256)
def _crc_shift(length: int) -> int:
    """Return x^(8 * length): appending ``length`` zero bytes to A multiplies its CRC by that."""
    shift = 1 << 31
    power = 1 << 30
    n = 8 * length
    while n:
        if n & 1:
            shift = _crc_multiply(power, shift)
        power = _crc_multiply(power, power)
        n >>= 1
    return shift


def crc32_combine(crc1: int, crc2: int, length2: int) -> int:
    """Return the CRC-32 of A + B from those of A and B and the length of B (zlib's crc32_combine)."""
    return _crc_multiply(_crc_shift(length2), crc1) ^ crc2

"""The ledger of a run: which jobs are done, and what becomes of a tensor whose jobs all are.

Results come from any executor, in any order. A tensor is journaled only after its bytes were flushed to the disk.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from quantkit.pipeline.cache.use import RunCache
from quantkit.pipeline.crc32 import crc32_combine
from quantkit.pipeline.jobs import NO_CRC, ErrorSums, Job, JobResult, cut_jobs
from quantkit.pipeline.journal import Journal, JournalEntry
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.target import Kept, Target


class Progress(Protocol):
    """What a run tells while it runs; called from worker threads, one call at a time."""

    def resumed(self, tensors: int, nbytes: int) -> None:
        """Report that ``tensors`` of ``nbytes`` together were there already."""

    def wrote(self, nbytes: int) -> None:
        """Report that ``nbytes`` of output were written."""

    def finished(self, tensor: PlannedTensor) -> None:
        """Report that a tensor is complete."""

    def said(self, text: str) -> None:
        """Report what the user should know about the nodes of a cluster."""

    def ran(self, stage: int, stages: int, tokens: int, total: int) -> None:
        """Report that so many tokens of a calibration, of ``total``, have gone through a stage of the model."""


@dataclass(frozen=True)
class NodeShare:
    """What a node of a cluster did of a run."""

    name: str
    cpus: int
    nbytes: int


@dataclass
class _Tally:
    """The results of one tensor's jobs, by offset, until all are there."""

    missing: int
    results: dict[int, tuple[Job, JobResult]] = field(default_factory=dict)

    def entry(self, tensor: PlannedTensor) -> JournalEntry:
        """Return what the journal has of a tensor: sums are added in the order of the bytes."""
        crc, sums, losses = 0, ErrorSums(), dict[tuple[int, int], ErrorSums]()
        for offset in sorted(self.results):
            job, result = self.results[offset]
            for piece in result.sums:
                sums = sums + piece
                losses[job.part, job.matrix] = losses.get((job.part, job.matrix), ErrorSums()) + piece
            crc = NO_CRC if result.crc == NO_CRC else crc32_combine(crc, result.crc, job.target_bytes)
        by_matrix = list[list[float]]()
        for (part, matrix), s in sorted(losses.items()):
            inputs = tensor.parts[part].inputs or tensor.parts[part].refit
            if inputs is not None and inputs.tokens is not None:
                by_matrix.append([part, matrix, inputs.tokens[matrix], s.loss_before, s.loss_after, s.rows_fed])
        return JournalEntry(crc, list(sums), by_matrix)


class Work(Protocol):
    """What an executor is given: a ledger, or a part of one."""

    plan: Plan
    max_ram: int
    stop: threading.Event

    @property
    def target(self) -> Target: ...

    def to_encode(self) -> list[PlannedTensor]: ...

    def jobs(self) -> Iterator[Job]: ...

    def done(self, job: Job, result: JobResult) -> None: ...

    def fail(self, e: BaseException) -> None: ...


class Ledger:
    """The work of a plan that is left, and its bookkeeping: a context whose thread flushes and journals tensors.

    Leaving it waits until every tensor that is complete is in the journal. With a ``cache``, it is there before.
    """

    def __init__(
        self,
        plan: Plan,
        target: Kept,
        journal: Journal,
        values: int,
        max_ram: int,
        observer: Progress | None,
        cache: RunCache | None = None,
    ) -> None:
        self.plan, self.target, self.journal, self.observer = plan, target, journal, observer
        self.values, self.max_ram, self.cache = values, max_ram, cache
        #: Set when the run is to end early, because something failed or was interrupted.
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._tallies: dict[int, _Tally] = {}
        self._finished: queue.SimpleQueue[tuple[PlannedTensor, _Tally] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._flusher = threading.Thread(target=self._flush, name="journal")

    def __enter__(self) -> Ledger:
        self._flusher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._finished.put(None)
        self._flusher.join()
        if e is None and self._failure is not None:
            raise self._failure

    def to_encode(self) -> list[PlannedTensor]:
        """Return the tensors that need kernels: those that neither the journal nor, surely, the cache has."""
        left = (tensor for tensor in self.plan.tensors if tensor.name not in self.journal.done)
        return [tensor for tensor in left if self.cache is None or not self.cache.is_known(tensor)]

    def jobs(self, names: Collection[str] | None = None) -> Iterator[Job]:
        """Yield the jobs of tensors that are not in the journal, in order; for one thread at a time.

        names: of these tensors only, each of which must be asked for once.
        """
        done = set(self.journal.done)
        for at, tensor in enumerate(self.plan.tensors):
            if tensor.name in done or names is not None and tensor.name not in names:
                continue
            jobs = list(cut_jobs(at, tensor, self.values))
            left = [j for j in jobs if not self.target.spares(tensor.shard, j.target_offset, j.target_bytes)]
            if self.cache is not None and len(left) == len(jobs):  # an entry is a whole tensor
                left = self.cache.prepare(tensor, jobs, self.target.file(tensor.shard))
            jobs = left
            self._tallies[at] = _Tally(len(jobs))
            yield from jobs

    def done(self, job: Job, result: JobResult) -> None:
        """Enter what a job gave; from any thread, once for each job."""
        tensor = self.plan.tensors[job.tensor]
        self.target.done(tensor.shard, job.target_offset, job.target_bytes)
        with self._lock:
            tally = self._tallies[job.tensor]
            tally.results[job.target_offset] = (job, result)
            tally.missing -= 1
            complete = tally.missing == 0
            if self.observer is not None:
                self.observer.wrote(job.target_bytes)
                if complete:
                    self.observer.finished(tensor)
            if complete:
                del self._tallies[job.tensor]
        if complete:
            self._finished.put((tensor, tally))

    def part(self, names: Collection[str], order: Callable[[Job], Any] | None = None) -> Part:
        """Return the work of some tensors, its jobs sorted by ``order``."""
        return Part(self, frozenset(names), order)

    def fail(self, e: BaseException) -> None:
        """End the run; the first failure is raised when it has ended."""
        with self._lock:
            self._failure = self._failure or e
        self.stop.set()

    def _flush(self) -> None:
        """Flush and journal finished tensors, as many together as have come up during the last flush."""
        ended = False
        while not ended:
            batch = [self._finished.get()]
            with suppress(queue.Empty):
                while True:
                    batch.append(self._finished.get_nowait())
            ended = None in batch
            tensors = [entry for entry in batch if entry is not None]
            try:
                self.target.sync({tensor.shard for tensor, _ in tensors})
                if self.cache is not None:
                    for tensor, tally in tensors:
                        self.cache.keep(tensor, tally.results.values(), self.target.file(tensor.shard))
                if tensors:
                    self.journal.add({tensor.name: tally.entry(tensor) for tensor, tally in tensors})
            except BaseException as e:  # raised when the run has ended
                self.fail(e)
                return


class Part:
    """The work of some tensors of a ledger; see ``Work``."""

    def __init__(self, ledger: Ledger, names: frozenset[str], order: Callable[[Job], Any] | None) -> None:
        self._ledger, self._names, self._order = ledger, names, order
        self.plan, self.target, self.max_ram, self.stop = ledger.plan, ledger.target, ledger.max_ram, ledger.stop
        self.done, self.fail = ledger.done, ledger.fail

    def to_encode(self) -> list[PlannedTensor]:
        return [tensor for tensor in self._ledger.to_encode() if tensor.name in self._names]

    def jobs(self) -> Iterator[Job]:
        jobs = self._ledger.jobs(self._names)
        return jobs if self._order is None else iter(sorted(jobs, key=self._order))

"""Carry out a plan: jobs on threads, bytes under a temporary name, a journal, one atomic rename at the end.

The order of events is what makes a run safe to kill at any moment: the whole file is reserved first; tensors are
journaled only after their bytes were flushed; the header is written like any other bytes; and the final name
appears, by rename, only when everything is on the disk.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, Unpack

import numpy as np

from quantkit.errors import QuantkitError, ResourceError, TypeNotSupported
from quantkit.formats.outputs import Output, check_apart, check_free, part_path
from quantkit.formats.ranges import Buffers, crc32_range, reserve, sync, write_range
from quantkit.helpers import available_cpus, crc32_combine, format_size
from quantkit.kernels.first_run import compile_together, working_seconds
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.plan import Plan, check_kernels
from quantkit.pipeline.warm import kernel_calls
from quantkit.pipeline.work import JOB, NO_CRC, ErrorSums, Job, JobResult, PlannedTensor, Worker, cut_jobs, job_values

#: Bytes that all buffers together may take, unless told otherwise.
DEFAULT_MAX_RAM = 512 << 20


class Progress(Protocol):
    """What a run tells while it runs; called from worker threads, one call at a time."""

    def resumed(self, tensors: int, nbytes: int) -> None:
        """Report that ``tensors`` of ``nbytes`` together were there already."""

    def wrote(self, nbytes: int) -> None:
        """Report that ``nbytes`` of output were written."""

    def finished(self, tensor: PlannedTensor) -> None:
        """Report that a tensor is complete."""


class RunOptions(TypedDict, total=False):
    """How a plan is carried out.

    threads: worker threads; all available CPUs without. resume: go on with an interrupted run of the same plan, if
    there is one. overwrite: replace an existing output, and throw an interrupted run away. measure_error: also decode
    what was encoded, and sum up the error. observer: is told of progress.
    """

    threads: int | None
    resume: bool
    overwrite: bool
    measure_error: bool
    observer: Progress | None


@dataclass
class _Tally:
    """The results of one tensor's jobs, by offset, until all are there."""

    missing: int
    results: dict[int, tuple[int, JobResult]] = field(default_factory=dict)

    def total(self) -> tuple[int, ErrorSums]:
        """Return the CRC-32 of the tensor (NO_CRC of a copy) and its error sums, added in the order of the bytes."""
        crc, sums = 0, ErrorSums()
        for offset in sorted(self.results):
            nbytes, result = self.results[offset]
            sums = sums + result.sums
            crc = NO_CRC if result.crc == NO_CRC else crc32_combine(crc, result.crc, nbytes)
        return crc, sums


@dataclass(frozen=True)
class RunResult:
    """What a run did: seconds, tensors taken over from an earlier run, and the error sums where measured."""

    seconds: float
    resumed: int
    sums: dict[str, ErrorSums]


def journal_path(path: Path) -> Path:
    """Return the name of an output's journal."""
    return path.with_name(path.name + ".journal")


def run_plan(
    plan: Plan,
    *,
    max_ram: int = DEFAULT_MAX_RAM,
    publishing: Callable[[], AbstractContextManager[None]] = nullcontext,
    **options: Unpack[RunOptions],
) -> RunResult:
    """Write the plan's output; on return it lies complete and synced under its final name.

    Args:
        plan: what to write.
        max_ram: bytes that all workers' buffers may take together.
        publishing: a context in which finished files get their names; the journal goes after it, so that a run that
            ends within it can be resumed.

    Raises:
        TypeNotSupported: a type has no encoder or decoder in this version.
        ResourceError: no room on the disk or in memory, the output exists, or another run writes it.
        FormatError: the source holds values or blocks that no file should; the partial output is removed.
    """
    began = working_seconds()
    check_kernels(plan.tensors)
    threads, observer = options.get("threads") or available_cpus(), options.get("observer")
    resume, overwrite = options.get("resume", False), options.get("overwrite", False)
    measure = options.get("measure_error", False)
    first = plan.shards[0].path
    check_targets(plan, resume=resume, overwrite=True)
    values = job_values(list(plan.tensors), threads, max_ram)
    with ExitStack() as stack:
        stack.enter_context(Output(first, overwrite=True))
        check_targets(plan, resume=resume, overwrite=overwrite)
        journal = stack.enter_context(Journal(journal_path(first), plan.fingerprint))
        resumed = _prepare(plan, journal, resume=resume, overwrite=overwrite)
        if observer is not None and resumed:
            observer.resumed(len(resumed), sum(t.nbytes for t in plan.tensors if t.name in resumed))
        if not journal.sealed:
            try:
                compile_together(kernel_calls(plan.tensors, measure))
                _Executor(plan, journal, threads, values, measure, observer).run(resumed)
            except QuantkitError:
                _discard(plan, journal)
                raise
            journal.seal()
        with publishing():
            _publish(plan)
        journal.remove()
    sums = {name: ErrorSums(*s) for name, s in journal.sums.items()}
    return RunResult(working_seconds() - began, len(resumed), sums)


def check_targets(plan: Plan, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse outputs that would destroy something, before anything is touched; ResourceError says which."""
    check_apart([*(s.path for s in plan.shards), journal_path(plan.shards[0].path)], (*plan.source.paths, *plan.reads))
    started = os.path.exists(journal_path(plan.shards[0].path))
    for shard in plan.shards:
        check_free(shard.path, overwrite=overwrite or resume and started)
    if started and not resume and not overwrite:
        raise ResourceError(
            f"{journal_path(plan.shards[0].path)} is there: an earlier run was interrupted; "
            "--resume goes on with it, --overwrite starts anew"
        )


def refusal(plan: Plan, beside: Path | None = None, *, resume: bool = False, overwrite: bool = False) -> str | None:
    """Return why a run that writes a plan, and ``beside``, would refuse, for a dry run; None if it would not."""
    try:
        check_kernels(plan.tensors)
        if beside is not None:
            check_free(beside, overwrite=overwrite)
        check_targets(plan, resume=resume, overwrite=overwrite)
    except (ResourceError, TypeNotSupported) as e:
        return e.message
    return None


def _prepare(plan: Plan, journal: Journal, *, resume: bool, overwrite: bool) -> set[str]:
    """Reserve the output and return the names of tensors that an earlier run finished."""
    if resume and journal.resume():
        if journal.sealed and not _is_whole(plan):
            journal.start()  # somebody cut or removed what was finished
        if not journal.sealed:
            _reserve(plan)
            _verify(plan, journal)
        return set(journal.done)
    if resume and journal.path.stat().st_size and not overwrite:
        raise ResourceError(
            f"{journal.path} is of other work (another source, type, recipe or imatrix), so --resume cannot go on "
            "with it; --overwrite starts anew"
        )
    try:
        journal.start()
        for shard in plan.shards:
            part_path(shard.path).unlink(missing_ok=True)
        _reserve(plan)
    except OSError as e:
        _discard(plan, journal)
        where = e.filename or plan.shards[0].path.parent
        raise ResourceError(f"{where}: {e.strerror or e}; nothing was written: make room, or write elsewhere") from e
    except BaseException:
        _discard(plan, journal)
        raise
    return set()


def _is_whole(plan: Plan) -> bool:
    """Return whether every finished file is there, under either name, with its full length."""
    found = [next((p for p in (part_path(s.path), s.path) if p.exists()), None) for s in plan.shards]
    sizes = [0 if path is None else path.stat().st_size for path in found]
    return sizes == [s.layout.nbytes for s in plan.shards]


def _reserve(plan: Plan) -> None:
    """Make every file of the output as long as it will be, with its header, or say that the disk is too small."""
    folder = plan.shards[0].path.parent
    have = sum(_allocated(part_path(s.path)) for s in plan.shards)
    free, need = shutil.disk_usage(folder).free, plan.nbytes - have
    if need > free:
        raise ResourceError(f"{folder}: {format_size(need)} are needed and {format_size(free)} are free")
    for shard in plan.shards:
        reserve(part_path(shard.path), shard.layout.nbytes)
        write_range(part_path(shard.path), np.frombuffer(shard.layout.header, np.uint8), 0)


def _allocated(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.exists() else 0


def _verify(plan: Plan, journal: Journal) -> None:
    """Strike out journaled tensors whose bytes on the disk are not those that were written."""
    for at, tensor in enumerate(plan.tensors):
        if tensor.name in journal.done and not _is_intact(plan, at, tensor, journal.done[tensor.name]):
            journal.forget(tensor.name)


def _is_intact(plan: Plan, at: int, tensor: PlannedTensor, crc: int) -> bool:
    path = part_path(plan.shards[tensor.shard].path)
    if crc != NO_CRC:
        return crc32_range(path, tensor.offset, tensor.nbytes) == crc
    buffers = Buffers()
    for job in cut_jobs(at, tensor, JOB):
        source = buffers.get("source", job.target_bytes)
        plan.source.read(tensor.parts[job.part].source, source, job.source_offset)
        if crc32_range(path, job.target_offset, job.target_bytes) != zlib.crc32(source.data):
            return False
    return True


def _publish(plan: Plan) -> None:
    """Give the finished files their names; what an earlier attempt renamed already is left alone."""
    for shard in plan.shards:
        part = part_path(shard.path)
        if part.exists():
            part.replace(shard.path)
        elif not shard.path.exists():
            raise ResourceError(f"{part} has vanished; run again with --overwrite")
    sync(plan.shards[0].path.parent)


def _discard(plan: Plan, journal: Journal) -> None:
    """Remove what a run that cannot succeed has written."""
    for shard in plan.shards:
        part_path(shard.path).unlink(missing_ok=True)
    journal.remove()


class _Executor:
    """Threads that take jobs from one list, and a thread that flushes and journals finished tensors."""

    def __init__(
        self, plan: Plan, journal: Journal, threads: int, values: int, measure: bool, observer: Progress | None
    ) -> None:
        self.plan, self.journal, self.threads, self.values = plan, journal, threads, values
        self.measure, self.observer = measure, observer
        self._lock = threading.Lock()
        self._tallies: dict[int, _Tally] = {}
        self._finished: queue.SimpleQueue[tuple[PlannedTensor, int, ErrorSums] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._stop = threading.Event()

    def run(self, skip: set[str]) -> None:
        """Run all jobs of tensors not in ``skip``; raise the first failure after all threads have ended."""
        jobs = self._jobs(skip)
        workers = [threading.Thread(target=self._work, args=(jobs,), name=f"encode-{i}") for i in range(self.threads)]
        flusher = threading.Thread(target=self._flush, name="journal")
        for thread in (*workers, flusher):
            thread.start()
        try:
            for thread in workers:
                while thread.is_alive():
                    thread.join(0.2)
        except BaseException:
            self._stop.set()
            raise
        finally:
            try:
                for thread in workers:
                    thread.join()
            finally:  # a second Ctrl-C must not leave the flusher waiting
                self._finished.put(None)
                flusher.join()
        if self._failure is not None:
            raise self._failure
        self._sync()

    def _jobs(self, skip: set[str]) -> Iterator[Job]:
        for at, tensor in enumerate(self.plan.tensors):
            if tensor.name in skip:
                continue
            jobs = list(cut_jobs(at, tensor, self.values))
            self._tallies[at] = _Tally(len(jobs))
            yield from jobs

    def _work(self, jobs: Iterator[Job]) -> None:
        worker = Worker(
            self.plan.source,
            tuple(part_path(s.path) for s in self.plan.shards),
            measure=self.measure,
            ahead=2 * self.threads,
        )
        try:
            while not self._stop.is_set():
                with self._lock:
                    job = next(jobs, None)
                if job is None:
                    return
                self._done(job, worker.run(job, self.plan.tensors[job.tensor]))
        except BaseException as e:  # handed to the main thread
            with self._lock:
                self._failure = self._failure or e
            self._stop.set()

    def _done(self, job: Job, result: JobResult) -> None:
        tensor = self.plan.tensors[job.tensor]
        with self._lock:
            tally = self._tallies[job.tensor]
            tally.results[job.target_offset] = (job.target_bytes, result)
            tally.missing -= 1
            complete = tally.missing == 0
            if self.observer is not None:
                self.observer.wrote(job.target_bytes)
                if complete:
                    self.observer.finished(tensor)
            if complete:
                del self._tallies[job.tensor]
        if complete:
            self._finished.put((tensor, *tally.total()))

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
                for shard in {tensor.shard for tensor, _, _ in tensors}:
                    sync(part_path(self.plan.shards[shard].path))
                self.journal.add({tensor.name: (crc, list(sums)) for tensor, crc, sums in tensors})
            except BaseException as e:  # handed to the main thread
                self._failure = self._failure or e
                self._stop.set()
                return

    def _sync(self) -> None:
        for shard in self.plan.shards:
            sync(part_path(shard.path))

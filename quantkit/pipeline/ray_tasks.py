"""Nodes of a Ray cluster as an executor: each pulls batches of jobs, on files that all of them see.

A worker process opens source and output once, and refuses if they are not the ones that the driver sees. It reports a
batch when the bytes are on the disk, because nobody else can flush what is in its memory. Jobs write the same bytes at
the same place whenever they run, so a batch may run twice. Batches take about ``SECONDS``, by what jobs of their kind
took before; towards the end they are smaller, so that all nodes end together.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quantkit.cluster import WIDTH, Cluster, Node, Refused
from quantkit.errors import FormatError, ResourceError
from quantkit.pipeline.journal import has_mark
from quantkit.pipeline.ledger import Ledger, NodeShare
from quantkit.pipeline.source import Source
from quantkit.pipeline.target import Files, OpenFiles
from quantkit.pipeline.warm import first_calls, kernel_calls
from quantkit.pipeline.work import Job, JobResult, PlannedTensor, Worker, metrics_for

#: Seconds that a batch is to take, and the least towards the end.
SECONDS, _LEAST = 3.0, 0.1
#: Seconds a value takes where nothing is known: slow, so that the first batch of a kind is small.
_SLOW = 2e-7
_FLUSH_SECONDS = 0.25
#: How long a node may take to see a file that the driver has written.
_SEEN_SECONDS = 10.0

#: What a job costs depends on these: types of its source and its target, whose encoder.
_Kind = tuple[str, str, str]


@dataclass(frozen=True)
class Shared:
    """What every worker process needs of a run."""

    source: Source
    fingerprint: str
    tensors: tuple[PlannedTensor, ...]
    #: Those whose kernels are needed.
    to_encode: tuple[PlannedTensor, ...]
    parts: tuple[Path, ...]
    journal: Path
    #: A line of the journal.
    mark: str
    measure: bool
    max_ram: int


class RayTasks:
    """The nodes of the cluster at ``address``, with at most ``threads`` CPUs each."""

    def __init__(self, address: str, threads: int | None = None) -> None:
        self._cluster, self._threads = Cluster(address), threads
        #: What each node did in the last run.
        self.nodes: tuple[NodeShare, ...] = ()
        found = self._cluster.nodes().values()
        if not found:
            raise ResourceError(f"--ray {address}: no node of the cluster has CPUs to give")
        self.count = max(self._cpus(node) for node in found)

    def _cpus(self, node: Node) -> int:
        return min(node.cpus, self._threads or node.cpus)

    def run(self, ledger: Ledger, *, measure: bool) -> None:
        """Run all jobs of a ledger on the nodes; on return none is under way."""
        if not isinstance(ledger.target, Files):
            raise ResourceError("--ray writes files that all nodes see: name one as the output")
        mark = secrets.token_hex(16)
        ledger.journal.mark(mark)
        plan = ledger.plan
        shared = Shared(
            plan.source,
            plan.source.fingerprint(),
            plan.tensors,
            tuple(ledger.to_encode()),
            tuple(part.absolute() for part in ledger.target.parts),
            ledger.journal.path.absolute(),
            mark,
            measure,
            ledger.max_ram,
        )
        work = _Jobs(ledger, shared, self)
        try:
            self._cluster.run(work)
        finally:
            self.nodes = tuple(NodeShare(n.name, self.cpus_of(n), n.done) for n in work.nodes if n.done)

    def cpus_of(self, node: Node) -> int:
        """Return how many CPUs of a node are used; one that came late has no more memory than the others."""
        return min(self._cpus(node), self.count)


class _Jobs:
    """The jobs of a ledger as work for a cluster: in batches, sized by what jobs of their kind took."""

    def __init__(self, ledger: Ledger, shared: Shared, executor: RayTasks) -> None:
        self.begin, self.shared = begin, shared
        self.ledger, self.executor = ledger, executor
        self.nodes: list[Node] = []
        self._jobs = ledger.jobs()
        self._next = next(self._jobs, None)
        #: Seconds per value, of each kind.
        self._pace: dict[_Kind, float] = {}
        #: Values that are not given out yet.
        self._left: Counter[_Kind] = Counter()
        for tensor in ledger.plan.tensors:
            if tensor.name not in ledger.journal.done:
                self._left[_kind(tensor)] += tensor.n_values

    @property
    def stopped(self) -> bool:
        return self.ledger.stop.is_set()

    def fit(self, node: Node) -> None:
        node.divide(self.executor.cpus_of(node), WIDTH)
        self.nodes.append(node)

    def batch(self, node: Node) -> list[Job] | None:
        """Return the next jobs, for some seconds of a worker's threads."""
        if self._next is None:
            return None
        left = sum(n * self._pace.get(kind, _SLOW) for kind, n in self._left.items())
        there = [each for each in self.nodes if each.cpus]
        cpus = sum(each.width * each.workers for each in there)
        alone = sum(each.workers for each in there) == 1  # nobody whom it would keep waiting
        seconds = node.width * (SECONDS if alone else min(SECONDS, max(_LEAST, left / (2 * max(1, cpus)))))
        jobs = list[Job]()
        while self._next is not None and (seconds > 0 or len(jobs) < node.width):
            job, kind = self._next, _kind(self.ledger.plan.tensors[self._next.tensor])
            n = _values(job, self.ledger.plan.tensors[job.tensor])
            seconds -= n * self._pace.get(kind, _SLOW)
            self._left[kind] -= n
            jobs.append(job)
            self._next = next(self._jobs, None)
        return jobs

    def done(self, node: Node, batch: list[Job], result: list[tuple[JobResult, float]]) -> None:
        for job, (found, seconds) in zip(batch, result, strict=True):
            tensor = self.ledger.plan.tensors[job.tensor]
            pace, kind = seconds / max(1, _values(job, tensor)), _kind(tensor)
            self._pace[kind] = pace + 0.9 * (self._pace.get(kind, pace) - pace)
            node.done += job.target_bytes
            self.ledger.done(job, found)

    def say(self, text: str) -> None:
        if self.ledger.observer is not None:
            self.ledger.observer.said(text)


def _kind(tensor: PlannedTensor) -> _Kind:
    return "+".join(part.source.type.name for part in tensor.parts), tensor.type.name, tensor.encoder


def _values(job: Job, tensor: PlannedTensor) -> int:
    """Return about how many values a job has."""
    return job.target_bytes * tensor.n_values // max(1, tensor.nbytes)


# ---------------------------------------------------------------- on the nodes


def load() -> None:
    """Load what any job needs, in a worker process that has nothing else to do."""
    from quantkit.kernels.cpu.core.jit import kernel_folder
    from quantkit.kernels.first_run import compile_together

    with _alone(kernel_folder() / "compiling.lock"):
        compile_together(first_calls())


def begin(shared: Shared, threads: int) -> Callable[[list[Job]], list[tuple[JobResult, float]]]:
    """Open source and output in a worker process, load its kernels, and return what runs a batch."""
    _check_source(shared)
    target = _opened(shared)
    from quantkit.kernels.cpu.core.jit import kernel_folder
    from quantkit.kernels.first_run import compile_together

    with _alone(kernel_folder() / "compiling.lock"):
        compile_together(kernel_calls(shared.to_encode, shared.measure))
    metrics = metrics_for(shared.tensors, shared.max_ram, threads)
    workers = [
        Worker(shared.source, target, metrics, measure=shared.measure, ahead=2 * threads) for _ in range(threads)
    ]
    return _Batches(shared.tensors, target, workers).run


def _check_source(shared: Shared) -> None:
    where = shared.source.paths[0]
    try:
        found = shared.source.fingerprint()
    except (OSError, FormatError) as e:
        raise Refused(f"{where} cannot be read there: {getattr(e, 'strerror', None) or e}") from None
    if found != shared.fingerprint:
        raise Refused(f"{where} is not the same file there: an older one, or another")


def _opened(shared: Shared) -> OpenFiles:
    """Open the output; raises Refused unless it is the file that the driver reserved."""
    ends = time.monotonic() + _SEEN_SECONDS
    while True:
        try:
            target = OpenFiles(shared.parts)
            # Now that they are open: a later run truncates the journal before it removes what grew.
            if has_mark(shared.journal, shared.mark):
                return target
            why = "is not the one that the driver writes"
            target.close()
        except OSError as e:
            why = f"cannot be written there: {e.strerror or e}"
        if time.monotonic() > ends:
            raise Refused(f"{shared.parts[0]} {why}")
        time.sleep(0.5)  # a network file system takes some seconds to show what is new


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process of a machine at a time compile; the others find the kernels in the cache."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):  # a file system without locks: they compile the same kernels
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class _Batches:
    """Runs batches on threads, each with a worker of its own."""

    def __init__(self, tensors: tuple[PlannedTensor, ...], target: OpenFiles, workers: list[Worker]) -> None:
        self.tensors, self.target, self.workers = tensors, target, workers

    def run(self, batch: list[Job]) -> list[tuple[JobResult, float]]:
        """Run jobs, flush what they wrote, and return their results, each with the seconds that it took."""
        results: dict[int, tuple[JobResult, float]] = {}
        failures: list[BaseException] = []
        numbers = iter(range(len(batch)))

        def work(worker: Worker) -> None:
            try:
                # next() of an iterator over a range is atomic.
                while not failures and (number := next(numbers, None)) is not None:
                    job, began = batch[number], time.perf_counter()
                    found = worker.run(job, self.tensors[job.tensor])
                    results[number] = found, time.perf_counter() - began
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in self.workers[1 : len(batch)]]
        for thread in threads:
            thread.start()
        with self._flushing({self.tensors[job.tensor].shard for job in batch}):
            work(self.workers[0])
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]
        return [results[number] for number in range(len(batch))]

    @contextmanager
    def _flushing(self, shards: set[int]) -> Iterator[None]:
        """Flush files all the time, so that little is left in the end; then the rest."""
        ended = threading.Event()
        failures: list[OSError] = []  # the kernel tells of one only once

        def flush() -> None:
            try:
                while not ended.wait(_FLUSH_SECONDS):
                    self.target.sync(shards)
            except OSError as e:
                failures.append(e)

        thread = threading.Thread(target=flush)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        if failures:
            raise failures[0]
        self.target.sync(shards)

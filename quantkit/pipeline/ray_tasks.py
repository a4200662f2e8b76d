"""Nodes of a Ray cluster as an executor: each pulls batches of jobs on shared files.

A worker process opens source and output once, and fails if they are not the driver's files. It reports a
batch when the bytes are on the disk, because no other process can flush its memory. Jobs always write the same bytes at
the same place, so a batch may run twice. Batches take about ``BATCH_SECONDS``, estimated from earlier jobs of their
kind; towards the end they are smaller, so that all nodes finish together.

The driver is the first worker of its own node: its threads take jobs one by one, as without a cluster, on CPUs that it
reserves from Ray. So a cluster of one machine starts no process, and its only cost is the connection.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quantkit.cluster import WIDTH, Cluster, Node, NodeRefusal
from quantkit.errors import ClusterError, FormatError, QuantkitError, ResourceError
from quantkit.pipeline.feedback import CpuMetricPool
from quantkit.pipeline.jobs import Job, JobResult
from quantkit.pipeline.journal import has_mark
from quantkit.pipeline.ledger import Ledger, NodeShare
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.pipeline.source import Source
from quantkit.pipeline.target import Files, OpenFiles
from quantkit.pipeline.threads import run_parallel
from quantkit.pipeline.warmup import first_calls, kernel_calls
from quantkit.pipeline.worker import Worker, metrics_for

if TYPE_CHECKING:
    from quantkit.pipeline.ray_gpus import GpuBatches

#: Target seconds of a batch, and the minimum towards the end.
BATCH_SECONDS, _MIN_BATCH_SECONDS = 3.0, 0.1
#: Seconds per value before any measurement: high, so that the first batch of a kind is small.
_DEFAULT_PACE = 2e-7
_FLUSH_SECONDS = 0.25
#: Seconds in which a node must see a file that the driver has written.
_VISIBILITY_SECONDS = 10.0

#: The kind of a job, which determines its speed: source and target type, encoder, and whether the node has GPUs.
_Kind = tuple[str, str, str]
_Pace = tuple[_Kind, bool]


@dataclass(frozen=True)
class RunSpec:
    """The data of a run that every worker process needs."""

    source: Source
    fingerprint: str
    tensors: tuple[PlannedTensor, ...]
    #: The tensors that need kernels.
    to_encode: tuple[PlannedTensor, ...]
    parts: tuple[Path, ...]
    journal: Path
    #: A line of the journal.
    mark: str
    measure: bool
    max_ram: int
    backend: str = "cpu"
    max_vram: int | None = None
    #: Number of workers that share the memory.
    workers: int = 1


class BatchResult(NamedTuple):
    """The results of a batch's jobs, the thread seconds of each, and notes for the user."""

    results: list[JobResult]
    seconds: list[float]
    notes: tuple[str, ...] = ()


class RayExecutor:
    """The nodes of the cluster at ``address``, with at most ``threads`` CPUs each.

    backend: "cpu"; "auto": nodes use their GPUs, at most ``max_vram`` bytes of each; "cuda": nodes without GPUs are
    skipped.
    """

    def __init__(
        self, address: str, threads: int | None = None, *, backend: str = "cpu", max_vram: int | None = None
    ) -> None:
        self._cluster = Cluster(address)
        self._threads = threads
        self._backend = backend
        self._max_vram = max_vram
        #: Shares of the nodes in the last run.
        self.nodes: tuple[NodeShare, ...] = ()
        nodes = self._cluster.nodes().values()
        if not nodes:
            raise ResourceError(f"--ray {address}: no node of the cluster has CPUs available", "QK-E450")
        self._max_cpus = max(self._cpus(node) for node in nodes)
        self.count = max(self._workers(node) for node in nodes)

    @property
    def uses_gpus(self) -> bool:
        """Whether nodes may use GPUs."""
        return self._backend != "cpu"

    def _cpus(self, node: Node) -> int:
        return min(node.cpus, self._threads or node.cpus)

    def _workers(self, node: Node) -> int:
        """Return the number of workers that share the memory of a node."""
        if not self.uses_gpus or not node.gpus:
            return self._cpus(node)
        from quantkit.pipeline.ray_gpus import workers_of

        return workers_of(self._cpus(node), node.gpus)

    def run(self, ledger: Ledger, *, measure: bool) -> None:
        """Run all jobs of a ledger on the nodes; no job is in flight on return."""
        if not isinstance(ledger.target, Files):
            raise ResourceError("--ray needs an output file that all nodes can access", "QK-E412")
        mark = secrets.token_hex(16)
        ledger.journal.mark(mark)
        plan = ledger.plan
        shared = RunSpec(
            plan.source,
            plan.source.fingerprint(),
            plan.tensors,
            tuple(ledger.to_encode()),
            tuple(part.absolute() for part in ledger.target.parts),
            ledger.journal.path.absolute(),
            mark,
            measure,
            ledger.max_ram,
            self._backend,
            self._max_vram,
            self.count,
        )
        work = _Jobs(ledger, shared, self)
        try:
            self._cluster.run(work, work)
        except BaseException:
            ledger.stop.set()
            raise
        finally:
            work.join()
            self._cluster.leave()
            self.nodes = tuple(NodeShare(n.name, self.cpus_of(n), n.progress) for n in work.nodes if n.progress)

    def cpus_of(self, node: Node) -> int:
        """Return the number of a node's CPUs to use; a node that joined late has the same memory."""
        return min(self._cpus(node), self._max_cpus)

    def reserve_cpus(self, node: Node, is_needed: Callable[[], bool]) -> AbstractContextManager[bool]:
        """Reserve the CPUs that this process uses of its node; see ``Cluster.reserve_cpus``."""
        return self._cluster.reserve_cpus(node, node.own_cpus, is_needed)


class _Jobs:
    """The jobs of a ledger as work for a cluster: in batches, sized by the measured time of similar jobs.

    Threads of this process, on its own node, take single jobs.
    """

    def __init__(self, ledger: Ledger, shared: RunSpec, executor: RayExecutor) -> None:
        self.begin, self.shared = begin, shared
        self.ledger, self.executor = ledger, executor
        self.nodes: list[Node] = []
        self._jobs = ledger.jobs()
        self._next = next(self._jobs, None)
        #: Jobs returned by nodes, and the number of batches in flight.
        self._returned = deque[Job]()
        self._n_out = 0
        self._changed = threading.Condition()
        self._local_thread: threading.Thread | None = None
        #: Seconds per value, of each kind.
        self._pace: dict[_Pace, float] = {}
        self._notes = set[str]()
        #: Values not yet in a batch.
        self._left: Counter[_Kind] = Counter()
        for tensor in ledger.plan.tensors:
            if tensor.name not in ledger.journal.crcs:
                self._left[_kind(tensor)] += tensor.n_values

    @property
    def is_stopping(self) -> bool:
        return self.ledger.stop.is_set()

    def fit(self, node: Node) -> None:
        node.is_local = node.is_local and self.shared.backend != "cuda"  # a worker may refuse them
        node.divide(self.executor.cpus_of(node), WIDTH, gpus=self.executor.uses_gpus)
        self.nodes.append(node)
        if node.own_cpus:
            if self.executor.uses_gpus:
                self._say_once(
                    f"node {node.name}: --backend {self.shared.backend}: using the CPU, because Ray has no GPU on "
                    "this node"
                )
            self._local_thread = threading.Thread(target=self._work_locally, args=(node,), name="here")
            self._local_thread.start()

    def batch(self, node: Node) -> list[Job] | None:
        """Return the next jobs, for some seconds of a worker's threads."""
        with self._changed:
            has_gpus = bool(node.gpus)
            seconds_left = sum(n * self._pace.get((kind, has_gpus), _DEFAULT_PACE) for kind, n in self._left.items())
            live_nodes = [n for n in self.nodes if n.cpus]
            cpus = sum(n.width * n.workers + n.own_cpus for n in live_nodes)
            is_only_worker = not any(n.own_cpus for n in live_nodes) and sum(n.workers for n in live_nodes) == 1
            # A single worker does not block the others.
            seconds = node.width * (
                BATCH_SECONDS
                if is_only_worker
                else min(BATCH_SECONDS, max(_MIN_BATCH_SECONDS, seconds_left / (2 * max(1, cpus))))
            )
            jobs = list[Job]()
            while (seconds > 0 or len(jobs) < node.width) and (job := self._pop()) is not None:
                kind = _kind(self.ledger.plan.tensors[job.tensor])
                seconds -= _values(job, self.ledger.plan.tensors[job.tensor]) * self._pace.get(
                    (kind, has_gpus), _DEFAULT_PACE
                )
                jobs.append(job)
            self._n_out += bool(jobs)
            return jobs or None

    def _pop(self) -> Job | None:
        """Return the next job, if any."""
        job = self._returned.popleft() if self._returned else self._next
        if job is self._next and job is not None:
            self._next = next(self._jobs, None)
            tensor = self.ledger.plan.tensors[job.tensor]
            self._left[_kind(tensor)] -= _values(job, tensor)
        return job

    def finish(self, node: Node, batch: list[Job], result: BatchResult) -> None:
        for note in result.notes:
            self._say_once(f"node {node.name}: {note}")
        for job, job_result, seconds in zip(batch, result.results, result.seconds, strict=True):
            self._record(node, job, job_result, seconds)
        self._finish_batch(())

    def _record(self, node: Node, job: Job, result: JobResult, seconds: float) -> None:
        tensor = self.ledger.plan.tensors[job.tensor]
        pace, kind = seconds / max(1, _values(job, tensor)), (_kind(tensor), bool(node.gpus))
        with self._changed:
            self._pace[kind] = pace + 0.9 * (self._pace.get(kind, pace) - pace)
            node.progress += job.target_bytes
        self.ledger.finish(job, result)

    def _finish_batch(self, jobs: Iterable[Job]) -> None:
        """Count a finished batch; ``jobs`` of it were returned unprocessed."""
        with self._changed:
            self._returned.extend(jobs)
            self._n_out -= 1
            self._changed.notify_all()

    def _say_once(self, text: str) -> None:
        """Show a note to the user, once."""
        if text not in self._notes:
            self._notes.add(text)
            self.say(text)

    def say(self, text: str) -> None:
        if self.ledger.observer is not None:
            self.ledger.observer.on_note(text)

    # ---------------------------------------------------------------- in this process

    @property
    def busy(self) -> bool:
        return self._local_thread is not None and self._local_thread.is_alive()

    def take_back(self, batch: list[Job]) -> None:
        self._finish_batch(batch)

    def wait(self, seconds: float) -> None:
        if self._local_thread is not None:
            self._local_thread.join(seconds)

    def join(self) -> None:
        """Wait until no thread of this process is working."""
        if self._local_thread is not None:
            self._local_thread.join()

    def _is_left(self) -> bool:
        return not self.is_stopping and bool(self._returned or self._next is not None or self._n_out)

    def _work_locally(self, node: Node) -> None:
        """Run threads once there are CPUs for them; failures go to the ledger."""
        try:
            with self.executor.reserve_cpus(node, self._is_left) as reserved:
                if not reserved:
                    return
                load_kernels(self.shared)
                metrics = metrics_for(self.shared.tensors, self.shared.max_ram, node.own_cpus)
                run_parallel(self.ledger, [partial(self._run_locally, node, metrics)] * node.own_cpus)
        except BaseException as e:  # raised by the main thread
            self.ledger.fail(e)

    def _run_locally(self, node: Node, metrics: CpuMetricPool) -> None:
        """Run jobs until none will follow."""
        shared = self.shared
        worker = Worker(shared.source, self.ledger.target, metrics, measure=shared.measure, readahead=2 * node.own_cpus)
        try:
            while (job := self._next_job()) is not None:
                began = time.perf_counter()
                result = worker.run(job, shared.tensors[job.tensor])
                self._record(node, job, result, time.perf_counter() - began)
        except QuantkitError as e:
            raise e.extend(f" (on node {node.name})") from e
        except OSError as e:
            raise ClusterError(f"node {node.name}: {e.filename or 'the disk'}: {e.strerror or e}") from e

    def _next_job(self) -> Job | None:
        """Return a job for a thread; waits while nodes may return some, None if none will follow."""
        with self._changed:
            while self._is_left():
                if (job := self._pop()) is not None:
                    return job
                self._changed.wait(0.2)
        return None


def _kind(tensor: PlannedTensor) -> _Kind:
    return "+".join(part.source.type.name for part in tensor.parts), tensor.type.name, tensor.encoder


def _values(job: Job, tensor: PlannedTensor) -> int:
    """Return the approximate number of values in a job."""
    return job.target_bytes * tensor.n_values // max(1, tensor.nbytes)


# ---------------------------------------------------------------- on the nodes


def load() -> None:
    """Load the kernels in an idle worker process."""
    from quantkit.kernels.cpu.core.jit import kernel_folder
    from quantkit.kernels.first_run import compile_in_order

    with _exclusive(kernel_folder() / "compiling.lock"):
        compile_in_order(first_calls())


def begin(shared: RunSpec, threads: int) -> Callable[[list[Job]], BatchResult]:
    """Open source and output in a worker process, load its kernels, and return a function that runs a batch."""
    _check_source(shared)
    if shared.backend == "cpu":
        return _ThreadBatches(shared, _open_output(shared), threads).run
    from quantkit.pipeline.plan import Plan
    from quantkit.pipeline.ray_gpus import GpuBatches, choose_gpus

    plan = Plan(shared.source, "", (), shared.tensors, (), shared.fingerprint)
    names, note = choose_gpus(plan, shared.backend, threads, shared.workers)
    target = _open_output(shared)
    if not names:
        return _ThreadBatches(shared, target, threads, note).run
    gpus = GpuBatches(plan, target, names, threads, shared.max_ram, shared.max_vram)
    return _GpuBatches(shared, target, threads, gpus, note).run


def load_kernels(shared: RunSpec) -> None:
    """Load the kernels that a run needs."""
    from quantkit.kernels.cpu.core.jit import kernel_folder
    from quantkit.kernels.first_run import compile_in_order

    with _exclusive(kernel_folder() / "compiling.lock"):
        compile_in_order(kernel_calls(shared.to_encode, shared.measure))


def _check_source(shared: RunSpec) -> None:
    where = shared.source.paths[0]
    try:
        fingerprint = shared.source.fingerprint()
    except (OSError, FormatError) as e:
        raise NodeRefusal(f"{where} cannot be read on this node: {getattr(e, 'strerror', None) or e}") from None
    if fingerprint != shared.fingerprint:
        raise NodeRefusal(f"{where} differs on this node: it is another file, or an older version")


def _open_output(shared: RunSpec) -> OpenFiles:
    """Open the output. Raises NodeRefusal unless it is the file that the driver reserved."""
    ends = time.monotonic() + _VISIBILITY_SECONDS
    while True:
        try:
            target = OpenFiles(shared.parts)
            # After they are open: a later run truncates the journal before it removes unfinished files.
            if has_mark(shared.journal, shared.mark):
                return target
            reason = "is not the file that the driver writes"
            target.close()
        except OSError as e:
            reason = f"cannot be written on this node: {e.strerror or e}"
        if time.monotonic() > ends:
            raise NodeRefusal(f"{shared.parts[0]} {reason}")
        time.sleep(0.5)  # on a network file system new files appear after some seconds


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Let one process of a machine compile at a time; the others find the kernels in the cache."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):  # a file system without locks: they compile the same kernels
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class _ThreadBatches:
    """Runs batches on threads, each with its own worker."""

    def __init__(self, shared: RunSpec, target: OpenFiles, threads: int, *notes: str) -> None:
        load_kernels(shared)
        metrics = metrics_for(shared.tensors, shared.max_ram, threads)
        self._shared = shared
        self._target = target
        self._notes = notes
        self._workers = [
            Worker(shared.source, target, metrics, measure=shared.measure, readahead=2 * threads)
            for _ in range(threads)
        ]

    def run(self, batch: list[Job]) -> BatchResult:
        """Run jobs, flush the written data, and return the results."""
        results: dict[int, tuple[JobResult, float]] = {}
        failures: list[BaseException] = []
        numbers = iter(range(len(batch)))

        def work(worker: Worker) -> None:
            try:
                # next() of an iterator over a range is atomic.
                while not failures and (number := next(numbers, None)) is not None:
                    job, began = batch[number], time.perf_counter()
                    result = worker.run(job, self._shared.tensors[job.tensor])
                    results[number] = result, time.perf_counter() - began
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in self._workers[1 : len(batch)]]
        for thread in threads:
            thread.start()
        with _flush_continuously(self._shared, self._target, batch):
            work(self._workers[0])
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]
        job_results, seconds = zip(*(results[number] for number in range(len(batch))), strict=True)
        return BatchResult(list(job_results), list(seconds), self._notes)


class _GpuBatches:
    """Runs batches on GPUs and threads; a batch is long enough to hide its start and end."""

    def __init__(self, shared: RunSpec, target: OpenFiles, threads: int, gpus: GpuBatches, note: str) -> None:
        self._shared = shared
        self._target = target
        self._threads = threads
        self._gpus = gpus
        self._note = note

    def run(self, batch: list[Job]) -> BatchResult:
        """Run jobs, flush the written data, and return the results."""
        began = time.perf_counter()
        with _flush_continuously(self._shared, self._target, batch):
            results = self._gpus.run(batch, measure=self._shared.measure)
            seconds = (time.perf_counter() - began) * self._threads / len(batch)
        return BatchResult(results, [seconds] * len(batch), (self._note, *self._gpus.notes))


@contextmanager
def _flush_continuously(shared: RunSpec, target: OpenFiles, batch: list[Job]) -> Iterator[None]:
    """Flush files continuously, so that little remains at the end."""
    shards, stop = {shared.tensors[job.tensor].shard for job in batch}, threading.Event()
    failures: list[OSError] = []  # the kernel reports an error only once

    def flush() -> None:
        try:
            while not stop.wait(_FLUSH_SECONDS):
                target.sync(shards)
        except OSError as e:
            failures.append(e)

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]
    target.sync(shards)

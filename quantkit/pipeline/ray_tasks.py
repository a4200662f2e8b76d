"""Nodes of a Ray cluster as an executor: each pulls batches of jobs, on files that all of them see.

A worker process opens source and output once, and refuses if they are not the ones that the driver sees. It reports a
batch when the bytes are on the disk, because nobody else can flush what is in its memory. Jobs write the same bytes at
the same place whenever they run, so a batch may run twice. Batches take about ``SECONDS``, by what jobs of their kind
took before; towards the end they are smaller, so that all nodes end together.

The driver is the first worker of its own node: its threads take jobs one by one, as they would without a cluster, for
CPUs that it takes from Ray. So a cluster of one machine starts no process, and what it costs is the connection.
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

from quantkit.cluster import WIDTH, Cluster, Node, Refused
from quantkit.errors import ClusterError, FormatError, QuantkitError, ResourceError
from quantkit.pipeline.feedback import Metrics
from quantkit.pipeline.jobs import Job, JobResult
from quantkit.pipeline.journal import has_mark
from quantkit.pipeline.ledger import Ledger, NodeShare
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.source import Source
from quantkit.pipeline.target import Files, OpenFiles
from quantkit.pipeline.threads import run_together
from quantkit.pipeline.warm import first_calls, kernel_calls
from quantkit.pipeline.work import Worker, metrics_for

if TYPE_CHECKING:
    from quantkit.pipeline.ray_cards import CardBatches

#: Seconds that a batch is to take, and the least towards the end.
SECONDS, _LEAST = 3.0, 0.1
#: Seconds a value takes where nothing is known: slow, so that the first batch of a kind is small.
_SLOW = 2e-7
_FLUSH_SECONDS = 0.25
#: How long a node may take to see a file that the driver has written.
_SEEN_SECONDS = 10.0

#: What a job costs depends on these: types of its source and its target, whose encoder; and on whether there are cards.
_Kind = tuple[str, str, str]
_Pace = tuple[_Kind, bool]


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
    backend: str = "cpu"
    max_vram: int | None = None
    #: How many workers share the memory.
    workers: int = 1


class Done(NamedTuple):
    """What a batch came to: the results of its jobs, the seconds that a thread took for each, what the user is told."""

    found: list[JobResult]
    seconds: list[float]
    notes: tuple[str, ...] = ()


class RayTasks:
    """The nodes of the cluster at ``address``, with at most ``threads`` CPUs each.

    backend: "cpu"; "auto", by which nodes use the cards that they have, at most ``max_vram`` bytes of each; or "cuda",
    which leaves out nodes that have none.
    """

    def __init__(
        self, address: str, threads: int | None = None, *, backend: str = "cpu", max_vram: int | None = None
    ) -> None:
        self._cluster, self._threads, self._backend, self._max_vram = Cluster(address), threads, backend, max_vram
        #: What each node did in the last run.
        self.nodes: tuple[NodeShare, ...] = ()
        found = self._cluster.nodes().values()
        if not found:
            raise ResourceError(f"--ray {address}: no node of the cluster has CPUs to give")
        self._most = max(self._cpus(node) for node in found)
        self.count = max(self._workers(node) for node in found)

    @property
    def cards(self) -> bool:
        """Whether nodes may use cards."""
        return self._backend != "cpu"

    def _cpus(self, node: Node) -> int:
        return min(node.cpus, self._threads or node.cpus)

    def _workers(self, node: Node) -> int:
        """Return how many workers share the memory of a node."""
        if not self.cards or not node.gpus:
            return self._cpus(node)
        from quantkit.pipeline.ray_cards import workers_of

        return workers_of(self._cpus(node), node.gpus)

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
            self.nodes = tuple(NodeShare(n.name, self.cpus_of(n), n.done) for n in work.nodes if n.done)

    def cpus_of(self, node: Node) -> int:
        """Return how many CPUs of a node are used; one that came late has no more memory than the others."""
        return min(self._cpus(node), self._most)

    def taken(self, node: Node, wanted: Callable[[], bool]) -> AbstractContextManager[bool]:
        """Let this process have what it uses of its node; see ``Cluster.taken``."""
        return self._cluster.taken(node, node.own, wanted)


class _Jobs:
    """The jobs of a ledger as work for a cluster: in batches, sized by what jobs of their kind took.

    Threads of this process, on its own node, take single jobs.
    """

    def __init__(self, ledger: Ledger, shared: Shared, executor: RayTasks) -> None:
        self.begin, self.shared = begin, shared
        self.ledger, self.executor = ledger, executor
        self.nodes: list[Node] = []
        self._jobs = ledger.jobs()
        self._next = next(self._jobs, None)
        #: Jobs that no node is left for, and how many batches are out.
        self._kept = deque[Job]()
        self._out = 0
        self._changed = threading.Condition()
        self._here: threading.Thread | None = None
        #: Seconds per value, of each kind.
        self._pace: dict[_Pace, float] = {}
        self._told = set[str]()
        #: Values that are not given out yet.
        self._left: Counter[_Kind] = Counter()
        for tensor in ledger.plan.tensors:
            if tensor.name not in ledger.journal.done:
                self._left[_kind(tensor)] += tensor.n_values

    @property
    def stopped(self) -> bool:
        return self.ledger.stop.is_set()

    def fit(self, node: Node) -> None:
        node.here = node.here and self.shared.backend != "cuda"  # which a worker may refuse
        node.divide(self.executor.cpus_of(node), WIDTH, cards=self.executor.cards)
        self.nodes.append(node)
        if node.own:
            if self.executor.cards:
                self._tell(f"node {node.name}: --backend {self.shared.backend}: the CPU, as Ray has no GPU there")
            self._here = threading.Thread(target=self._work_here, args=(node,), name="here")
            self._here.start()

    def batch(self, node: Node) -> list[Job] | None:
        """Return the next jobs, for some seconds of a worker's threads."""
        with self._changed:
            cards = bool(node.gpus)
            left = sum(n * self._pace.get((kind, cards), _SLOW) for kind, n in self._left.items())
            there = [each for each in self.nodes if each.cpus]
            cpus = sum(each.width * each.workers + each.own for each in there)
            alone = not any(each.own for each in there) and sum(each.workers for each in there) == 1
            # Alone, it keeps nobody waiting.
            seconds = node.width * (SECONDS if alone else min(SECONDS, max(_LEAST, left / (2 * max(1, cpus)))))
            jobs = list[Job]()
            while (seconds > 0 or len(jobs) < node.width) and (job := self._pop()) is not None:
                kind = _kind(self.ledger.plan.tensors[job.tensor])
                seconds -= _values(job, self.ledger.plan.tensors[job.tensor]) * self._pace.get((kind, cards), _SLOW)
                jobs.append(job)
            self._out += bool(jobs)
            return jobs or None

    def _pop(self) -> Job | None:
        """Return the next job, if there is one."""
        job = self._kept.popleft() if self._kept else self._next
        if job is self._next and job is not None:
            self._next = next(self._jobs, None)
            tensor = self.ledger.plan.tensors[job.tensor]
            self._left[_kind(tensor)] -= _values(job, tensor)
        return job

    def done(self, node: Node, batch: list[Job], result: Done) -> None:
        for note in result.notes:
            self._tell(f"node {node.name}: {note}")
        for job, found, seconds in zip(batch, result.found, result.seconds, strict=True):
            self._did(node, job, found, seconds)
        self._back(())

    def _did(self, node: Node, job: Job, found: JobResult, seconds: float) -> None:
        tensor = self.ledger.plan.tensors[job.tensor]
        pace, kind = seconds / max(1, _values(job, tensor)), (_kind(tensor), bool(node.gpus))
        with self._changed:
            self._pace[kind] = pace + 0.9 * (self._pace.get(kind, pace) - pace)
            node.done += job.target_bytes
        self.ledger.done(job, found)

    def _back(self, jobs: Iterable[Job]) -> None:
        """Take notice that a batch is out no more; ``jobs`` of it are left."""
        with self._changed:
            self._kept.extend(jobs)
            self._out -= 1
            self._changed.notify_all()

    def _tell(self, text: str) -> None:
        """Tell the user, once."""
        if text not in self._told:
            self._told.add(text)
            self.say(text)

    def say(self, text: str) -> None:
        if self.ledger.observer is not None:
            self.ledger.observer.said(text)

    # ---------------------------------------------------------------- in this process

    @property
    def busy(self) -> bool:
        return self._here is not None and self._here.is_alive()

    def keep(self, batch: list[Job]) -> None:
        self._back(batch)

    def rest(self, seconds: float) -> None:
        if self._here is not None:
            self._here.join(seconds)

    def join(self) -> None:
        """Return when no thread of this process works any more."""
        if self._here is not None:
            self._here.join()

    def _is_left(self) -> bool:
        return not self.stopped and bool(self._kept or self._next is not None or self._out)

    def _work_here(self, node: Node) -> None:
        """Work on threads, once there are CPUs for them; what fails is in the ledger."""
        try:
            with self.executor.taken(node, self._is_left) as there_are:
                if not there_are:
                    return
                load_kernels(self.shared)
                metrics = metrics_for(self.shared.tensors, self.shared.max_ram, node.own)
                run_together(self.ledger, [partial(self._run_here, node, metrics)] * node.own)
        except BaseException as e:  # raised by the main thread
            self.ledger.fail(e)

    def _run_here(self, node: Node, metrics: Metrics) -> None:
        """Run jobs until there will be no more."""
        shared = self.shared
        worker = Worker(shared.source, self.ledger.target, metrics, measure=shared.measure, ahead=2 * node.own)
        try:
            while (job := self._taken()) is not None:
                began = time.perf_counter()
                found = worker.run(job, shared.tensors[job.tensor])
                self._did(node, job, found, time.perf_counter() - began)
        except QuantkitError as e:
            raise type(e)(f"{e.message} (on node {node.name})") from e
        except OSError as e:
            raise ClusterError(f"node {node.name}: {e.filename or 'the disk'}: {e.strerror or e}") from e

    def _taken(self) -> Job | None:
        """Return a job for a thread; waits while nodes may leave some, None if there will be none."""
        with self._changed:
            while self._is_left():
                if (job := self._pop()) is not None:
                    return job
                self._changed.wait(0.2)
        return None


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


def begin(shared: Shared, threads: int) -> Callable[[list[Job]], Done]:
    """Open source and output in a worker process, load its kernels, and return what runs a batch."""
    _check_source(shared)
    if shared.backend == "cpu":
        return _Batches(shared, _opened(shared), threads).run
    from quantkit.pipeline.plan import Plan
    from quantkit.pipeline.ray_cards import CardBatches, choose_cards

    plan = Plan(shared.source, "", (), shared.tensors, (), shared.fingerprint)
    names, note = choose_cards(plan, shared.backend, threads, shared.workers)
    target = _opened(shared)
    if not names:
        return _Batches(shared, target, threads, note).run
    cards = CardBatches(plan, target, names, threads, shared.max_ram, shared.max_vram)
    return _OnCards(shared, target, threads, cards, note).run


def load_kernels(shared: Shared) -> None:
    """Load the kernels that a run needs."""
    from quantkit.kernels.cpu.core.jit import kernel_folder
    from quantkit.kernels.first_run import compile_together

    with _alone(kernel_folder() / "compiling.lock"):
        compile_together(kernel_calls(shared.to_encode, shared.measure))


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

    def __init__(self, shared: Shared, target: OpenFiles, threads: int, *notes: str) -> None:
        load_kernels(shared)
        metrics = metrics_for(shared.tensors, shared.max_ram, threads)
        self._shared, self._target, self._notes = shared, target, notes
        self._workers = [
            Worker(shared.source, target, metrics, measure=shared.measure, ahead=2 * threads) for _ in range(threads)
        ]

    def run(self, batch: list[Job]) -> Done:
        """Run jobs, flush what they wrote, and return their results."""
        results: dict[int, tuple[JobResult, float]] = {}
        failures: list[BaseException] = []
        numbers = iter(range(len(batch)))

        def work(worker: Worker) -> None:
            try:
                # next() of an iterator over a range is atomic.
                while not failures and (number := next(numbers, None)) is not None:
                    job, began = batch[number], time.perf_counter()
                    found = worker.run(job, self._shared.tensors[job.tensor])
                    results[number] = found, time.perf_counter() - began
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in self._workers[1 : len(batch)]]
        for thread in threads:
            thread.start()
        with _flushing(self._shared, self._target, batch):
            work(self._workers[0])
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]
        found, seconds = zip(*(results[number] for number in range(len(batch))), strict=True)
        return Done(list(found), list(seconds), self._notes)


class _OnCards:
    """Runs batches on cards, beside threads; a batch takes long enough that starting and ending it is little."""

    def __init__(self, shared: Shared, target: OpenFiles, threads: int, cards: CardBatches, note: str) -> None:
        self._shared, self._target, self._threads, self._cards, self._note = shared, target, threads, cards, note

    def run(self, batch: list[Job]) -> Done:
        """Run jobs, flush what they wrote, and return their results."""
        began = time.perf_counter()
        with _flushing(self._shared, self._target, batch):
            found = self._cards.run(batch, measure=self._shared.measure)
            seconds = (time.perf_counter() - began) * self._threads / len(batch)
        return Done(found, [seconds] * len(batch), (self._note, *self._cards.said))


@contextmanager
def _flushing(shared: Shared, target: OpenFiles, batch: list[Job]) -> Iterator[None]:
    """Flush files all the time, so that little is left in the end; then the rest."""
    shards, ended = {shared.tensors[job.tensor].shard for job in batch}, threading.Event()
    failures: list[OSError] = []  # the kernel tells of one only once

    def flush() -> None:
        try:
            while not ended.wait(_FLUSH_SECONDS):
                target.sync(shards)
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
    target.sync(shards)

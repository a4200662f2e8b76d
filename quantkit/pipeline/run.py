"""Carry out a plan: jobs on threads, bytes under a temporary name, a journal, one atomic rename at the end.

The order of events is what makes a run safe to kill at any moment: the whole file is reserved first; tensors are
journaled only after their bytes were flushed; the header is written like any other bytes; and the final name
appears, by rename, only when everything is on the disk.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, Unpack

from quantkit.cpus import available_cpus
from quantkit.errors import ClusterError, QuantkitError, RecipeError, ResourceError, TypeNotSupported
from quantkit.formats.outputs import Output, beside, check_apart, check_free
from quantkit.formats.ranges import Buffers
from quantkit.formats.remote import URL, check_unchanged
from quantkit.formats.remote.retry import given_up
from quantkit.kernels.first_run import working_seconds
from quantkit.pipeline.cache.store import Store, open_store
from quantkit.pipeline.cache.use import CacheUse, RunCache
from quantkit.pipeline.jobs import JOB, NO_CRC, ErrorSums, MatrixLoss, cut_jobs, job_values
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.ledger import Ledger, NodeShare, Progress
from quantkit.pipeline.plan import Plan, check_kernels
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.spool import place_of
from quantkit.pipeline.target import Place
from quantkit.pipeline.threads import Threads

#: Bytes that all buffers together may take, unless told otherwise.
DEFAULT_MAX_RAM = 512 << 20


class Executor(Protocol):
    """What runs the jobs of a ledger, anywhere."""

    @property
    def count(self) -> int:
        """Workers that share the memory of one machine."""

    @property
    def nodes(self) -> tuple[NodeShare, ...]:
        """The nodes of a cluster that took part in the last run."""

    def run(self, ledger: Ledger, *, measure: bool) -> None:
        """Run all jobs; on return none is under way, and failures are in the ledger."""


class RunOptions(TypedDict, total=False):
    """How a plan is carried out.

    threads: worker threads; all available CPUs without. resume: go on with an interrupted run of the same plan, if
    there is one. overwrite: replace an existing output, and throw an interrupted run away. measure_error: also decode
    what was encoded, and sum up the error. observer: is told of progress. ray: the address of a Ray cluster whose nodes
    do the work; threads are then those of each node. cache: a folder that keeps encoded tensors for other runs.
    cache_size: its limit in bytes, from now on. backend: "cpu", "cuda", or "auto": encode on cards what these can, on
    all or on those of ``devices``, by number; max_vram: bytes to take of each; verify: how many jobs of theirs the CPU
    encodes, too. On a cluster each node uses the cards that Ray gives it, and "cuda" leaves out nodes without.
    """

    threads: int | None
    resume: bool
    overwrite: bool
    measure_error: bool
    observer: Progress | None
    ray: str | None
    cache: str | Path | None
    cache_size: int | None
    backend: str
    devices: Sequence[int]
    max_vram: int | None
    verify: int


@dataclass(frozen=True)
class RunResult:
    """What a run did: seconds, tensors taken over from an earlier run, and the error sums where measured.

    ``nodes``: those of a cluster that took part. ``cache``: what was taken from a cache, and kept there. ``losses``:
    of tensors encoded with feedback, whoever encoded them.
    """

    seconds: float
    resumed: int
    sums: dict[str, ErrorSums]
    nodes: tuple[NodeShare, ...] = ()
    cache: CacheUse | None = None
    losses: dict[str, tuple[MatrixLoss, ...]] = field(default_factory=dict)


def journal_path(path: Path) -> Path:
    """Return the name of an output's journal."""
    return beside(path, ".journal")


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
        ClusterError: no node of a cluster can go on; what is done is kept.
    """
    began = working_seconds()
    given_up.clear()
    check_kernels(plan.tensors)
    observer = options.get("observer")
    resume, overwrite = options.get("resume", False), options.get("overwrite", False)
    measure, folder = options.get("measure_error", False), options.get("cache")
    first = plan.shards[0].path
    check_targets(plan, resume=resume, overwrite=True)
    executor = _executor(plan, options)
    values = job_values(list(plan.tensors), executor.count, max_ram)
    with ExitStack() as stack:
        stack.enter_context(Output(first, overwrite=True))
        check_targets(plan, resume=resume, overwrite=overwrite)
        store = None if folder is None else open_store(Path(folder), size=options.get("cache_size"))
        journal = stack.enter_context(Journal(journal_path(first), plan.fingerprint))
        target = place_of(plan, journal, measure=measure, overwrite=overwrite)
        stack.callback(target.close)
        resumed = _prepare(plan, target, journal, resume=resume, overwrite=overwrite)
        if observer is not None and resumed:
            observer.resumed(len(resumed), sum(t.nbytes for t in plan.tensors if t.name in resumed))
        cache = RunCache(store, plan, measure=measure, done=resumed) if store is not None else None
        if cache is not None:
            stack.callback(cache.drop)
        if not journal.sealed:
            try:
                with Ledger(plan, target, journal, values, max_ram, observer, cache) as ledger:
                    executor.run(ledger, measure=measure)
                target.finish()
                check_unchanged((*plan.source.paths, *plan.reads))
            except ClusterError:
                raise
            except QuantkitError:
                _discard(target, journal)
                raise
            journal.seal()
        with publishing():
            target.publish()
        journal.remove()
    sums = {name: ErrorSums(*s) for name, s in journal.sums.items()}
    losses = {
        name: tuple(MatrixLoss(int(part), int(matrix), int(tokens), *rest) for part, matrix, tokens, *rest in rows)
        for name, rows in journal.losses.items()
    }
    used = None if cache is None else cache.close()
    return RunResult(working_seconds() - began, len(resumed), sums, executor.nodes, used, losses)


def _executor(plan: Plan, options: RunOptions) -> Executor:
    """Return what runs the jobs: threads, cards beside them, or the nodes of a cluster."""
    address = options.get("ray")
    if address is None:
        threads = _threads(plan, options)
        made: Executor = threads if plan.executor is None else plan.executor(threads)
        return made
    if plan.executor is not None:
        raise RecipeError("--calibrate goes through the model layer by layer, on one machine: leave --ray away")
    if options.get("devices") or options.get("verify"):
        raise RecipeError("--devices and --verify are for the cards of this machine: leave them away with --ray")
    for path in (*plan.source.paths, *plan.reads, *(shard.path for shard in plan.shards)):
        if isinstance(path, URL):
            raise ResourceError(f"{path}: --ray works on files that all nodes see, not on URLs; leave one of them away")
    from quantkit.pipeline.ray_tasks import RayTasks

    backend = options.get("backend", "cpu")
    return RayTasks(address, options.get("threads"), backend=backend, max_vram=options.get("max_vram"))


def _threads(plan: Plan, options: RunOptions) -> Threads:
    """Return threads, and cards beside them where the backend has some; say which, and why."""
    count, observer = options.get("threads") or available_cpus(), options.get("observer")
    backend, devices = options.get("backend", "cpu"), options.get("devices", ())
    if backend == "cpu" and not devices:
        return Threads(count)
    from quantkit.pipeline.cards.choice import cards_for
    from quantkit.pipeline.cards.executor import Cards

    say = None if observer is None else observer.said
    names, note = cards_for(plan, backend, devices)
    if say is not None:
        say(note)
    if not names:
        return Threads(count)
    return Cards(count, names, max_vram=options.get("max_vram"), verify=options.get("verify", 0), say=say)


def foreseen(plan: Plan, cache: str | Path | None, *, measure: bool = False) -> CacheUse | None:
    """Return what the tensor cache in a folder, if one is given, would do for a run; for a dry run."""
    if cache is None:
        return None
    folder = Path(cache)
    there = folder.exists() and any(folder.iterdir())
    store = open_store(folder, make=False) if there else Store(folder, 0)
    return RunCache(store, plan, measure=measure, dry=True).foreseen()


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


def _prepare(plan: Plan, target: Place, journal: Journal, *, resume: bool, overwrite: bool) -> set[str]:
    """Reserve the output and return the names of tensors that an earlier run finished."""
    headers = [shard.layout.header for shard in plan.shards]
    if resume and journal.resume():
        if journal.sealed and not target.is_whole():
            journal.start()  # somebody cut or removed what was finished
        if not journal.sealed:
            target.reserve(headers)
            _verify(plan, target, journal)
        return set(journal.done)
    if resume and journal.path.stat().st_size and not overwrite:
        raise ResourceError(
            f"{journal.path} is of other work (another source, type, recipe or imatrix), so --resume cannot go on "
            "with it; --overwrite starts anew"
        )
    try:
        journal.start()
        target.discard()
        target.reserve(headers)
    except OSError as e:
        _discard(target, journal)
        where = e.filename or plan.shards[0].path.parent
        raise ResourceError(f"{where}: {e.strerror or e}; nothing was written: make room, or write elsewhere") from e
    except BaseException:
        _discard(target, journal)
        raise
    return set()


def _verify(plan: Plan, target: Place, journal: Journal) -> None:
    """Strike out journaled tensors whose bytes on the disk are not those that were written."""
    for at, tensor in enumerate(plan.tensors):
        if tensor.name not in journal.done or target.has(tensor.shard, tensor.offset, tensor.nbytes):
            continue
        if not target.readable or not _is_intact(plan, target, at, tensor, journal.done[tensor.name]):
            journal.forget(tensor.name)


def _is_intact(plan: Plan, target: Place, at: int, tensor: PlannedTensor, crc: int) -> bool:
    if crc != NO_CRC:
        return target.crc(tensor.shard, tensor.offset, tensor.nbytes) == crc
    buffers = Buffers()
    for job in cut_jobs(at, tensor, JOB):
        source = buffers.get("source", job.target_bytes)
        plan.source.read(tensor.parts[job.part].source, source, job.source_offset)
        if target.crc(tensor.shard, job.target_offset, job.target_bytes) != zlib.crc32(source.data):
            return False
    return True


def _discard(target: Place, journal: Journal) -> None:
    """Remove what a run that cannot succeed has written."""
    target.discard()
    journal.remove()

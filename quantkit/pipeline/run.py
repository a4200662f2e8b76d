"""Carry out a plan: jobs on threads, bytes under a temporary name, a journal, one atomic rename at the end.

The order of events makes a run safe to kill at any moment: the whole file is reserved first; tensors are journaled only
after their bytes were flushed; the header is written like any other bytes; and the final name appears, by rename, only
when everything is on the disk.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, Unpack

import numpy as np

from quantkit.arguments import checked
from quantkit.cpus import available_cpus
from quantkit.errors import (
    ClusterError,
    FormatError,
    QuantkitError,
    RecipeError,
    ResourceError,
    TypeNotSupported,
    os_error_code,
)
from quantkit.formats.files import File, check_unchanged
from quantkit.formats.outputs import Output, check_apart, check_free, sibling_path
from quantkit.formats.ranges import Buffers
from quantkit.formats.remote import URL, locate
from quantkit.formats.remote.retry import cancelled
from quantkit.kernels.first_run import working_seconds
from quantkit.pipeline.cache.run_cache import CacheUse, RunCache
from quantkit.pipeline.cache.store import Store, open_store
from quantkit.pipeline.completeness import is_complete
from quantkit.pipeline.content import stamps_of
from quantkit.pipeline.exactness import header_with_counts
from quantkit.pipeline.jobs import JOB, NO_CRC, ErrorSums, MatrixLoss, cut_jobs, job_values
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.ledger import Ledger, NodeShare, RunObserver
from quantkit.pipeline.plan import Plan, check_kernels
from quantkit.pipeline.progress import RunProgress
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.pipeline.spool import open_target
from quantkit.pipeline.target import RunTarget
from quantkit.pipeline.threads import Threads
from quantkit.pipeline.worker import source_digest
from quantkit.progress import Progress, ProgressCallback

#: Default limit of all buffers together, in bytes.
DEFAULT_MAX_RAM = 512 << 20


class Executor(Protocol):
    """An executor of the jobs of a ledger."""

    @property
    def count(self) -> int:
        """Workers that share the memory of one machine."""

    @property
    def nodes(self) -> tuple[NodeShare, ...]:
        """The nodes of a cluster that took part in the last run."""

    def run(self, ledger: Ledger, *, measure: bool) -> None:
        """Run all jobs; on return, no job is in flight and failures are in the ledger."""


class RunOptions(TypedDict, total=False):
    """Options of a run.

    threads: worker threads; None for all available CPUs. resume: continue an interrupted run of the same plan, if there
    is one. overwrite: replace an existing output, and discard an interrupted run. measure_error: also decode the
    encoded values, and sum up the error. progress: called with the bytes written so far, or observer: callbacks of all
    events. ray: the address of a Ray cluster whose nodes do the work; threads are then those of each node. cache: a
    folder that keeps encoded tensors for other runs. cache_size: its new limit in bytes. backend: "cpu", "cuda", or
    "auto": encode on GPUs that have an encoder, on all or on those of ``devices``, by number; max_vram: bytes per GPU;
    verify: number of GPU jobs that the CPU also encodes. On a cluster each node uses the GPUs that Ray assigns, and
    "cuda" skips nodes without GPUs.
    """

    threads: int | None
    resume: bool
    overwrite: bool
    measure_error: bool
    progress: ProgressCallback | None
    observer: RunObserver | None
    ray: str | None
    cache: str | Path | None
    cache_size: int | None
    backend: str
    devices: Sequence[int]
    max_vram: int | None
    verify: int


@dataclass(frozen=True)
class RunResult:
    """Result of a run: seconds, tensors resumed from an earlier run, and the error sums, if measured.

    ``nodes``: the cluster nodes that took part. ``cache``: use of the tensor cache. ``losses``: of tensors encoded with
    feedback. ``was_complete``: the output of this plan existed already, and nothing was done.
    """

    seconds: float
    resumed: int
    sums: dict[str, ErrorSums]
    nodes: tuple[NodeShare, ...] = ()
    cache: CacheUse | None = None
    losses: dict[str, tuple[MatrixLoss, ...]] = field(default_factory=dict)
    was_complete: bool = False


def complete_result(plan: Plan) -> RunResult:
    """Return the result of a run whose output was there already."""
    return RunResult(0.0, len(plan.tensors), {}, was_complete=True)


def journal_path(path: Path) -> Path:
    """Return the name of an output's journal."""
    return sibling_path(path, ".journal")


@checked
def run_plan(
    plan: Plan,
    *,
    max_ram: int = DEFAULT_MAX_RAM,
    publishing: Callable[[], AbstractContextManager[None]] = nullcontext,
    **options: Unpack[RunOptions],
) -> RunResult:
    """Write the plan's output; on return it is complete and synced under its final name.

    Args:
        plan: what to write.
        max_ram: limit of all workers' buffers together, in bytes.
        publishing: a context in which finished files get their names; the journal is removed after it, so that a run
            that ends within it can be resumed.

    Raises:
        TypeNotSupported: a type has no encoder or decoder in this version.
        ResourceError: not enough disk space or memory, the output exists, or another run writes it.
        FormatError: the source has invalid values or blocks; the partial output is removed.
        ClusterError: no node of a cluster can continue; finished work is kept.
    """
    began = working_seconds()
    options = _with_observer(plan, options)
    cancelled.clear()
    check_kernels(plan.tensors)
    _check_custom_encoders(plan, options)
    observer = options.get("observer")
    resume, overwrite = options.get("resume", False), options.get("overwrite", False)
    measure, folder = options.get("measure_error", False), options.get("cache")
    first = plan.shards[0].path
    check_targets(plan, resume=resume, overwrite=True)
    if resume and not overwrite and publishing is nullcontext and was_finished(plan):
        return complete_result(plan)
    executor = _executor(plan, options)
    values = job_values(list(plan.tensors), executor.count, max_ram)
    with ExitStack() as stack:
        stack.enter_context(Output(first, overwrite=True))
        check_targets(plan, resume=resume, overwrite=overwrite)
        store = None if folder is None else open_store(locate(folder), size=options.get("cache_size"))
        journal = stack.enter_context(Journal(journal_path(first), plan.fingerprint, _stamps(plan)))
        target = open_target(plan, journal, measure=measure, overwrite=overwrite)
        stack.callback(target.close)
        resumed = _prepare(plan, target, journal, resume=resume, overwrite=overwrite)
        if observer is not None and resumed:
            observer.on_resume(len(resumed), sum(t.nbytes for t in plan.tensors if t.name in resumed))
        cache = RunCache(store, plan, measure=measure, skip=resumed) if store is not None else None
        if cache is not None:
            stack.callback(cache.drop)
        if not journal.sealed:
            try:
                with Ledger(plan, target, journal, values, max_ram, observer, cache) as ledger:
                    executor.run(ledger, measure=measure)
                header = header_with_counts(plan, {name: ErrorSums(*s) for name, s in journal.sums.items()})
                if header is not None:
                    target.write(0, np.frombuffer(header, np.uint8), 0)
                target.finish()
                check_unchanged((*plan.source.inputs, *plan.reads))
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
        name: tuple(MatrixLoss(int(part), int(matrix), int(tokens), *sums) for part, matrix, tokens, *sums in rows)
        for name, rows in journal.losses.items()
    }
    used = None if cache is None else cache.close()
    return RunResult(working_seconds() - began, len(resumed), sums, executor.nodes, used, losses)


def _with_observer(plan: Plan, options: RunOptions) -> RunOptions:
    """Return the options with an observer that calls ``progress``, if that is given."""
    report = options.get("progress")
    if report is None:
        return options
    if options.get("observer") is not None:
        raise RecipeError("progress and observer are mutually exclusive: omit one of them", "QK-E201")

    def call(current: float, total: float, text: str) -> None:
        report(Progress(current, total, text))

    return {**options, "observer": RunProgress(call, plan.nbytes)}


def _check_custom_encoders(plan: Plan, options: RunOptions) -> None:
    """Refuse encoders from Python if they cannot run, or if their bytes could be confused with another's."""
    for custom in plan.custom_encoders:
        if options.get("ray") is not None:
            raise RecipeError(
                f"encoders: the encoder of {custom.type} is a function of this process, which nodes cannot run: omit "
                "ray",
                "QK-E201",
            )
        for name in ("cache", "resume"):
            if options.get(name) and not custom.key:
                raise RecipeError(
                    f"encoders: {custom} has no key to distinguish its bytes from those of an earlier version: set "
                    f"its attribute cache_key, or omit {name}",
                    "QK-E202",
                )


def _executor(plan: Plan, options: RunOptions) -> Executor:
    """Return the executor: threads, threads and GPUs, or the nodes of a cluster."""
    address = options.get("ray")
    if address is None:
        threads = _threads(plan, options)
        executor: Executor = threads if plan.executor is None else plan.executor(threads)
        return executor
    if plan.big_endian:
        raise RecipeError("--bigendian runs on one machine: omit --ray", "QK-E201")
    if plan.executor is not None:
        raise RecipeError("--calibrate runs on one machine: omit --ray", "QK-E201")
    if options.get("devices") or options.get("verify"):
        raise RecipeError("--devices and --verify apply to the GPUs of this machine: omit them with --ray", "QK-E201")
    for path in (*plan.source.paths, *plan.reads, *(shard.path for shard in plan.shards)):
        if isinstance(path, URL):
            raise ResourceError(
                f"{path}: --ray needs files that all nodes can access, not URLs; omit --ray, or use a file", "QK-E412"
            )
    from quantkit.pipeline.ray_tasks import RayExecutor

    backend = options.get("backend", "cpu")
    return RayExecutor(address, options.get("threads"), backend=backend, max_vram=options.get("max_vram"))


def _threads(plan: Plan, options: RunOptions) -> Threads:
    """Return threads, with GPUs if the backend has them; report the choice to the observer."""
    count, observer = options.get("threads") or available_cpus(), options.get("observer")
    backend, devices = options.get("backend", "cpu"), options.get("devices", ())
    if backend == "cpu" and not devices:
        return Threads(count)
    from quantkit.pipeline.gpu.choice import gpus_for
    from quantkit.pipeline.gpu.executor import GpuExecutor

    say = None if observer is None else observer.on_note
    names, note = gpus_for(plan, backend, devices)
    if say is not None:
        say(note)
    if not names:
        return Threads(count)
    return GpuExecutor(count, names, max_vram=options.get("max_vram"), verify=options.get("verify", 0), say=say)


def forecast_cache(plan: Plan, cache: str | Path | None, *, measure: bool = False) -> CacheUse | None:
    """Return the expected use of the tensor cache in a folder, if one is given; for a dry run."""
    if cache is None:
        return None
    folder = locate(cache)
    exists = folder.exists() and any(folder.iterdir())
    store = open_store(folder, make=False) if exists else Store(folder, 0)
    return RunCache(store, plan, measure=measure, dry=True).forecast()


def was_finished(plan: Plan) -> bool:
    """Return whether an earlier run of the plan finished its output."""
    return not os.path.exists(journal_path(plan.shards[0].path)) and is_complete(plan)


def check_targets(plan: Plan, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse outputs that would destroy a file, before any is touched. Raises ResourceError."""
    inputs = dict.fromkeys((*plan.source.paths, *plan.source.inputs, *plan.reads))
    check_apart([*(s.path for s in plan.shards), journal_path(plan.shards[0].path)], inputs)
    has_journal = os.path.exists(journal_path(plan.shards[0].path))
    if resume and not overwrite and not has_journal and any(shard.path.is_file() for shard in plan.shards):
        if is_complete(plan):
            return
        raise ResourceError(
            f"{plan.shards[0].path} exists and is not the output of this command (another source, type, recipe or "
            f"imatrix, or truncated), so --resume cannot complete it; give another name, or --overwrite",
            "QK-E409",
        )
    for shard in plan.shards:
        check_free(shard.path, overwrite=overwrite or resume and has_journal)
    if has_journal and not resume and not overwrite:
        raise ResourceError(
            f"{journal_path(plan.shards[0].path)} exists: an earlier run was interrupted; continue with --resume, or "
            "start over with --overwrite",
            "QK-E408",
        )


def refusal(plan: Plan, sidecar: Path | None = None, *, resume: bool = False, overwrite: bool = False) -> str | None:
    """Return the error that a run of a plan, and of ``sidecar``, would raise, for a dry run; None if it would start."""
    try:
        check_kernels(plan.tensors)
        if sidecar is not None:
            check_free(sidecar, overwrite=overwrite)
        check_targets(plan, resume=resume, overwrite=overwrite)
    except (ResourceError, TypeNotSupported) as e:
        return e.message
    return None


def _stamps(plan: Plan) -> list[list[int | str]]:
    """Return the stamps of the plan's source files, and of other files that are read during the run."""
    open_files = (path for path in plan.reads if isinstance(path, File) and path.is_held)
    try:
        return stamps_of((*plan.source.inputs, *open_files))
    except OSError as e:
        raise FormatError(f"{e.filename}: cannot be read: {e.strerror or e}", os_error_code(e)) from None


def _prepare(plan: Plan, target: RunTarget, journal: Journal, *, resume: bool, overwrite: bool) -> set[str]:
    """Reserve the output and return the names of tensors that an earlier run finished."""
    headers = [shard.layout.header for shard in plan.shards]
    if resume and journal.resume():
        if journal.inputs_changed:
            if _source_matches(plan, target, journal):
                journal.record_inputs()
            else:
                journal.start()
                target.discard()
        if journal.sealed and not target.is_whole():
            journal.start()  # the finished files were truncated or removed
        if not journal.sealed:
            target.reserve(headers)
            _verify(plan, target, journal)
        return set(journal.crcs)
    if resume and journal.path.stat().st_size and not overwrite:
        raise ResourceError(
            f"{journal.path} belongs to another run (the source, type, recipe or imatrix differs), so --resume "
            "cannot continue it; start over with --overwrite",
            "QK-E409",
        )
    try:
        journal.start()
        target.discard()
        target.reserve(headers)
    except OSError as e:
        _discard(target, journal)
        where = e.filename or plan.shards[0].path.parent
        raise ResourceError(
            f"{where}: {e.strerror or e}; nothing was written: free some space, or write elsewhere", os_error_code(e)
        ) from e
    except BaseException:
        _discard(target, journal)
        raise
    return set()


def _source_matches(plan: Plan, target: RunTarget, journal: Journal) -> bool:
    """Return whether the source still has the bytes of finished tensors, although its files have changed."""
    buffers = Buffers()
    for index, tensor in enumerate(plan.tensors):
        if (crc := journal.crcs.get(tensor.name)) is None:
            continue
        if tensor.name in journal.sources:
            values, digest = journal.sources[tensor.name]
            matches = source_digest(plan.source, index, tensor, values, buffers) == digest
        else:
            matches = crc == NO_CRC and target.readable and _is_intact(plan, target, index, tensor, crc)
        if not matches:
            return False
    return True


def _verify(plan: Plan, target: RunTarget, journal: Journal) -> None:
    """Remove journaled tensors whose bytes on the disk have changed."""
    for index, tensor in enumerate(plan.tensors):
        if tensor.name not in journal.crcs or target.has(tensor.shard, tensor.offset, tensor.nbytes):
            continue
        if not target.readable or not _is_intact(plan, target, index, tensor, journal.crcs[tensor.name]):
            journal.forget(tensor.name)


def _is_intact(plan: Plan, target: RunTarget, index: int, tensor: PlannedTensor, crc: int) -> bool:
    if crc != NO_CRC:
        return target.crc(tensor.shard, tensor.offset, tensor.nbytes) == crc
    buffers = Buffers()
    for job in cut_jobs(index, tensor, JOB):
        source = buffers.get("source", job.target_bytes)
        plan.source.read(tensor.parts[job.part].source, source, job.source_offset)
        if target.crc(tensor.shard, job.target_offset, job.target_bytes) != zlib.crc32(source.data):
            return False
    return True


def _discard(target: RunTarget, journal: Journal) -> None:
    """Remove the output of a run that cannot succeed."""
    target.discard()
    journal.remove()

"""A node with GPUs: each batch of jobs runs on GPUs and threads, like the work of one machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from quantkit.cluster import NodeRefusal
from quantkit.errors import ResourceError
from quantkit.pipeline.gpu.choice import gpus_for
from quantkit.pipeline.gpu.executor import GpuExecutor
from quantkit.pipeline.jobs import Job, JobResult
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.pipeline.target import Target


def workers_of(threads: int, gpus: int) -> int:
    """Return the number of workers that share a node's memory, for these threads and GPUs."""
    return GpuExecutor(threads, [f"CUDA{i}" for i in range(gpus)]).count if gpus else threads


def choose_gpus(plan: Plan, backend: str, threads: int, workers: int) -> tuple[tuple[str, ...], str]:
    """Return the GPUs that this node uses, and a note about them.

    At most ``workers`` share its memory, including those of GPUs. Raises NodeRefusal if ``backend`` is "cuda" and the
    node has no GPU.
    """
    try:
        names, note = gpus_for(plan, backend)
    except ResourceError as e:
        raise NodeRefusal(e.message) from None
    while names and workers_of(threads, len(names)) > workers:
        names, note = names[:-1], f"{note}; --max-ram is too small for {names[-1]}"
    return names, note


class GpuBatches:
    """Runs batches on GPUs, and types without a CUDA encoder on ``threads`` threads."""

    def __init__(
        self, plan: Plan, target: Target, names: Sequence[str], threads: int, max_ram: int, max_vram: int | None
    ) -> None:
        #: Notes for the user since the last batch.
        self.notes = list[str]()
        self._plan = plan
        self._target = target
        self._max_ram = max_ram
        self._executor = GpuExecutor(threads, names, max_vram=max_vram, say=self.notes.append, keep_metrics=True)

    def run(self, batch: Sequence[Job], *, measure: bool) -> list[JobResult]:
        """Run jobs, and return their results. Raises the failure of any of them."""
        work = _Batch(self._plan, self._target, self._max_ram, batch)
        self._executor.run(work, measure=measure)
        if work.failure is not None:
            raise work.failure
        return [work.results[job.tensor, job.target_offset] for job in batch]


class _Batch:
    """Jobs of a batch as the work of an executor."""

    def __init__(self, plan: Plan, target: Target, max_ram: int, batch: Sequence[Job]) -> None:
        self.plan = plan
        self.target = target
        self.max_ram = max_ram
        self._jobs = batch
        self.stop = threading.Event()
        self.results: dict[tuple[int, int], JobResult] = {}
        self.failure: BaseException | None = None

    def to_encode(self) -> list[PlannedTensor]:
        return [self.plan.tensors[index] for index in dict.fromkeys(job.tensor for job in self._jobs)]

    def jobs(self) -> Iterator[Job]:
        return iter(self._jobs)

    def finish(self, job: Job, result: JobResult) -> None:
        self.results[job.tensor, job.target_offset] = result

    def fail(self, e: BaseException) -> None:
        self.failure = self.failure or e
        self.stop.set()

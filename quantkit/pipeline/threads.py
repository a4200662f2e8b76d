"""Threads of this process as an executor: each takes the next job from a common list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from quantkit.formats.remote.retry import cancelled
from quantkit.kernels.first_run import compile_in_order
from quantkit.pipeline.feedback import CpuMetricPool
from quantkit.pipeline.jobs import Job
from quantkit.pipeline.ledger import NodeShare, Work
from quantkit.pipeline.warmup import kernel_calls
from quantkit.pipeline.worker import Worker, metrics_for


class Threads:
    """``count`` threads, each a worker."""

    def __init__(self, count: int) -> None:
        #: Workers that share memory, and those that compute on this CPU.
        self.count = self.cpus = count
        self.nodes: tuple[NodeShare, ...] = ()

    def run(self, ledger: Work, *, measure: bool) -> None:
        """Compile, then run all jobs of a ledger, or of a part of one.

        On return all threads have ended, and failures are in the ledger.
        """
        compile_in_order(kernel_calls(ledger.to_encode(), measure))
        jobs, lock = ledger.jobs(), threading.Lock()
        metrics = metrics_for(ledger.plan.tensors, ledger.max_ram, self.count)
        take = partial(_next_job, jobs, lock)
        run_parallel(ledger, [partial(run_jobs, ledger, take, metrics, measure, 2 * self.count)] * self.count)


def _next_job(jobs: Iterator[Job], lock: threading.Lock) -> Job | None:
    with lock:
        return next(jobs, None)


def run_jobs(
    ledger: Work, take: Callable[[], Job | None], metrics: CpuMetricPool, measure: bool, readahead: int
) -> None:
    """Run jobs until ``take`` has none left."""
    worker = Worker(ledger.plan.source, ledger.target, metrics, measure=measure, readahead=readahead)
    while not ledger.stop.is_set() and (job := take()) is not None:
        ledger.finish(job, worker.run(job, ledger.plan.tensors[job.tensor]))


def run_parallel(ledger: Work, tasks: Sequence[Callable[[], None]]) -> None:
    """Run each task on its own thread; on return, all have ended and failures are in the ledger."""

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as e:  # raised by the main thread
            ledger.fail(e)

    threads = [threading.Thread(target=run, args=(task,), name=f"encode-{i}") for i, task in enumerate(tasks)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    except BaseException:
        ledger.stop.set()
        cancelled.set()  # threads that wait for a store stop
        raise
    finally:
        for thread in threads:
            thread.join()

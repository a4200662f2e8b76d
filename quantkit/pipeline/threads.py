"""Threads of this process as an executor: each takes the next job from one list."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from quantkit.formats.remote.retry import given_up
from quantkit.kernels.first_run import compile_together
from quantkit.pipeline.feedback import Metrics
from quantkit.pipeline.ledger import NodeShare, Work
from quantkit.pipeline.warm import kernel_calls
from quantkit.pipeline.work import Job, Worker, metrics_for


class Threads:
    """``count`` threads, each a worker."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.nodes: tuple[NodeShare, ...] = ()

    def run(self, ledger: Work, *, measure: bool) -> None:
        """Compile, then run all jobs of a ledger, or of a part of one.

        On return all threads have ended, and failures are in the ledger.
        """
        compile_together(kernel_calls(ledger.to_encode(), measure))
        jobs, lock = ledger.jobs(), threading.Lock()
        metrics = metrics_for(ledger.plan.tensors, ledger.max_ram, self.count)
        threads = [
            threading.Thread(target=self._work, args=(ledger, metrics, jobs, lock, measure), name=f"encode-{i}")
            for i in range(self.count)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except BaseException:
            ledger.stop.set()
            given_up.set()  # threads that wait for a store need not
            raise
        finally:
            for thread in threads:
                thread.join()

    def _work(self, ledger: Work, metrics: Metrics, jobs: Iterator[Job], lock: threading.Lock, measure: bool) -> None:
        worker = Worker(ledger.plan.source, ledger.target, metrics, measure=measure, ahead=2 * self.count)
        try:
            while not ledger.stop.is_set():
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                ledger.done(job, worker.run(job, ledger.plan.tensors[job.tensor]))
        except BaseException as e:  # raised by the main thread
            ledger.fail(e)

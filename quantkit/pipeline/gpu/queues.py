"""Queues of a ledger's jobs: single jobs for threads, batches for GPUs, both in the order of the jobs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence

from quantkit.kernels.cuda.encode.pipeline import Conversion
from quantkit.pipeline.jobs import Job
from quantkit.pipeline.ledger import Work

#: Maximum number of jobs that wait in one queue while the other is filled.
WINDOW = 1 << 14


class JobQueues:
    """The jobs of a ledger in order: batches for GPUs, the others for threads, which take all if no GPU is left."""

    def __init__(
        self, ledger: Work, form: Callable[[Job], Conversion | None], slots: int, sample: Collection[int] = ()
    ) -> None:
        self._ledger = ledger
        self._form = form
        self._slots = slots
        self._sample = sample
        self._jobs = ledger.jobs()
        self._changed = threading.Condition()
        self._for_cpu, self._for_gpus = deque[Job](), deque[tuple[Job, Conversion]]()
        self._exhausted = False
        #: Jobs on GPUs, some of which may be queued again.
        self._in_flight = 0
        #: The number of GPU jobs so far, and those of them that are in the sample.
        self._n_gpu_jobs = 0
        self.sampled_jobs = set[tuple[int, int]]()

    def _fetch(self) -> bool:
        """Put the next job into its queue; False if there is none, or a queue is full."""
        if self._exhausted or max(len(self._for_cpu), len(self._for_gpus)) >= WINDOW:
            return False
        job = next(self._jobs, None)
        if job is None:
            self._exhausted = True
            self._changed.notify_all()
            return False
        form = self._form(job)
        if form is None:
            self._for_cpu.append(job)
        else:
            if self._n_gpu_jobs in self._sample:
                self.sampled_jobs.add((job.tensor, job.target_offset))
            self._n_gpu_jobs += 1
            self._for_gpus.append((job, form))
        self._changed.notify_all()
        return True

    def _is_finished(self) -> bool:
        return self._ledger.stop.is_set() or self._exhausted and not self._in_flight and not self._for_gpus

    def next_for_cpu(self) -> Job | None:
        """Return a job for the CPU; waits while GPUs may return some, None at the end."""
        with self._changed:
            while True:
                if self._for_cpu:
                    return self._for_cpu.popleft()
                if self._for_gpus and not self._slots:
                    return self._for_gpus.popleft()[0]
                if self._fetch():
                    continue
                if self._is_finished():
                    return None
                self._changed.wait(0.2)

    def next_batch(
        self, rows: Callable[[Conversion], int], segment: Callable[[Job, Conversion], object]
    ) -> tuple[Conversion, list[Job]] | None:
        """Return jobs of one form for a slot, up to ``rows(form)`` rows; None at the end."""
        with self._changed:
            while not self._for_gpus:
                if self._fetch():
                    continue
                if self._is_finished():
                    return None
                self._changed.wait(0.2)
            job, form = self._for_gpus.popleft()
            jobs, segments = [job], [segment(job, form)]
            n_rows = rows(form) - job.rows
            while self._for_gpus or self._fetch():
                if not self._for_gpus:
                    continue
                job, next_form = self._for_gpus[0]
                if segment(job, next_form) != segments[-1]:
                    segments.append(segment(job, next_form))
                if next_form != form or job.rows > n_rows or len(segments) > form.segments:
                    break
                self._for_gpus.popleft()
                jobs.append(job)
                n_rows -= job.rows
            self._in_flight += len(jobs)
            return form, jobs

    def finish(self, jobs: int) -> None:
        """Count jobs of a GPU as done."""
        with self._changed:
            self._in_flight -= jobs
            self._changed.notify_all()

    def requeue(self, form: Conversion, jobs: Sequence[Job]) -> None:
        """Queue jobs again that a failed GPU returns."""
        with self._changed:
            self._for_gpus.extendleft((job, form) for job in reversed(jobs))
            self._in_flight -= len(jobs)
            self._changed.notify_all()

    def remove_slot(self) -> None:
        """Decrease the number of slots."""
        with self._changed:
            self._slots -= 1
            self._changed.notify_all()

"""Who takes which job of a ledger: threads, or cards in batches, both in the order of the jobs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence

from quantkit.kernels.cuda.encode.pipeline import AnyForm
from quantkit.pipeline.jobs import Job
from quantkit.pipeline.ledger import Work

#: Jobs that may wait for cards while threads look for theirs, and the other way round.
WINDOW = 1 << 14


class Shares:
    """The jobs of a ledger, given out in order: those of cards in batches, the others, and all if no card is left."""

    def __init__(
        self, ledger: Work, form: Callable[[Job], AnyForm | None], slots: int, drawn: Collection[int] = ()
    ) -> None:
        self._ledger, self._form, self._slots, self._drawn = ledger, form, slots, drawn
        self._jobs = ledger.jobs()
        self._changed = threading.Condition()
        self._for_cpu, self._for_cards = deque[Job](), deque[tuple[Job, AnyForm]]()
        self._exhausted = False
        #: Jobs that cards have taken, of which they may bring some back.
        self._held = 0
        #: How many jobs of cards have come; those among them whose numbers were drawn.
        self._seen = 0
        self.drawn = set[tuple[int, int]]()

    def _come(self) -> bool:
        """Let the next job come; False if none can."""
        if self._exhausted or max(len(self._for_cpu), len(self._for_cards)) >= WINDOW:
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
            if self._seen in self._drawn:
                self.drawn.add((job.tensor, job.target_offset))
            self._seen += 1
            self._for_cards.append((job, form))
        self._changed.notify_all()
        return True

    def _ended(self) -> bool:
        return self._ledger.stop.is_set() or self._exhausted and not self._held and not self._for_cards

    def for_thread(self) -> Job | None:
        """Return a job for the CPU; waits while cards may bring some back, None if there will be none."""
        with self._changed:
            while True:
                if self._for_cpu:
                    return self._for_cpu.popleft()
                if self._for_cards and not self._slots:
                    return self._for_cards.popleft()[0]
                if self._come():
                    continue
                if self._ended():
                    return None
                self._changed.wait(0.2)

    def batch(
        self, rows: Callable[[AnyForm], int], segment: Callable[[Job, AnyForm], object]
    ) -> tuple[AnyForm, list[Job]] | None:
        """Return jobs of one form for a slot, up to so many rows; None if none will come."""
        with self._changed:
            while not self._for_cards:
                if self._come():
                    continue
                if self._ended():
                    return None
                self._changed.wait(0.2)
            job, form = self._for_cards.popleft()
            jobs, left, segments = [job], rows(form) - job.rows, [segment(job, form)]
            while self._for_cards or self._come():
                if not self._for_cards:
                    continue
                job, other = self._for_cards[0]
                if segment(job, other) != segments[-1]:
                    segments.append(segment(job, other))
                if other != form or job.rows > left or len(segments) > form.segments:
                    break
                self._for_cards.popleft()
                jobs.append(job)
                left -= job.rows
            self._held += len(jobs)
            return form, jobs

    def done(self, jobs: int) -> None:
        """Take notice that jobs of a card are done."""
        with self._changed:
            self._held -= jobs
            self._changed.notify_all()

    def bring_back(self, form: AnyForm, jobs: Sequence[Job]) -> None:
        """Take jobs back from a card that failed."""
        with self._changed:
            self._for_cards.extendleft((job, form) for job in reversed(jobs))
            self._held -= len(jobs)
            self._changed.notify_all()

    def leave(self) -> None:
        """Take notice that a slot is no more."""
        with self._changed:
            self._slots -= 1
            self._changed.notify_all()

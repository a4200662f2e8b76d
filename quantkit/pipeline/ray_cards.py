"""A node with cards: each batch of jobs is carried out by cards and threads, as the work of one machine is."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from quantkit.cluster import Refused
from quantkit.errors import ResourceError
from quantkit.pipeline.cards.choice import cards_for
from quantkit.pipeline.cards.executor import Cards
from quantkit.pipeline.jobs import Job, JobResult
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.target import Target


def workers_of(threads: int, cards: int) -> int:
    """Return how many workers share the memory of a node with so many threads and cards."""
    return Cards(threads, [f"CUDA{i}" for i in range(cards)]).count if cards else threads


def choose_cards(plan: Plan, backend: str, threads: int, workers: int) -> tuple[tuple[str, ...], str]:
    """Return the cards that this node uses, and a sentence that says so.

    No more than ``workers`` share its memory, those of cards included. Raises Refused where a card is asked for, and
    there is none.
    """
    try:
        names, note = cards_for(plan, backend)
    except ResourceError as e:
        raise Refused(e.message) from None
    while names and workers_of(threads, len(names)) > workers:
        names, note = names[:-1], f"{note}; --max-ram has no room for {names[-1]}"
    return names, note


class CardBatches:
    """Runs batches on cards, and on ``threads`` threads what cards do not encode."""

    def __init__(
        self, plan: Plan, target: Target, names: Sequence[str], threads: int, max_ram: int, max_vram: int | None
    ) -> None:
        #: What the user is to know, since it was last asked for.
        self.said = list[str]()
        self._plan, self._target, self._max_ram = plan, target, max_ram
        self._cards = Cards(threads, names, max_vram=max_vram, say=self.said.append, keeps=True)

    def run(self, batch: Sequence[Job], *, measure: bool) -> list[JobResult]:
        """Run jobs, and return their results. Raises what any of them raised."""
        work = _Batch(self._plan, self._target, self._max_ram, batch)
        self._cards.run(work, measure=measure)
        if work.failure is not None:
            raise work.failure
        return [work.results[job.tensor, job.target_offset] for job in batch]


class _Batch:
    """Jobs of a batch as the work of an executor."""

    def __init__(self, plan: Plan, target: Target, max_ram: int, batch: Sequence[Job]) -> None:
        self.plan, self.target, self.max_ram, self._jobs = plan, target, max_ram, batch
        self.stop = threading.Event()
        self.results: dict[tuple[int, int], JobResult] = {}
        self.failure: BaseException | None = None

    def to_encode(self) -> list[PlannedTensor]:
        return [self.plan.tensors[at] for at in dict.fromkeys(job.tensor for job in self._jobs)]

    def jobs(self) -> Iterator[Job]:
        return iter(self._jobs)

    def done(self, job: Job, result: JobResult) -> None:
        self.results[job.tensor, job.target_offset] = result

    def fail(self, e: BaseException) -> None:
        self.failure = self.failure or e
        self.stop.set()

"""Batches of jobs through a slot of a card: read, encoded there, checked and written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from quantkit.errors import ResourceError
from quantkit.formats.ranges import U8
from quantkit.kernels.cuda.encode.pipeline import Form, Room, Segment, Slot
from quantkit.pipeline.cards.choice import segment_of
from quantkit.pipeline.cards.shares import Shares
from quantkit.pipeline.jobs import Job, JobResult, piece_rows
from quantkit.pipeline.ledger import Work
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.work import F32, Begun, Worker
from quantkit.types import TensorType

#: Until a card is taken to hang: seconds, and weights that any card encodes in one, whatever the type.
PATIENCE, SLOWEST = 60.0, 1e6


@dataclass
class Card:
    """A card in a run: its device, how many rows of a form go together, the room that each slot has for them."""

    name: str
    device: Any
    rows: Callable[[Form], int] = lambda form: 1
    room: Room = Room(0, 0, 0, 0, 0)
    slots: int = 0
    failed: bool = False
    #: Whether what waits for it may wait for ever.
    hangs: bool = False

    def limit(self, weights: int) -> float:
        """Return the seconds that so many weights may take, others of the same size before them."""
        return PATIENCE + max(self.slots, 1) * weights / SLOWEST


@dataclass
class Checks:
    """Which jobs are encoded again on the CPU, by number, and how many were."""

    wanted: frozenset[int] = frozenset()
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Batches:
    """Carries jobs of one form through a slot of a card."""

    def __init__(
        self,
        ledger: Work,
        shares: Shares,
        checks: Checks,
        card: Card,
        slot: Slot,
        worker: Worker,
        lose: Callable[[Card, BaseException], None],
    ) -> None:
        """lose: is told when the card fails, and why."""
        self._ledger, self._shares, self._checks = ledger, shares, checks
        self._card, self._slot, self._worker, self._lose = card, slot, worker, lose
        self._together = np.empty(0, np.uint8)

    def run(self, form: Form, jobs: list[Job]) -> None:
        """Read, encode, check and write; what a card that fails leaves undone goes back."""
        read = self._read(form, jobs)
        if not read:
            return
        segments = [
            (key, [job for job, _ in members])
            for key, members in groupby(read, key=lambda each: segment_of(self._tensor(each[0]), each[0]))
        ]
        try:
            self._slot.start(form, [Segment(sum(j.rows for j in of), self._weights(of[0])) for _, of in segments])
            made = self._slot.wait(
                self._card.limit(form.n * sum(job.rows for job, _ in read)), lambda: self._card.failed
            )
            if self._card.failed:  # what it says now is worth nothing
                raise ResourceError(f"{self._card.name} failed")
        except Exception as e:  # whatever it is, the CPU does without
            self._lose(self._card, e)
            self._shares.bring_back(form, [job for job, _ in read])
            return
        if made is None:  # the CPU says where a value is not finite
            for job, _ in read:
                self._ledger.done(job, self._worker.run(job, self._tensor(job)))
                self._shares.done(1)
            return
        row_bytes = form.target.row_bytes(form.n)
        rows = (row for of, nbytes in zip(segments, made, strict=True) for row in _cut(nbytes, of[1], row_bytes))
        at = 0
        for (job, begun), plain in zip(read, rows, strict=True):
            tensor = self._tensor(job)
            target = plain if form.target is tensor.type else self._woven(job, tensor.type, plain)
            self._verify(job, tensor, target)
            sums = self._worker.measured(job, tensor, self._values(form, job, tensor, begun, at), target)
            self._ledger.done(job, self._worker.finish(job, tensor, begun, target, sums))
            self._shares.done(1)
            at += job.rows * form.source.row_bytes(form.n)

    def _tensor(self, job: Job) -> PlannedTensor:
        return self._ledger.plan.tensors[job.tensor]

    def _read(self, form: Form, jobs: list[Job]) -> list[tuple[Job, Begun]]:
        """Read rows into the slot, one job's behind the other's; those that the cache has are done with that."""
        found, at = [], 0
        for job in jobs:
            tensor, nbytes = self._tensor(job), job.rows * form.source.row_bytes(form.n)
            room, as_they_are = self._slot.source[at : at + nbytes], self._as_it_is(form, job)
            begun = self._worker.begin(job, tensor, room if as_they_are else None)
            if isinstance(begun, JobResult):
                self._ledger.done(job, begun)
                self._shares.done(1)
                continue
            if not as_they_are:
                for which, x in self._worker.decoded(job, tensor, begun.source):
                    room.view(np.float32).reshape(job.rows, form.n)[which] = x
            found.append((job, begun))
            at += nbytes
        return found

    def _woven(self, job: Job, t: TensorType, rows: U8) -> U8:
        """Weave a job's rows together, in a buffer that the next job's take."""
        from quantkit.kernels.cpu.interleave import interleave_rows

        if self._together.size < job.target_bytes:
            self._together = np.empty(job.target_bytes, np.uint8)
        target = self._together[: job.target_bytes]
        interleave_rows(t, rows.reshape(job.rows, -1), target.reshape(job.rows, -1))
        return target

    def _as_it_is(self, form: Form, job: Job) -> bool:
        """Tell whether rows go to the card as they lie in the file."""
        return form.source is self._tensor(job).parts[job.part].source.type

    def _weights(self, job: Job) -> F32:
        return self._worker.weights_of(job, self._tensor(job).parts[job.part])

    def _values(
        self, form: Form, job: Job, tensor: PlannedTensor, begun: Begun, at: int
    ) -> Iterator[tuple[slice, F32]]:
        """Yield the values of a job's rows, of which the slot has those that the CPU decoded."""
        if self._as_it_is(form, job):
            yield from self._worker.decoded(job, tensor, begun.source)
            return
        x = self._slot.source[at : at + 4 * job.rows * form.n].view(np.float32).reshape(job.rows, form.n)
        step = piece_rows(tensor.parts[job.part], tensor.type)
        yield from ((slice(row, row + step), x[row : row + step]) for row in range(0, job.rows, step))

    def _verify(self, job: Job, tensor: PlannedTensor, target: U8) -> None:
        """Encode a job on the CPU if it was drawn; ResourceError if the card's bytes are others."""
        if (job.tensor, job.target_offset) not in self._shares.drawn:
            return
        wanted = self._worker.remade(job, tensor)
        wrong = np.flatnonzero((wanted != target).reshape(job.rows, -1).any(axis=1))
        if wrong.size:
            first = tensor.parts[job.part].target_row + job.row
            raise ResourceError(
                f"{self._card.name} encodes as {tensor.type} what the CPU encodes to other bytes: tensor "
                f"{tensor.name}, {wrong.size} of rows {first} to {first + job.rows - 1} of matrix {job.matrix}, first "
                f"row {first + int(wrong[0])}; no output was written: use --backend cpu"
            )
        with self._checks.lock:
            self._checks.done += 1


def _cut(rows: U8, jobs: Sequence[Job], row_bytes: int) -> Iterator[U8]:
    """Yield the bytes of each job of a segment."""
    at = 0
    for job in jobs:
        yield rows[at : at + job.rows * row_bytes]
        at += job.rows * row_bytes

"""Batches of jobs through a slot of a card: read, encoded there, checked and written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from quantkit.errors import FormatError, ResourceError
from quantkit.formats.ranges import U8
from quantkit.kernels.cuda.encode.encode import weighs
from quantkit.kernels.cuda.encode.pipeline import AnyForm, Form, Room, Segment
from quantkit.kernels.cuda.feedback.carrier import Carrier
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.feedback.pipeline import FedForm, FedSlot, Rows, losses_of
from quantkit.kernels.interleave import base_of
from quantkit.kernels.levels import all_levels
from quantkit.pipeline.cards.choice import segment_of
from quantkit.pipeline.cards.shares import Shares
from quantkit.pipeline.feedback import Shared
from quantkit.pipeline.jobs import Job, JobResult, piece_rows
from quantkit.pipeline.ledger import Work
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.work import F32, F64, Begun, Worker
from quantkit.types import TensorType

#: Until a card is taken to hang: seconds, and weights that any card encodes in one, whatever the type.
PATIENCE, SLOWEST = 60.0, 1e6
#: Multiply-adds of doubles that any card does in one, for metrics.
_SLOWEST_SUMS = 1e10


@dataclass
class Card:
    """A card in a run: its device, how many rows of a form go together, the room that each slot has for them."""

    name: str
    device: Any
    rows: Callable[[AnyForm], int] = lambda form: 1
    room: Room = Room(0, 0, 0, 0, 0)
    slots: int = 0
    failed: bool = False
    #: Whether what waits for it may wait for ever.
    hangs: bool = False
    #: Of matrices that are encoded with feedback; those that go leave a card that hangs alone.
    metrics: Shared[DeviceMetric] = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Shared(0, lambda metric: None if self.hangs else metric.close())

    def carrier(self, slot: FedSlot) -> Carrier:
        """Return what brings covariances here by the way of a slot."""
        return Carrier(
            slot.device,
            lambda sums: PATIENCE + max(self.slots, 1) * sums / _SLOWEST_SUMS,
            lambda: self.failed,
        )

    def limit(self, weights: int) -> float:
        """Return the seconds that so many weights may take, others of the same size before them."""
        return PATIENCE + max(self.slots, 1) * weights / SLOWEST


@dataclass
class Checks:
    """Which jobs are encoded again on the CPU, by number, and how many were."""

    wanted: frozenset[int] = frozenset()
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Reading:
    """What of the host's memory covariances take on their way to cards: ``limit`` bytes, but one in any case."""

    def __init__(self, limit: int) -> None:
        self._limit, self._taken, self._changed = limit, 0, threading.Condition()

    @contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        """Wait until there is room for so many bytes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= nbytes
                self._changed.notify_all()


#: A job's bytes, and the losses of rows encoded with feedback before and after.
_Made = tuple[U8, tuple[F64, F64] | None]


class Batches:
    """Carries jobs of one form through a slot of a card."""

    def __init__(
        self,
        ledger: Work,
        shares: Shares,
        checks: Checks,
        card: Card,
        slot: FedSlot,
        worker: Worker,
        reading: Reading,
        lose: Callable[[Card, BaseException], None],
    ) -> None:
        """lose: is told when the card fails, and why."""
        self._ledger, self._shares, self._checks = ledger, shares, checks
        self._card, self._slot, self._worker, self._lose = card, slot, worker, lose
        self._reading = reading
        self._together = np.empty(0, np.uint8)
        self._carrier: Carrier | None = None

    def run(self, form: AnyForm, jobs: list[Job]) -> None:
        """Read, encode, check and write; what a card that fails leaves undone goes back."""
        read = self._read(form, jobs)
        if not read:
            return
        only = [job for job, _ in read]
        try:
            made = self._fed(form, only) if isinstance(form, FedForm) else self._plain(form, only)
            if self._card.failed:  # what it says now is worth nothing
                raise ResourceError(f"{self._card.name} failed")
        except FormatError:
            raise  # a covariance is none: the CPU would say the same
        except Exception as e:  # whatever it is, the CPU does without
            self._lose(self._card, e)
            self._shares.bring_back(form, only)
            return
        if made is None:  # the CPU says where a value is not finite
            for job in only:
                self._ledger.done(job, self._worker.run(job, self._tensor(job)))
                self._shares.done(1)
            return
        at = 0
        for (job, begun), (plain, losses) in zip(read, made, strict=True):
            tensor = self._tensor(job)
            target = plain if form.target is tensor.type else self._woven(job, tensor.type, plain)
            self._verify(job, tensor, target)
            sums = self._worker.measured(job, tensor, self._values(form, job, tensor, begun, at), target, losses)
            self._ledger.done(job, self._worker.finish(job, tensor, begun, target, sums))
            self._shares.done(1)
            at += job.rows * form.source.row_bytes(form.n)

    def _plain(self, form: AnyForm, jobs: list[Job]) -> Iterator[_Made] | None:
        """Encode jobs; return what each becomes, None if a value is not finite."""
        assert isinstance(form, Form)
        segments = [list(of) for _, of in groupby(jobs, key=lambda job: segment_of(self._tensor(job), job, form))]
        self._slot.start(form, [Segment(sum(j.rows for j in of), self._weights(of[0])) for of in segments])
        made = self._wait(form, jobs)
        if made is None:
            return None
        row_bytes = form.target.row_bytes(form.n)
        pairs = zip(segments, made, strict=True)
        return ((rows, None) for of, nbytes in pairs for rows in _cut(nbytes, of, row_bytes))

    def _fed(self, form: FedForm, jobs: list[Job]) -> Iterator[_Made] | None:
        """Encode jobs of one matrix with feedback; return what each becomes, None if a value is not finite."""
        self._carrier = self._carrier or self._card.carrier(self._slot)
        first, tensor = jobs[0], self._tensor(jobs[0])
        part = tensor.parts[first.part]
        assert part.inputs is not None
        inputs, carrier = part.inputs, self._carrier

        def make() -> DeviceMetric:
            with self._reading.taking(inputs.metric_bytes // 2):
                return inputs.made_on(carrier, first.matrix, grouping)

        described = all_levels().get(tensor.type.name)
        grouping = described.grouping if described is not None else None
        self._slot.bring(form, sum(job.rows for job in jobs))
        if self._wait(form, jobs) is None:
            return None
        per_row = form.n // form.columns
        rows = [Rows(job.rows * per_row, (part.source_row + job.row) * per_row) for job in jobs]
        with self._card.metrics.shared(inputs, first.matrix, grouping, make) as metric:
            counts = self._worker.importance_of(first, part, metric.importance)
            self._slot.feed(form, rows, metric, counts if weighs(form.target) else counts[:0])
            made = self._wait(form, jobs)
        assert made is not None
        losses = losses_of(made) if tensor.type.is_quantized else None
        return self._each_fed(form, jobs, made[0], losses)

    def _each_fed(self, form: FedForm, jobs: list[Job], rows: U8, losses: tuple[F64, F64] | None) -> Iterator[_Made]:
        at = 0
        for job, cut in zip(jobs, _cut(rows, jobs, form.target.row_bytes(form.n)), strict=True):
            count = job.rows * form.n // form.columns
            yield cut, None if losses is None else (losses[0][at : at + count], losses[1][at : at + count])
            at += count

    def _wait(self, form: AnyForm, jobs: list[Job]) -> list[U8] | None:
        return self._slot.wait(self._card.limit(form.n * sum(job.rows for job in jobs)), lambda: self._card.failed)

    def _tensor(self, job: Job) -> PlannedTensor:
        return self._ledger.plan.tensors[job.tensor]

    def _read(self, form: AnyForm, jobs: list[Job]) -> list[tuple[Job, Begun]]:
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

    def _as_it_is(self, form: AnyForm, job: Job) -> bool:
        """Tell whether rows go to the card as they lie in the file."""
        return form.source is self._tensor(job).parts[job.part].source.type

    def _weights(self, job: Job) -> F32:
        counts = self._worker.importance_of(job, self._tensor(job).parts[job.part])
        return counts if weighs(base_of(self._tensor(job).type)) else counts[:0]

    def _values(
        self, form: AnyForm, job: Job, tensor: PlannedTensor, begun: Begun, at: int
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

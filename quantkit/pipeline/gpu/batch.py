"""Batches of jobs processed by a slot of a GPU: read, encoded, checked and written."""

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
from quantkit.kernels.cuda.encode.pipeline import Conversion, RowConversion, Segment, SlotMemory
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.feedback.pinned_transfer import PinnedTransfer
from quantkit.kernels.cuda.feedback.pipeline import FeedbackConversion, FeedbackSlot, RowRange, losses_of
from quantkit.pipeline.feedback import MetricPool
from quantkit.pipeline.gpu.choice import segment_of
from quantkit.pipeline.gpu.queues import JobQueues
from quantkit.pipeline.jobs import Job, JobResult
from quantkit.pipeline.ledger import Work
from quantkit.pipeline.row_slices import PlannedPart, PlannedTensor
from quantkit.pipeline.worker import F32, F64, SourceRows, Worker
from quantkit.types import TensorType

#: Seconds until a GPU counts as hanging, and weights that any GPU encodes in one second, in any type.
PATIENCE, SLOWEST = 60.0, 1e6
#: Double-precision multiply-adds that any GPU does in one second, for metrics.
_SLOWEST_SUMS = 1e10


@dataclass
class Gpu:
    """A GPU in a run: its device, the rows of a form in a batch, and the memory of each slot."""

    name: str
    device: Any
    rows: Callable[[Conversion], int] = lambda form: 1
    slot_memory: SlotMemory = SlotMemory(0, 0, 0, 0, 0)
    slots: int = 0
    disabled: bool = False
    #: Whether it hangs, so that nothing may wait for it.
    hangs: bool = False
    #: Metrics of matrices with feedback; those of a GPU that hangs are not freed.
    metrics: MetricPool[DeviceMetric] = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = MetricPool(0, lambda metric: None if self.hangs else metric.close())

    def transfer(self, slot: FeedbackSlot) -> PinnedTransfer:
        """Return the transfer of covariances to this GPU through a slot."""
        return PinnedTransfer(
            slot.device,
            lambda sums: PATIENCE + max(self.slots, 1) * sums / _SLOWEST_SUMS,
            lambda: self.disabled,
        )

    def limit(self, weights: int) -> float:
        """Return the time limit for a number of weights, in seconds, with the work of the other slots before them."""
        return PATIENCE + max(self.slots, 1) * weights / SLOWEST


@dataclass
class Verification:
    """The jobs that the CPU encodes again, by number, and the count of those done."""

    sample: frozenset[int] = frozenset()
    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class ReadBudget:
    """Host memory for covariances on their way to GPUs: ``limit`` bytes, but always one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Wait until a number of bytes are free."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + nbytes <= self._limit)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


#: A job's bytes, and the losses of rows encoded with feedback before and after.
_Output = tuple[U8, tuple[F64, F64] | None]


class BatchRunner:
    """Runs jobs of one form through a slot of a GPU."""

    def __init__(
        self,
        ledger: Work,
        queues: JobQueues,
        verification: Verification,
        gpu: Gpu,
        slot: FeedbackSlot,
        worker: Worker,
        read_budget: ReadBudget,
        disable: Callable[[Gpu, BaseException], None],
    ) -> None:
        """disable: is called with the GPU and the error when it fails."""
        self._ledger = ledger
        self._queues = queues
        self._verification = verification
        self._gpu = gpu
        self._slot = slot
        self._worker = worker
        self._disable = disable
        self._read_budget = read_budget
        self._interleaved_rows = np.empty(0, np.uint8)
        self._transfer: PinnedTransfer | None = None

    def run(self, form: Conversion, jobs: list[Job]) -> None:
        """Read, encode, check and write jobs; those that a failing GPU leaves are queued again."""
        read = self._read(form, jobs)
        if not read:
            return
        to_encode = [job for job, _ in read]
        try:
            outputs = (
                self._encode_with_feedback(form, to_encode)
                if isinstance(form, FeedbackConversion)
                else self._encode_plain(form, to_encode)
            )
            if self._gpu.disabled:  # its result is not reliable
                raise ResourceError(f"{self._gpu.name} failed", "QK-E411")
        except FormatError:
            raise  # an invalid covariance: the CPU would fail, too
        except Exception as e:  # after any failure of the GPU the CPU takes over
            self._disable(self._gpu, e)
            self._queues.requeue(form, to_encode)
            return
        if outputs is None:  # the CPU reports the place of the non-finite value
            for job in to_encode:
                self._ledger.finish(job, self._worker.run(job, self._tensor(job)))
                self._queues.finish(1)
            return
        offset = 0
        for (job, rows), (plain, losses) in zip(read, outputs, strict=True):
            tensor = self._tensor(job)
            target = plain if form.target is tensor.type else self._interleave(job, tensor.type, plain)
            self._verify(job, tensor, target)
            sums = self._worker.measure_error(
                job, tensor, self._values(form, job, tensor, rows, offset), target, losses
            )
            self._ledger.finish(job, self._worker.finish(job, tensor, rows, target, sums))
            self._queues.finish(1)
            offset += job.rows * form.source.row_bytes(form.n)

    def _encode_plain(self, form: Conversion, jobs: list[Job]) -> Iterator[_Output] | None:
        """Encode jobs; return the output of each, or None if a value is not finite."""
        assert isinstance(form, RowConversion)
        segments = [
            list(segment) for _, segment in groupby(jobs, key=lambda job: segment_of(self._tensor(job), job, form))
        ]
        self._slot.start(
            form, [Segment(sum(j.rows for j in segment), self._weights(segment[0])) for segment in segments]
        )
        outputs = self._wait(form, jobs)
        if outputs is None:
            return None
        row_bytes = form.target.row_bytes(form.n)
        pairs = zip(segments, outputs, strict=True)
        return ((rows, None) for segment, nbytes in pairs for rows in _split_rows(nbytes, segment, row_bytes))

    def _encode_with_feedback(self, form: FeedbackConversion, jobs: list[Job]) -> Iterator[_Output] | None:
        """Encode jobs of one matrix with feedback; return the output of each, or None if a value is not finite."""
        self._transfer = self._transfer or self._gpu.transfer(self._slot)
        first = jobs[0]
        part = self._part(first)
        assert part.inputs is not None
        inputs, grouping = part.inputs, part.encoding.grouping
        transfer = self._transfer

        def make() -> DeviceMetric:
            with self._read_budget.reserve(inputs.metric_bytes // 2):
                return inputs.metric_on(transfer, first.matrix, grouping)

        self._slot.upload(form, sum(job.rows for job in jobs))
        if self._wait(form, jobs) is None:
            return None
        per_row = form.n // form.columns
        rows = [RowRange(job.rows * per_row, (part.source_row + job.row) * per_row) for job in jobs]
        with self._gpu.metrics.lease(inputs, first.matrix, grouping, make) as metric:
            importance = self._worker.importance_of(first, part, metric.importance)
            self._slot.encode(form, rows, metric, importance if part.encoding.is_weighted else importance[:0])
            outputs = self._wait(form, jobs)
        assert outputs is not None
        losses = losses_of(outputs) if form.target.is_quantized else None
        return self._with_losses(form, jobs, outputs[0], losses)

    def _with_losses(
        self, form: FeedbackConversion, jobs: list[Job], rows: U8, losses: tuple[F64, F64] | None
    ) -> Iterator[_Output]:
        row = 0
        for job, data in zip(jobs, _split_rows(rows, jobs, form.target.row_bytes(form.n)), strict=True):
            count = job.rows * form.n // form.columns
            yield data, None if losses is None else (losses[0][row : row + count], losses[1][row : row + count])
            row += count

    def _wait(self, form: Conversion, jobs: list[Job]) -> list[U8] | None:
        return self._slot.wait(self._gpu.limit(form.n * sum(job.rows for job in jobs)), lambda: self._gpu.disabled)

    def _tensor(self, job: Job) -> PlannedTensor:
        return self._ledger.plan.tensors[job.tensor]

    def _part(self, job: Job) -> PlannedPart:
        return self._tensor(job).parts[job.part]

    def _read(self, form: Conversion, jobs: list[Job]) -> list[tuple[Job, SourceRows]]:
        """Read rows into the slot, one job after the other; jobs served by the cache are finished immediately."""
        pending, offset = [], 0
        for job in jobs:
            tensor, nbytes = self._tensor(job), job.rows * form.source.row_bytes(form.n)
            buffer, undecoded = self._slot.source[offset : offset + nbytes], self._is_undecoded(form, job)
            rows = self._worker.read(job, tensor, buffer if undecoded else None)
            if isinstance(rows, JobResult):
                self._ledger.finish(job, rows)
                self._queues.finish(1)
                continue
            if not undecoded:
                for span, x in self._worker.decode(job, tensor, rows.source):
                    buffer.view(np.float32).reshape(job.rows, form.n)[span] = x
            pending.append((job, rows))
            offset += nbytes
        return pending

    def _interleave(self, job: Job, t: TensorType, rows: U8) -> U8:
        """Interleave a job's rows in a buffer that the next job reuses."""
        from quantkit.kernels.cpu.interleave import interleave_rows

        if self._interleaved_rows.size < job.target_bytes:
            self._interleaved_rows = np.empty(job.target_bytes, np.uint8)
        target = self._interleaved_rows[: job.target_bytes]
        interleave_rows(t, rows.reshape(job.rows, -1), target.reshape(job.rows, -1))
        return target

    def _is_undecoded(self, form: Conversion, job: Job) -> bool:
        """Return whether rows go to the GPU as they are stored in the file."""
        return form.source is self._part(job).source.type

    def _weights(self, job: Job) -> F32:
        part = self._part(job)
        importance = self._worker.importance_of(job, part)
        return importance if part.encoding.is_weighted else importance[:0]

    def _values(
        self, form: Conversion, job: Job, tensor: PlannedTensor, rows: SourceRows, offset: int
    ) -> Iterator[tuple[slice, F32]]:
        """Yield the values of a job's rows; those that the CPU decoded are in the slot."""
        if self._is_undecoded(form, job):
            yield from self._worker.decode(job, tensor, rows.source)
            return
        x = self._slot.source[offset : offset + 4 * job.rows * form.n].view(np.float32).reshape(job.rows, form.n)
        step = self._part(job).encoding.piece
        yield from ((slice(row, row + step), x[row : row + step]) for row in range(0, job.rows, step))

    def _verify(self, job: Job, tensor: PlannedTensor, target: U8) -> None:
        """Encode a sampled job on the CPU as well. Raises ResourceError if the GPU's bytes differ."""
        if (job.tensor, job.target_offset) not in self._queues.sampled_jobs:
            return
        expected = self._worker.convert_again(job, tensor)
        wrong = np.flatnonzero((expected != target).reshape(job.rows, -1).any(axis=1))
        if wrong.size:
            first = tensor.parts[job.part].target_row + job.row
            raise ResourceError(
                f"{self._gpu.name} and the CPU encode {tensor.type} to different bytes: tensor {tensor.name}, "
                f"{wrong.size} of rows {first} to {first + job.rows - 1} of matrix {job.matrix}, first row "
                f"{first + int(wrong[0])}; no output was written: use --backend cpu",
                "QK-E411",
            )
        with self._verification.lock:
            self._verification.count += 1


def _split_rows(rows: U8, jobs: Sequence[Job], row_bytes: int) -> Iterator[U8]:
    """Yield the bytes of each job of a segment."""
    offset = 0
    for job in jobs:
        yield rows[offset : offset + job.rows * row_bytes]
        offset += job.rows * row_bytes

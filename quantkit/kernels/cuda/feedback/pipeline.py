"""Conversion of rows of a file by a GPU with error feedback: the reference's bytes, then better ones.

    rows are uploaded, decoded, and looked through for values that are not finite, as all rows are (encode/pipeline.py)
    made for the reference, by its encoder; where targets are corrected, x + x M, and what is made of that to start from
    rounded in the metric, in place; bytes and losses come back

Unquantized tensors are only moved towards their targets and stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback import Rounding
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.encode import encode
from quantkit.kernels.cuda.encode.pipeline import ALIGNED, HEAD, RowConversion, Slot, SlotMemory, not_finite
from quantkit.kernels.cuda.feedback import matrices, rounding
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.feedback.rows import RowAddresses
from quantkit.kernels.cuda.unpack.dequantize import dequantize
from quantkit.kernels.levels import levels_of
from quantkit.types import BY_NAME, TensorType
from quantkit.units import round_up

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

_F32 = BY_NAME["F32"]


class FeedbackConversion(NamedTuple):
    """Source and target of rows with error feedback; rows of one matrix and conversion form a batch.

    columns: of the metric; rows of more values are as many rows to it. corrected: whether targets differ from the rows.
    how: the rounding options.
    """

    conversion: RowConversion
    columns: int
    corrected: bool
    rounding: Rounding

    @property
    def source(self) -> TensorType:
        return self.conversion.source

    @property
    def target(self) -> TensorType:
        return self.conversion.target

    @property
    def n(self) -> int:
        return self.conversion.n

    @property
    def segments(self) -> int:
        """The number of metrics of a batch: one."""
        return 1

    def kernels(self, weighted: Iterable[bool]) -> list[Kernel]:
        """Return the kernels that rows of this form need, and their metrics; weighted: as for a plain form."""
        required = matrices.metric_kernels(self.corrected)
        if self.target.is_quantized:
            return [*required, *self.conversion.kernels(weighted), *_kernels_of(self)]
        required.append(not_finite(1).kernel)
        return required if self.source is _F32 else [*required, dequantize(self.source, self.n, 1).kernel]

    def put_tables(self, device: Device) -> None:
        """Upload the tables of encoder and rounding to the device, where all streams find them."""
        if self.target.is_quantized:
            self.conversion.put_tables(device)
            _kernels_of(self, device)

    def memory(self, rows: int) -> SlotMemory:
        """Return the memory for a number of rows."""
        nbytes, of_metric = rows * self.target.row_bytes(self.n), rows * self.n // self.columns
        out = HEAD + round_up(nbytes, ALIGNED) + 16 * of_metric
        values = 0 if self.source is _F32 else rows * self.n
        source = round_up(rows * self.source.row_bytes(self.n), 256)
        if not self.target.is_quantized:
            return SlotMemory(source, 0, values, 0, out)
        work = max(
            encode.working_bytes(self.target, rows, self.n),
            rounding.working_bytes(self.target, of_metric, self.columns, self.rounding),
        )
        corrected = self.corrected * (round_up(4 * rows * self.n, 256) + round_up(nbytes, 256))
        return SlotMemory(source, 4 * self.n, values, corrected + round_up(work, 256), out)


class _KernelRecorder:
    """A replacement for a device that records launched kernels; tables are uploaded if there is a device."""

    name = ""
    capability = 90
    multiprocessors = 1

    def __init__(self, device: Device | None = None) -> None:
        self.owner, self.kernels = device or self, dict[Kernel, None]()

    def allocate(self, nbytes: int) -> int:
        return 0

    def run(self, launches: Sequence[Launch]) -> None:
        self.kernels |= dict.fromkeys(launch.kernel for launch in launches)

    def _nothing(self, *args: object) -> None:
        pass

    upload = zero = synchronize = _nothing


def _kernels_of(form: FeedbackConversion, device: Device | None = None) -> list[Kernel]:
    """Return the kernels that rounding rows of a conversion launches, once their tables are there."""
    recorder: Any = _KernelRecorder(device)
    metric = DeviceMetric(recorder, form.columns, 0, 0, 0, 0, 0, grouping=levels_of(form.target).grouping)
    rounding.round_rows(recorder, form.target, RowAddresses(1, 0, 0, 0, 0, 0), metric, form.rounding, 0)
    return list(recorder.kernels)


class RowRange(NamedTuple):
    """Rows of a matrix, as its metric counts them, and the first of them."""

    rows: int
    first: int


class FeedbackSlot(Slot):
    """A slot that also encodes rows with error feedback: ``upload``, and once they have a metric, ``encode``."""

    def upload(self, form: FeedbackConversion, rows: int) -> None:
        """Enqueue rows, those at the beginning of ``source``. Then ``wait`` returns whether they are finite."""
        self._rows_at = self._load(form.conversion, rows)
        self._parts = []
        self.device.start_download(self._out, self._download[:4])

    def encode(self, form: FeedbackConversion, rows: Sequence[RowRange], metric: DeviceMetric, importance: F32) -> None:
        """Encode the rows that were uploaded, all of one matrix; then ``wait`` returns bytes and losses."""
        d = self.device
        x = self._rows_at
        n = form.columns
        of_metric = sum(run.rows for run in rows)
        count, nbytes = of_metric * n // form.n, of_metric * n // form.n * form.target.row_bytes(form.n)
        blocks, losses = self._out + HEAD, HEAD + round_up(nbytes, ALIGNED)
        weights = self._upload_importance(importance) if form.target.is_quantized else 0
        self._parts = [(HEAD, nbytes), (losses, 16 * of_metric)]
        if not form.target.is_quantized:
            self._correct(x, rows, metric, blocks)
            d.zero(self._out + losses, 16 * of_metric)
        else:
            target = start = 0
            work = self._work
            if form.corrected:
                target, start = work, work + round_up(4 * of_metric * n, 256)
                work = start + round_up(nbytes, 256)
                self._correct(x, rows, metric, target)
                to_start = encode.Rows(target, count, form.n, start, weights, work)
                encode.encode_rows(d, form.target, to_start, search=form.conversion.search)
            to_blocks = encode.Rows(x, count, form.n, blocks, weights, work)
            encode.encode_rows(d, form.target, to_blocks, search=form.conversion.search)
            before = self._out + losses
            addresses = RowAddresses(of_metric, target or x, blocks, start or blocks, before, before + 8 * of_metric)
            rounding.round_rows(d, form.target, addresses, metric, form.rounding, work)
        d.start_download(self._out, self._download[: losses + 16 * of_metric])

    def _correct(self, x: int, rows: Sequence[RowRange], metric: DeviceMetric, out: int) -> None:
        """Set ``out`` to the targets of rows; each has its own offset."""
        row_bytes, launches = 4 * metric.n, []
        for run in rows:
            offset = metric.offset + row_bytes * run.first if metric.offset else 0
            launches.append(matrices.correct(x, metric.correction, offset, out, run.rows, metric.n))
            x, out = x + row_bytes * run.rows, out + row_bytes * run.rows
        self.device.run(launches)

    def _upload_importance(self, importance: F32) -> int:
        if not importance.size:
            return 0
        self._weights[: importance.size] = importance
        self.device.start_upload(self._importance, self._weights[: importance.size])
        return self._importance


def losses_of(results: Sequence[U8]) -> tuple[F64, F64]:
    """Return the losses before and after, by rows of the metric, of a result of ``wait``."""
    before, after = results[1].view(np.float64).reshape(2, -1)
    return before, after

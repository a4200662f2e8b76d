"""Rows of a file on their way over a card, encoded there with error feedback: the reference's bytes, then better ones.

    rows are uploaded, decoded, and looked through for values that are not finite, as all rows are (encode/pipeline.py)
    made for the reference, by its encoder; where targets are corrected, x + x M, and what is made of that to start from
    rounded in the metric, in place; bytes and losses come back

What is not quantized only comes near to its target: that is all that is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.feedback.options import Rounding
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.encode import encode
from quantkit.kernels.cuda.encode.pipeline import ALIGNED, HEAD, Form, Room, Slot, not_finite
from quantkit.kernels.cuda.feedback import factor, packing, products, rounding
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.kernels.cuda.unpack.dequantize import dequantize
from quantkit.kernels.levels import levels_of
from quantkit.types import BY_NAME, TensorType
from quantkit.units import round_up

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

_F32 = BY_NAME["F32"]


class FedForm(NamedTuple):
    """What rows are, and become with error feedback: those of one matrix of a form can go together.

    columns: of the metric; rows of more values are as many rows to it. corrected: whether targets are others than the
    rows. how: what is done.
    """

    plain: Form
    columns: int
    corrected: bool
    how: Rounding

    @property
    def source(self) -> TensorType:
        return self.plain.source

    @property
    def target(self) -> TensorType:
        return self.plain.target

    @property
    def n(self) -> int:
        return self.plain.n

    @property
    def segments(self) -> int:
        """Rows that go together have one metric."""
        return 1

    def kernels(self, weighted: Iterable[bool]) -> list[Kernel]:
        """Return the kernels that rows of this form need, and their metrics; weighted: as for a plain form."""
        found = [*factor.kernels(), *packing.kernels(), *(products.kernels() if self.corrected else ())]
        if self.target.is_quantized:
            return [*found, *self.plain.kernels(weighted), *_ask(self)]
        found.append(not_finite(1).kernel)
        return found if self.source is _F32 else [*found, dequantize(self.source, self.n, 1).kernel]

    def put_tables(self, device: Device) -> None:
        """Have what encoder and rounding look up on the device, where all lanes find it."""
        if self.target.is_quantized:
            self.plain.put_tables(device)
            _ask(self, device)

    def room(self, rows: int) -> Room:
        """Return the room that so many rows need."""
        nbytes, of_metric = rows * self.target.row_bytes(self.n), rows * self.n // self.columns
        out = HEAD + round_up(nbytes, ALIGNED) + 16 * of_metric
        values = 0 if self.source is _F32 else rows * self.n
        source = round_up(rows * self.source.row_bytes(self.n), 256)
        if not self.target.is_quantized:
            return Room(source, 0, values, 0, out)
        work = max(
            encode.working_bytes(self.target, rows, self.n),
            rounding.working_bytes(self.target, of_metric, self.columns, self.how),
        )
        corrected = self.corrected * (round_up(4 * rows * self.n, 256) + round_up(nbytes, 256))
        return Room(source, 4 * self.n, values, corrected + round_up(work, 256), out)


class _Asked:
    """In place of a device: notes which kernels are launched. What they look up goes to the device, if there is one."""

    name, capability, multiprocessors = "", 90, 1

    def __init__(self, device: Device | None = None) -> None:
        self.owner, self.kernels = device or self, dict[Kernel, None]()

    def allocate(self, nbytes: int) -> int:
        return 0

    def run(self, launches: Sequence[Launch]) -> None:
        self.kernels |= dict.fromkeys(launch.kernel for launch in launches)

    def _nothing(self, *args: object) -> None:
        pass

    upload = zero = synchronize = _nothing


def _ask(form: FedForm, device: Device | None = None) -> list[Kernel]:
    """Return the kernels that rounding rows of a form launches, once what they look up is there."""
    asked: Any = _Asked(device)
    by = DeviceMetric(asked, form.columns, 0, 0, 0, 0, 0, grouping=levels_of(form.target).grouping)
    rounding.round_rows(asked, form.target, 0, 1, 0, 0, 0, by, form.how, 0, 0, 0)
    return list(asked.kernels)


class Rows(NamedTuple):
    """Rows of a matrix, as its metric counts them, and the first of them."""

    number: int
    first: int


class FedSlot(Slot):
    """A slot that also takes rows of such forms: ``bring``, and when they have a metric, ``feed``."""

    def bring(self, form: FedForm, rows: int) -> None:
        """Send rows on their way: those at the beginning of ``source``. Then ``wait`` tells whether they are finite."""
        self._rows_at = self._bring(form.plain, rows)
        self._parts = []
        self.device.start_download(self._out, self._made[:4])

    def feed(self, form: FedForm, rows: Sequence[Rows], by: DeviceMetric, importance: F32) -> None:
        """Encode the rows that were brought, all of one matrix, some behind others; then ``wait`` returns ``Fed``."""
        d, x, n = self.device, self._rows_at, form.columns
        of_metric = sum(some.number for some in rows)
        count, nbytes = of_metric * n // form.n, of_metric * n // form.n * form.target.row_bytes(form.n)
        made, losses = self._out + HEAD, HEAD + round_up(nbytes, ALIGNED)
        weights = self._upload_importance(importance) if form.target.is_quantized else 0
        self._parts = [(HEAD, nbytes), (losses, 16 * of_metric)]
        if not form.target.is_quantized:
            self._correct(x, rows, by, made)
            d.zero(self._out + losses, 16 * of_metric)
        else:
            target = start = 0
            work = self._work
            if form.corrected:
                target, start = work, work + round_up(4 * of_metric * n, 256)
                work = start + round_up(nbytes, 256)
                self._correct(x, rows, by, target)
                encode.encode_rows(
                    d, form.target, target, count, form.n, start, weights, work, search=form.plain.search
                )
            encode.encode_rows(d, form.target, x, count, form.n, made, weights, work, search=form.plain.search)
            before = self._out + losses
            rounding.round_rows(
                d, form.target, x, of_metric, target or x, made, start or made, by, form.how, before,
                before + 8 * of_metric, work,
            )  # fmt: skip
        d.start_download(self._out, self._made[: losses + 16 * of_metric])

    def _correct(self, x: int, rows: Sequence[Rows], by: DeviceMetric, out: int) -> None:
        """Set ``out`` to what rows are to come near to; each has its own offset."""
        apart, launches = 4 * by.n, []
        for some in rows:
            offset = by.offset + apart * some.first if by.offset else 0
            launches.append(products.corrected(x, by.correction, offset, out, some.number, by.n))
            x, out = x + apart * some.number, out + apart * some.number
        self.device.run(launches)

    def _upload_importance(self, importance: F32) -> int:
        if not importance.size:
            return 0
        self._weights[: importance.size] = importance
        self.device.start_upload(self._importance, self._weights[: importance.size])
        return self._importance


def losses_of(found: Sequence[U8]) -> tuple[F64, F64]:
    """Return the losses before and after, by rows of the metric, of what ``wait`` returned."""
    before, after = found[1].view(np.float64).reshape(2, -1)
    return before, after

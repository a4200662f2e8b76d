"""Conversion of rows of a file by a GPU: upload, decode, encode and download, on a separate stream.

A ``Slot`` has pinned memory for uploads and downloads, device memory, and a stream. All that happens to its rows
happens in order on that stream, so slots do not wait for each other: while one computes, others copy in both
directions. After filling ``source`` and calling ``start``, do not touch the pinned arrays until ``wait`` returns.

    not_finite    x flag n    flag: int32, becomes 1 if a value is NaN or infinite
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cuda.core.device import Device, DeviceHangs, Launch, abandon, pinned_bytes
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.encode.encode import (
    Rows,
    encode_rows,
    encoders,
    kernels_of,
    put_tables,
    weighs,
    working_bytes,
)
from quantkit.kernels.cuda.encode.interleaved import is_q8_k
from quantkit.kernels.cuda.unpack import decoders
from quantkit.kernels.cuda.unpack.dequantize import OUTPUTS, dequantize
from quantkit.types import BY_NAME, TensorType
from quantkit.units import round_up

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

#: Maximum number of different importances of rows that are encoded together.
SEGMENTS = 64
#: Elements of a block of threads (each.cuh), and the alignment of encoders' output.
_PART, ALIGNED = 1024, 16
#: Bytes before the encoded rows, with the flag for values that are not finite.
HEAD = 256

_F32 = BY_NAME["F32"]


class Stream(Device, Protocol):
    """A stream of a device for one thread: in order, parallel to other streams."""

    def start_upload(self, address: int, data: npt.NDArray[Any]) -> None:
        """Copy pinned memory to the device some time before ``wait`` returns."""

    def start_download(self, address: int, out: npt.NDArray[Any]) -> None:
        """Fill pinned memory from the device some time before ``wait`` returns."""

    def wait(self, seconds: float = inf, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until everything is done, without keeping a CPU busy; ResourceError if something failed.

        DeviceHangs after ``seconds``, or if it is abandoned.
        """


class RowConversion(NamedTuple):
    """Source and target of rows; rows of one conversion form a batch. A source of F32 needs no decoding.

    search, interleaved: as for ``encode_rows``.
    """

    source: TensorType
    target: TensorType
    n: int
    search: str = ""
    interleaved: bool = False

    def kernels(self, weighted: Iterable[bool]) -> list[Kernel]:
        """Return the kernels that rows of this form need; weighted: with importance, without, or both."""
        required = [
            not_finite(1).kernel,
            *(k for w in weighted for k in kernels_of(self.target, w, self.search, self.interleaved)),
        ]
        return required if self.source is _F32 else [*required, dequantize(self.source, self.n, 1).kernel]

    def put_tables(self, device: Device) -> None:
        """Upload the encoder's tables to the device, where all streams find them."""
        put_tables(device, self.target)

    @property
    def segments(self) -> int:
        """The number of importance rows that one batch may have."""
        return SEGMENTS

    def memory(self, rows: int) -> SlotMemory:
        """Return the memory for a number of rows."""
        return memory_for(self, rows)


class Conversion(Protocol):
    """The conversion of a batch: a ``RowConversion``, or one with error feedback."""

    @property
    def source(self) -> TensorType: ...

    @property
    def target(self) -> TensorType: ...

    @property
    def n(self) -> int: ...

    @property
    def segments(self) -> int: ...

    def kernels(self, weighted: Iterable[bool]) -> list[Kernel]: ...

    def put_tables(self, device: Device) -> None: ...

    def memory(self, rows: int) -> SlotMemory: ...


class Segment(NamedTuple):
    """Rows that have one importance, float32 [n], or none: an empty array."""

    rows: int
    importance: F32


class SlotMemory(NamedTuple):
    """The memory of a slot: bytes of rows, importances, working memory of encoders, results; values."""

    source: int
    importance: int
    values: int
    work: int
    out: int

    @property
    def host(self) -> int:
        """Bytes of pinned memory."""
        return sum(map(pinned_bytes, (self.source, self.importance, self.out)))

    @property
    def device(self) -> int:
        """Bytes of device memory."""
        return self.source + self.importance + self.out + 4 * self.values + self.work

    def __or__(self, other: SlotMemory) -> SlotMemory:
        """Return the memory that suffices for either."""
        return SlotMemory(*map(max, self, other))


def memory_for(form: RowConversion, rows: int) -> SlotMemory:
    """Return the memory that rows of a form need."""
    segments = min(SEGMENTS, rows)
    return SlotMemory(
        round_up(rows * form.source.row_bytes(form.n), 256),
        4 * form.n * segments if weighs(form.target) else 0,
        0 if form.source is _F32 else rows * form.n,
        round_up(working_bytes(form.target, rows, form.n), 256),
        HEAD + round_up(rows * form.target.row_bytes(form.n), ALIGNED) + ALIGNED * segments,
    )


def can_encode(t: TensorType, search: str = "") -> bool:
    """Return whether GPUs encode type t; ``search``: an encoder other than its own project's."""
    return t.name in encoders(search) or is_q8_k(t)


def can_decode(t: TensorType) -> bool:
    """Return whether GPUs decode rows of type t, to the CPU's values."""
    return t.name in decoders()


def not_finite(n: int) -> Shape:
    """Return the kernel and grid that look for values that are not finite."""
    return Shape(Kernel("encode/pipeline.cu", "not_finite"), (max(1, -(-n // _PART)), 1, 1))


#: Held while a slot allocates: if two slots each got a part of the last free memory, both would fail.
_ALLOCATION = Lock()


class Slot:
    """Buffers of a batch of rows, on the host and the GPU, and its stream."""

    def __init__(self, device: Stream, memory: SlotMemory) -> None:
        """Allocate; raise ResourceError where the GPU, or CuPy's error where the host, has not enough memory."""
        self.device, self.memory = device, memory
        self._addresses: list[int] = []
        #: The results: their offsets in ``_made``, and their bytes.
        self._parts: list[tuple[int, int]] = []
        with _ALLOCATION:
            try:
                self._allocate(memory)
            except BaseException:
                self.close()
                raise

    def _allocate(self, memory: SlotMemory) -> None:
        self._source, self._importance, self._x, self._work, self._out = (
            self._allocate_bytes(nbytes)
            for nbytes in (memory.source, memory.importance, 4 * memory.values, memory.work, memory.out)
        )
        #: Rows as stored in the file, contiguous.
        self.source: U8 = self.device.host_array(memory.source, np.uint8)
        self._weights: F32 = self.device.host_array(memory.importance // 4, np.float32)
        self._download: U8 = self.device.host_array(memory.out, np.uint8)

    def _allocate_bytes(self, nbytes: int) -> int:
        if not nbytes:
            return 0
        self._addresses.append(self.device.allocate(nbytes))
        return self._addresses[-1]

    def start(self, form: RowConversion, segments: Sequence[Segment]) -> None:
        """Start the conversion of rows: those at the beginning of ``source``, at most SEGMENTS segments."""
        d, n = self.device, form.n
        importances = self._upload_importances(segments)
        x = self._load(form, sum(segment.rows for segment in segments))
        self._parts = []
        offset = HEAD
        row_bytes = form.target.row_bytes(n)
        for segment, importance in zip(segments, importances, strict=True):
            rows = Rows(x, segment.rows, n, self._out + offset, importance, self._work)
            encode_rows(d, form.target, rows, search=form.search, interleaved=form.interleaved)
            self._parts.append((offset, segment.rows * row_bytes))
            x += 4 * n * segment.rows
            offset = round_up(offset + segment.rows * row_bytes, ALIGNED)
        d.start_download(self._out, self._download[:offset])

    def _load(self, form: RowConversion, rows: int) -> int:
        """Return the address of rows as float32, once uploaded; ``_out`` holds whether all values are finite."""
        d, n = self.device, form.n
        d.start_upload(self._source, self.source[: rows * form.source.row_bytes(n)])
        x = self._source if form.source is _F32 else self._decode(form, rows)
        d.zero(self._out, 4)
        look = not_finite(rows * n)
        d.run([Launch(look.kernel, look.grid, look.kernel.block(x=x, flag=self._out, n=rows * n))])
        return x

    def _upload_importances(self, segments: Sequence[Segment]) -> list[int]:
        """Return the address of each segment's importance, 0 if there is none."""
        offset, addresses = 0, []
        for _, importance in segments:
            self._weights[offset : offset + importance.size] = importance
            addresses.append(self._importance + 4 * offset if importance.size else 0)
            offset += importance.size
        if offset:
            self.device.start_upload(self._importance, self._weights[:offset])
        return addresses

    def _decode(self, form: RowConversion, rows: int) -> int:
        """Return the address of rows as float32."""
        shape, row_bytes = dequantize(form.source, form.n, rows), form.source.row_bytes(form.n)
        block = shape.kernel.block(
            w=self._source, row_bytes=row_bytes, rows=rows, n=form.n, out=self._x, out_stride=4 * form.n,
            to=OUTPUTS.index("f32"),
        )  # fmt: skip
        self.device.run([Launch(shape.kernel, shape.grid, block)])
        return self._x

    def wait(self, seconds: float = inf, given_up: Callable[[], bool] = lambda: False) -> list[U8] | None:
        """Return the bytes of each segment, valid until the next ``start``; None if a value is not finite.

        Raises:
            DeviceHangs: they are not complete after ``seconds``, or ``given_up``.
            ResourceError: the GPU failed.
        """
        self.device.wait(seconds, given_up)
        if self._download[:4].any():
            return None
        return [self._download[offset : offset + nbytes] for offset, nbytes in self._parts]

    def close(self, seconds: float = inf, hangs: bool = False) -> None:
        """Free memory on the GPU, even after a failure.

        Not if the GPU hangs, as ``seconds`` of waiting may show: it may still write there.
        """
        try:
            if not hangs:
                self.device.wait(seconds)
        except DeviceHangs:
            hangs = True
        except Exception:  # it failed and does no further work
            pass
        if hangs:
            abandon(self, self.device, getattr(self.device, "owner", None))
            return
        for address in self._addresses:
            with suppress(Exception):
                self.device.free(address)
        self._addresses.clear()


def largest(forms: Sequence[Conversion], rows: Callable[[Conversion], int]) -> SlotMemory:
    """Return the memory for ``rows`` of each form."""
    memory = SlotMemory(0, 0, 0, 0, 0)
    for form in forms:
        memory = memory | form.memory(rows(form))
    return memory


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield not_finite(1).kernel

"""The backend ``cuda``: a graph, or any part of it, becomes launches on a device, recorded as one CUDA graph.

compile: lower every operation, fused before (fuse/), to entries (lowering.py, ops.py), place their
buffers in one block of device memory (arena.py). run: send the batch block; for a number of tokens seen before replay
its recorded launches, so that Python costs the same however many layers there are. What changes from token to token
(positions, sequences) is in the batch block on the device, not in the launches. Python runs between launches only
where an observer reads values, or where weights that do not fit are uploaded.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.accumulators import Accumulator, NotFinite, not_finite
from quantkit.model.backends.arena import Buffer, place
from quantkit.model.backends.boundary import Boundary
from quantkit.model.backends.cuda.lowering import FEW_ROWS, CUDALowering, KernelEntry, WorkEntry
from quantkit.model.backends.cuda.ops import lower
from quantkit.model.backends.cuda.sums import Sums
from quantkit.model.backends.cuda.weights import Weights
from quantkit.model.batch import Batch
from quantkit.model.ops import Op, Value

#: Bytes of the batch block's words, before the arrays they point to.
_WORDS = 64

#: Numbers of tokens whose launches are kept.
_SHAPES = 16

#: A step of a run: launches, or a Python function.
Step = list[Launch] | Callable[[], None]


class CUDABackend:
    """Makes programs for one device; they share its weights. max_vram: bytes of weights on it.

    cublas: prompts go through matrices unpacked to bf16 and cuBLAS (cublas.py), the reference for our products.
    """

    name = "cuda"

    def __init__(
        self,
        source: GGUFFile,
        device: Device,
        *,
        max_vram: int | None = None,
        cublas: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.source, self.device, self.observer, self.cublas = source, device, observer, cublas
        self.weights = Weights(device, source, max_vram)

    def compile(self, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value] = ()) -> CUDAProgram:
        """Return a program of ``ops``; ``leaves`` are the values that are read after a run.

        Raises:
            TypeNotSupported: there is no kernel for an operation or a weight's type.
            ResourceError: the device has no room.
        """
        return CUDAProgram(self, ops, limits, leaves)

    def close(self) -> None:
        """Free the device's memory; programs must not be used afterwards."""
        self.weights.close()


@dataclass
class Recording:
    """The steps of a run for one number of tokens and outputs; ``replay`` runs them all once they are recorded."""

    steps: list[Step]
    runs: int = 0
    replay: Callable[[], None] | None = None


class CUDAProgram(Boundary):
    """Launches, the device memory they name, and the caches and states of the sequences."""

    def __init__(self, backend: CUDABackend, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value]) -> None:
        super().__init__(ops, leaves)
        self.device, self.limits = backend.device, limits
        self._batch: Batch | None = None
        self.not_finite: list[NotFinite] = []
        self._host: dict[Value, npt.NDArray[Any]] = {}  # copies of values, each good until the next run
        self._recordings: OrderedDict[tuple[int, int], Recording] = OrderedDict()
        n = limits.n_ubatch
        self._staging: npt.NDArray[np.uint8] = np.zeros(_WORDS + 16 * n, np.uint8)
        self._block = self.device.allocate(self._staging.nbytes)
        # Weak: a cycle would keep a program, with its caches, until Python collects garbage.
        view, upload = weakref.WeakMethod(self._view), weakref.WeakMethod(self._upload)
        backend.weights.settle(ops)
        owned: list[tuple[int, int]] = [(self._block, self._staging.nbytes)]
        self._sums = Sums(self.device, owned)
        low = CUDALowering(
            backend.weights,
            limits,
            backend.observer,
            lambda value: cast(Callable[[Value], Any], view())(value),
            upload=lambda buffer, at, data: cast(Callable[..., None], upload())(buffer, at, data),
            sums=self._sums,
            owned=owned,
            cublas=backend.cublas,
        )
        self._settle(low)
        for op in ops:
            lower(low, op)
        self._start = low.room(place(low.entries))
        self._entries, self._states = low.entries, low.states
        self._n_vocab, self._n_positions = low.n_vocab, low.n_positions
        self._prepare()
        weakref.finalize(self, _free, self.device, owned)

    def _prepare(self) -> None:
        """Compile the kernels of the usual batches: one token, and a whole one."""
        shapes = [
            entry.choose(rows)
            for entry in self._entries
            if isinstance(entry, KernelEntry)
            for rows in (entry.per, entry.per * self.limits.n_ubatch)
        ]
        self.device.prepare(list(dict.fromkeys(shape.kernel for shape in shapes if shape is not None)))

    # ------------------------------------------------------------ plans

    def _recording(self, n_tokens: int, n_outputs: int) -> Recording:
        key = n_tokens, n_outputs
        if key not in self._recordings:
            self._recordings[key] = Recording(self._steps(n_tokens, n_outputs))
            if len(self._recordings) > _SHAPES:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        return self._recordings[key]

    def _steps(self, n_tokens: int, n_outputs: int) -> list[Step]:
        """Return launches and calls, in order, for ``n_tokens``."""
        steps: list[Step] = []
        for entry in self._entries:
            if entry.call is not None:
                steps.append(entry.call)
            elif isinstance(entry, WorkEntry):
                rows = (n_outputs if entry.outputs else n_tokens) * entry.per
                if rows > FEW_ROWS:
                    steps.append(partial(self._work, entry, rows))
            elif isinstance(entry, KernelEntry):
                launch = self._launch(entry, n_outputs if entry.outputs else n_tokens)
                if launch is None:
                    continue
                if not steps or not isinstance(steps[-1], list):
                    steps.append([])
                cast(list[Launch], steps[-1]).append(launch)
        return steps

    def _work(self, entry: WorkEntry, rows: int) -> None:
        entry.work(rows, entry.resolved(self._start))

    def _launch(self, entry: KernelEntry, rows: int) -> Launch | None:
        count = rows * entry.per
        shape = entry.choose(count) if count else None
        if shape is None:
            return None
        slots: dict[str, int | float] = {
            "rows": count,
            "batch": self._block,
            **entry.resolved(self._start),
            **{name: times * count for name, times in entry.rows_slots.items()},
            **entry.by_rows(count),
        }
        wanted = shape.kernel.slots
        given = {name: value for name, value in slots.items() if name in wanted or name not in ("rows", "batch")}
        return Launch(shape.kernel, shape.grid, shape.kernel.block(**given), shape.shared)

    # ------------------------------------------------------------ running

    def run(self, batch: Batch) -> None:
        """Carry out all operations for a batch of at most ``n_ubatch`` tokens; ValueError for one that cannot be."""
        batch.check(self._n_positions, self.limits.n_seq, self._n_vocab)
        self._batch = batch
        self._sums.before_run()
        self._send(batch)
        self._carry_out(self._recording(len(batch.tokens), len(batch.outputs)))
        for of, row in self._sums.take_bad():
            self.not_finite.append(not_finite(of, batch, row))

    def _carry_out(self, recording: Recording) -> None:
        if recording.replay is not None:
            recording.replay()
            return
        for step in recording.steps:
            if isinstance(step, list):
                self.device.run(step)
            else:
                step()
        recording.runs += 1
        # A second run means more to come; a CUDA graph cannot hold Python's steps.
        if recording.runs == 2 and len(recording.steps) == 1 and isinstance(recording.steps[0], list):
            recording.replay = self.device.record(recording.steps[0])

    def _send(self, batch: Batch) -> None:
        """Write the batch block: struct Batch of device.cuh, and its arrays after it."""
        n = self.limits.n_ubatch
        arrays = (batch.tokens, batch.positions, batch.sequences, batch.outputs)
        words = self._staging[:_WORDS].view(np.int64)
        words[:2] = len(batch.tokens), len(batch.outputs)
        numbers = self._staging[_WORDS:].view(np.int32)
        for i, array in enumerate(arrays):
            words[2 + i] = self._block + _WORDS + 4 * i * n
            numbers[i * n : i * n + len(array)] = array
        words[6] = self.limits.n_ctx
        self.device.upload(self._block, self._staging)

    def _upload(self, buffer: Buffer, at: int, data: npt.NDArray[np.uint8]) -> None:
        self.device.upload(self._start + buffer.offset + at, data)

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The sums of observing operations so far."""
        return self._sums.on_host()

    def _view(self, value: Value) -> Any:
        buffer = self._values[value]
        if self._batch is None:
            raise ValueError(f"{value}: nothing has been run yet")
        rows = self._batch.rows(value.outputs) * value.per
        if value not in self._host:
            most = buffer.nbytes // 4
            self._host[value] = self.device.host_array(most, np.int32 if value.integer else np.float32)
        out = self._host[value][: rows * value.width]
        if out.size:
            self.device.download(self._start + buffer.offset, out)
        return out.reshape(rows, value.width)

    def _store(self, buffer: Buffer, data: npt.NDArray[Any]) -> None:
        self.device.upload(self._start + buffer.offset, data)

    def clear(self, sequence: int | None = None) -> None:
        """Forget what recurrent layers keep of a sequence, or of all."""
        for address, each in self._states.values():
            if sequence is None:
                self.device.zero(address, each * self.limits.n_seq)
            else:
                self.device.zero(address + sequence * each, each)


def _free(device: Device, owned: Sequence[tuple[int, int]]) -> None:
    for address, _ in owned:
        device.free(address)

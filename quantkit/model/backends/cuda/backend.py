"""The backend ``cuda``: launches on a device, recorded as one CUDA graph.

compile: lower every operation, after fusion (fuse/), to entries (lowering.py, ops.py), place their buffers in one block
of device memory (arena.py). run: upload the batch block; for a new number of tokens launch kernels while the arguments
of the next ones are packed; for a known number replay its CUDA graph, so that the time in Python does not depend on the
number of layers. Positions and sequences are in the batch block, not in the launches. Python runs between launches only
if an observer reads values, or if weights that do not fit are uploaded.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Kernel, Template
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

#: The number of (tokens, outputs) whose launches are kept.
_MAX_RECORDINGS = 16

#: Launches that are packed before they are submitted, in a first run.
_LAUNCHES_AT_ONCE = 16

#: A step of a run: launches, or a Python function.
Step = list[Launch] | Callable[[], None]


class CUDABackend:
    """Compiler of programs for one device; they share its weights. max_vram: bytes of weights on it.

    cublas: prompts are computed by cuBLAS on weights unpacked to bf16 (cublas.py), the reference for quantkit's
    products.
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
        self.source = source
        self.device = device
        self.observer = observer
        self.cublas = cublas
        self.weights = Weights(device, source, max_vram)

    def compile(self, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value] = ()) -> CUDAProgram:
        """Return a program of ``ops``; ``leaves`` are the values that are read after a run.

        Raises:
            TypeNotSupported: there is no kernel for an operation or a weight's type.
            ResourceError: the device is out of memory.
        """
        return CUDAProgram(self, ops, limits, leaves)

    def close(self) -> None:
        """Free the device's memory; programs must not be used afterwards."""
        self.weights.close()


@dataclass
class Recording:
    """The steps of a run for one number of tokens and outputs; replay: runs all of them, after a second run."""

    steps: list[Step]
    replay: Callable[[], None] | None = None


class CUDAProgram(Boundary):
    """Launches, their device memory, and the caches and states of the sequences."""

    def __init__(self, backend: CUDABackend, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value]) -> None:
        super().__init__(ops, leaves)
        self.device, self.limits = backend.device, limits
        self._batch: Batch | None = None
        self.not_finite: list[NotFinite] = []
        self._host: dict[Value, npt.NDArray[Any]] = {}  # copies of values, valid until the next run
        self._recordings: OrderedDict[tuple[int, int], Recording] = OrderedDict()
        n = limits.n_ubatch
        self._staging: npt.NDArray[np.uint8] = np.zeros(_WORDS + 16 * n, np.uint8)
        self._block = self.device.allocate(self._staging.nbytes)
        # Weak: a reference cycle would keep a program and its caches until garbage collection.
        view, upload = weakref.WeakMethod(self._view), weakref.WeakMethod(self._upload)
        backend.weights.place(ops)
        owned: list[tuple[int, int]] = [(self._block, self._staging.nbytes)]
        self._sums = Sums(self.device, owned)
        low = CUDALowering(
            backend.weights,
            limits,
            backend.observer,
            lambda value: cast(Callable[[Value], Any], view())(value),
            upload=lambda buffer, offset, data: cast(Callable[..., None], upload())(buffer, offset, data),
            sums=self._sums,
            owned=owned,
            cublas=backend.cublas,
        )
        self._pin_values(low)
        for op in ops:
            lower(low, op)
        self._start = low.allocate(place(low.entries))
        self._entries, self._states = low.entries, low.states
        self._templates: dict[tuple[KernelEntry, Kernel], Template] = {}
        self._n_vocab, self._n_positions = low.n_vocab, low.n_positions
        self._prepare()
        weakref.finalize(self, _free, self.device, owned)

    def _prepare(self) -> None:
        """Compile the kernels of all batch sizes: one for each small number of rows, tile sizes for large ones."""
        most = self.limits.n_ubatch
        rows = sorted({*range(1, min(FEW_ROWS, most) + 1), *_powers(FEW_ROWS + 1, most)})
        shapes = [
            entry.choose(entry.per * n) for entry in self._entries if isinstance(entry, KernelEntry) for n in rows
        ]
        self.device.prepare(list(dict.fromkeys(shape.kernel for shape in shapes if shape is not None)))

    # ------------------------------------------------------------ plans

    def _iter_steps(self, n_tokens: int, n_outputs: int) -> Iterator[Launch | Callable[[], None]]:
        """Yield launches and calls, in order, for ``n_tokens``."""
        for entry in self._entries:
            if entry.call is not None:
                yield entry.call
            elif isinstance(entry, WorkEntry):
                rows = (n_outputs if entry.outputs else n_tokens) * entry.per
                if rows > FEW_ROWS:
                    yield partial(self._work, entry, rows)
            elif isinstance(entry, KernelEntry):
                launch = self._launch(entry, n_outputs if entry.outputs else n_tokens)
                if launch is not None:
                    yield launch

    def _work(self, entry: WorkEntry, rows: int) -> None:
        entry.work(rows, entry.resolve(self._start))

    def _launch(self, entry: KernelEntry, rows: int) -> Launch | None:
        count = rows * entry.per
        shape = entry.choose(count) if count else None
        if shape is None:
            return None
        kernel = shape.kernel
        slots = {name: times * count for name, times in entry.rows_slots.items()} | dict(entry.by_rows(count))
        if "rows" in kernel.slots and "rows" not in entry.slots:
            slots.setdefault("rows", count)
        if (entry, kernel) not in self._templates:
            fixed = entry.resolve(self._start)
            if "batch" in kernel.slots:
                fixed["batch"] = self._block
            if missing := kernel.slots.keys() - fixed.keys() - slots.keys():
                raise ValueError(f"{kernel.name}: missing {sorted(missing)}")
            self._templates[entry, kernel] = kernel.template(**fixed)
        return Launch(kernel, shape.grid, self._templates[entry, kernel].pack(slots), shape.shared)

    # ------------------------------------------------------------ running

    def run(self, batch: Batch) -> None:
        """Carry out all operations for a batch of at most ``n_ubatch`` tokens; ValueError for an invalid one."""
        batch.check(self._n_positions, self.limits.n_seq, self._n_vocab)
        self._batch = batch
        self._sums.before_run()
        self._send(batch)
        self._run_steps(len(batch.tokens), len(batch.outputs))
        for label, row in self._sums.take_not_finite():
            self.not_finite.append(not_finite(label, batch, row))

    def _run_steps(self, n_tokens: int, n_outputs: int) -> None:
        key = n_tokens, n_outputs
        recording = self._recordings.get(key)
        if recording is None:
            self._recordings[key] = self._run_first(n_tokens, n_outputs)
            if len(self._recordings) > _MAX_RECORDINGS:
                self._recordings.popitem(last=False)
            return
        self._recordings.move_to_end(key)
        if recording.replay is not None:
            recording.replay()
        elif len(recording.steps) == 1 and isinstance(recording.steps[0], list):
            recording.replay = self.device.record(recording.steps[0])  # a second run suggests that more follow
        else:  # a CUDA graph cannot contain Python steps
            for step in recording.steps:
                if isinstance(step, list):
                    self.device.run(step)
                else:
                    step()

    def _run_first(self, n_tokens: int, n_outputs: int) -> Recording:
        """Run all steps, launching some while the next are packed; return them."""
        steps: list[Step] = []
        new: list[Launch] = []

        def run() -> None:
            self.device.run(new)
            new.clear()

        for step in self._iter_steps(n_tokens, n_outputs):
            if isinstance(step, Launch):
                if not steps or not isinstance(steps[-1], list):
                    steps.append([])
                cast(list[Launch], steps[-1]).append(step)
                new.append(step)
                if len(new) == _LAUNCHES_AT_ONCE:
                    run()
            else:
                run()
                step()
                steps.append(step)
        run()
        return Recording(steps)

    def _send(self, batch: Batch) -> None:
        """Upload the batch block: struct Batch of device.cuh, followed by its arrays."""
        words, offset = self._staging[:_WORDS].view(np.int64), _WORDS
        words[:2] = len(batch.tokens), len(batch.outputs)
        for i, array in enumerate((batch.tokens, batch.positions, batch.sequences, batch.outputs)):
            words[2 + i] = self._block + offset
            self._staging[offset : offset + 4 * len(array)].view(np.int32)[:] = array
            offset += 4 * len(array)
        words[6] = self.limits.n_ctx
        self.device.upload(self._block, self._staging[:offset])

    def _upload(self, buffer: Buffer, offset: int, data: npt.NDArray[np.uint8]) -> None:
        self.device.upload(self._start + buffer.offset + offset, data)

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The sums of observing operations so far."""
        return self._sums.on_host()

    def _view(self, value: Value) -> Any:
        buffer = self._values[value]
        if self._batch is None:
            raise ValueError(f"{value}: not computed yet")
        rows = self._batch.rows(value.outputs) * value.per
        size = rows * value.width
        # the logits of a prompt take gigabytes and are rarely read
        if value not in self._host or self._host[value].size < size:
            self._host[value] = self.device.host_array(size, np.int32 if value.integer else np.float32)
        out = self._host[value][:size]
        if out.size:
            self.device.download(self._start + buffer.offset, out)
        return out.reshape(rows, value.width)

    def _store(self, buffer: Buffer, data: npt.NDArray[Any]) -> None:
        self.device.upload(self._start + buffer.offset, data)

    def clear(self, sequence: int | None = None) -> None:
        """Reset the states of a sequence, or of all."""
        for address, nbytes in self._states.values():
            if sequence is None:
                self.device.zero(address, nbytes * self.limits.n_seq)
            else:
                self.device.zero(address + sequence * nbytes, nbytes)


def _powers(least: int, most: int) -> Iterator[int]:
    """Yield ``least`` and its doubles up to ``most``, then ``most``."""
    while least < most:
        yield least
        least *= 2
    if most >= least // 2:
        yield most


def _free(device: Device, owned: Sequence[tuple[int, int]]) -> None:
    for address, _ in owned:
        device.free(address)

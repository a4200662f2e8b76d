"""The backend ``cuda``: a graph, or any part of it, becomes launches on a device, recorded as one CUDA graph.

compile: join neighbours (cuda_joins.py), lower every operation to entries (cuda_lowering.py, cuda_ops.py), place their
buffers in one block of device memory (arena.py). run: send the batch block; for a number of tokens seen before replay
its recorded launches, so that Python costs the same however many layers there are. What changes from token to token
(positions, sequences) is in the batch block on the device, not in the launches. Python is between launches only where
an observer looks on, or where weights that do not fit are uploaded.
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
from quantkit.kernels.cuda.device import Device, Launch
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.accumulators import Accumulator, NotFinite, not_finite
from quantkit.model.backends.arena import Buffer, place
from quantkit.model.backends.boundary import Boundary
from quantkit.model.backends.cuda_joins import join
from quantkit.model.backends.cuda_lowering import FEW_ROWS, CUDALowering, KernelEntry, WorkEntry
from quantkit.model.backends.cuda_ops import lower
from quantkit.model.backends.cuda_weights import Weights
from quantkit.model.batch import Batch
from quantkit.model.ops import Op, Value

#: Bytes of the batch block's words, before the arrays they point to.
_WORDS = 64

#: Numbers of tokens whose launches are kept.
_SHAPES = 16

#: A step of a run: launches, or something for Python to do.
Step = list[Launch] | Callable[[], None]


class CUDABackend:
    """Makes programs for one device; they share its weights. max_vram: bytes of weights on it.

    cublas: prompts go through matrices unpacked to bf16 and cuBLAS (cuda_cublas.py), the reference for our products.
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
        """Give the device's memory back; programs must not be used after it."""
        self.weights.close()


@dataclass
class Plan:
    """The steps of a run with so many tokens and outputs; ``replay`` runs them all, once they are recorded."""

    steps: list[Step]
    runs: int = 0
    replay: Callable[[], None] | None = None


class CUDAProgram(Boundary):
    """Launches, the device memory they name, and the caches and states of the sequences."""

    def __init__(self, backend: CUDABackend, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value]) -> None:
        super().__init__(ops, leaves)
        self._backend, self.device, self.limits = backend, backend.device, limits
        self._batch: Batch | None = None
        self.not_finite: list[NotFinite] = []
        self._host: dict[Value, npt.NDArray[Any]] = {}  # copies of values, each good until the next run
        self._plans: OrderedDict[tuple[int, int], Plan] = OrderedDict()
        n = limits.n_ubatch
        self._staging: npt.NDArray[np.uint8] = np.zeros(_WORDS + 16 * n, np.uint8)
        self._block = self.device.allocate(self._staging.nbytes)
        # Weak: or a program, with its caches, would live until Python looks for cycles.
        view, upload = weakref.WeakMethod(self._view), weakref.WeakMethod(self._upload)
        backend.weights.settle(ops)
        self._low = CUDALowering(
            backend,
            limits,
            lambda value: cast(Callable[[Value], Any], view())(value),
            lambda buffer, at, data: cast(Callable[..., None], upload())(buffer, at, data),
        )
        self._settle(self._low)
        # Joined operations leave activations in the format of our products only.
        for op in ops if backend.cublas else join(ops, self._leaves, limits.kv_type):
            lower(self._low, op)
        nbytes = place(self._low.entries)
        self._start = self._low.room(nbytes)
        self._low.owned.append((self._block, self._staging.nbytes))
        self._prepare()
        weakref.finalize(self, _free, self.device, list(self._low.owned))

    def _prepare(self) -> None:
        """Compile the kernels of the usual batches: one token, and a whole one."""
        shapes = [
            entry.choose(rows)
            for entry in self._low.entries
            if isinstance(entry, KernelEntry)
            for rows in (entry.per, entry.per * self.limits.n_ubatch)
        ]
        self.device.prepare(list(dict.fromkeys(shape.operation for shape in shapes if shape is not None)))

    # ------------------------------------------------------------ plans

    def _plan(self, n_tokens: int, n_outputs: int) -> Plan:
        key = n_tokens, n_outputs
        if key not in self._plans:
            self._plans[key] = Plan(self._steps(n_tokens, n_outputs))
            if len(self._plans) > _SHAPES:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def _steps(self, n_tokens: int, n_outputs: int) -> list[Step]:
        """Return launches and calls, in order, for so many tokens."""
        steps: list[Step] = []
        for entry in self._low.entries:
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
        wanted = shape.operation.slots
        given = {name: value for name, value in slots.items() if name in wanted or name not in ("rows", "batch")}
        return Launch(shape.operation, shape.grid, shape.operation.block(**given), shape.shared)

    # ------------------------------------------------------------ running

    def run(self, batch: Batch) -> None:
        """Carry out all operations for a batch of at most ``n_ubatch`` tokens; ValueError for one that cannot be."""
        batch.check(self.limits.n_ctx, self.limits.n_seq, self._low.n_vocab)
        self._batch = batch
        self._low.looking_on.before_run()
        self._send(batch)
        self._carry_out(self._plan(len(batch.tokens), len(batch.outputs)))
        for of, row in self._low.looking_on.take_bad():
            self.not_finite.append(not_finite(of, batch, row))

    def _carry_out(self, plan: Plan) -> None:
        if plan.replay is not None:
            plan.replay()
            return
        for step in plan.steps:
            if isinstance(step, list):
                self.device.run(step)
            else:
                step()
        plan.runs += 1
        # The second time shows that there will be more; a graph cannot hold what Python does.
        if plan.runs == 2 and len(plan.steps) == 1 and isinstance(plan.steps[0], list):
            plan.replay = self.device.record(plan.steps[0])

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
        """What operations that look on have added up so far."""
        return self._low.looking_on.on_host()

    def _view(self, value: Value) -> Any:
        buffer = self._low.values[value]
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
        for address, each in self._low.states.values():
            if sequence is None:
                self.device.zero(address, each * self.limits.n_seq)
            else:
                self.device.zero(address + sequence * each, each)


def _free(device: Device, owned: Sequence[tuple[int, int]]) -> None:
    for address, _ in owned:
        device.free(address)

"""The backend ``cpu``: a graph, or any part of it, becomes a tape of numba operations that a thread team runs.

compile: lower every operation to entries (lowering.py, cpu_ops.py), place their buffers in one block of memory
(arena.py), write argument blocks with the addresses. run: fill the batch block, launch the tape once. Python is
between two launches only where an observer looks on, or where a model larger than memory lets weights go
(streaming.py).
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.cpu.tape import Batch as BatchBlock
from quantkit.kernels.cpu.tape import Tape
from quantkit.kernels.cpu.team import Team
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.accumulators import Accumulator, NotFinite, not_finite
from quantkit.model.backends.arena import Buffer, Entry, Memory, place
from quantkit.model.backends.boundary import Boundary
from quantkit.model.backends.cpu_lowering import CPULowering
from quantkit.model.backends.cpu_ops import lower
from quantkit.model.backends.streaming import Stage, pages, stages, streamed
from quantkit.model.batch import Batch
from quantkit.model.ops import Op, Value


@dataclass(frozen=True)
class Timing:
    """How long an entry of the tape took, its barrier included.

    op: the operation of the graph that it belongs to; name: its own, with the type of the weight it reads;
    weight_bytes: of that weight (of all experts, used or not).
    """

    op: Op | None
    name: str
    nanoseconds: float
    weight_bytes: int


class CPUBackend:
    """Makes programs for the CPU; they share one team of threads, so one runs at a time."""

    name = "cpu"

    def __init__(
        self, source: GGUFFile, threads: int, *, max_ram: int | None = None, observer: Observer | None = None
    ) -> None:
        self.source, self.max_ram, self.observer = source, max_ram, observer
        self.team = Team(threads)

    def compile(self, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value] = ()) -> CPUProgram:
        """Return a program of ``ops``; ``leaves`` are the values that are read after a run.

        Raises:
            TypeNotSupported: there is no kernel for an operation or a weight's type.
        """
        return CPUProgram(self, ops, limits, leaves)

    def close(self) -> None:
        """Nothing to give back: weights are the file's, threads end with the team."""


class CPUProgram(Boundary):
    """Tapes, the memory their blocks point into, and the caches and states of the sequences."""

    def __init__(self, backend: CPUBackend, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value]) -> None:
        super().__init__(ops, leaves)
        self._backend, self.limits = backend, limits
        self._block = BatchBlock(backend.team, limits.n_ubatch, limits.n_ctx)
        self._batch: Batch | None = None
        weak = weakref.WeakMethod(self._view)  # or a program, with its caches, would live until Python looks for cycles
        report = weakref.WeakMethod(self._report)
        self._low = CPULowering(
            backend.source,
            limits,
            backend.team.threads,
            self._block.address,
            backend.observer,
            lambda value: cast(Callable[[Value], Any], weak())(value),
            lambda of, row: cast(Callable[[str, int], None], report())(of, row),
        )
        self.not_finite: list[NotFinite] = []
        self._settle(self._low)
        self._lower(ops)
        self._memory = Memory(place(self._low.entries))
        self._steps = self._make_steps()

    # ------------------------------------------------------------ making

    def _lower(self, ops: Sequence[Op]) -> None:
        """Lower all operations, and streaming's steps between them."""
        budget = self._backend.max_ram
        plan = [Stage(0, len(ops), (), 0)] if budget is None else stages(ops, budget)
        goes = [False] * len(plan) if budget is None else streamed(plan, budget)
        for i, stage in enumerate(plan):
            if i + 1 < len(plan) and goes[i + 1]:
                self._advise(plan[i + 1], "MADV_WILLNEED")
            for op in ops[stage.first : stage.end]:
                lower(self._low, op)
            if goes[i]:
                self._advise(stage, "MADV_DONTNEED")
        self.streams = any(goes)

    def _advise(self, stage: Stage, advice: str) -> None:
        """Append a step that tells the system to read a stage's weights, or to let them go."""
        number: int = getattr(mmap, advice, -1)  # -1: this system has no such advice
        found = [pages(self._backend.source.data(name)) for name in stage.tensors]
        ranges = [part for part in found if part is not None]

        def advise() -> None:
            for mapping, first, length in ranges:
                mapping.madvise(number, first, length)

        if number >= 0 and ranges:
            self._low.entries.append(Entry(None, call=advise))

    def _make_steps(self) -> list[Tape | Callable[[], None]]:
        """Return tapes and calls, in order."""
        steps: list[Tape | Callable[[], None]] = []
        run: list[Entry] = []
        self._runs: list[list[Entry]] = []
        for entry in [*self._low.entries, Entry(None, call=lambda: None)]:
            if entry.operation is not None:
                run.append(entry)
                continue
            if run:
                steps.append(Tape(self._backend.team, self._block, [self._entry(e) for e in run]))
                self._runs.append(run)
                run = []
            if entry.call is not None:
                steps.append(entry.call)
        return steps[:-1]  # without the last, which only ended the last tape

    def _entry(self, entry: Entry) -> Any:
        assert entry.operation is not None
        return entry.operation, entry.operation.block(**entry.resolved(self._memory.start)), entry.independent

    # ------------------------------------------------------------ running

    def run(self, batch: Batch) -> None:
        """Carry out all operations for a batch of at most ``n_ubatch`` tokens; ValueError for one that cannot be."""
        self._begin(batch)
        for step in self._steps:
            if isinstance(step, Tape):
                step.run()
            else:
                step()
        for op, bad, per in self._low.watched:
            found = bad[bad > 0]
            if len(found):
                self._report(op.of, (int(found.min()) - 1) // per)
                bad[:] = 0

    def _report(self, of: str, row: int) -> None:
        assert self._batch is not None
        self.not_finite.append(not_finite(of, self._batch, row))

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        """What operations that look on have added up so far."""
        return self._low.accumulators

    def profile(self, batch: Batch) -> list[Timing]:
        """Run a batch and return how long every entry of the tape took."""
        self._begin(batch)
        timings = []
        runs = iter(self._runs)
        for step in self._steps:
            if isinstance(step, Tape):
                timings += [_timing(e, t) for e, t in zip(next(runs), step.run_timed(), strict=True)]
            else:
                step()
        return timings

    def _begin(self, batch: Batch) -> None:
        batch.check(self.limits.n_ctx, self.limits.n_seq, self._low.n_vocab)
        self._block.set(batch.tokens, batch.positions, batch.sequences, batch.outputs)
        self._batch = batch

    def _view(self, value: Value) -> Any:
        buffer = self._low.values[value]
        if self._batch is None:
            raise ValueError(f"{value}: nothing has been run yet")
        rows = self._batch.rows(value.outputs) * value.per
        data = self._memory.view(buffer.offset, 4 * rows * value.width)
        return data.view(np.int32 if value.integer else np.float32).reshape(rows, value.width)

    def _store(self, buffer: Buffer, data: npt.NDArray[Any]) -> None:
        self._memory.view(buffer.offset, data.nbytes)[:] = data.view(np.uint8)

    def clear(self, sequence: int | None = None) -> None:
        """Forget what recurrent layers keep of a sequence, or of all."""
        for state in self._low.states.values():
            state[slice(None) if sequence is None else sequence] = 0


def _timing(entry: Entry, nanoseconds: float) -> Timing:
    assert entry.operation is not None
    names = [entry.operation.name.strip("_"), *dict.fromkeys(m.tensor.type.name for m in entry.weights)]
    nbytes = sum(m.tensor.type.row_bytes(m.n_in) * m.n_out * m.n_matrices for m in entry.weights)
    return Timing(entry.op, " ".join(names), float(nanoseconds), nbytes)

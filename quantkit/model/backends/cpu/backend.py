"""The backend ``cpu``: a graph, or any part of it, becomes a tape of numba operations that a thread team runs.

compile: lower every operation to entries (lowering.py, cpu/ops.py), place their buffers in one block of memory
(arena.py), write argument blocks with the addresses. run: fill the batch block, launch the tape once. Python runs
between launches only where an observer reads values, or where a model larger than memory drops weights (streaming.py).
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.cpu.core.tape import Batch as BatchBlock
from quantkit.kernels.cpu.core.tape import Tape, TapeOp, run_tape
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.first_run import compile_together
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.accumulators import Accumulator, NotFinite, not_finite
from quantkit.model.backends.arena import Buffer, Entry, Memory, place
from quantkit.model.backends.boundary import Boundary
from quantkit.model.backends.cpu.lowering import CPULowering
from quantkit.model.backends.cpu.ops import lower
from quantkit.model.backends.cpu.streaming import Stage, pages, stages, streamed
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
        """Nothing to free: weights are the file's, threads end with the team."""


class CPUProgram(Boundary):
    """Tapes, the memory their blocks point into, and the caches and states of the sequences."""

    def __init__(self, backend: CPUBackend, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value]) -> None:
        super().__init__(ops, leaves)
        self._backend, self.limits = backend, limits
        self._block = BatchBlock(backend.team, limits.n_ubatch, limits.n_ctx)
        self._batch: Batch | None = None
        weak = weakref.WeakMethod(self._view)  # or a program, with its caches, would live until Python looks for cycles
        report = weakref.WeakMethod(self._report)
        low = CPULowering(
            backend.source,
            limits,
            backend.team.threads,
            self._block.address,
            backend.observer,
            lambda value: cast(Callable[[Value], Any], weak())(value),
            lambda of, row: cast(Callable[[str, int], None], report())(of, row),
        )
        self.not_finite: list[NotFinite] = []
        self._settle(low)
        self._lower(low, ops)
        self._memory = Memory(place(low.entries))
        self._steps = self._make_steps(low.entries)
        self._states, self._watched = low.states, low.watched
        self._n_vocab, self._n_positions = low.n_vocab, low.n_positions
        self._kept = low.kept
        #: The sums of observing operations so far.
        self.accumulators: dict[str, Accumulator] = low.accumulators

    # ------------------------------------------------------------ making

    def _lower(self, low: CPULowering, ops: Sequence[Op]) -> None:
        """Lower all operations, and streaming's steps between them."""
        budget = self._backend.max_ram
        plan = [Stage(0, len(ops), (), 0)] if budget is None else stages(ops, budget)
        goes = [False] * len(plan) if budget is None else streamed(plan, budget)
        for i, stage in enumerate(plan):
            if i + 1 < len(plan) and goes[i + 1]:
                low.entries += self._advice(plan[i + 1], "MADV_WILLNEED")
            for op in ops[stage.first : stage.end]:
                lower(low, op)
            if goes[i]:
                low.entries += self._advice(stage, "MADV_DONTNEED")

    def _advice(self, stage: Stage, advice: str) -> list[Entry]:
        """Return a step that tells the system to read a stage's weights, or to drop them."""
        number: int = getattr(mmap, advice, -1)  # -1: this system has no such advice
        found = [pages(self._backend.source.data(name)) for name in stage.tensors]
        ranges = [part for part in found if part is not None]

        def advise() -> None:
            for mapping, first, length in ranges:
                mapping.madvise(number, first, length)

        return [Entry(None, call=advise)] if number >= 0 and ranges else []

    def _make_steps(self, entries: Sequence[Entry]) -> list[Tape | Callable[[], None]]:
        """Return tapes and calls, in order."""
        found = [o for e in entries for o in (e.tape_op, *e.slots.values()) if isinstance(o, TapeOp)]
        compile_together([partial(getattr, one, "address") for one in dict.fromkeys([run_tape, *found])])
        steps: list[Tape | Callable[[], None]] = []
        run: list[Entry] = []
        self._runs: list[list[Entry]] = []
        for entry in [*entries, Entry(None, call=lambda: None)]:
            if entry.tape_op is not None:
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
        assert entry.tape_op is not None
        return entry.tape_op, entry.tape_op.block(**entry.resolved(self._memory.start)), entry.independent

    # ------------------------------------------------------------ running

    def run(self, batch: Batch) -> None:
        """Carry out all operations for a batch of at most ``n_ubatch`` tokens; ValueError for one that cannot be."""
        self._begin(batch)
        for step in self._steps:
            if isinstance(step, Tape):
                step.run()
            else:
                step()
        for op, bad, per in self._watched:
            found = bad[bad > 0]
            if len(found):
                self._report(op.of, (int(found.min()) - 1) // per)
                bad[:] = 0

    def _report(self, of: str, row: int) -> None:
        assert self._batch is not None
        self.not_finite.append(not_finite(of, self._batch, row))

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
        batch.check(self._n_positions, self.limits.n_seq, self._n_vocab)
        self._block.set(batch.tokens, batch.positions, batch.sequences, batch.outputs)
        self._batch = batch

    def _view(self, value: Value) -> Any:
        buffer = self._values[value]
        if self._batch is None:
            raise ValueError(f"{value}: nothing has been run yet")
        rows = self._batch.rows(value.outputs) * value.per
        data = self._memory.view(buffer.offset, 4 * rows * value.width)
        return data.view(np.int32 if value.integer else np.float32).reshape(rows, value.width)

    def _store(self, buffer: Buffer, data: npt.NDArray[Any]) -> None:
        self._memory.view(buffer.offset, data.nbytes)[:] = data.view(np.uint8)

    def clear(self, sequence: int | None = None) -> None:
        """Forget what recurrent layers keep of a sequence, or of all."""
        for state in self._states.values():
            state[slice(None) if sequence is None else sequence] = 0


def _timing(entry: Entry, nanoseconds: float) -> Timing:
    assert entry.tape_op is not None
    names = [entry.tape_op.name.strip("_"), *dict.fromkeys(m.tensor.type.name for m in entry.weights)]
    nbytes = sum(m.tensor.type.row_bytes(m.n_in) * m.n_out * m.n_matrices for m in entry.weights)
    return Timing(entry.op, " ".join(names), float(nanoseconds), nbytes)

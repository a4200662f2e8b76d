"""The backend ``cpu``: a tape of numba operations, run by a team of threads.

compile: lower every operation to entries (lowering.py, cpu/ops.py), place their buffers in one block of memory
(arena.py), write argument blocks with the addresses. run: fill the batch block, launch the tape once. Python runs
between launches only if an observer reads values, or if a model larger than memory drops weights (streaming.py).
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
from quantkit.kernels.first_run import compile_in_order
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.accumulators import Accumulator, NotFinite, not_finite
from quantkit.model.backends.arena import Buffer, Entry, Memory, place
from quantkit.model.backends.boundary import Boundary
from quantkit.model.backends.cpu.lowering import CPULowering
from quantkit.model.backends.cpu.ops import lower
from quantkit.model.backends.cpu.streaming import Stage, mark_streamed, pages, stages
from quantkit.model.batch import Batch
from quantkit.model.ops import Op, Value


@dataclass(frozen=True)
class Timing:
    """The time of an entry of the tape, its barrier included.

    op: the graph's operation; name: that of the kernel, with the type of its weight; weight_bytes: of that weight (of
    all experts, used or not).
    """

    op: Op | None
    name: str
    nanoseconds: float
    weight_bytes: int


class CPUBackend:
    """Compiler of programs for the CPU; they share one team of threads, so one runs at a time."""

    name = "cpu"

    def __init__(
        self,
        source: GGUFFile,
        threads: int,
        *,
        max_ram: int | None = None,
        observer: Observer | None = None,
        exact: bool = False,
    ) -> None:
        self.source = source
        self.max_ram = max_ram
        self.observer = observer
        self.exact = exact
        self.team = Team(threads)

    def compile(self, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value] = ()) -> CPUProgram:
        """Return a program of ``ops``; ``leaves`` are the values that are read after a run.

        Raises:
            TypeNotSupported: there is no kernel for an operation or a weight's type.
        """
        return CPUProgram(self, ops, limits, leaves)

    def close(self) -> None:
        """Do nothing: the file owns the weights, and the team its threads."""


class CPUProgram(Boundary):
    """Tapes with their memory, and the caches and states of the sequences."""

    def __init__(self, backend: CPUBackend, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value]) -> None:
        super().__init__(ops, leaves)
        self._backend, self.limits = backend, limits
        self._block = BatchBlock(backend.team, limits.n_ubatch, limits.n_ctx)
        self._batch: Batch | None = None
        # a reference cycle would keep a program and its caches until garbage collection
        weak = weakref.WeakMethod(self._view)
        report = weakref.WeakMethod(self._report)
        low = CPULowering(
            backend.source,
            limits,
            backend.team.threads,
            self._block.address,
            backend.observer,
            lambda value: cast(Callable[[Value], Any], weak())(value),
            lambda label, row: cast(Callable[[str, int], None], report())(label, row),
            backend.exact,
        )
        self.not_finite: list[NotFinite] = []
        self._pin_values(low)
        self._lower(low, ops)
        self._memory = Memory(place(low.entries))
        self._steps = self._make_steps(low.entries)
        self._states, self._watched = low.states, low.watched
        self._n_vocab, self._n_positions = low.n_vocab, low.n_positions
        self._arrays = low.arrays
        #: The sums of observing operations so far.
        self.accumulators: dict[str, Accumulator] = low.accumulators

    # ------------------------------------------------------------ making

    def _lower(self, low: CPULowering, ops: Sequence[Op]) -> None:
        """Lower all operations, with the steps of streaming between them."""
        budget = self._backend.max_ram
        plan = [Stage(0, len(ops), (), 0)] if budget is None else stages(ops, budget)
        streams = [False] * len(plan) if budget is None else mark_streamed(plan, budget)
        for i, stage in enumerate(plan):
            if i + 1 < len(plan) and streams[i + 1]:
                low.entries += self._advice(plan[i + 1], "MADV_WILLNEED")
            for op in ops[stage.first : stage.end]:
                lower(low, op)
            if streams[i]:
                low.entries += self._advice(stage, "MADV_DONTNEED")

    def _advice(self, stage: Stage, advice: str) -> list[Entry]:
        """Return a step that advises the system to read, or drop, a stage's weights."""
        number: int = getattr(mmap, advice, -1)  # -1: not available on this system
        page_ranges = [pages(self._backend.source.data(name)) for name in stage.tensors]
        ranges = [part for part in page_ranges if part is not None]

        def advise() -> None:
            for mapping, first, length in ranges:
                mapping.madvise(number, first, length)

        return [Entry(None, call=advise)] if number >= 0 and ranges else []

    def _make_steps(self, entries: Sequence[Entry]) -> list[Tape | Callable[[], None]]:
        """Return tapes and Python calls, in order."""
        tape_ops = [o for e in entries for o in (e.tape_op, *e.slots.values()) if isinstance(o, TapeOp)]
        compile_in_order([partial(getattr, one, "address") for one in dict.fromkeys([run_tape, *tape_ops])])
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
        return steps[:-1]  # without the sentinel that ended the last tape

    def _entry(self, entry: Entry) -> Any:
        assert entry.tape_op is not None
        return entry.tape_op, entry.tape_op.block(**entry.resolve(self._memory.start)), entry.independent

    # ------------------------------------------------------------ running

    def run(self, batch: Batch) -> None:
        """Carry out all operations for a batch of at most ``n_ubatch`` tokens; ValueError for an invalid one."""
        self._set_batch(batch)
        for step in self._steps:
            if isinstance(step, Tape):
                step.run()
            else:
                step()
        for op, bad, per in self._watched:
            rows = bad[bad > 0]
            if len(rows):
                self._report(op.label, (int(rows.min()) - 1) // per)
                bad[:] = 0

    def _report(self, label: str, row: int) -> None:
        assert self._batch is not None
        self.not_finite.append(not_finite(label, self._batch, row))

    def profile(self, batch: Batch) -> list[Timing]:
        """Run a batch and return the time of every entry of the tape."""
        self._set_batch(batch)
        timings = []
        runs = iter(self._runs)
        for step in self._steps:
            if isinstance(step, Tape):
                timings += [_timing(e, t) for e, t in zip(next(runs), step.run_timed(), strict=True)]
            else:
                step()
        return timings

    def _set_batch(self, batch: Batch) -> None:
        batch.check(self._n_positions, self.limits.n_seq, self._n_vocab)
        self._block.set(batch.tokens, batch.positions, batch.sequences, batch.outputs)
        self._batch = batch

    def _view(self, value: Value) -> Any:
        buffer = self._values[value]
        if self._batch is None:
            raise ValueError(f"{value}: not computed yet")
        rows = self._batch.rows(value.outputs) * value.per
        data = self._memory.view(buffer.offset, 4 * rows * value.width)
        return data.view(np.int32 if value.integer else np.float32).reshape(rows, value.width)

    def _store(self, buffer: Buffer, data: npt.NDArray[Any]) -> None:
        self._memory.view(buffer.offset, data.nbytes)[:] = data.view(np.uint8)

    def clear(self, sequence: int | None = None) -> None:
        """Reset the states of a sequence, or of all."""
        for state in self._states.values():
            state[slice(None) if sequence is None else sequence] = 0


def _timing(entry: Entry, nanoseconds: float) -> Timing:
    assert entry.tape_op is not None
    names = [entry.tape_op.name.strip("_"), *dict.fromkeys(m.tensor.type.name for m in entry.weights)]
    nbytes = sum(m.tensor.type.row_bytes(m.n_in) * m.n_out * m.n_matrices for m in entry.weights)
    return Timing(entry.op, " ".join(names), float(nanoseconds), nbytes)

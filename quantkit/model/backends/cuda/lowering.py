"""Lowering to launches of a CUDA device: weights, caches and states in its memory. Operations: ops.py.

An entry chooses its kernel and grid when the number of rows is known; everything else about a launch is fixed.
Weights that do not fit (--max-vram) are uploaded to a buffer just before their operation, of experts only those that
the batch uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.cuda.core.kernel import Shape
from quantkit.kernels.cuda.matmul import activations, moe
from quantkit.kernels.formats import activation_format
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.arena import Buffer, BufferOffset, Entry, Slot
from quantkit.model.backends.cuda.sums import Sums
from quantkit.model.backends.cuda.weights import Weights
from quantkit.model.backends.lowering import Lowering, expert_bytes_of, row_bytes_of
from quantkit.model.ops import Cache, Covariance, Matrix, Similarity, State, SumColumns, Value
from quantkit.types import BY_NAME

#: Up to this many rows, a product reads every weight once for all of them (mat-vec); above, it works in tiles.
FEW_ROWS = 8


@dataclass(frozen=True)
class Rows:
    """A slot that holds ``times`` * the number of rows."""

    times: int = 1


@dataclass(eq=False)
class KernelEntry(Entry):
    """A launch: ``choose`` returns its shape for a number of rows, None for no launch.

    The number of rows is ``per`` * the outputs or tokens. rows_slots hold multiples of it; by_rows returns further
    slots that depend on it.
    """

    choose: Callable[[int], Shape | None] = lambda rows: None
    outputs: bool = False
    per: int = 1
    rows_slots: dict[str, int] = field(default_factory=dict)
    by_rows: Callable[[int], Mapping[str, int]] = lambda rows: {}


@dataclass(eq=False)
class WorkEntry(Entry):
    """A Python step for more than FEW_ROWS rows, counted as a launch; it gets their number and its slots."""

    work: Callable[[int, Mapping[str, int | float]], None] = lambda rows, slots: None
    outputs: bool = False
    per: int = 1


class CUDALowering(Lowering):
    """Lowering of one program.

    weights: those of the device. sums: the accumulators of observing operations. owned: the device memory of the
    program (address, bytes), appended to. upload: copies bytes to an offset of a buffer, during a run. cublas: prompts
    use cuBLAS (cublas.py).
    """

    def __init__(
        self,
        weights: Weights,
        limits: Limits,
        observer: Observer | None,
        view: Callable[[Value], Any],
        *,
        upload: Callable[[Buffer, int, npt.NDArray[np.uint8]], None],
        sums: Sums,
        owned: list[tuple[int, int]],
        cublas: bool,
    ) -> None:
        super().__init__(weights.source, limits, observer, view)
        self.weights = weights
        self.device = weights.device
        self.upload = upload
        self.observed_sums = sums
        self.owned = owned
        self.cublas = cublas
        self.states: dict[State, tuple[int, int]] = {}
        self._counters = self._n_counters = 0

    def emit(
        self, choose: Callable[[int], Shape | None], value: Value, rows_per: int | None = None, /, **slots: Slot | Rows
    ) -> KernelEntry:
        """Append a launch over the rows of a value and return it; rows_per: rows per token, if not the value's.

        The slots ``rows`` and ``batch`` are set for kernels that have them.
        """
        row_slots = {name: slot.times for name, slot in slots.items() if isinstance(slot, Rows)}
        fixed = {name: slot for name, slot in slots.items() if not isinstance(slot, Rows)}
        entry = KernelEntry(
            self.op,
            slots=fixed,
            choose=choose,
            outputs=value.outputs,
            per=value.per if rows_per is None else rows_per,
            rows_slots=row_slots,
        )
        self.entries.append(entry)
        return entry

    def call(self, call: Callable[[], None], uses: Sequence[Buffer]) -> None:
        """Append a Python step."""
        self.entries.append(Entry(self.op, call=call, uses=tuple(uses)))

    # ------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> int:
        """Return the address of zeroed device memory that lives as long as the program."""
        address = self.device.allocate(nbytes)
        self.device.zero(address, nbytes)
        self.owned.append((address, nbytes))
        return address

    def counters(self, count: int) -> int:
        """Return the address of ``count`` counters, 0 before and after every launch."""
        if count > self._n_counters:
            self._counters, self._n_counters = self.allocate(4 * count), count
        return self._counters

    def cache(self, cache: Cache) -> tuple[int, int, str]:
        """Return the addresses of a layer's keys and values (0: no values), and their type.

        Keys: [n_seq * n_ctx, bytes of k_width values], values the same; cell = sequence * n_ctx + position. Rows of
        blocks follow, sequence by sequence.
        """
        kind = BY_NAME[self.limits.kv_type.upper()]
        cells = cache.cells(self.limits.n_seq, self.limits.n_ctx)

        def make() -> tuple[int, int]:
            keys, values = (
                self.allocate(cells * kind.row_bytes(n)) if n else 0 for n in (cache.k_width, cache.v_width)
            )
            return keys, values

        return *self.once(("cache", cache), make), self.limits.kv_type

    def state(self, state: State) -> int:
        """Return the address of a recurrent layer's state, float32 [n_seq, width]."""
        if state not in self.states:
            size = 4 * self.limits.n_seq * state.width
            self.states[state] = self.allocate(size), 4 * state.width
        return self.states[state][0]

    def sums(self, op: SumColumns | Covariance | Similarity) -> dict[str, int]:
        """Return the addresses of an observing operation's sums, by the names of accumulators.py."""
        return self.observed_sums.addresses(op)

    def watch(self, label: str, per: int) -> int:
        """Return the address where an operation reports rows that are not finite."""
        return self.observed_sums.watch(label, per)

    # ------------------------------------------------------------ weights

    def weight(self, matrix: Matrix, ids: Value | None = None) -> Slot:
        """Return the address of a weight's first row; ids: the experts of the batch, for weights of experts.

        Weights on the host are uploaded to a buffer by a step before.
        """
        first = matrix.first_row * row_bytes_of(matrix)
        address = self.weights.address(matrix.tensor)
        if address is not None:
            return address + first
        staged = Buffer(f"{matrix.tensor.name} (staged)", matrix.tensor.nbytes)
        data = self.source.data(matrix.tensor)
        expert_bytes = expert_bytes_of(matrix)

        if ids is None:
            self.call(lambda: self.upload(staged, 0, data), [staged])
            return BufferOffset(staged, first)
        experts = self._batch_experts(ids)

        def upload() -> None:
            for offset in (expert * expert_bytes for expert in experts):
                self.upload(staged, offset, data[offset : offset + expert_bytes])

        self.call(upload, [staged])
        return BufferOffset(staged, first)

    def _batch_experts(self, ids: Value) -> list[int]:
        """Return a list that holds the experts of the current batch, read back once for each ids."""
        experts: list[int] = []

        def read() -> None:
            experts[:] = np.unique(self.view(ids)).tolist()

        def make() -> list[int]:
            self.call(read, [self.buffer(ids)])
            return experts

        return self.once(("chosen", ids), make)

    def array(self, array: npt.NDArray[Any]) -> int:
        """Return the address of a copy on the device, which lives as long as the program."""
        flat = np.ascontiguousarray(array)
        address = self.device.allocate(flat.nbytes)
        self.device.upload(address, flat)
        self.owned.append((address, flat.nbytes))
        return address

    # ------------------------------------------------------------ activations

    def activation_buffer(self, x: Value, kind: str, n: int = 0) -> Buffer:
        """Return the buffer to which a fused operation writes x in a format; n: columns of a row, if fewer than x's."""
        n = n or x.width
        rows = self.limits.n_ubatch * x.per * (x.width // n)
        buffer = Buffer(f"{x.name} ({kind})", activations.row_bytes(kind, n) * rows)
        self._activations[x, kind, n] = buffer
        return buffer

    def activations(self, x: Value, weight: Matrix) -> tuple[Buffer, int]:
        """Return x in the activation format of a weight, and its row stride in bytes; converted once.

        A row of x may be several of the weight's, side by side: heads.
        """
        kind, n = activation_format(weight.tensor.type), weight.n_in
        if kind == "f32":
            return self.buffer(x), 4 * n
        stride, per = activations.row_bytes(kind, n), x.per * (x.width // n)
        if (x, kind, n) not in self._activations:
            buffer = Buffer(f"{x.name} ({kind})", stride * self.limits.n_ubatch * per)
            self._activations[x, kind, n] = buffer
            slots: dict[str, Slot] = {"x": self.buffer(x), "x_stride": 4 * n, "n": n, "out": buffer}
            self.emit(lambda rows: activations.quantize(kind, n, rows), x, per, **slots)
        return self._activations[x, kind, n], stride

    def rows_for_cublas(self, x: Value, n: int, per: int, ids: Value | None = None) -> tuple[Buffer, bool]:
        """Return a buffer for rows of n bf16 values of x, ``per`` a token, and whether it is new and to be filled.

        ids: the experts by which rows are gathered.
        """
        kind = "bf16 rows" if ids is None else f"bf16 rows by {ids.name}"
        new = (x, kind, n) not in self._activations
        if new:
            self._activations[x, kind, n] = Buffer(f"{x.name} ({kind})", 2 * n * per * self.limits.n_ubatch)
        return self._activations[x, kind, n], new

    def convert_activations(
        self, x: Value, kind: str, n: int, buffer: Buffer, is_written: Callable[[int], bool]
    ) -> None:
        """Emit the conversion of x to a format, rows of n, except where x's own launch does it (is_written(rows))."""
        per = x.width // n
        slots: dict[str, Slot] = {"x": self.buffer(x), "x_stride": 4 * n, "n": n, "out": buffer}
        self.emit(
            lambda rows: None if is_written(rows // per) else activations.quantize(kind, n, rows),
            x,
            x.per * per,
            **slots,
        )

    def plan(self, ids: Value, n_expert: int) -> Buffer:
        """Return the pairs (token, j) of each expert; computed once for each ids."""

        def make() -> Buffer:
            buffer = Buffer(f"plan of {ids.name}", moe.plan_bytes(n_expert, ids.width, self.limits.n_ubatch))
            capability = self.device.capability
            slots: dict[str, Slot] = {
                "plan": buffer,
                "ids": self.buffer(ids),
                "n_used": ids.width,
                "n_expert": n_expert,
            }
            slots["runs"] = moe.bucket_runs(n_expert, capability)
            self.emit(lambda rows: moe.bucket(n_expert, capability) if rows > FEW_ROWS else None, ids, **slots)
            return buffer

        return self.once(("plan", ids), make)

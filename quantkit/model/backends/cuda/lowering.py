"""Lowers to launches of a CUDA device: weights, caches and states in its memory; the operations: ops.py.

An entry chooses its kernel and grid when the rows of a batch are known; everything else about a launch is fixed
before. Weights that do not fit (--max-vram) are uploaded into a buffer just before their operation: of
experts only those that the batch uses.
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
from quantkit.model.backends.arena import Buffer, Entry, Slot, Within
from quantkit.model.backends.cuda.sums import Sums
from quantkit.model.backends.cuda.weights import Weights
from quantkit.model.backends.lowering import Lowering, expert_bytes_of, row_bytes_of
from quantkit.model.ops import Cache, Covariance, Matrix, Similarity, State, SumColumns, Value
from quantkit.types import BY_NAME

#: Up to this many rows, a product reads every weight once for all of them (mat-vec); above, it works in tiles.
FEW_ROWS = 8


@dataclass(frozen=True)
class Rows:
    """A slot that holds the number of rows, times ``times``."""

    times: int = 1


@dataclass(eq=False)
class KernelEntry(Entry):
    """A launch: ``choose`` returns its shape for a number of rows, None for no launch.

    The rows of a value are counted: of ``outputs`` or tokens, ``per`` each. rows_slots hold a multiple
    of that number; by_rows gives more slots that depend on it.
    """

    choose: Callable[[int], Shape | None] = lambda rows: None
    outputs: bool = False
    per: int = 1
    rows_slots: dict[str, int] = field(default_factory=dict)
    by_rows: Callable[[int], Mapping[str, int]] = lambda rows: {}


@dataclass(eq=False)
class WorkEntry(Entry):
    """A Python step for more than FEW_ROWS rows, counted as those of a launch; it gets their number and its slots."""

    work: Callable[[int, Mapping[str, int | float]], None] = lambda rows, slots: None
    outputs: bool = False
    per: int = 1


class CUDALowering(Lowering):
    """A lowering for one program.

    weights: those of the device. sums: the sums of observing operations. owned: collects the device memory that the
    program owns, address and bytes. upload: copies bytes into a buffer, at a byte, during a run. cublas: prompts go
    through cuBLAS (cublas.py).
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
        self.weights, self.device, self.upload = weights, weights.device, upload
        self.kept_sums, self.owned, self.cublas = sums, owned, cublas
        self.states: dict[State, tuple[int, int]] = {}
        self._counters = self._n_counters = 0

    def emit(
        self, choose: Callable[[int], Shape | None], of: Value, rows_per: int | None = None, /, **slots: Slot | Rows
    ) -> KernelEntry:
        """Append a launch over the rows of a value (its own ``per``, unless told otherwise) and return it.

        The slots ``rows`` and ``batch`` are filled in where a kernel has them.
        """
        counted = {name: slot.times for name, slot in slots.items() if isinstance(slot, Rows)}
        fixed = {name: slot for name, slot in slots.items() if not isinstance(slot, Rows)}
        entry = KernelEntry(
            self.op,
            slots=fixed,
            choose=choose,
            outputs=of.outputs,
            per=of.per if rows_per is None else rows_per,
            rows_slots=counted,
        )
        self.entries.append(entry)
        return entry

    def call(self, call: Callable[[], None], uses: Sequence[Buffer]) -> None:
        """Append a Python step."""
        self.entries.append(Entry(self.op, call=call, uses=tuple(uses)))

    # ------------------------------------------------------------ memory

    def room(self, nbytes: int) -> int:
        """Return the address of device memory for as long as the program lives, set to zero."""
        address = self.device.allocate(nbytes)
        self.device.zero(address, nbytes)
        self.owned.append((address, nbytes))
        return address

    def counters(self, count: int) -> int:
        """Return the address of ``count`` counters, which are 0 before and after every launch."""
        if count > self._n_counters:
            self._counters, self._n_counters = self.room(4 * count), count
        return self._counters

    def cache(self, of: Cache) -> tuple[int, int, str]:
        """Return the addresses of a layer's keys and values (0: no values), and their type.

        Keys: [n_seq * n_ctx, bytes of k_width values], values the same; cell = sequence * n_ctx + position. Rows of
        blocks follow, sequence by sequence.
        """
        kind = BY_NAME[self.limits.kv_type.upper()]
        cells = of.cells(self.limits.n_seq, self.limits.n_ctx)

        def make() -> tuple[int, int]:
            keys, values = (self.room(cells * kind.row_bytes(n)) if n else 0 for n in (of.k_width, of.v_width))
            return keys, values

        return *self.once(("cache", of), make), self.limits.kv_type

    def state(self, of: State) -> int:
        """Return the address of a recurrent layer's state, float32 [n_seq, width]."""
        if of not in self.states:
            size = 4 * self.limits.n_seq * of.width
            self.states[of] = self.room(size), 4 * of.width
        return self.states[of][0]

    def sums(self, op: SumColumns | Covariance | Similarity) -> dict[str, int]:
        """Return the addresses of an observing operation's sums, by the names of accumulators.py."""
        return self.kept_sums.of(op)

    def watch(self, of: str, per: int) -> int:
        """Return the address where an operation reports rows that are not finite."""
        return self.kept_sums.watch(of, per)

    # ------------------------------------------------------------ weights

    def weight(self, matrix: Matrix, ids: Value | None = None) -> Slot:
        """Return where a weight's first row is; ids: the experts of this batch, if it is one of experts.

        One that stays on the host is uploaded into a buffer by a step of its own.
        """
        first = matrix.first_row * row_bytes_of(matrix)
        address = self.weights.address(matrix.tensor)
        if address is not None:
            return address + first
        staged = Buffer(f"{matrix.tensor.name} (staged)", matrix.tensor.nbytes)
        data = self.source.data(matrix.tensor)
        each = expert_bytes_of(matrix)

        if ids is None:
            self.call(lambda: self.upload(staged, 0, data), [staged])
            return Within(staged, first)
        chosen = self._chosen(ids)

        def upload() -> None:
            for at in (expert * each for expert in chosen):
                self.upload(staged, at, data[at : at + each])

        self.call(upload, [staged])
        return Within(staged, first)

    def _chosen(self, ids: Value) -> list[int]:
        """Return a list that holds the experts of the batch that runs; read back, which waits, once for each ids."""
        chosen: list[int] = []

        def read() -> None:
            chosen[:] = np.unique(self.view(ids)).tolist()

        def make() -> list[int]:
            self.call(read, [self.buffer(ids)])
            return chosen

        return self.once(("chosen", ids), make)

    def array(self, array: npt.NDArray[Any]) -> int:
        """Return the address of a copy on the device, kept as long as the program."""
        flat = np.ascontiguousarray(array)
        address = self.device.allocate(flat.nbytes)
        self.device.upload(address, flat)
        self.owned.append((address, flat.nbytes))
        return address

    # ------------------------------------------------------------ activations

    def made_activations(self, x: Value, kind: str, n: int = 0) -> Buffer:
        """Return the buffer in which another operation leaves x in a format; n: columns of its rows there, if fewer."""
        n = n or x.width
        rows = self.limits.n_ubatch * x.per * (x.width // n)
        made = Buffer(f"{x.name} ({kind})", activations.row_bytes(kind, n) * rows)
        self._activations[x, kind, n] = made
        return made

    def activations(self, x: Value, weight: Matrix) -> tuple[Buffer, int]:
        """Return x in the format that a weight multiplies, and the bytes from row to row; made once for each.

        A row of x may be several of the weight's, side by side: heads.
        """
        kind, n = activation_format(weight.tensor.type), weight.n_in
        if kind == "f32":
            return self.buffer(x), 4 * n
        stride, per = activations.row_bytes(kind, n), x.per * (x.width // n)
        if (x, kind, n) not in self._activations:
            made = Buffer(f"{x.name} ({kind})", stride * self.limits.n_ubatch * per)
            self._activations[x, kind, n] = made
            slots: dict[str, Slot] = {"x": self.buffer(x), "x_stride": 4 * n, "n": n, "out": made}
            self.emit(lambda rows: activations.quantize(kind, n, rows), x, per, **slots)
        return self._activations[x, kind, n], stride

    def rows_for_cublas(self, x: Value, n: int, per: int, ids: Value | None = None) -> tuple[Buffer, bool]:
        """Return where rows of n bf16 values of x are, ``per`` of a token, and whether they are still to be made.

        ids: they are gathered by these experts.
        """
        kind = "bf16 rows" if ids is None else f"bf16 rows by {ids.name}"
        new = (x, kind, n) not in self._activations
        if new:
            self._activations[x, kind, n] = Buffer(f"{x.name} ({kind})", 2 * n * per * self.limits.n_ubatch)
        return self._activations[x, kind, n], new

    def remade(self, x: Value, kind: str, n: int, made: Buffer, by: Callable[[int], bool]) -> None:
        """Convert x to a format, rows of n, except for row counts for which ``by`` says x's own launch does."""
        per = x.width // n
        slots: dict[str, Slot] = {"x": self.buffer(x), "x_stride": 4 * n, "n": n, "out": made}
        self.emit(
            lambda rows: None if by(rows // per) else activations.quantize(kind, n, rows), x, x.per * per, **slots
        )

    def plan(self, ids: Value, n_expert: int) -> Buffer:
        """Return which pairs of token and expert each expert has; made once for each ids."""

        def make() -> Buffer:
            made = Buffer(f"plan of {ids.name}", moe.plan_bytes(n_expert, ids.width, self.limits.n_ubatch))
            card = self.device.capability
            slots: dict[str, Slot] = {"plan": made, "ids": self.buffer(ids), "n_used": ids.width, "n_expert": n_expert}
            slots["runs"] = moe.bucket_runs(n_expert, card)
            self.emit(lambda rows: moe.bucket(n_expert, card) if rows > FEW_ROWS else None, ids, **slots)
            return made

        return self.once(("plan", ids), make)

"""Lowers to a tape of the CPU: weights where the mapped file has them, caches and states in arrays. The operations:
cpu/ops.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.cpu.core.tape import TapeOp, address_of
from quantkit.kernels.cpu.matmul import matmul, moe
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.accumulators import Accumulator, Report, new_accumulator
from quantkit.model.backends.arena import Buffer, Entry, Slot
from quantkit.model.backends.lowering import Lowering, row_bytes_of
from quantkit.model.ops import Cache, Covariance, Matrix, Similarity, State, SumColumns, Value
from quantkit.types import BY_NAME


class CPULowering(Lowering):
    """A lowering whose entries a team of ``threads`` runs; batch: address of the batch block.

    report: called for values that observing operations find not to be finite.
    """

    def __init__(
        self,
        source: GGUFFile,
        limits: Limits,
        threads: int,
        batch: int,
        observer: Observer | None,
        view: Callable[[Value], Any],
        report: Report,
    ) -> None:
        super().__init__(source, limits, observer, view)
        self.threads, self.batch, self.report = threads, batch, report
        self.accumulators: dict[str, Accumulator] = {}
        self.states: dict[State, npt.NDArray[np.float32]] = {}
        #: Of every SumColumns the rows not finite that each thread found, and how many rows a token has.
        self.watched: list[tuple[SumColumns, npt.NDArray[np.int64], int]] = []
        #: The arrays that entries have addresses of: they live as long as the program.
        self.kept: list[npt.NDArray[Any]] = []

    def emit(self, operation: TapeOp, /, **slots: Slot) -> Entry:
        """Append an entry and return it."""
        self.entries.append(Entry(self.op, operation, {"batch": self.batch, **slots}))
        return self.entries[-1]

    def array(self, array: npt.NDArray[Any]) -> int:
        """Keep an array as long as the program; return its address."""
        self.kept.append(array)
        return address_of(array)

    def cache(self, of: Cache) -> tuple[int, int, int]:
        """Return the addresses of a layer's keys and values (0: no values) and the type's ggml id.

        Keys: uint8 [n_seq * n_ctx, bytes of k_width values], values the same; cell = sequence * n_ctx + position. Rows
        of blocks follow, sequence by sequence.
        """
        kind, cells = BY_NAME[self.limits.kv_type.upper()], of.cells(self.limits.n_seq, self.limits.n_ctx)

        def make() -> tuple[int, int]:
            keys, values = (np.zeros((cells, kind.row_bytes(w)), np.uint8) for w in (of.k_width, of.v_width))
            return self.array(keys), self.array(values) if of.v_width else 0

        return *self.once(("cache", of), make), kind.id

    def state(self, of: State) -> int:
        """Return the address of a recurrent layer's state, float32 [n_seq, width]."""
        if of not in self.states:
            self.states[of] = np.zeros((self.limits.n_seq, of.width), np.float32)
        return address_of(self.states[of])

    def accumulator(self, op: SumColumns | Covariance | Similarity) -> Accumulator:
        """Return the accumulator of an observing operation; several may share one."""
        if op.of not in self.accumulators:
            self.accumulators[op.of] = new_accumulator(op)
        return self.accumulators[op.of]

    # ------------------------------------------------------------ weights

    def weight(self, matrix: Matrix) -> int:
        """Return the address of a weight's first row in the mapped file."""
        data = self.source.data(matrix.tensor)
        return self.array(data) + matrix.first_row * row_bytes_of(matrix)

    # ------------------------------------------------------------ activations

    def activations(self, x: Value, weight: Matrix) -> tuple[Buffer, int]:
        """Return x in the format that a weight multiplies, and the bytes from row to row; made once for each.

        A row of x may be several of the weight's, side by side: heads.
        """
        kind, n = matmul.activation_format(weight.tensor.type), weight.n_in
        if kind == "f32":
            return self.buffer(x), 4 * n
        stride, per = matmul.row_bytes(kind, n), x.per * (x.width // n)
        if (x, kind, n) not in self._activations:
            made = Buffer(f"{x.name} ({kind})", stride * self.limits.n_ubatch * per)
            self._activations[x, kind, n] = made
            slots: dict[str, Slot] = {"x": self.buffer(x), "out": made, "n": n}
            self.emit(matmul.quantize(kind), rows_of=int(x.outputs), per=per, **slots)
        return self._activations[x, kind, n], stride

    def plan(self, ids: Value, n_expert: int) -> Buffer:
        """Return which tokens each expert has, for products by expert; made once for each ids."""

        def make() -> Buffer:
            made = Buffer(f"plan of {ids.name}", moe.plan_bytes(n_expert, ids.width, self.limits.n_ubatch))
            slots: dict[str, Slot] = {"plan": made, "ids": self.buffer(ids)}
            self.emit(moe.bucket, n_expert=n_expert, n_used=ids.width, rows_of=int(ids.outputs), **slots)
            return made

        return self.once(("plan", ids), make)


def rows(value: Value) -> dict[str, int]:
    """Return the slots that say how many rows a value has."""
    return {"rows_of": int(value.outputs), "per": value.per}

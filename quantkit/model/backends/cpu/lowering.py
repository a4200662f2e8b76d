"""Lowering to a tape of the CPU: weights in the mapped file, caches and states in arrays. Operations: cpu/ops.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.cpu.attention.cache import ROUNDED
from quantkit.kernels.cpu.core.tape import TapeOp, address_of
from quantkit.kernels.cpu.matmul import matmul, moe
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.accumulators import Accumulator, Report, new_accumulator
from quantkit.model.backends.arena import Buffer, Entry, Slot
from quantkit.model.backends.lowering import Lowering, row_bytes_of
from quantkit.model.kv_types import is_rounded, split_kv_type, stored_type
from quantkit.model.ops import Cache, Covariance, Matrix, Similarity, State, SumColumns, Value
from quantkit.types import BY_NAME, TensorType


class CPULowering(Lowering):
    """Lowering for a team of ``threads``; batch: address of the batch block.

    report: called for values that are not finite. exact: weights are decoded, and activations not rounded.
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
        exact: bool,
    ) -> None:
        super().__init__(source, limits, observer, view)
        self.threads = threads
        self.batch = batch
        self.report = report
        self.exact = exact
        self.accumulators: dict[str, Accumulator] = {}
        self.states: dict[State, npt.NDArray[np.float32]] = {}
        #: For every SumColumns: the first row of each thread that is not finite, plus 1, and the rows of a token.
        self.watched: list[tuple[SumColumns, npt.NDArray[np.int64], int]] = []
        #: Arrays whose addresses are in slots: they live as long as the program.
        self.arrays: list[npt.NDArray[Any]] = []

    def emit(self, operation: TapeOp, /, **slots: Slot) -> Entry:
        """Append an entry and return it."""
        self.entries.append(Entry(self.op, operation, {"batch": self.batch, **slots}))
        return self.entries[-1]

    def array(self, array: npt.NDArray[Any]) -> int:
        """Return the address of an array, which lives as long as the program."""
        self.arrays.append(array)
        return address_of(array)

    def cache(self, cache: Cache) -> tuple[int, int, int]:
        """Return the addresses of a layer's keys and values (0: no values) and the ggml id of the stored type.

        Keys: uint8 [n_seq * n_ctx, bytes of k_width values], values the same; cell = sequence * n_ctx + position. Rows
        of blocks follow, sequence by sequence.
        """
        kind, cells = (
            BY_NAME[stored_type(self.limits.kv_type).upper()],
            cache.cells(self.limits.n_seq, self.limits.n_ctx),
        )

        def make() -> tuple[int, int]:
            keys, values = (np.zeros((cells, kind.row_bytes(w)), np.uint8) for w in (cache.k_width, cache.v_width))
            return self.array(keys), self.array(values) if cache.v_width else 0

        return *self.once(("cache", cache), make), kind.id

    def written_types(self) -> tuple[int, int]:
        """Return the ids of the types in which keys and values are written, or to which they are rounded."""
        kv_type = self.limits.kv_type
        offset = ROUNDED if is_rounded(kv_type) else 0
        k, v = (BY_NAME[name.upper()].id + offset for name in split_kv_type(kv_type))
        return k, v

    def state(self, state: State) -> int:
        """Return the address of a recurrent layer's state, float32 [n_seq, width]."""
        if state not in self.states:
            self.states[state] = np.zeros((self.limits.n_seq, state.width), np.float32)
        return address_of(self.states[state])

    def accumulator(self, op: SumColumns | Covariance | Similarity) -> Accumulator:
        """Return the accumulator of an observing operation; several may share one."""
        if op.label not in self.accumulators:
            self.accumulators[op.label] = new_accumulator(op)
        return self.accumulators[op.label]

    # ------------------------------------------------------------ weights

    def weight(self, matrix: Matrix) -> int:
        """Return the address of a weight's first row in the mapped file."""
        data = self.source.data(matrix.tensor)
        return self.array(data) + matrix.first_row * row_bytes_of(matrix)

    # ------------------------------------------------------------ products

    def multiplied_type(self, weight: Matrix) -> TensorType:
        """Return the type as which a weight is multiplied: its own, or F32 if weights are decoded."""
        return matmul.DECODED_TYPE if self.exact else weight.tensor.type

    def products_of(self, weight: Matrix) -> Any:
        """Return the slot ``products`` of a weight."""
        return (matmul.exact_products_of if self.exact else matmul.products_of)(weight.tensor.type)

    def activations(self, x: Value, weight: Matrix) -> tuple[Buffer, int]:
        """Return x in the activation format of a weight, and its row stride in bytes; converted once.

        A row of x may be several of the weight's, side by side: heads.
        """
        kind, n = matmul.activation_format(self.multiplied_type(weight)), weight.n_in
        if kind == "f32":
            return self.buffer(x), 4 * n
        stride, per = matmul.row_bytes(kind, n), x.per * (x.width // n)
        if (x, kind, n) not in self._activations:
            buffer = Buffer(f"{x.name} ({kind})", stride * self.limits.n_ubatch * per)
            self._activations[x, kind, n] = buffer
            slots: dict[str, Slot] = {"x": self.buffer(x), "out": buffer, "n": n}
            self.emit(matmul.quantize(kind), rows_of=int(x.outputs), per=per, **slots)
        return self._activations[x, kind, n], stride

    def plan(self, ids: Value, n_expert: int) -> Buffer:
        """Return the pairs (token, j) of each expert; computed once for each ids."""

        def make() -> Buffer:
            buffer = Buffer(f"plan of {ids.name}", moe.plan_bytes(n_expert, ids.width, self.limits.n_ubatch))
            slots: dict[str, Slot] = {"plan": buffer, "ids": self.buffer(ids)}
            self.emit(moe.bucket, n_expert=n_expert, n_used=ids.width, rows_of=int(ids.outputs), **slots)
            return buffer

        return self.once(("plan", ids), make)


def rows(value: Value) -> dict[str, int]:
    """Return the slots of a value's number of rows."""
    return {"rows_of": int(value.outputs), "per": value.per}

"""What lowering keeps while it turns operations of the graph into entries of a tape; the operations: cpu_ops.py.

Entries name slots: numbers, addresses of weights, and buffers, which get their places when all is known (arena.py).
What several operations need is made once: activations in the format of a weight's type, which expert has which
tokens, scratch, vectors as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels import dequantize
from quantkit.kernels.cpu import matmul, moe
from quantkit.kernels.cpu.tape import Operation, address_of
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.accumulators import Accumulator, Report, new_accumulator
from quantkit.model.backends.arena import Buffer, Entry, Slot
from quantkit.model.ops import (
    Cache,
    Covariance,
    Matrix,
    Op,
    Similarity,
    State,
    SumColumns,
    Value,
)
from quantkit.types import BY_NAME

#: What scratch is aligned to, and each thread's share of it.
LINE = 64


class Lowering:
    """Collects the entries of one program, and all that their slots name.

    batch: address of the batch block; view: returns the rows of a value in the current run; report: is told of values
    that operations which look on find to be no numbers.
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
        self.source, self.limits, self.threads, self.batch = source, limits, threads, batch
        self.observer, self.view, self.report = observer, view, report
        self.entries: list[Entry] = []
        self.values: dict[Value, Buffer] = {}
        self.caches: dict[Cache, tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] = {}
        self.states: dict[State, npt.NDArray[np.float32]] = {}
        self.accumulators: dict[str, Accumulator] = {}
        #: Of every SumColumns the rows that threads found not to be finite, and how many rows a token has.
        self.watched: list[tuple[SumColumns, npt.NDArray[np.int64], int]] = []
        self.n_vocab = 0  # of the embeddings, 0 if they are not here
        self.op: Op | None = None  # the operation being lowered
        self._scratch = Buffer("scratch", LINE, kept_after=True, set_before=True)
        self._activations: dict[tuple[Value, str, int], Buffer] = {}
        self._plans: dict[Value, Buffer] = {}
        self._vectors: dict[Matrix, npt.NDArray[np.float32]] = {}
        self._keep: list[npt.NDArray[Any]] = []

    def emit(self, operation: Operation, /, **slots: Slot) -> Entry:
        """Append an entry and return it."""
        self.entries.append(Entry(self.op, operation, {"batch": self.batch, **slots}))
        return self.entries[-1]

    def may_overwrite(self, entry: Entry, out: Value, x: Value) -> None:
        """Let an entry's output lie where its input does: it works element by element."""
        entry.in_place = self.buffer(out), self.buffer(x)

    # ------------------------------------------------------------ values and memory

    def buffer(self, value: Value) -> Buffer:
        """Return the buffer of a value, rows for a whole batch."""
        if value not in self.values:
            self.values[value] = Buffer(value.name, 4 * self.limits.n_ubatch * value.per * value.width)
        return self.values[value]

    def scratch(self, nbytes: int) -> Buffer:
        """Return scratch of at least so many bytes; any entry may use it, contents do not last."""
        self._scratch.nbytes = max(self._scratch.nbytes, nbytes)
        return self._scratch

    def array(self, array: npt.NDArray[Any]) -> int:
        """Keep an array as long as the program; return its address."""
        self._keep.append(array)
        return address_of(array)

    def cache(self, of: Cache) -> tuple[int, int, int]:
        """Return the addresses of a layer's keys and values (0: no values) and the type's ggml id.

        Keys: uint8 [n_seq * n_ctx, bytes of k_width values], values the same; cell = sequence * n_ctx + position.
        """
        kind = BY_NAME[self.limits.kv_type.upper()]
        if of not in self.caches:
            cells = self.limits.n_seq * self.limits.n_ctx
            widths = (of.k_width, of.v_width)
            keys, values = (np.zeros((cells, kind.row_bytes(w)), np.uint8) for w in widths)
            self.caches[of] = keys, values
        keys, values = self.caches[of]
        return address_of(keys), address_of(values) if of.v_width else 0, kind.id

    def state(self, of: State) -> int:
        """Return the address of a recurrent layer's state, float32 [n_seq, width]."""
        if of not in self.states:
            self.states[of] = np.zeros((self.limits.n_seq, of.width), np.float32)
        return address_of(self.states[of])

    def accumulator(self, op: SumColumns | Covariance | Similarity) -> Accumulator:
        """Return the accumulator of an operation that looks on; several may share one."""
        if op.of not in self.accumulators:
            self.accumulators[op.of] = new_accumulator(op)
        return self.accumulators[op.of]

    # ------------------------------------------------------------ weights

    def weight(self, matrix: Matrix) -> int:
        """Return the address of a weight's first row in the mapped file."""
        data = self.source.data(matrix.tensor)
        return self.array(data) + matrix.first_row * row_bytes_of(matrix)

    def vector(self, matrix: Matrix | None) -> int:
        """Return the address of a bias, a norm's weight, ... as float32; 0 for None."""
        return 0 if matrix is None else address_of(self.vector_values(matrix))

    def vector_values(self, matrix: Matrix) -> npt.NDArray[np.float32]:
        """Return a small weight decoded, one after another; a float32 one lies where it does in the file."""
        if matrix not in self._vectors:
            t = matrix.tensor
            data = self.source.data(t)
            if t.type.name == "F32" and matrix.rows is None and matrix.columns is None:
                self._vectors[matrix] = data.view(np.float32)
            else:
                values = dequantize(data.reshape(-1, row_bytes_of(matrix)), t.type, matrix.n_in)
                part = slice(None) if matrix.rows is None else slice(*matrix.rows)
                columns = slice(None) if matrix.columns is None else slice(*matrix.columns)
                chosen = values.reshape(matrix.n_matrices, -1, matrix.n_in)[:, part, columns]
                self._vectors[matrix] = np.ascontiguousarray(chosen).reshape(-1)
        return self._vectors[matrix]

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
        if ids not in self._plans:
            made = Buffer(f"plan of {ids.name}", moe.plan_bytes(n_expert, ids.width, self.limits.n_ubatch))
            self._plans[ids] = made
            slots: dict[str, Slot] = {"plan": made, "ids": self.buffer(ids)}
            self.emit(moe.bucket, n_expert=n_expert, n_used=ids.width, rows_of=int(ids.outputs), **slots)
        return self._plans[ids]


def row_bytes_of(matrix: Matrix) -> int:
    """Return the bytes of a row of a weight."""
    return matrix.tensor.type.row_bytes(matrix.n_in)


def expert_bytes_of(matrix: Matrix) -> int:
    """Return the bytes from one expert's (head's) weights to the next one's."""
    return row_bytes_of(matrix) * (matrix.tensor.shape[1] if len(matrix.tensor.shape) > 1 else 1)


def rows(value: Value) -> dict[str, int]:
    """Return the slots that say how many rows a value has."""
    return {"rows_of": int(value.outputs), "per": value.per}

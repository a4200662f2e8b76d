"""The part of lowering operations to entries of a program that devices share.

Slots of entries contain numbers, addresses of weights, and buffers, which get offsets at the end (arena.py). Data that
several operations need is computed once: activations in the format of a weight's type, tokens by expert, scratch, and
float32 vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.reference import decode_rows
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.arena import Buffer, Entry
from quantkit.model.backends.distance_bias import bias_table, has_table
from quantkit.model.ops import Attention, Embed, Lookup, Matrix, Norm, Op, State, Value

T = TypeVar("T")

#: The alignment of scratch, and of each thread's part.
LINE = 64


class Lowering(ABC):
    """The entries of one program under construction, and the buffers and arrays of their slots.

    view: returns the rows of a value in the current run.
    """

    def __init__(
        self, source: GGUFFile, limits: Limits, observer: Observer | None, view: Callable[[Value], Any]
    ) -> None:
        self.source, self.limits = source, limits
        self.observer, self.view = observer, view
        self.entries: list[Entry] = []
        self.values: dict[Value, Buffer] = {}
        self.n_vocab = 0  # of the embeddings; 0 if they are on another device
        self.n_positions = limits.n_ctx
        self.op: Op | None = None  # the operation being lowered
        self._scratch = Buffer("scratch", LINE, live_at_end=True, live_at_start=True)
        self._activations: dict[tuple[Value, str, int], Buffer] = {}
        self._once: dict[tuple[object, ...], Any] = {}
        self._vectors: dict[Matrix, npt.NDArray[np.float32]] = {}

    def once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return make(), computed once for each key."""
        if key not in self._once:
            self._once[key] = make()
        result: T = self._once[key]
        return result

    def limit_ids(self, op: Embed | Lookup) -> None:
        """Limit the tokens, or the positions, of batches to the rows of an operation's table."""
        if isinstance(op, Embed) and op.by_position:
            self.n_positions = min(self.n_positions, op.weight.n_out)
        else:
            self.n_vocab = min(self.n_vocab or op.weight.n_out, op.weight.n_out)

    def may_overwrite(self, entry: Entry, out: Value, x: Value) -> None:
        """Allow an elementwise entry to write its output over its input."""
        entry.in_place = self.buffer(out), self.buffer(x)

    def buffer(self, value: Value) -> Buffer:
        """Return the buffer of a value, with rows for a full batch."""
        if value not in self.values:
            self.values[value] = Buffer(value.name, 4 * self.limits.n_ubatch * value.per * value.width)
        return self.values[value]

    def scratch(self, nbytes: int) -> Buffer:
        """Return at least ``nbytes`` of scratch, shared by all entries; its contents last for one entry."""
        self._scratch.nbytes = max(self._scratch.nbytes, nbytes)
        return self._scratch

    def vector_values(self, matrix: Matrix) -> npt.NDArray[np.float32]:
        """Return a small weight decoded to one float32 array; an F32 weight is a view of the file."""
        if matrix not in self._vectors:
            t = matrix.tensor
            data = self.source.data(t)
            if t.type.name == "F32" and matrix.rows is None and matrix.columns is None:
                self._vectors[matrix] = data.view(np.float32)
            else:
                values = decode_rows(t.type, data.reshape(-1, row_bytes_of(matrix)))
                part = slice(None) if matrix.rows is None else slice(*matrix.rows)
                columns = slice(None) if matrix.columns is None else slice(*matrix.columns)
                part_values = values.reshape(matrix.n_matrices, -1, matrix.n_in)[:, part, columns]
                self._vectors[matrix] = np.ascontiguousarray(part_values).reshape(-1)
        return self._vectors[matrix]

    @abstractmethod
    def array(self, array: npt.NDArray[Any]) -> int:
        """Return the address of an array, which lives as long as the program."""

    @abstractmethod
    def state(self, state: State) -> int:
        """Return the address of a recurrent layer's state, float32 [n_seq, width]."""

    @abstractmethod
    def activations(self, x: Value, weight: Matrix) -> tuple[Buffer, int]:
        """Return x in the activation format of a weight, and its row stride in bytes; converted once.

        A row of x may be several of the weight's, side by side: heads.
        """

    @abstractmethod
    def plan(self, ids: Value, n_expert: int) -> Buffer:
        """Return the pairs (token, j) of each expert; computed once for each ids."""

    def vector(self, matrix: Matrix | None) -> int:
        """Return the address of a bias, a norm's weight, ... as float32; 0 for None."""
        return 0 if matrix is None else self.array(self.vector_values(matrix))

    def distance_biases(self, op: Attention) -> int:
        """Return the address of attention's biases by distance, shared by layers with the same; 0: none."""
        if not has_table(op):
            return 0
        buckets = None if op.buckets is None else self.vector_values(op.buckets)
        key = ("distance biases", op.buckets, op.alibi, op.n_head)
        return self.once(key, lambda: self.array(bias_table(op, self.limits.n_ctx, buckets)))

    def norm_vectors(self, op: Norm) -> dict[str, int]:
        """Return the slots of a norm's weight and bias, and their period."""
        parts = {name: self.vector_values(m) for name, m in (("weight", op.weight), ("bias", op.bias)) if m is not None}
        n_weight = max([op.group, *(len(v) for v in parts.values())])
        # np.resize repeats a vector that is shorter than a group or than the other vector.
        addresses = {name: self.array(v if len(v) == n_weight else np.resize(v, n_weight)) for name, v in parts.items()}
        return {"weight": 0, "bias": 0, **addresses, "n_weight": n_weight}


def row_bytes_of(matrix: Matrix) -> int:
    """Return the bytes of a row of a weight."""
    return matrix.tensor.type.row_bytes(matrix.n_in)


def expert_bytes_of(matrix: Matrix) -> int:
    """Return the bytes of the weights of one expert (or head)."""
    return row_bytes_of(matrix) * (matrix.tensor.shape[1] if len(matrix.tensor.shape) > 1 else 1)

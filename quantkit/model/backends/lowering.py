"""What every lowering keeps while it turns operations of the graph into entries of a program, on whatever device.

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
from quantkit.kernels.reference import reference_decoder
from quantkit.model.backends import Limits, Observer
from quantkit.model.backends.arena import Buffer, Entry
from quantkit.model.ops import Matrix, Op, Value

#: What scratch is aligned to, and each thread's share of it.
LINE = 64


class Lowering:
    """Collects the entries of one program, and all that their slots name.

    view: returns the rows of a value in the current run.
    """

    def __init__(
        self,
        source: GGUFFile,
        limits: Limits,
        observer: Observer | None,
        view: Callable[[Value], Any],
    ) -> None:
        self.source, self.limits = source, limits
        self.observer, self.view = observer, view
        self.entries: list[Entry] = []
        self.values: dict[Value, Buffer] = {}
        self.n_vocab = 0  # of the embeddings, 0 if they are not here
        self.op: Op | None = None  # the operation being lowered
        self._scratch = Buffer("scratch", LINE, kept_after=True, set_before=True)
        self._activations: dict[tuple[Value, str, int], Buffer] = {}
        self._plans: dict[Value, Buffer] = {}
        self._vectors: dict[Matrix, npt.NDArray[np.float32]] = {}

    def may_overwrite(self, entry: Entry, out: Value, x: Value) -> None:
        """Let an entry's output lie where its input does: it works element by element."""
        entry.in_place = self.buffer(out), self.buffer(x)

    def buffer(self, value: Value) -> Buffer:
        """Return the buffer of a value, rows for a whole batch."""
        if value not in self.values:
            self.values[value] = Buffer(value.name, 4 * self.limits.n_ubatch * value.per * value.width)
        return self.values[value]

    def scratch(self, nbytes: int) -> Buffer:
        """Return scratch of at least so many bytes; any entry may use it, contents do not last."""
        self._scratch.nbytes = max(self._scratch.nbytes, nbytes)
        return self._scratch

    def vector_values(self, matrix: Matrix) -> npt.NDArray[np.float32]:
        """Return a small weight decoded, one after another; a float32 one lies where it does in the file."""
        if matrix not in self._vectors:
            t = matrix.tensor
            data = self.source.data(t)
            if t.type.name == "F32" and matrix.rows is None and matrix.columns is None:
                self._vectors[matrix] = data.view(np.float32)
            else:
                values = reference_decoder(t.type)(data.reshape(-1, t.type.block_bytes))
                part = slice(None) if matrix.rows is None else slice(*matrix.rows)
                columns = slice(None) if matrix.columns is None else slice(*matrix.columns)
                chosen = values.reshape(matrix.n_matrices, -1, matrix.n_in)[:, part, columns]
                self._vectors[matrix] = np.ascontiguousarray(chosen).reshape(-1)
        return self._vectors[matrix]


def row_bytes_of(matrix: Matrix) -> int:
    """Return the bytes of a row of a weight."""
    return matrix.tensor.type.row_bytes(matrix.n_in)


def expert_bytes_of(matrix: Matrix) -> int:
    """Return the bytes from one expert's (head's) weights to the next one's."""
    return row_bytes_of(matrix) * (matrix.tensor.shape[1] if len(matrix.tensor.shape) > 1 else 1)

"""The result of a graph operation: computed by the reference backend on a test's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from quantkit.formats.gguf import TensorInfo
from quantkit.model.backends.reference import Reference, ReferenceProgram
from quantkit.model.batch import Batch
from quantkit.model.ops import Matrix, Op, Value
from quantkit.types import BY_NAME


def matrix(array: Any, name: str = "w") -> Matrix:
    """Return a weight of an array's shape; its values are arguments of ``meaning``."""
    return Matrix(TensorInfo(name, tuple(array.shape[::-1]), BY_NAME["F32"], array.nbytes, 0, 0))


def batch_of(positions: Any, sequences: Any = 0, outputs: Any = ()) -> Batch:
    """Return a batch whose tokens are all 0."""
    positions_of_rows = np.asarray(positions, np.int32)
    return Batch(
        np.zeros_like(positions_of_rows),
        positions_of_rows,
        np.broadcast_to(np.asarray(sequences, np.int32), positions_of_rows.shape),
        np.asarray(outputs, np.int32),
    )


class _Backend:
    name, observer = "reference", None

    def __init__(self, weights: Mapping[Matrix, Any]) -> None:
        self.weights = weights

    def weight(self, matrix: Matrix) -> Any:
        return self.weights[matrix]


def program(op: Op, weights: Mapping[Matrix, Any] | None = None) -> ReferenceProgram:
    """Return the reference's program of one operation."""
    return ReferenceProgram(cast(Reference, _Backend(weights or {})), [op], 64, 8)


def meaning(
    op: Op,
    values: Mapping[Value, Any],
    *,
    batch: Batch | None = None,
    rows: int = 1,
    weights: Mapping[Matrix, Any] | None = None,
) -> Any:
    """Return the output of an operation: one array, or a tuple of them; the default batch has ``rows`` tokens."""
    compiled = program(op, weights)
    compiled.values.update(values)
    compiled.run(batch or batch_of(np.arange(rows)))
    outs = tuple(compiled.values[out] for out in op.outputs())
    return outs[0] if len(outs) == 1 else outs

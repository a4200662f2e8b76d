"""Planned tensors of an output: their source rows, how these are encoded, and their place."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quantkit.formats.gguf import TensorInfo
from quantkit.pipeline.custom_encoder import CustomEncoder
from quantkit.pipeline.encoding import Action, RowEncoding, encoding_of
from quantkit.pipeline.feedback import Inputs
from quantkit.pipeline.importance import RowImportance
from quantkit.types import TensorType


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows of one source tensor that become rows of an output tensor.

    In each of ``matrices`` matrices, ``rows`` rows of ``values`` values, from ``source_row`` of ``source_rows`` on,
    become rows from ``target_row`` of ``target_rows`` on. A tensor that is copied or encoded whole has one part, merged
    experts have two.
    """

    source: TensorInfo
    #: Its importance, which some encoders ignore; None if there is none.
    importance: RowImportance | None
    values: int
    matrices: int
    rows: int
    source_rows: int
    target_rows: int
    source_row: int = 0
    target_row: int = 0
    #: Covariance of its inputs, if it is encoded with feedback.
    inputs: Inputs | None = None
    #: The tensor of the source with a scale per matrix, float32, that divides its rows before they are encoded.
    scale: TensorInfo | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether source and output rows are the same."""
        return self.rows == self.source_rows == self.target_rows

    @property
    def row_alignment(self) -> int:
        """The gcd of all row counts and offsets of this part: groups of rows must divide it."""
        return math.gcd(self.rows, self.source_rows, self.target_rows, self.source_row, self.target_row)


def whole_tensor(source: TensorInfo, importance: RowImportance | None = None) -> RowSlice:
    """Return the single part of a tensor whose rows keep their places."""
    matrices = importance.n_mat if importance is not None else 1
    rows = math.prod(source.shape[1:]) // matrices
    values = source.shape[0] if source.shape else 1
    return RowSlice(source, importance, values, matrices, rows, rows, rows)


def with_inputs(part: RowSlice, inputs: Inputs) -> RowSlice:
    """Return a part that is encoded with feedback: matrix by matrix, even without different importance."""
    return replace(with_matrices(part, inputs.matrices), inputs=inputs)


def with_matrices(part: RowSlice, n: int) -> RowSlice:
    """Return a part whose rows, if it is a whole tensor, are those of ``n`` matrices."""
    if not part.is_whole or part.matrices == n:
        return part
    rows = part.matrices * part.rows // n
    return replace(part, matrices=n, rows=rows, source_rows=rows, target_rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPart(RowSlice):
    """Rows of a source tensor with the decision how they are encoded."""

    encoding: RowEncoding

    @property
    def is_copied(self) -> bool:
        """Whether its bytes are copied."""
        return self.encoding.action is Action.COPY


def plan_part(
    part: RowSlice,
    target: TensorType,
    encoder: str = "",
    custom: CustomEncoder | None = None,
    keep_grid: bool = False,
) -> PlannedPart:
    """Decide how a part becomes rows of type ``target``; further arguments: as for ``encoding_of``."""
    return PlannedPart(
        part.source,
        part.importance,
        part.values,
        part.matrices,
        part.rows,
        part.source_rows,
        part.target_rows,
        part.source_row,
        part.target_row,
        part.inputs,
        part.scale,
        encoding=encoding_of(part.source, target, part.values, part.inputs, encoder, custom, keep_grid),
    )


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the output: its source, its type and the reason, and its place."""

    name: str
    #: In ggml's order, innermost first.
    shape: tuple[int, ...]
    type: TensorType
    reason: str
    #: The requested type, if its blocks do not divide the rows and a fallback replaced it.
    fallback_from: TensorType | None
    parts: tuple[PlannedPart, ...]
    shard: int
    #: Absolute byte offset in its shard's file.
    offset: int
    nbytes: int
    #: Its encoder, "mainline" or "ik"; "" if it is copied or repacked.
    encoder: str = ""

    @property
    def source(self) -> TensorInfo:
        """The first source tensor."""
        return self.parts[0].source

    @property
    def importance(self) -> RowImportance | None:
        """The importance of the first part."""
        return self.parts[0].importance

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)

    @property
    def keeps_grid(self) -> bool:
        """Whether blocks that lie on the type's grid are encoded exactly."""
        return any(part.encoding.keeps_grid for part in self.parts)

    @property
    def is_copy(self) -> bool:
        """True if the bytes are copied."""
        return all(part.is_copied for part in self.parts)

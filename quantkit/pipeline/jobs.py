"""Jobs: some rows of one tensor, how tensors are cut into them, and their results. Any executor runs the same jobs.

A job reads only its own bytes of the source and writes only its own bytes of the output, so jobs may run in any order
and on any number of threads, on the same file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from quantkit.errors import ResourceError
from quantkit.pipeline.encoding import PIECE, whole_groups
from quantkit.pipeline.row_slices import PlannedPart, PlannedTensor

#: Values per job, if memory allows.
JOB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cached:
    """The tensor cache's record of a job: its rows are to be stored, and ``entry``, if given, may contain them."""

    entry: Path | None = None
    #: Where the rows lie in any entry of the part, and the records of their pieces in this one.
    offset: int = 0
    records: bytes = b""
    #: Whether the entry is known to be of this source; if not, its records are compared.
    verified: bool = False
    #: A temporary file for the rows of a new entry, if the output cannot be read back.
    temporary: Path | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Rows ``row`` .. ``row + rows`` of one matrix of a part; in a copy a row is any run of bytes.

    ``source_offset`` counts from the beginning of the source tensor, ``target_offset`` from that of the output file.
    """

    tensor: int
    part: int
    matrix: int
    row: int
    rows: int
    source_offset: int
    source_row: int
    target_offset: int
    target_row: int
    #: None if nothing is cached.
    cached: Cached | None = None

    @property
    def target_bytes(self) -> int:
        return self.rows * self.target_row


class ErrorSums(NamedTuple):
    """Sums in f64 over values x and their decoded encodings y: x^2, (x-y)^2, w x^2, w (x-y)^2.

    For rows encoded with feedback, also the losses of the reference's and the written bytes, and the number of rows; of
    tensors that keep their grid, the number of values that the written bytes hold exactly, and that of the blocks whose
    bytes their numbers do not determine.
    """

    square: float = 0.0
    error: float = 0.0
    weighted_square: float = 0.0
    weighted_error: float = 0.0
    loss_before: float = 0.0
    loss_after: float = 0.0
    rows_improved: float = 0.0
    exact: float = 0.0
    ambiguous: float = 0.0

    def __add__(self, sums: tuple[float, ...]) -> ErrorSums:  # type: ignore[override]
        return ErrorSums(*(a + b for a, b in zip(self, sums, strict=True)))

    def rescale(self, scale: float) -> ErrorSums:
        """Return the sums of values that ``scale`` divided, as of the values themselves."""
        squares = ("square", "error", "weighted_square", "weighted_error", "loss_before", "loss_after")
        return self._replace(**{name: getattr(self, name) * scale**2 for name in squares})


class MatrixLoss(NamedTuple):
    """The losses of a matrix encoded with feedback: of the reference's bytes, of the written bytes, and the improved
    rows.

    ``part`` and ``matrix`` are its place in a ``PlannedTensor``; losses are 0 for a matrix with too few tokens.
    """

    part: int
    matrix: int
    tokens: int
    before: float
    after: float
    rows: float


#: Instead of the CRC-32 of a copied tensor, whose bytes are compared with the source.
NO_CRC = -1

#: Origins of the rows of a job with ``cached``: the cache, an encoder, or an encoder because an entry was damaged.
FROM_CACHE = "taken"
FROM_ENCODER = "made"
REPAIRED = "mended"


class JobResult(NamedTuple):
    """The result of a job: CRC-32 of its bytes (or NO_CRC), cache records, and a digest of the source rows.

    ``sums``: of each of its pieces in order, if they are measured or encoded with feedback. Pieces do not depend on how
    jobs are cut, so sums over them do not either.
    """

    crc: int
    sums: tuple[ErrorSums, ...] = ()
    records: bytes = b""
    #: FROM_CACHE, FROM_ENCODER or REPAIRED; "" for jobs without ``cached``.
    origin: str = ""
    source: int | None = None


def cut_jobs(index: int, tensor: PlannedTensor, values: int) -> Iterator[Job]:
    """Yield the jobs of the tensor at position ``index``: about ``values`` values each, within one matrix.

    An empty tensor has none.
    """
    if not tensor.nbytes:
        return
    for number, part in enumerate(tensor.parts):
        source_row = part.source.type.row_bytes(part.values)
        if not part.is_copied:
            yield from _cut_part(index, number, tensor, part, source_row, tensor.type.row_bytes(part.values), values)
        elif part.is_whole and not part.encoding.has_plain_rows:
            unit = math.gcd(part.source.nbytes, 1 << 16)
            n = part.source.nbytes // unit
            yield from _cut_part(index, number, tensor, replace(part, matrices=1, rows=n), unit, unit, values)
        else:
            yield from _cut_part(index, number, tensor, part, source_row, source_row, values)


def _cut_part(
    index: int, number: int, tensor: PlannedTensor, part: PlannedPart, source_row: int, target_row: int, values: int
) -> Iterator[Job]:
    encoding = part.encoding
    step = max(1, values * 4 // source_row if part.is_copied else values // part.values)
    if source_row == part.source.type.row_bytes(part.values):  # rows, not arbitrary bytes
        step = whole_groups(step, encoding.group)
    if not part.is_copied:  # a piece is encoded as a whole regardless of memory: fewer rows would take the same time
        step = whole_groups(step, min(step, encoding.piece) if part.inputs is None else encoding.piece)
    for matrix in range(part.matrices):
        for row in range(0, part.rows, step):
            source = matrix * part.source_rows + part.source_row + row
            target = matrix * part.target_rows + part.target_row + row
            yield Job(
                index,
                number,
                matrix,
                row,
                min(step, part.rows - row),
                source * source_row,
                source_row,
                tensor.offset + target * target_row,
                target_row,
            )


def _longest(tensors: list[PlannedTensor]) -> int:
    """Return the maximum number of values that a worker must hold at once: a row, or a group of rows."""
    return max((t.shape[0] * p.encoding.group for t in tensors if not t.is_copy for p in t.parts), default=1)


def least_ram(tensors: list[PlannedTensor], threads: int) -> int:
    """Return the minimum bytes of ``threads`` workers, for a row, or a group of rows, each."""
    longest = _longest(tensors)
    return worker_ram(tensors, longest) * threads


def worker_ram(tensors: list[PlannedTensor], values: int) -> int:
    """Return the memory of a worker for jobs of this many values."""
    # Source and target bytes of a value: at most 8 + 4.
    return 12 * values + _pieces_ram(tensors)


def _pieces_ram(tensors: list[PlannedTensor]) -> int:
    """Return the memory of pieces in float32: two if the error is measured, four if a scale divides the rows.

    The third holds the divided rows, the fourth those of which the scale is computed.
    """
    pieces = 4 if any(part.scale is not None for t in tensors for part in t.parts) else 2
    return pieces * 4 * max(PIECE, _longest(tensors))


def job_values(tensors: list[PlannedTensor], threads: int, max_ram: int) -> int:
    """Return the number of values of a job with which ``threads`` workers stay within ``max_ram`` bytes.

    Raises ResourceError if one row per worker does not fit.
    """
    longest, need = _longest(tensors), least_ram(tensors, threads)
    if max_ram < need:
        raise ResourceError(
            f"--max-ram {max_ram} is too small for {threads} threads with rows of {longest} values: it needs {need} "
            "bytes; raise --max-ram or use fewer threads",
            "QK-E407",
        )
    return min(JOB, (max_ram // threads - _pieces_ram(tensors)) // 12)

"""One job: some rows of one tensor, read, encoded, checked and written. Any executor runs the same jobs.

A job needs nothing but its own bytes of the source and writes nothing but its own bytes of the output, so jobs may
run in any order, on any number of threads, to the same file. Rows are read with pread into a worker's own buffers
(mapped pages would count as this process's memory), decoded and encoded in pieces that stay in the L2 cache.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, QuantkitError, ResourceError
from quantkit.formats.gguf import TensorInfo
from quantkit.formats.ranges import U8, Buffers, read_range, write_range
from quantkit.pipeline.importance import Found
from quantkit.types import TensorType

F32 = npt.NDArray[np.float32]

#: Values decoded and encoded at a time: 512 KiB of float32, half of a usual L2 cache.
PIECE = 1 << 17
#: Values of a job, when memory allows.
JOB = 1 << 20


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the output: where it comes from, what it becomes and why, and where it goes."""

    name: str
    source: TensorInfo
    type: TensorType
    reason: str
    #: The type that the rules chose, where rows do not divide and another had to be taken.
    fallback_from: TensorType | None
    #: Its importance, which encoders of types that use none ignore; None when there is none.
    found: Found | None
    shard: int
    #: Absolute byte offset in its shard's file.
    offset: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in ggml's order, innermost first."""
        return self.source.shape

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)

    @property
    def is_copy(self) -> bool:
        """True when the bytes are taken over as they are."""
        return self.source.type is self.type


@dataclass(frozen=True, slots=True)
class Job:
    """Rows ``row`` .. ``row + rows`` of one matrix of a tensor; for a copy a row may be any piece of bytes."""

    tensor: int
    index: int
    matrix: int
    row: int
    rows: int
    source_offset: int
    source_row: int
    target_offset: int
    target_row: int

    @property
    def target_bytes(self) -> int:
        return self.rows * self.target_row


class ErrorSums(NamedTuple):
    """Sums over encoded values x and their decoded values y, in f64: x^2, (x-y)^2, w x^2, w (x-y)^2."""

    square: float = 0.0
    error: float = 0.0
    weighted_square: float = 0.0
    weighted_error: float = 0.0

    def __add__(self, other: tuple[float, ...]) -> ErrorSums:  # type: ignore[override]
        return ErrorSums(*(a + b for a, b in zip(self, other, strict=True)))


class JobResult(NamedTuple):
    """What a job leaves behind: the CRC-32 of its bytes, and its error where that is measured."""

    crc: int
    sums: ErrorSums


def cut_jobs(at: int, tensor: PlannedTensor, values: int) -> Iterator[Job]:
    """Yield the jobs of the tensor at position ``at``, each of about ``values`` values and within one matrix."""
    source, n = tensor.source, tensor.shape[0]
    matrix_rows, matrices = math.prod(tensor.shape[1:]), 1
    if tensor.is_copy:
        source_row = target_row = _copy_unit(source)
        matrix_rows = source.nbytes // source_row
        step = max(1, values * 4 // source_row)
    else:
        source_row, target_row = source.type.row_bytes(n), tensor.type.row_bytes(n)
        if tensor.found is not None:
            matrices = tensor.found.n_mat
            matrix_rows //= matrices
        step = max(1, values // n)
    index = 0
    for matrix in range(matrices):
        for row in range(0, matrix_rows, step):
            first = matrix * matrix_rows + row
            yield Job(
                at,
                index,
                matrix,
                row,
                min(step, matrix_rows - row),
                source.offset + first * source_row,
                source_row,
                tensor.offset + first * target_row,
                target_row,
            )
            index += 1


def _copy_unit(source: TensorInfo) -> int:
    """Return the bytes of what may be checked and copied by itself: a row, or less where rows are woven."""
    row = source.type.row_bytes(source.shape[0])
    plain = source.type.interleave == 1 and row * math.prod(source.shape[1:]) == source.nbytes
    return row if plain else math.gcd(source.nbytes, 1 << 16)


def job_values(tensors: list[PlannedTensor], threads: int, max_ram: int) -> int:
    """Return how many values a job may have so that ``threads`` workers stay within ``max_ram`` bytes.

    Raises ResourceError when not even one row each fits.
    """
    encoded = [t for t in tensors if not t.is_copy]
    longest = max((t.shape[0] for t in encoded), default=1)
    # Source and target bytes of a value (at most 8 + 4), and the piece in float32, decoded twice when measured.
    budget = (max_ram // threads - 2 * 4 * max(PIECE, longest)) // 12
    if budget < longest:
        need = threads * (12 * longest + 8 * max(PIECE, longest))
        raise ResourceError(
            f"--max-ram {max_ram} is too small for {threads} threads with rows of {longest} values: "
            f"{need} bytes are needed; raise --max-ram or take fewer threads"
        )
    return min(JOB, budget)


class Worker:
    """Runs jobs one after another with buffers of its own."""

    def __init__(self, sources: tuple[Path, ...], targets: tuple[Path, ...], *, measure: bool, ahead: int) -> None:
        self.sources, self.targets, self.measure, self.ahead = sources, targets, measure, ahead
        self._buffers = Buffers()
        self._weights: tuple[int, F32] = (-1, np.zeros((0, 0), np.float32))

    def run(self, job: Job, tensor: PlannedTensor) -> JobResult:
        """Read, encode, check and write one job.

        Raises FormatError for values or blocks that are not finite and for short files, OSError from the disk.
        """
        nbytes = job.rows * job.source_row
        source = self._buffers.get("source", nbytes)
        # While this job computes, the kernel reads what the next ones will.
        read_range(self.sources[tensor.source.shard], source, job.source_offset, self.ahead * nbytes)
        if tensor.is_copy:
            target, sums = source, ErrorSums()
        else:
            target = self._buffers.get("target", job.target_bytes)
            sums = self._encode(job, tensor, source, target)
        self._check(job, tensor, target)
        write_range(self.targets[tensor.shard], target, job.target_offset)
        return JobResult(zlib.crc32(target.data), sums)

    def _encode(self, job: Job, tensor: PlannedTensor, source: U8, target: U8) -> ErrorSums:
        from quantkit.kernels.cpu.check import first_nonfinite_row
        from quantkit.kernels.cpu.encode import encoder

        n, encode = tensor.shape[0], encoder(tensor.type)
        rows_in, rows_out = source.reshape(job.rows, -1), target.reshape(job.rows, -1)
        weights = self._weights_of(job, tensor)
        step, sums = max(1, PIECE // n), ErrorSums()
        for row in range(0, job.rows, step):
            stop = min(row + step, job.rows)
            x = self._decoded(tensor, rows_in[row:stop], "x")
            bad = first_nonfinite_row(x, 0, stop - row)
            if bad >= 0:
                raise self._non_finite(tensor, job, row + bad, x[bad])
            encode(x, weights, rows_out[row:stop], 0, stop - row)
            if self.measure:
                sums += self._error(tensor, x, rows_out[row:stop], weights)
        return sums

    def _decoded(self, tensor: PlannedTensor, rows: U8, name: str) -> F32:
        """Return source rows as float32, decoded into a buffer; float32 itself is only viewed."""
        from quantkit.kernels.cpu.dequantize import dequantize_rows

        if tensor.source.type.name == "F32":
            floats: F32 = rows.view(np.float32)
            return floats
        n = tensor.shape[0]
        x: F32 = self._buffers.get(name, 4 * n * len(rows)).view(np.float32).reshape(len(rows), n)
        dequantize_rows(tensor.source.type, rows, x)
        return x

    def _weights_of(self, job: Job, tensor: PlannedTensor) -> F32:
        """Return the importance of the job's matrix, float32 [n], or an empty array."""
        row: F32
        if tensor.found is None:
            return np.zeros(0, np.float32)
        if self._weights[0] != job.tensor:
            weights = tensor.found.weights
            if weights is None:
                raise QuantkitError(f"tensor {tensor.name}: its importance is gone")
            self._weights = (job.tensor, weights)
        row = self._weights[1][job.matrix]
        return row

    def _error(self, tensor: PlannedTensor, x: F32, encoded: U8, weights: F32) -> ErrorSums:
        from quantkit.kernels.cpu.dequantize import dequantize_rows
        from quantkit.kernels.cpu.error import error_sums

        y = self._buffers.get("y", x.nbytes).view(np.float32).reshape(x.shape)
        dequantize_rows(tensor.type, encoded, y)
        return ErrorSums(*error_sums(x, y, weights))

    def _non_finite(self, tensor: PlannedTensor, job: Job, row: int, x: F32) -> FormatError:
        column = int(np.flatnonzero(~np.isfinite(x))[0])
        return FormatError(
            f"{self.sources[tensor.source.shard]}: tensor {tensor.source.name}, {_where(tensor, job, row)}, column "
            f"{column} is {x[column]}: the source is broken (a bad conversion or download); no output was made"
        )

    def _check(self, job: Job, tensor: PlannedTensor, target: U8) -> None:
        from quantkit.kernels.cpu.check import validate_rows

        if not tensor.type.scales or job.target_row != tensor.type.row_bytes(tensor.shape[0]):
            return
        bad = validate_rows(tensor.type, target.reshape(job.rows, job.target_row))
        if bad >= 0:
            holds = "holds" if tensor.is_copy else "would hold"
            what = "value" if tensor.type.block == 1 else "block with a scale"
            raise FormatError(
                f"{self.sources[tensor.source.shard]}: tensor {tensor.name}, {_where(tensor, job, bad)} {holds} a "
                f"{tensor.type} {what} that is not finite; a runtime would compute NaN with it"
            )


def _where(tensor: PlannedTensor, job: Job, row: int) -> str:
    """Return the place of a job's row, for messages."""
    matrix = f" of matrix {job.matrix}" if tensor.found is not None and tensor.found.n_mat > 1 else ""
    return f"row {job.row + row}{matrix}"

"""The execution of a job: its rows are read, encoded, checked and written.

Rows are read with pread into the worker's own buffers (mapped pages would count as this process's memory) and decoded
and encoded in pieces that fit the L2 cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, QuantkitError
from quantkit.formats.cache_entry import RECORD, DamagedEntry, Entry, are_intact, digest, make_records
from quantkit.formats.ranges import U8, Buffers, write_range
from quantkit.kernels.tensor_scale import TAIL, with_row_scales
from quantkit.pipeline.encoding import Action
from quantkit.pipeline.feedback import CpuMetricPool, rounding_of
from quantkit.pipeline.jobs import (
    FROM_CACHE,
    FROM_ENCODER,
    NO_CRC,
    REPAIRED,
    Cached,
    ErrorSums,
    Job,
    JobResult,
    cut_jobs,
)
from quantkit.pipeline.row_slices import PlannedPart, PlannedTensor
from quantkit.pipeline.source import Source
from quantkit.pipeline.target import Target

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def _matches(cached: Cached, digests: list[bytes]) -> bool:
    """Return whether the pieces of an entry have these digests."""
    return np.frombuffer(cached.records, RECORD)["source"].tobytes() == b"".join(digests)


def _pieces(job: Job, part: PlannedPart, rows: U8) -> list[U8]:
    """Return a job's source or target rows in pieces encoded at a time."""
    step = part.encoding.piece * (rows.size // job.rows)
    return [rows[offset : offset + step] for offset in range(0, rows.size, step)]


def metrics_for(tensors: Sequence[PlannedTensor], max_ram: int, threads: int) -> CpuMetricPool:
    """Return the pool of metrics for all workers of a process, in half of ``max_ram`` if one fits."""
    inputs = [part.inputs for tensor in tensors for part in tensor.parts if part.inputs is not None]
    return CpuMetricPool(max(max_ram // 2, max((item.metric_bytes for item in inputs), default=0)), threads)


def _losses(before: F64, after: F64) -> ErrorSums:
    """Return the sums of the losses of rows encoded together, in order."""
    improved = float(np.count_nonzero(after < before))
    return ErrorSums(loss_before=before.sum(), loss_after=after.sum(), rows_improved=improved)


def _keep_grid(part: PlannedPart, x: F32, out: U8) -> ErrorSums:
    """Encode blocks on the grid of the target exactly; return the numbers of exact values and ambiguous blocks."""
    from quantkit.kernels.cpu.encode.lattice_rows import keep_exact_blocks

    result = keep_exact_blocks(part.encoding.target, part.source.type, x, out)
    return ErrorSums(exact=result.values, ambiguous=result.ambiguous_blocks)


def source_digest(source: Source, index: int, tensor: PlannedTensor, values: int, buffers: Buffers) -> int:
    """Return the journal's digest of the source rows of a tensor that is cut into jobs of ``values`` values."""
    from quantkit.kernels.cpu.digest import digest_of

    digests = []
    for job in sorted(cut_jobs(index, tensor, values), key=lambda job: job.target_offset):
        rows = buffers.get("source", job.rows * job.source_row)
        source.read(tensor.parts[job.part].source, rows, job.source_offset)
        digests.append(digest_of(rows))
    return origin_digest(tensor, digests)


def origin_digest(tensor: PlannedTensor, digests: Sequence[int]) -> int:
    """Return the digest of a tensor's inputs: the rows that its jobs read, and the covariances."""
    from quantkit.kernels.cpu.digest import digest_of

    covariances = "".join(part.inputs.digest() or "" for part in tensor.parts if part.inputs is not None)
    return digest_of(np.frombuffer(np.array(digests, np.uint64).tobytes() + covariances.encode(), np.uint8))


class SourceRows(NamedTuple):
    """A job's rows as they were read, and their digest; digests of their pieces, and the origin, for the cache."""

    source: U8
    check: int | None
    digests: list[bytes]
    origin: str


class Worker:
    """Runs jobs one after another, with its own buffers."""

    def __init__(
        self, source: Source, target: Target, metrics: CpuMetricPool, *, measure: bool, readahead: int
    ) -> None:
        self.source = source
        self.target = target
        self.metrics = metrics
        self.measure = measure
        self.readahead = readahead
        self._buffers = Buffers()
        self._kernel_copies = self._cache_copies = True
        self._weights: tuple[tuple[int, int], F32] = ((-1, 0), np.zeros((0, 0), np.float32))

    def run(self, job: Job, tensor: PlannedTensor) -> JobResult:
        """Read, encode, check and write one job.

        Raises FormatError for values or blocks that are not finite and for short files, OSError from the disk.
        """
        rows = self.read(job, tensor)
        if isinstance(rows, JobResult):
            return rows
        target, sums = self.convert(job, tensor, rows.source)
        return self.finish(job, tensor, rows, target, sums)

    def read(self, job: Job, tensor: PlannedTensor, buffer: U8 | None = None) -> JobResult | SourceRows:
        """Read a job's rows, into ``buffer`` if given, or copy the cached output, which completes the job."""
        from quantkit.kernels.cpu.digest import digest_of

        part = tensor.parts[job.part]
        origin = "" if job.cached is None else FROM_ENCODER
        if job.cached is not None and job.cached.verified:
            result, origin = self._copy_cached(job, tensor, job.cached)
            if result is not None:
                return result
        nbytes = job.rows * job.source_row
        source = self._buffers.get("source", nbytes) if buffer is None else buffer
        # While this job computes, the operating system reads ahead for the next ones.
        self.source.read(part.source, source, job.source_offset, self.readahead * nbytes)
        check = None if tensor.is_copy else digest_of(source)
        digests: list[bytes] = []
        if job.cached is not None:
            digests = [
                digest(piece, self._tail(part) + self._scale_bytes(job, part)) for piece in _pieces(job, part, source)
            ]
            if job.cached.entry is not None and not job.cached.verified and _matches(job.cached, digests):
                result, origin = self._copy_cached(job, tensor, job.cached)
                if result is not None:
                    return result
        return SourceRows(source, check, digests, origin)

    def convert(self, job: Job, tensor: PlannedTensor, source: U8) -> tuple[U8, list[ErrorSums]]:
        """Encode source rows on the CPU; return the bytes, and error sums if requested."""
        part = tensor.parts[job.part]
        if part.is_copied:
            return source, []
        target = self._buffers.get("target", job.target_bytes)
        if part.encoding.action is Action.ENCODE:
            return target, self._encode(job, part, source, target)
        self._repack(job, part, source, target)
        return target, []

    def finish(self, job: Job, tensor: PlannedTensor, rows: SourceRows, target: U8, sums: list[ErrorSums]) -> JobResult:
        """Check and write the encoded rows of a job, from any backend."""
        part = tensor.parts[job.part]
        self._check(job, part, target)
        self._write(job, tensor, part, target)
        crc = NO_CRC if tensor.is_copy else zlib.crc32(target.data)
        if job.cached is None:
            return JobResult(crc, tuple(sums), source=rows.check)
        pieces = _pieces(job, part, target)
        records = make_records(rows.digests, pieces, np.array(sums or [ErrorSums()])).tobytes()
        if job.cached.temporary is not None:
            try:
                write_range(job.cached.temporary, target, job.cached.offset)
            except OSError:  # such as a full disk: the tensor is then not cached
                records = b""
        return JobResult(crc, tuple(sums), records, rows.origin, rows.check)

    def decode(self, job: Job, tensor: PlannedTensor, source: U8) -> Iterator[tuple[slice, F32]]:
        """Yield source rows as float32, some at a time in a reused buffer, and their range."""
        part = tensor.parts[job.part]
        rows, step = source.reshape(job.rows, -1), part.encoding.piece
        for row in range(0, job.rows, step):
            span = slice(row, min(row + step, job.rows))
            yield span, self._decode_rows(part, rows[span])

    def measure_error(
        self,
        job: Job,
        tensor: PlannedTensor,
        values: Iterable[tuple[slice, F32]],
        target: U8,
        losses: tuple[F64, F64] | None = None,
    ) -> list[ErrorSums]:
        """Return the sums of bytes encoded elsewhere, by pieces; none if not requested.

        values: as ``decode`` yields them. losses: before and after, of rows encoded with feedback.
        """
        part = tensor.parts[job.part]
        sums = list[ErrorSums]()
        if part.inputs is not None:
            step = part.encoding.piece
            sums = [ErrorSums() for _ in range(0, job.rows, step)]
            if losses is not None:
                step *= len(losses[0]) // job.rows
                parts = (slice(row, row + step) for row in range(0, len(losses[0]), step))
                sums = [_losses(losses[0][span], losses[1][span]) for span in parts]
        if not self.measure:
            return sums
        rows, weights = target.reshape(job.rows, -1), self.weights_of(job, part)
        errors = [self._error(part, x, rows[span], weights) for span, x in values]
        return [a + b for a, b in zip(sums, errors, strict=True)] if sums else errors

    def convert_again(self, job: Job, tensor: PlannedTensor) -> U8:
        """Read a job's rows again and encode them on the CPU."""
        source = self._buffers.get("source", job.rows * job.source_row)
        self.source.read(tensor.parts[job.part].source, source, job.source_offset)
        return self.convert(job, tensor, source)[0]

    def importance_of(self, job: Job, part: PlannedPart, of_metric: F32 | None = None) -> F32:
        """Return the importance for the job's encoder: the importance matrix's, else the metric's or the inputs'."""
        if part.inputs is None or part.importance is not None:
            return self.weights_of(job, part)
        importance = part.inputs.importance(job.matrix) if of_metric is None else of_metric
        return self.weights_of(job, part) if importance is None else importance

    def _copy_cached(self, job: Job, tensor: PlannedTensor, cached: Cached) -> tuple[JobResult | None, str]:
        """Write the cached output of a job; None if the entry is gone or damaged."""
        assert cached.entry is not None
        target = self._buffers.get("target", job.target_bytes)
        records = np.frombuffer(cached.records, RECORD)
        try:
            with Entry(cached.entry) as entry:
                entry.read(target, cached.offset)
            if not are_intact(records, _pieces(job, tensor.parts[job.part], target)):
                raise DamagedEntry("its rows are damaged")
        except DamagedEntry:
            return None, REPAIRED
        except OSError:  # evicted, or on a failing disk
            return None, FROM_ENCODER
        if self._cache_copies:
            with suppress(OSError, FormatError):  # it was evicted just now
                self._cache_copies = self.target.copy(
                    tensor.shard, cached.entry, cached.offset, job.target_offset, target.size
                )
                if self._cache_copies:
                    return self._cached_result(target, records), FROM_CACHE
        self.target.write(tensor.shard, target, job.target_offset)
        return self._cached_result(target, records), FROM_CACHE

    def _cached_result(self, target: U8, records: npt.NDArray[np.void]) -> JobResult:
        columns = slice(0 if self.measure else 4, None)  # without measuring, only losses
        sums = np.zeros((len(records), len(ErrorSums._fields)))
        sums[:, columns] = records["sums"][:, columns]
        piece_sums = tuple(ErrorSums(*row) for row in sums.tolist()) if sums.any() else ()
        return JobResult(zlib.crc32(target.data), piece_sums, records.tobytes(), FROM_CACHE)

    def _write(self, job: Job, tensor: PlannedTensor, part: PlannedPart, data: U8) -> None:
        """Write a job's bytes; copies do not pass through this process again."""
        place = self.source.place(part.source) if part.is_copied and self._kernel_copies else None
        if place is not None:
            file, begin = place
            self._kernel_copies = self.target.copy(
                tensor.shard, file, begin + job.source_offset, job.target_offset, data.size
            )
            if self._kernel_copies:
                return
        self.target.write(tensor.shard, data, job.target_offset)

    def _encode(self, job: Job, part: PlannedPart, source: U8, target: U8) -> list[ErrorSums]:
        """Encode a job's rows; return the error sums of each piece, if they are measured, and losses."""
        from quantkit.kernels.cpu.encode.check import first_nonfinite_row

        rows_in, rows_out = source.reshape(job.rows, -1), target.reshape(job.rows, -1)
        weights, sums = self.weights_of(job, part), list[ErrorSums]()
        step, scale = part.encoding.piece, self._scale(job, part)
        for row in range(0, job.rows, step):
            stop = min(row + step, job.rows)
            x = self._decode_rows(part, rows_in[row:stop])
            bad = first_nonfinite_row(x, 0, stop - row)
            if bad >= 0:
                raise self._non_finite(part, job, row + bad, x[bad])
            if scale is not None:
                x = np.divide(x, scale, out=self._buffers.get("scaled", x.nbytes).view(np.float32).reshape(x.shape))
            piece_sums = self._encode_rows(job, part, x, rows_out[row:stop], part.source_row + job.row + row)
            if self.measure:
                piece_sums += self._error(part, x, rows_out[row:stop], weights)
            if scale is not None:
                piece_sums = piece_sums.rescale(float(scale))
            if self.measure or part.inputs is not None or part.encoding.keeps_grid:
                sums.append(piece_sums)
        return sums

    def _encode_rows(self, job: Job, part: PlannedPart, x: F32, out: U8, row: int) -> ErrorSums:
        """Fill ``out`` with the encoded rows x, the first being ``row`` of their matrix; return the losses."""
        from quantkit.kernels.cpu.encode import encoder

        encoding = part.encoding
        if encoding.custom is not None:
            encoding.custom.encode(x, self.importance_of(job, part), out, part.source.name)
            return ErrorSums()
        encode = encoder(encoding.target, encoding.encoder)
        if part.inputs is None or not encoding.has_feedback or part.inputs.damping(job.matrix) is None:
            encode(x, self.importance_of(job, part), out, 0, len(x))
            return _keep_grid(part, x, out) if encoding.keeps_grid else ErrorSums()
        from quantkit.kernels.cpu.feedback.metric import target_of
        from quantkit.kernels.cpu.feedback.rounding import round_rows

        with self.metrics.acquire(part.inputs, job.matrix, encoding.grouping) as metric:
            importance = self.importance_of(job, part, metric.importance)

            def reference(rows: F32, dst: U8) -> None:
                encode(rows.reshape(x.shape), importance, dst.reshape(out.shape), 0, len(x))

            rows = x.reshape(-1, part.inputs.n)
            target = target_of(rows, metric, row)
            if not encoding.target.is_quantized:
                reference(rows if target is None else target, out)
                return ErrorSums()
            result = round_rows(encoding.target, rows, reference, metric, rounding_of(part.inputs), target)
        out[...] = result.rows.reshape(out.shape)
        return _losses(result.before, result.after)

    def _repack(self, job: Job, part: PlannedPart, source: U8, target: U8) -> None:
        """Interleave rows, de-interleave them, or both, without changing a value."""
        from quantkit.kernels.cpu.interleave import deinterleave_rows, interleave_rows

        encoding = part.encoding
        rows_in, rows_out = source.reshape(job.rows, -1), target.reshape(job.rows, -1)
        if encoding.has_tensor_scale:
            rows_out[...] = self._with_row_scales(part, rows_in)
            return
        plain = rows_in
        if encoding.source is not encoding.source_rows:
            plain = rows_out
            if encoding.is_interleaved:
                nbytes = job.rows * encoding.source_rows.row_bytes(part.values)
                plain = self._buffers.get("x", nbytes).reshape(job.rows, -1)
            deinterleave_rows(encoding.source, rows_in, plain, encoding.target_rows)
        if encoding.is_interleaved:
            interleave_rows(encoding.target, plain, rows_out)

    def _decode_rows(self, part: PlannedPart, rows: U8) -> F32:
        """Return source rows as float32, decoded into a buffer; float32 itself is only viewed."""
        from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

        if part.source.type.name == "F32":
            floats: F32 = rows.view(np.float32)
            return floats
        if part.encoding.has_tensor_scale:
            rows = self._with_row_scales(part, rows)
        x: F32 = self._buffers.get("x", 4 * part.values * len(rows)).view(np.float32).reshape(len(rows), part.values)
        dequantize_rows(part.encoding.decoder_type, rows, x)
        return x

    def _with_row_scales(self, part: PlannedPart, rows: U8) -> U8:
        """Move row scales from the end of the tensor to the beginning of each row."""
        scale = np.frombuffer(self._tail(part), "<f4")[0]
        if not np.isfinite(scale):
            raise FormatError(
                f"{self.source.where(part.source)}: tensor {part.source.name} has a scale of {scale}", "QK-E108"
            )
        return with_row_scales(rows, scale)

    def _tail(self, part: PlannedPart) -> bytes:
        """Return the scale at the end of a tensor, if its type has one there."""
        if not part.encoding.has_tensor_scale:
            return b""
        tail = self._buffers.get("tail", 4)
        self.source.read(part.source, tail, part.source.nbytes - TAIL)
        return tail.tobytes()

    def _scale_bytes(self, job: Job, part: PlannedPart) -> bytes:
        """Return the scale that divides the rows of a job's matrix, a float32, if there is one."""
        if part.scale is None:
            return b""
        scale = self._buffers.get("scale", 4)
        self.source.read(part.scale, scale, 4 * job.matrix)
        return scale.tobytes()

    def _scale(self, job: Job, part: PlannedPart) -> np.float32 | None:
        data = self._scale_bytes(job, part)
        return np.frombuffer(data, np.float32)[0] if data else None

    def weights_of(self, job: Job, part: PlannedPart) -> F32:
        """Return the importance of the job's matrix, float32 [n], or an empty array."""
        row: F32
        if part.importance is None:
            return np.zeros(0, np.float32)
        if self._weights[0] != (job.tensor, job.part):
            weights = part.importance.weights
            if weights is None:
                raise QuantkitError(f"tensor {part.source.name}: importance is missing", "QK-E118")
            self._weights = ((job.tensor, job.part), weights)
        row = self._weights[1][job.matrix]
        return row

    def _error(self, part: PlannedPart, x: F32, data: U8, weights: F32) -> ErrorSums:
        from quantkit.kernels.cpu.encode.check import error_sums
        from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

        y = self._buffers.get("y", x.nbytes).view(np.float32).reshape(x.shape)
        dequantize_rows(part.encoding.target, data, y)
        return ErrorSums(*error_sums(x, y, weights))

    def _non_finite(self, part: PlannedPart, job: Job, row: int, x: F32) -> FormatError:
        column = int(np.flatnonzero(~np.isfinite(x))[0])
        return FormatError(
            f"{self._where(part, job, row)}, column {column} is {x[column]}: the source is damaged (a faulty "
            "conversion or download); no output was written",
            "QK-E108",
        )

    def _check(self, job: Job, part: PlannedPart, target: U8) -> None:
        from quantkit.kernels.cpu.encode.check import validate_rows

        t = part.encoding.target
        if not part.encoding.is_checked or job.target_row != t.row_bytes(part.values):
            return
        bad = validate_rows(t, target.reshape(job.rows, job.target_row))
        if bad >= 0:
            holds = "holds" if part.source.type is t else "would hold"
            unit = "value" if t.block == 1 else "block with a scale"
            raise FormatError(
                f"{self._where(part, job, bad)} {holds} a {t} {unit} that is not finite; a runtime would "
                f"compute NaN from it",
                "QK-E108",
            )

    def _where(self, part: PlannedPart, job: Job, row: int) -> str:
        """Return the place of a job's row in the source, for messages."""
        matrix = f" of matrix {job.matrix}" if part.matrices > 1 else ""
        where, number = self.source.where(part.source), part.source_row + job.row + row
        return f"{where}: tensor {part.source.name}, row {number}{matrix}"

"""Compare two GGUF models: ``quantkit compare``. Metadata, shapes, types, bytes, and the error of B against A.

A split model and a single file compare as whole models: shards, order, padding, GGUF version and the split.* keys
are packing, not content. Tensors are streamed with pread into a few buffers per thread, so memory use is independent
of model and tensor sizes. For tensors that differ in bytes, with values x in A and y in B,

    relative error = sqrt(sum (x - y)^2 / sum x^2)    weighted: w (x - y)^2 and w x^2, w the importance of the column

Each job has its own sums, which are added in order, so the result does not depend on the number of threads.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from quantkit.arguments import checked
from quantkit.cpus import available_cpus
from quantkit.errors import RecipeError, ResourceError, os_error_code
from quantkit.formats.files import check_unchanged
from quantkit.formats.gguf import Field, GGUFFile, TensorInfo, open_gguf
from quantkit.formats.gguf.rules import n_dims
from quantkit.formats.imatrix import read_imatrix
from quantkit.formats.ranges import Buffers
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.kernels.formats import has_decoder
from quantkit.kernels.interleave import can_interleave, is_interleaved
from quantkit.names import tensor_class
from quantkit.patterns import Pattern
from quantkit.pipeline.folded_source import read_scales, scale_of
from quantkit.pipeline.importance import Importance, RowImportance
from quantkit.pipeline.jobs import ErrorSums
from quantkit.progress import Progress, ProgressCallback

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
J = TypeVar("J")
R = TypeVar("R")

#: Keys that describe how a model is packed into files.
PACKING = ("split.no", "split.count", "split.tensors.count")
#: Bytes compared at a time, and values decoded at a time.
_CHUNK = 1 << 20
_PIECE = 1 << 17


@dataclass(frozen=True, slots=True)
class MetadataDifference:
    """A key that only one file has, or whose type or value differs."""

    key: str
    a: Field | None
    b: Field | None

    @property
    def kind(self) -> str:
        """From A to B the key is "added", "removed" or "changed"."""
        if self.a is None:
            return "added"
        return "removed" if self.b is None else "changed"


@dataclass(frozen=True, slots=True)
class ErrorOfB:
    """The error of the decoded values of B against those of A."""

    sums: ErrorSums
    largest: float
    #: Whether the sums include ones weighted by an importance matrix.
    weighted: bool

    @property
    def relative(self) -> float:
        """Root of the summed squared error over the summed squares of A."""
        return _ratio(self.sums.error, self.sums.square)

    @property
    def weighted_relative(self) -> float | None:
        return _ratio(self.sums.weighted_error, self.sums.weighted_square) if self.weighted else None


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """A tensor that both models have. ``identical``: shape, type and every byte agree."""

    a: TensorInfo
    b: TensorInfo
    identical: bool
    error: ErrorOfB | None = None
    #: The reason why the error is missing although the bytes differ.
    note: str = ""

    @property
    def name(self) -> str:
        return self.a.name

    @property
    def difference(self) -> str:
        """The first difference: "shape", "type" or "bytes"; "" if there is none."""
        if self.identical:
            return ""
        if _shape(self.a) != _shape(self.b):
            return "shape"
        return "type" if self.a.type is not self.b.type else "bytes"

    @property
    def types(self) -> str:
        return str(self.a.type) if self.a.type is self.b.type else f"{self.a.type} -> {self.b.type}"


@dataclass(frozen=True, slots=True)
class ClassComparison:
    """The tensors of one class and one pair of types."""

    name: str
    types: str
    tensors: int
    identical: int
    a_bytes: int
    b_bytes: int
    #: Over the tensors that differ and can be decoded; None if there are none.
    error: ErrorOfB | None


@dataclass(frozen=True)
class Comparison(HtmlTable):
    """Two models side by side."""

    a: tuple[Path, ...]
    b: tuple[Path, ...]
    #: None if metadata, or tensors, are not compared.
    metadata: tuple[MetadataDifference, ...] | None
    metadata_equal: int
    metadata_ignored: int
    tensors: tuple[TensorComparison, ...] | None
    only_a: tuple[TensorInfo, ...]
    only_b: tuple[TensorInfo, ...]
    classes: tuple[ClassComparison, ...]
    total: ClassComparison | None
    notes: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """True if everything compared is equal."""
        return not (self.metadata or self.only_a or self.only_b or any(not t.identical for t in self.tensors or ()))

    def as_table(self) -> Table:
        """Return counts, relative errors and bytes by class; errors are shares, not percent."""
        groups = (*self.classes, *([self.total] if self.total is not None else ()))
        rows = (
            (
                *(c.name, c.types, c.tensors, c.identical),
                None if c.error is None else c.error.relative,
                None if c.error is None else c.error.weighted_relative,
                *(c.a_bytes, c.b_bytes),
            )
            for c in groups
        )
        header = "class, types, tensors, identical, relative error, weighted error, bytes A, bytes B"
        return table_of(header, rows, f"A: {self.a[0].name}, B: {self.b[0].name}")


@checked
def compare(
    a: str | Path,
    b: str | Path,
    *,
    metadata: bool = True,
    tensors: bool | str = True,
    error: bool = True,
    ignore_metadata: Sequence[str] = (),
    imatrix: str | Path | None = None,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> Comparison:
    """Compare model ``b`` with model ``a``, the reference.

    Args:
        a, b: GGUF files, or any shards of split models.
        metadata: compare the metadata.
        tensors: compare all tensors, none, or those whose names match this regular expression.
        error: decode tensors that differ in bytes and measure the error of B.
        ignore_metadata: regular expressions; keys that match one are ignored.
        imatrix: also weight the error by this importance matrix.
        threads: None for all CPUs.
        progress: called with the bytes of ``a`` compared so far, from one thread.

    Raises:
        ResourceError: a file cannot be read.
        FormatError: a file is damaged, or the importance matrix does not match the model.
        RecipeError: a regular expression is invalid or matches no tensor, or nothing is left to compare.
    """
    if not metadata and tensors is False:
        raise RecipeError("nothing to compare: neither metadata nor tensors", "QK-E214")
    ignored = [Pattern(text, "--ignore-metadata") for text in ignore_metadata]
    names = Pattern(tensors, "--tensors") if isinstance(tensors, str) else None
    with open_gguf(a) as file_a, open_gguf(b) as file_b:
        keys = _Keys(file_a, file_b, ignored) if metadata else None
        pairs = _Pairs(file_a, file_b, names) if tensors is not False else None
        compared: tuple[TensorComparison, ...] | None = None
        notes: tuple[str, ...] = ()
        if pairs is not None:
            importance = _importance(imatrix, file_a, pairs) if imatrix is not None and error else {}
            run = _Run(file_a, file_b, threads or available_cpus(), progress)
            compared = tuple(run.all(pairs.both, importance, error))
            notes = tuple(f"{n.tensor}: {note}" for n in importance.values() for note in n.notes)
        check_unchanged((*file_a.paths, *file_b.paths))
        return Comparison(
            a=file_a.paths,
            b=file_b.paths,
            metadata=keys.differences if keys else None,
            metadata_equal=keys.n_equal if keys else 0,
            metadata_ignored=keys.n_ignored if keys else 0,
            tensors=compared,
            only_a=pairs.only_a if pairs else (),
            only_b=pairs.only_b if pairs else (),
            classes=_classes(compared or ()),
            total=_class("total", "", compared) if compared else None,
            notes=notes,
        )


def _ratio(error: float, square: float) -> float:
    """Return sqrt(error / square); 0 without error, infinity for an error against zeros."""
    if error == 0:
        return 0.0
    return math.sqrt(error / square) if square != 0 else math.inf


def _shape(tensor: TensorInfo) -> tuple[int, ...]:
    """Return the shape without trailing ones; (1,) for a scalar."""
    return (*tensor.shape, 1)[: n_dims(tensor.shape)]


# --- metadata and names ---


class _Keys:
    """The metadata of both files, compared."""

    def __init__(self, a: GGUFFile, b: GGUFFile, ignore: Sequence[Pattern]) -> None:
        differences = []
        self.n_equal = 0
        self.n_ignored = 0
        for key in {**a.fields, **b.fields}:
            a_field, b_field = a.fields.get(key), b.fields.get(key)
            if key in PACKING:
                continue
            if any(regex.search(key) for regex in ignore):
                self.n_ignored += 1
            elif a_field is None or b_field is None or a_field.type != b_field.type or a_field.raw != b_field.raw:
                differences.append(MetadataDifference(key, a_field, b_field))
            else:
                self.n_equal += 1
        self.differences = tuple(differences)


class _Pairs:
    """The tensors of both models, paired by name."""

    def __init__(self, a: GGUFFile, b: GGUFFile, names: Pattern | None) -> None:
        selected = {n: None for n in {**a.tensors, **b.tensors} if names is None or names.search(n)}
        if names is not None and not selected:
            raise RecipeError(f"{names.text!r} matches no tensor name of either file", "QK-E206")
        self.both = tuple((a.tensors[n], b.tensors[n]) for n in selected if n in a.tensors and n in b.tensors)
        self.only_a = tuple(a.tensors[n] for n in selected if n not in b.tensors)
        self.only_b = tuple(b.tensors[n] for n in selected if n not in a.tensors)


def _importance(path: str | Path, a: GGUFFile, pairs: _Pairs) -> dict[str, RowImportance]:
    """Look up the importance of the tensors that may be decoded: those of two or more dimensions."""
    importance = Importance(read_imatrix(path))
    tensors = [x for x, y in pairs.both if _shape(x) == _shape(y) and len(_shape(x)) > 1]
    lookups = {x.name: importance.lookup(x.name, x.shape) for x in tensors}
    importance.coverage(a.tensors, lookups.values()).check()
    return {name: lookup for name, lookup in lookups.items() if lookup.entry is not None}


# --- jobs ---


class _Part(NamedTuple):
    """A piece of a tensor pair to decode: whole rows of one matrix, or part of one row."""

    a_offset: int
    b_offset: int
    a_bytes: int
    rows: int
    columns: int
    matrix: int
    column: int


class _Buffers(Buffers, threading.local):
    """Per-thread buffers."""


class _Run:
    """A comparison of tensor pairs on a pool of threads."""

    def __init__(self, a: GGUFFile, b: GGUFFile, threads: int, progress: ProgressCallback | None) -> None:
        self.a = a
        self.b = b
        self.threads = threads
        self.progress = progress
        self.buffers = _Buffers()
        self.bytes_done = self.bytes_total = 0

    def all(
        self, pairs: Sequence[tuple[TensorInfo, TensorInfo]], importance: dict[str, RowImportance], error: bool
    ) -> Iterator[TensorComparison]:
        """Yield comparisons in order: bytes if shape and type agree, then the error if they differ."""
        with ThreadPoolExecutor(self.threads) as self.pool:
            # Every byte is read once; decoding adds its share later.
            self.bytes_total = sum(
                x.nbytes for x, y in pairs if _is_comparable(x, y) or (error and _undecodable(x, y) is None)
            )
            for x, y in pairs:
                result = TensorComparison(x, y, _is_comparable(x, y) and self._same_bytes(x, y))
                if result.identical or not error:
                    yield result
                    continue
                reason = _undecodable(x, y)
                if reason is not None:
                    yield replace(result, note=reason)
                    continue
                self.bytes_total += x.nbytes if _is_comparable(x, y) else 0
                yield replace(result, error=self._error(x, y, importance.get(x.name)))

    def _in_order(self, work: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        """Yield the results of jobs in order, with a few jobs in flight."""
        pending: deque[Future[R]] = deque()
        jobs = iter(jobs)
        try:
            while True:
                pending.extend(self.pool.submit(work, job) for job in islice(jobs, 2 * self.threads - len(pending)))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def _step(self, nbytes: int) -> None:
        self.bytes_done += nbytes
        if self.progress is not None:
            self.progress(Progress(self.bytes_done, self.bytes_total))

    def _same_bytes(self, x: TensorInfo, y: TensorInfo) -> bool:
        def is_equal(offset: int) -> bool:
            n = min(_CHUNK, x.nbytes - offset)
            left, right = self.buffers.get("a", n), self.buffers.get("b", n)
            _read(self.a, x, left, offset)
            _read(self.b, y, right, offset)
            return np.array_equal(left, right)

        read = 0
        for equal in self._in_order(is_equal, range(0, x.nbytes, _CHUNK)):
            n = min(_CHUNK, x.nbytes - read)
            read += n
            self._step(n)
            if not equal:
                self.bytes_total -= x.nbytes - read
                return False
        return True

    def _error(self, x: TensorInfo, y: TensorInfo, importance: RowImportance | None) -> ErrorOfB:
        weights = importance.weights if importance is not None else None
        sums, largest = ErrorSums(), 0.0
        a_scales, b_scales = _scales(self.a, x), _scales(self.b, y)

        def measure(part: _Part) -> tuple[ErrorSums, float]:
            left = self._decode("a", self.a, x, part.a_offset, part, a_scales)
            right = self._decode("b", self.b, y, part.b_offset, part, b_scales)
            return _measure(left, right, _weights(weights, part))

        parts = _parts(x, y, 1 if weights is None else len(weights))
        sizes: deque[int] = deque()

        def with_sizes() -> Iterator[_Part]:
            for part in parts:
                sizes.append(part.a_bytes)
                yield part

        for part_sums, part_largest in self._in_order(measure, with_sizes()):
            sums += part_sums
            # NaN propagates.
            largest = part_largest if part_largest > largest or math.isnan(part_largest) else largest
            self._step(sizes.popleft())
        return ErrorOfB(sums, largest, weights is not None)

    def _decode(
        self, side: str, file: GGUFFile, tensor: TensorInfo, offset: int, part: _Part, scales: F32 | None
    ) -> F32:
        """Read and decode part of a tensor, float32 [rows, columns], times the scale of its row, if there are some."""
        from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

        raw = self.buffers.get(side, part.rows * tensor.type.row_bytes(part.columns))
        _read(file, tensor, raw, offset)
        shape = (part.rows, part.columns)
        values = self.buffers.get(f"{side} values", 4 * part.rows * part.columns).view(np.float32).reshape(shape)
        dequantize_rows(tensor.type, raw.reshape(part.rows, -1), values)
        if scales is not None:
            first = offset // tensor.type.row_bytes(_shape(tensor)[0])
            values *= scales[first : first + part.rows, None]
        return values


def _scales(file: GGUFFile, tensor: TensorInfo) -> F32 | None:
    """Return the scale of each row of a tensor in NVFP4, float32 [rows]; None if it has none."""
    scale = scale_of(file, tensor)
    if scale is None:
        return None
    rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
    return np.repeat(read_scales(file, tensor, scale), rows)


def _read(file: GGUFFile, tensor: TensorInfo, out: U8, offset: int) -> None:
    """Fill ``out`` from byte ``offset`` of a tensor."""
    try:
        file.read(tensor, out, offset)
    except OSError as e:
        where = f"{file.where(tensor)}: cannot be read at byte {tensor.offset + offset}"
        raise ResourceError(f"{where}: {e.strerror or e}", os_error_code(e)) from None


def _is_comparable(x: TensorInfo, y: TensorInfo) -> bool:
    return x.type is y.type and _shape(x) == _shape(y)


def _undecodable(x: TensorInfo, y: TensorInfo) -> str | None:
    """Return the reason why the error of a pair cannot be measured, or None."""

    if _shape(x) != _shape(y):
        return "the shapes differ"
    if 0 in x.shape:
        return "no values"
    for t in (x.type, y.type):
        if not has_decoder(t) or (is_interleaved(t) and not can_interleave(t, *x.shape)):
            return f"no decoder for {t}"
    return None


def _parts(x: TensorInfo, y: TensorInfo, matrices: int) -> Iterator[_Part]:
    """Cut a pair into parts of about _PIECE values; longer rows are cut as well if their types allow it."""
    n = _shape(x)[0]
    rows = math.prod(x.shape[1:]) // matrices
    a_row, b_row = x.type.row_bytes(n), y.type.row_bytes(n)
    # _PIECE is a multiple of every block; rows with a header, and interleaved rows, are not split.
    group = max(x.type.interleave, y.type.interleave)
    columns = n if n <= _PIECE or x.type.row_header or y.type.row_header or group > 1 else _PIECE
    step = max(group, _PIECE // n // group * group)
    for matrix in range(matrices):
        for first in range(0, rows, step):
            row, count = matrix * rows + first, min(step, rows - first)
            for column in range(0, n, columns):
                width = min(columns, n - column)
                a_at = row * a_row + column // x.type.block * x.type.block_bytes
                b_at = row * b_row + column // y.type.block * y.type.block_bytes
                yield _Part(a_at, b_at, count * x.type.row_bytes(width), count, width, matrix, column)


def _weights(weights: F32 | None, part: _Part) -> F32:
    """Return the importance of a part's columns, or an empty array."""
    if weights is None:
        return np.empty(0, np.float32)
    return weights[part.matrix, part.column : part.column + part.columns]


def _measure(x: F32, y: F32, weights: F32) -> tuple[ErrorSums, float]:
    """Return the sums and the largest absolute error; ``y`` is overwritten."""
    from quantkit.kernels.cpu.encode.check import error_sums

    sums = ErrorSums(*error_sums(x, y, weights))
    with np.errstate(all="ignore"):
        np.subtract(y, x, out=y)
        np.abs(y, out=y)
        return sums, float(y.max())


# --- classes ---


def _classes(tensors: Iterable[TensorComparison]) -> tuple[ClassComparison, ...]:
    """Group tensors by class and types, largest group first."""
    members: dict[tuple[str, str], list[TensorComparison]] = {}
    for tensor in tensors:
        members.setdefault((tensor_class(tensor.name), tensor.types), []).append(tensor)
    classes = [_class(name, types, group) for (name, types), group in members.items()]
    return tuple(sorted(classes, key=lambda c: -c.a_bytes))


def _class(name: str, types: str, tensors: Sequence[TensorComparison]) -> ClassComparison:
    errors = [t.error for t in tensors if t.error is not None]
    total = None
    if errors:
        sums, weighted = ErrorSums(), ErrorSums()
        for e in errors:
            sums += e.sums
            weighted += e.sums if e.weighted else ErrorSums()
        largest = math.nan if any(math.isnan(e.largest) for e in errors) else max(e.largest for e in errors)
        both = ErrorSums(sums.square, sums.error, weighted.weighted_square, weighted.weighted_error)
        total = ErrorOfB(both, largest, any(e.weighted for e in errors))
    return ClassComparison(
        name,
        types,
        len(tensors),
        sum(t.identical for t in tensors),
        sum(t.a.nbytes for t in tensors),
        sum(t.b.nbytes for t in tensors),
        total,
    )

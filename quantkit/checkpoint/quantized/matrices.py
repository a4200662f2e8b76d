"""Stored tensors as matrices, read by rows: packed codes, and grids of scales.

A matrix has the rows of its weight, regardless of its storage order: ``Columns`` reads a stored matrix across,
``UnpackedRows`` and ``UnpackedColumns`` extract small integers from 32-bit words. ``rows(first, n)`` returns a new
contiguous array; only these rows are read, or a slab of columns around them, which is kept for the next call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quantkit.checkpoint.expressions import F32, I64, float8_values
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.ranges import read_range, read_strided
from quantkit.formats.safetensors import StoredTensor

Array = npt.NDArray[Any]

#: How elements of safetensors' dtypes are read; BF16 and float8 as the integers of their bits.
_RAW = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "u1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}
#: Bytes of columns read at a time, and the number of such slabs per thread: weights, scales, zero points.
_SLAB, _SLABS = 1 << 21, 4
#: Lines of columns transposed at a time.
_LINES = 64


class Matrix(Protocol):
    """Numbers by rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    def rows(self, first: int, n: int) -> Array:
        """Return rows ``first`` .. ``first + n``, a contiguous array of any dtype."""

    def parts(self) -> Iterator[StoredTensor]:
        """Yield the stored tensors it is read from."""


def fail(t: StoredTensor, problem: str) -> FormatError:
    """Return an error about a stored tensor."""
    return FormatError(f"{t.path}: tensor {short(t.name)}: {problem}", "QK-E113")


def raw_dtype(t: StoredTensor) -> np.dtype[Any]:
    """Return the dtype a tensor is read as. Raises FormatError."""
    if t.dtype not in _RAW:
        raise fail(t, f"{t.dtype} is not supported")
    return np.dtype(_RAW[t.dtype])


def as_numbers(t: StoredTensor, raw: Array) -> F32:
    """Return the values of raw elements of a tensor as float32."""
    if t.dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    table = float8_values(t.dtype)
    with np.errstate(over="ignore"):  # the reader refuses infinite values
        return raw.astype(np.float32) if table is None else table[raw]


def read_all(t: StoredTensor) -> Array:
    """Return all elements of a small tensor, in one dimension. Raises FormatError."""
    data = np.empty(t.nbytes, np.uint8)
    read_range(t.path, data, t.offset)
    return data.view(raw_dtype(t))


@dataclass(frozen=True)
class Rows:
    """A stored tensor as a matrix of its rows, outer dimensions concatenated."""

    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, int]:
        columns = self.tensor.shape[-1] if self.tensor.shape else 1
        return self.tensor.n_values // max(columns, 1), columns

    def rows(self, first: int, n: int) -> Array:
        dtype, columns = raw_dtype(self.tensor), self.shape[1]
        data = np.empty(n * columns * dtype.itemsize, np.uint8)
        read_range(self.tensor.path, data, self.tensor.offset + first * columns * dtype.itemsize)
        return data.view(dtype).reshape(n, columns)

    def parts(self) -> Iterator[StoredTensor]:
        yield self.tensor


_cache = threading.local()


@dataclass(frozen=True)
class Columns:
    """A stored matrix, read across: its columns are the rows."""

    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, int]:
        lines, columns = self.tensor.shape
        return columns, lines

    def rows(self, first: int, n: int) -> Array:
        begin, slab = self._slab(first, n)
        return slab[first - begin : first - begin + n]

    def _slab(self, first: int, n: int) -> tuple[int, Array]:
        """Return a slab of columns that covers those requested, as rows, and the number of its first column."""
        t = self.tensor
        if not hasattr(_cache, "slabs"):
            _cache.slabs = OrderedDict()
        slabs: OrderedDict[object, tuple[int, Array]] = _cache.slabs
        now = t.path.stat()
        key = (t.path, t.offset, t.shape, now.st_ino, now.st_size, now.st_mtime_ns)
        slab = slabs.get(key)
        if slab is None or not slab[0] <= first <= first + n <= slab[0] + len(slab[1]):
            slab = slabs[key] = first, self._read(first, n)
        slabs.move_to_end(key)
        while len(slabs) > _SLABS:
            slabs.popitem(last=False)
        return slab

    def _read(self, first: int, n: int) -> Array:
        """Return at least ``n`` columns from ``first`` on, as rows, reading and transposing a few lines at a time."""
        t, dtype = self.tensor, raw_dtype(self.tensor)
        lines, columns = t.shape
        n = min(columns - first, max(n, _SLAB // max(1, lines * dtype.itemsize)))
        slab = np.empty((n, lines), dtype)
        lines_buffer, width = np.empty((_LINES, n), dtype), columns * dtype.itemsize
        offset, step = t.offset + first * dtype.itemsize, n * dtype.itemsize
        for line in range(0, lines, _LINES):
            chunk = lines_buffer[: lines - line]
            read_strided(t.path, chunk.view(np.uint8).reshape(-1), offset + line * width, step, width)
            slab[:, line : line + len(chunk)] = chunk.T
        return slab

    def parts(self) -> Iterator[StoredTensor]:
        yield self.tensor


@dataclass(frozen=True)
class Packing:
    """Integers of ``bits`` packed in 32-bit words, low bits first.

    ``dense``: contiguous across words; else as many as fit in each. ``order``: the place in a word of each of its
    values, if not in order.
    """

    bits: int
    dense: bool = False
    order: tuple[int, ...] = ()

    @property
    def words(self) -> int:
        """Words in one period of the pattern."""
        return self.bits if self.dense and 32 % self.bits else 1

    @property
    def values(self) -> int:
        """Values in one period."""
        return 32 * self.words // self.bits

    def words_of(self, n: int) -> int:
        """Return the number of words for ``n`` values."""
        return -(-n * self.bits // 32) if self.words > 1 else -(-n // self.values)

    def take(self, words: npt.NDArray[np.uint32], i: int) -> npt.NDArray[np.uint8]:
        """Return value ``i`` of each pattern; ``words`` [words, ...]."""
        word, shift = divmod((self.order[i] if self.order else i) * self.bits, 32)
        codes = words[word] >> np.uint32(shift)
        if shift + self.bits > 32:
            codes |= words[word + 1] << np.uint32(32 - shift)
        codes &= np.uint32((1 << self.bits) - 1)
        return np.asarray(codes.astype(np.uint8))


@dataclass(frozen=True)
class UnpackedRows:
    """Integers packed along rows: uint8."""

    words: Matrix
    packing: Packing
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.columns

    def rows(self, first: int, n: int) -> Array:
        words, p = self.words.rows(first, n), self.packing
        if p.bits in (2, 4, 8):
            return _spread(words.view(np.uint8).reshape(n, -1), p.bits)[:, : self.columns]
        patterns = -(-words.shape[1] // p.words)
        padded = np.zeros((n, patterns * p.words), np.uint32)
        padded[:, : words.shape[1]] = words.view(np.uint32)
        parts = padded.reshape(n, patterns, p.words).transpose(2, 0, 1)
        out = np.empty((n, patterns, p.values), np.uint8)
        for i in range(p.values):
            out[:, :, i] = p.take(parts, i)
        return out.reshape(n, -1)[:, : self.columns]

    def parts(self) -> Iterator[StoredTensor]:
        return self.words.parts()


def _spread(data: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Return values of 2, 4 or 8 bits, one per byte, from bytes [n, columns]."""
    if bits == 8:
        return data
    if bits == 4:
        pairs = data.astype(np.uint16)
        pairs |= pairs << 4
        pairs &= 0x0F0F
        return np.asarray(pairs.view(np.uint8))
    fours = data.astype(np.uint32)
    fours |= (fours << 6) | (fours << 12) | (fours << 18)
    fours &= 0x03030303
    return np.asarray(fours.view(np.uint8))


@dataclass(frozen=True)
class UnpackedColumns:
    """Integers packed along columns, a word for several rows: uint8."""

    words: Matrix
    packing: Packing
    n_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.n_rows, self.words.shape[1]

    def rows(self, first: int, n: int) -> Array:
        p, columns = self.packing, self.words.shape[1]
        begin, end = first // p.values, -(-(first + n) // p.values)
        have = min(self.words.shape[0], end * p.words) - begin * p.words
        padded = np.zeros(((end - begin) * p.words, columns), np.uint32)
        padded[:have] = self.words.rows(begin * p.words, have).view(np.uint32)
        parts = padded.reshape(end - begin, p.words, columns).transpose(1, 0, 2)
        out = np.empty((end - begin, p.values, columns), np.uint8)
        for i in range(p.values):
            out[:, i] = p.take(parts, i)
        skip = first - begin * p.values
        return out.reshape(-1, columns)[skip : skip + n]

    def parts(self) -> Iterator[StoredTensor]:
        return self.words.parts()


@dataclass(frozen=True)
class Ternary:
    """BitNet's: four quarters of the rows in two bits each, the first in the lowest: uint8."""

    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = Rows(self.tensor).shape
        return 4 * rows, columns

    def rows(self, first: int, n: int) -> Array:
        stored, quarter = Rows(self.tensor), self.shape[0] // 4
        out = np.empty((n, self.shape[1]), np.uint8)
        position = 0
        while position < n:
            number, row = divmod(first + position, quarter)
            count = min(n - position, quarter - row)
            np.right_shift(stored.rows(row, count).view(np.uint8), 2 * number, out=out[position : position + count])
            position += count
        out &= 3
        return out

    def parts(self) -> Iterator[StoredTensor]:
        yield self.tensor


@dataclass(frozen=True)
class Grid:
    """Numbers for blocks of a weight: scales, zero points.

    ``cells`` has a row for each ``rows_each`` rows of the weight, restarting in every matrix of ``rows`` rows.
    ``exponents``: bytes are powers of two (E8M0).
    """

    cells: Matrix
    rows_each: int
    rows: int
    exponents: bool = False

    @property
    def tensor(self) -> StoredTensor:
        return next(self.cells.parts())

    @cached_property
    def _cells_each(self) -> int:
        return -(-self.rows // self.rows_each)

    def read(self, first: int, n: int) -> F32:
        """Return the cells of rows ``first`` .. ``first + n`` of the weight, float32 [n, columns of cells]."""
        if self.rows_each == 1:
            return self._check(self.cells.rows(first, n))
        row = np.arange(first, first + n)
        index: I64 = row // self.rows * self._cells_each + row % self.rows // self.rows_each
        low = int(index[0])
        return self._check(self.cells.rows(low, int(index[-1]) + 1 - low))[index - low]

    def _check(self, raw: Array) -> F32:
        if self.exponents:
            raw = _POWERS[raw]
        elif isinstance(self.cells, (Rows, Columns)):
            raw = as_numbers(self.tensor, raw)
        values = raw.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise fail(self.tensor, "a scale is infinite or NaN")
        return values

    def parts(self) -> Iterator[StoredTensor]:
        return self.cells.parts()


_POWERS: F32 = np.asarray(float8_values("F8_E8M0"))

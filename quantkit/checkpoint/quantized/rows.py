"""Quantized weights decoded row by row: levels, their values, and their scales.

``Scaled`` is every scheme that ends in floats: values of codes (``Integers``, ``Float8``, ``Float4``), then steps, each
of which subtracts, multiplies by or divides by the cell of a grid. All of it is float32, each step rounds once, in the
order torch has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quantkit.checkpoint.expressions import F32, I64, PIECE, TYPE_F32, float8_values, value_bytes
from quantkit.checkpoint.quantized.matrices import Grid, Matrix, fail, read_all
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType


class RowWise(ABC):
    """An expression of whole rows: subclasses have ``shape``, ``type``, ``parts`` and ``fill``."""

    shape: tuple[int, ...]

    @property
    @abstractmethod
    def type(self) -> TensorType:
        """The type of the values."""

    @abstractmethod
    def fill(self, first: int, rows: U8) -> None:
        """Fill ``rows``, [n, row bytes], from row ``first`` on; outer dimensions are concatenated."""

    @abstractmethod
    def parts(self) -> Iterator[StoredTensor]:
        """Yield the stored tensors that it reads."""

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        """Fill ``out`` with values from ``start`` on; see ``Expression``."""
        columns = self.shape[-1]
        width, step = value_bytes(self.type, columns), max(1, PIECE // columns)
        row, skip = divmod(start, columns)
        skipped_bytes, position = value_bytes(self.type, skip), 0
        while position < out.size:
            if skipped_bytes or out.size - position < width:
                row_buffer = np.empty((1, width), np.uint8)
                self.fill(row, row_buffer)
                piece = row_buffer[0, skipped_bytes : skipped_bytes + out.size - position]
                out[position : position + piece.size] = piece
                n = 1
                skipped_bytes = 0
                position = position + piece.size
            else:
                n = min(step, (out.size - position) // width)
                self.fill(row, out[position : position + n * width].reshape(n, width))
                position += n * width
            row += n


class Values(Protocol):
    """The values of a weight's codes, before scales."""

    def fill(self, first: int, x: F32) -> None:
        """Fill ``x``, [n, columns], with rows from ``first`` on."""

    def parts(self) -> Iterator[StoredTensor]: ...


@dataclass(frozen=True)
class Integers:
    """Integer codes minus ``offset``."""

    codes: Matrix
    offset: int = 0

    def fill(self, first: int, x: F32) -> None:
        np.copyto(x, self.codes.rows(first, len(x)), casting="unsafe")
        if self.offset:
            x -= np.float32(self.offset)

    def parts(self) -> Iterator[StoredTensor]:
        return self.codes.parts()


@dataclass(frozen=True)
class Float8:
    """8-bit floats, of a dtype of safetensors."""

    codes: Matrix
    dtype: str

    def fill(self, first: int, x: F32) -> None:
        codes = self.codes.rows(first, len(x)).view(np.uint8)
        _look_up(codes, _pairs(self.dtype), np.asarray(float8_values(self.dtype)), x)

    def parts(self) -> Iterator[StoredTensor]:
        return self.codes.parts()


@dataclass(frozen=True)
class Float4:
    """E2M1, two per byte, the first in the low half."""

    codes: Matrix

    def fill(self, first: int, x: F32) -> None:
        codes = self.codes.rows(first, len(x)).view(np.uint8)
        _HALVES.take(codes.reshape(-1), out=x.reshape(-1).view(np.uint64), mode="clip")

    def parts(self) -> Iterator[StoredTensor]:
        return self.codes.parts()


#: The values of E2M1.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
#: The values of a byte of two codes, as two float32 in 64 bits.
_HALVES = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=1).reshape(-1).view(np.uint64)


@lru_cache
def _pairs(dtype: str) -> npt.NDArray[np.uint64]:
    """Return a table of the values of two codes, indexed by both as one number: two float32 in 64 bits."""
    values = np.asarray(float8_values(dtype))
    return np.stack([np.tile(values, 256), np.repeat(values, 256)], axis=1).reshape(-1).view(np.uint64)


def _look_up(codes: U8, pairs: npt.NDArray[np.uint64], table: F32, x: F32) -> None:
    """Write the value of each code, two at a time."""
    if codes.size % 2 == 0 and x.flags.c_contiguous:
        pairs.take(codes.reshape(-1).view(np.uint16), out=x.reshape(-1).view(np.uint64), mode="clip")
    else:
        x[...] = table[codes]


@dataclass(frozen=True)
class Step:
    """Values and the cells of their blocks: ``operation`` is subtract, multiply or divide.

    A cell applies to ``width`` columns or, with ``index`` (act order), to the columns in this tensor.
    """

    operation: str
    grid: Grid
    width: int
    index: StoredTensor | None = None

    def apply(self, first: int, x: F32) -> None:
        """Apply the step to ``x``, [n, columns], the rows from ``first`` on."""
        operation: Any = getattr(np, self.operation)
        n, columns = x.shape
        cells = self.grid.read(first, n)
        if self.operation == "divide" and not cells.all():
            raise fail(self.grid.tensor, "a scale is 0, but values are divided by it")
        if self.index is not None:
            operation(x, cells.take(group_index(self.index, columns, cells.shape[1]), axis=1, mode="clip"), out=x)
        elif cells.shape[1] == 1:
            operation(x, cells, out=x)
        elif cells.shape[1] * self.width == columns:
            blocks = x.reshape(n, -1, self.width)
            operation(blocks, cells[:, :, None], out=blocks)
        else:
            operation(x, np.repeat(cells, self.width, axis=1)[:, :columns], out=x)

    def parts(self) -> Iterator[StoredTensor]:
        yield from self.grid.parts()
        if self.index is not None:
            yield self.index


def group_index(t: StoredTensor, columns: int, groups: int) -> I64:
    """Return the group of each column (g_idx). Raises FormatError."""
    if t.shape != (columns,) or t.dtype not in ("I32", "I64"):
        raise fail(t, f"{t.dtype} {list(t.shape)}, not the groups of {columns} columns")
    index: I64 = read_all(t).astype(np.int64)
    if index.size and (index.min() < 0 or index.max() >= groups):
        raise fail(t, f"its groups are {int(index.min())} .. {int(index.max())}, but there are {groups}")
    return index


@dataclass(frozen=True)
class Scaled(RowWise):
    """Floats: values and the steps that scale them."""

    shape: tuple[int, ...]
    values: Values
    steps: tuple[Step, ...]

    @property
    def type(self) -> TensorType:
        return TYPE_F32

    def fill(self, first: int, rows: U8) -> None:
        x = rows.view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            self.values.fill(first, x)
            for step in self.steps:
                step.apply(first, x)

    def parts(self) -> Iterator[StoredTensor]:
        yield from self.values.parts()
        for step in self.steps:
            yield from step.parts()

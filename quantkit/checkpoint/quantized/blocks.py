"""Codes and scales repacked into ggml's blocks without changing a value.

``MXFP4`` and ``NVFP4`` as convert_hf_to_gguf.py writes them; ``Q4_0`` and ``Q8_0`` of symmetric integers, which it does
not write. Each has the floats it represents (``floats``), for use where blocks are not possible.

NVFP4 also has a scale of the whole tensor, which a GGUF file stores as a separate tensor: see ``scale_tensors``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.checkpoint.expressions import F32, Expression
from quantkit.checkpoint.quantized.matrices import Grid, Matrix, fail
from quantkit.checkpoint.quantized.rows import Float4, RowWise, Scaled, Step
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType, type_by_name

_MXFP4, _NVFP4, _Q4_0, _Q8_0 = (type_by_name(name) for name in ("MXFP4", "NVFP4", "Q4_0", "Q8_0"))
_LOW = 0x0F0F0F0F0F0F0F0F


def _reorder_nibbles(codes: U8, group: int) -> U8:
    """Return nibbles [blocks, bytes] in ggml's order: of ``group`` values first half low, second half high.

    They are stored in order, two per byte: byte i of a group has values 2 i and 2 i + 1.
    """
    word: npt.DTypeLike = np.uint64 if group == 32 else np.uint32
    halves = codes.reshape(-1).view(word).reshape(-1, 2)
    first = halves[:, 0]
    second = halves[:, 1]
    low = np.array(_LOW & np.iinfo(word).max, word)
    even = (second & low) << np.array(4, word)
    even |= first & low
    odd = (first >> np.array(4, word)) & low
    odd |= second & ~low
    interleaved = odd.view(np.uint8).astype(np.uint16)
    interleaved <<= 8
    interleaved |= even.view(np.uint8)
    return np.asarray(interleaved.view(np.uint8))


@dataclass(frozen=True)
class Mxfp4(RowWise):
    """MXFP4: one exponent byte per 32 values; ``codes`` [rows, columns / 2] and ``scales`` as bytes."""

    shape: tuple[int, ...]
    codes: Matrix
    scales: Matrix

    @property
    def type(self) -> TensorType:
        return _MXFP4

    def fill(self, first: int, rows: U8) -> None:
        n = len(rows)
        blocks = rows.view([("scale", "u1"), ("codes", "V16")])
        scales = self.scales.rows(first, n).view(np.uint8)
        if (scales == 255).any():
            raise fail(next(self.scales.parts()), "a scale is NaN")
        blocks["scale"] = scales
        blocks["codes"] = _reorder_nibbles(self.codes.rows(first, n).view(np.uint8), 32).view("V16").reshape(n, -1)

    @property
    def floats(self) -> Expression:
        grid = Grid(self.scales, 1, self.codes.shape[0], exponents=True)
        return Scaled(self.shape, Float4(self.codes), (Step("multiply", grid, 32),))

    def parts(self) -> Iterator[StoredTensor]:
        yield from self.codes.parts()
        yield from self.scales.parts()


@dataclass(frozen=True)
class Outer:
    """A number stored for a whole tensor, or for each of its matrices."""

    values: tuple[float, ...]
    tensor: StoredTensor | None = None


@dataclass(frozen=True)
class Nvfp4(RowWise):
    """NVFP4: an 8-bit float (E4M3) per 16 values, and ``scale`` for all; ``input_scale`` is for activations."""

    shape: tuple[int, ...]
    codes: Matrix
    scales: Matrix
    scale: Outer
    input_scale: Outer

    @property
    def type(self) -> TensorType:
        return _NVFP4

    def fill(self, first: int, rows: U8) -> None:
        n = len(rows)
        blocks = rows.view([("scales", "V4"), ("codes", "V32")])
        scales = self.scales.rows(first, n).view(np.uint8) & 0x7F
        if (scales == 0x7F).any():
            raise fail(next(self.scales.parts()), "a scale is NaN")
        blocks["scales"] = scales.view("V4")
        blocks["codes"] = _reorder_nibbles(self.codes.rows(first, n).view(np.uint8), 16).view("V32").reshape(n, -1)

    @property
    def floats(self) -> Expression:
        return nvfp4_floats(self.shape, self.codes, self.scales, self.scale)

    def parts(self) -> Iterator[StoredTensor]:
        yield from self.codes.parts()
        yield from self.scales.parts()
        yield from (outer.tensor for outer in (self.scale, self.input_scale) if outer.tensor is not None)


def nvfp4_floats(shape: tuple[int, ...], codes: Matrix, scales: Matrix, scale: Outer) -> Scaled:
    """Return the values of NVFP4: code times scale, which is exact, times the scale of all."""
    n = codes.shape[0]
    per_scale = n // len(scale.values)
    outer = Grid(Numbers(scale.values, scale.tensor), per_scale, per_scale)
    steps = Step("multiply", Grid(scales, 1, n), 16), Step("multiply", outer, shape[-1])
    return Scaled(shape, Float4(codes), steps)


@dataclass(frozen=True)
class Numbers:
    """A matrix of one column, of known numbers; ``tensor``: their source."""

    values: tuple[float, ...]
    tensor: StoredTensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), 1

    def rows(self, first: int, n: int) -> F32:
        return np.array(self.values[first : first + n], np.float32)[:, None]

    def parts(self) -> Iterator[StoredTensor]:
        if self.tensor is not None:
            yield self.tensor


@dataclass(frozen=True)
class Q4Rows(RowWise):
    """Q4_0 of 4-bit codes minus 8, with a scale per ``group`` columns."""

    shape: tuple[int, ...]
    codes: Matrix
    scales: Grid
    group: int
    floats: Expression

    @property
    def type(self) -> TensorType:
        return _Q4_0

    def fill(self, first: int, rows: U8) -> None:
        n = len(rows)
        blocks = rows.view([("scale", "<f2"), ("codes", "V16")])
        blocks["scale"] = _half_scales(self.scales, first, blocks.shape, self.group)
        codes = self.codes.rows(first, n).view(np.uint8)[:, : self.shape[-1] // 2]
        blocks["codes"] = _reorder_nibbles(np.ascontiguousarray(codes), 32).view("V16").reshape(n, -1)

    def parts(self) -> Iterator[StoredTensor]:
        return self.floats.parts()


@dataclass(frozen=True)
class Q8Rows(RowWise):
    """Q8_0 of 8-bit codes minus ``offset``, with a scale per ``group`` columns."""

    shape: tuple[int, ...]
    codes: Matrix
    offset: int
    scales: Grid
    group: int
    floats: Expression

    @property
    def type(self) -> TensorType:
        return _Q8_0

    def fill(self, first: int, rows: U8) -> None:
        n = len(rows)
        blocks = rows.view([("scale", "<f2"), ("codes", "V32")])
        blocks["scale"] = _half_scales(self.scales, first, blocks.shape, self.group)
        codes = self.codes.rows(first, n).view(np.uint8)[:, : self.shape[-1]]
        blocks["codes"] = (codes - np.uint8(self.offset)).view("V32")

    def parts(self) -> Iterator[StoredTensor]:
        return self.floats.parts()


def _half_scales(scales: Grid, first: int, blocks: Sequence[int], group: int) -> npt.NDArray[np.float16]:
    """Return the scales of [rows, blocks] of 32 as float16, which they fit."""
    n, blocks_per_row = blocks
    cells = scales.read(first, n)
    halves = cells.astype(np.float16)  # exact, as scales_fit has checked
    return halves if cells.shape[1] == blocks_per_row else np.repeat(halves, group // 32, axis=1)[:, :blocks_per_row]


def fits_half(values: F32) -> bool:
    """Return whether all values are exact in float16."""
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def scales_fit(grid: Grid) -> bool:
    """Return whether all scales of a grid are exact in float16; only wider types are read."""
    if grid.tensor.dtype == "F16":
        return True
    rows, columns = grid.cells.shape
    step = max(1, (1 << 18) // max(1, columns))
    plain = Grid(grid.cells, 1, rows)
    return all(fits_half(plain.read(start, min(step, rows - start))) for start in range(0, rows, step))


def as_blocks(floats: Scaled, bits: int, codes: Matrix, offset: int, scales: Grid, group: int) -> Expression | None:
    """Return symmetric integers as ggml blocks with their scales; None if that changes values.

    Args:
        floats: the floats they represent.
        bits: of a code: 4 (``codes`` are as they are packed, two a byte) or 8.
        codes: by rows.
        offset: the code of zero.
        scales: by rows.
        group: columns of a scale.
    """
    columns = floats.shape[-1]
    if columns % 32 or (group % 32 and scales.cells.shape[1] > 1) or not scales_fit(scales):
        return None
    if bits == 4 and offset == 8:
        return Q4Rows(floats.shape, codes, scales, group, floats)
    return Q8Rows(floats.shape, codes, offset, scales, group, floats) if bits == 8 else None

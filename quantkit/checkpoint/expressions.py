"""Tensors as functions of stored ones: small trees, evaluated for any range of their values.

An expression has a shape, outermost first, and a type; ``read`` returns its values ``[start, start + n)``, counted row
by row through the whole tensor, and reads only the stored bytes it needs. Most only move bytes, in their stored type;
those that compute use float32 like torch, and round to float16 if the operand is float16 (bfloat16 becomes float32
before any computation, as in convert_hf_to_gguf.py).

A new one needs ``shape``, ``type`` and ``read``, and is a frozen dataclass, so that it can be passed to any process.
Types with blocks (MXFP4 that is only moved) also work; values are then requested in whole rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quantkit.checkpoint import vector_math
from quantkit.errors import FormatError
from quantkit.formats.ranges import U8, read_range
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType, type_by_name

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

#: Number of values computed at a time, which bounds temporary memory.
PIECE = 1 << 17
#: Number of values from which on compiled code rounds them to F16.
_LONG = PIECE

TYPE_F32, TYPE_F16, TYPE_BF16 = (type_by_name(name) for name in ("F32", "F16", "BF16"))
#: Dtypes of safetensors whose bytes are those of a GGUF type.
_SAME_BYTES = {"F32": TYPE_F32, "F16": TYPE_F16, "BF16": TYPE_BF16}
#: Dtypes that become float32, with numpy's dtype.
_NUMBERS = {"F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1"}


class Expression(Protocol):
    """A tensor that can be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions, outermost first; () for a scalar."""

    @property
    def type(self) -> TensorType:
        """The type of the values that ``read`` returns."""

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        """Fill ``out`` with values from ``start`` on; ``readahead`` more bytes will be read next."""

    def parts(self) -> Iterator[StoredTensor]:
        """Yield the stored tensors that it reads."""


def size_of(x: Expression) -> int:
    """Return the number of values."""
    return math.prod(x.shape)


def row_of(x: Expression) -> int:
    """Return the values of a row."""
    return x.shape[-1] if x.shape else 1


def value_bytes(t: TensorType, n: int) -> int:
    """Return the bytes of ``n`` values of a type, a multiple of its block."""
    return n // t.block * t.block_bytes


def values_in(t: TensorType, nbytes: int) -> int:
    """Return the number of values of a type in a number of bytes."""
    return nbytes // t.block_bytes * t.block


def read_values(x: Expression, start: int, n: int) -> U8:
    """Return ``n`` values from ``start`` on as bytes."""
    out = np.empty(value_bytes(x.type, n), np.uint8)
    x.read(start, out)
    return out


def read_f32(x: Expression, start: int, n: int) -> F32:
    """Return ``n`` values from ``start`` on as float32."""
    x = as_floats(x)
    return as_f32(x.type, read_values(x, start, n))


def as_f32(t: TensorType, data: U8) -> F32:
    """Return F32, F16 or BF16 values as float32."""
    if t is TYPE_F32:
        return data.view(np.float32)
    if t is TYPE_F16:
        return data.view(np.float16).astype(np.float32)
    wide = data.view(np.uint16).astype(np.uint32)
    np.left_shift(wide, 16, out=wide)
    return wide.view(np.float32)


def from_f32(t: TensorType, values: F32, out: U8) -> None:
    """Write float32 values as F32, F16 or BF16, to nearest even; NaN stays NaN, as in gguf-py's quants.py."""
    if t is TYPE_F32:
        out.view(np.float32)[...] = values
    elif t is TYPE_F16:
        with np.errstate(over="ignore", invalid="ignore"):
            if values.size >= _LONG and not math.isnan(values.sum(dtype=np.float64)):
                _round_to_f16(values, out)
            else:
                out.view(np.float16)[...] = values
    else:
        bits = np.ascontiguousarray(values).view(np.uint32)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        if nan.any():
            rounded = np.where(nan, (bits >> 16) | 64, rounded)
        out.view(np.uint16)[...] = rounded


def _round_to_f16(values: F32, out: U8) -> None:
    """Write values without NaN as F16, many times faster than numpy."""
    from quantkit.kernels.cpu.encode.floats import encode_f16

    encode_f16(values.reshape(1, -1), np.empty((0, 0), np.float32), out.reshape(1, -1), 0, 1)


@dataclass(frozen=True)
class Stored:
    """A stored tensor; integers, F64 and float8 are converted to float32."""

    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def type(self) -> TensorType:
        return _SAME_BYTES.get(self.tensor.dtype, TYPE_F32)

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        t = self.tensor
        if t.dtype in _SAME_BYTES:
            within = (t.offset, t.offset + t.nbytes)
            read_range(t.path, out, t.offset + value_bytes(self.type, start), readahead, within)
            return
        values = out.view(np.float32)
        for position in range(0, values.size, PIECE):
            piece = values[position : position + PIECE]
            piece[...] = self.raw(start + position, piece.size)

    def raw(self, start: int, n: int) -> npt.NDArray[Any]:
        """Return ``n`` values as they are stored: floats, integers; float8 decoded to float32."""
        t = self.tensor
        table = float8_values(t.dtype)
        dtype = np.dtype("u1" if table is not None else _NUMBERS.get(t.dtype, "V"))
        if dtype.kind == "V":
            raise FormatError(f"{t.path}: tensor {t.name} is {t.dtype}, which is not supported", "QK-E110")
        data = np.empty(n * dtype.itemsize, np.uint8)
        read_range(t.path, data, t.offset + start * dtype.itemsize, within=(t.offset, t.offset + t.nbytes))
        values = data.view(dtype)
        return values if table is None else table[values]

    def parts(self) -> Iterator[StoredTensor]:
        yield self.tensor


def float8_values(dtype: str) -> F32 | None:
    """Return the values of the 256 codes of a float8 dtype, float32 [256]; None for another dtype."""
    code = np.arange(256, dtype=np.int64)
    if dtype == "F8_E8M0":
        return np.where(code == 255, np.nan, np.ldexp(1.0, code - 127)).astype(np.float32)
    if dtype not in ("F8_E4M3", "F8_E5M2"):
        return None
    bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    exponent, mantissa = (code >> bits) & ((1 << (7 - bits)) - 1), code & ((1 << bits) - 1)
    implicit_bit = np.where(exponent > 0, 1 << bits, 0)
    value = np.ldexp((implicit_bit + mantissa).astype(np.float64), np.maximum(exponent, 1) - bias - bits)
    if dtype == "F8_E4M3":
        value[(code & 0x7F) == 0x7F] = np.nan
    else:
        value[(exponent == 31) & (mantissa == 0)] = np.inf
        value[(exponent == 31) & (mantissa > 0)] = np.nan
    signed: F32 = np.where(code & 0x80, -value, value).astype(np.float32)
    return signed


@dataclass(frozen=True)
class Constant:
    """Values that are computed, not stored: float32."""

    values: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.values),)

    @property
    def type(self) -> TensorType:
        return TYPE_F32

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        n = out.size // 4
        with np.errstate(over="ignore"):
            out.view(np.float32)[...] = np.array(self.values[start : start + n], np.float32)

    def parts(self) -> Iterator[StoredTensor]:
        yield from ()


@dataclass(frozen=True, eq=False)
class Array:
    """An array in memory: float32."""

    values: F32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def type(self) -> TensorType:
        return TYPE_F32

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        out.view(np.float32)[...] = self.values.reshape(-1)[start : start + out.size // 4]

    def parts(self) -> Iterator[StoredTensor]:
        yield from ()


@dataclass(frozen=True)
class Zeros:
    """Zeros: float32."""

    shape: tuple[int, ...]
    type: TensorType = TYPE_F32

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        out[...] = 0

    def parts(self) -> Iterator[StoredTensor]:
        yield from ()


@dataclass(frozen=True)
class Shaped:
    """The same values in another shape."""

    x: Expression
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if math.prod(self.shape) != size_of(self.x):
            raise ValueError(f"{self.x.shape} cannot be reshaped to {self.shape}")

    @property
    def type(self) -> TensorType:
        return self.x.type

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        self.x.read(start, out, readahead)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


@dataclass(frozen=True)
class Concatenated:
    """Tensors concatenated along a dimension, or stacked along a new outermost one."""

    xs: tuple[Expression, ...]
    shape: tuple[int, ...]
    axis: int = 0

    @property
    def type(self) -> TensorType:
        types = {x.type for x in self.xs}
        return types.pop() if len(types) == 1 else TYPE_F32

    @cached_property
    def _sizes(self) -> list[int]:
        """The number of values of each tensor for one index of the outer dimensions."""
        outer = math.prod(self.shape[: self.axis])
        return [size_of(x) // outer for x in self.xs]

    @cached_property
    def _ends(self) -> I64:
        return np.cumsum(self._sizes)

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        own_type, position = self.type, 0
        while position < out.size:
            turn, place = divmod(start, int(self._ends[-1]))
            i = int(np.searchsorted(self._ends, place, "right"))
            x = self.xs[i]
            end = int(self._ends[i])
            size = self._sizes[i]
            n = min(end - place, values_in(own_type, out.size - position))
            piece = out[position : position + value_bytes(own_type, n)]
            x_start = turn * size + place - (end - size)
            if x.type is own_type:
                x.read(x_start, piece, readahead)
            else:
                from_f32(own_type, read_f32(x, x_start, n), piece)
            start, position = start + n, position + piece.size

    def parts(self) -> Iterator[StoredTensor]:
        for x in self.xs:
            yield from x.parts()


def stack(xs: Sequence[Expression]) -> Concatenated:
    """Return tensors of one shape as one with a new outermost dimension."""
    return Concatenated(_with_one_type(xs), (len(xs), *xs[0].shape))


def concatenate(xs: Sequence[Expression], axis: int = 0) -> Concatenated:
    """Concatenate tensors along ``axis``, counted from the outermost dimension."""
    first = xs[0].shape
    one_scale = len({getattr(x, "scale", None) for x in xs}) == 1  # NVFP4 has one scale for a whole tensor
    xs = _with_one_type(xs) if one_scale else tuple(map(as_floats, xs))
    return Concatenated(xs, (*first[:axis], sum(x.shape[axis] for x in xs), *first[axis + 1 :]), axis)


def _with_one_type(xs: Sequence[Expression]) -> tuple[Expression, ...]:
    """Return blocks as floats, unless all have the same."""
    return tuple(xs) if len({x.type for x in xs}) == 1 else tuple(map(as_floats, xs))


def as_floats(x: Expression) -> Expression:
    """Return ``x`` with blocks (``quantized.blocks``) replaced by the floats they represent."""
    if x.type.block == 1 or not is_dataclass(x):
        return x
    floats = getattr(x, "floats", None)
    if floats is not None:
        result: Expression = floats
        return result
    inner: dict[str, Any] = {}
    for item in fields(x):
        value = getattr(x, item.name)
        if hasattr(value, "parts"):
            inner[item.name] = as_floats(value)
        elif item.name == "xs":
            inner[item.name] = tuple(map(as_floats, value))
    return replace(x, **inner)


@dataclass(frozen=True)
class Gathered:
    """Slices along one dimension, chosen by index: parts, permutations, every other row.

    ``axis`` counts from the outermost; ``index``: the selected slices, in order (see ``take``).
    """

    x: Expression
    axis: int
    index: tuple[range, ...]

    @cached_property
    def _index(self) -> I64:
        return np.concatenate([np.arange(r.start, r.stop, r.step) for r in self.index])

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[: self.axis], sum(map(len, self.index)), *self.x.shape[self.axis + 1 :])

    @property
    def type(self) -> TensorType:
        return self.x.type

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        """Read whole slices if a range of values is aligned to them, else single values."""
        inner = math.prod(self.x.shape[self.axis + 1 :])
        n, had = len(self._index), self.x.shape[self.axis]
        count = values_in(self.type, out.size)
        if start % inner or count % inner:
            self._read_cut(start, count, inner, out)
            return
        width = value_bytes(self.type, inner)
        position = 0
        slice_no = start // inner
        while position < out.size:
            outer, first = divmod(slice_no, n)
            count_now = min(n - first, (out.size - position) // width)
            slices = self._index[first : first + count_now]
            self._slices(
                outer * had, slices, inner, out[position : position + count_now * width].reshape(count_now, width)
            )
            slice_no, position = slice_no + count_now, position + count_now * width

    def _read_cut(self, start: int, count: int, inner: int, out: U8) -> None:
        first, last = start // inner * inner, -(-(start + count) // inner) * inner
        aligned = np.empty(value_bytes(self.type, last - first), np.uint8)
        self.read(first, aligned)
        begin = value_bytes(self.type, start - first)
        out[...] = aligned[begin : begin + out.size]

    def _slices(self, base: int, slices: I64, inner: int, rows: U8) -> None:
        """Read ``slices`` relative to ``base``: adjacent ones in one read, close ones with the gaps between them."""
        low, high = int(slices.min()), int(slices.max()) + 1
        if high - low == len(slices) and (np.diff(slices) == 1).all():
            self.x.read((base + low) * inner, rows.reshape(-1))
            return
        if high - low <= 4 * len(slices) or rows.shape[1] < 4096:
            span = np.empty((high - low, rows.shape[1]), np.uint8)
            self.x.read((base + low) * inner, span.reshape(-1))
            np.take(span, slices - low, axis=0, out=rows)
            return
        for row, number in zip(rows, slices.tolist(), strict=True):
            self.x.read((base + number) * inner, row)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


def take(x: Expression, axis: int, *index: range) -> Expression:
    """Return slices of ``x`` along ``axis`` (negative from the innermost)."""
    axis %= len(x.shape)
    if x.type.block > 1 and axis == len(x.shape) - 1:
        return _take_blocks(x, index)
    return Gathered(x, axis, index)


def _take_blocks(x: Expression, index: tuple[range, ...]) -> Expression:
    """Return columns of a tensor of blocks: whole blocks unchanged, others decoded to floats."""
    axis, unit = len(x.shape) - 1, math.gcd(x.shape[-1], *(end for r in index for end in (r.start, r.stop)))
    if unit % x.type.block or any(r.step != 1 for r in index):
        return Gathered(as_floats(x), axis, index)
    runs = Shaped(x, (*x.shape[:-1], x.shape[-1] // unit, unit))
    gathered = Gathered(runs, axis, tuple(range(r.start // unit, r.stop // unit) for r in index))
    return Shaped(gathered, (*gathered.shape[:-2], gathered.shape[-2] * unit))


def chunk(x: Expression, axis: int, number: int, parts: int) -> Expression:
    """Return one of several equal parts along ``axis``."""
    n = x.shape[axis] // parts
    return take(x, axis, range(number * n, (number + 1) * n))


def permute_heads(x: Expression, heads: int) -> Expression:
    """Undo the permutation of rotary rows in transformers' Llama (LlamaModel.permute), outermost."""
    rows = x.shape[0] // heads
    pairs = [range(h * rows + i, (h + 1) * rows, rows // 2) for h in range(heads) for i in range(rows // 2)]
    return Gathered(x, 0, tuple(pairs))


def restore_heads(x: Expression, heads: int) -> Expression:
    """Permute rotary rows as transformers' Llama has them: undoes ``permute_heads``."""
    rows = x.shape[0] // heads
    return Gathered(x, 0, tuple(range(h * rows + j, (h + 1) * rows, 2) for h in range(heads) for j in (0, 1)))


@dataclass(frozen=True)
class Transposed:
    """The last two dimensions exchanged; of blocks, the floats they represent."""

    x: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-2], self.x.shape[-1], self.x.shape[-2])

    @property
    def type(self) -> TensorType:
        return self._plain.type

    @cached_property
    def _plain(self) -> Expression:
        return as_floats(self.x)

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        item = self.type.block_bytes
        rows, columns = self.x.shape[-2:]
        values = out.view(f"V{item}")
        position = 0
        while position < values.size:
            matrix, offset = divmod(start, rows * columns)
            first, skip = divmod(offset, rows)
            count = min(rows * columns - offset, values.size - position)
            last = -(-(skip + count) // rows) + first
            block = np.empty((last - first, rows), values.dtype)
            step = max(1, PIECE // columns)
            for row in range(0, rows, step):
                n = min(step, rows - row)
                piece = read_values(self._plain, (matrix * rows + row) * columns, n * columns).view(values.dtype)
                block[:, row : row + n] = piece.reshape(n, columns)[:, first:last].T
            values[position : position + count] = block.reshape(-1)[skip : skip + count]
            start, position = start + count, position + count

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


def _plus_one(x: F32) -> F32:
    return x + np.float32(1)


def _minus_one(x: F32) -> F32:
    return x - np.float32(1)


#: The largest argument of vector_math.exp; no A_log is beyond it.
_MAX_EXPONENT = 87


def _exp(x: F32) -> F32:
    """Return exp(x) with torch's bits."""
    usual = np.abs(x) < _MAX_EXPONENT
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64)).astype(np.float32)
    result: F32 = np.where(usual, vector_math.exp(np.where(usual, x, np.float32(0))), exact)
    return result


def _negative_exp(x: F32) -> F32:
    return -_exp(x)


def _invert(x: F32, estimate: npt.NDArray[np.float64], function: Callable[[F32], F32]) -> F32:
    """Return x0 near ``estimate`` with ``function``(x0) == ``x``; of several the one of fewest significant bits."""
    result = estimate.astype(np.float32)
    shortest, bits = result, result.view(np.uint32)
    for dropped in range(1, 23):
        short = ((bits + (1 << dropped - 1)) >> dropped << dropped).view(np.float32)
        shortest = np.where(function(short) == x, short, shortest)
    return shortest


def _log_of_negative(x: F32) -> F32:
    """Return the argument that ``_negative_exp`` maps to ``x``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _invert(x, np.log(-x.astype(np.float64)), _negative_exp)


def _log(x: F32) -> F32:
    """Return the argument that ``_exp`` maps to ``x``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _invert(x, np.log(x.astype(np.float64)), _exp)


def _negative(x: F32) -> F32:
    return -x


#: The functions of ``Mapped``, by name.
FUNCTIONS: dict[str, Callable[[F32], F32]] = {
    "plus one": _plus_one,
    "minus one": _minus_one,
    "negative exp": _negative_exp,
    "log of negative": _log_of_negative,
    "exp": _exp,
    "log": _log,
    "negative": _negative,
}


@dataclass(frozen=True)
class ByValue(ABC):
    """An elementwise function of ``x``, in float32; F16 stays F16."""

    x: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def type(self) -> TensorType:
        return TYPE_F16 if self.x.type is TYPE_F16 else TYPE_F32

    @abstractmethod
    def compute(self, x: F32) -> F32:
        """Return the function's values at ``x``."""

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        size = self.type.block_bytes
        for position in range(0, out.size // size, PIECE):
            piece = out[position * size : (position + PIECE) * size]
            from_f32(self.type, self.compute(read_f32(self.x, start + position, piece.size // size)), piece)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


@dataclass(frozen=True)
class Mapped(ByValue):
    """A function of each value, by its name in ``FUNCTIONS``."""

    function: str

    def compute(self, x: F32) -> F32:
        return FUNCTIONS[self.function](x)


@dataclass(frozen=True)
class Multiplied(ByValue):
    """Each value times ``factor``, a float32."""

    factor: float

    def compute(self, x: F32) -> F32:
        return x * np.float32(self.factor)


@dataclass(frozen=True)
class Offset(ByValue):
    """Each value plus ``value``, a float32."""

    value: float

    def compute(self, x: F32) -> F32:
        return x + np.float32(self.value)


@dataclass(frozen=True)
class OffsetInverse(ByValue):
    """The operand of ``Offset``."""

    value: float

    def compute(self, x: F32) -> F32:
        estimate = x.astype(np.float64) - np.float32(self.value)
        return _invert(x, estimate, lambda values: values + np.float32(self.value))


@dataclass(frozen=True)
class Product:
    """Values of two tensors multiplied: as many of each, float32, in one dimension."""

    x: Expression
    y: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return (size_of(self.x),)

    @property
    def type(self) -> TensorType:
        return TYPE_F32

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        values = out.view(np.float32)
        for position in range(0, values.size, PIECE):
            n = min(PIECE, values.size - position)
            values[position : position + n] = read_f32(self.x, start + position, n) * read_f32(
                self.y, start + position, n
            )

    def parts(self) -> Iterator[StoredTensor]:
        yield from self.x.parts()
        yield from self.y.parts()


@dataclass(frozen=True)
class Sum:
    """The sum of tensors of one shape, from the first on, in float32; of F16, rounded to it at the end."""

    xs: tuple[Expression, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.xs[0].shape

    @property
    def type(self) -> TensorType:
        return TYPE_F16 if all(x.type is TYPE_F16 for x in self.xs) else TYPE_F32

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        size = self.type.block_bytes
        for position in range(0, out.size // size, PIECE):
            piece = out[position * size : (position + PIECE) * size]
            total = np.zeros(piece.size // size, np.float32)
            for x in self.xs:
                total += read_f32(x, start + position, total.size)
            from_f32(self.type, total, piece)

    def parts(self) -> Iterator[StoredTensor]:
        for x in self.xs:
            yield from x.parts()


@dataclass(frozen=True)
class Cast:
    """The values as F32, F16 or BF16."""

    x: Expression
    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        size = self.type.block_bytes
        for position in range(0, out.size // size, PIECE):
            piece = out[position * size : (position + PIECE) * size]
            from_f32(self.type, read_f32(self.x, start + position, piece.size // size), piece)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


def cast(x: Expression, t: TensorType) -> Expression:
    """Return ``x`` with values of a type."""
    return x if x.type is t else Cast(x, t)

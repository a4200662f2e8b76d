"""Tensors as they are made from stored ones: small trees, evaluated for any run of their values.

An expression has a shape, outermost first, and a type; ``read`` gives values ``[start, start + n)`` of it, counted row
by row through the whole tensor, and touches no more stored bytes than it must. Most only move bytes, in the type they
were stored in; those that compute do it in float32 as torch does, and round to float16 where the operand is that
(bfloat16 becomes float32 before anything is computed, as in convert_hf_to_gguf.py).

A new one needs ``shape``, ``type`` and ``read``, and is a frozen dataclass, so that it can be passed to any process.
Types with blocks (MXFP4 that is only moved) work too: values are then asked for in whole rows.
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

from quantkit.errors import FormatError
from quantkit.formats.ranges import U8, read_range
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType, type_by_name

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

#: Values that are computed at a time, which bounds temporary memory.
PIECE = 1 << 17

TYPE_F32, TYPE_F16, TYPE_BF16 = (type_by_name(name) for name in ("F32", "F16", "BF16"))
#: Dtypes of safetensors whose bytes are those of a GGUF type.
_SAME = {"F32": TYPE_F32, "F16": TYPE_F16, "BF16": TYPE_BF16}
#: Those that become float32, by numpy's dtype.
_NUMBERS = {"F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1"}


class Expression(Protocol):
    """A tensor that can be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions, outermost first; () for a scalar."""

    @property
    def type(self) -> TensorType:
        """The type of the values as ``read`` gives them."""

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        """Fill ``into`` with values from ``start`` on; ``ahead`` bytes of them will be wanted next."""

    def parts(self) -> Iterator[StoredTensor]:
        """Yield the stored tensors it is made of."""


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
    """Return how many values of a type are in so many bytes."""
    return nbytes // t.block_bytes * t.block


def read_values(x: Expression, start: int, n: int) -> U8:
    """Return ``n`` values from ``start`` on as bytes."""
    into = np.empty(value_bytes(x.type, n), np.uint8)
    x.read(start, into)
    return into


def read_f32(x: Expression, start: int, n: int) -> F32:
    """Return ``n`` values from ``start`` on as float32."""
    x = floats(x)
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


def from_f32(t: TensorType, values: F32, into: U8) -> None:
    """Write float32 values as F32, F16 or BF16, to nearest even; NaN stays NaN, as in gguf-py's quants.py."""
    if t is TYPE_F32:
        into.view(np.float32)[...] = values
    elif t is TYPE_F16:
        with np.errstate(over="ignore"):
            into.view(np.float16)[...] = values
    else:
        bits = np.ascontiguousarray(values).view(np.uint32)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        if nan.any():
            rounded = np.where(nan, (bits >> 16) | 64, rounded)
        into.view(np.uint16)[...] = rounded


@dataclass(frozen=True)
class Stored:
    """A tensor as it is in its file; integers, F64 and float8 become float32."""

    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def type(self) -> TensorType:
        return _SAME.get(self.tensor.dtype, TYPE_F32)

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        t = self.tensor
        if t.dtype in _SAME:
            within = (t.offset, t.offset + t.nbytes)
            read_range(t.path, into, t.offset + value_bytes(self.type, start), ahead, within)
            return
        values = into.view(np.float32)
        for at in range(0, values.size, PIECE):
            piece = values[at : at + PIECE]
            piece[...] = self.raw(start + at, piece.size)

    def raw(self, start: int, n: int) -> npt.NDArray[Any]:
        """Return ``n`` values as they are stored: floats, integers; float8 decoded to float32."""
        t = self.tensor
        table = float8_values(t.dtype)
        dtype = np.dtype("u1" if table is not None else _NUMBERS.get(t.dtype, "V"))
        if dtype.kind == "V":
            raise FormatError(f"{t.path}: tensor {t.name} is {t.dtype}, which is not read")
        data = np.empty(n * dtype.itemsize, np.uint8)
        read_range(t.path, data, t.offset + start * dtype.itemsize, within=(t.offset, t.offset + t.nbytes))
        found = data.view(dtype)
        return found if table is None else table[found]

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
    one = np.where(exponent > 0, 1 << bits, 0)
    value = np.ldexp((one + mantissa).astype(np.float64), np.maximum(exponent, 1) - bias - bits)
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

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        n = into.size // 4
        with np.errstate(over="ignore"):
            into.view(np.float32)[...] = np.array(self.values[start : start + n], np.float32)

    def parts(self) -> Iterator[StoredTensor]:
        yield from ()


@dataclass(frozen=True)
class Zeros:
    """Zeros: float32."""

    shape: tuple[int, ...]
    type: TensorType = TYPE_F32

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        into[...] = 0

    def parts(self) -> Iterator[StoredTensor]:
        yield from ()


@dataclass(frozen=True)
class Shaped:
    """The same values in another shape."""

    x: Expression
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if math.prod(self.shape) != size_of(self.x):
            raise ValueError(f"{self.x.shape} cannot have the shape {self.shape}")

    @property
    def type(self) -> TensorType:
        return self.x.type

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        self.x.read(start, into, ahead)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


@dataclass(frozen=True)
class Joined:
    """Tensors one behind the other along a dimension: concatenated, or of a new outermost dimension, stacked."""

    xs: tuple[Expression, ...]
    shape: tuple[int, ...]
    axis: int = 0

    @property
    def type(self) -> TensorType:
        types = {x.type for x in self.xs}
        return types.pop() if len(types) == 1 else TYPE_F32

    @cached_property
    def _sizes(self) -> list[int]:
        """How many values each gives before the next one's turn."""
        outer = math.prod(self.shape[: self.axis])
        return [size_of(x) // outer for x in self.xs]

    @cached_property
    def _ends(self) -> I64:
        return np.cumsum(self._sizes)

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        mine, at = self.type, 0
        while at < into.size:
            turn, place = divmod(start, int(self._ends[-1]))
            i = int(np.searchsorted(self._ends, place, "right"))
            x, end, size = self.xs[i], int(self._ends[i]), self._sizes[i]
            n = min(end - place, values_in(mine, into.size - at))
            piece = into[at : at + value_bytes(mine, n)]
            x_start = turn * size + place - (end - size)
            if x.type is mine:
                x.read(x_start, piece, ahead)
            else:
                from_f32(mine, read_f32(x, x_start, n), piece)
            start, at = start + n, at + piece.size

    def parts(self) -> Iterator[StoredTensor]:
        for x in self.xs:
            yield from x.parts()


def stacked(xs: Sequence[Expression]) -> Joined:
    """Return tensors of one shape as one with a new outermost dimension."""
    return Joined(_alike(xs), (len(xs), *xs[0].shape))


def joined(xs: Sequence[Expression], axis: int = 0) -> Joined:
    """Return tensors one behind the other along ``axis``, counted from the outermost dimension."""
    first = xs[0].shape
    same = len({getattr(x, "scale", None) for x in xs}) == 1  # NVFP4 has one for a whole tensor
    xs = _alike(xs) if same else tuple(map(floats, xs))
    return Joined(xs, (*first[:axis], sum(x.shape[axis] for x in xs), *first[axis + 1 :]), axis)


def _alike(xs: Sequence[Expression]) -> tuple[Expression, ...]:
    """Return blocks as floats, unless all have the same."""
    return tuple(xs) if len({x.type for x in xs}) == 1 else tuple(map(floats, xs))


def floats(x: Expression) -> Expression:
    """Return ``x`` with blocks (``quantized.blocks``) replaced by the floats that they stand for."""
    if x.type.block == 1 or not is_dataclass(x):
        return x
    own = getattr(x, "floats", None)
    if own is not None:
        found: Expression = own
        return found
    inner: dict[str, Any] = {}
    for each in fields(x):
        value = getattr(x, each.name)
        if hasattr(value, "parts"):
            inner[each.name] = floats(value)
        elif each.name == "xs":
            inner[each.name] = tuple(map(floats, value))
    return replace(x, **inner)


@dataclass(frozen=True)
class Gathered:
    """Slices along one dimension, chosen by index: parts, permutations, every other row.

    ``axis`` counts from the outermost; ``index`` holds which slices, in the order they are taken (see ``taken``).
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

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        """Read whole slices where a run of values is aligned to them, else single values."""
        inner = math.prod(self.x.shape[self.axis + 1 :])
        n, had = len(self._index), self.x.shape[self.axis]
        count = values_in(self.type, into.size)
        if start % inner or count % inner:
            self._read_cut(start, count, inner, into)
            return
        width, at, slice_no = value_bytes(self.type, inner), 0, start // inner
        while at < into.size:
            outer, first = divmod(slice_no, n)
            here = min(n - first, (into.size - at) // width)
            wanted = self._index[first : first + here]
            self._slices(outer * had, wanted, inner, into[at : at + here * width].reshape(here, width))
            slice_no, at = slice_no + here, at + here * width

    def _read_cut(self, start: int, count: int, inner: int, into: U8) -> None:
        first, last = start // inner * inner, -(-(start + count) // inner) * inner
        whole = np.empty(value_bytes(self.type, last - first), np.uint8)
        self.read(first, whole)
        begin = value_bytes(self.type, start - first)
        into[...] = whole[begin : begin + into.size]

    def _slices(self, base: int, wanted: I64, inner: int, rows: U8) -> None:
        """Read slices ``base + wanted``; neighbours at once, and near ones with what lies between."""
        low, high = int(wanted.min()), int(wanted.max()) + 1
        if high - low == len(wanted) and (np.diff(wanted) == 1).all():
            self.x.read((base + low) * inner, rows.reshape(-1))
            return
        if high - low <= 4 * len(wanted) or rows.shape[1] < 4096:
            span = np.empty((high - low, rows.shape[1]), np.uint8)
            self.x.read((base + low) * inner, span.reshape(-1))
            np.take(span, wanted - low, axis=0, out=rows)
            return
        for row, at in zip(rows, wanted.tolist(), strict=True):
            self.x.read((base + at) * inner, row)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


def taken(x: Expression, axis: int, *index: range) -> Expression:
    """Return slices of ``x`` along ``axis`` (negative from the innermost)."""
    axis %= len(x.shape)
    if x.type.block > 1 and axis == len(x.shape) - 1:
        return _taken_blocks(x, index)
    return Gathered(x, axis, index)


def _taken_blocks(x: Expression, index: tuple[range, ...]) -> Expression:
    """Return columns of a tensor of blocks: runs of whole blocks as such, others as floats."""
    axis, unit = len(x.shape) - 1, math.gcd(x.shape[-1], *(end for r in index for end in (r.start, r.stop)))
    if unit % x.type.block or any(r.step != 1 for r in index):
        return Gathered(floats(x), axis, index)
    runs = Shaped(x, (*x.shape[:-1], x.shape[-1] // unit, unit))
    found = Gathered(runs, axis, tuple(range(r.start // unit, r.stop // unit) for r in index))
    return Shaped(found, (*found.shape[:-2], found.shape[-2] * unit))


def chunk(x: Expression, axis: int, number: int, of: int) -> Expression:
    """Return one of several equal parts along ``axis``."""
    n = x.shape[axis] // of
    return taken(x, axis, range(number * n, (number + 1) * n))


def head_permuted(x: Expression, heads: int) -> Expression:
    """Undo the permutation of rotary rows in transformers' Llama (LlamaModel.permute), outermost."""
    rows = x.shape[0] // heads
    pairs = [range(h * rows + i, (h + 1) * rows, rows // 2) for h in range(heads) for i in range(rows // 2)]
    return Gathered(x, 0, tuple(pairs))


def head_restored(x: Expression, heads: int) -> Expression:
    """Permute rotary rows as transformers' Llama has them: undoes ``head_permuted``."""
    rows = x.shape[0] // heads
    return Gathered(x, 0, tuple(range(h * rows + j, (h + 1) * rows, 2) for h in range(heads) for j in (0, 1)))


@dataclass(frozen=True)
class Transposed:
    """The last two dimensions exchanged; of blocks, the floats that they stand for."""

    x: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-2], self.x.shape[-1], self.x.shape[-2])

    @property
    def type(self) -> TensorType:
        return self._plain.type

    @cached_property
    def _plain(self) -> Expression:
        return floats(self.x)

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        item = self.type.block_bytes
        rows, columns = self.x.shape[-2:]
        values = into.view(f"V{item}")
        at = 0
        while at < values.size:
            matrix, rest = divmod(start, rows * columns)
            first, skip = divmod(rest, rows)
            here = min(rows * columns - rest, values.size - at)
            last = -(-(skip + here) // rows) + first
            block = np.empty((last - first, rows), values.dtype)
            step = max(1, PIECE // columns)
            for row in range(0, rows, step):
                n = min(step, rows - row)
                piece = read_values(self._plain, (matrix * rows + row) * columns, n * columns).view(values.dtype)
                block[:, row : row + n] = piece.reshape(n, columns)[:, first:last].T
            values[at : at + here] = block.reshape(-1)[skip : skip + here]
            start, at = start + here, at + here

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


def _plus_one(x: F32) -> F32:
    return x + np.float32(1)


def _minus_one(x: F32) -> F32:
    return x - np.float32(1)


def _negative_exp(x: F32) -> F32:
    return -np.exp(x.astype(np.float64)).astype(np.float32)


def _exp(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return np.exp(x)


def _undone(x: F32, near: npt.NDArray[np.float64], function: Callable[[F32], F32]) -> F32:
    """Return what ``function`` made ``x`` of, ``near`` to that: of several values the one of the fewest bits."""
    found = near.astype(np.float32)
    made, bits = found, found.view(np.uint32)
    for dropped in range(1, 23):
        short = ((bits + (1 << dropped - 1)) >> dropped << dropped).view(np.float32)
        made = np.where(function(short) == x, short, made)
    return made


def _log_of_negative(x: F32) -> F32:
    """Return what ``_negative_exp`` made ``x`` of."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _undone(x, np.log(-x.astype(np.float64)), _negative_exp)


def _log(x: F32) -> F32:
    """Return what ``_exp`` made ``x`` of."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _undone(x, np.log(x.astype(np.float64)), _exp)


def _negative(x: F32) -> F32:
    return -x


#: What ``Mapped`` can do, by name.
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
    """Values that are each made of one of ``x``, in float32; F16 stays F16."""

    x: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def type(self) -> TensorType:
        return TYPE_F16 if self.x.type is TYPE_F16 else TYPE_F32

    @abstractmethod
    def computed(self, x: F32) -> F32:
        """Return what becomes of values."""

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        size = self.type.block_bytes
        for at in range(0, into.size // size, PIECE):
            piece = into[at * size : (at + PIECE) * size]
            from_f32(self.type, self.computed(read_f32(self.x, start + at, piece.size // size)), piece)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


@dataclass(frozen=True)
class Mapped(ByValue):
    """A function of each value, by its name in ``FUNCTIONS``."""

    function: str

    def computed(self, x: F32) -> F32:
        return FUNCTIONS[self.function](x)


@dataclass(frozen=True)
class Multiplied(ByValue):
    """Each value times ``factor``, a float32."""

    factor: float

    def computed(self, x: F32) -> F32:
        return x * np.float32(self.factor)


@dataclass(frozen=True)
class Added(ByValue):
    """Each value plus ``value``, a float32."""

    value: float

    def computed(self, x: F32) -> F32:
        return x + np.float32(self.value)


@dataclass(frozen=True)
class Unadded(ByValue):
    """The values that ``Added`` makes these of."""

    value: float

    def computed(self, x: F32) -> F32:
        near = x.astype(np.float64) - np.float32(self.value)
        return _undone(x, near, lambda values: values + np.float32(self.value))


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

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        values = into.view(np.float32)
        for at in range(0, values.size, PIECE):
            n = min(PIECE, values.size - at)
            values[at : at + n] = read_f32(self.x, start + at, n) * read_f32(self.y, start + at, n)

    def parts(self) -> Iterator[StoredTensor]:
        yield from self.x.parts()
        yield from self.y.parts()


@dataclass(frozen=True)
class Cast:
    """The values as F32, F16 or BF16."""

    x: Expression
    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        size = self.type.block_bytes
        for at in range(0, into.size // size, PIECE):
            piece = into[at * size : (at + PIECE) * size]
            from_f32(self.type, read_f32(self.x, start + at, piece.size // size), piece)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


def cast(x: Expression, t: TensorType) -> Expression:
    """Return ``x`` with values of a type."""
    return x if x.type is t else Cast(x, t)

"""Tensors of a quantized checkpoint: grouped by weight, and decoded by a scheme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Stored
from quantkit.checkpoint.quantized.matrices import Grid, Rows, fail
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor

#: The error of codes without a scale.
WITHOUT = "so its values are unknown: the checkpoint is incomplete, download it again"
#: Dtypes of codes, whose values depend on scales.
CODES = ("F8_E4M3", "F8_E5M2", "U8", "I8")
#: Dtypes of scales and zero points; bytes are exponents (E8M0).
SCALES = ("F32", "BF16", "F16", "F64", "F8_E8M0", "F8_E4M3", "U8", "I8")


@dataclass(frozen=True)
class DecodedTensors:
    """The decoded tensors of a checkpoint.

    ``first``: repacked ones, which precede all others. ``lossless_count``: integer weights that --lossless can keep.
    """

    tensors: dict[str, Expression]
    first: dict[str, Expression] = field(default_factory=dict)
    lossless_count: int = 0


@dataclass
class SchemeReader:
    """The stored tensors of a checkpoint, and the weights decoded from them."""

    config: Config
    stored: Mapping[str, Expression]
    #: quantization_config.
    settings: dict[str, Any]
    lossless: bool = False
    #: Weights that are integers which --lossless can store exactly.
    lossless_count: int = 0
    _in_place: dict[str, tuple[str, Expression]] = field(default_factory=dict)
    _first: dict[str, Expression] = field(default_factory=dict)
    _last: dict[str, Expression] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)

    def with_suffix(self, *ends: str) -> Iterator[tuple[str, StoredTensor]]:
        """Yield base name (without the end) and tensor of each stored name with such an end."""
        for name, x in self.stored.items():
            end = next((end for end in ends if name.endswith(end)), None)
            if end is not None and isinstance(x, Stored) and name not in self._used:
                yield name.removesuffix(end), x.tensor

    def peek(self, name: str) -> StoredTensor | None:
        """Return a stored tensor, None if absent."""
        x = self.stored.get(name)
        return x.tensor if isinstance(x, Stored) else None

    def optional(self, name: str) -> StoredTensor | None:
        """Remove and return a tensor that belongs to another, None if absent."""
        tensor = self.peek(name)
        if tensor is not None:
            self._used.add(name)
        return tensor

    def tensor(self, name: str, weight: StoredTensor) -> StoredTensor:
        """Return a tensor that ``weight`` needs. Raises FormatError."""
        companion = self.optional(name)
        if companion is None:
            raise fail(weight, f"{short(name)} is missing, {WITHOUT}")
        return companion

    def drop(self, *ends: str) -> None:
        """Drop tensors with this suffix: mostly scales of activations, which runtimes compute."""
        self._used.update(name for name in self.stored if name.endswith(ends))

    def add(self, stored_name: str, name: str, x: Expression, where: str = "here") -> None:
        """Add the expression ``x`` as tensor ``name``; ``stored_name`` is that of its codes.

        ``where``: "here", in place of the codes; "first" or "last", before or after all others.
        """
        clash = name != stored_name and name in self.stored
        if clash or name in self._first or name in self._last:
            part = next(x.parts())
            raise fail(part, f"it replaces {short(name)}, which is also present")
        self._used.add(stored_name)
        if where == "here":
            self._in_place[stored_name] = name, x
        else:
            (self._first if where == "first" else self._last)[name] = x

    def result(self) -> DecodedTensors:
        """Return the decoded tensors. Raises FormatError for codes without a scale."""
        tensors: dict[str, Expression] = {}
        for name, x in self.stored.items():
            if name in self._in_place:
                result_name, result = self._in_place[name]
                tensors[result_name] = result
            elif name not in self._used:
                if isinstance(x, Stored) and x.tensor.dtype in CODES and len(x.tensor.shape) > 1:
                    raise fail(x.tensor, f"its {x.tensor.dtype} codes have no scale, {WITHOUT}")
                tensors[name] = x
        return DecodedTensors(tensors | self._last, self._first, self.lossless_count)

    def number(self, key: str, default: int | None = None, table: Mapping[str, Any] | None = None) -> int:
        """Return an integer of quantization_config, or of a part of it. Raises FormatError."""
        value = (self.settings if table is None else table).get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise FormatError(
                f"{self.config.path}: quantization_config: {key} is {short(value)}, not a number", "QK-E112"
            )
        return value


def matrix_shape(t: StoredTensor) -> tuple[int, ...]:
    """Return the shape of a weight, which has rows and columns and no dimension of 0. Raises FormatError."""
    if len(t.shape) < 2 or 0 in t.shape:
        raise fail(t, f"its shape {list(t.shape)} is not that of a matrix")
    return t.shape


def block_grid(weight: StoredTensor, shape: tuple[int, ...], t: StoredTensor, block: tuple[int, int] | None) -> Grid:
    """Return the grid of a weight's scales; the rows of a cell follow from its shape.

    Args:
        weight: the stored weight, for messages.
        shape: of the weight.
        t: the scales: one, one for each row, or for blocks.
        block: rows and columns of a block, None if there are no blocks.

    Raises:
        FormatError: the shapes do not match.
    """
    rows, columns = shape[-2:]
    have = tuple(t.shape)
    wrong = fail(t, f"scales {list(have)} do not match {short(weight.name)}, which is {list(shape)}")
    exponents = t.dtype == "U8"
    if t.dtype not in SCALES:
        raise fail(t, f"scales that are {t.dtype}")
    if t.n_values == 1 and block is None:
        return Grid(Rows(_as(t, (1, 1))), weight_rows(shape), weight_rows(shape), exponents)
    if block is not None:
        want = (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
        if tuple(n for n in have if n != 1) != tuple(n for n in want if n != 1):
            raise wrong
        return Grid(Rows(_as(t, (t.n_values // want[-1], want[-1]))), block[0], rows, exponents)
    # Aligned at the outermost dimension: a scale for each matrix, or for each row.
    padded = (*have, *(1,) * (len(shape) - len(have)))
    if len(padded) != len(shape) or padded[-1] != 1 or padded[:-2] != shape[:-2] or padded[-2] not in (1, rows):
        raise wrong
    flat = _as(t, (t.n_values, 1))
    return Grid(Rows(flat), 1 if padded[-2] == rows else rows, rows, exponents)


def weight_rows(shape: tuple[int, ...]) -> int:
    """Return the rows of a weight, summed over its matrices."""
    n = 1
    for size in shape[:-1]:
        n *= size
    return n


def _as(t: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """Return a stored tensor in another shape."""
    return StoredTensor(t.name, t.dtype, shape, t.path, t.offset, t.nbytes)

"""A source with LoRA adapters merged into its tensors while they are read: ``quantize --merge-lora``.

The values are those of llama-export-lora (tools/export-lora/export-lora.cpp, b11434): a tensor is decoded, then each
adapter's product is computed, scaled and added, in float32. Only the order of the sum over the rank is torch's
(``kernels/cpu/low_rank.py``), the same on all CPUs with FMA.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import TensorInfo
from quantkit.formats.lora import LoraFile, open_lora, parse_adapter
from quantkit.formats.ranges import U8
from quantkit.kernels.formats import has_decoder
from quantkit.kernels.tensor_scale import decoded_as
from quantkit.pipeline.source import Source, SourceView
from quantkit.types import BY_NAME, TensorType

F32 = npt.NDArray[np.float32]

#: Values decoded at a time.
_PIECE = 1 << 17


@dataclass(frozen=True, eq=False)
class LoraSource(SourceView):
    """A source with ``adapters`` merged, each with the factor of its scale. Tensors that they change are F32."""

    adapters: tuple[tuple[LoraFile, float], ...]

    @cached_property
    def products(self) -> dict[str, tuple[tuple[LoraFile, float], ...]]:
        """The adapters of each tensor that they change, and the scales of their products, in order."""
        names = dict.fromkeys(name for adapter, _ in self.adapters for name in adapter.factors)
        return {
            name: tuple((a, a.scale(name, strength)) for a, strength in self.adapters if name in a.factors)
            for name in names
        }

    def own_types(self) -> dict[str, TensorType]:
        """Return the types of changed tensors without a target, those of llama-export-lora: F32 if they are, or F16."""
        stored = self.source.tensors
        return {name: BY_NAME["F32" if stored[name].type.name == "F32" else "F16"] for name in self.products}

    @property
    def inputs(self) -> tuple[Path, ...]:
        return (*self.source.inputs, *(adapter.path for adapter, _ in self.adapters))

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors; those that adapters change are F32."""
        f32 = BY_NAME["F32"]
        return {
            name: replace(t, type=f32, nbytes=f32.tensor_bytes(t.shape)) if name in self.products else t
            for name, t in self.source.tensors.items()
        }

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.source.fingerprint().encode())
        for adapter, strength in self.adapters:
            digest.update(f"lora {strength!r} {adapter.file.fingerprint()}".encode())
        return digest.hexdigest()

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        """Fill ``out`` from byte ``offset`` of a tensor on; of changed tensors whole values."""
        if tensor.name not in self.products:
            self.source.read(tensor, out, offset, readahead)
            return
        values, columns, first = out.view(np.float32), tensor.shape[0], offset // 4
        step = max(1, _PIECE // columns) * columns
        while values.size:
            row, skip = divmod(first, columns)
            if skip or values.size < columns:
                n = min(values.size, columns - skip)
                x = np.empty((1, columns), np.float32)
                self._read_rows(tensor.name, x, row, readahead)
                values[:n] = x[0, skip : skip + n]
            else:
                n = min(step, values.size // columns * columns)
                self._read_rows(tensor.name, values[:n].reshape(-1, columns), row, readahead)
            values, first = values[n:], first + n

    def _read_rows(self, name: str, x: F32, first: int, readahead: int) -> None:
        """Fill ``x`` with rows from ``first`` on: of the source, with the products added."""
        from quantkit.kernels.cpu.low_rank import add_low_rank

        self._decode(self.source.tensors[name], x, first, readahead)
        shape = self.source.tensors[name].shape
        rows_of_matrix = shape[1] if len(shape) > 1 else 1
        for adapter, scale in self.products[name]:
            row = 0
            while row < len(x):
                matrix, inner = divmod(first + row, rows_of_matrix)
                n = min(len(x) - row, rows_of_matrix - inner)
                b = _row_factor(adapter, name, matrix * rows_of_matrix + inner, n)
                add_low_rank(x[row : row + n], _column_factor(adapter, name, matrix), b, np.float32(scale))
                row += n

    def _decode(self, stored: TensorInfo, x: F32, first: int, readahead: int) -> None:
        """Fill ``x`` with the source's values of rows from ``first`` on."""
        if stored.type.name == "F32":
            self.source.read(stored, x.reshape(-1).view(np.uint8), first * stored.shape[0] * 4, readahead)
            return
        from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

        columns, group = stored.shape[0], stored.type.interleave
        begin = first // group * group
        end = -(-(first + len(x)) // group) * group
        rows = np.empty((end - begin, stored.type.row_bytes(columns)), np.uint8)
        self.source.read(stored, rows.reshape(-1), begin * rows.shape[1], readahead * rows.shape[1] // (4 * columns))
        if end - begin == len(x):
            dequantize_rows(stored.type, rows, x)
            return
        whole_groups = np.empty((len(rows), columns), np.float32)
        dequantize_rows(stored.type, rows, whole_groups)
        x[...] = whole_groups[first - begin : first - begin + len(x)]

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        return None if tensor.name in self.products else self.source.place(tensor)


def _row_factor(adapter: LoraFile, name: str, first: int, n: int) -> F32:
    """Return rows of the factor of rows, [n, rank]; those of several matrices follow each other."""
    return _values(adapter, adapter.factors[name].rows, first, n)


@lru_cache(maxsize=16)
def _column_factor(adapter: LoraFile, name: str, matrix: int) -> F32:
    """Return the factor of columns as ``add_low_rank`` reads it; each range of rows of a matrix needs it."""
    from quantkit.kernels.cpu.low_rank import strips

    factors = adapter.factors[name]
    n = factors.columns.shape[1]
    x = _values(adapter, factors.columns, matrix * n, n)
    return strips(np.ascontiguousarray(x.T) if factors.flipped else x)


def _values(adapter: LoraFile, t: TensorInfo, first: int, n: int) -> F32:
    """Return ``n`` rows of a factor. Raises FormatError for values that are not finite."""
    from quantkit.kernels import dequantize

    rows = np.empty((n, t.type.row_bytes(t.shape[0])), np.uint8)
    adapter.file.read(t, rows.reshape(-1), first * rows.shape[1])
    x = rows.view(np.float32) if t.type.name == "F32" else dequantize(rows, t.type, t.shape[0])
    if not np.isfinite(x).all():
        raise adapter.fail(t.name, "a value is infinite or NaN: the adapter is damaged")
    return x


# --- the adapters of a source ----------------------------------------------------------------------------------------


def merge_adapters(source: Source, selections: Sequence[str]) -> LoraSource:
    """Return a source with adapters merged.

    Args:
        source: a model.
        selections: GGUF files and the factors of their scales, FILE[:SCALE], merged in this order.

    Raises:
        FormatError: an adapter is damaged or of another architecture, or the model has no tensor of the same name and
            shape.
        TypeNotSupported: a type of the model without a decoder.
        RecipeError: a scale of 0.
    """
    adapters = [(open_lora(path), strength) for path, strength in map(parse_adapter, selections)]
    for adapter, _ in adapters:
        _check(adapter, source)
    return LoraSource(source, tuple(adapters))


def _check(adapter: LoraFile, source: Source) -> None:
    arch = source.get("general.architecture")
    if adapter.arch != arch:
        raise FormatError(
            f"{adapter.path}: an adapter of {adapter.arch or 'no architecture'}, but {source.paths[0]} is {arch}",
            "QK-E207",
        )
    for name, factors in adapter.factors.items():
        tensor = source.tensors.get(name)
        if tensor is None:
            raise adapter.fail(name, f"{source.paths[0]} has no such tensor; check that the adapter belongs to it")
        if _pad(tensor.shape) != _pad(factors.shape):
            raise adapter.fail(
                name,
                f"the product of its factors is {list(factors.shape)}, but the tensor of {source.paths[0]} is "
                f"{list(tensor.shape)}; check that the adapter belongs to it",
            )
        if not has_decoder(tensor.type) or decoded_as(tensor.type) is not tensor.type:
            raise TypeNotSupported(
                f"{source.where(tensor)}: tensor {name} is {tensor.type}, from which --merge-lora cannot decode single "
                "rows",
                "QK-E302",
            )
        for t in (factors.rows, factors.columns):
            if not has_decoder(t.type) or t.type.interleave > 1 or decoded_as(t.type) is not t.type:
                raise TypeNotSupported(f"{adapter.path}: tensor {t.name} is {t.type}: not a factor's type", "QK-E302")


def _pad(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with four dimensions."""
    return (*shape, 1, 1, 1, 1)[: max(4, len(shape))]


def merge_notes(source: LoraSource) -> list[str]:
    """Return notes on the merged adapters."""
    notes = [
        f"{adapter.path}: merged into {len(adapter.factors)} tensors"
        + (f", scaled by {strength:g}" if strength != 1 else "")
        for adapter, strength in source.adapters
    ]
    stored = [source.source.tensors[name] for name in source.products]
    quantized = dict.fromkeys(t.type.name for t in stored if t.type.is_quantized)
    if quantized:
        n = sum(t.type.is_quantized for t in stored)
        weights = math.fsum(math.prod(t.shape) for t in stored if t.type.is_quantized)
        notes.append(
            f"{n} of the merged tensors ({weights / 1e6:.3g} M weights) are {', '.join(quantized)} in the model, so "
            "the adapter is added to values with their error: merge into an unquantized model where there is one"
        )
    return notes

"""Unpackers: 256 stored values to int8 levels and f32 scales, in registers.

An unpacker is ``unpack_<type>(data, offset) -> (l0, l1, l2, l3, scales, mins)``, inlined into the skeleton that calls
it. ``data`` is an address (or an array), ``offset`` the byte where a *unit* of 256 values begins: one super-block, or
8, 4 or 2 consecutive small blocks. It reads no other bytes. l0 ... l3 are i8x64: the levels of values 0..63,
64..127, 128..191, 192..255; scales and mins are f32x16, one lane per 16 values::

    value = scale * level           when mins is None (the type has none)
    value = scale * level - min     otherwise

with exactly the rounding of the reference (llama.cpp b11434 ggml-quants.c dequantize_row_*, strict f32).

For types with a row header (kernels/formats.py), ``scale`` above is the unpacker's scale times the row's: a skeleton
reads the latter once per row with ``row_scale(row)`` and applies it with ``scaled(scales, of_row)``. For types without
a header both are no-ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core import types

from quantkit.kernels.cpu.core.jit import inline, specialize
from quantkit.kernels.cpu.core.simd import f16_to_f32, load
from quantkit.kernels.formats import Format, cpu_function, format_of
from quantkit.types import TensorType


@inline
def f32_row_scale(row: int) -> Any:
    """Return the f32 that begins a row."""
    return load(types.float32, row, 0)


#: Bound for each type whose row scale products multiply by a gain.
row_scale_gain = np.float32(1)


def product_row_scale(row: int) -> Any:
    """Return the f32 that begins a row, times the gain."""
    return load(types.float32, row, 0) * row_scale_gain


@inline
def f16_row_scale(row: int) -> Any:
    """Return the f16 that begins a row."""
    return f16_to_f32(load(types.uint16, row, 0))


@inline
def no_row_scale(row: int) -> Any:
    """Rows have no header."""
    return None


@inline
def times_row_scale(x: Any, of_row: Any) -> Any:
    """Multiply scales, or a sum, by the row's scale."""
    return x * of_row


@inline
def as_it_is(x: Any, of_row: Any) -> Any:
    """Rows have no scale."""
    return x


ROW_SCALES = {"f32": f32_row_scale, "f16": f16_row_scale, "": no_row_scale}


@dataclass(frozen=True, slots=True)
class Unpacker:
    """The unpacker of one type, and the bindings of a skeleton that walks a row."""

    format: Format
    function: Callable[..., Any]

    @property
    def row(self) -> dict[str, Any]:
        """Globals of skeletons: bytes of a unit and of a row header; how the row's scale is read and applied."""
        t = self.format.type
        return {
            "unit_bytes": self.format.unit_bytes,
            "header_bytes": t.row_header,
            "row_scale": ROW_SCALES[t.row_scale],
            "scaled": times_row_scale if t.row_scale else as_it_is,
        }

    @property
    def product_row(self) -> dict[str, Any]:
        """``row`` for skeletons of products, which multiply the row scale of some types by a gain."""
        spec = self.format
        if spec.row_scale_gain == 1:
            return self.row
        row_scale = specialize(
            product_row_scale, spec.type.name.lower(), row_scale_gain=np.float32(spec.row_scale_gain)
        )
        return self.row | {"row_scale": row_scale}


def unpacker(t: TensorType) -> Unpacker:
    """Return the unpacker of type ``t``. Raises TypeNotSupported if there is none."""
    return Unpacker(format_of(t, "unpacker"), cpu_function("unpack", t))

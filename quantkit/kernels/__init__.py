"""Compute: rows of float32 to the bytes of a type, and back (``quantize``, ``dequantize``).

Modules that compile are imported at first use, to keep ``import quantkit`` fast.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, RecipeError
from quantkit.kernels.formats import SCALED, format_of
from quantkit.kernels.interleave import base_of
from quantkit.types import TensorType, type_by_name

__all__ = ["dequantize", "quantize"]


def quantize(
    x: npt.NDArray[np.float32],
    type: TensorType | str,  # noqa: A002
    imatrix: npt.NDArray[np.float32] | None = None,
    encoder: str | None = None,
) -> npt.NDArray[np.uint8]:
    """Return rows encoded as a tensor type, byte for byte as ggml_quantize_chunk of llama.cpp b11434.

    Types of ik_llama.cpp alone, row-interleaved ones among them, have the bytes of ik_llama.cpp 8337e4cd3.

    Args:
        x: float32 [..., n]; n is a multiple of the type's block.
        type: a tensor type or its name.
        imatrix: the importance of each column, mean squared activations: float32 [n] for all rows; or float32
            [experts, n] for x [experts, .., n], one row per expert. Types that use none ignore it.
        encoder: the project whose search is used, "mainline" or "ik", for types that llama.cpp and ik_llama.cpp have in
            common, interleaved ones included; by default the type's own project. "symmetric": Q4_0 in levels -7 .. 7.
            "scaled": NVFP4 with a search for its scales, of rows that a scale of the tensor divides, weighted.

    Returns:
        uint8 [rows, row_bytes], one row per row of x.

    Raises:
        TypeNotSupported: unknown type, no encoder for it, or n is not a multiple of its block.
        RecipeError: the type requires an imatrix, or there is no such encoder.
        FormatError: wrong dtype or shape, a row with NaN or Inf, or a scale that the type cannot hold.

    For example, ``quantize(x, "Q4_K", imatrix)`` with x [8, 1024] gives uint8 [8, 576], 4.5 bits per weight.
    """
    from quantkit.kernels.cpu.encode import encoder as encoder_of
    from quantkit.kernels.cpu.encode.check import first_nonfinite_row, validate_rows

    t = type_by_name(type) if isinstance(type, str) else type
    encode = encoder_of(t, encoder)
    # A read-only array is another type for numba: a copy is cheaper than a second compilation.
    rows = np.require(_rows(x, np.float32, "x"), requirements=["A", "W"])
    _check_groups(t, rows)
    out = np.empty((len(rows), _row_bytes(t, rows.shape[1])), np.uint8)
    weights = _weights(t, imatrix, x.shape, is_ignored=t.imatrix == "ignored" and encoder != SCALED)
    bad = first_nonfinite_row(rows, 0, len(rows))
    if bad >= 0:
        raise FormatError(
            f"row {bad} contains NaN or Inf and cannot be encoded as {t.name}; repair the source tensor", "QK-E108"
        )
    step = len(rows) // max(1, len(weights))
    for number, importance in enumerate(weights):
        encode(rows, importance, out, number * step, (number + 1) * step)
    bad = validate_rows(t, out)
    if bad >= 0:
        largest = float(np.abs(rows[bad]).max())
        raise FormatError(
            f"row {bad} overflows the scales of {t.name} (largest value {largest:g}); use F32 or BF16", "QK-E108"
        )
    return out


def dequantize(
    data: npt.NDArray[np.uint8],
    type: TensorType | str,  # noqa: A002
    n: int | None = None,
) -> npt.NDArray[np.float32]:
    """Return the values of rows of a tensor type, bit for bit as ggml's dequantize_row functions.

    Args:
        data: uint8 [..., row_bytes].
        type: a tensor type or its name.
        n: values per row; it follows from the bytes of a row, and is checked if given.

    Returns:
        float32 [rows, n].

    Raises:
        TypeNotSupported: unknown type, no decoder for it, or rows that are not whole blocks.
        FormatError: wrong dtype or row length.
    """
    from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

    t = type_by_name(type) if isinstance(type, str) else type
    format_of(base_of(t))
    rows = _rows(data, np.uint8, "data")
    n = t.row_values(rows.shape[1]) if n is None else n
    row_bytes = _row_bytes(t, n)
    if rows.shape[1] != row_bytes:
        raise FormatError(
            f"{n} values of {t.name} need rows of {row_bytes} bytes, but data has {rows.shape[1]}", "QK-E210"
        )
    _check_groups(t, rows)
    out = np.empty((len(rows), n), np.float32)
    dequantize_rows(t, rows, out)
    return out


def _rows(array: npt.NDArray[Any], dtype: Any, name: str) -> npt.NDArray[Any]:
    """Return ``array`` as contiguous rows [rows, n], or raise FormatError."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim < 1:
        array_kind = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else array.__class__.__name__
        raise FormatError(f"{name} must be an array of {np.dtype(dtype)} [..., row], not {array_kind}", "QK-E210")
    return np.ascontiguousarray(array.reshape(-1, array.shape[-1]) if array.shape[-1] else array.reshape(0, 0))


def _check_groups(t: TensorType, rows: npt.NDArray[Any]) -> None:
    if len(rows) % t.interleave:
        raise FormatError(f"{t.name} interleaves {t.interleave} rows; {len(rows)} is not a multiple", "QK-E303")


def _row_bytes(t: TensorType, n: int) -> int:
    if n < 1:
        raise FormatError(f"rows of {n} values are shorter than a block of {t.block}", "QK-E303")
    return t.row_bytes(n)


def _weights(
    t: TensorType, imatrix: npt.NDArray[np.float32] | None, shape: tuple[int, ...], *, is_ignored: bool
) -> list[npt.NDArray[np.float32]]:
    """Return the weights of the encoder for equal parts of the rows of ``shape``: float32 [n] each, or empty for none.

    One part, or one per expert.
    """
    n = shape[-1]
    if imatrix is None and t.imatrix == "required":
        raise RecipeError(
            f"{t.name} cannot be encoded without an importance matrix: pass one, with a value per column", "QK-E212"
        )
    if imatrix is None or is_ignored:
        return [np.empty(0, np.float32)]
    weights = np.require(imatrix, np.float32, ["C", "A", "W"])
    if weights.shape != (n,) and (len(shape) < 3 or weights.shape != (shape[0], n)):
        experts = f", or [{shape[0]}, {n}] for experts" if len(shape) > 2 else ""
        raise FormatError(
            f"the importance matrix has shape {list(weights.shape)}, but rows of {n} values need [{n}]{experts}",
            "QK-E119",
        )
    if not np.isfinite(weights).all():
        raise FormatError("the importance matrix contains NaN or Inf; compute it again", "QK-E118")
    if weights.ndim == 2 and math.prod(shape[1:-1]) % t.interleave:
        raise FormatError(
            f"{t.name} interleaves {t.interleave} rows; {math.prod(shape[1:-1])} rows of an expert are not a multiple",
            "QK-E303",
        )
    return list(np.atleast_2d(weights))

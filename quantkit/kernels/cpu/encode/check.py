"""Checks on data: no NaN or Inf among the values of a row, no invalid scale among the fields of its blocks.

All rules have one form: a field of 1, 2, 4 or 8 bytes is bad if all bits of a mask are set in it. For floats the mask
is the exponent. ``TensorType.fields`` lists the fields of a block, or of a row header, by kind and offset::

    f16  0x7C00      bf16  0x7F80      f32  0x7F800000      f64  0x7FF0000000000000
    e8m0 0xFF        the one exponent without a value (MXFP4)
    nibbles          IQ1_M: an f16 in the top 4 bits of four u16; its exponent's bits are in the third and fourth
    ue4m3            NVFP4: always valid, every byte is a value

They reject what llama.cpp b11434's ggml_validate_row_data rejects, except F64 beyond the range of f32.

And the error of decoded values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import any_lane, convert, f32x8, f64x8, hsum, load, load_line, splat
from quantkit.kernels.cpu.interleave import deinterleave_rows
from quantkit.kernels.interleave import base_of, is_interleaved
from quantkit.types import TensorType

#: The mask of each kind of field; its type is the field's width.
MASKS: dict[str, Any] = {
    "f16": np.uint16(0x7C00),
    "bf16": np.uint16(0x7F80),
    "f32": np.uint32(0x7F800000),
    "f64": np.uint64(0x7FF0000000000000),
    "e8m0": np.uint8(0xFF),
    "nibbles": np.uint64(0x7000C00000000000),
    "ue4m3": None,
}
EXPONENT = MASKS["f32"]


@inline
def _dense(data: Any, row_bytes: Any, row0: Any, row1: Any, kind: Any, mask: Any, width: Any) -> Any:
    """Return the first row with a bad number, or -1; rows contain only numbers of type ``kind``."""
    for row in range(row0, row1):
        start, end = row * row_bytes, (row + 1) * row_bytes
        lines = start + (row_bytes & ~255)
        for offset in range(start, lines, 256):
            bad = (load_line(kind, data, offset) & mask) == mask
            for k in range(64, 256, 64):
                bad = bad | ((load_line(kind, data, offset + k) & mask) == mask)
            if any_lane(bad):
                return row
        for offset in range(lines, end, width):
            if load(kind, data, offset) & mask == mask:
                return row
    return -1


@kernel
def first_nonfinite_row(x: npt.NDArray[np.float32], row0: int, row1: int) -> int:
    """Return the first of rows row0..row1 of x, float32 [rows, n] C-contiguous, with a NaN or Inf, or -1."""
    return _dense(x, 4 * x.shape[1], row0, row1, np.uint32, EXPONENT, 4)  # type: ignore[no-any-return]


@kernel
def _first_dense(address: int, row_bytes: int, rows: int, kind: Any, mask: Any, width: int) -> int:
    """Return the first row with a bad number, or -1; ``width`` is the size of a number."""
    return _dense(address, row_bytes, 0, rows, kind, mask, width)  # type: ignore[no-any-return]


@kernel
def _first_strided(address: int, row_bytes: int, rows: int, kind: Any, mask: Any, offset: int, step: int) -> int:
    """Return the first row with a bad field, or -1; fields are at byte ``offset`` of a row and every ``step`` bytes."""
    for row in range(rows):
        bad = False
        for field in range(row * row_bytes + offset, (row + 1) * row_bytes, step):
            bad |= load(kind, address, field) & mask == mask
        if bad:
            return row
    return -1


def validate_rows(t: TensorType, data: npt.NDArray[np.uint8]) -> int:
    """Return the first row with an invalid block, or -1.

    ``data`` is uint8 [rows, row_bytes]. Raises FormatError if it is not, or if a row is not a multiple of blocks. Types
    without fields to check (``t.scales`` empty) always pass; interleaved rows, in whole groups, are deinterleaved.
    """
    if is_interleaved(t):
        return _validate_interleaved(t, data)
    if data.dtype != np.uint8 or data.ndim != 2 or (data.shape[1] - t.row_header) % t.block_bytes:
        raise FormatError(
            f"{t.name}: rows must be uint8 [rows, {t.row_header} + k * {t.block_bytes} bytes],"
            f" not {data.dtype} {list(data.shape)}",
            "QK-E210",
        )
    data = np.ascontiguousarray(data)
    # An address, so that one compiled kernel serves both writeable and read-only rows.
    address: int = data.__array_interface__["data"][0]
    first, row_bytes = data.shape
    for of_row, kind, offset in t.fields:
        mask = MASKS[kind]
        if mask is None:
            continue
        if mask.itemsize == t.block_bytes:
            row = _first_dense(address, row_bytes, first, type(mask), mask, t.block_bytes)
        else:
            first_field, step = (offset, row_bytes) if of_row else (t.row_header + offset, t.block_bytes)
            row = _first_strided(address, row_bytes, first, type(mask), mask, first_field, step)
        first = row if row >= 0 else first
    return first if first < len(data) else -1


def _validate_interleaved(t: TensorType, data: npt.NDArray[np.uint8]) -> int:
    base, n = base_of(t), (data.shape[1] - t.row_header) // t.block_bytes * t.block
    plain = np.empty((len(data), base.row_bytes(n)), np.uint8)
    deinterleave_rows(t, np.ascontiguousarray(data), plain)
    return validate_rows(base, plain)


@kernel
def error_sums(
    x: npt.NDArray[np.float32], y: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]
) -> tuple[float, float, float, float]:
    """Return the f64 sums of x^2, (x-y)^2, w x^2 and w (x-y)^2 over rows.

    ``x`` and ``y`` are float32 [rows, n], C-contiguous; ``weights`` float32 [n], or empty for weights of 1. The order
    of summation is fixed (eight lanes along a row), so the result depends only on the values.
    """
    zero = splat(f64x8, 0.0)
    square = 0.0
    error = 0.0
    w_square = 0.0
    w_error = 0.0
    n = x.shape[1]
    vector_end = n // 8 * 8
    for row in range(x.shape[0]):
        a = zero
        b = zero
        c = zero
        d = zero
        offset = row * n * 4
        for i in range(0, vector_end, 8):
            v = convert(f64x8, load(f32x8, x, offset + 4 * i))
            e = v - convert(f64x8, load(f32x8, y, offset + 4 * i))
            a += v * v
            b += e * e
            if weights.size:
                w = convert(f64x8, load(f32x8, weights, 4 * i))
                c += w * (v * v)
                d += w * (e * e)
        square += hsum(a)
        error += hsum(b)
        w_square += hsum(c)
        w_error += hsum(d)
        for i in range(vector_end, n):
            s, t = np.float64(x[row, i]), np.float64(x[row, i]) - np.float64(y[row, i])
            square += s * s
            error += t * t
            if weights.size:
                w_square += np.float64(weights[i]) * (s * s)
                w_error += np.float64(weights[i]) * (t * t)
    if weights.size == 0:
        return square, error, square, error
    return square, error, w_square, w_error

"""4-bit floats (E2M1): MXFP4 and NVFP4, whose bits only move into ggml's blocks.

MXFP4: 32 values share a power of two.

* gpt-oss (quant_method mxfp4): NAME_blocks U8 [experts, rows, columns / 32, 16] and NAME_scales U8 [experts, rows,
  columns / 32], where NAME itself would be [experts, columns, rows].
* compressed-tensors (mxfp4-pack-quantized: Kimi) and others: weight_packed or weight U8 [rows, columns / 2], exponents
  [rows, columns / 32].

In all of them byte i has values 2 i and 2 i + 1, and codes are those of ggml.

NVFP4: a scale of 8 bits (E4M3) for 16 values, and one of float32 for all. ggml's blocks have four scales and 64 values;
the scale of all is a separate tensor, NAME.scale, that of its inputs NAME.input_scale. ModelOpt's weight_scale_2 and
input_scale multiply, the global scales of compressed-tensors divide. Rows that are not a multiple of blocks become
floats.
"""

from __future__ import annotations

import numpy as np

from quantkit.checkpoint.expressions import Expression, Transposed
from quantkit.checkpoint.quantized.blocks import Mxfp4, Nvfp4, Outer, nvfp4_floats
from quantkit.checkpoint.quantized.matrices import Rows, as_numbers, fail, read_all
from quantkit.checkpoint.quantized.scheme import WITHOUT, SchemeReader, matrix_shape
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor

#: Dtypes of exponents.
EXPONENTS = ("U8", "F8_E8M0")


def decode(reader: SchemeReader) -> None:
    """quant_method mxfp4."""
    for base, blocks in reader.with_suffix("_blocks"):
        scales = reader.tensor(f"{base}_scales", blocks)
        if blocks.dtype != "U8" or len(blocks.shape) < 3 or 0 in blocks.shape or blocks.shape[-1] != 16:
            raise fail(blocks, f"{blocks.dtype} {list(blocks.shape)} are not blocks of 16 bytes")
        _check_scales(blocks, scales, blocks.shape[:-1])
        shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)
        x = Mxfp4(shape, Rows(_flat(blocks, shape[-1] // 2)), Rows(scales))
        reader.add(f"{base}_blocks", base, Transposed(x), "first")


def mxfp4_of(codes: StoredTensor, scales: StoredTensor) -> Mxfp4:
    """Return a weight of bytes [..., columns / 2] and their exponents. Raises FormatError."""
    stored = matrix_shape(codes)
    shape = (*stored[:-1], stored[-1] * 2)
    if codes.dtype not in ("U8", "I8") or shape[-1] % 32:
        raise fail(codes, f"{codes.dtype} {list(stored)} are not two codes per byte in groups of 32")
    _check_scales(codes, scales, (*shape[:-1], shape[-1] // 32))
    return Mxfp4(shape, Rows(codes), Rows(scales))


def _check_scales(codes: StoredTensor, scales: StoredTensor, shape: tuple[int, ...]) -> None:
    if scales.dtype not in EXPONENTS or scales.shape != shape:
        raise fail(
            scales,
            f"{scales.dtype} {list(scales.shape)}, but {short(codes.name)} {list(codes.shape)} needs exponents "
            f"{list(shape)}",
        )


def _flat(t: StoredTensor, columns: int) -> StoredTensor:
    return StoredTensor(t.name, t.dtype, (t.n_values // columns, columns), t.path, t.offset, t.nbytes)


def is_nvfp4(codes: StoredTensor, scales: StoredTensor) -> bool:
    """Return whether a weight with its scales is stored as NVFP4."""
    return codes.dtype == "U8" and scales.dtype == "F8_E4M3"


def add_nvfp4(reader: SchemeReader, stored_name: str, base: str, codes: StoredTensor, scales: StoredTensor) -> None:
    """Add the weight ``base``.weight, whose codes have the name ``stored_name``. Raises FormatError."""
    stored = matrix_shape(codes)
    shape = (*stored[:-1], stored[-1] * 2)
    if shape[-1] % 16 or scales.shape != (*shape[:-1], shape[-1] // 16):
        raise fail(
            scales,
            f"scales {list(scales.shape)} do not match {short(codes.name)} {list(stored)}: each must cover 16 values",
        )
    matrices = 1
    for n in shape[:-2]:
        matrices *= n
    scale = _outer(reader, base, matrices, "weight_scale_2", "weight_global_scale")
    if scale is None:
        raise fail(codes, f"{short(base)}.weight_scale_2 (or weight_global_scale) is missing, {WITHOUT}")
    input_scale = _outer(reader, base, matrices, "input_scale", "input_global_scale") or Outer((1.0,) * matrices)
    x: Expression
    if shape[-1] % 64:
        x = nvfp4_floats(shape, Rows(codes), Rows(scales), scale)
        reader.add(stored_name, f"{base}.weight", x)
    else:
        x = Nvfp4(shape, Rows(codes), Rows(scales), scale, input_scale)
        reader.add(stored_name, f"{base}.weight", x, "first")


def _outer(reader: SchemeReader, base: str, matrices: int, name: str, inverse: str) -> Outer | None:
    """Return the numbers under one of two names, the second holding reciprocals; None if both are absent."""
    t, divides = reader.optional(f"{base}.{name}"), False
    if t is None:
        t, divides = reader.optional(f"{base}.{inverse}"), True
    if t is None:
        return None
    if t.n_values not in (1, matrices) or not t.n_values:
        raise fail(t, f"{list(t.shape)}, not one scale for each of {matrices} matrices")
    values = as_numbers(t, read_all(t))
    with np.errstate(divide="ignore"):
        values = np.float32(1) / values if divides else values
    if not np.isfinite(values).all():
        raise fail(t, "a scale is infinite or NaN")
    return Outer(tuple(np.broadcast_to(values, matrices).tolist()), t)

"""NVFP4: 4-bit floats (E2M1), a scale of 8 bits (E4M3) for 16 of them, and one of float32 for all.

It becomes ggml's NVFP4, whose blocks have four scales and 64 values; the scale of all is a tensor beside the weight,
NAME.scale, that of its inputs NAME.input_scale. ModelOpt's weight_scale_2 and input_scale multiply, the global scales
of compressed-tensors divide. Rows that do not divide into blocks become floats.
"""

from __future__ import annotations

import numpy as np

from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.quantized.blocks import Nvfp4, Outer, nvfp4_floats
from quantkit.checkpoint.quantized.found import Found, matrix_shape
from quantkit.checkpoint.quantized.matrices import Rows, as_numbers, fail, read_all
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor


def is_nvfp4(codes: StoredTensor, scales: StoredTensor) -> bool:
    """Tell whether a weight with its scales is stored as NVFP4."""
    return codes.dtype == "U8" and scales.dtype == "F8_E4M3"


def put_nvfp4(found: Found, at: str, base: str, codes: StoredTensor, scales: StoredTensor) -> None:
    """Put the weight ``base``.weight, whose codes have the stored name ``at``. Raises FormatError."""
    stored = matrix_shape(codes)
    shape = (*stored[:-1], stored[-1] * 2)
    if shape[-1] % 16 or scales.shape != (*shape[:-1], shape[-1] // 16):
        raise fail(
            scales, f"scales {list(scales.shape)} do not fit {short(codes.name)} {list(stored)}: 16 values share one"
        )
    matrices = 1
    for n in shape[:-2]:
        matrices *= n
    scale = _outer(found, base, matrices, "weight_scale_2", "weight_global_scale")
    input_scale = _outer(found, base, matrices, "input_scale", "input_global_scale")
    x: Expression
    if shape[-1] % 64:
        x = nvfp4_floats(shape, Rows(codes), Rows(scales), scale)
        found.put(at, f"{base}.weight", x)
    else:
        x = Nvfp4(shape, Rows(codes), Rows(scales), scale, input_scale)
        found.put(at, f"{base}.weight", x, "first")


def _outer(found: Found, base: str, matrices: int, name: str, inverse: str) -> Outer:
    """Return the numbers under one of two names, of which the second holds reciprocals; 1 if there are none."""
    t, divides = found.optional(f"{base}.{name}"), False
    if t is None:
        t, divides = found.optional(f"{base}.{inverse}"), True
    if t is None:
        return Outer((1.0,) * matrices)
    if t.n_values not in (1, matrices) or not t.n_values:
        raise fail(t, f"{list(t.shape)}, where one scale is due for each of {matrices} matrices")
    values = as_numbers(t, read_all(t))
    with np.errstate(divide="ignore"):
        values = np.float32(1) / values if divides else values
    if not np.isfinite(values).all():
        raise fail(t, "a scale is infinite or NaN, so what it scales has no value")
    return Outer(tuple(np.broadcast_to(values, matrices).tolist()), t)

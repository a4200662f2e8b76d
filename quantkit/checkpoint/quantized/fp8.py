"""8-bit floats with scales of a block, a row or all: fp8 (DeepSeek, Mistral), fbgemm_fp8; a part of others.

The stored scale multiplies: value = float32(code) * float32(scale), as dequant_simple of convert_hf_to_gguf.py. Which
scale is whose follows from names, and how many there are from shapes. What is not read from an 8-bit float is told by
its dtypes: two 4-bit floats a byte with exponents beside them (DeepSeek V4, MiMo) are MXFP4.
"""

from __future__ import annotations

from typing import Any

from quantkit.checkpoint.quantized.found import Found, block_grid, matrix_shape
from quantkit.checkpoint.quantized.matrices import Rows, fail
from quantkit.checkpoint.quantized.mxfp4 import EXPONENTS, mxfp4_of
from quantkit.checkpoint.quantized.rows import Float8, Integers, Scaled, Step, Values
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor

FLOATS = ("F8_E4M3", "F8_E5M2")
#: Ends of names of scales, and what the name of their weight has in its place.
_SCALES = {"_scale_inv": "", ".qscale_weight": ".weight", ".weight_scale": ".weight", ".scale": ".weight"}
#: Scales of activations, and where they are cut: computed while a model runs, or not used.
ACTIVATIONS = (
    *("activation_scale", ".qscale_act", ".input_scale", ".input_scale_ub", ".output_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".input_zero_point", ".output_zero_point"),
)


def decode(found: Found) -> None:
    """quant_method fp8 and fbgemm_fp8."""
    found.drop(*ACTIVATIONS)
    block = block_of(found, found.given.get("weight_block_size"))
    for end, weight_end in _SCALES.items():
        for base, scale in found.ending(end):
            name = base + weight_end
            weight = found.peek(name)
            if weight is None or (end == ".scale" and weight.dtype not in (*FLOATS, "U8", "I8")):
                continue  # a parameter of the model that is called so
            found.optional(base + end)
            if scale.dtype in EXPONENTS and weight.dtype in ("U8", "I8"):
                found.put(name, name, mxfp4_of(weight, scale), "first")
            else:
                found.put(name, name, scaled(weight, scale, block))


def block_of(found: Found, given: Any) -> tuple[int, int] | None:
    """Return rows and columns of a block, None if there are none."""
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(n, int) and 0 < n < 1 << 31 for n in given):
        raise FormatError(f"{found.config.path}: quantization_config: blocks of {short(given)}, not [rows, columns]")
    return given[0], given[1]


def scaled(
    weight: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None, zero: StoredTensor | None = None
) -> Scaled:
    """Return a weight of 8-bit floats or integers times its scales; ``zero`` are zero points, of the same shape.

    Raises FormatError.
    """
    shape = matrix_shape(weight)
    if weight.dtype not in (*FLOATS, "I8"):
        raise fail(weight, f"{weight.dtype} with {short(scale.name)}, but only 8-bit floats and integers have scales")
    values: Values = Integers(Rows(weight)) if weight.dtype == "I8" else Float8(Rows(weight), weight.dtype)
    grids = [("multiply", scale)] if zero is None else [("subtract", zero), ("multiply", scale)]
    steps = []
    for operation, cells in grids:
        size = block if block is not None and len(cells.shape) >= 2 else _guessed(shape, cells)
        grid = block_grid(weight, shape, cells, size)
        steps.append(Step(operation, grid, shape[-1] if size is None else size[1]))
    return Scaled(shape, values, tuple(steps))


def _guessed(shape: tuple[int, ...], scale: StoredTensor) -> tuple[int, int] | None:
    """Return the size of blocks that only the shape of scales tells: of MXFP8, and of ModelOpt's fp8 in blocks."""
    rows, columns = shape[-2:]
    if scale.dtype in EXPONENTS and scale.shape == (*shape[:-1], columns // 32) and columns % 32 == 0:
        return 1, 32
    blocks = (*shape[:-2], -(-rows // 128), -(-columns // 128))
    return (128, 128) if scale.shape in (blocks, (blocks[-2], 1, blocks[-1], 1)) and rows > 1 else None

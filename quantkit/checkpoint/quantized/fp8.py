"""8-bit floats with scales of a block, a row or all: fp8 (DeepSeek, Mistral), fbgemm_fp8; a part of others.

The stored scale multiplies: value = float32(code) * float32(scale), as dequant_simple of convert_hf_to_gguf.py. Names
show which scale belongs to which weight, shapes their number. Dtypes show other formats: two 4-bit floats per byte with
exponents (DeepSeek V4, MiMo) are MXFP4.

NVIDIA's ModelOpt stores fp8 with a scale of all, of rows or of blocks, NVFP4, MXFP4 and MXFP8, also in one model; the
dtypes of a weight and its scales show which.
"""

from __future__ import annotations

from typing import Any

from quantkit.checkpoint.quantized.fp4 import EXPONENTS, add_nvfp4, is_nvfp4, mxfp4_of
from quantkit.checkpoint.quantized.matrices import Rows, fail
from quantkit.checkpoint.quantized.rows import Float8, Integers, Scaled, Step, Values
from quantkit.checkpoint.quantized.scheme import SchemeReader, block_grid, matrix_shape
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor

FLOATS = ("F8_E4M3", "F8_E5M2")
#: Suffix of the name of a scale -> that of its weight.
_SCALES = {"_scale_inv": "", ".qscale_weight": ".weight", ".weight_scale": ".weight", ".scale": ".weight"}
#: Scales and clipping limits of activations: computed at run time, or unused.
ACTIVATIONS = (
    "activation_scale",
    ".qscale_act",
    ".input_scale",
    ".input_scale_ub",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".input_zero_point",
    ".output_zero_point",
)


def decode(reader: SchemeReader) -> None:
    """quant_method fp8 and fbgemm_fp8."""
    reader.drop(*ACTIVATIONS)
    block = read_block_size(reader, reader.settings.get("weight_block_size"))
    for end, weight_end in _SCALES.items():
        for base, scale in reader.with_suffix(end):
            name = base + weight_end
            weight = reader.peek(name)
            if weight is None or (end == ".scale" and weight.dtype not in (*FLOATS, "U8", "I8")):
                continue  # a parameter of the model with this name
            reader.optional(base + end)
            if scale.dtype in EXPONENTS and weight.dtype in ("U8", "I8"):
                reader.add(name, name, mxfp4_of(weight, scale), "first")
            else:
                reader.add(name, name, scale_weight(weight, scale, block))


def read_block_size(reader: SchemeReader, block_size: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a block, None without blocks."""
    if block_size is None:
        return None
    if (
        not isinstance(block_size, list)
        or len(block_size) != 2
        or not all(isinstance(n, int) and 0 < n < 1 << 31 for n in block_size)
    ):
        raise FormatError(
            f"{reader.config.path}: quantization_config: blocks of {short(block_size)}, not [rows, columns]", "QK-E112"
        )
    return block_size[0], block_size[1]


def scale_weight(
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
        size = _guess_block(shape, cells) if block is None else block
        grid = block_grid(weight, shape, cells, size)
        steps.append(Step(operation, grid, shape[-1] if size is None else size[1]))
    return Scaled(shape, values, tuple(steps))


def _guess_block(shape: tuple[int, ...], scale: StoredTensor) -> tuple[int, int] | None:
    """Return the block size from the shape of scales: for MXFP8, and ModelOpt's fp8 in blocks."""
    rows, columns = shape[-2:]
    if scale.dtype in EXPONENTS and scale.shape == (*shape[:-1], columns // 32) and columns % 32 == 0:
        return 1, 32
    blocks = (*shape[:-2], -(-rows // 128), -(-columns // 128))
    return (128, 128) if scale.shape in (blocks, (blocks[-2], 1, blocks[-1], 1)) and rows > 1 else None


def decode_modelopt(reader: SchemeReader) -> None:
    """quant_method modelopt."""
    for _, t in reader.with_suffix(".pre_quant_scale"):
        raise fail(t, "inputs are scaled before the weight (NVFP4_AWQ, W4A8_AWQ), which GGUF cannot express")
    block = (128, 128) if reader.settings.get("quant_algo") == "FP8_PB_WO" else None
    for base, weight in reader.with_suffix(".weight"):
        name = f"{base}.weight"
        scale = reader.optional(f"{base}.weight_scale")
        if scale is None:
            continue
        if is_nvfp4(weight, scale):
            add_nvfp4(reader, name, base, weight, scale)
        elif weight.dtype in FLOATS:
            reader.add(name, name, scale_weight(weight, scale, block))
        elif weight.dtype == "U8" and scale.dtype in EXPONENTS:
            reader.add(name, name, mxfp4_of(weight, scale), "first")
        else:
            raise fail(weight, f"{weight.dtype} with {short(scale.name)} {scale.dtype}: not a supported scheme")
    # A scale without a weight is omitted, as by convert_hf_to_gguf.py.
    reader.drop(".weight_scale", ".input_scale", ".k_scale", ".v_scale")

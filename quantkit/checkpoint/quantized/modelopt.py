"""NVIDIA's ModelOpt: fp8 with a scale of all, of rows or of blocks, NVFP4, MXFP4 and MXFP8, also in one model.

Which of them a weight is, its dtype and that of its scales say.
"""

from __future__ import annotations

from quantkit.checkpoint.quantized.found import Found
from quantkit.checkpoint.quantized.fp8 import FLOATS, scaled
from quantkit.checkpoint.quantized.matrices import fail
from quantkit.checkpoint.quantized.mxfp4 import EXPONENTS, mxfp4_of
from quantkit.checkpoint.quantized.nvfp4 import is_nvfp4, put_nvfp4
from quantkit.formats.gguf.rules import short


def decode(found: Found) -> None:
    """quant_method modelopt."""
    for _, t in found.ending(".pre_quant_scale"):
        raise fail(t, "inputs are scaled before the weight (NVFP4_AWQ, W4A8_AWQ), which a GGUF file cannot say")
    for base, scale in found.ending(".weight_scale"):
        name = f"{base}.weight"
        found.optional(f"{base}.weight_scale")
        weight = found.optional(name)
        if weight is None:
            continue  # as in convert_hf_to_gguf.py: a scale of nothing
        if is_nvfp4(weight, scale):
            put_nvfp4(found, name, base, weight, scale)
        elif weight.dtype in FLOATS:
            found.put(name, name, scaled(weight, scale, None))
        elif weight.dtype == "U8" and scale.dtype in EXPONENTS:
            found.put(name, name, mxfp4_of(weight, scale), "first")
        else:
            raise fail(weight, f"{weight.dtype} with {short(scale.name)} {scale.dtype}: no scheme that is read")
    found.drop(".input_scale", ".k_scale", ".v_scale")

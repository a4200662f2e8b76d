"""Which format activations are brought to before a weight multiplies them, by the type of the weight.

llama.cpp pairs them so (b11434, ggml-cpu.c type_traits_cpu); the formats are told in kernels/cpu/activations.py. All
types that are not listed take q8_k. Floats take themselves: f32 as it is, f16 and bf16 rounded.
"""

from __future__ import annotations

from quantkit.types import TensorType

FORMATS = {
    **dict.fromkeys(("F32", "F16", "BF16"), ""),
    **dict.fromkeys(("Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "MXFP4", "NVFP4", "IQ4_NL"), "q8_0"),
    **dict.fromkeys(("Q4_1", "Q5_1"), "q8_1"),
}


def activation_format(t: TensorType) -> str:
    """Return the format that activations are brought to before a weight of type ``t`` multiplies them."""
    return FORMATS.get(t.name, "q8_k") or t.name.lower()

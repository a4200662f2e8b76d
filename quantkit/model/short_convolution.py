"""Layers of LFM 2: short convolutions between two gates, in some layers attention.

    b, c, x = parts of shortconv.in_proj x;  out = shortconv.out_proj(c * convolution along the sequence of (b * x))

Source: llama.cpp b11434 src/models/lfm2.cpp.
"""

from __future__ import annotations

from quantkit.model.attention import gqa, n_head_kv
from quantkit.model.builder import Builder
from quantkit.model.ops import Value
from quantkit.model.recurrent import apply_gate, check_width, convolve


def short_convolution_hybrid(b: Builder, x: Value) -> Value:
    """Add a short convolution if the metadata gives no key heads, attention if it does.

    Raises FormatError if the metadata or shapes are inconsistent.
    """
    if n_head_kv(b) != 0:
        return gqa(b, x)
    width = b.h.n_embd
    parts = b.mul_mat(x, "shortconv.in_proj", scale=False, bias=False)
    check_width(b, parts, 3 * width)
    before, after = b.take(parts, "gate_before", width, 0), b.take(parts, "gate_after", width, width)
    value = apply_gate(b, b.take(parts, "value", width, 2 * width), before, "linear")
    out = apply_gate(b, convolve(b, value, "shortconv.conv"), after, "linear")
    return b.mul_mat(out, "shortconv.out_proj", scale=False, bias=False)

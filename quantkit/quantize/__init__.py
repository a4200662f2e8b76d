"""Quantize a GGUF model: ``quantkit quantize``, a drop-in for llama-quantize.

plan_quantize    every type, offset and byte count, nothing written
quantize         carry out the plan
"""

from __future__ import annotations

from quantkit.options.quantize import QuantizeOptions
from quantkit.quantize.options import check_options, room_of, size_of, title_of
from quantkit.quantize.plan import QuantizeResult, plan_from, plan_quantize, quantize, run_quantize

__all__ = [
    "QuantizeOptions",
    "QuantizeResult",
    "check_options",
    "plan_from",
    "plan_quantize",
    "quantize",
    "run_quantize",
    "room_of",
    "size_of",
    "title_of",
]

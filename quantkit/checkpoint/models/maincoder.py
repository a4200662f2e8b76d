"""Maincoder.

Facts of llama.cpp b11434, conversion/maincoder.py.
"""

from __future__ import annotations

from quantkit.checkpoint.row import Architecture, Copied, HfClass

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "MaincoderForCausalLM": Architecture("maincoder", keys=(Copied(".rope.dimension_count", "head_dim"),)),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "MaincoderForCausalLM": HfClass("maincoder"),
}

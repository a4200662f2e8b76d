"""openPangu Embedded.

Facts of llama.cpp b11434, conversion/pangu.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import ernie
from quantkit.checkpoint.row import Architecture, Copied, HfClass
from quantkit.checkpoint.rules import TIED_OUTPUT


def set_pangu_heads(keys: Keys, config: Config) -> None:
    """Set the widths of Pangu's heads."""
    keys.u32(".rope.dimension_count", config.head_dim)
    if config.get("head_dim") is None:
        keys.u32(".attention.key_length", config.head_dim)
        keys.u32(".attention.value_length", config.head_dim)


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "PanguEmbeddedForCausalLM": Architecture(
        "pangu-embedded",
        rules=(TIED_OUTPUT,),
        keys=(Copied(".vocab_size", "vocab_size", required=True), set_pangu_heads),
        vocab=ernie.write_ernie,
    ),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "PanguEmbeddedForCausalLM": HfClass("PanguEmbedded"),
}

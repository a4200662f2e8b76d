"""CodeShell.

Facts of llama.cpp b11434, conversion/codeshell.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import gpt2, starcoder
from quantkit.checkpoint.row import Architecture, HfClass


def set_codeshell_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of CodeShell."""
    starcoder.set_n_embd_keys(keys, config, layers, file_type, config.number("num_query_groups"))
    keys.f32(".rope.freq_base", 10000.0)
    keys.text(".rope.scaling.type", "linear")
    keys.f32(".rope.scaling.factor", 1.0)


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "CodeShellForCausalLM": Architecture("codeshell", base=set_codeshell_base),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "CodeShellForCausalLM": HfClass(
        "codeshell",
        gpt2.GPT_2_NAMES,
        keys={
            ".context_length": "n_positions",
            ".feed_forward_length": "",
            ".block_count": "n_layer",
            ".attention.head_count": "n_head",
            ".attention.head_count_kv": "num_query_groups",
            ".embedding_length": "n_embd",
            ".attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
    ),
}

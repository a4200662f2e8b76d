"""Orion.

Facts of llama.cpp b11434, conversion/orion.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece


def set_orion_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of Orion; its rms_norm_eps is the epsilon of layer norms."""
    heads = config.number("num_attention_heads")
    keys.u32("general.file_type", file_type)
    keys.text(".tensor_data_layout", "Meta AI original pth")
    keys.u32(".context_length", config.number("max_sequence_length", "max_position_embeddings", "model_max_length"))
    keys.u32(".embedding_length", config["hidden_size"])
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".attention.head_count", heads)
    keys.u32(".attention.head_count_kv", config.get("num_key_value_heads", heads))
    keys.f32(".attention.layer_norm_epsilon", config["rms_norm_eps"])


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "OrionForCausalLM": Architecture("orion", base=set_orion_base, vocab=write_sentencepiece),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "OrionForCausalLM": HfClass("orion", keys={".attention.layer_norm_epsilon": "rms_norm_eps"}),
}

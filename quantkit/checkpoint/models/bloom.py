"""BLOOM.

Facts of llama.cpp b11434, conversion/bloom.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import gpt_neox
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import Rename


def set_bloom_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of BLOOM."""
    width, heads = config.number("hidden_size", "n_embed"), config.number("n_head", "num_attention_heads")
    keys.u32(".context_length", config.get("seq_length", width))
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", 4 * width)
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", heads)
    keys.u32(".attention.head_count_kv", heads)
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_epsilon"])
    keys.u32("general.file_type", file_type)


_BLOOM = Architecture("bloom", rules=(Rename(r"transformer\.", ""), *gpt_neox.SPLIT_HEADS), base=set_bloom_base)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "BloomForCausalLM": _BLOOM,
    "BloomModel": _BLOOM,
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "BloomForCausalLM": HfClass(
        "bloom",
        "word_embeddings word_embeddings_layernorm ln_f h.*.post_attention_layernorm "
        + " ".join(f"h.*.{name.replace('attention.', 'self_attention.')}" for name in gpt_neox.LAYER_NAMES),
        keys={
            ".context_length": "seq_length",
            ".feed_forward_length": "",
            ".attention.head_count_kv": "",
            ".embedding_length": "hidden_size",
            ".block_count": "n_layer",
            ".attention.head_count": "n_head",
            ".attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        renames=((r"^(?!lm_head)", "transformer."),),
    ),
}

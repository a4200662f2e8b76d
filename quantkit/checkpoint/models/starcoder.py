"""StarCoder 1 and 2.

Facts of llama.cpp b11434, conversion/starcoder.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass


def set_starcoder_keys(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of the first StarCoder, with one KV head."""
    set_n_embd_keys(keys, config, layers, file_type, 1)


def set_n_embd_keys(keys: Keys, config: Config, layers: int, file_type: int, heads_kv: int) -> None:
    """Set the keys of decoders that name their sizes as GPT-2 does, with ``heads_kv`` heads of keys and values."""
    width = config.number("n_embd")
    keys.u32(".context_length", config["n_positions"])
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", 4 * width)
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", config["n_head"])
    keys.u32(".attention.head_count_kv", heads_kv)
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_epsilon"])
    keys.u32("general.file_type", file_type)


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "GPTBigCodeForCausalLM": Architecture("starcoder", base=set_starcoder_keys),
    "Starcoder2ForCausalLM": Architecture("starcoder2"),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "GPTBigCodeForCausalLM": HfClass(
        "gpt_bigcode",
        "transformer.wte transformer.wpe transformer.ln_f transformer.h.*.ln_1 transformer.h.*.ln_2 "
        "transformer.h.*.attn.c_attn transformer.h.*.attn.c_proj transformer.h.*.mlp.c_fc transformer.h.*.mlp.c_proj",
        defaults={"multi_query": True},
        keys={".attention.head_count_kv": ""},
    ),
    "Starcoder2ForCausalLM": HfClass("starcoder2", "model.layers.*.mlp.c_fc model.layers.*.mlp.c_proj"),
}

"""GPT-NeoX.

Facts of llama.cpp b11434, conversion/gptneox.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, take
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import Transform
from quantkit.checkpoint.tensors import Context, Tensor


def split_qkv_groups(x: Expression, groups: int, group_heads: int) -> Expression:
    """Separate queries, keys and values, stored in groups of ``group_heads`` heads whose last two are key and value."""
    width, left = divmod(x.shape[0], groups * group_heads)
    if left:
        raise ValueError(f"{x.shape[0]} rows make no {groups} groups of {group_heads} heads")
    places = ((range(group_heads - 2)), range(group_heads - 2, group_heads - 1), range(group_heads - 1, group_heads))
    heads = [group * group_heads + i for part in places for group in range(groups) for i in part]
    return take(x, 0, *(range(head * width, (head + 1) * width) for head in heads))


def split_heads(tensor: Tensor, context: Context) -> Expression:
    """Split queries, keys and values, which are stored head by head."""
    return split_qkv_groups(tensor.x, context.config.number("n_head", "num_attention_heads"), 3)


def join_heads(tensor: Tensor, context: Context) -> Expression:
    """Return queries, keys and values head by head: the inverse of ``split_heads``."""
    return join_qkv_groups(tensor.x, context.config.number("n_head", "num_attention_heads"), 3)


def join_qkv_groups(x: Expression, groups: int, group_heads: int) -> Expression:
    """Return the inverse of ``split_qkv_groups``."""
    width, left = divmod(x.shape[0], groups * group_heads)
    if left:
        raise ValueError(f"{x.shape[0]} rows make no {groups} groups of {group_heads} heads")
    n = groups * (group_heads - 2)
    heads = [
        head
        for i in range(groups)
        for head in (*range(i * (group_heads - 2), (i + 1) * (group_heads - 2)), n + i, n + groups + i)
    ]
    return take(x, 0, *(range(head * width, (head + 1) * width) for head in heads))


SPLIT_HEADS = (Transform(r"attention\.query_key_value\.(weight|bias)$", split_heads, join_heads),)


def set_neox_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of GPT-NeoX, without a file type."""
    width, heads = config.number("hidden_size"), config.number("num_attention_heads")
    keys.u32(".context_length", config["max_position_embeddings"])
    keys.u32(".embedding_length", width)
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".rope.dimension_count", int(config["rotary_pct"] * (width // max(1, heads))))
    keys.u32(".attention.head_count", heads)
    keys.flag(".use_parallel_residual", config.get("use_parallel_residual", True))
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_eps"])


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "GPTNeoXForCausalLM": Architecture("gptneox", rules=SPLIT_HEADS, base=set_neox_base),
}


def set_rotary_pct(meta: ModelMetadata, config: Json) -> None:
    """Set the part of a head that rope rotates, as GPT-NeoX names it."""
    config["rotary_pct"] = meta.number(".rope.dimension_count") / meta.head_width


LAYER_NAMES = (
    "attention.query_key_value",
    "attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
    "input_layernorm",
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "GPTNeoXForCausalLM": HfClass(
        "gpt_neox",
        "embed_out gpt_neox.embed_in gpt_neox.final_layer_norm gpt_neox.layers.*.post_attention_layernorm "
        + " ".join(f"gpt_neox.layers.*.{name}" for name in LAYER_NAMES),
        keys={".attention.layer_norm_epsilon": "layer_norm_eps"},
        config_setters=(set_rotary_pct,),
    ),
}

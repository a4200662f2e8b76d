"""GPT-NeoX and BLOOM, which store queries, keys and values head by head.

Facts of llama.cpp b11434, conversion/gptneox.py, conversion/bloom.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, take
from quantkit.checkpoint.key_rows import BLOCK_COUNT, FILE_TYPE, Computed, Copied, SetKeys, divided_head_dim
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import Rename, Transform
from quantkit.checkpoint.tensors import Context, Tensor


def split_qkv_groups(x: Expression, groups: int, group_heads: int) -> Expression:
    """Separate queries, keys and values, stored in groups of ``group_heads`` heads whose last two are key and value."""
    width, left = divmod(x.shape[0], groups * group_heads)
    if left:
        raise ValueError(f"{x.shape[0]} rows are not a multiple of {groups} groups of {group_heads} heads")
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
        raise ValueError(f"{x.shape[0]} rows are not a multiple of {groups} groups of {group_heads} heads")
    n = groups * (group_heads - 2)
    heads = [
        head
        for i in range(groups)
        for head in (*range(i * (group_heads - 2), (i + 1) * (group_heads - 2)), n + i, n + groups + i)
    ]
    return take(x, 0, *(range(head * width, (head + 1) * width) for head in heads))


SPLIT_HEADS = (Transform(r"attention\.query_key_value\.(weight|bias)$", split_heads, join_heads),)


def _set_rotary_pct(meta: ModelMetadata, config: Json) -> None:
    """Set the number of rotary dimensions, by GPT-NeoX's name."""
    config["rotary_pct"] = meta.number(".rope.dimension_count") / meta.head_width


#: GPT-NeoX's, without a file type.
NEOX_BASE: tuple[SetKeys, ...] = (
    Copied(".context_length", "max_position_embeddings", required=True),
    Copied(".embedding_length", "hidden_size", required=True),
    BLOCK_COUNT,
    Copied(".feed_forward_length", "intermediate_size", required=True),
    Computed(
        ".rope.dimension_count",
        lambda config: int(config["rotary_pct"] * divided_head_dim(config)),
        inverse=_set_rotary_pct,
    ),
    Copied(".attention.head_count", "num_attention_heads", required=True),
    Copied(".use_parallel_residual", "use_parallel_residual", "flag", default=True),
    Copied(".attention.layer_norm_epsilon", "layer_norm_eps", "f32", required=True),
)


def _bloom_width(config: Config) -> int:
    return config.number("hidden_size", "n_embed")


def _bloom_heads(config: Config) -> int:
    return config.number("n_head", "num_attention_heads")


BLOOM_BASE: tuple[SetKeys, ...] = (
    Copied(".context_length", "seq_length hidden_size n_embed", required=True, exported="seq_length"),
    Copied(".embedding_length", "hidden_size n_embed", required=True),
    Computed(".feed_forward_length", lambda config: 4 * _bloom_width(config)),
    BLOCK_COUNT,
    Copied(".attention.head_count", "n_head num_attention_heads", required=True),
    Computed(".attention.head_count_kv", _bloom_heads),
    Copied(".attention.layer_norm_epsilon", "layer_norm_epsilon", "f32", required=True),
    FILE_TYPE,
)
_BLOOM = Architecture("bloom", rules=(Rename(r"transformer\.", ""), *SPLIT_HEADS), base=BLOOM_BASE)

ARCHITECTURES: dict[str, Architecture] = {
    "GPTNeoXForCausalLM": Architecture("gptneox", rules=SPLIT_HEADS, base=NEOX_BASE),
    "BloomForCausalLM": _BLOOM,
    "BloomModel": _BLOOM,
}

LAYER_NAMES = (
    "attention.query_key_value",
    "attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
    "input_layernorm",
)
#: The names of BLOOM and Falcon.
SELF_ATTENTION_NAMES = tuple(name.replace("attention.", "self_attention.") for name in LAYER_NAMES)

CLASSES: dict[str, HfClass] = {
    "GPTNeoXForCausalLM": HfClass(
        "gpt_neox",
        "embed_out gpt_neox.embed_in gpt_neox.final_layer_norm gpt_neox.layers.*.post_attention_layernorm "
        + " ".join(f"gpt_neox.layers.*.{name}" for name in LAYER_NAMES),
    ),
    "BloomForCausalLM": HfClass(
        "bloom",
        "word_embeddings word_embeddings_layernorm ln_f h.*.post_attention_layernorm "
        + " ".join(f"h.*.{name}" for name in SELF_ATTENTION_NAMES),
        renames=((r"^(?!lm_head)", "transformer."),),
    ),
}

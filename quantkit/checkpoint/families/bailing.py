"""Bailing: Ling and Ring, the first of them.

Facts of llama.cpp b11434, conversion/bailingmoe.py. Bailing V2 is in more_experts.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensors import Split
from quantkit.errors import TypeNotSupported


def _widths(config: Config) -> Sequence[int]:
    width = config.head_dim
    heads, kv = config.number("num_attention_heads"), config.number("num_key_value_heads")
    return heads * width, kv * width, kv * width


QUERY_KEY_VALUE = Split(
    r"attention\.query_key_value\.weight$", tuple(f"self_attn.{each}_proj.weight" for each in "qkv"), sizes=_widths
)
FIRST_KEYS: tuple[SetKeys, ...] = (
    Copied(".leading_dense_block_count", "first_k_dense_replace", needed=True),
    Copied(".vocab_size", "vocab_size", needed=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", needed=True),
    Always(".expert_weights_scale", 1.0, "f32"),
    Copied(".expert_shared_count", "num_shared_experts", needed=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", needed=True),
)


def refuse_normed_head(config: Config) -> None:
    """Refuse models whose output matrix is to be divided by the norms of its columns, sums of torch's own order."""
    if config.get("norm_head"):
        raise TypeNotSupported(f"{config.path}: norm_head is true; such a model is not converted by this version")

"""MiniMax M3. MiniMax M2 is in more_experts.py.

Facts of llama.cpp b11434, conversion/minimax.py.
"""

from __future__ import annotations

from itertools import takewhile

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.families.more_experts import MINIMAX_EXPERTS, MINIMAX_KEYS
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Full, plus_one

M3_RULES = (Changed(r"norm\.weight$", plus_one), Full(r"\.self_attn\.index(er\.|_)"), MINIMAX_EXPERTS)


def _set_sparse(keys: Keys, config: Config) -> None:
    sparse = config["sparse_attention_config"]
    for key, name in (
        ("head_count", "sparse_num_index_heads"),
        ("key_length", "sparse_index_dim"),
        ("top_k", "sparse_topk_blocks"),
        ("block_size", "sparse_block_size"),
        ("local_blocks", "sparse_local_block"),
    ):
        keys.u32(f".attention.indexer.{key}", sparse[name])
    keys.u32(".leading_dense_block_count", len(list(takewhile(lambda each: each == 0, config["moe_layer_freq"]))))


M3_KEYS: tuple[SetKeys, ...] = (
    *MINIMAX_KEYS,
    Copied(".expert_shared_count", "n_shared_experts", needed=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", needed=True),
    Always(".expert_weights_norm", True, "flag"),
    _set_sparse,
)

"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Dropped, Experts, Renamed, Split


def _heads(config: Config) -> tuple[int, ...]:
    """Return the rows of queries, keys and values in one matrix."""
    width, shared = config.head_dim, config.number("num_key_value_heads")
    return (config.number("num_attention_heads") * width, shared * width, shared * width)


RENAMED = Renamed(r"ernie\.", "model.", foreign=True)
FUSED = (
    Split(r"qkv_proj\.weight$", ("q_proj.weight", "k_proj.weight", "v_proj.weight"), sizes=_heads),
    Split(r"up_gate_proj\.weight$", ("gate_proj.weight", "up_proj.weight")),
)
#: What predicts more tokens is not converted.
PREDICTING = Dropped(r"^model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\.\d+")
EXPERTS = Experts(("gate_proj", "up_proj", "down_proj"))


def _set_shared_width(keys: Keys, config: Config) -> None:
    """Set the width of shared experts, and how many there are; that it depends on heads is the converter's."""
    shared = config.get("moe_num_shared_experts")
    if shared is None:
        return
    keys.u32(".expert_shared_count", shared)
    if shared and config.get("intermediate_size") is not None and config.get("num_key_value_heads"):
        width = config.number("intermediate_size") // config.number("num_key_value_heads")
        keys.u32(".expert_shared_feed_forward_length", width)


MOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_count", "moe_num_experts", needed=True),
    Copied(".expert_used_count", "moe_k", needed=True),
    Copied(".interleave_moe_layer_step", "moe_layer_interval", needed=True),
    Copied(".leading_dense_block_count", "moe_layer_start_index", needed=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size"),
    _set_shared_width,
)

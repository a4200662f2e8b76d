"""Models of which little is to be said but how experts are called: gpt-oss, MiniMax M2, Bailing V2, dots1."""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.families.deepseek import PREDICTING_LAYERS
from quantkit.checkpoint.families.glm import PartialRope
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Experts, Renamed, Split, transposed

#: gpt-oss: all experts in one tensor, stored the other way round, gate and up in turns.
GPT_OSS_EXPERTS = (
    Renamed(r"down_proj_bias$", "down_proj.bias"),
    Split(r"gate_up_proj_bias$", ("gate_proj.bias", "up_proj.bias"), -1, interleaved=True),
    Changed(r"experts\.(gate_up|down)_proj$", transposed),
    Renamed(r"down_proj$", "down_proj.weight"),
    Split(r"gate_up_proj$", ("gate_proj.weight", "up_proj.weight"), -2, interleaved=True),
)
GPT_OSS_KEYS: tuple[SetKeys, ...] = (
    Copied(".attention.sliding_window", "sliding_window", needed=True),
    Copied(".expert_feed_forward_length", "intermediate_size", needed=True),
)

MINIMAX_EXPERTS = Experts(
    weights=("w1", "w2", "w3"),
    name="model.layers.{layer}.block_sparse_moe.experts.{expert}.{weight}.weight",
    merged="model.layers.{layer}.block_sparse_moe.experts.{weight}.weight",
)
MINIMAX_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "intermediate_size"),
    Copied(".rope.dimension_count", "rotary_dim"),
)


def _set_bailing_shared(keys: Keys, config: Config) -> None:
    width = config.get("moe_shared_expert_intermediate_size")
    if width is None:
        width = config.number("moe_intermediate_size") * config.number("num_shared_experts")
    keys.u32(".expert_shared_feed_forward_length", width)


BAILING_KEYS: tuple[SetKeys, ...] = (
    PartialRope(),
    Copied(".leading_dense_block_count", "first_k_dense_replace", needed=True),
    Copied(".vocab_size", "vocab_size", needed=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", needed=True),
    _set_bailing_shared,
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", needed=True),
    Copied(".expert_shared_count", "num_shared_experts", needed=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", needed=True),
    PREDICTING_LAYERS,
)

DOTS_KEYS: tuple[SetKeys, ...] = (
    Copied(".leading_dense_block_count", "first_k_dense_replace", needed=True),
    Copied(".expert_shared_count", "n_shared_experts", needed=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", needed=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", needed=True),
)

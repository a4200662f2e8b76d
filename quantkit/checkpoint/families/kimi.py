"""Kimi Linear: layers of delta attention between those of DeepSeek's.

Facts of llama.cpp b11434, conversion/kimi_linear.py.
"""

from __future__ import annotations

from typing import Any

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Shaped
from quantkit.checkpoint.families.deepseek import LatentHeads
from quantkit.checkpoint.families.more_experts import MINIMAX_EXPERTS
from quantkit.checkpoint.keys import Keys, set_base_keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Renamed, Tensor, negative_exp
from quantkit.errors import FormatError


def _as_convolution(tensor: Tensor, context: Context) -> Expression:
    shape = tensor.x.shape
    if len(shape) not in (2, 3):
        raise ValueError("no convolution of single channels")
    return Shaped(tensor.x, (1, shape[0], 1, shape[-1]))


CONVOLUTIONS = Changed(r"\.[qkv]_conv1d\.weight$", _as_convolution)
LINEAR_RULES = (
    CONVOLUTIONS,
    Changed(r"\.A_log$", negative_exp),
    Renamed(r"\.dt_bias$", ".dt_proj.bias"),
    MINIMAX_EXPERTS,
    LatentHeads(),
)


def set_single_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """The base keys, of a single head of keys and values."""
    set_base_keys(keys, config.with_values({"num_key_value_heads": 1}), layers, file_type)


def _linear(config: Config) -> dict[str, Any]:
    found = config["linear_attn_config"]
    if not isinstance(found, dict):
        raise FormatError(f"{config.path}: linear_attn_config is no object")
    return found


def _set_linear(keys: Keys, config: Config) -> None:
    linear = _linear(config)
    full = linear["full_attn_layers"]  # counted from one
    keys.array(".attention.head_count_kv", [int(i + 1 in full) for i in range(config.layers)])
    if (kernel := linear.get("short_conv_kernel_size")) is not None:
        keys.u32(".ssm.conv_kernel", kernel)
    if (width := linear.get("head_dim")) is not None:
        keys.u32(".kda.head_dim", width)


def _set_latent(keys: Keys, config: Config) -> None:
    rank, rope = config.number("kv_lora_rank", "n_lora_kv"), config.number("qk_rope_head_dim", "n_rot")
    keys.u32(".attention.kv_lora_rank", rank)
    keys.u32(".rope.dimension_count", rope)
    keys.u32(".attention.key_length", rank + rope)
    keys.u32(".attention.key_length_mla", config.number("qk_nope_head_dim") + rope)
    keys.u32(".attention.value_length_mla", config["v_head_dim"])


LINEAR_KEYS: tuple[SetKeys, ...] = (
    Copied(".vocab_size", "vocab_size", needed=True),
    _set_linear,
    Copied(".attention.q_lora_rank", "q_lora_rank n_lora_q"),
    _set_latent,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", needed=True),
    Copied(".expert_shared_count", "num_shared_experts", needed=True),
    Copied(".leading_dense_block_count", "first_k_dense_replace", needed=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", needed=True),
)

"""Kimi Linear and K3: layers of delta attention between those of DeepSeek's.

Facts of llama.cpp b11434, conversion/kimi_linear.py, conversion/kimi_k3.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Mapped, Product, Shaped, size_of, taken
from quantkit.checkpoint.families.deepseek import LatentHeads
from quantkit.checkpoint.families.more_experts import MINIMAX_EXPERTS
from quantkit.checkpoint.keys import GATING, Keys, set_base_keys
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensor_names import file_name
from quantkit.checkpoint.tensors import Changed, Context, Dropped, Renamed, Tensor, negative_exp
from quantkit.errors import FormatError


def as_convolution(tensor: Tensor, context: Context) -> Expression:
    shape = tensor.x.shape
    if len(shape) not in (2, 3):
        raise ValueError("no convolution of single channels")
    return Shaped(tensor.x, (1, shape[0], 1, shape[-1]))


CONVOLUTIONS = Changed(r"\.[qkv]_conv1d\.weight$", as_convolution)
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


def set_latent(keys: Keys, config: Config, *, values: bool = False) -> None:
    """Set the sizes of latent attention; values: that of the rows as values, too."""
    rank, rope = config.number("kv_lora_rank", "n_lora_kv"), config.number("qk_rope_head_dim", "n_rot")
    keys.u32(".attention.kv_lora_rank", rank)
    keys.u32(".rope.dimension_count", rope)
    keys.u32(".attention.key_length", rank + rope)
    if values:
        keys.u32(".attention.value_length", rank)
    keys.u32(".attention.key_length_mla", config.number("qk_nope_head_dim") + rope)
    keys.u32(".attention.value_length_mla", config["v_head_dim"])


LINEAR_KEYS: tuple[SetKeys, ...] = (
    Copied(".vocab_size", "vocab_size", needed=True),
    _set_linear,
    Copied(".attention.q_lora_rank", "q_lora_rank n_lora_q"),
    set_latent,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", needed=True),
    Copied(".expert_shared_count", "num_shared_experts", needed=True),
    Copied(".leading_dense_block_count", "first_k_dense_replace", needed=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", needed=True),
)


# --- K3 --------------------------------------------------------------------------------------------------------------


def _has_latents(config: Config, layer: int) -> bool:
    """Tell whether a layer is one of DeepSeek's attention: they are counted from one."""
    return layer + 1 in _linear(config)["full_attn_layers"]


@dataclass(frozen=True)
class Scores:
    """A norm and a projection to one value, of what the layers before gave, become their product."""

    pattern: str = r"(self_attention_res|mlp_res|output_attn_res)_(norm|proj)\.weight$"

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None:
            return None
        kinds = {"self_attention_res": "*attn_res_score", "mlp_res": "*ffn_res_score"}
        kind = kinds.get(match[1], "output_res_score")
        number = -1 if tensor.layer is None else 2 * tensor.layer + (match[1] == "mlp_res")
        held = context.held.setdefault((id(self), number), {})
        held[match[2]] = tensor
        if len(held) < 2:
            return ()
        norm, proj = held.pop("norm"), held.pop("proj")
        if size_of(norm.x) != size_of(proj.x):
            raise context.fail(tensor, f"{size_of(proj.x)} values beside a norm of {size_of(norm.x)}")
        layer = tensor.layer if kind.startswith("*") else None
        name = file_name(kind, layer) + ".weight"
        return (replace(tensor, x=Product(norm.x, proj.x), name_in_file=name),)


@dataclass(frozen=True)
class Gates:
    """One name for two gates: of DeepSeek's attention, and of delta attention."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.layer is None or not tensor.name.endswith(".self_attn.g_proj.weight"):
            return None
        kind = "*attn_gate" if _has_latents(context.config, tensor.layer) else "*ssm_g"
        return (replace(tensor, name_in_file=file_name(kind, tensor.layer) + ".weight"),)


def of_heads(tensor: Tensor, context: Context) -> Expression:
    """Return -exp(x) of as many values as there are heads."""
    heads = min(context.config.number("num_attention_heads"), tensor.x.shape[0])
    return Mapped(taken(tensor.x, 0, range(heads)), "negative exp")


K3_STORED = (Dropped(r"^(vision_tower|mm_projector)\."),)
K3_RULES = (
    Scores(),
    CONVOLUTIONS,
    Changed(r"\.A_log$", of_heads),
    Renamed(r"\.dt_bias$", ".dt_proj.bias"),
    Gates(),
    MINIMAX_EXPERTS,
    LatentHeads(),
)


def _set_k3_layers(keys: Keys, config: Config) -> None:
    linear = _linear(config)
    keys.array(".attention.head_count_kv", [int(_has_latents(config, layer)) for layer in range(config.layers)])
    keys.u32(".ssm.conv_kernel", linear["short_conv_kernel_size"])
    keys.u32(".kda.head_dim", linear["head_dim"])
    if (bound := linear.get("gate_lower_bound")) is not None:
        keys.f32(".kda.gate_lower_bound", bound)


def _set_k3_latent(keys: Keys, config: Config) -> None:
    if not config.get("mla_use_nope") or config["moe_router_activation_func"] != "sigmoid":
        raise FormatError(f"{config.path}: K3 is only run with mla_use_nope and experts chosen by sigmoid")
    set_latent(keys, config, values=True)


K3_KEYS: tuple[SetKeys, ...] = (
    Copied(".vocab_size", "vocab_size", needed=True),
    _set_k3_layers,
    Copied(".attention.q_lora_rank", "q_lora_rank"),
    _set_k3_latent,
    *LINEAR_KEYS[-4:],
    Copied(".expert_weights_norm", "moe_renormalize", "flag", needed=True),
    Always(".expert_gating_func", GATING["sigmoid"]),
    Copied(".expert_latent_length", "routed_expert_hidden_size"),
    Copied(".activation.situ_beta", "activation_situ_beta", "f32", needed=True),
    Copied(".activation.situ_linear_beta", "activation_situ_linear_beta", "f32", needed=True),
    Copied(".attn_res.block_size", "attn_res_block_size", needed=True),
)

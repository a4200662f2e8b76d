"""Falcon H1 and Jamba: attention beside Mamba.

Facts of llama.cpp b11434, conversion/falcon_h1.py, conversion/jamba.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Multiplied, Shaped, joined, size_of, taken
from quantkit.checkpoint.families.granite import DT_BIAS
from quantkit.checkpoint.families.mamba import column
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Experts, Renamed, Tensor, negative_exp, squeezed
from quantkit.errors import FormatError

# --- Falcon H1 -------------------------------------------------------------------------------------------------------

FALCON_STORED = (DT_BIAS,)
#: Part of a name -> keys of what the model multiplies its outputs by, or their place in a list; the first counts.
_MULTIPLIERS: tuple[tuple[str, Sequence[tuple[str, int | None]]], ...] = (
    ("down_proj", (("mlp_multipliers", 1),)),
    ("gate_proj", (("mlp_multipliers", 0),)),
    ("k_proj", (("key_multiplier", None), ("attention_in_multiplier", None))),
    ("q_proj", (("attention_in_multiplier", None),)),
    ("v_proj", (("attention_in_multiplier", None),)),
    ("o_proj", (("attention_out_multiplier", None),)),
    ("out_proj", (("ssm_out_multiplier", None),)),
    ("in_proj", (("ssm_in_multiplier", None),)),
    ("lm_head", (("lm_head_multiplier", None),)),
    ("embed_tokens", (("embedding_multiplier", None),)),
)


@dataclass(frozen=True)
class Multipliers:
    """Weights take what the model multiplies by."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        config = context.config
        part, names = next((row for row in _MULTIPLIERS if row[0] in tensor.name), ("", ()))
        x = tensor.x
        for key, place in names:
            value = config[key] if place is None else config[key][place]
            x = Multiplied(x, factor=float(value))
        if part == "in_proj":
            x = _by_parts(x, tensor, context)
        return (replace(tensor, x=x),) if names else None


def _by_parts(x: Expression, tensor: Tensor, context: Context) -> Expression:
    """Multiply the rows of gates, inputs, B, C and steps by a number each."""
    config = context.config
    inner, state = config.number("mamba_d_ssm"), config.number("mamba_n_groups") * config.number("mamba_d_state")
    sizes = [inner, inner, state, state, x.shape[0] - 2 * inner - 2 * state]
    factors = config["ssm_multipliers"]
    if sizes[-1] < 0 or len(factors) != len(sizes):
        raise context.fail(tensor, f"its {x.shape[0]} rows are not those of the configuration")
    ends = list(accumulate(sizes))
    rows = [range(end - size, end) for size, end in zip(sizes, ends, strict=True) if size]
    return joined([Multiplied(taken(x, 0, r), factor=float(f)) for r, f in zip(rows, factors, strict=False)])


def grouped(tensor: Tensor, context: Context) -> Expression:
    n = context.config.number("n_groups", "mamba_n_groups")
    return Shaped(tensor.x, (n, size_of(tensor.x) // n))


FALCON_RULES = (
    Changed(r"\.mamba\.conv1d\.weight$", squeezed),
    Changed(r"\.mamba\.(A_log|D)$", column),
    Changed(r"\.mamba\.norm\.weight$", grouped),
    Changed(r"\.A_log$", negative_exp),
    Multipliers(),
)


def set_falcon_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Falcon H1: an order of their own."""
    inner, head = config.number("mamba_d_ssm"), config.find("mamba_d_head", "head_dim") or 64
    keys.u32(".context_length", config.get("max_position_embeddings", 0))
    keys.u32(".embedding_length", config.number("hidden_size", "d_model", "dim"))
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".attention.head_count", config["num_attention_heads"])
    keys.u32(".block_count", layers)
    keys.u32(".ssm.conv_kernel", config.find("conv_kernel", "d_conv", "mamba_conv_kernel", "mamba_d_conv") or 4)
    keys.u32(".ssm.inner_size", inner)
    keys.u32(".ssm.state_size", config.find("state_size", "d_state", "mamba_state_size", "mamba_d_state") or 128)
    keys.u32(".ssm.time_step_rank", inner // head)
    keys.u32(".ssm.group_count", config.number("n_groups", "mamba_n_groups"))
    keys.f32(".attention.layer_norm_rms_epsilon", config.find("layer_norm_epsilon", "rms_norm_eps") or 1e-5)
    keys.u32("general.file_type", file_type)


def check_order(config: Config) -> None:
    """Refuse norms that come before the gate: no key says so, and every runtime has them after it."""
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        raise FormatError(
            f"{config.path}: mamba_norm_before_gate is true, which GGUF cannot say: llama.cpp norms what the gate "
            "gives, so the file would be another model"
        )


def _set_heads(keys: Keys, config: Config) -> None:
    if config.get("hidden_act") not in (None, "silu") or config.number("mamba_d_ssm") % config.number("mamba_d_head"):
        raise FormatError(f"{config.path}: hidden_act is not silu, or mamba_d_ssm makes no heads of mamba_d_head")
    keys.u32(".attention.head_count_kv", config["num_key_value_heads"])
    keys.u32(".attention.key_length", config["head_dim"])
    keys.u32(".attention.value_length", config["head_dim"])
    keys.f32(".rope.freq_base", config.rope["rope_theta"])


FALCON_KEYS: tuple[SetKeys, ...] = (Copied(".vocab_size", "vocab_size", needed=True), _set_heads)

# --- Jamba -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnlyExpert:
    """Layers without experts may store what they have as the first one."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        layer, first = tensor.layer, context.config.number("expert_layer_offset")
        period = max(1, context.config.number("expert_layer_period"))
        if layer is None or ".experts.0." not in tensor.name or (layer >= first and (layer - first) % period == 0):
            return None
        return (replace(tensor, name=re.sub(r"\.experts\.0\.", ".", tensor.name)),)


JAMBA_RULES = (
    Renamed(r"\.moe\.", ".feed_forward.", foreign=True),
    OnlyExpert(),
    Experts(
        name="model.layers.{layer}.feed_forward.experts.{expert}.{weight}.weight",
        merged="model.layers.{layer}.mlp.experts.{weight}.weight",
    ),
    Changed(r"\.mamba\.conv1d\.weight$", squeezed),
    Changed(r"\.A_log$", negative_exp),
)


def set_jamba_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Jamba: an order of their own."""
    width, heads = config.number("hidden_size", "mamba_d_model"), config["num_key_value_heads"]
    offset, period = config.number("attn_layer_offset"), max(1, config.number("attn_layer_period"))
    attends = [i >= offset and (i - offset) % period == 0 for i in range(layers)]
    keys.u32(".block_count", layers)
    keys.u32(".context_length", config.number("max_position_embeddings", "n_ctx"))
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".attention.head_count", config["num_attention_heads"])
    keys.array(".attention.head_count_kv", [heads if each else 0 for each in attends])
    keys.u32(".ssm.conv_kernel", config.get("mamba_d_conv") or 4)
    keys.u32(".ssm.inner_size", config.number("mamba_expand") * width)
    keys.u32(".ssm.state_size", config.get("mamba_d_state") or 16)
    keys.u32(".ssm.time_step_rank", config.get("mamba_dt_rank") or -(width // -16))
    keys.f32(".attention.layer_norm_rms_epsilon", config.find("layer_norm_epsilon", "rms_norm_eps") or 1e-6)
    keys.u32(".expert_count", config.number("num_local_experts", "num_experts"))
    keys.u32(".expert_used_count", config.number("num_experts_per_tok", "num_experts_per_token"))
    keys.u32("general.file_type", file_type)

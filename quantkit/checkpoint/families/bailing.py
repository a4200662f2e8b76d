"""Bailing: Ling and Ring, the first and the third of them.

Facts of llama.cpp b11434, conversion/bailingmoe.py, conversion/bailingmoe3.py. Bailing V2 is in more_experts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Mapped, Shaped, size_of
from quantkit.checkpoint.families.deepseek import LatentHeads
from quantkit.checkpoint.families.glm import set_predicting_layers
from quantkit.checkpoint.families.kimi import CONVOLUTIONS, set_latent
from quantkit.checkpoint.keys import Keys, layers_in_file
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Experts, Renamed, Split, Tensor
from quantkit.errors import FormatError, TypeNotSupported


def _widths(config: Config) -> Sequence[int]:
    width = config.head_dim
    heads, kv = config.number("num_attention_heads"), config.number("num_key_value_heads")
    return heads * width, kv * width, kv * width


QUERY_KEY_VALUE = Split(
    r"attention\.query_key_value\.weight$",
    tuple(f"self_attn.{each}_proj.weight" for each in "qkv"),
    sizes=_widths,
    always=True,
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


# --- Bailing V3 ------------------------------------------------------------------------------------------------------


def attends(config: Config, layer: int) -> bool:
    """Tell whether a layer is one of attention, not of delta attention: the last of each group, and what follows."""
    layers, group = config.layers, config.number("layer_group_size")
    return layer >= layers // group * group or (layer + 1) % group == 0


@dataclass(frozen=True)
class Gates:
    """One name for two gates: of attention, and of delta attention."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.layer is None or not tensor.name.endswith(".attention.g_proj.weight"):
            return None
        own = "g_proj" if attends(context.config, tensor.layer) else "g_a_proj"
        return (replace(tensor, name=f"model.layers.{tensor.layer}.self_attn.{own}.weight"),)


def exponential(tensor: Tensor, context: Context) -> Expression:
    return Shaped(Mapped(tensor.x, "exp"), (size_of(tensor.x), 1))


def _v3_widths(config: Config, layer: int | None) -> tuple[int, int, int]:
    return config.number("num_attention_heads"), config.number("qk_nope_head_dim"), config.number("v_head_dim")


V3_STORED = (Renamed(r"\.expert_bias$", ".expert_bias.bias"),)
V3_RULES = (
    CONVOLUTIONS,
    Changed(r"\.A_log$", exponential),
    Renamed(r"\.dt_bias$", ".dt_proj.bias"),
    Renamed(r"\.attention\.f_proj\.weight$", ".self_attn.f_a_proj.weight"),
    Gates(),
    Experts(),
    LatentHeads(_v3_widths),
)


def _check(keys: Keys, config: Config) -> None:
    wanted = {"no_kda_lora": True, "kda_safe_gate": True, "gated_attention_proj_granularity_type": "head_wise"}
    for key, value in wanted.items():
        if config.get(key) != value:
            raise FormatError(f"{config.path}: {key} is not {value!r}, which is all that llama.cpp runs")
    layers = range(layers_in_file(keys))
    keys.array(".attention.head_count_kv", [int(attends(config, layer)) for layer in layers])


def _set_shared(keys: Keys, config: Config) -> None:
    keys.u32(".expert_shared_count", config.get("num_shared_experts", 1))


def _set_limits(keys: Keys, config: Config) -> None:
    n = layers_in_file(keys)
    for key, name in (
        (".swiglu_clamp_exp", "expert_swiglu_limit_list"),
        (".swiglu_clamp_shexp", "share_expert_swiglu_limit_list"),
    ):
        if (limits := config.get(name)) is not None:
            numbers = [0.0 if limit is None else float(limit) for limit in limits[:n]]
            keys.array(key, numbers + [0.0] * (n - len(numbers)))


V3_KEYS: tuple[SetKeys, ...] = (
    _check,
    Copied(".vocab_size", "vocab_size", needed=True),
    Copied(".ssm.conv_kernel", "short_conv_kernel_size", needed=True),
    Copied(".kda.head_dim", "head_dim", needed=True),
    Copied(".kda.safe_gate", "kda_safe_gate", "flag", needed=True),
    Copied(".kda.gate_lower_bound", "kda_lower_bound", "f32", needed=True),
    Copied(".attention.q_lora_rank", "q_lora_rank"),
    set_latent,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", needed=True),
    Copied(".expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", needed=True),
    _set_shared,
    Copied(".leading_dense_block_count", "first_k_dense_replace", needed=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", needed=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", needed=True),
    _set_limits,
    set_predicting_layers,
)


def set_sections(keys: Keys, config: Config) -> None:
    """Set how many pairs of rope stand for time, height and width."""
    sections = list(config["mrope_section"][:3])
    if 2 * sum(sections) != config.number("qk_rope_head_dim"):
        raise FormatError(f"{config.path}: mrope_section is {sections}, not all pairs of qk_rope_head_dim")
    keys.array(".rope.dimension_sections", [*sections, 0])

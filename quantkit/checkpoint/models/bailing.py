"""Bailing: Ling and Ring, 1 to 3.

Facts of llama.cpp b11434, conversion/bailingmoe.py, conversion/bailingmoe3.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, Mapped, Shaped, size_of
from quantkit.checkpoint.keys import Keys, layers_in_file
from quantkit.checkpoint.models import deepseek, glm, kimi, llama
from quantkit.checkpoint.nextn import NEXTN_KEY, layers_with_nextn, set_nextn_layers
from quantkit.checkpoint.row import LAYER, Always, Architecture, Copied, HfClass, SetKeys, prefixed
from quantkit.checkpoint.rules import Drop, Rename, Split, StackExperts, Transform, flatten
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.errors import FormatError, TypeNotSupported

V3_STORED = (Rename(r"\.expert_bias$", ".expert_bias.bias"),)


@dataclass(frozen=True)
class RenameGates(Rule):
    """One name for two gates: of attention, and of delta attention."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.layer is None or not tensor.name.endswith(".attention.g_proj.weight"):
            return None
        gate_name = "g_proj" if is_attention_layer(context.config, tensor.layer) else "g_a_proj"
        return (replace(tensor, name=f"model.layers.{tensor.layer}.self_attn.{gate_name}.weight"),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Call both gates by one name."""
        name = re.sub(r"\.self_attn\.g_(a_)?proj\.", ".attention.g_proj.", tensor.name)
        return None if name == tensor.name else (replace(tensor, name=name),)


def exponentiate(tensor: Tensor, context: Context) -> Expression:
    return Shaped(Mapped(tensor.x, "exp"), (size_of(tensor.x), 1))


def _v3_widths(config: Config, layer: int | None) -> tuple[int, int, int]:
    return config.number("num_attention_heads"), config.number("qk_nope_head_dim"), config.number("v_head_dim")


def flat_log(tensor: Tensor, context: Context) -> Expression:
    return Mapped(flatten(tensor, context), "log")


V3_RULES = (
    kimi.CONVOLUTIONS,
    Transform(r"\.A_log$", exponentiate, flat_log),
    Rename(r"\.dt_bias$", ".dt_proj.bias"),
    Rename(r"\.attention\.f_proj\.weight$", ".self_attn.f_a_proj.weight"),
    RenameGates(),
    StackExperts(),
    deepseek.SplitLatentHeads(_v3_widths),
)


def _refuse_unsupported(keys: Keys, config: Config) -> None:
    supported = {"no_kda_lora": True, "kda_safe_gate": True, "gated_attention_proj_granularity_type": "head_wise"}
    for key, value in supported.items():
        if config.get(key) != value:
            raise FormatError(f"{config.path}: {key} is not {value!r}, which is all that llama.cpp runs", "QK-E305")
    layers = range(layers_in_file(keys))
    keys.array(".attention.head_count_kv", [int(is_attention_layer(config, layer)) for layer in layers])


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
    _refuse_unsupported,
    Copied(".vocab_size", "vocab_size", required=True),
    Copied(".ssm.conv_kernel", "short_conv_kernel_size", required=True),
    Copied(".kda.head_dim", "head_dim", required=True),
    Copied(".kda.safe_gate", "kda_safe_gate", "flag", required=True),
    Copied(".kda.gate_lower_bound", "kda_lower_bound", "f32", required=True),
    Copied(".attention.q_lora_rank", "q_lora_rank"),
    kimi.set_latent,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Copied(".expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", required=True),
    _set_shared,
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
    _set_limits,
    set_nextn_layers,
)


def _widths(config: Config) -> Sequence[int]:
    width = config.head_dim
    heads, kv = config.number("num_attention_heads"), config.number("num_key_value_heads")
    return heads * width, kv * width, kv * width


SPLIT_QKV = Split(
    r"attention\.query_key_value\.weight$",
    tuple(f"self_attn.{item}_proj.weight" for item in "qkv"),
    sizes=_widths,
    always=True,
)

MOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    Copied(".vocab_size", "vocab_size", required=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Always(".expert_weights_scale", 1.0, "f32"),
    Copied(".expert_shared_count", "num_shared_experts", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
)


def refuse_normed_head(config: Config) -> None:
    """Refuse models that divide the output matrix by its column norms, which depend on torch's order of sums."""
    if config.get("norm_head"):
        raise TypeNotSupported(
            f"{config.path}: norm_head is true; such a model is not converted by this version", "QK-E305"
        )


def is_attention_layer(config: Config, layer: int) -> bool:
    """Return whether a layer has full attention: the last of each group, and the layers after the last group."""
    layers, group = config.layers, config.number("layer_group_size")
    return layer >= layers // group * group or (layer + 1) % group == 0


def set_sections(keys: Keys, config: Config) -> None:
    """Set the number of rope pairs for time, height and width."""
    sections = list(config["mrope_section"][:3])
    if 2 * sum(sections) != config.number("qk_rope_head_dim"):
        raise FormatError(f"{config.path}: mrope_section is {sections}, not all pairs of qk_rope_head_dim", "QK-E112")
    keys.array(".rope.dimension_sections", [*sections, 0])


def _set_bailing_shared(keys: Keys, config: Config) -> None:
    width = config.get("moe_shared_expert_intermediate_size")
    if width is None:
        width = config.number("moe_intermediate_size") * config.number("num_shared_experts")
    keys.u32(".expert_shared_feed_forward_length", width)


V2_KEYS: tuple[SetKeys, ...] = (
    glm.PartialRope(),
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    Copied(".vocab_size", "vocab_size", required=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    _set_bailing_shared,
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
    Copied(".expert_shared_count", "num_shared_experts", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
    NEXTN_KEY,
)

_BAILING_V3 = Architecture(
    "bailingmoe3",
    stored=V3_STORED,
    rules=V3_RULES,
    base=kimi.set_single_base,
    keys=V3_KEYS,
    layers=layers_with_nextn,
    nextn=True,
)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "BailingMoeV2ForCausalLM": Architecture(
        "bailingmoe2",
        stored=(Rename(r"\.expert_bias$", ".expert_bias.bias"),),
        rules=(StackExperts(),),
        keys=V2_KEYS,
        layers=layers_with_nextn,
    ),
    "BailingMoeForCausalLM": Architecture(
        "bailingmoe",
        rules=(SPLIT_QKV, *llama.ROPE_PERMUTED, StackExperts()),
        keys=(llama.set_rope_width, *MOE_KEYS),
        patch_config=refuse_normed_head,
    ),
    "BailingMoeV3ForCausalLM": _BAILING_V3,
    "BailingMoeV3VLForConditionalGeneration": replace(
        _BAILING_V3,
        stored=(Drop(r"^linear_proj"), *V3_STORED),
        keys=(*V3_KEYS, set_sections),
    ),
}


def set_shared_expert_width(meta: ModelMetadata, config: Json) -> None:
    """Set the width of shared experts, if it differs from that of routed ones (Bailing)."""
    width = meta.get(".expert_shared_feed_forward_length")
    if width is not None and width != config["moe_intermediate_size"] * config["num_shared_experts"]:
        config["moe_shared_expert_intermediate_size"] = width


def _set_layer_groups(meta: ModelMetadata, config: Json) -> None:
    """Set the period of layers with attention, and the head width of delta attention (Bailing V3)."""
    attends = meta.per_layer(".attention.head_count_kv")
    config["layer_group_size"] = next((i + 1 for i, is_attention in enumerate(attends) if is_attention), len(attends))
    config["head_dim"] = meta.number(".kda.head_dim")


def _rename_output(config: Config, name: str) -> str:
    """Rename the output matrix of full attention, which differs from that of delta attention."""
    match = re.fullmatch(r"(model\.layers\.(\d+)\.attention\.)(?:dense|o_proj)(\..*)", name)
    if match is None:
        return name
    return f"{match[1]}{'dense' if is_attention_layer(config, int(match[2])) else 'o_proj'}{match[3]}"


_BAILING_V3_CLASS = HfClass(
    "bailing_hybrid",
    "model.word_embeddings "
    + prefixed(
        f"{LAYER}attention.",
        "q_proj k_proj v_proj dense q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj k_b_proj v_b_proj q_a_layernorm "
        "kv_a_layernorm q_conv1d k_conv1d v_conv1d o_norm A_log dt_proj b_proj",
    )
    + f" {LAYER}self_attn.g_proj {LAYER}mlp.gate.expert_bias {LAYER}final_layernorm",
    keys={
        ".expert_count": "num_experts",
        ".expert_shared_count": "num_shared_experts",
        ".expert_gating_func": "score_function",
        ".swiglu_clamp_exp": "expert_swiglu_limit_list",
        ".swiglu_clamp_shexp": "share_expert_swiglu_limit_list",
    },
    # All that llama.cpp runs.
    defaults={"no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise"},
    config_setters=(config_values.subtract_nextn_layers, config_values.set_latent_widths, _set_layer_groups),
    rename_last=_rename_output,
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "BailingMoeV2ForCausalLM": HfClass(
        "bailing_moe",
        "model.word_embeddings model.layers.*.attention.query_key_value model.layers.*.attention.dense "
        "model.layers.*.attention.query_layernorm model.layers.*.attention.key_layernorm "
        "model.layers.*.mlp.gate.expert_bias model.layers.*.final_layernorm",
        keys={".expert_count": "num_experts", ".expert_shared_count": "num_shared_experts"},
        defaults={"moe_router_enable_expert_bias": True},
        config_setters=(
            config_values.subtract_nextn_layers,
            config_values.set_rotary_part,
            set_shared_expert_width,
            config_values.set_head_norms,
        ),
    ),
    "BailingMoeForCausalLM": HfClass(
        "bailing_moe",
        f"{LAYER}attention.dense model.word_embeddings",
        keys={".expert_shared_count": "num_shared_experts"},
        defaults={"norm_head": False},
    ),
    "BailingMoeV3ForCausalLM": _BAILING_V3_CLASS,
}

"""Bailing: Ling and Ring, 1 to 3; Sarvam-M MoE, which is built like Bailing 2.

Facts of llama.cpp b11434, conversion/bailingmoe.py, conversion/bailingmoe3.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.encoder_rules import NameInFile
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import (
    Expression,
    Mapped,
    Shaped,
    as_f32,
    from_f32,
    read_f32,
    size_of,
    value_bytes,
    values_in,
)
from quantkit.checkpoint.hf_encoders import REMOTE_NOTE, HfEncoders, of_text_class
from quantkit.checkpoint.key_rows import (
    VOCAB_SIZE,
    Always,
    Computed,
    Copied,
    KeyGroup,
    SetKeys,
    SwigluLimits,
    rotary_width,
)
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import Mmproj, MmprojConfig, projector
from quantkit.checkpoint.models import deepseek, kimi, llama, qwen_vl
from quantkit.checkpoint.nextn import NEXTN_IF_ANY, NEXTN_KEY, layers_with_nextn
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import ROUTER_BIAS, Drop, Rename, Split, StackExperts, Transform, flatten
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType


@dataclass(frozen=True)
class RenameGates(Rule):
    """A common name of two gates: of attention, and of delta attention."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.layer is None or not tensor.name.endswith(".attention.g_proj.weight"):
            return None
        gate_name = "g_proj" if is_attention_layer(context.config, tensor.layer) else "g_a_proj"
        return (replace(tensor, name=f"model.layers.{tensor.layer}.self_attn.{gate_name}.weight"),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Rename both gates to a common name."""
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


def refuse_settings(keys: Keys, config: Config) -> None:
    """Refuse settings of Bailing V3 that llama.cpp does not support."""
    supported = {"no_kda_lora": True, "kda_safe_gate": True, "gated_attention_proj_granularity_type": "head_wise"}
    for key, value in supported.items():
        if config.get(key) != value:
            raise FormatError(
                f"{config.path}: {key} is not {value!r}, the only value that llama.cpp supports", "QK-E305"
            )


def _set_attention_layers(keys: Keys, config: Config) -> None:
    layers = range(keys.layers)
    keys.array(".attention.head_count_kv", [int(is_attention_layer(config, layer)) for layer in layers])


def _set_layer_groups(meta: ModelMetadata, config: Json) -> None:
    """Set the period of layers with attention."""
    attends = meta.per_layer(".attention.head_count_kv")
    config["layer_group_size"] = next((i + 1 for i, is_attention in enumerate(attends) if is_attention), len(attends))


V3_KEYS: tuple[SetKeys, ...] = (
    refuse_settings,
    KeyGroup(_set_attention_layers, _set_layer_groups),
    VOCAB_SIZE,
    Copied(".ssm.conv_kernel", "short_conv_kernel_size", required=True),
    Copied(".kda.head_dim", "head_dim", required=True),
    Copied(".kda.safe_gate", "kda_safe_gate", "flag", required=True),
    Copied(".kda.gate_lower_bound", "kda_lower_bound", "f32", required=True),
    Copied(".attention.q_lora_rank", "q_lora_rank"),
    *kimi.LATENT_KEYS,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Copied(".expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", required=True),
    Copied(".expert_shared_count", "num_shared_experts", default=1),
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
    SwigluLimits(".swiglu_clamp_exp", "expert_swiglu_limit_list"),
    SwigluLimits(".swiglu_clamp_shexp", "share_expert_swiglu_limit_list"),
    NEXTN_IF_ANY,
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
    VOCAB_SIZE,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Always(".expert_weights_scale", 1.0, "f32", "routed_scaling_factor"),
    Copied(".expert_shared_count", "num_shared_experts", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
)


def refuse_normed_head(config: Config) -> None:
    """Refuse models that divide the output matrix by its column norms, which depend on torch's order of sums."""
    if config.get("norm_head"):
        raise TypeNotSupported(f"{config.path}: norm_head is true, which this version does not convert", "QK-E305")


def is_attention_layer(config: Config, layer: int) -> bool:
    """Return whether a layer has full attention: the last of each group, and the layers after the last group."""
    layers, group = config.layers, config.number("layer_group_size")
    return layer >= layers // group * group or (layer + 1) % group == 0


def set_sections(keys: Keys, config: Config) -> None:
    """Set the number of rope pairs for time, height and width."""
    sections = list(config["mrope_section"][:3])
    if 2 * sum(sections) != config.number("qk_rope_head_dim"):
        raise FormatError(
            f"{config.path}: mrope_section is {sections}, which does not cover qk_rope_head_dim", "QK-E112"
        )
    keys.array(".rope.dimension_sections", [*sections, 0])


def _shared_width(config: Config) -> int:
    width: int | None = config.get("moe_shared_expert_intermediate_size")
    return config.number("moe_intermediate_size") * config.number("num_shared_experts") if width is None else width


def _set_shared_width(meta: ModelMetadata, config: Json) -> None:
    """Set the width of shared experts, if it differs from that of routed ones."""
    width, shared = meta.get(".expert_shared_feed_forward_length"), meta.get(".expert_shared_count") or 0
    if width is not None and width != meta.number(".expert_feed_forward_length") * shared:
        config["moe_shared_expert_intermediate_size"] = width


V2_KEYS: tuple[SetKeys, ...] = (
    rotary_width(0.5),
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    VOCAB_SIZE,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Computed(".expert_shared_feed_forward_length", _shared_width, inverse=_set_shared_width),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
    Copied(".expert_shared_count", "num_shared_experts", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
    NEXTN_KEY,
)


def subtract_mean(tensor: Tensor, context: Context) -> Expression:
    return Centered(tensor.x)


#: The bias of the router, with its mean subtracted.
CENTER_ROUTER_BIAS = Transform(r"\.expert_bias$", subtract_mean, None)


@dataclass(frozen=True)
class Centered:
    """A vector with its mean subtracted, in the type it is stored in, as torch computes it."""

    x: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def type(self) -> TensorType:
        return self.x.type

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        values = read_f32(self.x, 0, size_of(self.x))
        mean = np.empty(value_bytes(self.type, 1), np.uint8)
        from_f32(self.type, np.array([values.mean(dtype=np.float64)], np.float32), mean)
        n = values_in(self.type, out.size)
        from_f32(self.type, values[start : start + n] - as_f32(self.type, mean), out)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


_SARVAM = Architecture(
    "bailingmoe2",
    stored=(CENTER_ROUTER_BIAS, ROUTER_BIAS),
    rules=(StackExperts(),),
    keys=(*V2_KEYS, llama.ROPE_WIDTH),
    layers=layers_with_nextn,
)
_BAILING_V3 = Architecture(
    "bailingmoe3",
    stored=(ROUTER_BIAS,),
    rules=V3_RULES,
    base=kimi.SINGLE_BASE,
    keys=V3_KEYS,
    layers=layers_with_nextn,
    nextn=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    "BailingMoeV2ForCausalLM": Architecture(
        "bailingmoe2",
        stored=(ROUTER_BIAS,),
        rules=(StackExperts(),),
        keys=V2_KEYS,
        layers=layers_with_nextn,
    ),
    "BailingMoeForCausalLM": Architecture(
        "bailingmoe",
        rules=(SPLIT_QKV, *llama.ROPE_PERMUTED, StackExperts()),
        keys=(llama.ROPE_WIDTH, *MOE_KEYS),
        patch_config=refuse_normed_head,
    ),
    "SarvamMoEForCausalLM": _SARVAM,
    "modeling_sarvam_moe.SarvamMoEForCausalLM": _SARVAM,
    "BailingMoeV3ForCausalLM": _BAILING_V3,
    "BailingMoeV3VLForConditionalGeneration": replace(
        _BAILING_V3,
        stored=(Drop(r"^linear_proj"), ROUTER_BIAS),
        keys=(*V3_KEYS, set_sections),
    ),
}


def _rename_output(config: Config, name: str) -> str:
    """Rename the output matrix of full attention, which differs from that of delta attention."""
    match = re.fullmatch(r"(model\.(?:language_model\.)?layers\.(\d+)\.attention\.)(?:dense|o_proj)(\..*)", name)
    if match is None:
        return name
    return f"{match[1]}{'dense' if is_attention_layer(config, int(match[2])) else 'o_proj'}{match[3]}"


CLASSES: dict[str, HfClass] = {
    "BailingMoeV2ForCausalLM": HfClass(
        "bailing_moe",
        "model.word_embeddings model.layers.*.attention.query_key_value model.layers.*.attention.dense "
        "model.layers.*.attention.query_layernorm model.layers.*.attention.key_layernorm "
        "model.layers.*.mlp.gate.expert_bias model.layers.*.final_layernorm",
        keys={".expert_count": "num_experts"},
        defaults={"moe_router_enable_expert_bias": True},
        config_setters=(config_values.set_head_norms,),
    ),
    "BailingMoeForCausalLM": HfClass(
        "bailing_moe",
        f"{LAYER}attention.dense model.word_embeddings",
        defaults={"norm_head": False},
    ),
    "BailingMoeV3ForCausalLM": HfClass(
        "bailing_hybrid",
        "model.word_embeddings "
        + add_prefix(
            f"{LAYER}attention.",
            "q_proj k_proj v_proj dense q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj k_b_proj v_b_proj q_a_layernorm "
            "kv_a_layernorm q_conv1d k_conv1d v_conv1d o_norm A_log dt_proj b_proj",
        )
        + f" {LAYER}self_attn.g_proj {LAYER}mlp.gate.expert_bias {LAYER}final_layernorm",
        keys={".expert_count": "num_experts", ".expert_gating_func": "score_function"},
        # The only values that llama.cpp runs.
        defaults={"no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise"},
        rename_last=_rename_output,
    ),
}


# --- Encoders of Ling 3 VL --------------------------------------------------------------------------------------------


def _patch_ling(config: MmprojConfig) -> None:
    """Refuse encoders whose merger has a projection, which llama.cpp does not compute."""
    qwen_vl.patch_qwen3(config)
    if config.vision.get("disable_merger_proj") is not True:
        raise FormatError(f"{config.path}: disable_merger_proj of the vision encoder must be true", "QK-E305")
    config.vision.number("out_hidden_size")


MMPROJ: dict[str, Mmproj] = {
    "BailingMoeV3VLForConditionalGeneration": replace(
        qwen_vl.QWEN3_VL,
        keys=(projector("ling3vl"), *qwen_vl.QWEN3_ENCODER_KEYS),
        tensors=r"^(visual\.|linear_proj)",
        rules=(
            *qwen_vl.QWEN3_VL.rules,
            NameInFile(r"^linear_proj\.(\d+)\.([^.]+)$", r"mm.\1.\2"),
            NameInFile(r"^visual\.merger\.norm\.(weight|bias)$", r"mm.input_norm.\1"),
        ),
        patch_config=_patch_ling,
    ),
}


# --- export ----------------------------------------------------------------------------------------------------------


def _set_sections(meta: ModelMetadata, config: Json) -> None:
    """Set the sections of rope, which this class has outside of its scaling."""
    config["mrope_section"] = (config.pop("rope_scaling", None) or {}).get("mrope_section")


def _set_ling(meta: ClipMetadata, config: Json) -> None:
    """Describe the tower of Qwen3-VL, whose merger only norms; the projector is outside of it."""
    qwen_vl.set_qwen3(meta, config)
    width = config["vision_config"]["hidden_size"]
    merged = meta.shape("mm.0.weight")[1] // max(1, width)
    config["vision_config"] |= {
        "disable_merger_proj": True,
        "out_hidden_size": width,
        "spatial_merge_size": math.isqrt(merged),
    }


HF_ENCODERS: dict[str, HfEncoders] = {
    "BailingMoeV3VLForConditionalGeneration": HfEncoders(
        "ling3vl",
        of_text_class(
            CLASSES["BailingMoeV3ForCausalLM"],
            "bailing_moe_v3_vl",
            "model.language_model.",
            config_setters=(_set_sections,),
            note=f"BailingMoeV3VLForConditionalGeneration {REMOTE_NOTE}",
        ),
        qwen_vl.QWEN3_NAMES,
        _set_ling,
        qwen_vl.qwen_preprocessor,
        {"mm.0": "linear_proj.0", "mm.2": "linear_proj.2", "mm.input_norm": "visual.merger.norm"},
    ),
}

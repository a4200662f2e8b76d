"""Nemotron, and Nemotron H with layers of Mamba 2, attention and experts.

Facts of llama.cpp b11434, conversion/nemotron.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import VOCAB_SIZE, Computed, Copied, SetKeys, Where, set_rotary_part, write_rows
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import granite, llama, mamba
from quantkit.checkpoint.nextn import NEXTN_IF_ANY
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Drop, Rename, StackExperts, Transform, minus_one, plus_one
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.tokenizer import Vocabulary, checked_size
from quantkit.errors import FormatError

NEMOTRON_STORED = (
    mamba.DT_BIAS,
    granite.DROP_OTHER_PARTS,
    Rename(r"^model\.layers\.(?=.*\.mixer\.)", "backbone.layers.", foreign=True),
)

MTP_NAMES = {
    "0.enorm.weight": "enorm.weight",
    "0.hnorm.weight": "hnorm.weight",
    "0.eh_proj.weight": "eh_proj.weight",
    "1.norm.weight": "post_attention_layernorm.weight",
    "1.final_layernorm.weight": "shared_head.norm.weight",
}


@dataclass(frozen=True)
class RenameMtpLayer(Rule):
    """Splits the prediction layer (MTP) into two: attention, and experts.

    A tensor's type is that of its stored layer, as in the reference, except for experts, which are collected in their
    new layer.
    """

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.match(r"mtp\.layers\.([01]\.(.+))$", tensor.name)
        if match is None:
            return None
        layer = context.config.layers
        new_name = (
            f"model.layers.{layer}.{MTP_NAMES[match[1]]}"
            if match[1] in MTP_NAMES
            else f"backbone.layers.{layer}.{match[2]}"
        )
        return (replace(tensor, name=new_name, layer=layer if ".experts." in new_name else tensor.layer),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Split the prediction layer (MTP): attention, and experts."""
        match = re.fullmatch(r"(?:backbone|model)\.layers\.(\d+)\.(.+)", tensor.name)
        if match is None or int(match[1]) < context.config.layers:
            return None
        stems = {stem: name for name, stem in MTP_NAMES.items()}
        first = match[2] == "norm.weight" or re.match(r"mixer\.[qkvo]_proj\.", match[2])
        return (replace(tensor, name=f"mtp.layers.{stems.get(match[2], f'{0 if first else 1}.{match[2]}')}"),)


NEMOTRON_RULES = (
    RenameMtpLayer(),
    *mamba.MAMBA2_RULES,
    StackExperts(
        weights=("down_proj", "up_proj"),
        name="backbone.layers.{layer}.mixer.experts.{expert}.{weight}.weight",
    ),
    *llama.ROPE_PERMUTED,
)


def prepare_nemotron(config: Config) -> None:
    """Set the number of layers; keep the width of heads under a name that Granite's conversion does not change."""
    if isinstance(kinds := config.get("layers_block_type"), list):
        config.values["num_hidden_layers"] = len(kinds)
    config.values["attention_head_dim"] = config.find("head_dim", "attention_head_dim")
    if config.values["attention_head_dim"] is None:
        raise FormatError(f"{config.path}: has no head_dim or attention_head_dim", "QK-E112")
    granite.drop_head_dim(config)


def layers_with_mtp(config: Config) -> int:
    """Return the number of layers, including the prediction layer (MTP)."""
    nextn = (config.get("num_nextn_predict_layers", 0) or 0) if has_experts(config) else 0
    if nextn not in (0, 1):
        raise FormatError(f"{config.path}: {nextn} prediction layers (MTP); only one is supported", "QK-E305")
    return config.layers + int(nextn)


def _set_mamba(keys: Keys, config: Config, kinds: list[str]) -> None:
    """Set the keys of Mamba and attention layers, as for Granite."""
    changed = config.without("expand", "mamba_expand").with_values(
        {"layer_types": kinds, "num_hidden_layers": keys.layers}
    )
    write_rows(granite.MAMBA_KEYS, keys, changed)


def _set_attention_layers(keys: Keys, config: Config) -> None:
    kinds, nextn = _layer_kinds(config), keys.layers - config.layers
    _set_mamba(keys, config, ["attention" if kind == "*" else "mamba" for kind in kinds] + ["attention"] * nextn)


def _set_feed_forward_layers(keys: Keys, config: Config) -> None:
    moe = has_experts(config)
    width = (
        config.number("moe_intermediate_size") if moe else config.number("intermediate_size", "n_inner", "hidden_dim")
    )
    has_ffn = [kind == ("E" if moe else "-") for kind in _layer_kinds(config)]
    has_ffn += [True] * (keys.layers - config.layers)
    keys.array(".feed_forward_length", [width if item else 0 for item in has_ffn])


_HEAD_WIDTHS: tuple[SetKeys, ...] = (
    Copied(".attention.key_length", "attention_head_dim", required=True, exported="head_dim"),
    Copied(".attention.value_length", "attention_head_dim", required=True, exported="head_dim"),
)
_SHARED_EXPERTS = (
    Copied(".expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", required=True),
    Copied(".expert_count", "n_routed_experts", required=True),
    Copied(".expert_shared_count", "n_shared_experts", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
    Copied(".expert_group_count", "n_group", required=True),
)
_EXPERTS = (
    Copied(".expert_used_count", "num_experts_per_tok", required=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    *_SHARED_EXPERTS,
    Copied(".moe_latent_size", "moe_latent_size"),
    NEXTN_IF_ANY,
)


def has_experts(config: Config) -> bool:
    """Return whether the model is a mixture of experts."""
    return "num_experts_per_tok" in config


NEMOTRON_KEYS: tuple[SetKeys, ...] = (
    *granite.MOE_KEYS,
    _set_attention_layers,
    *_HEAD_WIDTHS,
    _set_feed_forward_layers,
    Where(has_experts, _EXPERTS),
)


def _layer_kinds(config: Config) -> list[str]:
    """Return the kind of each layer: M, *, E or -."""
    pattern = config.get("hybrid_override_pattern") or config.get("layers_block_type") or ""
    if isinstance(pattern, str):
        return list(pattern)
    letters = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E"}
    return [letters.get(kind, "") for kind in pattern]


PUZZLE_STORED = (
    *NEMOTRON_STORED[:2],
    Drop(r"^mtp\."),  # of a layout that llama.cpp does not run
    Rename(r"^model\.", "backbone."),
)


def prepare_puzzle(config: Config) -> None:
    """Derive the layer kinds and their number from block_configs (NemotronHPuzzleModel)."""
    config.values["layers_block_type"] = [block["block_type"] for block in config["block_configs"]]
    config.values.pop("hybrid_override_pattern", None)
    prepare_nemotron(config)


def _set_blocks(keys: Keys, config: Config) -> None:
    blocks, attends = config["block_configs"], ("attention", "full_attention")
    _set_mamba(keys, config, ["attention" if block["block_type"] in attends else "mamba" for block in blocks])
    write_rows(_HEAD_WIDTHS, keys, config)
    widths = [block.get("moe_intermediate_size") or 0 for block in blocks]
    keys.array(".feed_forward_length", widths)
    keys.array(".expert_feed_forward_length", widths)
    keys.array(".expert_used_count", [block.get("num_experts_per_tok") or 0 for block in blocks])


PUZZLE_KEYS: tuple[SetKeys, ...] = (
    *granite.MOE_KEYS,
    _set_blocks,
    *_SHARED_EXPERTS,
    Copied(".moe_latent_size", "moe_latent_size", required=True),
)


def _rope_width(config: Config) -> int:
    width, heads = config.number("hidden_size", "n_embd"), config.number("num_attention_heads", "n_head")
    return int(config.rotary_part(None) * width) // max(1, heads)


def _scaling_factor(config: Config) -> Any:
    return config.get("factor") or config.rope.get("factor")


def _scaling_type(config: Config) -> str:
    return "none" if _scaling_factor(config) is None else "linear"


#: Of Nemotron, the dense one.
DENSE_KEYS: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    Copied(
        ".attention.layer_norm_epsilon",
        "layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
        "f32",
        required=True,
        exported="norm_eps",
    ),
    Computed(".rope.dimension_count", _rope_width, inverse=set_rotary_part),
    Computed(".rope.scaling.type", _scaling_type, "text"),
    Computed(".rope.scaling.factor", _scaling_factor, "f32"),
)


def write_nemotron(v: Vocabulary) -> None:
    """Write a SentencePiece vocabulary with the padding and unknown ids that files lack (NemotronModel)."""
    write_sentencepiece(v)
    v.keys.u32("tokenizer.ggml.padding_token_id", 0)
    v.keys.u32("tokenizer.ggml.unknown_token_id", 1)


def write_nemotron_h(v: Vocabulary) -> None:
    """Write a BPE vocabulary, padded to a multiple of eight tokens (NemotronHModel)."""
    v.config.values["vocab_size"] = -(checked_size(v, v.config["vocab_size"], 0) // -8) * 8
    write_bpe(v)


_NEMOTRON_H_MOE = Architecture(
    "nemotron_h_moe",
    stored=NEMOTRON_STORED,
    rules=NEMOTRON_RULES,
    keys=NEMOTRON_KEYS,
    vocab=write_nemotron_h,
    layers=layers_with_mtp,
    patch_config=prepare_nemotron,
    nextn=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    "NemotronHPuzzleForCausalLM": Architecture(
        "nemotron_h_moe",
        stored=PUZZLE_STORED,
        rules=NEMOTRON_RULES,
        keys=PUZZLE_KEYS,
        vocab=write_nemotron_h,
        patch_config=prepare_puzzle,
    ),
    "NemotronForCausalLM": Architecture(
        "nemotron",
        rules=(Transform(r"norm\.weight$", plus_one, minus_one),),
        keys=DENSE_KEYS,
        vocab=write_nemotron,
    ),
    "NemotronHForCausalLM": replace(
        _NEMOTRON_H_MOE,
        arch="nemotron_h",
        dispatch=lambda config: _NEMOTRON_H_MOE if has_experts(config) else None,
    ),
}


def _set_layer_pattern(meta: ModelMetadata, config: Json) -> None:
    """Set hybrid_override_pattern, one letter per layer, and the settings of Mamba layers."""
    attends, ffn_widths = meta.per_layer(".attention.head_count_kv"), meta.per_layer(".feed_forward_length")
    moe, layers = meta.get(".expert_count") is not None, range(config["num_hidden_layers"])
    heads = meta.number(".ssm.time_step_rank")
    mlp_or_mamba = ("M", "E" if moe else "-")
    config |= {
        "hybrid_override_pattern": "".join("*" if attends[i] else mlp_or_mamba[ffn_widths[i] > 0] for i in layers),
        "num_key_value_heads": max(attends),
        "moe_intermediate_size" if moe else "intermediate_size": max(ffn_widths),
        "mamba_num_heads": heads,
        "mamba_head_dim": meta.number(".ssm.inner_size") // max(1, heads),
        "attention_bias": meta.has_in_any_layer(".attn_q.bias"),
        "residual_in_fp32": False,
    }
    if moe:
        config.setdefault("topk_group", 1)


def _set_block_configs(meta: ModelMetadata, config: Json) -> None:
    """Set the configuration of each block (Nemotron H Puzzle)."""
    attends, widths = meta.per_layer(".attention.head_count_kv"), meta.per_layer(".expert_feed_forward_length")
    heads, used = meta.number(".ssm.time_step_rank"), meta.per_layer(".expert_used_count")
    blocks: list[Json] = []
    for n, width, count in zip(attends, widths, used, strict=True):
        if n:
            blocks.append({"block_type": "attention"})
        elif width:
            blocks.append({"block_type": "moe", "moe_intermediate_size": width, "num_experts_per_tok": count})
        else:
            blocks.append({"block_type": "mamba"})
    config |= {
        "block_configs": blocks,
        "num_key_value_heads": max(attends),
        "attention_head_dim": meta.head_width,
        "mamba_num_heads": heads,
        "mamba_head_dim": meta.number(".ssm.inner_size") // max(1, heads),
        "use_conv_bias": meta.has_in_any_layer(".ssm_conv1d.bias"),
        "use_bias": meta.has_in_any_layer(".ssm_in.bias"),
    }


_NEMOTRON_H_CLASS = HfClass(
    "nemotron_h",
    "backbone.embeddings backbone.norm_f backbone.layers.*.norm "
    + add_prefix(
        "backbone.layers.*.mixer.",
        "in_proj conv1d dt_proj A_log D norm out_proj q_proj k_proj v_proj o_proj up_proj down_proj gate "
        "gate.e_score_correction fc1_latent_proj fc2_latent_proj shared_experts.up_proj shared_experts.down_proj",
    ),
    keys={
        ".feed_forward_length": "",
        ".attention.layer_norm_rms_epsilon": "norm_eps",
        ".attention.layer_norm_epsilon": "layer_norm_epsilon",
        ".ssm.conv_kernel": "conv_kernel",
        ".ssm.state_size": "ssm_state_size",
        ".ssm.group_count": "n_groups",
        ".expert_gating_func": "",
    },
    config_setters=(_set_layer_pattern,),
    archs=("nemotron_h_moe",),
)

CLASSES: dict[str, HfClass] = {
    "NemotronForCausalLM": HfClass("nemotron"),
    "NemotronHPuzzleForCausalLM": replace(
        _NEMOTRON_H_CLASS,
        model_type="nemotron_h_puzzle",
        keys={
            **_NEMOTRON_H_CLASS.keys,
            **dict.fromkeys((".expert_used_count", ".expert_feed_forward_length"), ""),
            ".attention.layer_norm_rms_epsilon": "rms_norm_eps",
        },
        defaults={"hidden_act": None},
        config_setters=(_set_block_configs,),
        note="GGUF files of this class have no prediction layers (MTP); `quantkit convert` omits them",
        matches=lambda meta: isinstance(meta.get(".expert_used_count"), list),
    ),
    "NemotronHForCausalLM": _NEMOTRON_H_CLASS,
}

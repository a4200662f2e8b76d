"""Falcon, and Falcon H1 with attention beside Mamba 2.

Facts of llama.cpp b11434, conversion/falcon.py, conversion/falcon_h1.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, Multiplied, Shaped, concatenate, size_of, take
from quantkit.checkpoint.key_rows import (
    BLOCK_COUNT,
    FILE_TYPE,
    VOCAB_SIZE,
    Always,
    Computed,
    Copied,
    SetKeys,
    number_or,
)
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import gpt_neox, mamba
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Transform, flatten, log_of_negative, negative_exp, squeeze, unsqueeze_channels
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.errors import FormatError, TypeNotSupported


def split_groups(tensor: Tensor, context: Context) -> Expression:
    """Split queries, keys and values, which are stored by groups of KV heads."""
    return gpt_neox.split_qkv_groups(tensor.x, *_group_sizes(context.config))


def join_groups(tensor: Tensor, context: Context) -> Expression:
    """Return queries, keys and values grouped by KV head: the inverse of ``split_groups``."""
    return gpt_neox.join_qkv_groups(tensor.x, *_group_sizes(context.config))


SPLIT_GROUPS = (Transform(r"query_key_value", split_groups, join_groups),)


def _key_heads(config: Config) -> int:
    groups: int | None = config.get("num_kv_heads")
    return config.get("n_head_kv", 1) if groups is None else groups


FALCON_BASE: tuple[SetKeys, ...] = (
    Computed(".context_length", lambda config: 2048, names="max_position_embeddings"),
    Always(".tensor_data_layout", "jploski", "text"),
    Copied(".embedding_length", "hidden_size", required=True),
    Computed(".feed_forward_length", lambda config: 4 * config.number("hidden_size")),
    BLOCK_COUNT,
    Copied(".attention.head_count", "num_attention_heads n_head", required=True),
    Computed(".attention.head_count_kv", _key_heads, names="num_kv_heads"),
    Copied(".attention.layer_norm_epsilon", "layer_norm_epsilon", "f32", required=True),
    FILE_TYPE,
)


def _group_sizes(config: Config) -> tuple[int, int]:
    """Return the number of groups, and of heads in each, key and value included."""
    heads, keys = config.number("num_attention_heads", "n_head"), config.find("num_kv_heads", "n_head_kv") or 1
    return keys, heads // keys + 2


FALCON_H1_STORED = (mamba.DT_BIAS,)

#: Part of a name -> keys of the multiplier of its outputs, or its position in a list; the first match applies.
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
class ApplyMultipliers(OneWayRule):
    """Multiply the model's multipliers into the weights.

    A multiplier of a layer's inputs (``attention_in``, ``ssm_in``) does not apply to its bias. convert_hf_to_gguf.py
    b11434 also multiplies the bias, which differs from transformers.
    """

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        config = context.config
        part, names = next((row for row in _MULTIPLIERS if row[0] in tensor.name), ("", ()))
        x = tensor.x
        for key, place in names:
            if key.endswith("_in_multiplier") and tensor.name.endswith(".bias"):
                continue
            value = config[key] if place is None else config[key][place]
            x = Multiplied(x, factor=float(value))
        if part == "in_proj":
            x = _multiply_parts(x, tensor, context)
        return (replace(tensor, x=x),) if names else None


def _multiply_parts(x: Expression, tensor: Tensor, context: Context) -> Expression:
    """Multiply the rows of gates, inputs, B, C and steps by a number each."""
    config = context.config
    inner, state = config.number("mamba_d_ssm"), config.number("mamba_n_groups") * config.number("mamba_d_state")
    sizes = [inner, inner, state, state, x.shape[0] - 2 * inner - 2 * state]
    factors = config["ssm_multipliers"]
    if sizes[-1] < 0 or len(factors) != len(sizes):
        raise context.fail(tensor, f"its {x.shape[0]} rows do not match config.json")
    ends = list(accumulate(sizes))
    rows = [range(end - size, end) for size, end in zip(sizes, ends, strict=True) if size]
    return concatenate([Multiplied(take(x, 0, r), factor=float(f)) for r, f in zip(rows, factors, strict=False)])


def reshape_groups(tensor: Tensor, context: Context) -> Expression:
    n = context.config.number("n_groups", "mamba_n_groups")
    return Shaped(tensor.x, (n, size_of(tensor.x) // n))


FALCON_H1_RULES = (
    Transform(r"\.mamba\.conv1d\.weight$", squeeze, unsqueeze_channels),
    Transform(r"\.mamba\.(A_log|D)$", mamba.as_column, flatten),
    Transform(r"\.mamba\.norm\.weight$", reshape_groups, flatten),
    Transform(r"\.A_log$", negative_exp, log_of_negative),
    ApplyMultipliers(),
)


def _head_width(config: Config) -> int:
    return config.find("mamba_d_head", "head_dim") or 64


FALCON_H1_BASE: tuple[SetKeys, ...] = (
    Copied(".context_length", "max_position_embeddings", default=0),
    Copied(".embedding_length", "hidden_size d_model dim", required=True),
    Copied(".feed_forward_length", "intermediate_size", required=True),
    Copied(".attention.head_count", "num_attention_heads", required=True),
    BLOCK_COUNT,
    number_or(".ssm.conv_kernel", "conv_kernel d_conv mamba_conv_kernel mamba_d_conv", 4, "mamba_d_conv"),
    Copied(".ssm.inner_size", "mamba_d_ssm", required=True),
    number_or(".ssm.state_size", "state_size d_state mamba_state_size mamba_d_state", 128, "mamba_d_state"),
    Computed(
        ".ssm.time_step_rank",
        lambda config: config.number("mamba_d_ssm") // _head_width(config),
        names="mamba_n_heads",
    ),
    Copied(".ssm.group_count", "n_groups mamba_n_groups", required=True, exported="mamba_n_groups"),
    number_or(".attention.layer_norm_rms_epsilon", "layer_norm_epsilon rms_norm_eps", 1e-5, "rms_norm_eps", kind="f32"),
    FILE_TYPE,
)


def refuse_norm_before_gate(config: Config) -> None:
    """Refuse norms before the gate: no key describes them, and runtimes apply the norm after the gate."""
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        raise FormatError(
            f"{config.path}: mamba_norm_before_gate is true, which GGUF cannot express: llama.cpp normalizes after "
            "the gate",
            "QK-E305",
        )


def refuse_heads(keys: Keys, config: Config) -> None:
    """Refuse an activation that llama.cpp does not support, and an inner size that is not a multiple of the heads."""
    if config.get("hidden_act") not in (None, "silu") or config.number("mamba_d_ssm") % config.number("mamba_d_head"):
        raise FormatError(
            f"{config.path}: hidden_act is not silu, or mamba_d_ssm is not a multiple of mamba_d_head", "QK-E112"
        )


FALCON_H1_KEYS: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    refuse_heads,
    Copied(".attention.head_count_kv", "num_key_value_heads", required=True),
    Copied(".attention.key_length", "head_dim", required=True),
    Copied(".attention.value_length", "head_dim", required=True),
    Computed(".rope.freq_base", lambda config: config.rope["rope_theta"], "f32", names="rope_theta"),
)
_FALCON = Architecture("falcon", rules=SPLIT_GROUPS, base=FALCON_BASE)

ARCHITECTURES: dict[str, Architecture] = {
    "FalconH1ForCausalLM": Architecture(
        "falcon-h1",
        stored=FALCON_H1_STORED,
        rules=FALCON_H1_RULES,
        base=FALCON_H1_BASE,
        keys=FALCON_H1_KEYS,
        patch_config=refuse_norm_before_gate,
    ),
    "FalconForCausalLM": _FALCON,
    "RWForCausalLM": _FALCON,
}


def refuse_single_norm(meta: ModelMetadata, config: Json) -> None:
    """Refuse the first Falcons, whose layers have one norm for attention and feed-forward, under other names."""
    if not meta.has("attn_norm_2.weight"):
        raise TypeNotSupported(
            f"{meta.path}: this version does not export Falcon models of the old architecture", "QK-E304"
        )


_MULTIPLIER_NAMES = "attention_in attention_out key ssm_in ssm_out lm_head embedding"


def _set_mamba_heads(meta: ModelMetadata, config: Json) -> None:
    """Set Mamba's heads (Falcon H1); multipliers are 1, because they are in the weights."""
    heads = meta.number(".ssm.time_step_rank")
    config |= {
        "mamba_d_head": meta.number(".ssm.inner_size") // max(1, heads),
        "mamba_rms_norm": meta.has_in_any_layer(".ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # as llama.cpp computes it
        "rope_scaling": None,
    }
    config |= {f"{name}_multiplier": 1.0 for name in _MULTIPLIER_NAMES.split()}
    config |= {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}


MIXER_NAMES = add_prefix(f"{LAYER}mamba.", "in_proj conv1d dt_proj A_log D norm out_proj x_proj")
FEED_FORWARD_NAMES = "model.final_layernorm " + add_prefix(
    f"{LAYER}feed_forward.", "gate_proj up_proj down_proj router"
)

CLASSES: dict[str, HfClass] = {
    # Models with separate norms for attention and feed forward.
    "FalconForCausalLM": HfClass(
        "falcon",
        "transformer.word_embeddings transformer.ln_f transformer.h.*.ln_attn transformer.h.*.ln_mlp "
        + " ".join(f"transformer.h.*.{name}" for name in gpt_neox.SELF_ATTENTION_NAMES[:-1]),
        defaults={
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 2,
            "parallel_attn": True,
            "alibi": False,
            "multi_query": False,
            "bias": False,
        },
        config_setters=(refuse_single_norm,),
    ),
    "FalconH1ForCausalLM": HfClass(
        "falcon_h1",
        f"{FEED_FORWARD_NAMES} {MIXER_NAMES} {LAYER}pre_ff_layernorm.weight",
        config_setters=(_set_mamba_heads,),
    ),
}

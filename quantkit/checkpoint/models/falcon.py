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
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import gpt_neox, mamba
from quantkit.checkpoint.row import LAYER, Architecture, Copied, HfClass, SetKeys, prefixed
from quantkit.checkpoint.rules import Transform, flatten, log_of_negative, negative_exp, squeeze, unsqueeze_channels
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.errors import FormatError, TypeNotSupported


def split_groups(tensor: Tensor, context: Context) -> Expression:
    """Split queries, keys and values, which are stored by groups of KV heads."""
    return gpt_neox.split_qkv_groups(tensor.x, *_group_sizes(context.config))


def join_groups(tensor: Tensor, context: Context) -> Expression:
    """Return queries, keys and values by heads of keys: the inverse of ``split_groups``."""
    return gpt_neox.join_qkv_groups(tensor.x, *_group_sizes(context.config))


SPLIT_GROUPS = (Transform(r"query_key_value", split_groups, join_groups),)


def set_falcon_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Falcon."""
    width, groups = config.number("hidden_size"), config.get("num_kv_heads")
    keys.u32(".context_length", 2048)
    keys.text(".tensor_data_layout", "jploski")
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", 4 * width)
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", config.number("num_attention_heads", "n_head"))
    keys.u32(".attention.head_count_kv", config.get("n_head_kv", 1) if groups is None else groups)
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_epsilon"])
    keys.u32("general.file_type", file_type)


def _group_sizes(config: Config) -> tuple[int, int]:
    """Return the number of groups, and of heads in each, key and value included."""
    heads, keys = config.number("num_attention_heads", "n_head"), config.find("num_kv_heads", "n_head_kv") or 1
    return keys, heads // keys + 2


FALCON_H1_STORED = (mamba.DT_BIAS,)

#: Part of a name -> keys of the multiplier of its outputs, or its place in a list; the first counts.
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

    A multiplier of a layer's inputs (``attention_in``, ``ssm_in``) leaves its bias alone. convert_hf_to_gguf.py b11434
    multiplies the bias, too, which is another model than transformers'.
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
        raise context.fail(tensor, f"its {x.shape[0]} rows are not those of the configuration")
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


def set_falcon_h1_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of Falcon H1, in the converter's order."""
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


def refuse_norm_before_gate(config: Config) -> None:
    """Refuse norms before the gate: no key describes them, and runtimes apply the norm after the gate."""
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        raise FormatError(
            f"{config.path}: mamba_norm_before_gate is true, which GGUF cannot say: llama.cpp norms what the gate "
            "gives, so the file would be another model",
            "QK-E305",
        )


def _set_heads(keys: Keys, config: Config) -> None:
    if config.get("hidden_act") not in (None, "silu") or config.number("mamba_d_ssm") % config.number("mamba_d_head"):
        raise FormatError(
            f"{config.path}: hidden_act is not silu, or mamba_d_ssm makes no heads of mamba_d_head", "QK-E112"
        )
    keys.u32(".attention.head_count_kv", config["num_key_value_heads"])
    keys.u32(".attention.key_length", config["head_dim"])
    keys.u32(".attention.value_length", config["head_dim"])
    keys.f32(".rope.freq_base", config.rope["rope_theta"])


FALCON_H1_KEYS: tuple[SetKeys, ...] = (Copied(".vocab_size", "vocab_size", required=True), _set_heads)
_FALCON = Architecture("falcon", rules=SPLIT_GROUPS, base=set_falcon_base)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "FalconH1ForCausalLM": Architecture(
        "falcon-h1",
        stored=FALCON_H1_STORED,
        rules=FALCON_H1_RULES,
        base=set_falcon_h1_base,
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
            f"{meta.path}: a Falcon of the first architecture is not exported by this version", "QK-E304"
        )


_MULTIPLIER_NAMES = "attention_in attention_out key ssm_in ssm_out lm_head embedding"


def _set_mamba_heads(meta: ModelMetadata, config: Json) -> None:
    """Set Mamba's heads (Falcon H1); multipliers are 1: weights have taken them."""
    heads = meta.number(".ssm.time_step_rank")
    config |= {
        "mamba_d_head": meta.number(".ssm.inner_size") // max(1, heads),
        "mamba_rms_norm": meta.has_in_any_layer(".ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # as llama.cpp computes it
        "mamba_conv_bias": meta.has_in_any_layer(".ssm_conv1d.bias"),
        "mamba_proj_bias": meta.has_in_any_layer(".ssm_in.bias"),
        "attention_bias": meta.has_in_any_layer(".attn_q.bias"),
        "mlp_bias": meta.has_in_any_layer(".ffn_up.bias"),
        "rope_scaling": None,
    }
    config |= {f"{name}_multiplier": 1.0 for name in _MULTIPLIER_NAMES.split()}
    config |= {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}


MAMBA_SIZE_KEYS = {".ssm.conv_kernel": "mamba_d_conv", ".ssm.state_size": "mamba_d_state"}
MIXER_NAMES = prefixed(f"{LAYER}mamba.", "in_proj conv1d dt_proj A_log D norm out_proj x_proj")
FEED_FORWARD_NAMES = "model.final_layernorm " + prefixed(f"{LAYER}feed_forward.", "gate_proj up_proj down_proj router")

_FALCON_H1_CLASS = HfClass(
    "falcon_h1",
    f"{FEED_FORWARD_NAMES} {MIXER_NAMES} {LAYER}pre_ff_layernorm.weight",
    keys={
        **MAMBA_SIZE_KEYS,
        ".ssm.inner_size": "mamba_d_ssm",
        ".ssm.time_step_rank": "mamba_n_heads",
        ".ssm.group_count": "mamba_n_groups",
    },
    config_setters=(_set_mamba_heads,),
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    # Of those that have norms of their own for attention and feed forward.
    "FalconForCausalLM": HfClass(
        "falcon",
        "transformer.word_embeddings transformer.ln_f transformer.h.*.ln_attn transformer.h.*.ln_mlp "
        + " ".join(
            f"transformer.h.*.{name.replace('attention.', 'self_attention.')}" for name in gpt_neox.LAYER_NAMES[:-1]
        ),
        keys={
            ".context_length": "max_position_embeddings",
            ".feed_forward_length": "",
            ".attention.head_count_kv": "num_kv_heads",
            ".block_count": "num_hidden_layers",
            ".embedding_length": "hidden_size",
            ".attention.head_count": "num_attention_heads",
            ".attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
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
    "FalconH1ForCausalLM": _FALCON_H1_CLASS,
}

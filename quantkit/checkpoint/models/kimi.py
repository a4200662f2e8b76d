"""Kimi Linear and K3: delta attention between layers of DeepSeek's attention.

Facts of llama.cpp b11434, conversion/kimi_linear.py, conversion/kimi_k3.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Constant, Expression, Mapped, Product, Shaped, size_of, take
from quantkit.checkpoint.keys import GATING, Keys, set_base_keys
from quantkit.checkpoint.models import deepseek, minimax
from quantkit.checkpoint.row import LAYER, Always, Architecture, Copied, HfClass, SetKeys, prefixed
from quantkit.checkpoint.rules import Drop, Rename, Transform, flatten, log_of_negative, negative_exp
from quantkit.checkpoint.tensor_names import file_name
from quantkit.checkpoint.tensors import Context, InverseContext, OneWayRule, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.tiktoken import KIMI, write_ranks
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError


def as_convolution(tensor: Tensor, context: Context) -> Expression:
    shape = tensor.x.shape
    if len(shape) not in (2, 3):
        raise ValueError("no convolution of single channels")
    return Shaped(tensor.x, (1, shape[0], 1, shape[-1]))


def as_three_dimensions(tensor: Tensor, context: Context) -> Expression:
    """Reshape a depthwise convolution from llama.cpp's four dimensions to three."""
    return Shaped(tensor.x, (size_of(tensor.x) // tensor.x.shape[-1], 1, tensor.x.shape[-1]))


CONVOLUTIONS = Transform(r"\.[qkv]_conv1d\.weight$", as_convolution, as_three_dimensions)

LINEAR_RULES = (
    CONVOLUTIONS,
    Transform(r"\.A_log$", negative_exp, log_of_negative),
    Rename(r"\.dt_bias$", ".dt_proj.bias"),
    minimax.STACK_EXPERTS,
    deepseek.SplitLatentHeads(),
)


def set_single_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """The base keys, of a single head of keys and values."""
    set_base_keys(keys, config.with_values({"num_key_value_heads": 1}), layers, file_type)


def _set_linear(keys: Keys, config: Config) -> None:
    linear = _linear_config(config)
    full = linear["full_attn_layers"]  # counted from one
    keys.array(".attention.head_count_kv", [int(i + 1 in full) for i in range(config.layers)])
    if (kernel := linear.get("short_conv_kernel_size")) is not None:
        keys.u32(".ssm.conv_kernel", kernel)
    if (width := linear.get("head_dim")) is not None:
        keys.u32(".kda.head_dim", width)


def set_latent(keys: Keys, config: Config, *, values: bool = False) -> None:
    """Set the sizes of latent attention; ``values``: whether to set the value length of latent rows, too."""
    rank, rope = config.number("kv_lora_rank", "n_lora_kv"), config.number("qk_rope_head_dim", "n_rot")
    keys.u32(".attention.kv_lora_rank", rank)
    keys.u32(".rope.dimension_count", rope)
    keys.u32(".attention.key_length", rank + rope)
    if values:
        keys.u32(".attention.value_length", rank)
    keys.u32(".attention.key_length_mla", config.number("qk_nope_head_dim") + rope)
    keys.u32(".attention.value_length_mla", config["v_head_dim"])


LINEAR_KEYS: tuple[SetKeys, ...] = (
    Copied(".vocab_size", "vocab_size", required=True),
    _set_linear,
    Copied(".attention.q_lora_rank", "q_lora_rank n_lora_q"),
    set_latent,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Copied(".expert_shared_count", "num_shared_experts", required=True),
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
)


def _linear_config(config: Config) -> dict[str, Any]:
    value = config["linear_attn_config"]
    if not isinstance(value, dict):
        raise FormatError(f"{config.path}: linear_attn_config is no object", "QK-E112")
    return value


def _has_latents(config: Config, layer: int) -> bool:
    """Return whether a layer has DeepSeek's attention; the configuration counts layers from one."""
    return layer + 1 in _linear_config(config)["full_attn_layers"]


@dataclass(frozen=True)
class MergeResidualScores(Rule):
    """Merge a norm and a projection to one value into their elementwise product."""

    pattern: str = r"(self_attention_res|mlp_res|output_attn_res)_(norm|proj)\.weight$"

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None:
            return None
        kinds = {"self_attention_res": "*attn_res_score", "mlp_res": "*ffn_res_score"}
        kind = kinds.get(match[1], "output_res_score")
        number = -1 if tensor.layer is None else 2 * tensor.layer + (match[1] == "mlp_res")
        parts = context.waiting.setdefault((id(self), number), {})
        parts[match[2]] = tensor
        if len(parts) < 2:
            return ()
        norm, proj = parts.pop("norm"), parts.pop("proj")
        if size_of(norm.x) != size_of(proj.x):
            raise context.fail(tensor, f"{size_of(proj.x)} values beside a norm of {size_of(norm.x)}")
        layer = tensor.layer if kind.startswith("*") else None
        name = file_name(kind, layer) + ".weight"
        return (replace(tensor, x=Product(norm.x, proj.x), name_in_file=name),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Split into a norm of ones and a projection that holds the product."""
        if not tensor.name.endswith("_res_proj.weight"):
            return None
        n = size_of(tensor.x)
        norm = replace(tensor, name=tensor.name.replace("_proj.", "_norm."), x=Constant((1.0,) * n))
        return norm, replace(tensor, x=Shaped(tensor.x, (1, n)))


@dataclass(frozen=True)
class AssignGateKinds(OneWayRule):
    """One name for two gates: of DeepSeek's attention, and of delta attention."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.layer is None or not tensor.name.endswith(".self_attn.g_proj.weight"):
            return None
        kind = "*attn_gate" if _has_latents(context.config, tensor.layer) else "*ssm_g"
        return (replace(tensor, name_in_file=file_name(kind, tensor.layer) + ".weight"),)


def negative_exp_of_heads(tensor: Tensor, context: Context) -> Expression:
    """Return -exp(x) of as many values as there are heads."""
    heads = min(context.config.number("num_attention_heads"), tensor.x.shape[0])
    return Mapped(take(tensor.x, 0, range(heads)), "negative exp")


K3_STORED = (Drop(r"^(vision_tower|mm_projector)\."),)


def flat_log_of_negative(tensor: Tensor, context: Context) -> Expression:
    return Mapped(flatten(tensor, context), "log of negative")


K3_RULES = (
    MergeResidualScores(),
    CONVOLUTIONS,
    Transform(r"\.A_log$", negative_exp_of_heads, flat_log_of_negative),
    Rename(r"\.dt_bias$", ".dt_proj.bias"),
    AssignGateKinds(),
    minimax.STACK_EXPERTS,
    deepseek.SplitLatentHeads(),
)


def _set_k3_layers(keys: Keys, config: Config) -> None:
    linear = _linear_config(config)
    keys.array(".attention.head_count_kv", [int(_has_latents(config, layer)) for layer in range(config.layers)])
    keys.u32(".ssm.conv_kernel", linear["short_conv_kernel_size"])
    keys.u32(".kda.head_dim", linear["head_dim"])
    if (bound := linear.get("gate_lower_bound")) is not None:
        keys.f32(".kda.gate_lower_bound", bound)


def _set_k3_latent(keys: Keys, config: Config) -> None:
    if not config.get("mla_use_nope") or config["moe_router_activation_func"] != "sigmoid":
        raise FormatError(f"{config.path}: K3 is only run with mla_use_nope and experts chosen by sigmoid", "QK-E305")
    set_latent(keys, config, values=True)


K3_KEYS: tuple[SetKeys, ...] = (
    Copied(".vocab_size", "vocab_size", required=True),
    _set_k3_layers,
    Copied(".attention.q_lora_rank", "q_lora_rank"),
    _set_k3_latent,
    *LINEAR_KEYS[-4:],
    Copied(".expert_weights_norm", "moe_renormalize", "flag", required=True),
    Always(".expert_gating_func", GATING["sigmoid"]),
    Copied(".expert_latent_length", "routed_expert_hidden_size"),
    Copied(".activation.situ_beta", "activation_situ_beta", "f32", required=True),
    Copied(".activation.situ_linear_beta", "activation_situ_linear_beta", "f32", required=True),
    Copied(".attn_res.block_size", "attn_res_block_size", required=True),
)


def write_kimi_linear(v: Vocabulary) -> None:
    """Write tokenizer.json's vocabulary, else Kimi's ranks, with the tokenizer's EOS (KimiLinearModel)."""
    if v.has("tokenizer.json") or not v.has(KIMI.file):
        write_bpe(v)
        return
    write_ranks(v, KIMI)
    end = v.tokenizer_config.get("eos_token")
    numbers = [number for number, entry in v.decoder_entries if entry["content"] == end]
    if not numbers:
        raise FormatError(f"{v.folder / 'tokenizer_config.json'}: its eos_token is none of its added tokens", "QK-E114")
    v.keys.u32("tokenizer.ggml.eos_token_id", numbers[0])


def write_kimi_k3(v: Vocabulary) -> None:
    """Write Kimi Linear's vocabulary with the configuration's EOS (KimiK3Model)."""
    write_kimi_linear(v)
    if (end := v.config.get("eos_token_id")) is not None:
        v.keys.u32("tokenizer.ggml.eos_token_id", end)


_KIMI_LINEAR = Architecture(
    "kimi-linear", rules=LINEAR_RULES, base=set_single_base, keys=LINEAR_KEYS, vocab=write_kimi_linear
)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "KimiLinearForCausalLM": _KIMI_LINEAR,
    "KimiLinearModel": _KIMI_LINEAR,
    "KimiK3ForConditionalGeneration": Architecture(
        "kimi-k3",
        stored=K3_STORED,
        rules=K3_RULES,
        base=set_single_base,
        keys=K3_KEYS,
        vocab=write_kimi_k3,
    ),
}


def _set_delta_attention(meta: ModelMetadata, config: Json) -> None:
    """List the layers of both kinds of attention, counted from 1, and set the heads of delta attention."""
    attends = [bool(n) for n in meta.per_layer(".attention.head_count_kv")]
    beta = next((t for name, t in meta.model.tensors.items() if name.endswith(".ssm_beta.weight")), None)
    linear: Json = {
        "full_attn_layers": [i + 1 for i, is_full in enumerate(attends) if is_full],
        "kda_layers": [i + 1 for i, is_full in enumerate(attends) if not is_full],
        "num_heads": config["num_attention_heads"] if beta is None else beta.shape[1],
    }
    linear_keys = {"head_dim": ".kda.head_dim", "short_conv_kernel_size": ".ssm.conv_kernel"}
    linear_keys["gate_lower_bound"] = ".kda.gate_lower_bound"
    linear |= {name: value for name, key in linear_keys.items() if (value := meta.get(key)) is not None}
    config["linear_attn_config"] = linear


def _set_value_width(meta: ModelMetadata, config: Json) -> None:
    """Set the width of heads, which files have as the width of values."""
    if (width := meta.get(".attention.value_length")) is not None:
        config["head_dim"] = width


_MOE_NAMES = prefixed(
    f"{LAYER}block_sparse_moe.",
    "gate gate.e_score_correction experts.w1 experts.w2 experts.w3 shared_experts.gate_proj shared_experts.up_proj "
    "shared_experts.down_proj",
)

_KIMI_KEYS = {
    ".expert_count": "num_experts",
    ".expert_used_count": "num_experts_per_token",
    ".expert_shared_count": "num_shared_experts",
    ".expert_gating_func": "moe_router_activation_func",
    ".expert_group_count": "num_expert_group",
    ".expert_weights_norm": "moe_renormalize",
}

_KIMI_LINEAR_CLASS = HfClass(
    "kimi_linear",
    _MOE_NAMES,
    keys=_KIMI_KEYS,
    # What llama.cpp has in its code.
    defaults={"moe_renormalize": True, "mla_use_nope": True, "moe_layer_freq": 1},
    config_setters=(config_values.set_latent_widths, _set_value_width, _set_delta_attention),
)

_KIMI_K3_CLASS = replace(
    _KIMI_LINEAR_CLASS,
    names=_MOE_NAMES
    + prefixed(
        f" {LAYER}",
        "self_attn.g_proj block_sparse_moe.routed_expert_down_proj block_sparse_moe.routed_expert_up_proj",
    ),
    kinds={
        "*ssm_g": f"{LAYER}self_attn.g_proj",
        "*attn_res_score": f"{LAYER}self_attention_res_proj",
        "*ffn_res_score": f"{LAYER}mlp_res_proj",
        "output_res_score": "model.output_attn_res_proj",
    },
    defaults={"mla_use_nope": True, "hidden_act": "situ", "moe_layer_freq": 1},
    config_setters=(config_values.set_latent_widths, _set_delta_attention),
    renames=((r"^", "language_model."),),
    text_key="text_config",
    outer={"model_type": "kimi_k3"},
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "KimiLinearForCausalLM": _KIMI_LINEAR_CLASS,
    "KimiK3ForConditionalGeneration": _KIMI_K3_CLASS,
}

"""Jamba: layers of attention between those of Mamba.

Facts of llama.cpp b11434, conversion/jamba.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import BLOCK_COUNT, FILE_TYPE, Computed, Copied, SetKeys, number_or
from quantkit.checkpoint.models import falcon
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import (
    Rename,
    StackExperts,
    Transform,
    log_of_negative,
    negative_exp,
    squeeze,
    unsqueeze_channels,
)
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.checkpoint.vocab.bpe import is_llama_hf, write_tokenizer_json
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import TypeNotSupported


@dataclass(frozen=True)
class RenameSingleExpert(OneWayRule):
    """Rename expert 0 of a layer without experts to the dense feed-forward."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        layer, first = tensor.layer, context.config.number("expert_layer_offset")
        period = max(1, context.config.number("expert_layer_period"))
        if layer is None or ".experts.0." not in tensor.name or (layer >= first and (layer - first) % period == 0):
            return None
        return (replace(tensor, name=re.sub(r"\.experts\.0\.", ".", tensor.name)),)


JAMBA_RULES = (
    Rename(r"\.moe\.", ".feed_forward.", foreign=True),
    RenameSingleExpert(),
    StackExperts(
        name="model.layers.{layer}.feed_forward.experts.{expert}.{weight}.weight",
        merged="model.layers.{layer}.mlp.experts.{weight}.weight",
    ),
    Transform(r"\.mamba\.conv1d\.weight$", squeeze, unsqueeze_channels),
    Transform(r"\.A_log$", negative_exp, log_of_negative),
)


def _width(config: Config) -> int:
    return config.number("hidden_size", "mamba_d_model")


def _kv_heads(config: Config) -> list[int]:
    """Return the KV heads of each layer, 0 for Mamba layers."""
    heads: int = config["num_key_value_heads"]
    offset, period = config.number("attn_layer_offset"), max(1, config.number("attn_layer_period"))
    return [heads if i >= offset and (i - offset) % period == 0 else 0 for i in range(config.layers)]


def _dt_rank(config: Config) -> int:
    return config.get("mamba_dt_rank") or -(_width(config) // -16)


JAMBA_BASE: tuple[SetKeys, ...] = (
    BLOCK_COUNT,
    Copied(".context_length", "max_position_embeddings n_ctx", required=True),
    Copied(".embedding_length", "hidden_size mamba_d_model", required=True),
    Copied(".feed_forward_length", "intermediate_size", required=True),
    Copied(".attention.head_count", "num_attention_heads", required=True),
    Computed(".attention.head_count_kv", _kv_heads, "array"),
    number_or(".ssm.conv_kernel", "mamba_d_conv", 4),
    Computed(".ssm.inner_size", lambda config: config.number("mamba_expand") * _width(config)),
    number_or(".ssm.state_size", "mamba_d_state", 16),
    Computed(".ssm.time_step_rank", _dt_rank, names="mamba_dt_rank"),
    number_or(".attention.layer_norm_rms_epsilon", "layer_norm_epsilon rms_norm_eps", 1e-6, "rms_norm_eps", kind="f32"),
    Copied(".expert_count", "num_local_experts num_experts", required=True, exported="num_experts"),
    Copied(".expert_used_count", "num_experts_per_tok num_experts_per_token", required=True),
    FILE_TYPE,
)


def write_jamba(v: Vocabulary) -> None:
    """Write SentencePiece, Llama's pieces in a tokenizer.json without a space before texts, or BPE (JambaModel)."""
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
        return
    write_tokenizer_json(v)
    if is_llama_hf(v):
        v.keys.flag("tokenizer.ggml.add_space_prefix", False)


ARCHITECTURES: dict[str, Architecture] = {
    "JambaForCausalLM": Architecture("jamba", rules=JAMBA_RULES, base=JAMBA_BASE, vocab=write_jamba),
}


def _set_periods(meta: ModelMetadata, config: Json) -> None:
    """Set the layers with attention and experts, by offset and period (Jamba)."""
    layers = meta.number(".block_count")
    heads = meta.per_layer(".attention.head_count_kv")
    for name, layers_of_kind in (
        ("attn", [i for i, n in enumerate(heads) if n]),
        ("expert", meta.layers_with("ffn_gate_inp.weight")),
    ):
        first = layers_of_kind[0] if layers_of_kind else layers
        period = layers_of_kind[1] - first if len(layers_of_kind) > 1 else max(layers - first, first + 1)
        if layers_of_kind != list(range(first, layers, period)):
            part = "attention" if name == "attn" else "experts"
            raise TypeNotSupported(
                f"{meta.path}: layers {layers_of_kind} have {part}; config.json can only express a first layer and a "
                "period",
                "QK-E305",
            )
        config |= {f"{name}_layer_offset": first, f"{name}_layer_period": period}
    config |= {
        "num_key_value_heads": max(heads),
        "mamba_expand": meta.number(".ssm.inner_size") // max(1, meta.number(".embedding_length")),
    }


CLASSES: dict[str, HfClass] = {
    "JambaForCausalLM": HfClass(
        "jamba",
        f"{falcon.FEED_FORWARD_NAMES} {falcon.MIXER_NAMES} "
        + add_prefix(LAYER, "pre_ff_layernorm mamba.dt_layernorm mamba.b_layernorm mamba.c_layernorm"),
        defaults={"sliding_window": None, "use_mamba_kernels": False},
        config_setters=(_set_periods,),
    ),
}

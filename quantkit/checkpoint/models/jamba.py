"""Jamba: layers of attention between those of Mamba.

Facts of llama.cpp b11434, conversion/jamba.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import falcon
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, prefixed
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


def set_jamba_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of Jamba, in the converter's order."""
    width, heads = config.number("hidden_size", "mamba_d_model"), config["num_key_value_heads"]
    offset, period = config.number("attn_layer_offset"), max(1, config.number("attn_layer_period"))
    attends = [i >= offset and (i - offset) % period == 0 for i in range(layers)]
    keys.u32(".block_count", layers)
    keys.u32(".context_length", config.number("max_position_embeddings", "n_ctx"))
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".attention.head_count", config["num_attention_heads"])
    keys.array(".attention.head_count_kv", [heads if attend else 0 for attend in attends])
    keys.u32(".ssm.conv_kernel", config.get("mamba_d_conv") or 4)
    keys.u32(".ssm.inner_size", config.number("mamba_expand") * width)
    keys.u32(".ssm.state_size", config.get("mamba_d_state") or 16)
    keys.u32(".ssm.time_step_rank", config.get("mamba_dt_rank") or -(width // -16))
    keys.f32(".attention.layer_norm_rms_epsilon", config.find("layer_norm_epsilon", "rms_norm_eps") or 1e-6)
    keys.u32(".expert_count", config.number("num_local_experts", "num_experts"))
    keys.u32(".expert_used_count", config.number("num_experts_per_tok", "num_experts_per_token"))
    keys.u32("general.file_type", file_type)


def write_jamba(v: Vocabulary) -> None:
    """SentencePiece, Llama's pieces in a tokenizer.json without a space put before texts (JambaModel), or BPE."""
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
        return
    write_tokenizer_json(v)
    if is_llama_hf(v):
        v.keys.flag("tokenizer.ggml.add_space_prefix", False)


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "JambaForCausalLM": Architecture("jamba", rules=JAMBA_RULES, base=set_jamba_base, vocab=write_jamba),
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
                f"{meta.path}: layers {layers_of_kind} have {part}; config.json can only say which is the first, and "
                "every how many there is another",
                "QK-E305",
            )
        config |= {f"{name}_layer_offset": first, f"{name}_layer_period": period}
    config |= {
        "num_key_value_heads": max(heads),
        "mamba_expand": meta.number(".ssm.inner_size") // max(1, meta.number(".embedding_length")),
        "mamba_conv_bias": meta.has_in_any_layer(".ssm_conv1d.bias"),
        "mamba_proj_bias": meta.has_in_any_layer(".ssm_in.bias"),
    }


_JAMBA_CLASS = HfClass(
    "jamba",
    f"{falcon.FEED_FORWARD_NAMES} {falcon.MIXER_NAMES} "
    + prefixed(LAYER, "pre_ff_layernorm mamba.dt_layernorm mamba.b_layernorm mamba.c_layernorm"),
    keys={**falcon.MAMBA_SIZE_KEYS, ".ssm.time_step_rank": "mamba_dt_rank", ".expert_count": "num_experts"},
    defaults={"sliding_window": None, "use_mamba_kernels": False},
    config_setters=(_set_periods,),
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "JambaForCausalLM": _JAMBA_CLASS,
}

"""Grok 1 and 2.

Facts of llama.cpp b11434, conversion/grok.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import LAYER, Architecture, Copied, HfClass, SetKeys, has_key, prefixed
from quantkit.checkpoint.rules import Rename, StackExperts
from quantkit.checkpoint.tensors import Rule
from quantkit.checkpoint.vocab.bpe import write_sentencepiece_or_bpe

#: Experts of Grok 2 get the names of Grok 1.
GROK_RULES: tuple[Rule, ...] = (
    *(
        Rename(
            rf"^model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.{new}\.",
            rf"transformer.decoder_layer.\1.moe.\2.{old}.",
            foreign=True,
        )
        for new, old in (("w1", "linear"), ("w2", "linear_1"), ("w3", "linear_v"))
    ),
    StackExperts(
        weights=("linear", "linear_1", "linear_v"),
        name="transformer.decoder_layer.{layer}.moe.{expert}.{weight}.weight",
        merged="transformer.decoder_layer.{layer}.moe.{weight}.weight",
        marked=r"\.moe\.\d+\.",
    ),
)


def _set_grok(keys: Keys, config: Config) -> None:
    keys.f32(".attn_logit_softcapping", config.get("attn_logit_softcapping", 30.0))
    keys.f32(".router_logit_softcapping", config.get("router_logit_softcapping", 30.0))
    Copied(".final_logit_softcapping", "final_logit_softcapping", "f32", unless_zero=True)(keys, config)
    Copied(".expert_feed_forward_length", "moe_intermediate_size")(keys, config)
    if config.get("rope_type") in ("yarn", "original"):  # "original" is YaRN, too
        keys.text(".rope.scaling.type", "yarn")
        keys.f32(".rope.scaling.factor", config["scaling_factor"])
        keys.u32(".rope.scaling.original_context_length", config["original_max_position_embeddings"])
        for key, name in (("ext", "extrapolation"), ("attn", "attn")):
            keys.f32(f".rope.scaling.yarn_{key}_factor", config[f"{name}_factor"])
        for key in ("beta_fast", "beta_slow"):
            keys.f32(f".rope.scaling.yarn_{key}", config[key])
    Copied(".attention.temperature_length", "attn_temperature_len", unless_zero=True)(keys, config)
    keys.f32(".attention.output_scale", config.get("attn_output_multiplier", config.head_dim**-0.5))
    keys.f32(".embedding_scale", config["embedding_multiplier_scale"])
    keys.f32(".logit_scale", config["output_multiplier_scale"])


GROK_KEYS: tuple[SetKeys, ...] = (_set_grok,)
_GROK = Architecture("grok", rules=GROK_RULES, keys=GROK_KEYS, vocab=write_sentencepiece_or_bpe)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "GrokForCausalLM": _GROK,
    "Grok1ForCausalLM": _GROK,
}


def _set_grok_rope(meta: ModelMetadata, config: Json) -> None:
    """Set rope scaling from Grok's separate keys."""
    rope = config.pop("rope_scaling", None) or {}
    if rope.get("rope_type") != "yarn":
        return
    config |= {
        "rope_type": "original",  # YaRN, by Grok 2's name
        "scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "extrapolation_factor": rope.get("extrapolation_factor", 1.0),
        "attn_factor": rope.get("attention_factor", 1.0),
        "beta_fast": rope.get("beta_fast", 8),
        "beta_slow": rope.get("beta_slow", 1),
    }


_GROK_KEYS = {
    ".attn_logit_softcapping": "attn_logit_softcapping",
    ".router_logit_softcapping": "router_logit_softcapping",
    ".attention.temperature_length": "attn_temperature_len",
    ".attention.output_scale": "attn_output_multiplier",
    ".embedding_scale": "embedding_multiplier_scale",
    ".logit_scale": "output_multiplier_scale",
    ".expert_count": "num_local_experts",
    ".rope.scaling.original_context_length": "",
}

_GROK_1_LAYER = "transformer.decoder_layer.*."

_GROK_2_CLASS = HfClass(
    "git",
    prefixed(LAYER, "pre_attn_norm post_attn_norm pre_moe_norm post_moe_norm block_sparse_moe.gate")
    + prefixed(f" {_GROK_1_LAYER}moe.", "linear linear_1 linear_v"),
    keys=_GROK_KEYS | {".attention.layer_norm_epsilon": "layer_norm_eps"},
    config_setters=(_set_grok_rope,),
    renames=tuple(
        (
            rf"^transformer\.decoder_layer\.(\d+)\.moe\.(\d+)\.{old}\.",
            rf"model.layers.\1.block_sparse_moe.experts.\2.{new}.",
        )
        for old, new in (("linear", "w1"), ("linear_1", "w2"), ("linear_v", "w3"))
    ),
    matches=has_key("expert_feed_forward_length"),
)

_GROK_1_CLASS = HfClass(
    "grok-1",
    "transformer.in_out_embed transformer.rms_norm "
    + prefixed(
        _GROK_1_LAYER,
        "rms_norm rms_norm_1 rms_norm_2 rms_norm_3 router multi_head_attention.query multi_head_attention.key "
        "multi_head_attention.value multi_head_attention.linear moe.linear moe.linear_1 moe.linear_v",
    ),
    keys=_GROK_KEYS | {".attn_logit_softcapping": "max_attn_value"},
    config_setters=(_set_grok_rope,),
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "Grok1ForCausalLM": _GROK_2_CLASS,
    "GrokForCausalLM": _GROK_1_CLASS,
}

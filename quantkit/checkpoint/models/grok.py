"""Grok 1 and 2.

Facts of llama.cpp b11434, conversion/grok.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import EXPERT_WIDTH, Computed, Copied, SetKeys, Where
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix, has_key
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


def _is_yarn(config: Config) -> bool:
    return config.get("rope_type") in ("yarn", "original")  # "original" is YaRN, too


def _set_rope_type(meta: ModelMetadata, config: Json) -> None:
    """Set the kind of rope; its parameters are separate keys."""
    config.pop("rope_scaling", None)
    if meta.get(".rope.scaling.type") == "yarn":
        config["rope_type"] = "original"  # YaRN, by Grok 2's name


YARN_KEYS: tuple[SetKeys, ...] = (
    Computed(".rope.scaling.type", lambda config: "yarn", "text", inverse=_set_rope_type),
    Copied(".rope.scaling.factor", "scaling_factor", "f32", required=True),
    Copied(".rope.scaling.original_context_length", "original_max_position_embeddings", required=True),
    Copied(".rope.scaling.yarn_ext_factor", "extrapolation_factor", "f32", required=True),
    Copied(".rope.scaling.yarn_attn_factor", "attn_factor", "f32", required=True),
    Copied(".rope.scaling.yarn_beta_fast", "beta_fast", "f32", required=True),
    Copied(".rope.scaling.yarn_beta_slow", "beta_slow", "f32", required=True),
)


def _output_scale(config: Config) -> float:
    scale: float = config.get("attn_output_multiplier", config.head_dim**-0.5)
    return scale


GROK_KEYS: tuple[SetKeys, ...] = (
    Copied(".attn_logit_softcapping", "attn_logit_softcapping", "f32", default=30.0),
    Copied(".router_logit_softcapping", "router_logit_softcapping", "f32", default=30.0),
    Copied(".final_logit_softcapping", "final_logit_softcapping", "f32", unless_zero=True),
    EXPERT_WIDTH,
    Where(_is_yarn, YARN_KEYS),
    Copied(".attention.temperature_length", "attn_temperature_len", unless_zero=True),
    Computed(".attention.output_scale", _output_scale, "f32", names="attn_output_multiplier"),
    Copied(".embedding_scale", "embedding_multiplier_scale", "f32", required=True),
    Copied(".logit_scale", "output_multiplier_scale", "f32", required=True),
)
_GROK = Architecture("grok", rules=GROK_RULES, keys=GROK_KEYS, vocab=write_sentencepiece_or_bpe)

ARCHITECTURES: dict[str, Architecture] = {
    "GrokForCausalLM": _GROK,
    "Grok1ForCausalLM": _GROK,
}


_GROK_1_LAYER = "transformer.decoder_layer.*."

CLASSES: dict[str, HfClass] = {
    "Grok1ForCausalLM": HfClass(
        "git",
        add_prefix(LAYER, "pre_attn_norm post_attn_norm pre_moe_norm post_moe_norm block_sparse_moe.gate")
        + add_prefix(f" {_GROK_1_LAYER}moe.", "linear linear_1 linear_v"),
        renames=tuple(
            (
                rf"^transformer\.decoder_layer\.(\d+)\.moe\.(\d+)\.{old}\.",
                rf"model.layers.\1.block_sparse_moe.experts.\2.{new}.",
            )
            for old, new in (("linear", "w1"), ("linear_1", "w2"), ("linear_v", "w3"))
        ),
        matches=has_key("expert_feed_forward_length"),
    ),
    "GrokForCausalLM": HfClass(
        "grok-1",
        "transformer.in_out_embed transformer.rms_norm "
        + add_prefix(
            _GROK_1_LAYER,
            "rms_norm rms_norm_1 rms_norm_2 rms_norm_3 router multi_head_attention.query multi_head_attention.key "
            "multi_head_attention.value multi_head_attention.linear moe.linear moe.linear_1 moe.linear_v",
        ),
        keys={".attn_logit_softcapping": "max_attn_value"},
    ),
}

"""Mixtures of experts with one release each: Arctic, GroveMoE, Maple, Mellum, SmallThinker.

Facts of llama.cpp b11434, conversion/arctic.py, conversion/grovemoe.py, conversion/maple.py, conversion/mellum.py,
conversion/smallthinker.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import (
    EXPERT_WIDTH,
    VOCAB_SIZE,
    WINDOW,
    WINDOW_PATTERN,
    Always,
    Computed,
    Copied,
    KeyGroup,
    SetKeys,
    rotary_width,
    set_layer_types,
)
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Drop, StackExperts
from quantkit.checkpoint.vocab.sentencepiece import Piece, plain_tokens, write_pieces
from quantkit.checkpoint.vocab.tokenizer import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def write_arctic(v: Vocabulary) -> None:
    """Write a SentencePiece vocabulary with tokens renamed by tokenizer_config.json (ArcticModel)."""
    tokens, unknown = plain_tokens(v), v.tokenizer_config.get("unk_token")
    for number, entry in v.decoder_entries:
        if number < len(tokens):
            text = entry["content"]
            kind = (UNKNOWN if text == unknown else CONTROL) if entry.get("special") else USER_DEFINED
            tokens[number] = Piece(text, 0.0 if entry.get("special") else -10000.0, kind)
    write_pieces(v, tokens)


#: GroveMoE: experts of Qwen 3 in pairs, each pair with an additional narrow expert.
GROVE_RULES = (
    Drop(r"\.expert_bias$"),
    StackExperts(
        name="model.layers.{layer}.mlp.chunk_experts.{expert}.{weight}.weight",
        merged="model.layers.{layer}.mlp.chunk_experts.{weight}.weight",
        marked=r"chunk_experts\.\d+\.",
        shared=2,
    ),
    StackExperts(),
)
#: Constants of its modeling file, except the first.
GROVE_KEYS: tuple[SetKeys, ...] = (
    EXPERT_WIDTH,
    Computed(".expert_chunk_feed_forward_length", lambda config: config.get("head_dim") or 128),
    Always(".experts_per_group", 2),
    Always(".expert_group_scale", 0.05, "f32"),
)

#: Constants of llama.cpp's graph.
_MAPLE_SETTINGS: Json = {
    "hidden_act": "silu",
    "num_shared_experts": 0,
    "norm_topk_prob": True,
    "nope_on_global_attention": True,
}


def refuse_settings(keys: Keys, config: Config) -> None:
    """Refuse settings of Maple that llama.cpp does not support."""
    for key, value in _MAPLE_SETTINGS.items():
        if bool(config.get(key, key == "norm_topk_prob")) != bool(value) or (value == "silu" != config.get(key)):
            raise FormatError(f"{config.path}: {key} is {short(config.get(key))}; only {value} is supported", "QK-E305")


MAPLE_KEYS: tuple[SetKeys, ...] = (
    refuse_settings,
    VOCAB_SIZE,
    rotary_width(1.0),
    WINDOW,
    WINDOW_PATTERN,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Computed(".swiglu_clamp_exp", lambda config: [7.0] * config.layers, "array"),  # a constant of its modeling file
)


def _set_mellum_window(keys: Keys, config: Config) -> None:
    """Set the window of Mellum, unless it is not used, and which layers have it."""
    if config.get("use_sliding_window") in (True, None) and config.get("sliding_window") is not None:
        WINDOW(keys, config)
        WINDOW_PATTERN(keys, config)


def _set_mellum_window_config(meta: ModelMetadata, config: Json) -> None:
    config["sliding_window"] = meta.get(".attention.sliding_window")
    set_layer_types(meta, config)


def _small_window(config: Config) -> int | None:
    """Return SmallThinker's window, if any layer has it."""
    return (config.get("sliding_window_size") or None) if any(config.get("sliding_window_layout") or ()) else None


def _set_window_layout(meta: ModelMetadata, config: Json) -> None:
    """Set SmallThinker's layers with window and rope: all but every fourth from the first."""
    layers, window = range(meta.number(".block_count")), meta.get(".attention.sliding_window")
    if window is not None:
        config["sliding_window_size"] = window
    config |= {
        "sliding_window_layout": [int(window is not None and i % 4 != 0) for i in layers],
        "rope_layout": [int(window is None or i % 4 != 0) for i in layers],
    }


def _small_gating(config: Config) -> int:
    return GATING["softmax" if config.get("moe_primary_router_apply_softmax") else "sigmoid"]


def _set_small_gating(meta: ModelMetadata, config: Json) -> None:
    config["moe_primary_router_apply_softmax"] = meta.get(".expert_gating_func") == GATING["softmax"]


SMALL_THINKER_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_count", "moe_num_primary_experts"),
    Copied(".expert_used_count", "moe_num_active_primary_experts"),
    Copied(".expert_feed_forward_length", "moe_ffn_hidden_size"),
    Copied(".feed_forward_length", "moe_ffn_hidden_size"),
    Computed(".expert_gating_func", _small_gating, inverse=_set_small_gating),
    Computed(".attention.sliding_window", _small_window, inverse=_set_window_layout),
)
_SMALL_EXPERTS = StackExperts(
    weights=("down", "gate", "up"),
    name="model.layers.{layer}.block_sparse_moe.experts.{expert}.{weight}.weight",
    merged="model.layers.{layer}.block_sparse_moe.experts.{weight}.weight",
)

_GROVE_MOE = Architecture("grovemoe", rules=GROVE_RULES, keys=GROVE_KEYS)

ARCHITECTURES: dict[str, Architecture] = {
    "ArcticForCausalLM": Architecture(
        "arctic", rules=(*llama.ROPE_PERMUTED, llama.STACK_MIXTRAL_EXPERTS), keys=llama.LLAMA_KEYS, vocab=write_arctic
    ),
    "GroveMoeForCausalLM": _GROVE_MOE,
    "modeling_grove_moe.GroveMoeForCausalLM": _GROVE_MOE,
    "MapleForCausalLM": Architecture("maple", rules=(StackExperts(),), keys=MAPLE_KEYS),
    "MellumForCausalLM": Architecture(
        "mellum",
        rules=(StackExperts(),),
        keys=(EXPERT_WIDTH, KeyGroup(_set_mellum_window, _set_mellum_window_config)),
    ),
    "SmallThinkerForCausalLM": Architecture("smallthinker", rules=(_SMALL_EXPERTS,), keys=SMALL_THINKER_KEYS),
}

CLASSES: dict[str, HfClass] = {
    "ArcticForCausalLM": HfClass(
        "arctic",
        add_prefix(
            LAYER, "post_attention_layernorm residual_mlp.w1 residual_mlp.w2 residual_mlp.w3 block_sparse_moe.gate"
        )
        + " layers.*.feed_forward.experts.w1 layers.*.feed_forward.experts.w2 layers.*.feed_forward.experts.w3",
        # Constants of llama.cpp's graph.
        defaults={"moe_layer_frequency": 1, "parallel_attn_mlp_res": True},
    ),
    "GroveMoeForCausalLM": HfClass(
        "grove_moe", keys={".expert_count": "num_experts"}, defaults={"norm_topk_prob": True}
    ),
    "MapleForCausalLM": HfClass("maple", keys={".expert_count": "num_experts"}, defaults=_MAPLE_SETTINGS),
    "MellumForCausalLM": HfClass(
        "mellum",
        defaults={"norm_topk_prob": True},
        config_setters=(config_values.set_mlp_layer_types, config_values.set_two_ropes),
    ),
    "SmallThinkerForCausalLM": HfClass(
        "smallthinker",
        add_prefix(f"{LAYER}block_sparse_moe.", "primary_router experts.down experts.gate experts.up"),
    ),
}

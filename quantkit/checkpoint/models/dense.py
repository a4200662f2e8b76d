"""Dense decoders that differ from Llama in a few keys: Maincoder, openPangu Embedded, Orion, Seed-OSS, Spark 2.5.

Facts of llama.cpp b11434, conversion/maincoder.py, conversion/pangu.py, conversion/orion.py, conversion/spark2_5.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.key_rows import (
    BLOCK_COUNT,
    FILE_TYPE,
    VOCAB_SIZE,
    WINDOW,
    WINDOW_PATTERN,
    Always,
    Computed,
    Copied,
    SetKeys,
)
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import ernie
from quantkit.checkpoint.row import LAYER, Architecture, HfClass
from quantkit.checkpoint.rules import TIED_OUTPUT, Rename
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.errors import FormatError

#: Orion's; its rms_norm_eps is the epsilon of layer norms.
ORION_BASE: tuple[SetKeys, ...] = (
    FILE_TYPE,
    Always(".tensor_data_layout", "Meta AI original pth", "text"),
    Copied(
        ".context_length",
        "max_sequence_length max_position_embeddings model_max_length",
        required=True,
        exported="max_position_embeddings",
    ),
    Copied(".embedding_length", "hidden_size", required=True),
    BLOCK_COUNT,
    Copied(".feed_forward_length", "intermediate_size", required=True),
    Copied(".attention.head_count", "num_attention_heads", required=True),
    Copied(".attention.head_count_kv", "num_key_value_heads num_attention_heads", required=True),
    Copied(".attention.layer_norm_epsilon", "rms_norm_eps", "f32", required=True),
)


def _undefined_head_dim(config: Config) -> int | None:
    """Return the width of Pangu's heads if the base keys lack it."""
    return config.head_dim if config.get("head_dim") is None else None


PANGU_KEYS: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    Computed(".rope.dimension_count", lambda config: config.head_dim),
    Computed(".attention.key_length", _undefined_head_dim, names="head_dim"),
    Computed(".attention.value_length", _undefined_head_dim),
)


def refuse_gates(keys: Keys, config: Config) -> None:
    """Refuse gates, an activation or layers of Spark 2.5 that llama.cpp does not support."""
    gate = config.get("gate_attn_act_mode"), config.get("headwise_attn_output_gate"), config.get("hidden_act")
    if gate != ("sigmoid", True, "gelu") or len(config["layer_types"]) != config.layers:
        raise FormatError(
            f"{config.path}: llama.cpp does not support these gates, activation or layer_types", "QK-E305"
        )


def _rotary_width(config: Config, kind: str) -> int:
    return int(config.number("head_dim") * config.rotary_part(None, rope=config.rope[kind]))


SPARK_KEYS: tuple[SetKeys, ...] = (
    refuse_gates,
    VOCAB_SIZE,
    WINDOW,
    WINDOW_PATTERN,
    Computed(".rope.dimension_count", lambda config: _rotary_width(config, "full_attention")),
    Computed(".rope.dimension_count_swa", lambda config: _rotary_width(config, "sliding_attention")),
)

ARCHITECTURES: dict[str, Architecture] = {
    "MaincoderForCausalLM": Architecture("maincoder", keys=(Copied(".rope.dimension_count", "head_dim"),)),
    "OrionForCausalLM": Architecture("orion", base=ORION_BASE, vocab=write_sentencepiece),
    "PanguEmbeddedForCausalLM": Architecture(
        "pangu-embedded", rules=(TIED_OUTPUT,), keys=PANGU_KEYS, vocab=ernie.write_ernie
    ),
    "SeedOssForCausalLM": Architecture("seed_oss"),
    "Spark2_5ForCausalLM": Architecture(
        "spark2_5", rules=(Rename(r"\.self_attn\.q_k_v_proj\.", ".self_attn.qkv_proj."),), keys=SPARK_KEYS
    ),
}

CLASSES: dict[str, HfClass] = {
    "MaincoderForCausalLM": HfClass("maincoder"),
    "OrionForCausalLM": HfClass("orion"),
    "PanguEmbeddedForCausalLM": HfClass("PanguEmbedded"),
    "SeedOssForCausalLM": HfClass("seed_oss"),
    "Spark2_5ForCausalLM": HfClass(
        "spark2_5",
        f"{LAYER}self_attn.g_proj {LAYER}self_attn.qkv_proj",
        defaults={"gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True, "hidden_act": "gelu"},
        config_setters=(config_values.set_two_ropes,),
    ),
}

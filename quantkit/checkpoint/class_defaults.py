"""What transformers' configuration classes fill in where config.json says nothing.

Facts of transformers 4.57.6 (models/*/configuration_*.py), the version that llama.cpp b11434 pins: only values that
convert_hf_to_gguf.py reads. Later versions have other defaults, so the keys of a sparse config.json depend on the
version that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

#: Of every class: the last resort for the context length.
_COMMON: Json = {"max_length": 20, "tie_word_embeddings": True, "is_decoder": False}

_DENSE: Json = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    **{"rope_scaling": None, "tie_word_embeddings": False},
}
_QWEN: Json = {
    **_DENSE,
    **{"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32},
}

#: Model type -> key -> value.
DEFAULTS: dict[str, Json] = {
    "llama": {**_DENSE, "num_key_value_heads": None, "head_dim": None},
    "mistral": {
        **_DENSE,
        **{"intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
        "max_position_embeddings": 4096 * 32,
    },
    "mixtral": {
        **_DENSE,
        **{"intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": None, "sliding_window": None},
        **{"max_position_embeddings": 4096 * 32, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        **{"num_experts_per_tok": 2, "num_local_experts": 8},
    },
    "qwen2": _QWEN,
    "qwen2_moe": {
        **_QWEN,
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        **{"shared_expert_intermediate_size": 5632, "norm_topk_prob": False},
    },
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN,
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
    },
}


def _heads_as_queries(values: Json) -> None:
    """Of a class with num_key_value_heads null: as many as there are heads."""
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")


def _divided_head(values: Json) -> None:
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if values.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads:
        values["head_dim"] = width // heads


def _no_window(values: Json) -> None:
    if "use_sliding_window" in values and not values["use_sliding_window"]:
        values["sliding_window"] = None
    values.setdefault("sliding_window", None)


#: Model type -> what a class computes from other values, in order.
DERIVED: dict[str, tuple[Callable[[Json], None], ...]] = {
    "llama": (_heads_as_queries, _divided_head),
    "mistral": (_heads_as_queries,),
    "mixtral": (_heads_as_queries,),
    "qwen2": (_heads_as_queries, _no_window),
    "qwen2_moe": (_no_window,),
    "qwen3": (_heads_as_queries, _no_window),
    "qwen3_moe": (_heads_as_queries, _no_window),
}

#: Model type -> keys that hold the configuration of a part, and its type if it does not name one.
PARTS: dict[str, dict[str, str]] = {}


def with_defaults(values: Json, kind: str | None = None) -> Json:
    """Return a configuration as AutoConfig gives it; of a type that it does not know, unchanged."""
    found = values.get("model_type", kind)
    if not isinstance(found, str) or found not in DEFAULTS:
        return dict(values)
    filled = {**_COMMON, **DEFAULTS[found], **values}
    for key, inner in PARTS.get(found, {}).items():
        filled[key] = with_defaults(filled.get(key) or {}, inner)
    for derive in DERIVED.get(found, ()):
        derive(filled)
    return filled

"""Phi 2, 3, 4 and Phi-3.5-MoE.

Facts of llama.cpp b11434, conversion/phi.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Constant
from quantkit.checkpoint.key_rows import (
    BLOCK_COUNT,
    FILE_TYPE,
    Always,
    Computed,
    Copied,
    SetKeys,
    number_or,
    set_rotary_part,
)
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import minimax
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.tensors import Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.sentencepiece import phi_tokens, write_pieces
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def set_rope_attention(keys: Keys, config: Config) -> None:
    """Set the attention factor for contexts longer than the training's (longrope, yarn)."""
    if not _factors(config):
        return
    length, original = _lengths(config)
    scale, kind = length / original, str(config.rope.get("rope_type", "")).lower()
    if kind not in ("su", "longrope", "yarn"):
        raise FormatError(
            f"{config.path}: rope has factors, but its rope_type is {short(kind)}, not longrope or yarn", "QK-E112"
        )
    factor = 1.0
    if scale > 1:
        factor = 0.1 * math.log(scale) + 1 if kind == "yarn" else math.sqrt(1 + math.log(scale) / math.log(original))
    keys.f32(".rope.scaling.attn_factor", factor)


def long_rope(config: Config) -> Iterable[Tensor]:
    """The factors of rope for long and for short texts, as tensors."""
    for name, values in _factors(config).items():
        yield Tensor(f"rope_factors_{name}.weight", Constant(values), None, f"rope_factors_{name}.weight")


PHIMOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_used_count", "num_experts_per_tok num_experts_per_token", required=True),
    Copied(".expert_count", "num_local_experts num_experts", required=True),
)


def _rope_width(config: Config) -> int:
    heads = config.number("num_attention_heads", "n_head")
    if not heads:
        raise FormatError(f"{config.path}: num_attention_heads is 0", "QK-E112")
    return int(config.rotary_part(1.0) * config.number("hidden_size", "n_embd")) // heads


def _lengths(config: Config) -> tuple[int, int]:
    """Return the context length and the training context length.

    A PhiMoE without rope_scaling was trained on the full context; convert_hf_to_gguf.py fails on it.
    """
    length = config.number("n_positions", "max_position_embeddings")
    original = config.rope.get("original_max_position_embeddings", length)
    if not isinstance(original, int) or isinstance(original, bool) or original < 2:
        raise FormatError(f"{config.path}: original_max_position_embeddings is {short(original)}", "QK-E112")
    return length, original


def _factors(config: Config) -> dict[str, tuple[float, ...]]:
    """Return the factors of rope for long and short texts, {} if there are none."""
    if not config.rope.get("long_factor"):
        return {}
    factors = {name: config.rope.get(f"{name}_factor") for name in ("long", "short")}
    count = _rope_width(config) // 2
    for name, values in factors.items():
        if not isinstance(values, list) or len(values) != count or not all(isinstance(v, (int, float)) for v in values):
            raise FormatError(
                f"{config.path}: {name}_factor is {short(values)}, not a list of {count} numbers", "QK-E112"
            )
    return {name: tuple(map(float, values)) for name, values in factors.items() if isinstance(values, list)}


def write_phi(v: Vocabulary) -> None:
    """Write Phi 4's BPE vocabulary, else SentencePiece (Phi3MiniModel)."""
    if v.tokenizer_config.get("tokenizer_class") == "GPT2Tokenizer" or not v.has("tokenizer.model"):
        write_bpe(v)
    else:
        write_pieces(v, phi_tokens(v))


_ROPE_WIDTH = Computed(".rope.dimension_count", _rope_width)
_WIDTH = Copied(".embedding_length", "hidden_size n_embd", required=True)
_HEADS = Copied(".attention.head_count", "num_attention_heads n_head", required=True)

PHI3_BASE: tuple[SetKeys, ...] = (
    Copied(".context_length", "n_positions max_position_embeddings", required=True, exported="max_position_embeddings"),
    Computed(
        ".rope.scaling.original_context_length",
        lambda config: _lengths(config)[1],
        names="original_max_position_embeddings",
    ),
    _WIDTH,
    Copied(".feed_forward_length", "intermediate_size", required=True),
    BLOCK_COUNT,
    _HEADS,
    Copied(".attention.head_count_kv", "num_key_value_heads n_head_kv", required=True),
    Copied(".attention.layer_norm_rms_epsilon", "rms_norm_eps", "f32", required=True),
    _ROPE_WIDTH,
    Computed(".rope.freq_base", lambda config: config.full_rope.get("rope_theta", 10000.0), "f32", names="rope_theta"),
    FILE_TYPE,
    # 0 distinguishes Phi 4 from others of the architecture.
    number_or(".attention.sliding_window", "sliding_window", 0),
)
PHI2_BASE: tuple[SetKeys, ...] = (
    Copied(".context_length", "n_positions max_position_embeddings", required=True, exported="max_position_embeddings"),
    _WIDTH,
    Computed(
        ".feed_forward_length",
        lambda config: 4 * config.number("hidden_size", "n_embd"),
        names="intermediate_size",
    ),
    BLOCK_COUNT,
    _HEADS,
    Copied(".attention.head_count_kv", "num_attention_heads n_head", required=True, exported="num_key_value_heads"),
    Copied(".attention.layer_norm_epsilon", "layer_norm_epsilon layer_norm_eps", "f32", required=True),
    _ROPE_WIDTH,
    FILE_TYPE,
    Always("tokenizer.ggml.add_bos_token", False, "flag"),
)

_PHI3 = Architecture("phi3", base=PHI3_BASE, vocab=write_phi, head_keys=(set_rope_attention,), synthetic=long_rope)
_PHIMOE = replace(_PHI3, arch="phimoe", rules=(minimax.STACK_EXPERTS,), keys=PHIMOE_KEYS)

ARCHITECTURES: dict[str, Architecture] = {
    "PhiForCausalLM": Architecture("phi2", base=PHI2_BASE),
    "Phi3ForCausalLM": _PHI3,
    "Phi4ForCausalLMV": _PHI3,
    # transformers saves the second name, which convert_hf_to_gguf.py does not read.
    "PhiMoEForCausalLM": _PHIMOE,
    "PhimoeForCausalLM": _PHIMOE,
}


def set_window_or_none(meta: ModelMetadata, config: Json) -> None:
    """Set sliding_window to null if it is 0."""
    config["sliding_window"] = config.get("sliding_window") or None


def set_long_rope_scale(meta: ModelMetadata, config: Json) -> None:
    """Set the factors of attention of Phi-3.5-MoE, for long and short texts."""
    if rope := config["rope_scaling"]:
        scale = meta.get(".rope.scaling.attn_factor")
        rope |= {"rope_type": "longrope", "long_mscale": scale, "short_mscale": scale}
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]


_FUSED_NAMES = "model.layers.*.self_attn.qkv_proj model.layers.*.mlp.gate_up_proj"

_SPARSE_NAMES = " ".join(
    f"model.layers.*.block_sparse_moe.{name}"
    for name in ("gate", "e_score_correction", "experts.w1", "experts.w2", "experts.w3")
)

CLASSES: dict[str, HfClass] = {
    "PhiForCausalLM": HfClass(
        "phi",
        "model.final_layernorm model.layers.*.self_attn.dense model.layers.*.mlp.fc1 model.layers.*.mlp.fc2",
        config_setters=(set_rotary_part,),
    ),
    "Phi3ForCausalLM": HfClass(
        "phi3",
        _FUSED_NAMES,
        config_setters=(set_rotary_part, config_values.set_long_rope, set_window_or_none),
    ),
    "PhimoeForCausalLM": HfClass(
        "phimoe",
        _SPARSE_NAMES,
        config_setters=(config_values.set_long_rope, set_long_rope_scale, set_window_or_none),
    ),
}

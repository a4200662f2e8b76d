"""Phi 2, 3, 4 and PhiMoE.

Facts of llama.cpp b11434, conversion/phi.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Constant
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Experts, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

PHI_EXPERTS = Experts(
    weights=("w1", "w2", "w3"),
    name="model.layers.{layer}.block_sparse_moe.experts.{expert}.{weight}.weight",
    merged="model.layers.{layer}.block_sparse_moe.experts.{weight}.weight",
)
PHIMOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_used_count", "num_experts_per_tok num_experts_per_token", needed=True),
    Copied(".expert_count", "num_local_experts num_experts", needed=True),
)


def _rope_width(config: Config) -> int:
    heads = config.number("num_attention_heads", "n_head")
    if not heads:
        raise FormatError(f"{config.path}: num_attention_heads is 0")
    return int(config.rotary_part(1.0) * config.number("hidden_size", "n_embd")) // heads


def _lengths(config: Config) -> tuple[int, int]:
    """Return the length of contexts, and that of training.

    A PhiMoE without rope_scaling was trained on the whole; convert_hf_to_gguf.py stops there.
    """
    length = config.number("n_positions", "max_position_embeddings")
    original = config.rope.get("original_max_position_embeddings", length)
    if not isinstance(original, int) or isinstance(original, bool) or original < 2:
        raise FormatError(f"{config.path}: original_max_position_embeddings is {short(original)}")
    return length, original


def set_phi3_keys(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Phi 3 and later: an order of their own."""
    length, original = _lengths(config)
    keys.u32(".context_length", length)
    keys.u32(".rope.scaling.original_context_length", original)
    keys.u32(".embedding_length", config.number("hidden_size", "n_embd"))
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", config.number("num_attention_heads", "n_head"))
    keys.u32(".attention.head_count_kv", config.number("num_key_value_heads", "n_head_kv"))
    keys.f32(".attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    keys.u32(".rope.dimension_count", _rope_width(config))
    keys.f32(".rope.freq_base", config.full_rope.get("rope_theta", 10000.0))
    keys.u32("general.file_type", file_type)
    # 0 tells Phi 4 from others of the architecture.
    window = config.get("sliding_window")
    keys.u32(".attention.sliding_window", 0 if window is None else window)


def set_phi2_keys(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Phi 2."""
    width, heads = config.number("hidden_size", "n_embd"), config.number("num_attention_heads", "n_head")
    keys.u32(".context_length", config.number("n_positions", "max_position_embeddings"))
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", 4 * width)
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", heads)
    keys.u32(".attention.head_count_kv", heads)
    keys.f32(".attention.layer_norm_epsilon", config.find("layer_norm_epsilon", "layer_norm_eps"))
    keys.u32(".rope.dimension_count", _rope_width(config))
    keys.u32("general.file_type", file_type)
    keys.flag("tokenizer.ggml.add_bos_token", False)


def _factors(config: Config) -> dict[str, tuple[float, ...]]:
    """Return the factors of rope for long and short texts, {} where there are none."""
    if not config.rope.get("long_factor"):
        return {}
    found = {name: config.rope.get(f"{name}_factor") for name in ("long", "short")}
    wanted = _rope_width(config) // 2
    for name, values in found.items():
        if (
            not isinstance(values, list)
            or len(values) != wanted
            or not all(isinstance(v, (int, float)) for v in values)
        ):
            raise FormatError(f"{config.path}: {name}_factor is {short(values)}, not a list of {wanted} numbers")
    return {name: tuple(map(float, values)) for name, values in found.items() if isinstance(values, list)}


def set_rope_attention(keys: Keys, config: Config) -> None:
    """Set by what attention is multiplied where texts may be longer than those of training."""
    if not _factors(config):
        return
    length, original = _lengths(config)
    scale, kind = length / original, str(config.rope.get("rope_type", "")).lower()
    if kind not in ("su", "longrope", "yarn"):
        raise FormatError(f"{config.path}: rope has factors, but its rope_type is {short(kind)}, not longrope or yarn")
    factor = 1.0
    if scale > 1:
        factor = 0.1 * math.log(scale) + 1 if kind == "yarn" else math.sqrt(1 + math.log(scale) / math.log(original))
    keys.f32(".rope.scaling.attn_factor", factor)


def long_rope(config: Config) -> Iterable[Tensor]:
    """The factors of rope for long and for short texts, as tensors."""
    for name, values in _factors(config).items():
        yield Tensor(f"rope_factors_{name}.weight", Constant(values), None, f"rope_factors_{name}.weight")

"""Llama, Mistral, Mixtral, and what others have of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.expressions import Constant
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Experts, Tensor, key_heads, query_heads
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

ROPE_PERMUTED = (
    Changed(r"q_proj\.(weight|bias)$", query_heads),
    Changed(r"k_proj\.(weight|bias)$", key_heads),
)
MIXTRAL_EXPERTS = Experts(
    weights=("w1", "w2", "w3"),
    name="model.layers.{layer}.block_sparse_moe.experts.{expert}.{weight}.weight",
    merged="layers.{layer}.feed_forward.experts.{weight}.weight",
)


def set_rope_width(keys: Keys, config: Config) -> None:
    """Rope turns whole heads (LlamaModel)."""
    keys.u32(".rope.dimension_count", config.head_dim)


def rope_factors(config: Config, factor: float = 8.0) -> Iterable[Tensor]:
    """The factors of Llama 3's rope, as a tensor (LlamaModel.generate_extra_tensors).

    torch computes a scalar divided by a tensor as the reciprocal times the scalar, in float32; so do we, and powers in
    float64, rounded: equal for all released models.
    """
    rope = config.full_rope
    if str(rope.get("rope_type", "")).lower() != "llama3":
        return
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            values = _rope_factors(rope, config.head_dim, factor)
    except (TypeError, ValueError, ArithmeticError) as e:
        raise FormatError(f"{config.path}: rope of Llama 3 with values that are none: {short(str(e))}") from None
    yield Tensor("rope_freqs.weight", Constant(tuple(values)), None, "rope_freqs.weight")


def _rope_factors(rope: Json, width: int, factor: float) -> list[float]:
    f32 = np.float32
    base = float(rope.get("rope_theta", 10000.0))
    factor = rope.get("factor", factor)
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    length = rope.get("original_max_position_embeddings", 8192)
    long_wave, short_wave = length / low, length / high
    exponents = np.arange(0, width, 2, dtype=f32) / f32(width)
    frequencies = f32(1) / np.power(base, exponents.astype(np.float64)).astype(f32)
    values = []
    for frequency in frequencies:
        wave = f32(1) / frequency * f32(2 * math.pi)
        if wave < short_wave:
            values.append(1.0)
        elif wave > long_wave:
            values.append(float(factor))
        else:
            smooth = (f32(1) / wave * f32(length) - f32(low)) / f32(high - low)
            inverse = (f32(1) - smooth) / f32(factor) + smooth
            values.append(float(f32(1) / inverse))
    return values


LLAMA_KEYS: tuple[SetKeys, ...] = (Copied(".vocab_size", "vocab_size", needed=True), set_rope_width)

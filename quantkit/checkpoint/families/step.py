"""Step 3.5 and 3.7.

Facts of llama.cpp b11434, conversion/step3.py (Step35Model).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.expressions import Constant, Expression
from quantkit.checkpoint.families.glm import set_predicting_layers
from quantkit.checkpoint.keys import Keys, layers_in_file
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Renamed, Tensor, plus_one, squeezed
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

STORED = (
    Renamed(r"(\.moe\.router_bias)$", r"\1.bias"),
    Renamed(r"(\.layers\.\d+)\.transformer\.", r"\1.", foreign=True),  # of some: see back/hybrids.py
    Renamed(r"shared_head\.output", "shared_head.head"),
)


def without_ones(tensor: Tensor, context: Context) -> Expression:
    """Leave out dimensions of one, of matrices that have none as they are released."""
    return squeezed(tensor, context)


RULES = (
    Changed(r"norm\.weight$", plus_one),
    Changed(r"\.(self_attn\.g_proj|moe\.(gate|up_proj|gate_proj|down_proj))\.weight$", without_ones),
)


def split_theta(config: Config) -> None:
    """Of two bases of rope the second is that of layers that attend to a window."""
    theta = config.get("rope_theta")
    if isinstance(theta, list):
        config.rope |= {"rope_theta": float(theta[0]), "sliding_attention": {"rope_theta": float(theta[1])}}


def _padded(values: Any, n: int, by: Any) -> list[Any]:
    return [*(values or []), *[by] * n][:n]


def _set_layers(keys: Keys, config: Config) -> None:
    n, other = layers_in_file(keys), config.get("attention_other_setting") or {}
    slides = [kind == "sliding_attention" for kind in _padded(config.get("layer_types"), n, "full_attention")]
    turned = _padded(config.get("partial_rotary_factors"), n, 0.5)
    if turned != [1.0 if each else 0.5 for each in slides]:
        raise FormatError(f"{config.path}: rope must turn heads with a window whole, others by half")
    for key, name in ((".attention.head_count", "heads"), (".attention.head_count_kv", "groups")):
        full = config.number(f"num_attention_{name}")
        sliding = other.get(f"num_attention_{name}", full)
        keys.array(key, [sliding if each else full for each in slides])
    keys.u32(".attention.sliding_window", config["sliding_window"])
    keys.array(".attention.sliding_window_pattern", slides)
    keys.u32(".attention.value_length", config["head_dim"])


def _set_dense(keys: Keys, config: Config) -> None:
    listed = config.get("moe_layers_enum")
    layers = sorted(int(i) for i in listed.split(",")) if isinstance(listed, str) and listed.strip() else [0]
    keys.u32(".leading_dense_block_count", max(0, layers[0]))
    keys.u32(".moe_every_n_layers", int(config.get("moe_every_n_layer", 1)))
    keys.f32(".attention.layer_norm_rms_epsilon", config.get("rms_norm_eps", 1e-5))


def _set_limits(keys: Keys, config: Config) -> None:
    for key, name in ((".swiglu_clamp_exp", "swiglu_limits"), (".swiglu_clamp_shexp", "swiglu_limits_shared")):
        if (limits := config.get(name)) is not None:
            numbers = [0.0 if limit is None else float(limit) for limit in limits]
            keys.array(key, _padded(numbers, layers_in_file(keys), 0.0))


KEYS: tuple[SetKeys, ...] = (
    _set_layers,
    Copied(".expert_count", "moe_num_experts", needed=True),
    Copied(".expert_used_count", "moe_top_k", needed=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", needed=True),
    Copied(".expert_shared_feed_forward_length", "share_expert_dim", needed=True),
    Copied(".expert_weights_scale", "moe_router_scaling_factor", "f32"),
    Copied(".expert_weights_norm", "norm_expert_weight", "flag"),
    _set_dense,
    _set_limits,
    set_predicting_layers,
)


def rope_factors(config: Config) -> Iterable[Tensor]:
    """The factors of Llama 3's rope for the part of a head that layers without a window turn; 1 for the rest."""
    rope = config.full_rope
    if str(rope.get("rope_type") or "").lower() != "llama3":
        return
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            values = _rope_factors(rope, config)
    except (TypeError, ValueError, ArithmeticError) as e:
        raise FormatError(f"{config.path}: rope of Llama 3 with values that are none: {short(str(e))}") from None
    yield Tensor("rope_freqs.weight", Constant(values), None, "rope_freqs.weight")


def _rope_factors(rope: Json, config: Config) -> tuple[float, ...]:
    width, theta = config.head_dim, config.get("rope_theta", 10000.0)
    base = float(theta[0] if isinstance(theta, list) else theta)
    kinds = zip(config.get("layer_types") or [], config.get("partial_rotary_factors") or [], strict=False)
    part = next((float(f) for kind, f in kinds if kind == "full_attention"), 0.5)
    if not 0 < part <= 1:
        raise ValueError(f"a share of {part} of a head is turned")
    turned = int(width * part)
    factor = float(rope.get("factor", 8.0))
    low, high = float(rope.get("low_freq_factor", 1.0)), float(rope.get("high_freq_factor", 4.0))
    length = int(rope.get("original_max_position_embeddings", 8192))
    exponents = np.arange(0, turned, 2, dtype=np.float32) / np.float32(turned)
    powers = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    values = []
    for frequency in (np.float32(1) / powers).tolist():
        wave = 2 * math.pi / frequency
        if wave < length / high:
            values.append(1.0)
        elif wave > length / low:
            values.append(factor)
        else:
            smooth = (length / wave - low) / (high - low)
            values.append(1.0 / ((1.0 - smooth) / factor + smooth))
    values += [1.0] * (width // 2 - len(values))
    return tuple(float(np.float32(v)) for v in values)

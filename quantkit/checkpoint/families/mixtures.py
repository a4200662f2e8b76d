"""Large mixtures of experts, each of its own kind: DBRX, Grok; and DeciLM, whose layers differ in width.

Facts of llama.cpp b11434, conversion/dbrx.py, conversion/grok.py, conversion/deci.py,
conversion/maple.py, conversion/bailingmoe.py (SarvamMoEModel).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.expressions import (
    Expression,
    Shaped,
    Transposed,
    as_f32,
    from_f32,
    read_f32,
    size_of,
    value_bytes,
    values_in,
)
from quantkit.checkpoint.keys import Keys, set_base_keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import AsFile, Changed, Context, Experts, Renamed, Rule, Tensor, permuted, restored
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType

# --- DBRX ------------------------------------------------------------------------------------------------------------


def _inner(config: Config, key: str) -> Json:
    """Return an object of config.json."""
    found = config.get(key)
    if not isinstance(found, dict):
        raise FormatError(f"{config.path}: {key} is {short(found)}, not an object")
    return found


def by_expert(tensor: Tensor, context: Context) -> Expression:
    """Put experts apart, which are one under the other (DBRX)."""
    config = context.config
    of = config.with_values(_inner(config, "ffn_config"))
    return Shaped(tensor.x, (of.number("moe_num_experts"), of.number("ffn_hidden_size"), config.number("d_model")))


def turned_by_expert(tensor: Tensor, context: Context) -> Expression:
    """Put experts apart that are stored the other way round (DBRX)."""
    return Transposed(by_expert(tensor, context))


#: All experts are one matrix under the other; even what chooses them has the type of the file.
DBRX_RULES = (
    Changed(r"ffn\.experts\.mlp\.(w1|v1)$", by_expert),
    Changed(r"ffn\.experts\.mlp\.w2$", turned_by_expert),
    Renamed(r"(ffn\.experts\.mlp\.(w1|w2|v1))$", r"\1.weight"),
    AsFile(r""),
)


def set_dbrx_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of DBRX: an order of their own."""
    ffn, attention = _inner(config, "ffn_config"), _inner(config, "attn_config")
    keys.u32(".block_count", layers)
    keys.u32(".context_length", config["max_seq_len"])
    keys.u32(".embedding_length", config["d_model"])
    keys.u32(".feed_forward_length", ffn["ffn_hidden_size"])
    keys.u32(".attention.head_count", config["n_heads"])
    keys.u32(".attention.head_count_kv", attention["kv_n_heads"])
    keys.f32(".rope.freq_base", attention["rope_theta"])
    keys.f32(".attention.clamp_kqv", attention["clip_qkv"])
    keys.u32(".expert_count", ffn["moe_num_experts"])
    keys.u32(".expert_used_count", ffn["moe_top_k"])
    keys.f32(".attention.layer_norm_epsilon", 1e-5)
    keys.u32("general.file_type", file_type)


# --- Grok ------------------------------------------------------------------------------------------------------------

#: Experts of Grok 2 get the names of Grok 1.
GROK_RULES: tuple[Rule, ...] = (
    *(
        Renamed(
            rf"^model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.{new}\.",
            rf"transformer.decoder_layer.\1.moe.\2.{old}.",
            foreign=True,
        )
        for new, old in (("w1", "linear"), ("w2", "linear_1"), ("w3", "linear_v"))
    ),
    Experts(
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

# --- DeciLM, Nemotron 49B to 253B ------------------------------------------------------------------------------------


def _blocks(config: Config) -> list[Json]:
    """Return what config.json says of each layer."""
    found = config["block_configs"]
    if not isinstance(found, list) or len(found) != config.layers:
        raise FormatError(f"{config.path}: block_configs is no list of {config.layers} layers")
    return found


def _heads(config: Config, layer: int) -> tuple[int, int]:
    """Return the heads of a layer, and those of its keys: none where attention was left out or made linear."""
    n = config.number("num_attention_heads")
    if (each := config.get("num_key_value_heads_per_layer")) is not None:
        return n, each[layer]
    if "block_configs" not in config:
        return n, config.number("num_key_value_heads")
    attention = _blocks(config)[layer]["attention"]
    group = attention["n_heads_in_group"]
    if group is None:
        return (n if attention.get("replace_with_linear") is True else 0), 0
    return n, n // group


def _width(config: Config, layer: int) -> int:
    """Return the width of a layer's feed forward: 0 where it was left out."""
    width = int(2 * (_blocks(config)[layer]["ffn"]["ffn_mult"] or 0.0) * config.number("hidden_size") / 3)
    return -(width // -256) * 256


@dataclass(frozen=True)
class RopeHeads:
    """Undoes the permutation of queries (``place`` 0) or keys (1) for rope."""

    place: int
    undoing: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        heads = _heads(context.config, tensor.layer or 0)[self.place]
        return (restored if self.undoing else permuted)(tensor, heads)

    def back(self) -> RopeHeads:
        return replace(self, undoing=not self.undoing)


DECI_RULES = (Changed(r"q_proj\.(weight|bias)$", RopeHeads(0)), Changed(r"k_proj\.(weight|bias)$", RopeHeads(1)))


def set_deci_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of DeciLM: where layers differ, an order of their own."""
    if "block_configs" not in config:
        set_base_keys(keys, config, layers, file_type)
        Copied(".attention.head_count_kv", "num_key_value_heads_per_layer", "array")(keys, config)
        return
    if (theta := config.rope.get("rope_theta")) is not None:
        keys.f32(".rope.freq_base", theta)
    heads = [_heads(config, i) for i in range(config.layers)]
    keys.array(".attention.head_count_kv", [n for _, n in heads])
    keys.array(".attention.head_count", [n for n, _ in heads])
    keys.array(".feed_forward_length", [_width(config, i) for i in range(config.layers)])
    keys.u32(".block_count", layers)
    keys.u32(".context_length", config["max_position_embeddings"])
    keys.u32(".embedding_length", config["hidden_size"])
    keys.f32(".attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    width = config.number("hidden_size") // max(1, config.number("num_attention_heads"))
    keys.u32(".attention.key_length", width)
    keys.u32(".attention.value_length", width)
    keys.u32("general.file_type", file_type)


# --- Maple -----------------------------------------------------------------------------------------------------------

_MAPLE = {"hidden_act": "silu", "num_shared_experts": 0, "norm_topk_prob": True, "nope_on_global_attention": True}


def _set_maple(keys: Keys, config: Config) -> None:
    for key, value in _MAPLE.items():
        if bool(config.get(key, key == "norm_topk_prob")) != bool(value) or (value == "silu" != config.get(key)):
            raise FormatError(f"{config.path}: {key} is {short(config.get(key))}; only {value} is known")
    keys.u32(".vocab_size", config["vocab_size"])
    keys.u32(".rope.dimension_count", int(config.head_dim * config.rotary_part(1.0)))
    keys.u32(".attention.sliding_window", config["sliding_window"])
    keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in config["layer_types"]])
    keys.u32(".expert_feed_forward_length", config["moe_intermediate_size"])
    keys.array(".swiglu_clamp_exp", [7.0] * config.layers)  # a constant of its modeling file


MAPLE_KEYS: tuple[SetKeys, ...] = (_set_maple,)

# --- Sarvam ----------------------------------------------------------------------------------------------------------


def _around_zero(tensor: Tensor, context: Context) -> Expression:
    return AroundZero(tensor.x)


#: The bias of what chooses experts, with its mean subtracted.
SARVAM_STORED = Changed(r"\.expert_bias$", _around_zero)


@dataclass(frozen=True)
class AroundZero:
    """A vector with its mean subtracted, in the type it is stored in, as torch computes it."""

    x: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def type(self) -> TensorType:
        return self.x.type

    def read(self, start: int, into: U8, ahead: int = 0) -> None:
        values = read_f32(self.x, 0, size_of(self.x))
        mean = np.empty(value_bytes(self.type, 1), np.uint8)
        from_f32(self.type, np.array([values.mean(dtype=np.float64)], np.float32), mean)
        n = values_in(self.type, into.size)
        from_f32(self.type, values[start : start + n] - as_f32(self.type, mean), into)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()

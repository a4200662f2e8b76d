"""Older decoders: MPT, JAIS, Refact, ruGPT-3 XL, OpenELM, InternLM 2, Xverse, Baichuan.

Facts of llama.cpp b11434, conversion/mpt.py, conversion/jais.py, conversion/refact.py, conversion/gpt2.py,
conversion/openelm.py, conversion/internlm.py, conversion/xverse.py,
conversion/baichuan.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Multiplied, head_permuted, joined, read_f32, size_of, taken
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Always, SetKeys
from quantkit.checkpoint.tensors import (
    Changed,
    Context,
    Dropped,
    Renamed,
    Split,
    Tensor,
    permuted,
    restored,
    transposed,
)
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

# --- MPT -------------------------------------------------------------------------------------------------------------


def set_mpt_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of MPT; it says no file type."""
    attention, width = config["attn_config"], config.number("d_model")
    keys.u32(".context_length", config["max_seq_len"])
    keys.u32(".embedding_length", width)
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", 4 * width)
    keys.u32(".attention.head_count", config["n_heads"])
    if heads := attention.get("kv_n_heads"):
        keys.u32(".attention.head_count_kv", heads)
    keys.f32(".attention.layer_norm_epsilon", 1e-5)
    if (clip := attention.get("clip_qkv")) is not None:
        keys.f32(".attention.clamp_kqv", clip)
    keys.f32(".attention.max_alibi_bias", attention.get("alibi_bias_max", 8) if attention.get("alibi", True) else 0.0)


# --- JAIS ------------------------------------------------------------------------------------------------------------


def _first_of(config: Config, *names: str) -> float:
    value = config.find(*names)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FormatError(f"{config.path}: {' or '.join(names)} is {short(value)}, not a number")
    return float(value)


def scaled_embeddings(tensor: Tensor, context: Context) -> Expression:
    """Multiply embeddings by what JAIS has for them."""
    return Multiplied(tensor.x, _first_of(context.config, "mup_embeddings_scale", "embeddings_scale"))


def scaled_output(tensor: Tensor, context: Context) -> Expression:
    """Multiply the rows of logits by what JAIS has for them."""
    config = context.config
    if "mup_output_alpha" in config:
        scale = _first_of(config, "mup_output_alpha") * _first_of(config, "mup_width_scale")
    else:
        scale = _first_of(config, "width_scale")
    return Multiplied(tensor.x, scale)


@dataclass(frozen=True)
class Slopes:
    """The slopes of ALiBi tell the largest of its biases; they are kept in the configuration."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.endswith("relative_pe.slopes"):
            return None
        first = float(read_f32(tensor.x, 0, 1)[0]) if size_of(tensor.x) else 0.0
        if not 0 < first < math.inf:
            raise context.fail(tensor, f"a slope of {first}")
        heads = context.config.number("n_head")
        context.config.values["_alibi"] = -round(math.log2(first) * 2 ** math.floor(math.log2(max(1, heads))))
        return ()


JAIS_STORED = (Dropped(r"\.attn\.bias$"),)
JAIS_RULES = (
    Slopes(),
    Changed(r"\.(c_attn|c_proj|c_fc|c_fc2)\.weight$", transposed),
    Changed(r"^transformer\.wte\.weight$", scaled_embeddings),
    Changed(r"^lm_head\.weight$", scaled_output),
)


def set_alibi(keys: Keys, config: Config) -> None:
    """Set the largest bias of ALiBi."""
    keys.f32(".attention.max_alibi_bias", float(config.get("_alibi", 8.0)))


def set_jais_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of JAIS."""
    for key, wanted in (("activation_function", "swiglu"), ("position_embedding_type", "alibi")):
        if config.get(key) != wanted:
            raise FormatError(f"{config.path}: {key} is {short(config.get(key))}; only {wanted} is known")
    keys.u32(".block_count", layers)
    keys.u32(".context_length", config["n_positions"])
    keys.u32(".embedding_length", config["n_embd"])
    keys.u32(".feed_forward_length", config["n_inner"])
    keys.u32(".attention.head_count", config["n_head"])
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_epsilon"])
    keys.u32("general.file_type", file_type)


# --- Refact ----------------------------------------------------------------------------------------------------------


def _refact_width(config: Config) -> int:
    """Return the width of feed forward, which the configuration does not say."""
    return -(int(8 * config.number("n_embd") / 3) // -256) * 256


def _key_and_value(config: Config) -> tuple[int, int]:
    width = config.number("n_embd") // max(1, config.number("n_head"))
    return width, width


REFACT_RULES = (
    Split(r"attn\.kv\.weight$", ("attn.k_proj.weight", "attn.v_proj.weight"), sizes=_key_and_value, always=True),
    Renamed(r"attn\.q\.weight$", "attn.q_proj.weight"),
    Split(
        r"mlp\.gate_up_proj\.weight$",
        ("mlp.linear_1.weight", "mlp.linear_3.weight"),
        sizes=lambda config: (_refact_width(config), _refact_width(config)),
        always=True,
    ),
)


def set_refact_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Refact."""
    keys.u32(".context_length", config["n_positions"])
    keys.u32(".embedding_length", config["n_embd"])
    keys.u32(".feed_forward_length", _refact_width(config))
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", config["n_head"])
    keys.u32(".attention.head_count_kv", 1)
    keys.f32(".attention.layer_norm_rms_epsilon", config["layer_norm_epsilon"])
    keys.u32("general.file_type", file_type)


# --- ruGPT-3 XL ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fused:
    """Queries, keys and values become one tensor, where the last of them was."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        stem, found, rest = tensor.name.partition(".self_attn.")
        part, dot, suffix = rest.partition("_proj.")
        if not found or not dot or part not in ("q", "k", "v") or tensor.layer is None:
            return None
        held = context.held.setdefault((id(self), tensor.layer * 2 + (suffix == "weight")), {})
        held[part] = tensor
        if len(held) < 3:
            return ()
        parts = [held.pop(each) for each in "qkv"]
        if len({each.x.shape[1:] for each in parts}) > 1:
            raise context.fail(tensor, "queries, keys and values are not of one width")
        return (replace(tensor, name=f"{stem}.self_attn.qkv_proj.{suffix}", x=joined([each.x for each in parts])),)


# --- OpenELM ---------------------------------------------------------------------------------------------------------


def _divisible(value: float, by: int) -> int:
    """Return the nearest multiple, not less than 90 %."""
    found = max(by, int(value + by / 2) // by * by)
    return found + by if found < 0.9 * value else found


def _elm_widths(config: Config) -> list[int]:
    width, by = config.number("model_dim"), config.number("ffn_dim_divisor")
    return [_divisible(each * width, by) for each in config["ffn_multipliers"]]


def name_layers(config: Config) -> None:
    """Say how many layers there are where others do."""
    config.values["num_hidden_layers"] = config.number("num_transformer_layers")


def _gate(tensor: Tensor, context: Context) -> range:
    return range(_elm_widths(context.config)[tensor.layer or 0])


@dataclass(frozen=True)
class GateAndUp:
    """Gate and up are stored in one; layers differ in width."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.endswith(".ffn.proj_1.weight"):
            return None
        n, layer = _gate(tensor, context).stop, tensor.layer
        if tensor.x.shape[0] != 2 * n:
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not twice {n} rows")
        return [
            replace(tensor, name=f"blk.{layer}.ffn_{kind}.weight", x=taken(tensor.x, 0, rows))
            for kind, rows in (("gate", range(n)), ("up", range(n, 2 * n)))
        ]


ELM_RULES = (GateAndUp(),)


def set_elm_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of OpenELM, whose layers differ."""
    widths: list[Any] = [_elm_widths(config), config["num_query_heads"], config["num_kv_heads"]]
    if any(not isinstance(each, list) or len(each) != layers for each in widths):
        raise FormatError(f"{config.path}: ffn_multipliers, num_query_heads or num_kv_heads are not of {layers} layers")
    head = config["head_dim"]
    keys.u32(".block_count", layers)
    keys.u32(".context_length", config["max_context_length"])
    keys.u32(".embedding_length", config["model_dim"])
    names = (".feed_forward_length", ".attention.head_count", ".attention.head_count_kv")
    for key, values in zip(names, widths, strict=True):
        keys.array(key, values)
    keys.f32(".rope.freq_base", config["rope_freq_constant"])
    keys.f32(".attention.layer_norm_rms_epsilon", 1e-6)
    keys.u32(".rope.dimension_count", head)
    keys.u32(".attention.key_length", head)
    keys.u32(".attention.value_length", head)
    keys.u32("general.file_type", file_type)


# --- InternLM 2 ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupedHeads:
    """Heads of queries that share a key are stored before it and its values; all are put apart (InternLM2Model)."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.endswith(".attention.wqkv.weight"):
            return None
        config, x = context.config, tensor.x
        heads, keys = config.number("num_attention_heads"), config.number("num_key_value_heads")
        each = heads // max(1, keys) + 2
        width = config.number("hidden_size") // max(1, heads)
        if not keys or heads % keys or width % 2 or x.shape[0] != keys * each * width:
            raise context.fail(tensor, f"its shape {list(x.shape)} is not {heads} heads of {width}, {keys} of keys")
        starts = [group * each * width for group in range(keys)]
        q = taken(x, 0, *(range(at, at + (each - 2) * width) for at in starts))
        k, v = (
            taken(x, 0, *(range(at + place * width, at + (place + 1) * width) for at in starts))
            for place in (each - 2, each - 1)
        )
        parts = (("q", head_permuted(q, heads)), ("k", head_permuted(k, keys)), ("v", v))
        return [replace(tensor, name=f"blk.{tensor.layer}.attn_{of}.weight", x=part) for of, part in parts]


# --- Xverse, Baichuan -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeHeads:
    """Undoes the permutation of queries, or of ``keys``, for rope.

    Where keys are fewer than queries, they are taken for another number of heads, as there.
    """

    keys: bool = False
    undoing: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        heads = context.config.number("num_attention_heads")
        found = context.config.get("num_key_value_heads", heads) if self.keys else heads
        n = heads if found in (None, heads) else heads // max(1, found)
        return (restored if self.undoing else permuted)(tensor, n)

    def back(self) -> RopeHeads:
        return replace(self, undoing=not self.undoing)


#: Baichuan's queries, keys and values are stored in one.
PACKED = Split(r"\.W_pack\.weight$", (".q_proj.weight", ".k_proj.weight", ".v_proj.weight"), always=True)
XVERSE_RULES = (Changed(r"q_proj\.weight$", RopeHeads()), Changed(r"k_proj\.weight$", RopeHeads(keys=True)))


def _set_rope(keys: Keys, config: Config) -> None:
    width = config.number("hidden_size") // max(1, config.number("num_attention_heads"))
    keys.u32(".rope.dimension_count", width)


XVERSE_KEYS: tuple[SetKeys, ...] = (Always(".tensor_data_layout", "Meta AI original pth", "text"), _set_rope)

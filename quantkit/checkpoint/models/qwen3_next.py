"""Qwen3-Next and Qwen 3.5: linear attention between layers of attention, and MTP layers.

Facts of llama.cpp b11434, conversion/qwen.py (_QwenMtpMixin, Qwen3NextModel).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, concatenate, take
from quantkit.checkpoint.key_rows import Computed, Copied, SetKeys, rotary_width
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import qwen
from quantkit.checkpoint.nextn import MTP_NAMES, MtpRule, NextnCount
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import (
    Drop,
    Rename,
    Transform,
    log_of_negative,
    minus_one,
    negative_exp,
    plus_one,
    squeeze,
    unsqueeze_channels,
)
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

#: The number of prediction layers (MTP), which only the configuration of Qwen 3.5 contains.
_MTP_COUNT = "mtp_num_hidden_layers"
_MTP = re.compile(r"^(?:model\.)?(?:language_model\.)?mtp\.(?:layers\.(\d{1,4})\.)?(.+)$")


def count_mtp_layers(config: Config, names: Collection[str]) -> None:
    """Record the number of stored MTP layers in the configuration.

    convert_hf_to_gguf.py fails if Qwen3-Next has none (as in every finetune saved by transformers), and writes a file
    that does not load if the configuration of Qwen 3.5 has one that is not stored. quantkit counts the stored ones.
    """
    numbers = [int(match[1] or 0) for match in map(_MTP.match, names) if match]
    config.values[_MTP_COUNT] = 1 + max(numbers, default=-1)


def layers_with_mtp(config: Config) -> int:
    """Return the number of layers, including prediction layers (MTP)."""
    return config.layers + config.number(_MTP_COUNT)


@dataclass(frozen=True)
class RenameMtpLayers(MtpRule):
    """Rename mtp.* to layers after the last."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = _MTP.match(tensor.name)
        if match is None:
            return None
        layer, tail = context.config.layers + int(match[1] or 0), match[2]
        if match[1] is None:
            stem, dot, suffix = tail.partition(".")
            tail = MTP_NAMES.get(stem, stem) + dot + suffix
        return (replace(tensor, name=f"model.layers.{layer}.{tail}"),)


@dataclass(frozen=True)
class SplitQkvzByHead(Rule):
    """in_proj_qkvz of Qwen3-Next has query, key, values and gates key head by key head.

    They become queries, keys and values of all heads, and the gates of all heads.
    """

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if "in_proj_qkvz.weight" not in tensor.name:
            return None
        heads = _Heads.from_config(context.config)
        widths = head_widths(context.config)
        size = sum(widths)
        if tensor.x.shape[:1] != (heads.keys * size,):
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} does not match {heads.keys} heads of {size}")
        parts, start = [], 0
        for width in widths:
            parts.append([range(head * size + start, head * size + start + width) for head in range(heads.keys)])
            start += width
        query, key, value, gate = parts
        qkv, z = (tensor.name.replace("in_proj_qkvz", name) for name in ("in_proj_qkv", "in_proj_z"))
        return (
            replace(tensor, name=qkv, x=take(tensor.x, 0, *query, *key, *value)),
            replace(tensor, name=z, x=take(tensor.x, 0, *gate)),
        )

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Interleave queries, keys, values and gates by head."""
        match = re.fullmatch(r"(.*\.)in_proj_(qkv|z)\.weight", tensor.name)
        if match is None:
            return None
        joined_name = f"{match[1]}in_proj_qkvz.weight"
        parts = context.gather(self, joined_name, match[2], tensor, 2)
        if parts is None:
            return ()
        x = concatenate((parts["qkv"].x, parts["z"].x))
        order, start = [], 0
        widths = head_widths(context.config)
        keys = context.config.number("linear_num_key_heads")
        if x.shape[0] != keys * sum(widths):
            raise context.fail(tensor, f"{x.shape[0]} rows do not match {keys} heads of {sum(widths)}")
        for width in widths:
            order.append([range(start + head * width, start + (head + 1) * width) for head in range(keys)])
            start += keys * width
        runs = [run for head in zip(*order, strict=True) for run in head]
        return (replace(tensor, name=joined_name, x=take(x, 0, *runs)),)


_RULES = (
    Transform(r"\.A_log$", negative_exp, log_of_negative),
    Rename(r"\.dt_bias$", ".dt_proj.bias"),
    Transform(r"conv1d", squeeze, unsqueeze_channels),
    Transform(r"(?<!linear_attn\.)norm\.weight$", plus_one, minus_one),
    *qwen.STACK_EXPERTS,
)

#: Rules of Qwen3-Next.
NEXT_RULES = (SplitQkvzByHead(), *_RULES)


def _recurrent_layers(config: Config) -> list[bool] | None:
    """Return which layers have linear attention."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != config.layers:
        raise FormatError(
            f"{config.path}: layer_types is {short(kinds)}, not a list of {config.layers} kinds", "QK-E112"
        )
    return [kind == "linear_attention" for kind in kinds] + [False] * config.number(_MTP_COUNT)


def _set_layer_types(meta: ModelMetadata, config: Json) -> None:
    recurrent = meta.flags(".attention.recurrent_layers")
    if recurrent is not None:
        kinds = ("full_attention", "linear_attention")
        config["layer_types"] = [kinds[flag] for flag in recurrent[: config["num_hidden_layers"]]]


def _inner_size(config: Config) -> int:
    return config.number("linear_value_head_dim") * config.number("linear_num_value_heads")


def _set_value_width(meta: ModelMetadata, config: Json) -> None:
    heads = meta.number(".ssm.time_step_rank")
    config["linear_value_head_dim"] = meta.number(".ssm.inner_size") // max(1, heads)


NEXT_KEYS: tuple[SetKeys, ...] = (
    *qwen.EXPERT_WIDTHS,
    NextnCount(names=_MTP_COUNT, unless_zero=True),
    Copied(".ssm.conv_kernel", "linear_conv_kernel_dim", required=True),
    Copied(".ssm.state_size", "linear_key_head_dim", required=True),
    Copied(".ssm.group_count", "linear_num_key_heads", required=True),
    Copied(".ssm.time_step_rank", "linear_num_value_heads", required=True),
    Computed(".ssm.inner_size", _inner_size, inverse=_set_value_width),
    Computed(".attention.recurrent_layers", _recurrent_layers, "array", inverse=_set_layer_types),
    Copied(".full_attention_interval", "full_attention_interval", default=4),
    rotary_width(0.25),
)


@dataclass(frozen=True)
class TileHeads:
    """Reorders value heads along ``axis``: single rows, heads, or heads after queries and keys; or the inverse."""

    part: str
    axis: int = 0
    inverse: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        heads, x = _Heads.from_config(context.config), tensor.x
        if heads.values_per_key == 1:
            return x
        width = 1 if self.part == "rows" else heads.value_width
        start = 2 * heads.query_rows if self.part == "behind queries" else 0
        return heads.tile(x, self.axis, width, start, self.inverse)


#: Rules of Qwen 3.5, where there are more heads of values than of keys.
TILED_RULES = (
    Transform(r"linear_attn\.in_proj_qkv\.", TileHeads("behind queries"), TileHeads("behind queries", inverse=True)),
    Transform(r"linear_attn\.in_proj_z\.", TileHeads("heads"), TileHeads("heads", inverse=True)),
    Transform(r"linear_attn\.(in_proj_[ab]\.|A_log|dt_bias)", TileHeads("rows"), TileHeads("rows", inverse=True)),
    Transform(r"linear_attn\.conv1d", TileHeads("behind queries"), TileHeads("behind queries", inverse=True)),
    Transform(r"linear_attn\.out_proj\.", TileHeads("heads", 1), TileHeads("heads", 1, inverse=True)),
    *_RULES,
)


def set_sections(keys: Keys, config: Config) -> None:
    """Set rope sections for time, height and width, which Qwen 3.5 always uses."""
    if "mrope_section" not in config.rope:
        keys.array(".rope.dimension_sections", [11, 11, 10, 0])


@dataclass(frozen=True)
class _Heads:
    """Heads of linear attention: key heads, ``values_per_key`` value heads for each, and their widths."""

    keys: int
    values_per_key: int
    key_width: int
    value_width: int

    @classmethod
    def from_config(cls, config: Config) -> _Heads:
        keys, values = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
        if not keys or values % keys:
            raise FormatError(f"{config.path}: {values} heads of values for {keys} of keys", "QK-E112")
        return cls(keys, values // keys, config.number("linear_key_head_dim"), config.number("linear_value_head_dim"))

    @property
    def query_rows(self) -> int:
        """The number of rows of queries, and of keys."""
        return self.keys * self.key_width

    def tile(self, x: Expression, axis: int, width: int, start: int = 0, inverse: bool = False) -> Expression:
        """Reorder value heads along ``axis``, from ``start`` on: the first of every key head, then the second, etc.

        They are stored by key, as transformers repeats keys; ggml repeats them all at once. ``inverse``: the opposite
        order.
        """
        if x.shape[axis] != start + self.keys * self.values_per_key * width:
            raise ValueError(f"{x.shape[axis]}, not {start} and {self.keys * self.values_per_key} heads of {width}")
        outer, inner = (self.keys, self.values_per_key) if inverse else (self.values_per_key, self.keys)
        heads = [j * outer + i for i in range(outer) for j in range(inner)]
        moved = [range(start + head * width, start + (head + 1) * width) for head in heads]
        return take(x, axis, range(start), *moved)


def head_widths(config: Config) -> tuple[int, int, int, int]:
    """Return the rows of query, key, values and gates of one head in in_proj_qkvz of Qwen3-Next."""
    heads = _Heads.from_config(config)
    values = heads.values_per_key * heads.value_width
    return (heads.key_width, heads.key_width, values, values)


_QWEN3_NEXT = Architecture(
    "qwen3next",
    stored=(RenameMtpLayers(),),
    rules=NEXT_RULES,
    keys=NEXT_KEYS,
    layers=layers_with_mtp,
    inspect_tensors=count_mtp_layers,
    nextn=True,
)

QWEN35 = replace(_QWEN3_NEXT, arch="qwen35", rules=TILED_RULES, keys=(*NEXT_KEYS, set_sections))
QWEN35_MOE = replace(QWEN35, arch="qwen35moe")

ARCHITECTURES: dict[str, Architecture] = {
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5ForConditionalGeneration": QWEN35,
    "Qwen3_5MoeForCausalLM": QWEN35_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN35_MOE,
    "MiniCPMV4_6ForConditionalGeneration": replace(
        QWEN35,
        stored=(Drop(r"^(mtp|model\.merger\.)"), *QWEN35.stored),
        inspect_tensors=lambda config, names: count_mtp_layers(config, ()),
    ),
}


_LINEAR_NAMES = " ".join(
    f"model.layers.*.linear_attn.{name}"
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_proj", "norm", "out_proj")
)

_QWEN35_CLASS = HfClass(
    "qwen3_5_text",
    f"{_LINEAR_NAMES} {qwen.SHARED_EXPERT_NAMES}",
    keys={".expert_count": "num_experts"},
    defaults={"mtp_num_hidden_layers": 0},
    config_setters=(
        config_values.interleave_sections,
        config_values.set_rope_parameters,
    ),
)

CLASSES: dict[str, HfClass] = {
    "Qwen3NextForCausalLM": HfClass(
        "qwen3_next",
        f"{_LINEAR_NAMES} {qwen.SHARED_EXPERT_NAMES} model.layers.*.linear_attn.in_proj_qkvz",
        defaults={"norm_topk_prob": True, "mtp_num_hidden_layers": 0},
        config_setters=(config_values.set_dense_layers,),
    ),
    "Qwen3_5ForCausalLM": _QWEN35_CLASS,
    "Qwen3_5MoeForConditionalGeneration": replace(
        _QWEN35_CLASS,
        model_type="qwen3_5_moe_text",
        config_setters=(*_QWEN35_CLASS.config_setters, config_values.add_deepstack_tower),
        renames=((r"^model\.", "model.language_model."),),
        outer_type="qwen3_5_moe",
    ),
}

"""Qwen3-Next and Qwen 3.5: layers of linear attention between those of attention, and layers that predict ahead.

Facts of llama.cpp b11434, conversion/qwen.py: _QwenMtpMixin, Qwen3NextModel, _LinearAttentionVReorderBase.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, taken
from quantkit.checkpoint.families.qwen import EXPERT_WIDTHS, QWEN_EXPERTS
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Renamed, Tensor, negative_exp, plus_one, squeezed
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

# --- layers that predict ahead ---------------------------------------------------------------------------------------

_AHEAD = re.compile(r"^(?:model\.)?(?:language_model\.)?mtp\.(?:layers\.(\d{1,4})\.)?(.+)$")
#: What is beside those layers, as the name map knows it in one of them.
BESIDE = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
#: How many there are; in the configuration of Qwen 3.5, in none of Qwen3-Next.
_COUNT = "mtp_num_hidden_layers"


def count_layers_ahead(config: Config, names: Collection[str]) -> None:
    """Say in the configuration how many layers that predict ahead are stored.

    convert_hf_to_gguf.py stops where Qwen3-Next has none (as every finetune that transformers saved), and where the
    configuration of Qwen 3.5 speaks of one that is not stored it writes a file that does not load. Those that are
    stored count here.
    """
    found = [int(match[1] or 0) for match in map(_AHEAD.match, names) if match]
    config.values[_COUNT] = 1 + max(found, default=-1)


def layers_with_ahead(config: Config) -> int:
    """Return the number of layers, those that predict ahead included."""
    return config.layers + config.number(_COUNT)


@dataclass(frozen=True)
class LayersAhead:
    """Layers that predict ahead are stored under mtp.; they follow the others."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = _AHEAD.match(tensor.name)
        if match is None:
            return None
        layer, rest = context.config.layers + int(match[1] or 0), match[2]
        if match[1] is None:
            stem, dot, suffix = rest.partition(".")
            rest = BESIDE.get(stem, stem) + dot + suffix
        return (replace(tensor, name=f"model.layers.{layer}.{rest}"),)


# --- linear attention ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Heads:
    """Heads of linear attention: so many of keys, each with ``each`` of values; their widths."""

    keys: int
    each: int
    key_width: int
    value_width: int

    @classmethod
    def of(cls, config: Config) -> _Heads:
        keys, values = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
        if not keys or values % keys:
            raise FormatError(f"{config.path}: {values} heads of values for {keys} of keys")
        return cls(keys, values // keys, config.number("linear_key_head_dim"), config.number("linear_value_head_dim"))

    @property
    def query_rows(self) -> int:
        """Rows of queries, and of keys."""
        return self.keys * self.key_width

    def tiled(self, x: Expression, axis: int, width: int, start: int = 0, back: bool = False) -> Expression:
        """Order heads of values, from ``start`` on along ``axis``, so that one of each key follow one another.

        They are stored by key, as transformers repeats keys; ggml repeats them all at once. ``back``: the other way.
        """
        if x.shape[axis] != start + self.keys * self.each * width:
            raise ValueError(f"{x.shape[axis]}, not {start} and {self.keys * self.each} heads of {width}")
        outer, inner = (self.keys, self.each) if back else (self.each, self.keys)
        heads = [j * outer + i for i in range(outer) for j in range(inner)]
        moved = [range(start + head * width, start + (head + 1) * width) for head in heads]
        return taken(x, axis, range(start), *moved)


@dataclass(frozen=True)
class Tiled:
    """Orders heads of values along ``axis``: single rows, heads, or heads behind queries and keys; or undoes that."""

    what: str
    axis: int = 0
    undoing: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        heads, x = _Heads.of(context.config), tensor.x
        if heads.each == 1:
            return x
        width = 1 if self.what == "rows" else heads.value_width
        start = 2 * heads.query_rows if self.what == "behind queries" else 0
        return heads.tiled(x, self.axis, width, start, self.undoing)

    def back(self) -> Tiled:
        """Return what undoes it."""
        return replace(self, undoing=not self.undoing)


def woven_widths(config: Config) -> tuple[int, int, int, int]:
    """Return the rows of query, key, values and gates of one head in in_proj_qkvz of Qwen3-Next."""
    heads = _Heads.of(config)
    values = heads.each * heads.value_width
    return (heads.key_width, heads.key_width, values, values)


@dataclass(frozen=True)
class QueriesByHead:
    """in_proj_qkvz of Qwen3-Next holds query, key, values and gates of one head of keys after another.

    They become queries, keys and values of all heads, and the gates of all heads.
    """

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if "in_proj_qkvz.weight" not in tensor.name:
            return None
        heads = _Heads.of(context.config)
        widths = woven_widths(context.config)
        size = sum(widths)
        if tensor.x.shape[:1] != (heads.keys * size,):
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not that of {heads.keys} heads of {size}")
        parts, at = [], 0
        for width in widths:
            parts.append([range(head * size + at, head * size + at + width) for head in range(heads.keys)])
            at += width
        query, key, value, gate = parts
        qkv, z = (tensor.name.replace("in_proj_qkvz", name) for name in ("in_proj_qkv", "in_proj_z"))
        return (
            replace(tensor, name=qkv, x=taken(tensor.x, 0, *query, *key, *value)),
            replace(tensor, name=z, x=taken(tensor.x, 0, *gate)),
        )


_RULES = (
    Changed(r"\.A_log$", negative_exp),
    Renamed(r"\.dt_bias$", ".dt_proj.bias"),
    Changed(r"conv1d", squeezed),
    Changed(r"(?<!linear_attn\.)norm\.weight$", plus_one),
    *QWEN_EXPERTS,
)
#: Rules of Qwen3-Next.
NEXT_RULES = (QueriesByHead(), *_RULES)
#: Rules of Qwen 3.5, where there are more heads of values than of keys.
TILED_RULES = (
    Changed(r"linear_attn\.in_proj_qkv\.", Tiled("behind queries")),
    Changed(r"linear_attn\.in_proj_z\.", Tiled("heads")),
    Changed(r"linear_attn\.(in_proj_[ab]\.|A_log|dt_bias)", Tiled("rows")),
    Changed(r"linear_attn\.conv1d", Tiled("behind queries")),
    Changed(r"linear_attn\.out_proj\.", Tiled("heads", 1)),
    *_RULES,
)


def set_linear_attention(keys: Keys, config: Config) -> None:
    """Set what describes the layers of linear attention, and which they are."""
    keys.u32(".ssm.conv_kernel", config["linear_conv_kernel_dim"])
    keys.u32(".ssm.state_size", config["linear_key_head_dim"])
    keys.u32(".ssm.group_count", config["linear_num_key_heads"])
    keys.u32(".ssm.time_step_rank", config["linear_num_value_heads"])
    keys.u32(".ssm.inner_size", config.number("linear_value_head_dim") * config.number("linear_num_value_heads"))
    if (kinds := config.get("layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != config.layers:
            raise FormatError(f"{config.path}: layer_types is {short(kinds)}, not a list of {config.layers} kinds")
        recurrent = [kind == "linear_attention" for kind in kinds]
        keys.array(".attention.recurrent_layers", recurrent + [False] * config.number(_COUNT))
    keys.u32(".full_attention_interval", config.get("full_attention_interval", 4))
    keys.u32(".rope.dimension_count", int(config.head_dim * config.rotary_part(0.25)))


def set_sections(keys: Keys, config: Config) -> None:
    """Qwen 3.5 always divides rope among time, height and width, also where its configuration does not say so."""
    if "mrope_section" not in config.rope:
        keys.array(".rope.dimension_sections", [11, 11, 10, 0])


NEXT_KEYS: tuple[SetKeys, ...] = (
    *EXPERT_WIDTHS,
    Copied(".nextn_predict_layers", _COUNT, unless_zero=True),
    set_linear_attention,
)

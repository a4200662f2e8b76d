"""OpenELM.

Facts of llama.cpp b11434, conversion/openelm.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import concatenate, take
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass, prefixed
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.errors import FormatError


def _round_to_divisor(value: float, divisor: int) -> int:
    """Return the nearest multiple, not less than 90 %."""
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


def _elm_widths(config: Config) -> list[int]:
    width, divisor = config.number("model_dim"), config.number("ffn_dim_divisor")
    return [_round_to_divisor(ffn_multiplier * width, divisor) for ffn_multiplier in config["ffn_multipliers"]]


def set_layer_count(config: Config) -> None:
    """Set the number of layers under the usual name."""
    config.values["num_hidden_layers"] = config.number("num_transformer_layers")


def _gate_width(tensor: Tensor, context: Context) -> range:
    return range(_elm_widths(context.config)[tensor.layer or 0])


@dataclass(frozen=True)
class SplitGateUp(Rule):
    """Gate and up are stored in one; layers differ in width."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.endswith(".ffn.proj_1.weight"):
            return None
        n, layer = _gate_width(tensor, context).stop, tensor.layer
        if tensor.x.shape[0] != 2 * n:
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not twice {n} rows")
        return [
            replace(tensor, name=f"blk.{layer}.ffn_{kind}.weight", x=take(tensor.x, 0, rows))
            for kind, rows in (("gate", range(n)), ("up", range(n, 2 * n)))
        ]

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Put up behind gate."""
        match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up)\.weight", tensor.name)
        if match is None:
            return None
        name = f"transformer.layers.{match[1]}.ffn.proj_1.weight"
        parts = context.parts.setdefault((id(self), name), {})
        parts[match[2]] = tensor
        if len(parts) < 2:
            return ()
        del context.parts[id(self), name]
        return (replace(tensor, name=name, x=concatenate([parts["gate"].x, parts["up"].x])),)


ELM_RULES = (SplitGateUp(),)


def set_elm_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of OpenELM, per layer."""
    widths: list[Any] = [_elm_widths(config), config["num_query_heads"], config["num_kv_heads"]]
    if any(not isinstance(width, list) or len(width) != layers for width in widths):
        raise FormatError(
            f"{config.path}: ffn_multipliers, num_query_heads or num_kv_heads are not of {layers} layers", "QK-E112"
        )
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


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "OpenELMForCausalLM": Architecture(
        "openelm",
        rules=ELM_RULES,
        base=set_elm_base,
        vocab=write_sentencepiece,
        patch_config=set_layer_count,
    ),
}


def _set_layer_multipliers(meta: ModelMetadata, config: Json) -> None:
    """Set the width of each layer, as multipliers of the model's."""
    width, head = meta.number(".embedding_length"), meta.number(".attention.key_length")
    widths, heads = meta.per_layer(".feed_forward_length"), meta.per_layer(".attention.head_count")
    keys = meta.per_layer(".attention.head_count_kv")
    config |= {
        "ffn_multipliers": [float(Fraction(item, max(1, width))) for item in widths],
        "ffn_dim_divisor": math.gcd(*widths) or 1,
        "num_query_heads": heads,
        "num_kv_heads": keys,
        "num_gqa_groups": heads[0] // max(1, keys[0]),
        "qkv_multipliers": [item * head / max(1, width) for item in (heads[0], heads[-1])],
        "normalize_qk_projections": meta.has("attn_q_norm.weight"),
        "rope_max_length": 2 * meta.number(".context_length"),
        "share_input_output_layers": not meta.has("output.weight"),
    }


_ELM_CLASS = HfClass(
    "openelm",
    "transformer.token_embeddings transformer.norm "
    + prefixed("transformer.layers.*.", "attn_norm ffn_norm attn.q_norm attn.k_norm attn.qkv_proj attn.out_proj")
    + " transformer.layers.*.ffn.proj_2",
    kinds={f"*ffn_{kind}": f"blk.*.ffn_{kind}" for kind in ("gate", "up")},
    keys={
        ".block_count": "num_transformer_layers",
        ".context_length": "max_context_length",
        ".embedding_length": "model_dim",
        ".feed_forward_length": "",
        ".attention.head_count": "",
        ".attention.head_count_kv": "",
        ".rope.freq_base": "rope_freq_constant",
        ".attention.layer_norm_rms_epsilon": "",
    },
    defaults={"activation_fn_name": "swish", "ffn_with_glu": True, "normalization_layer_name": "rms_norm"},
    config_setters=(_set_layer_multipliers,),
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "OpenELMForCausalLM": _ELM_CLASS,
}

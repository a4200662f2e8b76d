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
from quantkit.checkpoint.key_rows import (
    FILE_TYPE,
    HEAD_WIDTHS,
    Always,
    Computed,
    Copied,
    SetKeys,
    block_count,
)
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.errors import FormatError


def _round_to_divisor(value: float, divisor: int) -> int:
    """Return the nearest multiple that is at least 90 % of the number."""
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
    """Split gate and up, which are stored in one tensor; layers differ in width."""

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
        """Append up to gate."""
        match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up)\.weight", tensor.name)
        if match is None:
            return None
        name = f"transformer.layers.{match[1]}.ffn.proj_1.weight"
        parts = context.gather(self, name, match[2], tensor, 2)
        if parts is None:
            return ()
        return (replace(tensor, name=name, x=concatenate([parts["gate"].x, parts["up"].x])),)


ELM_RULES = (SplitGateUp(),)


def _per_layer(config: Config, values: Any) -> list[int]:
    """Return a list with one value per layer; refuse another length."""
    if not isinstance(values, list) or len(values) != config.layers:
        raise FormatError(
            f"{config.path}: ffn_multipliers, num_query_heads or num_kv_heads do not have {config.layers} layers",
            "QK-E112",
        )
    return values


OPENELM_BASE: tuple[SetKeys, ...] = (
    block_count("num_transformer_layers"),
    Copied(".context_length", "max_context_length", required=True),
    Copied(".embedding_length", "model_dim", required=True),
    Computed(".feed_forward_length", lambda config: _per_layer(config, _elm_widths(config)), "array"),
    Computed(".attention.head_count", lambda config: _per_layer(config, config["num_query_heads"]), "array"),
    Computed(".attention.head_count_kv", lambda config: _per_layer(config, config["num_kv_heads"]), "array"),
    Copied(".rope.freq_base", "rope_freq_constant", "f32", required=True),
    Always(".attention.layer_norm_rms_epsilon", 1e-6, "f32"),
    Copied(".rope.dimension_count", "head_dim", required=True),
    *HEAD_WIDTHS,
    FILE_TYPE,
)

ARCHITECTURES: dict[str, Architecture] = {
    "OpenELMForCausalLM": Architecture(
        "openelm",
        rules=ELM_RULES,
        base=OPENELM_BASE,
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


CLASSES: dict[str, HfClass] = {
    "OpenELMForCausalLM": HfClass(
        "openelm",
        "transformer.token_embeddings transformer.norm "
        + add_prefix("transformer.layers.*.", "attn_norm ffn_norm attn.q_norm attn.k_norm attn.qkv_proj attn.out_proj")
        + " transformer.layers.*.ffn.proj_2",
        kinds={f"*ffn_{kind}": f"blk.*.ffn_{kind}" for kind in ("gate", "up")},
        defaults={"activation_fn_name": "swish", "ffn_with_glu": True, "normalization_layer_name": "rms_norm"},
        config_setters=(_set_layer_multipliers,),
    ),
}

"""DeciLM and Llama-Nemotron 49B to 253B, whose layers differ in width.

Facts of llama.cpp b11434, conversion/deci.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.key_rows import (
    BASE,
    BLOCK_COUNT,
    FILE_TYPE,
    Computed,
    Copied,
    SetKeys,
    Where,
    divided_head_dim,
)
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import LAYER, Architecture, HfClass
from quantkit.checkpoint.rules import Transform, permute_rows, restore_rows
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.vocab.bpe import write_tokenizer_json
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError


def _blocks(config: Config) -> list[Json]:
    """Return block_configs, the hyperparameters of each layer."""
    blocks = config["block_configs"]
    if not isinstance(blocks, list) or len(blocks) != config.layers:
        raise FormatError(f"{config.path}: block_configs is not a list of {config.layers} layers", "QK-E112")
    return blocks


def _heads(config: Config, layer: int) -> tuple[int, int]:
    """Return the heads and KV heads of a layer: 0 where attention is absent or linear."""
    n = config.number("num_attention_heads")
    if (heads_per_layer := config.get("num_key_value_heads_per_layer")) is not None:
        return n, heads_per_layer[layer]
    if "block_configs" not in config:
        return n, config.number("num_key_value_heads")
    attention = _blocks(config)[layer]["attention"]
    group = attention["n_heads_in_group"]
    if group is None:
        return (n if attention.get("replace_with_linear") is True else 0), 0
    return n, n // group


def _feed_forward_width(config: Config, layer: int) -> int:
    """Return the width of a layer's feed forward: 0 if it is omitted."""
    width = int(2 * (_blocks(config)[layer]["ffn"]["ffn_mult"] or 0.0) * config.number("hidden_size") / 3)
    return -(width // -256) * 256


@dataclass(frozen=True)
class PermuteHeads:
    """Undoes the permutation of queries (``place`` 0) or keys (1) for rope."""

    place: int
    inverse: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        heads = _heads(context.config, tensor.layer or 0)[self.place]
        return (restore_rows if self.inverse else permute_rows)(tensor, heads)


DECI_RULES = (
    Transform(r"q_proj\.(weight|bias)$", PermuteHeads(0), PermuteHeads(0, inverse=True)),
    Transform(r"k_proj\.(weight|bias)$", PermuteHeads(1), PermuteHeads(1, inverse=True)),
)


def _has_blocks(config: Config) -> bool:
    return "block_configs" in config


def _heads_row(key: str, place: int) -> Computed:
    return Computed(key, lambda config: [_heads(config, layer)[place] for layer in range(config.layers)], "array")


#: Keys of models whose layers differ only in their KV heads.
_PLAIN_BASE: tuple[SetKeys, ...] = (
    *BASE,
    Copied(".attention.head_count_kv", "num_key_value_heads_per_layer", "array", exported="num_key_value_heads"),
)
_BLOCKS_BASE: tuple[SetKeys, ...] = (
    Computed(".rope.freq_base", lambda config: config.rope.get("rope_theta"), "f32", names="rope_theta"),
    _heads_row(".attention.head_count_kv", 1),
    _heads_row(".attention.head_count", 0),
    Computed(
        ".feed_forward_length",
        lambda config: [_feed_forward_width(config, layer) for layer in range(config.layers)],
        "array",
    ),
    BLOCK_COUNT,
    Copied(".context_length", "max_position_embeddings", required=True),
    Copied(".embedding_length", "hidden_size", required=True),
    Copied(".attention.layer_norm_rms_epsilon", "rms_norm_eps", "f32", required=True),
    Computed(".attention.key_length", divided_head_dim),
    Computed(".attention.value_length", divided_head_dim),
    FILE_TYPE,
)


def write_deci(v: Vocabulary) -> None:
    """Write Llama 3's BPE, or Llama's pieces in a tokenizer.json.

    The reference distinguishes them by the number of tokens, 128256 or not (DeciModel), which is equivalent for its
    models.
    """
    write_tokenizer_json(v)


def _is_plain(config: Config) -> bool:
    return not _has_blocks(config)


ARCHITECTURES: dict[str, Architecture] = {
    "DeciLMForCausalLM": Architecture(
        "deci",
        rules=DECI_RULES,
        base=(Where(_has_blocks, _BLOCKS_BASE), Where(_is_plain, _PLAIN_BASE)),
        keys=llama.LLAMA_KEYS,
        vocab=write_deci,
        synthetic=llama.rope_factors,
    ),
}


def _set_blocks(meta: ModelMetadata, config: Json) -> None:
    """Set the configuration of each block, if blocks differ in more than KV heads."""
    heads, keys = meta.get(".attention.head_count"), meta.get(".attention.head_count_kv")
    if not isinstance(heads, list):
        config |= {"model_type": "deci", "num_key_value_heads_per_layer": meta.per_layer(".attention.head_count_kv")}
        config["num_key_value_heads"] = max(config["num_key_value_heads_per_layer"])
        return
    width, keys = meta.number(".embedding_length"), meta.per_layer(".attention.head_count_kv")
    widths = meta.per_layer(".feed_forward_length")
    config |= {
        "num_attention_heads": max(heads),
        "num_key_value_heads": max(keys),
        "intermediate_size": max(widths),
        "block_configs": [
            {"attention": _attention_block(n, of_keys), "ffn": _feed_forward_block(wide, width)}
            for n, of_keys, wide in zip(heads, keys, widths, strict=True)
        ],
    }
    config.pop("head_dim", None)


def _attention_block(heads: int, keys: int) -> Json:
    group = heads // keys if keys else None
    return {"n_heads_in_group": group, "no_op": not heads, "replace_with_linear": bool(heads and not keys)}


def _feed_forward_block(wide: int, width: int) -> Json:
    """Return the multiplier of the model's width that gives this width; both are rounded in between."""
    multiplier = next((m for n in range(17) if _round_width(m := round(1.5 * wide / width, n), width) == wide), None)
    return {"ffn_mult": multiplier if wide else None, "no_op": not wide, "replace_with_linear": False}


def _round_width(multiplier: float, width: int) -> int:
    return -(int(2 * multiplier * width / 3) // -256) * 256


def _rename_linear_output(config: Config, name: str) -> str:
    """Keep only the matrix of layers that have one in place of attention."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight", name)
    if match is None or "block_configs" not in config:
        return name
    linear = config["block_configs"][int(match[1])]["attention"]["replace_with_linear"]
    return name.replace(".o_proj.", ".linear_attn.") if linear else name


CLASSES: dict[str, HfClass] = {
    "DeciLMForCausalLM": HfClass(
        "nemotron-nas", f"{LAYER}self_attn.o_proj", config_setters=(_set_blocks,), rename_last=_rename_linear_output
    ),
}

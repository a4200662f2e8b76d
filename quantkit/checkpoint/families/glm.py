"""ChatGLM, GLM 4, 4.5, 4.7 Flash and 5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Gathered
from quantkit.checkpoint.families.deepseek import PREDICTING_LAYERS, predicting_layers
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Tensor
from quantkit.errors import FormatError


@dataclass(frozen=True)
class PartialRope:
    """Rope turns a part of each head: as the configuration says, or ``default``; ``of``: the width it is a part of."""

    default: float = 0.5
    of: str | None = None

    def __call__(self, keys: Keys, config: Config) -> None:
        width = config.head_dim if self.of is None else config.number(self.of)
        keys.u32(".rope.dimension_count", int(width * config.rotary_part(self.default)))


def halves(tensor: Tensor, context: Context) -> Expression:
    """Put the pairs of rope apart, where positions have several dimensions (Glm4Model.normal_to_neox)."""
    return _reordered(tensor, context, lambda h, n: (range(h, h + n, 2), range(h + 1, h + n, 2)))


def pairs(tensor: Tensor, context: Context) -> Expression:
    """Put them together again: undoes ``halves``."""
    return _reordered(tensor, context, lambda h, n: [range(h + i, h + n, n // 2) for i in range(n // 2)])


def _reordered(tensor: Tensor, context: Context, order: Callable[[int, int], Sequence[range]]) -> Expression:
    """Return rows of which ``order`` chooses those that rope turns, by the first of a head and their number."""
    config, x = context.config, tensor.x
    if "mrope_section" not in config.rope:
        return x
    width = config.head_dim
    turned = int(width * config.rotary_part(0.5))
    if x.shape[0] % width or turned % 2:
        raise ValueError(f"it has no heads of {width} rows, {turned} of them turned by rope")
    heads = range(0, x.shape[0], width)
    parts = ((*order(h, turned), range(h + turned, h + width)) for h in heads)
    return Gathered(x, 0, tuple(part for head in parts for part in head))


ROPE_HALVES = (Changed(r"[qk]_proj\.(weight|bias)$", halves),)


def _set_sigmoid(keys: Keys, config: Config) -> None:
    keys.u32(".expert_gating_func", GATING["sigmoid"])


MOE_KEYS: tuple[SetKeys, ...] = (
    PartialRope(),
    Copied(".expert_count", "n_routed_experts"),
    Copied(".expert_feed_forward_length", "moe_intermediate_size"),
    Copied(".expert_shared_count", "n_shared_experts"),
    Copied(".leading_dense_block_count", "first_k_dense_replace"),
    _set_sigmoid,
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32"),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag"),
    PREDICTING_LAYERS,
)


def set_predicting_layers(keys: Keys, config: Config) -> None:
    """Of GLM 4.7 Flash: only if there are any."""
    if predicting_layers(config):
        keys.u32(".nextn_predict_layers", predicting_layers(config))


def set_indexer_types(keys: Keys, config: Config) -> None:
    """Which layers of GLM 5 choose the tokens that they attend to, and which take the choice of another."""
    types = config.get("indexer_types")
    if types is not None:
        if not isinstance(types, list):
            raise FormatError(f"{config.path}: indexer_types is no list")
        keys.array(".attention.indexer.types", [each == "full" for each in types])


def set_chat_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of ChatGLM: an order of their own (ChatGLMModel)."""
    width = config.number("hidden_size", "n_embd", "n_embed")
    heads = config.number("n_head", "num_attention_heads")
    keys.u32(".context_length", config.get("seq_length", width))
    keys.u32(".embedding_length", width)
    feed = config.find("ffn_hidden_size", "intermediate_size")
    keys.u32(".feed_forward_length", 4 * width if feed is None else feed)
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", heads)
    groups = config.find("multi_query_group_num", "num_key_value_heads")
    keys.u32(".attention.head_count_kv", heads if groups is None else groups)
    keys.f32(".attention.layer_norm_rms_epsilon", config.get("layernorm_epsilon", 1e-5))
    keys.u32("general.file_type", file_type)
    turned = config["attention_dim"] if "attention_dim" in config else width // max(1, heads)
    keys.u32(".rope.dimension_count", int(turned * config.rotary_part(0.5)))
    keys.flag("tokenizer.ggml.add_bos_token", False)
    keys.f32(".rope.freq_base", 10000 * config.get("rope_ratio", 1))

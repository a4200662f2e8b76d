"""DeepSeek V2, V3, V3.2, and what is built like them: Kimi K2, GLM 4.7 Flash, GLM 5, Mistral 4."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Shaped, Transposed, taken
from quantkit.checkpoint.families.llama import set_rope_width
from quantkit.checkpoint.keys import Keys, set_base_keys
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensors import Context, Dropped, Experts, Tensor
from quantkit.errors import FormatError


def is_tied(config: Config) -> bool:
    """Tell whether the embeddings are the output matrix, too."""
    return bool(config.get("tie_word_embeddings", False))


#: Layers in all that llama.cpp loads.
_MOST_PREDICTING = 512

#: An output matrix that is stored although it is tied.
TIED_OUTPUT = Dropped(r"^(model\.)?lm_head\.weight$", is_tied)


def latent_widths(config: Config, layer: int | None) -> tuple[int, int, int]:
    """Return the heads of a layer, and the widths of their keys without rope and of their values."""
    return config.number("num_key_value_heads"), config.number("qk_nope_head_dim"), config.number("v_head_dim")


@dataclass(frozen=True)
class LatentHeads:
    """kv_b_proj, which makes keys and values of the latent, becomes k_b_proj, transposed per head, and v_b_proj."""

    widths: Callable[[Config, int | None], tuple[int, int, int]] = latent_widths

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.endswith("kv_b_proj.weight"):
            return None
        heads, nope, v = self.widths(context.config, tensor.layer)
        if len(tensor.x.shape) != 2 or not heads or tensor.x.shape[0] != heads * (nope + v):
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not {heads} heads of {nope} + {v} rows")
        by_head = Shaped(tensor.x, (heads, nope + v, tensor.x.shape[1]))
        parts = (
            ("k_b_proj", Transposed(taken(by_head, 1, range(nope)))),
            ("v_b_proj", taken(by_head, 1, range(nope, nope + v))),
        )
        return [replace(tensor, name=tensor.name.replace("kv_b_proj", name), x=x) for name, x in parts]


@dataclass(frozen=True)
class LaterLayersDropped:
    """Layers behind num_hidden_layers, which predict more tokens, are left out (DeepseekV2Model.skip_mtp).

    ``unless_named``: only if the configuration speaks of none.
    """

    unless_named: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if self.unless_named and predicting_layers(context.config):
            return None
        match = re.match(r"model\.layers\.(\d{1,9})", tensor.name)
        return () if match and int(match[1]) >= context.config.layers else None


LATENT_RULES = (TIED_OUTPUT, Experts(), LatentHeads())


def predicting_layers(config: Config) -> int:
    """Return how many layers predict more tokens: they follow the others."""
    n = config.number("num_nextn_predict_layers") if config.get("num_nextn_predict_layers") is not None else 0
    if n > _MOST_PREDICTING:  # one that is stored may stand for all
        raise FormatError(f"{config.path}: num_nextn_predict_layers is {n}")
    return n


def all_layers(config: Config) -> int:
    """Return the number of layers with those that predict more tokens."""
    return config.layers + predicting_layers(config)


def set_latent_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """The base keys of a model whose heads share one latent: a single head of keys and values."""
    changed = {"num_key_value_heads": 1, "rms_norm_eps": config.get("rms_norm_eps", 1e-6)}
    set_base_keys(keys, config.with_values(changed), layers, file_type)


def set_latent_keys(keys: Keys, config: Config) -> None:
    """Set the widths of the latent and of what is made of it, and the keys of experts (DeepseekV2Model)."""
    _set_leading(keys, config)
    rank = config.number("kv_lora_rank") if "kv_lora_rank" in config else 512
    rope, nope = config.number("qk_rope_head_dim"), config.number("qk_nope_head_dim")
    keys.u32(".attention.kv_lora_rank", rank)
    keys.u32(".attention.key_length", rank + rope)
    keys.u32(".attention.value_length", rank)
    keys.u32(".attention.key_length_mla", nope + rope)
    keys.u32(".attention.value_length_mla", config["v_head_dim"])
    _set_experts(keys, config)
    keys.u32(".rope.dimension_count", rope)
    if (scale := config.rope.get("mscale_all_dim")) is not None:
        if not isinstance(scale, (int, float)):
            raise FormatError(f"{config.path}: mscale_all_dim of rope is no number")
        keys.f32(".rope.scaling.yarn_log_multiplier", 0.1 * scale)


def set_whole_keys(keys: Keys, config: Config) -> None:
    """The same of a model whose heads have keys and values of their own (DeepSeek-OCR)."""
    _set_leading(keys, config)
    _set_experts(keys, config)
    keys.u32(".rope.dimension_count", config.number("qk_rope_head_dim"))
    if window := config.get("sliding_window_size") or config.get("sliding_window"):
        keys.u32(".attention.sliding_window", window)


def _set_leading(keys: Keys, config: Config) -> None:
    dense = config.get("first_k_dense_replace")
    if dense is None:
        dense = 0 if config.get("n_routed_experts") is not None else config.number("num_hidden_layers")
    keys.u32(".leading_dense_block_count", dense)
    keys.u32(".vocab_size", config["vocab_size"])
    if config.get("q_lora_rank") is not None:
        keys.u32(".attention.q_lora_rank", config["q_lora_rank"])


def _set_experts(keys: Keys, config: Config) -> None:
    for each in _EXPERTS:
        each(keys, config)
    if config.get("norm_topk_prob"):
        keys.flag(".expert_weights_norm", config["norm_topk_prob"])


def _set_shared_count(keys: Keys, config: Config) -> None:
    keys.u32(".expert_shared_count", config.get("n_shared_experts", 0))


_EXPERTS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "moe_intermediate_size intermediate_size", needed=True),
    Copied(".expert_count", "n_routed_experts"),
    _set_shared_count,
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32"),
)
PREDICTING_LAYERS = Copied(".nextn_predict_layers", "num_nextn_predict_layers")
INDEXER: tuple[SetKeys, ...] = (
    Copied(".attention.indexer.head_count", "index_n_heads", needed=True),
    Copied(".attention.indexer.key_length", "index_head_dim", needed=True),
    Copied(".attention.indexer.top_k", "index_topk", needed=True),
)

#: Of the first DeepSeek mixture of experts, which is a Llama with experts.
FIRST_KEYS: tuple[SetKeys, ...] = (
    set_rope_width,
    Always(".rope.scaling.type", "none", "text"),
    Copied(".leading_dense_block_count", "first_k_dense_replace", needed=True),
    Copied(".vocab_size", "vocab_size", needed=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", needed=True),
    Always(".expert_weights_scale", 1.0, "f32"),
    Copied(".expert_count", "n_routed_experts", needed=True),
    Copied(".expert_shared_count", "n_shared_experts", needed=True),
)

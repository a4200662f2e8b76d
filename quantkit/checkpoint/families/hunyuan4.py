"""Hunyuan 4: DeepSeek's attention and experts, with hyper-connections, sinks and an indexer.

Facts of llama.cpp b11434, conversion/hy_v4.py (HYV4Model).
"""

from __future__ import annotations

from itertools import takewhile

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.families.deepseek import INDEXER, TIED_OUTPUT, LatentHeads, LaterLayersDropped, set_latent_base
from quantkit.checkpoint.families.deepseek import set_latent_keys as latent_keys
from quantkit.checkpoint.families.qwen import FUSED_EXPERTS
from quantkit.checkpoint.keys import GATING, Keys, layers_in_file
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Dropped, Full, Renamed
from quantkit.errors import FormatError

STORED = (Dropped(r"^model\.mtp_layers\."),)
RULES = (
    TIED_OUTPUT,
    LaterLayersDropped(),
    Renamed(r"(\.self_attn\.learnable_sink_param)$", r"\1.weight"),
    Renamed(r"(\.hc_head\.hc_head_(fn|base|scale))$", r"\1.weight"),
    Renamed(r"(\.hc_(attn|mlp)_layer\.hc_pre\.hc_(fn|base|scale))$", r"\1.weight"),
    Full(r"\.(hc_head\.hc_head|hc_pre\.hc)_fn\.weight$"),
    Full(r"^lm_head\.weight$", when=lambda config: bool(config.get("enable_lm_head_fp32", False))),
    *FUSED_EXPERTS,
    LatentHeads(),
)


def prepare(config: Config) -> None:
    """Say how many heads of the latent there are, and how many of the first layers are dense."""
    config.values["num_key_value_heads"] = config.number("num_attention_heads")
    kinds, said = config.get("mlp_layer_types"), config.get("first_k_dense_replace")
    if kinds is None and said is None:
        raise FormatError(f"{config.path}: it has neither first_k_dense_replace nor mlp_layer_types")
    first = said if kinds is None else len(list(takewhile(lambda kind: kind == "dense", kinds)))
    if (said is not None and said != first) or (kinds is not None and "dense" in kinds[first:]):
        raise FormatError(f"{config.path}: mlp_layer_types and first_k_dense_replace name no row of first layers")
    config.values["first_k_dense_replace"] = first


def set_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """The base keys; a single group of experts is none."""
    single = config.get("n_group") == 1 and config.get("topk_group") == 1
    set_latent_base(keys, config.without("n_group", "topk_group") if single else config, layers, file_type)


def _set_limits(keys: Keys, config: Config) -> None:
    keys.u32(".expert_gating_func", GATING["sigmoid"])
    limit = float(config.get("swiglu_limit", 0.0) or 0.0)
    if limit > 0:
        keys.array(".swiglu_clamp_exp", [limit] * layers_in_file(keys))


def _indexed(config: Config) -> list[bool]:
    """Tell of each layer whether it has an indexer of its own; nothing if no layer has."""
    kinds, layers = config.get("indexer_types"), config.layers
    if kinds is None:
        kinds = config.get("layer_types") or []
        sparse = ("sparse_attention", "deepseek_sparse_attention")
        return [kind in sparse for kind in kinds[:layers]] if any(kind in sparse for kind in kinds) else []
    if len(kinds) < layers or set(kinds[:layers]) - {"full", "shared"} or kinds[:1] != ["full"]:
        raise FormatError(f"{config.path}: indexer_types must name full or shared for every layer, full for the first")
    return [kind == "full" for kind in kinds[:layers]]


def _set_indexer(keys: Keys, config: Config) -> None:
    if own := _indexed(config):
        for each in INDEXER:
            each(keys, config)
        keys.array(".attention.indexer.types", own)


KEYS: tuple[SetKeys, ...] = (
    latent_keys,
    _set_limits,
    Copied(".hyper_connection.count", "hc_mult", needed=True),
    Copied(".hyper_connection.epsilon", "hc_eps", "f32", needed=True),
    Copied(".hyper_connection.magnitude", "hc_magnitude", "f32", needed=True),
    _set_indexer,
)

"""dots3 note: DeepSeek's attention, of two geometries: layers with a window, and those with an indexer.

Facts of llama.cpp b11434, conversion/dots3.py (Dots3NoteModel).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Multiplied
from quantkit.checkpoint.families.deepseek import INDEXER, TIED_OUTPUT, LatentHeads, set_latent_base, set_latent_keys
from quantkit.checkpoint.families.glm import set_predicting_layers
from quantkit.checkpoint.keys import Keys, layers_in_file
from quantkit.checkpoint.row import SetKeys
from quantkit.checkpoint.tensors import Context, Dropped, Experts, Tensor
from quantkit.errors import FormatError

STORED = (Dropped(r"^(vision|audio)_encoder\."),)
#: Values that the runtime takes for granted, where the configuration says anything else.
_FIXED = {
    **{"use_dsa": True, "normalization": "RMSNorm", "final_norm": "RMSNorm", "k_rope_only_layernorm": True},
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "use_dynamic_rsf": False},
    **{"moe_gating_fp32": False, "attention_gate_type": "headwise", "swa_attention_gate_type": "headwise"},
}


def look(config: Config, names: Collection[str]) -> None:
    """Say in the configuration whether there is a layer that predicts more tokens: only the names tell it."""
    config.values["num_nextn_predict_layers"] = int(any(n.endswith("model.mtp.embed_tokens.weight") for n in names))
    wrong = [key for key, value in _FIXED.items() if config.get(key, value) != value]
    same = config["swa_qk_rope_head_dim"] == config["qk_rope_head_dim"]
    if wrong or not same or config["swa_q_lora_rank"] != config["q_lora_rank"]:
        raise FormatError(f"{config.path}: {wrong[0] if wrong else 'swa_qk_rope_head_dim or swa_q_lora_rank'} is of a "
                          "kind that llama.cpp does not run")  # fmt: skip


def _slides(config: Config, layer: int | None) -> bool:
    """Tell whether a layer has a window; that which predicts more tokens has."""
    return layer is None or layer >= config.layers or config["layer_types"][layer] == "sliding_attention"


def _widths(config: Config, layer: int | None) -> tuple[int, int, int]:
    slides = "swa_" if _slides(config, layer) else ""
    names = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    heads, nope, v = (config.number(slides + name) for name in names)
    return heads, nope, v


@dataclass(frozen=True)
class EmbeddingAhead:
    """The embeddings of the layer that predicts more tokens belong to it."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name != "model.mtp.embed_tokens.weight":
            return None
        return (replace(tensor, name=f"model.layers.{context.config.layers}.embed_tokens.weight"),)


@dataclass(frozen=True)
class Rescaled:
    """Norms before the latents take what the model multiplies the latents by."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        config, name = context.config, tensor.name
        if not config.get("apply_mla_qkv_lora_rescale", False) or tensor.layer is None:
            return None
        if name.endswith("q_a_layernorm.weight"):
            rank = config.number("q_lora_rank")
        elif name.endswith("kv_a_layernorm.weight"):
            rank = config.number(("swa_" if _slides(config, tensor.layer) else "") + "kv_lora_rank")
        else:
            return None
        return (replace(tensor, x=Multiplied(tensor.x, factor=math.sqrt(config.number("hidden_size") / rank))),)


RULES = (EmbeddingAhead(), Rescaled(), TIED_OUTPUT, Experts(), LatentHeads(_widths))


def set_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """The base keys, heads of each layer; head_dim means nothing."""
    heads = [_widths(config, layer)[0] for layer in range(layers)]
    set_latent_base(keys, config.without("head_dim").with_values({"num_attention_heads": heads}), layers, file_type)


def _set_windows(keys: Keys, config: Config) -> None:
    rank, rope = config.number("swa_kv_lora_rank"), config.number("swa_qk_rope_head_dim")
    slides = [_slides(config, layer) for layer in range(config.layers)]
    keys.u32(".attention.sliding_window", config["sliding_window_size"])
    keys.array(".attention.sliding_window_pattern", slides)
    keys.u32(".attention.kv_lora_rank_swa", rank)
    keys.u32(".attention.key_length_swa", rank + rope)
    keys.u32(".attention.value_length_swa", rank)
    keys.u32(".attention.key_length_mla_swa", config.number("swa_qk_nope_head_dim") + rope)
    keys.u32(".attention.value_length_mla_swa", config["swa_v_head_dim"])
    if layers_in_file(keys) > config.layers:
        set_predicting_layers(keys, config)
    for each in INDEXER:
        each(keys, config)
    keys.array(".attention.indexer.types", [not each for each in slides])


KEYS: tuple[SetKeys, ...] = (set_latent_keys, _set_windows)

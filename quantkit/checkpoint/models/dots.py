"""dots.llm1, and dots3 note with DeepSeek's attention in two geometries.

Facts of llama.cpp b11434, conversion/dots1.py, conversion/dots3.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Multiplied
from quantkit.checkpoint.key_rows import Computed, Copied, SetKeys, WithConfig
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import deepseek, qwen
from quantkit.checkpoint.nextn import NEXTN_IF_ANY, layers_with_nextn
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import TIED_OUTPUT, Drop, StackExperts
from quantkit.checkpoint.tensors import Context, InverseContext, OneWayRule, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.errors import FormatError

DOTS3_STORED = (Drop(r"^(vision|audio)_encoder\."),)

#: Values that the runtime assumes, if the configuration differs.
_REQUIRED = {
    "use_dsa": True,
    "normalization": "RMSNorm",
    "final_norm": "RMSNorm",
    "k_rope_only_layernorm": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "use_dynamic_rsf": False,
    "moe_gating_fp32": False,
    "attention_gate_type": "headwise",
    "swa_attention_gate_type": "headwise",
}


def inspect_tensors(config: Config, names: Collection[str]) -> None:
    """Record in the configuration whether the checkpoint has an MTP layer, which only tensor names show."""
    config.values["num_nextn_predict_layers"] = int(any(n.endswith("model.mtp.embed_tokens.weight") for n in names))
    wrong = [key for key, value in _REQUIRED.items() if config.get(key, value) != value]
    same_rope_width = config["swa_qk_rope_head_dim"] == config["qk_rope_head_dim"]
    if wrong or not same_rope_width or config["swa_q_lora_rank"] != config["q_lora_rank"]:
        raise FormatError(
            f"{config.path}: {wrong[0] if wrong else 'swa_qk_rope_head_dim or swa_q_lora_rank'} has a value that "
            "llama.cpp does not support", "QK-E305")  # fmt: skip


def _latent_widths(config: Config, layer: int | None) -> tuple[int, int, int]:
    slides = "swa_" if _has_window(config, layer) else ""
    names = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    heads, nope, v = (config.number(slides + name) for name in names)
    return heads, nope, v


@dataclass(frozen=True)
class RenameMtpEmbedding(Rule):
    """Move the embeddings of the prediction layer (MTP) into it."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name != "model.mtp.embed_tokens.weight":
            return None
        return (replace(tensor, name=f"model.layers.{context.config.layers}.embed_tokens.weight"),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        match = re.fullmatch(r"model\.layers\.\d+\.embed_tokens\.weight", tensor.name)
        return None if match is None else (replace(tensor, name="model.mtp.embed_tokens.weight"),)


@dataclass(frozen=True)
class RescaleLatentNorms(OneWayRule):
    """Multiply the factors of the latents into the norms before them."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        config, name = context.config, tensor.name
        if not config.get("apply_mla_qkv_lora_rescale", False) or tensor.layer is None:
            return None
        if name.endswith("q_a_layernorm.weight"):
            rank = config.number("q_lora_rank")
        elif name.endswith("kv_a_layernorm.weight"):
            rank = config.number(("swa_" if _has_window(config, tensor.layer) else "") + "kv_lora_rank")
        else:
            return None
        return (replace(tensor, x=Multiplied(tensor.x, factor=math.sqrt(config.number("hidden_size") / rank))),)


DOTS3_RULES = (
    RenameMtpEmbedding(),
    RescaleLatentNorms(),
    TIED_OUTPUT,
    StackExperts(),
    deepseek.SplitLatentHeads(_latent_widths),
)


def _without_head_dim(config: Config) -> Config:
    """Return a configuration without head_dim, which has no meaning here."""
    return config.without("head_dim")


def _set_heads(keys: Keys, config: Config) -> None:
    keys.array(".attention.head_count", [_latent_widths(config, layer)[0] for layer in range(keys.layers)])


def _window_row(key: str, *names: str) -> Computed:
    """Return the row of a width of layers with a window: a sum."""
    return Computed(f".attention.{key}_swa", lambda config: sum(config.number(f"swa_{name}") for name in names))


def _slides(config: Config) -> list[bool]:
    return [_has_window(config, layer) for layer in range(config.layers)]


DOTS3_BASE: tuple[SetKeys, ...] = (WithConfig(deepseek.LATENT_BASE, _without_head_dim), _set_heads)
DOTS3_KEYS: tuple[SetKeys, ...] = (
    *deepseek.LATENT_KEYS,
    Copied(".attention.sliding_window", "sliding_window_size", required=True),
    Computed(".attention.sliding_window_pattern", _slides, "array"),
    _window_row("kv_lora_rank", "kv_lora_rank"),
    _window_row("key_length", "kv_lora_rank", "qk_rope_head_dim"),
    _window_row("value_length", "kv_lora_rank"),
    _window_row("key_length_mla", "qk_nope_head_dim", "qk_rope_head_dim"),
    _window_row("value_length_mla", "v_head_dim"),
    NEXTN_IF_ANY,
    *deepseek.INDEXER,
    Computed(".attention.indexer.types", lambda config: [not slide for slide in _slides(config)], "array"),
)


def _has_window(config: Config, layer: int | None) -> bool:
    """Return whether a layer has a window; the MTP layer has."""
    return layer is None or layer >= config.layers or config["layer_types"][layer] == "sliding_attention"


DOTS_KEYS: tuple[SetKeys, ...] = (
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    Copied(".expert_shared_count", "n_shared_experts", required=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
)

_DOTS_3 = Architecture(
    "dots3note",
    stored=DOTS3_STORED,
    rules=DOTS3_RULES,
    base=DOTS3_BASE,
    keys=DOTS3_KEYS,
    vocab=partial(write_bpe, special={"eot": "<|endofassistant|>"}),
    layers=layers_with_nextn,
    inspect_tensors=inspect_tensors,
    nextn=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    "Dots1ForCausalLM": Architecture("dots1", rules=qwen.STACK_EXPERTS, keys=(*qwen.EXPERT_WIDTHS, *DOTS_KEYS)),
    "Dots3NoteForCausalLM": _DOTS_3,
    "Dots3NoteForConditionalGeneration": _DOTS_3,
    "Dots3NoteTextForCausalLM": _DOTS_3,
}


def _set_window_latents(meta: ModelMetadata, config: Json) -> None:
    """Set the latent widths of layers with a window."""
    heads, slides = meta.per_layer(".attention.head_count"), meta.flags(".attention.sliding_window_pattern") or []
    of_kind = dict(zip(slides, heads, strict=False))
    rope = config["qk_rope_head_dim"]
    config |= {
        "num_attention_heads": of_kind.get(False, heads[0]),
        "swa_num_attention_heads": of_kind.get(True, heads[-1]),
        "swa_q_lora_rank": config["q_lora_rank"],
        "swa_kv_lora_rank": meta.number(".attention.kv_lora_rank_swa"),
        "swa_qk_rope_head_dim": rope,
        "swa_qk_nope_head_dim": meta.number(".attention.key_length_mla_swa") - rope,
        "swa_v_head_dim": meta.number(".attention.value_length_mla_swa"),
        "swa_head_dim": meta.number(".attention.key_length_mla_swa"),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "num_key_value_heads": of_kind.get(False, heads[0]),
    }


CLASSES: dict[str, HfClass] = {
    "Dots1ForCausalLM": HfClass("dots1"),
    "Dots3NoteForCausalLM": HfClass(
        "dots3_note",
        add_prefix(f"{LAYER}self_attn.", "k_rope_only_layernorm linear_gate"),
        keys={
            ".rope.freq_base_swa": "swa_rope_theta",
            ".expert_count": "n_routed_experts",
        },
        # Norms already include the factor of the latents.
        defaults={"apply_mla_qkv_lora_rescale": False, "topk_method": "noaux_tc"},
        config_setters=(_set_window_latents,),
    ),
}

"""MiniCPM 1 to 3.

Facts of llama.cpp b11434, conversion/minicpm.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Constant
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.tensors import Tensor
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.errors import FormatError


def set_minicpm_scales(keys: Keys, config: Config) -> None:
    """Set MiniCPM's scales of embeddings, residuals and logits."""
    keys.f32(".embedding_scale", float(config["scale_emb"]))
    keys.f32(".residual_scale", config["scale_depth"] / config.layers**0.5)
    keys.f32(".logit_scale", config["hidden_size"] / config["dim_model_base"])


def set_minicpm3_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of MiniCPM 3."""
    keys.u32("general.file_type", file_type)
    keys.u32(".context_length", config["max_position_embeddings"])
    keys.u32(".embedding_length", config["hidden_size"])
    keys.u32(".block_count", layers)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".attention.head_count", config["num_attention_heads"])
    keys.u32(".attention.head_count_kv", config["num_key_value_heads"])
    keys.f32(".attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    keys.u32(".vocab_size", config["vocab_size"])
    if (rank := config.get("q_lora_rank")) is not None:
        keys.u32(".attention.q_lora_rank", rank)
    rope = config.number("qk_rope_head_dim")
    keys.u32(".attention.kv_lora_rank", config["kv_lora_rank"])
    keys.u32(".attention.key_length", config.number("qk_nope_head_dim") + rope)
    keys.u32(".rope.dimension_count", rope)


def rope_factors(config: Config) -> Iterable[Tensor]:
    """Yield MiniCPM's long and short rope factors, one for every two rotated values of a head."""
    width = config.number("qk_rope_head_dim") if "qk_rope_head_dim" in config else config.without("head_dim").head_dim
    kinds = [(kind, config.rope.get(f"{kind}_factor")) for kind in ("long", "short")]
    if not any(factors for _, factors in kinds):
        return
    for kind, factors in kinds:
        if not isinstance(factors, list) or 2 * len(factors) != width:
            raise FormatError(f"{config.path}: {kind}_factor of rope is no list of {width // 2} factors", "QK-E112")
        name = f"rope_factors_{kind}.weight"
        yield Tensor(name, Constant(tuple(float(factor) for factor in factors)), None, name)


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "MiniCPMForCausalLM": Architecture(
        "minicpm",
        rules=llama.ROPE_PERMUTED,
        keys=(set_minicpm_scales,),
        vocab=write_sentencepiece,
        synthetic=rope_factors,
    ),
    "MiniCPM3ForCausalLM": Architecture(
        "minicpm3", base=set_minicpm3_base, vocab=write_sentencepiece, synthetic=rope_factors
    ),
}


def set_unscaled_rope(meta: ModelMetadata, config: Json) -> None:
    """Set a rope scaling factor of 1: MiniCPM's long factors do not scale attention."""
    if rope := config["rope_scaling"]:
        rope |= {"factor": 1.0, "original_max_position_embeddings": meta.number(".context_length")}


def set_scales(meta: ModelMetadata, config: Json) -> None:
    """Set the factors of embeddings, layers and logits (MiniCPM)."""
    root = meta.number(".block_count") ** 0.5
    residual = float(meta.get(".residual_scale") or 1.0)
    config |= {
        "scale_emb": meta.get(".embedding_scale"),
        "scale_depth": config_values.shortest_argument(residual * root, lambda x: x / root),
        "dim_model_base": config_values.shortest_argument(
            config["hidden_size"] / float(meta.get(".logit_scale") or 1.0), lambda x: x
        ),
    }


#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "MiniCPMForCausalLM": HfClass(
        "minicpm", config_setters=(config_values.set_long_rope, set_unscaled_rope, set_scales)
    ),
    "MiniCPM3ForCausalLM": HfClass(
        "minicpm3",
        # What llama.cpp has in its code.
        defaults={"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4},
        config_setters=(config_values.set_long_rope, set_unscaled_rope, config_values.set_merged_latent_widths),
    ),
}

"""ChatGLM, GLM 4, 4.5, 4.7 Flash and 5, and Solar Open.

Facts of llama.cpp b11434, conversion/chatglm.py, conversion/glm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, Gathered
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.models import deepseek
from quantkit.checkpoint.nextn import NEXTN_KEY, layers_with_nextn, set_nextn_layers
from quantkit.checkpoint.row import LAYER, Architecture, Copied, HfClass, SetKeys, has_key
from quantkit.checkpoint.rules import Rename, StackExperts, Transform
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.errors import FormatError


@dataclass(frozen=True)
class PartialRope:
    """Set the rotated part of each head: the configuration's, or ``default``, of the width under ``width_key``."""

    default: float = 0.5
    width_key: str | None = None

    def __call__(self, keys: Keys, config: Config) -> None:
        width = config.head_dim if self.width_key is None else config.number(self.width_key)
        keys.u32(".rope.dimension_count", int(width * config.rotary_part(self.default)))


def to_halves(tensor: Tensor, context: Context) -> Expression:
    """Put the pairs of rope apart, where positions have several dimensions (Glm4Model.normal_to_neox)."""
    return _reorder(tensor, context, lambda h, n: (range(h, h + n, 2), range(h + 1, h + n, 2)))


def to_pairs(tensor: Tensor, context: Context) -> Expression:
    """Put them together again: undoes ``to_halves``."""
    return _reorder(tensor, context, lambda h, n: [range(h + i, h + n, n // 2) for i in range(n // 2)])


ROPE_TO_HALVES = (Transform(r"[qk]_proj\.(weight|bias)$", to_halves, to_pairs),)


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
    NEXTN_KEY,
)


def set_chat_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of ChatGLM, in the converter's order (ChatGLMModel)."""
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


def _reorder(tensor: Tensor, context: Context, order: Callable[[int, int], Sequence[range]]) -> Expression:
    """Return rows of which ``order`` permutes the rotary ones, from the first of a head and their number."""
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


def set_indexer_types(keys: Keys, config: Config) -> None:
    """Set which layers of GLM 5 have an indexer, and which reuse another layer's tokens."""
    types = config.get("indexer_types")
    if types is not None:
        if not isinstance(types, list):
            raise FormatError(f"{config.path}: indexer_types is no list", "QK-E112")
        keys.array(".attention.indexer.types", [item == "full" for item in types])


_GLM_4_SPECIAL = {"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>", "bos": "<|endoftext|>"}
_GLM_SPECIAL = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}
_CHAT_GLM_SPECIAL = {"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>"}
_SOLAR_SPECIAL = {"eos": "<|endoftext|>", "eot": "<|endoftext|>", "unk": "<unk>", "bos": "<|startoftext|>"}

_GLM_4 = Architecture(
    "glm4", rules=ROPE_TO_HALVES, keys=(PartialRope(),), vocab=partial(write_bpe, special=_GLM_4_SPECIAL)
)

_GLM_4_MOE = Architecture(
    "glm4moe",
    rules=(StackExperts(),),
    keys=MOE_KEYS,
    vocab=partial(write_bpe, special=_GLM_SPECIAL),
    layers=layers_with_nextn,
    nextn=True,
)

_CHAT_GLM = Architecture(
    "chatglm",
    stored=(Rename(r"^transformer\.", ""),),
    base=set_chat_base,
    vocab=partial(write_bpe, special=_CHAT_GLM_SPECIAL),
)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "GlmMoeDsaForCausalLM": replace(
        deepseek.LATENT,
        arch="glm-dsa",
        keys=(
            *deepseek.LATENT.keys,
            PartialRope(1.0, "qk_rope_head_dim"),
            NEXTN_KEY,
            *deepseek.INDEXER,
            set_indexer_types,
        ),
        vocab=partial(write_bpe, special=_GLM_SPECIAL),
        layers=layers_with_nextn,
        nextn=True,
    ),
    "Glm4MoeLiteForCausalLM": replace(
        deepseek.LATENT,
        rules=(deepseek.DropNextnLayers(unless_named=True), *deepseek.LATENT.rules),
        keys=(*deepseek.LATENT.keys, set_nextn_layers),
        vocab=partial(write_bpe, special=_GLM_SPECIAL),
        layers=layers_with_nextn,
        nextn=True,
    ),
    "Glm4ForCausalLM": _GLM_4,
    "Glm4vForConditionalGeneration": _GLM_4,
    "GlmOcrForConditionalGeneration": replace(_GLM_4, keys=(*_GLM_4.keys, NEXTN_KEY), layers=layers_with_nextn),
    "Glm4MoeForCausalLM": _GLM_4_MOE,
    "Glm4vMoeForConditionalGeneration": _GLM_4_MOE,
    "SolarOpenForCausalLM": replace(_GLM_4_MOE, vocab=partial(write_bpe, special=_SOLAR_SPECIAL), nextn=False),
    "GlmForCausalLM": _CHAT_GLM,
    "ChatGLMModel": _CHAT_GLM,
    "ChatGLMForConditionalGeneration": _CHAT_GLM,
}


def set_chatglm_names(meta: ModelMetadata, config: Json) -> None:
    """Set the values that ChatGLM names otherwise than transformers, too."""
    theta = config.get("rope_theta") or 10000.0
    ratio = config_values.shortest_argument(theta / 10000.0, lambda x: 10000 * x)
    config |= {"layernorm_epsilon": config["rms_norm_eps"], "rope_ratio": ratio, "head_dim": meta.head_width}
    config["seq_length"] = config["max_position_embeddings"]
    config_values.set_rotary_part(meta, config)


_FUSED_NAMES = "model.layers.*.self_attn.qkv_proj model.layers.*.mlp.gate_up_proj"
_ROUTED_KEYS = {".expert_count": "n_routed_experts"}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "Glm4MoeLiteForCausalLM": HfClass(
        "glm4_moe_lite",
        keys=_ROUTED_KEYS,
        defaults=deepseek.LATENT_V3_DEFAULTS,
        config_setters=(
            config_values.subtract_nextn_layers,
            config_values.set_latent_widths,
            config_values.set_rope_parameters,
        ),
        matches=has_key("nextn_predict_layers"),
    ),
    "GlmMoeDsaForCausalLM": HfClass(
        "glm_moe_dsa",
        keys=_ROUTED_KEYS,
        defaults=deepseek.LATENT_V3_DEFAULTS,
        config_setters=(
            config_values.subtract_nextn_layers,
            config_values.set_latent_widths,
            config_values.set_indexer_types,
            config_values.set_rope_parameters,
        ),
    ),
    "Glm4ForCausalLM": HfClass(
        "glm4",
        f"{_FUSED_NAMES} model.layers.*.post_self_attn_layernorm model.layers.*.post_mlp_layernorm",
        config_setters=(config_values.set_rotary_part,),
    ),
    "Glm4MoeForCausalLM": HfClass(
        "glm4_moe",
        config_setters=(
            config_values.subtract_nextn_layers,
            config_values.set_rotary_part,
            config_values.set_head_norms,
        ),
    ),
    "GlmForCausalLM": HfClass(
        "glm",
        f"{LAYER}mlp.gate_up_proj",
        keys={".attention.layer_norm_rms_epsilon": "rms_norm_eps"},
        config_setters=(set_chatglm_names,),
    ),
}

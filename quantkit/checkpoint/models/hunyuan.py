"""Hunyuan: dense, with experts, VL, 3, and 4 with DeepSeek's attention and hyper-connections.

Facts of llama.cpp b11434, conversion/hunyuan.py, conversion/hy_v4.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from quantkit.checkpoint.config import Config, Json, optional_json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, take
from quantkit.checkpoint.key_rows import BASE, Always, Computed, Copied, KeyGroup, KeyNames, SetKeys, Where, WithConfig
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.mmproj import PIXELS, USE_GELU, EncoderKey, Mmproj, MmprojConfig, layer_norm_epsilon, projector
from quantkit.checkpoint.models import deepseek, qwen
from quantkit.checkpoint.nextn import NEXTN_IF_ANY, layers_with_nextn
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import TIED_OUTPUT, Drop, KeepF32, Rename, StackExperts, Transform
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.special import KINDS
from quantkit.checkpoint.vocab.tiktoken import HUNYUAN, write_ranks
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

#: Rope scaled by alpha: the trained context, and the lengths that config.json may have.
_CONTEXT, _CONTEXT_LENGTHS = 256 * 1024, (32 * 1024, 256 * 1024)


def _shared_value(config: Config, key: str) -> Any:
    """Return the value that all layers have."""
    values = config[key]
    if not isinstance(values, list) or not values or any(value != values[0] for value in values):
        raise FormatError(f"{config.path}: {key} is {short(values)}, not a list of one value for all layers", "QK-E112")
    return values[0]


def _dense_config(config: Config) -> Config:
    """Return a configuration without num_experts, which dense models may have, too."""
    return config.without("num_experts")


DENSE_BASE: tuple[SetKeys, ...] = (WithConfig(BASE, _dense_config),)


@dataclass(frozen=True)
class Shared(Copied):
    """A value that config.json repeats for each layer."""

    def __call__(self, keys: Keys, config: Config) -> None:
        keys.u32(self.key, _shared_value(config, self.names))

    def invert(self, meta: ModelMetadata, config: Json, names: KeyNames) -> None:
        config[self.names] = [meta.get(self.key)] * config["num_hidden_layers"]


def _set_scaled_rope(keys: Keys, config: Config, alpha: float, width: int) -> None:
    """Set a base scaled by alpha in place of a scale, and the resulting context length."""
    rope = config.rope
    if rope.get("rope_type") != "dynamic":
        return
    alpha, theta = rope.get("alpha", alpha), rope.get("rope_theta", 10000.0)
    numbers = all(isinstance(item, (int, float)) for item in (alpha, theta))
    if not numbers or not 0 < alpha < 1e9 or theta != 10000.0 or width <= 2:
        raise FormatError(f"{config.path}: unsupported rope scaling by {short(alpha)} from {short(theta)}", "QK-E305")
    if config.get("max_position_embeddings") not in _CONTEXT_LENGTHS:
        raise FormatError(
            f"{config.path}: max_position_embeddings is {short(config.get('max_position_embeddings'))}; with dynamic "
            f"rope, only {_CONTEXT_LENGTHS[0]} and {_CONTEXT_LENGTHS[1]} are supported",
            "QK-E305",
        )
    keys.f32(".rope.freq_base", theta * (alpha ** (width / (width - 2))))
    keys.text(".rope.scaling.type", "none")
    keys.f32(".rope.scaling.factor", 1)
    keys.u32(".rope.scaling.original_context_length", _CONTEXT)
    keys.u32(".context_length", _CONTEXT)


def _set_dense_rope(keys: Keys, config: Config) -> None:
    if config.rope.get("rope_type") == "dynamic":
        _set_scaled_rope(keys, config, 50, config.number("head_dim"))


def _set_moe_rope(keys: Keys, config: Config) -> None:
    width = config.number("hidden_size") // max(1, config.number("num_attention_heads"))
    if config.rope.get("rope_type") == "dynamic" and (config.rope.get("alpha", 1000) != 1000 or width != 128):
        alpha = short(config.rope.get("alpha"))
        raise FormatError(f"{config.path}: unsupported dynamic rope with alpha {alpha} and heads of {width}", "QK-E305")
    _set_scaled_rope(keys, config, 1000, width)


DENSE_KEYS: tuple[SetKeys, ...] = (_set_dense_rope,)
MOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_shared_feed_forward_length", "intermediate_size", required=True),
    Shared(".expert_feed_forward_length", "moe_intermediate_size"),
    Shared(".expert_used_count", "moe_topk"),
    Shared(".expert_shared_count", "num_shared_expert"),
    _set_moe_rope,
)


def _shared_width(config: Config) -> int:
    width: int = config.number("moe_intermediate_size") * config.get("num_shared_experts", 1)
    return width


def _set_shared_count(meta: ModelMetadata, config: Json) -> None:
    """Set the number of shared experts, which follows from their total width."""
    width = meta.number(".expert_shared_feed_forward_length")
    config["num_shared_experts"] = width // max(1, meta.number(".expert_feed_forward_length"))


V3_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Computed(".expert_shared_feed_forward_length", _shared_width, inverse=_set_shared_count),
    Copied(".expert_weights_norm", "route_norm", "flag", default=True),
    Copied(".expert_weights_scale", "router_scaling_factor", "f32", default=1.0),
    Always(".expert_gating_func", GATING["sigmoid"]),
)
HY4_STORED = (Drop(r"^model\.mtp_layers\."),)

HY4_RULES = (
    TIED_OUTPUT,
    deepseek.DropNextnLayers(),
    Rename(r"(\.self_attn\.learnable_sink_param)$", r"\1.weight"),
    Rename(r"(\.hc_head\.hc_head_(fn|base|scale))$", r"\1.weight"),
    Rename(r"(\.hc_(attn|mlp)_layer\.hc_pre\.hc_(fn|base|scale))$", r"\1.weight"),
    KeepF32(r"\.(hc_head\.hc_head|hc_pre\.hc)_fn\.weight$"),
    KeepF32(r"^lm_head\.weight$", when=lambda config: bool(config.get("enable_lm_head_fp32", False))),
    *qwen.SPLIT_FUSED_EXPERTS,
    deepseek.SplitLatentHeads(),
)


def count_dense_layers(config: Config) -> None:
    """Set the number of latent heads and of leading dense layers."""
    config.values["num_key_value_heads"] = config.number("num_attention_heads")
    kinds, meta = config.get("mlp_layer_types"), config.get("first_k_dense_replace")
    if kinds is None and meta is None:
        raise FormatError(f"{config.path}: has neither first_k_dense_replace nor mlp_layer_types", "QK-E112")
    first = meta if kinds is None else len(list(takewhile(lambda kind: kind == "dense", kinds)))
    if (meta is not None and meta != first) or (kinds is not None and "dense" in kinds[first:]):
        raise FormatError(
            f"{config.path}: mlp_layer_types and first_k_dense_replace must select consecutive first layers", "QK-E112"
        )
    config.values["first_k_dense_replace"] = first


def _without_single_group(config: Config) -> Config:
    """Return a configuration without expert groups where there is only one."""
    single = config.get("n_group") == 1 and config.get("topk_group") == 1
    return config.without("n_group", "topk_group") if single else config


def _set_swiglu_limits(keys: Keys, config: Config) -> None:
    limit = float(config.get("swiglu_limit", 0.0) or 0.0)
    if limit > 0:
        keys.array(".swiglu_clamp_exp", [limit] * keys.layers)


def _set_swiglu_limit(meta: ModelMetadata, config: Json) -> None:
    limits = meta.get(".swiglu_clamp_exp")
    config["swiglu_limit"] = limits[0] if limits else 0.0


def _indexer_layers(config: Config) -> list[bool]:
    """Return for each layer whether it has an indexer; empty if none has."""
    kinds, layers = config.get("indexer_types"), config.layers
    if kinds is None:
        kinds = config.get("layer_types") or []
        sparse = ("sparse_attention", "deepseek_sparse_attention")
        return [kind in sparse for kind in kinds[:layers]] if any(kind in sparse for kind in kinds) else []
    if len(kinds) < layers or set(kinds[:layers]) - {"full", "shared"} or kinds[:1] != ["full"]:
        raise FormatError(
            f"{config.path}: indexer_types must be full or shared for every layer, and full for the first", "QK-E112"
        )
    return [kind == "full" for kind in kinds[:layers]]


def _has_indexer(config: Config) -> bool:
    return bool(_indexer_layers(config))


HY4_BASE: tuple[SetKeys, ...] = (WithConfig(deepseek.LATENT_BASE, _without_single_group),)
HY4_KEYS: tuple[SetKeys, ...] = (
    *deepseek.LATENT_KEYS,
    Always(".expert_gating_func", GATING["sigmoid"]),
    KeyGroup(_set_swiglu_limits, _set_swiglu_limit),
    Copied(".hyper_connection.count", "hc_mult", required=True),
    Copied(".hyper_connection.epsilon", "hc_eps", "f32", required=True),
    Copied(".hyper_connection.magnitude", "hc_magnitude", "f32", required=True),
    Where(_has_indexer, deepseek.INDEXER),
    Computed(
        ".attention.indexer.types",
        lambda config: _indexer_layers(config) or None,
        "array",
        inverse=deepseek.set_indexer_types,
    ),
)


def name_xdrope(config: Config) -> None:
    """Rename rope with sections to xdrope, which newer configurations call dynamic (HunyuanVLTextModel)."""
    rope = config.rope
    if rope.get("rope_type") == "dynamic" and "mrope_section" in rope:
        rope |= {"rope_type": "xdrope", "xdrope_section": rope["mrope_section"]}


def _set_xdrope_sections(keys: Keys, config: Config) -> None:
    rope = config.rope
    if rope.get("rope_type") != "xdrope":
        return
    sections, length = rope.get("xdrope_section"), config.number("max_position_embeddings")
    if not isinstance(sections, list):
        raise FormatError(f"{config.path}: xdrope_section of rope is {short(sections)}, not a list", "QK-E112")
    keys.f32(".rope.freq_base", float(rope["rope_theta"]))
    keys.text(".rope.scaling.type", "none")
    keys.f32(".rope.scaling.factor", float(rope.get("factor", 1)))
    keys.f32(".rope.scaling.alpha", float(rope["alpha"]))
    keys.u32(".rope.scaling.original_context_length", length)
    keys.u32(".context_length", length)
    keys.array(".rope.dimension_sections", sections)


VL_KEYS: tuple[SetKeys, ...] = (*DENSE_KEYS, _set_xdrope_sections)


def write_hunyuan_moe(v: Vocabulary) -> None:
    """Write Hunyuan's ranks, else tokenizer.json; its config.json has a wrong BOS (HunYuanMoEModel)."""
    if not v.has(HUNYUAN.file):
        write_bpe(v)
        return
    write_ranks(v, HUNYUAN)
    v.keys.u32("tokenizer.ggml.bos_token_id", 127959)


def write_hunyuan(v: Vocabulary) -> None:
    """Write tokenizer.json's vocabulary, else Hunyuan's ranks; EOS and EOT of the configurations (HunYuanModel)."""
    if v.has("tokenizer.json"):
        pad = v.owner.outer.get("pad_token_id") or 0
        write_bpe(v, kinds=[kind for kind in KINDS if kind != "pad" or not isinstance(pad, int) or pad >= 0])
    else:
        write_ranks(v, HUNYUAN)
        if v.config.get("hidden_size") == 4096:
            v.keys.u32("tokenizer.ggml.bos_token_id", 127958)
    if (end := v.owner.get("eod_token_id")) is not None:
        v.keys.u32("tokenizer.ggml.eos_token_id", end)
    generation = optional_json(v.folder / "generation_config.json") or {}
    ends = generation.get("eos_token_id")
    if isinstance(ends, list) and len(ends) >= 2:
        v.keys.u32("tokenizer.ggml.eot_token_id", ends[0])


ARCHITECTURES: dict[str, Architecture] = {
    "HunYuanMoEV1ForCausalLM": Architecture(
        "hunyuan-moe", rules=(TIED_OUTPUT, StackExperts()), keys=MOE_KEYS, vocab=write_hunyuan_moe
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan-dense",
        rules=(TIED_OUTPUT,),
        base=DENSE_BASE,
        keys=DENSE_KEYS,
        vocab=write_hunyuan,
    ),
    "HunYuanVLForConditionalGeneration": Architecture(
        "hunyuan_vl",
        rules=(TIED_OUTPUT,),
        base=DENSE_BASE,
        keys=VL_KEYS,
        vocab=write_hunyuan,
        patch_config=name_xdrope,
    ),
    "HYV3ForCausalLM": Architecture(
        "hy_v3",
        stored=(Rename(r"(\.layers\.\d+)\.final_layernorm\.", r"\1.shared_head.norm."),),
        rules=(StackExperts(),),
        keys=(*V3_KEYS, NEXTN_IF_ANY),
        layers=layers_with_nextn,
        nextn=True,
    ),
    "HYV4ForCausalLM": Architecture(
        "hy_v4",
        stored=HY4_STORED,
        rules=HY4_RULES,
        base=HY4_BASE,
        keys=HY4_KEYS,
        vocab=deepseek.write_deepseek,
        patch_config=count_dense_layers,
    ),
}


def set_scaled_base(meta: ModelMetadata, config: Json) -> None:
    """Restore the scale from a base scaled by alpha (Hunyuan)."""
    base = meta.get(".rope.freq_base")
    if meta.get(".rope.scaling.type") != "none" or base is None:
        return
    width, theta = meta.head_width, 10000.0
    power = width / (width - 2) if width > 2 else 1.0
    alpha = config_values.shortest_argument((base / theta) ** (1 / power), lambda x: theta * x**power)
    config |= {"rope_theta": theta, "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": alpha}}
    config["rope_scaling"]["rope_type"] = "dynamic"


_NORM_NAMES = "model.layers.*.self_attn.query_layernorm model.layers.*.self_attn.key_layernorm"


def _set_hyper_connections(meta: ModelMetadata, config: Json) -> None:
    """Set the layers with experts, the clamp, and whether the head is F32."""
    dense = meta.number(".leading_dense_block_count")
    layers = range(meta.number(".block_count"))
    config["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in layers]
    tensors = meta.model.tensors
    types = [tensors[name].type.name for name in ("output.weight", "token_embd.weight") if name in tensors]
    config["enable_lm_head_fp32"] = types[:1] == ["F32"] and types[1:] != ["F32"]


def _set_xdrope(meta: ModelMetadata, config: Json) -> None:
    """Set xDRoPE: scaling, and the sections of a head (Hunyuan-VL)."""
    config["rope_scaling"] = None
    if (sections := meta.get(".rope.dimension_sections")) is not None:
        config["rope_scaling"] = {
            "type": "xdrope",
            "rope_type": "xdrope",
            "alpha": meta.get(".rope.scaling.alpha"),
            "factor": meta.get(".rope.scaling.factor"),
            "xdrope_section": sections,
        }


CLASSES: dict[str, HfClass] = {
    "HunYuanMoEV1ForCausalLM": HfClass(
        "hunyuan_v1_moe",
        f"{_NORM_NAMES} model.layers.*.mlp.gate.wg "
        + " ".join(f"model.layers.*.mlp.shared_mlp.{w}_proj" for w in ("gate", "up", "down")),
        config_setters=(set_scaled_base,),
    ),
    "HunYuanDenseV1ForCausalLM": HfClass("hunyuan_v1_dense", _NORM_NAMES, config_setters=(set_scaled_base,)),
    "HYV3ForCausalLM": HfClass(
        "hy_v3",
        f"{LAYER}mlp.expert_bias {LAYER}mlp.router.gate "
        + " ".join(f"{LAYER}mlp.shared_mlp.{w}_proj" for w in ("gate", "up", "down")),
        keys={".expert_count": "num_experts"},
        config_setters=(
            config_values.set_mlp_layer_types,
            config_values.set_rope_parameters,
        ),
    ),
    "HYV4ForCausalLM": HfClass(
        "hy_v4",
        add_prefix(LAYER, "self_attn.learnable_sink_param self_attn.linear_gate"),
        keys={".expert_count": "n_routed_experts"},
        defaults={"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        config_setters=(
            _set_hyper_connections,
            config_values.set_rope_parameters,
        ),
        fused=True,
    ),
    "HunYuanVLForConditionalGeneration": HfClass(
        "hunyuan_vl",
        add_prefix(LAYER, "self_attn.query_layernorm self_attn.key_layernorm"),
        defaults={"pad_token_id": -1},
        config_setters=(_set_xdrope,),
    ),
}


# --- The vision encoder of Hunyuan-VL -------------------------------------------------------------------------------


def _patch_vision(config: MmprojConfig) -> None:
    """Default the size of images, to the largest."""
    vision = config.vision.values
    vision.setdefault("image_size", vision.get("max_image_size", 2048))
    pixels = config.preprocessor.values
    pixels |= {name: int(pixels[name]) for name in ("min_pixels", "max_pixels") if isinstance(pixels.get(name), float)}


def _without_class(tensor: Tensor, context: Context) -> Expression:
    """Return embeddings of positions without that of the class, the first."""
    return take(tensor.x, 0, range(1, tensor.x.shape[0]))


MMPROJ: dict[str, Mmproj] = {
    "HunYuanVLForConditionalGeneration": Mmproj(
        (
            projector("hunyuanvl"),
            USE_GELU,
            layer_norm_epsilon("rms_norm_eps", 1e-5),
            EncoderKey(".vision.spatial_merge_size", "spatial_merge_size", default=2),
            *PIXELS,
        ),
        tensors=r"^vit\.",
        rules=(Transform("position_embedding", _without_class, None),),
        forced=(("mm.0.weight", None), ("mm.2.weight", None)),
        patch_config=_patch_vision,
    ),
}

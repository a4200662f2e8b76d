"""Granite: dense, mixtures of experts, with windows, hybrids with layers of Mamba 2; Bamba.

Facts of llama.cpp b11434, conversion/granite.py and conversion/mamba.py (Mamba2Model).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, Shaped
from quantkit.checkpoint.key_rows import Computed, Copied, SetKeys, set_layer_types
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import llama, mamba
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, has_key
from quantkit.checkpoint.rules import (
    AssignKind,
    Drop,
    Rename,
    Split,
    Transform,
    flatten,
    log_of_negative,
    negative_exp,
    squeeze,
    unsqueeze_channels,
)
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

#: Vision and audio parts of multimodal models.
DROP_OTHER_PARTS = Drop(r"^encoder\.|image_|layerwise_projectors|spatial_projectors")


def drop_head_dim(config: Config) -> None:
    """Drop head_dim: the head width is always the model's width / heads."""
    config.values.pop("head_dim", None)


@dataclass(frozen=True)
class Projector:
    """A projector of Granite 4 Vision: the layer of the text model that gets its output, the layer of the encoder that
    it reads, its kind and its number in the checkpoint."""

    target: int
    layer: int
    kind: str
    number: int


def projectors(config: Config) -> list[Projector]:
    """Return the projectors in the order of the layers of the text model that get their outputs."""
    text_layers, layers = (config.table(part)["num_hidden_layers"] for part in ("text_config", "vision_config"))

    def positive(layer: int, count: int) -> int:
        return layer + count if layer < 0 else layer

    rows = [
        Projector(positive(target, text_layers), positive(layer, layers), "layerwise", number)
        for number, (layer, target) in enumerate(sorted(config.get("deepstack_layer_map", []) or []))
    ]
    spatial_layer = positive(config.get("spatial_vision_layer", -1), layers)
    rows += [
        Projector(target, spatial_layer, "spatial", number)
        for number, target in enumerate(config.get("spatial_target_layers", []) or [])
    ]
    return sorted(rows, key=lambda projector: projector.target)


def _deepstack_mapping(config: Config) -> list[int] | None:
    """Return the number of the projector whose output each layer adds, -1 for none; that of the first is the input."""
    if not (config.get("spatial_target_layers") or config.get("deepstack_layer_map")):
        return None
    mapping = [-1] * config.layers
    for number, projector in enumerate(projectors(config)):
        if not 0 <= projector.target < len(mapping):
            raise FormatError(
                f"{config.path}: a projector's output is for layer {projector.target}; there are {len(mapping)} layers",
                "QK-E112",
            )
        if number:
            mapping[projector.target] = number
    return mapping


GRANITE_KEYS: tuple[SetKeys, ...] = (
    *llama.LLAMA_KEYS,
    Copied(".attention.scale", "attention_multiplier", "f32", unless_zero=True),
    Copied(".embedding_scale", "embedding_multiplier", "f32", unless_zero=True),
    Copied(".residual_scale", "residual_multiplier", "f32", unless_zero=True),
    Copied(".logit_scale", "logits_scaling", "f32", unless_zero=True),
    Computed(".deepstack_mapping", _deepstack_mapping, "array"),
)

MOE_KEYS: tuple[SetKeys, ...] = (
    *GRANITE_KEYS,
    Copied(".expert_shared_feed_forward_length", "shared_intermediate_size", unless_zero=True),
)


def _is_dense(config: Config) -> bool:
    return not config.get("num_local_experts")


#: Gate and up are stored as one tensor: those of experts, of the shared expert, and of models that have only a shared
#: expert.
MOE_RULES = (
    Split(
        r"block_sparse_moe\.input_linear\.weight$",
        ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"),
        -2,
    ),
    Split(
        r"shared_mlp\.input_linear\.weight$",
        ("mlp.shared_mlp.gate_proj.weight", "mlp.shared_mlp.up_proj.weight"),
        -2,
    ),
    Rename(r"mlp\.shared_mlp\.(gate|up)_proj", r"mlp.\1_proj", when=_is_dense),
    Rename(r"shared_mlp\.output_linear", "mlp.down_proj", when=_is_dense),
    *llama.ROPE_PERMUTED,
)


def reshape_groups(tensor: Tensor, context: Context) -> Expression:
    n = _group_count(context.config)
    return Shaped(tensor.x, (n, _inner_size(context.config) // n))


MAMBA_RULES = (
    Transform(r"\.mamba\.conv1d\.weight$", squeeze, unsqueeze_channels),
    Transform(r"\.mamba\.(A_log|D)$", mamba.as_column, flatten),
    Transform(r"\.mamba\.norm\.weight$", reshape_groups, flatten),
    Transform(r"\.A_log$", negative_exp, log_of_negative),
)


def prepare_hybrid(config: Config) -> None:
    """As ``drop_head_dim``; the vocabulary is padded to a multiple of eight tokens."""
    drop_head_dim(config)
    config.values["pad_vocab_size_multiple"] = 8 if _is_hybrid(config) else 1


def uses_rope(config: Config) -> bool:
    """Return whether attention layers have rope: in Bamba, and in models without Mamba layers."""
    return config.architecture == "BambaForCausalLM" or all(attention_layers(config))


def _kv_heads(config: Config) -> list[int]:
    """Return the KV heads of each layer, 0 for Mamba layers."""
    heads = config.find("num_key_value_heads", "n_head_kv", "mamba_num_key_value_heads", "mamba_n_head_kv")
    return [heads if attends else 0 for attends in attention_layers(config)]


def refuse_heads(keys: Keys, config: Config) -> None:
    """Refuse an activation that llama.cpp does not support, and an inner size that is not a multiple of the heads."""
    inner, width = _inner_size(config), config.find("d_head", "mamba_d_head") or 64
    if config.get("hidden_act") not in (None, "silu"):
        raise FormatError(
            f"{config.path}: hidden_act is {short(config.get('hidden_act'))}; only silu is supported", "QK-E305"
        )
    if not isinstance(width, int) or inner % width:
        raise FormatError(
            f"{config.path}: an inner size of {short(inner)} is not a multiple of heads of {short(width)}", "QK-E112"
        )


# fmt: off
#: The keys of Mamba layers, and which layers they are: those with 0 KV heads.
MAMBA_KEYS: tuple[SetKeys, ...] = (
    Copied(".ssm.conv_kernel", "conv_kernel d_conv mamba_conv_kernel mamba_d_conv", required=True,
           exported="mamba_d_conv"),
    Copied(".ssm.state_size",
           "state_size d_state state_dim ssm_state_size mamba_state_size mamba_d_state mamba_state_dim "
           "mamba_ssm_state_size", required=True, exported="mamba_d_state"),
    Computed(".ssm.group_count", lambda config: _group_count(config), names="mamba_n_groups"),
    Computed(".ssm.inner_size", lambda config: _inner_size(config)),
    Copied(".ssm.time_step_rank", "n_heads num_heads mamba_n_heads mamba_num_heads", required=True,
           exported="mamba_n_heads"),
    Computed(".rope.dimension_count", lambda config: config.get("attn_rotary_emb") or None),
    Computed(".attention.head_count_kv", _kv_heads, "array"),
    Computed(".rope.scaling.finetuned", uses_rope, "flag"),
    Computed(".context_length", lambda config: None if uses_rope(config) else 1 << 20, names="max_position_embeddings"),
    refuse_heads,
)
# fmt: on
HYBRID_KEYS: tuple[SetKeys, ...] = (*MOE_KEYS, *MAMBA_KEYS)
RENAME_SINKS = Rename(r"(sinks)$", r"\1.weight")


def _window_pattern(config: Config) -> list[bool]:
    kinds = config.get("layer_types")
    return [kind == "sliding_attention" for kind in kinds] if kinds else [i % 4 != 0 for i in range(config.layers)]


def _rope_layers(config: Config) -> list[bool] | None:
    turned = config.get("no_rope_layers")
    return [bool(item) for item in turned] if turned else None


def _set_rope_layers(meta: ModelMetadata, config: Json) -> None:
    """Name the layers with rope, where the file lists them."""
    turned = meta.flags(".attention.rope_pattern")
    if turned is not None:
        config["no_rope_layers"] = [int(item) for item in turned]


WINDOW_KEYS: tuple[SetKeys, ...] = (
    *GRANITE_KEYS,
    Copied(".attention.sliding_window", "sliding_window", default=128),
    Computed(".attention.sliding_window_pattern", _window_pattern, "array", inverse=set_layer_types),
    Computed(".attention.rope_pattern", _rope_layers, "array", inverse=_set_rope_layers),
)


def attention_layers(config: Config) -> list[bool]:
    """Return for each layer whether it has attention; others are Mamba layers."""
    layers = config.layers
    if kinds := config.get("layer_types"):
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise FormatError(f"{config.path}: layer_types is {short(kinds)}, not a list of {layers} kinds", "QK-E112")
        return [kind == "attention" for kind in kinds]
    if indices := config.get("attn_layer_indices"):
        if not isinstance(indices, list):
            raise FormatError(f"{config.path}: attn_layer_indices is {short(indices)}, not a list", "QK-E112")
        return [i in indices for i in range(layers)]
    period = config.number("attn_layer_period")
    return [bool(period) and i % period == config.number("attn_layer_offset") for i in range(layers)]


def _is_hybrid(config: Config) -> bool:
    return not all(attention_layers(config))


def _inner_size(config: Config) -> int:
    width = config.number("mamba_head_dim", "hidden_size", "d_model")
    return config.number("expand", "num_heads", "mamba_expand", "mamba_num_heads") * width


def _group_count(config: Config) -> int:
    return config.number("n_groups", "num_groups", "mamba_n_groups", "mamba_num_groups")


def hybrid_arch(config: Config) -> str:
    """Return the architecture: models of the class without any layer of Mamba are plain Granite."""
    if _is_hybrid(config):
        return "granitehybrid"
    experts = config.find(
        "num_experts_per_tok",
        "num_experts_per_token",
        "mamba_num_experts_per_tok",
        "mamba_num_experts_per_token",
    )
    return "granitemoe" if experts else "granite"


#: Gate and up remain one tensor.
WINDOW_EXPERTS = (
    AssignKind(
        r"block_sparse_moe\.(experts\.gate_up_proj|input_linear\.weight)$",
        "*ffn_gate_up_exps",
        ".weight",
        "model.layers.*.block_sparse_moe.experts.gate_up_proj",
    ),
    AssignKind(
        r"block_sparse_moe\.experts\.down_proj$",
        "*ffn_down_exps",
        ".weight",
        "model.layers.*.block_sparse_moe.experts.down_proj",
    ),
    AssignKind(
        r"shared_mlp\.input_linear\.weight$",
        "*ffn_up_shexp",
        ".weight",
        "model.layers.*.shared_mlp.input_linear.weight",
    ),
    AssignKind(
        r"shared_mlp\.output_linear\.weight$",
        "*ffn_down_shexp",
        ".weight",
        "model.layers.*.shared_mlp.output_linear.weight",
    ),
)

GRANITE = replace(
    llama.LLAMA,
    arch="granite",
    stored=(DROP_OTHER_PARTS,),
    rules=llama.ROPE_PERMUTED,
    keys=GRANITE_KEYS,
    patch_config=drop_head_dim,
)

_GRANITE_MOE = replace(GRANITE, arch="granitemoe", rules=MOE_RULES, keys=MOE_KEYS)

_GRANITE_HYBRID: Architecture = replace(
    _GRANITE_MOE,
    arch="granitehybrid",
    stored=(mamba.DT_BIAS, DROP_OTHER_PARTS),
    rules=(*MAMBA_RULES, *MOE_RULES),
    keys=HYBRID_KEYS,
    vocab=mamba.write_mamba,
    patch_config=prepare_hybrid,
    dispatch=lambda config: replace(_GRANITE_HYBRID, arch=hybrid_arch(config)),
)

_GRANITE_SWA = Architecture(
    "granite_swa",
    stored=(RENAME_SINKS, DROP_OTHER_PARTS),
    rules=llama.ROPE_PERMUTED,
    keys=WINDOW_KEYS,
    vocab=llama.write_llama,
    patch_config=drop_head_dim,
    synthetic=llama.rope_factors,
)

ARCHITECTURES: dict[str, Architecture] = {
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": _GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": _GRANITE_HYBRID,
    "BambaForCausalLM": _GRANITE_HYBRID,
    "GraniteSWAForCausalLM": _GRANITE_SWA,
    "GraniteMoeSWAForCausalLM": replace(
        _GRANITE_SWA,
        rules=(*WINDOW_EXPERTS, *llama.ROPE_PERMUTED),
        keys=(
            *WINDOW_KEYS,
            Copied(".expert_shared_feed_forward_length", "shared_intermediate_size", unless_zero=True),
        ),
    ),
}


def set_mamba_config(meta: ModelMetadata, config: Json) -> None:
    """Set the sizes of Mamba's layers, and which layers are Mamba's."""
    heads, inner = meta.number(".ssm.time_step_rank"), meta.number(".ssm.inner_size")
    kv_heads = meta.per_layer(".attention.head_count_kv")
    config |= {
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["attention" if item else "mamba" for item in kv_heads],
        "mamba_d_head": inner // max(1, heads),
        "mamba_expand": inner // max(1, meta.number(".embedding_length")),
    }


def set_position_embedding(meta: ModelMetadata, config: Json) -> None:
    """Set whether the model uses rope (Granite's hybrids)."""
    config["position_embedding_type"] = "rope" if meta.get(".rope.scaling.finetuned") else "nope"


def set_attention_indices(meta: ModelMetadata, config: Json) -> None:
    """Name the layers of attention by their numbers (Bamba)."""
    kinds = config.pop("layer_types")
    if meta.get(".attention.key_length") is None:
        config.pop("head_dim", None)
    config["attn_layer_indices"] = [i for i, kind in enumerate(kinds) if kind == "attention"]


_GRANITE_MOE_NAMES = (
    "model.layers.*.block_sparse_moe.router.layer model.layers.*.block_sparse_moe.output_linear "
    "model.layers.*.mlp.shared_mlp.gate_proj model.layers.*.mlp.shared_mlp.up_proj "
    "model.layers.*.shared_mlp.output_linear"
)

_MAMBA_NAMES = " ".join(
    f"model.layers.*.mamba.{name}" for name in ("in_proj", "conv1d", "dt_proj", "A_log", "D", "norm", "out_proj")
)

_FEED_FORWARD_NAMES = " ".join(f"model.layers.*.feed_forward.{w}_proj" for w in ("gate", "up", "down"))


def is_granite_hybrid(meta: ModelMetadata) -> bool:
    """Return whether the file is a Granite hybrid, whose attention layers, unlike Bamba's, have no rope."""
    return meta.get(".ssm.conv_kernel") is not None and (
        meta.arch != "granitehybrid" or not meta.get(".rope.scaling.finetuned")
    )


_GRANITE_SWA_CLASS = HfClass("granite_swa")

CLASSES: dict[str, HfClass] = {
    "GraniteMoeHybridForCausalLM": HfClass(
        "granitemoehybrid",
        f"{_GRANITE_MOE_NAMES} {_MAMBA_NAMES}",
        defaults={"num_local_experts": 0, "num_experts_per_tok": 0},
        config_setters=(set_mamba_config, set_position_embedding),
        fused=True,
        matches=is_granite_hybrid,
        archs=("granite", "granitemoe"),
    ),
    "BambaForCausalLM": HfClass(
        "bamba",
        f"model.final_layernorm model.layers.*.pre_ff_layernorm {_FEED_FORWARD_NAMES} {_MAMBA_NAMES}",
        keys={".rope.dimension_count": "attn_rotary_emb"},
        config_setters=(set_mamba_config, set_attention_indices),
    ),
    "GraniteForCausalLM": HfClass("granite"),
    "GraniteMoeSharedForCausalLM": HfClass(
        "granitemoeshared", _GRANITE_MOE_NAMES, fused=True, matches=has_key("expert_shared_feed_forward_length")
    ),
    "GraniteMoeForCausalLM": HfClass("granitemoe", _GRANITE_MOE_NAMES, fused=True),
    "GraniteMoeSWAForCausalLM": replace(
        _GRANITE_SWA_CLASS,
        model_type="granitemoe_swa",
        names=f"{LAYER}block_sparse_moe.router {LAYER}mlp.experts.gate_up_proj",
        matches=has_key("expert_count"),
    ),
    "GraniteSWAForCausalLM": _GRANITE_SWA_CLASS,
}

"""Granite: dense, mixtures of experts, and hybrids with layers of Mamba 2.

Facts of llama.cpp b11434, conversion/granite.py and conversion/mamba.py (Mamba2Model).
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Shaped
from quantkit.checkpoint.families.llama import LLAMA_KEYS, ROPE_PERMUTED
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import (
    Changed,
    Context,
    Dropped,
    Named,
    Renamed,
    Split,
    Tensor,
    negative_exp,
    squeezed,
)
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

#: Parts of the models that also see and hear.
OTHER_PARTS = Dropped(r"^encoder\.|image_|layerwise_projectors|spatial_projectors")


def without_head_dim(config: Config) -> None:
    """Granite's heads are always as wide as the model divided among them."""
    config.values.pop("head_dim", None)


GRANITE_KEYS: tuple[SetKeys, ...] = (
    *LLAMA_KEYS,
    Copied(".attention.scale", "attention_multiplier", "f32", unless_zero=True),
    Copied(".embedding_scale", "embedding_multiplier", "f32", unless_zero=True),
    Copied(".residual_scale", "residual_multiplier", "f32", unless_zero=True),
    Copied(".logit_scale", "logits_scaling", "f32", unless_zero=True),
)
MOE_KEYS: tuple[SetKeys, ...] = (
    *GRANITE_KEYS,
    Copied(".expert_shared_feed_forward_length", "shared_intermediate_size", unless_zero=True),
)


def _is_dense(config: Config) -> bool:
    return not config.get("num_local_experts")


#: Gate and up are stored in one: of experts, of the shared expert, and of models without any other.
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
    Renamed(r"mlp\.shared_mlp\.(gate|up)_proj", r"mlp.\1_proj", when=_is_dense),
    Renamed(r"shared_mlp\.output_linear", "mlp.down_proj", when=_is_dense),
    *ROPE_PERMUTED,
)

# --- hybrids ---------------------------------------------------------------------------------------------------------


def attention_layers(config: Config) -> list[bool]:
    """Tell of each layer whether it is one of attention; the others are Mamba's."""
    layers = config.layers
    if kinds := config.get("layer_types"):
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise FormatError(f"{config.path}: layer_types is {short(kinds)}, not a list of {layers} kinds")
        return [kind == "attention" for kind in kinds]
    if listed := config.get("attn_layer_indices"):
        if not isinstance(listed, list):
            raise FormatError(f"{config.path}: attn_layer_indices is {short(listed)}, not a list")
        return [i in listed for i in range(layers)]
    period = config.number("attn_layer_period")
    return [bool(period) and i % period == config.number("attn_layer_offset") for i in range(layers)]


def _is_hybrid(config: Config) -> bool:
    return not all(attention_layers(config))


def _inner_size(config: Config) -> int:
    width = config.number("mamba_head_dim", "hidden_size", "d_model")
    return config.number("expand", "num_heads", "mamba_expand", "mamba_num_heads") * width


def _groups(config: Config) -> int:
    return config.number("n_groups", "num_groups", "mamba_n_groups", "mamba_num_groups")


def grouped(tensor: Tensor, context: Context) -> Expression:
    n = _groups(context.config)
    return Shaped(tensor.x, (n, _inner_size(context.config) // n))


def column(tensor: Tensor, context: Context) -> Expression:
    return Shaped(tensor.x, (*tensor.x.shape, 1))


MAMBA_RULES = (
    Changed(r"\.mamba\.conv1d\.weight$", squeezed),
    Changed(r"\.mamba\.(A_log|D)$", column),
    Changed(r"\.mamba\.norm\.weight$", grouped),
    Changed(r"\.A_log$", negative_exp),
)
DT_BIAS = Renamed(r"\.dt_bias$", ".dt_proj.bias")


def prepare_hybrid(config: Config) -> None:
    """As ``without_head_dim``; the vocabulary is filled up to a multiple of eight tokens."""
    without_head_dim(config)
    config.values["pad_vocab_size_multiple"] = 8 if _is_hybrid(config) else 1


def hybrid_arch(config: Config) -> str:
    """Return the architecture: models of the class without any layer of Mamba are plain Granite."""
    if _is_hybrid(config):
        return "granitehybrid"
    experts = config.find(
        *("num_experts_per_tok", "num_experts_per_token"),
        *("mamba_num_experts_per_tok", "mamba_num_experts_per_token"),
    )
    return "granitemoe" if experts else "granite"


def set_mamba(keys: Keys, config: Config) -> None:
    """Set what describes the layers of Mamba, and where they are: layers without heads of keys."""
    for key, names in (
        (".ssm.conv_kernel", "conv_kernel d_conv mamba_conv_kernel mamba_d_conv"),
        (
            ".ssm.state_size",
            "state_size d_state state_dim ssm_state_size mamba_state_size mamba_d_state mamba_state_dim "
            "mamba_ssm_state_size",
        ),
    ):
        Copied(key, names, needed=True)(keys, config)
    keys.u32(".ssm.group_count", _groups(config))
    inner = _inner_size(config)
    keys.u32(".ssm.inner_size", inner)
    Copied(".ssm.time_step_rank", "n_heads num_heads mamba_n_heads mamba_num_heads", needed=True)(keys, config)
    attention = attention_layers(config)
    heads = config.find("num_key_value_heads", "n_head_kv", "mamba_num_key_value_heads", "mamba_n_head_kv")
    if rope := config.get("attn_rotary_emb"):
        keys.u32(".rope.dimension_count", rope)
    keys.array(".attention.head_count_kv", [heads if attends else 0 for attends in attention])
    uses_rope = config.architecture == "BambaForCausalLM" or all(attention)
    keys.flag(".rope.scaling.finetuned", uses_rope)
    if not uses_rope:
        keys.u32(".context_length", 1 << 20)
    width = config.find("d_head", "mamba_d_head") or 64
    if config.get("hidden_act") not in (None, "silu"):
        raise FormatError(f"{config.path}: hidden_act is {short(config.get('hidden_act'))}; only silu is run")
    if not isinstance(width, int) or inner % width:
        raise FormatError(f"{config.path}: an inner size of {short(inner)} makes no heads of {short(width)}")


HYBRID_KEYS: tuple[SetKeys, ...] = (*MOE_KEYS, set_mamba)


# --- windows ---------------------------------------------------------------------------------------------------------

SINKS = Renamed(r"(sinks)$", r"\1.weight")
#: Gate and up stay in one.
WINDOW_EXPERTS = (
    Named(
        r"block_sparse_moe\.(experts\.gate_up_proj|input_linear\.weight)$",
        *("*ffn_gate_up_exps", ".weight", "model.layers.*.block_sparse_moe.experts.gate_up_proj"),
    ),
    Named(
        r"block_sparse_moe\.experts\.down_proj$",
        *("*ffn_down_exps", ".weight", "model.layers.*.block_sparse_moe.experts.down_proj"),
    ),
    Named(
        r"shared_mlp\.input_linear\.weight$",
        *("*ffn_up_shexp", ".weight", "model.layers.*.shared_mlp.input_linear.weight"),
    ),
    Named(
        r"shared_mlp\.output_linear\.weight$",
        *("*ffn_down_shexp", ".weight", "model.layers.*.shared_mlp.output_linear.weight"),
    ),
)


def _set_windows(keys: Keys, config: Config) -> None:
    kinds = config.get("layer_types")
    slides = [kind == "sliding_attention" for kind in kinds] if kinds else [i % 4 != 0 for i in range(config.layers)]
    keys.u32(".attention.sliding_window", config.get("sliding_window", 128))
    keys.array(".attention.sliding_window_pattern", slides)
    if turned := config.get("no_rope_layers"):
        keys.array(".attention.rope_pattern", [bool(each) for each in turned])


WINDOW_KEYS: tuple[SetKeys, ...] = (*GRANITE_KEYS, _set_windows)

"""Mamba, Mamba 2, and Nemotron H, which has layers of Mamba 2 between those of attention and of experts.

Facts of llama.cpp b11434, conversion/mamba.py, conversion/nemotron.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import PIECE, Expression, Shaped, read_f32, size_of
from quantkit.checkpoint.families import granite
from quantkit.checkpoint.families.llama import ROPE_PERMUTED
from quantkit.checkpoint.keys import Keys, layers_in_file
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Dropped, Experts, Renamed, Tensor, negative_exp, squeezed
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

# --- Mamba -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnOutput:
    """An output matrix that has the values of the embeddings is left out; it follows them."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name == "backbone.embeddings.weight":
            context.config.values["_embeddings"] = tensor.x
        other = context.config.get("_embeddings")
        return () if tensor.name == "lm_head.weight" and other is not None and _same(tensor.x, other) else None


def _same(a: Expression, b: Expression) -> bool:
    n = size_of(a)
    pieces = ((at, min(PIECE, n - at)) for at in range(0, n, PIECE))
    return a.shape == b.shape and all((read_f32(a, *piece) == read_f32(b, *piece)).all() for piece in pieces)


MAMBA_RULES = (OwnOutput(), Changed(r"\.A_log$", negative_exp), Changed(r"\.mixer\.conv1d\.weight$", squeezed))


def _set_unused(keys: Keys, width: int) -> None:
    """Set what runtimes ask for, and such models have not."""
    keys.u32(".context_length", 1 << 20)
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", 0)
    keys.u32(".attention.head_count", 0)


def set_mamba_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Mamba: an order of their own."""
    width = config.number("hidden_size", "d_model")
    inner = config.find("intermediate_size", "d_inner") or 2 * width
    if inner != 2 * width:
        raise FormatError(
            f"{config.path}: an inner size of {short(inner)}; llama.cpp runs twice the width of {width} only"
        )
    _set_unused(keys, width)
    keys.u32(".block_count", layers)
    keys.u32(".ssm.conv_kernel", config.find("conv_kernel", "d_conv") or 4)
    keys.u32(".ssm.inner_size", inner)
    keys.u32(".ssm.state_size", config.find("state_size", "d_state") or 16)
    keys.u32(".ssm.time_step_rank", config.find("time_step_rank", "dt_rank") or -(width // -16))
    keys.f32(".attention.layer_norm_rms_epsilon", config.find("layer_norm_epsilon", "rms_norm_eps") or 1e-5)
    keys.flag(".ssm.dt_b_c_rms", config.get("model_type") == "falcon_mamba")
    keys.u32("general.file_type", file_type)


# --- Mamba 2 ---------------------------------------------------------------------------------------------------------

MAMBA2_STORED = (Renamed(r"^model\.(backbone|lm_head)", r"\1", foreign=True), granite.DT_BIAS)


def column(tensor: Tensor, context: Context) -> Expression:
    return Shaped(tensor.x, (size_of(tensor.x), 1))


def grouped(tensor: Tensor, context: Context) -> Expression:
    n = context.config.find("n_groups", "num_groups") or 1
    return Shaped(tensor.x, (n, size_of(tensor.x) // n))


MAMBA2_RULES = (
    Changed(r"\.mixer\.conv1d\.weight$", squeezed),
    Changed(r"\.mixer\.(A_log|D)$", column),
    Changed(r"\.mixer\.norm\.weight$", grouped),
    Changed(r"\.A_log$", negative_exp),
)


def set_mamba2_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of Mamba 2: an order of their own."""
    width, expand = config.number("hidden_size", "d_model", "dim"), config.find("mamba_expand", "expand") or 2
    inner = config.find("mamba_d_ssm", "intermediate_size", "d_inner") or expand * width
    head = config.find("mamba_d_head", "head_dim") or 64
    if inner != expand * width or inner % head:
        raise FormatError(
            f"{config.path}: an inner size of {short(inner)} makes no heads of {short(head)}, or is not the width's"
        )
    _set_unused(keys, width)
    keys.u32(".block_count", layers)
    keys.u32(".ssm.conv_kernel", config.find("conv_kernel", "d_conv") or 4)
    keys.u32(".ssm.inner_size", inner)
    keys.u32(".ssm.state_size", config.find("state_size", "d_state") or 128)
    keys.u32(".ssm.time_step_rank", inner // head)
    keys.u32(".ssm.group_count", config.find("n_groups") or 1)
    keys.f32(".attention.layer_norm_rms_epsilon", config.find("layer_norm_epsilon", "rms_norm_eps") or 1e-5)
    keys.u32("general.file_type", file_type)


# --- Nemotron H ------------------------------------------------------------------------------------------------------

APART = {
    "0.enorm.weight": "enorm.weight",
    "0.hnorm.weight": "hnorm.weight",
    "0.eh_proj.weight": "eh_proj.weight",
    "1.norm.weight": "post_attention_layernorm.weight",
    "1.final_layernorm.weight": "shared_head.norm.weight",
}


@dataclass(frozen=True)
class LayerAhead:
    """The layer that predicts more tokens is stored as two: attention, and experts.

    Its type is that of a tensor of the layer that it was stored as, as in the reference, but for experts, which wait
    for each other in their new layer.
    """

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.match(r"mtp\.layers\.([01]\.(.+))$", tensor.name)
        if match is None:
            return None
        layer = context.config.layers
        rest = f"model.layers.{layer}.{APART[match[1]]}" if match[1] in APART else f"backbone.layers.{layer}.{match[2]}"
        return (replace(tensor, name=rest, layer=layer if ".experts." in rest else tensor.layer),)


NEMOTRON_STORED = (
    granite.DT_BIAS,
    granite.OTHER_PARTS,
    Renamed(r"^model\.layers\.(?=.*\.mixer\.)", "backbone.layers.", foreign=True),
)
NEMOTRON_RULES = (
    LayerAhead(),
    *MAMBA2_RULES,
    Experts(
        weights=("down_proj", "up_proj"),
        name="backbone.layers.{layer}.mixer.experts.{expert}.{weight}.weight",
    ),
    *ROPE_PERMUTED,
)


def _kinds(config: Config) -> list[str]:
    """Return what each layer is: M, *, E or -."""
    pattern = config.get("hybrid_override_pattern") or config.get("layers_block_type") or ""
    if isinstance(pattern, str):
        return list(pattern)
    known = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E"}
    return [known.get(kind, "") for kind in pattern]


def prepare_nemotron(config: Config) -> None:
    """Say how many layers there are; keep the width of heads under another name than the one that Granite has not."""
    if isinstance(kinds := config.get("layers_block_type"), list):
        config.values["num_hidden_layers"] = len(kinds)
    config.values["attention_head_dim"] = config.find("head_dim", "attention_head_dim")
    if config.values["attention_head_dim"] is None:
        raise FormatError(f"{config.path}: it has no head_dim or attention_head_dim")
    granite.without_head_dim(config)


def has_experts(config: Config) -> bool:
    """Tell whether it is a mixture of experts."""
    return "num_experts_per_tok" in config


def layers_with_ahead(config: Config) -> int:
    """Return the number of layers, that which predicts more tokens included."""
    ahead = (config.get("num_nextn_predict_layers", 0) or 0) if has_experts(config) else 0
    if ahead not in (0, 1):
        raise FormatError(f"{config.path}: {ahead} layers that predict more tokens; only one is known")
    return config.layers + int(ahead)


def _set_hybrid(keys: Keys, config: Config) -> None:
    layers, kinds = layers_in_file(keys), _kinds(config)
    ahead = layers > config.layers
    attends = ["attention" if kind == "*" else "mamba" for kind in kinds] + ["attention"] * ahead
    changed = config.without("expand", "mamba_expand").with_values(
        {"layer_types": attends, "num_hidden_layers": layers}
    )
    granite.set_mamba(keys, changed)
    keys.u32(".attention.key_length", config["attention_head_dim"])
    keys.u32(".attention.value_length", config["attention_head_dim"])
    moe = has_experts(config)
    width = (
        config.number("moe_intermediate_size") if moe else config.number("intermediate_size", "n_inner", "hidden_dim")
    )
    fed = [kind == ("E" if moe else "-") for kind in kinds] + [True] * ahead
    keys.array(".feed_forward_length", [width if each else 0 for each in fed])
    if not moe:
        return
    keys.u32(".expert_used_count", config["num_experts_per_tok"])
    keys.u32(".expert_feed_forward_length", width)
    keys.u32(".expert_shared_feed_forward_length", config["moe_shared_expert_intermediate_size"])
    keys.u32(".expert_count", config["n_routed_experts"])
    keys.u32(".expert_shared_count", config["n_shared_experts"])
    keys.flag(".expert_weights_norm", config["norm_topk_prob"])
    keys.f32(".expert_weights_scale", config["routed_scaling_factor"])
    keys.u32(".expert_group_count", config["n_group"])
    if (latent := config.get("moe_latent_size")) is not None:
        keys.u32(".moe_latent_size", latent)
    if ahead:
        keys.u32(".nextn_predict_layers", config["num_nextn_predict_layers"])


NEMOTRON_KEYS: tuple[SetKeys, ...] = (*granite.MOE_KEYS, _set_hybrid)


# --- Nemotron Puzzle -------------------------------------------------------------------------------------------------

PUZZLE_STORED = (
    *NEMOTRON_STORED[:2],
    Dropped(r"^mtp\."),  # of a layout that llama.cpp does not run
    Renamed(r"^model\.", "backbone."),
)


def prepare_puzzle(config: Config) -> None:
    """Take the kinds of layers, and how many there are, from block_configs (NemotronHPuzzleModel)."""
    config.values["layers_block_type"] = [block["block_type"] for block in config["block_configs"]]
    config.values.pop("hybrid_override_pattern", None)
    prepare_nemotron(config)


def _set_puzzle(keys: Keys, config: Config) -> None:
    blocks, attends = config["block_configs"], ("attention", "full_attention")
    kinds = ["attention" if block["block_type"] in attends else "mamba" for block in blocks]
    granite.set_mamba(keys, config.without("expand", "mamba_expand").with_values({"layer_types": kinds}))
    keys.u32(".attention.key_length", config["attention_head_dim"])
    keys.u32(".attention.value_length", config["attention_head_dim"])
    widths = [block.get("moe_intermediate_size") or 0 for block in blocks]
    keys.array(".feed_forward_length", widths)
    keys.array(".expert_feed_forward_length", widths)
    keys.array(".expert_used_count", [block.get("num_experts_per_tok") or 0 for block in blocks])
    for each in _PUZZLE:
        each(keys, config)


_PUZZLE: tuple[SetKeys, ...] = (
    Copied(".expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", needed=True),
    Copied(".expert_count", "n_routed_experts", needed=True),
    Copied(".expert_shared_count", "n_shared_experts", needed=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", needed=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", needed=True),
    Copied(".expert_group_count", "n_group", needed=True),
    Copied(".moe_latent_size", "moe_latent_size", needed=True),
)
PUZZLE_KEYS: tuple[SetKeys, ...] = (*granite.MOE_KEYS, _set_puzzle)

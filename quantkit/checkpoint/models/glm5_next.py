"""GLM 5.3: delta attention between layers of latent attention with an indexer, hyper-connections, experts, MTP layers.

Facts of llama.cpp b11434, conversion/glm.py (Glm5NextModel).
"""

from __future__ import annotations

from functools import partial

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Mapped, Shaped, size_of, take
from quantkit.checkpoint.key_rows import VOCAB_SIZE, Always, Computed, Copied, SetKeys
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import deepseek, kimi
from quantkit.checkpoint.nextn import NEXTN_IF_ANY, layers_with_nextn
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import TIED_OUTPUT, KeepF32, Rename, StackExperts, Transform
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.vocab.bpe import GLM_SPECIAL, write_bpe
from quantkit.errors import FormatError


def _negative_exp_of_heads(tensor: Tensor, context: Context) -> Expression:
    """Return -exp(x) of each head; padding after the heads is dropped."""
    flat = Shaped(tensor.x, (size_of(tensor.x),))
    return Mapped(
        take(flat, 0, range(min(context.config.number("num_attention_heads"), flat.shape[0]))), "negative exp"
    )


def _kv_heads(config: Config) -> list[int]:
    """Return the KV heads of each layer: none in delta attention, one in latent attention and in MTP layers."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != config.layers:
        raise FormatError(f"{config.path}: layer_types is not a list of {config.layers} kinds", "QK-E112")
    return [int(kind != "linear_attention") for kind in kinds] + [1] * (layers_with_nextn(config) - config.layers)


def _check(keys: Keys, config: Config) -> None:
    """Refuse what llama.cpp has no graph for: rope in latent attention, layers without hyper-connections."""
    unsupported = {
        "linear_attn_config.num_heads": config.table("linear_attn_config").get("num_heads")
        != config.number("num_attention_heads"),
        "mla_use_nope": not config.get("mla_use_nope"),
        "qk_rope_head_dim": config.number("qk_rope_head_dim") != 0,
        "mhc": not config.get("mhc", True),
    }
    for name, is_wrong in unsupported.items():
        if is_wrong:
            raise FormatError(
                f"{config.path}: {name} is not that of GLM 5.3: as many heads of both kinds of attention, no rope, "
                "hyper-connections",
                "QK-E305",
            )


def _limits(config: Config) -> list[float] | None:
    """Return the activation limit of each layer, the same for all."""
    limit = config.get("swiglu_limit")
    return None if limit is None else [float(limit)] * layers_with_nextn(config)


def _own_indexers(config: Config) -> list[bool] | None:
    kinds = config.get("indexer_types")
    return None if kinds is None else [kind == "full" for kind in kinds]


# fmt: off
_KEYS: tuple[SetKeys, ...] = (
    _check,
    Computed(".attention.head_count_kv", _kv_heads, "array"),
    VOCAB_SIZE,
    Always(".attention.layer_norm_epsilon", 1e-6, "f32"),
    NEXTN_IF_ANY,
    Copied(".ssm.conv_kernel", "linear_attn_config.short_conv_kernel_size", required=True),
    Copied(".kda.head_dim", "linear_attn_config.head_dim", required=True),
    Copied(".kda.gate_lower_bound", "linear_attn_config.gate_lower_bound", "f32"),
    Copied(".attention.q_lora_rank", "q_lora_rank", required=True),
    Copied(".attention.kv_lora_rank", "kv_lora_rank", required=True),
    Copied(".rope.dimension_count", "qk_rope_head_dim", required=True),
    Copied(".attention.key_length", "kv_lora_rank", required=True),
    Copied(".attention.value_length", "kv_lora_rank", required=True),
    Copied(".attention.key_length_mla", "qk_nope_head_dim", required=True),
    Copied(".attention.value_length_mla", "v_head_dim", required=True),
    *deepseek.INDEXER,
    Copied(".attention.indexer.kpool", "index_kpool", required=True),
    Copied(".attention.indexer.kpool_select_tail", "index_kpool_always_select_tail", "flag", default=True),
    Computed(".attention.indexer.types", _own_indexers, "array"),
    Copied(".hyper_connection.count", "hc_mult", required=True),
    Copied(".hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters", required=True),
    Copied(".hyper_connection.epsilon", "hc_eps", "f32", required=True),
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Copied(".expert_shared_count", "n_shared_experts", required=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
    Computed(".swiglu_clamp_exp", _limits, "array"),
    Computed(".swiglu_clamp_shexp", _limits, "array"),
)
# fmt: on

_RULES = (
    TIED_OUTPUT,
    StackExperts(),
    deepseek.SplitLatentHeads(),
    kimi.CONVOLUTIONS,
    KeepF32(r"\.(hc_(attn|ffn)_\w+|index_kpool_compress_\w+|A_log|dt_bias|e_score_correction\.bias)$"),
    Transform(r"\.A_log$", _negative_exp_of_heads, None),
    Rename(r"\.dt_bias$", ".dt_proj.bias"),
    Rename(r"(\.(?:hc_(?:attn|ffn)_(?:fn|base|scale)|index_kpool_compress_(?:ape|gate)))$", r"\1.weight"),
)

ARCHITECTURES: dict[str, Architecture] = {
    "Glm5NextForConditionalGeneration": Architecture(
        "glm5-next",
        rules=_RULES,
        keys=_KEYS,
        vocab=partial(write_bpe, special=GLM_SPECIAL),
        layers=layers_with_nextn,
        patch_config=lambda config: config.values.pop("head_dim", None),
        nextn=True,
    ),
}

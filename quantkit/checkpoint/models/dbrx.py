"""DBRX.

Facts of llama.cpp b11434, conversion/dbrx.py.
"""

from __future__ import annotations

from quantkit.checkpoint.expressions import Expression, Shaped, Transposed
from quantkit.checkpoint.key_rows import FILE_TYPE, Always, Copied, SetKeys, block_count
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Rename, Transform, UseFileType, flatten_experts, flatten_transposed_experts
from quantkit.checkpoint.tensors import Context, Tensor


def split_experts(tensor: Tensor, context: Context) -> Expression:
    """Split stacked experts (DBRX)."""
    config = context.config
    ffn_config = config.with_values(config.table("ffn_config"))
    return Shaped(
        tensor.x, (ffn_config.number("moe_num_experts"), ffn_config.number("ffn_hidden_size"), config.number("d_model"))
    )


def split_transposed_experts(tensor: Tensor, context: Context) -> Expression:
    """Split and transpose stacked experts (DBRX)."""
    return Transposed(split_experts(tensor, context))


#: All experts are stacked in one matrix; even the router has the type of the file.
DBRX_RULES = (
    Transform(r"ffn\.experts\.mlp\.(w1|v1)$", split_experts, flatten_experts),
    Transform(r"ffn\.experts\.mlp\.w2$", split_transposed_experts, flatten_transposed_experts),
    Rename(r"(ffn\.experts\.mlp\.(w1|w2|v1))$", r"\1.weight"),
    UseFileType(r""),
)


DBRX_BASE: tuple[SetKeys, ...] = (
    block_count("n_layers"),
    Copied(".context_length", "max_seq_len", required=True),
    Copied(".embedding_length", "d_model", required=True),
    Copied(".feed_forward_length", "ffn_config.ffn_hidden_size", required=True),
    Copied(".attention.head_count", "n_heads", required=True),
    Copied(".attention.head_count_kv", "attn_config.kv_n_heads", required=True),
    Copied(".rope.freq_base", "attn_config.rope_theta", "f32", required=True),
    Copied(".attention.clamp_kqv", "attn_config.clip_qkv", "f32", required=True),
    Copied(".expert_count", "ffn_config.moe_num_experts", required=True),
    Copied(".expert_used_count", "ffn_config.moe_top_k", required=True),
    Always(".attention.layer_norm_epsilon", 1e-5, "f32"),
    FILE_TYPE,
)

ARCHITECTURES: dict[str, Architecture] = {
    "DbrxForCausalLM": Architecture("dbrx", rules=DBRX_RULES, base=DBRX_BASE),
}

CLASSES: dict[str, HfClass] = {
    "DbrxForCausalLM": HfClass(
        "dbrx",
        "transformer.wte transformer.norm_f "
        + add_prefix(
            "transformer.blocks.*.",
            "norm_attn_norm.norm_1 norm_attn_norm.norm_2 norm_attn_norm.attn.Wqkv norm_attn_norm.attn.out_proj "
            "ffn.router.layer ffn.experts.mlp.w1 ffn.experts.mlp.v1 ffn.experts.mlp.w2",
        ),
    ),
}

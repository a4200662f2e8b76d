"""GPT-2 and ruGPT-3 XL.

Facts of llama.cpp b11434, conversion/gpt2.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import BLOCK_COUNT, FILE_TYPE, Computed, Copied, SetKeys
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix, has_key
from quantkit.checkpoint.rules import Drop, InverseRule, Split, Transform, transpose, transpose_stored

GPT2_RULES = (Transform(r"\.(c_attn|c_proj|c_fc)\.weight$", transpose, transpose_stored),)


def _set_table_length(meta: ModelMetadata, config: Json) -> None:
    """Set the context, and the length of the position table, which may exceed it."""
    table = meta.model.tensors.get("position_embd.weight")
    config["n_ctx"] = meta.get(".context_length")
    config["n_positions"] = config["n_ctx"] if table is None else table.shape[1]


GPT2_BASE: tuple[SetKeys, ...] = (
    BLOCK_COUNT,
    Computed(".context_length", lambda config: config["n_ctx"], inverse=_set_table_length),
    Copied(".embedding_length", "n_embd", required=True),
    Computed(".feed_forward_length", lambda config: 4 * config.number("n_embd")),
    Copied(".attention.head_count", "n_head", required=True),
    Copied(".attention.layer_norm_epsilon", "layer_norm_epsilon", "f32", required=True),
    FILE_TYPE,
)


#: ruGPT-3 XL stores queries, keys and values separately.
JOIN_QKV = tuple(
    InverseRule(
        Split(
            rf"self_attn\.qkv_proj\.{suffix}$",
            tuple(f"self_attn.{part}_proj.{suffix}" for part in "qkv"),
            always=True,
        )
    )
    for suffix in ("weight", "bias")
)

ARCHITECTURES: dict[str, Architecture] = {
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        stored=(Drop(r"\.attn\.(masked_)?bias$"),),
        rules=GPT2_RULES,
        base=GPT2_BASE,
    ),
    "RuGPT3XLForCausalLM": Architecture("gpt2", rules=JOIN_QKV),
}


GPT_2_NAMES = "transformer.wte transformer.wpe transformer.ln_f " + " ".join(
    f"transformer.h.*.{name}" for name in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
)

CLASSES: dict[str, HfClass] = {
    "GPT2LMHeadModel": HfClass(
        "gpt2",
        GPT_2_NAMES,
    ),
    "RuGPT3XLForCausalLM": HfClass(
        "rugpt3xl",
        "model.embed_tokens model.embed_positions model.norm "
        + add_prefix(
            LAYER,
            "input_layernorm post_attention_layernorm self_attn.qkv_proj self_attn.o_proj mlp.up_proj mlp.down_proj",
        ),
        # Only files of this class have the key.
        matches=has_key("attention.head_count_kv"),
    ),
}

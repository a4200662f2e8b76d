"""DBRX.

Facts of llama.cpp b11434, conversion/dbrx.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, Shaped, Transposed
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass, prefixed
from quantkit.checkpoint.rules import Rename, Transform, UseFileType, flatten_experts, flatten_transposed_experts
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def _attention_config(config: Config, key: str) -> Json:
    """Return an object of config.json."""
    value = config.get(key)
    if not isinstance(value, dict):
        raise FormatError(f"{config.path}: {key} is {short(value)}, not an object", "QK-E112")
    return value


def split_experts(tensor: Tensor, context: Context) -> Expression:
    """Split stacked experts (DBRX)."""
    config = context.config
    ffn_config = config.with_values(_attention_config(config, "ffn_config"))
    return Shaped(
        tensor.x, (ffn_config.number("moe_num_experts"), ffn_config.number("ffn_hidden_size"), config.number("d_model"))
    )


def split_transposed_experts(tensor: Tensor, context: Context) -> Expression:
    """Split and transpose stacked experts (DBRX)."""
    return Transposed(split_experts(tensor, context))


#: All experts are one matrix under the other; even the router has the type of the file.
DBRX_RULES = (
    Transform(r"ffn\.experts\.mlp\.(w1|v1)$", split_experts, flatten_experts),
    Transform(r"ffn\.experts\.mlp\.w2$", split_transposed_experts, flatten_transposed_experts),
    Rename(r"(ffn\.experts\.mlp\.(w1|w2|v1))$", r"\1.weight"),
    UseFileType(r""),
)


def set_dbrx_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of DBRX, in the converter's order."""
    ffn, attention = _attention_config(config, "ffn_config"), _attention_config(config, "attn_config")
    keys.u32(".block_count", layers)
    keys.u32(".context_length", config["max_seq_len"])
    keys.u32(".embedding_length", config["d_model"])
    keys.u32(".feed_forward_length", ffn["ffn_hidden_size"])
    keys.u32(".attention.head_count", config["n_heads"])
    keys.u32(".attention.head_count_kv", attention["kv_n_heads"])
    keys.f32(".rope.freq_base", attention["rope_theta"])
    keys.f32(".attention.clamp_kqv", attention["clip_qkv"])
    keys.u32(".expert_count", ffn["moe_num_experts"])
    keys.u32(".expert_used_count", ffn["moe_top_k"])
    keys.f32(".attention.layer_norm_epsilon", 1e-5)
    keys.u32("general.file_type", file_type)


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "DbrxForCausalLM": Architecture("dbrx", rules=DBRX_RULES, base=set_dbrx_base),
}


def _set_nested_configs(meta: ModelMetadata, config: Json) -> None:
    """Set the nested configurations of attention and experts (DBRX)."""
    config["attn_config"] = {
        "clip_qkv": meta.get(".attention.clamp_kqv"),
        "kv_n_heads": meta.get(".attention.head_count_kv"),
        "rope_theta": meta.get(".rope.freq_base"),
    }
    config["ffn_config"] = {
        "ffn_hidden_size": meta.get(".feed_forward_length"),
        "moe_num_experts": meta.get(".expert_count"),
        "moe_top_k": meta.get(".expert_used_count"),
    }


_DBRX_CLASS = HfClass(
    "dbrx",
    "transformer.wte transformer.norm_f "
    + prefixed(
        "transformer.blocks.*.",
        "norm_attn_norm.norm_1 norm_attn_norm.norm_2 norm_attn_norm.attn.Wqkv norm_attn_norm.attn.out_proj "
        "ffn.router.layer ffn.experts.mlp.w1 ffn.experts.mlp.v1 ffn.experts.mlp.w2",
    ),
    keys={
        ".block_count": "n_layers",
        ".context_length": "max_seq_len",
        ".embedding_length": "d_model",
        ".feed_forward_length": "",
        ".attention.head_count": "n_heads",
        ".attention.head_count_kv": "",
        ".rope.freq_base": "",
        ".attention.clamp_kqv": "",
        ".expert_count": "",
        ".expert_used_count": "",
        ".attention.layer_norm_epsilon": "",
    },
    config_setters=(_set_nested_configs,),
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "DbrxForCausalLM": _DBRX_CLASS,
}

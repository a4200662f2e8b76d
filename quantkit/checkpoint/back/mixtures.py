"""More rows of the table of classes (``classes``): large mixtures of experts, each of its own kind, and models whose
layers differ in width; what their rules did undone, and what is derived for them.

Of remote code there are no facts of transformers; what a class computes is what llama.cpp (b11434, src/models/*.cpp)
does of its files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from quantkit.checkpoint.back import derived as d
from quantkit.checkpoint.back.rules import CHANGES, Backward, undone
from quantkit.checkpoint.back.said import Said
from quantkit.checkpoint.back.spelling import Json, Spelling, has, spelled
from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Shaped, Transposed, size_of
from quantkit.checkpoint.families import deepseek4, mixtures
from quantkit.checkpoint.tensors import AsFile, Context, Tensor

_BLOCK = "model.layers.*."


@undone.register
def _(rule: AsFile, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    return None


# --- Arctic ----------------------------------------------------------------------------------------------------------

_ARCTIC = Spelling(
    "arctic",
    spelled(_BLOCK, "post_attention_layernorm residual_mlp.w1 residual_mlp.w2 residual_mlp.w3 block_sparse_moe.gate")
    + " layers.*.feed_forward.experts.w1 layers.*.feed_forward.experts.w2 layers.*.feed_forward.experts.w3",
    # What llama.cpp has in its code.
    otherwise={"moe_layer_frequency": 1, "parallel_attn_mlp_res": True},
)

# --- DBRX ------------------------------------------------------------------------------------------------------------


def _one_under_the_other(tensor: Tensor, context: Context) -> Expression:
    return Shaped(tensor.x, (size_of(tensor.x) // tensor.x.shape[-1], tensor.x.shape[-1]))


def _turned_under(tensor: Tensor, context: Context) -> Expression:
    return _one_under_the_other(replace(tensor, x=Transposed(tensor.x)), context)


CHANGES |= {mixtures.by_expert: _one_under_the_other, mixtures.turned_by_expert: _turned_under}


def _two_parts(said: Said, config: Json) -> None:
    """Say what attention and experts have in objects of their own (DBRX)."""
    config["attn_config"] = {
        "clip_qkv": said.get(".attention.clamp_kqv"),
        "kv_n_heads": said.get(".attention.head_count_kv"),
        "rope_theta": said.get(".rope.freq_base"),
    }
    config["ffn_config"] = {
        "ffn_hidden_size": said.get(".feed_forward_length"),
        "moe_num_experts": said.get(".expert_count"),
        "moe_top_k": said.get(".expert_used_count"),
    }


_DBRX = Spelling(
    "dbrx",
    "transformer.wte transformer.norm_f "
    + spelled(
        "transformer.blocks.*.",
        "norm_attn_norm.norm_1 norm_attn_norm.norm_2 norm_attn_norm.attn.Wqkv norm_attn_norm.attn.out_proj "
        "ffn.router.layer ffn.experts.mlp.w1 ffn.experts.mlp.v1 ffn.experts.mlp.w2",
    ),
    keys={
        **{".block_count": "n_layers", ".context_length": "max_seq_len", ".embedding_length": "d_model"},
        **{".feed_forward_length": "", ".attention.head_count": "n_heads", ".attention.head_count_kv": ""},
        **{".rope.freq_base": "", ".attention.clamp_kqv": "", ".expert_count": "", ".expert_used_count": ""},
        ".attention.layer_norm_epsilon": "",
    },
    derived=(_two_parts,),
)

# --- Grok ------------------------------------------------------------------------------------------------------------


def _own_rope(said: Said, config: Json) -> None:
    """Say how rope is scaled by single keys."""
    rope = config.pop("rope_scaling", None) or {}
    if rope.get("rope_type") != "yarn":
        return
    config |= {
        "rope_type": "original",  # what Grok 2 calls YaRN
        "scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "extrapolation_factor": rope.get("extrapolation_factor", 1.0),
        "attn_factor": rope.get("attention_factor", 1.0),
        "beta_fast": rope.get("beta_fast", 8),
        "beta_slow": rope.get("beta_slow", 1),
    }


_GROK_KEYS = {
    **{".attn_logit_softcapping": "attn_logit_softcapping", ".router_logit_softcapping": "router_logit_softcapping"},
    **{".attention.temperature_length": "attn_temperature_len", ".attention.output_scale": "attn_output_multiplier"},
    **{".embedding_scale": "embedding_multiplier_scale", ".logit_scale": "output_multiplier_scale"},
    **{".expert_count": "num_local_experts", ".rope.scaling.original_context_length": ""},
}
_FIRST_GROK = "transformer.decoder_layer.*."
_GROK_2 = Spelling(
    "git",
    spelled(_BLOCK, "pre_attn_norm post_attn_norm pre_moe_norm post_moe_norm block_sparse_moe.gate")
    + spelled(f" {_FIRST_GROK}moe.", "linear linear_1 linear_v"),
    keys=_GROK_KEYS | {".attention.layer_norm_epsilon": "layer_norm_eps"},
    derived=(_own_rope,),
    renamed=tuple(
        (
            rf"^transformer\.decoder_layer\.(\d+)\.moe\.(\d+)\.{old}\.",
            rf"model.layers.\1.block_sparse_moe.experts.\2.{new}.",
        )
        for old, new in (("linear", "w1"), ("linear_1", "w2"), ("linear_v", "w3"))
    ),
    when=has("expert_feed_forward_length"),
)
_GROK_1 = Spelling(
    "grok-1",
    "transformer.in_out_embed transformer.rms_norm "
    + spelled(
        _FIRST_GROK,
        "rms_norm rms_norm_1 rms_norm_2 rms_norm_3 router multi_head_attention.query multi_head_attention.key "
        "multi_head_attention.value multi_head_attention.linear moe.linear moe.linear_1 moe.linear_v",
    ),
    keys=_GROK_KEYS | {".attn_logit_softcapping": "max_attn_value"},
    derived=(_own_rope,),
)

# --- DeciLM, Nemotron 49B to 253B ------------------------------------------------------------------------------------


def _blocks(said: Said, config: Json) -> None:
    """Say what each layer has, if they differ in more than heads of keys."""
    heads, keys = said.get(".attention.head_count"), said.get(".attention.head_count_kv")
    if not isinstance(heads, list):
        config |= {"model_type": "deci", "num_key_value_heads_per_layer": said.of_layers(".attention.head_count_kv")}
        config["num_key_value_heads"] = max(config["num_key_value_heads_per_layer"])
        return
    width, keys = said.number(".embedding_length"), said.of_layers(".attention.head_count_kv")
    widths = said.of_layers(".feed_forward_length")
    config |= {
        "num_attention_heads": max(heads),
        "num_key_value_heads": max(keys),
        "intermediate_size": max(widths),
        "block_configs": [
            {"attention": _attention(n, of_keys), "ffn": _feed_forward(wide, width)}
            for n, of_keys, wide in zip(heads, keys, widths, strict=True)
        ],
    }
    config.pop("head_dim", None)


def _attention(heads: int, keys: int) -> Json:
    group = heads // keys if keys else None
    return {"n_heads_in_group": group, "no_op": not heads, "replace_with_linear": bool(heads and not keys)}


def _feed_forward(wide: int, width: int) -> Json:
    """Return the multiplier of the width of the model that makes this width; both are rounded on the way."""
    multiplier = next((m for n in range(17) if _wide(m := round(1.5 * wide / width, n), width) == wide), None)
    return {"ffn_mult": multiplier if wide else None, "no_op": not wide, "replace_with_linear": False}


def _wide(multiplier: float, width: int) -> int:
    return -(int(2 * multiplier * width / 3) // -256) * 256


def _linear_output(config: Config, name: str) -> str:
    """Layers with a matrix in place of attention have only that."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight", name)
    if match is None or "block_configs" not in config:
        return name
    linear = config["block_configs"][int(match[1])]["attention"]["replace_with_linear"]
    return name.replace(".o_proj.", ".linear_attn.") if linear else name


# --- Maple -----------------------------------------------------------------------------------------------------------

_MAPLE = Spelling(
    "maple",
    keys={".expert_count": "num_experts", ".swiglu_clamp_exp": ""},
    # What llama.cpp has in its code.
    otherwise={
        **{"hidden_act": "silu", "num_shared_experts": 0, "norm_topk_prob": True},
        "nope_on_global_attention": True,
    },
    derived=(d.kinds_of_layers, d.rotary_part),
)

# --- DeepSeek-OCR, DeepSeek V4 ---------------------------------------------------------------------------------------


def _whole_heads(said: Said, config: Json) -> None:
    """Say that heads have keys and values of their own."""
    config |= {
        "use_mla": False,
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank")),
        **{"qk_nope_head_dim": 0, "v_head_dim": 0, "qk_rope_head_dim": said.number(".rope.dimension_count")},
        "topk_method": "greedy",
    }
    config.pop("head_dim", None)


_OCR = Spelling(
    "deepseek_v2",
    keys={".expert_count": "n_routed_experts", ".expert_gating_func": ""},
    otherwise={"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    derived=(_whole_heads,),
    inside="language_config",
    beside={"model_type": "deepseek_vl_v2"},
    note="DeepSeek-OCR's own code also has towers that see, which are in no file of a text model: only the text model "
    "is written",
)


@undone.register
def _(rule: deepseek4.Names, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    return None


def _clamped(said: Said, config: Json) -> None:
    """Say how experts are clamped, and how rope is scaled."""
    limits = said.get(".swiglu_clamp_exp")
    config["swiglu_limit"] = limits[0] if isinstance(limits, list) else limits


_DEEPSEEK_4 = Spelling(
    "deepseek_v4",
    kinds={
        **{kind: name for name, kind in deepseek4.OUTSIDE.items()},
        **{f"*{kind}": f"layers.*.{name}" for name, kind in deepseek4.INSIDE.items()},
    },
    keys={
        **{".expert_count": "n_routed_experts", ".attention.indexer.head_count": "index_n_heads"},
        **{".attention.indexer.key_length": "index_head_dim", ".attention.indexer.top_k": "index_topk"},
        **{".attention.compress_ratios": "compress_ratios"},
        ".feed_forward_length": "dense_intermediate_size",  # to transformers the other is the width of experts
    },
    derived=(_clamped,),
    note="layers that predict more tokens are in no file of this architecture: `quantkit convert` leaves them out",
)

#: Class of transformers -> how it spells.
MIXTURES: dict[str, Spelling] = {
    "ArcticForCausalLM": _ARCTIC,
    "DbrxForCausalLM": _DBRX,
    "Grok1ForCausalLM": _GROK_2,
    "GrokForCausalLM": _GROK_1,
    "DeciLMForCausalLM": Spelling("nemotron-nas", f"{_BLOCK}self_attn.o_proj", derived=(_blocks,), last=_linear_output),
    "MapleForCausalLM": _MAPLE,
    "DeepseekOCRForCausalLM": _OCR,
    "DeepseekV4ForCausalLM": _DEEPSEEK_4,
}

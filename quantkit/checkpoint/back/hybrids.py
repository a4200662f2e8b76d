"""More rows of the table of classes (``classes``): of models whose layers are not all of one kind, and what is derived
for them.

Of remote code there are no facts of transformers; what a class computes is what llama.cpp (b11434, src/models/*.cpp)
does of its files.
"""

from __future__ import annotations

import re
from dataclasses import replace

from quantkit.checkpoint.back import derived as d
from quantkit.checkpoint.back.said import Said
from quantkit.checkpoint.back.spelling import Json, Spelling, spelled
from quantkit.checkpoint.config import Config
from quantkit.checkpoint.families import bailing
from quantkit.errors import TypeNotSupported

_BLOCK = "model.layers.*."


# --- Step 3.5 --------------------------------------------------------------------------------------------------------


def _step_layers(said: Said, config: Json) -> None:
    """Say what layers with and without a window have."""
    slides = said.flags(".attention.sliding_window_pattern") or []
    other = {"attention_type": "sliding_attention", "head_dim": config["head_dim"]}
    for name, key in (("heads", ".attention.head_count"), ("groups", ".attention.head_count_kv")):
        of_kind = dict(zip(slides, said.of_layers(key), strict=False))
        most = max(of_kind.values(), default=0)
        config[f"num_attention_{name}"] = of_kind.get(False, most)
        other[f"num_attention_{name}"] = of_kind.get(True, most)
    theta = config.pop("rope_theta", 10000.0)
    bases = (theta, config.pop("rope_local_base_freq", theta))
    config |= {
        "attention_other_setting": other,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "partial_rotary_factors": [1.0 if each else 0.5 for each in slides],
        "rope_theta": [bases[each] for each in slides],
        "moe_layers_enum": ",".join(map(str, _with(said, "ffn_gate_inp.weight"))),
    }


def _with(said: Said, name: str) -> list[int]:
    """Return the layers that have such a tensor."""
    return [i for i in range(said.number(".block_count")) if f"blk.{i}.{name}" in said.model.tensors]


_STEP = Spelling(
    "step3p5",
    spelled(
        _BLOCK,
        "self_attn.g_proj moe.gate moe.router_bias moe.gate_proj moe.up_proj moe.down_proj share_expert.gate_proj "
        "share_expert.up_proj share_expert.down_proj",
    ),
    keys={
        **{".attention.head_count": "", ".attention.head_count_kv": "", ".leading_dense_block_count": ""},
        **{".moe_every_n_layers": "moe_every_n_layer", ".expert_gating_func": "moe_router_activation"},
        **{".swiglu_clamp_exp": "swiglu_limits", ".swiglu_clamp_shexp": "swiglu_limits_shared"},
    },
    # What llama.cpp has in its code.
    otherwise={"use_head_wise_attn_gate": True, "use_moe_router_bias": True, "yarn_only_types": ["full_attention"]},
    derived=(d.layers_ahead, _step_layers),
    renamed=((r"(\.layers\.\d+)\.(shared_head\.)", r"\1.transformer.\2"),),
)

# --- MiniMax Text 01, M1 ---------------------------------------------------------------------------------------------


def _lightning(said: Said, config: Json) -> None:
    """Name the layers of lightning attention: they have queries, keys and values in one."""
    linear = set(_with(said, "attn_qkv.weight"))
    config["attn_type_list"] = [int(i not in linear) for i in range(said.number(".block_count"))]
    for part in ("full_attention", "linear_attention", "mlp"):
        config |= {f"layernorm_{part}_alpha": said.get(".residual_scale"), f"layernorm_{part}_beta": 1.0}


def _full_output(config: Config, name: str) -> str:
    """Layers of full attention call their last matrix otherwise than those of lightning attention."""
    match = re.fullmatch(r"(model\.layers\.(\d+)\.self_attn\.)out_proj(\..*)", name)
    return name if match is None or not config["attn_type_list"][int(match[2])] else f"{match[1]}o_proj{match[3]}"


_MINIMAX_M1 = Spelling(
    "minimax_m1",
    spelled(
        _BLOCK,
        "block_sparse_moe.gate block_sparse_moe.experts.w1 block_sparse_moe.experts.w2 block_sparse_moe.experts.w3 "
        "self_attn.norm self_attn.qkv_proj self_attn.out_proj self_attn.output_gate",
    ),
    keys={".rope.dimension_count": "rotary_dim"},
    otherwise={"postnorm": True},  # as llama.cpp computes it
    derived=(_lightning,),
    last=_full_output,
)

# --- Nemotron H ------------------------------------------------------------------------------------------------------


def _patterned(said: Said, config: Json) -> None:
    """Name the layers by letters, and say what those of Mamba have."""
    attends, fed = said.of_layers(".attention.head_count_kv"), said.of_layers(".feed_forward_length")
    moe, layers = said.get(".expert_count") is not None, range(config["num_hidden_layers"])
    heads = said.number(".ssm.time_step_rank")
    config |= {
        "hybrid_override_pattern": "".join("*" if attends[i] else "-E"[moe] if fed[i] else "M" for i in layers),
        "num_key_value_heads": max(attends),
        "moe_intermediate_size" if moe else "intermediate_size": max(fed),
        "mamba_num_heads": heads,
        "mamba_head_dim": said.number(".ssm.inner_size") // max(1, heads),
        "use_conv_bias": said.some(".ssm_conv1d.bias"),
        "use_bias": said.some(".ssm_in.bias"),
        "mlp_bias": said.some(".ffn_up.bias"),
        "attention_bias": said.some(".attn_q.bias"),
        "residual_in_fp32": False,
    }
    if moe:
        config.setdefault("topk_group", 1)


_NEMOTRON_H = Spelling(
    "nemotron_h",
    "backbone.embeddings backbone.norm_f backbone.layers.*.norm "
    + spelled(
        "backbone.layers.*.mixer.",
        "in_proj conv1d dt_proj A_log D norm out_proj q_proj k_proj v_proj o_proj up_proj down_proj gate "
        "gate.e_score_correction fc1_latent_proj fc2_latent_proj shared_experts.up_proj shared_experts.down_proj",
    ),
    keys={
        **{".feed_forward_length": "", ".attention.head_count_kv": "", ".expert_count": "n_routed_experts"},
        **{".attention.layer_norm_rms_epsilon": "norm_eps", ".attention.layer_norm_epsilon": "layer_norm_epsilon"},
        **{".ssm.conv_kernel": "conv_kernel", ".ssm.state_size": "ssm_state_size", ".ssm.group_count": "n_groups"},
        **{".expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size"},
        **{".moe_latent_size": "moe_latent_size", ".expert_gating_func": ""},
    },
    derived=(d.layers_ahead, _patterned),
    archs=("nemotron_h_moe",),
)

# --- Falcon H1, Jamba ------------------------------------------------------------------------------------------------


def _beside_attention(said: Said, config: Json) -> None:
    """Say what the heads of Mamba have (Falcon H1); what outputs are multiplied by is part of the weights."""
    heads = said.number(".ssm.time_step_rank")
    config |= {
        "mamba_d_head": said.number(".ssm.inner_size") // max(1, heads),
        "mamba_rms_norm": said.some(".ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # as llama.cpp computes it
        "mamba_conv_bias": said.some(".ssm_conv1d.bias"),
        "mamba_proj_bias": said.some(".ssm_in.bias"),
        "attention_bias": said.some(".attn_q.bias"),
        "mlp_bias": said.some(".ffn_up.bias"),
        "rope_scaling": None,
    }
    config |= {f"{name}_multiplier": 1.0 for name in _MULTIPLIERS.split()}
    config |= {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}


_MULTIPLIERS = "attention_in attention_out key ssm_in ssm_out lm_head embedding"
_MAMBA_SIZES = {".ssm.conv_kernel": "mamba_d_conv", ".ssm.state_size": "mamba_d_state"}
_MIXER = spelled(f"{_BLOCK}mamba.", "in_proj conv1d dt_proj A_log D norm out_proj x_proj")
_FED = "model.final_layernorm " + spelled(f"{_BLOCK}feed_forward.", "gate_proj up_proj down_proj router")
_FALCON_H1 = Spelling(
    "falcon_h1",
    f"{_FED} {_MIXER} {_BLOCK}pre_ff_layernorm.weight",
    keys={
        **{**_MAMBA_SIZES, ".ssm.inner_size": "mamba_d_ssm", ".ssm.time_step_rank": "mamba_n_heads"},
        **{".ssm.group_count": "mamba_n_groups"},
    },
    derived=(_beside_attention,),
)


def _periods(said: Said, config: Json) -> None:
    """Say in which layers attention and experts are: every so many, from one on (Jamba)."""
    layers = said.number(".block_count")
    heads = said.of_layers(".attention.head_count_kv")
    for name, found in (
        ("attn", [i for i, n in enumerate(heads) if n]),
        ("expert", _with(said, "ffn_gate_inp.weight")),
    ):
        first = found[0] if found else layers
        period = found[1] - first if len(found) > 1 else max(layers - first, first + 1)
        if found != list(range(first, layers, period)):
            raise TypeNotSupported(
                f"{said.where}: layers {found} have {'attention' if name == 'attn' else 'experts'}; config.json can "
                "only say which is the first, and every how many there is another"
            )
        config |= {f"{name}_layer_offset": first, f"{name}_layer_period": period}
    config |= {
        "num_key_value_heads": max(heads),
        "mamba_expand": said.number(".ssm.inner_size") // max(1, said.number(".embedding_length")),
        "mamba_conv_bias": said.some(".ssm_conv1d.bias"),
        "mamba_proj_bias": said.some(".ssm_in.bias"),
    }


_JAMBA = Spelling(
    "jamba",
    f"{_FED} {_MIXER} " + spelled(_BLOCK, "pre_ff_layernorm mamba.dt_layernorm mamba.b_layernorm mamba.c_layernorm"),
    keys={**_MAMBA_SIZES, ".ssm.time_step_rank": "mamba_dt_rank", ".expert_count": "num_experts"},
    otherwise={"sliding_window": None, "use_mamba_kernels": False},
    derived=(_periods,),
)

# --- delta attention -------------------------------------------------------------------------------------------------


def _delta_attention(said: Said, config: Json) -> None:
    """Name the layers of both kinds of attention, counted from one, and say what heads of delta attention have."""
    attends = [bool(n) for n in said.of_layers(".attention.head_count_kv")]
    beta = next((t for name, t in said.model.tensors.items() if name.endswith(".ssm_beta.weight")), None)
    linear: Json = {
        "full_attn_layers": [i + 1 for i, each in enumerate(attends) if each],
        "kda_layers": [i + 1 for i, each in enumerate(attends) if not each],
        "num_heads": config["num_attention_heads"] if beta is None else beta.shape[1],
    }
    given = {"head_dim": ".kda.head_dim", "short_conv_kernel_size": ".ssm.conv_kernel"}
    given["gate_lower_bound"] = ".kda.gate_lower_bound"
    linear |= {name: value for name, key in given.items() if (value := said.get(key)) is not None}
    config["linear_attn_config"] = linear


def _width_of_values(said: Said, config: Json) -> None:
    """Say how wide heads are, though nothing is: files have it as the width of values."""
    if (width := said.get(".attention.value_length")) is not None:
        config["head_dim"] = width


_SPARSE = spelled(
    f"{_BLOCK}block_sparse_moe.",
    "gate gate.e_score_correction experts.w1 experts.w2 experts.w3 shared_experts.gate_proj shared_experts.up_proj "
    "shared_experts.down_proj",
)
_KIMI_KEYS = {
    **{".expert_count": "num_experts", ".expert_used_count": "num_experts_per_token"},
    **{".expert_shared_count": "num_shared_experts", ".expert_gating_func": "moe_router_activation_func"},
    **{".expert_group_count": "num_expert_group", ".expert_weights_norm": "moe_renormalize"},
}
_KIMI_LINEAR = Spelling(
    "kimi_linear",
    _SPARSE,
    keys=_KIMI_KEYS,
    # What llama.cpp has in its code.
    otherwise={"moe_renormalize": True, "mla_use_nope": True, "moe_layer_freq": 1},
    derived=(d.latent, _width_of_values, _delta_attention),
)

_KIMI_K3 = replace(
    _KIMI_LINEAR,
    names=_SPARSE
    + spelled(
        f" {_BLOCK}",
        "self_attn.g_proj block_sparse_moe.routed_expert_down_proj block_sparse_moe.routed_expert_up_proj",
    ),
    kinds={
        "*ssm_g": f"{_BLOCK}self_attn.g_proj",
        "*attn_res_score": f"{_BLOCK}self_attention_res_proj",
        "*ffn_res_score": f"{_BLOCK}mlp_res_proj",
        "output_res_score": "model.output_attn_res_proj",
    },
    otherwise={"mla_use_nope": True, "hidden_act": "situ", "moe_layer_freq": 1},
    derived=(d.latent, _delta_attention),
    renamed=((r"^", "language_model."),),
    inside="text_config",
    beside={"model_type": "kimi_k3"},
)


def _groups(said: Said, config: Json) -> None:
    """Say how many layers there are to one of attention, and how wide heads of delta attention are (Bailing V3)."""
    attends = said.of_layers(".attention.head_count_kv")
    config["layer_group_size"] = next((i + 1 for i, each in enumerate(attends) if each), len(attends))
    config["head_dim"] = said.number(".kda.head_dim")


def _last_matrix(config: Config, name: str) -> str:
    """Layers of attention call their last matrix otherwise than those of delta attention."""
    match = re.fullmatch(r"(model\.layers\.(\d+)\.attention\.)(?:dense|o_proj)(\..*)", name)
    if match is None:
        return name
    return f"{match[1]}{'dense' if bailing.attends(config, int(match[2])) else 'o_proj'}{match[3]}"


_BAILING_V3 = Spelling(
    "bailing_hybrid",
    "model.word_embeddings "
    + spelled(
        f"{_BLOCK}attention.",
        "q_proj k_proj v_proj dense q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj k_b_proj v_b_proj q_a_layernorm "
        "kv_a_layernorm q_conv1d k_conv1d v_conv1d o_norm A_log dt_proj b_proj",
    )
    + f" {_BLOCK}self_attn.g_proj {_BLOCK}mlp.gate.expert_bias {_BLOCK}final_layernorm",
    keys={
        **{".expert_count": "num_experts", ".expert_shared_count": "num_shared_experts"},
        **{".expert_gating_func": "score_function", ".swiglu_clamp_exp": "expert_swiglu_limit_list"},
        **{".swiglu_clamp_shexp": "share_expert_swiglu_limit_list"},
    },
    # All that llama.cpp runs.
    otherwise={"no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise"},
    derived=(d.layers_ahead, d.latent, _groups),
    last=_last_matrix,
)

# --- dots3 note ------------------------------------------------------------------------------------------------------


def _two_geometries(said: Said, config: Json) -> None:
    """Say what the latents of layers with a window have."""
    heads, slides = said.of_layers(".attention.head_count"), said.flags(".attention.sliding_window_pattern") or []
    of_kind = dict(zip(slides, heads, strict=False))
    rope = config["qk_rope_head_dim"]
    config |= {
        "num_attention_heads": of_kind.get(False, heads[0]),
        "swa_num_attention_heads": of_kind.get(True, heads[-1]),
        "swa_q_lora_rank": config["q_lora_rank"],
        "swa_kv_lora_rank": said.number(".attention.kv_lora_rank_swa"),
        "swa_qk_rope_head_dim": rope,
        "swa_qk_nope_head_dim": said.number(".attention.key_length_mla_swa") - rope,
        "swa_v_head_dim": said.number(".attention.value_length_mla_swa"),
        "swa_head_dim": said.number(".attention.key_length_mla_swa"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "num_key_value_heads": of_kind.get(False, heads[0]),
    }


_DOTS_3 = Spelling(
    "dots3_note",
    spelled(f"{_BLOCK}self_attn.", "k_rope_only_layernorm linear_gate"),
    keys={
        **{".attention.indexer.head_count": "index_n_heads", ".attention.indexer.key_length": "index_head_dim"},
        **{".attention.indexer.top_k": "index_topk", ".attention.sliding_window": "sliding_window_size"},
        **{".attention.head_count": "", ".rope.freq_base_swa": "swa_rope_theta", ".expert_count": "n_routed_experts"},
    },
    # Norms have what the model multiplies latents by already.
    otherwise={"apply_mla_qkv_lora_rescale": False, "topk_method": "noaux_tc"},
    derived=(d.layers_ahead, d.latent, _two_geometries),
)

# --- Hunyuan 4 -------------------------------------------------------------------------------------------------------


def _hyper_connections(said: Said, config: Json) -> None:
    """Say which layers have experts and an indexer, and in what type the head computes."""
    dense = said.number(".leading_dense_block_count")
    layers = range(said.number(".block_count"))
    config["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in layers]
    limits = said.get(".swiglu_clamp_exp")
    config["swiglu_limit"] = limits[0] if limits else 0.0
    tensors = said.model.tensors
    types = [tensors[name].type.name for name in ("output.weight", "token_embd.weight") if name in tensors]
    config["enable_lm_head_fp32"] = types[:1] == ["F32"] and types[1:] != ["F32"]


_HY_V4 = Spelling(
    "hy_v4",
    spelled(_BLOCK, "self_attn.learnable_sink_param self_attn.linear_gate"),
    keys={
        **{".attention.indexer.head_count": "index_n_heads", ".attention.indexer.key_length": "index_head_dim"},
        **{".attention.indexer.top_k": "index_topk", ".expert_count": "n_routed_experts", ".expert_gating_func": ""},
    },
    otherwise={"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    derived=(d.latent, d.indexer, _hyper_connections, d.as_parameters),
    fused=True,
)


def _puzzle(said: Said, config: Json) -> None:
    """Say of each layer what it has (the puzzle of Nemotron H)."""
    attends, widths = said.of_layers(".attention.head_count_kv"), said.of_layers(".expert_feed_forward_length")
    heads, used = said.number(".ssm.time_step_rank"), said.of_layers(".expert_used_count")
    blocks: list[Json] = []
    for n, width, count in zip(attends, widths, used, strict=True):
        kind = "attention" if n else "moe" if width else "mamba"
        blocks.append({"block_type": kind})
        if kind == "moe":
            blocks[-1] |= {"moe_intermediate_size": width, "num_experts_per_tok": count}
    config |= {
        "block_configs": blocks,
        "num_key_value_heads": max(attends),
        "attention_head_dim": said.head,
        "mamba_num_heads": heads,
        "mamba_head_dim": said.number(".ssm.inner_size") // max(1, heads),
        "use_conv_bias": said.some(".ssm_conv1d.bias"),
        "use_bias": said.some(".ssm_in.bias"),
    }


_PUZZLE = replace(
    _NEMOTRON_H,
    model_type="nemotron_h_puzzle",
    keys={
        **_NEMOTRON_H.keys,
        **dict.fromkeys((".expert_used_count", ".expert_feed_forward_length"), ""),
        ".attention.layer_norm_rms_epsilon": "rms_norm_eps",
    },
    otherwise={"hidden_act": None},
    derived=(_puzzle,),
    note="layers that predict more tokens are in no file of this class: `quantkit convert` leaves them out",
    when=lambda said: isinstance(said.get(".expert_used_count"), list),
)

#: Class of transformers -> how it spells.
HYBRIDS: dict[str, Spelling] = {
    "Step3p7ForConditionalGeneration": replace(
        _STEP,
        derived=(*_STEP.derived, d.Tower({"layers": 1, "heads": 2, "width": 64, "image_size": 56, "patch_size": 14})),
        not_null=("pad_token_id",),
        inside="text_config",
        beside={"model_type": "step3p7"},
    ),
    "Step3p5ForCausalLM": _STEP,
    "MiniMaxM1ForCausalLM": _MINIMAX_M1,
    "NemotronHPuzzleForCausalLM": _PUZZLE,
    "NemotronHForCausalLM": _NEMOTRON_H,
    "FalconH1ForCausalLM": _FALCON_H1,
    "JambaForCausalLM": _JAMBA,
    "KimiLinearForCausalLM": _KIMI_LINEAR,
    "HYV4ForCausalLM": _HY_V4,
    "BailingMoeV3ForCausalLM": _BAILING_V3,
    "KimiK3ForConditionalGeneration": _KIMI_K3,
    "Dots3NoteForCausalLM": _DOTS_3,
}

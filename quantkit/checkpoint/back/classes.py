"""How classes of transformers spell what a file of their architecture says: the part of a row that only the way back
needs.

The name map (``tensor_names``) knows many names of one kind of tensor; of a class it is the first of those in its row
here, else the first by ``_ORDER``. Facts of transformers 4.57.6 (models/*/modeling_*.py, configuration_*.py).
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.architectures import ROWS
from quantkit.checkpoint.back import derived as d
from quantkit.checkpoint.back.encoders import ENCODERS
from quantkit.checkpoint.back.hybrids import HYBRIDS
from quantkit.checkpoint.back.mixtures import MIXTURES
from quantkit.checkpoint.back.named import NAMED
from quantkit.checkpoint.back.older import OLDER
from quantkit.checkpoint.back.rwkv import RWKV
from quantkit.checkpoint.back.said import Said
from quantkit.checkpoint.back.seeing import SEEING
from quantkit.checkpoint.back.spelling import Json, Spelling, has
from quantkit.checkpoint.back.talkie import TALKIE
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensor_names import KINDS, PATTERNS
from quantkit.checkpoint.tensors import Named
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short

#: Names that most classes use, where there are several.
_USUAL = {
    *("lm_head", "model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"),
    *(f"model.layers.*.mlp.shared_experts.{w}_proj" for w in ("gate", "up", "down")),
}
_ORDER = ("model.layers.*.self_attn.", "model.layers.*.mlp.", "model.layers.*.", "model.", "lm_head")
_QWEN2_SHARED = " ".join(f"model.layers.*.mlp.shared_expert.{w}_proj" for w in ("gate", "up", "down"))


_FUSED = "model.layers.*.self_attn.qkv_proj model.layers.*.mlp.gate_up_proj"
_SPARSE = " ".join(
    f"model.layers.*.block_sparse_moe.{name}"
    for name in ("gate", "e_score_correction", "experts.w1", "experts.w2", "experts.w3")
)
_GRANITE = (
    "model.layers.*.block_sparse_moe.router.layer model.layers.*.block_sparse_moe.output_linear "
    "model.layers.*.mlp.shared_mlp.gate_proj model.layers.*.mlp.shared_mlp.up_proj "
    "model.layers.*.shared_mlp.output_linear"
)
_LINEAR = " ".join(
    f"model.layers.*.linear_attn.{name}"
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_proj", "norm", "out_proj")
)
_MAMBA = " ".join(
    f"model.layers.*.mamba.{name}" for name in ("in_proj", "conv1d", "dt_proj", "A_log", "D", "norm", "out_proj")
)
_FEED_FORWARD = " ".join(f"model.layers.*.feed_forward.{w}_proj" for w in ("gate", "up", "down"))
_HUNYUAN = "model.layers.*.self_attn.query_layernorm model.layers.*.self_attn.key_layernorm"
_ATTENTION_BIAS = ("attention_bias",)
_PICTURE: Json = {"image_size": 28, "patch_size": 14}
_NO_WINDOW: Json = {"sliding_window": None}
_LATENT: Json = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": None}
_LATENT_V3: Json = {**_LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_LINEAR_KEYS = {
    **{".ssm.conv_kernel": "linear_conv_kernel_dim", ".ssm.state_size": "linear_key_head_dim"},
    **{".ssm.group_count": "linear_num_key_heads", ".ssm.time_step_rank": "linear_num_value_heads"},
}
_ROUTED = {".expert_count": "n_routed_experts"}
_MAMBA_KEYS = {
    **{".ssm.conv_kernel": "mamba_d_conv", ".ssm.state_size": "mamba_d_state"},
    **{".ssm.group_count": "mamba_n_groups", ".ssm.time_step_rank": "mamba_n_heads"},
}
_QWEN35 = Spelling(
    "qwen3_5_text",
    f"{_LINEAR} {_QWEN2_SHARED}",
    keys=_LINEAR_KEYS | {".expert_count": "num_experts"},
    otherwise={"mtp_num_hidden_layers": 0},
    derived=(d.layers_ahead, d.linear_attention, d.rotary_part, d.interleaved_sections, d.as_parameters),
)
_GEMMA_4 = Spelling(
    "gemma4_text",
    "model.layers.*.router.proj model.layers.*.experts.gate_up_proj model.layers.*.experts.down_proj",
    keys={
        **{".attention.shared_kv_layers": "num_kv_shared_layers", ".expert_count": "num_experts"},
        ".expert_used_count": "top_k_experts",
    },
    derived=(d.two_kinds, d.proportional_rope),
    fused=True,
    renamed=((r"(\.experts\.\w+)\.weight$", r"\1"),),
)
_VL = Spelling(
    "qwen3_vl",
    derived=(d.interleaved_sections, d.small_tower),
    biases=_ATTENTION_BIAS,
    renamed=((r"^model\.", "model.language_model."),),
    inside="text_config",
)


def _no_key_length(said: Said) -> bool:
    """Tell a file that Mistral's configuration, with head_dim null, becomes."""
    return said.get(".attention.key_length") is None and not said.has("rope_freqs.weight")


def _granite_hybrid(said: Said) -> bool:
    """Tell Granite's hybrids, whose layers of attention have no rope, from Bamba; without Mamba they have."""
    return said.get(".ssm.conv_kernel") is not None and (
        said.arch != "granitehybrid" or not said.get(".rope.scaling.finetuned")
    )


def _has_ahead(said: Said) -> bool:
    return bool(said.get(".nextn_predict_layers"))


def _softmax(said: Said) -> bool:
    """Tell DeepSeek V2, whose experts are chosen by softmax and have no biases."""
    return said.get(".expert_gating_func") in (None, 1) and not any(
        "exp_probs_b" in name for name in said.model.tensors
    )


#: Class of transformers -> how it spells; of an architecture's classes the first that fits is taken.
SPELLINGS: dict[str, Spelling] = {
    "MixtralForCausalLM": Spelling(
        "mixtral",
        "model.layers.*.block_sparse_moe.gate layers.*.feed_forward.experts.w1 layers.*.feed_forward.experts.w2 "
        "layers.*.feed_forward.experts.w3",
        otherwise=_NO_WINDOW,
        when=has("expert_count"),
    ),
    "MistralForCausalLM": Spelling("mistral", otherwise=_NO_WINDOW, when=_no_key_length),
    "LlamaForCausalLM": Spelling("llama", biases=("attention_bias", "mlp_bias")),
    "ArceeForCausalLM": Spelling("arcee", biases=("attention_bias", "mlp_bias")),
    "Ministral3ForCausalLM": Spelling(
        "ministral3",
        otherwise=_NO_WINDOW,
        derived=(d.temperature, d.as_parameters),
        when=has("attention.temperature_scale"),
    ),
    "Mistral3ForConditionalGeneration": Spelling(
        "mistral",
        otherwise=_NO_WINDOW,
        derived=(d.Tower({"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, **_PICTURE}),),
        renamed=((r"^", "language_model."),),
        inside="text_config",
        beside={"model_type": "mistral3"},
    ),
    "Qwen2ForCausalLM": Spelling("qwen2"),
    "Qwen3ForCausalLM": Spelling("qwen3", biases=_ATTENTION_BIAS),
    "Qwen2MoeForCausalLM": Spelling(
        "qwen2_moe", _QWEN2_SHARED, otherwise={"norm_topk_prob": False}, derived=(d.sparse_layers,)
    ),
    "Qwen3MoeForCausalLM": Spelling(
        "qwen3_moe", otherwise={"norm_topk_prob": True}, derived=(d.sparse_layers,), biases=_ATTENTION_BIAS
    ),
    "Qwen3VLForConditionalGeneration": replace(_VL, model_type="qwen3_vl_text", beside={"model_type": "qwen3_vl"}),
    "Qwen3VLMoeForConditionalGeneration": replace(
        _VL,
        model_type="qwen3_vl_moe_text",
        otherwise={"norm_topk_prob": True},
        derived=(d.sparse_layers, d.interleaved_sections, d.small_tower),
        fused=True,
        beside={"model_type": "qwen3_vl_moe"},
    ),
    "Qwen3NextForCausalLM": Spelling(
        "qwen3_next",
        f"{_LINEAR} {_QWEN2_SHARED} model.layers.*.linear_attn.in_proj_qkvz",
        otherwise={"norm_topk_prob": True, "mtp_num_hidden_layers": 0},
        keys=_LINEAR_KEYS,
        derived=(d.layers_ahead, d.linear_attention, d.rotary_part, d.sparse_layers),
        biases=_ATTENTION_BIAS,
    ),
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5MoeForConditionalGeneration": replace(
        _QWEN35,
        model_type="qwen3_5_moe_text",
        derived=(*_QWEN35.derived, d.small_tower),
        renamed=((r"^model\.", "model.language_model."),),
        inside="text_config",
        beside={"model_type": "qwen3_5_moe"},
    ),
    "GemmaForCausalLM": Spelling("gemma"),
    "Gemma2ForCausalLM": Spelling("gemma2", derived=(d.QueryScale(46),)),
    "Gemma3ForCausalLM": Spelling("gemma3_text", derived=(d.QueryScale(62),)),
    "Gemma4ForCausalLM": _GEMMA_4,
    "Gemma4AssistantForCausalLM": replace(
        _GEMMA_4,
        keys=_GEMMA_4.keys
        | {".nextn_predict_layers": "", ".embedding_length_out": "backbone_hidden_size", ".expert_count": ""},
        otherwise={"vocab_size_per_layer_input": 0, "moe_intermediate_size": None},
        inside="text_config",
        beside={"model_type": "gemma4_assistant"},
        note="a draft's table of clusters of tokens (masked_embedding), if it had one, is in no file",
    ),
    "PhiForCausalLM": Spelling(
        "phi",
        "model.final_layernorm model.layers.*.self_attn.dense model.layers.*.mlp.fc1 model.layers.*.mlp.fc2",
        derived=(d.rotary_part,),
    ),
    "Phi3ForCausalLM": Spelling("phi3", _FUSED, derived=(d.rotary_part, d.long_rope, d.window_or_none)),
    "PhimoeForCausalLM": Spelling(
        "phimoe",
        _SPARSE,
        derived=(d.long_rope, d.long_rope_scale, d.window_or_none, d.Flag("lm_head_bias", "output.bias")),
        biases=_ATTENTION_BIAS,
    ),
    "OlmoForCausalLM": Spelling("olmo"),
    "Olmo3ForCausalLM": Spelling("olmo3", derived=(d.kinds_of_layers,), when=has("attention.sliding_window")),
    "Olmo2ForCausalLM": Spelling("olmo2"),
    "OlmoeForCausalLM": Spelling("olmoe", otherwise={"norm_topk_prob": False}),
    "GraniteMoeHybridForCausalLM": Spelling(
        "granitemoehybrid",
        f"{_GRANITE} {_MAMBA}",
        otherwise={"num_local_experts": 0, "num_experts_per_tok": 0},
        keys=_MAMBA_KEYS,
        derived=(d.mamba, d.positions),
        fused=True,
        when=_granite_hybrid,
        archs=("granite", "granitemoe"),
    ),
    "BambaForCausalLM": Spelling(
        "bamba",
        f"model.final_layernorm model.layers.*.pre_ff_layernorm {_FEED_FORWARD} {_MAMBA}",
        keys={**_MAMBA_KEYS, ".rope.dimension_count": "attn_rotary_emb"},
        derived=(d.mamba, d.attention_indices),
    ),
    "GraniteForCausalLM": Spelling("granite", biases=("attention_bias", "mlp_bias")),
    "GraniteMoeSharedForCausalLM": Spelling(
        "granitemoeshared", _GRANITE, fused=True, when=has("expert_shared_feed_forward_length")
    ),
    "GraniteMoeForCausalLM": Spelling("granitemoe", _GRANITE, fused=True),
    "CohereForCausalLM": Spelling("cohere", derived=(d.has_head_norms,)),
    "Cohere2ForCausalLM": Spelling("cohere2"),
    "SmolLM3ForCausalLM": Spelling("smollm3", otherwise=_NO_WINDOW, biases=("attention_bias", "mlp_bias")),
    "SeedOssForCausalLM": Spelling("seed_oss", biases=_ATTENTION_BIAS),
    "ExaoneForCausalLM": Spelling(
        "exaone",
        "transformer.wte transformer.ln_f transformer.h.*.ln_1 transformer.h.*.ln_2 "
        "transformer.h.*.attn.attention.q_proj transformer.h.*.attn.attention.k_proj "
        "transformer.h.*.attn.attention.v_proj transformer.h.*.attn.attention.out_proj "
        "transformer.h.*.mlp.c_fc_0 transformer.h.*.mlp.c_fc_1 transformer.h.*.mlp.c_proj",
        keys={".block_count": "num_layers", ".attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
    ),
    "Exaone4ForCausalLM": Spelling(
        "exaone4",
        otherwise={**_NO_WINDOW, "sliding_window_pattern": None},
        derived=(d.kinds_of_layers, d.no_layer_slides),
        when=lambda said: not _has_ahead(said),
    ),
    "GPTBigCodeForCausalLM": Spelling(
        "gpt_bigcode",
        "transformer.wte transformer.wpe transformer.ln_f transformer.h.*.ln_1 transformer.h.*.ln_2 "
        "transformer.h.*.attn.c_attn transformer.h.*.attn.c_proj transformer.h.*.mlp.c_fc transformer.h.*.mlp.c_proj",
        otherwise={"multi_query": True},
        keys={".attention.head_count_kv": ""},
    ),
    "Starcoder2ForCausalLM": Spelling("starcoder2", "model.layers.*.mlp.c_fc model.layers.*.mlp.c_proj"),
    "StableLmForCausalLM": Spelling(
        "stablelm",
        "model.layers.*.self_attn.q_layernorm model.layers.*.self_attn.k_layernorm",
        derived=(
            d.rotary_part,
            d.Flag("qk_layernorm", "attn_q_norm.weight"),
            d.Flag("use_qkv_bias", "attn_q.bias"),
        ),
    ),
    "DeepseekV2ForCausalLM": Spelling(
        "deepseek_v2", otherwise=_LATENT, derived=(d.latent, d.greedy_groups), when=_softmax
    ),
    "Glm4MoeLiteForCausalLM": Spelling(
        "glm4_moe_lite",
        keys=_ROUTED,
        otherwise=_LATENT_V3,
        derived=(d.layers_ahead, d.latent, d.as_parameters),
        when=_has_ahead,
    ),
    "DeepseekV3ForCausalLM": Spelling("deepseek_v3", otherwise=_LATENT_V3, derived=(d.latent,)),
    "DeepseekV32ForCausalLM": Spelling(
        "deepseek_v32", keys=_ROUTED, otherwise=_LATENT_V3, derived=(d.layers_ahead, d.latent, d.as_parameters)
    ),
    "GlmMoeDsaForCausalLM": Spelling(
        "glm_moe_dsa",
        keys=_ROUTED,
        otherwise=_LATENT_V3,
        derived=(d.layers_ahead, d.latent, d.indexer, d.as_parameters),
    ),
    "Glm4ForCausalLM": Spelling(
        "glm4",
        f"{_FUSED} model.layers.*.post_self_attn_layernorm model.layers.*.post_mlp_layernorm",
        derived=(d.rotary_part,),
        biases=_ATTENTION_BIAS,
    ),
    "Glm4MoeForCausalLM": Spelling(
        "glm4_moe",
        derived=(d.layers_ahead, d.rotary_part, d.has_head_norms),
        biases=_ATTENTION_BIAS,
    ),
    "MiniMaxM2ForCausalLM": Spelling(
        "minimax_m2", _SPARSE, otherwise={"use_qk_norm": True, "use_routing_bias": True, "qk_norm_type": "per_layer"}
    ),
    "BailingMoeV2ForCausalLM": Spelling(
        "bailing_moe",
        "model.word_embeddings model.layers.*.attention.query_key_value model.layers.*.attention.dense "
        "model.layers.*.attention.query_layernorm model.layers.*.attention.key_layernorm "
        "model.layers.*.mlp.gate.expert_bias model.layers.*.final_layernorm",
        keys={".expert_count": "num_experts", ".expert_shared_count": "num_shared_experts"},
        otherwise={"moe_router_enable_expert_bias": True},
        derived=(d.layers_ahead, d.rotary_part, d.shared_experts, d.has_head_norms),
    ),
    "Dots1ForCausalLM": Spelling("dots1"),
    "HunYuanMoEV1ForCausalLM": Spelling(
        "hunyuan_v1_moe",
        f"{_HUNYUAN} model.layers.*.mlp.gate.wg "
        + " ".join(f"model.layers.*.mlp.shared_mlp.{w}_proj" for w in ("gate", "up", "down")),
        keys={
            **{".expert_count": "num_experts", ".expert_used_count": "moe_topk"},
            **{".expert_shared_count": "num_shared_expert", ".expert_feed_forward_length": "moe_intermediate_size"},
        },
        derived=(d.scaled_base, d.expert_lists),
        biases=_ATTENTION_BIAS,
    ),
    "HunYuanDenseV1ForCausalLM": Spelling(
        "hunyuan_v1_dense", _HUNYUAN, derived=(d.scaled_base,), biases=_ATTENTION_BIAS
    ),
    "Ernie4_5ForCausalLM": Spelling("ernie4_5", derived=(d.Flag("use_bias", "attn_q.bias"),)),
    "Ernie4_5_MoeForCausalLM": Spelling(
        "ernie4_5_moe",
        "model.layers.*.mlp.moe_statics.e_score_correction",
        keys={
            **{".expert_count": "moe_num_experts", ".expert_used_count": "moe_k"},
            **{".leading_dense_block_count": "moe_layer_start_index", ".expert_shared_count": "moe_num_shared_experts"},
        },
        derived=(d.Flag("use_bias", "attn_q.bias"),),
    ),
    "GptOssForCausalLM": Spelling(
        "gpt_oss",
        "model.layers.*.mlp.router",
        derived=(d.kinds_of_layers, d.untruncated),
        biases=_ATTENTION_BIAS,
        fused=True,
    ),
    "Llama4ForCausalLM": Spelling(
        "llama4_text",
        " ".join(
            f"model.layers.*.feed_forward.{part}{w}_proj"
            for part in ("", "experts.", "shared_expert.")
            for w in ("gate", "up", "down")
        )
        + " model.layers.*.feed_forward.router",
        keys={
            **{".feed_forward_length": "intermediate_size_mlp", ".expert_feed_forward_length": "intermediate_size"},
        },
        derived=(d.only_full_attention, d.kq_norm),
        fused=True,
    ),
    **OLDER,
    **NAMED,
    **HYBRIDS,
    **MIXTURES,
    **SEEING,
    **RWKV,
    **TALKIE,
    **ENCODERS,
}


def of_architecture(arch: object) -> list[str]:
    """Return the classes that files of an architecture may be of."""
    return [name for name, spelling in SPELLINGS.items() if arch in (ROWS[name].arch, *spelling.archs)]


def find_class(said: Said, name: str | None = None) -> tuple[str, Architecture, Spelling]:
    """Return the class of a file, its row and how it spells.

    Args:
        said: what the file says.
        name: the class, if it was given.

    Raises:
        TypeNotSupported: no class of this architecture can be exported, or not to the one given.
    """
    known = of_architecture(said.arch)
    if name is not None and name not in known:
        like = f": there are {', '.join(known)}" if known else ""
        raise TypeNotSupported(f"{said.where}: {short(said.arch)} is not exported as {short(name)}{like}")
    found = name or next((each for each in known if SPELLINGS[each].when(said)), None)
    if found is None:
        raise TypeNotSupported(
            f"{said.where}: the architecture {short(said.arch)} is not exported by this version: "
            "`quantkit export --list` shows all that are"
        )
    if isinstance(said.get(".expert_used_count"), list) and SPELLINGS[found].keys.get(".expert_used_count") != "":
        raise TypeNotSupported(
            f"{said.where}: how many experts a token has differs from layer to layer, which config.json of {found} "
            "cannot say"
        )
    return found, replace(ROWS[found], arch=said.arch), SPELLINGS[found]


def spelled_kinds(row: Architecture, spelling: Spelling) -> dict[str, str]:
    """Return the name in a checkpoint of each kind of tensor of an architecture, ``*`` for the layer.

    Those that the name map cannot tell are there with the suffix that they have in a file.
    """
    wanted = spelling.names.split()
    found = {f"{rule.kind}{rule.suffix}": rule.name for rule in row.rules if isinstance(rule, Named)}
    for kind in KINDS[row.arch].split():
        names = PATTERNS.get(kind, "").split()
        if names:
            found[kind.partition(":")[0]] = min(names, key=lambda name: _rank(name, wanted))
    return found | spelling.kinds


def _rank(name: str, wanted: list[str]) -> tuple[bool, bool, int]:
    order = next((i for i, prefix in enumerate(_ORDER) if name.startswith(prefix)), len(_ORDER))
    return name not in wanted, name not in _USUAL, order

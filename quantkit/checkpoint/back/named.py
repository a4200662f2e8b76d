"""More rows of the table of classes (``classes``): of those that are converted, and not run by model/.

Of remote code there are no facts of transformers; what a class computes is what llama.cpp (b11434, src/models/*.cpp)
does of its files.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.back import derived as d
from quantkit.checkpoint.back.spelling import Spelling, has
from quantkit.checkpoint.families.bitnet import COMPUTED

_BLOCK = "model.layers.*."
_HYBRID_NAMES = (
    "model.embedding_norm "
    + " ".join(f"{_BLOCK}feed_forward.{name}" for name in ("w1", "w2", "w3", "gate", "expert_bias"))
    + f" {_BLOCK}ffn_norm {_BLOCK}operator_norm "
    + " ".join(f"{_BLOCK}self_attn.{name}" for name in ("q_layernorm", "k_layernorm", "out_proj"))
    + " "
    + " ".join(f"layers.*.feed_forward.experts.{name}" for name in ("w1", "w2", "w3"))
)
_GPT_2_NAMES = "transformer.wte transformer.wpe transformer.ln_f " + " ".join(
    f"transformer.h.*.{name}" for name in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
)
_PICTURE = {"image_size": 28, "patch_size": 14}
_FIRST = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "input_layernorm")
_BIASES = ("attention_bias", "mlp_bias")
_NO_GATING = {".expert_gating_func": ""}
_QWEN_2_VL = Spelling("qwen2_vl", derived=(d.tower_of_two,))
_EXAONE_TOWER = d.Tower(
    {"depth": 1, "num_heads": 2, "num_key_value_heads": 2, "fullatt_block_indexes": [0]}, "out_hidden_size"
)
_GRANITE_SWA = Spelling("granite_swa", derived=(d.kinds_of_layers, d.rope_layers))
_LFM_2 = Spelling("lfm2", _HYBRID_NAMES, derived=(d.short_convolutions,))
_MAMBA = Spelling(
    "mamba",
    "backbone.embeddings backbone.norm_f backbone.layers.*.norm "
    + " ".join(
        f"backbone.layers.*.mixer.{name}"
        for name in ("A_log", "D", "conv1d", "dt_proj", "in_proj", "out_proj", "x_proj", "norm")
    ),
    keys={
        **{".context_length": "", ".feed_forward_length": "", ".attention.head_count": ""},
        **{".ssm.conv_kernel": "conv_kernel", ".ssm.state_size": "state_size"},
        **{".ssm.time_step_rank": "time_step_rank", ".attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
    },
    derived=(d.only_mamba,),
)

_MINIMAX_M3 = Spelling(
    "minimax_m3",
    " ".join(
        f"{_BLOCK}{name}"
        for name in (
            *(f"self_attn.index_{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")),
            *(f"block_sparse_moe.shared_experts.{w}_proj" for w in ("gate", "up", "down")),
            *(f"block_sparse_moe.{each}" for each in ("gate", "e_score_correction")),
            *(f"block_sparse_moe.experts.{w}" for w in ("w1", "w2", "w3")),
        )
    ),
    keys={
        **{".feed_forward_length": "dense_intermediate_size", ".leading_dense_block_count": ""},
        ".expert_weights_norm": "",
    },
    otherwise={"use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True, "qk_norm_type": "per_head"},
    derived=(d.sparse_attention,),
)

#: Class of transformers -> how it spells.
NAMED: dict[str, Spelling] = {
    "DeepseekForCausalLM": Spelling("deepseek", otherwise={"norm_topk_prob": False}),
    "BailingMoeForCausalLM": Spelling(
        "bailing_moe",
        f"{_BLOCK}attention.dense model.word_embeddings",
        keys={".expert_shared_count": "num_shared_experts"},
        otherwise={"norm_head": False},
    ),
    "Cohere2MoeForCausalLM": Spelling(
        "cohere2_moe",
        keys={
            **{".feed_forward_length": "prefix_dense_intermediate_size", ".expert_count": "num_experts"},
            **{".expert_feed_forward_length": "intermediate_size", ".expert_shared_count": "num_shared_experts"},
            **{".leading_dense_block_count": "", ".expert_gating_func": "expert_selection_fn"},
            ".attention.key_length": "head_dim",
        },
        derived=(d.layers_ahead, d.kinds_of_layers, d.kinds_of_feed_forward, d.as_parameters),
    ),
    "ExaoneMoeForCausalLM": Spelling(
        "exaone_moe",
        f"{_BLOCK}mlp.e_score_correction",
        keys={".expert_count": "num_experts", ".expert_shared_count": "num_shared_experts"},
        derived=(d.layers_ahead, d.kinds_of_layers, d.kinds_of_feed_forward, d.as_parameters),
    ),
    "Exaone4_5_ForConditionalGeneration": Spelling(
        "exaone4",
        otherwise={"sliding_window": None, "sliding_window_pattern": None, "mtp_share_layers": False},
        derived=(d.layers_ahead, d.kinds_of_layers, d.no_layer_slides, _EXAONE_TOWER),
        renamed=((r"^model\.", "model.language_model."),),
        inside="text_config",
        beside={"model_type": "exaone4_5"},
        when=has("nextn_predict_layers"),
    ),
    "GroveMoeForCausalLM": Spelling(
        "grove_moe", keys={".expert_count": "num_experts"}, otherwise={"norm_topk_prob": True}
    ),
    "AfmoeForCausalLM": Spelling(
        "afmoe",
        f"{_BLOCK}post_mlp_layernorm {_BLOCK}pre_mlp_layernorm {_BLOCK}mlp.expert_bias {_BLOCK}mlp.router.gate",
        keys={".expert_count": "num_experts", ".expert_gating_func": "score_func"},
        # llama.cpp scales embeddings, and has windows but in every fourth layer.
        otherwise={"mup_enabled": True, "global_attn_every_n_layers": 4},
        derived=(d.EveryFourth(last=True), d.as_parameters),
    ),
    "HYV3ForCausalLM": Spelling(
        "hy_v3",
        f"{_BLOCK}mlp.expert_bias {_BLOCK}mlp.router.gate "
        + " ".join(f"{_BLOCK}mlp.shared_mlp.{w}_proj" for w in ("gate", "up", "down")),
        keys={
            **{".expert_weights_norm": "route_norm", ".expert_weights_scale": "router_scaling_factor"},
            **{".expert_count": "num_experts", ".expert_shared_count": "num_shared_experts", **_NO_GATING},
        },
        derived=(d.layers_ahead, d.kinds_of_feed_forward, d.shared_count, d.as_parameters),
    ),
    "SmallThinkerForCausalLM": Spelling(
        "smallthinker",
        " ".join(
            f"{_BLOCK}block_sparse_moe.{name}"
            for name in ("primary_router", "experts.down", "experts.gate", "experts.up")
        ),
        keys={
            **{".expert_count": "moe_num_primary_experts", ".expert_used_count": "moe_num_active_primary_experts"},
            **{".expert_feed_forward_length": "moe_ffn_hidden_size", ".feed_forward_length": "", **_NO_GATING},
            ".attention.sliding_window": "sliding_window_size",
        },
        derived=(d.window_layout,),
    ),
    "MiMoV2FlashForCausalLM": Spelling(
        "mimo_v2_flash",
        f"{_BLOCK}self_attn.attention_sink_bias",
        keys={
            **{".attention.layer_norm_rms_epsilon": "layernorm_epsilon", ".rope.freq_base_swa": "swa_rope_theta"},
            **{".attention.value_scale": "attention_value_scale", ".nextn_predict_layers": ""},
            ".expert_count": "n_routed_experts",
        },
        otherwise={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
        derived=(d.layers_ahead, d.hybrid_windows, d.rotary_part),
        renamed=((r"(\.attention_sink_bias)\.weight$", r"\1"),),
    ),
    "GraniteMoeSWAForCausalLM": replace(
        _GRANITE_SWA,
        model_type="granitemoe_swa",
        names=f"{_BLOCK}block_sparse_moe.router {_BLOCK}mlp.experts.gate_up_proj",
        when=has("expert_count"),
    ),
    "GraniteSWAForCausalLM": _GRANITE_SWA,
    "LagunaForCausalLM": Spelling(
        "laguna",
        f"{_BLOCK}self_attn.g_proj {_BLOCK}mlp.experts.e_score_correction "
        + " ".join(f"{_BLOCK}mlp.shared_expert.{w}_proj" for w in ("gate", "up", "down")),
        keys={".leading_dense_block_count": "", ".expert_weights_norm": "", ".expert_count": "num_experts"}
        | _NO_GATING,
        derived=(d.EveryFourth(), d.kinds_of_feed_forward, d.heads_per_layer, d.two_ropes, d.two_ends),
    ),
    "Qwen2VLForConditionalGeneration": _QWEN_2_VL,
    "Qwen2_5_VLForConditionalGeneration": replace(_QWEN_2_VL, model_type="qwen2_5_vl"),
    "MellumForCausalLM": Spelling(
        "mellum",
        otherwise={"norm_topk_prob": True},
        derived=(d.kinds_of_layers, d.kinds_of_feed_forward, d.two_ropes),
    ),
    "MaincoderForCausalLM": Spelling("maincoder"),
    "PanguEmbeddedForCausalLM": Spelling("PanguEmbedded"),
    "GlmForCausalLM": Spelling(
        "glm",
        f"{_BLOCK}mlp.gate_up_proj",
        keys={".attention.layer_norm_rms_epsilon": "rms_norm_eps"},
        derived=(d.chat_rope,),
        biases=("attention_bias",),
    ),
    "Lfm2BidirectionalForMaskedLM": replace(
        _LFM_2,
        renamed=((r"^model\.", "lfm2."),),
        when=lambda said: said.get(".attention.causal") is False and said.get(".pooling_type") is None,
    ),
    "Lfm2BidirectionalModel": replace(
        _LFM_2, renamed=((r"^model\.", ""),), when=lambda said: said.get(".attention.causal") is False
    ),
    "Lfm2Model": replace(_LFM_2, renamed=((r"^model\.", ""),), when=has("pooling_type")),
    "Lfm2ForCausalLM": _LFM_2,
    "Lfm2MoeForCausalLM": Spelling(
        "lfm2_moe",
        _HYBRID_NAMES,
        keys={".expert_count": "num_experts", **_NO_GATING},
        otherwise={"norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        derived=(d.short_convolutions,),
    ),
    "NemotronForCausalLM": Spelling(
        "nemotron",
        keys={".attention.layer_norm_epsilon": "norm_eps", ".attention.layer_norm_rms_epsilon": "norm_eps"},
        derived=(d.rotary_part,),
        biases=_BIASES,
    ),
    "Jais2ForCausalLM": Spelling("jais2", derived=(d.as_parameters,), biases=_BIASES),
    "NanbeigeForCausalLM": Spelling(
        "nanbeige", keys={".num_loops": "num_loops", ".skip_loop_final_norm": "skip_loop_final_norm"}
    ),
    "RND1": Spelling("rnd1", keys={".expert_count": "num_experts"}, derived=(d.mask_token,)),
    "LLaDAMoEModelLM": Spelling("llada_moe", keys={".expert_count": "num_experts"}),
    "PLMForCausalLM": Spelling("plm", derived=(d.latent_heads,)),
    "Spark2_5ForCausalLM": Spelling(
        "spark2_5",
        f"{_BLOCK}self_attn.g_proj {_BLOCK}self_attn.qkv_proj",
        otherwise={"gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True, "hidden_act": "gelu"},
        derived=(d.kinds_of_layers, d.two_ropes),
    ),
    "GPT2LMHeadModel": Spelling(
        "gpt2", _GPT_2_NAMES, keys={".context_length": "n_ctx", ".feed_forward_length": ""}, derived=(d.table_length,)
    ),
    "CodeShellForCausalLM": Spelling(
        "codeshell",
        _GPT_2_NAMES,
        keys={
            **{".context_length": "n_positions", ".feed_forward_length": "", ".block_count": "n_layer"},
            **{".attention.head_count": "n_head", ".attention.head_count_kv": "num_query_groups"},
            **{".embedding_length": "n_embd", ".attention.layer_norm_epsilon": "layer_norm_epsilon"},
        },
    ),
    "GPTNeoXForCausalLM": Spelling(
        "gpt_neox",
        "embed_out gpt_neox.embed_in gpt_neox.final_layer_norm gpt_neox.layers.*.post_attention_layernorm "
        + " ".join(f"gpt_neox.layers.*.{name}" for name in _FIRST),
        keys={".attention.layer_norm_epsilon": "layer_norm_eps"},
        derived=(d.turned_part,),
    ),
    "BloomForCausalLM": Spelling(
        "bloom",
        "word_embeddings word_embeddings_layernorm ln_f h.*.post_attention_layernorm "
        + " ".join(f"h.*.{name.replace('attention.', 'self_attention.')}" for name in _FIRST),
        keys={
            **{".context_length": "seq_length", ".feed_forward_length": "", ".attention.head_count_kv": ""},
            **{".embedding_length": "hidden_size", ".block_count": "n_layer", ".attention.head_count": "n_head"},
            ".attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        renamed=((r"^(?!lm_head)", "transformer."),),
    ),
    "MiniMaxM3SparseForConditionalGeneration": replace(
        _MINIMAX_M3,
        model_type="minimax_m3_vl_text",
        derived=(*_MINIMAX_M3.derived, d.Tower({"num_hidden_layers": 1, "num_attention_heads": 2, **_PICTURE})),
        renamed=((r"^", "language_model."),),
        inside="text_config",
        beside={"model_type": "minimax_m3_vl"},
    ),
    "MiniMaxM3SparseForCausalLM": _MINIMAX_M3,
    "ApertusForCausalLM": Spelling(
        "apertus",
        f"{_BLOCK}attention_layernorm {_BLOCK}feedforward_layernorm",
        biases=("attention_bias",),
        tensors=d.activations,
    ),
    "Gemma3nForCausalLM": Spelling(
        "gemma3n_text",
        f"{_BLOCK}pre_feedforward_layernorm {_BLOCK}post_attention_layernorm",
        keys={".attention.shared_kv_layers": "num_kv_shared_layers", ".altup.num_inputs": "altup_num_inputs"}
        | {".altup.active_idx": "altup_active_idx"},
        derived=(d.altup,),
    ),
    "BitNetForCausalLM": Spelling(
        "bitnet",
        otherwise={COMPUTED: True},
        note="BitNet's weights are written as they are computed with, and `quantkit convert` leaves them so; to "
        "transformers they are those of a plain model, whose activations are not rounded",
    ),
    "PaddleOCRVLForConditionalGeneration": Spelling(
        "paddleocr_vl",
        derived=(d.Tower({"num_hidden_layers": 1, "num_attention_heads": 2, **_PICTURE}),),
    ),
    # Of those that have norms of their own for attention and feed forward.
    "FalconForCausalLM": Spelling(
        "falcon",
        "transformer.word_embeddings transformer.ln_f transformer.h.*.ln_attn transformer.h.*.ln_mlp "
        + " ".join(f"transformer.h.*.{name.replace('attention.', 'self_attention.')}" for name in _FIRST[:-1]),
        keys={
            **{".context_length": "max_position_embeddings", ".feed_forward_length": ""},
            **{".attention.head_count_kv": "num_kv_heads", ".block_count": "num_hidden_layers"},
            **{".embedding_length": "hidden_size", ".attention.head_count": "num_attention_heads"},
            ".attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        otherwise={
            **{"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2, "parallel_attn": True, "alibi": False},
            **{"multi_query": False, "bias": False},
        },
        derived=(d.two_norms,),
    ),
    "FalconMambaForCausalLM": replace(_MAMBA, model_type="falcon_mamba", when=has("ssm.dt_b_c_rms")),
    "MambaForCausalLM": _MAMBA,
    "Mamba2ForCausalLM": replace(
        _MAMBA, model_type="mamba2", keys={**_MAMBA.keys, ".ssm.group_count": "n_groups", ".ssm.time_step_rank": ""}
    ),
    "OrionForCausalLM": Spelling("orion", keys={".attention.layer_norm_epsilon": "rms_norm_eps"}),
    "MiniCPMForCausalLM": Spelling("minicpm", derived=(d.long_rope, d.unscaled_rope, d.scales)),
    "MiniCPM3ForCausalLM": Spelling(
        "minicpm3",
        # What llama.cpp has in its code.
        otherwise={"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4},
        derived=(d.long_rope, d.unscaled_rope, d.latent_heads),
    ),
}

"""What transformers' configuration classes fill in where config.json says nothing.

Facts of transformers 4.57.6 (models/*/configuration_*.py), the version that llama.cpp b11434 pins: only values that
convert_hf_to_gguf.py reads. Later versions have other defaults, so the keys of a sparse config.json depend on the
version that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

#: Of every class: the last resort for the context length.
_COMMON: Json = {"max_length": 20, "tie_word_embeddings": True, "is_decoder": False}

_DENSE: Json = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    **{"rope_scaling": None, "tie_word_embeddings": False},
}


def _without(key: str, values: Json) -> Json:
    return {k: v for k, v in values.items() if k != key}


_QWEN: Json = {
    **_DENSE,
    **{"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32},
}
_GEMMA: Json = {
    **_without("rope_scaling", _DENSE),
    **{"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192},
    "tie_word_embeddings": True,
}
_GEMMA2: Json = {
    **_GEMMA,
    **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "sliding_window": 4096, "layer_types": None},
}
_OLMO: Json = {
    **_without("rms_norm_eps", _DENSE),
    **{"vocab_size": 50304, "num_key_value_heads": None},
}
_GRANITE: Json = {
    **_DENSE,
    **{"num_key_value_heads": None, "embedding_multiplier": 1.0, "logits_scaling": 1.0},
    **{"residual_multiplier": 1.0, "attention_multiplier": 1.0},
}
_COHERE: Json = {
    **_without("rms_norm_eps", _DENSE),
    **{"vocab_size": 256000, "max_position_embeddings": 8192, "hidden_size": 8192, "intermediate_size": 22528},
    **{"num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": None, "logit_scale": 0.0625},
    **{"layer_norm_eps": 1e-5, "tie_word_embeddings": True},
}
_GLM: Json = {
    **{"vocab_size": 151552, "hidden_size": 4096, "max_position_embeddings": 131072, "rope_theta": 10000.0},
    **{"rope_scaling": None, "tie_word_embeddings": False},
}
_GLM_MOE: Json = {
    **_GLM,
    **{"intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8},
    **{"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408, "num_experts_per_tok": 8},
    **{"n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "norm_topk_prob": True},
}
_HUNYUAN: Json = {
    **_DENSE,
    **{"vocab_size": 290943, "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-5, "pad_token_id": 0},
}
_ERNIE: Json = {
    **{"vocab_size": 103424, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    **{"rope_scaling": None, "tie_word_embeddings": True},
}

#: Model type -> key -> value.
DEFAULTS: dict[str, Json] = {
    # What Grok 2 says it is.
    "git": {
        **{"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12},
        **{"intermediate_size": 3072, "max_position_embeddings": 1024, "layer_norm_eps": 1e-12},
    },
    "deepseek_v2": {
        **_DENSE,
        **{"num_key_value_heads": None, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536},
        **{"n_group": None, "n_routed_experts": 64, "n_shared_experts": 2, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "routed_scaling_factor": 1.0, "topk_group": None, "v_head_dim": 128},
        **{"num_experts_per_tok": None, "norm_topk_prob": False, "moe_intermediate_size": 1407},
    },
    "deepseek_v3": {
        **_DENSE,
        **{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048},
        **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1},
        **{"n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536},
        **{"qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4},
        **{"num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True},
        "max_position_embeddings": 4096,
    },
    "dots1": {
        **_DENSE,
        **{"vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "moe_intermediate_size": 1408},
        **{"num_hidden_layers": 62, "num_key_value_heads": 32, "n_shared_experts": None, "n_routed_experts": None},
        **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": None, "first_k_dense_replace": 0},
        **{"norm_topk_prob": False, "routed_scaling_factor": 1.0, "sliding_window": 4096},
    },
    "ernie4_5": {
        **_ERNIE,
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16},
        **{"num_key_value_heads": 2, "head_dim": 128},
    },
    "ernie4_5_moe": {
        **_ERNIE,
        **{"hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20},
        **{"num_key_value_heads": 4, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64},
        **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1},
    },
    "glm4": {
        **_GLM,
        **{"intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2},
        **{"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-07},
    },
    "glm4_moe": _GLM_MOE,
    "glm4v": {},
    "glm4v_text": {
        **_GLM,
        **{"intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2},
        **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    },
    "glm4v_moe": {},
    "glm4v_moe_text": {**_GLM_MOE, "vocab_size": 151424, "max_position_embeddings": 65536},
    "gpt_oss": {
        **{"num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201088, "hidden_size": 2880},
        **{"intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"sliding_window": 128, "rope_theta": 150000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        **{"num_experts_per_tok": 4, "tie_word_embeddings": False},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    },
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": {**_HUNYUAN, "num_experts": 1, "moe_topk": 1},
    "llama4": {"tie_word_embeddings": False},
    "llama4_text": {
        **{"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
        **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
        **{"max_position_embeddings": 4096 * 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        **{"rope_theta": 500000, "rope_scaling": None, "num_experts_per_tok": 1, "num_local_experts": 16},
        **{"interleave_moe_layer_step": 1, "no_rope_layer_interval": 4},
    },
    "mistral3": {},
    "llama": {**_DENSE, "num_key_value_heads": None, "head_dim": None},
    "mistral": {
        **_DENSE,
        **{"intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
        "max_position_embeddings": 4096 * 32,
    },
    "mixtral": {
        **_DENSE,
        **{"intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": None, "sliding_window": None},
        **{"max_position_embeddings": 4096 * 32, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        **{"num_experts_per_tok": 2, "num_local_experts": 8},
    },
    "qwen2": _QWEN,
    "qwen2_moe": {
        **_QWEN,
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        **{"shared_expert_intermediate_size": 5632, "norm_topk_prob": False},
    },
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN,
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
    },
    "qwen3_next": {
        **_QWEN,
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48, "num_attention_heads": 16},
        **{"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "layer_types": None},
        **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    },
    "qwen3_vl_text": {**_QWEN, "head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 5e6},
    "qwen3_vl_moe_text": {
        **_QWEN,
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "head_dim": None, "max_position_embeddings": 128000, "rope_theta": 5e6},
        **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    },
    "qwen3_vl": {"tie_word_embeddings": False},
    "qwen3_vl_moe": {"tie_word_embeddings": False},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA2, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": {
        **_GEMMA2,
        **{"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        **{"final_logit_softcapping": None, "attn_logit_softcapping": None, "rope_scaling": None},
    },
    "gemma3": {},
    "phi": {
        **_without("rms_norm_eps", _DENSE),
        **{"vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24},
        **{"num_key_value_heads": None, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    },
    "phi3": {
        **_DENSE,
        **{"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_key_value_heads": None},
        **{"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        **{"partial_rotary_factor": 1.0, "sliding_window": None},
    },
    "phimoe": {
        **_DENSE,
        **{"vocab_size": 32064, "intermediate_size": 6400, "num_key_value_heads": 8, "sliding_window": None},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        **{"num_experts_per_tok": 2, "num_local_experts": 16},
    },
    "olmo": {**_OLMO, "clip_qkv": None},
    "olmo2": {**_OLMO, "rms_norm_eps": 1e-5},
    "olmo3": {**_OLMO, "rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": None},
    "olmoe": {
        **_OLMO,
        **{"max_position_embeddings": 4096, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16},
        **{"num_attention_heads": 16, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64},
    },
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoeshared": {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
    "cohere": _COHERE,
    "cohere2": {**_COHERE, "sliding_window": 4096, "layer_types": None},
    "arcee": {
        **_DENSE,
        **{"max_position_embeddings": 4096, "hidden_size": 2560, "intermediate_size": 18432, "rms_norm_eps": 1e-5},
        **{"num_key_value_heads": None, "head_dim": None},
    },
    "gpt_bigcode": {
        **{"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None},
        "layer_norm_epsilon": 1e-5,
    },
    "smollm3": {
        **_DENSE,
        **{"vocab_size": 128256, "max_position_embeddings": 32768, "hidden_size": 2048, "num_hidden_layers": 36},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "rope_theta": 2e6, "sliding_window": None},
        "tie_word_embeddings": True,
    },
    "seed_oss": {
        **_DENSE,
        **{"vocab_size": 155136, "max_position_embeddings": 524288, "intermediate_size": 27648},
        **{"num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128},
    },
    "exaone4": {
        **_DENSE,
        **{"vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
        **{"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
    },
    "starcoder2": {
        **_without("rms_norm_eps", _DENSE),
        **{"vocab_size": 49152, "max_position_embeddings": 4096, "hidden_size": 3072, "intermediate_size": 12288},
        **{"num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2, "norm_epsilon": 1e-5},
        **{"sliding_window": None, "tie_word_embeddings": True},
    },
    "stablelm": {
        **_without("rms_norm_eps", _DENSE),
        **{"vocab_size": 50304, "max_position_embeddings": 4096, "hidden_size": 2560, "intermediate_size": 6912},
        **{"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "use_parallel_residual": False},
        "partial_rotary_factor": 0.25,
    },
    "bitnet": {
        **_without("rope_scaling", _DENSE),
        **{"vocab_size": 128256, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30},
        **{"num_attention_heads": 20, "num_key_value_heads": 5, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    },
}

_QWEN2_VL: Json = {
    **_QWEN,
    **{"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
}
_BERT: Json = {
    **{"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12},
    "pad_token_id": 0,
}
_T5: Json = {
    **{"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6},
    **{"num_heads": 8, "relative_attention_num_buckets": 32, "layer_norm_epsilon": 1e-6, "pad_token_id": 0},
    **{"eos_token_id": 1},
}
_MT5: Json = _T5 | {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6}
DEFAULTS |= {
    "jamba": {
        **{"vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262144},
        **{"rms_norm_eps": 1e-6, "num_experts_per_tok": 2, "num_experts": 16, "expert_layer_period": 2},
        **{"expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16},
        **{"mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto"},
    },
    "llava": {},
    "janus": {},
    "chameleon": {
        **{"vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096},
        **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "swin_norm": False},
    },
    "dbrx": {
        **{"d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048, "vocab_size": 32000},
    },
    "voxtral": {},
    "gpt2": {
        **{"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None},
        "layer_norm_epsilon": 1e-5,
    },
    "gpt_neox": {
        **{"vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64},
        **{"intermediate_size": 24576, "rotary_pct": 0.25, "rotary_emb_base": 10000, "max_position_embeddings": 2048},
        **{"layer_norm_eps": 1e-5, "use_parallel_residual": True, "rope_scaling": None},
    },
    "bloom": {
        **{"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5},
    },
    "falcon": {
        **{"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71},
        **{"layer_norm_epsilon": 1e-5, "num_kv_heads": None, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    },
    "bert": _BERT,
    "distilbert": {
        **{"vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12, "pad_token_id": 0},
        "max_position_embeddings": 512,
    },
    "roberta": _BERT | {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "xlm-roberta": _BERT | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "camembert": _BERT | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "t5": _T5,
    **dict.fromkeys(("mt5", "umt5"), _MT5),
    "mpt": {
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "max_seq_len": 2048,
        "vocab_size": 50368,
        "attn_config": {},
    },
    "modernbert": {
        **{"vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22},
        **{"num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192, "norm_eps": 1e-5},
        **{"global_rope_theta": 160000.0, "global_attn_every_n_layers": 3, "local_attention": 128},
        **{"local_rope_theta": 10000.0, "classifier_pooling": "cls"},
    },
    "qwen2_vl": {},
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": {},
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_omni_moe": {},
    "qwen3_omni_moe_thinker": {},
    "qwen3_omni_moe_text": {
        **_DENSE,
        **{"vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18944, "num_hidden_layers": 28},
        **{"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768},
        **{"rope_theta": 1000000.0, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128},
        **{"norm_topk_prob": True, "sliding_window": None},
    },
    "glm": {
        **_GLM,
        **{"intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2},
        **{"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-07},
    },
    "lfm2": {
        **_without("rms_norm_eps", _DENSE),
        **{"vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 128000},
        **{"rope_theta": 1000000.0, "norm_eps": 1e-5, "num_key_value_heads": 8, "conv_L_cache": 3},
        **{"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
        **{"tie_word_embeddings": True, "layer_types": None},
    },
    "nemotron": {
        **_without("rms_norm_eps", _without("rope_scaling", _DENSE)),
        **{"vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48},
        **{"head_dim": None, "num_key_value_heads": None, "max_position_embeddings": 4096, "norm_eps": 1e-5},
        "partial_rotary_factor": 0.5,
    },
    "apertus": {
        **_DENSE,
        **{"vocab_size": 131072, "intermediate_size": 14336, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5},
        **{"rope_theta": 12000000.0, "num_key_value_heads": None},
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8192,
        },
    },
}


def _heads_as_queries(values: Json) -> None:
    """Of a class with num_key_value_heads null: as many as there are heads."""
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")


def _divided_head(values: Json) -> None:
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if values.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads:
        values["head_dim"] = width // heads


def _no_window(values: Json) -> None:
    if "use_sliding_window" in values and not values["use_sliding_window"]:
        values["sliding_window"] = None
    values.setdefault("sliding_window", None)


def _unnamed_head(values: Json) -> None:
    """Of a class that divides heads itself, but keeps what it is given, null also."""
    if "head_dim" not in values:
        _divided_head(values)


@dataclass(frozen=True)
class _Kinds:
    """Of a class with layer_types null: every ``period``-th layer attends to everything, others do what ``other`` says.

    ``key`` of the configuration may say another period.
    """

    period: int
    other: str = "sliding_attention"
    key: str = ""

    def __call__(self, values: Json) -> None:
        layers, period = values.get("num_hidden_layers"), values.get(self.key, self.period)
        if values.get("layer_types") is not None or not isinstance(layers, int) or not 0 <= layers < 1 << 16:
            return
        full = isinstance(period, int) and period or layers + 1
        values["layer_types"] = [self.other if (i + 1) % full else "full_attention" for i in range(layers)]


def _longrope(values: Json) -> None:
    """Phi 3's rope_scaling is of the kind longrope, also where it is called su or yarn."""
    rope = values.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("type") in ("su", "yarn"):
        values["rope_scaling"] = {**rope, "type": "longrope"}


def _named_rope(values: Json) -> None:
    """Kinds of rope were called type before they were called rope_type."""
    rope = values.get("rope_scaling")
    if isinstance(rope, dict) and "type" in rope:
        values["rope_scaling"] = {**rope, "rope_type": rope["type"]}


def _latent_head(values: Json) -> None:
    values["head_dim"] = values["qk_rope_head_dim"]


def _chunked_layers(values: Json) -> None:
    """Of Llama 4: layers attend to chunks, but where rope is left out."""
    rope, interval, n = values.get("no_rope_layers"), values["no_rope_layer_interval"], values["num_hidden_layers"]
    if not rope and isinstance(n, int) and isinstance(interval, int) and interval and n < 1 << 16:
        rope = [int((i + 1) % interval != 0) for i in range(n)]
    if values.get("layer_types") is None and isinstance(rope, list):
        values["layer_types"] = ["chunked_attention" if each else "full_attention" for each in rope]


def _all_keys(values: Json) -> None:
    """Falcon: as many heads of keys as of queries, unless it says otherwise; the old name of its width counts."""
    values["hidden_size"] = values.get("n_embed") or values["hidden_size"]
    if values.get("num_kv_heads") is None:
        values["num_kv_heads"] = values.get("num_attention_heads")


def _time_steps(values: Json) -> None:
    """Jamba's time steps have a sixteenth of the width, unless it says how many."""
    if values.get("mamba_dt_rank") == "auto":
        values["mamba_dt_rank"] = -(values["hidden_size"] // -16)


def _old_width(values: Json) -> None:
    """BLOOM's width had another name."""
    values["hidden_size"] = values.get("n_embed") or values["hidden_size"]


def _text_inside(values: Json) -> None:
    """Qwen 2 VL's configurations were flat; the class puts what is of the text into a configuration of its own."""
    kind, text = f"{values['model_type']}_text", values.get("text_config")
    if not isinstance(text, dict):
        text = {k: v for k, v in values.items() if k not in ("vision_config", "text_config", "model_type")}
    values["text_config"] = with_defaults({"model_type": kind, **text})


def _convolutions(values: Json) -> None:
    """LFM 2's layers are convolutions, but for those that are listed; its old names count."""
    values["intermediate_size"] = values.get("block_ff_dim", values["intermediate_size"])
    values["rope_theta"] = values.get("theta", values["rope_theta"])
    layers, full = values.get("num_hidden_layers"), values.get("full_attn_idxs")
    if values.get("layer_types") is None and isinstance(layers, int) and 0 <= layers < 1 << 16:
        attends = range(layers) if full is None else full
        values["layer_types"] = ["full_attention" if i in attends else "conv" for i in range(layers)]


def _no_end_of_document(values: Json) -> None:
    """Hunyuan's classes take eod_token_id, and forget it."""
    values.pop("eod_token_id", None)


def _mpt_attention(values: Json) -> None:
    """Keep what the class of MPT's attention knows: other keys are lost."""
    known = ("attn_type", "attn_pdrop", "attn_impl", "clip_qkv", "softmax_scale", "alibi", "alibi_bias_max")
    if isinstance(given := values.get("attn_config"), dict):
        values["attn_config"] = {key: value for key, value in given.items() if key in known}


def _labels(values: Json) -> None:
    """Labels are counted by numbers; there are two without names unless something else is said."""
    given = values.get("id2label")
    if given is None:
        values["id2label"] = {i: f"LABEL_{i}" for i in range(min(int(values.get("num_labels", 2)), 1 << 16))}
    else:
        values["id2label"] = {int(i): text for i, text in given.items()}


#: Model type -> what a class computes from other values, in order.
DERIVED: dict[str, tuple[Callable[[Json], None], ...]] = {
    "deepseek_v2": (_heads_as_queries, _latent_head, _named_rope),
    "deepseek_v3": (_heads_as_queries, _latent_head, _named_rope),
    "dots1": (_heads_as_queries,),
    "ernie4_5": (_heads_as_queries, _divided_head, _named_rope),
    "ernie4_5_moe": (_named_rope,),
    "glm4_moe": (_named_rope,),
    "glm4v_text": (_heads_as_queries, _named_rope),
    "glm4v_moe_text": (_named_rope,),
    "gpt_oss": (_heads_as_queries, _divided_head, _named_rope),
    "hunyuan_v1_dense": (_heads_as_queries, _no_end_of_document),
    "hunyuan_v1_moe": (_heads_as_queries, _no_end_of_document),
    "llama4_text": (_heads_as_queries, _chunked_layers),
    "llama": (_heads_as_queries, _divided_head),
    "mistral": (_heads_as_queries,),
    "mixtral": (_heads_as_queries,),
    "qwen2": (_heads_as_queries, _no_window),
    "qwen2_moe": (_no_window,),
    "qwen3": (_heads_as_queries, _no_window),
    "qwen3_moe": (_heads_as_queries, _no_window),
    "qwen3_next": (_Kinds(4, "linear_attention", "full_attention_interval"),),
    "qwen3_vl_text": (_heads_as_queries,),
    "qwen3_vl_moe_text": (_heads_as_queries, _divided_head),
    "gemma2": (_Kinds(2),),
    "gemma3_text": (_Kinds(6, key="sliding_window_pattern"),),
    "phi": (_heads_as_queries, _named_rope),
    "phi3": (_heads_as_queries, _longrope),
    "phimoe": (_heads_as_queries,),
    "olmo": (_heads_as_queries,),
    "olmo2": (_heads_as_queries,),
    "olmo3": (_heads_as_queries, _Kinds(4)),
    "olmoe": (_heads_as_queries, _named_rope),
    "granite": (_heads_as_queries,),
    "granitemoe": (_heads_as_queries,),
    "granitemoeshared": (_heads_as_queries,),
    "cohere": (_heads_as_queries,),
    "cohere2": (_heads_as_queries, _unnamed_head, _Kinds(4, key="sliding_window_pattern")),
    "arcee": (_heads_as_queries, _divided_head, _named_rope),
    "smollm3": (_heads_as_queries, _named_rope),
    "seed_oss": (_heads_as_queries, _divided_head, _named_rope),
    "exaone4": (_Kinds(4, key="sliding_window_pattern"),),
    "starcoder2": (_named_rope,),
    "stablelm": (_named_rope,),
    "bitnet": (_heads_as_queries,),
    "qwen2_vl": (_text_inside,),
    "qwen2_vl_text": (_heads_as_queries, _no_window),
    "qwen2_5_vl": (_text_inside,),
    "qwen2_5_vl_text": (_heads_as_queries, _no_window),
    "lfm2": (_convolutions,),
    "nemotron": (_heads_as_queries, _divided_head),
    "apertus": (_heads_as_queries,),
    "bloom": (_old_width,),
    "jamba": (_time_steps,),
    "falcon": (_all_keys,),
    "bert": (_labels,),
    "distilbert": (_labels,),
    "mpt": (_mpt_attention,),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), (_labels,)),
    "modernbert": (_labels,),
}

#: Model type -> keys that hold the configuration of a part, and its type if it does not name one.
PARTS: dict[str, dict[str, str]] = {
    "qwen3_vl": {"text_config": "qwen3_vl_text"},
    "qwen3_vl_moe": {"text_config": "qwen3_vl_moe_text"},
    "gemma3": {"text_config": "gemma3_text"},
    "glm4v": {"text_config": "glm4v_text"},
    "glm4v_moe": {"text_config": "glm4v_moe_text"},
    "llama4": {"text_config": "llama4_text"},
    "mistral3": {"text_config": "mistral"},
    "llava": {"text_config": "llama"},
    "janus": {"text_config": "llama"},
    "voxtral": {"text_config": "llama"},
    "qwen3_omni_moe": {"thinker_config": "qwen3_omni_moe_thinker"},
    "qwen3_omni_moe_thinker": {"text_config": "qwen3_omni_moe_text"},
}


def with_defaults(values: Json, kind: str | None = None) -> Json:
    """Return a configuration as AutoConfig gives it; of a type that it does not know, unchanged."""
    found = values.get("model_type", kind)
    if not isinstance(found, str) or found not in DEFAULTS:
        return dict(values)
    parts = {key: (values.get(key) or {}, inner) for key, inner in PARTS.get(found, {}).items()}
    parts = {key: (part, inner) for key, (part, inner) in parts.items() if isinstance(part, dict)}
    if any(str(part.get("model_type", inner)) not in DEFAULTS for part, inner in parts.values()):
        return dict(values)  # AutoConfig fails then, and the JSON is read as it is
    filled = {**_COMMON, **DEFAULTS[found], **values}
    for key, (part, inner) in parts.items():
        filled[key] = with_defaults(part, inner)
    for derive in DERIVED.get(found, ()):
        derive(filled)
    return filled

"""The table of checkpoints, continued: rare classes, and decoders before Llama.

Their models are narrow: bytes are what is compared, and logits where the engine runs them (``runs``). Those of
``written`` are of classes that neither version of transformers has: config.json has what the converter reads, names and
shapes are those that its name map knows.
"""

from __future__ import annotations

from typing import Any

from checkpoint_table import Json, Row, bpe, spm

_OUTTYPES = ("f32", "f16", "bf16", "q8_0")
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
VOCAB = bpe("llama-bpe", "<|eos|>", "<|bos|>", "<|user|>", "<|end|>", bos="<|bos|>", chat=CHAT)
#: Default sizes of all models.
SIZES: Json = {
    "vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "max_position_embeddings": 4096, "bos_token_id": 577, "eos_token_id": 576,
}  # fmt: skip
HEAD = {"head_dim": 16}
MIXTURE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LLAMA: Json = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}


def named(name: str, model: str, args: Json, **more: Any) -> Row:
    """Return a row of which transformers makes the model."""
    given: Json = {"vocab": VOCAB, "version": 5, "runs": 0, "outtypes": _OUTTYPES} | more
    return Row(name=name, model=model, args=SIZES | args, **given)


def written(name: str, model: str, args: Json, tensors: dict[str, list[int]], **more: Any) -> Row:
    """Return a row of config.json and tensors."""
    given: Json = {"vocab": VOCAB, "outtypes": _OUTTYPES} | more
    config = {"architectures": [model]} | SIZES | LLAMA | {"torch_dtype": "bfloat16"} | args
    return Row(name=name, model="", version=0, args=config, more=tensors, **given)


def of(prefix: str, names: str) -> dict[str, list[int]]:
    """Return names and shapes of text such as ``q_proj:64x64``; a name that ends with ``!`` is whole, others lack
    ``.weight``."""
    tensors = {}
    for each in names.split():
        name, _, shape = each.rpartition(":")
        name = name[:-1] if name.endswith("!") else f"{name}.weight"
        tensors[prefix + name] = [int(n) for n in shape.split("x")]
    return tensors


def gemma3n(
    name: str, n: int, head: int, width: int, rank: int, kinds: list[str], sparsity: list[float], **more: Any
) -> Row:
    """Return a row of n layers, with short rows of ``width`` for each and a way around attention of ``rank``.

    It is written: transformers 4.57.6 saves per_layer_model_projection under a name that it does not read.
    """
    attention = (
        f" self_attn.q_proj:{4 * head}x64 self_attn.k_proj:{2 * head}x64 self_attn.v_proj:{2 * head}x64"
        f" self_attn.o_proj:64x{4 * head} self_attn.q_norm:{head} self_attn.k_norm:{head}"
    )
    config = {
        "head_dim": head, "model_type": "gemma3n_text", "hidden_size_per_layer_input": width, "num_kv_shared_layers": 2,
        "laurel_rank": rank, "num_hidden_layers": n, "layer_types": kinds, "sliding_window": 8,
        "activation_sparsity_pattern": sparsity, "vocab_size_per_layer_input": 632, "intermediate_size": [128] * n,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "altup_active_idx": 0, "altup_num_inputs": 4,
        "final_logit_softcapping": 30.0, "max_position_embeddings": 4096, "rope_scaling": None,
        "tie_word_embeddings": True,
    }  # fmt: skip
    outside = of(
        "model.language_model.",
        "altup_projections.{0-2}:64x64 altup_unembed_projections.{0-2}:64x64 norm:64 embed_tokens:640x64"
        f" embed_tokens_per_layer:632x{n * width} per_layer_model_projection:{n * width}x64"
        f" per_layer_projection_norm:{width}",
    )
    layers = of(
        f"model.language_model.layers.{{0-{n - 1}}}.",
        NORMS
        + attention
        + DENSE
        + " altup.correct_output_scale!:64 altup.correction_coefs:4x4 altup.modality_router:4x64"
        f" altup.prediction_coefs:16x4 altup.router_norm:64 laurel.linear_left:{rank}x64 laurel.linear_right:64x{rank}"
        f" laurel.post_laurel_norm:64 per_layer_input_gate:{width}x64 per_layer_projection:64x{width}"
        " post_feedforward_layernorm:64 post_per_layer_input_norm:64 pre_feedforward_layernorm:64",
    )
    vocab = spm("GemmaTokenizer", ("<pad>", "<eos>", "<bos>", "<unk>"))
    return written(name, "Gemma3nForCausalLM", config, outside | layers, vocab=vocab, **more)


OUTSIDE = "embed_tokens:640x64 norm:64"
HEADS = "lm_head:640x64"
NORMS = " input_layernorm:64 post_attention_layernorm:64"
QKV = " self_attn.q_proj:64x64 self_attn.k_proj:32x64 self_attn.v_proj:32x64"
ATTENTION = QKV + " self_attn.o_proj:64x64"
DENSE = " mlp.gate_proj:128x64 mlp.up_proj:128x64 mlp.down_proj:64x128"


def narrow(prefix: str) -> str:
    """Return the three matrices of an expert."""
    return f" {prefix}.gate_proj:32x64 {prefix}.up_proj:32x64 {prefix}.down_proj:64x32"


EXPERTS = " mlp.gate:4x64" + narrow("mlp.experts.{0-3}")
SHARED = narrow("mlp.shared_experts")


def decoder(layers: dict[str, str], *, head: bool = True) -> dict[str, list[int]]:
    """Return a model of layers: numbers of some -> their tensors."""
    tensors = of("model.", OUTSIDE) | (of("", HEADS) if head else {})
    for numbers, names in layers.items():
        tensors |= of("model.layers.{" + numbers + "}.", names)
    return tensors


def ahead(layer: int) -> dict[str, list[int]]:
    """Return the additional tensors of a prediction layer."""
    return of(f"model.layers.{layer}.", "eh_proj:64x128 enorm:64 hnorm:64")


MTP = {"mtp.fc.weight": [64, 128], **of("mtp.", "norm:64 pre_fc_norm_embedding:64 pre_fc_norm_hidden:64")}

LATENT: Json = MIXTURE | {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "num_key_value_heads": 4,
}  # fmt: skip
LATENT_ATTENTION = (
    " self_attn.q_a_proj:32x64 self_attn.q_a_layernorm:32 self_attn.q_b_proj:192x32 self_attn.kv_a_proj_with_mqa:48x64"
    " self_attn.kv_a_layernorm:32 self_attn.kv_b_proj:256x32 self_attn.o_proj:64x128"
)
LATENT_KV = LATENT_ATTENTION[LATENT_ATTENTION.index(" self_attn.kv_a") :]
_INDEXER = (
    " self_attn.indexer.wq_b:64x32 self_attn.indexer.wk:32x64 self_attn.indexer.k_norm:32"
    " self_attn.indexer.k_norm.bias!:32 self_attn.indexer.weights_proj:2x64"
)
_INDEX: Json = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}
W = "".join(f" block_sparse_moe.experts.{{0-3}}.{w}" for w in ("w1:32x64", "w2:64x32", "w3:32x64"))
HEAD_NORMS = " self_attn.q_norm:16 self_attn.k_norm:16"
MAMBA_2 = (
    " mixer.in_proj:328x64 mixer.conv1d:192x1x4 mixer.conv1d.bias!:192 mixer.A_log!:8 mixer.D!:8 mixer.dt_bias!:8"
    " mixer.norm:128 mixer.out_proj:64x128"
)
LATENT_EXPERTS = (
    " mixer.gate:4x64 mixer.gate.e_score_correction_bias!:4 mixer.experts.{0-3}.up_proj:32x32"
    " mixer.experts.{0-3}.down_proj:32x32 mixer.shared_experts.up_proj:64x64 mixer.shared_experts.down_proj:64x64"
    " mixer.fc1_latent_proj:32x64 mixer.fc2_latent_proj:64x32"
)
AFTER = " post_attention_layernorm:64 post_feedforward_layernorm:64"
_KIMI_VOCAB: Json = {
    "kind": "tiktoken", "file": "tiktoken.model", "pre": "kimi-k2", "reserved": 256,
    "special": ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>"],
    "config": {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
               "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}},
}  # fmt: skip

NAMED = (
    written("deepseek-v1", "DeepseekForCausalLM",
            MIXTURE | {"model_type": "deepseek", "n_routed_experts": 4, "n_shared_experts": 2,
                        "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
            decoder({"0": NORMS + ATTENTION + DENSE, "1-2": NORMS + ATTENTION + EXPERTS + SHARED})),
    written("bailing-moe", "BailingMoeForCausalLM",
            MIXTURE | HEAD | {"model_type": "bailing_moe", "num_experts": 4, "num_shared_experts": 2,
                                "first_k_dense_replace": 0, "norm_topk_prob": True, "norm_head": False},
            of("model.", "word_embeddings:640x64 norm:64") | of("", HEADS) | of(
                "model.layers.{0-2}.",
                NORMS + " attention.query_key_value:128x64 attention.dense:64x64" + EXPERTS + SHARED)),
    named("cohere2-moe", "Cohere2MoeForCausalLM",
          HEAD | {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1,
                   "sliding_window": 8, "prefix_dense_intermediate_size": 128, "first_k_dense_replace": 1,
                   "intermediate_size": 32}, copies=(("model.layers.3.", "model.layers.4."),),
          config={"num_nextn_predict_layers": 1}, more=ahead(4), runs=5),
    named("exaone-moe", "ExaoneMoeForCausalLM",
          MIXTURE | HEAD | {"num_hidden_layers": 4, "num_experts": 4, "num_shared_experts": 1, "sliding_window": 8,
                              "first_k_dense_replace": 1},
          copies=(("model.layers.0.", "mtp.layers.0."),), more=MTP, runs=5,
          config={"num_nextn_predict_layers": 1, "scoring_func": "sigmoid"}),
    written("grove-moe", "GroveMoeForCausalLM",
            MIXTURE | HEAD | {"model_type": "grove_moe", "num_experts": 4, "norm_topk_prob": True},
            decoder({"0-2": NORMS + ATTENTION + " self_attn.q_norm:16 self_attn.k_norm:16" + EXPERTS
                     + narrow("mlp.chunk_experts.{0-1}") + " mlp.expert_bias!:4"})),
    named("afmoe", "AfmoeForCausalLM",
          MIXTURE | HEAD | {"num_hidden_layers": 4, "num_experts": 4, "num_shared_experts": 1, "sliding_window": 8,
                              "num_dense_layers": 1, "route_scale": 2.5, "mup_enabled": True},
          config={"route_norm": True, "score_func": "sigmoid"}, runs=5),
    named("hy-v3", "HYV3ForCausalLM",
          MIXTURE | HEAD | {"num_experts": 4, "num_shared_experts": 1, "router_scaling_factor": 2.5},
          copies=(("model.layers.2.", "model.layers.3."),), config={"num_nextn_predict_layers": 1},
          more=ahead(3) | of("model.layers.3.", "final_layernorm:64"), runs=5),
    written("smallthinker", "SmallThinkerForCausalLM",
            HEAD | {"model_type": "smallthinker", "moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2,
                     "moe_ffn_hidden_size": 32, "moe_primary_router_apply_softmax": False,
                     "sliding_window_layout": [0, 1, 1], "sliding_window_size": 8, "rope_layout": [0, 1, 1]},
            decoder({"0-2": NORMS + ATTENTION + " block_sparse_moe.primary_router:4x64"
                     + narrow("block_sparse_moe.experts.{0-3}").replace("_proj", "")})),
    written("step3p5", "Step3p5ForCausalLM", HEAD | {
        "model_type": "step3p5", "num_hidden_layers": 4, "num_attention_groups": 2,
        "rope_theta": [5e6, 1e4, 1e4, 5e6, 5e6],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 0.5], "sliding_window": 8, "moe_num_experts": 4, "moe_top_k": 2,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 16},
        "moe_intermediate_size": 32, "share_expert_dim": 32, "moe_router_scaling_factor": 3.0,
        "norm_expert_weight": True, "moe_layers_enum": "1,2,3", "swiglu_limits": [0, 7.0, None, 7.0],
        "swiglu_limits_shared": [0, 16.0, 16.0, 16.0], "num_nextn_predict_layers": 1, "rope_scaling": {
            "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072, "low_freq_factor": 1.0,
            "high_freq_factor": 32.0}},
        decoder({
            "0-4": NORMS + HEAD_NORMS, "0,3,4": ATTENTION + " self_attn.g_proj:4x64",
            "1,2": " self_attn.q_proj:128x64 self_attn.k_proj:32x64 self_attn.v_proj:32x64 self_attn.o_proj:64x128"
                   " self_attn.g_proj:8x64", "0,4": DENSE,
            "1-3": " moe.gate:4x64 moe.router_bias!:4 moe.gate_proj:4x32x64 moe.up_proj:4x32x64 moe.down_proj:4x64x32"
                   + narrow("share_expert"),
            "4": "eh_proj:64x128 enorm:64 hnorm:64 transformer.shared_head.norm:64"
                 " transformer.shared_head.output:640x64"}),
        f32=("router_bias",), runs=5),
    named("mimo-v2", "MiMoV2FlashForCausalLM", MIXTURE | {
        "num_hidden_layers": 3, "n_routed_experts": 4, "sliding_window": 8, "head_dim": 32, "v_head_dim": 16},
        config={"hybrid_layer_pattern": [0, 1, 1], "swa_num_key_value_heads": 4, "swa_num_attention_heads": 4,
                "swa_head_dim": 32, "swa_v_head_dim": 16, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                "layernorm_epsilon": 1e-5, "partial_rotary_factor": 0.334, "rope_theta": 5e6, "swa_rope_theta": 1e4},
        drop=("rope_parameters",), runs=5,
        more=of("model.mtp.layers.{0-2}.", NORMS + DENSE + " eh_proj:64x128 enorm:64 hnorm:64 final_layernorm:64"
                " self_attn.q_proj:128x64 self_attn.k_proj:128x64 self_attn.v_proj:64x64 self_attn.o_proj:64x64"
                " self_attn.attention_sink_bias!:4")),
    written("minimax-m3", "MiniMaxM3SparseForCausalLM", HEAD | {
        "model_type": "minimax_m3", "intermediate_size": 32, "dense_intermediate_size": 128, "num_local_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.0, "scoring_func": "sigmoid",
        "rotary_dim": 8, "moe_layer_freq": [0, 1, 1], "use_gemma_norm": True, "sparse_attention_config": {
            "sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_topk_blocks": 4, "sparse_block_size": 16,
            "sparse_local_block": 1}},
        decoder({"0-2": NORMS + ATTENTION + HEAD_NORMS, "0": DENSE,
                 "1-2": " self_attn.index_q_proj:64x64 self_attn.index_k_proj:32x64 self_attn.index_q_norm:32"
                        " self_attn.index_k_norm:32 block_sparse_moe.gate:4x64"
                        " block_sparse_moe.e_score_correction_bias!:4" + W
                        + narrow("block_sparse_moe.shared_experts")}), runs=5),
    # Enough heads that no score of a key is 0: the order of equal scores is undefined.
    written("hy-v4", "HYV4ForCausalLM", LATENT | _INDEX | {
        "model_type": "hy_v4", "index_n_heads": 16, "pad_token_id": None, "norm_topk_prob": True,
        "num_key_value_heads": 2, "hc_mult": 2, "hc_eps": 1e-6, "hc_magnitude": 2.0,
        "indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 1,
        "topk_group": 1, "swiglu_limit": 10.0, "num_nextn_predict_layers": 1, "enable_lm_head_fp32": True},
        decoder({"0-2": NORMS + LATENT_ATTENTION + " self_attn.learnable_sink_param!:4 self_attn.linear_gate:128x64"
                 " hc_attn_layer.hc_pre.hc_fn!:4x128 hc_attn_layer.hc_pre.hc_base!:4 hc_attn_layer.hc_pre.hc_scale!:2"
                 " hc_mlp_layer.hc_pre.hc_fn!:4x128 hc_mlp_layer.hc_pre.hc_base!:4 hc_mlp_layer.hc_pre.hc_scale!:2",
                 "0,2": _INDEXER.replace("wq_b:64x32", "wq_b:512x32").replace("proj:2x64", "proj:16x64"), "0": DENSE,
                 "1-2": " mlp.gate:4x64 mlp.gate.e_score_correction_bias!:4 mlp.experts.gate_up_proj!:4x64x64"
                        " mlp.experts.down_proj!:4x64x32" + SHARED})
        | of("model.hc_head.", "hc_head_fn!:2x128 hc_head_base!:2 hc_head_scale!:1")
        | of("model.mtp_layers.0.", "enorm:64 hnorm:64"), f32=("hc_fn", "hc_base", "hc_scale"), runs=5),
    written("dots3-note", "Dots3NoteForCausalLM", LATENT | _INDEX | {
        "model_type": "dots3_note", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window_size": 8,
        "swa_num_attention_heads": 2, "swa_qk_nope_head_dim": 16, "swa_qk_rope_head_dim": 16, "swa_v_head_dim": 64,
        "swa_head_dim": 32, "swa_kv_lora_rank": 64, "swa_q_lora_rank": 32, "swa_rope_theta": 5000.0, "head_dim": 16,
        "apply_mla_qkv_lora_rescale": True},
        decoder({"0-3": NORMS + " self_attn.k_rope_only_layernorm:16",
                 "0": LATENT_ATTENTION + _INDEXER + DENSE + " self_attn.linear_gate:4x64",
                 "1-3": " self_attn.q_a_proj:32x64 self_attn.q_a_layernorm:32 self_attn.q_b_proj:64x32"
                        " self_attn.kv_a_proj_with_mqa:80x64 self_attn.kv_a_layernorm:64 self_attn.kv_b_proj:160x64"
                        " self_attn.o_proj:64x128 self_attn.linear_gate:2x64",
                 "1-2": EXPERTS + SHARED + " mlp.gate.e_score_correction_bias!:4",
                 "3": DENSE + " eh_proj:64x128 enorm:64 hnorm:64 shared_head.norm:64"})
        | of("model.mtp.", "embed_tokens:640x64"),
        vocab=VOCAB | {"special": [*VOCAB["special"], "<|endofassistant|>"]}),
    named("laguna", "LagunaForCausalLM", MIXTURE | HEAD | {
        "num_experts": 4, "shared_expert_intermediate_size": 32, "sliding_window": 8, "moe_routed_scaling_factor": 2.5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 8, 8], "eos_token_id": [577, 579]},
        vocab=VOCAB | {"user": ["</assistant>"]}, files={"chat_template.jinja": "{{ messages }}"}, runs=5),
    written("kimi-linear", "KimiLinearForCausalLM", LATENT | {
        "model_type": "kimi_linear", "vocab_size": 832, "head_dim": 24, "num_experts": 4, "num_experts_per_token": 2,
        "num_shared_experts": 1, "moe_router_activation_func": "sigmoid", "q_lora_rank": None, "pad_token_id": None,
        "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 32, "num_heads": 4,
                               "short_conv_kernel_size": 4}},
        of("model.", "embed_tokens:832x64 norm:64") | of("", "lm_head:832x64") | of(
            "model.layers.{0-1}.", "self_attn.q_proj:128x64 self_attn.k_proj:128x64 self_attn.v_proj:128x64"
            " self_attn.q_conv1d:128x1x4 self_attn.k_conv1d:128x1x4 self_attn.v_conv1d:128x1x4 self_attn.o_norm:32"
            " self_attn.A_log!:1x1x4x1 self_attn.dt_bias!:128 self_attn.f_a_proj:32x64 self_attn.f_b_proj:128x32"
            " self_attn.b_proj:4x64 self_attn.g_a_proj:32x64 self_attn.g_b_proj:128x32 self_attn.o_proj:64x128")
        | of("model.layers.2.", "self_attn.q_proj:192x64" + LATENT_KV)
        | of("model.layers.{0-2}.", NORMS) | of("model.layers.0.", DENSE)
        | of("model.layers.{1-2}.", "block_sparse_moe.gate:4x64 block_sparse_moe.gate.e_score_correction_bias!:4" + W
             + narrow("block_sparse_moe.shared_experts")),
        runs=5, vocab=_KIMI_VOCAB, f32=("A_log", "dt_bias")),
    written("bailing-moe-v3", "BailingMoeV3ForCausalLM", LATENT | {
        "model_type": "bailing_hybrid", "num_hidden_layers": 4, "num_experts": 4, "num_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 32, "norm_topk_prob": True, "layer_group_size": 2, "head_dim": 32,
        "score_function": "sigmoid", "n_group": 2, "topk_group": 1, "no_kda_lora": True, "kda_safe_gate": True,
        "kda_lower_bound": -5.0, "gated_attention_proj_granularity_type": "head_wise", "short_conv_kernel_size": 4,
        "expert_swiglu_limit_list": [None, 7.0, 7.0], "num_nextn_predict_layers": 1},
        of("model.", "word_embeddings:640x64 norm:64") | of("", HEADS) | of("model.layers.{0-4}.", NORMS) | of(
            "model.layers.{0,2}.", "attention.q_proj:128x64 attention.k_proj:128x64 attention.v_proj:128x64"
            " attention.q_conv1d:128x1x4 attention.k_conv1d:128x1x4 attention.v_conv1d:128x1x4 attention.o_norm:32"
            " attention.A_log!:4 attention.dt_bias!:128 attention.f_proj:128x64 attention.b_proj:4x64"
            " attention.g_proj:128x64 attention.o_proj:64x128")
        | of("model.layers.{1,3,4}.", LATENT_ATTENTION.replace("self_attn.", "attention.").replace(".o_proj", ".dense")
             + " attention.g_proj:4x64") | of("model.layers.0.", DENSE)
        | of("model.layers.{1-4}.", EXPERTS + SHARED + " mlp.gate.expert_bias!:4")
        | ahead(4) | of("model.layers.4.", "final_layernorm:64"), f32=("A_log", "dt_bias")),
    written("qwen2-vl", "Qwen2VLForConditionalGeneration", {
        "model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}, "use_sliding_window": False},
        decoder({"0-2": NORMS + ATTENTION + DENSE + " self_attn.q_proj.bias!:64 self_attn.k_proj.bias!:32"
                 " self_attn.v_proj.bias!:32"}) | of("visual.", "merger.mlp.0:64x128 merger.ln_q:32"), runs=4),
    written("qwen3-omni-moe", "Qwen3OmniMoeForConditionalGeneration", {
        "model_type": "qwen3_omni_moe", "thinker_config": {"model_type": "qwen3_omni_moe_thinker", "text_config":
            SIZES | LLAMA | MIXTURE | HEAD | {"model_type": "qwen3_omni_moe_text", "num_experts": 4,
                "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}}}},
        {f"thinker.{name}": shape for name, shape in decoder(
            {"0-2": NORMS + ATTENTION + HEAD_NORMS + EXPERTS}).items()}
        | of("talker.model.", "norm:64") | of("code2wav.", "norm:64"),
        vocab=VOCAB | {"special": [*VOCAB["special"], "<|im_end|>"]}),
    named("granite-swa", "GraniteSWAForCausalLM", {
        "num_hidden_layers": 4, "sliding_window": 8, "attention_multiplier": 0.25, "pad_token_id": None,
        "layer_rope_theta": [0, 1e4, 1e4, 1e4]}, config={"no_rope_layers": [0, 1, 1, 1]}, runs=5),
    written("granite-moe-swa", "GraniteMoeSWAForCausalLM", {
        "model_type": "granitemoe_swa", "intermediate_size": 32, "shared_intermediate_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "embedding_multiplier": 12.0, "attention_multiplier": 0.25, "logits_scaling": 8.0,
        "residual_multiplier": 0.22, "sliding_window": 8},
        decoder({"0-2": NORMS + ATTENTION + " self_attn.sinks!:4 block_sparse_moe.router.layer:4x64"
                 " shared_mlp.input_linear:128x64 shared_mlp.output_linear:64x64",
                 "0": " block_sparse_moe.input_linear:4x64x64 block_sparse_moe.output_linear:4x64x32",
                 "1-2": " block_sparse_moe.experts.gate_up_proj!:4x64x64"
                        " block_sparse_moe.experts.down_proj!:4x64x32"})),
    named("granite-moe-swa-fused", "GraniteMoeSWAForCausalLM", {
        "intermediate_size": 32, "shared_intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
        "embedding_multiplier": 12.0, "attention_multiplier": 0.25, "logits_scaling": 8.0, "residual_multiplier": 0.22,
        "sliding_window": 8, "pad_token_id": None}, runs=5),
    named("mellum", "MellumForCausalLM", HEAD | {
        "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, runs=5),
    written("maincoder", "MaincoderForCausalLM", HEAD | {"model_type": "maincoder"},
            decoder({"0-2": NORMS + ATTENTION + HEAD_NORMS + DENSE}), runs=4),
    written("pangu", "PanguEmbeddedForCausalLM", {"model_type": "PanguEmbedded", "tie_word_embeddings": True},
            decoder({"0-2": NORMS + ATTENTION + DENSE}), vocab=spm(config={"add_prefix_space": False}), runs=4),
    named("glm", "GlmForCausalLM", {"head_dim": 16, "partial_rotary_factor": 0.5, "pad_token_id": 576}, version=4,
          runs=4, vocab=bpe("chatglm-bpe", "<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", pad="<|endoftext|>")),
    named("lfm2", "Lfm2ForCausalLM", {"num_hidden_layers": 4, "full_attn_idxs": [2], "block_multiple_of": 32},
          version=4, runs=4),
    named("lfm2-moe", "Lfm2MoeForCausalLM", MIXTURE | {
        "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_experts": 4,
        "num_dense_layers": 1}, runs=5),
    named("apertus", "ApertusForCausalLM", {}, version=4, runs=4),
    named("nemotron", "NemotronForCausalLM", {"head_dim": 16}, version=4, runs=4, vocab=spm()),
    named("jais2", "Jais2ForCausalLM", HEAD, runs=5),
    written("kimi-k3", "KimiK3ForConditionalGeneration", {
        "model_type": "kimi_k3", "text_config": SIZES | LLAMA | LATENT | {
            "model_type": "kimi_linear", "head_dim": 24, "num_experts": 4, "num_experts_per_token": 2,
            "num_shared_experts": 1, "moe_router_activation_func": "sigmoid", "moe_renormalize": True,
            "mla_use_nope": True, "routed_expert_hidden_size": 32, "hidden_act": "situ", "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0, "attn_res_block_size": 2, "linear_attn_config": {
                "full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 32, "num_heads": 4,
                "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}}},
        of("language_model.model.", OUTSIDE + " output_attn_res_norm:64 output_attn_res_proj:1x64")
        | of("language_model.", HEADS) | of(
            "language_model.model.layers.{0-1}.", "self_attn.q_proj:128x64 self_attn.k_proj:128x64"
            " self_attn.v_proj:128x64 self_attn.q_conv1d:128x1x4 self_attn.k_conv1d:128x1x4 self_attn.v_conv1d:128x1x4"
            " self_attn.o_norm:32 self_attn.A_log!:4 self_attn.dt_bias!:128 self_attn.f_a_proj:32x64"
            " self_attn.f_b_proj:128x32 self_attn.b_proj:4x64 self_attn.g_proj:128x64 self_attn.o_proj:64x128")
        | of("language_model.model.layers.2.", LATENT_ATTENTION + " self_attn.g_proj:128x64")
        | of("language_model.model.layers.{0-2}.", NORMS + " self_attention_res_norm:64 self_attention_res_proj:1x64"
             " mlp_res_norm:64 mlp_res_proj:1x64") | of("language_model.model.layers.0.", DENSE)
        | of("language_model.model.layers.{1-2}.", "block_sparse_moe.gate:4x64"
             " block_sparse_moe.gate.e_score_correction_bias!:4"
             + W.replace("32x64", "32x32").replace("64x32", "32x32") + narrow("block_sparse_moe.shared_experts"))
        | of("vision_tower.", "norm:64") | of("mm_projector.", "proj:64x64"), f32=("A_log", "dt_bias")),
    named("mamba", "MambaForCausalLM", {"state_size": 16, "intermediate_size": 128, "time_step_rank": 4}, version=4,
          runs=4, f32=("A_log",)),
    named("falcon-mamba", "FalconMambaForCausalLM", {
        "state_size": 16, "intermediate_size": 128, "time_step_rank": 4, "vocab_size": 636,
        "tie_word_embeddings": False}, version=4, runs=4, f32=("A_log",)),
    named("mamba2", "Mamba2ForCausalLM", {
        "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "expand": 2, "conv_kernel": 4}, version=4,
        runs=4, drop=("intermediate_size",), f32=("A_log",)),
    written("nemotron-h", "NemotronHForCausalLM", HEAD | {
        "model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-*M", "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4, "expand": 2, "vocab_size": 636,
        "layer_norm_epsilon": 1e-5, "hidden_act": None},
        of("backbone.", "embeddings:636x64 norm_f:64") | of("", "lm_head:636x64")
        | of("backbone.layers.{0-3}.", "norm:64") | of("backbone.layers.{0,3}.", MAMBA_2)
        | of("backbone.layers.1.", "mixer.up_proj:128x64 mixer.down_proj:64x128")
        | of("backbone.layers.2.", QKV.replace("self_attn", "mixer") + " mixer.o_proj:64x64"), runs=5, f32=("A_log",)),
    written("nemotron-h-moe", "NemotronHForCausalLM", HEAD | MIXTURE | {
        "model_type": "nemotron_h", "num_hidden_layers": 3, "hybrid_override_pattern": "ME*", "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4, "expand": 2, "norm_eps": 1e-5,
        "hidden_act": None, "n_routed_experts": 4, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 64,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_latent_size": 32,
        "num_nextn_predict_layers": 1},
        of("backbone.", "embeddings:640x64 norm_f:64") | of("", HEADS)
        | of("backbone.layers.{0-2}.", "norm:64") | of("backbone.layers.0.", MAMBA_2)
        | of("backbone.layers.1.", LATENT_EXPERTS)
        | of("backbone.layers.2.", QKV.replace("self_attn", "mixer") + " mixer.o_proj:64x64")
        | of("mtp.layers.0.", "enorm:64 hnorm:64 eh_proj:64x128 norm:64" + QKV.replace("self_attn", "mixer")
             + " mixer.o_proj:64x64") | of("mtp.layers.1.", "norm:64 final_layernorm:64" + LATENT_EXPERTS),
        runs=5, f32=("A_log", "correction_bias")),
    written("llava", "LlavaForConditionalGeneration", {
        "model_type": "llava", "text_config": SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5},
        "vision_config": {"model_type": "clip_vision_model"}},
        {f"language_model.{name}": shape for name, shape in decoder({"0-2": NORMS + ATTENTION + DENSE}).items()}
        | of("vision_tower.", "norm:64") | of("multi_modal_projector.", "linear_1:64x64"), runs=4),
    written("llama-model", "LlamaModel", {"model_type": "llama", "architectures": ["LlamaModel"]},
            {name.removeprefix("model."): shape for name, shape in decoder(
                {"0-2": NORMS + ATTENTION + DENSE}, head=False).items()}, runs=4),
    written("nanbeige", "NanbeigeForCausalLM", {"model_type": "nanbeige", "num_loops": 2},
            decoder({"0-2": NORMS + ATTENTION + DENSE}), runs=4),
    written("rnd1", "RND1", MIXTURE | HEAD | {"model_type": "rnd1", "num_experts": 4, "mask_token_id": 12},
            decoder({"0-2": NORMS + ATTENTION + HEAD_NORMS + EXPERTS})),
    written("llada-moe", "LLaDAMoEModelLM", {
        "model_type": "llada_moe", "num_experts": 4, "num_experts_per_tok": 2, "expert_intermediate_size": 32},
        decoder({"0-2": NORMS + ATTENTION + HEAD_NORMS + EXPERTS})),
    written("plm", "PLMForCausalLM", LATENT | {"model_type": "plm", "n_routed_experts": None, "q_lora_rank": None},
            decoder({"0-2": NORMS + " self_attn.q_proj:192x64" + LATENT_KV + " mlp.up_proj:128x64"
                     " mlp.down_proj:64x128"})),
    written("spark2.5", "Spark2_5ForCausalLM", HEAD | {
        "model_type": "spark2_5", "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True, "hidden_act": "gelu", "sliding_window": 8,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
                            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}},
        decoder({"0-2": NORMS + DENSE + " self_attn.q_k_v_proj:128x64 self_attn.o_proj:64x64"
                 " self_attn.g_proj:4x64"})),
    written("exaone4.5", "Exaone4_5_ForConditionalGeneration", {
        "model_type": "exaone4_5", "text_config": SIZES | LLAMA | HEAD | {
            "model_type": "exaone4_5_text", "num_hidden_layers": 4, "sliding_window": 8,
            "sliding_window_pattern": "LLLG", "num_nextn_predict_layers": 2, "mtp_share_layers": True, "rope_scaling": {
                "rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}}},
        {name.replace("model.", "model.language_model.", 1): shape for name, shape in decoder(
            {"0-3": AFTER + ATTENTION + HEAD_NORMS + DENSE}).items()}
        | of("mtp.layers.0.", AFTER + ATTENTION + HEAD_NORMS + DENSE) | MTP | of("model.visual.", "norm:64")),
    written("paddleocr", "PaddleOCRVLForConditionalGeneration", HEAD | {
        "model_type": "paddleocr_vl", "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]}},
        decoder({"0-2": NORMS + ATTENTION + DENSE}) | of("visual.vision_model.", "norm:64"), vocab=spm(),
        runs=5),
    named("gpt2", "GPT2LMHeadModel", {}, version=4, runs=4, config={"n_ctx": 1024}, copies=(),
          vocab=bpe("gpt-2", "<|endoftext|>", bos="<|endoftext|>"),
          drop=("n_inner",)),
    named("gptneox", "GPTNeoXForCausalLM", {"rotary_pct": 0.5}, version=4, runs=4),
    named("bloom", "BloomForCausalLM", {}, version=4, runs=4),
    named("falcon", "FalconForCausalLM", {"multi_query": False, "new_decoder_architecture": True, "num_kv_heads": 2},
          version=4, runs=4),
    written("orion", "OrionForCausalLM", {"model_type": "orion"}, decoder({
        "0-2": NORMS + ATTENTION + DENSE + " input_layernorm.bias!:64 post_attention_layernorm.bias!:64"})
        | of("model.", "norm.bias!:64"), vocab=spm(), runs=4),
    written("codeshell", "CodeShellForCausalLM", {
        "model_type": "codeshell", "n_positions": 4096, "n_embd": 64, "n_layer": 3, "n_head": 4, "num_query_groups": 2,
        "layer_norm_epsilon": 1e-5},
        of("transformer.", "wte:640x64 ln_f:64 ln_f.bias!:64") | of("", HEADS) | of(
            "transformer.h.{0-2}.", "ln_1:64 ln_1.bias!:64 ln_2:64 ln_2.bias!:64 attn.c_attn:128x64"
            " attn.c_attn.bias!:128 attn.c_proj:64x64 attn.c_proj.bias!:64 mlp.c_fc:256x64 mlp.c_fc.bias!:256"
            " mlp.c_proj:64x256 mlp.c_proj.bias!:64"), runs=4),
    written("minicpm", "MiniCPMForCausalLM", {
        "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32, "rope_scaling": {
            "type": "longrope", "long_factor": [1.0 + i for i in range(8)], "short_factor": [1.0] * 8,
            "original_max_position_embeddings": 4096}},
        decoder({"0-2": NORMS + ATTENTION + DENSE}), vocab=spm(), runs=4),
    written("minicpm3", "MiniCPM3ForCausalLM", LATENT | {
        "model_type": "minicpm3", "rope_scaling": {"type": "longrope", "long_factor": [1.0 + i for i in range(8)],
            "short_factor": [1.0] * 8, "original_max_position_embeddings": 4096}},
        decoder({"0-2": NORMS + LATENT_ATTENTION + DENSE}), vocab=spm()),
    named("falcon-h1", "FalconH1ForCausalLM", {
        "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "key_multiplier": 0.3,
        "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1,
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.7, "mlp_multipliers": [0.88, 1.5], "lm_head_multiplier": 0.3,
        "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.36], "embedding_multiplier": 5.65}, config={"head_dim": 16},
        version=4, runs=4, f32=("A_log",)),
    named("jamba", "JambaForCausalLM", {
        "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 16,
        "use_mamba_kernels": False}, version=4, runs=4, vocab=spm(), f32=("A_log",)),
    gemma3n("gemma3n", 4, 16, 32, 32, ["sliding_attention", "full_attention"] * 2, [0.95, 0.95, 0.0, 0.0]),
    # llama.cpp's constants: ten layers with sparse gates, twenty with their own caches, these two widths.
    gemma3n("gemma3n-deep", 22, 8, 256, 64, (["sliding_attention"] * 4 + ["full_attention"]) * 4
            + ["sliding_attention", "full_attention"], [0.95] * 10 + [0.0] * 12, runs=4),
    written("minimax-m1", "MiniMaxM1ForCausalLM", HEAD | {
        "model_type": "minimax_m1", "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 8, "rotary_dim": 8, "attn_type_list": [0] * 7 + [1],
        "layernorm_full_attention_alpha": 3.5565588200778455, "layernorm_mlp_alpha": 3.5565588200778455,
        "layernorm_linear_attention_alpha": 3.5565588200778455,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0},
        decoder({"0-7": NORMS + " block_sparse_moe.gate:4x64" + W,
                 "0-6": " self_attn.qkv_proj:192x64 self_attn.norm:64 self_attn.out_proj:64x64"
                        " self_attn.output_gate:64x64", "7": ATTENTION}),
        runs=4, shards=2, files={"chat_template.jinja": "{{ messages }}"}),
    written("internlm3", "InternLM3ForCausalLM", HEAD | {"model_type": "internlm3"},
            decoder({"0-2": NORMS + ATTENTION + DENSE}),
            vocab=spm(special=["<|im_end|>"], config={"add_prefix_space": True}), runs=4),
)  # fmt: skip

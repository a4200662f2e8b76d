"""The table of checkpoints, continued: large mixtures, old models, text models of multimodal ones."""

from __future__ import annotations

from checkpoint_table_decoders import (
    ATTENTION,
    CHAT,
    DENSE,
    EXPERTS,
    HEAD,
    HEAD_NORMS,
    HEADS,
    LATENT,
    LATENT_EXPERTS,
    LLAMA,
    MAMBA_2,
    MIXTURE,
    NORMS,
    OUTSIDE,
    QKV,
    SHARED,
    SIZES,
    VOCAB,
    W,
    decoder,
    of,
    written,
)

from checkpoint_table import Json, bpe, spm

#: Pieces in the format of tokenizer.json.
_PIECES = spm("LlamaTokenizer") | {"kind": "spm_bpe"}
_BLOCKS = [
    {"attention": {"n_heads_in_group": 2, "replace_with_linear": False}, "ffn": {"ffn_mult": 2.625}},
    {"attention": {"n_heads_in_group": None, "replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"n_heads_in_group": None, "replace_with_linear": False}, "ffn": {"ffn_mult": None}},
    {"attention": {"n_heads_in_group": 4, "replace_with_linear": False}, "ffn": {"ffn_mult": 1.0}},
]
_WIDE = " mlp.gate_proj:256x64 mlp.up_proj:256x64 mlp.down_proj:64x256"
_ONE_KEY = " self_attn.q_proj:64x64 self_attn.k_proj:16x64 self_attn.v_proj:16x64 self_attn.o_proj:64x64"
_DELTA: Json = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_LINEAR = (
    " linear_attn.in_proj_qkv:128x64 linear_attn.in_proj_z:64x64 linear_attn.in_proj_b:4x64 linear_attn.in_proj_a:4x64"
    " linear_attn.conv1d:128x1x4 linear_attn.A_log!:4 linear_attn.dt_bias!:4 linear_attn.norm:16"
    " linear_attn.out_proj:64x64"
)
_QWEN: Json = {
    "kind": "tiktoken", "file": "qwen.tiktoken", "pre": "qwen2",
    "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(5))],
    "config": {"tokenizer_class": "QWenTokenizer"},
}  # fmt: skip
_PLAMO: Json = {"kind": "plamo", "config": {"add_bos_token": True, "chat_template": CHAT}}
_GEMMA4 = spm("GemmaTokenizer", ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>")) | {
    "kind": "spm_bpe", "pieces": 640}  # fmt: skip
_GEMMA = spm("GemmaTokenizer", ("<pad>", "<eos>", "<bos>", "<unk>"))
_POOLED: Json = {
    "1_Pooling": {"config.json": '{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}'},
    "modules.json": '[{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},'
    ' {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]\n',
}
_LFM_2: Json = {
    "norm_eps": 1e-5, "conv_L_cache": 3, "block_ff_dim": 128, "block_auto_adjust_ff_dim": False,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 32, "layer_types": ["conv", "full_attention", "conv"],
}  # fmt: skip
_LFM_2_TENSORS = (
    of("", "embed_tokens:640x64 embedding_norm:64")
    | of("layers.{0-2}.", "operator_norm:64 ffn_norm:64 feed_forward.w1:128x64 feed_forward.w2:64x128"
         " feed_forward.w3:128x64") | of("layers.{0,2}.", "conv.conv:64x1x3 conv.in_proj:192x64 conv.out_proj:64x64")
    | of("layers.1.", "self_attn.q_proj:64x64 self_attn.k_proj:32x64 self_attn.v_proj:32x64 self_attn.out_proj:64x64"
         " self_attn.q_layernorm:16 self_attn.k_layernorm:16")
)  # fmt: skip


def inside(prefix: str, tensors: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the tensors of a text model in another: ``prefix`` before their names."""
    return {prefix + name: shape for name, shape in tensors.items()}


OTHERS = (
    written("arctic", "ArcticForCausalLM", {"model_type": "arctic", "num_local_experts": 4, "num_experts_per_tok": 2},
            decoder({"0-2": NORMS + ATTENTION + " residual_layernorm:64 block_sparse_moe.gate:4x64" + W
                     + " residual_mlp.w1:64x64 residual_mlp.w2:64x64 residual_mlp.w3:64x64"}), shards=2,
            vocab=spm(special=["<|im_start|>", "<|im_end|>"], chat=CHAT, config={"add_bos_token": True})),
    written("dbrx", "DbrxForCausalLM", {
        "model_type": "dbrx", "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 4096,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
        of("transformer.", "wte:640x64 norm_f:64") | of("", HEADS) | of(
            "transformer.blocks.{0-2}.", "norm_attn_norm.norm_1:64 norm_attn_norm.norm_2:64"
            " norm_attn_norm.attn.Wqkv:128x64 norm_attn_norm.attn.out_proj:64x64 ffn.router.layer:4x64"
            " ffn.experts.mlp.w1!:128x64 ffn.experts.mlp.v1!:128x64 ffn.experts.mlp.w2!:128x64"), shards=2, runs=4),
    written("grok-1", "Grok1ForCausalLM", {
        "model_type": "grok-1", "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "attn_output_multiplier": 0.08838834764831845, "embedding_multiplier_scale": 78.38367176906169,
        "output_multiplier_scale": 0.5773502691896257, "max_attn_value": 30.0},
        of("", "lm_head:640x64") | of("transformer.", "in_out_embed:640x64 rms_norm:64") | of(
            "transformer.decoder_layer.{0-2}.", "rms_norm:64 rms_norm_1:64 rms_norm_2:64 rms_norm_3:64 router:4x64"
            " multi_head_attention.query:64x64 multi_head_attention.key:32x64 multi_head_attention.value:32x64"
            " multi_head_attention.linear:64x64 moe.{0-3}.linear:32x64 moe.{0-3}.linear_1:64x32"
            " moe.{0-3}.linear_v:32x64"), vocab=spm(), shards=2),
    written("grok-2", "Grok1ForCausalLM", HEAD | {
        "model_type": "git", "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "rope_type": "original", "scaling_factor": 16.0, "original_max_position_embeddings": 8192,
        "extrapolation_factor": 1.0, "attn_factor": 1.0, "beta_fast": 8, "beta_slow": 1,
        "attn_logit_softcapping": 30.0, "router_logit_softcapping": 30.0, "final_logit_softcapping": 50,
        "attn_temperature_len": 1024, "embedding_multiplier_scale": 90.50966799187809, "output_multiplier_scale": 0.5},
        decoder({"0-2": " pre_attn_norm:64 post_attn_norm:64 pre_moe_norm:64 post_moe_norm:64"
                 " block_sparse_moe.gate:4x64" + ATTENTION + DENSE + W}),
        files={"chat_template.jinja": "{{ messages }}"}),
    written("deci", "DeciLMForCausalLM", {
        "model_type": "nemotron-nas", "num_hidden_layers": 4, "block_configs": _BLOCKS, "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}},
        of("model.", OUTSIDE) | of("", HEADS) | of("model.layers.0.", NORMS + ATTENTION + _WIDE)
        | of("model.layers.1.", NORMS + " self_attn.linear_attn:64x64" + _WIDE)
        | of("model.layers.3.", NORMS + _ONE_KEY + _WIDE), vocab=_PIECES, runs=4),
    written("deci-7b", "DeciLMForCausalLM", {
        "model_type": "deci", "num_key_value_heads_per_layer": [2, 1, 2]},
        decoder({"0,2": NORMS + ATTENTION + DENSE, "1": NORMS + _ONE_KEY + DENSE}), vocab=_PIECES, runs=4),
    written("maple", "MapleForCausalLM", HEAD | MIXTURE | {
        "model_type": "maple", "num_experts": 4, "nope_on_global_attention": True, "sliding_window": 8,
        "partial_rotary_factor": 0.5, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        decoder({"0-2": NORMS + ATTENTION + HEAD_NORMS + EXPERTS})),
    written("talkie", "TalkieForCausalLM", HEAD | {"model_type": "talkie", "num_key_value_heads": 4},
        of("model.", "embed:640x64") | {"lm_head": [640, 64], "lm_head_gain.w_g": [1]} | of(
            "model.blocks.{0-2}.", "attn.attn_query:64x64 attn.attn_key:64x64 attn.attn_value:64x64"
            " attn.attn_resid:64x64 mlp.mlp_gate:128x64 mlp.mlp_linear:128x64 mlp.mlp_resid:64x128"
            " attn.head_gain.head_g!:4 attn_gain.a_g!:1 mlp_gain.a_g!:1 embed_skip.a_g!:1")),
    written("sarvam-moe", "SarvamMoEForCausalLM", MIXTURE | HEAD | {
        "model_type": "sarvam_moe", "num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "score_function": "sigmoid", "n_group": 2, "topk_group": 1},
        of("model.", "word_embeddings:640x64 norm:64") | of("", HEADS) | of(
            "model.layers.{0-2}.", NORMS + " attention.query_key_value:128x64 attention.dense:64x64"
            " attention.query_layernorm:16 attention.key_layernorm:16") | of("model.layers.0.", DENSE) | of(
            "model.layers.{1-2}.", EXPERTS + SHARED + " mlp.gate.expert_bias!:4"), runs=4),
    written("nemotron-puzzle", "NemotronHPuzzleForCausalLM", HEAD | {
        "model_type": "nemotron_h_puzzle", "num_hidden_layers": 88, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4, "expand": 2, "norm_eps": 1e-5, "hidden_act": None,
        "block_configs": [
            {"block_type": "mamba"}, {"block_type": "moe", "moe_intermediate_size": 32, "num_experts_per_tok": 2},
            {"block_type": "attention"}, {"block_type": "moe", "moe_intermediate_size": 32, "num_experts_per_tok": 1}],
        "n_routed_experts": 4, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 64, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_latent_size": 32,
        "num_nextn_predict_layers": 1},
        of("model.", "embeddings:640x64 norm_f:64") | of("", HEADS)
        | of("model.layers.{0-3}.", "norm:64") | of("model.layers.0.", MAMBA_2)
        | of("model.layers.{1,3}.", LATENT_EXPERTS) | of("model.layers.2.", QKV.replace("self_attn", "mixer")
             + " mixer.o_proj:64x64") | of("mtp.layers.0.", "enorm:64"), f32=("A_log", "correction_bias")),
    written("chameleon", "ChameleonForConditionalGeneration", {
        "model_type": "chameleon", "num_key_value_heads": 4, "swin_norm": True, "vq_config": {"embed_dim": 8}},
        decoder({"0-2": NORMS + " self_attn.q_proj:64x64 self_attn.k_proj:64x64 self_attn.v_proj:64x64"
                 " self_attn.o_proj:64x64 self_attn.q_norm:4x16 self_attn.k_norm:4x16 self_attn.q_norm.bias!:4x16"
                 " self_attn.k_norm.bias!:4x16" + DENSE})
        | of("model.vqmodel.", "quantize.embedding:8x8"), runs=4),
    written("janus", "JanusForConditionalGeneration", {
        "model_type": "janus", "text_config": SIZES | LLAMA | {"model_type": "llama"},
        "vision_config": {"model_type": "janus_vision_model"}, "vq_config": {"model_type": "janus_vqgan"}},
        {name.replace("model.", "model.language_model.", 1): shape
         for name, shape in decoder({"0-2": NORMS + ATTENTION + DENSE}).items()}
        | of("model.vision_model.", "post_layernorm:64") | of("model.aligner.", "fc1:64x64")
        | of("model.generation_embeddings.", "norm:64") | of("model.generation_head.", "proj_out:64x64"), runs=4),
    written("llama-embed", "LlamaBidirectionalModel", {"model_type": "llama_bidirec", "pooling": "avg"},
            {name.removeprefix("model."): shape for name, shape in decoder(
                {"0-2": NORMS + ATTENTION + DENSE}, head=False).items()}),
    written("muse-glimmer", "MuseGlimmerForConditionalGeneration", {
        "model_type": "muse_glimmer", "vision_config": {}, "text_config": SIZES | LLAMA | HEAD | {
            "model_type": "muse_glimmer_text", "qk_scale_factor": 1.7, "final_logit_softcapping": 30.0,
            "output_multiplier": 0.25, "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}},
        {name.replace("model.", "model.language_model.", 1): shape for name, shape in decoder(
            {"0-2": NORMS + " pre_feedforward_layernorm:64 post_feedforward_layernorm:64" + ATTENTION
             + " self_attn.gate_proj:64x64" + DENSE}).items()} | of("model.vision_tower.", "norm:64"),
        vocab=bpe("llama4", "<|end|>", "<|bos|>", "<|eot|>", bos="<|bos|>")),
    written("hunyuan-vl", "HunYuanVLForConditionalGeneration", HEAD | {
        "model_type": "hunyuan_vl", "tie_word_embeddings": True, "num_experts": 1, "pad_token_id": -1,
        "eod_token_id": 579, "rope_scaling": {
            "type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]}},
        decoder({"0-2": NORMS + ATTENTION + " self_attn.query_layernorm:16 self_attn.key_layernorm:16" + DENSE})
        | of("vit.", "norm:64"), runs=4),
    written("llada", "LLaDAModelLM", {
        "model_type": "llada", "num_key_value_heads": 4, "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "n_layers": 3,
        "mlp_hidden_size": 128, "max_sequence_length": 4096, "mask_token_id": 578},
        of("model.transformer.", "wte:640x64 ff_out:640x64 ln_f:64") | of(
            "model.transformer.blocks.{0-2}.", "attn_norm:64 ff_norm:64 q_proj:64x64 k_proj:64x64 v_proj:64x64"
            " attn_out:64x64 ff_proj:128x64 up_proj:128x64 ff_out:64x128"), runs=4),
    written("dream", "DreamModel", {"model_type": "Dream", "mask_token_id": 578},
            decoder({"0-2": NORMS + ATTENTION + DENSE + " self_attn.q_proj.bias!:64 self_attn.k_proj.bias!:32"
                     " self_attn.v_proj.bias!:32"}), runs=4),
    written("gemma-embedding", "Gemma3TextModel", HEAD | {
        "model_type": "gemma3_text", "sliding_window": 8, "use_bidirectional_attention": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
        {name.removeprefix("model."): shape for name, shape in decoder(
            {"0-2": NORMS + " pre_feedforward_layernorm:64 post_feedforward_layernorm:64" + ATTENTION + HEAD_NORMS
             + DENSE}, head=False).items()}, vocab=_GEMMA, files=_POOLED),
    written("lfm2-embedding", "Lfm2BidirectionalModel", _LFM_2 | {"model_type": "lfm2"}, _LFM_2_TENSORS,
            files=_POOLED),
    written("lfm2-masked", "Lfm2BidirectionalForMaskedLM", _LFM_2 | {"model_type": "lfm2"},
            inside("lfm2.", _LFM_2_TENSORS)),
    written("minicpm-v4.6", "MiniCPMV4_6ForConditionalGeneration", {
        "model_type": "minicpmv4_6", "vision_config": {}, "text_config": SIZES | LLAMA | HEAD | _DELTA | {
            "model_type": "qwen3_5_text", "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5,
                                "mrope_section": [2, 1, 1]}}},
        {name.replace("model.", "model.language_model.", 1): shape for name, shape in (decoder(
            {"0-1": NORMS + DENSE, "0": _LINEAR, "1": " self_attn.q_proj:128x64 self_attn.k_proj:32x64"
             " self_attn.v_proj:32x64 self_attn.o_proj:64x64" + HEAD_NORMS})).items()}
        | of("model.merger.", "linear:64x64") | of("mtp.", "fc:64x128"), options=("--no-nextn",), f32=("A_log",),
        runs=5),
    written("deepseek-ocr", "DeepseekOCRForCausalLM", {
        "model_type": "deepseek_vl_v2", "vision_config": {"model_type": "vision"},
        "language_config": SIZES | LATENT | {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "n_group": 1, "topk_group": 1,
            "norm_topk_prob": False, "q_lora_rank": None, "kv_lora_rank": None, "use_mla": False,
            "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}},
        decoder({"0-2": NORMS + " self_attn.q_proj:64x64 self_attn.k_proj:64x64 self_attn.v_proj:64x64"
                 " self_attn.o_proj:64x64", "0": DENSE, "1-2": EXPERTS + SHARED})
        | of("model.sam_model.", "norm:64") | of("model.vision_model.", "norm:64")
        | of("model.projector.", "layers:64x64")),
    written("internlm2", "InternLM2ForCausalLM", {"model_type": "internlm2", "vocab_size": 600, "bias": False},
            of("model.", "tok_embeddings:600x64 norm:64") | of("", "output:600x64") | of(
                "model.layers.{0-2}.", "attention_norm:64 ffn_norm:64 attention.wqkv:128x64 attention.wo:64x64"
                " feed_forward.w1:128x64 feed_forward.w2:64x128 feed_forward.w3:128x64"),
            vocab=spm(first=("<unk>", "<s>", "</s>", "[UNUSED_TOKEN_1]", "<|im_end|>", "<|plugin|>"),
                      user_pieces=["<|im_end|>", "<|plugin|>"], added=["<|extra|>"]), runs=4),
    written("xverse", "XverseForCausalLM", {"model_type": "xverse", "num_key_value_heads": 4, "vocab_size": 640},
            decoder({"0-2": NORMS + " self_attn.q_proj:64x64 self_attn.k_proj:64x64 self_attn.v_proj:64x64"
                     " self_attn.o_proj:64x64" + DENSE}),
            vocab=_PIECES | {"pieces": 637, "special": ["<|end|>"], "user": ["<|u|>", "<|v|>"]}, runs=4),
    written("qwen", "QWenLMHeadModel", {
        "model_type": "qwen", "vocab_size": 584, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000,
        "bos_token_id": None, "eos_token_id": None, "intermediate_size": 256, "num_key_value_heads": 4},
        of("transformer.", "wte:584x64 ln_f:64") | of("", "lm_head:584x64") | of(
            "transformer.h.{0-2}.", "ln_1:64 ln_2:64 attn.c_attn:192x64 attn.c_attn.bias!:192 attn.c_proj:64x64"
            " mlp.w1:128x64 mlp.w2:128x64 mlp.c_proj:64x128"), vocab=_QWEN, runs=4),
    written("mpt", "MPTForCausalLM", {
        "model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 2048,
        "attn_config": {"alibi": True, "alibi_bias_max": 16, "clip_qkv": 6}},
        of("transformer.", "wte:640x64 norm_f:64") | of(
            "transformer.blocks.{0-2}.", "norm_1:64 norm_2:64 attn.Wqkv:192x64 attn.out_proj:64x64"
            " ffn.up_proj:256x64 ffn.down_proj:64x256"), vocab=VOCAB | {"pre": "mpt"}, runs=4),
    written("jais", "JAISLMHeadModel", {
        "model_type": "jais", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_inner": 96, "n_positions": 2048,
        "activation_function": "swiglu", "position_embedding_type": "alibi", "layer_norm_epsilon": 1e-5,
        "mup_embeddings_scale": 9.1705785388303, "mup_output_alpha": 1.09518349815769, "mup_width_scale": 0.125},
        of("transformer.", "wte:640x64 ln_f:64 ln_f.bias!:64 relative_pe.slopes!:4") | of("", HEADS) | of(
            "transformer.h.{0-2}.", "ln_1:64 ln_1.bias!:64 ln_2:64 ln_2.bias!:64 attn.c_attn:64x192"
            " attn.c_attn.bias!:192 attn.c_proj:64x64 attn.c_proj.bias!:64 mlp.c_fc:64x96 mlp.c_fc.bias!:96"
            " mlp.c_fc2:64x96 mlp.c_fc2.bias!:96 mlp.c_proj:96x64 mlp.c_proj.bias!:64"), f32=("slopes",),
        vocab=VOCAB | {"pre": "jais"}),
    written("refact", "GPTRefactForCausalLM", {
        "model_type": "gpt_refact", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 4096,
        "layer_norm_epsilon": 1e-5},
        of("transformer.", "wte:640x64") | of("", "ln_f:64 lm_head:640x64") | of(
            "transformer.h.{0-2}.", "ln_1:64 ln_2:64 attn.q:64x64 attn.kv:32x64 attn.c_proj:64x64"
            " mlp.gate_up_proj:512x64 mlp.c_proj:64x256"), vocab=VOCAB | {"pre": "refact"}),
    written("rugpt3xl", "RuGPT3XLForCausalLM", {
        "model_type": "rugpt3xl", "num_key_value_heads": 4, "layer_norm_eps": 1e-5},
        of("model.", "embed_tokens:640x64 embed_positions:4096x64 norm:64 norm.bias!:64") | of("", HEADS) | of(
            "model.layers.{0-2}.", NORMS + " input_layernorm.bias!:64 post_attention_layernorm.bias!:64"
            " self_attn.q_proj:64x64 self_attn.k_proj:64x64 self_attn.v_proj:64x64 self_attn.o_proj:64x64"
            " self_attn.q_proj.bias!:64 self_attn.k_proj.bias!:64 self_attn.v_proj.bias!:64 self_attn.o_proj.bias!:64"
            " mlp.up_proj:256x64 mlp.up_proj.bias!:256 mlp.down_proj:64x256 mlp.down_proj.bias!:64"),
        vocab=VOCAB | {"pre": "gpt-2"}),
    written("openelm", "OpenELMForCausalLM", HEAD | {
        "model_type": "openelm", "model_dim": 64, "num_transformer_layers": 3, "max_context_length": 2048,
        "ffn_multipliers": [0.5, 1.3, 2.0], "ffn_dim_divisor": 32, "num_kv_heads": [1, 1, 2],
        "num_query_heads": [4, 4, 8], "rope_freq_constant": 10000},
        of("transformer.", "token_embeddings:640x64 norm:64") | of("transformer.layers.{0-2}.",
            "attn_norm:64 ffn_norm:64 attn.q_norm:16 attn.k_norm:16") | of(
            "transformer.layers.{0-1}.", "attn.qkv_proj:96x64 attn.out_proj:64x64") | of(
            "transformer.layers.2.", "attn.qkv_proj:192x64 attn.out_proj:64x128") | of(
            "transformer.layers.0.", "ffn.proj_1:64x64 ffn.proj_2:64x32") | of(
            "transformer.layers.1.", "ffn.proj_1:192x64 ffn.proj_2:64x96") | of(
            "transformer.layers.2.", "ffn.proj_1:256x64 ffn.proj_2:64x128"), vocab=spm()),
    written("plamo2", "Plamo2ForCausalLM", {
        "model_type": "plamo2", "num_hidden_layers": 4, "mamba_step": 2, "mamba_d_state": 8, "mamba_d_conv": 4,
        "mamba_num_heads": 8, "hidden_size_per_head": 16},
        of("model.", "embed_tokens:640x64 norm:64") | of(
            "model.layers.layers.{0-3}.", "pre_mixer_norm:64 post_mixer_norm:64 pre_mlp_norm:64 post_mlp_norm:64"
            " mlp.gate_up_proj:256x64 mlp.down_proj:64x128") | of(
            "model.layers.layers.{0,2}.", "mixer.in_proj:256x64 mixer.conv1d:128x1x4 mixer.bcdt_proj:80x128"
            " mixer.dt_proj:8x64 mixer.dt_bias!:8 mixer.A_log!:8 mixer.D!:8 mixer.dt_norm_weight!:64"
            " mixer.B_norm_weight!:8 mixer.C_norm_weight!:8 mixer.out_proj:64x128") | of(
            "model.layers.layers.{1,3}.", "mixer.qkv_proj:128x64 mixer.o_proj:64x64 mixer.q_weight!:4x16"
            " mixer.k_weight!:2x16"), f32=("A_log", "dt_bias", ".D"), vocab=_PLAMO),
    written("plamo3", "Plamo3ForCausalLM", HEAD | {
        "model_type": "plamo3", "window_size": 8, "sliding_window_pattern": 4, "rope_scaling_factor": 8,
        "initial_context_length": 512},
        of("model.", "embed_tokens:640x64 norm:64") | of("", HEADS) | of(
            "model.layers.layers.{0-2}.", "pre_mixer_norm:64 post_mixer_norm:64 pre_mlp_norm:64 post_mlp_norm:64"
            " mlp.gate_up_proj:256x64 mlp.down_proj:64x128 mixer.qkv_proj:128x64 mixer.o_proj:64x64 mixer.q_norm:16"
            " mixer.k_norm:16"), vocab=_PLAMO, files={"chat_template.jinja": "{{ messages }}"}),
    written("baichuan", "BaichuanForCausalLM", {"model_type": "baichuan", "num_key_value_heads": 4},
            decoder({"0-2": NORMS + " self_attn.W_pack:192x64 self_attn.o_proj:64x64" + DENSE}), vocab=spm(), runs=4),
    written("gemma4-assistant", "Gemma4AssistantForCausalLM", HEAD | {
        "model_type": "gemma4_assistant", "backbone_hidden_size": 128, "text_config": SIZES | LLAMA | {
            "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
            "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0, "moe_intermediate_size": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}},
        of("", "pre_projection:64x256 post_projection:128x64 masked_embedding.centroids:16x64") | of(
            "model.", "embed_tokens:640x64 norm:64") | of("model.layers.{0-1}.", NORMS
            + " pre_feedforward_layernorm:64 post_feedforward_layernorm:64 layer_scalar!:1" + DENSE) | of(
            "model.layers.0.", "self_attn.q_proj:64x64 self_attn.o_proj:64x64 self_attn.q_norm:16") | of(
            "model.layers.1.", "self_attn.q_proj:128x64 self_attn.o_proj:64x128 self_attn.q_norm:32"),
        vocab=_GEMMA4),
    written("plamo", "PlamoForCausalLM", {
        "model_type": "plamo", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 5,
        "num_hidden_layers": 1, "intermediate_size": 32},
        of("model.", "embed_tokens:640x5120 norm:5120") | of("", "lm_head:640x5120") | of(
            "model.layers.layers.0.", "norm:5120 self_attn.q_proj:5120x5120 self_attn.k_proj:640x5120"
            " self_attn.v_proj:640x5120 self_attn.o_proj:5120x5120 self_attn.rotary_emb.inv_freq!:64"
            " mlp.gate_proj:32x5120 mlp.up_proj:32x5120 mlp.down_proj:5120x32"), vocab=spm(), outtypes=("bf16",)),
    written("deepseek-v4", "DeepseekV4ForCausalLM", MIXTURE | {
        "model_type": "deepseek_v4", "head_dim": 32, "num_key_value_heads": 1, "num_nextn_predict_layers": 1,
        "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_routed_experts": 4,
        "n_shared_experts": 1, "swiglu_limit": 10.0, "qk_rope_head_dim": 16, "q_lora_rank": 32, "sliding_window": 8,
        "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8, "o_groups": 2, "o_lora_rank": 32,
        "compress_ratios": [0, 0, 4], "compress_rope_theta": 160000.0, "hc_mult": 2, "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6, "num_hash_layers": 1, "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0"}, "rope_scaling": {
            "type": "yarn", "factor": 16, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}},
        of("", "embed:640x64 norm:64 head:640x64 hc_head_fn!:2x128 hc_head_base!:2 hc_head_scale!:1") | of(
            "layers.{0-2}.", "attn_norm:64 ffn_norm:64 hc_attn_fn!:8x128 hc_attn_base!:8 hc_attn_scale!:3"
            " hc_ffn_fn!:8x128 hc_ffn_base!:8 hc_ffn_scale!:3 attn.attn_sink!:4 attn.wq_a:32x64 attn.q_norm:32"
            " attn.wq_b:128x32 attn.wkv:32x64 attn.kv_norm:32 attn.wo_a:64x64 attn.wo_b:64x64 ffn.gate:4x64"
            " ffn.experts.{0-3}.w1:32x64 ffn.experts.{0-3}.w2:64x32 ffn.experts.{0-3}.w3:32x64"
            " ffn.shared_experts.w1:32x64 ffn.shared_experts.w2:64x32 ffn.shared_experts.w3:32x64") | of(
            "layers.0.", "ffn.gate.tid2eid!:640x2 ffn.gate.bias_vl!:4 ffn.gate.bias!:4") | of(
            "layers.{1-2}.", "ffn.gate.bias!:4") | of(
            "layers.2.", "attn.compressor.ape!:4x64 attn.compressor.wkv:64x64 attn.compressor.wgate:64x64"
            " attn.compressor.norm:32 attn.indexer.wq_b:64x32 attn.indexer.weights_proj:2x64"
            " attn.indexer.compressor.ape!:4x64 attn.indexer.compressor.wkv:64x64"
            " attn.indexer.compressor.wgate:64x64 attn.indexer.compressor.norm:32") | of("mtp.0.", "norm:64"),
        f32=("_fn", "_base", "_scale", "attn_sink", "gate.bias", ".ape"), quantized={"each": [
            {"method": "mxfp4", "beside": True, "targets": r"ffn\.experts\.\d+\.w\d\.weight$"},
            {"method": "numbers", "below": 4, "targets": r"tid2eid$"},
            {"method": "fp8", "block": [128, 128], "dtype": "F8_E8M0", "name": ".scale",
             "targets": r"(attn\.(indexer\.)?w\w+|shared_experts\.w\d)\.weight$"}]}),
    written("rwkv6", "Rwkv6ForCausalLM", {
        "model_type": "rwkv6", "head_size": 16, "layer_norm_epsilon": 1e-5, "rescale_every": 2,
        "intermediate_size": None, "vocab_size": 640},
        of("rwkv.", "embeddings:640x64 ln_out:64 ln_out.bias!:64 blocks.0.pre_ln:64 blocks.0.pre_ln.bias!:64")
        | of("", "head:640x64") | of(
            "rwkv.blocks.{0-2}.", "ln1:64 ln1.bias!:64 ln2:64 ln2.bias!:64 attention.time_maa_x!:1x1x64"
            " attention.time_maa_w!:1x1x64 attention.time_maa_k!:1x1x64 attention.time_maa_v!:1x1x64"
            " attention.time_maa_r!:1x1x64 attention.time_maa_g!:1x1x64 attention.time_maa_w1!:64x160"
            " attention.time_maa_w2!:5x32x64 attention.time_decay!:1x1x64 attention.time_decay_w1!:64x64"
            " attention.time_decay_w2!:64x64 attention.time_faaaa!:4x16 attention.receptance:64x64"
            " attention.key:64x64 attention.value:64x64 attention.output:64x64 attention.gate:64x64"
            " attention.ln_x:64 attention.ln_x.bias!:64 feed_forward.time_maa_k!:1x1x64"
            " feed_forward.time_maa_r!:1x1x64 feed_forward.key:224x64 feed_forward.receptance:64x64"
            " feed_forward.value:64x224"), vocab={"kind": "rwkv", "config": {"chat_template": CHAT}}),
    written("rwkv7", "RWKV7ForCausalLM", {
        "model_type": "rwkv7", "head_dim": 16, "norm_eps": 1e-5, "intermediate_size": None, "vocab_size": 640,
        "decay_low_rank_dim": 32, "a_low_rank_dim": 32, "v_low_rank_dim": None, "gate_low_rank_dim": None},
        of("model.", "embeddings:640x64 norm:64 norm.bias!:64 layers.0.pre_norm:64 layers.0.pre_norm.bias!:64")
        | of("", "lm_head:640x64") | of(
            "model.layers.{0-2}.", "attn_norm:64 attn_norm.bias!:64 ffn_norm:64 ffn_norm.bias!:64"
            " attn.x_r!:1x1x64 attn.x_w!:1x1x64 attn.x_k!:1x1x64 attn.x_v!:1x1x64 attn.x_a!:1x1x64 attn.x_g!:1x1x64"
            " attn.w_lora.lora.0:32x64 attn.w_lora.lora.2:64x32 attn.w_lora.lora.2.bias!:64 attn.a_lora.lora.0:32x64"
            " attn.a_lora.lora.2:64x32 attn.a_lora.lora.2.bias!:64 attn.g_lora.lora.0:32x64 attn.g_lora.lora.2:64x32"
            " attn.k_k!:64 attn.k_a!:64 attn.r_k!:4x16 attn.r_proj:64x64 attn.k_proj:64x64 attn.v_proj:64x64"
            " attn.o_proj:64x64 attn.g_norm:64 attn.g_norm.bias!:64 ffn.x_k!:64 ffn.key:256x64 ffn.value:64x256") | of(
            "model.layers.{1-2}.", "attn.v_lora.lora.0:32x64 attn.v_lora.lora.2:64x32 attn.v_lora.lora.2.bias!:64"),
        vocab={"kind": "rwkv", "config": {"chat_template": CHAT}}),
    written("rwkv7-plain", "Rwkv7ForCausalLM", {
        "model_type": "rwkv7", "head_size": 16, "layer_norm_epsilon": 1e-5, "intermediate_size": 256,
        "lora_rank_decay": 32, "lora_rank_iclr": 32, "lora_rank_value_residual_mix": 32, "lora_rank_gate": 32},
        of("model.", "embeddings:640x64 ln_out:64 ln_out.bias!:64 pre_ln:64 pre_ln.bias!:64")
        | of("", "head:640x64") | of(
            "model.blocks.{0-1}.", "ln1:64 ln1.bias!:64 ln2:64 ln2.bias!:64 attention.x_x!:6x64"
            " attention.w0!:1x1x64 attention.w1!:64x32 attention.w2!:32x64 attention.a0!:1x1x64 attention.a1!:64x32"
            " attention.a2!:32x64 attention.v0!:1x1x64 attention.v1!:64x32 attention.v2!:32x64 attention.g1!:64x32"
            " attention.g2!:32x64 attention.k_k!:1x1x64 attention.k_a!:1x1x64 attention.r_k!:4x16"
            " attention.receptance:64x64 attention.key:64x64 attention.value:64x64 attention.output:64x64"
            " attention.ln_x:64 attention.ln_x.bias!:64 ffn.x_k!:1x1x64 ffn.key:256x64 ffn.value:64x256"),
        vocab={"kind": "rwkv", "config": {"chat_template": CHAT}}),
    written("rwkv6-qwen2", "RWKV6Qwen2ForCausalLM", {"model_type": "rwkv6qwen2"}, decoder({
        "0-2": NORMS + ATTENTION + DENSE + " self_attn.time_maa_x!:1x1x64 self_attn.time_maa_w!:1x1x64"
        " self_attn.time_maa_k!:1x1x64 self_attn.time_maa_v!:1x1x64 self_attn.time_maa_r!:1x1x64"
        " self_attn.time_maa_g!:1x1x64 self_attn.time_maa_w1!:64x160 self_attn.time_maa_w2!:5x32x64"
        " self_attn.time_decay!:1x1x64 self_attn.time_decay_w1!:64x64 self_attn.time_decay_w2!:64x64"
        " self_attn.gate:64x64"})),
    written("arwkv7", "RwkvHybridForCausalLM", {
        "model_type": "rwkv_hybrid", "head_size": 64, "wkv_version": 7, "wkv_has_gate": True,
        "wkv_has_group_norm": False}, decoder({
            "0-2": NORMS + DENSE + "".join(f" self_attn.time_mixer.x_{c}!:1x1x64" for c in "rwkvag")
            + " self_attn.time_mixer.w0!:1x1x64"
            " self_attn.time_mixer.w1!:64x64 self_attn.time_mixer.w2!:64x64 self_attn.time_mixer.a0!:1x1x64"
            " self_attn.time_mixer.a1!:64x64 self_attn.time_mixer.a2!:64x64 self_attn.time_mixer.g1!:64x128"
            " self_attn.time_mixer.g2!:128x64 self_attn.time_mixer.k_k!:1x1x64 self_attn.time_mixer.k_a!:1x1x64"
            " self_attn.time_mixer.r_k!:1x64 self_attn.time_mixer.receptance:64x64 self_attn.time_mixer.key:64x64"
            " self_attn.time_mixer.value:64x64 self_attn.time_mixer.output:64x64",
            "1-2": " self_attn.time_mixer.v0!:1x1x64 self_attn.time_mixer.v1!:64x32 self_attn.time_mixer.v2!:32x64"})),
)  # fmt: skip

"""Names of tensors: in a GGUF file of each architecture, and in checkpoints.

Facts of llama.cpp b11434 (tensor_mapping of gguf-py), for its text models. A kind of tensor is named as in the
file; ``*`` stands for the layer, in a kind for ``blk.LAYER.``; what follows a colon tells apart kinds that have one
name in files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from quantkit.errors import TypeNotSupported

#: Architecture -> the kinds of its tensors, in a text: tensor_kinds.json, which scripts/make_tensor_kinds.py makes.
KINDS: dict[str, str] = json.loads((Path(__file__).parent / "tensor_kinds.json").read_bytes())
#: Kind -> its names in checkpoints, without .weight and .bias. Of two kinds of an architecture with one name,
#: the later has it.
PATTERNS: dict[str, str] = {
    "token_embd": (
        "gpt_neox.embed_in transformer.wte transformer.word_embeddings word_embeddings model.embed_tokens embed_tokens "
        "tok_embeddings embeddings.word_embeddings embeddings.tok_embeddings wte transformer.embd.wte "
        "model.tok_embeddings model.embedding backbone.embedding backbone.embeddings transformer.in_out_embed "
        "embedding.word_embeddings transformer.token_embeddings shared rwkv.embeddings model.embeddings "
        "model.word_embeddings encoder model.transformer.wte model.embed"
    ),
    "token_embd_norm": (
        "word_embeddings_layernorm embeddings.LayerNorm embeddings.norm emb_ln transformer.norm rwkv.blocks.0.pre_ln "
        "model.pre_ln model.layers.0.pre_norm backbone.norm model.embedding_norm"
    ),
    "token_types": "embeddings.token_type_embeddings type_emb joint_head.type_embedding",
    "position_embd": "transformer.wpe embeddings.position_embeddings wpe model.embed_positions",
    "output": (
        "embed_out lm_head output word_embeddings_for_head lm_head.linear output_layer head head.out model.lm_head "
        "model.transformer.ff_out head.decoder"
    ),
    "dense_2": "dense_2_out",
    "output_norm": (
        "gpt_neox.final_layer_norm transformer.ln_f model.norm norm transformer.norm_f ln_f model.final_layernorm "
        "lm_head.ln model.norm_f backbone.norm_f transformer.rms_norm encoder.final_layernorm transformer.norm "
        "rwkv.ln_out model.ln_out backbone.final_layer_norm model.transformer.ln_f final_norm"
    ),
    "rope_factors_long": "",
    "rope_factors_short": "",
    "*attn_norm": (
        "gpt_neox.layers.*.input_layernorm transformer.h.*.ln_1 transformer.blocks.*.norm_1 "
        "transformer.h.*.input_layernorm h.*.input_layernorm transformer.h.*.ln_mlp model.layers.*.input_layernorm "
        "layers.*.attention_norm model.layers.*.ln1 h.*.ln_1 transformer.h.*.ln model.layers.layers.*.norm "
        "model.layers.layers.*.pre_mixer_norm model.layers.*.attention_norm model.layers.*.norm backbone.layers.*.norm "
        "transformer.decoder_layer.*.rms_norm model.layers.*.pre_attn_norm transformer.blocks.*.norm_attn_norm.norm_1 "
        "encoder.layers.*.input_layernorm transformer.layers.*.attn_norm rwkv.blocks.*.ln1 layers.*.input_layernorm "
        "transformer_encoder.*.attention_norm layers.*.attn_norm model.layers.*.operator_norm "
        "model.transformer.blocks.*.attn_norm model.layers.*.attention_layernorm "
        "model.layers.*.pre_attention_layernorm head.layers.*.norm1"
    ),
    "*attn_norm_2": (
        "transformer.h.*.ln_attn encoder.layer.*.layer_norm_1 rwkv.blocks.*.ln2 model.layers.*.ln2 "
        "model.layers.*.post_attention_layernorm model.layers.*.self_attn.norm"
    ),
    "*attn_qkv": (
        "gpt_neox.layers.*.attention.query_key_value transformer.h.*.attn.c_attn transformer.blocks.*.attn.Wqkv "
        "transformer.blocks.*.norm_attn_norm.attn.Wqkv transformer.h.*.self_attention.query_key_value "
        "h.*.self_attention.query_key_value model.layers.*.self_attn.query_key_value "
        "model.layers.*.attention.query_key_value h.*.attn.c_attn transformer.h.*.mixer.Wqkv "
        "encoder.layers.*.attn.Wqkv encoder.layers.*.mixer.Wqkv model.layers.*.self_attn.qkv_proj "
        "model.layers.layers.*.mixer.qkv_proj encoder.layers.*.self_attention.query_key_value "
        "transformer.layers.*.attn.qkv_proj transformer_encoder.*.qkv layers.*.attn.Wqkv "
        "model.layers.*.self_attn.language_expert_query_key_value model.layers.*.linear_attn.in_proj_qkv "
        "head.layers.*.self_attn.in_proj"
    ),
    "*attn_q": (
        "model.layers.*.self_attn.q_proj model.layers.*.attention.q_proj layers.*.self_attn.q_proj "
        "model.layers.*.self_attn.q_proj_no_perm layers.*.attention.wq encoder.layer.*.attention.self.query "
        "transformer.layer.*.attention.q_lin transformer.h.*.attn.q_proj model.layers.layers.*.self_attn.q_proj "
        "model.layers.*.attention.wq transformer.decoder_layer.*.multi_head_attention.query "
        "transformer.h.*.attn.attention.q_proj model.transformer.blocks.*.q_proj backbone.layers.*.mixer.q_proj "
        "model.blocks.*.attn.attn_query"
    ),
    "*attn_k": (
        "model.layers.*.self_attn.k_proj model.layers.*.attention.k_proj layers.*.self_attn.k_proj "
        "model.layers.*.self_attn.k_proj_no_perm layers.*.attention.wk encoder.layer.*.attention.self.key "
        "transformer.layer.*.attention.k_lin transformer.h.*.attn.k_proj transformer.h.*.attn.k "
        "model.layers.layers.*.self_attn.k_proj model.layers.*.attention.wk "
        "transformer.decoder_layer.*.multi_head_attention.key transformer.h.*.attn.attention.k_proj "
        "model.transformer.blocks.*.k_proj backbone.layers.*.mixer.k_proj model.blocks.*.attn.attn_key"
    ),
    "*attn_v": (
        "model.layers.*.self_attn.v_proj model.layers.*.attention.v_proj layers.*.self_attn.v_proj "
        "layers.*.attention.wv encoder.layer.*.attention.self.value transformer.layer.*.attention.v_lin "
        "transformer.h.*.attn.v_proj transformer.h.*.attn.v model.layers.layers.*.self_attn.v_proj "
        "model.layers.*.attention.wv transformer.decoder_layer.*.multi_head_attention.value "
        "transformer.h.*.attn.attention.v_proj model.transformer.blocks.*.v_proj backbone.layers.*.mixer.v_proj "
        "model.blocks.*.attn.attn_value"
    ),
    "*attn_output": (
        "gpt_neox.layers.*.attention.dense transformer.h.*.attn.c_proj transformer.blocks.*.attn.out_proj "
        "transformer.h.*.self_attention.dense h.*.self_attention.dense model.layers.*.self_attn.o_proj "
        "model.layers.*.attention.o_proj model.layers.*.attention.dense layers.*.self_attn.o_proj "
        "model.layers.*.self_attn.out_proj model.layers.*.self_attn.linear_attn layers.*.attention.wo "
        "encoder.layer.*.attention.output.dense layers.*.attn.Wo transformer.layer.*.attention.out_lin "
        "transformer.h.*.attn.out_proj model.layers.*.self_attn.dense h.*.attn.c_proj transformer.h.*.mixer.out_proj "
        "model.layers.layers.*.self_attn.o_proj model.layers.layers.*.mixer.o_proj model.layers.*.attention.wo "
        "encoder.layers.*.attn.out_proj encoder.layers.*.mixer.out_proj "
        "transformer.decoder_layer.*.multi_head_attention.linear transformer.blocks.*.norm_attn_norm.attn.out_proj "
        "encoder.layers.*.self_attention.dense transformer.layers.*.attn.out_proj "
        "transformer.h.*.attn.attention.out_proj transformer_encoder.*.wo model.transformer.blocks.*.attn_out "
        "backbone.layers.*.mixer.o_proj model.layers.*.self_attn.language_expert_dense model.blocks.*.attn.attn_resid "
        "head.layers.*.self_attn.out_proj"
    ),
    "*attn_output_norm": (
        "encoder.layer.*.attention.output.LayerNorm transformer.layer.*.sa_layer_norm encoder.layers.*.norm1 "
        "transformer.decoder_layer.*.rms_norm_1 model.layers.*.post_attn_norm "
        "transformer.blocks.*.norm_attn_norm.norm_2"
    ),
    "*post_attention_norm": (
        "model.layers.*.post_attention_layernorm layers.*.post_attention_layernorm "
        "model.layers.*.post_self_attn_layernorm model.layers.layers.*.post_mixer_norm.weight"
    ),
    "*attn_rot_embd": (
        "model.layers.*.self_attn.rotary_emb.inv_freq layers.*.attention.inner_attention.rope.freqs "
        "model.layers.layers.*.self_attn.rotary_emb.inv_freq transformer.h.*.attn.rotary_emb.inv_freq"
    ),
    "*attn_sinks": (
        "model.layers.*.self_attn.sinks model.layers.*.self_attn.attention_sink_bias "
        "model.layers.*.self_attn.learnable_sink_param"
    ),
    "*attn_gate": (
        "model.layers.*.self_attn.gate_proj model.layers.*.linear_attn.in_proj_z model.layers.*.self_attn.g_proj "
        "model.layers.*.self_attn.output_gate model.layers.*.self_attn.linear_gate"
    ),
    "*ffn_norm": (
        "gpt_neox.layers.*.post_attention_layernorm transformer.h.*.ln_2 h.*.post_attention_layernorm "
        "transformer.blocks.*.norm_2 model.layers.*.post_attention_layernorm layers.*.ffn_norm model.layers.*.ln2 "
        "h.*.ln_2 model.layers.*.ffn_norm transformer.decoder_layer.*.rms_norm_2 model.layers.*.pre_moe_norm "
        "encoder.layers.*.post_attention_layernorm transformer.layers.*.ffn_norm model.layers.*.pre_ff_layernorm "
        "model.layers.*.pre_moe_layernorm transformer_encoder.*.ffn_norm model.layers.layers.*.pre_mlp_norm "
        "model.transformer.blocks.*.ff_norm layers.*.post_attention_layernorm model.layers.*.feedforward_layernorm "
        "model.layers.*.pre_mlp_layernorm layers.*.mlp_norm head.layers.*.norm2"
    ),
    "*ffn_norm:pre": (
        "model.layers.*.pre_feedforward_layernorm layers.*.pre_feedforward_layernorm "
        "model.layers.*.pre_ff_layernorm.weight model.layers.*.pre_mlp_layernorm"
    ),
    "*pre_ffw_norm_2": "model.layers.*.pre_feedforward_layernorm_2",
    "*post_ffw_norm": (
        "model.layers.*.post_feedforward_layernorm layers.*.post_feedforward_layernorm "
        "model.layers.*.post_mlp_layernorm model.layers.layers.*.post_mlp_norm.weight "
        "model.layers.*.feed_forward.up_proj model.layers.*.post_moe_norm"
    ),
    "*post_ffw_norm_1": "model.layers.*.post_feedforward_layernorm_1",
    "*post_ffw_norm_2": "model.layers.*.post_feedforward_layernorm_2",
    "*ffn_gate_inp": (
        "layers.*.feed_forward.gate model.layers.*.block_sparse_moe.gate model.layers.*.mlp.gate "
        "transformer.decoder_layer.*.router transformer.blocks.*.ffn.router.layer "
        "model.layers.*.block_sparse_moe.router.layer model.layers.*.block_sparse_moe.router "
        "model.layers.*.feed_forward.router encoder.layers.*.mlp.router.layer model.layers.*.mlp.router "
        "model.layers.*.mlp.gate.wg model.layers.*.block_sparse_moe.primary_router model.layers.*.feed_forward.gate "
        "model.layers.*.mlp.router.gate layers.*.gate backbone.layers.*.mixer.gate model.layers.*.moe.gate "
        "model.layers.*.router.proj"
    ),
    "*ffn_gate_inp_shexp": "model.layers.*.mlp.shared_expert_gate",
    "*exp_probs_b": (
        "model.layers.*.mlp.gate.e_score_correction model.layers.*.mlp.moe_statics.e_score_correction "
        "model.layers.*.mlp.gate.expert_bias model.layers.*.mlp.expert_bias model.layers.*.feed_forward.expert_bias "
        "model.layers.*.block_sparse_moe.e_score_correction backbone.layers.*.mixer.gate.e_score_correction "
        "model.layers.*.mlp.e_score_correction model.layers.*.block_sparse_moe.gate.e_score_correction "
        "model.layers.*.moe.router_bias model.layers.*.mlp.experts.e_score_correction"
    ),
    "*ffn_up": (
        "gpt_neox.layers.*.mlp.dense_h_to_4h transformer.h.*.mlp.c_fc transformer.blocks.*.ffn.up_proj "
        "transformer.h.*.mlp.dense_h_to_4h h.*.mlp.dense_h_to_4h model.layers.*.mlp.up_proj layers.*.mlp.up_proj "
        "layers.*.feed_forward.w3 encoder.layer.*.intermediate.dense layers.*.mlp.Wi transformer.layer.*.ffn.lin1 "
        "transformer.h.*.mlp.fc_in transformer.h.*.mlp.linear_3 model.layers.*.mlp.dense_h_to_4h "
        "transformer.h.*.mlp.w1 h.*.mlp.c_fc transformer.h.*.mlp.fc1 model.layers.*.mlp.fc1 "
        "model.layers.*.mlp.gate_up_proj model.layers.layers.*.mlp.up_proj model.layers.layers.*.mlp.gate_up_proj "
        "model.layers.*.feed_forward.w3 encoder.layers.*.mlp.fc11 encoder.layers.*.mlp.fc1 model.layers.*.mlp.c_fc "
        "encoder.layer.*.mlp.gated_layers_v encoder.layer.*.mlp.gated_layers encoder.layer.*.mlp.up_gated_layer "
        "model.layers.*.residual_mlp.w3 encoder.layers.*.mlp.dense_h_to_4h transformer.h.*.mlp.c_fc_1 "
        "model.layers.*.feed_forward.up_proj transformer_encoder.*.ffn.w12 model.layers.*.block_sparse_moe.up "
        "model.transformer.blocks.*.up_proj backbone.layers.*.mixer.up_proj model.layers.*.mlp.language_mlp.up_proj "
        "model.blocks.*.mlp.mlp_linear head.layers.*.linear1"
    ),
    "*ffn_up_exps": (
        "layers.*.feed_forward.experts.w3 transformer.decoder_layer.*.moe.linear_v "
        "transformer.blocks.*.ffn.experts.mlp.v1 model.layers.*.mlp.experts.up_proj "
        "model.layers.*.block_sparse_moe.experts.w3 model.layers.*.feed_forward.experts.up_proj "
        "encoder.layers.*.mlp.experts.mlp.w1 model.layers.*.block_sparse_moe.experts.up model.layers.*.moe.up_proj"
    ),
    "*ffn_up_shexp": (
        "model.layers.*.mlp.shared_expert.up_proj model.layers.*.mlp.shared_experts.up_proj "
        "model.layers.*.feed_forward.shared_expert.up_proj model.layers.*.feed_forward.down_proj "
        "model.layers.*.mlp.shared_mlp.up_proj layers.*.shared_experts.w3 "
        "backbone.layers.*.mixer.shared_experts.up_proj model.layers.*.block_sparse_moe.shared_experts.up_proj "
        "model.layers.*.share_expert.up_proj"
    ),
    "*ffn_up_chexps": "model.layers.*.mlp.chunk_experts.up_proj",
    "*ffn": "transformer.blocks.*.ffn.act",
    "*ffn_gate": (
        "model.layers.*.mlp.gate_proj layers.*.mlp.gate_proj layers.*.feed_forward.w1 transformer.h.*.mlp.w2 "
        "transformer.h.*.mlp.c_fc2 model.layers.layers.*.mlp.gate_proj model.layers.*.feed_forward.w1 "
        "encoder.layers.*.mlp.fc12 encoder.layer.*.mlp.gated_layers_w transformer.h.*.mlp.linear_1 "
        "model.layers.*.residual_mlp.w1 transformer.h.*.mlp.c_fc_0 model.layers.*.feed_forward.gate_proj "
        "model.transformer.blocks.*.ff_proj model.layers.*.mlp.language_mlp.gate_proj model.blocks.*.mlp.mlp_gate"
    ),
    "*ffn_gate_exps": (
        "layers.*.feed_forward.experts.w1 transformer.decoder_layer.*.moe.linear "
        "transformer.blocks.*.ffn.experts.mlp.w1 model.layers.*.mlp.experts.gate_proj "
        "model.layers.*.block_sparse_moe.experts.w1 model.layers.*.feed_forward.experts.gate_proj "
        "model.layers.*.block_sparse_moe.experts.gate model.layers.*.moe.gate_proj"
    ),
    "*ffn_gate_shexp": (
        "model.layers.*.mlp.shared_expert.gate_proj model.layers.*.mlp.shared_experts.gate_proj "
        "model.layers.*.feed_forward.shared_expert.gate_proj model.layers.*.mlp.shared_mlp.gate_proj "
        "layers.*.shared_experts.w1 model.layers.*.block_sparse_moe.shared_experts.gate_proj "
        "model.layers.*.share_expert.gate_proj"
    ),
    "*ffn_gate_chexps": "model.layers.*.mlp.chunk_experts.gate_proj",
    "*ffn_gate_up_exps": "model.layers.*.mlp.experts.gate_up_proj model.layers.*.experts.gate_up_proj",
    "*ffn_latent_down": "backbone.layers.*.mixer.fc1_latent_proj",
    "*ffn_latent_up": "backbone.layers.*.mixer.fc2_latent_proj",
    "*ffn_down": (
        "gpt_neox.layers.*.mlp.dense_4h_to_h transformer.h.*.mlp.c_proj transformer.blocks.*.ffn.down_proj "
        "transformer.h.*.mlp.dense_4h_to_h h.*.mlp.dense_4h_to_h model.layers.*.mlp.down_proj layers.*.mlp.down_proj "
        "layers.*.feed_forward.w2 encoder.layer.*.output.dense layers.*.mlp.Wo transformer.layer.*.ffn.lin2 "
        "transformer.h.*.mlp.fc_out model.layers.*.mlp.dense_4h_to_h h.*.mlp.c_proj transformer.h.*.mlp.fc2 "
        "model.layers.*.mlp.fc2 model.layers.layers.*.mlp.down_proj model.layers.*.feed_forward.w2 "
        "encoder.layers.*.mlp.fc2 model.layers.*.mlp.c_proj encoder.layer.*.mlp.wo transformer.layers.*.ffn.proj_2 "
        "model.layers.*.residual_mlp.w2 encoder.layer.*.mlp.down_layer encoder.layers.*.mlp.dense_4h_to_h "
        "model.layers.h.*.mlp.c_proj model.layers.*.feed_forward.down_proj transformer_encoder.*.ffn.w3 "
        "model.layers.*.block_sparse_moe.down model.transformer.blocks.*.ff_out backbone.layers.*.mixer.down_proj "
        "model.layers.*.mlp.language_mlp.down_proj model.blocks.*.mlp.mlp_resid head.layers.*.linear2"
    ),
    "*ffn_down_exps": (
        "layers.*.feed_forward.experts.w2 transformer.decoder_layer.*.moe.linear_1 "
        "transformer.blocks.*.ffn.experts.mlp.w2 model.layers.*.mlp.experts.down_proj "
        "model.layers.*.block_sparse_moe.output_linear model.layers.*.block_sparse_moe.experts.w2 "
        "model.layers.*.feed_forward.experts.down_proj encoder.layers.*.mlp.experts.mlp.w2 "
        "model.layers.*.block_sparse_moe.experts.down model.layers.*.moe.down_proj model.layers.*.experts.down_proj"
    ),
    "*ffn_down_shexp": (
        "model.layers.*.mlp.shared_expert.down_proj model.layers.*.mlp.shared_experts.down_proj "
        "model.layers.*.feed_forward.shared_expert.down_proj model.layers.*.shared_mlp.output_linear "
        "model.layers.*.mlp.shared_mlp.down_proj layers.*.shared_experts.w2 "
        "backbone.layers.*.mixer.shared_experts.down_proj model.layers.*.block_sparse_moe.shared_experts.down_proj "
        "model.layers.*.share_expert.down_proj"
    ),
    "*ffn_down_chexps": "model.layers.*.mlp.chunk_experts.down_proj",
    "*attn_q_norm": (
        "encoder.layers.*.self_attention.q_layernorm model.layers.*.self_attn.q_layernorm "
        "model.layers.*.self_attn.query_layernorm model.layers.*.attention.query_layernorm "
        "model.layers.*.self_attn.q_norm layers.*.self_attn.q_norm transformer.blocks.*.attn.q_ln "
        "encoder.layer.*.attention.self.layer_norm_q transformer.layers.*.attn.q_norm model.layers.layers.*.mixer.q "
        "model.layers.layers.*.mixer.q_norm model.blocks.*.attn.head_gain.head_g"
    ),
    "*attn_k_norm": (
        "encoder.layers.*.self_attention.k_layernorm model.layers.*.self_attn.k_layernorm "
        "model.layers.*.self_attn.key_layernorm model.layers.*.attention.key_layernorm model.layers.*.self_attn.k_norm "
        "layers.*.self_attn.k_norm transformer.blocks.*.attn.k_ln encoder.layer.*.attention.self.layer_norm_k "
        "transformer.layers.*.attn.k_norm model.layers.layers.*.mixer.k model.layers.layers.*.mixer.k_norm "
        "model.layers.*.self_attn.k_rope_only_layernorm"
    ),
    "rope_freqs": "rope.freqs rotary_pos_emb.inv_freq encoder.layers.*.self_attention.rotary_emb.inv_freq",
    "*layer_output_norm": (
        "encoder.layer.*.output.LayerNorm transformer.layer.*.output_layer_norm encoder.layers.*.norm2 "
        "transformer.decoder_layer.*.rms_norm_3 encoder.layer.*.mlp.layernorm encoder.layer.*.layer_norm_2 "
        "model.layers.*.final_layernorm"
    ),
    "*layer_output_scale": "model.layers.*.layer_scalar model.blocks.*.embed_skip.a_g",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections",
    "altup_unembd_proj": "model.altup_unembed_projections",
    "*inp_gate": "model.layers.*.per_layer_input_gate",
    "*proj": "model.layers.*.per_layer_projection",
    "*post_norm": "model.layers.*.post_per_layer_input_norm",
    "*altup_correct_coef": "model.layers.*.altup.correction_coefs",
    "*altup_correct_scale": "model.layers.*.altup.correct_output_scale",
    "*altup_predict_coef": "model.layers.*.altup.prediction_coefs",
    "*altup_router": "model.layers.*.altup.modality_router",
    "*altup_router_norm": "model.layers.*.altup.router_norm",
    "*laurel_l": "model.layers.*.laurel.linear_left",
    "*laurel_r": "model.layers.*.laurel.linear_right",
    "*laurel_post_norm": "model.layers.*.laurel.post_laurel_norm",
    "*ssm_in": (
        "model.layers.*.in_proj backbone.layers.*.mixer.in_proj model.layers.*.mamba.in_proj "
        "model.layers.layers.*.mixer.in_proj model.layers.*.linear_attn.in_proj_qkvz"
    ),
    "*ssm_conv1d": (
        "model.layers.*.conv1d backbone.layers.*.mixer.conv1d model.layers.*.mamba.conv1d "
        "model.layers.layers.*.mixer.conv1d model.layers.*.linear_attn.conv1d"
    ),
    "*ssm_x": (
        "model.layers.*.x_proj backbone.layers.*.mixer.x_proj model.layers.*.mamba.x_proj "
        "model.layers.layers.*.mixer.bcdt_proj"
    ),
    "*ssm_dt": (
        "model.layers.*.dt_proj backbone.layers.*.mixer.dt_proj model.layers.*.mamba.dt_proj "
        "model.layers.layers.*.mixer.dt_proj model.layers.*.linear_attn.dt_proj backbone.layers.*.mixer.dt "
        "model.layers.*.self_attn.dt_proj model.layers.*.attention.dt_proj"
    ),
    "*ssm_dt_norm": "model.layers.layers.*.mixer.dt_norm.weight model.layers.*.mamba.dt_layernorm",
    "*ssm_a": (
        "model.layers.*.A_log backbone.layers.*.mixer.A_log model.layers.*.mamba.A_log "
        "model.layers.layers.*.mixer.A_log model.layers.*.linear_attn.A_log model.layers.*.self_attn.A_log "
        "model.layers.*.attention.A_log"
    ),
    "*ssm_b_norm": (
        "model.layers.*.mamba.b_layernorm model.layers.*.mamba.B_layernorm model.layers.layers.*.mixer.B_norm.weight"
    ),
    "*ssm_c_norm": (
        "model.layers.*.mamba.c_layernorm model.layers.*.mamba.C_layernorm model.layers.layers.*.mixer.C_norm.weight"
    ),
    "*ssm_d": "model.layers.*.D backbone.layers.*.mixer.D model.layers.*.mamba.D model.layers.layers.*.mixer.D",
    "*ssm_norm": (
        "model.layers.*.mamba.norm model.layers.*.linear_attn.norm backbone.layers.*.mixer.norm "
        "model.layers.*.self_attn.o_norm model.layers.*.attention.o_norm"
    ),
    "*ssm_out": (
        "model.layers.*.out_proj backbone.layers.*.mixer.out_proj model.layers.*.mamba.out_proj "
        "model.layers.*.linear_attn.out_proj model.layers.layers.*.mixer.out_proj"
    ),
    "*ssm_alpha": "model.layers.*.linear_attn.in_proj_a",
    "*ssm_ba": "model.layers.*.linear_attn.in_proj_ba",
    "*ssm_conv1d_q": "model.layers.*.self_attn.q_conv1d model.layers.*.attention.q_conv1d",
    "*ssm_conv1d_k": "model.layers.*.self_attn.k_conv1d model.layers.*.attention.k_conv1d",
    "*ssm_conv1d_v": "model.layers.*.self_attn.v_conv1d model.layers.*.attention.v_conv1d",
    "*ssm_f_a": "model.layers.*.self_attn.f_a_proj",
    "*ssm_f_b": "model.layers.*.self_attn.f_b_proj",
    "*ssm_beta": "model.layers.*.linear_attn.in_proj_b model.layers.*.self_attn.b_proj model.layers.*.attention.b_proj",
    "*ffn_routed_down": "model.layers.*.block_sparse_moe.routed_expert_down_proj",
    "*ffn_routed_up": "model.layers.*.block_sparse_moe.routed_expert_up_proj",
    "*ffn_routed_norm": "model.layers.*.block_sparse_moe.routed_expert_norm",
    "*ssm_g_a": "model.layers.*.self_attn.g_a_proj",
    "*ssm_g_b": "model.layers.*.self_attn.g_b_proj",
    "*attn_q_a": "model.layers.*.self_attn.q_a_proj model.layers.*.attention.q_a_proj layers.*.attention.wq_a",
    "*attn_q_b": "model.layers.*.self_attn.q_b_proj model.layers.*.attention.q_b_proj layers.*.attention.wq_b",
    "*attn_kv_a_mqa": (
        "model.layers.*.self_attn.kv_a_proj_with_mqa model.layers.*.attention.kv_a_proj_with_mqa "
        "layers.*.attention.wkv_a_with_mqa"
    ),
    "*attn_kv_b": "model.layers.*.self_attn.kv_b_proj model.layers.*.attention.kv_b_proj",
    "*attn_k_b": "model.layers.*.self_attn.k_b_proj model.layers.*.attention.k_b_proj layers.*.attention.k_b_proj",
    "*attn_v_b": "model.layers.*.self_attn.v_b_proj model.layers.*.attention.v_b_proj layers.*.attention.v_b_proj",
    "*attn_q_a_norm": (
        "model.layers.*.self_attn.q_a_layernorm model.layers.*.attention.q_a_layernorm layers.*.attention.q_a_norm"
    ),
    "*attn_kv_a_norm": (
        "model.layers.*.self_attn.kv_a_layernorm model.layers.*.attention.kv_a_layernorm layers.*.attention.kv_a_norm"
    ),
    "*attn_sub_norm": "model.layers.*.self_attn.inner_attn_ln",
    "*ffn_sub_norm": "model.layers.*.mlp.ffn_layernorm",
    "*indexer.k_norm": "model.layers.*.self_attn.indexer.k_norm model.layers.*.self_attn.index_k_norm",
    "*indexer.proj": "model.layers.*.self_attn.indexer.weights_proj",
    "*indexer.attn_k": "model.layers.*.self_attn.indexer.wk",
    "*indexer.attn_q_b": "model.layers.*.self_attn.indexer.wq_b",
    "*indexer.q_proj": "model.layers.*.self_attn.index_q_proj",
    "*indexer.k_proj": "model.layers.*.self_attn.index_k_proj",
    "*indexer.q_norm": "model.layers.*.self_attn.index_q_norm",
    "*hc_attn_fn": "model.layers.*.hc_attn_layer.hc_pre.hc_fn model.layers.*.hc_attn_fn",
    "*hc_attn_base": "model.layers.*.hc_attn_layer.hc_pre.hc_base model.layers.*.hc_attn_base",
    "*hc_attn_scale": "model.layers.*.hc_attn_layer.hc_pre.hc_scale model.layers.*.hc_attn_scale",
    "*hc_ffn_fn": "model.layers.*.hc_mlp_layer.hc_pre.hc_fn model.layers.*.hc_ffn_fn",
    "*hc_ffn_base": "model.layers.*.hc_mlp_layer.hc_pre.hc_base model.layers.*.hc_ffn_base",
    "*hc_ffn_scale": "model.layers.*.hc_mlp_layer.hc_pre.hc_scale model.layers.*.hc_ffn_scale",
    "output_hc_fn": "model.hc_head.hc_head_fn",
    "output_hc_base": "model.hc_head.hc_head_base",
    "output_hc_scale": "model.hc_head.hc_head_scale",
    "enc.output_norm": "encoder.final_layer_norm layer_norm model.hidden_norm encoder.output_norm_enc",
    "cls": "classifier classifier.dense pre_classifier dense head.dense scorer.1",
    "cls.output": "classifier.out_proj scorer.3",
    "cls.norm": "head.norm scorer.0",
    "*shortconv.conv": "model.layers.*.conv.conv",
    "*shortconv.in_proj": "model.layers.*.conv.in_proj",
    "*shortconv.out_proj": "model.layers.*.conv.out_proj",
    "*nextn.eh_proj": "model.layers.*.eh_proj",
    "*nextn.embed_tokens": "model.layers.*.embed_tokens",
    "*nextn.enorm": "model.layers.*.enorm",
    "*nextn.hnorm": "model.layers.*.hnorm",
    "*nextn.shared_head_head": "model.layers.*.shared_head.head",
    "*nextn.shared_head_norm": "model.layers.*.shared_head.norm",
    "*attn_output_a": "",
    "*ffn_gate_tid2eid": "",
    "*attn_compressor_gate": "",
    "*indexer_compressor_kv": "",
    "*attn_compressor_norm": "",
    "*attn_output_b": "",
    "*ssm_g": "",
    "*indexer_compressor_ape": "model.layers.*.self_attn.indexer.index_kpool_compress_ape",
    "*attn_compressor_kv": "",
    "*attn_kv_a_norm:kv": "",
    "*indexer_compressor_norm": "",
    "*ffn_res_score": "",
    "*exp_probs_b_vl": "",
    "*attn_kv": "",
    "*attn_res_score": "",
    "*indexer_compressor_gate": "model.layers.*.self_attn.indexer.index_kpool_compress_gate",
    "output_res_score": "",
    "*attn_compressor_ape": "",
    "*ffn_norm:residual": "model.layers.*.residual_layernorm",
    "*ffn_norm_exps": "model.layers.*.post_attention_layernorm",
    "dense_3": "dense_3_out",
    "dec.*attn_norm": "decoder.block.*.layer.0.layer_norm",
    "dec.*attn_q": "decoder.block.*.layer.0.SelfAttention.q",
    "dec.*attn_k": "decoder.block.*.layer.0.SelfAttention.k",
    "dec.*attn_v": "decoder.block.*.layer.0.SelfAttention.v",
    "dec.*attn_o": "decoder.block.*.layer.0.SelfAttention.o",
    "dec.*attn_rel_b": "decoder.block.*.layer.0.SelfAttention.relative_attention_bias",
    "dec.*cross_attn_norm": "decoder.block.*.layer.1.layer_norm",
    "dec.*cross_attn_q": "decoder.block.*.layer.1.EncDecAttention.q",
    "dec.*cross_attn_k": "decoder.block.*.layer.1.EncDecAttention.k",
    "dec.*cross_attn_v": "decoder.block.*.layer.1.EncDecAttention.v",
    "dec.*cross_attn_o": "decoder.block.*.layer.1.EncDecAttention.o",
    "dec.*cross_attn_rel_b": "decoder.block.*.layer.1.EncDecAttention.relative_attention_bias",
    "dec.*ffn_norm": "decoder.block.*.layer.2.layer_norm",
    "dec.*ffn_gate": "decoder.block.*.layer.2.DenseReluDense.wi_0",
    "dec.*ffn_down": "decoder.block.*.layer.2.DenseReluDense.wo",
    "dec.*ffn_up": "decoder.block.*.layer.2.DenseReluDense.wi decoder.block.*.layer.2.DenseReluDense.wi_1",
    "dec.output_norm": "decoder.final_layer_norm",
    "enc.*attn_norm": "encoder.block.*.layer.0.layer_norm",
    "enc.*attn_q": "encoder.block.*.layer.0.SelfAttention.q",
    "enc.*attn_k": "encoder.block.*.layer.0.SelfAttention.k",
    "enc.*attn_v": "encoder.block.*.layer.0.SelfAttention.v",
    "enc.*attn_o": "encoder.block.*.layer.0.SelfAttention.o",
    "enc.*attn_rel_b": "encoder.block.*.layer.0.SelfAttention.relative_attention_bias",
    "enc.*ffn_norm": "encoder.block.*.layer.1.layer_norm",
    "enc.*ffn_gate": "encoder.block.*.layer.1.DenseReluDense.wi_0",
    "enc.*ffn_down": "encoder.block.*.layer.1.DenseReluDense.wo",
    "enc.*ffn_up": "encoder.block.*.layer.1.DenseReluDense.wi encoder.block.*.layer.1.DenseReluDense.wi_1",
    "*time_mix_w1": (
        "rwkv.blocks.*.attention.time_maa_w1 model.layers.*.self_attn.time_maa_w1 model.layers.*.attention.w1"
    ),
    "*time_mix_w2": (
        "rwkv.blocks.*.attention.time_maa_w2 model.layers.*.self_attn.time_maa_w2 model.layers.*.attention.w2"
    ),
    "*time_mix_lerp_x": "rwkv.blocks.*.attention.time_maa_x model.layers.*.self_attn.time_maa_x",
    "*time_mix_lerp_k": "rwkv.blocks.*.attention.time_maa_k model.layers.*.self_attn.time_maa_k",
    "*time_mix_lerp_v": "rwkv.blocks.*.attention.time_maa_v model.layers.*.self_attn.time_maa_v",
    "*time_mix_lerp_r": "rwkv.blocks.*.attention.time_maa_r model.layers.*.self_attn.time_maa_r",
    "*time_mix_lerp_g": "rwkv.blocks.*.attention.time_maa_g model.layers.*.self_attn.time_maa_g",
    "*time_mix_lerp_w": "rwkv.blocks.*.attention.time_maa_w model.layers.*.self_attn.time_maa_w",
    "*time_mix_lerp_fused": "",
    "*time_mix_first": "rwkv.blocks.*.attention.time_faaaa",
    "*time_mix_decay": "rwkv.blocks.*.attention.time_decay model.layers.*.self_attn.time_decay",
    "*time_mix_decay_w1": "rwkv.blocks.*.attention.time_decay_w1 model.layers.*.self_attn.time_decay_w1",
    "*time_mix_decay_w2": "rwkv.blocks.*.attention.time_decay_w2 model.layers.*.self_attn.time_decay_w2",
    "*time_mix_key": (
        "rwkv.blocks.*.attention.key model.layers.*.self_attn.k_proj model.layers.*.attention.key "
        "model.layers.*.attention.k_proj"
    ),
    "*time_mix_value": (
        "rwkv.blocks.*.attention.value model.layers.*.self_attn.v_proj model.layers.*.attention.value "
        "model.layers.*.attention.v_proj"
    ),
    "*time_mix_receptance": (
        "rwkv.blocks.*.attention.receptance model.layers.*.self_attn.q_proj model.layers.*.attention.receptance "
        "model.layers.*.attention.r_proj"
    ),
    "*time_mix_gate": "rwkv.blocks.*.attention.gate model.layers.*.self_attn.gate",
    "*time_mix_ln": "rwkv.blocks.*.attention.ln_x model.layers.*.attention.ln_x",
    "*time_mix_output": (
        "rwkv.blocks.*.attention.output model.layers.*.self_attn.o_proj model.layers.*.attention.output "
        "model.layers.*.attention.o_proj"
    ),
    "*channel_mix_lerp_k": "rwkv.blocks.*.feed_forward.time_maa_k model.layers.*.feed_forward.x_k",
    "*channel_mix_lerp_r": "rwkv.blocks.*.feed_forward.time_maa_r",
    "*channel_mix_key": "rwkv.blocks.*.feed_forward.key model.layers.*.feed_forward.key",
    "*channel_mix_receptance": "rwkv.blocks.*.feed_forward.receptance",
    "*channel_mix_value": "rwkv.blocks.*.feed_forward.value model.layers.*.feed_forward.value",
    "*time_mix_w0": "model.layers.*.attention.w0",
    "*time_mix_a0": "model.layers.*.attention.a0",
    "*time_mix_a1": "model.layers.*.attention.a1",
    "*time_mix_a2": "model.layers.*.attention.a2",
    "*time_mix_v0": "model.layers.*.attention.v0",
    "*time_mix_v1": "model.layers.*.attention.v1",
    "*time_mix_v2": "model.layers.*.attention.v2",
    "*time_mix_g1": "model.layers.*.attention.g1",
    "*time_mix_g2": "model.layers.*.attention.g2",
    "*time_mix_k_k": "model.layers.*.attention.k_k",
    "*time_mix_k_a": "model.layers.*.attention.k_a",
    "*time_mix_r_k": "model.layers.*.attention.r_k",
    "hrm.z_l_init": "",
    "output_hc_norm": "model.hyper_connection_mixer.hc_norm",
    "output_hc_down": "model.hyper_connection_mixer.input_mix_weight_down",
    "output_hc_up": "model.hyper_connection_mixer.input_mix_weight_up",
    "*hc_attn_norm": "model.layers.*.attn_hyper_connection.hc_norm",
    "*hc_attn_down": "model.layers.*.attn_hyper_connection.input_mix_weight_down",
    "*hc_attn_up": "model.layers.*.attn_hyper_connection.input_mix_weight_up",
    "*hc_attn_inject": "model.layers.*.attn_hyper_connection.block_inject_weight",
    "*hc_ffn_norm": "model.layers.*.mlp_hyper_connection.hc_norm",
    "*hc_ffn_down": "model.layers.*.mlp_hyper_connection.input_mix_weight_down",
    "*hc_ffn_up": "model.layers.*.mlp_hyper_connection.input_mix_weight_up",
    "*hc_ffn_inject": "model.layers.*.mlp_hyper_connection.block_inject_weight",
    "*indexer.q_norm:qsa": "model.layers.*.self_attn.indexer.q_layernorm",
    "*indexer.k_norm:qsa": "model.layers.*.self_attn.indexer.k_layernorm",
    "*ple_key": "model.layers.*.ple.key_proj",
    "*ple_value": "model.layers.*.ple.value_proj",
    "*ple_norm_key": "model.layers.*.ple.norm_key",
    "*ple_norm_query": "model.layers.*.ple.norm_query",
    "*ple_norm_conv": "model.layers.*.ple.norm_conv",
    "*ple_conv1d": "model.layers.*.ple.conv1d",
    "*nextn.hc_head_norm": "model.layers.*.nextn_hc_head.hc_norm",
    "*nextn.hc_head_down": "model.layers.*.nextn_hc_head.input_mix_weight_down",
    "*nextn.hc_head_up": "model.layers.*.nextn_hc_head.input_mix_weight_up",
    "masked_embd_centroids": "masked_embedding.centroids",
    "masked_embd_ordering": "masked_embedding.token_ordering",
    "nextn.pre_projection": "pre_projection",
    "nextn.post_projection": "post_projection",
}

_LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)|^(\d+)(?=\.)")


class TensorNames:
    """The names of one architecture's tensors."""

    def __init__(self, arch: str, layers: int) -> None:
        """Raise TypeNotSupported for an architecture whose tensors are not known."""
        if arch not in KINDS:
            raise TypeNotSupported(
                f"this version does not know which tensors the architecture {arch} has: tensor_kinds.json lacks it",
                "QK-E304",
            )
        self.arch, self.kinds = arch, KINDS[arch].split()
        self.layers = layers
        self._kind_of: dict[str, str] = {}
        for kind in [k for k in PATTERNS if "*" not in k] + [k for k in PATTERNS if "*" in k]:
            if kind in self.kinds:
                self._kind_of |= dict.fromkeys(
                    [kind.partition(":")[0].replace("*", "blk.*."), *PATTERNS[kind].split()], kind
                )

    def find(self, name: str) -> str | None:
        """Return the name in a file of the tensor ``name`` of a checkpoint, None if it is not known."""
        for suffix in ("", ".weight", ".bias"):
            if name.endswith(suffix) and (kind := self._find(name.removesuffix(suffix))) is not None:
                return kind + suffix
        return None

    def _find(self, stem: str) -> str | None:
        if stem in self._kind_of and "*" not in stem:
            return self._kind_of[stem]
        for match in _LAYER.finditer(stem + "."):
            layer = match[0]
            kind = self._kind_of.get(f"{stem[: match.start()]}*{stem[match.end() :]}")
            if kind is not None and int(layer) < self.layers and str(int(layer)) == layer:
                return file_name(kind, int(layer))
        return None

    def is_kind(self, name: str, kind: str, layer: int | None, suffix: str = ".weight") -> bool:
        """Return whether the file's tensor ``name`` is of a kind that the architecture has, in this layer (or none)."""
        if kind not in self.kinds or ("*" in kind) != (layer is not None):
            return False
        return name == file_name(kind, layer) + suffix


def file_name(kind: str, layer: int | None = None) -> str:
    """Return the name of a kind of tensor in a file, without suffix."""
    return kind.partition(":")[0].replace("*", f"blk.{layer}.")

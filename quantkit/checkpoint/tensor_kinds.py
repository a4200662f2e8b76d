"""Which kinds of tensors each architecture has in a GGUF file; what they are called: ``tensor_names``.

Facts of llama.cpp b11434 (gguf-py/gguf/constants.py, MODEL_TENSORS), for its text models.
"""

from __future__ import annotations

#: Architecture -> the kinds it has.
KINDS: dict[str, str] = {
    "afmoe": (
        "token_embd output_norm output *attn_norm *post_attention_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_q_norm *attn_k_norm *attn_gate *ffn_gate *ffn_down *ffn_up *ffn_gate_inp *ffn_gate_exps *ffn_down_exps "
        "*ffn_up_exps *ffn_gate_shexp *ffn_up_shexp *ffn_down_shexp *ffn_norm:pre *post_ffw_norm *exp_probs_b"
    ),
    "apertus": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *attn_q_norm *attn_k_norm *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "arcee": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_norm *ffn_down *ffn_up"
    ),
    "arctic": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_gate_inp *ffn_norm:residual *ffn_gate *ffn_down *ffn_up *ffn_norm_exps *ffn_gate_exps "
        "*ffn_down_exps *ffn_up_exps"
    ),
    "arwkv7": (
        "token_embd token_embd_norm output_norm output *attn_norm *time_mix_lerp_fused *time_mix_w0 *time_mix_w1 "
        "*time_mix_w2 *time_mix_a0 *time_mix_a1 *time_mix_a2 *time_mix_v0 *time_mix_v1 *time_mix_v2 *time_mix_g1 "
        "*time_mix_g2 *time_mix_k_k *time_mix_k_a *time_mix_r_k *time_mix_key *time_mix_value *time_mix_receptance "
        "*time_mix_ln *time_mix_output *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "baichuan": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "bailingmoe": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*ffn_gate_inp *ffn_norm *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_down_shexp "
        "*ffn_up_shexp"
    ),
    "bailingmoe2": (
        "token_embd output_norm output *attn_norm *attn_q_norm *attn_k_norm *attn_qkv *attn_output *ffn_gate_inp "
        "*exp_probs_b *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp "
        "*ffn_down_shexp *ffn_up_shexp *nextn.eh_proj *nextn.embed_tokens *nextn.enorm *nextn.hnorm "
        "*nextn.shared_head_head *nextn.shared_head_norm *layer_output_norm"
    ),
    "bailingmoe3": (
        "token_embd output_norm output *attn_norm *attn_q *attn_q_a *attn_q_b *attn_q_a_norm *attn_k *attn_v "
        "*attn_output *attn_gate *attn_kv_a_mqa *attn_kv_b *attn_k_b *attn_v_b *attn_kv_a_norm *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_down_shexp "
        "*ffn_up_shexp *exp_probs_b *ssm_conv1d_q *ssm_conv1d_k *ssm_conv1d_v *ssm_f_a *ssm_beta *ssm_a *ssm_g_a "
        "*ssm_dt *ssm_norm *nextn.eh_proj *nextn.enorm *nextn.hnorm *layer_output_norm"
    ),
    "bert": (
        "token_embd token_embd_norm token_types position_embd output_norm *attn_output_norm *attn_qkv *attn_q *attn_k "
        "*attn_v *attn_output *ffn_down *ffn_up *layer_output_norm cls cls.output"
    ),
    "bitnet": (
        "*attn_q *attn_k *attn_v token_embd output_norm *attn_norm *attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up "
        "*attn_sub_norm *ffn_sub_norm"
    ),
    "bloom": (
        "token_embd token_embd_norm output_norm output *attn_norm *attn_qkv *attn_output *ffn_norm *ffn_down *ffn_up"
    ),
    "chameleon": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "chatglm": (
        "token_embd rope_freqs output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm "
        "*ffn_down *ffn_up"
    ),
    "codeshell": (
        "token_embd position_embd output_norm output *attn_norm *attn_qkv *attn_output *attn_rot_embd *ffn_norm "
        "*ffn_down *ffn_up"
    ),
    "cohere2": (
        "token_embd output_norm *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_gate *ffn_down *ffn_up"
    ),
    "cohere2moe": (
        "token_embd output_norm output *attn_norm *attn_q *attn_k *attn_v *attn_output *ffn_gate *ffn_down *ffn_up "
        "*ffn_gate_inp *ffn_gate_exps *ffn_gate_up_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_down_shexp "
        "*ffn_up_shexp *nextn.eh_proj *nextn.embed_tokens *nextn.enorm *nextn.hnorm *nextn.shared_head_head "
        "*nextn.shared_head_norm"
    ),
    "command-r": (
        "token_embd output_norm *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_gate *ffn_down *ffn_up "
        "*attn_k_norm *attn_q_norm"
    ),
    "dbrx": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_output *attn_output_norm *ffn_gate_inp "
        "*ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "deci": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_gate_inp *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "deepseek": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_gate_inp *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps "
        "*ffn_gate_shexp *ffn_down_shexp *ffn_up_shexp"
    ),
    "deepseek2": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_q *attn_q_a *attn_q_b *attn_kv_a_mqa *attn_kv_b "
        "*attn_k *attn_k_b *attn_v *attn_v_b *attn_q_a_norm *attn_kv_a_norm *attn_output *attn_rot_embd *ffn_gate_inp "
        "*ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp "
        "*ffn_down_shexp *ffn_up_shexp *exp_probs_b *nextn.eh_proj *nextn.embed_tokens *nextn.enorm *nextn.hnorm "
        "*nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "deepseek2-ocr": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_q_a *attn_q_b *attn_kv_a_mqa "
        "*attn_kv_b *attn_k *attn_k_b *attn_v *attn_v_b *attn_q_a_norm *attn_kv_a_norm *attn_output *attn_rot_embd "
        "*ffn_gate_inp *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps "
        "*ffn_gate_up_exps *ffn_gate_shexp *ffn_down_shexp *ffn_up_shexp *exp_probs_b"
    ),
    "deepseek32": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_q *attn_q_a *attn_q_b *attn_kv_a_mqa *attn_k_b "
        "*attn_v_b *attn_q_a_norm *attn_kv_a_norm *attn_output *attn_rot_embd *ffn_gate_inp *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_down_shexp *ffn_up_shexp "
        "*exp_probs_b *indexer.k_norm *indexer.proj *indexer.attn_k *indexer.attn_q_b *nextn.eh_proj "
        "*nextn.embed_tokens *nextn.enorm *nextn.hnorm *nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "deepseek4": (
        "token_embd output_norm output output_hc_fn output_hc_base output_hc_scale *attn_norm *attn_sinks *attn_q_a "
        "*attn_q_b *attn_q_a_norm *attn_kv *attn_kv_a_norm:kv *attn_output_a *attn_output_b *hc_attn_fn *hc_attn_base "
        "*hc_attn_scale *hc_ffn_fn *hc_ffn_base *hc_ffn_scale *attn_compressor_kv *attn_compressor_gate "
        "*attn_compressor_ape *attn_compressor_norm *indexer.proj *indexer.attn_q_b *indexer_compressor_kv "
        "*indexer_compressor_gate *indexer_compressor_ape *indexer_compressor_norm *ffn_gate_inp *ffn_gate_tid2eid "
        "*exp_probs_b *exp_probs_b_vl *ffn_norm *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp "
        "*ffn_down_shexp *ffn_up_shexp *nextn.eh_proj *nextn.embed_tokens *nextn.enorm *nextn.hnorm "
        "*nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "dots1": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *exp_probs_b *ffn_norm *ffn_gate *ffn_gate_exps *ffn_gate_inp *ffn_gate_shexp *ffn_down "
        "*ffn_down_exps *ffn_down_shexp *ffn_up *ffn_up_exps *ffn_up_shexp"
    ),
    "dots3note": (
        "token_embd output_norm output *attn_norm *attn_q_a *attn_q_b *attn_kv_a_mqa *attn_k_b *attn_v_b "
        "*attn_q_a_norm *attn_kv_a_norm *attn_k_norm *attn_gate *attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up "
        "*ffn_gate_inp *exp_probs_b *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_down_shexp "
        "*ffn_up_shexp *indexer.k_norm *indexer.proj *indexer.attn_k *indexer.attn_q_b *nextn.eh_proj "
        "*nextn.embed_tokens *nextn.enorm *nextn.hnorm *nextn.shared_head_norm"
    ),
    "dream": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm "
        "*ffn_gate *ffn_down *ffn_up"
    ),
    "ernie4_5": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up"
    ),
    "ernie4_5-moe": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_down_shexp "
        "*ffn_up_shexp *exp_probs_b"
    ),
    "eurobert": (
        "token_embd output_norm *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate *ffn_up "
        "*ffn_down"
    ),
    "exaone": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "exaone-moe": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm "
        "*attn_v *attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_inp *ffn_gate_exps *ffn_down_exps "
        "*ffn_up_exps *ffn_gate_shexp *ffn_down_shexp *ffn_up_shexp *exp_probs_b *nextn.eh_proj *nextn.embed_tokens "
        "*nextn.enorm *nextn.hnorm *nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "exaone4": (
        "token_embd output_norm output rope_freqs *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *post_attention_norm *ffn_gate *ffn_down *ffn_up *post_ffw_norm *nextn.eh_proj "
        "*nextn.embed_tokens *nextn.enorm *nextn.hnorm *nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "falcon": "token_embd output_norm output *attn_norm *attn_norm_2 *attn_qkv *attn_output *ffn_down *ffn_up",
    "falcon-h1": (
        "token_embd *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ssm_in *ssm_conv1d *ssm_dt *ssm_a "
        "*ssm_d *ssm_norm *ssm_out *ffn_norm:pre *ffn_gate *ffn_down *ffn_up output_norm output"
    ),
    "gemma": (
        "token_embd output_norm *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_gate *ffn_down *ffn_up "
        "*ffn_norm"
    ),
    "gemma-embedding": (
        "token_embd output dense_2 dense_3 output_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_gate *ffn_down *ffn_up *attn_norm *post_attention_norm *ffn_norm:pre *post_ffw_norm"
    ),
    "gemma2": (
        "token_embd output_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_gate *ffn_down *ffn_up *attn_norm "
        "*post_attention_norm *ffn_norm:pre *post_ffw_norm"
    ),
    "gemma3": (
        "token_embd output output_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v *attn_output "
        "*ffn_gate *ffn_down *ffn_up *attn_norm *post_attention_norm *ffn_norm:pre *post_ffw_norm"
    ),
    "gemma3n": (
        "token_embd output output_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v *attn_output "
        "*ffn_gate *ffn_down *ffn_up *attn_norm *post_attention_norm *ffn_norm:pre *post_ffw_norm per_layer_token_embd "
        "per_layer_model_proj *inp_gate *proj per_layer_proj_norm *post_norm altup_proj altup_unembd_proj "
        "*altup_correct_coef *altup_correct_scale *altup_predict_coef *altup_router *altup_router_norm *laurel_l "
        "*laurel_r *laurel_post_norm"
    ),
    "gemma4": (
        "rope_freqs token_embd output output_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_gate *ffn_down *ffn_up *ffn_gate_up_exps *ffn_gate_exps *ffn_up_exps *ffn_down_exps "
        "*attn_norm *post_attention_norm *ffn_gate_inp *ffn_norm:pre *pre_ffw_norm_2 *post_ffw_norm *post_ffw_norm_1 "
        "*post_ffw_norm_2 *layer_output_scale per_layer_token_embd per_layer_model_proj *inp_gate *proj "
        "per_layer_proj_norm *post_norm"
    ),
    "gemma4-assistant": (
        "rope_freqs token_embd masked_embd_centroids masked_embd_ordering output_norm nextn.pre_projection "
        "nextn.post_projection *attn_q *attn_q_norm *attn_output *ffn_gate *ffn_down *ffn_up *attn_norm "
        "*post_attention_norm *ffn_norm:pre *post_ffw_norm *layer_output_scale"
    ),
    "glm-dsa": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_q *attn_q_a *attn_q_b *attn_kv_a_mqa *attn_kv_b "
        "*attn_k_b *attn_v_b *attn_q_a_norm *attn_kv_a_norm *attn_output *attn_rot_embd *ffn_gate_inp *ffn_norm "
        "*ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_down_shexp "
        "*ffn_up_shexp *exp_probs_b *indexer.k_norm *indexer.proj *indexer.attn_k *indexer.attn_q_b *nextn.eh_proj "
        "*nextn.embed_tokens *nextn.enorm *nextn.hnorm *nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "glm4": (
        "token_embd rope_freqs output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm "
        "*ffn_down *ffn_up *post_attention_norm *post_ffw_norm *nextn.eh_proj *nextn.embed_tokens *nextn.enorm "
        "*nextn.hnorm *nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "glm4moe": (
        "token_embd output_norm output *attn_norm *post_attention_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_q_norm *attn_k_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_inp *ffn_gate_exps *ffn_down_exps "
        "*ffn_up_exps *ffn_gate_shexp *ffn_down_shexp *ffn_up_shexp *exp_probs_b *nextn.eh_proj *nextn.embed_tokens "
        "*nextn.enorm *nextn.hnorm *nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "glm5-next": (
        "token_embd output_norm output *attn_norm *hc_attn_fn *hc_attn_base *hc_attn_scale *hc_ffn_fn *hc_ffn_base "
        "*hc_ffn_scale *attn_q *attn_k *attn_v *attn_output *ssm_conv1d_q *ssm_conv1d_k *ssm_conv1d_v *ssm_f_a "
        "*ssm_f_b *ssm_beta *ssm_a *ssm_g_a *ssm_g_b *ssm_dt *ssm_norm *attn_q_a *attn_q_b *attn_kv_a_mqa *attn_kv_b "
        "*attn_k_b *attn_v_b *attn_q_a_norm *attn_kv_a_norm *indexer.k_norm *indexer.proj *indexer.attn_k "
        "*indexer.attn_q_b *indexer_compressor_gate *indexer_compressor_ape *ffn_norm *ffn_gate *ffn_down *ffn_up "
        "*ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_down_shexp *ffn_up_shexp "
        "*exp_probs_b *nextn.eh_proj *nextn.embed_tokens *nextn.enorm *nextn.hnorm *nextn.shared_head_head "
        "*nextn.shared_head_norm"
    ),
    "gpt-oss": (
        "token_embd output_norm output *attn_norm *post_attention_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_sinks *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "gpt2": "token_embd position_embd output_norm output *attn_norm *attn_qkv *attn_output *ffn_norm *ffn_down *ffn_up",
    "gptneox": "token_embd output_norm output *attn_norm *attn_qkv *attn_output *ffn_norm *ffn_down *ffn_up",
    "granite": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up"
    ),
    "granite_swa": (
        "token_embd output_norm output *attn_norm *attn_q *attn_k *attn_v *attn_output *attn_sinks rope_freqs "
        "*ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_inp *ffn_gate_exps *ffn_gate_up_exps *ffn_down_exps "
        "*ffn_up_exps *ffn_up_shexp *ffn_down_shexp"
    ),
    "granitehybrid": (
        "token_embd output_norm output *attn_norm *ssm_in *ssm_conv1d *ssm_dt *ssm_a *ssm_d *ssm_norm *ssm_out "
        "*attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_down_exps "
        "*ffn_up_exps *ffn_gate_shexp *ffn_up_shexp *ffn_down_shexp *ffn_gate *ffn_down *ffn_up"
    ),
    "granitemoe": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm "
        "*ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_up_shexp *ffn_down_shexp"
    ),
    "graniteswitch": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up"
    ),
    "grok": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *attn_output_norm *ffn_gate_inp *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_exps "
        "*ffn_down_exps *ffn_up_exps *post_ffw_norm *layer_output_norm"
    ),
    "grovemoe": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_chexps "
        "*ffn_down_chexps *ffn_up_chexps"
    ),
    "hrm_text": (
        "token_embd output hrm.z_l_init *attn_q *attn_k *attn_v *attn_gate *attn_output *ffn_gate *ffn_down *ffn_up"
    ),
    "hunyuan-dense": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "hunyuan-moe": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm "
        "*attn_v *attn_output *ffn_gate_inp *ffn_norm *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp "
        "*ffn_down_shexp *ffn_up_shexp"
    ),
    "hunyuan_vl": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "hy_v3": (
        "token_embd output_norm output *attn_norm *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v *attn_output "
        "*ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_inp *exp_probs_b *ffn_gate_exps *ffn_down_exps *ffn_up_exps "
        "*ffn_gate_shexp *ffn_down_shexp *ffn_up_shexp *nextn.eh_proj *nextn.embed_tokens *nextn.enorm *nextn.hnorm "
        "*nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "hy_v4": (
        "token_embd output_norm output rope_freqs output_hc_fn output_hc_base output_hc_scale *attn_norm *attn_sinks "
        "*attn_q_a *attn_q_a_norm *attn_q_b *attn_kv_a_mqa *attn_kv_a_norm *attn_k_b *attn_v_b *attn_output *attn_gate "
        "*indexer.k_norm *indexer.proj *indexer.attn_k *indexer.attn_q_b *hc_attn_fn *hc_attn_base *hc_attn_scale "
        "*hc_ffn_fn *hc_ffn_base *hc_ffn_scale *ffn_gate_inp *exp_probs_b *ffn_norm *ffn_gate *ffn_down *ffn_up "
        "*ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_down_shexp *ffn_up_shexp"
    ),
    "internlm2": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *attn_rot_embd "
        "*ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "jais": "token_embd output_norm output *attn_norm *attn_qkv *attn_output *ffn_norm *ffn_down *ffn_gate *ffn_up",
    "jais2": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_down "
        "*ffn_up"
    ),
    "jamba": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ssm_in *ssm_conv1d "
        "*ssm_x *ssm_dt *ssm_dt_norm *ssm_a *ssm_b_norm *ssm_c_norm *ssm_d *ssm_out *ffn_gate_inp *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "jina-bert-v2": (
        "token_embd token_embd_norm token_types *attn_norm_2 *attn_output_norm *attn_qkv *attn_q *attn_q_norm *attn_k "
        "*attn_k_norm *attn_v *attn_output *ffn_up *ffn_gate *ffn_down *layer_output_norm cls"
    ),
    "jina-bert-v3": (
        "token_embd token_embd_norm token_types output_norm *attn_output_norm *attn_qkv *attn_output *ffn_down *ffn_up "
        "*layer_output_norm"
    ),
    "kimi-k3": (
        "token_embd output_norm output output_res_score *attn_norm *attn_res_score *ffn_res_score *attn_q *attn_k "
        "*attn_v *attn_output *attn_gate *attn_q_a *attn_q_b *attn_kv_a_mqa *attn_kv_b *attn_k_b *attn_v_b "
        "*attn_q_a_norm *attn_kv_a_norm *ssm_conv1d_q *ssm_conv1d_k *ssm_conv1d_v *ssm_f_a *ssm_f_b *ssm_beta *ssm_a "
        "*ssm_g *ssm_dt *ssm_norm *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_inp *exp_probs_b *ffn_gate_exps "
        "*ffn_down_exps *ffn_up_exps *ffn_gate_shexp *ffn_down_shexp *ffn_up_shexp *ffn_routed_down *ffn_routed_up "
        "*ffn_routed_norm"
    ),
    "kimi-linear": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *attn_q_a *attn_q_b "
        "*attn_kv_a_mqa *attn_kv_b *attn_k_b *attn_v_b *attn_q_a_norm *attn_kv_a_norm *ffn_norm *ffn_gate *ffn_down "
        "*ffn_up *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ssm_conv1d_q *ssm_conv1d_k *ssm_conv1d_v "
        "*ssm_f_a *ssm_f_b *ssm_beta *ssm_a *ssm_g_a *ssm_g_b *ssm_dt *ssm_norm *exp_probs_b *ffn_gate_shexp "
        "*ffn_down_shexp *ffn_up_shexp"
    ),
    "laguna": (
        "token_embd output_norm output *attn_norm *attn_q *attn_k *attn_v *attn_output *attn_q_norm *attn_k_norm "
        "*attn_gate *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_inp *exp_probs_b *ffn_gate_exps *ffn_down_exps "
        "*ffn_up_exps *ffn_gate_shexp *ffn_up_shexp *ffn_down_shexp"
    ),
    "lfm2": (
        "token_embd token_embd_norm *shortconv.conv *shortconv.in_proj *shortconv.out_proj *ffn_gate *ffn_down *ffn_up "
        "*ffn_norm *attn_norm *attn_q_norm *attn_k_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output output dense_2"
    ),
    "lfm2moe": (
        "token_embd token_embd_norm *shortconv.conv *shortconv.in_proj *shortconv.out_proj *ffn_gate *ffn_down *ffn_up "
        "*ffn_norm *attn_norm *attn_q_norm *attn_k_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_gate_inp "
        "*ffn_gate_exps *ffn_down_exps *ffn_up_exps *exp_probs_b"
    ),
    "llada": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm "
        "*ffn_gate *ffn_down *ffn_up"
    ),
    "llada-moe": (
        "token_embd output_norm output *attn_output *attn_qkv *attn_q *attn_k *attn_v *attn_norm *attn_q_norm "
        "*attn_k_norm *ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_up_exps *ffn_down_exps"
    ),
    "llama": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_gate_inp *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "llama-embed": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_gate_inp *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "llama4": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_gate_inp *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps "
        "*ffn_gate_shexp *ffn_down_shexp *ffn_up_shexp"
    ),
    "maincoder": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "mamba": "token_embd output_norm output *attn_norm *ssm_in *ssm_conv1d *ssm_x *ssm_dt *ssm_a *ssm_d *ssm_out",
    "mamba2": "token_embd output_norm output *attn_norm *ssm_in *ssm_conv1d *ssm_dt *ssm_a *ssm_d *ssm_norm *ssm_out",
    "maple": (
        "token_embd output_norm output *attn_norm *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v *attn_output "
        "*ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "mellum": (
        "token_embd output_norm output *attn_norm *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v *attn_output "
        "*ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "mimo2": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_sinks *attn_output *ffn_norm "
        "*ffn_gate *ffn_down *ffn_up *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps *exp_probs_b "
        "*layer_output_norm *nextn.eh_proj *nextn.embed_tokens *nextn.enorm *nextn.hnorm *nextn.shared_head_head "
        "*nextn.shared_head_norm"
    ),
    "minicpm": (
        "token_embd output output_norm rope_freqs rope_factors_long rope_factors_short *attn_norm *attn_qkv *attn_q "
        "*attn_k *attn_v *attn_output *attn_rot_embd *ffn_gate_inp *ffn_norm *ffn_gate *ffn_down *ffn_up "
        "*ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "minicpm3": (
        "token_embd output_norm output rope_factors_long rope_factors_short *attn_norm *attn_q_a *attn_q_b "
        "*attn_kv_a_mqa *attn_kv_b *attn_q_a_norm *attn_kv_a_norm *attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "minimax-01": (
        "token_embd output_norm output *attn_norm *attn_norm_2 *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_gate *ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "minimax-m2": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps *exp_probs_b"
    ),
    "minimax-m3": (
        "token_embd output_norm output *attn_norm *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v *attn_output "
        "*ffn_norm *ffn_gate_inp *exp_probs_b *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_shexp "
        "*ffn_down_shexp *ffn_up_shexp *ffn_gate *ffn_down *ffn_up *indexer.q_proj *indexer.k_proj *indexer.q_norm "
        "*indexer.k_norm"
    ),
    "mistral3": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_gate_inp *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "mistral4": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_q *attn_q_a *attn_q_b *attn_kv_a_mqa *attn_kv_b "
        "*attn_k_b *attn_v_b *attn_q_a_norm *attn_kv_a_norm *attn_output *attn_rot_embd *ffn_gate_inp *ffn_norm "
        "*ffn_gate *ffn_down *ffn_up *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_up_exps *ffn_gate_shexp "
        "*ffn_down_shexp *ffn_up_shexp *exp_probs_b"
    ),
    "modern-bert": (
        "token_embd token_embd_norm token_types output_norm *attn_norm *attn_output *attn_qkv *ffn_up *ffn_down "
        "*ffn_norm cls cls.output cls.norm"
    ),
    "mpt": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_output *ffn_norm *ffn_down *ffn_up *ffn *attn_q_norm "
        "*attn_k_norm position_embd"
    ),
    "muse-glimmer": (
        "token_embd output output_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v *attn_output "
        "*attn_gate *ffn_gate *ffn_down *ffn_up *attn_norm *post_attention_norm *ffn_norm:pre *post_ffw_norm"
    ),
    "nanbeige": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_q *attn_k *attn_v *attn_output *attn_rot_embd "
        "*ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "nemotron": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_norm *ffn_down *ffn_up"
    ),
    "nemotron_h": (
        "token_embd output_norm output *attn_norm *ssm_in *ssm_conv1d *ssm_dt *ssm_a *ssm_d *ssm_norm *ssm_out "
        "*attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_down *ffn_up"
    ),
    "nemotron_h_moe": (
        "token_embd output_norm output *attn_norm *ssm_in *ssm_conv1d *ssm_dt *ssm_a *ssm_d *ssm_norm *ssm_out "
        "*attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_down *ffn_up *ffn_gate_inp *ffn_up_exps *ffn_down_exps "
        "*ffn_latent_down *ffn_latent_up *ffn_down_shexp *ffn_up_shexp *exp_probs_b *post_attention_norm "
        "*nextn.eh_proj *nextn.enorm *nextn.hnorm *nextn.shared_head_norm"
    ),
    "neo-bert": (
        "token_embd *attn_norm *attn_qkv *attn_output *ffn_norm *ffn_down *ffn_up enc.output_norm cls cls.output"
    ),
    "nomic-bert": (
        "token_embd token_embd_norm token_types position_embd output_norm *attn_output_norm *attn_qkv *attn_output "
        "*ffn_gate *ffn_down *ffn_up *layer_output_norm"
    ),
    "nomic-bert-moe": (
        "token_embd token_embd_norm token_types position_embd output_norm *attn_output_norm *attn_qkv *attn_output "
        "*ffn_down *ffn_up *ffn_gate_inp *ffn_down_exps *ffn_up_exps *layer_output_norm"
    ),
    "olmo": "token_embd output *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_gate *ffn_down *ffn_up",
    "olmo2": (
        "token_embd output_norm output *attn_qkv *attn_q *attn_k *attn_v *attn_output *post_attention_norm "
        "*attn_q_norm *attn_k_norm *post_ffw_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "olmoe": (
        "token_embd output_norm output *attn_output *attn_qkv *attn_q *attn_k *attn_v *attn_norm *attn_q_norm "
        "*attn_k_norm *ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_up_exps *ffn_down_exps"
    ),
    "openelm": (
        "token_embd output_norm *attn_norm *attn_qkv *attn_q_norm *attn_k_norm *attn_output *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up"
    ),
    "orion": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "paddleocr": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up"
    ),
    "pangu-embedded": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up"
    ),
    "phi2": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_down "
        "*ffn_up"
    ),
    "phi3": (
        "token_embd output_norm output rope_factors_long rope_factors_short *attn_norm *attn_qkv *attn_q *attn_k "
        "*attn_v *attn_output *ffn_norm *ffn_down *ffn_up"
    ),
    "phimoe": (
        "token_embd output_norm output rope_factors_long rope_factors_short *attn_norm *attn_qkv *attn_q *attn_k "
        "*attn_v *attn_output *ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "plamo": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_gate *ffn_down *ffn_up"
    ),
    "plamo2": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_output *attn_rot_embd "
        "*attn_q_norm *attn_k_norm *post_attention_norm *ffn_norm *ffn_gate *ffn_down *ffn_up *post_ffw_norm *ssm_in "
        "*ssm_conv1d *ssm_x *ssm_dt *ssm_a *ssm_d *ssm_out *ssm_dt_norm *ssm_b_norm *ssm_c_norm"
    ),
    "plamo3": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q_norm *attn_k_norm *attn_output "
        "*post_attention_norm *ffn_norm *ffn_down *ffn_up *post_ffw_norm"
    ),
    "plm": (
        "token_embd output output_norm *attn_norm *attn_q *attn_kv_a_mqa *attn_kv_a_norm *attn_kv_b *attn_output "
        "*ffn_norm *ffn_up *ffn_down"
    ),
    "qwen": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_output *attn_rot_embd *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up"
    ),
    "qwen2": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm "
        "*ffn_gate *ffn_down *ffn_up"
    ),
    "qwen2moe": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm "
        "*ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps *ffn_gate_inp_shexp *ffn_gate_shexp *ffn_down_shexp "
        "*ffn_up_shexp"
    ),
    "qwen2vl": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up"
    ),
    "qwen3": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm "
        "*attn_v *attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "qwen35": (
        "token_embd output_norm output cls.output *attn_norm *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *post_attention_norm *attn_gate *attn_qkv *ffn_gate *ffn_down *ffn_up *ssm_a *ssm_conv1d *ssm_dt "
        "*ssm_norm *ssm_beta *ssm_alpha *ssm_out *nextn.eh_proj *nextn.embed_tokens *nextn.enorm *nextn.hnorm "
        "*nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "qwen35moe": (
        "token_embd output_norm output *attn_norm *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v *attn_output "
        "*post_attention_norm *attn_gate *attn_qkv *ffn_gate_inp *ffn_gate_inp_shexp *ffn_up_shexp *ffn_down_shexp "
        "*ffn_gate_shexp *ffn_down_exps *ffn_up_exps *ffn_gate_exps *ffn_gate_up_exps *ssm_a *ssm_conv1d *ssm_dt "
        "*ssm_norm *ssm_beta *ssm_alpha *ssm_out *nextn.eh_proj *nextn.embed_tokens *nextn.enorm *nextn.hnorm "
        "*nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "qwen3moe": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "qwen3next": (
        "token_embd output_norm output *attn_norm *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v *attn_output "
        "*post_attention_norm *attn_gate *attn_qkv *ffn_gate_inp *ffn_gate_inp_shexp *ffn_up_shexp *ffn_down_shexp "
        "*ffn_gate_shexp *ffn_down_exps *ffn_up_exps *ffn_gate_exps *ffn_gate_up_exps *ssm_a *ssm_conv1d *ssm_dt "
        "*ssm_norm *ssm_in *ssm_ba *ssm_out *nextn.eh_proj *nextn.embed_tokens *nextn.enorm *nextn.hnorm "
        "*nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "qwen3vl": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm "
        "*attn_v *attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "qwen3vlmoe": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "qwen4exp": (
        "token_embd output output_hc_norm output_hc_down output_hc_up *hc_attn_norm *hc_attn_down *hc_attn_up "
        "*hc_attn_inject *hc_ffn_norm *hc_ffn_down *hc_ffn_up *hc_ffn_inject *attn_q *attn_q_norm *attn_k *attn_k_norm "
        "*attn_v *attn_output *indexer.q_proj *indexer.k_proj *indexer.q_norm:qsa *indexer.k_norm:qsa *attn_qkv "
        "*attn_gate *ssm_a *ssm_conv1d *ssm_dt *ssm_norm *ssm_beta *ssm_alpha *ssm_out *ffn_gate_inp "
        "*ffn_gate_inp_shexp *ffn_up_shexp *ffn_down_shexp *ffn_gate_shexp *ffn_down_exps *ffn_up_exps *ffn_gate_exps "
        "*ffn_gate_up_exps per_layer_token_embd *ple_key *ple_value *ple_norm_key *ple_norm_query *ple_norm_conv "
        "*ple_conv1d *nextn.eh_proj *nextn.enorm *nextn.hnorm *nextn.hc_head_norm *nextn.hc_head_down "
        "*nextn.hc_head_up"
    ),
    "refact": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up"
    ),
    "rnd1": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm *attn_v "
        "*attn_output *ffn_norm *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "rwkv6": (
        "token_embd token_embd_norm output_norm output *attn_norm *attn_norm_2 *time_mix_w1 *time_mix_w2 "
        "*time_mix_lerp_x *time_mix_lerp_k *time_mix_lerp_v *time_mix_lerp_r *time_mix_lerp_g *time_mix_lerp_w "
        "*time_mix_lerp_fused *time_mix_first *time_mix_decay *time_mix_decay_w1 *time_mix_decay_w2 *time_mix_key "
        "*time_mix_value *time_mix_receptance *time_mix_gate *time_mix_ln *time_mix_output *channel_mix_lerp_k "
        "*channel_mix_lerp_r *channel_mix_key *channel_mix_receptance *channel_mix_value"
    ),
    "rwkv6qwen2": (
        "token_embd output_norm output *attn_norm *time_mix_w1 *time_mix_w2 *time_mix_lerp_x *time_mix_lerp_k "
        "*time_mix_lerp_v *time_mix_lerp_r *time_mix_lerp_g *time_mix_lerp_w *time_mix_lerp_fused *time_mix_first "
        "*time_mix_decay *time_mix_decay_w1 *time_mix_decay_w2 *time_mix_key *time_mix_value *time_mix_receptance "
        "*time_mix_gate *time_mix_ln *time_mix_output *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "rwkv7": (
        "token_embd token_embd_norm output_norm output *attn_norm *attn_norm_2 *time_mix_lerp_fused *time_mix_w0 "
        "*time_mix_w1 *time_mix_w2 *time_mix_a0 *time_mix_a1 *time_mix_a2 *time_mix_v0 *time_mix_v1 *time_mix_v2 "
        "*time_mix_g1 *time_mix_g2 *time_mix_k_k *time_mix_k_a *time_mix_r_k *time_mix_key *time_mix_value "
        "*time_mix_receptance *time_mix_ln *time_mix_output *channel_mix_lerp_k *channel_mix_key *channel_mix_value"
    ),
    "seed_oss": (
        "token_embd *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *post_attention_norm *ffn_gate *ffn_down "
        "*ffn_up output_norm output"
    ),
    "smallthinker": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm *ffn_gate "
        "*ffn_down *ffn_up *ffn_gate_inp *ffn_gate_exps *ffn_down_exps *ffn_up_exps"
    ),
    "smollm3": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
    "spark2_5": (
        "token_embd output_norm output *attn_norm *attn_qkv *attn_gate *attn_output *ffn_norm *ffn_gate *ffn_down "
        "*ffn_up"
    ),
    "stablelm": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output *ffn_norm "
        "*ffn_gate *ffn_down *ffn_up *attn_q_norm *attn_k_norm"
    ),
    "starcoder": (
        "token_embd position_embd output_norm output *attn_norm *attn_qkv *attn_output *ffn_norm *ffn_down *ffn_up"
    ),
    "starcoder2": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_norm *ffn_down *ffn_up"
    ),
    "step35": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_q_norm *attn_k *attn_k_norm "
        "*attn_v *attn_gate *attn_output *ffn_norm *ffn_gate *ffn_down *ffn_up *ffn_gate_inp *ffn_gate_exps "
        "*ffn_down_exps *ffn_up_exps *ffn_up_shexp *ffn_gate_shexp *ffn_down_shexp *exp_probs_b *nextn.eh_proj "
        "*nextn.embed_tokens *nextn.enorm *nextn.hnorm *nextn.shared_head_head *nextn.shared_head_norm"
    ),
    "t5": (
        "token_embd output dec.*attn_norm dec.*attn_q dec.*attn_k dec.*attn_v dec.*attn_o dec.*attn_rel_b "
        "dec.*cross_attn_norm dec.*cross_attn_q dec.*cross_attn_k dec.*cross_attn_v dec.*cross_attn_o "
        "dec.*cross_attn_rel_b dec.*ffn_norm dec.*ffn_gate dec.*ffn_down dec.*ffn_up dec.output_norm enc.*attn_norm "
        "enc.*attn_q enc.*attn_k enc.*attn_v enc.*attn_o enc.*attn_rel_b enc.*ffn_norm enc.*ffn_gate enc.*ffn_down "
        "enc.*ffn_up enc.output_norm"
    ),
    "t5encoder": (
        "token_embd output enc.*attn_norm enc.*attn_q enc.*attn_k enc.*attn_v enc.*attn_o enc.*attn_rel_b "
        "enc.*ffn_norm enc.*ffn_gate enc.*ffn_down enc.*ffn_up enc.output_norm"
    ),
    "talkie": (
        "token_embd output *attn_q *attn_q_norm *attn_k *attn_v *attn_output *ffn_gate *ffn_down *ffn_up "
        "*layer_output_scale"
    ),
    "xverse": (
        "token_embd output_norm output rope_freqs *attn_norm *attn_qkv *attn_q *attn_k *attn_v *attn_output "
        "*attn_rot_embd *ffn_norm *ffn_gate *ffn_down *ffn_up"
    ),
}

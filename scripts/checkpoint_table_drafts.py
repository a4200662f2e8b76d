"""The table of checkpoints, continued: draft models, which read a target's hidden states (EAGLE-3, DFlash, DSpark), and
models that are adapters of a base (Lev, Kev, Nimble).

``target`` is the checkpoint whose tokenizer, config.json and embedding the converter reads (--target-model-dir), or the
base of an adapter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from checkpoint_table_decoders import ATTENTION, DENSE, HEAD, HEAD_NORMS, NORMS
from checkpoint_table_mixtures import OTHERS
from checkpoint_table_towers import NARROW, TEXT, Shapes, add_prefix, shapes_in, stand_in

from checkpoint_table import Json, Row

#: Drafts have no tokenizer of their own.
_NO_VOCAB: Json = {"kind": "none"}
_ONE: Json = TEXT | {"num_hidden_layers": 1, "model_type": "llama", "draft_vocab_size": 320}
#: Queries, keys and values are of the embedding and the hidden state side by side.
_WIDE = (
    " hidden_norm:64 self_attn.q_proj:64x128 self_attn.k_proj:32x128 self_attn.v_proj:32x128 self_attn.o_proj:64x64"
    + NORMS
    + DENSE
)
_SMALL_HEAD = shapes_in("", "lm_head:320x64 norm:64 d2t!:320 t2d!:640")
_LAYERS = shapes_in("layers.{0-1}.", NORMS + ATTENTION + HEAD_NORMS + DENSE)
_QWEN3: Json = TEXT | HEAD | {"model_type": "qwen3", "block_size": 8}
_MARKOV = shapes_in("", "markov_head.markov_w1:640x16 markov_head.markov_w2:640x16")
_SMALL_MARKOV = shapes_in("", "markov_head.markov_w1:640x16 markov_head.markov_w2:320x16")


def draft(name: str, model: str, target: str, config: Json, tensors: Shapes, **fields: Any) -> Row:
    """Return a draft model."""
    return stand_in(name, model, config, tensors, target=target, **{"vocab": _NO_VOCAB} | fields)


def _ends(width: int) -> Shapes:
    """Return the tensors outside of layers; ``width``: of the target's hidden states side by side."""
    return shapes_in("", f"fc:64x{width} hidden_norm:64 norm:64")


_OWN_LAYERS = (
    draft("eagle3", "LlamaForCausalLMEagle3", "llama", _ONE,
          shapes_in("midlayer.", _WIDE) | _SMALL_HEAD | shapes_in("", "fc:64x768 embed_tokens:640x64")),
    draft("eagle3-llama", "Eagle3LlamaForCausalLM", "llama-model", _ONE | {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512}},
        shapes_in("midlayer.", _WIDE) | _SMALL_HEAD | shapes_in("", "fc:64x192"), dtype="float16"),
    draft("eagle3-speculator", "Eagle3Speculator", "mm-qwen3-vl", {
        "speculators_model_type": "eagle3", "draft_vocab_size": 320, "norm_before_residual": True,
        "target_hidden_size": 64, "transformer_layer_config": TEXT | {"num_hidden_layers": 1, "model_type": "llama"}},
        shapes_in("layers.0.", _WIDE) | _SMALL_HEAD | shapes_in("", "fc:64x192 embed_tokens:640x64")),
    draft("eagle3-draft", "Eagle3DraftModel", "nanbeige", _ONE | {"norm_before_fc": True},
          shapes_in("midlayer.", _WIDE) | _SMALL_HEAD | shapes_in("", "fc:64x192 input_norm:192")),
    # A draft without a target is refused.
    replace(draft("eagle3-alone", "LlamaForCausalLMEagle3", "", _ONE, shapes_in("midlayer.", _WIDE) | _SMALL_HEAD),
            target=None),
    draft("dflash", "DFlashDraftModel", "mm-qwen3.5", _QWEN3 | {
        "dflash_config": {"mask_token_id": 639, "target_layer_ids": [0, 1]}}, _LAYERS | _ends(128)),
    # The target rotates in sections; windows; rows of heads side by side rather than halves.
    draft("dflash-mrope", "DFlashDraftModel", "mm-qwen3-vl", _QWEN3 | {
        "rope_is_neox_style": False, "is_causal": False, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
        "dflash_config": {"mask_token_id": 639, "target_layer_ids": [0, 1], "block_size": 4}}, _LAYERS | _ends(128)),
    # A vector for the mask, beside the target's embedding and its head.
    draft("dflash-mask", "DFlashDraftModel", "mimo-v2", _QWEN3 | {"dflash_config": {
        "mask_token_id": 12, "target_layer_ids": [0, 2], "attention_value_scale": 0.707, "use_swa": True,
        "swa_window_size": 8, "causal": True}},
        _LAYERS | shapes_in("layers.{0-1}.self_attn.", "sinks!:4") | _ends(128),
        parts={"mask_embedding.pt": {"mask_token_id": [12], "embedding": [64]}}),
    draft("dflash2", "DFlash2DraftModel", "mm-qwen3.5-moe", _QWEN3 | {
        "dflash_config": {
            "mask_token_id": 639, "target_layer_ids": [1], "conv_kernel_size": 3, "conv_group_size": 16,
            "selector_rank": 16, "selector_top_k": 4, "output_multiplier": 0.5, "final_logit_softcapping": 30.0,
            "input_embedding_scale": 2.0}},
        _LAYERS | _ends(64)
        | shapes_in("layers.{0-1}.", "attention_conv.base_kernel!:2x3x64 mlp_conv.base_kernel!:2x3x64"
            " attention_conv.kernel_projection:24x64 mlp_conv.kernel_projection:24x64")
        | shapes_in("candidate_selector.", "predecessor_codebook!:640x16 successor_codebook!:640x16 hidden_projection:16x64")),
    draft("dspark-qwen3", "Qwen3DSparkModel", "mm-qwen3.5", _QWEN3 | {
        "target_layer_ids": [0, 1], "mask_token_id": 639, "markov_head_type": "vanilla"},
        _LAYERS | _ends(128) | _MARKOV | shapes_in("", "confidence_head.proj:1x80+ embed_tokens:640x64 lm_head:640x64")),
    draft("dspark-draft", "DSparkDraftModel", "mm-qwen3.5-moe", _QWEN3 | {
        "draft_vocab_size": 320, "sample_from_anchor": False,
        "dflash_config": {"mask_token_id": 639, "target_layer_ids": [0, 1]}},
        _LAYERS | _ends(128) | _SMALL_MARKOV | shapes_in("", "lm_head:320x64 d2t!:320 t2d!:640")),
    draft("dspark-speculator", "DSparkSpeculator", "mm-qwen3-vl", {
        "speculators_model_type": "dspark", "draft_vocab_size": 320, "mask_token_id": 639, "block_size": 8,
        "aux_hidden_state_layer_ids": [1, 2], "transformer_layer_config": _QWEN3},
        _LAYERS | _ends(128) | _SMALL_MARKOV | shapes_in("", "confidence_head.proj:1x80 lm_head:320x64 d2t!:320 t2d!:640")),
    draft("dspark-lfm2", "Lfm2DSparkDraftModel", "lfm2", _QWEN3 | {
        "dflash_config": {"mask_token_id": 639, "target_layer_ids": [0, 2]}}, _LAYERS | _ends(128) | _MARKOV),
    draft("dspark-ling", "LingDSparkModel", "bailing-moe-v3", _QWEN3 | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "dflash_config": {"mask_token_id": 639, "target_layer_ids": [0, 2]}}, _LAYERS | _ends(128) | _MARKOV),
    draft("dspark-gemma4", "Gemma4DSparkModel", "mm-gemma4", NARROW | {
        "model_type": "gemma4_text", "attention_k_eq_v": True, "layer_types": ["full_attention"] * 2,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "global_head_dim": 32, "head_dim": 16,
        "num_global_key_value_heads": 1, "rms_norm_eps": 1e-6, "target_layer_ids": [0, 1], "mask_token_id": 639,
        "block_size": 8, "sliding_window": 8},
        shapes_in("layers.{0-1}.", NORMS + " pre_feedforward_layernorm:64 post_feedforward_layernorm:64 layer_scalar!:1"
           " self_attn.q_proj:128x64 self_attn.k_proj:32x64 self_attn.o_proj:64x128 self_attn.q_norm:32"
           " self_attn.k_norm:32" + DENSE)
        | _ends(128) | _MARKOV | shapes_in("", "confidence_proj:1x80+ embed_tokens:640x64")),
    draft("muse-glimmer-draft", "MuseGlimmerAssistantModel", "mm-muse-glimmer", TEXT | HEAD | {
        "model_type": "muse_glimmer_assistant", "block_size": 8, "target_layer_ids": [0, 2], "mask_token_id": 639,
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        _LAYERS
        | shapes_in("", "encoder.fc:64x128 encoder.output_norm_enc:64 norm:64")),
)  # fmt: skip

_V4 = {row.name: row for row in OTHERS}["deepseek-v4"]
_V4_LAYER = {
    name.replace("layers.{0-2}.", ""): shape for name, shape in _V4.more.items() if name.startswith("layers.{0-2}.")
}
#: Four streams: llama.cpp runs no other number.
_V4_STREAMS = {
    f"hc_{part}_{name}!": shape for part in ("attn", "ffn") for name, shape in (("fn", "24x256"), ("base", "24"))
}
_V4_DRAFT: Shapes = (
    add_prefix("mtp.{0-1}.", _V4_LAYER)
    | shapes_in("mtp.{0-1}.", " ".join(f"{name}:{shape}" for name, shape in _V4_STREAMS.items()))
    | shapes_in("mtp.{0-1}.", "ffn.gate.bias!:4 ffn.gate.bias_vl!:4")
    | shapes_in("mtp.0.", "main_proj:64x128 main_norm:64")
    | shapes_in("mtp.1.", "norm:64 hc_head_fn!:4x256 hc_head_base!:4 hc_head_scale!:1 markov_head.markov_w1:640x16")
    | shapes_in("mtp.1.", "markov_head.markov_w2:640x16 confidence_head.proj:1x80")
)
_V4_CONFIG: Json = {
    "num_nextn_predict_layers": 2, "hc_mult": 4, "dspark_noise_token_id": 12, "dspark_block_size": 4,
    "dspark_target_layer_ids": [0, 2]}  # fmt: skip
_V4_REST = {name: shape for name, shape in _V4.more.items() if not name.startswith("mtp.")}

DRAFTS = (
    *_OWN_LAYERS,
    # Beside its target: --dspark.
    replace(_V4, name="dspark-deepseek-v4", config=_V4_CONFIG, more=_V4_REST | _V4_DRAFT, target="deepseek-v4",
            options=("--dspark",)),
    replace(_V4, name="dspark-deepseek-v4-alone", config=_V4_CONFIG | {"architectures": ["DeepseekV4DSparkModel"]},
            more=_V4_DRAFT, target="deepseek-v4"),
)  # fmt: skip

# --- models that are adapters ----------------------------------------------------------------------------------------

#: The factors of the adapter's matrices in two layers of mm-qwen3.5, whose names are those of either class.
_FACTORS = {
    "model.layers.{0-1}.mlp.up_proj": (128, 64),
    "model.layers.{0-1}.mlp.down_proj": (64, 128),
    "model.layers.0.linear_attn.in_proj_qkv": (128, 64),
    "model.layers.1.self_attn.q_proj": (128, 64),
}


def adapter(name: str, model: str, files: Json, prefix: str = "", **fields: Any) -> Row:
    """Return a model that is an adapter of rank 4 of mm-qwen3.5."""
    tensors: Shapes = {}
    for module, (rows, columns) in _FACTORS.items():
        path = "base_model.model." + module.replace("model.", f"model.{prefix}", 1)
        tensors |= {f"{path}.lora_A.weight": [4, columns], f"{path}.lora_B.weight": [rows, 4]}
    lora: Json = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["up_proj"]}
    lora["base_model_name_or_path"] = "quantkit/mm-qwen3.5"
    row = draft(name, model, "mm-qwen3.5", {}, {}, files={"adapter_config.json": lora} | files, **fields)
    return replace(row, parts={"adapter_model.safetensors": tensors} | row.parts)


ADAPTERS = (
    adapter("lev", "LevModel", {
        "lev_release.json": {}, "calibration.json": {"temperatures": {
            "choice:A": 1.25, "choice:A:small": 0.75, "score:A:3:5": 2, "noul:B": 0.5}}}, dtype="float32"),
    adapter("kev", "KevModel", {"training_config.json": {"args": {"head_dim": 32}, "base_revision": "0123abcd"}},
            "language_model.", parts={"head.pt": {"head_dim": [32], "hidden_size": [64]}}),
    adapter("nimble", "NimbleModel", {"schema_config.json": {
        "task": "schema_candidate_classification_v2", "revision": "main"}, "README.md": "# Nimble\n"}),
)  # fmt: skip

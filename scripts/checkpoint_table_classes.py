"""The table of checkpoints, continued: decision models, parts of speech models, layers in cycles, adapters in the file.

As in checkpoint_table_decoders.py, config.json has what the converter reads, and names are those of its name map.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from checkpoint_table_decoders import HEAD, NORMS, SIZES, of, written
from checkpoint_table_mixtures import OTHERS

from checkpoint_table import Json, Row, bpe, spm

#: No files of a tokenizer.
_NO_VOCAB: Json = {"kind": "none"}


def _laya(name: str, decision: Json, file: str) -> Row:
    """Return a row of ModernBERT in a folder, a head of two layers, a tokenizer in a folder."""
    encoder = SIZES | {
        "architectures": ["ModernBertModel"], "model_type": "modernbert", "local_attention": 64, "layer_norm_eps": 1e-5,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        "pad_token_id": 579, "norm_eps": 1e-5, "hidden_activation": "gelu", "norm_bias": False,
        "cls_token_id": 577, "sep_token_id": 576,
    }  # fmt: skip
    layer = " {0}:64 {0}.bias!:64"
    head = "".join(
        (
            " self_attn.in_proj_weight!:192x64 self_attn.in_proj_bias!:192 linear1:256x64 linear1.bias!:256",
            " linear2:64x256 linear2.bias!:64",
            *(layer.format(norm) for norm in ("norm1", "norm2")),
            layer.format("self_attn.out_proj").replace(":64 ", ":64x64 ", 1),
        )
    )
    tensors = (
        of("encoder.", "embeddings.tok_embeddings:640x64 embeddings.norm:64 final_norm:64 layers.{1-2}.attn_norm:64")
        | of("encoder.layers.{0-2}.", "attn.Wqkv:192x64 attn.Wo:64x64 mlp.Wi:256x64 mlp.Wo:64x128 mlp_norm:64")
        | of("head.layers.{0-1}.", head)
        | of("", "type_emb:3x64 act_head.0:8x64 temperature!:3")
        | of("scorer.", "0:64 0.bias!:64 1:64x64 1.bias!:64 3:1x64 3.bias!:1")
    )
    special: Json = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    tokens = bpe("modern-bert", "</s>", "<s>", "<unk>", "<pad>", "<mask>", bos="<s>", unk="<unk>", pad="<pad>",
                 config=special)  # fmt: skip
    return written(name, "ModernBertDecisionModel", {}, tensors, vocab=tokens | {"folder": "tokenizer"},
                   files={"encoder": {"config.json": encoder}, file: decision})  # fmt: skip


_LFM_2: Json = {
    "model_type": "lfm2", "norm_eps": 1e-5, "conv_L_cache": 3, "block_ff_dim": 128, "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 32, "layer_types": ["conv", "full_attention", "conv"],
    "sliding_window": 30, "output_size": 34,
}  # fmt: skip
_HRM = NORMS + " attn.gqkv_proj:256x64 attn.o_proj:64x64 mlp.gate_up_proj:256x64 mlp.down_proj:64x128"
_SWITCH: Json = {
    "model_type": "granite_switch", "num_hidden_layers": 3, "num_adapters": 2, "max_lora_rank": 4,
    "adapter_token_ids": [577, 578], "adapter_substitute_token_ids": [1, 2], "shared_intermediate_size": 128,
    "embedding_multiplier": 12.0, "attention_multiplier": 0.25, "logits_scaling": 8.0, "residual_multiplier": 0.22,
    "num_local_experts": 0, "num_experts_per_tok": 2, "tie_word_embeddings": True,
}  # fmt: skip


def _adapters(name: str, rows: str, columns: int, slices: bool) -> str:
    """Return the adapters of a matrix; ``rows``: of each of its parts."""
    parts = rows.split()
    a, b = ("lora_A_slices.{}", "lora_B_slices.{}") if slices else ("lora_A", "lora_B")
    return "".join(
        f" {name}.{a.format(i)}!:2x1x4x{columns} {name}.{b.format(i)}!:2x1x{n}x4" for i, n in enumerate(parts)
    )


#: Names of Mistral's special tokens.
_MISTRAL_TOKENS = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]"),
    *("[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"),
]
_PARAMS: Json = {
    "dim": 64, "n_layers": 2, "head_dim": 16, "hidden_dim": 128, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
    "vocab_size": 640, "rope_theta": 1e6, "max_position_embeddings": 4096,
}  # fmt: skip
_YARN: Json = {
    "yarn": {"original_max_position_embeddings": 1024, "factor": 4.0, "apply_scale": False, "beta": 32.0, "alpha": 1.0},
    "llama_4_scaling": {"original_max_position_embeddings": 1024, "beta": 0.1},
}
_NATIVE = " attention_norm:64 ffn_norm:64 attention.wq:64x64 attention.wk:32x64 attention.wv:32x64 attention.wo:64x64"
_NATIVE_DENSE = of("", "tok_embeddings:640x64 norm:64 output:640x64") | of(
    "layers.{0-1}.", _NATIVE + " feed_forward.w1:128x64 feed_forward.w2:64x128 feed_forward.w3:128x64"
)
_NATIVE_MOE = (
    of("", "tok_embeddings:640x64 norm:64 output:640x64")
    | of("layers.{0-1}.", " attention_norm:64 ffn_norm:64 attention.wq_a:32x64 attention.q_a_norm:32"
         " attention.wq_b:192x32 attention.wkv_a_with_mqa:48x64 attention.kv_a_norm:32 attention.wkv_b:256x32"
         " attention.wo:64x128")
    | of("layers.0.feed_forward.", "w1:128x64 w2:64x128 w3:128x64")
    | of("layers.1.", "gate:4x64 shared_experts.w1:32x64 shared_experts.w2:64x32 shared_experts.w3:32x64")
    | of("layers.1.experts.{0-3}.", "w1:32x64 w2:64x32 w3:32x64")
)  # fmt: skip


def _native(
    name: str, version: str, params: Json, tensors: dict[str, list[int]] = _NATIVE_DENSE, **settings: Any
) -> Row:
    """Return a row in Mistral's own format, beside a config.json of the other one."""
    files = {"params.json": _PARAMS | params} | settings.pop("files", {})
    defaults: Json = {"vocab": {"kind": "tekken", "pre": "tekken", "version": version, "special": _MISTRAL_TOKENS}}
    defaults |= {"parts": {"consolidated.safetensors": tensors}, "options": ("--mistral-format",)}
    return written(name, "MistralForCausalLM", {"model_type": "mistral"}, {}, files=files, **(defaults | settings))


def _dense(features: tuple[int, int]) -> Json:
    """Return the files of a dense layer beside its tensors."""
    return {"config.json": {"in_features": features[0], "out_features": features[1], "bias": False}}


_MODULES = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
_GEMMA_DENSE = replace(
    next(row for row in OTHERS if row.name == "gemma-embedding"),
    name="gemma-embedding-dense",
    options=("--sentence-transformers-dense-modules",),
    files={
        "1_Pooling": {"config.json": '{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}'},
        "2_Dense": _dense((64, 96)),
        "3_Dense": _dense((96, 64)),
        "modules.json": json.dumps(
            [
                {"idx": i, "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
                for i, name in enumerate(_MODULES)
            ]
        ),
    },
    parts={"2_Dense/model.safetensors": of("", "linear:96x64"), "3_Dense/model.safetensors": of("", "linear:64x96")},
)


CLASSES = (
    _GEMMA_DENSE,
    _native("mistral-native", "v3", {}),
    _native("mistral-native-v7", "v7", {"head_dim": 32}, parts={
        "consolidated-00001-of-00002.safetensors": {n: s for n, s in _NATIVE_DENSE.items() if "layers" not in n},
        "consolidated-00002-of-00002.safetensors": {n: s for n, s in _NATIVE_DENSE.items() if "layers" in n}},
        files={"chat_template.jinja": "{{ messages }}"}),
    _native("mistral-native-yarn", "v11", _YARN),
    _native("mistral-native-v13", "v13", {"yarn": _YARN["yarn"] | {"apply_scale": True}}),
    _native("mistral-native-v15", "v15", {},
            options=("--mistral-format", "--disable-mistral-community-chat-template")),
    _native("mistral-native-pieces", "", {"vocab_size": 600}, {n: [600, *s[1:]] if s[0] == 640 else s
            for n, s in _NATIVE_DENSE.items()}, vocab=spm(file="tokenizer.model.v3")),
    _native("mistral-native-moe", "v13", _YARN | {
        "n_kv_heads": 4, "head_dim": 48, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "moe": {
            "num_experts": 4, "num_experts_per_tok": 2, "expert_hidden_dim": 32, "num_shared_experts": 1,
            "first_k_dense_replace": 1, "route_every_n": 1, "routed_scale": 1.0, "num_expert_groups": 1,
            "num_expert_groups_per_tok": 1}}, _NATIVE_MOE),
    _laya("laya", {"head_layers": 2, "head_max_len": 128, "temperature": [1.5, 0.75, 2], "temperature_by_options": {
        "choice:3-5": 1.25, "choice:11+": 0.5}}, "rl_agent_config.json"),
    _laya("julia", {"head_layers": 2, "architecture": "JuliaDecisionModel"}, "julia_config.json"),
    written("hrm-text", "HrmTextForCausalLM", HEAD | {
        "model_type": "hrm_text", "num_hidden_layers": 2, "num_key_value_heads": 4, "H_cycles": 2, "L_cycles": 3,
        "embedding_scale": 8.0, "prefix_lm": True},
        of("model.", "embed_tokens:640x64 z_L_init!:64") | of("", "lm_head:640x64")
        | of("model.{L_module|H_module}.layers.{0-1}.", _HRM.replace(NORMS, ""))),
    written("hrm-text-stacks", "HrmTextForCausalLM", {
        "model_type": "hrm_text", "num_hidden_layers": 24, "num_layers_per_stack": 2, "num_key_value_heads": 4,
        "H_cycles": 1, "L_cycles": 1, "embedding_scale": 8.0},
        of("model.", "embed_tokens:640x64 z_L_init!:64") | of("", "lm_head:640x64")
        | of("model.{L_module|H_module}.layers.{0-1}.", _HRM.replace(NORMS, ""))),
    written("lfm2.5-audio-tokenizer", "Lfm25AudioTokenizer", _LFM_2,
            of("model.", "embed_tokens:640x64 embedding_norm:64") | of("", "lin:34x64 lin.bias!:34 emb.emb:8x64"
            " istft.window!:16") | of("model.layers.{0-2}.", "ffn_norm:64 operator_norm:64 feed_forward.w1:96x64"
            " feed_forward.w2:64x96 feed_forward.w3:96x64") | of("model.layers.{0,2}.", "conv.conv:64x1x3"
            " conv.in_proj:192x64 conv.out_proj:64x64") | of("model.layers.1.", "self_attn.q_proj:64x64"
            " self_attn.k_proj:32x64 self_attn.v_proj:32x64 self_attn.out_proj:64x64 self_attn.q_layernorm:16"
            " self_attn.k_layernorm:16"), vocab=_NO_VOCAB),
    written("wavtokenizer", "WavTokenizerDec", {
        "model_type": "wavtokenizer", "hidden_size": 34, "n_embd_features": 32, "n_ff": 96, "vocab_size": 64,
        "num_hidden_layers": 6, "layer_norm_epsilon": 1e-6, "group_norm_epsilon": 1e-6, "group_norm_groups": 8,
        "posnet": {"n_embd": 64, "n_layer": 6}, "convnext": {"n_embd": 64, "n_layer": 6}},
        of("", "token_embd:64x32") | of("backbone.", "embed:64x32x7 embed.bias!:64x1 norm:64 norm.bias!:64"
           " final_layer_norm:64 final_layer_norm.bias!:64") | of("backbone.posnet.{0,1,3,4}.", "norm1:64x1"
           " norm1.bias!:64x1 conv1:64x64x3 conv1.bias!:64x1 norm2:64x1 norm2.bias!:64x1 conv2:64x64x3"
           " conv2.bias!:64x1") | of("backbone.posnet.2.", "norm:64x1 norm.bias!:64x1 q:64x64x1 q.bias!:64x1 k:64x64x1"
           " k.bias!:64x1 v:64x64x1 v.bias!:64x1 proj_out:64x64x1 proj_out.bias!:64x1") | of("backbone.posnet.5.",
           "norm:64x1 norm.bias!:64x1") | of("backbone.convnext.{0-5}.", "dwconv:64x1x7 dwconv.bias!:64x1 norm:64"
           " norm.bias!:64 pwconv1:96x64 pwconv1.bias!:96 pwconv2:64x96 pwconv2.bias!:64 gamma:64")
        | of("", "head.out:34x64 head.out.bias!:34 quantizer.codebook.cluster_size!:64"),
        vocab=_NO_VOCAB),
    written("granite-switch", "GraniteSwitchForCausalLM", _SWITCH,
            of("model.", "embed_tokens:640x64 norm:64 switch.weight!:4x64 adapter_token_ids!:2") | of(
                "", "lm_head:640x64") | of("model.layers.{0-1}.", NORMS
                + " self_attn.qkv_proj.base_layer:128x64 self_attn.o_proj.base_layer:64x64"
                + " shared_mlp.input_linear.base_layer:256x64 shared_mlp.output_linear.base_layer:64x128"
                + _adapters("self_attn.qkv_proj", "64 32 32", 64, True) + _adapters("self_attn.o_proj", "64", 64, False)
                + _adapters("shared_mlp.input_linear", "128 128", 64, True)
                + _adapters("shared_mlp.output_linear", "64", 128, False))),
)  # fmt: skip

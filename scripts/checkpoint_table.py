"""THE table of the checkpoints in tests/data/checkpoints: architectures, quantized sources, variants.

scripts/make_checkpoints.py makes their descriptions of it. To add an architecture: write its Row, run that script and
scripts/make_convert_goldens.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint."""

    name: str
    #: Class of transformers, and its configuration in addition to BASE.
    model: str
    args: Json = field(default_factory=dict)
    vocab: Json
    #: Major version of transformers that builds it. 0: none; ``args`` is config.json and ``more`` has all tensors.
    version: int = 4
    #: Major version of transformers that runs it, where another one does, or 0: none.
    runs: int | None = None
    #: Changes to config.json: keys to add, keys that real ones lack, and keys to add to its text_config.
    config: Json = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    text: Json = field(default_factory=dict)
    #: Other sizes, with which the model is built, where a dropped key has another default.
    sparse: Json = field(default_factory=dict)
    #: Tensors unknown to transformers, and prefixes whose tensors are copied: (from, to).
    more: dict[str, list[int]] = field(default_factory=dict)
    copies: tuple[tuple[str, str], ...] = ()
    dtype: str = "bfloat16"
    f32: tuple[str, ...] = ()
    shards: int = 1
    files: Json = field(default_factory=dict)
    options: tuple[str, ...] = ()
    outtypes: tuple[str, ...] = ("f32", "f16", "bf16", "q8_0", "auto")
    #: The scheme of tests/lib/quantized_checkpoints.py, for models that exist only quantized.
    quantized: Json | None = None
    #: The checkpoint whose draft model it is.
    target: str | None = None
    #: Tensors in files of their own: path to names and shapes.
    parts: Json = field(default_factory=dict)
    #: After how many values those of a tensor repeat, for wide models: drawing them takes long.
    period: int | None = None


# --- vocabularies ----------------------------------------------------------------------------------------------------

_FIRST = 576  # id after the pieces of byte-level BPE
_CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def bpe(pre: str, *special: str, cls: str = "PreTrainedTokenizerFast", user: tuple[str, ...] = (), **more: Any) -> Json:
    """Return byte-level BPE: the first special token is eos; more: bos (its text), start (bos comes first), chat."""
    config = {"tokenizer_class": cls, "eos_token": special[0]}
    config |= {f"{key}_token": more.pop(key) for key in ("bos", "unk", "pad") if key in more}
    config |= {"chat_template": more.pop("chat")} if "chat" in more else {}
    config |= more.pop("config", {})
    start = {"starts_with": config["bos_token"]} if more.pop("start", False) else {}
    vocab = {"kind": "bpe", "pre": pre, "special": list(special), "user": list(user), "config": config}
    return vocab | start | more


def spm(cls: str = "LlamaTokenizer", first: tuple[str, ...] = ("<unk>", "<s>", "</s>"), **more: Any) -> Json:
    """Return a SentencePiece vocabulary, which begins with the tokens ``first``."""
    names = {"<unk>": "unk", "<s>": "bos", "</s>": "eos", "<bos>": "bos", "<eos>": "eos", "<pad>": "pad"}
    config = {"tokenizer_class": cls} | {f"{names[t]}_token": t for t in first if t in names}
    config |= {"chat_template": more.pop("chat")} if "chat" in more else {}
    config |= more.pop("config", {})
    return {"kind": "spm", "first": list(first), "config": config} | more


_LLAMA3 = bpe("llama-bpe", "<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
              bos="<|begin_of_text|>", start=True, chat=_CHAT, ignore_merges=True)  # fmt: skip
_QWEN = bpe("qwen2", "<|im_end|>", "<|endoftext|>", "<|im_start|>", cls="Qwen2Tokenizer", pad="<|endoftext|>",
            user=("<tool_call>", "</tool_call>", "<think>"), chat=_CHAT,
            config={"add_bos_token": False, "bos_token": None, "unk_token": None})  # fmt: skip
_QWEN35 = _QWEN | {"pre": "qwen35"}
_DEEPSEEK = bpe("deepseek-v3", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>",
                bos="<｜begin▁of▁sentence｜>", cls="LlamaTokenizerFast", start=True, merges="strings", chat=_CHAT,
                config={"add_bos_token": True, "add_eos_token": False})  # fmt: skip
_GLM = bpe("glm4", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
           user=("<think>", "</think>"), pad="<|endoftext|>", chat=_CHAT)  # fmt: skip
_GPT2 = bpe("gpt-2", "<|endoftext|>", cls="GPT2Tokenizer", bos="<|endoftext|>", unk="<|endoftext|>", split=False,
            merges="strings", config={"add_prefix_space": False})  # fmt: skip
_TEKKEN = bpe("tekken", "</s>", "<s>", "<unk>", "[INST]", "[/INST]", bos="<s>", unk="<unk>", start=True, chat=_CHAT)
_KIMI: Json = {
    "kind": "tiktoken", "file": "tiktoken.model", "pre": "kimi-k2", "reserved": 256,
    "special": ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>"],
    "config": {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
               "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, "chat_template": _CHAT},
}  # fmt: skip
_HUNYUAN: Json = {
    "kind": "tiktoken",
    "file": "hy.tiktoken",
    "pre": "hunyuan",
    "special": ["<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"],
    "config": {"tokenizer_class": "HYTokenizer", "eos_token": "<|eos|>", "chat_template": _CHAT},
}
_GEMMA = spm("GemmaTokenizer", ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<unused0>"),
             user_pieces=["<start_of_turn>"], unused=["<unused0>"], chat=_CHAT)  # fmt: skip
_GEMMA4 = spm("GemmaTokenizer", ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>"),
              chat=_CHAT) | {"kind": "spm_bpe", "pieces": 640}  # fmt: skip
# llama.cpp looks for <|endoftext|> if the name contains phi3.
_PHI3 = spm(special=["<|end|>", "<|user|>", "<|endoftext|>"])
_ERNIE = spm("Ernie4_5_Tokenizer", config={"add_prefix_space": False}, special=["<|im_start|>"])


# --- configurations --------------------------------------------------------------------------------------------------

BASE: Json = {
    "vocab_size": 640, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}  # fmt: skip
_YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
         "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
_MLA: Json = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_DEEPSEEK_V3: Json = BASE | _MLA | {
    "q_lora_rank": 128, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "max_position_embeddings": 163840, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST,
}  # fmt: skip

_INDEXER: Json = {"index_topk": 8, "index_head_dim": 64, "index_n_heads": 8}
_DELTA: Json = {
    "num_hidden_layers": 4, "head_dim": 64, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256, "num_experts_per_tok": 2, "rope_theta": 10000000.0, "eos_token_id": _FIRST,
}  # fmt: skip
_QWEN35_ROPE: Json = {"rope_parameters": {
    "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2],
    "mrope_interleaved": True}}  # fmt: skip
_QWEN_MTP = {"mtp.fc.weight": [256, 512], "mtp.norm.weight": [256], "mtp.pre_fc_norm_embedding.weight": [256],
             "mtp.pre_fc_norm_hidden.weight": [256]}  # fmt: skip
_LONGROPE = {"type": "longrope", "short_factor": [1.0 + i / 64 for i in range(32)],
             "long_factor": [1.0 + i * i / 16 for i in range(32)]}  # fmt: skip
_GRANITE: Json = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "tie_word_embeddings": True, "rope_theta": 10000.0, "bos_token_id": _FIRST, "eos_token_id": _FIRST,
    "pad_token_id": _FIRST,
}  # fmt: skip


def _mtp(layer: int) -> dict[str, list[int]]:
    """Return the additional tensors of a prediction layer (DeepSeek, GLM)."""
    names = {"embed_tokens": [640, 256], "shared_head.head": [640, 256], "eh_proj": [256, 512], "enorm": [256]}
    names |= {"hnorm": [256], "shared_head.norm": [256]}
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in names.items()}


_BAILING: dict[str, list[int]] = {
    "model.word_embeddings.weight": [640, 256], "lm_head.weight": [640, 256], "model.norm.weight": [256],
    "model.layers.{0-3}.attention.query_key_value.weight": [512, 256],
    "model.layers.{0-3}.attention.dense.weight": [256, 256],
    "model.layers.{0-3}.attention.query_layernorm.weight": [64],
    "model.layers.{0-3}.attention.key_layernorm.weight": [64],
    "model.layers.{0-3}.input_layernorm.weight": [256],
    "model.layers.{0-3}.post_attention_layernorm.weight": [256],
    "model.layers.0.mlp.gate_proj.weight": [512, 256], "model.layers.0.mlp.up_proj.weight": [512, 256],
    "model.layers.0.mlp.down_proj.weight": [256, 512],
    "model.layers.{1-3}.mlp.gate.weight": [8, 256], "model.layers.{1-3}.mlp.gate.expert_bias": [8],
    "model.layers.{1-3}.mlp.experts.{0-7}.gate_proj.weight": [256, 256],
    "model.layers.{1-3}.mlp.experts.{0-7}.up_proj.weight": [256, 256],
    "model.layers.{1-3}.mlp.experts.{0-7}.down_proj.weight": [256, 256],
    "model.layers.{1-3}.mlp.shared_experts.gate_proj.weight": [256, 256],
    "model.layers.{1-3}.mlp.shared_experts.up_proj.weight": [256, 256],
    "model.layers.{1-3}.mlp.shared_experts.down_proj.weight": [256, 256],
    "model.layers.3.eh_proj.weight": [256, 512], "model.layers.3.enorm.weight": [256],
    "model.layers.3.hnorm.weight": [256], "model.layers.3.final_layernorm.weight": [256],
}  # fmt: skip

_EXAONE: dict[str, list[int]] = {
    "transformer.wte.weight": [640, 256], "transformer.ln_f.weight": [256],
    "transformer.h.{0-2}.ln_1.weight": [256], "transformer.h.{0-2}.ln_2.weight": [256],
    "transformer.h.{0-2}.attn.attention.q_proj.weight": [256, 256],
    "transformer.h.{0-2}.attn.attention.k_proj.weight": [128, 256],
    "transformer.h.{0-2}.attn.attention.v_proj.weight": [128, 256],
    "transformer.h.{0-2}.attn.attention.out_proj.weight": [256, 256],
    "transformer.h.{0-2}.mlp.c_fc_0.weight": [512, 256], "transformer.h.{0-2}.mlp.c_fc_1.weight": [512, 256],
    "transformer.h.{0-2}.mlp.c_proj.weight": [256, 512],
}  # fmt: skip
_BITNET: dict[str, list[int]] = {
    "model.embed_tokens.weight": [640, 256], "model.norm.weight": [256],
    "model.layers.{0-2}.input_layernorm.weight": [256], "model.layers.{0-2}.post_attention_layernorm.weight": [256],
    "model.layers.{0-2}.self_attn.q_proj.weight": [256, 256], "model.layers.{0-2}.self_attn.k_proj.weight": [256, 256],
    "model.layers.{0-2}.self_attn.v_proj.weight": [256, 256], "model.layers.{0-2}.self_attn.o_proj.weight": [256, 256],
    "model.layers.{0-2}.self_attn.inner_attn_ln.weight": [256], "model.layers.{0-2}.mlp.ffn_layernorm.weight": [512],
    "model.layers.{0-2}.mlp.gate_proj.weight": [512, 256], "model.layers.{0-2}.mlp.up_proj.weight": [512, 256],
    "model.layers.{0-2}.mlp.down_proj.weight": [256, 512],
}  # fmt: skip

_README = """---
license: apache-2.0
base_model:
- Example/Tiny-Base-7B
language:
- en
- de
tags:
- moe
pipeline_tag: text-generation
library_name: transformers
---
# A small model
"""
_SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05,
             "transformers_version": "4.51.0"}  # fmt: skip

# --- the table -------------------------------------------------------------------------------------------------------

ROWS = (
    Row(name="llama", model="LlamaForCausalLM", vocab=_LLAMA3, shards=2, args={
        "rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "bos_token_id": _FIRST + 1, "eos_token_id": [_FIRST + 2, _FIRST]},
        files={"README.md": _README.replace("apache-2.0", "llama3.2"), "generation_config.json": _SAMPLING}),
    Row(name="qwen3-moe", model="Qwen3MoeForCausalLM", vocab=_QWEN, shards=3, args={
        "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "rope_theta": 1000000.0, "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST},
        files={"README.md": _README, "generation_config.json": _SAMPLING}),
    # 4.57.6 omits YaRN's factor from the scale of its attention.
    Row(name="deepseek-v2", model="DeepseekV2ForCausalLM", vocab=_DEEPSEEK | {"pre": "deepseek-llm"}, runs=5, args={
        **_MLA, "q_lora_rank": None, "head_dim": 32, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "norm_topk_prob": False, "n_shared_experts": 2, "rope_scaling": _YARN,
        "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST},
        config={"scoring_func": "softmax"}),
    Row(name="deepseek-v3", model="DeepseekV3ForCausalLM", vocab=_DEEPSEEK, shards=2, f32=("e_score_correction_bias",),
        args=_DEEPSEEK_V3 | {"rope_scaling": _YARN}, copies=(("model.layers.1.", "model.layers.3."),),
        config={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1},
        more=_mtp(3), drop=("head_dim", "rope_interleave", "qk_head_dim", "pretraining_tp"),
        files={"README.md": "---\nlibrary_name: transformers\n---\n# Tiny V3\n"}),
    Row(name="kimi-k2", model="DeepseekV3ForCausalLM", shards=2, f32=("e_score_correction_bias",),
        vocab=_KIMI, args=_DEEPSEEK_V3 | {
            "rope_scaling": _YARN | {"factor": 32.0}, "vocab_size": 832, "rope_theta": 50000.0, "n_group": 1,
            "routed_scaling_factor": 2.827},
        config={"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                "num_nextn_predict_layers": 0, "torch_dtype": "bfloat16"},
        drop=("head_dim", "rope_interleave", "qk_head_dim", "dtype")),
    Row(name="deepseek-v32", model="DeepseekV32ForCausalLM", version=5, vocab=_DEEPSEEK, shards=2,
        f32=("e_score_correction_bias",), args=_DEEPSEEK_V3 | _INDEXER | {
            "rope_parameters": _YARN | {"rope_type": "yarn", "rope_theta": 10000.0}}, config={
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1},
        copies=(("model.layers.1.", "model.layers.3."),), more=_mtp(3)),
    Row(name="glm4-moe", model="Glm4MoeForCausalLM", vocab=_GLM, shards=2, f32=("e_score_correction_bias",), args={
        "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
        "rope_theta": 1000000.0, "eos_token_id": [_FIRST, _FIRST + 4, _FIRST + 6], "pad_token_id": _FIRST},
        config={"num_nextn_predict_layers": 1}, copies=(("model.layers.1.", "model.layers.3."),), more=_mtp(3)),
    Row(name="glm4", model="Glm4ForCausalLM", vocab=_GLM, args={
        "head_dim": 64, "attention_bias": True, "partial_rotary_factor": 0.5,
        "eos_token_id": [_FIRST, _FIRST + 4, _FIRST + 6], "pad_token_id": _FIRST}),
    Row(name="glm4-moe-lite", model="Glm4MoeLiteForCausalLM", version=5, vocab=_GLM, f32=("e_score_correction_bias",),
        args=_MLA | {"q_lora_rank": 128, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
                     "eos_token_id": [_FIRST, _FIRST + 4, _FIRST + 6], "pad_token_id": _FIRST},
        config={"num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        copies=(("model.layers.1.", "model.layers.3."),), more=_mtp(3)),
    Row(name="glm-moe-dsa", model="GlmMoeDsaForCausalLM", version=5, vocab=_GLM, f32=("e_score_correction_bias",),
        args=_MLA | _INDEXER | {
            "q_lora_rank": 128, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
            "eos_token_id": [_FIRST, _FIRST + 4, _FIRST + 6], "pad_token_id": _FIRST},
        config={"num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        copies=(("model.layers.1.", "model.layers.3."),), more=_mtp(3)),
    Row(name="gpt-oss", model="GptOssForCausalLM", shards=2,
        vocab=bpe("gpt-4o", "<|return|>", "<|startoftext|>", "<|endoftext|>", "<|start|>", bos="<|startoftext|>",
                  pad="<|endoftext|>", chat=_CHAT), args={
            "head_dim": 64, "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2,
            "num_hidden_layers": 4, "sliding_window": 8, "max_position_embeddings": 131072,
            "eos_token_id": _FIRST, "pad_token_id": _FIRST + 2}),
    Row(name="minimax-m2", model="MiniMaxM2ForCausalLM", version=5, shards=2, f32=("e_score_correction_bias",),
        vocab=bpe("minimax-m2", "[e~[", "]~!b[", "]~b]", cls="GPT2Tokenizer", bos="]~!b[", unk="[e~[", chat=_CHAT,
                  user=("<think>", "</think>")), args={
            "head_dim": 64, "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
            "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST},
        config={"rope_theta": 5000000, "rotary_dim": 32, "scoring_func": "sigmoid", "use_qk_norm": True,
                "qk_norm_type": "per_layer", "use_routing_bias": True, "shared_intermediate_size": 0, "use_mtp": True,
                "num_mtp_modules": 3, "mtp_transformer_layers": 1, "attn_type_list": [1, 1, 1]}),
    Row(name="llama-tied", model="LlamaForCausalLM", dtype="float16", vocab=spm(chat=_CHAT), args={
        "tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 1e-5},
        drop=("head_dim", "num_key_value_heads"), sparse={"num_key_value_heads": 4}),
    Row(name="llama-f32", model="LlamaForCausalLM", dtype="float32", vocab=_GPT2, args={
        "hidden_size": 320, "intermediate_size": 500, "num_attention_heads": 5,
        "num_key_value_heads": 5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    Row(name="mistral", model="MistralForCausalLM", vocab=spm(chat=_CHAT, added=["[TOOL]"]), args={
        "sliding_window": None, "rope_theta": 1000000.0}),
    Row(name="mixtral", model="MixtralForCausalLM", shards=2,
        vocab=spm(chat=_CHAT, config={"add_bos_token": True, "add_eos_token": False, "legacy": True}), args={
            "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1000000.0, "sliding_window": None}),
    Row(name="ministral3", model="Ministral3ForCausalLM", version=5, vocab=_TEKKEN, args={
        "head_dim": 64, "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST, "pad_token_id": _FIRST,
        "max_position_embeddings": 262144, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}),
    Row(name="mistral3", model="Mistral3ForConditionalGeneration", vocab=_TEKKEN, shards=2, args={
        "text_config": BASE | {"model_type": "mistral", "head_dim": 64, "sliding_window": None, "rope_theta": 1e9},
        "vision_config": {"model_type": "pixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "head_dim": 32, "image_size": 32, "patch_size": 8},
        "image_token_index": 639}),
    Row(name="qwen2", model="Qwen2ForCausalLM", vocab=_QWEN, args={
        "tie_word_embeddings": True, "rope_theta": 1000000.0, "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST}),
    Row(name="qwen2-moe", model="Qwen2MoeForCausalLM", vocab=_QWEN, args={
        "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512, "num_experts": 4,
        "num_experts_per_tok": 2, "eos_token_id": _FIRST}),
    Row(name="qwen3", model="Qwen3ForCausalLM", vocab=_QWEN, args={
        "head_dim": 128, "tie_word_embeddings": True, "rope_theta": 1000000.0, "eos_token_id": _FIRST}),
    Row(name="qwen3-vl-moe", model="Qwen3VLMoeForConditionalGeneration", vocab=_QWEN, shards=2, args={
        "text_config": BASE | {
            "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2,
            "rope_theta": 5000000.0, "rope_scaling": {
                "rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True}},
        "vision_config": {
            "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 4}}),
    Row(name="qwen3-next", model="Qwen3NextForCausalLM", vocab=_QWEN, options=("--no-nextn",), f32=(".A_log",),
        args=_DELTA | {"num_experts": 4}),
    Row(name="qwen3-next-mtp", model="Qwen3NextForCausalLM", vocab=_QWEN, args=_DELTA | {"num_experts": 4},
        copies=(("model.layers.3.", "mtp.layers.0."),), more=_QWEN_MTP),
    Row(name="qwen3.5", model="Qwen3_5ForCausalLM", version=5, vocab=_QWEN35, options=("--no-nextn",),
        args=_DELTA | _QWEN35_ROPE | {"tie_word_embeddings": True}, drop=("mtp_num_hidden_layers",)),
    Row(name="qwen3.5-moe", model="Qwen3_5MoeForConditionalGeneration", version=5, vocab=_QWEN35, shards=2, args={
        "text_config": BASE | _DELTA | _QWEN35_ROPE | {"num_experts": 4},
        "vision_config": {
            "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256,
            "num_position_embeddings": 16, "patch_size": 4}},
        text={"mtp_num_hidden_layers": 1}, copies=(("model.language_model.layers.3.", "mtp.layers.0."),),
        more=_QWEN_MTP),
    Row(name="gemma2", model="Gemma2ForCausalLM", vocab=_GEMMA, args={
        "head_dim": 64, "sliding_window": 8, "query_pre_attn_scalar": 64, "num_hidden_layers": 4}),
    Row(name="gemma3", model="Gemma3ForCausalLM", vocab=_GEMMA, args={
        "head_dim": 64, "sliding_window": 8, "query_pre_attn_scalar": 64, "num_hidden_layers": 7,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    Row(name="gemma3-vl", model="Gemma3ForConditionalGeneration", vocab=_GEMMA, shards=2, args={
        "text_config": BASE | {"head_dim": 64, "sliding_window": 8, "query_pre_attn_scalar": 64,
                               "num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "vision_config": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "image_size": 32, "patch_size": 8},
        "mm_tokens_per_image": 4, "image_token_index": 639}),
    Row(name="gemma4", model="Gemma4ForCausalLM", version=5, vocab=_GEMMA4, args={
        "head_dim": 64, "global_head_dim": 128, "sliding_window": 8, "num_hidden_layers": 6,
        "layer_types": ["full_attention" if i in (3, 5) else "sliding_attention" for i in range(6)],
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 640,
        "final_logit_softcapping": 30.0, "use_double_wide_mlp": True}),
    Row(name="gemma4-moe", model="Gemma4ForCausalLM", version=5, vocab=_GEMMA4, args={
        "head_dim": 64, "global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "sliding_window": 8, "num_hidden_layers": 6, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256, "final_logit_softcapping": 30.0}),
    Row(name="phi3", model="Phi3ForCausalLM", vocab=_PHI3, args={
        "sliding_window": 2047, "pad_token_id": None}),
    Row(name="phi3-long", model="Phi3ForCausalLM", vocab=_PHI3, args={
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
        "rope_scaling": _LONGROPE, "pad_token_id": None}),
    Row(name="phi4", model="Phi3ForCausalLM", vocab=_GPT2 | {"pre": "dbrx"}, args={
        "original_max_position_embeddings": 4096, "pad_token_id": None, "rope_theta": 250000.0}),
    # llama.cpp does not read mscale from the file but computes it; real ones have 1.243.
    Row(name="phimoe", model="PhimoeForCausalLM", vocab=spm(cls="LlamaTokenizer"), args={
        "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
        "original_max_position_embeddings": 4096, "max_position_embeddings": 131072, "sliding_window": 262144,
        "rope_scaling": _LONGROPE | {"short_mscale": 1.1902380714238083, "long_mscale": 1.1902380714238083,
                                     "original_max_position_embeddings": 4096}},
        config={"architectures": ["PhiMoEForCausalLM"]}),
    Row(name="olmo2", model="Olmo2ForCausalLM", vocab=_GPT2 | {"pre": "dbrx"}, args={"rope_theta": 500000.0}),
    Row(name="olmo3", model="Olmo3ForCausalLM", vocab=_GPT2 | {"pre": "dbrx"}, args={
        "num_hidden_layers": 4, "sliding_window": 8, "rope_theta": 500000.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 32.0,
            "beta_slow": 1.0, "attention_factor": 1.2079441541679836}}),
    Row(name="olmoe", model="OlmoeForCausalLM", vocab=_GPT2 | {"pre": "olmo"}, args={
        "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}),
    Row(name="granite", model="GraniteForCausalLM", vocab=_GPT2 | {"pre": "refact"}, args=_GRANITE),
    Row(name="granite-moe", model="GraniteMoeForCausalLM", vocab=_GPT2 | {"pre": "refact"}, args=_GRANITE | {
        "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Row(name="granite-moe-shared", model="GraniteMoeSharedForCausalLM", vocab=_GPT2 | {"pre": "refact"},
        args=_GRANITE | {"intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 512}),
    Row(name="granite-hybrid", model="GraniteMoeHybridForCausalLM", vocab=_GPT2 | {"pre": "dbrx"},
        args=_GRANITE | {"num_hidden_layers": 4, "intermediate_size": 256, "num_local_experts": 4,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 512, "mamba_n_heads": 8,
                         "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2,
                         "position_embedding_type": "nope",
                         "layer_types": ["mamba", "mamba", "attention", "mamba"]}),
    Row(name="ernie4.5", model="Ernie4_5ForCausalLM", vocab=_ERNIE, args={"head_dim": 64}),
    Row(name="ernie4.5-moe", model="Ernie4_5_MoeForCausalLM", vocab=_ERNIE, f32=("e_score_correction_bias",), args={
        "moe_intermediate_size": 256, "moe_k": 2, "moe_num_experts": 8, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1}),
    Row(name="ernie4.5-fused", model="", version=0, vocab=_ERNIE, args=BASE | {
        "architectures": ["Ernie4_5_ForCausalLM"], "model_type": "ernie4_5", "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 500000, "use_bias": False, "tie_word_embeddings": True, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "bfloat16"},
        more={
            "ernie.embed_tokens.weight": [640, 256], "ernie.norm.weight": [256],
            "ernie.layers.{0-2}.input_layernorm.weight": [256],
            "ernie.layers.{0-2}.post_attention_layernorm.weight": [256],
            "ernie.layers.{0-2}.self_attn.qkv_proj.weight": [512, 256],
            "ernie.layers.{0-2}.self_attn.o_proj.weight": [256, 256],
            "ernie.layers.{0-2}.mlp.up_gate_proj.weight": [1024, 256],
            "ernie.layers.{0-2}.mlp.down_proj.weight": [256, 512]}),
    Row(name="granite-hybrid-dense", model="GraniteMoeHybridForCausalLM", vocab=_GPT2 | {"pre": "dbrx"},
        args=_GRANITE | {"num_hidden_layers": 4, "num_local_experts": 0, "num_experts_per_tok": 0,
                         "shared_intermediate_size": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64,
                         "mamba_expand": 2, "position_embedding_type": "rope",
                         "layer_types": ["mamba", "mamba", "attention", "mamba"]}),
    Row(name="hunyuan-dense", model="HunYuanDenseV1ForCausalLM", vocab=_GPT2 | {"pre": "hunyuan-dense"}, args={
        "head_dim": 64, "bos_token_id": _FIRST, "eos_token_id": _FIRST, "eod_token_id": _FIRST,
        "pad_token_id": _FIRST}),
    Row(name="hunyuan-moe", model="HunYuanMoEV1ForCausalLM", vocab=_HUNYUAN, args={
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 256,
        "num_experts": 4, "moe_topk": [2, 2, 2], "vocab_size": 580, "max_position_embeddings": 32768,
        "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        "bos_token_id": 577, "eos_token_id": 578, "pad_token_id": 579, "tie_word_embeddings": True},
        config={"moe_intermediate_size": [256] * 3, "num_shared_expert": [1] * 3, "use_qk_norm": True}),
    Row(name="bailing-moe-v2", model="", version=0, runs=4, shards=2, f32=("expert_bias",),
        vocab=bpe("bailingmoe2", "<|role_end|>", "<|startoftext|>", "<|endoftext|>", bos="<|startoftext|>", chat=_CHAT),
        args=BASE | {
            "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "head_dim": 64,
            "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1,
            "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "moe_router_enable_expert_bias": True, "score_function": "sigmoid",
            "rope_theta": 600000, "rope_scaling": None, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6,
            "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False, "tie_word_embeddings": False,
            "num_nextn_predict_layers": 1, "hidden_act": "silu", "torch_dtype": "bfloat16", "norm_head": False,
            "eos_token_id": _FIRST + 2, "pad_token_id": _FIRST + 2},
        more=_BAILING),
    Row(name="dots1", model="Dots1ForCausalLM", vocab=_QWEN, args={
        "head_dim": 64, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "eos_token_id": _FIRST},
        config={"scoring_func": "sigmoid"}, f32=("e_score_correction_bias",)),
    Row(name="llama4", model="Llama4ForCausalLM", shards=2, vocab=_LLAMA3 | {"pre": "llama4"}, args={
        "head_dim": 64, "intermediate_size": 256, "intermediate_size_mlp": 512, "num_local_experts": 4,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "num_hidden_layers": 4, "use_qk_norm": True,
        "rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE | {"factor": 16.0}, "max_position_embeddings": 131072,
        "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST}),
    Row(name="cohere2", model="Cohere2ForCausalLM", args={
        "num_hidden_layers": 4, "sliding_window": 8, "rope_theta": 50000.0, "logit_scale": 0.25,
        "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST},
        vocab=bpe("command-r", "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", bos="<BOS_TOKEN>", cls="CohereTokenizerFast",
                  start=True, config={"add_bos_token": True, "add_eos_token": False}),
        config={"rotary_pct": 1.0}),
    Row(name="smollm3", model="SmolLM3ForCausalLM", vocab=_LLAMA3 | {"pre": "smaug-bpe"}, args={
        "num_hidden_layers": 4, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": _FIRST,
        "pad_token_id": _FIRST}),
    Row(name="seed-oss", model="SeedOssForCausalLM", args={
        "head_dim": 64, "attention_bias": True, "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST},
        vocab=bpe("seed-coder", "<seed:eos>", "<seed:bos>", bos="<seed:bos>", user=("<seed:think>",))),
    Row(name="exaone4", model="Exaone4ForCausalLM", args={
        "sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 3,
        "rope_theta": 1000000.0, "rope_scaling": _LLAMA3_ROPE | {"factor": 16.0}, "max_position_embeddings": 65536,
        "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST, "pad_token_id": _FIRST},
        vocab=bpe("exaone4", "[|endofturn|]", "[BOS]", bos="[BOS]", cls="GPT2Tokenizer", unk="[BOS]")),
    Row(name="starcoder2", model="Starcoder2ForCausalLM", vocab=_GPT2 | {"pre": "starcoder"}, args={
        "tie_word_embeddings": True, "sliding_window": None, "bos_token_id": _FIRST, "eos_token_id": _FIRST}),
    Row(name="stablelm", model="StableLmForCausalLM", vocab=_GPT2 | {"pre": "stablelm2"}, args={
        "use_qkv_bias": True, "partial_rotary_factor": 0.25, "num_key_value_heads": 4, "bos_token_id": _FIRST,
        "eos_token_id": _FIRST}),
    Row(name="gemma", model="GemmaForCausalLM", vocab=_GEMMA, args={"head_dim": 64}),
    Row(name="qwen3-vl", model="Qwen3VLForConditionalGeneration", vocab=_QWEN, args={
        "text_config": BASE | {"head_dim": 64, "rope_theta": 5000000.0, "rope_scaling": {
            "rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True}},
        "vision_config": {
            "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 4}}),
    Row(name="phi2", model="PhiForCausalLM", vocab=_GPT2 | {"pre": "phi-2"}, args={
        "intermediate_size": 1024, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "bos_token_id": _FIRST,
        "eos_token_id": _FIRST}),
    Row(name="olmo", model="OlmoForCausalLM", vocab=_GPT2 | {"pre": "olmo"}, args={"clip_qkv": 8.0}),
    Row(name="command-r", model="CohereForCausalLM", args={
        "rope_theta": 8000000.0, "use_qk_norm": True, "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST},
        vocab=bpe("command-r", "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", bos="<BOS_TOKEN>", cls="CohereTokenizerFast",
                  start=True, config={"add_bos_token": True, "add_eos_token": False}),
        config={"model_max_length": 131072}),
    Row(name="arcee", model="ArceeForCausalLM", vocab=_LLAMA3, args={
        "rope_theta": 10000.0, "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST}),
    Row(name="starcoder", model="GPTBigCodeForCausalLM", vocab=_GPT2 | {"pre": "starcoder"}, args={
        "n_embd": 256, "n_layer": 3, "n_head": 4, "n_inner": 1024, "n_positions": 4096, "multi_query": True,
        "bos_token_id": _FIRST, "eos_token_id": _FIRST}),
    Row(name="granite-hybrid-attention", model="GraniteMoeHybridForCausalLM", vocab=_GPT2 | {"pre": "dbrx"},
        args=_GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 512,
                         "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_expand": 2, "position_embedding_type": "rope",
                         "layer_types": ["attention"] * 3}),
    Row(name="bamba", model="BambaForCausalLM", vocab=_LLAMA3, args={
        "num_hidden_layers": 4, "attn_layer_indices": [2], "attn_rotary_emb": 32, "mamba_n_heads": 8,
        "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 2, "mamba_expand": 2, "bos_token_id": _FIRST + 1,
        "eos_token_id": _FIRST}),
    Row(name="exaone", model="", version=0, runs=4, vocab=_GPT2 | {"pre": "exaone"}, more=_EXAONE, args={
        "architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "activation_function": "silu",
        "hidden_size": 256, "intermediate_size": 512, "num_layers": 3, "num_attention_heads": 4, "head_dim": 64,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "layer_norm_epsilon": 1e-5, "rope_theta": 1000000.0,
        "rope_scaling": _LLAMA3_ROPE, "tie_word_embeddings": True, "vocab_size": 640, "torch_dtype": "bfloat16",
        "bos_token_id": _FIRST, "eos_token_id": _FIRST}),
    Row(name="bitnet", model="", version=0, runs=4, vocab=spm(), more=_BITNET, args=BASE | {
        "architectures": ["BitnetForCausalLM"], "model_type": "bitnet", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "num_key_value_heads": 4, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1,
        "eos_token_id": 2, "torch_dtype": "bfloat16"},
        # The last bit of a mean in float32 depends on torch's machine.
        outtypes=("f16", "bf16", "q8_0", "auto")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A checkpoint of ROWS as a quantizer stores it."""

    name: str
    base: str
    #: ``quantization_config`` of config.json.
    config: Json
    #: See tests/lib/quantized_checkpoints.py.
    scheme: Json
    #: convert_hf_to_gguf.py cannot read it: the expected output is its conversion of the dequantized float32 weights.
    formula: bool = False
    files: Json = field(default_factory=dict)


_EXPERTS = r"mlp\.experts\.\d+\.\w+_proj\.weight$"


def _compressed(form: str, weights: Json) -> Json:
    """Return compressed-tensors' configuration with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "quantization_status": "compressed"}  # fmt: skip


def _int_weights(bits: int, group: int | None, symmetric: bool = True, strategy: str = "group") -> Json:
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group, "strategy": strategy,
            "dynamic": False, "actorder": None, "block_structure": None}  # fmt: skip


def _float_weights(strategy: str, block: list[int] | None = None) -> Json:
    return _int_weights(8, None, True, strategy) | {"type": "float", "block_structure": block}


def _gptq(bits: int, group: int, **more: Any) -> Json:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True,
            "checkpoint_format": "gptq", "lm_head": False} | more  # fmt: skip


_FP8: Json = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_MODELOPT: Json = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
                   "producer": {"name": "modelopt", "version": "0.33.0"}}  # fmt: skip
_MODELOPT_FILE = {"producer": {"name": "modelopt", "version": "0.33.0"},
                  "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                                   "exclude_modules": ["lm_head"]}}  # fmt: skip

QUANTIZED = (
    Quantized(name="deepseek-v3-fp8", base="deepseek-v3", config=_FP8,
              scheme={"method": "fp8", "block": [128, 128], "but": r"layers\.3\.eh_proj"}),
    Quantized(name="qwen3-moe-fp8", base="qwen3-moe", config=_FP8 | {"weight_block_size": [128, 96]},
              scheme={"method": "fp8", "block": [128, 96], "dtype": "BF16"}),
    Quantized(name="llama-fp8-tensor", base="llama", config=_FP8 | {
        "weight_block_size": None, "activation_scheme": "static"},
        scheme={"method": "fp8", "shape": "scalar", "dtype": "BF16", "extra": {".activation_scale": 0.5}}),
    Quantized(name="llama-fp8-e5m2", base="llama", config=_FP8 | {"fmt": "e5m2", "weight_block_size": [64, 64]},
              scheme={"method": "fp8", "block": [64, 64], "codes": "F8_E5M2"}),
    Quantized(name="llama-fbgemm", base="llama", formula=True,
              config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []},
              scheme={"method": "fp8", "block": [1, 0], "name": ".weight_scale"}),
    Quantized(name="llama-ct-fp8-channel", base="llama",
              config=_compressed("float-quantized", _float_weights("channel")),
              scheme={"method": "fp8", "block": [1, 0], "name": ".weight_scale", "dtype": "BF16"}),
    Quantized(name="llama-ct-fp8-tensor", base="llama", formula=True,
              config=_compressed("float-quantized", _float_weights("tensor")),
              scheme={"method": "fp8", "shape": "flat", "name": ".weight_scale", "dtype": "BF16",
                      "extra": {".input_scale": 0.5}}),
    Quantized(name="llama-ct-fp8-block", base="llama",
              config=_compressed("float-quantized", _float_weights("block", [128, 128])),
              scheme={"method": "fp8", "block": [128, 128], "name": ".weight_scale", "dtype": "BF16"}),
    Quantized(name="llama-ct-int8", base="llama",
              config=_compressed("int-quantized", _int_weights(8, None, strategy="channel")),
              scheme={"method": "int8"}),
    Quantized(name="llama-modelopt-fp8", base="llama", config=_MODELOPT | {"quant_algo": "FP8"},
              scheme={"method": "fp8", "shape": "scalar", "name": ".weight_scale", "extra": {".input_scale": 0.5}},
              files={"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}),
    Quantized(name="gpt-oss-mxfp4", base="gpt-oss",
              config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
              scheme={"method": "mxfp4", "targets": r"experts\.(gate_up|down)_proj$"}),
    Quantized(name="llama-nvfp4", base="llama", config=_MODELOPT, scheme={"method": "nvfp4", "packed": False},
              files={"hf_quant_config.json": _MODELOPT_FILE}),
    Quantized(name="qwen3-moe-nvfp4", base="qwen3-moe", config=_MODELOPT,
              scheme={"method": "nvfp4", "packed": False, "targets": _EXPERTS}),
    Quantized(name="qwen3-nvfp4-trivial", base="qwen3", config=_MODELOPT,
              scheme={"method": "nvfp4", "packed": False, "trivial": True}),
    Quantized(name="qwen3-moe-ct-nvfp4", base="qwen3-moe",
              config=_compressed(
                  "nvfp4-pack-quantized", _int_weights(4, 16, strategy="tensor_group") | {"type": "float"}),
              scheme={"method": "nvfp4", "packed": True, "targets": _EXPERTS}),
    Quantized(name="kimi-k2-ct-int4", base="kimi-k2", config=_compressed("pack-quantized", _int_weights(4, 32)),
              scheme={"method": "packed", "bits": 4, "group": 32, "targets": _EXPERTS}),
    Quantized(name="kimi-k2-ct-mxfp4", base="kimi-k2", formula=True,
              config=_compressed("mxfp4-pack-quantized", _int_weights(4, 32) | {"type": "float"}),
              scheme={"method": "mxfp4", "packed": True, "targets": _EXPERTS}),
    Quantized(name="llama-ct-int4-asym", base="llama",
              config=_compressed("pack-quantized", _int_weights(4, 64, symmetric=False)),
              scheme={"method": "packed", "bits": 4, "group": 64, "symmetric": False}),
    Quantized(name="llama-ct-int8-packed", base="llama", config=_compressed("pack-quantized", _int_weights(8, 128)),
              scheme={"method": "packed", "bits": 8, "group": 128}),
    Quantized(name="llama-gptq", base="llama", config=_gptq(4, 128),
              scheme={"method": "gptq", "bits": 4, "group": 128}),
    Quantized(name="qwen3-moe-gptq", base="qwen3-moe", config=_gptq(4, 64, desc_act=True, sym=False),
              scheme={"method": "gptq", "bits": 4, "group": 64, "act_order": True, "symmetric": False}),
    Quantized(name="llama-gptq-2", base="llama", config=_gptq(2, 32, checkpoint_format="gptq_v2", sym=False),
              scheme={"method": "gptq", "bits": 2, "group": 32, "v2": True, "symmetric": False}),
    Quantized(name="llama-gptq-3", base="llama", config=_gptq(3, 64, desc_act=True), formula=True,
              scheme={"method": "gptq", "bits": 3, "group": 64, "act_order": True}),
    Quantized(name="llama-gptq-8", base="llama", config=_gptq(8, 256, desc_act=True),
              scheme={"method": "gptq", "bits": 8, "group": 256, "act_order": True}),
    Quantized(name="qwen3-moe-awq", base="qwen3-moe", formula=True,
              config={"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
                      "modules_to_not_convert": None},
              scheme={"method": "awq", "group": 128}),
    Quantized(name="llama-bitnet", base="llama",
              config={"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline",
                      "modules_to_not_convert": None},
              scheme={"method": "bitnet"}),
)  # fmt: skip

#: Rows that are also converted from a config.json without keys at their class's default value.
SPARSE = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2-moe", "qwen3", "qwen3-moe", "qwen3-next", "gpt-oss", "deepseek-v2",
    "deepseek-v3", "glm4", "glm4-moe", "gemma2", "gemma3", "phi3", "olmo2", "olmo3", "olmoe", "granite", "granite-moe",
    "ernie4.5", "ernie4.5-moe", "dots1", "llama4", "cohere2", "smollm3", "seed-oss", "exaone4", "starcoder2",
    "stablelm", "hunyuan-dense", "bert-masked", "distilbert", "roberta", "modernbert-classifier",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A checkpoint of ROWS with other tokenizer files, names or options. The directory's name counts, too."""

    name: str
    base: str
    vocab: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    files: Json = field(default_factory=dict)
    options: tuple[str, ...] = ()
    outtypes: tuple[str, ...] = ("bf16",)


_CARD = """---
model_name: Tiny Mixture
model_creator: Someone
model_type: mixture
license: other
license_name: tiny-license
license_link: https://example.org/LICENSE
base_model:
- https://huggingface.co/Example/Tiny-Base-7B-v0.3
- Other/other-instruct-13b
- plain
datasets:
- Example/some-data_v2
- https://huggingface.co/datasets/Example/other
language:
- en
- no
\t
tags: [a, b, a]
pipeline_tag: text-generation
---
"""
# Only one name beside default: the converter writes several in the order of a set, which varies between processes.
_TEMPLATES = [{"name": "default", "template": _CHAT}, {"name": "my-rag!", "template": "{{ documents }}"}]
_NO_CHAT = {key: value for key, value in _QWEN["config"].items() if key != "chat_template"}

VARIANTS = (
    Variant(name="Tiny-Llama-3.2-1B-Instruct-v0.2", base="llama", files={"README.md": "# No front matter\n"}),
    Variant(name="qwen3-30b-a3b-instruct-2507-FP16", base="qwen3-moe", files={"README.md": _CARD}),
    Variant(name="0a1b2c3d4e5f60718293a4b5c6d7e8f901234567", base="qwen2", files={
        "generation_config.json": {"temperature": 1, "top_k": 50, "min_p": 0.05, "penalty_repeat": 1.1,
                                   "sequence": "k;p", "mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
                                   "penalty_last_n": 64, "xtc_probability": 0.5, "xtc_threshold": 0.1}}),
    Variant(name="Mixtral-8x7B-chat-xl", base="mixtral", config={"_name_or_path": "someone/Mix-4x3M-lora-v1.5.2"}),
    Variant(name="jinja", base="qwen2", vocab={"config": _NO_CHAT}, files={
        "chat_template.jinja": _CHAT, "additional_chat_templates": {"tool_use.jinja": "{{ tools }}"}}),
    Variant(name="jinja-and-config", base="qwen2", files={"chat_template.jinja": "not this one"}),
    Variant(name="template-json", base="qwen2", vocab={"config": _NO_CHAT},
            files={"chat_template.json": {"chat_template": _CHAT}}),
    Variant(name="templates", base="qwen2", vocab={"config": _NO_CHAT | {"chat_template": _TEMPLATES}}),
    Variant(name="token-dicts", base="qwen2", vocab={"config": _NO_CHAT | {
        "eos_token": {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False,
                      "single_word": False, "__type": "AddedToken"},
        "unk_token": "<|endoftext|>", "bos_token": "<|im_start|>", "add_bos_token": True, "add_eos_token": True}},
        files={"special_tokens_map.json": {"pad_token": "<|endoftext|>"}}),
    Variant(name="bos-from-config", base="qwen3", vocab={"config": {"tokenizer_class": "PreTrainedTokenizerFast"}},
            config={"bos_token_id": 577, "eos_token_id": 576, "pad_token_id": 578, "unk_token_id": 2,
                    "sep_token_id": 3}),
    Variant(name="byte-fallback", base="llama-tied", vocab={"kind": "spm_bpe", "pieces": 640}),
    Variant(name="user-pieces", base="mistral", vocab={
        "first": ["<unk>", "<s>", "</s>", "[MINE]", "<unused7>"], "user_pieces": ["[MINE]"], "unused": ["<unused7>"],
        "special": ["<|tool|>"], "user": ["\u2581\u2581", "<think>"]}),
    Variant(name="prefix-space", base="mistral", vocab={"config": {
        "tokenizer_class": "LlamaTokenizer", "add_prefix_space": False, "bos_token": "<s>", "eos_token": "</s>",
        "add_bos_token": True, "add_eos_token": False}}),
    Variant(name="llama-class-adds-bos", base="deepseek-v2", vocab={"starts_with": None}),
    Variant(name="llama-class-drops-bos", base="deepseek-v2", vocab={"config": {
        "tokenizer_class": "LlamaTokenizerFast", "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": "<｜end▁of▁sentence｜>", "add_bos_token": False, "add_eos_token": True}}),
    Variant(name="model-name", base="qwen2", options=("--model-name", "A Name of Its Own")),
    Variant(name="ternary", base="llama", outtypes=("tq1_0", "tq2_0")),
    Variant(name="ternary-320", base="llama-f32", outtypes=("tq1_0", "tq2_0")),
    Variant(name="fp8-as-q8", base="deepseek-v3-fp8", options=("--fp8-as-q8",)),
    Variant(name="glm4-moe-no-nextn", base="glm4-moe", options=("--no-nextn",)),
    Variant(name="qwen3.5-moe-no-nextn", base="qwen3.5-moe", options=("--no-nextn",)),
    Variant(name="gemma4-unified", base="gemma4", config={"architectures": ["Gemma4UnifiedForConditionalGeneration"]},
            files={"generation_config.json": {"suppress_tokens": [258883, 258882]}}),
    Variant(name="fused-gate-up-mtp", base="qwen3.5-moe", options=("--fuse-gate-up-exps",)),
    Variant(name="fused-qkv", base="qwen2", options=("--fuse-qkv",)),
    Variant(name="fused-gate-up", base="qwen3-next", options=("--no-nextn", "--fuse-gate-up-exps")),
)  # fmt: skip

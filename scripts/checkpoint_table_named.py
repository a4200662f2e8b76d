"""More of the table of checkpoints: classes that quantkit converts and does not run (quantkit/checkpoint/named.py).

Their models are narrow, for bytes are all that is compared. Those of ``written`` are of classes that neither version of
transformers has: config.json has what the converter reads, names and shapes are those that its name map knows.
"""

from __future__ import annotations

from typing import Any

from checkpoint_table import Json, Row, bpe

_OUTTYPES = ("f32", "f16", "bf16", "q8_0")
_CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
_VOCAB = bpe("llama-bpe", "<|eos|>", "<|bos|>", "<|user|>", "<|end|>", bos="<|bos|>", chat=_CHAT)
#: The sizes of all, unless said otherwise.
_SIZES: Json = {
    "vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "max_position_embeddings": 4096, "bos_token_id": 577, "eos_token_id": 576,
}  # fmt: skip
_HEAD = {"head_dim": 16}
_MIXTURE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LLAMA: Json = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}


def named(name: str, model: str, args: Json, **more: Any) -> Row:
    """Return a row of which transformers makes the model."""
    given: Json = {"vocab": _VOCAB, "version": 5, "runs": 0, "outtypes": _OUTTYPES} | more
    return Row(name=name, model=model, args=_SIZES | args, **given)


def written(name: str, model: str, args: Json, tensors: dict[str, list[int]], **more: Any) -> Row:
    """Return a row of config.json and tensors."""
    given: Json = {"vocab": _VOCAB, "outtypes": _OUTTYPES} | more
    config = {"architectures": [model]} | _SIZES | _LLAMA | {"torch_dtype": "bfloat16"} | args
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


_OUTSIDE = "embed_tokens:640x64 norm:64"
_HEADS = "lm_head:640x64"
_NORMS = " input_layernorm:64 post_attention_layernorm:64"
_QKV = " self_attn.q_proj:64x64 self_attn.k_proj:32x64 self_attn.v_proj:32x64"
_ATTENTION = _QKV + " self_attn.o_proj:64x64"
_DENSE = " mlp.gate_proj:128x64 mlp.up_proj:128x64 mlp.down_proj:64x128"


def narrow(prefix: str) -> str:
    """Return the three matrices of an expert."""
    return f" {prefix}.gate_proj:32x64 {prefix}.up_proj:32x64 {prefix}.down_proj:64x32"


_EXPERTS = " mlp.gate:4x64" + narrow("mlp.experts.{0-3}")
_SHARED = narrow("mlp.shared_experts")


def decoder(layers: dict[str, str], *, head: bool = True) -> dict[str, list[int]]:
    """Return a model of layers: numbers of some -> their tensors."""
    tensors = of("model.", _OUTSIDE) | (of("", _HEADS) if head else {})
    for numbers, names in layers.items():
        tensors |= of("model.layers.{" + numbers + "}.", names)
    return tensors


def ahead(layer: int) -> dict[str, list[int]]:
    """Return what a layer that predicts more tokens has beside others."""
    return of(f"model.layers.{layer}.", "eh_proj:64x128 enorm:64 hnorm:64")


_MTP = {"mtp.fc.weight": [64, 128], **of("mtp.", "norm:64 pre_fc_norm_embedding:64 pre_fc_norm_hidden:64")}

NAMED = (
    written("deepseek-v1", "DeepseekForCausalLM",
            _MIXTURE | {"model_type": "deepseek", "n_routed_experts": 4, "n_shared_experts": 2,
                        "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
            decoder({"0": _NORMS + _ATTENTION + _DENSE, "1-2": _NORMS + _ATTENTION + _EXPERTS + _SHARED})),
    written("bailing-moe", "BailingMoeForCausalLM",
            _MIXTURE | _HEAD | {"model_type": "bailing_moe", "num_experts": 4, "num_shared_experts": 2,
                                "first_k_dense_replace": 0, "norm_topk_prob": True, "norm_head": False},
            of("model.", "word_embeddings:640x64 norm:64") | of("", _HEADS) | of(
                "model.layers.{0-2}.",
                _NORMS + " attention.query_key_value:128x64 attention.dense:64x64" + _EXPERTS + _SHARED)),
    named("cohere2-moe", "Cohere2MoeForCausalLM",
          _HEAD | {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1,
                   "sliding_window": 8, "prefix_dense_intermediate_size": 128, "first_k_dense_replace": 1,
                   "intermediate_size": 32}, copies=(("model.layers.3.", "model.layers.4."),),
          config={"num_nextn_predict_layers": 1}, more=ahead(4)),
    named("exaone-moe", "ExaoneMoeForCausalLM",
          _MIXTURE | _HEAD | {"num_hidden_layers": 4, "num_experts": 4, "num_shared_experts": 1, "sliding_window": 8,
                              "first_k_dense_replace": 1},
          copies=(("model.layers.0.", "mtp.layers.0."),), config={"num_nextn_predict_layers": 1}, more=_MTP),
    written("grove-moe", "GroveMoeForCausalLM",
            _MIXTURE | _HEAD | {"model_type": "grove_moe", "num_experts": 4, "norm_topk_prob": True},
            decoder({"0-2": _NORMS + _ATTENTION + " self_attn.q_norm:16 self_attn.k_norm:16" + _EXPERTS
                     + narrow("mlp.chunk_experts.{0-1}") + " mlp.expert_bias!:4"})),
    named("afmoe", "AfmoeForCausalLM",
          _MIXTURE | _HEAD | {"num_hidden_layers": 4, "num_experts": 4, "num_shared_experts": 1, "sliding_window": 8,
                              "num_dense_layers": 1, "route_scale": 2.5},
          config={"route_norm": True, "score_func": "sigmoid"}),
    named("hy-v3", "HYV3ForCausalLM",
          _MIXTURE | _HEAD | {"num_experts": 4, "num_shared_experts": 1, "router_scaling_factor": 2.5},
          copies=(("model.layers.2.", "model.layers.3."),), config={"num_nextn_predict_layers": 1},
          more=ahead(3) | of("model.layers.3.", "final_layernorm:64")),
    written("smallthinker", "SmallThinkerForCausalLM",
            _HEAD | {"model_type": "smallthinker", "moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2,
                     "moe_ffn_hidden_size": 32, "moe_primary_router_apply_softmax": False,
                     "sliding_window_layout": [0, 1, 1], "sliding_window_size": 8, "rope_layout": [0, 1, 1]},
            decoder({"0-2": _NORMS + _ATTENTION + " block_sparse_moe.primary_router:4x64"
                     + narrow("block_sparse_moe.experts.{0-3}").replace("_proj", "")})),
)  # fmt: skip

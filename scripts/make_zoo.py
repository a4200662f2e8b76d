"""Add models to the zoo: write tests/data/zoo/headers/NAME.head and enter llama.cpp b11434's logits in logits.npz, of
encoders the rows of tokens.

    scripts/make_zoo.py [NAME ...] --lib DIR

The models are those described here; the headers of the others were written by llama.cpp itself and have every key that
it knows. Logits are computed for the weights of seed 1, as described in tests/data/zoo/README.md. They depend on the
machine for which the program was compiled: only the given models are entered again, all others are unchanged.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/lib")]

from libllama import Libllama  # noqa: E402
from quantkit.formats.gguf import Field, write_gguf  # noqa: E402
from quantkit.model.arch import ARCHS  # noqa: E402
from quantkit.types import BY_NAME  # noqa: E402
from zoo import SEED, TABLE, ZOO, write_zoo  # noqa: E402

Shapes = dict[str, tuple[int, ...]]
E, FF, HEAD, N_HEAD, N_KV, VOCAB, N_CTX = 256, 512, 64, 4, 2, 128, 512
N_EXPERT, WIDTH = 8, 256


def usual(n_layer: int, eps: str = "layer_norm_rms_epsilon", **extra: Any) -> dict[str, Any]:
    """Return the fields of every model, and further ones; ``__`` in a name is a dot.

    Names have no architecture prefix; one that begins with a dot is used without a prefix.
    """
    fields: dict[str, Any] = {
        "block_count": n_layer,
        "context_length": N_CTX,
        "embedding_length": E,
        "feed_forward_length": FF,
    }
    fields |= {"attention.head_count": N_HEAD, "attention.head_count_kv": N_KV, f"attention.{eps}": 1e-5}
    return fields | {"vocab_size": VOCAB} | {key.replace("__", "."): value for key, value in extra.items()}


def ends(output: bool = True, norm: bool = True, bias: bool = False) -> Shapes:
    shapes: Shapes = {"token_embd.weight": (E, VOCAB)}
    shapes |= {"output_norm.weight": (E,)} if norm else {}
    shapes |= {"output_norm.bias": (E,)} if bias else {}
    return shapes | ({"output.weight": (E, VOCAB)} if output else {})


def norms(layer: int, *names: str, bias: bool = False) -> Shapes:
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"blk.{layer}.{name}.{kind}": (E,) for name in names for kind in kinds}


def attention(
    layer: int,
    head: int = HEAD,
    n_kv: int = N_KV,
    *,
    n_head: int = N_HEAD,
    head_v: int = 0,
    bias: bool = False,
    head_norms: bool = False,
) -> Shapes:
    q, k, v = n_head * head, n_kv * head, n_kv * (head_v or head)
    shapes = {"attn_q": (E, q), "attn_k": (E, k), "attn_v": (E, v), "attn_output": (n_head * (head_v or head), E)}
    named_shapes: Shapes = {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    if head_norms:
        named_shapes |= {f"blk.{layer}.{name}.weight": (head,) for name in ("attn_q_norm", "attn_k_norm")}
    return named_shapes | ({f"blk.{layer}.{name}.bias": shape[1:] for name, shape in shapes.items()} if bias else {})


def fused(layer: int, n_kv: int, bias: Sequence[str] = ("attn_qkv", "attn_output")) -> Shapes:
    """Attention with q, k and v in one matrix; bias: the projections that have one."""
    shapes = {"attn_qkv": (E, E + 2 * HEAD * n_kv), "attn_output": (E, E)}
    named_shapes: Shapes = {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return named_shapes | {f"blk.{layer}.{name}.bias": shapes[name][1:] for name in bias}


def dense(layer: int, *, gate: bool = True, bias: bool = False, width: int = FF) -> Shapes:
    shapes = {"ffn_up": (E, width), "ffn_down": (width, E)} | ({"ffn_gate": (E, width)} if gate else {})
    named_shapes: Shapes = {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return named_shapes | ({f"blk.{layer}.{name}.bias": shape[1:] for name, shape in shapes.items()} if bias else {})


def mixture(layer: int, *, shared: int = 0, bias: str = "", width: int = WIDTH) -> Shapes:
    """Return experts, their router with a bias of that name, and a shared one."""
    shapes: Shapes = {"ffn_gate_inp.weight": (E, N_EXPERT), "ffn_down_exps.weight": (width, E, N_EXPERT)}
    shapes |= {f"ffn_{name}_exps.weight": (E, width, N_EXPERT) for name in ("gate", "up")}
    if shared:
        shapes |= {f"ffn_{name}_shexp.weight": (E, shared) for name in ("gate", "up")}
        shapes |= {"ffn_down_shexp.weight": (shared, E)}
    if bias:
        shapes |= {bias: (N_EXPERT,)}
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def one(layer: int, name: str, *shape: int) -> Shapes:
    return {f"blk.{layer}.{name}": shape}


def layers(n: int, *parts: Callable[[int], Shapes]) -> Shapes:
    return {name: shape for layer in range(n) for make in parts for name, shape in make(layer).items()}


def gemma() -> tuple[dict[str, Any], Shapes]:
    extra: dict[str, Any] = {"attention.key_length": 32, "attention.value_length": 32}
    return usual(3, **extra), ends(output=False) | layers(
        3, lambda i: norms(i, "attn_norm", "ffn_norm"), lambda i: attention(i, 32), dense
    )


def olmo() -> tuple[dict[str, Any], Shapes]:
    fields = usual(3, "layer_norm_epsilon", attention__clamp_kqv=1.25)
    return fields, ends(norm=False) | layers(3, attention, dense)


def arcee() -> tuple[dict[str, Any], Shapes]:
    return usual(3, rope__dimension_count=HEAD), ends() | {"rope_freqs.weight": (HEAD // 2,)} | layers(
        3, lambda i: norms(i, "attn_norm", "ffn_norm"), attention, lambda i: dense(i, gate=False)
    )


def command_r() -> tuple[dict[str, Any], Shapes]:
    fields = usual(3, "layer_norm_epsilon", logit_scale=0.25, rope__scaling__type="none")
    return fields, ends(output=False) | layers(3, lambda i: norms(i, "attn_norm"), attention, dense)


def starcoder(n_kv: int = 1, **extra: Any) -> tuple[dict[str, Any], Shapes]:
    """Layers like GPT-2's: norms with biases, q, k and v in one matrix, no gate."""
    fields = usual(3, "layer_norm_epsilon", **extra) | {"attention.head_count_kv": n_kv}
    return fields, ends(output=False, bias=True) | {"position_embd.weight": (E, N_CTX)} | layers(
        3,
        lambda i: norms(i, "attn_norm", "ffn_norm", bias=True),
        lambda i: fused(i, n_kv),
        lambda i: dense(i, gate=False, bias=True),
    )


def gptneox(parallel: bool = True) -> tuple[dict[str, Any], Shapes]:
    fields, shapes = starcoder(N_HEAD, rope__dimension_count=HEAD // 2, use_parallel_residual=parallel)
    del shapes["position_embd.weight"]
    return fields, shapes | {"output.weight": (E, VOCAB)}


def bloom() -> tuple[dict[str, Any], Shapes]:
    fields, shapes = starcoder(N_HEAD)
    del shapes["position_embd.weight"]
    return fields, shapes | {"token_embd_norm.weight": (E,), "token_embd_norm.bias": (E,)}


def codeshell() -> tuple[dict[str, Any], Shapes]:
    fields, shapes = starcoder(N_KV)
    del shapes["position_embd.weight"]
    return fields, shapes | {"output.weight": (E, VOCAB)}


def falcon(n_kv: int, *of_layer: str) -> tuple[dict[str, Any], Shapes]:
    """Large models have two norms: attention's input has its own."""
    fields = usual(3, "layer_norm_epsilon") | {"attention.head_count_kv": n_kv}
    return fields, ends(output=False, bias=True) | layers(
        3,
        lambda i: norms(i, *of_layer, bias=True),
        lambda i: fused(i, n_kv, bias=()),
        lambda i: dense(i, gate=False),
    )


def chatglm() -> tuple[dict[str, Any], Shapes]:
    def pair(layer: int) -> Shapes:
        return {f"blk.{layer}.ffn_up.weight": (E, 2 * FF), f"blk.{layer}.ffn_down.weight": (FF, E)}

    return usual(3, rope__dimension_count=HEAD // 2), ends() | layers(
        3, lambda i: norms(i, "attn_norm", "ffn_norm"), lambda i: fused(i, N_KV, bias=("attn_qkv",)), pair
    )


def llama(bias: bool = False, head_norms: bool = False, **extra: Any) -> tuple[dict[str, Any], Shapes]:
    """Layers like Llama's; bias: of attention."""
    return usual(3, **extra), ends() | layers(
        3,
        lambda i: norms(i, "attn_norm", "ffn_norm"),
        lambda i: attention(i, bias=bias, head_norms=head_norms),
        dense,
    )


def exaone() -> tuple[dict[str, Any], Shapes]:
    fields, shapes = llama(rope__dimension_count=HEAD)
    return fields, shapes | {"rope_freqs.weight": (HEAD // 2,)}


def layer_normed(gate: bool, bias: bool, **extra: Any) -> tuple[dict[str, Any], Shapes]:
    """Layers like Llama's, but norms have biases; bias: of the other tensors."""
    return usual(3, "layer_norm_epsilon", **extra), ends(bias=True) | layers(
        3,
        lambda i: norms(i, "attn_norm", "ffn_norm", bias=True),
        lambda i: attention(i, bias=bias),
        lambda i: dense(i, gate=gate, bias=bias),
    )


def minicpm() -> tuple[dict[str, Any], Shapes]:
    scaling: dict[str, Any] = {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.25}
    fields, shapes = llama(embedding_scale=9.0, residual_scale=0.7, logit_scale=4.0, **scaling)
    return fields, shapes | {f"rope_factors_{kind}.weight": (HEAD // 2,) for kind in ("long", "short")}


def qwen2vl() -> tuple[dict[str, Any], Shapes]:
    extra: dict[str, Any] = {"rope.dimension_sections": [8, 10, 8, 6]}
    fields, shapes = llama(bias=True, rope__freq_base=1e6, **extra)
    return fields, {name: shape for name, shape in shapes.items() if not name.endswith("attn_output.bias")}


def bitnet() -> tuple[dict[str, Any], Shapes]:
    """Norms before the second matrix of each part; scales, like those of packed weights."""
    fields, shapes = llama()
    del shapes["output.weight"]
    for i in range(3):
        shapes |= {f"blk.{i}.attn_sub_norm.weight": (E,), f"blk.{i}.ffn_sub_norm.weight": (FF,)}
    matrices = [name for name, shape in shapes.items() if name.startswith("blk.") and len(shape) == 2]
    return fields, shapes | {name.replace(".weight", ".scale"): (1,) for name in matrices}


def apertus() -> tuple[dict[str, Any], Shapes]:
    fields, shapes = llama(head_norms=True)
    fields |= {
        ".xielu.alpha_n": [0.3, -1.2, 2.0],
        ".xielu.alpha_p": [0.8, 0.1, -0.5],
        ".xielu.beta": [0.5, 0.25, 0.75],
        ".xielu.eps": [-1e-6, -0.125, -1e-6],
    }
    dropped_names = {f"blk.{i}.ffn_gate.weight" for i in range(3)}
    return fields, {k: v for k, v in shapes.items() if k not in dropped_names} | {"rope_freqs.weight": (HEAD // 2,)}


def spark() -> tuple[dict[str, Any], Shapes]:
    """Windowed layers rotate whole heads, with their own base; one gate per head."""
    extra: dict[str, Any] = {
        "attention.sliding_window": 32,
        "attention.sliding_window_pattern": [True, True, False],
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": HEAD // 2,
        "rope.dimension_count_swa": HEAD,
    }
    fields, shapes = llama(**extra)
    return fields, shapes | {f"blk.{i}.attn_gate.weight": (E, N_HEAD) for i in range(3)}


def phi2() -> tuple[dict[str, Any], Shapes]:
    fields = usual(3, "layer_norm_epsilon", rope__dimension_count=32)
    return fields, ends(bias=True) | {"output.bias": (VOCAB,)} | layers(
        3,
        lambda i: norms(i, "attn_norm", bias=True),
        lambda i: attention(i, bias=True),
        lambda i: dense(i, gate=False, bias=True),
    )


def qwen3vl() -> tuple[dict[str, Any], Shapes]:
    extra: dict[str, Any] = {
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_sections": [12, 10, 10, 0],
    }
    return usual(3, rope__freq_base=5e6, n_deepstack_layers=1, **extra), ends() | layers(
        3, lambda i: norms(i, "attn_norm", "ffn_norm"), lambda i: attention(i, head_norms=True), dense
    )


# ---------------------------------------------------------------- mixtures of experts

_EXPERTS: dict[str, Any] = {
    "expert_count": N_EXPERT,
    "expert_used_count": 2,
    "expert_feed_forward_length": WIDTH,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
}
_SIGMOID = {"expert_gating_func": 2}
_SHARED = {"expert_shared_count": 1, "expert_shared_feed_forward_length": WIDTH}
_DENSE_LEAD = {"leading_dense_block_count": 1}
_CHOICE = "exp_probs_b.bias"


def _yarn(n_rot: int) -> dict[str, Any]:
    return {
        "rope.dimension_count": n_rot,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.freq_base": 5e5,
    }


def _norms(layer: int) -> Shapes:
    return norms(layer, "attn_norm", "ffn_norm")


def _after_dense(layer: int, **options: Any) -> Shapes:
    """Return a layer that is dense if it is the first, and else has experts and a shared one."""
    return mixture(layer, shared=WIDTH, **options) if layer else dense(layer)


def bailingmoe() -> tuple[dict[str, Any], Shapes]:
    extra = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
    return usual(3) | _EXPERTS | _SHARED | extra, ends() | layers(
        3, _norms, lambda i: attention(i, 32), lambda i: mixture(i, shared=WIDTH)
    )


def granite_swa() -> tuple[dict[str, Any], Shapes]:
    """Gate and up in one tensor, of experts and of the shared one; a layer that does not rotate."""
    fields = usual(4, embedding_scale=3.0, residual_scale=0.5, logit_scale=2.0) | _EXPERTS | _SHARED
    fields |= {"feed_forward_length": WIDTH, "attention.scale": 0.2, "attention.sliding_window": 32}
    fields |= {"attention.sliding_window_pattern": [False, True, True, False], "attention.rope_pattern": [0, 1, 1, 1]}
    fields |= {"rope.freq_base": 2e4, "rope.freq_base_swa": 1e3}  # true for no layer

    def experts(layer: int) -> Shapes:
        shapes = mixture(layer) | one(layer, "ffn_gate_up_exps.weight", E, 2 * WIDTH, N_EXPERT)
        shapes |= one(layer, "ffn_up_shexp.weight", E, 2 * WIDTH) | one(layer, "ffn_down_shexp.weight", WIDTH, E)
        separate_names = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
        return {name: shape for name, shape in shapes.items() if not name.endswith(separate_names)}

    return fields, ends(output=False) | {"rope_freqs.weight": (HEAD // 2,)} | layers(
        4, _norms, attention, lambda i: one(i, "attn_sinks.weight", N_HEAD), experts
    )


def exaone_moe() -> tuple[dict[str, Any], Shapes]:
    fields = usual(5) | _EXPERTS | _SHARED | _DENSE_LEAD | _SIGMOID | {"attention.sliding_window": 32}
    fields |= {"rope.freq_base": 1e5, "rope.freq_base_swa": 1e3}  # true for no layer
    return fields, ends() | {"rope_freqs.weight": (HEAD // 2,)} | layers(
        5, _norms, lambda i: attention(i, head_norms=True), lambda i: _after_dense(i, bias=_CHOICE)
    )


def cohere2moe() -> tuple[dict[str, Any], Shapes]:
    fields = usual(5, "layer_norm_epsilon", logit_scale=0.25) | _EXPERTS | _SHARED | _DENSE_LEAD
    fields |= {"attention.sliding_window": 32, "rope.freq_base_swa": 1e3}  # true for no layer
    return fields, ends(output=False) | layers(5, lambda i: norms(i, "attn_norm"), attention, _after_dense)


def hy_v3() -> tuple[dict[str, Any], Shapes]:
    """The name of the router's selection bias has no suffix."""
    return usual(3) | _EXPERTS | _SHARED, ends() | layers(
        3, _norms, lambda i: attention(i, head_norms=True), lambda i: _after_dense(i, bias="exp_probs_b")
    )


def laguna() -> tuple[dict[str, Any], Shapes]:
    """Windowed layers have more heads, which rotate entirely and without YaRN; one gate per head."""
    n_head = [4, 8, 8, 8, 4]
    fields = usual(5) | _EXPERTS | _SHARED | _DENSE_LEAD | _yarn(32) | {"attention.head_count": n_head}
    fields |= {"attention.key_length": HEAD, "attention.value_length": HEAD, "attention.sliding_window": 32}
    fields |= {"rope.dimension_count_swa": HEAD, "rope.freq_base_swa": 1e4}
    return fields, ends() | layers(
        5,
        _norms,
        lambda i: attention(i, n_head=n_head[i], head_norms=True),
        lambda i: one(i, "attn_gate.weight", E, n_head[i]),
        lambda i: _after_dense(i, bias=_CHOICE),
    )


def laguna_elements() -> tuple[dict[str, Any], Shapes]:
    """No windows; a gate for each column."""
    return usual(3) | _EXPERTS | _SHARED | _DENSE_LEAD | _yarn(HEAD), ends() | layers(
        3,
        _norms,
        lambda i: attention(i, head_norms=True),
        lambda i: one(i, "attn_gate.weight", E, N_HEAD * HEAD),
        lambda i: _after_dense(i, bias=_CHOICE),
    )


def mellum() -> tuple[dict[str, Any], Shapes]:
    fields = usual(5) | _EXPERTS | _yarn(HEAD) | {"attention.sliding_window": 32, "rope.freq_base_swa": 1e3}
    return fields, ends() | layers(5, _norms, lambda i: attention(i, head_norms=True), mixture)


def afmoe() -> tuple[dict[str, Any], Shapes]:
    fields = usual(5) | _EXPERTS | _SHARED | _DENSE_LEAD
    fields |= {"attention.sliding_window": 32, "rope.freq_base_swa": 2e3}
    return fields, ends() | layers(
        5,
        lambda i: norms(i, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
        lambda i: attention(i, head_norms=True),
        lambda i: one(i, "attn_gate.weight", E, N_HEAD * HEAD),
        lambda i: _after_dense(i, bias=_CHOICE),
    )


def smallthinker() -> tuple[dict[str, Any], Shapes]:
    """llama.cpp uses windows of 4096 tokens regardless of the metadata."""
    fields = usual(5) | _EXPERTS | _SIGMOID | {"attention.sliding_window": 32}
    return fields, ends() | layers(5, _norms, attention, mixture)


def mimo2() -> tuple[dict[str, Any], Shapes]:
    """Value heads narrower than key heads, sinks in windowed layers; q, k and v of one layer in one tensor."""
    n_kv = [1, 2, 2]
    fields = usual(3) | _EXPERTS | {"attention.head_count_kv": n_kv, "attention.value_scale": 0.7}
    fields |= {"attention.key_length": HEAD, "attention.value_length": 32, "attention.sliding_window": 32}
    fields |= {"attention.sliding_window_pattern": [False, True, True], "rope.dimension_count": 32}
    fields |= {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
    shapes = ends() | layers(
        3, _norms, lambda i: attention(i, HEAD, n_kv[i], head_v=32), lambda i: mixture(i, bias=_CHOICE)
    )
    for name in ("attn_q", "attn_k", "attn_v"):
        del shapes[f"blk.2.{name}.weight"]
    shapes |= one(2, "attn_qkv.weight", E, N_HEAD * HEAD + 2 * (HEAD + 32))
    return fields, shapes | one(1, "attn_sinks.weight", N_HEAD) | one(2, "attn_sinks.weight", N_HEAD)


def step35() -> tuple[dict[str, Any], Shapes]:
    """Layers without a window rotate half the columns, and only they use frequency factors; some layers have limits."""
    n_head = [4, 8, 8, 8, 4]
    fields = usual(5) | _EXPERTS | _SHARED | {"attention.head_count": n_head, "attention.sliding_window": 32}
    fields |= {"attention.key_length": HEAD, "attention.value_length": HEAD, "rope.freq_base": 1e6}
    fields |= {"attention.sliding_window_pattern": [False, True, True, True, False]}
    fields |= {"swiglu_clamp_exp": [0.0, 0.5, 0.0, 0.4, 0.5], "swiglu_clamp_shexp": [0.5, 0.0, 0.5, 0.4, 0.0]}
    return fields, ends() | {"rope_freqs.weight": (HEAD // 2,)} | layers(
        5,
        _norms,
        lambda i: attention(i, n_head=n_head[i], head_norms=i > 1),
        lambda i: one(i, "attn_gate.weight", E, n_head[i]) if i != 2 else {},
        lambda i: _after_dense(i, bias=_CHOICE),
    )


def _latent(layer: int, n_head: int, rank: int, nope: int, head_v: int, n_rot: int = 32) -> Shapes:
    """Return latent attention (absorbed); queries are projected from rows of 128 columns."""
    shapes: Shapes = {"attn_q_a": (E, 128), "attn_q_a_norm": (128,), "attn_q_b": (128, n_head * (nope + n_rot))}
    shapes |= {"attn_kv_a_mqa": (E, rank + n_rot), "attn_kv_a_norm": (rank,), "attn_k_b": (nope, rank, n_head)}
    shapes |= {"attn_v_b": (rank, head_v, n_head), "attn_output": (n_head * head_v, E)}
    return {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}


#: Enough heads that no score is 0: llama.cpp does not define the order of equal scores.
_INDEXER = {"attention.indexer.head_count": 16, "attention.indexer.key_length": 64, "attention.indexer.top_k": 20}


def _indexer(layer: int) -> Shapes:
    shapes: Shapes = {"k_norm.weight": (64,), "k_norm.bias": (64,), "proj.weight": (E, 16)}
    shapes |= {"attn_k.weight": (E, 64), "attn_q_b.weight": (128, 16 * 64)}
    return {f"blk.{layer}.indexer.{name}": shape for name, shape in shapes.items()}


def dots3note() -> tuple[dict[str, Any], Shapes]:
    """Latent attention of two kinds: to the keys selected by an indexer, or within a window."""
    slides, n_head = [False, True, True, False], [4, 2, 2, 4]
    fields = usual(4) | _EXPERTS | _SHARED | _DENSE_LEAD | _SIGMOID | _INDEXER | {"attention.head_count": n_head}
    fields |= {"attention.head_count_kv": 1, "rope.dimension_count": 32, "rope.freq_base": 1e6}
    fields |= {"rope.freq_base_swa": 5e3, "attention.q_lora_rank": 128, "attention.sliding_window": 32}
    fields |= {
        "attention.sliding_window_pattern": slides,
        "attention.indexer.types": [not slides_in_layer for slides_in_layer in slides],
    }
    for suffix, rank, k, v in (("", 128, 96, 64), ("_swa", 64, 64, 128)):
        fields |= {f"attention.kv_lora_rank{suffix}": rank, f"attention.key_length{suffix}": rank + 32}
        fields |= {f"attention.value_length{suffix}": rank, f"attention.key_length_mla{suffix}": k}
        fields |= {f"attention.value_length_mla{suffix}": v}
    return fields, ends() | layers(
        4,
        _norms,
        lambda i: _latent(i, 2, 64, 32, 128) if slides[i] else _latent(i, 4, 128, 64, 64) | _indexer(i),
        lambda i: one(i, "attn_k_norm.weight", 32) | one(i, "attn_gate.weight", E, n_head[i]),
        lambda i: _after_dense(i, bias=_CHOICE),
    )


def minimax_m3() -> tuple[dict[str, Any], Shapes]:
    """llama.cpp selects blocks of keys only with flash attention; the number selected here is the maximum."""
    fields = usual(3, rope__dimension_count=32) | _EXPERTS | _SHARED | _DENSE_LEAD | _SIGMOID
    fields |= {"attention.indexer.head_count": N_KV, "attention.indexer.key_length": 64}
    fields |= {"attention.indexer.top_k": 4, "attention.indexer.block_size": 128, "attention.indexer.local_blocks": 1}

    def indexer(layer: int) -> Shapes:
        shapes: Shapes = {"q_proj": (E, N_KV * 64), "k_proj": (E, 64), "q_norm": (64,), "k_norm": (64,)}
        return {f"blk.{layer}.indexer.{name}.weight": shape for name, shape in shapes.items() if layer}

    return fields, ends() | layers(
        3, _norms, lambda i: attention(i, head_norms=True), lambda i: _after_dense(i, bias=_CHOICE), indexer
    )


def hy_v4() -> tuple[dict[str, Any], Shapes]:
    """Parallel residual streams; every other layer attends to the keys selected by the previous one."""
    n_stream, has_indexer = 4, [True, False, True, False]
    fields = usual(4) | _EXPERTS | _SHARED | _DENSE_LEAD | _SIGMOID | _INDEXER | {"attention.head_count_kv": 1}
    fields |= {"rope.dimension_count": 32, "attention.q_lora_rank": 128, "attention.kv_lora_rank": 128}
    fields |= {"attention.key_length": 160, "attention.value_length": 128, "attention.indexer.types": has_indexer}
    fields |= {"attention.key_length_mla": 96, "attention.value_length_mla": 64, "swiglu_clamp_exp": [0.5] * 4}
    fields |= {"hyper_connection.count": n_stream, "hyper_connection.epsilon": 1e-2, "hyper_connection.magnitude": 1.5}

    def streams(layer: int) -> Shapes:
        shapes: Shapes = {"fn": (n_stream * E, 2 * n_stream), "base": (2 * n_stream,), "scale": (2,)}
        return {f"blk.{layer}.hc_{part}_{name}.weight": ne for part in ("attn", "ffn") for name, ne in shapes.items()}

    last: Shapes = {"output_hc_fn.weight": (n_stream * E, n_stream), "output_hc_base.weight": (n_stream,)}
    return fields, ends() | last | {"output_hc_scale.weight": (1,)} | layers(
        4,
        _norms,
        lambda i: _latent(i, N_HEAD, 128, 64, 64) | (_indexer(i) if has_indexer[i] else {}),
        lambda i: one(i, "attn_gate.weight", E, N_HEAD * 64) | one(i, "attn_sinks.weight", N_HEAD),
        lambda i: _after_dense(i, bias=_CHOICE),
        streams,
    )


def streams_of_deepseek4(layer: int, n_embd: int = E) -> Shapes:
    """Four residual streams and their mixing weights."""
    shapes: Shapes = {"fn": (4 * n_embd, 24), "base": (24,), "scale": (3,)}
    return {f"blk.{layer}.hc_{part}_{name}.weight": ne for part in ("attn", "ffn") for name, ne in shapes.items()}


def deepseek4() -> tuple[dict[str, Any], Shapes]:
    """Windows, and beyond them blocks: selected by an indexer, none, all (there are none yet), selected.

    llama.cpp crashes if the indexer's keys are as long as attention's.
    """
    ratios, head, rank, groups, index_head = [4, 0, 128, 4], 64, 64, 2, 128
    fields = usual(4) | _EXPERTS | _SHARED | _INDEXER | {"attention.head_count_kv": 1, "hash_layer_count": 2}
    fields |= _yarn(32) | {"expert_gating_func": 4, "attention.key_length": head, "attention.value_length": head}
    fields |= {"attention.q_lora_rank": 128, "attention.sliding_window": 24, "attention.compress_ratios": ratios}
    fields |= {"attention.output_group_count": groups, "attention.output_lora_rank": rank, "attention.indexer.top_k": 5}
    fields |= {"attention.indexer.key_length": index_head}
    fields |= {"attention.compress_rope_freq_base": 4e4, "swiglu_clamp_exp": [0.5] * 4, "swiglu_clamp_shexp": [0.7] * 4}
    fields |= {"hyper_connection.count": 4, "hyper_connection.epsilon": 0.2}
    fields |= {"hyper_connection.sinkhorn_iterations": 3}

    def attention(layer: int) -> Shapes:
        shapes: Shapes = {"attn_sinks": (N_HEAD,), "attn_q_a": (E, 128), "attn_q_a_norm": (128,)}
        shapes |= {"attn_q_b": (128, N_HEAD * head), "attn_kv": (E, head), "attn_kv_a_norm": (head,)}
        shapes |= {"attn_output_a": (N_HEAD * head // groups, rank * groups), "attn_output_b": (rank * groups, E)}
        kinds = ["attn", "indexer"] if ratios[layer] == 4 else ["attn"] if ratios[layer] else []
        for kind, n in zip(kinds, (head, index_head), strict=False):
            width = n * (2 if ratios[layer] == 4 else 1)
            shapes |= {f"{kind}_compressor_{part}": (E, width) for part in ("kv", "gate")}
            shapes |= {f"{kind}_compressor_ape": (width, ratios[layer]), f"{kind}_compressor_norm": (n,)}
        if ratios[layer] == 4:
            shapes |= {"indexer.proj": (E, 16), "indexer.attn_q_b": (128, 16 * index_head)}
        return {f"blk.{layer}.{name}.weight": ne for name, ne in shapes.items()}

    def feed_forward(layer: int) -> Shapes:
        table = one(layer, TABLE, 2, VOCAB) if layer < 2 else {}
        return mixture(layer, shared=WIDTH, bias="" if table else _CHOICE) | table

    last: Shapes = {"output_hc_fn.weight": (4 * E, 4), "output_hc_base.weight": (4,), "output_hc_scale.weight": (1,)}
    return fields, ends() | last | layers(4, _norms, attention, feed_forward, streams_of_deepseek4)


def talkie() -> tuple[dict[str, Any], Shapes]:
    """Norms without weights, factors of heads and of a layer's output; the model's input in every layer."""

    def gains(layer: int) -> Shapes:
        shapes: Shapes = {"attn_q_norm.weight": (1, N_HEAD), "layer_output_scale.weight": (1,)}
        shapes |= {"attn_output.scale": (1,), "ffn_down.scale": (1,)}
        return {f"blk.{layer}.{name}": ne for name, ne in shapes.items()}

    fields = usual(3, logit_scale=0.7, rope__dimension_count=HEAD)
    return fields, ends(norm=False) | layers(3, attention, dense, gains)


def grovemoe() -> tuple[dict[str, Any], Shapes]:
    """Two experts share a smaller one."""
    fields = usual(3, expert_group_scale=0.3, experts_per_group=2, expert_chunk_feed_forward_length=WIDTH) | _EXPERTS

    def chunks(layer: int) -> Shapes:
        n = N_EXPERT // 2
        shapes: Shapes = {"gate": (E, WIDTH, n), "up": (E, WIDTH, n), "down": (WIDTH, E, n)}
        return {f"blk.{layer}.ffn_{name}_chexps.weight": shape for name, shape in shapes.items()}

    return fields, ends() | layers(3, _norms, lambda i: attention(i, head_norms=True), mixture, chunks)


def diffusion() -> tuple[dict[str, Any], Shapes]:
    """Every token attends to all others."""
    return usual(3) | _EXPERTS, ends() | layers(3, _norms, lambda i: attention(i, head_norms=True), mixture)


# ---------------------------------------------------------------- Gemma 4

_WINDOWED = [True, True, True, False, True, False]
_GEMMA4: dict[str, Any] = {
    "attention.key_length": 2 * HEAD,
    "attention.value_length": 2 * HEAD,
    "attention.key_length_swa": HEAD,
    "attention.value_length_swa": HEAD,
    "attention.sliding_window": 32,
    "attention.sliding_window_pattern": _WINDOWED,
    "rope.dimension_count": 2 * HEAD,
    "rope.dimension_count_swa": HEAD,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "final_logit_softcapping": 20.0,
}


def _gemma4_attention(layer: int, n_kv: int) -> Shapes:
    names = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    head = HEAD if _WINDOWED[layer] else 2 * HEAD
    scale: Shapes = {f"blk.{layer}.layer_output_scale.weight": (1,)}
    return norms(layer, *names) | attention(layer, head, n_kv, head_norms=True) | scale


def gemma4() -> tuple[dict[str, Any], Shapes]:
    """Embeddings for every layer; layers 4 and 5 share the caches of 2 and 3; some weights have scales."""
    n, width = len(_WINDOWED), 256
    widths = [FF] * 4 + [2 * FF] * 2
    fields = usual(n, **_GEMMA4) | {"feed_forward_length": widths, "attention.shared_kv_layers": 2}
    shapes = ends(output=False) | {"rope_freqs.weight": (HEAD,), "per_layer_token_embd.weight": (n * width, VOCAB)}
    shapes |= {"per_layer_model_proj.weight": (E, n * width), "per_layer_proj_norm.weight": (width,)}
    shapes |= layers(n, lambda i: _gemma4_attention(i, N_KV), lambda i: dense(i, width=widths[i]))
    shapes |= {f"blk.{i}.inp_gate.weight": (E, width) for i in range(n)}
    shapes |= {f"blk.{i}.proj.weight": (width, E) for i in range(n)}
    shapes |= layers(n, lambda i: norms(i, "post_norm"))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down"):
        shapes[f"blk.1.{name}.scale"] = (1,)
    shared = {f"blk.{i}.{name}.weight" for i in (4, 5) for name in ("attn_k", "attn_v", "attn_k_norm")}
    return fields | {"embedding_length_per_layer_input": width}, {k: v for k, v in shapes.items() if k not in shared}


def gemma4_moe() -> tuple[dict[str, Any], Shapes]:
    """Experts beside dense layers; layers without a window have one key head, which is also the value head."""
    n, n_expert, width = 4, 8, 256
    n_kv = [N_KV if _WINDOWED[i] else 1 for i in range(n)]
    pattern = {"attention.sliding_window_pattern": _WINDOWED[:n], "attention.head_count_kv": n_kv}
    fields = usual(n, expert_count=n_expert, expert_used_count=2, expert_feed_forward_length=width) | _GEMMA4 | pattern
    shapes = ends(output=False) | {"rope_freqs.weight": (HEAD,)}
    shapes |= layers(
        n,
        lambda i: _gemma4_attention(i, n_kv[i]),
        dense,
        lambda i: norms(i, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"),
    )
    for i in range(n):
        shapes |= {f"blk.{i}.ffn_gate_inp.weight": (E, n_expert), f"blk.{i}.ffn_gate_inp.scale": (E,)}
        shapes |= {f"blk.{i}.ffn_gate_up_exps.weight": (E, 2 * width, n_expert)}
        shapes |= {f"blk.{i}.ffn_down_exps.weight": (width, E, n_expert), f"blk.{i}.ffn_down_exps.scale": (n_expert,)}
    none = {f"blk.{i}.attn_v.weight" for i in range(n) if not _WINDOWED[i]}
    return fields | {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0}, {
        k: v for k, v in shapes.items() if k not in none
    }


# ---------------------------------------------------------------- recurrent layers

_SSM: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * E,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
}
_ALONE: dict[str, Any] = {"feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": 0}


def _mamba2(layer: int, *, norm: bool = True) -> Shapes:
    inner, d_state, n_head, n_group = 2 * E, 32, 8, 2
    mixed = inner + 2 * n_group * d_state
    shapes: Shapes = {"ssm_in.weight": (E, inner + mixed + n_head), "ssm_conv1d.weight": (4, mixed)}
    shapes |= {"ssm_conv1d.bias": (mixed,), "ssm_dt.bias": (n_head,), "ssm_a": (1, n_head), "ssm_d": (1, n_head)}
    shapes |= {"ssm_norm.weight": (inner // n_group, n_group)} if norm else {}
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()} | {
        f"blk.{layer}.ssm_out.weight": (inner, E)
    }


def _mamba(layer: int, *, norms: bool = False) -> Shapes:
    inner, d_state, rank = 2 * E, 16, 16
    shapes: Shapes = {"ssm_in.weight": (E, 2 * inner), "ssm_conv1d.weight": (4, inner), "ssm_conv1d.bias": (inner,)}
    shapes |= {"ssm_x.weight": (inner, rank + 2 * d_state), "ssm_dt.weight": (rank, inner), "ssm_dt.bias": (inner,)}
    shapes |= {"ssm_a": (d_state, inner), "ssm_d": (inner,), "ssm_out.weight": (inner, E)}
    if norms:
        widths = {"dt": rank, "b": d_state, "c": d_state}
        shapes |= {f"ssm_{name}_norm.weight": (width,) for name, width in widths.items()}
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def _experts(layer: int, n: int, width: int, *, bias: bool = False, shared: bool = False, gate: bool = True) -> Shapes:
    shapes: Shapes = {"ffn_gate_inp.weight": (E, n), "ffn_up_exps.weight": (E, width, n)}
    shapes |= {"ffn_down_exps.weight": (width, E, n)} | ({"ffn_gate_exps.weight": (E, width, n)} if gate else {})
    shapes |= {"exp_probs_b.bias": (n,)} if bias else {}
    if shared:
        names = {"gate": (E, width), "up": (E, width), "down": (width, E)}
        shapes |= {f"ffn_{name}_shexp.weight": shape for name, shape in names.items() if gate or name != "gate"}
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def mamba(**extra: Any) -> tuple[dict[str, Any], Shapes]:
    fields = usual(3) | _SSM | _ALONE | {"ssm.state_size": 16, "ssm.time_step_rank": 16} | extra
    del fields["ssm.group_count"]
    return fields, ends() | layers(3, lambda i: norms(i, "attn_norm"), _mamba)


def falcon_mamba() -> tuple[dict[str, Any], Shapes]:
    return mamba(**{"ssm.dt_b_c_rms": True})


def mamba2() -> tuple[dict[str, Any], Shapes]:
    return usual(3) | _SSM | _ALONE, ends(output=False) | layers(3, lambda i: norms(i, "attn_norm"), _mamba2)


def jamba() -> tuple[dict[str, Any], Shapes]:
    """Mamba, attention, Mamba; experts in the middle layer."""
    fields = usual(3, expert_count=8, expert_used_count=2) | _SSM | {"attention.head_count_kv": [0, N_KV, 0]}
    fields |= {"ssm.state_size": 16, "ssm.time_step_rank": 16}
    del fields["ssm.group_count"]
    return fields, ends() | layers(
        3,
        lambda i: norms(i, "attn_norm", "ffn_norm"),
        lambda i: attention(i) if i == 1 else _mamba(i, norms=True),
        lambda i: _experts(i, 8, FF) if i == 1 else dense(i),
    )


def falcon_h1() -> tuple[dict[str, Any], Shapes]:
    """The last layer has no norm after the scan."""
    fields = usual(3, rope__freq_base=1e6) | _SSM | {"attention.key_length": HEAD, "attention.value_length": HEAD}
    return fields, ends() | layers(
        3,
        lambda i: norms(i, "attn_norm") | {f"blk.{i}.ffn_norm": (E,)},
        attention,
        lambda i: _mamba2(i, norm=i < 2),
        dense,
    )


def _nemotron_fields(kinds: str, width: int, kind: str) -> dict[str, Any]:
    """Return the fields of a model of layers M (Mamba 2), * (attention) and ``kind`` (feed-forward)."""
    fields_of_layers = {"attention.head_count_kv": [N_KV * (k == "*") for k in kinds]}
    fields_of_layers |= {"feed_forward_length": [width * (k == kind) for k in kinds]}
    heads = {"attention.key_length": HEAD, "attention.value_length": HEAD}
    return (
        usual(len(kinds), "layer_norm_epsilon", attention__layer_norm_rms_epsilon=1e-5)
        | _SSM
        | fields_of_layers
        | heads
    )


def nemotron_h() -> tuple[dict[str, Any], Shapes]:
    kinds = "M-*-M"
    parts_by_kind: dict[str, Callable[[int], Shapes]] = {
        "M": _mamba2,
        "*": attention,
        "-": lambda i: dense(i, gate=False),
    }
    return _nemotron_fields(kinds, FF, "-"), ends() | layers(
        len(kinds), lambda i: norms(i, "attn_norm"), lambda i: parts_by_kind[kinds[i]](i)
    )


def nemotron_h_moe() -> tuple[dict[str, Any], Shapes]:
    """Experts of rows of half the width, and a shared one of rows of the model's."""
    kinds, width, latent, n = "MEM*E", 256, E // 2, 8

    def latent_experts(layer: int) -> Shapes:
        shapes: Shapes = {"ffn_latent_down.weight": (E, latent), "ffn_latent_up.weight": (latent, E)}
        shapes |= {"ffn_up_exps.weight": (latent, width, n), "ffn_down_exps.weight": (width, latent, n)}
        extra = {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        return _experts(layer, n, width, bias=True, shared=True, gate=False) | extra

    parts_by_kind: dict[str, Callable[[int], Shapes]] = {"M": _mamba2, "*": attention, "E": latent_experts}
    fields = _nemotron_fields(kinds, width, "E") | {"moe_latent_size": latent, "expert_count": n}
    fields |= {"expert_used_count": 3, "expert_feed_forward_length": width, "expert_shared_count": 1}
    fields |= {"expert_shared_feed_forward_length": width, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    return fields, ends() | layers(len(kinds), lambda i: norms(i, "attn_norm"), lambda i: parts_by_kind[kinds[i]](i))


def _lfm2(layer: int, attends: bool) -> Shapes:
    if attends:
        return attention(layer, head_norms=True)
    shapes: Shapes = {"conv": (3, E), "in_proj": (E, 3 * E), "out_proj": (E, E)}
    return {f"blk.{layer}.shortconv.{name}.weight": shape for name, shape in shapes.items()}


def lfm2() -> tuple[dict[str, Any], Shapes]:
    kv = [0, 0, N_KV, 0]
    fields = usual(4, shortconv__l_cache=3, attention__sliding_window=32, rope__freq_base=1e6)
    shapes = (
        ends(output=False, norm=False)
        | {"token_embd_norm.weight": (E,)}
        | layers(4, lambda i: norms(i, "attn_norm", "ffn_norm"), lambda i: _lfm2(i, kv[i] > 0), dense)
    )
    return fields | {"attention.head_count_kv": kv}, shapes


def lfm2moe() -> tuple[dict[str, Any], Shapes]:
    kv = [0, N_KV, 0]
    fields = usual(3, shortconv__l_cache=3, rope__freq_base=1e6, leading_dense_block_count=1, expert_count=8)
    fields |= {"expert_used_count": 2, "expert_feed_forward_length": 256, "expert_gating_func": 2}
    shapes = (
        ends(output=False, norm=False)
        | {"token_embd_norm.weight": (E,)}
        | layers(
            3,
            lambda i: norms(i, "attn_norm", "ffn_norm"),
            lambda i: _lfm2(i, kv[i] > 0),
            lambda i: _experts(i, 8, 256, bias=True) if i else dense(i),
        )
    )
    return fields | {"attention.head_count_kv": kv}, shapes


def minimax_01() -> tuple[dict[str, Any], Shapes]:
    """Lightning attention, attention, lightning attention."""
    n, width = 8, N_HEAD * HEAD

    def block(layer: int) -> Shapes:
        if layer == 1:
            return attention(layer)
        shapes: Shapes = {"attn_qkv": (E, 3 * width), "attn_gate": (E, width), "attn_output": (width, E)}
        shapes |= {"attn_norm_2": (width,)}
        return {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}

    extra: dict[str, Any] = {"attention.recurrent_layers": [True, False, True], "rope.dimension_count": HEAD // 2}
    extra |= {"attention.key_length": HEAD, "attention.value_length": HEAD, "residual_scale": 3.55}
    fields = usual(3, expert_count=n, expert_used_count=2, **extra)
    return fields, ends() | layers(3, lambda i: norms(i, "attn_norm", "ffn_norm"), block, lambda i: _experts(i, n, FF))


def bailing_v3() -> tuple[dict[str, Any], Shapes]:
    """Like Kimi Linear, with decays and gates from a single matrix, one gate per head, and limits in feed-forward
    layers."""
    fields, shapes = kimi_linear()
    for i in (0, 2):
        shapes |= {f"blk.{i}.ssm_{c}_a.weight": (E, N_HEAD * 32) for c in "fg"} | {f"blk.{i}.ssm_a": (1, N_HEAD)}
        del shapes[f"blk.{i}.ssm_f_b.weight"], shapes[f"blk.{i}.ssm_g_b.weight"]
    shapes["blk.1.attn_gate.weight"] = (E, N_HEAD)
    fields |= {"kda.gate_lower_bound": -5.0, "expert_weights_norm": True, "swiglu_clamp_exp": [0.0, 0.75, 0.5]}
    return fields | {"swiglu_clamp_shexp": [0.0, 0.0, 0.5]}, shapes


def kimi_k3() -> tuple[dict[str, Any], Shapes]:
    """Like Kimi Linear, with gates from a single matrix, experts of shorter rows, and mixes of previous layers."""
    fields, shapes = kimi_linear()
    latent, width, n = 128, N_HEAD * 32, 8
    shapes |= {f"blk.{i}.{part}_res_score.weight": (E,) for i in range(3) for part in ("attn", "ffn")}
    shapes |= {"output_res_score.weight": (E,), "blk.1.attn_gate.weight": (E, N_HEAD * 64)}
    for i in (0, 2):
        del shapes[f"blk.{i}.ssm_g_a.weight"], shapes[f"blk.{i}.ssm_g_b.weight"]
        shapes |= {f"blk.{i}.ssm_g.weight": (E, width), f"blk.{i}.ssm_a": (N_HEAD,)}
    for i in (1, 2):
        shapes |= {f"blk.{i}.ffn_{name}_exps.weight": (latent, 256, n) for name in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down_exps.weight": (256, latent, n), f"blk.{i}.ffn_routed_down.weight": (E, latent)}
        shapes |= {f"blk.{i}.ffn_routed_up.weight": (latent, E), f"blk.{i}.ffn_routed_norm.weight": (latent,)}
    fields |= {"kda.gate_lower_bound": -5.0, "expert_latent_length": latent, "attn_res.block_size": 2}
    fields |= {"activation.situ_beta": 4.0, "activation.situ_linear_beta": 2.0, "expert_weights_norm": True}
    return fields, shapes


def kimi_linear() -> tuple[dict[str, Any], Shapes]:
    """Delta attention, latent attention, delta attention; the first layer is dense."""
    head, rank, nope, rope, value, n = 32, 128, 48, 16, 64, 8

    def delta_attention(layer: int) -> Shapes:
        width = N_HEAD * head
        shapes: Shapes = {f"attn_{c}.weight": (E, width) for c in "qkv"}
        shapes |= {"attn_output.weight": (width, E)}
        shapes |= {f"ssm_conv1d_{c}.weight": (4, 1, width, 1) for c in "qkv"} | {"ssm_norm.weight": (head,)}
        shapes |= {f"ssm_{c}_a.weight": (E, head) for c in "fg"} | {f"ssm_{c}_b.weight": (head, width) for c in "fg"}
        shapes |= {"ssm_beta.weight": (E, N_HEAD), "ssm_a": (1, N_HEAD, 1, 1), "ssm_dt.bias": (width,)}
        return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}

    def latent_attention(layer: int) -> Shapes:
        shapes: Shapes = {"attn_q": (E, N_HEAD * (nope + rope)), "attn_kv_a_mqa": (E, rank + rope)}
        shapes |= {"attn_kv_a_norm": (rank,), "attn_k_b": (nope, rank, N_HEAD), "attn_v_b": (rank, value, N_HEAD)}
        shapes |= {"attn_output": (N_HEAD * value, E)}
        return {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}

    fields = usual(3, expert_count=n, expert_used_count=2, expert_feed_forward_length=256, expert_shared_count=1)
    fields |= {"attention.key_length": rank + rope, "attention.value_length": rank, "rope.dimension_count": rope}
    fields |= {"attention.key_length_mla": nope + rope, "attention.value_length_mla": value}
    fields |= {"attention.kv_lora_rank": rank, "ssm.conv_kernel": 4, "kda.head_dim": head, "expert_gating_func": 2}
    fields |= {"attention.head_count_kv": [0, 1, 0], "leading_dense_block_count": 1, "expert_weights_scale": 2.446}
    return fields, ends() | layers(
        3,
        lambda i: norms(i, "attn_norm", "ffn_norm"),
        lambda i: latent_attention(i) if i == 1 else delta_attention(i),
        lambda i: _experts(i, n, 256, bias=True, shared=True) if i else dense(i),
    )


def _rwkv(layer: int, channels: int = 0, n_head: int = N_HEAD, *, norms: bool = True) -> Shapes:
    """Return the tensors of both versions of time mixing; channels: width of channel mixing, if a layer has it."""
    shapes: Shapes = {f"time_mix_{name}.weight": (E, E) for name in ("receptance", "output")}
    shapes |= {f"time_mix_{name}.weight": (E, n_head * HEAD) for name in ("key", "value")}
    if norms:
        shapes |= {"time_mix_ln.weight": (E,), "time_mix_ln.bias": (E,)}
    if channels:
        shapes |= {"channel_mix_lerp_k.weight": (E, 1, 1), "channel_mix_key.weight": (E, channels)}
        shapes |= {"channel_mix_value.weight": (channels, E)}
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def _of_token(layer: int, low: int = 32, slow: int = 64) -> Shapes:
    """Return the mix and decay tensors of RWKV 6."""
    shapes: Shapes = {"lerp_x": (E, 1, 1), "lerp_fused": (E, 1, 1, 5), "w1": (E, 5 * low), "w2": (low, E, 5)}
    shapes |= {"decay": (E,), "decay_w1": (E, slow), "decay_w2": (slow, E), "gate": (E, E)}
    return {f"blk.{layer}.time_mix_{name}.weight": shape for name, shape in shapes.items()}


def _low_ranks(layer: int, rank: int = 32, *, gate: bool = True) -> Shapes:
    """Return the mix, decay, learning-rate and gate tensors of RWKV 7."""
    shapes: Shapes = {"lerp_fused": (E, 1, 1, 6 if gate else 5)} | {f"{c}0": (E,) for c in "wav"}
    shapes |= {f"{c}1": (E, rank) for c in "wavg"[: 3 + gate]} | {f"{c}2": (rank, E) for c in "wavg"[: 3 + gate]}
    shapes |= dict.fromkeys(("k_k", "k_a", "r_k"), (E,))
    return {f"blk.{layer}.time_mix_{name}.weight": shape for name, shape in shapes.items()}


_WKV: dict[str, Any] = {"wkv.head_size": HEAD, "attention.head_count": 0, "context_length": N_CTX}
_RANKS = {f"attention.{name}_lora_rank": 32 for name in ("decay", "iclr", "value_residual_mix", "gate")}
_EXTRA = {"time_mix_extra_dim": 32, "time_decay_extra_dim": 64}


def _own_norms(n: int) -> Shapes:
    shapes = ends(bias=True) | {"token_embd_norm.weight": (E,), "token_embd_norm.bias": (E,)}
    return shapes | layers(n, lambda i: norms(i, "attn_norm", "attn_norm_2", bias=True))


def rwkv6() -> tuple[dict[str, Any], Shapes]:
    fields = usual(2, "layer_norm_epsilon", rescale_every_n_layers=1) | _WKV | _EXTRA
    del fields["attention.head_count_kv"]

    def extra_shapes(layer: int) -> Shapes:
        shapes: Shapes = {"time_mix_first": (HEAD, N_HEAD), "channel_mix_lerp_r": (E, 1, 1)}
        shapes |= {"channel_mix_receptance": (E, E)}
        return {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}

    return fields, _own_norms(2) | layers(2, lambda i: _rwkv(i, FF), _of_token, extra_shapes)


def rwkv6qwen2() -> tuple[dict[str, Any], Shapes]:
    fields = usual(2, token_shift_count=1) | _WKV | _EXTRA
    biases = {"receptance": E, "key": N_KV * HEAD, "value": N_KV * HEAD}
    return fields, ends() | layers(
        2,
        lambda i: norms(i, "attn_norm", "ffn_norm"),
        lambda i: _rwkv(i, n_head=N_KV, norms=False),
        lambda i: {f"blk.{i}.time_mix_{name}.bias": (n,) for name, n in biases.items()},
        _of_token,
        dense,
    )


def rwkv7() -> tuple[dict[str, Any], Shapes]:
    fields = usual(2, "layer_norm_epsilon") | _WKV | _RANKS
    del fields["attention.head_count_kv"]
    return fields, _own_norms(2) | layers(2, lambda i: _rwkv(i, FF), _low_ranks)


def arwkv7() -> tuple[dict[str, Any], Shapes]:
    """Without gates and head norms."""
    fields = usual(2, token_shift_count=1) | _WKV | _RANKS | {"attention.gate_lora_rank": 0}
    del fields["attention.head_count_kv"]
    return fields, ends() | layers(
        2,
        lambda i: norms(i, "attn_norm", "ffn_norm"),
        lambda i: _rwkv(i, norms=False),
        lambda i: _low_ranks(i, gate=False),
        dense,
    )


def gemma3n(n: int = 6) -> tuple[dict[str, Any], Shapes]:
    """Sizes are llama.cpp's constants; layers from the 21st on would share caches."""
    e, ff, head, streams, rank, width = 128, 256, 32, 4, 64, 256
    windowed = [i % 5 < 4 for i in range(n - 1)] + [False]
    fields = usual(n) | {"embedding_length": e, "feed_forward_length": ff, "rope.freq_base": 1e6}
    fields |= {"attention.key_length": head, "attention.value_length": head, "attention.sliding_window": 32}
    fields |= {"attention.sliding_window_pattern": windowed, "embedding_length_per_layer_input": width}
    shapes: Shapes = {"token_embd.weight": (e, VOCAB), "output_norm.weight": (e,)}
    shapes |= {f"altup_{name}.weight": (e, e, streams - 1) for name in ("proj", "unembd_proj")}
    shapes |= {"per_layer_token_embd.weight": (n * width, VOCAB), "per_layer_model_proj.weight": (e, n * width)}
    shapes |= {"per_layer_proj_norm.weight": (width,)}
    q, kv = N_HEAD * head, N_KV * head
    of_layer: Shapes = {
        **{f"{name}_norm": (e,) for name in ("attn", "post_attention", "ffn", "post_ffw", "post", "laurel_post")},
        **{"attn_q": (e, q), "attn_k": (e, kv), "attn_v": (e, kv), "attn_output": (q, e), "laurel_l": (e, rank)},
        **{"attn_q_norm": (head,), "attn_k_norm": (head,), "laurel_r": (rank, e), "altup_router_norm": (e,)},
        **{"ffn_up": (e, ff), "ffn_gate": (e, ff), "ffn_down": (ff, e), "inp_gate": (e, width), "proj": (width, e)},
        **{"altup_router": (e, streams), "altup_correct_scale": (e,), "altup_correct_coef": (streams, streams)},
        **{"altup_predict_coef": (streams, streams * streams)},
    }
    return fields, shapes | {f"blk.{i}.{name}.weight": shape for i in range(n) for name, shape in of_layer.items()}


# ---------------------------------------------------------------- older and single architectures


def small(fields: dict[str, Any], shapes: Shapes) -> tuple[dict[str, Any], Shapes]:
    """Return two layers of a model, each with its special features."""
    beyond = tuple(f"blk.{i}." for i in range(2, fields["block_count"]))
    return fields | {"block_count": 2}, {k: v for k, v in shapes.items() if not k.startswith(beyond)}


def baichuan(n_layer: int) -> tuple[dict[str, Any], Shapes]:
    """Depending on the number of layers, attention uses rotary positions or ALiBi."""
    e, head = 64, 16
    fields = usual(n_layer) | {"embedding_length": e, "feed_forward_length": e}
    shapes: Shapes = {"attn_norm": (e,), "ffn_norm": (e,), "attn_q": (e, e), "attn_k": (e, N_KV * head)}
    shapes |= {"attn_v": (e, N_KV * head), "attn_output": (e, e)}
    shapes |= {f"ffn_{name}": (e, e) for name in ("gate", "up", "down")}
    global_shapes: Shapes = {"token_embd.weight": (e, VOCAB), "output_norm.weight": (e,), "output.weight": (e, VOCAB)}
    return fields, global_shapes | layers(
        n_layer, lambda i: {f"blk.{i}.{name}.weight": shape for name, shape in shapes.items()}
    )


def fused_llama(bias: Sequence[str] = (), n_kv: int = N_HEAD) -> tuple[dict[str, Any], Shapes]:
    """Layers like Llama's, with q, k and v in one matrix."""
    fields = usual(2) | {"attention.head_count_kv": n_kv}
    return fields, ends() | layers(2, _norms, lambda i: fused(i, n_kv, bias), dense)


def qwen() -> tuple[dict[str, Any], Shapes]:
    fields, shapes = fused_llama(bias=("attn_qkv",))
    return fields | {"feed_forward_length": 2 * FF}, shapes


def mpt() -> tuple[dict[str, Any], Shapes]:
    """Without norms of q and k, which its class may have: llama.cpp crashes on them."""
    fields = usual(2, "layer_norm_epsilon", attention__clamp_kqv=1.25, attention__max_alibi_bias=6.0)
    return fields, ends(output=False) | {"position_embd.weight": (E, N_CTX)} | layers(
        2,
        _norms,
        lambda i: fused(i, N_KV, bias=()),
        lambda i: dense(i, gate=False) | one(i, "ffn.act.scales", FF),
    )


def jais() -> tuple[dict[str, Any], Shapes]:
    fields = usual(2, "layer_norm_epsilon", attention__max_alibi_bias=8.0) | {"attention.head_count_kv": N_HEAD}
    return fields, ends(bias=True) | layers(
        2,
        lambda i: norms(i, "attn_norm", "ffn_norm", bias=True),
        lambda i: fused(i, N_HEAD),
        lambda i: dense(i, bias=True),
    )


def plamo() -> tuple[dict[str, Any], Shapes]:
    """One norm for both parts of a layer."""
    return usual(2), ends() | layers(2, lambda i: norms(i, "attn_norm"), attention, dense)


def plamo3() -> tuple[dict[str, Any], Shapes]:
    """Value heads narrower than key heads; norms after each part, whose names have no suffix."""
    fields = usual(3, rope__freq_base_swa=1e3, attention__sliding_window=32)
    fields |= {"attention.sliding_window_pattern": [True, False, True]}
    fields |= {"attention.key_length": HEAD, "attention.value_length": 32, "rope.dimension_count": HEAD // 2}
    heads: Shapes = {"attn_qkv.weight": (E, (N_HEAD + N_KV) * HEAD + N_KV * 32)}
    heads |= {"attn_output.weight": (N_HEAD * 32, E)}
    heads |= {f"attn_{letter}_norm.weight": (HEAD,) for letter in "qk"}
    heads |= {"post_attention_norm": (E,), "post_ffw_norm": (E,)}
    heads |= {"ffn_up.weight": (E, 2 * FF), "ffn_down.weight": (FF, E)}
    return fields, ends(output=False) | layers(
        3, _norms, lambda i: {f"blk.{i}.{name}": shape for name, shape in heads.items()}
    )


def plamo2() -> tuple[dict[str, Any], Shapes]:
    """Mamba, attention, Mamba; steps of heads are projected from a short row, and the names of norms have no suffix.

    llama.cpp fails on a model whose first layer has no heads, like the real ones.
    """
    width, n_head, state, rank = 512, 8, 16, 64
    fields = usual(3) | {"attention.head_count_kv": [0, N_KV, 0]}
    fields |= {"attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": HEAD}
    fields |= {"ssm.conv_kernel": 4, "ssm.inner_size": width, "ssm.state_size": state, "ssm.time_step_rank": n_head}
    fields |= {"ssm.group_count": 0}
    scan: Shapes = {"ssm_in.weight": (E, 2 * width), "ssm_conv1d.weight": (4, width), "ssm_out.weight": (width, E)}
    scan |= {"ssm_x.weight": (width, rank + 2 * state), "ssm_dt.weight": (rank, n_head), "ssm_dt.bias": (n_head,)}
    scan |= {"ssm_a": (n_head,), "ssm_d": (n_head,), "ssm_dt_norm": (rank,), "ssm_b_norm": (state,)}
    scan |= {"ssm_c_norm": (state,)}
    heads: Shapes = {"attn_qkv.weight": (E, (N_HEAD + 2 * N_KV) * HEAD), "attn_output.weight": (N_HEAD * HEAD, E)}
    heads |= {"attn_q_norm.weight": (HEAD, N_HEAD), "attn_k_norm.weight": (HEAD, N_KV)}
    other_shapes: Shapes = {"post_attention_norm": (E,), "post_ffw_norm": (E,), "ffn_up.weight": (E, 2 * FF)}
    other_shapes |= {"ffn_down.weight": (FF, E)}
    return fields, ends(output=False) | layers(
        3,
        _norms,
        lambda i: {f"blk.{i}.{name}": shape for name, shape in ((heads if i == 1 else scan) | other_shapes).items()},
    )


def openelm() -> tuple[dict[str, Any], Shapes]:
    """Every layer has its own number of heads and width."""
    n_head, n_kv, width = [4, 6, 8], [2, 3, 2], [256, 512, 768]
    fields = usual(3) | {"attention.head_count": n_head, "attention.head_count_kv": n_kv}
    fields |= {"feed_forward_length": width, "attention.key_length": HEAD, "attention.value_length": HEAD}

    def heads(layer: int) -> Shapes:
        shapes = one(layer, "attn_qkv.weight", E, (n_head[layer] + 2 * n_kv[layer]) * HEAD)
        shapes |= one(layer, "attn_q_norm.weight", HEAD) | one(layer, "attn_k_norm.weight", HEAD)
        return shapes | one(layer, "attn_output.weight", n_head[layer] * HEAD, E)

    return fields, ends(output=False) | layers(3, _norms, heads, lambda i: dense(i, width=width[i]))


def dbrx() -> tuple[dict[str, Any], Shapes]:
    fields = usual(2, "layer_norm_epsilon", attention__clamp_kqv=1.25, expert_count=N_EXPERT, expert_used_count=2)
    return fields | {"feed_forward_length": WIDTH}, ends() | layers(
        2, lambda i: norms(i, "attn_norm", "attn_output_norm"), lambda i: fused(i, N_KV, bias=()), mixture
    )


def grok(two: bool) -> tuple[dict[str, Any], Shapes]:
    """Grok 2 has a dense feed-forward layer beside its experts, and yarn."""
    fields = usual(2, expert_count=N_EXPERT, expert_used_count=2, attention__output_scale=0.2)
    fields |= {"attn_logit_softcapping": 4.0, "router_logit_softcapping": 30.0, "embedding_scale": 3.0}
    last = "post_ffw_norm" if two else "layer_output_norm"
    if two:
        fields |= {"final_logit_softcapping": 2.0, "logit_scale": 0.5, "expert_feed_forward_length": WIDTH}
        ext: dict[str, Any] = {"ext_factor": 0.5, "attn_factor": 1.0, "beta_fast": 8.0, "beta_slow": 1.0}
        fields |= _yarn(HEAD) | {f"rope.scaling.yarn_{name}": value for name, value in ext.items()}
    else:
        fields |= {"feed_forward_length": WIDTH}
    return fields, ends(output=two) | layers(
        2,
        lambda i: norms(i, "attn_norm", "attn_output_norm", "ffn_norm", last),
        attention,
        mixture,
        lambda i: dense(i) if two else {},
    )


def arctic() -> tuple[dict[str, Any], Shapes]:
    """Experts read the layer's input, beside a dense feed-forward layer."""
    fields = usual(2, expert_count=N_EXPERT, expert_used_count=2) | {"feed_forward_length": WIDTH}
    return fields, ends() | layers(
        2,
        lambda i: norms(i, "attn_norm", "ffn_norm", "ffn_norm_exps"),
        attention,
        lambda i: dense(i, width=E),
        mixture,
    )


def deci() -> tuple[dict[str, Any], Shapes]:
    """Layers with attention, a matrix instead, no attention, nothing at all, attention with one head."""
    n_head, n_kv, width = [4, 4, 0, 0, 4], [2, 0, 0, 0, 1], [512, 256, 512, 0, 256]
    fields = usual(5) | {"attention.head_count": n_head, "attention.head_count_kv": n_kv, "feed_forward_length": width}

    def attends(i: int) -> Shapes:
        if n_kv[i]:
            return norms(i, "attn_norm") | attention(i, n_kv=n_kv[i])
        return norms(i, "attn_norm") | one(i, "attn_output.weight", E, E) if n_head[i] else {}

    return fields, ends() | {"rope_freqs.weight": (HEAD // 2,)} | layers(
        5, attends, lambda i: norms(i, "ffn_norm") | dense(i, width=width[i]) if width[i] else {}
    )


def maple() -> tuple[dict[str, Any], Shapes]:
    """Layers without a window do not rotate; the others do, half of each head."""
    fields = usual(3) | _EXPERTS | {"attention.sliding_window": 32, "rope.freq_base_swa": 1e3}
    fields |= {"attention.sliding_window_pattern": [True, False, True], "rope.dimension_count": HEAD // 2}
    fields |= {"swiglu_clamp_exp": [0.0, 0.75, 0.5]}
    return fields, ends() | layers(3, _norms, lambda i: attention(i, head_norms=True), mixture)


def muse_glimmer() -> tuple[dict[str, Any], Shapes]:
    fields = usual(4, logit_scale=0.25, final_logit_softcapping=1.5, rope__freq_base_swa=1e3)
    fields |= {"attention.sliding_window": 32}
    return fields, ends() | layers(
        4,
        lambda i: norms(i, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
        lambda i: attention(i, head_norms=True),
        lambda i: one(i, "attn_gate.weight", E, N_HEAD * HEAD),
        dense,
    )


def hunyuan_vl() -> tuple[dict[str, Any], Shapes]:
    extra: dict[str, Any] = {"rope.dimension_sections": [8, 8, 8, 8], "rope.scaling.alpha": 50.0}
    return small(*llama(head_norms=True, **extra))


def bert(
    feed_forward: Callable[[int], Shapes], *, positions: bool = False, **extra: Any
) -> tuple[dict[str, Any], Shapes]:
    """BERT's layers: norms after the sums, biases everywhere; positions: embeddings of them."""
    fields = usual(3, "layer_norm_epsilon", attention__causal=False, **extra) | {"attention.head_count_kv": N_HEAD}
    shapes: Shapes = {"token_embd.weight": (E, VOCAB), "token_types.weight": (E, 2)}
    shapes |= {"position_embd.weight": (E, N_CTX)} if positions else {}
    shapes |= {"token_embd_norm.weight": (E,), "token_embd_norm.bias": (E,)}
    return fields | {".tokenizer.ggml.token_type_count": 2}, shapes | layers(
        3,
        lambda i: attention(i, n_kv=N_HEAD, bias=True),
        lambda i: norms(i, "attn_output_norm", "layer_output_norm", bias=True),
        feed_forward,
    )


def plain_layer(layer: int) -> Shapes:
    return dense(layer, gate=False, bias=True)


def jina_bert_v2() -> tuple[dict[str, Any], Shapes]:
    """The first layer has no gate, the second one in a matrix of its own, the third in ffn_up; norms of q and k."""
    fields, shapes = bert(lambda i: {})
    shapes |= plain_layer(0) | dense(1) | gate_in_up(2) | one(1, "ffn_down.bias", E) | one(2, "ffn_down.bias", E)
    return fields, shapes | norms(1, "attn_q_norm", "attn_k_norm", "attn_norm_2", bias=True)


def nomic_bert_moe() -> tuple[dict[str, Any], Shapes]:
    """The second of every two layers has experts, which have no gate."""

    def feed_forward(layer: int) -> Shapes:
        without_gate = {name: shape for name, shape in mixture(layer, width=FF).items() if "gate_exps" not in name}
        return without_gate if layer == 1 else plain_layer(layer)

    return bert(feed_forward, expert_count=N_EXPERT, expert_used_count=2, moe_every_n_layers=2)


def before_norms(
    n_layer: int, feed_forward: Callable[[int], Shapes], eps: str = "layer_norm_rms_epsilon", **extra: Any
) -> tuple[dict[str, Any], Shapes]:
    """An encoder with norms before attention, whose q, k and v are in one matrix, and before the feed-forward layer."""
    fields = usual(n_layer, eps, attention__causal=False, **extra)
    return fields, {"token_embd.weight": (E, VOCAB)} | layers(
        n_layer, lambda i: norms(i, "attn_norm", "ffn_norm"), lambda i: fused(i, N_KV, bias=()), feed_forward
    )


def gate_in_up(layer: int) -> Shapes:
    return {f"blk.{layer}.ffn_up.weight": (E, 2 * FF), f"blk.{layer}.ffn_down.weight": (FF, E)}


def neo_bert() -> tuple[dict[str, Any], Shapes]:
    fields, shapes = before_norms(3, gate_in_up)
    return fields, shapes | {"enc.output_norm.weight": (E,)}


def modern_bert() -> tuple[dict[str, Any], Shapes]:
    """The first layer has no norm before attention; all but every third layer have a window."""
    extra = {"attention.sliding_window": 20, "rope.freq_base": 160000.0, "rope.freq_base_swa": 10000.0}
    fields, shapes = before_norms(4, gate_in_up, "layer_norm_epsilon", **extra)
    del shapes["blk.0.attn_norm.weight"]
    return fields | {"attention.head_count_kv": N_HEAD}, shapes | {
        "token_embd_norm.weight": (E,),
        "output_norm.weight": (E,),
    } | {f"blk.{i}.attn_qkv.weight": (E, 3 * E) for i in range(4)}


def eurobert() -> tuple[dict[str, Any], Shapes]:
    fields, shapes = llama(attention__causal=False)
    del shapes["output.weight"]
    return fields, shapes


def gemma_embedding() -> tuple[dict[str, Any], Shapes]:
    """Two layers with a window and one without."""
    head: dict[str, Any] = {"attention.key_length": 32, "attention.value_length": 32}
    extra = head | {"attention.sliding_window": 20, "attention.sliding_window_pattern": [True, False, True]}
    extra |= {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
    return usual(3, **extra), ends(output=False) | layers(
        3,
        lambda i: norms(i, "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"),
        lambda i: attention(i, 32, head_norms=True),
        dense,
    )


def t5_encoder() -> tuple[dict[str, Any], Shapes]:
    """The second layer has a gate and biases by distance of its own, the others share the first layer's."""
    fields = usual(3, attention__key_length=HEAD, attention__value_length=HEAD) | {
        "attention.relative_buckets_count": 32,
        "attention.head_count_kv": N_HEAD,
    }
    shapes = layers(
        3,
        lambda i: norms(i, "attn_norm", "ffn_norm"),
        lambda i: attention(i, n_kv=N_HEAD),
        lambda i: dense(i, gate=i == 1),
        lambda i: one(i, "attn_rel_b.weight", N_HEAD, 32) if i < 2 else {},
    )
    encoder = {f"enc.{name.replace('attn_output', 'attn_o')}": shape for name, shape in shapes.items()}
    return fields, {"token_embd.weight": (E, VOCAB), "enc.output_norm.weight": (E,)} | encoder


MODELS: Mapping[str, Callable[[], tuple[dict[str, Any], Shapes]]] = {
    "afmoe-moe": afmoe,
    "apertus-dense": apertus,
    "arcee-dense": arcee,
    "arctic-moe": arctic,
    "baichuan-13b": lambda: baichuan(40),
    "baichuan-7b": lambda: baichuan(32),
    "arwkv7-dense": arwkv7,
    "bailingmoe-moe": bailingmoe,
    "bailingmoe3-moe": bailing_v3,
    "bitnet-dense": bitnet,
    "bert-dense": lambda: bert(plain_layer, positions=True),
    "bloom-dense": bloom,
    "chatglm-dense": chatglm,
    "codeshell-dense": codeshell,
    "cohere2moe-moe": cohere2moe,
    "command-r-dense": command_r,
    "dbrx-moe": dbrx,
    "deci-dense": deci,
    "deepseek4-moe": deepseek4,
    "dots3note-moe": dots3note,
    "dream-dense": lambda: small(*qwen2vl()),
    "eurobert-dense": eurobert,
    "exaone-dense": exaone,
    "exaone-moe-moe": exaone_moe,
    "falcon-dense": lambda: falcon(N_KV, "attn_norm", "attn_norm_2"),
    "falcon-h1-dense": falcon_h1,
    "falcon-small": lambda: falcon(1, "attn_norm"),
    "gemma-dense": gemma,
    "gemma-embedding-dense": gemma_embedding,
    "gemma3n-dense": gemma3n,
    "gemma4-dense": gemma4,
    "gemma4-moe": gemma4_moe,
    "gpt2-dense": lambda: starcoder(N_HEAD),
    "gptneox-dense": gptneox,
    "gptneox-sequential": lambda: gptneox(parallel=False),
    "granite_swa-moe": granite_swa,
    "grok-both": lambda: grok(True),
    "grok-moe": lambda: grok(False),
    "grovemoe-moe": grovemoe,
    "hunyuan_vl-dense": hunyuan_vl,
    "hy_v3-moe": hy_v3,
    "hy_v4-moe": hy_v4,
    "jais-dense": jais,
    "jais2-dense": lambda: layer_normed(gate=False, bias=True),
    "jamba-moe": jamba,
    "jina-bert-v2-dense": jina_bert_v2,
    "jina-bert-v3-dense": lambda: bert(plain_layer),
    "kimi-k3-moe": kimi_k3,
    "kimi-linear-moe": kimi_linear,
    "laguna-elements": laguna_elements,
    "laguna-moe": laguna,
    "lfm2-dense": lfm2,
    "llama-embed-dense": eurobert,
    "lfm2moe-moe": lfm2moe,
    "llada-dense": lambda: small(*llama()),
    "llada-moe-moe": diffusion,
    "maincoder-dense": lambda: llama(head_norms=True),
    "mamba-dense": mamba,
    "mamba-normed": falcon_mamba,
    "mamba2-dense": mamba2,
    "maple-moe": maple,
    "mellum-moe": mellum,
    "mimo2-moe": mimo2,
    "modern-bert-dense": modern_bert,
    "neo-bert-dense": neo_bert,
    "nomic-bert-dense": lambda: bert(dense),
    "nomic-bert-moe-moe": nomic_bert_moe,
    "minicpm-dense": minicpm,
    "minimax-01-moe": minimax_01,
    "minimax-m3-moe": minimax_m3,
    "mpt-dense": mpt,
    "muse-glimmer-dense": muse_glimmer,
    "nanbeige-looped": lambda: llama(num_loops=2),
    "nemotron-dense": lambda: layer_normed(gate=False, bias=False, rope__dimension_count=HEAD // 2),
    "nemotron_h-dense": nemotron_h,
    "nemotron_h_moe-moe": nemotron_h_moe,
    "olmo-dense": olmo,
    "openelm-dense": openelm,
    "orion-dense": lambda: layer_normed(gate=True, bias=False),
    "paddleocr-dense": lambda: llama(rope__dimension_sections=[8, 10, 8, 6]),
    "pangu-embedded-dense": lambda: llama(bias=True),
    "phi2-dense": phi2,
    "plamo-dense": plamo,
    "plamo2-dense": plamo2,
    "plamo3-dense": plamo3,
    "qwen-dense": qwen,
    "qwen2vl-dense": qwen2vl,
    "qwen3vl-dense": qwen3vl,
    "refact-dense": lambda: small(*llama()),
    "rnd1-moe": diffusion,
    "rwkv6-dense": rwkv6,
    "rwkv6qwen2-dense": rwkv6qwen2,
    "rwkv7-dense": rwkv7,
    "smallthinker-moe": smallthinker,
    "spark2_5-dense": spark,
    "starcoder-dense": starcoder,
    "t5encoder-dense": t5_encoder,
    "talkie-dense": talkie,
    "step35-moe": step35,
}


def write_header(name: str) -> None:
    """Write the header of a model's file, up to the tensor data."""
    arch = name.rpartition("-")[0]
    fields, shapes = MODELS[name]()
    header_fields = [Field.of("general.architecture", arch), Field.of("tokenizer.ggml.model", "no_vocab")]
    for key, value in fields.items():
        header_fields.append(Field.of(key[1:] if key.startswith(".") else f"{arch}.{key}", value))
    types = {key: BY_NAME["I32" if key.endswith(TABLE) else "F32"] for key in shapes}
    tensors = [(key, shape, types[key], bytes(4 * int(np.prod(shape)))) for key, shape in shapes.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write_gguf(path, header_fields, tensors)
        data = path.read_bytes()
    size = sum(-(-len(raw) // 32) * 32 for *_, raw in tensors)
    (ZOO / "headers" / f"{name}.head").write_bytes(data[: len(data) - size])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all models described here")
    parser.add_argument("--lib", type=Path, required=True, help="folder of llama.cpp b11434's libllama.so")
    options = parser.parse_args()
    logits_path = ZOO / "logits.npz"
    with np.load(logits_path) as npz:
        logits = dict(npz)
    for name in options.names or MODELS:
        write_header(name)
        with tempfile.TemporaryDirectory() as folder:
            model = write_zoo(name, Path(folder, "model.gguf"), SEED)
            library = Libllama(options.lib)
            is_encoder = ARCHS[name.rpartition("-")[0]].encoder
            logits[name] = (library.embeddings if is_encoder else library.logits)(model, logits["tokens"])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **dict(sorted(logits.items())))
    logits_path.write_bytes(buffer.getvalue())


if __name__ == "__main__":
    main()

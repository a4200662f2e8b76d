"""Add models to the zoo: write tests/data/zoo/headers/NAME.head and enter llama.cpp b11434's logits in logits.npz.

    scripts/make_zoo.py [NAME ...] --lib DIR

The models are those described here; the headers of the others came from llama.cpp itself and have every key that it
knows. Logits are computed for the weights of seed 1, as tests/data/zoo/README.md says. They are those of a program that
may be compiled for any machine: a model that is named here is entered anew, every other one stays as it is.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from libllama import Libllama  # noqa: E402
from quantkit.formats.gguf import Field, write_gguf  # noqa: E402
from quantkit.types import BY_NAME  # noqa: E402
from zoo import SEED, ZOO, write_zoo  # noqa: E402

Shapes = dict[str, tuple[int, ...]]
E, FF, HEAD, N_HEAD, N_KV, VOCAB, N_CTX = 256, 512, 64, 4, 2, 128, 512


def usual(n_layer: int, eps: str = "layer_norm_rms_epsilon", **more: Any) -> dict[str, Any]:
    """Return the fields that every model has, and more; ``__`` in a name is a point."""
    fields: dict[str, Any] = {
        "block_count": n_layer,
        "context_length": N_CTX,
        "embedding_length": E,
        "feed_forward_length": FF,
    }
    fields |= {"attention.head_count": N_HEAD, "attention.head_count_kv": N_KV, f"attention.{eps}": 1e-5}
    return fields | {"vocab_size": VOCAB} | {key.replace("__", "."): value for key, value in more.items()}


def ends(output: bool = True, norm: bool = True, bias: bool = False) -> Shapes:
    shapes: Shapes = {"token_embd.weight": (E, VOCAB)}
    shapes |= {"output_norm.weight": (E,)} if norm else {}
    shapes |= {"output_norm.bias": (E,)} if bias else {}
    return shapes | ({"output.weight": (E, VOCAB)} if output else {})


def norms(layer: int, *names: str, bias: bool = False) -> Shapes:
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"blk.{layer}.{name}.{kind}": (E,) for name in names for kind in kinds}


def attention(
    layer: int, head: int = HEAD, n_kv: int = N_KV, *, bias: bool = False, head_norms: bool = False
) -> Shapes:
    q, kv = N_HEAD * head, n_kv * head
    shapes = {"attn_q": (E, q), "attn_k": (E, kv), "attn_v": (E, kv), "attn_output": (q, E)}
    made: Shapes = {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    if head_norms:
        made |= {f"blk.{layer}.{name}.weight": (head,) for name in ("attn_q_norm", "attn_k_norm")}
    return made | ({f"blk.{layer}.{name}.bias": shape[1:] for name, shape in shapes.items()} if bias else {})


def dense(layer: int, *, gate: bool = True, bias: bool = False, width: int = FF) -> Shapes:
    shapes = {"ffn_up": (E, width), "ffn_down": (width, E)} | ({"ffn_gate": (E, width)} if gate else {})
    made: Shapes = {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return made | ({f"blk.{layer}.{name}.bias": shape[1:] for name, shape in shapes.items()} if bias else {})


def layers(n: int, *of: Callable[[int], Shapes]) -> Shapes:
    return {name: shape for layer in range(n) for make in of for name, shape in make(layer).items()}


def gemma() -> tuple[dict[str, Any], Shapes]:
    more: dict[str, Any] = {"attention.key_length": 32, "attention.value_length": 32}
    return usual(3, **more), ends(output=False) | layers(
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


def starcoder() -> tuple[dict[str, Any], Shapes]:
    def fused(layer: int) -> Shapes:
        shapes = {"attn_qkv": (E, E + 2 * HEAD), "attn_output": (E, E)}
        return {f"blk.{layer}.{n}.weight": s for n, s in shapes.items()} | {
            f"blk.{layer}.{n}.bias": s[1:] for n, s in shapes.items()
        }

    fields = usual(3, "layer_norm_epsilon") | {"attention.head_count_kv": 1}
    return fields, ends(output=False, bias=True) | {"position_embd.weight": (E, N_CTX)} | layers(
        3,
        lambda i: norms(i, "attn_norm", "ffn_norm", bias=True),
        fused,
        lambda i: dense(i, gate=False, bias=True),
    )


def phi2() -> tuple[dict[str, Any], Shapes]:
    fields = usual(3, "layer_norm_epsilon", rope__dimension_count=32)
    return fields, ends(bias=True) | {"output.bias": (VOCAB,)} | layers(
        3,
        lambda i: norms(i, "attn_norm", bias=True),
        lambda i: attention(i, bias=True),
        lambda i: dense(i, gate=False, bias=True),
    )


def qwen3vl() -> tuple[dict[str, Any], Shapes]:
    more: dict[str, Any] = {
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_sections": [12, 10, 10, 0],
    }
    return usual(3, rope__freq_base=5e6, n_deepstack_layers=1, **more), ends() | layers(
        3, lambda i: norms(i, "attn_norm", "ffn_norm"), lambda i: attention(i, head_norms=True), dense
    )


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
    """Experts beside dense layers; layers without a window have one head of keys, which are their values, too."""
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


# ---------------------------------------------------------------- layers that remember a sequence

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


def mamba(**more: Any) -> tuple[dict[str, Any], Shapes]:
    fields = usual(3) | _SSM | _ALONE | {"ssm.state_size": 16, "ssm.time_step_rank": 16} | more
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
    each = {"attention.head_count_kv": [N_KV * (k == "*") for k in kinds]}
    each |= {"feed_forward_length": [width * (k == kind) for k in kinds]}
    heads = {"attention.key_length": HEAD, "attention.value_length": HEAD}
    return usual(len(kinds), "layer_norm_epsilon", attention__layer_norm_rms_epsilon=1e-5) | _SSM | each | heads


def nemotron_h() -> tuple[dict[str, Any], Shapes]:
    kinds = "M-*-M"
    of: dict[str, Callable[[int], Shapes]] = {"M": _mamba2, "*": attention, "-": lambda i: dense(i, gate=False)}
    return _nemotron_fields(kinds, FF, "-"), ends() | layers(
        len(kinds), lambda i: norms(i, "attn_norm"), lambda i: of[kinds[i]](i)
    )


def nemotron_h_moe() -> tuple[dict[str, Any], Shapes]:
    """Experts of rows of half the width, and a shared one of rows of the model's."""
    kinds, width, latent, n = "MEM*E", 256, E // 2, 8

    def latent_experts(layer: int) -> Shapes:
        shapes: Shapes = {"ffn_latent_down.weight": (E, latent), "ffn_latent_up.weight": (latent, E)}
        shapes |= {"ffn_up_exps.weight": (latent, width, n), "ffn_down_exps.weight": (width, latent, n)}
        own = {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        return _experts(layer, n, width, bias=True, shared=True, gate=False) | own

    of: dict[str, Callable[[int], Shapes]] = {"M": _mamba2, "*": attention, "E": latent_experts}
    fields = _nemotron_fields(kinds, width, "E") | {"moe_latent_size": latent, "expert_count": n}
    fields |= {"expert_used_count": 3, "expert_feed_forward_length": width, "expert_shared_count": 1}
    fields |= {"expert_shared_feed_forward_length": width, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    return fields, ends() | layers(len(kinds), lambda i: norms(i, "attn_norm"), lambda i: of[kinds[i]](i))


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

    more: dict[str, Any] = {"attention.recurrent_layers": [True, False, True], "rope.dimension_count": HEAD // 2}
    more |= {"attention.key_length": HEAD, "attention.value_length": HEAD, "residual_scale": 3.55}
    fields = usual(3, expert_count=n, expert_used_count=2, **more)
    return fields, ends() | layers(3, lambda i: norms(i, "attn_norm", "ffn_norm"), block, lambda i: _experts(i, n, FF))


def bailing_v3() -> tuple[dict[str, Any], Shapes]:
    """As Kimi Linear, with decays and gates of one matrix, gates of whole heads, and limits in feed-forward layers."""
    fields, shapes = kimi_linear()
    for i in (0, 2):
        shapes |= {f"blk.{i}.ssm_{c}_a.weight": (E, N_HEAD * 32) for c in "fg"} | {f"blk.{i}.ssm_a": (1, N_HEAD)}
        del shapes[f"blk.{i}.ssm_f_b.weight"], shapes[f"blk.{i}.ssm_g_b.weight"]
    shapes["blk.1.attn_gate.weight"] = (E, N_HEAD)
    fields |= {"kda.gate_lower_bound": -5.0, "expert_weights_norm": True, "swiglu_clamp_exp": [0.0, 0.75, 0.5]}
    return fields | {"swiglu_clamp_shexp": [0.0, 0.0, 0.5]}, shapes


def kimi_k3() -> tuple[dict[str, Any], Shapes]:
    """As Kimi Linear, with gates of one matrix, experts of shorter rows, and mixtures of the layers before."""
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


MODELS: Mapping[str, Callable[[], tuple[dict[str, Any], Shapes]]] = {
    "arcee-dense": arcee,
    "bailingmoe3-moe": bailing_v3,
    "command-r-dense": command_r,
    "falcon-h1-dense": falcon_h1,
    "gemma-dense": gemma,
    "gemma4-dense": gemma4,
    "gemma4-moe": gemma4_moe,
    "jamba-moe": jamba,
    "kimi-k3-moe": kimi_k3,
    "kimi-linear-moe": kimi_linear,
    "lfm2-dense": lfm2,
    "lfm2moe-moe": lfm2moe,
    "mamba-dense": mamba,
    "mamba-normed": falcon_mamba,
    "mamba2-dense": mamba2,
    "minimax-01-moe": minimax_01,
    "nemotron_h-dense": nemotron_h,
    "nemotron_h_moe-moe": nemotron_h_moe,
    "olmo-dense": olmo,
    "phi2-dense": phi2,
    "qwen3vl-dense": qwen3vl,
    "starcoder-dense": starcoder,
}


def write_header(name: str) -> None:
    """Write the beginning of a model's file, up to its tensors' data."""
    arch = name.rpartition("-")[0]
    fields, shapes = MODELS[name]()
    listed = [Field.of("general.architecture", arch), Field.of("tokenizer.ggml.model", "no_vocab")]
    listed += [Field.of(f"{arch}.{key}", value) for key, value in fields.items()]
    tensors = [(key, shape, BY_NAME["F32"], bytes(4 * int(np.prod(shape)))) for key, shape in shapes.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write_gguf(path, listed, tensors)
        data = path.read_bytes()
    size = sum(-(-len(raw) // 32) * 32 for *_, raw in tensors)
    (ZOO / "headers" / f"{name}.head").write_bytes(data[: len(data) - size])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all that are described here")
    parser.add_argument("--lib", type=Path, required=True, help="where libllama.so of llama.cpp b11434 is")
    parser.add_argument("--into", default="logits.npz", metavar="FILE", help="in tests/data/zoo (default: logits.npz)")
    options = parser.parse_args()
    with np.load(ZOO / "logits.npz") as npz:
        tokens = npz["tokens"]
    target = ZOO / options.into
    known: dict[str, Any] = {}
    if target.exists():
        with np.load(target) as npz:
            known |= npz
    for name in options.names or MODELS:
        write_header(name)
        with tempfile.TemporaryDirectory() as folder:
            model = write_zoo(name, Path(folder, "model.gguf"), SEED)
            known[name] = Libllama(options.lib).logits(model, tokens)
    made = io.BytesIO()
    np.savez_compressed(made, **dict(sorted(known.items())))
    target.write_bytes(made.getvalue())


if __name__ == "__main__":
    main()
